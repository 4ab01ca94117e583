"""This machine's facts, read in about a second besides torch's import; what cannot be read is named, never raised.

Packages are read by their metadata alone: importing them takes seconds, prints, and fails where one is broken, which is
what is to be told. Variables that hold secrets are not read at all.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import site
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil

from finitune.machine.environment import Disk, Environment, Limits, Machine, MachineMemory, Python, Toolkit, UnreadFact
from finitune.machine.reading import packages, pytorch

_T = TypeVar("_T")

CPU_FEATURES = ("avx", "avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16",
                "amx_fp16", "asimd", "asimdhp", "bf16")  # fmt: skip
READ_VARIABLE_PREFIXES = (
    *("CUDA_", "NVIDIA_", "CUBLAS", "CUDNN_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "TRITON_", "XFORMERS_", "BNB_"),
    *("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "DIFFUSERS_", "ACCELERATE_", "HSA_", "HIP_", "ROCR_", "ROCM_", "MIOPEN_"),
    *("OMP_", "MKL_", "KMP_", "OPENBLAS_", "ZE_", "SYCL_"),
)
READ_VARIABLE_NAMES = (
    *("PYTHONPATH", "PYTHONNOUSERSITE", "PYTHONHOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "TMPDIR"),
    *("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"),
)
SECRET_VARIABLE_PATTERN = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_CGROUP_NO_LIMIT = 1 << 60
"""Version 1 of control groups says a number about as large for none."""


def read_environment() -> Environment:
    """All facts of this machine that a run depends on."""
    unread: list[UnreadFact] = []

    def attempt(what: str, read: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return read()
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            unread.append(UnreadFact(what, reason))
            return otherwise

    torch = pytorch.read_torch()
    driver = attempt("driver", pytorch.read_driver, pytorch.NO_DRIVER)
    loads = bool(torch.version) and not torch.error
    return Environment(
        python=attempt("python", read_python, Python(platform.python_version(), 64, "", "", False)),
        machine=attempt("machine", read_machine, Machine(platform.system(), "", "", False, "", "", "", 1, ())),
        torch=torch,
        driver=driver,
        memory=attempt("memory", read_memory, MachineMemory(0, 0, None, 0, 0, None)),
        limits=attempt("limits", read_limits, Limits(None, None)),
        devices=attempt("devices", lambda: pytorch.read_devices(driver), ()) if loads else (),
        packages=attempt("packages", packages.read_packages, ()),
        disks=attempt("disks", read_disks, ()),
        toolkits=attempt("toolkits", read_toolkits, ()),
        variables=read_variables(os.environ),
        unread=tuple(unread),
    )


def read_python() -> Python:
    """The interpreter that runs this."""
    conda = (Path(sys.prefix) / "conda-meta").is_dir()
    kind = "conda" if conda else "venv" if sys.prefix != sys.base_prefix else ""
    bits = 64 if sys.maxsize > 2**32 else 32
    on = bool(site.ENABLE_USER_SITE) and site.getusersitepackages() in sys.path
    return Python(platform.python_version(), bits, platform.python_implementation(), kind, on)


def read_machine() -> Machine:
    """The system and its processor."""
    wsl = "microsoft" in platform.release().lower()
    hosted = (
        "colab" if "COLAB_RELEASE_TAG" in os.environ else "kaggle" if "KAGGLE_KERNEL_RUN_TYPE" in os.environ else ""
    )
    name, flags = read_cpu()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    features = tuple(feature for feature in CPU_FEATURES if feature in flags)
    return Machine(
        system=platform.system(),
        release=platform.release(),
        architecture=platform.machine(),
        wsl=wsl,
        container=read_container(),
        hosted=hosted,
        cpu=name or platform.processor() or platform.machine() or "CPU",
        cores=cores,
        cpu_features=features,
    )


def read_cpu() -> tuple[str, set[str]]:
    """The processor's name and its flags, where /proc tells; elsewhere what torch found."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        text = path.read_text(errors="replace")
        name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
        flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
        return name[1].strip() if name else "", set(flags[1].split()) if flags else set()
    return platform.processor(), pytorch.read_cpu_flags()


def read_container() -> str:
    """What holds this process, or ""."""
    for path, name in (("/.dockerenv", "docker"), ("/run/.containerenv", "podman")):
        if Path(path).exists():
            return name
    named = os.environ.get("container", "")  # noqa: SIM112 (so do systemd and podman call it)
    return named or ("kubernetes" if "KUBERNETES_SERVICE_HOST" in os.environ else "")


def read_memory() -> MachineMemory:
    """Memory of the machine and of the control group."""
    ram, swap = psutil.virtual_memory(), psutil.swap_memory()
    limit, used = read_cgroup_memory()
    available = ram.available if limit is None else min(ram.available, max(limit - used, 0))
    shm = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None
    return MachineMemory(ram.total, available, limit, swap.total, swap.free, shm)


def read_cgroup_memory(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> tuple[int | None, int]:
    """The tightest memory limit of the control groups that this process is in, and what is used of it, in bytes.

    Caches that the system would give back do not count as used. Source: kernel documentation, cgroup v1 and v2.
    """
    found = [
        (read_number_file(f / limit), read_number_file(f / usage) or 0, f)
        for f, limit, usage in list_cgroups(root, own)
    ]
    limits = [(limit, used, folder) for limit, used, folder in found if limit is not None and limit < _CGROUP_NO_LIMIT]
    if not limits:
        return None, 0
    limit, used, folder = min(limits, key=lambda entry: entry[0])
    stat = folder / "memory.stat"
    cached = re.search(r"^(?:total_)?inactive_file (\d+)", stat.read_text() if stat.exists() else "", re.MULTILINE)
    return limit, max(used - int(cached[1] if cached else 0), 0)


def list_cgroups(root: Path, own: Path) -> Iterator[tuple[Path, str, str]]:
    """Each control group of this process up to the root, with the names of its files for the limit and the use."""
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            base, files = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, files = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        inner = base / name.lstrip("/")
        yield from ((folder, *files) for folder in (inner, *inner.parents) if folder.is_relative_to(base))


def read_number_file(path: Path) -> int | None:
    """The number that a file holds; None where it holds none, or is not there."""
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdigit() else None


def read_limits() -> Limits:
    """The soft limits that large runs meet."""
    try:
        import resource
    except ImportError:  # Windows
        return Limits(None, None)
    soft = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE)]
    locked, files = (None if value == resource.RLIM_INFINITY else value for value in soft)
    return Limits(locked, files)


def read_disks() -> tuple[Disk, ...]:
    """Room where a run writes."""
    places = {"working folder": Path.cwd(), "temporary folder": Path(tempfile.gettempdir())}
    usage = {place: shutil.disk_usage(path) for place, path in places.items()}
    return tuple(Disk(place, found.total, found.free) for place, found in usage.items())


def read_toolkits() -> tuple[Toolkit, ...]:
    """The compilers of CUDA and ROCm on the path."""
    found = []
    for program, pattern in (("nvcc", r"release (\d+\.\d+)"), ("hipcc", r"HIP version: (\d+\.\d+)")):
        match = re.search(pattern, pytorch.run_program(program, "--version"))
        found += [Toolkit(program, match[1])] if match else []
    return tuple(found)


def read_variables(variables: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """The variables that runs depend on, by name; none whose name says that it holds a secret."""
    wanted = (
        name for name in sorted(variables) if name.startswith(READ_VARIABLE_PREFIXES) or name in READ_VARIABLE_NAMES
    )
    return {name: variables[name] for name in wanted if not SECRET_VARIABLE_PATTERN.search(name)}
