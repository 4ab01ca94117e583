"""What can be asked for: one function for each verb, whose options become its journey's Request.

A verb does no work of its own. It returns the journey, ready to run. Everything heavy is imported inside the verbs, so
that `--help` answers at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from finitune.progress import Progress
from finitune.report import Report

Job = Callable[[Progress], Report]
Precision = Literal["auto", "planned-half", "current-half", "bf16", "fp32", "raw-half"]
Flag = Annotated[bool, Parameter(negative="")]


@Parameter(name="*")
@dataclass(frozen=True)
class Model:
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
class Picture:
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


def generate(
    model: Model,
    picture: Picture = Picture(),
    *,
    precision: Precision = "auto",
    plan: Path | None = None,
    out: Path | None = None,
) -> Job:
    """Draw a picture, and check that it is one.

    Parameters
    ----------
    precision
        How to compute; `auto` takes the best that this machine and the plan allow.
    plan
        A precision plan, as `finitune plan` writes it.
    out
        The PNG file to write.
    """
    from finitune.journeys import generate as journey

    request = journey.Request(**vars(model), **vars(picture), precision=precision, plan=plan, out=out)
    return partial(journey.run, request)


def diagnose(
    model: Model,
    picture: Picture = Picture(),
    *,
    precision: Precision = "raw-half",
    out: Path | None = None,
) -> Job:
    """Find out why a picture is black: which block, which operation, which number.

    Parameters
    ----------
    precision
        How the picture was computed when it failed.
    out
        A folder for the evidence: the picture as it was asked for, the one that a plan draws, the ranges.
    """
    from finitune.journeys import diagnose as journey

    return partial(journey.run, journey.Request(**vars(model), **vars(picture), precision=precision, out=out))


def plan(
    model: Model,
    *,
    out: Path | None = None,
    headroom_bits: float = 2,
    prompts: Path | None = None,
    steps: int = 28,
    seed: int = 0,
    size: str | None = None,
) -> Job:
    """Measure a model's ranges, write the smallest plan that keeps fp16 finite, and prove it.

    Parameters
    ----------
    out
        The plan file to write.
    headroom_bits
        Powers of two to keep free above the largest measured magnitude.
    prompts
        A text file with one calibration prompt a line.
    steps
        Number of denoising steps for each prompt.
    seed
        Seed of the noise.
    size
        WIDTHxHEIGHT in pixels; the model's own size if left out.
    """
    from finitune.journeys import plan as journey

    request = journey.Request(
        **vars(model), out=out, headroom_bits=headroom_bits, prompts=prompts, steps=steps, seed=seed, size=size
    )
    return partial(journey.run, request)


def demo(*, out: Path = Path("finitune-out/demo"), steps: int = 28) -> Job:
    """See it on a small model: a black picture, its diagnosis, its plan, and the picture.

    Parameters
    ----------
    out
        The folder to write to.
    steps
        Number of denoising steps of each picture.
    """
    from finitune.journeys import demo as journey
    from finitune.render.story import story_page

    return partial(journey.run, journey.Request(out=out, steps=steps), story_page)


VERBS: tuple[Callable[..., Job], ...] = (generate, diagnose, plan, demo)
