"""What can be wrong between torch, the driver and the cards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from finitune.device.environment import Environment
from finitune.device.rules.rule import ERROR, NOTE, WARNING, Numbers, Rule, leading, once

Blindness = Literal["", "torch", "cpu-wheel", "rocm-build", "no-driver", "driver-old", "hidden", "no-gpu", "unknown"]

COMPATIBILITY = "https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"
INSTALL = "https://pytorch.org/get-started/locally/"
CPU_WHEEL = "https://github.com/bmaltais/kohya_ss/issues/719"
OFF = "autocast('cuda') and GradScaler('cuda') then switch themselves off without a word"

DRIVER_SINCE = {13: 580, 12: 525, 11: 450}
"""The first driver for each major CUDA version, by minor version compatibility. Source: COMPATIBILITY."""

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def blindness(environment: Environment) -> Blindness:
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
    if hiding(environment):
        return "hidden"
    if torch.cuda and driver.version and driver_since(environment) > leading(driver.version, 1):
        return "driver-old"
    if torch.cuda and not driver.version:
        return "no-driver" if "nvidia" in driver.pci else "no-gpu"
    return "unknown" if there else "no-gpu"


def hiding(environment: Environment) -> dict[str, str]:
    """The variables that leave torch no device, with their values."""
    return {
        name: environment.variables[name]
        for name in VISIBLE
        if name in environment.variables and hides_all(environment.variables[name], environment)
    }


def hides_all(value: str, environment: Environment) -> bool:
    """Whether the first device that a list names is none; CUDA reads the list up to the first that is not there."""
    first = value.split(",")[0].strip()
    cards = environment.driver.cards
    if first.isdigit():
        return bool(cards) and int(first) >= len(cards)
    if first.startswith(("GPU-", "MIG-")):
        return bool(cards) and not first.startswith("MIG-") and not any(c.uuid.startswith(first) for c in cards)
    return True  # nothing, -1, or a word


def driver_since(environment: Environment) -> tuple[int, ...]:
    """The first driver that the CUDA of the wheel runs on; () where that is not known."""
    since = DRIVER_SINCE.get(next(iter(leading(environment.torch.cuda or "")), 0))
    return (since,) if since else ()


def blind(*reasons: Blindness) -> Callable[[Environment], list[Numbers]]:
    """The condition that torch is blind for one of these reasons, with the numbers of all."""

    def numbers(environment: Environment) -> list[Numbers]:
        torch, driver, hidden = environment.torch, environment.driver, hiding(environment)
        return once(
            blindness(environment) in reasons,
            torch=torch.version,
            built_for=f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "CPU",
            driver=driver.version or "none",
            needed=".".join(map(str, driver_since(environment))) or "unknown",
            cards=", ".join(card.name for card in driver.cards) or ", ".join(driver.pci) or "none",
            variables=", ".join(f"{name}={value!r}" for name, value in hidden.items()) or "none",
        )

    return numbers


def two_copies(environment: Environment) -> Iterator[Numbers]:
    for package in environment.packages:
        if len(package.homes) > 1:
            yield {"package": package.name, "version": package.version, "homes": ", ".join(package.homes)}


def conv3d(environment: Environment) -> list[Numbers]:
    torch = environment.torch
    slow = torch.cuda and (2, 9) <= leading(torch.version) < (2, 10) and 91002 <= (torch.cudnn or 0) < 91500
    return once(slow, torch=torch.version, cudnn=torch.cudnn)


def other_toolkit(environment: Environment) -> Iterator[Numbers]:
    built = environment.torch.cuda or environment.torch.hip
    for toolkit in environment.toolkits:
        if built and leading(toolkit.version) != leading(built):
            yield {"program": toolkit.program, "version": toolkit.version, "built_for": built}


# fmt: off
RULES = (
    Rule("TORCH-MISSING", ERROR, "torch",
         lambda e: once(not e.torch.version and not e.torch.error, python=e.python.version),
         "torch is not installed for this Python ({python})",
         "Install it with the command that the page below gives for this system.", INSTALL),
    Rule("TORCH-BROKEN", ERROR, "torch",
         lambda e: once(e.torch.error and not e.torch.available, torch=e.torch.version or "unknown",
                        what=e.torch.error),
         "torch {torch} is installed and does not load: {what}",
         "Install it again into a fresh environment; on Windows install the Visual C++ runtime, too.",
         "https://github.com/pytorch/pytorch/issues/131662"),
    Rule("TORCH-CPU-ONLY", ERROR, "torch", blind("cpu-wheel"),
         f"torch {{torch}} is a CPU build, on a machine with {{cards}}; {OFF}",
         "Remove torch and install a build for the card: pip install torch --index-url "
         "https://download.pytorch.org/whl/cu130 (NVIDIA), or the ROCm wheel (AMD).", CPU_WHEEL),
    Rule("TORCH-ROCM-ON-NVIDIA", ERROR, "torch", blind("rocm-build"),
         "torch {torch} is built for AMD cards ({built_for}), and the machine has {cards}",
         "Install a CUDA wheel of torch.", INSTALL),
    Rule("DRIVER-MISSING", ERROR, "driver", blind("no-driver"),
         f"an NVIDIA card is on the bus, and no driver of NVIDIA's answers; {OFF}",
         "Install NVIDIA's driver {needed} or later; in a container, start it with --gpus all.", COMPATIBILITY),
    Rule("DRIVER-OLD", ERROR, "driver", blind("driver-old"),
         f"the driver is {{driver}}, and torch {{torch}} ({{built_for}}) needs {{needed}} or later; {OFF}",
         "Update the driver, or install a torch built for an older CUDA: cu126 runs from driver 525 on.",
         COMPATIBILITY),
    Rule("DEVICES-HIDDEN", WARNING, "environment", blind("hidden"),
         f"{{variables}} leaves torch none of the cards ({{cards}}), so it computes on the CPU; {OFF}",
         "Unset the variable, or name a device that is there: they count from 0.",
         "https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables"),
    Rule("DEVICES-UNSEEN", ERROR, "torch", blind("unknown"),
         f"torch {{torch}} ({{built_for}}) sees none of the cards ({{cards}}) of driver {{driver}}; {OFF}",
         "Restart the machine (after a driver update that is needed); in a container, start it with --gpus all.",
         "https://github.com/bmaltais/kohya_ss/issues/378"),
    Rule("NO-GPU", NOTE, "devices", blind("no-gpu"),
         f"there is no GPU that torch {{torch}} ({{built_for}}) could use, so it computes on the CPU; {OFF}",
         "Nothing to do, unless there is one: then see to its driver.",
         "https://docs.pytorch.org/docs/stable/amp.html"),
    Rule("PACKAGE-TWICE", WARNING, "{package}", two_copies,
         "{package} is installed more than once ({homes}); the first one, {version}, is imported",
         "Remove the other copy, or start Python with -s and without PYTHONPATH.",
         "https://docs.python.org/3/library/site.html"),
    Rule("CONV3D-MEMORY", WARNING, "torch", conv3d,
         "torch {torch} with cuDNN {cudnn} computes 3-D convolutions in half precision with several times the memory; "
         "the VAE of Anima and Qwen-Image is made of them",
         "Install torch 2.10 or later, or nvidia-cudnn 9.15 or later beside torch 2.9.1.",
         "https://github.com/pytorch/pytorch/issues/166643"),
    Rule("TOOLKIT-OTHER", NOTE, "{program}", other_toolkit,
         "{program} {version} is on the path, and torch brings its own CUDA {built_for}: that does not matter for "
         "wheels, only for building extensions from source",
         "Nothing to do.", INSTALL),
)
# fmt: on
