"""Machines as data, each with the codes that `examine` has to find on it: those, and no others.

The kinds of report that they stand for: cards of every generation against wheels of every age, the four ways of not
seeing a GPU, extensions built for another torch, pairs of packages, containers, Windows, WSL, and variables.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from finitune.machine.environment import (
    GIB,
    Device,
    Disk,
    Driver,
    DriverCard,
    Environment,
    Limits,
    Machine,
    MachineMemory,
    Package,
    Python,
    Toolkit,
    Torch,
)
from finitune.machine.hardware import DeviceFacts

CU118 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_37", "sm_90")
CU126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
CU128_OLD = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")  # torch 2.7 to 2.10
CU128 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
ROCM = ("gfx906", "gfx90a", "gfx942", "gfx1030", "gfx1100", "gfx1201")
WHEELS = {"cu118": CU118, "cu124": CU126, "cu126": CU126, "cu128": CU128, "cu130": CU128, "rocm6.4": ROCM, "cpu": ()}

T4 = ("Tesla T4", (7, 5), 15)
RTX_2080_TI = ("NVIDIA GeForce RTX 2080 Ti", (7, 5), 11)
GTX_1660 = ("NVIDIA GeForce GTX 1660 SUPER", (7, 5), 6)
CMP = ("NVIDIA CMP 40HX", (7, 5), 8)
V100 = ("Tesla V100-SXM2-32GB", (7, 0), 32)
P40 = ("Tesla P40", (6, 1), 24)
GTX_1080 = ("NVIDIA GeForce GTX 1080 Ti", (6, 1), 11)
M40 = ("Tesla M40", (5, 2), 12)
RTX_3060 = ("NVIDIA GeForce RTX 3060", (8, 6), 12)
RTX_3090 = ("NVIDIA GeForce RTX 3090", (8, 6), 24)
RTX_4090 = ("NVIDIA GeForce RTX 4090", (8, 9), 24)
RTX_5090 = ("NVIDIA GeForce RTX 5090", (12, 0), 32)
MIG = ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", (8, 0), 40)
H100 = ("NVIDIA H100 80GB HBM3", (9, 0), 80)
RX_7900 = ("AMD Radeon RX 7900 XTX", "gfx1100", 24)
RX_6700 = ("AMD Radeon RX 6700 XT", "gfx1031", 12)

GOOD = {
    "torch": "2.14.1", "torchvision": "0.29.1", "triton": "3.8.0", "numpy": "2.4.6", "diffusers": "0.42.1",
    "transformers": "5.24.0", "peft": "0.21.2", "accelerate": "1.15.0", "safetensors": "0.8.0",
    "huggingface-hub": "2.4.0",
}  # fmt: skip
LINUX = Machine("Linux", "6.8.0", "x86_64", False, "", "", "AMD Ryzen 9 7900X", 16, ("avx", "avx2", "fma", "f16c"))
MEMORY = MachineMemory(64 * GIB, 50 * GIB, None, 8 * GIB, 8 * GIB, 32 * GIB)
DISKS = (Disk("working folder", 900 * GIB, 300 * GIB), Disk("temporary folder", 900 * GIB, 300 * GIB))
WINDOWS = replace(LINUX, system="Windows", release="11", architecture="AMD64")
PAGED = replace(MEMORY, swap_total_bytes=64 * GIB, shm_bytes=None)

Row = tuple[str, tuple[str, ...], Environment]


def machine(
    *cards: tuple[Any, ...],
    torch: str = "2.14.1+cu130",
    archs: tuple[str, ...] | None = None,
    driver: str = "580.95.05",
    seen: bool = True,
    packages: dict[str, str | Package] | None = None,
    **changes: Any,
) -> Environment:
    """A machine with cards, which torch sees or not; changes are fields of Environment, or of its torch."""
    tag = torch.partition("+")[2]
    cuda = f"{tag[2:4]}.{tag[4:]}" if tag.startswith("cu") else None
    hip = tag.removeprefix("rocm") if tag.startswith("rocm") else None
    arch_list = WHEELS.get(tag, ()) if archs is None else archs
    cudnn = changes.pop("cudnn", 92400 if cuda else None)
    devices = [device(index, card, torch, cuda, arch_list) for index, card in enumerate(cards)]
    nvidia = [d for d in devices if d.facts.kind == "cuda"]
    pci = changes.pop("pci", ("nvidia",) * bool(nvidia))
    found = {**GOOD, "torch": torch, **(packages or {})}
    if not torch:
        del found["torch"]
    return Environment(
        python=changes.pop("python", Python("3.12.4", 64, "CPython", "venv", False)),
        machine=changes.pop("machine", LINUX),
        torch=Torch(torch, cuda, hip, cudnn, arch_list, seen and bool(cards), changes.pop("error", "")),
        driver=Driver(driver if nvidia else "", tuple(map(card_of, nvidia)), pci),
        memory=changes.pop("memory", MEMORY),
        limits=changes.pop("limits", Limits(None, 1 << 20)),
        devices=tuple(devices) if seen else (),
        packages=tuple(v if isinstance(v, Package) else Package(n, v) for n, v in found.items()),
        disks=changes.pop("disks", DISKS),
        **changes,
    )  # fmt: skip


def device(
    index: int, card: tuple[Any, ...], torch: str, cuda: str | None, archs: tuple[str, ...], free: float = 0.9
) -> Device:
    """One of a machine's devices: an AMD card where an architecture stands in the place of a capability."""
    name, what, gib = card[:3]
    free = card[3] if len(card) > 3 else free
    kind, capability, gcn = ("rocm", None, what) if isinstance(what, str) else ("cuda", what, "")
    facts = DeviceFacts(name, kind, capability, gcn, gib * GIB, torch, cuda, archs)  # type: ignore[arg-type]
    return Device(facts, index, f"uuid-{index}", int(free * gib * GIB), "MIG" in name, None)


def card_of(found: Device) -> DriverCard:
    """The same card, as the driver tells of it."""
    facts = found.facts
    free = found.free_bytes or 0
    return DriverCard(
        facts.name, f"GPU-{found.uuid}", facts.capability, facts.total_memory_bytes, free, found.mig, None
    )


def flash(version: str) -> dict[str, str | Package]:
    return {"flash-attn": version}


APPLE = Device(DeviceFacts("Apple GPU", "mps", None, "", 24 * GIB, "2.14.1", None, ()), 0, "", None, False, None)
MAC = replace(LINUX, system="Darwin", architecture="arm64", cpu="Apple M3", cpu_features=())
BUILT = Package("xformers", "0.0.30", (), "2.7.0+cu126", "12.6", ("8.0", "9.0"))
OLD_XFORMERS = Package("xformers", "0.0.22", ("torch==2.0.1",), "2.0.1+cu118", "11.8", ("5.0+PTX", "8.0", "9.0+PTX"))
TURING = ("BF16-EMULATED", "CARD-BELOW-PACKAGE")  # Triton's note among them
OLD = (*TURING, "CARD-LAST-WHEELS")

# fmt: off
ROWS: tuple[Row, ...] = (
    # Cards and wheels
    ("T4", TURING, machine(T4)),
    ("RTX 2080 Ti", TURING, machine(RTX_2080_TI)),
    ("T4 with torch 2.6", ("BF16-EMULATED", "HALF-ROUNDED-TWICE"),
     machine(T4, torch="2.6.0+cu124", packages={"triton": "3.2.0"})),
    ("GTX 1660", (*TURING, "HALF-UNSAFE"), machine(GTX_1660)),
    ("a Turing card of an unknown name", (*TURING, "DTYPE-UNDECIDED"), machine(CMP)),
    ("V100, cu126", OLD, machine(V100, torch="2.14.1+cu126")),
    ("V100, torch 2.11 for cu128", (*TURING, "KERNELS-MISSING"), machine(V100, torch="2.11.0+cu128")),
    ("V100, torch 2.8 for cu128, xformers 0.0.32", (*OLD, "CARD-BELOW-PACKAGE"),
     machine(V100, torch="2.8.0+cu128", archs=CU128_OLD, packages={"xformers": "0.0.32"})),
    ("P40, cu126", (*OLD, "HALF-SLOW"), machine(P40, torch="2.14.1+cu126")),
    ("GTX 1080 Ti, cu130", (*TURING, "HALF-SLOW", "KERNELS-MISSING"), machine(GTX_1080)),
    ("M40 with bitsandbytes 0.48", (*OLD, "CARD-BELOW-PACKAGE", "HALF-SLOW"),
     machine(M40, torch="2.14.1+cu126", packages={"bitsandbytes": "0.48.1"})),
    ("RTX 3060", (), machine(RTX_3060)),
    ("RTX 4090", (), machine(RTX_4090)),
    ("RTX 4090 on code for 8.6 alone", (), machine(RTX_4090, archs=("sm_86",))),
    ("RTX 5090", (), machine(RTX_5090)),
    ("RTX 5090, cu124", ("KERNELS-MISSING",), machine(RTX_5090, torch="2.6.0+cu124")),
    ("RTX 5090 with PTX for 9.0", (), machine(RTX_5090, archs=("sm_80", "sm_86", "sm_90", "compute_90"))),
    ("RTX 5090 with code for 9.0a", ("KERNELS-MISSING",), machine(RTX_5090, archs=("sm_90a", "compute_90a"))),
    ("H100 with code for 9.0a", (), machine(H100, archs=("sm_90a",))),
    ("a slice of an A100", (), machine(MIG)),
    ("RX 7900 XTX", (), machine(RX_7900, torch="2.14.1+rocm6.4")),
    ("RX 6700 XT as another card", ("CARD-DISGUISED", "KERNELS-MISSING"),
     machine(RX_6700, torch="2.14.1+rocm6.4", variables={"HSA_OVERRIDE_GFX_VERSION": "10.3.0"})),
    ("a card that is in use", ("GPU-MEMORY-TAKEN",), machine((*RTX_3060, 0.1))),
    ("Apple M3", (), replace(machine(torch="2.14.1", machine=MAC), devices=(APPLE,))),
    # Several cards
    ("2 RTX 4090, driver 545", ("P2P-NOT-THERE",), machine(RTX_4090, RTX_4090, driver="545.23.08")),
    ("2 RTX 4090, driver 545, told so", (),
     machine(RTX_4090, RTX_4090, driver="545.23.08", variables={"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"})),
    ("2 RTX 4090, driver 550", (), machine(RTX_4090, RTX_4090, driver="550.90.07", torch="2.14.1+cu126")),
    ("RTX 3090 and 4090", ("CARDS-MIXED", "P2P-NOT-THERE"), machine(RTX_3090, RTX_4090, driver="535.54.03")),
    ("RTX 3090 and T4", (*TURING, "CARDS-MIXED"), machine(RTX_3090, T4)),
    ("2 RTX 3060 on Windows", ("NCCL-NOT-THERE", "SYSMEM-FALLBACK"),
     machine(RTX_3060, RTX_3060, machine=WINDOWS, memory=PAGED)),
    # No GPU is seen
    ("a CPU build beside an RTX 3060", ("TORCH-CPU-ONLY",), machine(RTX_3060, torch="2.4.0+cpu", seen=False)),
    ("a CPU build beside an AMD card", ("TORCH-CPU-ONLY",), machine(torch="2.4.0+cpu", pci=("amd",))),
    ("driver 470 under cu130", ("DRIVER-OLD",), machine(RTX_3060, driver="470.223.02", seen=False)),
    ("driver 535 under cu130", ("DRIVER-OLD",), machine(RTX_3060, driver="535.104.05", seen=False)),
    ("driver 535 under cu126", ("DEVICES-UNSEEN",),
     machine(RTX_3060, driver="535.104.05", torch="2.14.1+cu126", seen=False)),
    ("no driver for a card on the bus", ("DRIVER-MISSING",), machine(pci=("nvidia",))),
    ("no GPU", ("NO-GPU",), machine(pci=("intel",))),
    ("no GPU, and a CPU build", ("NO-GPU",), machine(torch="2.14.1+cpu")),
    ("devices hidden by nothing", ("DEVICES-HIDDEN",),
     machine(RTX_3060, seen=False, variables={"CUDA_VISIBLE_DEVICES": ""})),
    ("a device that is not there", ("DEVICES-HIDDEN",),
     machine(RTX_3060, seen=False, variables={"CUDA_VISIBLE_DEVICES": "7"})),
    ("another card's UUID", ("DEVICES-HIDDEN",),
     machine(RTX_3060, seen=False, variables={"CUDA_VISIBLE_DEVICES": "GPU-1234"})),
    ("a ROCm build on NVIDIA", ("TORCH-ROCM-ON-NVIDIA",), machine(RTX_3060, torch="2.14.1+rocm6.4", seen=False)),
    ("a ROCm build that sees nothing", ("DEVICES-UNSEEN",), machine(torch="2.14.1+rocm6.4", pci=("amd",))),
    ("a torch that does not load", ("TORCH-BROKEN",),
     machine(RTX_3060, seen=False, error="OSError: [WinError 126] fbgemm.dll")),
    ("no torch", ("TORCH-MISSING",), machine(RTX_3060, torch="", seen=False)),
    # Packages
    ("xformers for torch 2.0.1", ("EXTENSION-OTHER-TORCH",),
     machine(RTX_3090, torch="2.1.0+cu118", packages={"xformers": OLD_XFORMERS, "numpy": "1.26.4"})),
    ("xformers for CUDA 12.1 under 11.8", ("EXTENSION-OTHER-TORCH",),
     machine(RTX_3090, torch="2.5.1+cu118",
             packages={"xformers": replace(OLD_XFORMERS, built_torch="2.5.1+cu121", built_cuda="12.1", requires=())})),
    ("xformers under a CPU build", ("EXTENSION-OTHER-TORCH", "NO-GPU"),
     machine(torch="2.7.0+cpu", packages={"xformers": BUILT})),
    ("xformers without the card", ("EXTENSION-WITHOUT-KERNELS",),
     machine(RTX_5090, torch="2.7.0+cu128", packages={"xformers": replace(BUILT, built_torch="2.7.0+cu128",
                                                                          built_cuda="12.8")})),
    ("FlashAttention 2 on a T4", (*TURING, "CARD-BELOW-PACKAGE", "EXTENSION-OTHER-TORCH"),
     machine(T4, packages=flash("2.8.3+cu12torch2.8cxx11abiTRUE"))),
    ("FlashAttention 2 in its place", (),
     machine(RTX_3090, torch="2.8.0+cu128", packages=flash("2.8.3+cu12torch2.8cxx11abiTRUE"))),
    ("an old diffusers with a new hub", ("PACKAGES-BREAK", "PACKAGES-BREAK"),
     machine(RTX_3060, packages={"diffusers": "0.25.1"})),
    ("a torch for NumPy 1", ("PACKAGES-BREAK",), machine(RTX_3060, torch="2.2.2+cu118")),
    ("what finitune needs", ("PACKAGE-TOO-OLD",),
     machine(RTX_3060, packages={"transformers": "5.24.0", "diffusers": "0.38.0",
                                 "finitune": Package("finitune", "0.1.0", ("diffusers>=0.40", "torch>=2.5"))})),
    ("what another package needs", ("PACKAGE-MISMATCH",),
     machine(RTX_3060, packages={"peft": Package("peft", "0.21.2", ("accelerate>=2", "huggingface_hub>=0.25"))})),
    ("an installation broken off", ("PACKAGE-DAMAGED",), machine(RTX_3060, packages={"xformers": ""})),
    ("two copies of torch", ("PACKAGE-TWICE", "PACKAGES-FROM-HOME"),
     machine(RTX_3060, packages={"torch": Package("torch", "2.14.1", homes=("user", "environment"))})),
    ("packages from outside", ("PACKAGES-FROM-PYTHONPATH",),
     machine(RTX_3060, packages={"diffusers": Package("diffusers", "0.42.1", homes=("PYTHONPATH",))})),
    ("torch 2.9 and its cuDNN", ("CONV3D-MEMORY",), machine(RTX_3060, torch="2.9.1+cu128", cudnn=91002)),
    ("torch 2.9 and a newer cuDNN", (), machine(RTX_3060, torch="2.9.1+cu128", cudnn=91501)),
    # The system
    ("Windows", ("PAGE-FILE-SMALL", "SYSMEM-FALLBACK"), machine(RTX_3060, machine=WINDOWS, driver="581.15")),
    ("WSL", ("SYSMEM-FALLBACK", "WSL"), machine(RTX_3060, machine=replace(LINUX, wsl=True), driver="581.15")),
    ("a small container", ("RAM-CAPPED", "RAM-SMALL", "SHM-SMALL"),
     machine(RTX_3060, memory=replace(MEMORY, limit_bytes=8 * GIB, available_bytes=7 * GIB, shm_bytes=64 << 20))),
    ("a container with two cards", ("SHM-SMALL",),
     machine(RTX_3060, RTX_3060, memory=replace(MEMORY, shm_bytes=64 << 20))),
    ("memory in use", ("RAM-TAKEN",), machine(RTX_3060, memory=replace(MEMORY, available_bytes=GIB))),
    ("full disks", ("DISK-SMALL", "DISK-SMALL"),
     machine(RTX_3060, disks=(Disk("working folder", GIB, GIB), Disk("temporary folder", GIB, GIB)))),
    ("few open files", ("FILES-FEW",), machine(RTX_3060, limits=Limits(65536, 256))),
    ("an old processor", ("CPU-OLD",), machine(RTX_3060, machine=replace(LINUX, cpu_features=("avx",)))),
    ("32 bits", ("PYTHON-32-BIT",), machine(RTX_3060, python=Python("3.10.1", 32, "CPython", "", False))),
    ("another nvcc", ("TOOLKIT-OTHER",), machine(RTX_3060, toolkits=(Toolkit("nvcc", "11.8"),))),
    ("the same nvcc", (), machine(RTX_3060, toolkits=(Toolkit("nvcc", "13.0"),))),
    # Variables
    ("the system's CUDA on the loader's path", ("LIBRARIES-MIXED",),
     machine(RTX_3060, variables={"LD_LIBRARY_PATH": "/usr/local/nvidia/lib64:/usr/local/cuda-12.1/lib64"})),
    ("names of old guides",
     ("VARIABLE-DEPRECATED", "VARIABLE-DEPRECATED", "VARIABLE-INVENTED", "VARIABLE-INVENTED", "VARIABLE-UNKNOWN"),
     machine(RTX_3060, variables={
         "NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1", "NCCL_TIMEOUT": "3600",
         "NCCL_SOCKET_NTIMEO": "2000000", "NCCL_P2P_DISABEL": "1"})),
    ("real names", (),
     machine(RTX_3060, variables={
         "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "WARN",
         "NCCL_IB_TIMEOUT": "22", "NCCL_VERSION": "2.21.5-1", "CUDA_LAUNCH_BLOCKING": "0"})),
    ("debugging left on", ("VARIABLE-DEBUGGING",) * 4,
     machine(RTX_3060, variables={
         "CUDA_LAUNCH_BLOCKING": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "NCCL_DEBUG": "INFO",
         "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})),
    ("a misspelt allocator key", ("ALLOCATOR-KEY-UNKNOWN",),
     machine(RTX_3060, variables={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandeable_segments:True"})),
    ("the allocator's new name under torch 2.9", ("ALLOCATOR-SETTING-IGNORED",),
     machine(RTX_3060, torch="2.9.1+cu128", cudnn=91501,
             variables={"PYTORCH_ALLOC_CONF": "expandable_segments:True"})),
    ("the allocator's new name under torch 2.14", (),
     machine(RTX_3060, variables={"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:[256:1,512:2],backend:native"})),
    ("one thread of sixteen", ("CPU-THREADS-FEW",), machine(RTX_3060, variables={"OMP_NUM_THREADS": "1"})),
    ("one thread for each of two processes", (),
     machine(RTX_3060, variables={"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"})),
    ("TF32 by force", ("FP32-IS-TF32",), machine(RTX_3060, variables={"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"})),
)
# fmt: on
