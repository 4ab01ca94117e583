"""What a machine is made of, as plain data: read once by `reading`, judged by `rules`, told by `finitune doctor`.

Nothing here looks at the machine, so that a table of machines can stand in a test. Two views of the graphics cards are
kept apart, since their difference is what most reports are about: what the driver tells (`Driver.cards`), and what
torch may use (`Environment.devices`).
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from finitune.machine.hardware import Advice, Capability, DeviceFacts, advise, has_kernels

GIB = 1 << 30


def to_gib(size_bytes: float) -> float:
    """Bytes as GiB, to a tenth."""
    return round(size_bytes / GIB, 1)


@dataclass(frozen=True)
class Python:
    """The interpreter."""

    version: str
    bits: int
    implementation: str
    environment: str  # "venv", "conda", or "" for the system's own
    user_site: bool  # packages of the user's home are on the path, too


@dataclass(frozen=True)
class Machine:
    """The system and its processor."""

    system: str  # "Linux", "Windows", "Darwin"
    release: str
    architecture: str  # "x86_64", "arm64"
    wsl: bool
    container: str  # "docker", "podman" ... or ""
    hosted: str  # "colab", "kaggle" or ""
    cpu: str
    cores: int  # that this process may use
    cpu_features: tuple[str, ...]  # of those that matter: "avx2", "avx512f", "amx_tile", "f16c" ...


@dataclass(frozen=True)
class Torch:
    """What the installed torch was built for, and whether it sees an accelerator."""

    version: str  # "" where it is not installed
    cuda: str | None
    hip: str | None
    cudnn: int | None  # 92400 for 9.24.0
    arch_list: tuple[str, ...]
    available: bool  # torch.cuda.is_available(), which stands for ROCm, too
    error: str  # what its import, or its query, ended with


@dataclass(frozen=True)
class Device:
    """An accelerator that torch may use."""

    facts: DeviceFacts
    index: int
    uuid: str
    free_bytes: int | None
    mig: bool
    ecc: bool | None


@dataclass(frozen=True)
class DeviceKindView:
    """A kind of device as rules look at it: its facts, and what follows from them."""

    facts: DeviceFacts

    @property
    def advice(self) -> Advice:
        return advise(self.facts)

    @property
    def reason(self) -> str:
        """Why the advised dtype is the one."""
        return self.advice.reasons[0]

    @property
    def runs(self) -> bool:
        return has_kernels(self.facts)


@dataclass(frozen=True)
class DriverCard:
    """A graphics card as NVIDIA's driver tells of it, whether torch sees it or not."""

    name: str
    uuid: str
    capability: Capability | None
    total_bytes: int
    free_bytes: int
    mig: bool
    ecc: bool | None


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver, its cards, and whose graphics cards sit on the bus."""

    version: str  # "" where there is none
    cards: tuple[DriverCard, ...]
    pci: tuple[str, ...]  # "nvidia", "amd", "intel", where the system tells


@dataclass(frozen=True)
class Package:
    """An installed package, as its metadata tells; it was not imported."""

    name: str
    version: str  # "" where the metadata is damaged
    requires: tuple[str, ...] = ()  # its requirements of other packages that are told here
    built_torch: str = ""  # the torch that its binaries were built with
    built_cuda: str = ""
    built_archs: tuple[str, ...] = ()  # "8.0", "9.0+PTX"
    homes: tuple[str, ...] = ("environment",)  # "environment", "user", "PYTHONPATH"; the first one is imported


@dataclass(frozen=True)
class MachineMemory:
    """Memory of the machine, in bytes; None where there is no such thing, or nobody knows."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None  # of the control group: of a container, or of a job
    swap_total_bytes: int  # or the page file
    swap_free_bytes: int
    shm_bytes: int | None  # the size of /dev/shm

    @property
    def room_bytes(self) -> int:
        """What this process may ever have."""
        return min(self.total_bytes, self.limit_bytes or self.total_bytes)

    @property
    def room_gib(self) -> float:
        return to_gib(self.room_bytes)

    @property
    def total_gib(self) -> float:
        return to_gib(self.total_bytes)

    @property
    def available_gib(self) -> float:
        return to_gib(self.available_bytes)

    @property
    def swap_gib(self) -> float:
        return to_gib(self.swap_total_bytes)

    @property
    def swap_share(self) -> float | None:
        """Swap for each byte of memory; None where that is not known."""
        return self.swap_total_bytes / self.total_bytes if self.total_bytes else None

    @property
    def shm_mib(self) -> int:
        return (self.shm_bytes or 0) >> 20


@dataclass(frozen=True)
class Disk:
    """Room on a disk, in bytes."""

    place: str  # "working folder", "temporary folder"
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Limits:
    """Limits of the process (ulimit); None where there is none, or nobody knows."""

    locked_bytes: int | None
    open_files: int | None


@dataclass(frozen=True)
class Toolkit:
    """A compiler on the path."""

    program: str
    version: str


@dataclass(frozen=True)
class UnreadFact:
    """A group of facts that could not be read, and why."""

    fact: str
    reason: str


@dataclass(frozen=True)
class Environment:
    """All that decides whether a run will work on this machine."""

    python: Python
    machine: Machine
    torch: Torch
    driver: Driver
    memory: MachineMemory
    limits: Limits
    devices: tuple[Device, ...] = ()
    packages: tuple[Package, ...] = ()
    disks: tuple[Disk, ...] = ()
    toolkits: tuple[Toolkit, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    unread: tuple[UnreadFact, ...] = ()

    def package(self, name: str) -> Package | None:
        """The package of that name, where it is installed."""
        return next((package for package in self.packages if package.name == name), None)

    @property
    def kinds(self) -> tuple[DeviceKindView, ...]:
        """One device of each kind."""
        return tuple(map(DeviceKindView, dict.fromkeys(device.facts for device in self.devices)))

    @property
    def gpus(self) -> int:
        """How many accelerators torch may use."""
        return len(self.devices)

    @property
    def main(self) -> DeviceFacts:
        """The device that finitune computes on: the first accelerator, or the CPU."""
        if self.devices:
            return self.devices[0].facts
        torch = self.torch
        total = self.memory.total_bytes
        return DeviceFacts(self.machine.cpu, "cpu", None, "", total, torch.version, torch.cuda, torch.arch_list)

    def as_json(self) -> dict[str, Any]:
        """The facts in JSON's types."""
        return asdict(self)

    @classmethod
    def from_json(cls, form: Mapping[str, Any]) -> Environment:
        """The facts that `as_json` gave, after a round through JSON. Raises TypeError for another form."""
        return restore_from_json(cls, form)


def restore_from_json(kind: Any, value: Any) -> Any:
    """`value` of JSON as a field of type `kind` holds it: lists as tuples, objects as dataclasses."""
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: restore_from_json(hints.get(name, object), item) for name, item in value.items()})
    arguments = get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return value if value is None else restore_from_json(arguments[0], value)
    if get_origin(kind) is tuple:
        return tuple(restore_from_json(arguments[0], item) for item in value)
    return value
