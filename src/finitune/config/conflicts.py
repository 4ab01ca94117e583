"""Options that exclude each other, that do nothing, or that nobody can mean: the rules of conflicts.toml, evaluated.

Here is what the rules may ask about, and the predicates of those whose condition is more than a comparison.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from finitune.adapters import ADAPTER_ALGORITHMS, AdapterAlgorithm, find_algorithm, list_algorithms
from finitune.config.datasets import (
    SIDE_MULTIPLE,
    ConfigSection,
    ResolvedDataset,
    ResolvedSubset,
    resolve_datasets,
    round_to_side,
    to_width_height,
)
from finitune.config.option_types import join_alternatives
from finitune.config.schema import TrainConfig
from finitune.package_data import read_package_toml
from finitune.report import Finding, Level
from finitune.rules import Rule, evaluate_rules
from finitune.rules.conditions import Condition, parse_condition, read_fact

NO_EFFECT_CODE = "CONFIG-NO-EFFECT"
_RULES_PATH = Path(__file__).with_name("conflicts.toml")
_MAX_RESOLUTION_SIDE = 4096
"""The side of a picture that is surely a slip of the pen: a step at 1024 takes a sixteenth of it."""
_MAX_NETWORK_SCALE = 8.0
"""alpha / rank above which training tends to diverge; 32 is reported with losses of NaN (kohya_ss, issue 1758)."""
_SELF_TUNING_PREFIXES = ("prodigy", "dadapt")
"""How names of optimisers begin that find the learning rate themselves."""
_MAX_RATE_BY_OPTIMIZER = {"lion": 1e-3, "sgd": 1.0}
_DEFAULT_MAX_RATE = 1e-2
_FORBIDDEN_NAME_CHARACTERS = frozenset('/\\:*?"<>|')
"""Signs that a file's name cannot have everywhere."""
_MAX_OUTPUT_NAME_BYTES = 150
"""Bytes of a name; systems allow 255, and steps, spellings and endings come behind it."""

ConflictFields = Mapping[str, object]


def find_config_conflicts(config: TrainConfig) -> list[Finding]:
    """Everything that the rules find in a configuration: errors first, then warnings, then notes."""
    return evaluate_rules(read_config_rules(), ConfigFacts(config))


@dataclass(frozen=True)
class ConfigFacts:
    """A configuration as rules ask of it: its sections, and what follows from several options together."""

    config: TrainConfig

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)

    @property
    def steps(self) -> int | None:
        """Optimiser steps, where the configuration alone tells."""
        training = self.config.training
        return None if training.max_train_epochs else training.count_steps(0)

    @property
    def algorithm(self) -> AdapterAlgorithm:
        """The traits of the algorithm that is trained."""
        return find_algorithm(self.config.network.algorithm)

    @property
    def pattern_rates(self) -> list[float]:
        return list(self.config.network.network_reg_lrs.values())

    @property
    def optimizer_name(self) -> str:
        """The optimiser in lower case, without module and separators."""
        return re.sub(r"[-_ ]", "", self.config.optimizer.optimizer_type.rpartition(".")[2].casefold())

    @property
    def self_tuning(self) -> bool:
        """Whether the optimiser finds its learning rate."""
        return self.optimizer_name.startswith(_SELF_TUNING_PREFIXES)

    @property
    def saves_between(self) -> bool:
        """Whether files are written before the last."""
        return bool(self.config.saving.save_every_n_steps or self.config.saving.save_every_n_epochs)

    @property
    def valid_sigmas(self) -> bool:
        sigmas = self.config.validation.validation_sigmas
        return bool(sigmas) and all(0 < sigma <= 1 for sigma in sigmas)

    @cached_property
    def by_place(self) -> Mapping[str, Mapping[str, ResolvedDataset | ResolvedSubset]]:
        """What rules may ask each of, by its place, with everything inherited."""
        datasets = {f"datasets[{number}]": dataset for number, dataset in enumerate(resolve_datasets(self.config))}
        subsets = {
            f"{place}.subsets[{number}]": subset
            for place, dataset in datasets.items()
            for number, subset in enumerate(dataset.subsets)
        }
        return {"dataset": datasets, "subset": subsets}

    @property
    def subsets(self) -> list[Any]:
        return list(self.by_place["subset"].values())

    @property
    def learned_subsets(self) -> list[Any]:
        """Those that are not of regularisation pictures."""
        return [subset for subset in self.subsets if not subset.is_reg]

    @property
    def masked_places(self) -> str:
        """Where there are masks."""
        subsets: Mapping[str, Any] = self.by_place["subset"]
        return ", ".join(place for place, one in subsets.items() if one.alpha_mask or one.conditioning_data_dir)

    @property
    def regularisation_places(self) -> str:
        subsets: Mapping[str, Any] = self.by_place["subset"]
        return ", ".join(place for place, subset in subsets.items() if subset.is_reg)

    @property
    def keeps_pictures_out(self) -> bool:
        """Whether a dataset keeps pictures for validation."""
        return any(dataset.validation_split for dataset in resolve_datasets(self.config))

    @property
    def sizes_every_batch(self) -> bool:
        """Whether every dataset has a batch size of its own."""
        return all(dataset.batch_size is not None for dataset in resolve_datasets(self.config))


# --- the rules of the file -------------------------------------------------------------------------------------------


@cache
def read_config_rules() -> tuple[Rule, ...]:
    """The rules in the order of the file; raises ValueError for what is wrong in it."""
    return tuple(rule for entry in read_package_toml(_RULES_PATH)["rule"] for rule in parse_config_rules(entry))


def parse_config_rules(entry: Mapping[str, Any]) -> Iterator[Rule]:
    """The rules of one table: one, or one for each option that it says to have no effect."""
    rest = {name: value for name, value in entry.items() if name not in ("when", "within", "no_effect", "why")}
    scope, when = entry.get("within", ""), entry.get("when", {})
    if "no_effect" not in entry:
        condition = parse_condition(when, CONFIG_PREDICATES)
        yield Rule(**rest | {"level": Level(rest["level"]), "when": ask_each(scope, condition)})
    for path in entry.get("no_effect", ()):
        name = path.rpartition(".")[2]
        predicates = {**CONFIG_PREDICATES, "lacks_option": partial(lacks_option, option=name)}
        yield Rule(
            level=Level.WARNING,
            code=NO_EFFECT_CODE,
            subject={"dataset": "datasets.", "subset": "datasets.subsets."}.get(scope, "") + path,
            when=ask_each(scope, restrict_to_given(path, parse_condition(when, predicates))),
            text=f"{name} has no effect {entry['why']}" + (" ({where})" if scope else ""),
            remedy=entry.get("remedy", f"Leave {name} out."),
        )


def restrict_to_given(path: str, condition: Condition) -> Condition:
    """A condition that holds only where an option differs from its default."""
    section, _, name = path.rpartition(".")
    return lambda facts: (
        condition(facts) if is_option_given(read_fact(facts, section) if section else facts, name) else ()
    )


def ask_each(scope: str, condition: Condition) -> Condition:
    """The condition, asked of each dataset or subset: the fields of the first in which it holds, `where` names all."""
    if not scope:
        return condition

    def ask(facts: ConfigFacts) -> Iterator[ConflictFields]:
        matches = {place: next(iter(condition(part)), None) for place, part in facts.by_place[scope].items()}
        found = {place: fields for place, fields in matches.items() if fields is not None}
        if found:
            yield {**next(iter(found.values())), "where": ", ".join(found)}

    return ask


def is_option_given(section: ConfigSection, name: str) -> bool:
    """Whether an option differs from its default."""
    return getattr(section, name) != type(section).model_fields[name].get_default(call_default_factory=True)


# --- predicates: something false where all is well, else the fields of the message -----------------------------------


def lacks_option(facts: ConfigFacts, option: str) -> ConflictFields:
    """The algorithms that have an option, where the one that is trained has it not."""
    able = [one.name for one in ADAPTER_ALGORITHMS if one.trainable and option in one.options]
    return {} if facts.algorithm.name in able else {"what": join_alternatives(able)}


def lacks_magnitudes(facts: ConfigFacts) -> object:
    name = facts.config.network.algorithm
    able = list_algorithms(additive=True, trainable=True)
    return facts.config.network.dora and name not in able and {"algorithm": name, "do": ", ".join(able)}


def lacks_up_factors(facts: ConfigFacts) -> object:
    name = facts.config.network.algorithm
    able = [one.name for one in ADAPTER_ALGORITHMS if one.trainable and one.roles_where(up=True)]
    asked = facts.config.optimizer.loraplus_lr_ratio is not None
    return asked and name not in able and {"algorithm": name, "do": ", ".join(able)}


def find_excessive_network_scale(facts: ConfigFacts) -> ConflictFields:
    """alpha and rank of the largest scale, where it is above what trains well."""
    network = facts.config.network
    if facts.algorithm.alpha_means != "scale":
        return {}
    scales = []
    for pattern, rank in {"": network.network_dim, **network.network_reg_dims}.items():
        alpha = network.network_reg_alphas.get(pattern, network.network_alpha) or rank
        scales.append((alpha / (math.sqrt(rank) if network.rs_lora else max(rank, 1)), alpha, rank))
    scale, alpha, rank = max(scales)
    return {"scale": f"{scale:g}", "alpha": f"{alpha:g}", "rank": rank} if scale > _MAX_NETWORK_SCALE else {}


def find_pattern_without_alpha(facts: ConfigFacts) -> ConflictFields:
    """The first pattern with a rank of its own and the alpha of the others."""
    network = facts.config.network
    for pattern, rank in network.network_reg_dims.items():
        if network.network_alpha and rank != network.network_dim and pattern not in network.network_reg_alphas:
            scale, usual = network.network_alpha / max(rank, 1), network.network_alpha / network.network_dim
            return {"pattern": pattern, "rank": rank, "scale": f"{scale:g}", "usual": f"{usual:g}"}
    return {}


def find_invalid_network_pattern(facts: ConfigFacts) -> ConflictFields:
    """The first pattern that is no regular expression."""
    lists = ("exclude_patterns", "include_patterns", "only_patterns")
    for option in (*lists, "network_reg_dims", "network_reg_alphas", "network_reg_lrs"):
        for pattern in getattr(facts.config.network, option):
            try:
                re.compile(pattern)
            except re.error as error:
                return {"option": option, "pattern": pattern, "why": str(error)}
    return {}


def find_invalid_pattern_value(facts: ConfigFacts) -> ConflictFields:
    """The first rank below 1, or alpha or learning rate below 0, by pattern."""
    for option, least in (("network_reg_dims", 1), ("network_reg_alphas", 0), ("network_reg_lrs", 0)):
        for pattern, value in getattr(facts.config.network, option).items():
            if value < least:
                return {"option": option, "pattern": pattern, "value": value, "least": least}
    return {}


def has_only_zero_rates(facts: ConfigFacts) -> bool:
    """Whether every learning rate is 0."""
    optimizer, network = facts.config.optimizer, facts.config.network
    text = (
        network.train_text_encoder and optimizer.text_encoder_lr,
        network.train_llm_adapter and optimizer.llm_adapter_lr,
    )
    return not any((optimizer.learning_rate, *text, *facts.pattern_rates))


def find_excessive_learning_rate(facts: ConfigFacts) -> ConflictFields:
    """The learning rate, where it is above what the optimiser bears."""
    rate = facts.config.optimizer.learning_rate
    limits = (top for kind, top in _MAX_RATE_BY_OPTIMIZER.items() if kind in facts.optimizer_name)
    highest = next(limits, _DEFAULT_MAX_RATE)
    if facts.self_tuning or rate <= highest:
        return {}
    return {"name": facts.config.optimizer.optimizer_type, "rate": f"{rate:g}", "highest": f"{highest:g}"}


def find_extra_rates(facts: ConfigFacts) -> object:
    """The other rates that are given to an optimiser that finds one for all."""
    optimizer = facts.config.optimizer
    given = [
        f"optimizer.{name}"
        for name in ("text_encoder_lr", "llm_adapter_lr", "loraplus_lr_ratio")
        if is_option_given(optimizer, name)
    ]
    given += ["network.network_reg_lrs"] * bool(facts.pattern_rates)
    return facts.self_tuning and given and {"given": ", ".join(given)}


def find_slow_ema(facts: ConfigFacts) -> ConflictFields:
    """How many steps a moving average looks back, where the run is not much longer."""
    decay, last = facts.config.optimizer.ema_decay, facts.steps
    span = round(1 / (1 - decay)) if decay else 0
    return {"span": span, "last": last} if last and span > last / 2 else {}


def find_endless_warmup(facts: ConfigFacts) -> ConflictFields:
    """The steps of a warm-up that is not over when the run ends; below 1 they are a share of it."""
    warmup, last = facts.config.optimizer.lr_warmup_steps, facts.steps
    return {"warmup": f"{warmup:g}", "last": last} if warmup >= 1 and last and last <= warmup else {}


def find_output_name_fault(facts: ConfigFacts) -> ConflictFields:
    """What a name has that files cannot have, here or on another system."""
    name = facts.config.saving.output_name
    if not name.strip():
        return {"fault": "is empty"}
    if _FORBIDDEN_NAME_CHARACTERS & set(name):
        return {"fault": 'cannot have any of / \\ : * ? " < > |'}
    if name != name.strip() or name[0] == "." or name[-1] == ".":
        return {"fault": "cannot begin or end with a dot or a blank"}
    long = len(name.encode()) > _MAX_OUTPUT_NAME_BYTES
    return {"fault": f"has more than {_MAX_OUTPUT_NAME_BYTES} letters"} if long else {}


def find_unaligned_step(dataset: ResolvedDataset) -> ConflictFields:
    """The step between the sides of buckets, where it is no multiple of 16, and the nearest that is."""
    step = dataset.bucket_reso_steps
    return {"value": step, "nearest": round_to_side(step)} if step % SIDE_MULTIPLE else {}


def find_unaligned_side(dataset: ResolvedDataset) -> ConflictFields:
    """The first side that is no multiple of 16, and the nearest that is."""
    wrong = [side for side in to_width_height(dataset.resolution) if side % SIDE_MULTIPLE]
    return {"value": wrong[0], "nearest": round_to_side(wrong[0])} if wrong else {}


def find_excessive_resolution(dataset: ResolvedDataset) -> ConflictFields:
    """The resolution, where it has more pixels than anybody trains on."""
    width, height = to_width_height(dataset.resolution)
    largest = f"{_MAX_RESOLUTION_SIDE} x {_MAX_RESOLUTION_SIDE}"
    return {"size": f"{width} x {height}", "largest": largest} if width * height > _MAX_RESOLUTION_SIDE**2 else {}


def find_crossed_bucket_limits(dataset: ResolvedDataset) -> ConflictFields:
    """The shortest and the longest side of buckets where they leave no room."""
    shortest, longest = dataset.min_bucket_reso, max(dataset.max_bucket_reso, *to_width_height(dataset.resolution))
    return {"shortest": shortest, "longest": longest} if shortest > longest else {}


def find_repeated_subset_folder(dataset: ResolvedDataset) -> ConflictFields:
    """The first folder that a dataset names twice for the same purpose."""
    named = Counter((subset.image_dir, subset.metadata_file, subset.is_reg) for subset in dataset.subsets)
    return next(({"folder": str(key[0])} for key, count in named.items() if count > 1 and key[0]), {})


CONFIG_PREDICATES = {
    predicate.__name__: predicate
    for predicate in (
        lacks_magnitudes,
        lacks_up_factors,
        find_excessive_network_scale,
        find_pattern_without_alpha,
        find_invalid_network_pattern,
        find_invalid_pattern_value,
        has_only_zero_rates,
        find_excessive_learning_rate,
        find_extra_rates,
        find_slow_ema,
        find_endless_warmup,
        find_output_name_fault,
        find_unaligned_step,
        find_unaligned_side,
        find_excessive_resolution,
        find_crossed_bucket_limits,
        find_repeated_subset_folder,
    )
}
"""What the rules may call by name."""
