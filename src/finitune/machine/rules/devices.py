"""What a card can, cannot, and does badly; and what several cards do to one another."""

from __future__ import annotations

import re
from collections.abc import Iterator

from finitune.machine.environment import Device, Environment
from finitune.machine.hardware import Advice, advise, has_kernels
from finitune.machine.rules.rule import (
    DEVICE_ERROR,
    DEVICE_NOTE,
    DEVICE_WARNING,
    MachineRule,
    MatchFields,
    parse_version_parts,
    report_if,
    to_gib,
)
from finitune.report import Finding

MIN_P2P_DRIVER = "550.40.07"
RTX_4000_PATTERN = re.compile(r"RTX 40\d0")
P2P_OFF_VARIABLES = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")
MIN_FREE_GPU_SHARE = 0.5
MIN_WHEEL_CAPABILITY = (7, 5)
"""From here on the wheels of torch 2.15 and later hold kernels."""


def list_distinct_devices(environment: Environment) -> Iterator[tuple[Device, Advice]]:
    """One device of each kind, with the advice for it."""
    seen = set()
    for device in environment.devices:
        if device.facts not in seen:
            seen.add(device.facts)
            yield device, advise(device.facts)


def format_architecture(device: Device) -> str:
    """'7.5' or 'gfx90a'."""
    facts = device.facts
    return ".".join(map(str, facts.capability)) if facts.capability else facts.gcn_arch.partition(":")[0]


def split_advice_warning(device: Device, warning: str) -> MatchFields:
    """A warning of the advice: what is the matter, and what to do."""
    what, _, remedy = warning.partition(". ")
    return {"device": device.facts.name, "is": format_architecture(device), "what": what, "do": remedy}


def find_missing_kernels(environment: Environment) -> Iterator[MatchFields]:
    for device, advice in list_distinct_devices(environment):
        if not has_kernels(device.facts):
            yield {**split_advice_warning(device, advice.warnings[0]), "built_for": ", ".join(device.facts.arch_list)}


def find_other_warnings(environment: Environment) -> Iterator[MatchFields]:
    for device, advice in list_distinct_devices(environment):
        for warning in advice.warnings[0 if has_kernels(device.facts) else 1 :]:
            yield split_advice_warning(device, warning)


def find_emulated_bf16(environment: Environment) -> Iterator[MatchFields]:
    for device, advice in list_distinct_devices(environment):
        if device.facts.kind == "cuda" and not advice.native_bf16:
            yield {"device": device.facts.name, "capability": format_architecture(device), "works": True, "fast": False}


def find_half_without_gain(environment: Environment, *, unsafe: bool) -> Iterator[MatchFields]:
    """NVIDIA cards on which fp16 is no gain: those that may give NaN in it, or those that are only slow."""
    for device, advice in list_distinct_devices(environment):
        capability = device.facts.capability
        if not capability or advice.compute != "fp32" or (capability >= (7, 5) and advice.alternatives):
            continue
        if (capability == (7, 5)) is unsafe:
            yield {"device": device.facts.name, "capability": format_architecture(device), "what": advice.reasons[0]}


def find_last_wheel_cards(environment: Environment) -> Iterator[MatchFields]:
    for device, _ in list_distinct_devices(environment):
        if device.facts.capability and device.facts.capability < MIN_WHEEL_CAPABILITY and has_kernels(device.facts):
            yield {
                "device": device.facts.name,
                "capability": format_architecture(device),
                "torch": environment.torch.version,
            }


def find_taken_gpu_memory(environment: Environment) -> Iterator[MatchFields]:
    for device in environment.devices:
        total, free = device.facts.total_memory_bytes, device.free_bytes
        if total and free is not None and device.facts.kind != "cpu" and free < MIN_FREE_GPU_SHARE * total:
            yield {
                "device": f"{device.facts.name} ({device.index})",
                "free_gib": to_gib(free),
                "total_gib": to_gib(total),
            }


def find_mixed_gpus(environment: Environment) -> list[MatchFields]:
    found = {device.facts.name: advice.compute for device, advice in list_distinct_devices(environment)}
    apart = "; their best dtypes differ, too" if len(set(found.values())) > 1 else ""
    return report_if(len(found) > 1, cards=", ".join(f"{name} ({best})" for name, best in found.items()), what=apart)


def find_missing_p2p(environment: Environment) -> list[MatchFields]:
    """Several RTX 4000 cards on a driver that offers them P2P, which they lack; accelerate refuses to start there."""
    names = [device.facts.name for device in environment.devices]
    variables = [f"{name}=1" for name in P2P_OFF_VARIABLES if name not in environment.variables]
    old = parse_version_parts(environment.driver.version, 3) < parse_version_parts(MIN_P2P_DRIVER, 3)
    mine = [name for name in names if RTX_4000_PATTERN.search(name)]
    return report_if(
        len(names) > 1 and mine and old and variables,
        cards=len(names),
        device=mine[0] if mine else "",
        driver=environment.driver.version or "unknown",
        variables=" ".join(variables),
    )


def find_gfx_override(environment: Environment) -> list[MatchFields]:
    override = environment.variables.get("HSA_OVERRIDE_GFX_VERSION", "")
    return report_if(environment.torch.hip and override, version=override)


def examine_processes(environment: Environment, processes: int) -> list[Finding]:
    """What is wrong with starting so many processes on this machine's GPUs; nothing where there is no GPU."""
    gpus = len(environment.devices)
    if not gpus or processes == gpus:
        return []
    numbers: dict[str, object] = {"processes": processes, "gpus": gpus}
    if processes < 1:
        what = f"{processes} processes for {gpus} GPU{'s' * (gpus > 1)}: nothing would run"
        return [Finding(DEVICE_ERROR, "PROCESSES-NONE", "processes", what, numbers, f"Start 1 to {gpus}.")]
    if processes > gpus:
        what = f"{processes} processes for {gpus} GPU{'s' * (gpus > 1)}: two would share one, which NCCL refuses"
        remedy = f"Start {gpus}: --distributed {gpus}, torchrun --nproc-per-node {gpus}."
        evidence = {**numbers, "source": "https://github.com/Peterande/D-FINE/issues/289"}
        return [Finding(DEVICE_ERROR, "GPUS-TOO-FEW", "processes", what, evidence, remedy)]
    what = f"{processes} process{'es' * (processes > 1)} for {gpus} GPUs: {gpus - processes} will be idle"
    return [Finding(DEVICE_NOTE, "GPUS-IDLE", "processes", what, numbers, "Nothing to do, if that is what is meant.")]


_ACCELERATE_P2P_URL = "https://github.com/cocktailpeanut/fluxgym/issues/283"

DEVICE_RULES = (
    MachineRule(
        "KERNELS-MISSING",
        DEVICE_ERROR,
        "{device}",
        find_missing_kernels,
        "{what}",
        "{do}",
        "https://github.com/pytorch/pytorch/blob/main/RELEASE.md#pytorch-cuda-support-matrix",
    ),
    MachineRule(
        "DTYPE-UNDECIDED",
        DEVICE_WARNING,
        "{device}",
        lambda e: [n for n in find_other_warnings(e) if str(n["what"]).startswith(str(n["device"]))],
        "{what}",
        "{do}",
        "https://github.com/pytorch/pytorch/issues/195716",
    ),
    MachineRule(
        "HALF-ROUNDED-TWICE",
        DEVICE_WARNING,
        "torch",
        lambda e: [n for n in find_other_warnings(e) if not str(n["what"]).startswith(str(n["device"]))],
        "{what}",
        "{do}",
        "https://github.com/pytorch/pytorch/releases/tag/v2.8.0",
    ),
    MachineRule(
        "HALF-UNSAFE",
        DEVICE_WARNING,
        "{device}",
        lambda e: find_half_without_gain(e, unsafe=True),
        "{what}: finitune computes in fp32 here, and other programs' fp16 ends in black pictures",
        "Leave --precision at auto; give other programs --no-half or fp32.",
        "https://github.com/pytorch/pytorch/issues/58123",
    ),
    MachineRule(
        "HALF-SLOW",
        DEVICE_NOTE,
        "{device}",
        lambda e: find_half_without_gain(e, unsafe=False),
        "{what}",
        "Nothing to do: finitune computes in fp32 here.",
        "https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#arithmetic-instructions",
    ),
    MachineRule(
        "BF16-EMULATED",
        DEVICE_NOTE,
        "{device}",
        find_emulated_bf16,
        "bf16 works on {device} ({capability}), and is slow: it is emulated. torch.cuda.is_bf16_supported() says yes "
        "here since torch 2.3, so programs that ask it choose bf16",
        "Nothing to do in finitune; give other programs fp16 or fp32 instead of auto.",
        "https://github.com/pytorch/pytorch/pull/148322",
    ),
    MachineRule(
        "CARD-LAST-WHEELS",
        DEVICE_NOTE,
        "{device}",
        find_last_wheel_cards,
        "torch 2.14 for CUDA 12.6 is the last release with kernels for {device} ({capability}); this is {torch}",
        "Do not update torch beyond 2.14, and keep to its cu126 wheel.",
        "https://github.com/pytorch/pytorch/issues/190385",
    ),
    MachineRule(
        "CARD-DISGUISED",
        DEVICE_NOTE,
        "environment",
        find_gfx_override,
        "HSA_OVERRIDE_GFX_VERSION={version} makes the card pass for another: kernels run, and may be wrong",
        "Unset it where the ROCm wheel lists the card; else see the products in the table of measurements.",
        "https://github.com/ROCm/rocBLAS/issues/1536",
    ),
    MachineRule(
        "GPU-MEMORY-TAKEN",
        DEVICE_WARNING,
        "{device}",
        find_taken_gpu_memory,
        "only {free_gib} of {total_gib} GiB are free: another program holds the rest",
        "Close it: nvidia-smi lists the programs.",
        "https://docs.nvidia.com/deploy/nvidia-smi/index.html",
    ),
    MachineRule(
        "CARDS-MIXED",
        DEVICE_WARNING,
        "devices",
        find_mixed_gpus,
        "the cards are of several kinds: {cards}. Together they go at the pace of the slowest, with its memory{what}",
        "Choose by CUDA_VISIBLE_DEVICES the ones that are alike.",
        "https://docs.pytorch.org/docs/stable/notes/ddp.html",
    ),
    MachineRule(
        "P2P-NOT-THERE",
        DEVICE_WARNING,
        "devices",
        find_missing_p2p,
        "{cards} cards, {device} among them, and driver {driver}: the RTX 4000 series has no P2P, and accelerate "
        f"stops a run on several of them on drivers before {MIN_P2P_DRIVER}",
        "Set {variables}, update the driver, or run on one GPU: CUDA_VISIBLE_DEVICES=0.",
        _ACCELERATE_P2P_URL,
    ),
)
