"""What the header of a model tells: by what its family is known, how its names begin, which parts are there, in which
precision it says it is and is, and whether its 8-bit weights have their scales.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finitune.report import Level, Report

if TYPE_CHECKING:
    from finitune.files.tensorfile import TensorFile
    from finitune.merging.bases import Base
    from finitune.models.spec import ModelSpec

PRECISIONS = {
    **dict.fromkeys(("fp32", "float32", "f32", "float"), "F32"),
    **dict.fromkeys(("fp16", "float16", "f16", "half"), "F16"),
    **dict.fromkeys(("bf16", "bfloat16"), "BF16"),
    **dict.fromkeys(("fp8", "float8", "fp8_scaled", "float8_e4m3fn", "fp8_e4m3fn", "fp8_e4m3"), "F8_E4M3"),
    **dict.fromkeys(("float8_e5m2", "fp8_e5m2"), "F8_E5M2"),
}
"""Words for a precision in the field, and the dtype as files name it."""
WORD = re.compile(
    r"(?<![a-z0-9])(bfloat16|bf16|float16|fp16|float32|fp32|float8_e[45]m[23](?:fn)?|fp8_e[45]m[23](?:fn)?|fp8)"
    r"(?![a-z0-9])"
)
STATED_BY = ("dtype", "torch_dtype", "precision", "weight_dtype", "ss_save_precision", "ss_weight_dtype")
"""Names in metadata and in config.json that state the precision of weights; those with a dot by their last part."""
MOSTLY = 0.5
"""A declaration is true where it is of this share of the bytes: norms and biases are kept wider everywhere."""

SCALED_MARKS = ("scaled_fp8",)
"""ComfyUI's mark in a checkpoint whose 8-bit weights have scales."""

PLACES = {
    "vae": ("the VAE",),
    "transformer": ("the denoiser of Anima", "a denoiser in diffusers' naming"),
    "text_encoder": ("the text encoder",),
    "text_conditioner": ("a text conditioner alone",),
}
"""What a folder or a file that is called so holds, in the words of `models.anima.keys.recognise`."""


def tell_header(opened: Base, report: Report) -> None:
    """All of it, to the report."""
    tell_family(opened, report)
    tell_prefix(opened, report)
    tell_places(opened, report)
    tell_parts(opened, report)
    tell_precision(opened, report)
    for component, file in opened.files.items():
        tell_scales(component, file, report)


def tell_family(opened: Base, report: Report) -> None:
    """By what the family is known, or a note that the model is of none."""
    from finitune.merging.bases import score
    from finitune.models import MODELS

    if opened.family is not None:
        widths = widths_of(opened, opened.family)
        report.figures["family_evidence"] = {
            "tensors_known": len(opened.landings()),
            "of": report.figures["tensors"],
            "widths_as_published": widths[True],
            "widths_of_its_own": widths[False],
        }
        return
    near = {model.name: known for model in MODELS if (known := score(opened, list(opened), model)[0])}
    held = holds(opened)
    report.add(
        Level.NOTE,
        "MODEL-FAMILY-UNKNOWN",
        str(opened.path),
        "it is of none of the families known here" + (f"; it holds {held}" if held else ""),
        remedy="Adapters for it can be checked, converted and merged by its own names: --model FILE.",
        tensors_known_by_family=near,
        first=[str(key) for key in opened][:3],
    )


def widths_of(opened: Base, family: ModelSpec) -> Counter[bool]:
    """How many weights by which the family is told apart have its width, and how many have another."""
    from finitune.files.keymap import match

    found: Counter[bool] = Counter()
    for key, (landing, parameter) in opened.landings().items():
        for mark in family.adapters.hallmarks:
            here = parameter == "weight" and landing.component == mark.component
            if here and match(landing.sites[0], mark.site) is not None:
                found[opened.shape(key)[1] == mark.inputs] += 1
    return found


def holds(opened: Base) -> str:
    """Which part of a model a single file is, in words; "" where that is not known."""
    from finitune.models.anima.keys import recognise

    if opened.is_folder:
        return ""
    held = recognise(opened.files[""])
    return "" if held.startswith("something") else held


def tell_prefix(opened: Base, report: Report) -> None:
    """What stands before the names of a single file, and a warning where only some of a denoiser have it."""
    from finitune.merging.bases import WRAPPINGS

    if opened.is_folder:
        return
    names = list(opened.files[""])
    counts = Counter(next((p for p in WRAPPINGS if name.startswith(p)), "") for name in names)
    wrapped = {prefix: count for prefix, count in counts.items() if prefix}
    report.figures["prefix"] = max(wrapped, key=wrapped.__getitem__) if wrapped else ""
    twice = [
        name for name in names if any(name.startswith(p) and name.removeprefix(p) in opened.files[""] for p in wrapped)
    ]
    if len(wrapped) > 1 or twice:
        report.add(
            Level.WARNING,
            "MODEL-PREFIX-MIXED",
            str(opened.path),
            f"{len(twice)} tensors are there twice, with a prefix and without"
            if twice
            else f"its names begin in {len(wrapped)} ways",
            remedy="It was put together from two files. Programs take the one and ignore the other: get the original.",
            prefixes=dict(counts),
            first=twice[:3],
        )


def tell_places(opened: Base, report: Report) -> None:
    """An error where a folder of a model holds another part of it, a warning where a file's name says another."""
    from finitune.models.anima.keys import recognise

    for component, file in opened.files.items():
        called = component or word_in(file.path.name)
        held, wanted = recognise(file), PLACES.get(called, ())
        known = {part for parts in PLACES.values() for part in parts}
        if not wanted or held in wanted or held not in known:
            continue
        right = next(name for name, parts in PLACES.items() if held in parts)
        report.add(
            Level.ERROR if component else Level.WARNING,
            "MODEL-WRONG-PART",
            str(file.path),
            f"it is called {called}, and holds {held}",
            remedy=f"Put it where {right} is asked for.",
            called=called,
            holds=held,
        )


def word_in(name: str) -> str:
    """The part that a file's name speaks of; "" where it speaks of none or of several."""
    found = [part for part in ("vae", "text_encoder", "transformer") if part in name.lower()]
    return found[0] if len(found) == 1 else ""


def tell_parts(opened: Base, report: Report) -> None:
    """Which components are there, and an error where a folder lacks some of its family."""
    parts = sorted({found[0].component for found in opened.landings().values()}) or [
        part for part in opened.files if part
    ]
    report.figures["parts"] = parts
    family = opened.family
    if family is None or not opened.is_folder or "" in opened.files:
        if family is not None and family.name == "anima" and parts == ["transformer"] and not opened.is_folder:
            report.add(
                Level.WARNING,
                "MODEL-PARTS-MISSING",
                str(opened.path),
                "the text conditioner (llm_adapter.*) is not in it, and Anima cannot draw without",
                remedy="Get the file of the whole denoiser, or take it from the base model.",
                missing=["text_conditioner"],
            )
        return
    missing = [part for part in family.components if not (opened.path / part).is_dir()]
    if missing:
        report.add(
            Level.ERROR,
            "MODEL-PARTS-MISSING",
            str(opened.path),
            f"folders of {family.title} are missing: {', '.join(missing)}",
            remedy="Fetch them from the model's release; folders that are not there are never fetched here.",
            missing=missing,
        )


def tell_precision(opened: Base, report: Report) -> None:
    """A warning where what a file says of its precision is not what its tensors are; a note where nothing says it."""
    stated: dict[str, dict[str, str]] = {}
    for component, file in opened.files.items():
        said = dict(declarations(file))
        stated[component] = said
        shares = shares_of(file)
        for where, dtype in said.items():
            if shares and shares.get(dtype, 0.0) < MOSTLY:
                main = max(shares, key=shares.__getitem__)
                report.add(
                    Level.WARNING,
                    "MODEL-PRECISION-MISSTATED",
                    str(file.path),
                    f"{where} says {dtype}, but {shares[main]:.0%} of its bytes are {main}",
                    remedy="Programs that go by it load it in another precision than it has; the tensors are right.",
                    stated=dtype,
                    stated_by=where,
                    shares={name: round(share, 4) for name, share in shares.items()},
                )
    told = {component or "file": said for component, said in stated.items() if said}
    report.figures["precision_stated"] = told
    if not told:
        report.add(
            Level.NOTE,
            "MODEL-PRECISION-UNSTATED",
            str(opened.path),
            "nothing in its metadata, settings or name says in which precision it was trained or saved",
            remedy="The tensors tell how it is stored, not whether it was rounded before: weights that went through "
            "fp16 or bf16 and lie in fp32 have lost their bits all the same.",
        )


def declarations(file: TensorFile) -> Iterator[tuple[str, str]]:
    """(where it is said, dtype as files name it) of all that speaks of a file's precision."""
    for source, table in (("metadata", file.metadata), ("config.json", settings_beside(file.path))):
        for key, value in table.items():
            word = str(value).removeprefix("torch.").strip().lower()
            if key.rpartition(".")[2] in STATED_BY and word in PRECISIONS:
                yield f"{source} {key}", PRECISIONS[word]
    words = {
        PRECISIONS.get(word.removesuffix("fn"), PRECISIONS.get(word, ""))
        for word in WORD.findall(file.path.name.lower())
    }
    if len(words) == 1:
        yield "its name", words.pop()


def settings_beside(path: Path) -> Mapping[str, Any]:
    """The config.json in a component's folder; nothing where there is none that can be read."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads((path.parent / "config.json").read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}


def shares_of(file: TensorFile) -> dict[str, float]:
    """The share of the bytes that each floating dtype has."""
    size: Counter[str] = Counter()
    for entry in file.entries.values():
        if entry.torch_dtype.is_floating_point:
            size[entry.dtype] += entry.size_bytes
    total = sum(size.values())
    return {name: count / total for name, count in size.items()} if total else {}


def tell_scales(component: str, file: TensorFile, report: Report) -> None:
    """Whether 8-bit weights have scales: all is well, none is told, some is an error."""
    eight = [
        name for name, entry in file.entries.items() if entry.dtype in ("F8_E4M3", "F8_E5M2") and len(entry.shape) > 1
    ]
    if not eight:
        return
    bare = [name for name in eight if not has_scale(name, file)]
    marked = bool({*SCALED_MARKS} & file.entries.keys()) or "_quantization_metadata" in file.metadata
    report.figures["fp8_weights"] = len(eight)
    report.figures["fp8_scaled"] = len(eight) - len(bare)
    where = f"{component}/{bare[0]}" if component and bare else (bare[0] if bare else "")
    if bare and (marked or len(bare) < len(eight)):
        report.add(
            Level.ERROR if marked and len(bare) == len(eight) else Level.WARNING,
            "FP8-SCALES-MISSING",
            where,
            f"{len(bare)} of {len(eight)} weights in 8 bits have no scale beside them, and the others or a mark say "
            "that the file has scales",
            remedy="Without its scale a weight is wrong by a factor. Get the file again, or the one in bf16.",
            missing=len(bare),
            of=len(eight),
            first=bare[:3],
        )
    elif bare:
        report.add(
            Level.NOTE,
            "FP8-UNSCALED",
            str(file.path),
            f"its {len(eight)} weights in 8 bits have no scales: they were cast, so that small ones are coarse or zero",
            remedy="It loads everywhere. For merging and training take the file in bf16 or fp16.",
        )


def has_scale(name: str, file: TensorFile) -> bool:
    """Whether a scale of a weight stands beside it, of the whole weight or of its blocks."""
    from finitune.merging.scaled import FOREIGN, SUFFIXES

    stem = name.removesuffix(".weight")
    return any(stem + suffix in file for suffix in (*SUFFIXES, *FOREIGN))
