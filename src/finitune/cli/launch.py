"""One command line from its words to its exit code.

Parse, run the verb's journey with progress bars on the error stream, and tell what came of it as text or JSON.
"""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.exceptions import (
    CoercionError,
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from finitune import __version__
from finitune.cli.options import CliFlag, VerbJob
from finitune.cli.verbs import CLI_VERBS
from finitune.errors import FinituneError, UsageError, suggest_nearest_name
from finitune.machine import processes
from finitune.progress import SilentProgress
from finitune.report import Finding, Level, Report

if TYPE_CHECKING:
    from rich.console import Console

_VERBOSITY_VARIABLES = (
    "DIFFUSERS_VERBOSITY",
    "TRANSFORMERS_VERBOSITY",
)  # their advice to programmers is not for the users of a command
_INTERRUPTED_EXIT_CODE = 130  # 128 + SIGINT, as shells expect
_CODE_BY_CYCLOPTS_ERROR = {
    UnknownCommandError: "VERB-UNKNOWN",
    UnknownOptionError: "OPTION-UNKNOWN",
    MissingArgumentError: "OPTION-MISSING",
    CoercionError: "OPTION-UNREADABLE",
    UnusedCliTokensError: "ARGUMENT-LEFT-OVER",
}
_GLOBAL_OPTIONS = ("--help", "--version", "--json", "--debug")  # those that need no verb


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name; None takes the process's own); returns the exit code."""
    app = App(name="finitune", help="Half precision that stays finite.", version=__version__, help_format="plaintext")
    for place, verb in enumerate(CLI_VERBS):
        app.command(verb, sort_key=place)
    app.meta.group_parameters = Group("With every verb", sort_key=99)

    @app.meta.default
    def launch(
        *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
        json: CliFlag = False,
        debug: CliFlag = False,
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
        return _INTERRUPTED_EXIT_CODE
    except Exception as error:
        if debug:
            raise
        return _confess(error, name, json=json)
    return _tell(report, json=json)


def _run(job: VerbJob) -> Report:
    """Run with progress bars on the error stream; what a library prints goes there, too."""
    import os

    from finitune.render.terminal import TerminalProgress

    for variable in _VERBOSITY_VARIABLES:
        os.environ.setdefault(variable, "error")
    with redirect_stdout(sys.stderr), TerminalProgress(_console(sys.stderr)) as bars:
        return job(SilentProgress() if processes.read_rank() else bars)


def _tell(report: Report, *, json: bool) -> int:
    """Print the report: to the output stream, or to the error stream where the request was wrong.

    Of several processes the first one does; the others add a line on the error stream where something failed.
    """
    if processes.read_rank():
        for finding in (finding for finding in report.findings if finding.level is Level.ERROR):
            print(f"process {processes.read_rank()}: {finding.code}: {finding.message}", file=sys.stderr)
    elif json:
        print(jsonlib.dumps(report.as_json(), indent=2, ensure_ascii=False, default=str))
    else:
        from finitune.render.terminal import print_report

        print_report(report, _console(sys.stderr if report.exit_code == UsageError.exit_code else sys.stdout))
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
    code = next((code for kind, code in _CODE_BY_CYCLOPTS_ERROR.items() if isinstance(error, kind)), "USAGE")
    token = error.unused_tokens[0] if error.unused_tokens else ""
    if isinstance(error, UnknownCommandError) and token.startswith("-"):
        code, message = "OPTION-UNKNOWN", f"There is no option {token!r}.{suggest_nearest_name(token, _GLOBAL_OPTIONS)}"
    elif isinstance(error, UnknownCommandError):
        message = f"There is no verb {token!r}.{suggest_nearest_name(token, _names())}"
    elif isinstance(error, MissingArgumentError) and error.argument and error.argument.required:
        message = f"{error.argument.name.strip('-').upper()} is missing."
    elif isinstance(error, UnusedCliTokensError):
        message = f"There is one argument too many: {token!r}."
    chain = " ".join(("finitune", *(error.command_chain or ())))
    return UsageError(message, code=code, subject=chain, remedy=f"See `{chain} --help`.")


def _names() -> tuple[str, ...]:
    return tuple(verb.__name__.replace("_", "-") for verb in CLI_VERBS)


def _console(stream: object) -> Console:
    from rich.console import Console

    return Console(file=stream, highlight=False)  # type: ignore[arg-type]
