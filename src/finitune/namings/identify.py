"""What an adapter file is: the model family that it was made for, and how it is spelled; by evidence, not by belief.

A family is known by the share of the file's modules that its tables have, then by hallmarks: widths of weights and
numbers of blocks that tell relatives with equal names apart. What the metadata says decides only where these do not;
after it, that adapters train whatever is alike in a model, so that the family is likelier of which the file has more.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from finitune.errors import AdapterError
from finitune.files.keymap import match_template
from finitune.models.sites import AdapterSites, ComponentSites
from finitune.models.spec import ModelSpec
from finitune.namings.keys import TensorGroup, infer_linear_inputs
from finitune.namings.metadata import parse_metadata_table
from finitune.namings.resolve import ResolvedModule, Resolver
from finitune.namings.spellings import SPELLINGS, WRAPPER_PREFIXES, AdapterSpelling
from finitune.report import Finding, Level

_GENERIC_COMPONENTS = (
    ComponentSites("unet", ("unet",), ()),
    ComponentSites("transformer", ("unet",), ()),
    *(ComponentSites(f"text_encoder{n}", ("te", "te1", "te2", "te3"), (), comfy="clip_l") for n in ("", "_2", "_3")),
)
"""Components as most families have them, to find a prefix where no table knows the modules behind it."""


@dataclass(frozen=True)
class ParsedName:
    """A module's name taken apart: the prefix, the wrappers stripped, and what the rest was found to be."""

    prefix: str
    name: str
    stripped: tuple[str, ...] = ()
    found: ResolvedModule | None = None
    container: bool = False


class NameParser:
    """Takes module names apart, for the modules of one resolver."""

    def __init__(self, resolver: Resolver):
        self.resolver = resolver
        self.prefixes: dict[str, set[str]] = {}
        for component in resolver.components.values():
            for spelling in SPELLINGS:
                for text in spelling.texts(component):
                    self.prefixes.setdefault(text, set()).add(component.name)

    def see(self, module: str) -> ParsedName:
        """The reading of a name that strips least and is a module; without one, the farthest that was tried.

        So a real module that is called like a wrapper or a prefix is never stripped.
        """
        queue: deque[ParsedName] = deque([ParsedName("", module)])
        seen: set[tuple[str, str]] = set()
        sight, container = queue[0], False
        while queue:
            sight = queue.popleft()
            if (sight.prefix, sight.name) in seen:
                continue
            seen.add((sight.prefix, sight.name))
            components, flat = self.prefixes.get(sight.prefix), sight.prefix.endswith("_")
            found = self.resolver.find(sight.name, components, flat=flat)
            if found is not None:
                return ParsedName(sight.prefix, sight.name, sight.stripped, found)
            container = container or self.resolver.is_container(sight.name, components, flat=flat)
            queue.extend(self.list_simpler_names(sight))
        return ParsedName(sight.prefix, sight.name, sight.stripped, container=container)

    def list_simpler_names(self, sight: ParsedName) -> Iterable[ParsedName]:
        """The name with one thing less: a prefix, a wrapper, or signs left behind at the end."""
        if not sight.prefix:
            for text in sorted(self.prefixes, key=len, reverse=True):
                if text and sight.name.startswith(text):
                    yield ParsedName(text, sight.name[len(text) :], sight.stripped)
        for wrapper in WRAPPER_PREFIXES:
            text = wrapper.replace(".", "_") if sight.prefix.endswith("_") else wrapper
            if sight.name.startswith(text):
                yield ParsedName(sight.prefix, sight.name[len(text) :], (*sight.stripped, wrapper))
        bare = sight.name.rstrip("_.")
        if bare and bare != sight.name:
            yield ParsedName(sight.prefix, bare, (*sight.stripped, sight.name[len(bare) :]))


@dataclass(frozen=True)
class FamilyMatch:
    """How well one family explains a file: what each module was found to be, and the widths that speak for or against.

    `beyond` counts the blocks behind the family's last one; `named` is whether the metadata names the family.
    """

    model: ModelSpec | None
    sights: Mapping[str, ParsedName]
    agreeing: tuple[str, ...] = ()
    contradicting: tuple[str, ...] = ()
    beyond: int = 0
    named: bool = False

    @cached_property
    def resolved(self) -> int:
        """How many module names are modules of the family."""
        return sum(sight.found is not None for sight in self.sights.values())

    @cached_property
    def coverage(self) -> float:
        """The share of the family's names, in the components that the file touches, that the file has."""
        used = {sight.found.entry.name: sight.found.entry for sight in self.sights.values() if sight.found is not None}
        if self.model is None or not used:
            return 0.0
        touched = {entry.component.name: entry for entry in used.values()}
        return len(used) / sum(len(entry.component.places or entry.component.sites) for entry in touched.values())

    @property
    def strength(self) -> tuple[int, int, int, int]:
        """What decides between families, the weightiest first."""
        return self.resolved, -len(self.contradicting), -self.beyond, len(self.agreeing)

    @property
    def is_certain(self) -> bool:
        """Whether every module is the family's, widths say so too, and nothing speaks against it."""
        whole = self.resolved == len(self.sights)
        return whole and bool(self.agreeing) and not self.contradicting and not self.beyond


def match_family(model: ModelSpec, groups: Sequence[TensorGroup], metadata: Mapping[str, str]) -> FamilyMatch:
    eyes = NameParser(Resolver.of_model(model))
    sights = {group.module: eyes.see(group.module) for group in groups}
    agreeing: list[str] = []
    contradicting: list[str] = []
    beyond: set[str] = set()
    for group in groups:
        found = sights[group.module].found
        if found is None:
            continue
        beyond |= find_blocks_beyond_depth(found, model.adapters)
        said, wanted = infer_linear_inputs(group), find_hallmark_inputs(found, model.adapters)
        if said is not None and wanted is not None:
            text = f"{found.landing.sites[0]} has {said} inputs, {wanted} in {model.title}"
            (agreeing if said == wanted else contradicting).append(text)
    named = find_stated_family(metadata, [model]) is not None
    return FamilyMatch(model, sights, tuple(agreeing), tuple(contradicting), len(beyond), named)


def match_model_modules(resolver: Resolver, groups: Sequence[TensorGroup]) -> FamilyMatch:
    """What the modules of a file are among those of a user's own model."""
    eyes = NameParser(resolver)
    return FamilyMatch(None, {group.module: eyes.see(group.module) for group in groups})


def identify_adapter_family(
    groups: Sequence[TensorGroup],
    metadata: Mapping[str, str],
    models: Sequence[ModelSpec],
    model: ModelSpec | None = None,
) -> tuple[FamilyMatch, list[Finding]]:
    """The case for the family that explains a file best, or for the `model` that was named, and what speaks against.

    A named model of a known family may have modules of its own beside the family's: it stands for the family then. Of
    one of no family nothing is known but its modules, which are all that counts.
    Raises AdapterError (ADAPTER-OTHER-FAMILY) where another family explains the file and the named one does not.
    """
    known = list({one.name: one for one in (*models, *([model] if model is not None else ()))}.values())
    if model is not None and (named := match_family(model, groups, metadata)).is_certain:
        return named, check_metadata_family(named, metadata, known)
    cases = [match_family(one, groups, metadata) for one in known]
    best = max(cases, key=lambda case: (case.strength, case.named, case.coverage))
    findings: list[Finding] = []
    if model is not None:
        own = next(case for case in cases if case.model is not None and case.model.name == model.name)
        other = best.strength > own.strength and not best.contradicting
        if other and (best.agreeing or best.resolved > own.resolved) and model.name in {one.name for one in models}:
            raise make_other_family_error(own, best)
        return own, findings + check_metadata_family(own, metadata, known)
    if best.resolved == 0:
        return FamilyMatch(None, best.sights), findings
    rivals = [case.model.title for case in cases if case.model and case.strength == best.strength and case is not best]
    if rivals and not best.named:
        message = f"it fits {get_match_title(best)} and {', '.join(rivals)} alike; it is read as of the first"
        findings.append(Finding(Level.NOTE, "ADAPTER-FAMILY-TIE", get_match_title(best), message, {"rivals": rivals}))
    if best.contradicting:
        message = f"it fits {get_match_title(best)} by its names, but not by its widths: {best.contradicting[0]}"
        evidence: dict[str, object] = {"modules": len(best.contradicting), "first": list(best.contradicting[:3])}
        findings.append(
            Finding(Level.WARNING, "ADAPTER-WIDTHS", get_match_title(best), message, evidence, "Name the model.")
        )
    return best, findings + check_metadata_family(best, metadata, known)


def check_metadata_family(case: FamilyMatch, metadata: Mapping[str, str], known: Sequence[ModelSpec]) -> list[Finding]:
    """A warning where the metadata names another family than that of the tensors."""
    said = find_stated_family(metadata, known)
    if said is None or case.model is None or said.name == case.model.name:
        return []
    message = f"the metadata says {said.title}, the tensors are of {case.model.title}: the tensors are believed"
    evidence = {"metadata": said.name, "tensors": case.model.name, "agreeing": list(case.agreeing[:3])}
    return [Finding(Level.WARNING, "ADAPTER-FAMILY-METADATA", said.name, message, evidence)]


def get_match_title(case: FamilyMatch) -> str:
    return case.model.title if case.model is not None else "the model"


def make_other_family_error(own: FamilyMatch, best: FamilyMatch) -> AdapterError:
    return AdapterError(
        f"this is an adapter of {get_match_title(best)}; the model is {get_match_title(own)}",
        code="ADAPTER-OTHER-FAMILY",
        subject=get_match_title(best),
        evidence={
            "modules": len(own.sights),
            f"known to {get_match_title(best)}": best.resolved,
            f"known to {get_match_title(own)}": own.resolved,
            "widths": list((best.agreeing + own.contradicting)[:4]),
        },
        remedy=f"Use it with {get_match_title(best)}, or take an adapter that was made for {get_match_title(own)}.",
    )


def find_hallmark_inputs(found: ResolvedModule, sites: AdapterSites) -> int | None:
    for hallmark in sites.hallmarks:
        if (
            hallmark.component == found.landing.component
            and match_template(found.landing.sites[0], hallmark.site) is not None
        ):
            return hallmark.inputs
    return None


def find_blocks_beyond_depth(found: ResolvedModule, sites: AdapterSites) -> set[str]:
    """The blocks that a module lies in, of which the family has fewer."""
    beyond: set[str] = set()
    for template, depth in sites.depths.items():
        block = ".".join(found.landing.sites[0].split(".")[: template.count(".") + 1])
        numbers = match_template(block, template)
        if numbers and any(int(number) >= depth for number in numbers.values()):
            beyond.add(block)
    return beyond


def find_stated_family(metadata: Mapping[str, str], models: Iterable[ModelSpec]) -> ModelSpec | None:
    version = metadata.get("ss_base_model_version", "")
    architecture = metadata.get("modelspec.architecture", "").partition("/")[0]
    for model in models:
        sites = model.adapters
        if version in sites.base_model_versions or (
            architecture and architecture == sites.architecture.partition("/")[0]
        ):
            return model
    return None


def detect_spelling(
    case: FamilyMatch, groups: Sequence[TensorGroup], metadata: Mapping[str, str]
) -> tuple[AdapterSpelling | None, int]:
    """The spelling that most modules of a file are in, and how many are; the first of SPELLINGS among equals."""
    votes: Counter[str] = Counter()
    for group in groups:
        sight = case.sights[group.module]
        votes.update(spelling.name for spelling in SPELLINGS if is_group_in_spelling(group, sight, spelling, metadata))
    best = max(SPELLINGS, key=lambda spelling: votes[spelling.name])
    if best.name == "comfy" and best.name in votes and read_producer_software(metadata) == "ai-toolkit":
        best = next(spelling for spelling in SPELLINGS if spelling.software == "ai-toolkit")
    return (best, votes[best.name]) if votes[best.name] else (None, 0)


def is_group_in_spelling(
    group: TensorGroup, sight: ParsedName, spelling: AdapterSpelling, metadata: Mapping[str, str]
) -> bool:
    """Whether a module of a file is written as a spelling writes."""
    if spelling.software and spelling.software != read_producer_software(metadata):
        return False
    if not all(set(member.suffix.dialects) & set(spelling.dialects) for member in group.members.values()):
        return False
    if sight.found is None:
        return any(sight.prefix in spelling.texts(component) for component in _GENERIC_COMPONENTS)
    entry = sight.found.entry
    if sight.prefix not in spelling.texts(entry.component):
        return False
    return spelling.names == "kohya" or entry.common or entry.native == (spelling.names == "original")


def read_producer_software(metadata: Mapping[str, str]) -> str:
    """The program that says in the metadata that it wrote the file; '' where none does."""
    table, _ = parse_metadata_table(metadata, "software")
    return str((table or {}).get("name", ""))
