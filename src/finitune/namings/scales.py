"""Where an adapter's scale is stated: in its own tensors, in the metadata, in a JSON beside the file, or nowhere.

Tensors are believed first. What two places state must agree; where it does not, neither is taken. A missing alpha
means scale 1 (alpha = rank) and never alpha = 1. Sources: kohya's and LyCORIS's files keep alpha beside the factors;
diffusers keeps PEFT's configurations in `lora_adapter_metadata`; PEFT keeps one in `adapter_config.json`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from finitune.adapters import find_algorithm
from finitune.adapters.core import AmbiguityOptions, SiteAdapter
from finitune.adapters.lokr import LoKr
from finitune.errors import AdapterError
from finitune.namings.core import PEFT_CONFIG_FILE_NAME, SCALE_UNKNOWN_CODE, FindingCollector, SiteTarget
from finitune.namings.metadata import DIFFUSERS_METADATA_KEY, parse_metadata_number, parse_metadata_table
from finitune.report import Finding, Level

_SCALE_TOLERANCE = 2.0**-7
"""How far two statements of a scale may differ: alpha is stored in the factors' dtype, which may be bf16 or fp8."""


@dataclass(frozen=True)
class PeftConfig:
    """A PEFT configuration, and where it stands."""

    table: Mapping[str, Any]
    source: str

    def alpha(self, names: Iterable[str]) -> float | None:
        """alpha for a module, by its pattern or for all."""
        return self.number(names, "alpha_pattern", "lora_alpha", "alpha")

    def rank(self, names: Iterable[str]) -> float | None:
        """The configured rank for a module, by its pattern or for all."""
        return self.number(names, "rank_pattern", "r")

    @property
    def rank_stabilised(self) -> bool:
        return self.table.get("use_rslora") is True

    def number(self, names: Iterable[str], pattern_key: str, *keys: str) -> float | None:
        """The number of the first pattern that ends a name of the module, as PEFT matches them, or of the first key."""
        patterns = self.table.get(pattern_key)
        if isinstance(patterns, dict):
            for pattern, value in patterns.items():
                if any(match_peft_pattern(name, pattern) for name in names):
                    return to_finite_number(value)
        return next((n for n in (to_finite_number(self.table.get(key)) for key in keys) if n is not None), None)


def match_peft_pattern(name: str, pattern: str) -> bool:
    """Whether a pattern of PEFT, a regular expression for the end of a name, means this module."""
    try:
        return re.match(rf"(.*\.)?({pattern})$", name) is not None
    except re.error:
        return name == pattern or name.endswith(f".{pattern}")


def to_finite_number(value: object) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def read_peft_configs(path: Path, metadata: Mapping[str, str]) -> tuple[dict[str, PeftConfig], list[Finding]]:
    """The PEFT configurations of an adapter file by component ("" for any), and what could not be read.

    The metadata's table keeps them flat, each key behind its component's name.
    """
    table, findings = parse_metadata_table(metadata, DIFFUSERS_METADATA_KEY)
    found = list(findings)
    if table is not None:
        tables: dict[str, dict[str, Any]] = {}
        for key, value in table.items():
            component, dot, rest = key.rpartition(".")
            tables.setdefault(component if dot else "", {})[rest] = value
        return {
            name: PeftConfig(values, f"metadata {DIFFUSERS_METADATA_KEY}") for name, values in tables.items()
        }, found
    beside = path.parent / PEFT_CONFIG_FILE_NAME
    if beside.is_file():
        try:
            side = json.loads(beside.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            why = f"{PEFT_CONFIG_FILE_NAME} beside the file cannot be read: {error}"
            found.append(Finding(Level.WARNING, "METADATA-UNREADABLE", str(beside), why, {}, "It is not relied on."))
            side = None
        if isinstance(side, dict) and "peft_type" in side:
            return {"": PeftConfig(side, PEFT_CONFIG_FILE_NAME)}, found
    return {}, found


@dataclass(frozen=True)
class ScaledAdapter:
    """An adapter with its scale, the place that stated it ("" for none), and why a tensor alpha had no part in it."""

    adapter: SiteAdapter
    source: str
    unused: str = ""


def resolve_adapter_scale(
    adapter: SiteAdapter,
    tensor: float | None,
    config: PeftConfig | None,
    names: Iterable[str],
    answers: AmbiguityOptions,
) -> ScaledAdapter:
    """The adapter with alpha as its tensor or its configuration states it; `tensor` is the former.

    Raises AdapterError where the two disagree, and for an alpha that cannot be meant.
    """
    algorithm, names = find_algorithm(adapter.algorithm), list(names)
    stated = config.alpha(names) if config is not None else None
    if config is not None and adapter.algorithm == LoKr.name and algorithm.rank(adapter) is None:
        rank = config.rank(names)
        if rank is not None and stated is not None:  # PEFT divides by it even where both factors are full
            adapter = replace(adapter, options={**adapter.options, "rank": rank})
    rank = algorithm.rank(adapter)
    if rank is None and adapter.algorithm == LoKr.name:
        usable = tensor is not None and math.isfinite(tensor) and tensor > 0
        kept = replace(adapter, alpha=tensor) if usable else adapter  # LyCORIS cannot load a file without it
        return ScaledAdapter(kept, "", "two full factors have no rank to divide it by")
    if rank is None:
        return ScaledAdapter(adapter, "", "it has no scale")
    by_config = config is not None and stated is not None
    configured = replace(adapter, alpha=stated, rank_stabilised=config.rank_stabilised if config else False)
    if tensor is None:
        return ScaledAdapter(configured, config.source) if by_config and config else ScaledAdapter(adapter, "")
    usable = replace(adapter, alpha=interpret_stored_alpha(tensor, rank, answers))
    if by_config and config:
        one, other = algorithm.scale(usable), algorithm.scale(configured)
        if abs(one - other) > _SCALE_TOLERANCE * max(abs(one), abs(other)):
            raise AdapterError(
                f"two scales are stated: {one:.6g} by the alpha tensor ({tensor:.6g}), {other:.6g} by {config.source} "
                f"({stated:.6g}{', rank-stabilised' if config.rank_stabilised else ''})",
                code="ADAPTER-SCALE-CONFLICT",
                evidence={"alpha tensor": tensor, config.source: stated, "rank": rank, "scales": [one, other]},
                remedy="Remove the one that is wrong: the tensors' alpha, or the configuration.",
            )
    return ScaledAdapter(usable, "alpha tensors")


def interpret_stored_alpha(alpha: float, rank: int, answers: AmbiguityOptions) -> float:
    """The alpha that a stored one means; raises AdapterError where nothing sensible, or two things, can be meant."""
    if alpha == 0 and answers.zero_alpha is not None:
        return float(rank) if answers.zero_alpha == "rank" else 0.0
    if math.isfinite(alpha) and alpha > 0:
        return alpha
    if alpha == 0:
        raise AdapterError(
            "alpha is 0, which programs read in two ways: LyCORIS and sd-scripts as the rank (scale 1), diffusers as "
            "nothing at all (scale 0)",
            code="ADAPTER-ALPHA",
            evidence={"alpha": alpha, "rank": rank},
            remedy="Say which is meant: --zero-alpha rank, or --zero-alpha zero.",
        )
    why = "negative, which turns the adapter's effect around" if alpha < 0 and math.isfinite(alpha) else "not a number"
    if math.isinf(alpha):
        why = "infinite: it overflowed when it was saved in half precision"
    raise AdapterError(
        f"alpha is {alpha:g}: {why}",
        code="ADAPTER-ALPHA",
        evidence={"alpha": str(alpha), "rank": rank},
        remedy="Export the adapter again, with alpha in fp32; or set alpha right in the file.",
    )


def note_scales(
    sources: Counter[str], unstated: Iterable[str], metadata: Mapping[str, str], producer: str
) -> list[Finding]:
    """Which places stated the scales of how many modules, and what is assumed where none did.

    `unstated` are the dialects of the modules without a scale; `producer` is who is known to train with alpha = rank.
    """
    found: list[Finding] = []
    stated = {source: count for source, count in sources.items() if source}
    if stated:
        message = "scales are stated by " + ", ".join(f"{source} ({count})" for source, count in stated.items())
        found.append(Finding(Level.NOTE, "ADAPTER-SCALE-SOURCE", "", message, dict(stated)))
    missing = sources.get("", 0)
    if not missing:
        return found
    evidence: dict[str, object] = {"modules": missing, **compute_candidate_scale(metadata, "ss_network_alpha")}
    peft = bool(set(unstated) & {"peft", "genmo"})
    if peft and not producer:
        message = "scale unknown: 1 is assumed, because PEFT keeps alpha outside of the tensors and no file states it"
        remedy = "Put adapter_config.json beside the file, or say what alpha / rank is: --scale 1 where they are equal."
        found.append(Finding(Level.WARNING, SCALE_UNKNOWN_CODE, "", message, evidence, remedy))
    else:
        why = f"{producer} trains with alpha = rank" if producer else "every program reads its absence so"
        message = f"alpha is absent from {missing} modules: scale 1, because {why}"
        found.append(Finding(Level.NOTE, "ADAPTER-NO-ALPHA", "", message, evidence))
    return found


def compute_candidate_scale(metadata: Mapping[str, str], alpha: str | float) -> dict[str, object]:
    """The scale that the metadata's dimension would make of an alpha, given or named; {} without either."""
    number = parse_metadata_number(metadata, alpha)[0] if isinstance(alpha, str) else alpha
    dimension = parse_metadata_number(metadata, "ss_network_dim")[0]
    if number is None or not dimension or not math.isfinite(number):
        return {}
    return {"alpha": number, "ss_network_dim": dimension, "candidate scale": number / dimension}


@dataclass(frozen=True)
class UndividedLora:
    """A LoRA as it stands in the file, before a fused weight is divided."""

    module: str
    landing: SiteTarget
    adapter: SiteAdapter

    @property
    def rank(self) -> int:
        return self.adapter.tensors["down"].shape[0]

    @property
    def sites(self) -> list[str]:
        return [f"{self.landing.component}.{site}" for site in self.landing.sites]


def note_split_training(wholes: list[UndividedLora], notes: FindingCollector) -> dict[str, int]:
    """Warn of LoRA trained as n parts, and saved as one of n times the rank that kept the parts' alpha: {site: n}.

    Every program then divides by a rank n times too large. Known by a block-diagonal `up` whose rank is n times the
    other modules', at the same alpha. Source: kohya-ss/sd-scripts issue 2204.
    """
    found: dict[str, int] = {}
    usual = Counter((whole.rank, whole.adapter.alpha) for whole in wholes).most_common()
    for whole in wholes:
        for (rank, alpha), _ in usual:
            count = whole.rank // rank
            if alpha is not None and count > 1 and whole.rank == count * rank and whole.adapter.alpha == alpha:
                if not whole.adapter.rank_stabilised and is_block_diagonal(whole, count):
                    message = (
                        f"its rank is {count} times {rank} because {count} parts were trained apart, "
                        f"but alpha is that of one part: it acts at 1/{count} of its strength"
                    )
                    remedy = (
                        f"Multiply alpha by {count} at these modules ({alpha:g} to {alpha * count:g}): "
                        "finitune convert FILE --to kohya --fix-split-scale"
                    )
                    evidence = {"rank": whole.rank, "usual rank": rank, "alpha": alpha, "right alpha": alpha * count}
                    notes.add(Level.WARNING, "ADAPTER-SPLIT-SCALE", whole.module, message, evidence, remedy)
                    found |= dict.fromkeys(whole.sites, count)
                break
    return found


def is_block_diagonal(whole: UndividedLora, count: int) -> bool:
    """Whether `up` is `count` blocks along its diagonal and zero beside them, each block having something in it."""
    up = whole.adapter.tensors["up"].flatten(1).float()
    rank, inputs = up.shape[1] // count, whole.adapter.tensors["down"].shape[1]
    if whole.landing.division == "by-input" and len(whole.landing.sites) == count:
        sizes = [inputs] * (count - 1) + [up.shape[0] - inputs * (count - 1)]
    else:
        sizes = [up.shape[0] // count] * count
    if sum(sizes) != up.shape[0] or min(sizes) <= 0:
        return False
    blocks = [block.split(rank, dim=1)[n] for n, block in enumerate(up.split(sizes))]
    within = [int(torch.count_nonzero(block)) for block in blocks]
    return all(within) and int(torch.count_nonzero(up)) == sum(within)
