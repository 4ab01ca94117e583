"""What the system withholds: memory, disks, limits, a clean Python."""

from __future__ import annotations

import re
from collections.abc import Iterator

from finitune.machine.environment import GIB, Environment
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

MIN_RAM_BYTES = 12 * GIB
MIN_FREE_RAM_BYTES = 4 * GIB
MIN_SHM_BYTES = GIB
MIN_FREE_DISK_BY_PLACE = {"working folder": 10 * GIB, "temporary folder": 2 * GIB}
MIN_OPEN_FILES = 1024
MIN_PAGE_FILE_SHARE = 0.5
MIN_SYSMEM_DRIVER = 536
X86_ARCHITECTURES = ("x86_64", "AMD64")


def has_windows_driver(environment: Environment) -> bool:
    """Whether the cards are run by Windows' driver: on Windows, and in WSL."""
    return environment.machine.system == "Windows" or environment.machine.wsl


def find_sysmem_fallback(environment: Environment) -> list[MatchFields]:
    driver = environment.driver.version
    spills = (
        has_windows_driver(environment)
        and environment.devices
        and parse_version_parts(driver, 1) >= (MIN_SYSMEM_DRIVER,)
    )
    return report_if(spills, driver=driver)


def find_small_page_file(environment: Environment) -> list[MatchFields]:
    memory = environment.memory
    small = memory.swap_total_bytes < MIN_PAGE_FILE_SHARE * memory.total_bytes
    numbers = {"page_file_gib": to_gib(memory.swap_total_bytes), "ram_gib": to_gib(memory.total_bytes)}
    return report_if(environment.machine.system == "Windows" and small, **numbers)


def find_small_disks(environment: Environment) -> Iterator[MatchFields]:
    for disk in environment.disks:
        least = MIN_FREE_DISK_BY_PLACE.get(disk.place, 0)
        if disk.free_bytes < least:
            yield {"place": disk.place, "free_gib": to_gib(disk.free_bytes), "least_gib": to_gib(least)}


def find_memory_cap(environment: Environment) -> list[MatchFields]:
    memory = environment.memory
    tight = memory.limit_bytes is not None and memory.limit_bytes < memory.total_bytes
    return report_if(tight, limit_gib=to_gib(memory.room_bytes), ram_gib=to_gib(memory.total_bytes))


def find_small_shm(environment: Environment, *, several: bool) -> list[MatchFields]:
    shm = environment.memory.shm_bytes
    little = shm is not None and shm < MIN_SHM_BYTES and (len(environment.devices) > 1) is several
    return report_if(little, shm_mib=(shm or 0) >> 20)


def find_outside_packages(environment: Environment, home: str) -> list[MatchFields]:
    """Packages whose imported copy is not of this environment, one finding for all."""
    names = [package.name for package in environment.packages if package.homes[:1] == (home,)]
    return report_if(
        names, packages=", ".join(names), environment=environment.python.environment or "the system's Python"
    )


def find_system_cuda_folders(environment: Environment) -> list[MatchFields]:
    """Folders of a CUDA or cuDNN of the system's on the loader's path, before those of the wheels."""
    folders = environment.variables.get("LD_LIBRARY_PATH", "").split(":")
    others = [folder for folder in folders if re.search(r"cuda(?!_compat)|cudnn", folder)]
    return report_if(others and environment.torch.cuda, folders=len(others), variable="LD_LIBRARY_PATH")


SYSTEM_RULES = (
    MachineRule(
        "PYTHON-32-BIT",
        DEVICE_ERROR,
        "Python",
        lambda e: report_if(e.python.bits != 64, bits=e.python.bits, python=e.python.version),
        "Python {python} is a {bits}-bit build: there is no torch for it",
        "Install a 64-bit Python.",
        "https://pytorch.org/get-started/locally/",
    ),
    MachineRule(
        "RAM-SMALL",
        DEVICE_WARNING,
        "memory",
        lambda e: report_if(
            e.memory.room_bytes < MIN_RAM_BYTES, ram_gib=to_gib(e.memory.room_bytes), least_gib=to_gib(MIN_RAM_BYTES)
        ),
        "{ram_gib} GiB of memory: a model of 4 GB in fp32 and its reader need {least_gib}",
        "Close other programs, add swap or a larger page file, and use models stored in half precision.",
        "https://github.com/Comfy-Org/ComfyUI/issues/8065",
    ),
    MachineRule(
        "RAM-TAKEN",
        DEVICE_WARNING,
        "memory",
        lambda e: report_if(
            e.memory.available_bytes < MIN_FREE_RAM_BYTES <= e.memory.room_bytes,
            available_gib=to_gib(e.memory.available_bytes),
            ram_gib=to_gib(e.memory.room_bytes),
        ),
        "only {available_gib} of {ram_gib} GiB of memory are free",
        "Close other programs.",
        "https://github.com/tdrussell/diffusion-pipe/issues/173",
    ),
    MachineRule(
        "RAM-CAPPED",
        DEVICE_NOTE,
        "memory",
        find_memory_cap,
        "this container or job may have {limit_gib} of the machine's {ram_gib} GiB; beyond that it is killed without "
        "a message",
        "Start it with more: docker run --memory, or the scheduler's option.",
        "https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files",
    ),
    MachineRule(
        "PAGE-FILE-SMALL",
        DEVICE_WARNING,
        "memory",
        find_small_page_file,
        "the page file is {page_file_gib} GiB beside {ram_gib} GiB of memory: Windows refuses to map a large model "
        "('the paging file is too small', error 1455)",
        "Let Windows manage its size, on a disk with room: System > Advanced > Performance > Virtual memory.",
        "https://github.com/Comfy-Org/ComfyUI/issues/8065",
    ),
    MachineRule(
        "SHM-SMALL",
        DEVICE_WARNING,
        "/dev/shm",
        lambda e: find_small_shm(e, several=True),
        "{shm_mib} MiB: several processes and NCCL exchange data there ('No space left on device', bus error)",
        "Start the container with --shm-size=8g or --ipc=host.",
        "https://github.com/NVIDIA/nccl/issues/342",
    ),
    MachineRule(
        "SHM-SMALL",
        DEVICE_NOTE,
        "/dev/shm",
        lambda e: find_small_shm(e, several=False),
        "{shm_mib} MiB: programs with data loader processes end there in a bus error; finitune does not need it",
        "Start the container with --shm-size=8g or --ipc=host.",
        "https://github.com/pytorch/pytorch#docker-image",
    ),
    MachineRule(
        "DISK-SMALL",
        DEVICE_WARNING,
        "{place}",
        find_small_disks,
        "{free_gib} GiB are free there; a training wants {least_gib} for caches, states and adapters",
        "Make room, or set output_dir and cache_dir (or TMPDIR) to another disk.",
        "https://docs.python.org/3/library/tempfile.html#tempfile.gettempdir",
    ),
    MachineRule(
        "FILES-FEW",
        DEVICE_NOTE,
        "ulimit",
        lambda e: report_if(
            e.limits.open_files is not None and e.limits.open_files < MIN_OPEN_FILES, open_files=e.limits.open_files
        ),
        "only {open_files} files may be open at once ('too many open files')",
        "ulimit -n 4096",
        "https://docs.pytorch.org/docs/stable/multiprocessing.html#file-descriptor-file-descriptor",
    ),
    MachineRule(
        "CPU-OLD",
        DEVICE_WARNING,
        "CPU",
        lambda e: report_if(
            e.machine.architecture in X86_ARCHITECTURES
            and e.machine.cpu_features
            and "avx2" not in e.machine.cpu_features,
            cpu=e.machine.cpu,
        ),
        "{cpu} has no AVX2: torch computes on it with its slowest kernels",
        "Compute on a GPU.",
        "https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cpu/README.md",
    ),
    MachineRule(
        "SYSMEM-FALLBACK",
        DEVICE_NOTE,
        "driver",
        find_sysmem_fallback,
        "driver {driver} moves what does not fit on the card into the computer's memory: a run that is too large gets "
        "many times slower, and does not stop",
        "NVIDIA Control Panel > Manage 3D settings > CUDA - Sysmem Fallback Policy: Prefer No Sysmem Fallback.",
        "https://nvidia.custhelp.com/app/answers/detail/a_id/5490",
    ),
    MachineRule(
        "WSL",
        DEVICE_NOTE,
        "system",
        lambda e: report_if(e.machine.wsl, ram_gib=to_gib(e.memory.total_bytes)),
        "WSL gives Linux {ram_gib} GiB, by default half of the memory, and reads Windows' own disks slowly",
        "Raise memory= in .wslconfig, and keep data sets and caches on the Linux disk.",
        "https://learn.microsoft.com/windows/wsl/wsl-config",
    ),
    MachineRule(
        "NCCL-NOT-THERE",
        DEVICE_NOTE,
        "system",
        lambda e: report_if(e.machine.system == "Windows" and len(e.devices) > 1, gpus=len(e.devices)),
        "NCCL does not exist for Windows: {gpus} GPUs exchange gradients through gloo, which is slow",
        "Use WSL or Linux for several GPUs.",
        "https://docs.pytorch.org/docs/stable/distributed.html#backends",
    ),
    MachineRule(
        "PACKAGES-FROM-HOME",
        DEVICE_WARNING,
        "Python",
        lambda e: find_outside_packages(e, "user"),
        "{packages}: imported from the user's home, not from {environment}, and shared with every other program",
        "Start Python with -s, or set PYTHONNOUSERSITE=1, and install them into the environment.",
        "https://docs.python.org/3/library/site.html#site.ENABLE_USER_SITE",
    ),
    MachineRule(
        "PACKAGES-FROM-PYTHONPATH",
        DEVICE_WARNING,
        "PYTHONPATH",
        lambda e: find_outside_packages(e, "PYTHONPATH"),
        "{packages}: imported from PYTHONPATH, whatever {environment} holds",
        "Unset PYTHONPATH.",
        "https://docs.python.org/3/using/cmdline.html#envvar-PYTHONPATH",
    ),
    MachineRule(
        "LIBRARIES-MIXED",
        DEVICE_NOTE,
        "{variable}",
        find_system_cuda_folders,
        "{variable} names {folders} folders of a CUDA or cuDNN of the system's: parts of it can be loaded in place of "
        "torch's own (CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH)",
        "Unset it for finitune: the wheels of torch bring all that they need.",
        "https://github.com/pytorch/pytorch/issues/188892",
    ),
)
