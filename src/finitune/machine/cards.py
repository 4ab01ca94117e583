"""Cards by the names that people give them, with the facts that the advice for one rests on: for a card that is not
here. Memory is what the card is sold with; of several sizes the usual one comes first, and a size in the name
("3060 8gb") decides.

Sources: NVIDIA's list of compute capabilities, AMD's ROCm table of architectures, and the makers' data sheets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from finitune.errors import UsageError
from finitune.machine.hardware import Capability, DeviceFacts, DeviceKind

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


def _rows(prefix: str, kind: DeviceKind, arch: Capability | str | None, listed: str) -> tuple[GpuModel, ...]:
    """Cards of one architecture, from "NAME:8/16, NAME:12": each a name and its sizes."""
    capability, gcn = (arch, "") if isinstance(arch, tuple) else (None, arch or "")
    pairs = (text.strip().split(":") for text in listed.split(","))
    return tuple(
        GpuModel(f"{prefix}{name}", kind, capability, gcn, tuple(map(int, sizes.split("/")))) for name, sizes in pairs
    )


# fmt: off
GPU_MODELS = (
    *_rows("NVIDIA GeForce ", "cuda", (12, 0), "RTX 5050:8, RTX 5060:8, RTX 5060 Ti:8/16, RTX 5070:12, RTX 5070 Ti:16, "
           "RTX 5080:16, RTX 5090:32"),
    *_rows("NVIDIA ", "cuda", (12, 0), "RTX PRO 6000:96, RTX PRO 4000:24"),
    *_rows("NVIDIA ", "cuda", (10, 0), "B200:180, GB200:186"),
    *_rows("NVIDIA ", "cuda", (9, 0), "H100:80, H200:141, GH200:96, H800:80"),
    *_rows("NVIDIA GeForce ", "cuda", (8, 9), "RTX 4050:6, RTX 4060:8, RTX 4060 Ti:8/16, RTX 4070:12, "
           "RTX 4070 SUPER:12, RTX 4070 Ti:12, RTX 4070 Ti SUPER:16, RTX 4080:16, RTX 4080 SUPER:16, RTX 4090:24"),
    *_rows("NVIDIA ", "cuda", (8, 9), "L4:24, L40:48, L40S:48, RTX 6000 Ada Generation:48, RTX 4000 Ada Generation:20"),
    *_rows("NVIDIA GeForce ", "cuda", (8, 6), "RTX 2050:4, RTX 3050:8/6/4, RTX 3060:12/8, RTX 3060 Ti:8, RTX 3070:8, "
           "RTX 3070 Ti:8, RTX 3080:10/12, RTX 3080 Ti:12, RTX 3090:24, RTX 3090 Ti:24"),
    *_rows("NVIDIA ", "cuda", (8, 6), "A2:16, A10:24, A10G:24, A16:16, A40:48, RTX A2000:6/12, RTX A4000:16, "
           "RTX A4500:20, RTX A5000:24, RTX A6000:48"),
    *_rows("NVIDIA ", "cuda", (8, 7), "Orin:32/64"),
    *_rows("NVIDIA ", "cuda", (8, 0), "A100:40/80, A30:24, A800:80"),
    *_rows("NVIDIA GeForce ", "cuda", (7, 5), "RTX 2060:6/12, RTX 2060 SUPER:8, RTX 2070:8, RTX 2070 SUPER:8, "
           "RTX 2080:8, RTX 2080 SUPER:8, RTX 2080 Ti:11/22, GTX 1630:4, GTX 1650:4, GTX 1650 SUPER:4, GTX 1650 Ti:4, "
           "GTX 1660:6, GTX 1660 SUPER:6, GTX 1660 Ti:6, MX450:2, MX550:2"),
    *_rows("NVIDIA ", "cuda", (7, 5), "TITAN RTX:24, T400:4/2, T500:4, T600:4, T1000:8/4, T1200:4, T2000:4, T4G:16, "
           "Quadro RTX 3000:6, Quadro RTX 4000:8, Quadro RTX 5000:16, Quadro RTX 6000:24, Quadro RTX 8000:48, "
           "CMP 30HX:6"),
    *_rows("Tesla ", "cuda", (7, 5), "T4:16, T10:16, T40:24"),
    *_rows("Tesla ", "cuda", (7, 0), "V100:16/32"),
    *_rows("NVIDIA ", "cuda", (7, 0), "TITAN V:12, Quadro GV100:32"),
    *_rows("NVIDIA GeForce ", "cuda", (6, 1), "GT 1030:2, GTX 1050:2, GTX 1050 Ti:4, GTX 1060:6/3, GTX 1070:8, "
           "GTX 1070 Ti:8, GTX 1080:8, GTX 1080 Ti:11"),
    *_rows("NVIDIA ", "cuda", (6, 1), "TITAN X Pascal:12, TITAN Xp:12"),
    *_rows("Tesla ", "cuda", (6, 1), "P4:8, P40:24"),
    *_rows("Tesla ", "cuda", (6, 0), "P100:16/12"),
    *_rows("Tesla ", "cuda", (5, 2), "M40:12/24, M60:8"),
    *_rows("NVIDIA GeForce ", "cuda", (5, 2), "GTX 950:2, GTX 960:2/4, GTX 970:4, GTX 980:4, GTX 980 Ti:6"),
    *_rows("NVIDIA GeForce ", "cuda", (5, 0), "GTX 750 Ti:2"),
    *_rows("Tesla ", "cuda", (3, 7), "K80:12"),

    *_rows("AMD Radeon ", "rocm", "gfx1201", "RX 9070:16, RX 9070 XT:16"),
    *_rows("AMD Radeon ", "rocm", "gfx1200", "RX 9060 XT:8/16"),
    *_rows("AMD Radeon ", "rocm", "gfx1100", "RX 7900 XT:20, RX 7900 XTX:24, RX 7900 GRE:16, PRO W7900:48"),
    *_rows("AMD Radeon ", "rocm", "gfx1101", "RX 7800 XT:16, RX 7700 XT:12"),
    *_rows("AMD Radeon ", "rocm", "gfx1102", "RX 7600:8, RX 7600 XT:16"),
    *_rows("AMD Radeon ", "rocm", "gfx1030", "RX 6800:16, RX 6800 XT:16, RX 6900 XT:16, RX 6950 XT:16"),
    *_rows("AMD Radeon ", "rocm", "gfx1031", "RX 6700 XT:12"),
    *_rows("AMD Radeon ", "rocm", "gfx1032", "RX 6600:8, RX 6600 XT:8"),
    *_rows("AMD Radeon ", "rocm", "gfx1010", "RX 5700:8, RX 5700 XT:8"),
    *_rows("AMD ", "rocm", "gfx906", "Radeon VII:16, Instinct MI50:16/32, Instinct MI60:32"),
    *_rows("AMD Radeon ", "rocm", "gfx900", "RX Vega 56:8, RX Vega 64:8"),
    *_rows("AMD Radeon ", "rocm", "gfx803", "RX 470:4/8, RX 480:8, RX 570:4/8, RX 580:8/4, RX 590:8"),
    *_rows("AMD Instinct ", "rocm", "gfx908", "MI100:32"),
    *_rows("AMD Instinct ", "rocm", "gfx90a", "MI210:64, MI250:64, MI250X:64"),
    *_rows("AMD Instinct ", "rocm", "gfx942", "MI300A:128, MI300X:192, MI325X:256"),
    *_rows("AMD Instinct ", "rocm", "gfx950", "MI350X:288, MI355X:288"),

    *_rows("Intel(R) ", "xpu", None, "Arc(TM) A380:6, Arc(TM) A580:8, Arc(TM) A750:8, Arc(TM) A770:16/8, "
           "Arc(TM) B570:10, Arc(TM) B580:12, Data Center GPU Max:48"),
    *_rows("Apple ", "mps", None, "M1:8/16, M1 Pro:16/32, M1 Max:32/64, M1 Ultra:64/128, M2:8/16/24, M2 Pro:16/32, "
           "M2 Max:32/64/96, M2 Ultra:64/128/192, M3:8/16/24, M3 Pro:18/36, M3 Max:36/48/64/128, M3 Ultra:96/256/512, "
           "M4:16/24/32, M4 Pro:24/48/64, M4 Max:36/48/64/128, M5:16/24/32"),
    *_rows("", "cpu", None, "CPU:16"),
)
# fmt: on

GPU_MAKER_PATTERN = re.compile(
    r"nvidia|geforce|tesla|quadro|\bamd\b|radeon|instinct|intel|\(r\)|\(tm\)|apple|\bgpu\b|graphics|\blaptop\b|\bmobile\b"
)
GPU_SERIES_PATTERN = re.compile(r"\b(?:rtx|gtx|rx|arc|gt)(?=\b|\d)")
GPU_MEMORY_PATTERN = re.compile(r"[\s(]*(\d+)\s*gi?b\)?\s*$")


def find_gpu_model(text: str) -> tuple[GpuModel, int | None]:
    """The card that a name means, however it is written, and the memory in GiB if the name states one.

    >>> card_named("rtx 2080 ti")[0].name, card_named("Tesla T4")[0].name, card_named("3060 8GB")[1]
    ('NVIDIA GeForce RTX 2080 Ti', 'Tesla T4', 8)

    Raises UsageError (GPU-UNKNOWN) with the nearest names.
    """
    lowered = text.lower().strip()
    stated = GPU_MEMORY_PATTERN.search(lowered)
    name = GPU_MEMORY_PATTERN.sub("", lowered)
    for strip in (normalize_gpu_name, strip_gpu_maker, strip_gpu_series):
        found = [card for card in GPU_MODELS if strip(card.name) == strip(name)]
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
    from rapidfuzz.distance import OSA

    slips = {card.name: OSA.distance(strip_gpu_series(card.name), short) for card in GPU_MODELS}
    few = [name for name, count in slips.items() if count <= max(1, len(short) // 3) and short]
    return sorted(few, key=lambda name: (slips[name], strip_gpu_series(name)[:1] != short[:1]))[:3]
