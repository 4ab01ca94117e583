"""Cards by the names that people give them, with the facts that the advice for one rests on: for a card that is not
here. The cards stand in cards.toml; a size in the name ("3060 8gb") decides between those that a card is sold with.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rapidfuzz.distance import OSA

from finitune.errors import UsageError
from finitune.machine.hardware import Capability, DeviceFacts, DeviceKind
from finitune.package_data import read_package_toml

BYTES_PER_GIB = 1 << 30


@dataclass(frozen=True)
class GpuModel:
    """A model of a card: its name as its driver says it, its architecture, the sizes of its memory in GiB."""

    name: str
    kind: DeviceKind
    capability: Capability | None
    gcn_arch: str
    memory: tuple[int, ...]

    def facts(self, torch_version: str, gib: int | None = None) -> DeviceFacts:
        """The same as the facts of a device, under a torch that has kernels for it."""
        cuda = "13.0" if self.kind == "cuda" else None
        total = (gib or self.memory[0]) * BYTES_PER_GIB
        return DeviceFacts(self.name, self.kind, self.capability, self.gcn_arch, total, torch_version, cuda, ())


@cache
def read_gpu_models() -> tuple[GpuModel, ...]:
    """All cards of cards.toml, in its order."""
    return tuple(
        GpuModel(
            f"{group['prefix']}{name}",
            group["kind"],
            tuple(group["capability"]) if "capability" in group else None,
            group.get("gcn_arch", ""),
            tuple(sizes),
        )
        for group in read_package_toml(Path(__file__).with_suffix(".toml"))["cards"]
        for name, sizes in group["memory"].items()
    )


GPU_MAKER_PATTERN = re.compile(
    r"nvidia|geforce|tesla|quadro|\bamd\b|radeon|instinct|intel|\(r\)|\(tm\)|apple|\bgpu\b|graphics|\blaptop\b|\bmobile\b"
)
GPU_SERIES_PATTERN = re.compile(r"\b(?:rtx|gtx|rx|arc|gt)(?=\b|\d)")
GPU_MEMORY_PATTERN = re.compile(r"[\s(]*(\d+)\s*gi?b\)?\s*$")


def find_gpu_model(text: str) -> tuple[GpuModel, int | None]:
    """The card that a name means, however it is written, and the memory in GiB if the name states one.

    >>> find_gpu_model("rtx 2080 ti")[0].name, find_gpu_model("Tesla T4")[0].name, find_gpu_model("3060 8GB")[1]
    ('NVIDIA GeForce RTX 2080 Ti', 'Tesla T4', 8)

    Raises UsageError (GPU-UNKNOWN) with the nearest names.
    """
    lowered = text.lower().strip()
    stated = GPU_MEMORY_PATTERN.search(lowered)
    name = GPU_MEMORY_PATTERN.sub("", lowered)
    for strip in (normalize_gpu_name, strip_gpu_maker, strip_gpu_series):
        found = [card for card in read_gpu_models() if strip(card.name) == strip(name)]
        if len(found) == 1:
            return found[0], int(stated[1]) if stated else None
        if found:
            break
    raise make_unknown_gpu_error(text, found)


def normalize_gpu_name(name: str) -> str:
    """A name without blanks, dashes and the makers' marks."""
    return keep_alphanumeric(re.sub(r"\((?:r|tm)\)", "", name.lower()))


def strip_gpu_maker(name: str) -> str:
    """The same without its maker."""
    return keep_alphanumeric(GPU_MAKER_PATTERN.sub(" ", name.lower()))


def strip_gpu_series(name: str) -> str:
    """The same without the series: people say 3060."""
    return keep_alphanumeric(GPU_SERIES_PATTERN.sub(" ", GPU_MAKER_PATTERN.sub(" ", name.lower())))


def keep_alphanumeric(name: str) -> str:
    """Letters and digits alone."""
    return re.sub(r"[^a-z0-9]", "", name)


def make_unknown_gpu_error(text: str, several: list[GpuModel]) -> UsageError:
    """The error for a name that is no card's, or several cards'."""
    near = [card.name for card in several] or find_nearest_gpus(strip_gpu_series(text))
    what = "several cards are called so." if several else "there is no such card in the table."
    return UsageError(
        f"--gpu {text}: {what}" + (f" Did you mean {' or '.join(map(repr, near))}?" if near else ""),
        code="GPU-UNKNOWN",
        subject="--gpu",
        evidence={"near": near},
        remedy="Names are as in T4, RTX 2080 Ti, 3060, RX 7900 XTX, Arc A770, M2. On the machine itself: "
        "finitune doctor",
    )


def find_nearest_gpus(short: str) -> list[str]:
    """The names of up to three cards that few slips of a finger part from a short name: 3900 and 3090 are one apart."""
    slips = {card.name: OSA.distance(strip_gpu_series(card.name), short) for card in read_gpu_models()}
    few = [name for name, count in slips.items() if count <= max(1, len(short) // 3) and short]
    return sorted(few, key=lambda name: (slips[name], strip_gpu_series(name)[:1] != short[:1]))[:3]
