"""The command line: a verb's options become its journey's Request, its Report becomes text or JSON and an exit code.

A verb does no work of its own. It returns the journey, ready to run; `main` runs it, watches over it and tells what
came of it. Everything heavy is imported inside the verbs, so that `--help` answers at once.
"""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.exceptions import (
    CoercionError,
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from finitune import __version__
from finitune.errors import FinituneError, UsageError, did_you_mean
from finitune.progress import Progress
from finitune.report import Finding, Level, Report

if TYPE_CHECKING:
    from rich.console import Console

Job = Callable[[Progress], Report]
Precision = Literal["auto", "planned-half", "current-half", "bf16", "fp32", "raw-half"]
Flag = Annotated[bool, Parameter(negative="")]

QUIET = (
    "DIFFUSERS_VERBOSITY",
    "TRANSFORMERS_VERBOSITY",
)  # their advice to programmers is not for the users of a command
INTERRUPTED = 130  # 128 + SIGINT, as shells expect
CODES = {
    UnknownCommandError: "VERB-UNKNOWN",
    UnknownOptionError: "OPTION-UNKNOWN",
    MissingArgumentError: "OPTION-MISSING",
    CoercionError: "OPTION-UNREADABLE",
    UnusedCliTokensError: "ARGUMENT-LEFT-OVER",
}
OPTIONS = ("--help", "--version", "--json", "--debug")  # those that need no verb


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name; None takes the process's own); returns the exit code."""
    app = App(name="finitune", help="Half precision that stays finite.", version=__version__, help_format="plaintext")
    for place, verb in enumerate(VERBS):
        app.command(verb, sort_key=place)
    app.meta.group_parameters = Group("With every verb", sort_key=99)

    @app.meta.default
    def launch(
        *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
        json: Flag = False,
        debug: Flag = False,
    ) -> int:
        """Half precision that stays finite.

        Parameters
        ----------
        json
            Print the report as JSON, and nothing else.
        debug
            Show the traceback of an unexpected failure.
        """
        return _execute(app, tokens, json=json, debug=debug)

    tokens = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return app.meta(tokens, exit_on_error=False, print_error=False, result_action="return_value") or 0
    except CycloptsError as error:
        return _tell(Report("finitune").fail(_usage(error)), json="--json" in tokens)


def _execute(app: App, tokens: Sequence[str], *, json: bool, debug: bool) -> int:
    """Parse, run and tell; nothing that goes wrong in between escapes, unless it is a bug and --debug is given."""
    name = tokens[0] if tokens and tokens[0] in _names() else "finitune"
    try:
        command, bound, _ = app.parse_args(tokens, exit_on_error=False, print_error=False)
        job = command(*bound.args, **bound.kwargs)
        if job is None:  # help or version, already printed
            return 0
        report = _run(job)
    except CycloptsError as error:
        report = Report(name).fail(_usage(error))
    except FinituneError as error:
        report = Report(name).fail(error)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if debug:
            raise
        return _confess(error, name, json=json)
    return _tell(report, json=json)


def _run(job: Job) -> Report:
    """Run with progress bars on the error stream; what a library prints goes there, too."""
    import os

    from finitune.render.terminal import Bars

    for variable in QUIET:
        os.environ.setdefault(variable, "error")
    with redirect_stdout(sys.stderr), Bars(_console(sys.stderr)) as bars:
        return job(bars)


def _tell(report: Report, *, json: bool) -> int:
    """Print the report: to the output stream, or to the error stream where the request was wrong."""
    if json:
        print(jsonlib.dumps(report.as_json(), indent=2, ensure_ascii=False, default=str))
    else:
        from finitune.render.terminal import show

        show(report, _console(sys.stderr if report.exit_code == UsageError.exit_code else sys.stdout))
    return report.exit_code


def _confess(error: Exception, name: str, *, json: bool) -> int:
    """Tell of a failure that nobody foresaw: a bug of ours."""
    what = f"{type(error).__name__}: {error}".splitlines()[0]
    remedy = "This is a bug. Run it again with --debug and open an issue with what it prints."
    if json:
        return _tell(Report(name, [Finding(Level.ERROR, "UNEXPECTED", name, what, remedy=remedy)]), json=True)
    print(f"finitune {name} failed: {what}. {remedy}", file=sys.stderr)
    return 1


def _usage(error: CycloptsError) -> UsageError:
    """What cyclopts could not parse, as one of our own errors."""
    error.verbose = False
    message = str(error)
    code = next((code for kind, code in CODES.items() if isinstance(error, kind)), "USAGE")
    token = error.unused_tokens[0] if error.unused_tokens else ""
    if isinstance(error, UnknownCommandError) and token.startswith("-"):
        code, message = "OPTION-UNKNOWN", f"There is no option {token!r}.{did_you_mean(token, OPTIONS)}"
    elif isinstance(error, UnknownCommandError):
        message = f"There is no verb {token!r}.{did_you_mean(token, _names())}"
    elif isinstance(error, MissingArgumentError) and error.argument and error.argument.required:
        message = f"{error.argument.name.strip('-').upper()} is missing."
    elif isinstance(error, UnusedCliTokensError):
        message = f"There is one argument too many: {token!r}."
    chain = " ".join(("finitune", *(error.command_chain or ())))
    return UsageError(message, code=code, subject=chain, remedy=f"See `{chain} --help`.")


def _names() -> tuple[str, ...]:
    return tuple(verb.__name__ for verb in VERBS)


def _console(stream: object) -> Console:
    from rich.console import Console

    return Console(file=stream, highlight=False)  # type: ignore[arg-type]
