"""What torch and NVIDIA's driver tell of this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from finitune.machine.environment import Device, Driver, DriverCard, Torch
from finitune.machine.hardware import read_device_facts

PROGRAM_TIMEOUT_S = 5.0
NO_DRIVER = Driver("", (), ())
NVIDIA_SMI_FIELDS = ("name", "uuid", "driver_version", "compute_cap", "memory.total", "memory.free", "mig.mode.current",
         "ecc.mode.current")  # fmt: skip
PCI_VENDORS = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}
PCI_DISPLAY_CLASS = "0x03"
"""PCI class of display controllers, its first byte. Source: the PCI ID list."""
CPU_FLAGS_BY_CAPABILITY = {
    "DEFAULT": (),
    "AVX2": ("avx", "avx2", "fma", "f16c"),
    "AVX512": ("avx", "avx2", "fma", "f16c", "avx512f"),
}


def read_torch() -> Torch:
    """What the installed torch is; `error` where it does not load, whatever it raises."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        version = ""
    try:
        import torch
    except Exception as error:
        return Torch(version, None, None, None, (), False, "" if not version else format_torch_error(error))
    built = (str(torch.__version__), torch.version.cuda, torch.version.hip)
    try:
        cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
        return Torch(*built, cudnn, tuple(torch.cuda.get_arch_list()), torch.cuda.is_available(), "")
    except Exception as error:
        return Torch(*built, None, (), False, format_torch_error(error))


def format_torch_error(error: Exception) -> str:
    """The first line of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def read_devices(driver: Driver) -> tuple[Device, ...]:
    """The accelerators that torch may use; none on a machine that has but a CPU."""
    import torch

    if torch.cuda.is_available():
        return tuple(read_cuda_device(index, driver) for index in range(torch.cuda.device_count()))
    if torch.xpu.is_available():
        return tuple(read_plain_device(index) for index in range(torch.xpu.device_count()))
    return (read_plain_device(0),) if torch.backends.mps.is_available() else ()


def read_cuda_device(index: int, driver: Driver) -> Device:
    """A card of NVIDIA's or AMD's."""
    import torch

    found = torch.cuda.get_device_properties(index)
    uuid = str(getattr(found, "uuid", ""))
    card = next((card for card in driver.cards if card.uuid.removeprefix("GPU-") == uuid), None)
    if card is None:  # an AMD card, a slice of one, or a driver without nvidia-smi
        return Device(
            read_device_facts(index), index, uuid, torch.cuda.mem_get_info(index)[0], "MIG" in found.name, None
        )
    return Device(read_device_facts(index), index, uuid, card.free_bytes, card.mig, card.ecc)


def read_plain_device(index: int) -> Device:
    """An accelerator of which torch tells no more than its facts."""
    return Device(read_device_facts(index), index, "", None, False, None)


def read_driver() -> Driver:
    """What nvidia-smi tells: every card, whatever CUDA_VISIBLE_DEVICES leaves of them."""
    lines = run_program(
        "nvidia-smi", f"--query-gpu={','.join(NVIDIA_SMI_FIELDS)}", "--format=csv,noheader,nounits"
    ).splitlines()
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    rows = [row for row in rows if len(row) == len(NVIDIA_SMI_FIELDS)]
    module = Path("/proc/driver/nvidia/version")  # the kernel's, where nvidia-smi is not on the path (containers)
    found = re.search(r"Kernel Module[^\d]*(\d+\.[\d.]+)", module.read_text()) if module.exists() else None
    version = rows[0][2] if rows else found[1] if found else ""
    return Driver(version, tuple(parse_nvidia_smi_row(row) for row in rows), read_pci_vendors())


def parse_nvidia_smi_row(row: list[str]) -> DriverCard:
    """A line of nvidia-smi; it writes [N/A] for what it does not know."""
    name, uuid, _, capability, total, free, mig, ecc = row
    major, _, minor = capability.partition(".")
    numbers = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
    on = {"Enabled": True, "Disabled": False}
    return DriverCard(name, uuid, numbers, parse_mib(total), parse_mib(free), on.get(mig, False), on.get(ecc))


def parse_mib(text: str) -> int:
    """Bytes, of a number of MiB; 0 for what is none."""
    return int(text) << 20 if text.isdigit() else 0


def read_pci_vendors(root: Path = Path("/sys/bus/pci/devices")) -> tuple[str, ...]:
    """Whose graphics cards sit on the bus, where Linux tells."""
    found = set()
    for folder in root.iterdir() if root.is_dir() else ():
        kind, vendor = ((folder / name).read_text().strip() for name in ("class", "vendor"))
        if kind.startswith(PCI_DISPLAY_CLASS) and vendor in PCI_VENDORS:
            found.add(PCI_VENDORS[vendor])
    return tuple(sorted(found))


def run_program(program: str, *arguments: str) -> str:
    """What a program prints; "" where it is not there, fails, or takes too long."""
    path = shutil.which(program) or find_windows_program(program)
    if not path:
        return ""
    try:
        done = subprocess.run(
            [path, *arguments], capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def find_windows_program(program: str) -> str | None:
    """Where Windows keeps a program that is not on the path; in WSL, where the driver's are."""
    root = os.environ.get("SYSTEMROOT", "")
    places = (Path(root) / "System32" / f"{program}.exe", Path("/usr/lib/wsl/lib") / program)
    return next((str(place) for place in places if place.is_file()), None)


def read_cpu_flags() -> set[str]:
    """The processor's features by what torch chose its kernels for, where the system does not tell."""
    import torch

    return set(CPU_FLAGS_BY_CAPABILITY.get(torch.backends.cpu.get_cpu_capability(), ()))
