"""Options that several verbs share, and what they are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from finitune.progress import Progress
from finitune.report import Report

VerbJob = Callable[[Progress], Report]
CliPrecision = Literal["auto", "planned-half", "current-half", "bf16", "fp32", "raw-half"]
CliDtype = Literal["fp32", "bf16", "fp16"]
CliFlag = Annotated[bool, Parameter(negative="")]
CliOutPath = Annotated[Path | None, Parameter(alias="-o")]


@Parameter(name="*")
@dataclass(frozen=True)
class CliModelOptions:
    """Where the model is."""

    model: str
    """`pico-anima` (ships with finitune), a diffusers folder, or the file of the diffusion transformer."""
    _: KW_ONLY
    qwen3: Path | None = None
    """The text encoder's file, where MODEL is a file."""
    vae: Path | None = None
    """The VAE's file, where MODEL is a file."""
    tokenizers: Path | None = None
    """A folder with `tokenizer` and `t5_tokenizer`, where MODEL is a file."""
    device: str = "auto"
    """Where to compute: `auto` takes the first GPU if there is one, else the CPU."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CliDrawingOptions:
    """What to draw."""

    prompt: str = "red apple"
    """What to draw."""
    negative: str = ""
    """What not to draw."""
    steps: int = 28
    """Number of denoising steps."""
    cfg: float = 4.0
    """Guidance: how strongly the prompt pulls."""
    seed: int = 0
    """Seed of the noise."""
    size: str | None = None
    """WIDTHxHEIGHT in pixels; the model's own size if left out."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CliRankOptions:
    """How much of a LoRA to keep; with both, the smaller rank wins."""

    rank: int | None = None
    """The largest rank of a layer."""
    energy: float | None = None
    """The share of each layer's squared change to keep, as 0.99."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CliAmbiguityOptions:
    """What an adapter file may leave open."""

    dora_side: Literal["out", "in"] | None = None
    """The side of DoRA magnitudes whose shape fits both."""
    glora_order: Literal["new", "old"] | None = None
    """The order of GLoRA factors whose shapes fit both; `old` is of 2023."""
    zero_alpha: Literal["rank", "zero"] | None = None
    """What alpha 0 means: `rank` to LyCORIS and sd-scripts, `zero` to diffusers."""
    scale: float | None = None
    """alpha / rank, where no file states it: 1 for a training with alpha = rank."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CliAdapterOptions(CliAmbiguityOptions):
    """What to put on the model."""

    adapter: tuple[str, ...] = ()
    """An adapter file, as FILE or FILE:STRENGTH; may be given several times."""
    merge_first: CliFlag = False
    """Put the adapters into the weights, instead of attaching them to the layers."""
