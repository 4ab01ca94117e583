"""What can be asked for: one function for each verb, whose options become its journey's Request.

A verb does no work of its own. It returns the journey, ready to run. Everything heavy is imported inside the verbs, so
that `--help` answers at once.
"""

from __future__ import annotations

from collections.abc import Callable

from finitune.cli.adapter_verbs import convert, extract, merge, resize
from finitune.cli.model_verbs import demo, diagnose, generate, plan
from finitune.cli.options import VerbJob
from finitune.cli.preflight_verbs import bench, check, doctor, explain
from finitune.cli.training_verbs import train, verify_resume

CLI_VERBS: tuple[Callable[..., VerbJob], ...] = (
    doctor,
    check,
    generate,
    diagnose,
    plan,
    train,
    verify_resume,
    convert,
    merge,
    extract,
    resize,
    bench,
    explain,
    demo,
)
