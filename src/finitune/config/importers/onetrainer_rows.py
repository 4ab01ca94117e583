"""What becomes of each key of OneTrainer.

Source of names, defaults and meanings (facts only, it is AGPL): Nerogar/OneTrainer modules/util/config/TrainConfig.py,
ConceptConfig.py, SampleConfig.py and modules/modelSetup/mixin/ModelSetupNoiseMixin.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from finitune.config.imported import Fate
from finitune.config.importers.mapping import (
    Answer,
    Conversion,
    Row,
    always,
    changed,
    no_effect,
    not_here,
    number,
    otherwise,
    switch,
    taken,
    to,
    under,
    unsupported,
    whole,
    without_effect,
)
from finitune.config.importers.terms import betas, optimizer_name, pattern_of_part, stored_dtype

Beside = Mapping[str, Any]
UI = without_effect("for its user interface")
OTHER_MODELS = without_effect("for other models")


def sizes(value: object) -> list[object]:
    """ "768,1024" as numbers; "832x1216" as a pair."""
    parts = [part.strip() for part in str(value).split(",") if part.strip()]
    pairs = [[int(side) for side in re.split(r"[x*]", part)] for part in parts]
    return [pair[0] if len(pair) == 1 else pair for pair in pairs]


def resolution(value: Any, beside: Beside) -> Answer:
    """One or more sizes."""
    try:
        found = sizes(value)
    except ValueError:
        return taken(value)
    if len(found) > 1:
        note = f"one [[datasets]] for each of {len(found)} sizes; there each epoch draws one size for each picture"
        return changed(found, note)
    return taken(found or [512])


def epochs(value: Any, beside: Beside) -> Answer:
    """Epochs: with n sizes ours are n times as long."""
    answer, times = whole(value, beside), len(sizes(beside.get("resolution", "512")))
    if times > 1 and isinstance(answer.value, int):
        return changed(max(1, round(answer.value / times)), f"each picture is shown at all {times} sizes in an epoch")
    return answer


def every(unit_key: str, place: str) -> Conversion:
    """A number with a unit in the next key: steps or epochs."""

    def convert(value: Any, beside: Beside) -> Answer:
        unit = str(beside.get(unit_key, "NEVER")).upper()
        if unit in ("NEVER", "ALWAYS") or not value:
            return no_effect("never")
        if unit not in ("STEP", "EPOCH"):
            return unsupported(f"every {value} {unit.lower()}s: choose a number of steps, {place}_every_n_steps.")
        return Answer(whole(value, beside).value, place=f"{place}_every_n_{unit.lower()}s")

    return convert


def unit_of(key: str) -> Row:
    """The unit of another key."""
    return otherwise(f"the unit of {key}")


def balancing(value: Any, beside: Beside) -> Answer:
    """Repeats in each epoch, or a number of samples in each epoch."""
    if str(beside.get("balancing_strategy", "REPEATS")).upper() != "REPEATS":
        return unsupported("a number of pictures in each epoch: set num_repeats")
    repeats = float(value)
    if repeats == int(repeats) and repeats >= 1:
        return taken(int(repeats))
    return changed(max(1, round(repeats)), "only whole repeats: every picture is shown so often in each epoch")


def scheduler(value: Any, beside: Beside) -> Answer:
    """The course of the learning rate."""
    name = str(value).upper()
    known = {"CONSTANT": "constant", "LINEAR": "linear", "COSINE": "cosine"}
    if name.startswith("COSINE_WITH"):
        return taken("cosine_with_restarts")
    if name == "COSINE" and float(beside.get("learning_rate_min_factor") or 0) > 0:
        return taken("cosine_with_min_lr")
    return taken(known[name]) if name in known else unsupported(f"{value!r}: set lr_scheduler; it stays constant.")


def min_factor(value: Any, beside: Beside) -> Answer:
    """The last learning rate as a share of the first."""
    if not value:
        return no_effect()
    cosine = str(beside.get("learning_rate_scheduler", "")).upper() == "COSINE"
    return number(value, beside) if cosine else unsupported("only cosine has a least rate here: cosine_with_min_lr")


def distribution(value: Any, beside: Beside) -> Answer:
    """How sigmas are drawn: the distribution, its weight and bias, and the shift behind it."""
    name, shift = str(value).upper(), float(beside.get("timestep_shift") or 1)
    weight, bias = float(beside.get("noising_weight") or 0), float(beside.get("noising_bias") or 0)
    if beside.get("dynamic_timestep_shifting"):
        note = "shifted by the size of the picture; draws are by sigmoid here"
        return changed("flux_shift", note, objective__sigmoid_scale=weight + 1)
    if name == "LOGIT_NORMAL" and not bias:
        return taken("sigmoid" if shift == 1 else "shift", objective__sigmoid_scale=weight + 1)
    scheme: dict[str, object] = {}
    if name == "UNIFORM":
        if shift == 1:
            return taken("uniform")
        scheme = {"weighting_scheme": "none"}
    elif name == "LOGIT_NORMAL":  # kohya draws 1 - u
        scheme = {"weighting_scheme": "logit_normal", "logit_mean": -bias, "logit_std": weight + 1}
    elif name == "HEAVY_TAIL":
        scheme = {"weighting_scheme": "mode", "mode_scale": weight}
    elif name == "COS_MAP" and shift == 1:
        note = "uniform draws, the loss weighted by the same curve: the same in the mean"
        return changed("sigma", note, objective__weighting_scheme="cosmap")
    if not scheme:
        return unsupported(f"{value!r}: choose timestep_sampling and weighting_scheme")
    return Answer("sigma", also={f"objective.{key}": setting for key, setting in scheme.items()})


def ema_decay(value: Any, beside: Beside) -> Answer:
    """The decay for each step; there it is applied every few steps only."""
    if str(beside.get("ema", "OFF")).upper() == "OFF":
        return no_effect("ema is off")
    steps = int(beside.get("ema_update_step_interval") or 5)
    if steps == 1:
        return number(value, beside)
    return changed(float(value) ** (1 / steps), f"the same average, updated in each step instead of every {steps}")


def ema(value: Any, beside: Beside) -> Answer:
    """Whether there is a moving average."""
    return no_effect() if str(value).upper() == "OFF" else ema_decay(beside.get("ema_decay", 0.999), beside)


STRENGTHS = {"mse_strength": ("l2", 1.0), "mae_strength": ("l1", 0.0), "huber_strength": ("huber", 0.0)}


def strength(key: str) -> Conversion:
    """The weight of one loss among several: the strongest is taken, as the only one."""

    def convert(value: Any, beside: Beside) -> Answer:
        if not value:
            return no_effect()
        strongest = max(STRENGTHS, key=lambda name: float(beside.get(name, STRENGTHS[name][1])))
        if strongest != key:
            return unsupported(f"one loss at a time: {strongest} counts")
        plain = float(value) == 1 and key != "huber_strength"
        return taken(STRENGTHS[key][0]) if plain else changed(STRENGTHS[key][0], "with weight 1; huber in kohya's form")

    return convert


def layers(value: Any, beside: Beside) -> Answer:
    """Parts of module names, or regular expressions that are searched for in them."""
    parts = [part.strip() for part in str(value).split(",") if part.strip()]
    if beside.get("layer_filter_regex"):
        return taken([f".*(?:{part}).*" for part in parts])
    return taken([pattern_of_part(part) for part in parts])


def only_for(kind: str, convert: Conversion) -> Conversion:
    """For one peft_type only."""

    def chosen(value: Any, beside: Beside) -> Answer:
        return (
            convert(value, beside) if str(beside.get("peft_type", "LORA")).upper() == kind else no_effect(f"for {kind}")
        )

    return chosen


def lora_rank(value: Any, beside: Beside) -> Answer:
    """The rank; LoKr may have one of its own."""
    if str(beside.get("peft_type", "")).upper() == "LOKR" and "lokr_dim" in beside:
        return no_effect("lokr_dim counts")
    return whole(value, beside)


def destination(value: Any, beside: Beside) -> Answer:
    """The file's name; its folder is the run's."""
    path = PurePath(str(value).replace("\\", "/"))
    return changed(path.stem, "the name; the folder is workspace_dir") if len(path.parts) > 1 else taken(path.stem)


def tag_dropout(value: Any, beside: Beside) -> Answer:
    """Tags left out: all at once, or each on its own."""
    if not beside.get("tag_dropout_enable"):
        return no_effect("tag_dropout_enable is not set")
    if str(beside.get("tag_dropout_mode", "FULL")).upper() == "FULL":
        note = "all tags at once, kept ones, too"
        return Answer(float(value), Fate.CHANGED, note, place="subset.caption_dropout_rate")
    return taken(float(value))


LEFT_OUT = Answer(None, Fate.UNSUPPORTED, "left out; set validation_split instead", {"listed.enabled": False})


def validation_concept(value: Any, beside: Beside) -> Answer:
    """Pictures to measure on."""
    return LEFT_OUT if value else no_effect()


def repeated_type(value: Any, beside: Beside) -> Answer:
    """What a concept is for."""
    if str(value).upper() == "PRIOR_PREDICTION":
        return changed(True, "regularisation pictures learn themselves here; there what the base model predicts")
    return Answer() if str(value).upper() == "STANDARD" else LEFT_OUT


OFF = False
PART: dict[str, Row] = {
    "model_name": to("model.pretrained_model_name_or_path"),
    "train": always(True, todo="the denoiser is always trained here"),
    "include": without_effect("the parts of Anima are always there"),
    "learning_rate": to("optimizer.learning_rate", number),
    "weight_dtype": to("model.storage", stored_dtype),
    "gradient_checkpointing": to("training.gradient_checkpointing", switch),
    "offload_fraction": not_here("set offload_blocks to a number of blocks", 0, 0.0),
    "activation_offloading": not_here("set offload_blocks to a number of blocks", False),
    "attention_mask": without_effect("Anima attends to its padding"),
    "guidance_scale": without_effect("Anima has no guidance embedding"),
    "dropout_probability": to("general.caption_dropout_rate", number),
    "stop_training_after": otherwise("trained to the end"),
    "stop_training_after_unit": otherwise("trained to the end"),
    "train_embedding": without_effect("no embedding is trained"),
}
TEXT_ENCODER: dict[str, Row] = {
    **PART,
    "model_name": to("model.qwen3"),
    "train": to("network.train_text_encoder", switch),
    "learning_rate": to("optimizer.text_encoder_lr", number),
    "weight_dtype": otherwise("texts are encoded once, before training, in full precision"),
    "gradient_checkpointing": otherwise("as the denoiser"),
}
VAE: dict[str, Row] = {
    **PART,
    "model_name": to("model.vae"),
    "train": without_effect("the VAE is never trained"),
    "learning_rate": without_effect("the VAE is never trained"),
    "weight_dtype": otherwise("pictures are encoded once, before training, in full precision"),
    "gradient_checkpointing": without_effect("the VAE is never trained"),
    "dropout_probability": without_effect("the VAE reads no captions"),
}
BETAS = to("optimizer.optimizer_args.betas", betas("beta1", "beta2"))
CARRIED = (
    *("weight_decay", "eps", "momentum", "d0", "d_coef", "growth_rate", "clip_threshold", "decay_rate", "dampening"),
    *("amsgrad", "nesterov", "decouple", "safeguard_warmup", "use_bias_correction", "relative_step"),
    *("scale_parameter", "warmup_init", "weight_decouple", "fixed_decay", "rectify", "cautious", "weight_lr_power"),
)
OPTIMIZER: dict[str, Row] = {
    "optimizer": to("optimizer.optimizer_type", optimizer_name),
    "beta1": BETAS,
    "beta2": BETAS,
    **{
        name: to(f"optimizer.optimizer_args.{name}", lambda v, b: no_effect() if v is OFF else taken(v))
        for name in CARRIED
    },
    "stochastic_rounding": without_effect("the adapter's weights are fp32"),
    "fused_back_pass": not_here("leave it out", False),
    "__version": UI,
    **dict.fromkeys(
        ("fused", "foreach", "capturable", "differentiable", "maximize"), otherwise("the library's own way")
    ),
    "*": not_here("not carried over: write it into optimizer_args if the optimiser knows it", False),
}
CONCEPT_IMAGE: dict[str, Row] = {
    "enable_crop_jitter": not_here("crops are in the middle; random_crop crops anywhere", False),
    "enable_random_flip": to("subset.flip_aug", switch),
    "enable_resolution_override": otherwise("resolution_override counts if set"),
    "resolution_override": to(
        "dataset.resolution", lambda v, b: resolution(v, b) if b.get("enable_resolution_override") else no_effect()
    ),
    **{
        f"enable_{how}_{what}": not_here("color_aug, flip_aug and random_crop are what there is", False)
        for how in ("random", "fixed")
        for what in ("flip", "rotate", "brightness", "contrast", "saturation", "hue", "mask_rotate_crop")
        if (how, what) != ("random", "flip")
    },
    "enable_random_circular_mask_shrink": not_here("draw the masks as they should be", False),
    "random_rotate_max_angle": without_effect("pictures are not turned"),
    **dict.fromkeys(
        (f"random_{what}_max_strength" for what in ("brightness", "contrast", "saturation", "hue")),
        without_effect("colours are not varied"),
    ),
}
CONCEPT_TEXT: dict[str, Row] = {
    "prompt_source": always("sample", todo="write a .txt file beside each picture, or one caption as class_tokens"),
    "prompt_path": without_effect("captions stand beside the pictures"),
    "enable_tag_shuffling": to("subset.shuffle_caption", switch),
    "tag_delimiter": to("subset.caption_separator"),
    "keep_tags_count": to("subset.keep_tokens", whole),
    "tag_dropout_enable": otherwise("by tag_dropout_probability"),
    "tag_dropout_mode": otherwise("by tag_dropout_probability"),
    "tag_dropout_probability": to("subset.caption_tag_dropout_rate", tag_dropout),
    "tag_dropout_special_tags_mode": not_here("keep_tokens keeps the first tags", "NONE"),
    "tag_dropout_special_tags": not_here("keep_tokens keeps the first tags"),
    "tag_dropout_special_tags_regex": without_effect("no special tags"),
    "caps_randomize_enable": not_here("leave it out", False),
    **dict.fromkeys(
        ("caps_randomize_probability", "caps_randomize_mode", "caps_randomize_lowercase"),
        without_effect("capitals stay"),
    ),
}
CONCEPT: dict[str, Row] = {
    "path": to("subset.image_dir"),
    "enabled": to("listed.enabled", lambda v, b: Answer() if v else changed(v, "the concept is left out")),
    "type": to("subset.is_reg", repeated_type),
    "validation_concept": to("listed.enabled", validation_concept),
    "include_subdirectories": not_here("write a [[datasets.subsets]] for each folder", False),
    "balancing": to("subset.num_repeats", balancing),
    "repeats": to("subset.num_repeats", balancing),
    "balancing_strategy": otherwise("by balancing"),
    "text_variations": to("subset.caption_variants", whole),
    "image_variations": not_here("random_crop and color_aug are drawn anew in each step", 1),
    "loss_weight": not_here("repeat the folder (num_repeats) instead", 1, 1.0),
    "seed": otherwise("all that is random follows from training.seed"),
    "name": UI,
    "__version": UI,
    "concept_stats.*": UI,
    **under("image", CONCEPT_IMAGE),
    **under("text", CONCEPT_TEXT),
}
SAMPLE: dict[str, Row] = {
    "enabled": to("sample.enabled"),
    "prompt": to("sample.prompt"),
    "negative_prompt": to("sample.n"),
    "width": to("sample.w", whole),
    "height": to("sample.h", whole),
    "seed": to("sample.d", lambda v, b: no_effect("random_seed is set") if b.get("random_seed") else whole(v, b)),
    "random_seed": not_here("previews have fixed seeds, to be compared", False),
    "diffusion_steps": to("sample.s", whole),
    "cfg_scale": to("sample.l", number),
    "noise_scheduler": otherwise("previews are drawn by the family's own sampler"),
    "__version": UI,
    "*": OTHER_MODELS,
}
