"""Verbs for models and pictures."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from finitune.cli.options import (
    CliAdapterOptions,
    CliDrawingOptions,
    CliModelOptions,
    CliOutPath,
    CliPrecision,
    VerbJob,
)


def generate(
    model: CliModelOptions,
    picture: CliDrawingOptions = CliDrawingOptions(),
    adapters: CliAdapterOptions = CliAdapterOptions(),
    *,
    precision: CliPrecision = "auto",
    plan: Path | None = None,
    out: CliOutPath = None,
) -> VerbJob:
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
    from finitune.verbs import generate as journey

    how = {"precision": precision, "plan": plan, "out": out}
    return partial(journey.run, journey.Request(**vars(model), **vars(picture), **vars(adapters), **how))


def diagnose(
    model: CliModelOptions,
    picture: CliDrawingOptions = CliDrawingOptions(),
    *,
    precision: CliPrecision = "raw-half",
    out: CliOutPath = None,
) -> VerbJob:
    """Find out why a picture is black: which block, which operation, which number.

    Parameters
    ----------
    precision
        How the picture was computed when it failed.
    out
        A folder for the evidence: the picture as it was asked for, the one that a plan draws, the ranges.
    """
    from finitune.verbs import diagnose as journey

    return partial(journey.run, journey.Request(**vars(model), **vars(picture), precision=precision, out=out))


def plan(
    model: CliModelOptions,
    *,
    out: CliOutPath = None,
    headroom_bits: float = 2,
    prompts: Path | None = None,
    steps: int = 28,
    seed: int = 0,
    size: str | None = None,
) -> VerbJob:
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
    from finitune.verbs import plan as journey

    request = journey.Request(
        **vars(model), out=out, headroom_bits=headroom_bits, prompts=prompts, steps=steps, seed=seed, size=size
    )
    return partial(journey.run, request)


def demo(*, out: Annotated[Path, Parameter(alias="-o")] = Path("finitune-out/demo"), steps: int = 28) -> VerbJob:
    """See it on a small model: a black picture, its diagnosis, its plan, and the picture.

    Parameters
    ----------
    out
        The folder to write to.
    steps
        Number of denoising steps of each picture.
    """
    from finitune.render.demo_page import render_demo_page
    from finitune.verbs import demo as journey

    return partial(journey.run, journey.Request(out=out, steps=steps), render_demo_page)
