"""Which programs load an adapter file as it was meant, and what the others make of it: a table of known faults.

Each row holds for one program, or several, and says when it applies. The first row that applies decides; a program
without one loads the file. The table is of programs as they were in 2026: diffusers 0.42, PEFT 0.21, ComfyUI 0.3.64
and its later changes, A1111 1.10, Forge of 2025-06, sd-scripts 0.10.2. Their issue numbers stand in the reasons.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

from finitune.adapters import algorithm_of
from finitune.namings.shelf import outlined

if TYPE_CHECKING:
    from finitune.namings.core import Reading


class Verdict(str, Enum):
    """Whether a program loads a file, refuses or ignores (a part of) it, or draws something else than was trained."""

    YES = "yes"
    NO = "no"
    WRONG = "wrong"


@dataclass(frozen=True)
class Loading:
    """What one program makes of a file, and why."""

    loader: str
    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class Traits:
    """What of a file decides how programs load it."""

    spelling: str
    family: str
    algorithms: frozenset[str]
    """Those of the file: a T-LoRA, which is read as a LoRA, is one."""
    roles: frozenset[str]
    components: frozenset[str]
    sides: frozenset[str]
    """The sides of DoRA magnitudes."""
    scales: frozenset[float]
    alphas: frozenset[float]
    half: bool
    """Whether factors are stored in fp16 or bf16."""
    bundled: bool
    """Whether learned token embeddings lie in the file."""

    @classmethod
    def of(cls, reading: Reading) -> Traits:
        """The traits of an adapter file as read."""
        sites = reading.adapter.sites.values()
        scaled = (site for site in sites if algorithm_of(site.algorithm).rank(outlined(site)) is not None)
        dtypes = {tensor.dtype for site in scaled for tensor in site.tensors.values()}
        baked = {"tlora"} if any(line.role == "q_layer" for line in reading.ledger) else set()
        return cls(
            spelling=reading.spelling,
            family="" if reading.family is None else reading.family.name,
            algorithms=frozenset({site.algorithm for site in sites} | baked),
            roles=frozenset(role for site in sites for role in site.tensors),
            components=frozenset(name.partition(".")[0] for name in reading.adapter),
            sides=frozenset(site.magnitude.side for site in sites if site.magnitude is not None),
            scales=frozenset(algorithm_of(site.algorithm).scale(site) for site in sites),
            alphas=frozenset(site.alpha for site in sites if site.alpha is not None),
            half=bool(dtypes & {torch.float16, torch.bfloat16}),
            bundled=bool(reading.adapter.embeddings),
        )

    @property
    def rounds_when_folded(self) -> bool:
        """Whether folding a scale into the stored factors rounds them again: no power of two, in half precision."""
        return self.half and any(abs(math.frexp(scale)[0]) not in (0.0, 0.5) for scale in self.scales)

    @property
    def scale_in_metadata(self) -> bool:
        """Whether the scale is not 1 and no tensor says so."""
        return self.spelling in ("diffusers", "peft") and self.scales != {1.0}


@dataclass(frozen=True)
class Row:
    """One known fact: these programs give this verdict on files to which `applies` holds."""

    loaders: tuple[str, ...]
    applies: Callable[[Traits], bool]
    verdict: Verdict
    reason: str


DIFFUSERS, PEFT, COMFY, A1111, FORGE, SCRIPTS = "diffusers", "PEFT", "ComfyUI", "A1111", "Forge", "sd-scripts"
LOADERS = (DIFFUSERS, PEFT, COMFY, A1111, FORGE, SCRIPTS)
NO, WRONG, YES = Verdict.NO, Verdict.WRONG, Verdict.YES

READS: dict[str, frozenset[str]] = {
    DIFFUSERS: frozenset(
        {"kohya", "diffusers", "diffusers-old", "diffusers-bare", "comfy", "ai-toolkit", "xlabs", "bfl-control", "fal"}
    ),
    PEFT: frozenset({"peft"}),
    COMFY: frozenset(
        {"kohya", "lycoris", "onetrainer", "videox-fun", "cascade", "comfy", "ai-toolkit", "bfl-control"}
        | {"diffusers", "diffusers-old", "diffusers-dotted", "original-bare"}
    ),
    A1111: frozenset({"kohya", "lycoris", "kohya-oft"}),
    FORGE: frozenset({"kohya", "lycoris", "onetrainer", "comfy", "ai-toolkit", "diffusers", "diffusers-old"}),
    SCRIPTS: frozenset({"kohya", "kohya-oft"}),
}
"""The spellings that each program is known to read, if the model is one that it maps."""

WRITE_FOR = {DIFFUSERS: "diffusers", PEFT: "peft", COMFY: "comfy", A1111: "kohya", FORGE: "kohya", SCRIPTS: "kohya"}
"""The spelling to convert to for each program."""

UNETS = ("sd15", "sd2", "sdxl")
NO_PLAIN_LORA = frozenset({"loha", "glora", "full", "norm", "ia3", "oft", "oft_v2", "boft", "tlora", "set"})


def has(*algorithms: str) -> Callable[[Traits], bool]:
    """Files with at least one of these algorithms."""
    return lambda file: bool(file.algorithms & set(algorithms))


def spelled(*spellings: str) -> Callable[[Traits], bool]:
    """Files in one of these spellings."""
    return lambda file: file.spelling in spellings


def not_of(*families: str) -> Callable[[Traits], bool]:
    """Files of any known family but these."""
    return lambda file: bool(file.family) and file.family not in families


def both(*conditions: Callable[[Traits], bool]) -> Callable[[Traits], bool]:
    """Files to which every condition applies."""
    return lambda file: all(condition(file) for condition in conditions)


def dora(*sides: str) -> Callable[[Traits], bool]:
    """Files with magnitudes on one of these sides."""
    return lambda file: bool(file.sides & set(sides))


def tucker(file: Traits) -> bool:
    """Files with a core between the factors."""
    return bool(file.roles & {"mid", "t1", "t2"})


def anima(file: Traits) -> bool:
    """Files for Anima."""
    return file.family == "anima"


ROWS: tuple[Row, ...] = (
    # A naming that the program does not know comes first: nothing else matters then.
    Row((DIFFUSERS,), both(anima, spelled("kohya")), NO, "it has no map for kohya's names of Anima; nothing is loaded"),
    Row((DIFFUSERS,), both(anima, spelled("comfy", "ai-toolkit"), lambda f: bool(f.alphas)), NO,
        "it refuses the .alpha tensors (#14088): convert with --to diffusers"),
    Row((DIFFUSERS,), lambda f: f.family in (*UNETS, "flux") and f.spelling in ("comfy", "ai-toolkit"), NO,
        "it has no map for the original names of this model: convert with --to diffusers"),
    Row((COMFY,), both(anima, spelled("diffusers")), NO, "it does not know diffusers' names of Anima (#14182)"),
    Row((A1111,), not_of(*UNETS, "sd3"), NO, "it does not run this model"),
    Row((FORGE,), not_of(*UNETS, "flux"), NO, "it does not run this model"),
    Row((COMFY,), lambda f: anima(f) and f.spelling == "kohya" and "text_encoder" in f.components, NO,
        "without its change #13847 it has no map for the text encoder's keys (#13747)"),
    # Algorithms.
    Row((DIFFUSERS,), has(*NO_PLAIN_LORA), NO, "its converter knows LoRA alone: convert with --as lora"),
    Row((DIFFUSERS,), lambda f: "lokr" in f.algorithms and f.family not in ("flux2", "z_image"), NO,
        "for this model its converter knows LoRA alone: convert with --as lora"),
    Row((DIFFUSERS, PEFT, SCRIPTS), tucker, NO, "it has no core between the factors (lora_mid; #11943)"),
    Row((PEFT,), has("full", "norm", "tlora", "set"), NO, "it has no such adapter"),
    Row((COMFY,), has("ia3", "tlora"), NO, "it has no such adapter; only its log says so (#6381)"),
    Row((COMFY,), has("oft", "boft"), WRONG, "it applies the strength twice, and leaves rescale out"),
    Row((COMFY, FORGE, A1111), has("oft_v2"), NO, "it does not know PEFT's rotations (oft_R)"),
    Row((A1111,), has("glora"), WRONG, "it knows only the order of the factors of 2023"),
    Row((A1111,), lambda f: "w_norm" in f.roles and "b_norm" not in f.roles, NO, "it wants w_norm and b_norm together"),
    Row((A1111, FORGE), has("tlora"), NO, "it has no such adapter"),
    Row((FORGE,), has("oft", "boft", "ia3"), NO, "it has no such adapter (#1395)"),
    Row((SCRIPTS,), has("glora", "full", "norm", "ia3", "boft", "oft_v2", "set", "tlora"), NO, "it has none such"),
    Row((SCRIPTS,), both(has("oft"), lambda f: 0.0 in f.alphas), WRONG, "it takes alpha 0 as no rotation at all"),
    # DoRA.
    Row((DIFFUSERS,), both(dora("out", "in"), spelled("kohya", "comfy")), WRONG,
        "it leaves dora_scale out and draws the plain LoRA: convert with --to diffusers"),
    Row((DIFFUSERS, PEFT), dora("in"), NO, "its magnitudes are of the outputs"),
    Row((COMFY,), both(dora("out", "in"), spelled("diffusers")), WRONG,
        "it does not know lora_magnitude_vector and draws the plain LoRA (#3494)"),
    Row((COMFY, FORGE), dora("out"), WRONG, "it divides by the norm of the base alone (#15458)"),
    Row((A1111,), dora("out"), WRONG, "it takes every magnitude as one of the inputs"),
    Row((SCRIPTS,), dora("out", "in"), NO, "it has no DoRA"),
    # Scale.
    Row((COMFY, FORGE), lambda f: f.scale_in_metadata, WRONG,
        "it does not read the scale from the metadata: convert with --portable"),
    Row((DIFFUSERS,), lambda f: 0.0 in f.alphas and f.spelling == "kohya", WRONG, "it takes alpha 0 as strength 0"),
    Row((DIFFUSERS,), lambda f: f.spelling in ("kohya", "comfy") and f.rounds_when_folded, YES,
        "alpha / rank is no power of two: its factors are rounded once more, by up to 0.2 %"),
    Row((DIFFUSERS, COMFY, PEFT), lambda f: f.bundled, YES, "the learned token embeddings have to be loaded apart"),
)  # fmt: skip
"""From what stops all loading to what is only worth saying; the first that applies decides."""


def where_it_loads(reading: Reading) -> list[Loading]:
    """What each program makes of a file, as far as its naming, algorithms, magnitudes and scales decide it."""
    traits = Traits.of(reading)
    return [loading(loader, traits) for loader in LOADERS]


def loading(loader: str, file: Traits) -> Loading:
    """What one program makes of a file: it must read the spelling; then the first row that applies, or yes."""
    if file.spelling not in READS[loader]:
        return Loading(loader, NO, f"it does not read this spelling: convert with --to {WRITE_FOR[loader]}")
    for row in ROWS:
        if loader in row.loaders and row.applies(file):
            return Loading(loader, row.verdict, row.reason)
    return Loading(loader, Verdict.YES, "")
