"""What a state belongs to, and whether a run may go on from it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from finitune.errors import AdapterError, FinituneError, UsageError
from finitune.report import Finding, Level, to_json_value

_ManifestFacts = Mapping[str, object]

_WEIGHTS_ONLY_REMEDY = (
    "Go on from the weights alone: resume = 'never', and network_weights = the adapter file beside the state. "
    "Or put the settings back."
)

_HARMLESS_OPTION_PREFIXES = (
    "saving.",
    "preview.",
    "validation.",
    "logging.",
    "guard.",
    "training.max_train_",
    "training.cache_dir",
)
"""Options whose change leaves the next step what it would have been; a longer run may bend the schedule, though."""


@dataclass(frozen=True)
class TrainingManifest:
    """What decides whether a state fits: the trainable tensors in their order, the sites, the optimiser, the data.

    `shapes`: by name, in the optimiser's order. `sites`: facts by site, such as {"rank": 16, "alpha": 16.0}.
    `optimizer`: library and class; `optimizer_args`: its arguments. `config`: every option by dotted name.
    `dataset`: a digest of its pictures and captions.
    """

    algorithm: str
    shapes: Mapping[str, tuple[int, ...]]
    optimizer: str
    optimizer_args: _ManifestFacts = field(default_factory=dict)
    sites: Mapping[str, _ManifestFacts] = field(default_factory=dict)
    config: _ManifestFacts = field(default_factory=dict)
    dataset: str = ""

    def as_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(to_json_value(asdict(self)), default=str))

    @classmethod
    def from_json(cls, form: Mapping[str, Any]) -> TrainingManifest:
        """The manifest that was written. Raises TypeError for another form."""
        shapes = {name: tuple(shape) for name, shape in form["shapes"].items()}
        return cls(**{**form, "shapes": shapes})

    @property
    def comparable(self) -> TrainingManifest:
        """The manifest as it is after a round through JSON."""
        return TrainingManifest.from_json(self.as_json())


def require_same_manifest(saved: TrainingManifest, now: TrainingManifest, subject: str) -> None:
    """Raise AdapterError or UsageError (STATE-DIFFERS), each difference named, where a state is of another training."""
    saved, now = saved.comparable, now.comparable
    adapter = list(list_adapter_differences(saved, now))
    optimizer = list(list_optimizer_differences(saved, now))
    if not adapter and not optimizer:
        return
    kind: type[FinituneError] = AdapterError if adapter else UsageError
    raise kind(
        f"The state is of another {'adapter' if adapter else 'optimiser'}: {'; '.join(adapter + optimizer)}.",
        code="STATE-DIFFERS",
        subject=subject,
        evidence={"differences": adapter + optimizer},
        remedy=_WEIGHTS_ONLY_REMEDY,
    )


def list_adapter_differences(saved: TrainingManifest, now: TrainingManifest) -> Iterable[str]:
    """How two adapters differ; first what explains the rest."""
    if saved.algorithm != now.algorithm:
        yield f"algorithm {saved.algorithm} in the state, {now.algorithm} now"
        return
    yield from list_name_differences("site", saved.sites, now.sites)
    facts = [
        (f"{fact} {saved.sites[site].get(fact)} in the state, {now.sites[site].get(fact)} now", site)
        for site in saved.sites
        if site in now.sites
        for fact in {**saved.sites[site], **now.sites[site]}
        if saved.sites[site].get(fact) != now.sites[site].get(fact)
    ]
    yield from group_equal_differences(facts)
    if facts:
        return
    yield from list_name_differences("tensor", saved.shapes, now.shapes)
    both = [name for name in saved.shapes if name in now.shapes]
    yield from group_equal_differences(
        (f"shape {list(saved.shapes[name])} in the state, {list(now.shapes[name])} now", name)
        for name in both
        if saved.shapes[name] != now.shapes[name]
    )
    order = [name for name in now.shapes if name in saved.shapes]
    moved = [name for name, other in zip(both, order, strict=True) if name != other]
    if moved:
        yield f"{len(moved)} tensors stand in another order, the first is {moved[0]}"


def list_optimizer_differences(saved: TrainingManifest, now: TrainingManifest) -> Iterable[str]:
    if saved.optimizer != now.optimizer:
        yield f"optimiser {saved.optimizer} in the state, {now.optimizer} now"
        return
    for name, was, becomes in iterate_changed_values(saved.optimizer_args, now.optimizer_args):
        yield f"{name} of {now.optimizer} was {was}, is {becomes}"


def list_name_differences(what: str, saved: Iterable[str], now: Iterable[str]) -> Iterable[str]:
    """How many names are on one side only."""
    old, new = list(saved), list(now)
    for names, where in (
        ([name for name in old if name not in set(new)], "in the state alone"),
        ([name for name in new if name not in set(old)], "not in the state"),
    ):
        if names:
            yield f"{len(names)} {what}{'s' * (len(names) > 1)} {where}, such as {names[0]}"


def group_equal_differences(differences: Iterable[tuple[str, str]]) -> Iterable[str]:
    """Equal differences in one line, with the number of places and the first of them."""
    places: dict[str, list[str]] = {}
    for difference, place in differences:
        places.setdefault(difference, []).append(place)
    for difference, where in places.items():
        yield (
            f"{difference} ({len(where)} places, such as {where[0]})"
            if len(where) > 1
            else f"{difference} ({where[0]})"
        )


def iterate_changed_values(saved: _ManifestFacts, now: _ManifestFacts) -> Iterable[tuple[str, object, object]]:
    """Names whose values differ: (name, then, now); 'absent' where there was none."""
    for name in {**saved, **now}:
        was, becomes = saved.get(name, "absent"), now.get(name, "absent")
        if was != becomes:
            yield name, was, becomes


def find_manifest_changes(saved: TrainingManifest, now: TrainingManifest, subject: str) -> list[Finding]:
    """Findings about what may differ between a state and the run that goes on from it: data, and options."""
    saved, now = saved.comparable, now.comparable
    findings: list[Finding] = []
    if saved.dataset != now.dataset:
        findings.append(
            Finding(
                Level.WARNING,
                "STATE-OTHER-DATA",
                subject,
                "The dataset is not the one that the state was trained on; its order begins anew in this epoch.",
                {"saved": saved.dataset, "now": now.dataset},
                "Put the pictures and captions back if the run should end as it would have.",
            )
        )
    for name, was, becomes in iterate_changed_values(saved.config, now.config):
        harmless = name.startswith(_HARMLESS_OPTION_PREFIXES)
        findings.append(
            Finding(
                Level.NOTE if harmless else Level.WARNING,
                "STATE-NEW-SETTING" if harmless else "STATE-OTHER-SETTING",
                name,
                f"{name} was {was} when the state was saved, and is {becomes} from here on.",
                {"saved": was, "now": becomes},
            )
        )
    return findings
