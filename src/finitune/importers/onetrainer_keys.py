"""What becomes of each key of OneTrainer.

Source of names, defaults and meanings (facts only, it is AGPL): Nerogar/OneTrainer modules/util/config/TrainConfig.py,
ConceptConfig.py, SampleConfig.py and modules/modelSetup/mixin/ModelSetupNoiseMixin.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from finitune.config.imported_config import KeyStatus
from finitune.importers.conversions import (
    build_name_part_pattern,
    convert_optimizer_name,
    convert_storage_dtype,
    make_betas_converter,
)
from finitune.importers.mapping import (
    ConvertedValue,
    KeyMapping,
    ValueConverter,
    convert_boolean,
    convert_number,
    convert_whole_number,
    map_constant,
    map_implicit,
    map_no_effect,
    map_to,
    map_unsupported,
    mark_no_effect,
    mark_unsupported,
    prefix_keys,
    take_changed,
    take_value,
)

_Siblings = Mapping[str, Any]
ONETRAINER_UI_ONLY = map_no_effect("for its user interface")
ONETRAINER_OTHER_MODELS = map_no_effect("for other models")


def parse_onetrainer_sizes(value: object) -> list[object]:
    """ "768,1024" as numbers; "832x1216" as a pair."""
    parts = [part.strip() for part in str(value).split(",") if part.strip()]
    pairs = [[int(side) for side in re.split(r"[x*]", part)] for part in parts]
    return [pair[0] if len(pair) == 1 else pair for pair in pairs]


def convert_onetrainer_resolution(value: Any, beside: _Siblings) -> ConvertedValue:
    """One or more sizes."""
    try:
        found = parse_onetrainer_sizes(value)
    except ValueError:
        return take_value(value)
    if len(found) > 1:
        note = f"one [[datasets]] for each of {len(found)} sizes; there each epoch draws one size for each picture"
        return take_changed(found, note)
    return take_value(found or [512])


def convert_onetrainer_epochs(value: Any, beside: _Siblings) -> ConvertedValue:
    """Epochs: with n sizes ours are n times as long."""
    answer, times = convert_whole_number(value, beside), len(parse_onetrainer_sizes(beside.get("resolution", "512")))
    if times > 1 and isinstance(answer.value, int):
        return take_changed(
            max(1, round(answer.value / times)), f"each picture is shown at all {times} sizes in an epoch"
        )
    return answer


def make_interval_converter(unit_key: str, place: str) -> ValueConverter:
    """A number with a unit in the next key: steps or epochs."""

    def convert(value: Any, beside: _Siblings) -> ConvertedValue:
        unit = str(beside.get(unit_key, "NEVER")).upper()
        if unit in ("NEVER", "ALWAYS") or not value:
            return mark_no_effect("never")
        if unit not in ("STEP", "EPOCH"):
            return mark_unsupported(f"every {value} {unit.lower()}s: choose a number of steps, {place}_every_n_steps.")
        return ConvertedValue(convert_whole_number(value, beside).value, place=f"{place}_every_n_{unit.lower()}s")

    return convert


def map_interval_unit(key: str) -> KeyMapping:
    """The unit of another key."""
    return map_implicit(f"the unit of {key}")


def convert_balancing(value: Any, beside: _Siblings) -> ConvertedValue:
    """Repeats in each epoch, or a number of samples in each epoch."""
    if str(beside.get("balancing_strategy", "REPEATS")).upper() != "REPEATS":
        return mark_unsupported("a number of pictures in each epoch: set num_repeats")
    repeats = float(value)
    if repeats == int(repeats) and repeats >= 1:
        return take_value(int(repeats))
    return take_changed(max(1, round(repeats)), "only whole repeats: every picture is shown so often in each epoch")


def convert_onetrainer_scheduler(value: Any, beside: _Siblings) -> ConvertedValue:
    """The course of the learning rate."""
    name = str(value).upper()
    known = {"CONSTANT": "constant", "LINEAR": "linear", "COSINE": "cosine"}
    if name.startswith("COSINE_WITH"):
        return take_value("cosine_with_restarts")
    if name == "COSINE" and float(beside.get("learning_rate_min_factor") or 0) > 0:
        return take_value("cosine_with_min_lr")
    return (
        take_value(known[name])
        if name in known
        else mark_unsupported(f"{value!r}: set lr_scheduler; it stays constant.")
    )


def convert_min_rate_factor(value: Any, beside: _Siblings) -> ConvertedValue:
    """The last learning rate as a share of the first."""
    if not value:
        return mark_no_effect()
    cosine = str(beside.get("learning_rate_scheduler", "")).upper() == "COSINE"
    return (
        convert_number(value, beside)
        if cosine
        else mark_unsupported("only cosine has a least rate here: cosine_with_min_lr")
    )


def convert_timestep_distribution(value: Any, beside: _Siblings) -> ConvertedValue:
    """How sigmas are drawn: the distribution, its weight and bias, and the shift behind it."""
    name, shift = str(value).upper(), float(beside.get("timestep_shift") or 1)
    weight, bias = float(beside.get("noising_weight") or 0), float(beside.get("noising_bias") or 0)
    if beside.get("dynamic_timestep_shifting"):
        note = "shifted by the size of the picture; draws are by sigmoid here"
        return take_changed("flux_shift", note, objective__sigmoid_scale=weight + 1)
    if name == "LOGIT_NORMAL" and not bias:
        return take_value("sigmoid" if shift == 1 else "shift", objective__sigmoid_scale=weight + 1)
    scheme: dict[str, object] = {}
    if name == "UNIFORM":
        if shift == 1:
            return take_value("uniform")
        scheme = {"weighting_scheme": "none"}
    elif name == "LOGIT_NORMAL":  # kohya draws 1 - u
        scheme = {"weighting_scheme": "logit_normal", "logit_mean": -bias, "logit_std": weight + 1}
    elif name == "HEAVY_TAIL":
        scheme = {"weighting_scheme": "mode", "mode_scale": weight}
    elif name == "COS_MAP" and shift == 1:
        note = "uniform draws, the loss weighted by the same curve: the same in the mean"
        return take_changed("sigma", note, objective__weighting_scheme="cosmap")
    if not scheme:
        return mark_unsupported(f"{value!r}: choose timestep_sampling and weighting_scheme")
    return ConvertedValue("sigma", also={f"objective.{key}": setting for key, setting in scheme.items()})


def convert_onetrainer_ema_decay(value: Any, beside: _Siblings) -> ConvertedValue:
    """The decay for each step; there it is applied every few steps only."""
    if str(beside.get("ema", "OFF")).upper() == "OFF":
        return mark_no_effect("ema is off")
    steps = int(beside.get("ema_update_step_interval") or 5)
    if steps == 1:
        return convert_number(value, beside)
    return take_changed(float(value) ** (1 / steps), f"the same average, updated in each step instead of every {steps}")


def convert_onetrainer_ema(value: Any, beside: _Siblings) -> ConvertedValue:
    """Whether there is a moving average."""
    return (
        mark_no_effect()
        if str(value).upper() == "OFF"
        else convert_onetrainer_ema_decay(beside.get("ema_decay", 0.999), beside)
    )


ONETRAINER_LOSS_STRENGTHS = {"mse_strength": ("l2", 1.0), "mae_strength": ("l1", 0.0), "huber_strength": ("huber", 0.0)}


def make_loss_strength_converter(key: str) -> ValueConverter:
    """The weight of one loss among several: the strongest is taken, as the only one."""

    def convert(value: Any, beside: _Siblings) -> ConvertedValue:
        if not value:
            return mark_no_effect()
        strongest = max(
            ONETRAINER_LOSS_STRENGTHS, key=lambda name: float(beside.get(name, ONETRAINER_LOSS_STRENGTHS[name][1]))
        )
        if strongest != key:
            return mark_unsupported(f"one loss at a time: {strongest} counts")
        plain = float(value) == 1 and key != "huber_strength"
        return (
            take_value(ONETRAINER_LOSS_STRENGTHS[key][0])
            if plain
            else take_changed(ONETRAINER_LOSS_STRENGTHS[key][0], "with weight 1; huber in kohya's form")
        )

    return convert


def convert_layer_filter(value: Any, beside: _Siblings) -> ConvertedValue:
    """Parts of module names, or regular expressions that are searched for in them."""
    parts = [part.strip() for part in str(value).split(",") if part.strip()]
    if beside.get("layer_filter_regex"):
        return take_value([f".*(?:{part}).*" for part in parts])
    return take_value([build_name_part_pattern(part) for part in parts])


def restrict_to_peft_type(kind: str, convert: ValueConverter) -> ValueConverter:
    """For one peft_type only."""

    def chosen(value: Any, beside: _Siblings) -> ConvertedValue:
        return (
            convert(value, beside)
            if str(beside.get("peft_type", "LORA")).upper() == kind
            else mark_no_effect(f"for {kind}")
        )

    return chosen


def convert_onetrainer_rank(value: Any, beside: _Siblings) -> ConvertedValue:
    """The rank; LoKr may have one of its own."""
    if str(beside.get("peft_type", "")).upper() == "LOKR" and "lokr_dim" in beside:
        return mark_no_effect("lokr_dim counts")
    return convert_whole_number(value, beside)


def convert_model_destination(value: Any, beside: _Siblings) -> ConvertedValue:
    """The file's name; its folder is the run's."""
    path = PurePath(str(value).replace("\\", "/"))
    return (
        take_changed(path.stem, "the name; the folder is workspace_dir")
        if len(path.parts) > 1
        else take_value(path.stem)
    )


def convert_tag_dropout(value: Any, beside: _Siblings) -> ConvertedValue:
    """Tags left out: all at once, or each on its own."""
    if not beside.get("tag_dropout_enable"):
        return mark_no_effect("tag_dropout_enable is not set")
    if str(beside.get("tag_dropout_mode", "FULL")).upper() == "FULL":
        note = "all tags at once, kept ones, too"
        return ConvertedValue(float(value), KeyStatus.CHANGED, note, place="subset.caption_dropout_rate")
    return take_value(float(value))


_LEFT_OUT_CONCEPT = ConvertedValue(
    None, KeyStatus.UNSUPPORTED, "left out; set validation_split instead", {"listed.enabled": False}
)


def convert_validation_concept(value: Any, beside: _Siblings) -> ConvertedValue:
    """Pictures to measure on."""
    return _LEFT_OUT_CONCEPT if value else mark_no_effect()


def convert_concept_type(value: Any, beside: _Siblings) -> ConvertedValue:
    """What a concept is for."""
    if str(value).upper() == "PRIOR_PREDICTION":
        return take_changed(True, "regularisation pictures learn themselves here; there what the base model predicts")
    return ConvertedValue() if str(value).upper() == "STANDARD" else _LEFT_OUT_CONCEPT


_OFF_VALUE = False
ONETRAINER_PART_KEYS: dict[str, KeyMapping] = {
    "model_name": map_to("model.pretrained_model_name_or_path"),
    "train": map_constant(True, todo="the denoiser is always trained here"),
    "include": map_no_effect("the parts of Anima are always there"),
    "learning_rate": map_to("optimizer.learning_rate", convert_number),
    "weight_dtype": map_to("model.storage", convert_storage_dtype),
    "gradient_checkpointing": map_to("training.gradient_checkpointing", convert_boolean),
    "offload_fraction": map_unsupported("set offload_blocks to a number of blocks", 0, 0.0),
    "activation_offloading": map_unsupported("set offload_blocks to a number of blocks", False),
    "attention_mask": map_no_effect("Anima attends to its padding"),
    "guidance_scale": map_no_effect("Anima has no guidance embedding"),
    "dropout_probability": map_to("general.caption_dropout_rate", convert_number),
    "stop_training_after": map_implicit("trained to the end"),
    "stop_training_after_unit": map_implicit("trained to the end"),
    "train_embedding": map_no_effect("no embedding is trained"),
}
ONETRAINER_TEXT_ENCODER_KEYS: dict[str, KeyMapping] = {
    **ONETRAINER_PART_KEYS,
    "model_name": map_to("model.qwen3"),
    "train": map_to("network.train_text_encoder", convert_boolean),
    "learning_rate": map_to("optimizer.text_encoder_lr", convert_number),
    "weight_dtype": map_implicit("texts are encoded once, before training, in full precision"),
    "gradient_checkpointing": map_implicit("as the denoiser"),
}
ONETRAINER_VAE_KEYS: dict[str, KeyMapping] = {
    **ONETRAINER_PART_KEYS,
    "model_name": map_to("model.vae"),
    "train": map_no_effect("the VAE is never trained"),
    "learning_rate": map_no_effect("the VAE is never trained"),
    "weight_dtype": map_implicit("pictures are encoded once, before training, in full precision"),
    "gradient_checkpointing": map_no_effect("the VAE is never trained"),
    "dropout_probability": map_no_effect("the VAE reads no captions"),
}
_OPTIMIZER_BETAS = map_to("optimizer.optimizer_args.betas", make_betas_converter("beta1", "beta2"))
_CARRIED_OPTIMIZER_KEYS = (
    *("weight_decay", "eps", "momentum", "d0", "d_coef", "growth_rate", "clip_threshold", "decay_rate", "dampening"),
    *("amsgrad", "nesterov", "decouple", "safeguard_warmup", "use_bias_correction", "relative_step"),
    *("scale_parameter", "warmup_init", "weight_decouple", "fixed_decay", "rectify", "cautious", "weight_lr_power"),
)
ONETRAINER_OPTIMIZER_KEYS: dict[str, KeyMapping] = {
    "optimizer": map_to("optimizer.optimizer_type", convert_optimizer_name),
    "beta1": _OPTIMIZER_BETAS,
    "beta2": _OPTIMIZER_BETAS,
    **{
        name: map_to(
            f"optimizer.optimizer_args.{name}", lambda v, b: mark_no_effect() if v is _OFF_VALUE else take_value(v)
        )
        for name in _CARRIED_OPTIMIZER_KEYS
    },
    "stochastic_rounding": map_no_effect("the adapter's weights are fp32"),
    "fused_back_pass": map_unsupported("leave it out", False),
    "__version": ONETRAINER_UI_ONLY,
    **dict.fromkeys(
        ("fused", "foreach", "capturable", "differentiable", "maximize"), map_implicit("the library's own way")
    ),
    "*": map_unsupported("not carried over: write it into optimizer_args if the optimiser knows it", False),
}
_CONCEPT_IMAGE_KEYS: dict[str, KeyMapping] = {
    "enable_crop_jitter": map_unsupported("crops are in the middle; random_crop crops anywhere", False),
    "enable_random_flip": map_to("subset.flip_aug", convert_boolean),
    "enable_resolution_override": map_implicit("resolution_override counts if set"),
    "resolution_override": map_to(
        "dataset.resolution",
        lambda v, b: convert_onetrainer_resolution(v, b) if b.get("enable_resolution_override") else mark_no_effect(),
    ),
    **{
        f"enable_{how}_{what}": map_unsupported("color_aug, flip_aug and random_crop are what there is", False)
        for how in ("random", "fixed")
        for what in ("flip", "rotate", "brightness", "contrast", "saturation", "hue", "mask_rotate_crop")
        if (how, what) != ("random", "flip")
    },
    "enable_random_circular_mask_shrink": map_unsupported("draw the masks as they should be", False),
    "random_rotate_max_angle": map_no_effect("pictures are not turned"),
    **dict.fromkeys(
        (f"random_{what}_max_strength" for what in ("brightness", "contrast", "saturation", "hue")),
        map_no_effect("colours are not varied"),
    ),
}
_CONCEPT_TEXT_KEYS: dict[str, KeyMapping] = {
    "prompt_source": map_constant(
        "sample", todo="write a .txt file beside each picture, or one caption as class_tokens"
    ),
    "prompt_path": map_no_effect("captions stand beside the pictures"),
    "enable_tag_shuffling": map_to("subset.shuffle_caption", convert_boolean),
    "tag_delimiter": map_to("subset.caption_separator"),
    "keep_tags_count": map_to("subset.keep_tokens", convert_whole_number),
    "tag_dropout_enable": map_implicit("by tag_dropout_probability"),
    "tag_dropout_mode": map_implicit("by tag_dropout_probability"),
    "tag_dropout_probability": map_to("subset.caption_tag_dropout_rate", convert_tag_dropout),
    "tag_dropout_special_tags_mode": map_unsupported("keep_tokens keeps the first tags", "NONE"),
    "tag_dropout_special_tags": map_unsupported("keep_tokens keeps the first tags"),
    "tag_dropout_special_tags_regex": map_no_effect("no special tags"),
    "caps_randomize_enable": map_unsupported("leave it out", False),
    **dict.fromkeys(
        ("caps_randomize_probability", "caps_randomize_mode", "caps_randomize_lowercase"),
        map_no_effect("capitals stay"),
    ),
}
ONETRAINER_CONCEPT_KEYS: dict[str, KeyMapping] = {
    "path": map_to("subset.image_dir"),
    "enabled": map_to(
        "listed.enabled", lambda v, b: ConvertedValue() if v else take_changed(v, "the concept is left out")
    ),
    "type": map_to("subset.is_reg", convert_concept_type),
    "validation_concept": map_to("listed.enabled", convert_validation_concept),
    "include_subdirectories": map_unsupported("write a [[datasets.subsets]] for each folder", False),
    "balancing": map_to("subset.num_repeats", convert_balancing),
    "repeats": map_to("subset.num_repeats", convert_balancing),
    "balancing_strategy": map_implicit("by balancing"),
    "text_variations": map_to("subset.caption_variants", convert_whole_number),
    "image_variations": map_unsupported("random_crop and color_aug are drawn anew in each step", 1),
    "loss_weight": map_unsupported("repeat the folder (num_repeats) instead", 1, 1.0),
    "seed": map_implicit("all that is random follows from training.seed"),
    "name": ONETRAINER_UI_ONLY,
    "__version": ONETRAINER_UI_ONLY,
    "concept_stats.*": ONETRAINER_UI_ONLY,
    **prefix_keys("image", _CONCEPT_IMAGE_KEYS),
    **prefix_keys("text", _CONCEPT_TEXT_KEYS),
}
ONETRAINER_SAMPLE_KEYS: dict[str, KeyMapping] = {
    "enabled": map_to("sample.enabled"),
    "prompt": map_to("sample.prompt"),
    "negative_prompt": map_to("sample.n"),
    "width": map_to("sample.w", convert_whole_number),
    "height": map_to("sample.h", convert_whole_number),
    "seed": map_to(
        "sample.d",
        lambda v, b: mark_no_effect("random_seed is set") if b.get("random_seed") else convert_whole_number(v, b),
    ),
    "random_seed": map_unsupported("previews have fixed seeds, to be compared", False),
    "diffusion_steps": map_to("sample.s", convert_whole_number),
    "cfg_scale": map_to("sample.l", convert_number),
    "noise_scheduler": map_implicit("previews are drawn by the family's own sampler"),
    "__version": ONETRAINER_UI_ONLY,
    "*": ONETRAINER_OTHER_MODELS,
}
