"""Options that several verbs share. A verb's Request has them as bases: its fields are its command line.

A field is an option, the string below it is its help. Nothing heavy is imported here, so that help is told at once.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from finitune.config.schema import PrecisionMode
from finitune.errors import UsageError

if TYPE_CHECKING:
    from finitune.adapters.core import AmbiguityOptions

OutPath = Annotated[Path | None, Parameter(alias="-o")]
DrawingPrecision = Literal[PrecisionMode, "raw-half"]
"""What a training can compute in, and plain fp16."""
AdapterFileDtype = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class ModelChoice:
    """Where the model is: a shipped one, a diffusers folder, or a DiT file together with its Qwen3 and VAE files."""

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

    @property
    def files(self) -> dict[str, Path]:
        """The files beside that of MODEL, by the name of their option."""
        named = {"qwen3": self.qwen3, "vae": self.vae, "tokenizers": self.tokenizers}
        return {name: path for name, path in named.items() if path is not None}

    def to_command_words(self) -> str:
        """The words that name this model, and the drawing that is asked of it, where not as by default."""
        shared = DrawingOptions if isinstance(self, DrawingOptions) else ModelChoice
        given = [(one, getattr(self, one.name)) for one in fields(shared) if one.name not in ("model", "precision")]
        options = [f"--{one.name} {shlex.quote(str(value))}" for one, value in given if value != one.default]
        return " ".join([shlex.quote(self.model), *options])


@dataclass(frozen=True, kw_only=True)
class DrawingOptions(ModelChoice):
    """What to draw, and in which precision."""

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
    precision: DrawingPrecision = "auto"
    """How to compute; `auto` takes the best that this machine and the plan allow."""


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """How much of a LoRA to keep; with both, the smaller rank wins."""

    rank: int | None = None
    """The largest rank of a layer."""
    energy: float | None = None
    """The share of each layer's squared change to keep, as 0.99."""


@dataclass(frozen=True, kw_only=True)
class AmbiguityRequest:
    """Answers to what an adapter file may leave open; the findings that ask for one name its option."""

    dora_side: Literal["out", "in"] | None = None
    """The side of DoRA magnitudes whose shape fits both."""
    glora_order: Literal["new", "old"] | None = None
    """The order of GLoRA factors whose shapes fit both; `old` is of 2023."""
    zero_alpha: Literal["rank", "zero"] | None = None
    """What alpha 0 means: `rank` to LyCORIS and sd-scripts, `zero` to diffusers."""
    scale: float | None = None
    """alpha / rank, where no file states it: 1 for a training with alpha = rank."""

    def answers(self) -> AmbiguityOptions:
        """The same for the reader; raises UsageError for a scale that none can be."""
        from finitune.adapters.core import AmbiguityOptions

        if self.scale is not None and not (math.isfinite(self.scale) and self.scale):
            raise UsageError(
                f"--scale {self.scale:g} is no scale",
                code="SCALE-OUT-OF-RANGE",
                subject="--scale",
                remedy="It is alpha / rank: 1 where they are equal, 2 for alpha 32 at rank 16.",
            )
        return AmbiguityOptions(self.dora_side, self.glora_order, self.zero_alpha, self.scale)
