"""Verbs that answer before anything long runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from finitune.cli.options import CliAmbiguityOptions, CliFlag, VerbJob


def doctor(
    *, quick: CliFlag = False, distributed: int | None = None, bundle: Path | None = None, run: Path | None = None
) -> VerbJob:
    """Say whether it will work on this machine, in which dtype, and what to change first.

    Parameters
    ----------
    quick
        Read the facts, and measure nothing.
    distributed
        Let so many processes meet and add up, as training on several GPUs does.
    bundle
        A ZIP file to write for a bug report: without tokens, names of people, and paths outside the project.
    run
        The folder of a run, whose configuration, report and steps go into the bundle.
    """
    from finitune.verbs import doctor as journey

    return partial(journey.run, journey.Request(quick=quick, distributed=distributed, bundle=bundle, run=run))


def check(
    *paths: Annotated[Path, Parameter(name="PATH", required=True)],
    doubts: CliAmbiguityOptions = CliAmbiguityOptions(),
    model: str | None = None,
    gpu: str | None = None,
    fix: CliFlag = False,
    yes: CliFlag = False,
    html: Path | None = None,
) -> VerbJob:
    """Say what each path is, what is wrong with it, and where it will load; mend what is safe to mend.

    Parameters
    ----------
    paths
        A training configuration (ours, or another program's), a dataset folder, a model, an adapter, a cache, a run, a
        ComfyUI workflow, or a picture that was generated.
    model
        The model that it is for: its family (`anima`, `sdxl` ...), `pico-anima`, a file or a folder.
    gpu
        Tell what each dtype will do on a card of this name, such as T4 or 3060.
    fix
        Make the changes that lose nothing, after asking; a copy of each file stays as NAME.orig.
    yes
        With `--fix`: do not ask.
    html
        A page to write of all that was found.
    """
    from finitune.cli.terminal_prompt import get_terminal_prompt
    from finitune.render.check_page import render_check_page
    from finitune.verbs import check as journey

    how = {
        "model": model,
        "gpu": gpu,
        "fix": fix,
        "yes": yes,
        "html": html,
        "ask": get_terminal_prompt() if fix else None,
    }
    return partial(journey.run, journey.Request(paths=paths, **how, **vars(doubts)), page=render_check_page)


def bench(
    what: Literal["attention"] = "attention",
    *,
    model: Literal["anima", "sdxl", "flux"] = "anima",
    size: str = "1024x1024",
    device: str = "auto",
    out: Annotated[Path, Parameter(alias="-o")] = Path("finitune-out/bench-attention.md"),
) -> VerbJob:
    """Measure every kind of attention that is installed: speed, memory, error; and say which to choose here.

    Parameters
    ----------
    what
        What to measure.
    model
        The model whose layers are measured.
    size
        WIDTHxHEIGHT in pixels.
    device
        Where to compute: `auto` takes the first GPU if there is one, else the CPU.
    out
        The Markdown file to write, a table that can be pasted into an issue.
    """
    from finitune.verbs import bench as journey

    return partial(journey.run, journey.Request(what=what, model=model, size=size, device=device, out=out))


def explain(code: str = "") -> VerbJob:
    """Tell what a code of a report means, how it was found, and what to do.

    Parameters
    ----------
    code
        A code, such as DRIVER-OLD, or the beginning of several; all are listed if left out.
    """
    from finitune.verbs import explain as journey

    return partial(journey.run, journey.Request(code=code))
