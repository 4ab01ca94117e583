"""All that is known of machines, as rules: `examine_machine` is a pure function of the facts.

The rules stand in rules.toml; what needs more than a comparison is a predicate of this folder, named there without its
"find_". A predicate takes an `Environment`, and gives the numbers of each case.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from finitune.machine.environment import Environment
from finitune.machine.rules.devices import DEVICE_PREDICATES
from finitune.machine.rules.packages import PACKAGE_PREDICATES
from finitune.machine.rules.software import SOFTWARE_PREDICATES
from finitune.machine.rules.variables import VARIABLE_PREDICATES
from finitune.report import Finding, Level
from finitune.rules import Rule, evaluate_rules, read_rules

MACHINE_RULES_FILE = Path(__file__).with_name("rules.toml")
MACHINE_PREDICATES = {
    predicate.__name__.removeprefix("find_"): predicate
    for predicate in (*DEVICE_PREDICATES, *PACKAGE_PREDICATES, *SOFTWARE_PREDICATES, *VARIABLE_PREDICATES)
}


@cache
def read_machine_rules() -> tuple[Rule, ...]:
    """The rules, in the order of what is most useful to change first."""
    return read_rules(MACHINE_RULES_FILE, MACHINE_PREDICATES)


def examine_machine(environment: Environment) -> list[Finding]:
    """What is wrong, or worth knowing, of a machine: errors first; within a level, the most useful first."""
    return evaluate_rules(read_machine_rules(), environment)


def examine_processes(environment: Environment, processes: int) -> list[Finding]:
    """What is wrong with starting so many processes on this machine's GPUs; nothing where there is no GPU."""
    gpus = environment.gpus
    if not gpus or processes == gpus:
        return []
    numbers: dict[str, object] = {"processes": processes, "gpus": gpus}
    if processes < 1:
        what = f"{processes} processes for {gpus} GPU{'s' * (gpus > 1)}: nothing would run"
        return [Finding(Level.ERROR, "PROCESSES-NONE", "processes", what, numbers, f"Start 1 to {gpus}.")]
    if processes > gpus:
        what = f"{processes} processes for {gpus} GPU{'s' * (gpus > 1)}: two would share one, which NCCL refuses"
        remedy = f"Start {gpus}: --distributed {gpus}, torchrun --nproc-per-node {gpus}."
        evidence = {**numbers, "source": "https://github.com/Peterande/D-FINE/issues/289"}
        return [Finding(Level.ERROR, "GPUS-TOO-FEW", "processes", what, evidence, remedy)]
    what = f"{processes} process{'es' * (processes > 1)} for {gpus} GPUs: {gpus - processes} will be idle"
    return [Finding(Level.NOTE, "GPUS-IDLE", "processes", what, numbers, "Nothing to do, if that is what is meant.")]
