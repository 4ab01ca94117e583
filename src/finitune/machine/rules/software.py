"""What can be wrong between torch, the driver and the cards, and what the system withholds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal

from finitune.machine.environment import GIB, Environment, to_gib
from finitune.machine.hardware import parse_version_parts
from finitune.rules.conditions import Fields

NoGpuReason = Literal["", "torch", "cpu-wheel", "rocm-build", "no-driver", "driver-old", "hidden", "no-gpu", "unknown"]

MIN_DRIVER_BY_CUDA = {13: 580, 12: 525, 11: 450}
"""The first driver for each major CUDA version, by minor version compatibility.

Source: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
"""

VISIBLE_DEVICES_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def find_no_gpu_reason(environment: Environment) -> NoGpuReason:
    """Why torch sees no GPU: the first of the reasons that holds; "" where it sees one."""
    torch, driver = environment.torch, environment.driver
    if environment.devices:
        return ""
    if not torch.version or (torch.error and not torch.available):
        return "torch"
    if driver.cards and torch.hip:
        return "rocm-build"
    there = bool(driver.cards) or bool(set(driver.pci) & {"nvidia", "amd"})
    if not torch.cuda and not torch.hip:
        return "cpu-wheel" if there else "no-gpu"
    if find_hiding_variables(environment):
        return "hidden"
    if torch.cuda and driver.version and find_min_driver(environment) > parse_version_parts(driver.version, 1):
        return "driver-old"
    if torch.cuda and not driver.version:
        return "no-driver" if "nvidia" in driver.pci else "no-gpu"
    return "unknown" if there else "no-gpu"


def find_hiding_variables(environment: Environment) -> dict[str, str]:
    """The variables that leave torch no device, with their values."""
    return {
        name: environment.variables[name]
        for name in VISIBLE_DEVICES_VARIABLES
        if name in environment.variables and is_hiding_all_devices(environment.variables[name], environment)
    }


def is_hiding_all_devices(value: str, environment: Environment) -> bool:
    """Whether the first device that a list names is none; CUDA reads the list up to the first that is not there."""
    first = value.split(",")[0].strip()
    cards = environment.driver.cards
    if first.isdigit():
        return bool(cards) and int(first) >= len(cards)
    if first.startswith(("GPU-", "MIG-")):
        return bool(cards) and not first.startswith("MIG-") and not any(c.uuid.startswith(first) for c in cards)
    return True  # nothing, -1, or a word


def find_min_driver(environment: Environment) -> tuple[int, ...]:
    """The first driver that the CUDA of the wheel runs on; () where that is not known."""
    since = MIN_DRIVER_BY_CUDA.get(next(iter(parse_version_parts(environment.torch.cuda or "")), 0))
    return (since,) if since else ()


def find_no_gpu(environment: Environment, reason: NoGpuReason) -> Iterator[Fields]:
    """That torch is blind for this reason, with the numbers of all."""
    if find_no_gpu_reason(environment) != reason:
        return
    torch, driver, hidden = environment.torch, environment.driver, find_hiding_variables(environment)
    yield {
        "torch": torch.version,
        "built_for": f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "CPU",
        "driver": driver.version or "none",
        "needed": ".".join(map(str, find_min_driver(environment))) or "unknown",
        "cards": ", ".join(card.name for card in driver.cards) or ", ".join(driver.pci) or "none",
        "variables": ", ".join(f"{name}={value!r}" for name, value in hidden.items()) or "none",
    }


def find_broken_torch(environment: Environment) -> Iterator[Fields]:
    torch = environment.torch
    if torch.error and not torch.available:
        yield {"torch": torch.version or "unknown", "what": torch.error}


def find_duplicate_packages(environment: Environment) -> Iterator[Fields]:
    for package in environment.packages:
        if len(package.homes) > 1:
            yield {"package": package.name, "version": package.version, "homes": ", ".join(package.homes)}


def find_other_toolkits(environment: Environment) -> Iterator[Fields]:
    built = environment.torch.cuda or environment.torch.hip
    for toolkit in environment.toolkits:
        if built and parse_version_parts(toolkit.version) != parse_version_parts(built):
            yield {"program": toolkit.program, "version": toolkit.version, "built_for": built}


def find_small_disks(environment: Environment, least_gib: Mapping[str, int]) -> Iterator[Fields]:
    for disk in environment.disks:
        least = least_gib.get(disk.place, 0)
        if disk.free_bytes < least * GIB:
            yield {"place": disk.place, "free_gib": to_gib(disk.free_bytes), "least_gib": float(least)}


def find_outside_packages(environment: Environment, home: str) -> Iterator[Fields]:
    """Packages whose imported copy is not of this environment, one finding for all."""
    names = [package.name for package in environment.packages if package.homes[:1] == (home,)]
    if names:
        yield {
            "packages": ", ".join(names),
            "environment": environment.python.environment or "the system's Python",
        }


def find_system_cuda_folders(environment: Environment) -> Iterator[Fields]:
    """Folders of a CUDA or cuDNN of the system's on the loader's path, before those of the wheels."""
    folders = environment.variables.get("LD_LIBRARY_PATH", "").split(":")
    others = [folder for folder in folders if re.search(r"cuda(?!_compat)|cudnn", folder)]
    if others and environment.torch.cuda:
        yield {"folders": len(others), "variable": "LD_LIBRARY_PATH"}


SOFTWARE_PREDICATES = (
    find_no_gpu,
    find_broken_torch,
    find_duplicate_packages,
    find_other_toolkits,
    find_small_disks,
    find_outside_packages,
    find_system_cuda_folders,
)
