"""Where an adapter's scale is stated: in its own tensors, in the metadata, in a JSON beside the file, or nowhere.

Tensors are believed first. What two places state must agree; where it does not, neither is taken. A missing alpha
means scale 1 (alpha = rank) and never alpha = 1. Sources: kohya's and LyCORIS's files keep alpha beside the factors;
diffusers keeps PEFT's configurations in `lora_adapter_metadata`; PEFT keeps one in `adapter_config.json`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finitune.adapters import find_algorithm
from finitune.adapters.core import SiteAdapter
from finitune.errors import AdapterError
from finitune.namings.core import PEFT_CONFIG_FILE_NAME, AmbiguityOptions
from finitune.namings.metadata import DIFFUSERS_METADATA_KEY, parse_metadata_table
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
        """Whether alpha is divided by the root of the rank."""
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
    if config is not None and adapter.algorithm == "lokr" and algorithm.rank(adapter) is None:
        rank = config.rank(names)
        if rank is not None and stated is not None:  # PEFT divides by it even where both factors are full
            adapter = replace(adapter, options={**adapter.options, "rank": rank})
    rank = algorithm.rank(adapter)
    if rank is None and adapter.algorithm == "lokr":
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
