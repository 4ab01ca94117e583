"""What a card can, cannot, and does badly; and what several cards do to one another."""

from __future__ import annotations

import re
from collections.abc import Iterator

from finitune.machine.environment import Device, Environment, to_gib
from finitune.machine.hardware import Advice, advise, has_kernels, parse_version_parts
from finitune.rules.conditions import Fields

MIN_P2P_DRIVER = "550.40.07"
RTX_4000_PATTERN = re.compile(r"RTX 40\d0")
P2P_OFF_VARIABLES = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
MIN_FREE_GPU_SHARE = 0.5
MIN_WHEEL_CAPABILITY = (7, 5)
"""From here on the wheels of torch 2.15 and later hold kernels."""


def list_distinct_devices(environment: Environment) -> Iterator[tuple[Device, Advice]]:
    """One device of each kind, with the advice for it."""
    for facts in dict.fromkeys(device.facts for device in environment.devices):
        yield next(device for device in environment.devices if device.facts == facts), advise(facts)


def find_caution(environment: Environment, kind: str) -> Iterator[Fields]:
    for device, advice in list_distinct_devices(environment):
        facts = device.facts
        for caution in advice.cautions:
            if caution.kind == kind:
                built = {"built_for": ", ".join(facts.arch_list)} if kind == "kernels" else {}
                words = {"what": caution.what, "do": caution.remedy}
                yield {"device": facts.name, "is": facts.architecture, **words, **built}


def find_emulated_bf16(environment: Environment) -> Iterator[Fields]:
    for device, advice in list_distinct_devices(environment):
        facts = device.facts
        if facts.kind == "cuda" and not advice.native_bf16:
            yield {"device": facts.name, "capability": facts.architecture, "works": True, "fast": False}


def find_half_without_gain(environment: Environment, unsafe: bool) -> Iterator[Fields]:
    """NVIDIA cards on which fp16 is no gain: those that may give NaN in it, or those that are only slow."""
    for device, advice in list_distinct_devices(environment):
        capability = device.facts.capability
        if not capability or advice.compute != "fp32" or (capability >= (7, 5) and advice.alternatives):
            continue
        if (capability == (7, 5)) is unsafe:
            yield {"device": device.facts.name, "capability": device.facts.architecture, "what": advice.reasons[0]}


def find_last_wheel_cards(environment: Environment) -> Iterator[Fields]:
    for device, _ in list_distinct_devices(environment):
        facts = device.facts
        if facts.capability and facts.capability < MIN_WHEEL_CAPABILITY and has_kernels(facts):
            yield {"device": facts.name, "capability": facts.architecture, "torch": environment.torch.version}


def find_taken_gpu_memory(environment: Environment) -> Iterator[Fields]:
    for device in environment.devices:
        total, free = device.facts.total_memory_bytes, device.free_bytes
        if total and free is not None and device.facts.kind != "cpu" and free < MIN_FREE_GPU_SHARE * total:
            name = f"{device.facts.name} ({device.index})"
            yield {"device": name, "free_gib": to_gib(free), "total_gib": to_gib(total)}


def find_mixed_gpus(environment: Environment) -> Iterator[Fields]:
    found = {device.facts.name: advice.compute for device, advice in list_distinct_devices(environment)}
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


PREDICATES = (
    find_caution,
    find_emulated_bf16,
    find_half_without_gain,
    find_last_wheel_cards,
    find_taken_gpu_memory,
    find_mixed_gpus,
    find_missing_p2p,
)
