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

FILE = re.compile(r"[^\n\r<>|?*\"]+\.(?:safetensors|sft|ckpt|pt|pth|bin|gguf)", re.IGNORECASE)
PAIR = re.compile(r'\s*([A-Za-z][\w /\-]*):\s*("(?:\\.|[^"\\])*"|[^,]*)(?:,|$)')
LORA = re.compile(r"<(?:lora|lyco):([^:>]+)(?::([-\d.]+))?")
SIZE = re.compile(r"(\d+)\s*[xX]\s*(\d+)")

NAMES = {"steps": "steps", "cfg": "cfg", "seed": "seed", "noise_seed": "seed", "width": "width", "height": "height",
         "shift": "shift", "sampler_name": "sampler", "scheduler": "scheduler",
         "weight_dtype": "weight_dtype"}  # fmt: skip
"""Inputs of ComfyUI's nodes, and our names for them."""
A1111_NAMES = {"Steps": "steps", "CFG scale": "cfg", "Seed": "seed", "Sampler": "sampler", "Schedule type": "scheduler",
               "Shift": "shift", "Distilled CFG Scale": "distilled_cfg", "Precision": "precision"}  # fmt: skip
WIDGETS: Mapping[str, tuple[str, ...]] = {
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
NUMBERS = {"steps", "cfg", "seed", "width", "height", "shift", "distilled_cfg"}
DEPTH = 6


@dataclass(frozen=True)
class Made:
    """What made a picture: the program, its settings by name (numbers as numbers), and the files that it used."""

    program: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    prompt: str = ""


def made_by(texts: Mapping[str, str]) -> Made | None:
    """How a picture with these text chunks was made; None where none of them says it."""
    for name, read in (("finitune", own), ("prompt", graph), ("workflow", graph), ("parameters", a1111)):
        if name in texts and (found := read(texts[name])):
            return found
    return None


def own(text: str) -> Made | None:
    """Of finitune's JSON."""
    table = table_of(text)
    if table is None:
        return None
    size = SIZE.fullmatch(str(table.get("size", "")))
    settings = {key: table[key] for key in ("steps", "cfg", "seed", "precision") if key in table}
    if size:
        settings |= {"width": int(size[1]), "height": int(size[2])}
    model = str(table.get("model", ""))
    return Made("finitune", settings, (model,) if FILE.fullmatch(model) else (), str(table.get("prompt", "")))


def a1111(text: str) -> Made | None:
    """Of the text of A1111, Forge and others: prompt, negative prompt, one line of settings."""
    *_, last = text.strip().splitlines() or [""]
    if "Steps:" not in last:
        return None
    found = {key.strip(): value.strip().strip('"') for key, value in PAIR.findall(last)}
    settings: dict[str, Any] = {}
    for theirs, ours in A1111_NAMES.items():
        if theirs in found:
            settings[ours] = number(found[theirs]) if ours in NUMBERS else found[theirs]
    if size := SIZE.fullmatch(found.get("Size", "")):
        settings |= {"width": int(size[1]), "height": int(size[2])}
    named = [f"{found[key]}.safetensors" for key in ("Model", "VAE") if found.get(key, "None") != "None"]
    named = [
        name.removesuffix(".safetensors") if FILE.fullmatch(name.removesuffix(".safetensors")) else name
        for name in named
    ]
    named += [f"{name}.safetensors" for name, _ in LORA.findall(text)]
    return Made("A1111 or one of its kin", cleaned(settings), tuple(dict.fromkeys(named)), text.partition("\n")[0])


def graph(text: str) -> Made | None:
    """Of a graph of ComfyUI in JSON."""
    document = table_of(text)
    return None if document is None else graph_of(document)


def graph_of(document: Mapping[str, Any]) -> Made | None:
    """Of a graph of ComfyUI; where several nodes state a setting, the first."""
    nodes = document.get("nodes")
    settings: dict[str, Any] = {}
    if isinstance(nodes, list):
        for node in nodes:
            values = node.get("widgets_values") if isinstance(node, Mapping) else None
            names = WIDGETS.get(str(node.get("type")), ()) if values is not None else ()
            pairs = values.items() if isinstance(values, Mapping) else zip(names, values or (), strict=False)
            for name, value in pairs if isinstance(values, (Mapping, list)) else ():
                if name in NAMES.values():
                    settings.setdefault(name, value)
    else:
        inside = document.get("prompt")
        nodes = [n for n in (inside if isinstance(inside, Mapping) else document).values() if isinstance(n, Mapping)]
        for node in nodes:
            inputs = node.get("inputs")
            for name, value in inputs.items() if isinstance(inputs, Mapping) else ():
                if name in NAMES and not isinstance(value, (list, dict)):
                    settings.setdefault(NAMES[name], value)
    if not nodes:
        return None
    settings = {name: number(value) if name in NUMBERS else value for name, value in settings.items()}
    return Made("ComfyUI", cleaned(settings), tuple(dict.fromkeys(files_in(nodes))))


def files_in(value: Any, depth: int = DEPTH) -> Iterator[str]:
    """The names of weights in a document, down to some depth."""
    if isinstance(value, str):
        if FILE.fullmatch(value.strip()):
            yield value.strip()
    elif depth and isinstance(value, (Mapping, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from files_in(item, depth - 1)


def number(value: Any) -> int | float | None:
    """A number, of one or of its text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    with suppress(ValueError, OverflowError):
        real = float(value)
        return int(value) if isinstance(value, int) or (isinstance(value, str) and value.isdigit()) else real
    return None


def cleaned(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without those that say nothing."""
    return {name: value for name, value in settings.items() if value is not None}


def table_of(text: str) -> dict[str, Any] | None:
    """A JSON table; None for any other text."""
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
        if isinstance(found, dict):
            return found
    return None
