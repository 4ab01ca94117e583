"""A question on the terminal before files are changed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from finitune.verbs.check.request import FileFix, FixConfirmation

_MAX_CHANGES_SHOWN = 20


def get_terminal_prompt() -> FixConfirmation | None:
    """The question, or None where nobody can answer: no terminal, or a pipe at one end."""
    return ask_on_terminal if sys.stdin.isatty() and sys.stderr.isatty() else None


def ask_on_terminal(mendings: Sequence[FileFix]) -> bool:
    """List the changes on the error stream, and wait for an answer; anything but yes is no."""
    from finitune.render import escape_control_characters

    lines = [f"  {one.path}: {one.what}" for one in mendings[:_MAX_CHANGES_SHOWN]]
    more = [f"  and {len(mendings) - _MAX_CHANGES_SHOWN} more"] if len(mendings) > _MAX_CHANGES_SHOWN else []
    print(escape_control_characters("\n".join(["These changes lose nothing:", *lines, *more])), file=sys.stderr)
    print("Make them? A copy of each file stays as NAME.orig. [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
