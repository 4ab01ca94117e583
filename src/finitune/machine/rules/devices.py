"""What a card can, cannot, and does badly; and what several cards do to one another."""

from __future__ import annotations

import re
from collections.abc import Iterator

from finitune.machine.environment import Environment, to_gib
from finitune.machine.hardware import parse_version_parts
from finitune.rules.conditions import Fields

MIN_P2P_DRIVER = "550.40.07"
RTX_4000_PATTERN = re.compile(r"RTX 40\d0")
P2P_OFF_VARIABLES = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
MIN_FREE_GPU_SHARE = 0.5


def find_caution(environment: Environment, kind: str) -> Iterator[Fields]:
    for device in environment.kinds:
        facts = device.facts
        for caution in device.advice.cautions:
            if caution.kind == kind:
                built = {"built_for": ", ".join(facts.arch_list)} if kind == "kernels" else {}
                words = {"what": caution.what, "do": caution.remedy}
                yield {"device": facts.name, "is": facts.architecture, **words, **built}


def find_taken_gpu_memory(environment: Environment) -> Iterator[Fields]:
    for device in environment.devices:
        total, free = device.facts.total_memory_bytes, device.free_bytes
        if total and free is not None and device.facts.kind != "cpu" and free < MIN_FREE_GPU_SHARE * total:
            name = f"{device.facts.name} ({device.index})"
            yield {"device": name, "free_gib": to_gib(free), "total_gib": to_gib(total)}


def find_mixed_gpus(environment: Environment) -> Iterator[Fields]:
    found = {one.facts.name: one.advice.compute for one in environment.kinds}
    if len(found) > 1:
        apart = "; their best dtypes differ, too" if len(set(found.values())) > 1 else ""
        yield {"cards": ", ".join(f"{name} ({best})" for name, best in found.items()), "what": apart}


def find_missing_p2p(environment: Environment) -> Iterator[Fields]:
    """Several RTX 4000 cards on a driver that offers them P2P, which they lack; accelerate refuses to start there."""
    variables = [f"{name}=1" for name in P2P_OFF_VARIABLES if name not in environment.variables]
    old = parse_version_parts(environment.driver.version, 3) < parse_version_parts(MIN_P2P_DRIVER, 3)
    names = [device.facts.name for device in environment.devices if RTX_4000_PATTERN.search(device.facts.name)]
    if environment.gpus > 1 and names and old and variables:
        driver = environment.driver.version or "unknown"
        yield {"cards": environment.gpus, "device": names[0], "driver": driver, "variables": " ".join(variables)}


DEVICE_PREDICATES = (
    find_caution,
    find_taken_gpu_memory,
    find_mixed_gpus,
    find_missing_p2p,
)
