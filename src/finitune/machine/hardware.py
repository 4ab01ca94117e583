"""Which compute dtype on which device, and why: `advise` is a pure function of `DeviceFacts`.

What is known stands in devices.toml, a table for each family, and the first that fits decides. Three things shape it.

Where bf16 is native it is the default, since it needs no plan; where it is not, fp16 by a plan is, if it is faster.
Whether bf16 is native follows from the compute capability (8.0 and later) or the AMD architecture, never from
`torch.cuda.is_bf16_supported`: since torch 2.3 that says True on Turing, Volta and Pascal too, because a bf16 tensor
can be made there, though emulated bf16 can be slower than fp32. On ROCm it says True without looking at the device.
T4 and GTX 1650 share capability 7.5, and only one of them has tensor cores; so Turing is told apart by name. A name
that is not known gets fp32: slow at worst, where a half product without tensor cores may be slower still, or NaN.

Sources: NVIDIA CUDA programming guide (compute capabilities, binary compatibility) and data sheets; AMD instruction
set manuals; torch/cuda/__init__.py; pytorch issues #58123, #77955 and #195716 (GTX 16xx in half precision).
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from finitune.errors import UsageError
from finitune.package_data import read_package_toml

DeviceKind = Literal["cuda", "rocm", "mps", "cpu", "xpu"]
ComputeDtype = Literal["planned-half", "bf16", "fp32"]
Capability = tuple[int, int]


@dataclass(frozen=True)
class DeviceFacts:
    """What the advice rests on: the device, and what the installed torch was built for."""

    name: str
    kind: DeviceKind
    capability: Capability | None  # NVIDIA only
    gcn_arch: str  # AMD only, as torch spells it: "gfx90a:sramecc+:xnack-"
    total_memory_bytes: int  # 0 where it is not known
    torch_version: str
    cuda_version: str | None  # what torch was built with, not the driver's
    arch_list: tuple[str, ...]  # what torch's kernels were built for: "sm_75", "compute_90", "gfx1100"

    @property
    def architecture(self) -> str:
        """'7.5', 'gfx90a', or '' where a device has no such number."""
        return ".".join(map(str, self.capability)) if self.capability else self.gcn_arch.partition(":")[0]


@dataclass(frozen=True)
class Advice:
    """The dtype to compute in, what else would work, and the grounds; each text is whole by itself."""

    compute: ComputeDtype
    alternatives: tuple[ComputeDtype, ...]  # best first; what is neither here nor `compute` is no good on this device
    native_bf16: bool  # False where it is emulated or not known
    tensor_cores: bool  # or AMD's matrix cores, or Intel's XMX; False where it is not known
    fp16_output_products: bool  # torch.mm(fp16, fp16, out_dtype=torch.float32) is offered: no fp16 rounding of a sum
    reasons: tuple[str, ...]
    cautions: tuple[Caution, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """The cautions as texts."""
        return tuple(map(str, self.cautions))


@dataclass(frozen=True)
class Caution:
    """Something to know of a device: it has no kernels, its name says too little, or products come in fp16."""

    kind: Literal["kernels", "name", "output"]
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}. {self.remedy}"


@dataclass(frozen=True, kw_only=True)
class DeviceFamily:
    """A table of devices.toml, where the fields are explained."""

    family: str
    compute: ComputeDtype
    reason: str
    kind: DeviceKind = "cpu"
    alternatives: tuple[ComputeDtype, ...] = ()
    since: Capability = (0, 0)
    names: tuple[str, ...] = ()
    native_bf16: bool = False
    tensor_cores: bool = False
    warning: str = ""
    remedy: str = ""

    def fits(self, facts: DeviceFacts) -> bool:
        """True if `facts` describe a device of this family, or of a later one of the same kind."""
        if self.kind != facts.kind or self.since > (facts.capability or (0, 0)):
            return False
        text = facts.gcn_arch if facts.kind == "rocm" else facts.name
        return not self.names or any(re.search(rf"\b{name}\b", text, re.IGNORECASE) for name in self.names)


def parse_device_family(entry: Mapping[str, Any]) -> DeviceFamily:
    """A table of devices.toml; raises TypeError for a key that families do not have, or lack."""
    lists: dict[str, Any] = {key: tuple(value) for key, value in entry.items() if isinstance(value, list)}
    return DeviceFamily(**{**entry, **lists})


@cache
def read_device_families() -> tuple[DeviceFamily, ...]:
    """All families, in the order in which they are tried."""
    return tuple(map(parse_device_family, read_package_toml(_DEVICES_FILE)["family"]))


_DEVICES_FILE = Path(__file__).with_name("devices.toml")
BF16_EMULATED = "bf16 is only emulated here (on a GTX 1080 it took 1.85 times as long as fp32)"

# mm, bmm, addmm and baddbmm took `out_dtype` in torch 2.8 (its release notes), on CUDA; ROCm and XPU followed later
# or not at all, so nothing is promised there. numerics/products.py tries it before it relies on it.
MIN_TORCH_FOR_OUT_DTYPE = (2, 8)

# A binary for a discrete GPU does not run on an integrated one, nor the other way round, until CUDA 13.2 lets the
# integrated ones join. Source: CUDA programming guide, "Binary compatibility"; torch/cuda/__init__.py.
INTEGRATED_CAPABILITIES = ((5, 3), (6, 2), (7, 2), (8, 7), (10, 1))
MIN_CUDA_FOR_INTEGRATED = (13, 2)

# Where a wheel lacks the kernels: capability from which on, and what to install. Source: the architectures that
# torch/cuda/__init__.py of 2.14 lists for its own wheels.
WHEEL_REMEDY_BY_CAPABILITY = (
    ((10, 0), "Install a torch wheel built for CUDA 12.8 or later, such as cu130."),
    ((7, 5), "Install the cu126 or the cu130 wheel of torch."),
    ((5, 0), "Install the cu126 wheel of torch, 2.14 or earlier: the last ones built for Maxwell, Pascal and Volta."),
    ((0, 0), "No wheel of a torch that is new enough is built for this card; use another card, or the CPU."),
)
JETSON_WHEEL_REMEDY = "Install the torch wheel that NVIDIA publishes for this Jetson."


def advise(facts: DeviceFacts) -> Advice:
    """The compute dtype for a device, with alternatives, reasons and warnings; total: an unknown device gets fp32.

    >>> t4 = DeviceFacts("Tesla T4", "cuda", (7, 5), "", 16 << 30, "2.11.0+cu126", "12.6", ("sm_70", "sm_75"))
    >>> advise(t4).compute, advise(t4).native_bf16
    ('planned-half', False)
    """
    family = next((family for family in read_device_families() if family.fits(facts)), None)
    family = family or parse_device_family(read_package_toml(_DEVICES_FILE)["unknown"])
    single_output = facts.kind == "cuda" and parse_version_parts(facts.torch_version) >= MIN_TORCH_FOR_OUT_DTYPE
    identity = facts.architecture
    reasons = [f"{family.family}{f' ({identity})' if identity else ''}: {family.reason}"]
    if facts.capability and not family.native_bf16:
        reasons.append(BF16_EMULATED)
    if facts.kind == "cpu":
        build = "a GPU build that sees no GPU: see to the driver" if facts.arch_list else "a CPU build, blind to GPUs"
        reasons.append(f"torch {facts.torch_version} is {build}")
    return Advice(
        compute=family.compute,
        alternatives=family.alternatives,
        native_bf16=family.native_bf16,
        tensor_cores=family.tensor_cores,
        fp16_output_products=single_output,
        reasons=tuple(reasons),
        cautions=tuple(list_cautions(facts, family, single_output)),
    )


def list_cautions(facts: DeviceFacts, family: DeviceFamily, single_output: bool) -> Iterator[Caution]:
    """What to know of a device, the worst first."""
    if not has_kernels(facts):
        yield Caution(
            "kernels",
            f"torch {facts.torch_version} holds no kernels for {facts.name} ({facts.architecture}), only for "
            f"{', '.join(facts.arch_list)}; it would stop with 'no kernel image is available'",
            find_wheel_remedy(facts),
        )
    if family.warning:
        yield Caution("name", f"{facts.name}: {family.warning}", family.remedy)
    if family.compute == "planned-half" and facts.kind == "cuda" and not single_output:
        yield Caution(
            "output",
            f"torch {facts.torch_version} writes fp16 products in fp16 only, so each is scaled to fit and rounded once "
            "more",
            f"Install torch {'.'.join(map(str, MIN_TORCH_FOR_OUT_DTYPE))} or later.",
        )


def find_wheel_remedy(facts: DeviceFacts) -> str:
    """Which torch has kernels for a device."""
    capability = facts.capability or (0, 0)
    if facts.kind == "rocm":
        return "Install a ROCm wheel of torch that lists it."
    if capability in INTEGRATED_CAPABILITIES:
        return JETSON_WHEEL_REMEDY
    return next(text for since, text in WHEEL_REMEDY_BY_CAPABILITY if capability >= since)


def has_kernels(facts: DeviceFacts) -> bool:
    """True if the installed torch holds code for this device; True, too, where torch does not say what it holds.

    NVIDIA: machine code (sm_XY) runs on the same major version from its minor on, PTX (compute_XY) on anything later;
    a suffix "a" ties either to one capability. AMD: the architecture itself must be listed.
    """
    if facts.kind == "rocm":
        return not facts.gcn_arch or not facts.arch_list or facts.architecture in facts.arch_list
    if facts.kind != "cuda" or not facts.arch_list or facts.capability is None:
        return True
    joined = parse_version_parts(facts.cuda_version or "") >= MIN_CUDA_FOR_INTEGRATED
    return any(_runs_on(entry, facts.capability, joined) for entry in facts.arch_list)


def read_device_facts(index: int = 0) -> DeviceFacts:
    """The facts of accelerator `index`, or of the CPU where torch sees no accelerator.

    Raises UsageError (DEVICE-INDEX) for an accelerator that is not there.
    """
    import torch

    build: dict[str, Any] = {
        "torch_version": str(torch.__version__),
        "cuda_version": torch.version.cuda,
        "arch_list": tuple(torch.cuda.get_arch_list()),
    }
    if torch.cuda.is_available():
        _check_index(index, torch.cuda.device_count())
        found = torch.cuda.get_device_properties(index)
        if torch.version.hip:
            return DeviceFacts(found.name, "rocm", None, found.gcnArchName, found.total_memory, **build)
        return DeviceFacts(found.name, "cuda", (found.major, found.minor), "", found.total_memory, **build)
    if torch.xpu.is_available():
        _check_index(index, torch.xpu.device_count())
        found = torch.xpu.get_device_properties(index)
        return DeviceFacts(found.name, "xpu", None, "", found.total_memory, **build)
    _check_index(index, 1)
    if torch.backends.mps.is_available():
        return DeviceFacts("Apple GPU", "mps", None, "", torch.mps.recommended_max_memory(), **build)
    return _cpu_facts(build)


def _cpu_facts(build: Mapping[str, Any]) -> DeviceFacts:
    known = getattr(os, "sysconf_names", {})  # not there on Windows
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in known else 0
    return DeviceFacts(platform.processor() or platform.machine() or "CPU", "cpu", None, "", memory, **build)


def _check_index(index: int, count: int) -> None:
    if not 0 <= index < count:
        raise UsageError(
            f"There is no device {index}.",
            code="DEVICE-INDEX",
            subject=str(index),
            evidence={"devices": count},
            remedy="Take 0: there is one device." if count == 1 else f"Take 0 to {count - 1}.",
        )


def _runs_on(entry: str, capability: Capability, joined: bool) -> bool:
    """Whether code of one entry of the arch list runs on a card; `joined`: integrated GPUs take discrete ones' code."""
    parsed = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", entry)
    if not parsed:
        return False
    form, major, minor, suffix = parsed.groups()
    built = (int(major), int(minor))
    if suffix == "a" or built == capability:
        return built == capability
    if form == "compute" and not suffix:
        return built <= capability
    apart = built in INTEGRATED_CAPABILITIES or (capability in INTEGRATED_CAPABILITIES and not joined)
    return not apart and built[0] == capability[0] and built[1] <= capability[1]


def parse_version_parts(version: str, parts: int = 2) -> tuple[int, ...]:
    """The first numbers of a version.

    >>> parse_version_parts("2.14.1+cu130"), parse_version_parts("580.65.06", 1), parse_version_parts("unknown")
    ((2, 14), (580,), ())
    """
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")[:parts]) if found else ()
