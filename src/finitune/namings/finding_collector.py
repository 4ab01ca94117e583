"""Findings about an adapter file: said once, however many modules they hold for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from finitune.adapters.core import SiteAdapter
from finitune.errors import FinituneError
from finitune.namings.core import SiteTarget
from finitune.namings.metadata import parse_metadata_number
from finitune.report import Finding, Level

SCALE_UNKNOWN_CODE = "ADAPTER-SCALE-UNKNOWN"
_MAX_MODULES_NAMED = 3
"""How many modules a finding names."""


@dataclass
class FindingCollector:
    """Findings with the modules that each holds for."""

    alike: dict[tuple[Level, str, str], tuple[Finding, list[str]]] = field(default_factory=dict)

    def add(
        self, level: Level, code: str, module: str, message: str, evidence: Mapping[str, object], remedy: str = ""
    ) -> None:
        """Note a finding about a module; the evidence is that of the first of its kind."""
        finding = Finding(level, code, module, message, dict(evidence), remedy)
        self.alike.setdefault((level, code, message), (finding, []))[1].append(module)

    def fail(self, module: str, error: FinituneError) -> None:
        """Note the error that a module ended with."""
        self.add(Level.ERROR, error.code, module, error.message, error.evidence, error.remedy)

    def findings(self) -> list[Finding]:
        """All findings, each with how many modules it holds for and the first of them."""
        found: list[Finding] = []
        for finding, modules in self.alike.values():
            evidence = {**finding.evidence, "modules": len(modules), "first": modules[:_MAX_MODULES_NAMED]}
            found.append(
                Finding(finding.level, finding.code, finding.subject, finding.message, evidence, finding.remedy)
            )
        return found


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
        """The sites that its rows are, with their component."""
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
