"""The command line: words become a verb's Request, its Report becomes text or JSON and an exit code.

A verb's module is loaded when the verb is called, so that `finitune --help` answers at once.
"""

from __future__ import annotations

import ast
import inspect
import json as jsonlib
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.exceptions import (
    CoercionError,
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from finitune import __version__
from finitune.errors import FinituneError, UsageError, suggest_nearest_name
from finitune.machine import processes
from finitune.progress import SilentProgress
from finitune.report import Finding, Level, Report

if TYPE_CHECKING:
    from rich.console import Console

    from finitune.verbs.check.request import FileFix

_PURPOSE = "Half precision that stays finite."
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
_MAX_CHANGES_SHOWN = 20


@dataclass(frozen=True)
class CliVerb:
    """A verb before its module is loaded: `page` makes the page that it writes, `asks` before it changes files."""

    name: str
    help: str
    page: tuple[str, str] | None = None
    asks: bool = False

    def load(self) -> ModuleType:
        """The verb's module: its `Request` is the command line, its `run` does the work."""
        return import_module(f"finitune.verbs.{self.name.replace('-', '_')}")


CLI_VERBS = (
    CliVerb("doctor", "Say whether it will work on this machine, in which dtype, and what to change first."),
    CliVerb(
        "check",
        "Say what each path is, what is wrong with it, and where it will load; mend what is safe to mend.",
        page=("finitune.render.check_page", "render_check_page"),
        asks=True,
    ),
    CliVerb("generate", "Draw a picture, and check that it is one."),
    CliVerb("diagnose", "Find out why a picture is black: which block, which operation, which number."),
    CliVerb("plan", "Measure a model's ranges, write the smallest plan that keeps fp16 finite, and prove it."),
    CliVerb(
        "train",
        "Train an adapter, and check every file that is written.",
        page=("finitune.render.training_page", "render_training_page"),
    ),
    CliVerb("verify-resume", "Prove that a run that is killed and resumed ends with the same bits."),
    CliVerb("convert", "Write an adapter file in another spelling, or as another algorithm, and say what that costs."),
    CliVerb("merge", "Merge adapters into a model, or into one another, rounding once, and check what was written."),
    CliVerb("extract", "Write what a tuned model has learned over its base as a LoRA, with the error of each layer."),
    CliVerb("resize", "Write a LoRA of a smaller rank, with the true error of each layer."),
    CliVerb(
        "bench",
        "Measure every kind of attention that is installed: speed, memory, error; and say which to choose here.",
    ),
    CliVerb("explain", "Tell what a code of a report means, how it was found, and what to do."),
    CliVerb(
        "demo",
        "See it on a small model: a black picture, its diagnosis, its plan, and the picture.",
        page=("finitune.render.demo_page", "render_demo_page"),
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name; None takes the process's own); returns the exit code.

    Nothing that goes wrong escapes, unless it is a bug and --debug is given.
    """
    tokens = sys.argv[1:] if arguments is None else list(arguments)
    word = next((token for token in tokens if not token.startswith("-")), None)
    verb = next((verb for verb in CLI_VERBS if verb.name == word), None)
    name, json = verb.name if verb else "finitune", "--json" in tokens
    for variable in _VERBOSITY_VARIABLES:
        os.environ.setdefault(variable, "error")
    try:
        app = build_app(verb)
        return app.meta(tokens, exit_on_error=False, print_error=False, result_action="return_value") or 0
    except CycloptsError as error:
        return _tell(Report(name).fail(_usage(error)), json=json)
    except FinituneError as error:
        return _tell(Report(name).fail(error), json=json)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return _INTERRUPTED_EXIT_CODE
    except Exception as error:
        if "--debug" in tokens:
            raise
        return _confess(error, name, json=json)


def build_app(verb: CliVerb | None) -> App:
    """What cyclopts parses by: every verb with its line of help, and all options of the one that is called."""
    app = App(name="finitune", help=_PURPOSE, version=__version__, help_format="plaintext")
    for place, one in enumerate(CLI_VERBS):
        app.command(App(name=one.name, help=one.help, sort_key=place))
    if verb:
        app[verb.name].default(build_command(verb.load().Request))
    app.meta.group_parameters = Group("With every verb", sort_key=99)
    app.meta.suppress_keyboard_interrupt = False  # main tells of it

    @app.meta.default
    def launch(
        *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
        json: Annotated[bool, Parameter(negative="")] = False,
        debug: Annotated[bool, Parameter(negative="")] = False,
    ) -> int:
        """Half precision that stays finite.

        Parameters
        ----------
        json
            Print the report as JSON, and nothing else.
        debug
            Show the traceback of an unexpected failure.
        """
        command, bound, _ = app.parse_args(tokens, exit_on_error=False, print_error=False)
        request = command(*bound.args, **bound.kwargs)
        if verb is None or request is None:  # help or version, already printed
            return 0
        return _tell(_run(verb, request), json=json)

    return app


def build_command(request_class: type) -> Callable[..., Any]:
    """The function that cyclopts makes a command of: it takes a Request's fields, and returns the Request.

    The class's own fields come before those that it shares with other verbs. A positional tuple takes all the words
    that are left. The string below a field is its help.
    """
    own_first = [name for base in request_class.__mro__ for name in inspect.get_annotations(base)]
    given, helps = inspect.signature(request_class).parameters, _read_field_docs(request_class)
    types, hints = get_type_hints(request_class), get_type_hints(request_class, include_extras=True)
    parameters = []
    for name in dict.fromkeys(name for name in own_first if name in given):
        kind, hint = given[name].kind, hints[name]
        extras = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        if any(extra.parse is False for extra in extras):  # a field for programs alone
            continue
        if kind is kind.POSITIONAL_OR_KEYWORD and get_origin(types[name]) is tuple:
            kind, hint = kind.VAR_POSITIONAL, Annotated[(get_args(types[name])[0], *extras)]
        hint = Annotated[hint, Parameter(help=helps.get(name), negative_bool="")]
        parameters.append(inspect.Parameter(name, kind, default=given[name].default, annotation=hint))
    signature = inspect.Signature(sorted(parameters, key=lambda parameter: parameter.kind))

    def command(*positional: object, **options: object) -> object:
        return request_class(**signature.bind(*positional, **options).arguments)

    command.__signature__ = signature  # type: ignore[attr-defined]
    return command


def _read_field_docs(request_class: type) -> dict[str, str]:
    """The string below each field of a class and its bases, on one line."""
    docs: dict[str, str] = {}
    for base in request_class.__mro__[:-1]:
        module = ast.parse(textwrap.dedent(inspect.getsource(base)))
        for field, doc in pairwise(node for definition in module.body for node in ast.iter_child_nodes(definition)):
            if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr):
                docs.setdefault(ast.unparse(field.target), " ".join(ast.literal_eval(doc.value).split()))
    return docs


def _run(verb: CliVerb, request: Any) -> Report:
    """Run with progress bars on the error stream; what a library prints goes there, too."""
    from finitune.render.terminal import TerminalProgress

    page = {"page": getattr(import_module(verb.page[0]), verb.page[1])} if verb.page else {}
    if verb.asks and sys.stdin.isatty() and sys.stderr.isatty():  # else nobody can answer
        request = replace(request, ask=ask_on_terminal)
    with redirect_stdout(sys.stderr), TerminalProgress(_console(sys.stderr)) as bars:
        return verb.load().run(request, progress=SilentProgress() if processes.read_rank() else bars, **page)


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
        message = f"There is no verb {token!r}.{suggest_nearest_name(token, [verb.name for verb in CLI_VERBS])}"
    elif isinstance(error, MissingArgumentError) and error.argument and error.argument.required:
        message = f"{error.argument.name.strip('-').upper()} is missing."
    elif isinstance(error, UnusedCliTokensError):
        message = f"There is one argument too many: {token!r}."
    chain = " ".join(("finitune", *(error.command_chain or ())))
    return UsageError(message, code=code, subject=chain, remedy=f"See `{chain} --help`.")


def _console(stream: object) -> Console:
    from rich.console import Console

    return Console(file=stream, highlight=False)  # type: ignore[arg-type]


def ask_on_terminal(fixes: Sequence[FileFix]) -> bool:
    """List the changes on the error stream, and wait for an answer; anything but yes is no."""
    from finitune.render import escape_control_characters

    lines = [f"  {one.path}: {one.what}" for one in fixes[:_MAX_CHANGES_SHOWN]]
    more = [f"  and {len(fixes) - _MAX_CHANGES_SHOWN} more"] if len(fixes) > _MAX_CHANGES_SHOWN else []
    print(escape_control_characters("\n".join(["These changes lose nothing:", *lines, *more])), file=sys.stderr)
    print("Make them? A copy of each file stays as NAME.orig. [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
