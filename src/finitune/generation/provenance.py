"""How a picture was made, from what programs write into it: finitune's own JSON, the line of A1111 and its kin, and the
graphs of ComfyUI, of which the server's form names every input and the editor's only lists their values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

_WEIGHT_FILE_PATTERN = re.compile(r"[^\n\r<>|?*\"]+\.(?:safetensors|sft|ckpt|pt|pth|bin|gguf)", re.IGNORECASE)
_SETTING_PAIR_PATTERN = re.compile(r'\s*([A-Za-z][\w /\-]*):\s*("(?:\\.|[^"\\])*"|[^,]*)(?:,|$)')
_LORA_TAG_PATTERN = re.compile(r"<(?:lora|lyco):([^:>]+)(?::([-\d.]+))?")
_PICTURE_SIZE_PATTERN = re.compile(r"(\d+)\s*[xX]\s*(\d+)")

_SETTING_BY_COMFYUI_INPUT = {
    "steps": "steps",
    "cfg": "cfg",
    "seed": "seed",
    "noise_seed": "seed",
    "width": "width",
    "height": "height",
    "shift": "shift",
    "sampler_name": "sampler",
    "scheduler": "scheduler",
    "weight_dtype": "weight_dtype",
}
"""Inputs of ComfyUI's nodes, and our names for them."""
_SETTING_BY_A1111_NAME = {
    "Steps": "steps",
    "CFG scale": "cfg",
    "Seed": "seed",
    "Sampler": "sampler",
    "Schedule type": "scheduler",
    "Shift": "shift",
    "Distilled CFG Scale": "distilled_cfg",
    "Precision": "precision",
}
_WIDGET_SETTINGS_BY_NODE: Mapping[str, tuple[str, ...]] = {
    "KSampler": ("seed", "", "steps", "cfg", "sampler", "scheduler"),
    "KSamplerAdvanced": ("", "seed", "", "steps", "cfg", "sampler", "scheduler"),
    "EmptyLatentImage": ("width", "height"),
    "EmptySD3LatentImage": ("width", "height"),
    "EmptyHunyuanLatentVideo": ("width", "height"),
    "ModelSamplingSD3": ("shift",),
    "ModelSamplingAuraFlow": ("shift",),
    "UNETLoader": ("", "weight_dtype"),
}
"""The order of values in the editor's nodes, by their type; "" for what is not looked at."""
_NUMERIC_SETTINGS = {"steps", "cfg", "seed", "width", "height", "shift", "distilled_cfg"}
_MAX_GRAPH_DEPTH = 6


@dataclass(frozen=True)
class PictureProvenance:
    """What made a picture: the program, its settings by name (numbers as numbers), and the files that it used."""

    program: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    prompt: str = ""


def read_picture_provenance(texts: Mapping[str, str]) -> PictureProvenance | None:
    """How a picture with these text chunks was made; None where none of them says it."""
    for name, read in (
        ("finitune", parse_finitune_metadata),
        ("prompt", parse_comfyui_json),
        ("workflow", parse_comfyui_json),
        ("parameters", parse_a1111_parameters),
    ):
        if name in texts and (found := read(texts[name])):
            return found
    return None


def parse_finitune_metadata(text: str) -> PictureProvenance | None:
    """Of finitune's JSON."""
    table = parse_json_table(text)
    if table is None:
        return None
    size = _PICTURE_SIZE_PATTERN.fullmatch(str(table.get("size", "")))
    settings = {key: table[key] for key in ("steps", "cfg", "seed", "precision") if key in table}
    if size:
        settings |= {"width": int(size[1]), "height": int(size[2])}
    model = str(table.get("model", ""))
    return PictureProvenance(
        "finitune", settings, (model,) if _WEIGHT_FILE_PATTERN.fullmatch(model) else (), str(table.get("prompt", ""))
    )


def parse_a1111_parameters(text: str) -> PictureProvenance | None:
    """Of the text of A1111, Forge and others: prompt, negative prompt, one line of settings."""
    *_, last = text.strip().splitlines() or [""]
    if "Steps:" not in last:
        return None
    found = {key.strip(): value.strip().strip('"') for key, value in _SETTING_PAIR_PATTERN.findall(last)}
    settings: dict[str, Any] = {}
    for theirs, ours in _SETTING_BY_A1111_NAME.items():
        if theirs in found:
            settings[ours] = parse_setting_number(found[theirs]) if ours in _NUMERIC_SETTINGS else found[theirs]
    if size := _PICTURE_SIZE_PATTERN.fullmatch(found.get("Size", "")):
        settings |= {"width": int(size[1]), "height": int(size[2])}
    named = [f"{found[key]}.safetensors" for key in ("Model", "VAE") if found.get(key, "None") != "None"]
    named = [
        name.removesuffix(".safetensors") if _WEIGHT_FILE_PATTERN.fullmatch(name.removesuffix(".safetensors")) else name
        for name in named
    ]
    named += [f"{name}.safetensors" for name, _ in _LORA_TAG_PATTERN.findall(text)]
    return PictureProvenance(
        "A1111 or one of its kin", drop_missing_settings(settings), tuple(dict.fromkeys(named)), text.partition("\n")[0]
    )


def parse_comfyui_json(text: str) -> PictureProvenance | None:
    """Of a graph of ComfyUI in JSON."""
    document = parse_json_table(text)
    return None if document is None else parse_comfyui_graph(document)


def parse_comfyui_graph(document: Mapping[str, Any]) -> PictureProvenance | None:
    """Of a graph of ComfyUI; where several nodes state a setting, the first."""
    nodes = document.get("nodes")
    settings: dict[str, Any] = {}
    if isinstance(nodes, list):
        for node in nodes:
            values = node.get("widgets_values") if isinstance(node, Mapping) else None
            names = _WIDGET_SETTINGS_BY_NODE.get(str(node.get("type")), ()) if values is not None else ()
            pairs = values.items() if isinstance(values, Mapping) else zip(names, values or (), strict=False)
            for name, value in pairs if isinstance(values, (Mapping, list)) else ():
                if name in _SETTING_BY_COMFYUI_INPUT.values():
                    settings.setdefault(name, value)
    else:
        inside = document.get("prompt")
        nodes = [n for n in (inside if isinstance(inside, Mapping) else document).values() if isinstance(n, Mapping)]
        for node in nodes:
            inputs = node.get("inputs")
            for name, value in inputs.items() if isinstance(inputs, Mapping) else ():
                if name in _SETTING_BY_COMFYUI_INPUT and not isinstance(value, (list, dict)):
                    settings.setdefault(_SETTING_BY_COMFYUI_INPUT[name], value)
    if not nodes:
        return None
    settings = {
        name: parse_setting_number(value) if name in _NUMERIC_SETTINGS else value for name, value in settings.items()
    }
    return PictureProvenance(
        "ComfyUI", drop_missing_settings(settings), tuple(dict.fromkeys(iterate_weight_names(nodes)))
    )


def iterate_weight_names(value: Any, depth: int = _MAX_GRAPH_DEPTH) -> Iterator[str]:
    """The names of weights in a document, down to some depth."""
    if isinstance(value, str):
        if _WEIGHT_FILE_PATTERN.fullmatch(value.strip()):
            yield value.strip()
    elif depth and isinstance(value, (Mapping, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from iterate_weight_names(item, depth - 1)


def parse_setting_number(value: Any) -> int | float | None:
    """A number, of one or of its text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    with suppress(ValueError, OverflowError):
        real = float(value)
        return int(value) if isinstance(value, int) or (isinstance(value, str) and value.isdigit()) else real
    return None


def drop_missing_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without those that say nothing."""
    return {name: value for name, value in settings.items() if value is not None}


def parse_json_table(text: str) -> dict[str, Any] | None:
    """A JSON table; None for any other text."""
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
        if isinstance(found, dict):
            return found
    return None
