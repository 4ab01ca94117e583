"""A question on the terminal before files are changed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from finitune.journeys.checks import Ask, Mending

SHOWN = 20


def on_terminal() -> Ask | None:
    """The question, or None where nobody can answer: no terminal, or a pipe at one end."""
    return ask if sys.stdin.isatty() and sys.stderr.isatty() else None


def ask(mendings: Sequence[Mending]) -> bool:
    """List the changes on the error stream, and wait for an answer; anything but yes is no."""
    from finitune.render import printable

    lines = [f"  {one.path}: {one.what}" for one in mendings[:SHOWN]]
    more = [f"  and {len(mendings) - SHOWN} more"] if len(mendings) > SHOWN else []
    print(printable("\n".join(["These changes lose nothing:", *lines, *more])), file=sys.stderr)
    print("Make them? A copy of each file stays as NAME.orig. [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
