"""A preset file of LyCORIS held against the modules of a model: a preset that names none trains nothing, in silence.

Facts: LyCORIS 4.1, lycoris/config.py (the keys that there are) and lycoris/kohya.py (`unet_target_name` is matched at
the beginning of a dotted name, `unet_target_module` by the name of a class).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from finitune.config.toml_text import read_toml
from finitune.errors import suggest_nearest_name
from finitune.report import Finding, Level

_LYCORIS_PRESET_KEYS = (
    *("enable_conv", "target_module", "target_name", "unet_target_module", "unet_target_name", "exclude_name"),
    *("text_encoder_target_module", "text_encoder_target_name", "module_algo_map", "name_algo_map", "lora_prefix"),
    "use_fnmatch",
)
_MODULE_PATTERN_BY_CLASS = {
    "Block": r"blocks\.",
    "PatchEmbed": r"x_embedder\.",
    "TimestepEmbedding": r"t_embedder\.",
    "FinalLayer": r"final_layer\.",
    "LLMAdapterTransformerBlock": r"(llm_adapter\.)?blocks\.",
    "Attention": r".*attn\.",
    "GPT2FeedForward": r".*mlp\.",
}
"""The classes of Anima's own code, by where their modules stand."""


def check_lycoris_preset(path: Path, names: Sequence[str]) -> list[Finding]:
    """Keys of a preset that LyCORIS does not know, and what in it names none of the modules, by their original names.

    Raises what `read_toml` does.
    """
    preset = read_toml(path).document
    found = [
        Finding(
            Level.WARNING,
            "LYCORIS-PRESET-KEY",
            f"{path}: {key}",
            f"LyCORIS's presets have no key {key!r}: version 3 passes over it, 4 "
            f"stops.{suggest_nearest_name(key, _LYCORIS_PRESET_KEYS)}",
            {"key": key},
            f"These are: {', '.join(_LYCORIS_PRESET_KEYS)}.",
        )
        for key in preset
        if key not in _LYCORIS_PRESET_KEYS
    ]
    targets = {target: count_preset_matches(target, names, preset, by) for target, by in list_preset_targets(preset)}
    idle = [target for target, number in targets.items() if not number]
    if idle and any(targets.values()):
        message = f"{', '.join(idle)}: no module of this model is called so"
        found.append(Finding(Level.NOTE, "LYCORIS-PRESET-IDLE", str(path), message, {"targets": targets}))
    elif not any(targets.values()):
        message = f"the preset names none of the model's {len(names)} modules: LyCORIS trains nothing, and says nothing"
        remedy = "Classes of Anima are Block and LLMAdapterTransformerBlock (LyCORIS 4); or name modules by pattern."
        found.append(Finding(Level.ERROR, "LYCORIS-PRESET-EMPTY", str(path), message, {"targets": targets}, remedy))
    return found


def list_preset_targets(preset: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a preset names of the denoiser, each by "name" or by "module"."""
    return [
        (str(target), by)
        for by in ("name", "module")
        for key in (f"unet_target_{by}", f"target_{by}")
        for target in preset.get(key) or ()
    ]


def count_preset_matches(target: str, names: Sequence[str], preset: Mapping[str, Any], by: str) -> int:
    """How many of the modules a target names."""
    if by == "module":
        pattern = _MODULE_PATTERN_BY_CLASS.get(target)
        return sum(bool(re.match(pattern, name)) for name in names) if pattern else 0
    if preset.get("use_fnmatch"):
        return sum(fnmatch(name, target) for name in names)
    try:
        return sum(bool(re.match(target, name)) for name in names)
    except re.error:
        return 0
