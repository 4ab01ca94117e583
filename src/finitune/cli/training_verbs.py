"""Verbs for training."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from finitune.cli.options import CliFlag, CliOutPath, VerbJob


def train(
    config: Path | None = None,
    *,
    source: Annotated[str | None, Parameter(name="--from")] = None,
    init: CliFlag = False,
    explain: CliFlag = False,
    dry_run: CliFlag = False,
    resume: CliFlag = False,
    out: CliOutPath = None,
) -> VerbJob:
    """Train an adapter, and check every file that is written.

    Parameters
    ----------
    config
        A training configuration of ours, as `--init` writes one.
    source
        Another program's configuration, or its command line in quotes: kohya's sd-scripts (TOML, flags, dataset TOML),
        kohya_ss GUI, ai-toolkit, OneTrainer, SimpleTuner, diffusion-pipe. The report tells what became of each key.
    init
        Write a configuration with every option explained, and stop.
    explain
        List the modules that would get an adapter, with the reason for each, and stop.
    dry_run
        Look at everything, make the caches, measure one step, a save and a preview, and stop.
    resume
        Go on from the last state in the output folder.
    out
        The file for `--init`; else the folder of the run, in place of the configuration's.
    """
    from finitune.render.training_page import render_training_page
    from finitune.verbs import train as journey

    request = journey.Request(
        config=config, source=source, init=init, explain=explain, dry_run=dry_run, resume=resume, out=out
    )
    return partial(journey.run, request, render_training_page)


def verify_resume(config: Path, *, steps: int = 6, out: CliOutPath = None) -> VerbJob:
    """Prove that a run that is killed and resumed ends with the same bits.

    Parameters
    ----------
    config
        A training configuration of ours.
    steps
        How many steps to take; the second run is stopped and resumed in the middle.
    out
        A folder for both runs; a temporary one if left out.
    """
    from finitune.verbs import verify_resume as journey

    return partial(journey.run, journey.Request(config=config, steps=steps, out=out))
