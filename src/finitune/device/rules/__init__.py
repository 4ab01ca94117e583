"""All that is known of machines, as tables of rules: `examine` is a pure function of the facts.

The tables stand in the order of what is most useful to change first: what keeps the GPU from being used, what a card
cannot do, packages that do not fit, the system's limits, and variables.
"""

from __future__ import annotations

from finitune.device.environment import Environment
from finitune.device.rules import devices, packages, pytorch, system, variables
from finitune.report import Finding, Level

TABLES = (pytorch, devices, packages, system, variables)


def examine(environment: Environment) -> list[Finding]:
    """What is wrong, or worth knowing, of a machine: errors first; within a level, the most useful first."""
    found = [finding for table in TABLES for rule in table.RULES for finding in rule.findings(environment)]
    return sorted(found, key=lambda finding: list(Level).index(finding.level))
