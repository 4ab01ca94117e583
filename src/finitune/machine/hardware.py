"""Which compute dtype on which device, and why: `advise` is a pure function of `DeviceFacts`.

What is known stands in RULES, one line a family, and the first line that fits decides. Three things shape it.

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

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from finitune.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

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


@dataclass(frozen=True)
class Advice:
    """The dtype to compute in, what else would work, and the grounds; each text is whole by itself."""

    compute: ComputeDtype
    alternatives: tuple[ComputeDtype, ...]  # best first; what is neither here nor `compute` is no good on this device
    native_bf16: bool  # False where it is emulated or not known
    tensor_cores: bool  # or AMD's matrix cores, or Intel's XMX; False where it is not known
    fp16_output_products: bool  # torch.mm(fp16, fp16, out_dtype=torch.float32) is offered: no fp16 rounding of a sum
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class DeviceFamily:
    """One family of devices: how to know it, what it has, and what follows."""

    family: str
    kind: DeviceKind
    compute: ComputeDtype
    reason: str
    alternatives: tuple[ComputeDtype, ...] = ()
    since: Capability = (0, 0)  # lowest compute capability
    names: tuple[str, ...] = ()  # whole words of the name, or of the AMD architecture; none: any
    native_bf16: bool = False
    tensor_cores: bool = False
    warning: str = ""

    def fits(self, facts: DeviceFacts) -> bool:
        """True if `facts` describe a device of this family, or of a later one of the same kind."""
        if self.kind != facts.kind or self.since > (facts.capability or (0, 0)):
            return False
        text = facts.gcn_arch if facts.kind == "rocm" else facts.name
        return not self.names or any(re.search(rf"\b{name}\b", text, re.IGNORECASE) for name in self.names)


TURING_WITH_TENSOR_CORES = (r"T4G?", "T10", "T40", r"RTX ?20[6-8]0", r"RTX ?[34568]000P?", "TITAN RTX")
TURING_WITHOUT_TENSOR_CORES = (r"GTX ?16[356]0", r"MX[45]50", r"T[456]00", "T550", r"T1[02]00", "T2000", "CMP 30HX")
XE_WITH_MATRIX_ENGINES = (r"Arc.* [AB]\d{2,3}M?", r"Arc.* 1[34]0[VT]", r"Data Center GPU (Max|Flex)")

BF16_NATIVE = (
    "bf16 is native and as wide as fp32, so it needs no plan; planned-half is more accurate, at the same speed"
)
BF16_NATIVE_MI100 = (
    "bf16 is native and as wide as fp32, so it needs no plan; planned-half is more accurate, and twice as fast"
)
# torch documentation, "Numerical accuracy": fp16 matrix instructions of MI200 flush subnormals to zero.
BF16_NATIVE_MI200 = "bf16 is native, and fp16 products flush subnormals to zero, on which no plan may count"
HALF_ONLY = "its tensor cores multiply fp16 but not bf16, and fp32 would leave them idle"
HALF_IN_PAIRS = "it has no bf16 units and no matrix cores, but fp16 in pairs at twice the rate of fp32"
NO_TENSOR_CORES = "it has no tensor cores, so fp16 products are not faster than fp32 ones"
NO_MATRIX_CORES = "it has neither bf16 units nor matrix cores"
SOME_TENSOR_CORES = (
    "some 7.5 cards have tensor cores, and on the others fp16 is slow or NaN; fp32 is right on all of them"
)
SOME_MATRIX_ENGINES = "not every Intel GPU has matrix engines; fp32 is right on all of them"
HALF_AS_FP32 = "planned-half is computed with fp32 arithmetic here: it saves memory, not time"
CPU_EMULATES_HALF = (
    "a CPU is fast in fp32; planned-half is emulated, with the tensor core's meaning, at the cost of fp32"
)
BF16_EMULATED = "bf16 is only emulated here (on a GTX 1080 it took 1.85 times as long as fp32)"

_MEASURE_HALF_HINT = (
    "Measure it: time a 2048 x 2048 product in fp16 and in fp32. If fp16 is more than three times as fast, "
    "pass --precision planned-half."
)
_UNKNOWN_DEVICE_HINT = f"nothing is known about this device. {_MEASURE_HALF_HINT}"
_UNKNOWN_TURING_HINT = f"its name does not say whether it has tensor cores. {_MEASURE_HALF_HINT}"
_UNKNOWN_XE_HINT = (
    "its name does not say whether it has matrix engines. Measure it: time a 2048 x 2048 product in bf16 and in fp32. "
    "If bf16 is faster, pass --precision bf16."
)

_NATIVE_BF16: dict[str, Any] = {"native_bf16": True, "tensor_cores": True}
_HALF_OR_FP32: tuple[ComputeDtype, ...] = ("planned-half", "fp32")
_HALF: tuple[ComputeDtype, ...] = ("planned-half",)
_FP32: tuple[ComputeDtype, ...] = ("fp32",)

DEVICE_FAMILIES = (
    DeviceFamily("Blackwell or later", "cuda", "bf16", BF16_NATIVE, _HALF_OR_FP32, since=(10, 0), **_NATIVE_BF16),
    DeviceFamily("Hopper", "cuda", "bf16", BF16_NATIVE, _HALF_OR_FP32, since=(9, 0), **_NATIVE_BF16),
    DeviceFamily("Ada", "cuda", "bf16", BF16_NATIVE, _HALF_OR_FP32, since=(8, 9), **_NATIVE_BF16),
    DeviceFamily("Ampere", "cuda", "bf16", BF16_NATIVE, _HALF_OR_FP32, since=(8, 0), **_NATIVE_BF16),
    DeviceFamily(
        "Turing with tensor cores",
        "cuda",
        "planned-half",
        f"{HALF_ONLY} (T4: 65 TFLOPS in fp16, 8.1 in fp32)",
        _FP32,
        since=(7, 5),
        names=TURING_WITH_TENSOR_CORES,
        tensor_cores=True,
    ),
    DeviceFamily(
        "Turing without tensor cores",
        "cuda",
        "fp32",
        f"{NO_TENSOR_CORES}, and fp16 convolutions can give NaN",
        since=(7, 5),
        names=TURING_WITHOUT_TENSOR_CORES,
    ),
    DeviceFamily(
        "Turing of an unknown name",
        "cuda",
        "fp32",
        SOME_TENSOR_CORES,
        _HALF,
        since=(7, 5),
        warning=_UNKNOWN_TURING_HINT,
    ),
    DeviceFamily(
        "Volta",
        "cuda",
        "planned-half",
        f"{HALF_ONLY} (V100: 125 TFLOPS in fp16, 15.7 in fp32)",
        _FP32,
        since=(7, 0),
        tensor_cores=True,
    ),
    DeviceFamily(
        "Pascal", "cuda", "fp32", f"{NO_TENSOR_CORES}; fp16 arithmetic runs at 1/64 of the rate", _HALF, since=(6, 1)
    ),
    DeviceFamily("Pascal", "cuda", "fp32", f"{NO_TENSOR_CORES}: torch adds them up in fp32", _HALF, since=(6, 0)),
    DeviceFamily("Maxwell", "cuda", "fp32", NO_TENSOR_CORES, _HALF, since=(5, 0)),
    DeviceFamily("Kepler or older", "cuda", "fp32", NO_TENSOR_CORES, since=(1, 0)),
    DeviceFamily("RDNA 4", "rocm", "bf16", BF16_NATIVE, _HALF_OR_FP32, names=(r"gfx12\w\w",), **_NATIVE_BF16),
    DeviceFamily("RDNA 3", "rocm", "bf16", BF16_NATIVE, _HALF_OR_FP32, names=(r"gfx11\w\w",), **_NATIVE_BF16),
    DeviceFamily(
        "CDNA 3 or 4", "rocm", "bf16", BF16_NATIVE, _HALF_OR_FP32, names=(r"gfx94[0-2]", "gfx950"), **_NATIVE_BF16
    ),
    DeviceFamily("CDNA 2", "rocm", "bf16", BF16_NATIVE_MI200, _FP32, names=("gfx90a",), **_NATIVE_BF16),
    DeviceFamily("CDNA 1", "rocm", "bf16", BF16_NATIVE_MI100, _HALF_OR_FP32, names=("gfx908",), **_NATIVE_BF16),
    DeviceFamily("RDNA 1 or 2", "rocm", "planned-half", HALF_IN_PAIRS, _FP32, names=(r"gfx10\w\w",)),
    DeviceFamily("Vega 20", "rocm", "planned-half", HALF_IN_PAIRS, _FP32, names=("gfx906",)),
    DeviceFamily("Vega or older", "rocm", "fp32", NO_MATRIX_CORES, _HALF, names=(r"gfx[6-9]\w\w",)),
    DeviceFamily(
        "Intel Xe",
        "xpu",
        "bf16",
        f"bf16 is native in its matrix engines; {HALF_AS_FP32}",
        _HALF_OR_FP32,
        names=XE_WITH_MATRIX_ENGINES,
        **_NATIVE_BF16,
    ),
    DeviceFamily(
        "Intel GPU of an unknown name",
        "xpu",
        "fp32",
        SOME_MATRIX_ENGINES,
        ("bf16", "planned-half"),
        warning=_UNKNOWN_XE_HINT,
    ),
    DeviceFamily("Apple GPU", "mps", "fp32", f"bf16 is emulated on M1 and M2, and 50 % slower; {HALF_AS_FP32}", _HALF),
    DeviceFamily("CPU", "cpu", "fp32", CPU_EMULATES_HALF, ("planned-half", "bf16")),
)

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
    rule = next((rule for rule in DEVICE_FAMILIES if rule.fits(facts)), None)
    if rule is None:
        rule = DeviceFamily(
            "Unknown", facts.kind, "fp32", "fp32 is right on every device", warning=_UNKNOWN_DEVICE_HINT
        )
    single_output = facts.kind == "cuda" and _leading(facts.torch_version) >= MIN_TORCH_FOR_OUT_DTYPE
    identity = _identity(facts)
    reasons = [f"{rule.family}{f' ({identity})' if identity else ''}: {rule.reason}"]
    if facts.capability and not rule.native_bf16:
        reasons.append(BF16_EMULATED)
    if facts.kind == "cpu":
        build = "a GPU build that sees no GPU: see to the driver" if facts.arch_list else "a CPU build, blind to GPUs"
        reasons.append(f"torch {facts.torch_version} is {build}")
    warnings = _missing_kernels(facts)
    if rule.warning:
        warnings.append(f"{facts.name}: {rule.warning}")
    if rule.compute == "planned-half" and facts.kind == "cuda" and not single_output:
        warnings.append(
            f"torch {facts.torch_version} writes fp16 products in fp16 only, so each is scaled to fit and rounded once "
            f"more. Install torch {_dotted(MIN_TORCH_FOR_OUT_DTYPE)} or later."
        )
    return Advice(
        compute=rule.compute,
        alternatives=rule.alternatives,
        native_bf16=rule.native_bf16,
        tensor_cores=rule.tensor_cores,
        fp16_output_products=single_output,
        reasons=tuple(reasons),
        warnings=tuple(warnings),
    )


def has_kernels(facts: DeviceFacts) -> bool:
    """True if the installed torch holds code for this device; True, too, where torch does not say what it holds.

    NVIDIA: machine code (sm_XY) runs on the same major version from its minor on, PTX (compute_XY) on anything later;
    a suffix "a" ties either to one capability. AMD: the architecture itself must be listed.
    """
    if facts.kind == "rocm":
        return not facts.gcn_arch or not facts.arch_list or _identity(facts) in facts.arch_list
    if facts.kind != "cuda" or not facts.arch_list or facts.capability is None:
        return True
    joined = _leading(facts.cuda_version or "") >= MIN_CUDA_FOR_INTEGRATED
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
    import os
    import platform

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


def _missing_kernels(facts: DeviceFacts) -> list[str]:
    if has_kernels(facts):
        return []
    capability = facts.capability or (0, 0)
    if facts.kind == "rocm":
        remedy = "Install a ROCm wheel of torch that lists it."
    elif capability in INTEGRATED_CAPABILITIES:
        remedy = JETSON_WHEEL_REMEDY
    else:
        remedy = next(text for since, text in WHEEL_REMEDY_BY_CAPABILITY if capability >= since)
    return [
        f"torch {facts.torch_version} holds no kernels for {facts.name} ({_identity(facts)}), only for "
        f"{', '.join(facts.arch_list)}; it would stop with 'no kernel image is available'. {remedy}"
    ]


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


def _identity(facts: DeviceFacts) -> str:
    """'7.5', 'gfx90a', or '' where a device has no such number."""
    if facts.kind == "rocm":
        return facts.gcn_arch.partition(":")[0]
    return _dotted(facts.capability) if facts.capability else ""


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _leading(version: str) -> tuple[int, ...]:
    """(2, 14) of '2.14.1+cu130'; () where there is no such beginning."""
    parsed = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, parsed.groups())) if parsed else ()
