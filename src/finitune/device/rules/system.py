"""What the system withholds: memory, disks, limits, a clean Python."""

from __future__ import annotations

import re
from collections.abc import Iterator

from finitune.device.environment import GIB, Environment
from finitune.device.rules.rule import ERROR, NOTE, WARNING, Numbers, Rule, gib, leading, once

SMALL_RAM = 12 * GIB
LITTLE_FREE_RAM = 4 * GIB
LITTLE_SHM = GIB
LITTLE_DISK = {"working folder": 10 * GIB, "temporary folder": 2 * GIB}
FEW_FILES = 1024
PAGE_FILE_SHARE = 0.5
SYSMEM_SINCE = 536
X86 = ("x86_64", "AMD64")


def on_windows_driver(environment: Environment) -> bool:
    """Whether the cards are run by Windows' driver: on Windows, and in WSL."""
    return environment.machine.system == "Windows" or environment.machine.wsl


def sysmem(environment: Environment) -> list[Numbers]:
    driver = environment.driver.version
    spills = on_windows_driver(environment) and environment.devices and leading(driver, 1) >= (SYSMEM_SINCE,)
    return once(spills, driver=driver)


def page_file(environment: Environment) -> list[Numbers]:
    memory = environment.memory
    small = memory.swap_total_bytes < PAGE_FILE_SHARE * memory.total_bytes
    numbers = {"page_file_gib": gib(memory.swap_total_bytes), "ram_gib": gib(memory.total_bytes)}
    return once(environment.machine.system == "Windows" and small, **numbers)


def small_disks(environment: Environment) -> Iterator[Numbers]:
    for disk in environment.disks:
        least = LITTLE_DISK.get(disk.place, 0)
        if disk.free_bytes < least:
            yield {"place": disk.place, "free_gib": gib(disk.free_bytes), "least_gib": gib(least)}


def capped(environment: Environment) -> list[Numbers]:
    memory = environment.memory
    tight = memory.limit_bytes is not None and memory.limit_bytes < memory.total_bytes
    return once(tight, limit_gib=gib(memory.room_bytes), ram_gib=gib(memory.total_bytes))


def little_shm(environment: Environment, *, several: bool) -> list[Numbers]:
    shm = environment.memory.shm_bytes
    little = shm is not None and shm < LITTLE_SHM and (len(environment.devices) > 1) is several
    return once(little, shm_mib=(shm or 0) >> 20)


def from_elsewhere(environment: Environment, home: str) -> list[Numbers]:
    """Packages whose imported copy is not of this environment, one finding for all."""
    names = [package.name for package in environment.packages if package.homes[:1] == (home,)]
    return once(names, packages=", ".join(names), environment=environment.python.environment or "the system's Python")


def own_libraries(environment: Environment) -> list[Numbers]:
    """Folders of a CUDA or cuDNN of the system's on the loader's path, before those of the wheels."""
    folders = environment.variables.get("LD_LIBRARY_PATH", "").split(":")
    others = [folder for folder in folders if re.search(r"cuda(?!_compat)|cudnn", folder)]
    return once(others and environment.torch.cuda, folders=len(others), variable="LD_LIBRARY_PATH")


# fmt: off
RULES = (
    Rule("PYTHON-32-BIT", ERROR, "Python",
         lambda e: once(e.python.bits != 64, bits=e.python.bits, python=e.python.version),
         "Python {python} is a {bits}-bit build: there is no torch for it", "Install a 64-bit Python.",
         "https://pytorch.org/get-started/locally/"),
    Rule("RAM-SMALL", WARNING, "memory",
         lambda e: once(e.memory.room_bytes < SMALL_RAM, ram_gib=gib(e.memory.room_bytes), least_gib=gib(SMALL_RAM)),
         "{ram_gib} GiB of memory: a model of 4 GB in fp32 and its reader need {least_gib}",
         "Close other programs, add swap or a larger page file, and use models stored in half precision.",
         "https://github.com/Comfy-Org/ComfyUI/issues/8065"),
    Rule("RAM-TAKEN", WARNING, "memory",
         lambda e: once(e.memory.available_bytes < LITTLE_FREE_RAM <= e.memory.room_bytes,
                        available_gib=gib(e.memory.available_bytes), ram_gib=gib(e.memory.room_bytes)),
         "only {available_gib} of {ram_gib} GiB of memory are free", "Close other programs.",
         "https://github.com/tdrussell/diffusion-pipe/issues/173"),
    Rule("RAM-CAPPED", NOTE, "memory", capped,
         "this container or job may have {limit_gib} of the machine's {ram_gib} GiB; beyond that it is killed without "
         "a message", "Start it with more: docker run --memory, or the scheduler's option.",
         "https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files"),
    Rule("PAGE-FILE-SMALL", WARNING, "memory", page_file,
         "the page file is {page_file_gib} GiB beside {ram_gib} GiB of memory: Windows refuses to map a large model "
         "('the paging file is too small', error 1455)",
         "Let Windows manage its size, on a disk with room: System > Advanced > Performance > Virtual memory.",
         "https://github.com/Comfy-Org/ComfyUI/issues/8065"),
    Rule("SHM-SMALL", WARNING, "/dev/shm", lambda e: little_shm(e, several=True),
         "{shm_mib} MiB: several processes and NCCL exchange data there ('No space left on device', bus error)",
         "Start the container with --shm-size=8g or --ipc=host.", "https://github.com/NVIDIA/nccl/issues/342"),
    Rule("SHM-SMALL", NOTE, "/dev/shm", lambda e: little_shm(e, several=False),
         "{shm_mib} MiB: programs with data loader processes end there in a bus error; finitune does not need it",
         "Start the container with --shm-size=8g or --ipc=host.", "https://github.com/pytorch/pytorch#docker-image"),
    Rule("DISK-SMALL", WARNING, "{place}", small_disks,
         "{free_gib} GiB are free there; a training wants {least_gib} for caches, states and adapters",
         "Make room, or set output_dir and cache_dir (or TMPDIR) to another disk.",
         "https://docs.python.org/3/library/tempfile.html#tempfile.gettempdir"),
    Rule("FILES-FEW", NOTE, "ulimit",
         lambda e: once(e.limits.open_files is not None and e.limits.open_files < FEW_FILES,
                        open_files=e.limits.open_files),
         "only {open_files} files may be open at once ('too many open files')", "ulimit -n 4096",
         "https://docs.pytorch.org/docs/stable/multiprocessing.html#file-descriptor-file-descriptor"),
    Rule("CPU-OLD", WARNING, "CPU",
         lambda e: once(e.machine.architecture in X86 and e.machine.cpu_features
                        and "avx2" not in e.machine.cpu_features, cpu=e.machine.cpu),
         "{cpu} has no AVX2: torch computes on it with its slowest kernels", "Compute on a GPU.",
         "https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cpu/README.md"),
    Rule("SYSMEM-FALLBACK", NOTE, "driver", sysmem,
         "driver {driver} moves what does not fit on the card into the computer's memory: a run that is too large gets "
         "many times slower, and does not stop",
         "NVIDIA Control Panel > Manage 3D settings > CUDA - Sysmem Fallback Policy: Prefer No Sysmem Fallback.",
         "https://nvidia.custhelp.com/app/answers/detail/a_id/5490"),
    Rule("WSL", NOTE, "system", lambda e: once(e.machine.wsl, ram_gib=gib(e.memory.total_bytes)),
         "WSL gives Linux {ram_gib} GiB, by default half of the memory, and reads Windows' own disks slowly",
         "Raise memory= in .wslconfig, and keep data sets and caches on the Linux disk.",
         "https://learn.microsoft.com/windows/wsl/wsl-config"),
    Rule("NCCL-NOT-THERE", NOTE, "system",
         lambda e: once(e.machine.system == "Windows" and len(e.devices) > 1, gpus=len(e.devices)),
         "NCCL does not exist for Windows: {gpus} GPUs exchange gradients through gloo, which is slow",
         "Use WSL or Linux for several GPUs.", "https://docs.pytorch.org/docs/stable/distributed.html#backends"),
    Rule("PACKAGES-FROM-HOME", WARNING, "Python", lambda e: from_elsewhere(e, "user"),
         "{packages}: imported from the user's home, not from {environment}, and shared with every other program",
         "Start Python with -s, or set PYTHONNOUSERSITE=1, and install them into the environment.",
         "https://docs.python.org/3/library/site.html#site.ENABLE_USER_SITE"),
    Rule("PACKAGES-FROM-PYTHONPATH", WARNING, "PYTHONPATH", lambda e: from_elsewhere(e, "PYTHONPATH"),
         "{packages}: imported from PYTHONPATH, whatever {environment} holds",
         "Unset PYTHONPATH.", "https://docs.python.org/3/using/cmdline.html#envvar-PYTHONPATH"),
    Rule("LIBRARIES-MIXED", NOTE, "{variable}", own_libraries,
         "{variable} names {folders} folders of a CUDA or cuDNN of the system's: parts of it can be loaded in place of "
         "torch's own (CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH)",
         "Unset it for finitune: the wheels of torch bring all that they need.",
         "https://github.com/pytorch/pytorch/issues/188892"),
)
# fmt: on
