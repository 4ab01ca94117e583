"""What a rule about a configuration is: when it holds, how bad that is, and what is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from finitune.config.datasets import ResolvedDataset, ResolvedSubset, Section, flattened
from finitune.config.schema import TrainConfig
from finitune.report import Finding, Level

ERROR, WARNING, NOTE = Level.ERROR, Level.WARNING, Level.NOTE
NO_EFFECT = "CONFIG-NO-EFFECT"
DEFAULT_STEPS = 1600
"""Optimiser steps where neither steps nor epochs are given."""
Holds = Callable[[TrainConfig], object]
"""Something false where all is well; where it is not, something true, or the numbers that the message names."""


@dataclass(frozen=True)
class Rule:
    """One line of the table. `message` and `remedy` may name the numbers that `when` gives, in braces."""

    level: Level
    code: str
    subject: str
    when: Holds
    message: str
    remedy: str = ""

    def finding(self, config: TrainConfig) -> Finding | None:
        """What there is to say of a configuration."""
        found = self.when(config)
        if not found:
            return None
        numbers = dict(found) if isinstance(found, Mapping) else {}
        message, remedy = (text.format(**numbers) if numbers else text for text in (self.message, self.remedy))
        return Finding(self.level, self.code, self.subject, message, numbers, remedy)


def idle(option: str, without: Holds, why: str, remedy: str = "") -> Rule:
    """The rule that an option is given and has no effect, because of what holds in `without`."""
    name = option.rpartition(".")[2]
    when: Holds = lambda config: is_set(config, option) and without(config)  # noqa: E731
    return Rule(WARNING, NO_EFFECT, option, when, f"{name} has no effect {why}", remedy or f"Leave {name} out.")


def is_set(config: TrainConfig, option: str) -> bool:
    """Whether "section.option" differs from its default."""
    section, _, name = option.partition(".")
    return differs(getattr(config, section), name)


def differs(section: Section, *names: str) -> bool:
    """Whether one of the options differs from its default."""
    fields = type(section).model_fields
    return any(getattr(section, name) != fields[name].get_default(call_default_factory=True) for name in names)


def in_subsets(holds: Callable[[ResolvedSubset, ResolvedDataset], object]) -> Holds:
    """The condition that something holds in a subset, with the places of all such subsets."""

    def when(config: TrainConfig) -> Mapping[str, Any]:
        found = {
            f"datasets[{d}].subsets[{s}]": holds(subset, dataset)
            for d, dataset in enumerate(flattened(config))
            for s, subset in enumerate(dataset.subsets)
        }
        return at_places(found)

    return when


def in_datasets(holds: Callable[[ResolvedDataset], object]) -> Holds:
    """The condition that something holds in a dataset, with the places of all such datasets."""
    return lambda config: at_places({f"datasets[{d}]": holds(dataset) for d, dataset in enumerate(flattened(config))})


def at_places(found: Mapping[str, object]) -> Mapping[str, Any]:
    """The numbers of the first place where something was found, and `where`: all such places."""
    true = {place: numbers for place, numbers in found.items() if numbers}
    if not true:
        return {}
    first = next(iter(true.values()))
    return {**(first if isinstance(first, Mapping) else {}), "where": ", ".join(true)}


def in_subset(option: str, without: Callable[[ResolvedSubset], object], why: str, remedy: str = "") -> Rule:
    """The rule that an option of subsets is given and has no effect, because of what holds in `without`."""
    when = in_subsets(lambda subset, _: differs(subset, option) and without(subset))
    message = f"{option} has no effect {why} ({{where}})"
    return Rule(WARNING, NO_EFFECT, f"datasets.subsets.{option}", when, message, remedy or f"Leave {option} out.")


def in_dataset(option: str, without: Callable[[ResolvedDataset], object], why: str, remedy: str = "") -> Rule:
    """The rule that an option of datasets is given and has no effect, because of what holds in `without`."""
    when = in_datasets(lambda dataset: differs(dataset, option) and without(dataset))
    message = f"{option} has no effect {why} ({{where}})"
    return Rule(WARNING, NO_EFFECT, f"datasets.{option}", when, message, remedy or f"Leave {option} out.")


def steps(config: TrainConfig) -> int | None:
    """Optimiser steps, where the configuration alone tells."""
    training = config.training
    return None if training.max_train_epochs else training.max_train_steps or DEFAULT_STEPS


def never_reached(section: str, option: str) -> Rule:
    """The rule that something is to happen every so many steps, and the run ends before."""

    def when(config: TrainConfig) -> Mapping[str, int]:
        every, last = getattr(getattr(config, section), option), steps(config)
        return {"every": every, "last": last} if every and last and every > last else {}

    message = f"{option} = {{every}} is never reached: the run ends after {{last}} steps"
    return Rule(WARNING, "NEVER-REACHED", f"{section}.{option}", when, message, "Lower it, or leave it out.")


def both_counts(section: str, verb: str) -> Rule:
    """The rule that something is counted in steps and in epochs, which may be meant."""
    first, second = f"{verb}_every_n_steps", f"{verb}_every_n_epochs"

    def when(config: TrainConfig) -> bool:
        options = getattr(config, section)
        return bool(getattr(options, first) and getattr(options, second))

    message = f"{first} and {second} are both given, and both happen"
    return Rule(NOTE, "COUNTED-TWICE", f"{section}.{second}", when, message, "Leave one out if that is not meant.")
