"""What we know of a model family, as data; everybody who asks about a family asks here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from finitune.machine.measuring.attention_bench import BenchLayer
from finitune.models.sites import AdapterSites

_ADAPTER_ONLY_KEY_PATTERN = re.compile(
    r"(.*\.)?(lora_(down|up|mid|A|B)(\.[^.]+)*\.weight|lora_[AB](\..+)?|hada_w[12]_[ab]|lokr_w[12](_[ab])?"
    r"|dora_scale|lora_magnitude_vector(\..+)?|oft_(blocks|diag|R\..+))"
)
"""Names that only adapters have: LoRA, LoHa, LoKr, DoRA, OFT."""


@dataclass(frozen=True)
class Fp16Hazard:
    """What becomes of a family in plain fp16, and where that was found out."""

    wrong: bool
    why: str
    source: str


@dataclass(frozen=True)
class SettingRule:
    """What a family wants of `settings` of a picture: `holds` of each value, or else `sentence` is broken.

    An empty sentence is that of the invariant called `name`.
    """

    name: str
    settings: tuple[str, ...]
    holds: Callable[[float], bool]
    sentence: str = ""


@dataclass(frozen=True)
class FilePart:
    """What a file of a family can hold: in words, the component, and a name that nothing else has (a pattern).

    `role` is the part that such a file plays where a model is several files; "" where it is of another layout.
    """

    title: str
    component: str
    landmark: str
    role: str = ""

    def is_in(self, names: Iterable[str]) -> bool:
        """Whether one of the names is the landmark."""
        return any(map(re.compile(self.landmark).fullmatch, names))


def find_file_part(names: Iterable[str], families: Iterable[ModelSpec]) -> FilePart | None:
    """What a file with these names holds of one of the families; None where that is not known."""
    names = list(names)
    return next((part for family in families for part in family.parts if part.is_in(names)), None)


def has_adapter_names(names: Iterable[str]) -> bool:
    """Whether a file with these names is an adapter."""
    return any(map(_ADAPTER_ONLY_KEY_PATTERN.fullmatch, names))


@dataclass(frozen=True)
class ShippedModel:
    """A model that comes with the package: its folder, its plan, and the side of the pictures that it draws best."""

    folder: Path
    plan: Path
    picture_side: int


@dataclass(frozen=True)
class ModelSpec:
    """A model family: its name, its components in the order they run, and what every correct host keeps to.

    `invariants` are (name, sentence) pairs: facts about conditioning and sampling that no tensor records, and that
    a black or muddled picture should be checked against when precision is acquitted; `setting_rules` are those that a
    picture's settings can break. `adapters` is where its adapters lie. `attention` gives the attentions of a pass by
    the number of tokens, one for 16 x 16 pixels. `classes` are the classes of the original code, by a pattern of where
    their modules stand. `runtime` names the LoadedModel of the family, "module:class", which is imported when a model
    is loaded and not before: it needs diffusers. It is "" for a family that is read and written, but not run.
    """

    name: str
    components: tuple[str, ...]
    invariants: tuple[tuple[str, str], ...]
    adapters: AdapterSites
    title: str
    runtime: str = ""
    fp16: Fp16Hazard | None = None
    attention: Callable[[int], list[BenchLayer]] | None = None
    setting_rules: tuple[SettingRule, ...] = ()
    parts: tuple[FilePart, ...] = ()
    beside_denoiser: Mapping[str, str] = field(default_factory=dict)
    """The components that the file of the denoiser must hold, too, {component: in words}."""
    classes: Mapping[str, str] = field(default_factory=dict)
    shipped: Mapping[str, ShippedModel] = field(default_factory=dict)
    picture_side: int = 1024
