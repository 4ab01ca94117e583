"""What a rule about a configuration is: when it holds, how bad that is, and what is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from finitune.config.datasets import ConfigSection, ResolvedDataset, ResolvedSubset, resolve_datasets
from finitune.config.schema import TrainConfig
from finitune.report import Finding, Level

CONFIG_ERROR, CONFIG_WARNING, CONFIG_NOTE = Level.ERROR, Level.WARNING, Level.NOTE
NO_EFFECT_CODE = "CONFIG-NO-EFFECT"
DEFAULT_TRAIN_STEPS = 1600
"""Optimiser steps where neither steps nor epochs are given."""
ConfigCondition = Callable[[TrainConfig], object]
"""Something false where all is well; where it is not, something true, or the numbers that the message names."""


@dataclass(frozen=True)
class ConfigRule:
    """One line of the table. `message` and `remedy` may name the numbers that `when` gives, in braces."""

    level: Level
    code: str
    subject: str
    when: ConfigCondition
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


def make_no_effect_rule(option: str, without: ConfigCondition, why: str, remedy: str = "") -> ConfigRule:
    """The rule that an option is given and has no effect, because of what holds in `without`."""
    name = option.rpartition(".")[2]
    when: ConfigCondition = lambda config: is_option_set(config, option) and without(config)  # noqa: E731
    return ConfigRule(
        CONFIG_WARNING, NO_EFFECT_CODE, option, when, f"{name} has no effect {why}", remedy or f"Leave {name} out."
    )


def is_option_set(config: TrainConfig, option: str) -> bool:
    """Whether "section.option" differs from its default."""
    section, _, name = option.partition(".")
    return has_non_default_option(getattr(config, section), name)


def has_non_default_option(section: ConfigSection, *names: str) -> bool:
    """Whether one of the options differs from its default."""
    fields = type(section).model_fields
    return any(getattr(section, name) != fields[name].get_default(call_default_factory=True) for name in names)


def match_any_subset(holds: Callable[[ResolvedSubset, ResolvedDataset], object]) -> ConfigCondition:
    """The condition that something holds in a subset, with the places of all such subsets."""

    def when(config: TrainConfig) -> Mapping[str, Any]:
        found = {
            f"datasets[{d}].subsets[{s}]": holds(subset, dataset)
            for d, dataset in enumerate(resolve_datasets(config))
            for s, subset in enumerate(dataset.subsets)
        }
        return merge_places(found)

    return when


def match_any_dataset(holds: Callable[[ResolvedDataset], object]) -> ConfigCondition:
    """The condition that something holds in a dataset, with the places of all such datasets."""
    return lambda config: merge_places(
        {f"datasets[{d}]": holds(dataset) for d, dataset in enumerate(resolve_datasets(config))}
    )


def merge_places(found: Mapping[str, object]) -> Mapping[str, Any]:
    """The numbers of the first place where something was found, and `where`: all such places."""
    true = {place: numbers for place, numbers in found.items() if numbers}
    if not true:
        return {}
    first = next(iter(true.values()))
    return {**(first if isinstance(first, Mapping) else {}), "where": ", ".join(true)}


def make_subset_no_effect_rule(
    option: str, without: Callable[[ResolvedSubset], object], why: str, remedy: str = ""
) -> ConfigRule:
    """The rule that an option of subsets is given and has no effect, because of what holds in `without`."""
    when = match_any_subset(lambda subset, _: has_non_default_option(subset, option) and without(subset))
    message = f"{option} has no effect {why} ({{where}})"
    return ConfigRule(
        CONFIG_WARNING, NO_EFFECT_CODE, f"datasets.subsets.{option}", when, message, remedy or f"Leave {option} out."
    )


def make_dataset_no_effect_rule(
    option: str, without: Callable[[ResolvedDataset], object], why: str, remedy: str = ""
) -> ConfigRule:
    """The rule that an option of datasets is given and has no effect, because of what holds in `without`."""
    when = match_any_dataset(lambda dataset: has_non_default_option(dataset, option) and without(dataset))
    message = f"{option} has no effect {why} ({{where}})"
    return ConfigRule(
        CONFIG_WARNING, NO_EFFECT_CODE, f"datasets.{option}", when, message, remedy or f"Leave {option} out."
    )


def compute_configured_steps(config: TrainConfig) -> int | None:
    """Optimiser steps, where the configuration alone tells."""
    training = config.training
    return None if training.max_train_epochs else training.max_train_steps or DEFAULT_TRAIN_STEPS


def make_never_reached_rule(section: str, option: str) -> ConfigRule:
    """The rule that something is to happen every so many steps, and the run ends before."""

    def when(config: TrainConfig) -> Mapping[str, int]:
        every, last = getattr(getattr(config, section), option), compute_configured_steps(config)
        return {"every": every, "last": last} if every and last and every > last else {}

    message = f"{option} = {{every}} is never reached: the run ends after {{last}} steps"
    return ConfigRule(
        CONFIG_WARNING, "NEVER-REACHED", f"{section}.{option}", when, message, "Lower it, or leave it out."
    )


def make_counted_twice_rule(section: str, verb: str) -> ConfigRule:
    """The rule that something is counted in steps and in epochs, which may be meant."""
    first, second = f"{verb}_every_n_steps", f"{verb}_every_n_epochs"

    def when(config: TrainConfig) -> bool:
        options = getattr(config, section)
        return bool(getattr(options, first) and getattr(options, second))

    message = f"{first} and {second} are both given, and both happen"
    return ConfigRule(
        CONFIG_NOTE, "COUNTED-TWICE", f"{section}.{second}", when, message, "Leave one out if that is not meant."
    )
