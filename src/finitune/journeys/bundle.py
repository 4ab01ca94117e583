"""One file for a bug report: the machine, what was found and measured, and the last run; nothing private in it."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

from finitune.device.environment import Environment
from finitune.errors import UsageError
from finitune.files.writer import not_read_back, write_atomically
from finitune.journeys.redaction import Redactor, redactor
from finitune.report import Report

RUN_FILES = ("config.toml", "report.html", "steps.jsonl", "validations.jsonl", "ranges.jsonl")
LAST_BYTES = 4 << 20
"""Of a long file the end is taken."""
INSIDE = """What is in here, for a bug report about finitune:

environment.json  the machine: versions, cards, memory, variables of torch and its like
report.json       what finitune doctor found and measured
run/              the last run's configuration, report and steps, where a run was named

Tokens, user names, the computer's name and paths outside of the project were taken out, and pictures left out.
Texts of yours may be in run/: captions in prompts, names of files. Look before you send it.
"""

_DATA = re.compile(r"data:[\w.+/-]+;base64,[A-Za-z0-9+/=]+")


def write_bundle(path: Path, environment: Environment, report: Report, run: Path | None = None) -> tuple[str, ...]:
    """Write the bundle atomically and read it back; the names of what is in it.

    Raises UsageError (RUN-NOT-FOUND) where `run` holds no run, FileError (FILE-NOT-WRITTEN, FILE-READ-BACK).
    """
    redact = redactor(Path.cwd(), run)
    entries = {
        "README.txt": INSIDE,
        "environment.json": as_json(redact.value(environment.as_json())),
        "report.json": as_json(redact.value(report.as_json())),
        **run_entries(run, redact),
    }

    def write(temporary: Path) -> None:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as bundle:
            for name, text in entries.items():
                bundle.writestr(name, text)

    write_atomically(path, write)
    with zipfile.ZipFile(path) as bundle:
        if bundle.testzip() is not None or set(bundle.namelist()) != set(entries):
            raise not_read_back(path, "Check the disk, and write it elsewhere.")
    return tuple(entries)


def demand_run(run: Path) -> list[Path]:
    """The files of a run that go into the bundle. Raises UsageError (RUN-NOT-FOUND) where there are none."""
    found = [run / name for name in RUN_FILES if (run / name).is_file()]
    if not found:
        raise UsageError(
            f"--run {run}: there is no run in it",
            code="RUN-NOT-FOUND",
            subject="--run",
            evidence={"looked_for": list(RUN_FILES)},
            remedy="Name the output_dir of a training: it holds config.toml.",
        )
    return found


def run_entries(run: Path | None, redact: Redactor) -> dict[str, str]:
    """The files of a run, redacted, by their names in the bundle."""
    readers: dict[str, Callable[[str, Redactor], str]] = {".jsonl": redacted_lines, ".html": redacted_page}
    return {
        f"run/{path.name}": readers.get(path.suffix, redacted_text)(end_of(path), redact)
        for path in (demand_run(run) if run else ())
    }


def end_of(path: Path) -> str:
    """The last LAST_BYTES of a text file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(size - LAST_BYTES, 0))
        text = file.read().decode("utf-8", errors="replace")
    return text if size <= LAST_BYTES else text.partition("\n")[2]


def redacted_text(text: str, redact: Redactor) -> str:
    """A text, line by line."""
    return "".join(redact.text(line) for line in text.splitlines(keepends=True))


def redacted_page(text: str, redact: Redactor) -> str:
    """A page, without its pictures."""
    return redacted_text(_DATA.sub("data:,", text), redact)


def redacted_lines(text: str, redact: Redactor) -> str:
    """JSON objects, one a line, each value by itself; a line that is none as text."""
    return "".join(redacted_line(line, redact) + "\n" for line in text.splitlines())


def redacted_line(line: str, redact: Redactor) -> str:
    """A line of JSON."""
    try:
        return json.dumps(redact.value(json.loads(line)))
    except ValueError:
        return redact.text(line)


def as_json(value: object) -> str:
    """JSON for people."""
    return json.dumps(value, indent=2, default=str) + "\n"
