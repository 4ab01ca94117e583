"""All that is known of machines, as tables of rules: `examine` is a pure function of the facts.

The tables stand in the order of what is most useful to change first: what keeps the GPU from being used, what a card
cannot do, packages that do not fit, the system's limits, and variables.
"""

from __future__ import annotations

from finitune.machine.environment import Environment
from finitune.machine.rules.devices import DEVICE_RULES
from finitune.machine.rules.packages import PACKAGE_RULES
from finitune.machine.rules.pytorch import PYTORCH_RULES
from finitune.machine.rules.system import SYSTEM_RULES
from finitune.machine.rules.variables import VARIABLE_RULES
from finitune.report import Finding, Level

MACHINE_RULES = (*PYTORCH_RULES, *DEVICE_RULES, *PACKAGE_RULES, *SYSTEM_RULES, *VARIABLE_RULES)


def examine_machine(environment: Environment) -> list[Finding]:
    """What is wrong, or worth knowing, of a machine: errors first; within a level, the most useful first."""
    found = [finding for rule in MACHINE_RULES for finding in rule.findings(environment)]
    return sorted(found, key=lambda finding: list(Level).index(finding.level))
