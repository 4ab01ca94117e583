"""Options that exclude each other, that do nothing, or that nobody can mean: one table, looked through before a start.

A rule is a line: how bad it is, its code, the option, when it holds, what is told, what to do. That an option has no
effect is said of values that differ from the default, so that a configuration with everything written out is silent.
What other programs forbid and what works here is no rule: gradient checkpointing with cached latents, any rank, any
alpha up to the rank, pictures of any size.
"""

from __future__ import annotations

from finitune.config.conflicts_data import CONFIG_DATA_RULES
from finitune.config.conflicts_learning import CONFIG_LEARNING_RULES
from finitune.config.conflicts_model import CONFIG_MODEL_RULES
from finitune.config.conflicts_run import CONFIG_RUN_RULES
from finitune.config.schema import TrainConfig
from finitune.report import Finding, Level

CONFIG_RULES = (*CONFIG_MODEL_RULES, *CONFIG_LEARNING_RULES, *CONFIG_RUN_RULES, *CONFIG_DATA_RULES)


def find_config_conflicts(config: TrainConfig) -> list[Finding]:
    """Everything that the table finds in a configuration: errors first, then warnings, then notes."""
    found = [finding for rule in CONFIG_RULES if (finding := rule.finding(config))]
    return sorted(found, key=lambda finding: list(Level).index(finding.level))
