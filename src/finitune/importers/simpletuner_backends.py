"""What becomes of each key of SimpleTuner's data backends and of its LyCORIS file."""

from __future__ import annotations

from typing import Any

from finitune.importers.conversions import to_whole_number
from finitune.importers.mapping import (
    ConvertedValue,
    KeyMapping,
    convert_boolean,
    convert_number,
    convert_whole_number,
    make_choice_converter,
    map_constant,
    map_implicit,
    map_to,
    map_unsupported,
    mark_no_effect,
    mark_unsupported,
    take_changed,
    take_value,
)
from finitune.importers.simpletuner_keys import (
    SIMPLETUNER_ALWAYS_CACHED,
    SimpleTunerSiblings,
    compute_square_side,
    convert_min_image_size,
)

_FULL_FACTOR_RANK = 10_000
SIMPLETUNER_CACHE_MAPPING = map_implicit("latents, texts and masks have one cache, and masks their pictures' names")
_ALGORITHM_BY_ALGO = {
    "locon": "lora",
    "lora": "lora",
    "loha": "loha",
    "lokr": "lokr",
    "full": "full",
    "ia3": "ia3",
    "diag-oft": "oft",
    "boft": "boft",
    "glora": "glora",
}


def convert_lycoris_rank(value: Any, beside: SimpleTunerSiblings) -> ConvertedValue:
    """The rank; a very large one means a full second factor of LoKr."""
    if beside.get("algo") == "lokr" and to_whole_number(value) >= _FULL_FACTOR_RANK:
        return take_changed(1, "so large a rank means a full second factor", network__full_matrix=True)
    return convert_whole_number(value, beside)


def convert_extra_repeats(value: Any, beside: SimpleTunerSiblings) -> ConvertedValue:
    """How often a picture is shown: n times more there, n times in all here."""
    return take_changed(int(float(value)) + 1, "repeats are extra there: one more showing in all")


def convert_caption_strategy(value: Any, beside: SimpleTunerSiblings) -> ConvertedValue:
    """Where captions come from; each line of a text file is one of its own."""
    if value == "textfile":
        return take_changed(True, "one line of several is drawn; {a|b} in a caption is a choice, too")
    return ConvertedValue() if value == "instanceprompt" else mark_unsupported("write a .txt file beside each picture")


def convert_instance_prompt(value: Any, beside: SimpleTunerSiblings) -> ConvertedValue:
    """One text for all pictures, in front of captions or instead of them."""
    if beside.get("caption_strategy") == "instanceprompt" or beside.get("only_instance_prompt"):
        note = "the caption of pictures without a caption file; take the files away if there are any"
        return take_changed(value, note)
    if beside.get("prepend_instance_prompt"):
        return ConvertedValue(f"{value} ", place="subset.caption_prefix")
    return mark_no_effect("captions come from files")


def convert_crop_aspect(value: Any, beside: SimpleTunerSiblings) -> ConvertedValue:
    """Squares, or shapes near to each picture's."""
    if not beside.get("crop"):
        return take_value(True)
    return take_value(False) if value == "square" else take_changed(True, "kohya's buckets")


def convert_backend_resolution(value: Any, beside: SimpleTunerSiblings) -> ConvertedValue:
    """The side of a square: by area in pixels or megapixels; or the shorter side."""
    kind = beside.get("resolution_type", "pixel_area")
    if kind == "area":
        return take_changed(compute_square_side(value, beside), "megapixels, as the side of a square")
    return (
        take_changed(compute_square_side(value, beside), "the area of that square; there the shorter side")
        if kind == "pixel"
        else convert_whole_number(value, beside)
    )


SIMPLETUNER_LYCORIS_KEYS: dict[str, KeyMapping] = {
    "algo": map_to("network.algorithm", make_choice_converter(_ALGORITHM_BY_ALGO, "choose an algorithm.")),
    "multiplier": map_constant(1, 1.0, todo="adapters are trained at strength 1"),
    "linear_dim": map_to("network.network_dim", convert_lycoris_rank),
    "linear_alpha": map_to("network.network_alpha", convert_number),
    "conv_dim": map_to("network.conv_dim", convert_whole_number),
    "conv_alpha": map_to("network.conv_alpha", convert_number),
    "factor": map_to("network.factor", convert_whole_number),
    "full_matrix": map_to("network.full_matrix", convert_boolean),
    "decompose_both": map_to("network.decompose_both", convert_boolean),
    "unbalanced_factorization": map_to("network.unbalanced", convert_boolean),
    "use_tucker": map_to("network.use_tucker", convert_boolean),
    "rs_lora": map_to("network.rs_lora", convert_boolean),
    "weight_decompose": map_to("network.dora", convert_boolean),
    "dora_wd": map_to("network.dora", convert_boolean),
    "dropout": map_to("network.network_dropout", convert_number),
    "rank_dropout": map_to("network.rank_dropout", convert_number),
    "module_dropout": map_to("network.module_dropout", convert_number),
    "bypass_mode": map_implicit("the change is never built where it need not be"),
    "use_scalar": map_unsupported("leave it out", False),
    "constraint": map_to("network.constraint", convert_number),
    "apply_preset.*": map_unsupported("write only_patterns, and network_reg_dims, by module names"),
    "*": map_unsupported("leave it out", False),
}
SIMPLETUNER_BACKEND_KEYS: dict[str, KeyMapping] = {
    "id": map_implicit("folders have no names"),
    "type": map_constant("local", todo="copy the pictures to a folder"),
    "dataset_type": map_constant("image", todo="only pictures can be trained on"),
    "instance_data_dir": map_to("subset.image_dir"),
    "disabled": map_to(
        "listed.enabled", lambda v, b: take_changed(False, "the backend is left out") if v else mark_no_effect()
    ),
    "disable": map_to(
        "listed.enabled", lambda v, b: take_changed(False, "the backend is left out") if v else mark_no_effect()
    ),
    "caption_strategy": map_to("subset.enable_wildcard", convert_caption_strategy),
    "instance_prompt": map_to("subset.class_tokens", convert_instance_prompt),
    "only_instance_prompt": map_implicit("by instance_prompt"),
    "prepend_instance_prompt": map_implicit("by instance_prompt"),
    "crop": map_implicit("by crop_aspect"),
    "crop_aspect": map_to("dataset.enable_bucket", convert_crop_aspect),
    "crop_style": map_to(
        "subset.random_crop",
        make_choice_converter(
            {"random": True, "center": False, "centre": False}, "crops are in the middle, or random."
        ),
    ),
    "crop_aspect_buckets": map_unsupported("buckets are kohya's"),
    "resolution": map_to("dataset.resolution", convert_backend_resolution),
    "resolution_type": map_implicit("by resolution"),
    "minimum_image_size": map_to("dataset.skip_image_resolution", convert_min_image_size),
    **dict.fromkeys(
        ("maximum_image_size", "target_downsample_size"), map_implicit("pictures are resized to their bucket first")
    ),
    **dict.fromkeys(("minimum_aspect_ratio", "maximum_aspect_ratio"), map_unsupported("take such pictures away")),
    "repeats": map_to("subset.num_repeats", convert_extra_repeats),
    "probability": map_unsupported("set num_repeats", 1, 1.0),
    "is_regularisation_data": map_to("subset.is_reg", convert_boolean, "there they learn what the base model predicts"),
    "is_regularization_data": map_to("subset.is_reg", convert_boolean, "there they learn what the base model predicts"),
    "conditioning_data": map_to("subset.conditioning_data_dir", lambda v, b: take_changed(None, "the masks' folder")),
    "metadata_backend": map_constant("discovery", "json", todo="write a .txt file beside each picture"),
    **dict.fromkeys(
        (
            "cache_dir_vae",
            "text_embeds",
            "image_embeds",
            "cache_dir",
            "write_batch_size",
            "hash_filenames",
            "skip_file_discovery",
            "preserve_data_backend_cache",
            "vae_cache_clear_each_epoch",
            "default",
            "scan_for_errors",
        ),
        SIMPLETUNER_ALWAYS_CACHED,
    ),
    **dict.fromkeys(
        ("parquet.*", "video.*", "conditioning.*", "caption_filter_list"), map_unsupported("pictures and .txt files")
    ),
}
