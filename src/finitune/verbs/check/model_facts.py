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
from typing import Any

from finitune.files.keymap import match_template
from finitune.files.tensorfile import TensorFile
from finitune.merging.base_model import DENOISER_PREFIXES, MergeBase, score_family_match
from finitune.merging.merge_plan import FOREIGN_FP8_SCALE_SUFFIXES, FP8_SCALE_SUFFIXES
from finitune.models import MODEL_FAMILIES
from finitune.models.spec import ModelSpec, find_file_part, has_adapter_names
from finitune.report import Level, Report

_DTYPE_BY_PRECISION_WORD = {
    **dict.fromkeys(("fp32", "float32", "f32", "float"), "F32"),
    **dict.fromkeys(("fp16", "float16", "f16", "half"), "F16"),
    **dict.fromkeys(("bf16", "bfloat16"), "BF16"),
    **dict.fromkeys(("fp8", "float8", "fp8_scaled", "float8_e4m3fn", "fp8_e4m3fn", "fp8_e4m3"), "F8_E4M3"),
    **dict.fromkeys(("float8_e5m2", "fp8_e5m2"), "F8_E5M2"),
}
"""Words for a precision in the field, and the dtype as files name it."""
_PRECISION_WORD_PATTERN = re.compile(
    r"(?<![a-z0-9])(bfloat16|bf16|float16|fp16|float32|fp32|float8_e[45]m[23](?:fn)?|fp8_e[45]m[23](?:fn)?|fp8)"
    r"(?![a-z0-9])"
)
_PRECISION_KEYS = ("dtype", "torch_dtype", "precision", "weight_dtype", "ss_save_precision", "ss_weight_dtype")
"""Names in metadata and in config.json that state the precision of weights; those with a dot by their last part."""
_MIN_DECLARED_SHARE = 0.5
"""A declaration is true where it is of this share of the bytes: norms and biases are kept wider everywhere."""

_FP8_SCALE_MARKS = ("scaled_fp8",)
"""ComfyUI's mark in a checkpoint whose 8-bit weights have scales."""


def report_model_header(opened: MergeBase, report: Report) -> None:
    report_model_family(opened, report)
    report_name_prefix(opened, report)
    report_misplaced_parts(opened, report)
    report_model_parts(opened, report)
    report_stated_precision(opened, report)
    for component, file in opened.files.items():
        report_fp8_scales(component, file, report)


def report_model_family(opened: MergeBase, report: Report) -> None:
    """By what the family is known, or a note that the model is of none."""
    if opened.family is not None:
        widths = count_hallmark_widths(opened, opened.family)
        report.figures["family_evidence"] = {
            "tensors_known": len(opened.find_all_targets()),
            "of": report.figures["tensors"],
            "widths_as_published": widths[True],
            "widths_of_its_own": widths[False],
        }
        return
    near = {
        model.name: known for model in MODEL_FAMILIES if (known := score_family_match(opened, list(opened), model)[0])
    }
    held = describe_held_part(opened)
    report.add(
        Level.NOTE,
        "MODEL-FAMILY-UNKNOWN",
        str(opened.path),
        "it is of none of the families known here" + (f"; it holds {held}" if held else ""),
        remedy="Adapters for it can be checked, converted and merged by its own names: --model FILE.",
        tensors_known_by_family=near,
        first=[str(key) for key in opened][:3],
    )


def count_hallmark_widths(opened: MergeBase, family: ModelSpec) -> Counter[bool]:
    """How many weights by which the family is told apart have its width, and how many have another."""
    found: Counter[bool] = Counter()
    for key, (landing, parameter) in opened.find_all_targets().items():
        for mark in family.adapters.hallmarks:
            here = parameter == "weight" and landing.component == mark.component
            if here and match_template(landing.sites[0], mark.site) is not None:
                found[opened.shape(key)[1] == mark.inputs] += 1
    return found


def describe_held_part(opened: MergeBase) -> str:
    """Which part of a model a single file is, in words; "" where that is not known."""
    if opened.is_folder:
        return ""
    names = opened.files[""]
    part = find_file_part(names, MODEL_FAMILIES)
    return "an adapter" if has_adapter_names(names) else part.title if part else ""


def report_name_prefix(opened: MergeBase, report: Report) -> None:
    """What stands before the names of a single file, and a warning where only some of a denoiser have it."""
    if opened.is_folder:
        return
    names = list(opened.files[""])
    counts = Counter(next((p for p in DENOISER_PREFIXES if name.startswith(p)), "") for name in names)
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


def report_misplaced_parts(opened: MergeBase, report: Report) -> None:
    """An error where a folder of a model holds another part of it, a warning where a file's name says another."""
    known = {part.component for family in MODEL_FAMILIES for part in family.parts}
    for component, file in opened.files.items():
        named = [part for part in ("vae", "text_encoder", "transformer") if part in file.path.name.lower()]
        called = component or (named[0] if len(named) == 1 else "")
        part = None if has_adapter_names(file) else find_file_part(file, MODEL_FAMILIES)
        if called not in known or part is None or part.component == called:
            continue
        report.add(
            Level.ERROR if component else Level.WARNING,
            "MODEL-WRONG-PART",
            str(file.path),
            f"it is called {called}, and holds {part.title}",
            remedy=f"Put it where {part.component} is asked for.",
            called=called,
            holds=part.title,
        )


def report_model_parts(opened: MergeBase, report: Report) -> None:
    """Which components are there, and an error where a folder lacks some of its family."""
    parts = sorted({found[0].component for found in opened.find_all_targets().values()}) or [
        part for part in opened.files if part
    ]
    report.figures["parts"] = parts
    family = opened.family
    if family is None or not opened.is_folder or "" in opened.files:
        alone = family is not None and parts == [family.adapters.components[0].name] and not opened.is_folder
        if family is not None and alone and family.beside_denoiser:
            report.add(
                Level.WARNING,
                "MODEL-PARTS-MISSING",
                str(opened.path),
                f"{', '.join(family.beside_denoiser.values())} is not in it, and {family.title} cannot draw without",
                remedy="Get the file of the whole denoiser, or take it from the base model.",
                missing=[*family.beside_denoiser],
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


def report_stated_precision(opened: MergeBase, report: Report) -> None:
    """A warning where what a file says of its precision is not what its tensors are; a note where nothing says it."""
    stated: dict[str, dict[str, str]] = {}
    for component, file in opened.files.items():
        stated[component or "file"] = said = dict(find_stated_precisions(file))
        size: Counter[str] = Counter()
        for entry in file.entries.values():
            if entry.torch_dtype.is_floating_point:
                size[entry.dtype] += entry.size_bytes
        total = sum(size.values())
        shares = {name: count / total for name, count in size.items()} if total else {}
        for where, dtype in said.items():
            if shares and shares.get(dtype, 0.0) < _MIN_DECLARED_SHARE:
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
    told = {component: said for component, said in stated.items() if said}
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


def find_stated_precisions(file: TensorFile) -> Iterator[tuple[str, str]]:
    """(where it is said, dtype as files name it) of all that speaks of a file's precision."""
    for source, table in (("metadata", file.metadata), ("config.json", read_component_config(file.path))):
        for key, value in table.items():
            word = str(value).removeprefix("torch.").strip().lower()
            if key.rpartition(".")[2] in _PRECISION_KEYS and word in _DTYPE_BY_PRECISION_WORD:
                yield f"{source} {key}", _DTYPE_BY_PRECISION_WORD[word]
    words = {
        _DTYPE_BY_PRECISION_WORD.get(word.removesuffix("fn"), _DTYPE_BY_PRECISION_WORD.get(word, ""))
        for word in _PRECISION_WORD_PATTERN.findall(file.path.name.lower())
    }
    if len(words) == 1:
        yield "its name", words.pop()


def read_component_config(path: Path) -> Mapping[str, Any]:
    """The config.json in a component's folder; nothing where there is none that can be read."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads((path.parent / "config.json").read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}


def report_fp8_scales(component: str, file: TensorFile, report: Report) -> None:
    """Whether 8-bit weights have scales: all is well, none is told, some is an error."""
    eight = [
        name for name, entry in file.entries.items() if entry.dtype in ("F8_E4M3", "F8_E5M2") and len(entry.shape) > 1
    ]
    if not eight:
        return
    beside = (*FP8_SCALE_SUFFIXES, *FOREIGN_FP8_SCALE_SUFFIXES)  # the scale of a whole weight, or of its blocks
    bare = [name for name in eight if not any(name.removesuffix(".weight") + suffix in file for suffix in beside)]
    marked = bool({*_FP8_SCALE_MARKS} & file.entries.keys()) or "_quantization_metadata" in file.metadata
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
