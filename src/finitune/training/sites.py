"""Which modules get an adapter, of which rank and at which rate: chosen by patterns, each with its reason.

Patterns are regular expressions of whole names, as in sd-scripts; they are tried against the module's original name
("blocks.3.self_attn.q_proj") and against its site ("transformer_blocks.3.attn1.to_q").
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from finitune.adapters import find_algorithm
from finitune.adapters.core import Target
from finitune.adapters.layer import CONVOLUTION_TYPES
from finitune.config.schema import NetworkSection
from finitune.errors import UsageError, suggest_nearest_name
from finitune.models.spec import ModelSpec
from finitune.namings.resolve import Resolver
from finitune.report import Finding, Level, Table


@dataclass(frozen=True)
class SelectedSite:
    """A module that gets an adapter; `rate` None is the component's own; `reason` names the pattern that decided."""

    component: str
    module: str
    original: str
    shape: tuple[int, ...]
    rank: int
    alpha: float
    rate: float | None = None
    reason: str = ""

    @property
    def site(self) -> str:
        return f"{self.component}.{self.module}"

    @property
    def full_rank(self) -> int:
        """The largest rank that a change of the weight can have."""
        out, *inner = self.shape
        return min(out, math.prod(inner))

    def target(self, weight: nn.Parameter, network: NetworkSection) -> Target:
        names = find_algorithm(network.algorithm).options
        options = {name: getattr(network, name) for name in names if hasattr(network, name)}
        return Target(weight, self.rank, self.alpha, options)


@dataclass(frozen=True)
class SiteSelection:
    """The modules that get an adapter, and the products that do not, {site: why}."""

    chosen: tuple[SelectedSite, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    def of(self, component: str) -> dict[str, SelectedSite]:
        return {one.module: one for one in self.chosen if one.component == component}

    def table(self) -> Table:
        """The modules for a person, those that differ in a number alone together."""
        rows: dict[tuple[str, ...], int] = {}
        for one in self.chosen:
            shape = " x ".join(map(str, one.shape))
            row = (
                mask_module_numbers(one.site),
                mask_module_numbers(one.original),
                shape,
                str(one.rank),
                f"{one.alpha:g}",
                one.reason,
            )
            rows[row] = rows.get(row, 0) + 1
        columns = ("site", "original name", "weight", "rank", "alpha", "why", "modules")
        return Table("sites", columns, tuple((*row, str(count)) for row, count in rows.items()))


@dataclass(frozen=True)
class SitePattern:
    """A regular expression of the configuration, and where it stands there."""

    text: str
    place: str
    compiled: re.Pattern[str]

    def fits(self, *names: str) -> bool:
        return any(self.compiled.fullmatch(name) for name in names)


def choose_sites(roots: Mapping[str, nn.Module], family: ModelSpec, network: NetworkSection) -> SiteSelection:
    """The modules of `roots`, {component: module}, that get an adapter.

    Raises UsageError: PATTERN-UNREADABLE, SITES-NONE where no module is left.
    """
    patterns = {
        place: [compile_site_pattern(text, place) for text in getattr(network, place)]
        for place in ("only_patterns", "exclude_patterns", "include_patterns")
    }
    by_pattern = {
        place: [(compile_site_pattern(text, place), value) for text, value in getattr(network, place).items()]
        for place in ("network_reg_dims", "network_reg_alphas", "network_reg_lrs")
    }
    every = [pattern for group in patterns.values() for pattern in group]
    every += [pattern for group in by_pattern.values() for pattern, _ in group]
    idle = {pattern.place + pattern.text: pattern for pattern in every}
    chosen: list[SelectedSite] = []
    left_out: dict[str, str] = {}
    for component, module, layer, original in iterate_site_candidates(roots, family):
        names = (original, module)
        for pattern in list(idle.values()):
            if pattern.fits(*names):
                del idle[pattern.place + pattern.text]
        reason = find_exclusion_reason(names, family, patterns)
        if not reason and network.conv_dim == 0 and has_spatial_kernel(layer):
            reason = "conv_dim is 0"
        if reason:
            left_out[f"{component}.{module}"] = reason
            continue
        rank, alpha, why = choose_rank_and_alpha(layer, names, network, by_pattern)
        rate = find_first_pattern(by_pattern["network_reg_lrs"], names)
        shape = get_weight_shape(layer)
        chosen.append(SelectedSite(component, module, original, shape, rank, alpha, rate and rate[1], why))
    findings = tuple(make_idle_pattern_finding(pattern, chosen, left_out) for pattern in idle.values())
    if not chosen:
        raise make_no_sites_error(roots, left_out, findings)
    return SiteSelection(tuple(chosen), left_out, (*findings, *find_excessive_ranks(chosen, network)))


def iterate_site_candidates(
    roots: Mapping[str, nn.Module], family: ModelSpec
) -> Iterator[tuple[str, str, nn.Module, str]]:
    """(component, module name, layer, original name) of every Linear and convolution where trainers put adapters."""
    resolver = Resolver.of_model(family)
    for component, root in roots.items():
        within = re.compile(family.adapters.trained.get(component, ".*"))
        for name, layer in root.named_modules():
            if isinstance(layer, (nn.Linear, *CONVOLUTION_TYPES)) and within.fullmatch(name):
                yield component, name, layer, resolver.native_name(component, name) or name


def find_exclusion_reason(names: tuple[str, str], family: ModelSpec, patterns: Mapping[str, list[SitePattern]]) -> str:
    """Why a module gets none, '' where it gets one: only_patterns first, then exclusion, from which inclusion saves."""
    only = patterns["only_patterns"]
    if only:
        return "" if any(p.fits(*names) for p in only) else "not among only_patterns"
    if any(p.fits(*names) for p in patterns["include_patterns"]):
        return ""
    if family.adapters.untrained and re.fullmatch(family.adapters.untrained, names[0]):
        return f"left alone by default ({family.title})"
    found = next((p for p in patterns["exclude_patterns"] if p.fits(*names)), None)
    return f"exclude_patterns: {found.text}" if found else ""


def has_spatial_kernel(layer: nn.Module) -> bool:
    return any(side > 1 for side in get_weight_shape(layer)[2:])


def get_weight_shape(layer: nn.Module) -> tuple[int, ...]:
    weight: Any = layer.weight
    return tuple(weight.shape)


def choose_rank_and_alpha(
    layer: nn.Module,
    names: tuple[str, str],
    network: NetworkSection,
    by_pattern: Mapping[str, list[tuple[SitePattern, float]]],
) -> tuple[int, float, str]:
    """Rank, alpha and reason: by pattern, else by the kind of layer. Alpha 0 stands for the rank, as in sd-scripts."""
    kernel = has_spatial_kernel(layer)
    conv_dim, conv_alpha = network.conv_dim, network.conv_alpha
    rank = conv_dim if kernel and conv_dim else network.network_dim
    alpha = conv_alpha if kernel and conv_alpha is not None else network.network_alpha
    ranked, scaled = (
        find_first_pattern(by_pattern[name], names) for name in ("network_reg_dims", "network_reg_alphas")
    )
    reasons = [f"{pattern.place}: {pattern.text}" for pattern, _ in filter(None, (ranked, scaled))]
    if ranked:
        rank = int(ranked[1])
    if scaled:
        alpha = scaled[1]
    return rank, alpha or float(rank), "; ".join(reasons) or ("conv_dim" if kernel and conv_dim else "network_dim")


def find_first_pattern(
    patterns: list[tuple[SitePattern, float]], names: tuple[str, str]
) -> tuple[SitePattern, float] | None:
    return next(((pattern, value) for pattern, value in patterns if pattern.fits(*names)), None)


def compile_site_pattern(text: str, place: str) -> SitePattern:
    """A pattern; raises UsageError (PATTERN-UNREADABLE) for text that is no regular expression."""
    try:
        return SitePattern(text, place, re.compile(text))
    except re.error as error:
        raise UsageError(
            f"{place}: {text!r} is no regular expression: {error}",
            code="PATTERN-UNREADABLE",
            subject=f"network.{place}",
            evidence={"pattern": text, "at": error.pos},
            remedy=r"A dot stands for any sign, `.*` for any text; write `\.` for a dot itself.",
        ) from error


def make_idle_pattern_finding(
    pattern: SitePattern, chosen: Iterable[SelectedSite], left_out: Mapping[str, str]
) -> Finding:
    known = [*(one.original for one in chosen), *(site.partition(".")[2] for site in left_out)]
    return Finding(
        Level.ERROR,
        "PATTERN-MATCHES-NOTHING",
        f"network.{pattern.place}",
        f"{pattern.text!r} is the whole name of no module",
        {"pattern": pattern.text, "modules": len(known), "such as": known[:2]},
        "Patterns must fit a whole name, so that `.*` is often needed at either end."
        + suggest_nearest_name(pattern.text, known),
    )


def find_excessive_ranks(chosen: Iterable[SelectedSite], network: NetworkSection) -> Iterator[Finding]:
    """The finding that ranks are larger than any change of their weights could have; LoKr takes them to mean full."""
    takes_any = find_algorithm(network.algorithm).rank_means == "factors"
    above = [one for one in chosen if one.rank > one.full_rank] if takes_any else []
    if above:
        worst = max(above, key=lambda one: one.rank / one.full_rank)
        yield Finding(
            Level.WARNING,
            "NETWORK-RANK-ABOVE",
            "network.network_dim",
            f"the rank is above the smaller side of {len(above)} weights; at {worst.site} it is {worst.rank}, and no "
            f"change of this weight has a rank above {worst.full_rank}",
            {"modules": len(above), "rank": worst.rank, "full_rank": worst.full_rank, "site": worst.site},
            f"A rank of {min(one.full_rank for one in above)} says as much there with fewer numbers: network_dim, "
            "network_reg_dims for some modules; or algorithm = 'full'.",
        )


def make_no_sites_error(
    roots: Mapping[str, nn.Module], left_out: Mapping[str, str], findings: tuple[Finding, ...]
) -> UsageError:
    why = sorted(set(left_out.values()))
    return UsageError(
        f"no module of {', '.join(roots)} gets an adapter: {'; '.join(why) or 'there is none'}",
        code="SITES-NONE",
        subject="network",
        evidence={"modules": len(left_out), "idle_patterns": [f.evidence["pattern"] for f in findings]},
        remedy="See the names with `finitune train CONFIG --explain`, and loosen the patterns.",
    )


def mask_module_numbers(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
