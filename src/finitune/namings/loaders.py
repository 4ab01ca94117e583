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

from finitune.adapters import find_algorithm
from finitune.namings.tensor_reader import to_meta_adapter

if TYPE_CHECKING:
    from finitune.namings.core import ParsedAdapter


class LoadVerdict(str, Enum):
    """Whether a program loads a file, refuses or ignores (a part of) it, or draws something else than was trained."""

    YES = "yes"
    NO = "no"
    WRONG = "wrong"


@dataclass(frozen=True)
class LoaderResult:
    """What one program makes of a file, and why."""

    loader: str
    verdict: LoadVerdict
    reason: str


@dataclass(frozen=True)
class AdapterFileTraits:
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
    def of(cls, reading: ParsedAdapter) -> AdapterFileTraits:
        """The traits of an adapter file as read."""
        sites = reading.adapter.sites.values()
        scaled = (site for site in sites if find_algorithm(site.algorithm).rank(to_meta_adapter(site)) is not None)
        dtypes = {tensor.dtype for site in scaled for tensor in site.tensors.values()}
        baked = {"tlora"} if any(line.role == "q_layer" for line in reading.ledger) else set()
        return cls(
            spelling=reading.spelling,
            family="" if reading.family is None else reading.family.name,
            algorithms=frozenset({site.algorithm for site in sites} | baked),
            roles=frozenset(role for site in sites for role in site.tensors),
            components=frozenset(name.partition(".")[0] for name in reading.adapter),
            sides=frozenset(site.magnitude.side for site in sites if site.magnitude is not None),
            scales=frozenset(find_algorithm(site.algorithm).scale(site) for site in sites),
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
class LoaderRule:
    """One known fact: these programs give this verdict on files to which `applies` holds."""

    loaders: tuple[str, ...]
    applies: Callable[[AdapterFileTraits], bool]
    verdict: LoadVerdict
    reason: str


_DIFFUSERS_LOADER, _PEFT_LOADER, _COMFY_LOADER, _A1111_LOADER, _FORGE_LOADER, _SD_SCRIPTS_LOADER = (
    "diffusers",
    "PEFT",
    "ComfyUI",
    "A1111",
    "Forge",
    "sd-scripts",
)
ADAPTER_LOADERS = (_DIFFUSERS_LOADER, _PEFT_LOADER, _COMFY_LOADER, _A1111_LOADER, _FORGE_LOADER, _SD_SCRIPTS_LOADER)
_NO, _WRONG, _YES = LoadVerdict.NO, LoadVerdict.WRONG, LoadVerdict.YES

SPELLINGS_BY_LOADER: dict[str, frozenset[str]] = {
    _DIFFUSERS_LOADER: frozenset(
        {"kohya", "diffusers", "diffusers-old", "diffusers-bare", "comfy", "ai-toolkit", "xlabs", "bfl-control", "fal"}
    ),
    _PEFT_LOADER: frozenset({"peft"}),
    _COMFY_LOADER: frozenset(
        {"kohya", "lycoris", "onetrainer", "videox-fun", "cascade", "comfy", "ai-toolkit", "bfl-control"}
        | {"diffusers", "diffusers-old", "diffusers-dotted", "original-bare"}
    ),
    _A1111_LOADER: frozenset({"kohya", "lycoris", "kohya-oft"}),
    _FORGE_LOADER: frozenset({"kohya", "lycoris", "onetrainer", "comfy", "ai-toolkit", "diffusers", "diffusers-old"}),
    _SD_SCRIPTS_LOADER: frozenset({"kohya", "kohya-oft"}),
}
"""The spellings that each program is known to read, if the model is one that it maps."""

TARGET_SPELLING_BY_LOADER = {
    _DIFFUSERS_LOADER: "diffusers",
    _PEFT_LOADER: "peft",
    _COMFY_LOADER: "comfy",
    _A1111_LOADER: "kohya",
    _FORGE_LOADER: "kohya",
    _SD_SCRIPTS_LOADER: "kohya",
}
"""The spelling to convert to for each program."""

_UNET_FAMILIES = ("sd15", "sd2", "sdxl")
_NON_LORA_ALGORITHMS = frozenset({"loha", "glora", "full", "norm", "ia3", "oft", "oft_v2", "boft", "tlora", "set"})


def match_algorithms(*algorithms: str) -> Callable[[AdapterFileTraits], bool]:
    """Files with at least one of these algorithms."""
    return lambda file: bool(file.algorithms & set(algorithms))


def match_spellings(*spellings: str) -> Callable[[AdapterFileTraits], bool]:
    """Files in one of these spellings."""
    return lambda file: file.spelling in spellings


def match_other_families(*families: str) -> Callable[[AdapterFileTraits], bool]:
    """Files of any known family but these."""
    return lambda file: bool(file.family) and file.family not in families


def match_all_conditions(*conditions: Callable[[AdapterFileTraits], bool]) -> Callable[[AdapterFileTraits], bool]:
    """Files to which every condition applies."""
    return lambda file: all(condition(file) for condition in conditions)


def match_dora_sides(*sides: str) -> Callable[[AdapterFileTraits], bool]:
    """Files with magnitudes on one of these sides."""
    return lambda file: bool(file.sides & set(sides))


def has_tucker_core(file: AdapterFileTraits) -> bool:
    """Files with a core between the factors."""
    return bool(file.roles & {"mid", "t1", "t2"})


def is_anima_adapter(file: AdapterFileTraits) -> bool:
    """Files for Anima."""
    return file.family == "anima"


LOADER_RULES: tuple[LoaderRule, ...] = (
    # A naming that the program does not know comes first: nothing else matters then.
    LoaderRule(
        (_DIFFUSERS_LOADER,),
        match_all_conditions(is_anima_adapter, match_spellings("kohya")),
        _NO,
        "it has no map for kohya's names of Anima; nothing is loaded",
    ),
    LoaderRule(
        (_DIFFUSERS_LOADER,),
        match_all_conditions(is_anima_adapter, match_spellings("comfy", "ai-toolkit"), lambda f: bool(f.alphas)),
        _NO,
        "it refuses the .alpha tensors (#14088): convert with --to diffusers",
    ),
    LoaderRule(
        (_DIFFUSERS_LOADER,),
        lambda f: f.family in (*_UNET_FAMILIES, "flux") and f.spelling in ("comfy", "ai-toolkit"),
        _NO,
        "it has no map for the original names of this model: convert with --to diffusers",
    ),
    LoaderRule(
        (_COMFY_LOADER,),
        match_all_conditions(is_anima_adapter, match_spellings("diffusers")),
        _NO,
        "it does not know diffusers' names of Anima (#14182)",
    ),
    LoaderRule((_A1111_LOADER,), match_other_families(*_UNET_FAMILIES, "sd3"), _NO, "it does not run this model"),
    LoaderRule((_FORGE_LOADER,), match_other_families(*_UNET_FAMILIES, "flux"), _NO, "it does not run this model"),
    LoaderRule(
        (_COMFY_LOADER,),
        lambda f: is_anima_adapter(f) and f.spelling == "kohya" and "text_encoder" in f.components,
        _NO,
        "without its change #13847 it has no map for the text encoder's keys (#13747)",
    ),
    # Algorithms.
    LoaderRule(
        (_DIFFUSERS_LOADER,),
        match_algorithms(*_NON_LORA_ALGORITHMS),
        _NO,
        "its converter knows LoRA alone: convert with --as lora",
    ),
    LoaderRule(
        (_DIFFUSERS_LOADER,),
        lambda f: "lokr" in f.algorithms and f.family not in ("flux2", "z_image"),
        _NO,
        "for this model its converter knows LoRA alone: convert with --as lora",
    ),
    LoaderRule(
        (_DIFFUSERS_LOADER, _PEFT_LOADER, _SD_SCRIPTS_LOADER),
        has_tucker_core,
        _NO,
        "it has no core between the factors (lora_mid; #11943)",
    ),
    LoaderRule((_PEFT_LOADER,), match_algorithms("full", "norm", "tlora", "set"), _NO, "it has no such adapter"),
    LoaderRule(
        (_COMFY_LOADER,), match_algorithms("ia3", "tlora"), _NO, "it has no such adapter; only its log says so (#6381)"
    ),
    LoaderRule(
        (_COMFY_LOADER,),
        match_algorithms("oft", "boft"),
        _WRONG,
        "it applies the strength twice, and leaves rescale out",
    ),
    LoaderRule(
        (_COMFY_LOADER, _FORGE_LOADER, _A1111_LOADER),
        match_algorithms("oft_v2"),
        _NO,
        "it does not know PEFT's rotations (oft_R)",
    ),
    LoaderRule((_A1111_LOADER,), match_algorithms("glora"), _WRONG, "it knows only the order of the factors of 2023"),
    LoaderRule(
        (_A1111_LOADER,),
        lambda f: "w_norm" in f.roles and "b_norm" not in f.roles,
        _NO,
        "it wants w_norm and b_norm together",
    ),
    LoaderRule((_A1111_LOADER, _FORGE_LOADER), match_algorithms("tlora"), _NO, "it has no such adapter"),
    LoaderRule((_FORGE_LOADER,), match_algorithms("oft", "boft", "ia3"), _NO, "it has no such adapter (#1395)"),
    LoaderRule(
        (_SD_SCRIPTS_LOADER,),
        match_algorithms("glora", "full", "norm", "ia3", "boft", "oft_v2", "set", "tlora"),
        _NO,
        "it has none such",
    ),
    LoaderRule(
        (_SD_SCRIPTS_LOADER,),
        match_all_conditions(match_algorithms("oft"), lambda f: 0.0 in f.alphas),
        _WRONG,
        "it takes alpha 0 as no rotation at all",
    ),
    # DoRA.
    LoaderRule(
        (_DIFFUSERS_LOADER,),
        match_all_conditions(match_dora_sides("out", "in"), match_spellings("kohya", "comfy")),
        _WRONG,
        "it leaves dora_scale out and draws the plain LoRA: convert with --to diffusers",
    ),
    LoaderRule((_DIFFUSERS_LOADER, _PEFT_LOADER), match_dora_sides("in"), _NO, "its magnitudes are of the outputs"),
    LoaderRule(
        (_COMFY_LOADER,),
        match_all_conditions(match_dora_sides("out", "in"), match_spellings("diffusers")),
        _WRONG,
        "it does not know lora_magnitude_vector and draws the plain LoRA (#3494)",
    ),
    LoaderRule(
        (_COMFY_LOADER, _FORGE_LOADER),
        match_dora_sides("out"),
        _WRONG,
        "it divides by the norm of the base alone (#15458)",
    ),
    LoaderRule((_A1111_LOADER,), match_dora_sides("out"), _WRONG, "it takes every magnitude as one of the inputs"),
    LoaderRule((_SD_SCRIPTS_LOADER,), match_dora_sides("out", "in"), _NO, "it has no DoRA"),
    # Scale.
    LoaderRule(
        (_COMFY_LOADER, _FORGE_LOADER),
        lambda f: f.scale_in_metadata,
        _WRONG,
        "it does not read the scale from the metadata: convert with --portable",
    ),
    LoaderRule(
        (_DIFFUSERS_LOADER,),
        lambda f: 0.0 in f.alphas and f.spelling == "kohya",
        _WRONG,
        "it takes alpha 0 as strength 0",
    ),
    LoaderRule(
        (_DIFFUSERS_LOADER,),
        lambda f: f.spelling in ("kohya", "comfy") and f.rounds_when_folded,
        _YES,
        "alpha / rank is no power of two: its factors are rounded once more, by up to 0.2 %",
    ),
    LoaderRule(
        (_DIFFUSERS_LOADER, _COMFY_LOADER, _PEFT_LOADER),
        lambda f: f.bundled,
        _YES,
        "the learned token embeddings have to be loaded apart",
    ),
)
"""From what stops all loading to what is only worth saying; the first that applies decides."""


def predict_all_loaders(reading: ParsedAdapter) -> list[LoaderResult]:
    """What each program makes of a file, as far as its naming, algorithms, magnitudes and scales decide it."""
    traits = AdapterFileTraits.of(reading)
    return [predict_loader(loader, traits) for loader in ADAPTER_LOADERS]


def predict_loader(loader: str, file: AdapterFileTraits) -> LoaderResult:
    """What one program makes of a file: it must read the spelling; then the first row that applies, or yes."""
    if file.spelling not in SPELLINGS_BY_LOADER[loader]:
        return LoaderResult(
            loader, _NO, f"it does not read this spelling: convert with --to {TARGET_SPELLING_BY_LOADER[loader]}"
        )
    for row in LOADER_RULES:
        if loader in row.loaders and row.applies(file):
            return LoaderResult(loader, row.verdict, row.reason)
    return LoaderResult(loader, LoadVerdict.YES, "")
