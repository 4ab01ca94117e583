"""What becomes of each key of SimpleTuner's data backends and of its LyCORIS file."""

from __future__ import annotations

from typing import Any

from finitune.config.importers.mapping import (
    Answer,
    Row,
    always,
    changed,
    no_effect,
    not_here,
    number,
    one_of,
    otherwise,
    switch,
    taken,
    to,
    unsupported,
    whole,
)
from finitune.config.importers.simpletuner_rows import CACHED, Beside, side, smallest
from finitune.config.importers.terms import whole_number

FULL_RANK = 10_000
CACHE = otherwise("latents, texts and masks have one cache, and masks their pictures' names")
KINDS = {
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


def lycoris_rank(value: Any, beside: Beside) -> Answer:
    """The rank; a very large one means a full second factor of LoKr."""
    if beside.get("algo") == "lokr" and whole_number(value) >= FULL_RANK:
        return changed(1, "so large a rank means a full second factor", network__full_matrix=True)
    return whole(value, beside)


def repeats(value: Any, beside: Beside) -> Answer:
    """How often a picture is shown: n times more there, n times in all here."""
    return changed(int(float(value)) + 1, "repeats are extra there: one more showing in all")


def captions(value: Any, beside: Beside) -> Answer:
    """Where captions come from; each line of a text file is one of its own."""
    if value == "textfile":
        return changed(True, "one line of several is drawn; {a|b} in a caption is a choice, too")
    return Answer() if value == "instanceprompt" else unsupported("write a .txt file beside each picture")


def instance_prompt(value: Any, beside: Beside) -> Answer:
    """One text for all pictures, in front of captions or instead of them."""
    if beside.get("caption_strategy") == "instanceprompt" or beside.get("only_instance_prompt"):
        note = "the caption of pictures without a caption file; take the files away if there are any"
        return changed(value, note)
    if beside.get("prepend_instance_prompt"):
        return Answer(f"{value} ", place="subset.caption_prefix")
    return no_effect("captions come from files")


def crop_aspect(value: Any, beside: Beside) -> Answer:
    """Squares, or shapes near to each picture's."""
    if not beside.get("crop"):
        return taken(True)
    return taken(False) if value == "square" else changed(True, "kohya's buckets")


def resolution(value: Any, beside: Beside) -> Answer:
    """The side of a square: by area in pixels or megapixels; or the shorter side."""
    kind = beside.get("resolution_type", "pixel_area")
    if kind == "area":
        return changed(side(value, beside), "megapixels, as the side of a square")
    return (
        changed(side(value, beside), "the area of that square; there the shorter side")
        if kind == "pixel"
        else whole(value, beside)
    )


LYCORIS: dict[str, Row] = {
    "algo": to("network.algorithm", one_of(KINDS, "choose an algorithm.")),
    "multiplier": always(1, 1.0, todo="adapters are trained at strength 1"),
    "linear_dim": to("network.network_dim", lycoris_rank),
    "linear_alpha": to("network.network_alpha", number),
    "conv_dim": to("network.conv_dim", whole),
    "conv_alpha": to("network.conv_alpha", number),
    "factor": to("network.factor", whole),
    "full_matrix": to("network.full_matrix", switch),
    "decompose_both": to("network.decompose_both", switch),
    "unbalanced_factorization": to("network.unbalanced", switch),
    "use_tucker": to("network.use_tucker", switch),
    "rs_lora": to("network.rs_lora", switch),
    "weight_decompose": to("network.dora", switch),
    "dora_wd": to("network.dora", switch),
    "dropout": to("network.network_dropout", number),
    "rank_dropout": to("network.rank_dropout", number),
    "module_dropout": to("network.module_dropout", number),
    "bypass_mode": otherwise("the change is never built where it need not be"),
    "use_scalar": not_here("leave it out", False),
    "constraint": to("network.constraint", number),
    "apply_preset.*": not_here("write only_patterns, and network_reg_dims, by module names"),
    "*": not_here("leave it out", False),
}
BACKEND: dict[str, Row] = {
    "id": otherwise("folders have no names"),
    "type": always("local", todo="copy the pictures to a folder"),
    "dataset_type": always("image", todo="only pictures can be trained on"),
    "instance_data_dir": to("subset.image_dir"),
    "disabled": to("listed.enabled", lambda v, b: changed(False, "the backend is left out") if v else no_effect()),
    "disable": to("listed.enabled", lambda v, b: changed(False, "the backend is left out") if v else no_effect()),
    "caption_strategy": to("subset.enable_wildcard", captions),
    "instance_prompt": to("subset.class_tokens", instance_prompt),
    "only_instance_prompt": otherwise("by instance_prompt"),
    "prepend_instance_prompt": otherwise("by instance_prompt"),
    "crop": otherwise("by crop_aspect"),
    "crop_aspect": to("dataset.enable_bucket", crop_aspect),
    "crop_style": to(
        "subset.random_crop",
        one_of({"random": True, "center": False, "centre": False}, "crops are in the middle, or random."),
    ),
    "crop_aspect_buckets": not_here("buckets are kohya's"),
    "resolution": to("dataset.resolution", resolution),
    "resolution_type": otherwise("by resolution"),
    "minimum_image_size": to("dataset.skip_image_resolution", smallest),
    **dict.fromkeys(
        ("maximum_image_size", "target_downsample_size"), otherwise("pictures are resized to their bucket first")
    ),
    **dict.fromkeys(("minimum_aspect_ratio", "maximum_aspect_ratio"), not_here("take such pictures away")),
    "repeats": to("subset.num_repeats", repeats),
    "probability": not_here("set num_repeats", 1, 1.0),
    "is_regularisation_data": to("subset.is_reg", switch, "there they learn what the base model predicts"),
    "is_regularization_data": to("subset.is_reg", switch, "there they learn what the base model predicts"),
    "conditioning_data": to("subset.conditioning_data_dir", lambda v, b: changed(None, "the masks' folder")),
    "metadata_backend": always("discovery", "json", todo="write a .txt file beside each picture"),
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
        CACHED,
    ),
    **dict.fromkeys(
        ("parquet.*", "video.*", "conditioning.*", "caption_filter_list"), not_here("pictures and .txt files")
    ),
}
