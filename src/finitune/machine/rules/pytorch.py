"""What can be wrong between torch, the driver and the cards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from finitune.machine.environment import Environment
from finitune.machine.rules.rule import (
    DEVICE_ERROR,
    DEVICE_NOTE,
    DEVICE_WARNING,
    MachineRule,
    MatchFields,
    parse_version_parts,
    report_if,
)

NoGpuReason = Literal["", "torch", "cpu-wheel", "rocm-build", "no-driver", "driver-old", "hidden", "no-gpu", "unknown"]

_CUDA_COMPATIBILITY_URL = "https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"
_TORCH_INSTALL_URL = "https://pytorch.org/get-started/locally/"
_CPU_WHEEL_URL = "https://github.com/bmaltais/kohya_ss/issues/719"
_AMP_OFF_NOTE = "autocast('cuda') and GradScaler('cuda') then switch themselves off without a word"

MIN_DRIVER_BY_CUDA = {13: 580, 12: 525, 11: 450}
"""The first driver for each major CUDA version, by minor version compatibility. Source: COMPATIBILITY."""

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


def match_no_gpu(*reasons: NoGpuReason) -> Callable[[Environment], list[MatchFields]]:
    """The condition that torch is blind for one of these reasons, with the numbers of all."""

    def numbers(environment: Environment) -> list[MatchFields]:
        torch, driver, hidden = environment.torch, environment.driver, find_hiding_variables(environment)
        return report_if(
            find_no_gpu_reason(environment) in reasons,
            torch=torch.version,
            built_for=f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "CPU",
            driver=driver.version or "none",
            needed=".".join(map(str, find_min_driver(environment))) or "unknown",
            cards=", ".join(card.name for card in driver.cards) or ", ".join(driver.pci) or "none",
            variables=", ".join(f"{name}={value!r}" for name, value in hidden.items()) or "none",
        )

    return numbers


def find_duplicate_packages(environment: Environment) -> Iterator[MatchFields]:
    for package in environment.packages:
        if len(package.homes) > 1:
            yield {"package": package.name, "version": package.version, "homes": ", ".join(package.homes)}


def find_slow_conv3d(environment: Environment) -> list[MatchFields]:
    torch = environment.torch
    slow = torch.cuda and (2, 9) <= parse_version_parts(torch.version) < (2, 10) and 91002 <= (torch.cudnn or 0) < 91500
    return report_if(slow, torch=torch.version, cudnn=torch.cudnn)


def find_other_toolkits(environment: Environment) -> Iterator[MatchFields]:
    built = environment.torch.cuda or environment.torch.hip
    for toolkit in environment.toolkits:
        if built and parse_version_parts(toolkit.version) != parse_version_parts(built):
            yield {"program": toolkit.program, "version": toolkit.version, "built_for": built}


PYTORCH_RULES = (
    MachineRule(
        "TORCH-MISSING",
        DEVICE_ERROR,
        "torch",
        lambda e: report_if(not e.torch.version and not e.torch.error, python=e.python.version),
        "torch is not installed for this Python ({python})",
        "Install it with the command that the page below gives for this system.",
        _TORCH_INSTALL_URL,
    ),
    MachineRule(
        "TORCH-BROKEN",
        DEVICE_ERROR,
        "torch",
        lambda e: report_if(
            e.torch.error and not e.torch.available, torch=e.torch.version or "unknown", what=e.torch.error
        ),
        "torch {torch} is installed and does not load: {what}",
        "Install it again into a fresh environment; on Windows install the Visual C++ runtime, too.",
        "https://github.com/pytorch/pytorch/issues/131662",
    ),
    MachineRule(
        "TORCH-CPU-ONLY",
        DEVICE_ERROR,
        "torch",
        match_no_gpu("cpu-wheel"),
        f"torch {{torch}} is a CPU build, on a machine with {{cards}}; {_AMP_OFF_NOTE}",
        "Remove torch and install a build for the card: pip install torch --index-url "
        "https://download.pytorch.org/whl/cu130 (NVIDIA), or the ROCm wheel (AMD).",
        _CPU_WHEEL_URL,
    ),
    MachineRule(
        "TORCH-ROCM-ON-NVIDIA",
        DEVICE_ERROR,
        "torch",
        match_no_gpu("rocm-build"),
        "torch {torch} is built for AMD cards ({built_for}), and the machine has {cards}",
        "Install a CUDA wheel of torch.",
        _TORCH_INSTALL_URL,
    ),
    MachineRule(
        "DRIVER-MISSING",
        DEVICE_ERROR,
        "driver",
        match_no_gpu("no-driver"),
        f"an NVIDIA card is on the bus, and no driver of NVIDIA's answers; {_AMP_OFF_NOTE}",
        "Install NVIDIA's driver {needed} or later; in a container, start it with --gpus all.",
        _CUDA_COMPATIBILITY_URL,
    ),
    MachineRule(
        "DRIVER-OLD",
        DEVICE_ERROR,
        "driver",
        match_no_gpu("driver-old"),
        f"the driver is {{driver}}, and torch {{torch}} ({{built_for}}) needs {{needed}} or later; {_AMP_OFF_NOTE}",
        "Update the driver, or install a torch built for an older CUDA: cu126 runs from driver 525 on.",
        _CUDA_COMPATIBILITY_URL,
    ),
    MachineRule(
        "DEVICES-HIDDEN",
        DEVICE_WARNING,
        "environment",
        match_no_gpu("hidden"),
        f"{{variables}} leaves torch none of the cards ({{cards}}), so it computes on the CPU; {_AMP_OFF_NOTE}",
        "Unset the variable, or name a device that is there: they count from 0.",
        "https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables",
    ),
    MachineRule(
        "DEVICES-UNSEEN",
        DEVICE_ERROR,
        "torch",
        match_no_gpu("unknown"),
        f"torch {{torch}} ({{built_for}}) sees none of the cards ({{cards}}) of driver {{driver}}; {_AMP_OFF_NOTE}",
        "Restart the machine (after a driver update that is needed); in a container, start it with --gpus all.",
        "https://github.com/bmaltais/kohya_ss/issues/378",
    ),
    MachineRule(
        "NO-GPU",
        DEVICE_NOTE,
        "devices",
        match_no_gpu("no-gpu"),
        f"there is no GPU that torch {{torch}} ({{built_for}}) could use, so it computes on the CPU; {_AMP_OFF_NOTE}",
        "Nothing to do, unless there is one: then see to its driver.",
        "https://docs.pytorch.org/docs/stable/amp.html",
    ),
    MachineRule(
        "PACKAGE-TWICE",
        DEVICE_WARNING,
        "{package}",
        find_duplicate_packages,
        "{package} is installed more than once ({homes}); the first one, {version}, is imported",
        "Remove the other copy, or start Python with -s and without PYTHONPATH.",
        "https://docs.python.org/3/library/site.html",
    ),
    MachineRule(
        "CONV3D-MEMORY",
        DEVICE_WARNING,
        "torch",
        find_slow_conv3d,
        "torch {torch} with cuDNN {cudnn} computes 3-D convolutions in half precision with several times the memory; "
        "the VAE of Anima and Qwen-Image is made of them",
        "Install torch 2.10 or later, or nvidia-cudnn 9.15 or later beside torch 2.9.1.",
        "https://github.com/pytorch/pytorch/issues/166643",
    ),
    MachineRule(
        "TOOLKIT-OTHER",
        DEVICE_NOTE,
        "{program}",
        find_other_toolkits,
        "{program} {version} is on the path, and torch brings its own CUDA {built_for}: that does not matter for "
        "wheels, only for building extensions from source",
        "Nothing to do.",
        _TORCH_INSTALL_URL,
    ),
)
