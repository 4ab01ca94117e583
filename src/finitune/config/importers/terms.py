"""What trainers call the same things: dtypes, optimisers, schedules, losses, prompts, each once for all importers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from finitune.config.importers.mapping import Account, Answer, Conversion, changed, one_of, taken, unsupported

RANK = 16
"""Our rank where none is given, and that of most."""
HALF = changed(
    "auto",
    "fp16 is autocast with a loss scale there; here scaled half products with fp32 masters wherever the machine has "
    "fast fp16",
)
PRECISIONS: Mapping[str, object] = {
    **dict.fromkeys(("bf16", "bfloat16", "bfloat_16"), "bf16"),
    **dict.fromkeys(("fp32", "float32", "float_32", "float", "no"), "fp32"),
    **dict.fromkeys(("tf32", "tfloat_32"), changed("fp32", "TensorFloat-32 is not forced here")),
    **dict.fromkeys(("fp16", "float16", "float_16"), HALF),
}


def compute_dtype(value: Any, beside: Mapping[str, Any]) -> Answer:
    """The dtype of the arithmetic, as our precision."""
    return one_of(PRECISIONS, "choose planned-half, current-half, bf16 or fp32 as precision.")(value, beside)


SAVED: Mapping[str, object] = {
    **dict.fromkeys(("bf16", "bfloat16", "bfloat_16"), "bf16"),
    **dict.fromkeys(("fp32", "float32", "float_32", "float"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "float_16"), "fp16"),
}


def saved_dtype(value: Any, beside: Mapping[str, Any]) -> Answer:
    """The dtype of files."""
    return one_of(SAVED, "choose fp32, fp16 or bf16 as save_precision.")(value, beside)


def stored_dtype(value: Any, beside: Mapping[str, Any]) -> Answer:
    """How the frozen weights are held: 8-bit floats, or a plain dtype."""
    name = re.sub(r"^q(?=float)", "", str(value).lower())
    if name.startswith(("float8", "fp8", "float_8")):
        return taken("fp8") if "w8a8" not in name else changed("fp8", "weights in 8 bits; products in the full dtype")
    if name in SAVED:
        return taken(SAVED[name])
    return unsupported(f"{value!r}: 8-bit floats are the smallest storage here; set storage to fp8.")


OPTIMIZERS = {
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
OTHER_OPTIMIZERS = {
    "adamwbf16": changed("AdamW", "bf16 weights with stochastic rounding there; the masters are fp32 here"),
    "adamwadv": changed("AdamW", "OneTrainer's own variant; the plain one here"),
    "adamw8bitkahan": changed("AdamW8bit", "Kahan sums are for bf16 weights; the masters are fp32 here"),
    "adamwschedulefree": taken("ScheduleFreeAdamW"),
    "adamschedulefree": taken("ScheduleFreeAdamW"),
    "prodigyopt": taken("Prodigy"),
    "prodigy8bit": changed("Prodigy", "its state is fp32 here"),
    "prodigyplusschedulefree": changed("Prodigy", "without the schedule-free average"),
    "pagedadamw8bit": changed("AdamW8bit", "its state is not paged to main memory here"),
    "dadaptation": taken("DAdaptAdam"),
    "dadaptadan": changed("DAdaptAdam", "Adam instead of Adan"),
}


def optimizer_name(value: Any, beside: Mapping[str, Any]) -> Answer:
    """Our name of an optimiser, whichever library the original takes it from."""
    name = re.sub(r"^(bnb|optimi|ao|torch)[-_]|[-_](optimi|paged|bnb)$", "", str(value).lower().partition("+")[0])
    plain = re.sub(r"[-_ ]", "", name)
    if plain in OPTIMIZERS:
        return taken(OPTIMIZERS[plain])
    return OTHER_OPTIMIZERS.get(plain) or unsupported(
        f"{value!r}: choose one of torch, pytorch-optimizer or bitsandbytes; AdamW is taken."
    )


SCHEDULES: Mapping[str, object] = {
    name: name
    for name in ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial")
}

LOSSES: Mapping[str, object] = {"mse": "l2", "l2": "l2", "mae": "l1", "l1": "l1", "huber": "huber"}


def schedule(value: Any, beside: Mapping[str, Any]) -> Answer:
    """The course of the learning rate."""
    return one_of(SCHEDULES, "the learning rate stays constant; set lr_scheduler.")(value, beside)


def betas(first: str, second: str) -> Conversion:
    """The conversion of two keys that are one pair here; each writes both."""

    def pair(value: Any, beside: Mapping[str, Any]) -> Answer:
        return taken([float(beside.get(first) or 0.9), float(beside.get(second) or 0.999)])

    return pair


def scale_one(account: Account) -> None:
    """LoKr with a full second factor has no alpha in LyCORIS and its kin: the scale is 1, as with alpha = rank."""
    if account.get("network.full_matrix") and not account.get("network.decompose_both"):
        account.set("network.network_alpha", account.get("network.network_dim") or RANK)


def pattern_of_part(part: str) -> str:
    """The regular expression of whole module names that contain `part`."""
    return f".*{re.escape(part)}.*"


def patterns_of_parts(value: Any, beside: Mapping[str, Any]) -> Answer:
    """Parts of module names, as regular expressions of whole ones."""
    parts = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    return taken([pattern_of_part(str(part)) for part in parts])


def prompt_line(prompt: str, options: Mapping[str, object]) -> str:
    """A prompt with kohya's flags for what it sets itself: --n --w --h --d --s --l."""
    flags = (f"--{flag} {value}" for flag, value in options.items() if value not in (None, "", False))
    return " ".join((prompt, *flags))


def spread(
    options: Mapping[str, object], subsets: Sequence[Mapping[str, object]], resolutions: Sequence[object]
) -> list[dict[str, object]]:
    """One [[datasets]] for each resolution, over the same folders: pictures are shown at each of them."""
    return [
        {**options, "resolution": resolution, "subsets": [dict(subset) for subset in subsets]}
        for resolution in resolutions
    ]


def as_list(value: Any) -> list[Any]:
    """A list of what may be one thing."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def whole_number(value: Any) -> Any:
    """`value` as a whole number where it is one."""
    try:
        return int(float(value))
    except (TypeError, ValueError):
        return value
