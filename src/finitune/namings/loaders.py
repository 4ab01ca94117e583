"""Which programs load an adapter file as it was meant, and what the others make of it.

The algorithms say how programs treat them, the spellings which programs read them, and `loaders.toml` what programs do
with names, models, magnitudes and scales. What none of them knows of a program is "not known", and never "yes".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch

from finitune.adapters import ADAPTER_FORMS, AdapterAlgorithm, find_algorithm, find_form
from finitune.adapters.core import AdapterProgram, LoadVerdict, SiteAdapter
from finitune.namings.core import ParsedAdapter
from finitune.namings.spellings import SPELLINGS
from finitune.namings.tensor_reader import to_meta_adapter
from finitune.package_data import read_package_toml
from finitune.rules.conditions import Condition, parse_condition

ADAPTER_LOADERS: tuple[AdapterProgram, ...] = get_args(AdapterProgram)
_LOADER_FACTS = Path(__file__).with_name("loaders.toml")


@dataclass(frozen=True)
class LoaderResult:
    """What one program makes of a file, and why."""

    loader: str
    verdict: LoadVerdict
    reason: str


@dataclass(frozen=True)
class LoaderRule:
    """One known fact: these programs give this verdict on files to which `applies` holds."""

    programs: tuple[str, ...]
    applies: Condition
    verdict: LoadVerdict
    text: str


@dataclass(frozen=True)
class AdapterFileTraits:
    """What of a file decides how programs load it: the facts that rules are asked about."""

    spelling: str
    family: str
    forms: Mapping[str, tuple[SiteAdapter, ...]]
    """The adapters of each form in the file; a T-LoRA, which is read as a LoRA, is one."""
    cores: bool
    components: frozenset[str]
    sides: frozenset[str]
    """The sides of DoRA magnitudes."""
    scales: frozenset[float]
    alphas: frozenset[float]
    half: bool
    """Whether factors are stored in fp16 or bf16."""
    bundled: bool
    """Whether learned token embeddings lie in the file."""

    @classmethod
    def of(cls, reading: ParsedAdapter) -> AdapterFileTraits:
        sites = reading.adapter.sites.values()
        names = dict.fromkeys(site.algorithm for site in sites)
        roles = {line.role for line in reading.ledger}
        read_as_others = (form for form in ADAPTER_FORMS if not isinstance(form, AdapterAlgorithm))
        baked = [form.name for form in read_as_others if roles & {suffix.role for suffix in form.suffixes}]
        scaled = (site for site in sites if find_algorithm(site.algorithm).rank(to_meta_adapter(site)) is not None)
        dtypes = {tensor.dtype for site in scaled for tensor in site.tensors.values()}
        return cls(
            spelling=reading.spelling,
            family="" if reading.family is None else reading.family.name,
            forms={
                **{name: tuple(site for site in sites if site.algorithm == name) for name in names},
                **dict.fromkeys(baked, ()),
            },
            cores=any(set(find_algorithm(s.algorithm).roles_where(core=True)) & s.tensors.keys() for s in sites),
            components=frozenset(name.partition(".")[0] for name in reading.adapter),
            sides=frozenset(site.magnitude.side for site in sites if site.magnitude is not None),
            scales=frozenset(find_algorithm(site.algorithm).scale(site) for site in sites),
            alphas=frozenset(site.alpha for site in sites if site.alpha is not None),
            half=bool(dtypes & {torch.float16, torch.bfloat16}),
            bundled=bool(reading.adapter.embeddings),
        )

    @property
    def rounds_when_folded(self) -> bool:
        """Whether folding a scale into the stored factors rounds them again: no power of two, in half precision."""
        return self.half and any(abs(math.frexp(scale)[0]) not in (0.0, 0.5) for scale in self.scales)

    @property
    def scale_in_metadata(self) -> bool:
        """Whether the scale is not 1 and no tensor says so."""
        kept = {spelling.name: spelling.alpha for spelling in SPELLINGS}.get(self.spelling)
        return kept == "metadata" and self.scales != {1.0}


@cache
def read_loader_rules(stage: str) -> tuple[LoaderRule, ...]:
    """The rules of `loaders.toml` about "names" or "contents", in their order."""
    return tuple(
        LoaderRule(tuple(one["programs"]), parse_condition(one["when"], {}), LoadVerdict(one["verdict"]), one["text"])
        for one in read_package_toml(_LOADER_FACTS)[stage]
    )


def predict_all_loaders(reading: ParsedAdapter) -> list[LoaderResult]:
    """What each program makes of a file, as far as its naming, algorithms, magnitudes and scales decide it."""
    traits = AdapterFileTraits.of(reading)
    return [LoaderResult(loader, *predict_loader(loader, traits)) for loader in ADAPTER_LOADERS]


def predict_loader(loader: AdapterProgram, file: AdapterFileTraits) -> tuple[LoadVerdict, str]:
    """What stops all loading, then what draws something else, then what is not known, then what is worth a word."""
    said = list(iterate_verdicts(loader, file))
    bad = (one for one in said if one[0] in (LoadVerdict.NO, LoadVerdict.WRONG))
    unknown = (one for one in said if one[0] is LoadVerdict.UNKNOWN)
    return next(bad, None) or next(unknown, None) or next(iter(said), (LoadVerdict.YES, ""))


def iterate_verdicts(loader: AdapterProgram, file: AdapterFileTraits) -> Iterator[tuple[LoadVerdict, str]]:
    """All that is known to speak against a file, the weightiest first."""
    facts: Mapping[str, Any] = read_package_toml(_LOADER_FACTS)
    spelling = next((one for one in SPELLINGS if one.name == file.spelling), None)
    if spelling is None:
        yield LoadVerdict.UNKNOWN, "whether it reads this spelling was not tried"
    elif loader not in spelling.programs:
        target = next(one.name for one in SPELLINGS if loader in one.written_for)
        yield LoadVerdict.NO, f"it does not read this spelling: convert with --to {target}"
    yield from match_rules(loader, file, "names")
    if file.family in facts["runs_not"].get(loader, ()):
        yield LoadVerdict.NO, "it does not run this model"
    elif loader in facts["runs"] and file.family not in facts["runs"][loader]:
        yield LoadVerdict.UNKNOWN, "whether it runs this model was not tried"
    for name, adapters in file.forms.items():
        support = find_form(name).support(loader, adapters, file.family)
        if support.verdict is not LoadVerdict.YES:
            yield support.verdict, support.reason
    yield from match_rules(loader, file, "contents")


def match_rules(loader: str, file: AdapterFileTraits, stage: str) -> Iterator[tuple[LoadVerdict, str]]:
    for rule in read_loader_rules(stage):
        if loader in rule.programs and any(True for _ in rule.applies(file)):
            yield rule.verdict, rule.text
