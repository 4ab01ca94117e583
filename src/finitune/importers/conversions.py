"""What trainers call the same things: dtypes, optimisers, schedules, losses, prompts, each once for all importers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from finitune.importers.mapping import (
    ConvertedValue,
    ImportAccount,
    ValueConverter,
    convert_number,
    make_choice_converter,
    mark_no_effect,
    mark_unsupported,
    take_changed,
    take_value,
)

DEFAULT_IMPORT_RANK = 16
"""Our rank where none is given, and that of most."""
_FP16_PRECISION = take_changed(
    "auto",
    "fp16 is autocast with a loss scale there; here scaled half products with fp32 masters wherever the machine has "
    "fast fp16",
)
_PRECISION_BY_DTYPE: Mapping[str, object] = {
    **dict.fromkeys(("bf16", "bfloat16", "bfloat_16"), "bf16"),
    **dict.fromkeys(("fp32", "float32", "float_32", "float", "no"), "fp32"),
    **dict.fromkeys(("tf32", "tfloat_32"), take_changed("fp32", "TensorFloat-32 is not forced here")),
    **dict.fromkeys(("fp16", "float16", "float_16"), _FP16_PRECISION),
}


def convert_compute_dtype(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    """The dtype of the arithmetic, as our precision."""
    return make_choice_converter(_PRECISION_BY_DTYPE, "choose planned-half, current-half, bf16 or fp32 as precision.")(
        value, beside
    )


_SAVE_PRECISION_BY_DTYPE: Mapping[str, object] = {
    **dict.fromkeys(("bf16", "bfloat16", "bfloat_16"), "bf16"),
    **dict.fromkeys(("fp32", "float32", "float_32", "float"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "float_16"), "fp16"),
}


def convert_saved_dtype(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    """The dtype of files."""
    return make_choice_converter(_SAVE_PRECISION_BY_DTYPE, "choose fp32, fp16 or bf16 as save_precision.")(
        value, beside
    )


def convert_storage_dtype(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    """How the frozen weights are held: 8-bit floats, or a plain dtype."""
    name = re.sub(r"^q(?=float)", "", str(value).lower())
    if name.startswith(("float8", "fp8", "float_8")):
        return (
            take_value("fp8")
            if "w8a8" not in name
            else take_changed("fp8", "weights in 8 bits; products in the full dtype")
        )
    if name in _SAVE_PRECISION_BY_DTYPE:
        return take_value(_SAVE_PRECISION_BY_DTYPE[name])
    return mark_unsupported(f"{value!r}: 8-bit floats are the smallest storage here; set storage to fp8.")


_OPTIMIZER_BY_NAME = {
    "adafactor": "Adafactor",
    "adagrad": "Adagrad",
    "adam": "Adam",
    "adam8bit": "Adam8bit",
    "adamw": "AdamW",
    "adamw8bit": "AdamW8bit",
    "adan": "Adan",
    "ademamix": "AdEMAMix",
    "adopt": "ADOPT",
    "came": "CAME",
    "dadaptadam": "DAdaptAdam",
    "dadaptlion": "DAdaptLion",
    "lamb": "Lamb",
    "lion": "Lion",
    "lion8bit": "Lion8bit",
    "muon": "Muon",
    "prodigy": "Prodigy",
    "radam": "RAdam",
    "ranger": "Ranger",
    "rmsprop": "RMSprop",
    "schedulefreeadamw": "ScheduleFreeAdamW",
    "sgd": "SGD",
    "soap": "SOAP",
    "stableadamw": "StableAdamW",
    "tiger": "Tiger",
    "yogi": "Yogi",
}
_OPTIMIZER_VARIANTS = {
    "adamwbf16": take_changed("AdamW", "bf16 weights with stochastic rounding there; the masters are fp32 here"),
    "adamwadv": take_changed("AdamW", "OneTrainer's own variant; the plain one here"),
    "adamw8bitkahan": take_changed("AdamW8bit", "Kahan sums are for bf16 weights; the masters are fp32 here"),
    "adamwschedulefree": take_value("ScheduleFreeAdamW"),
    "adamschedulefree": take_value("ScheduleFreeAdamW"),
    "prodigyopt": take_value("Prodigy"),
    "prodigy8bit": take_changed("Prodigy", "its state is fp32 here"),
    "prodigyplusschedulefree": take_changed("Prodigy", "without the schedule-free average"),
    "pagedadamw8bit": take_changed("AdamW8bit", "its state is not paged to main memory here"),
    "dadaptation": take_value("DAdaptAdam"),
    "dadaptadan": take_changed("DAdaptAdam", "Adam instead of Adan"),
}


def convert_optimizer_name(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    """Our name of an optimiser, whichever library the original takes it from."""
    name = re.sub(r"^(bnb|optimi|ao|torch)[-_]|[-_](optimi|paged|bnb)$", "", str(value).lower().partition("+")[0])
    plain = re.sub(r"[-_ ]", "", name)
    if plain in _OPTIMIZER_BY_NAME:
        return take_value(_OPTIMIZER_BY_NAME[plain])
    return _OPTIMIZER_VARIANTS.get(plain) or mark_unsupported(
        f"{value!r}: choose one of torch, pytorch-optimizer or bitsandbytes; AdamW is taken."
    )


_SCHEDULE_BY_NAME: Mapping[str, object] = {
    name: name
    for name in ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial")
}

IMPORTED_LOSS_TYPES: Mapping[str, object] = {"mse": "l2", "l2": "l2", "mae": "l1", "l1": "l1", "huber": "huber"}


def convert_schedule_name(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    """The course of the learning rate."""
    return make_choice_converter(_SCHEDULE_BY_NAME, "the learning rate stays constant; set lr_scheduler.")(
        value, beside
    )


def make_betas_converter(first: str, second: str) -> ValueConverter:
    """The conversion of two keys that are one pair here; each writes both."""

    def pair(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
        return take_value([float(beside.get(first) or 0.9), float(beside.get(second) or 0.999)])

    return pair


def set_lokr_unit_scale(account: ImportAccount) -> None:
    """LoKr with a full second factor has no alpha in LyCORIS and its kin: the scale is 1, as with alpha = rank."""
    if account.get("network.full_matrix") and not account.get("network.decompose_both"):
        account.set("network.network_alpha", account.get("network.network_dim") or DEFAULT_IMPORT_RANK)


def build_name_part_pattern(part: str) -> str:
    """The regular expression of whole module names that contain `part`."""
    return f".*{re.escape(part)}.*"


def convert_name_parts(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    """Parts of module names, as regular expressions of whole ones."""
    parts = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    return take_value([build_name_part_pattern(str(part)) for part in parts])


def format_prompt_line(prompt: str, options: Mapping[str, object]) -> str:
    """A prompt with kohya's flags for what it sets itself: --n --w --h --d --s --l."""
    flags = (f"--{flag} {value}" for flag, value in options.items() if value not in (None, "", False))
    return " ".join((prompt, *flags))


def build_datasets_by_resolution(
    options: Mapping[str, object], subsets: Sequence[Mapping[str, object]], resolutions: Sequence[object]
) -> list[dict[str, object]]:
    """One [[datasets]] for each resolution, over the same folders: pictures are shown at each of them."""
    return [
        {**options, "resolution": resolution, "subsets": [dict(subset) for subset in subsets]}
        for resolution in resolutions
    ]


def wrap_in_list(value: Any) -> list[Any]:
    """A list of what may be one thing."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def to_whole_number(value: Any) -> Any:
    """`value` as a whole number where it is one."""
    try:
        return int(float(value))
    except (TypeError, ValueError):
        return value


def convert_self_tuned_rate(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    answer = convert_number(value, beside)
    finds_itself = str(beside.get("optimizer", "")).lower().startswith(("prodigy", "dadaptation"))
    if finds_itself and isinstance(answer.value, (int, float)) and answer.value < 0.1:
        return take_changed(1.0, "below 0.1 ai-toolkit takes 1 for an optimiser that finds the rate itself")
    return answer


def convert_walk_seed(value: Any, beside: Mapping[str, Any]) -> ConvertedValue:
    if value:
        return mark_no_effect("each prompt has the next seed here anyway")
    return mark_unsupported(
        "each prompt has the next seed here; write --d SEED behind each prompt for one and the same"
    )
