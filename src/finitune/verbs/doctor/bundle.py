"""One file for a bug report: the machine, what was found and measured, and the last run; nothing private in it."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

from finitune.errors import UsageError
from finitune.files.writer import make_read_back_error, write_atomically
from finitune.machine.environment import Environment
from finitune.report import Report
from finitune.verbs.doctor.redaction import Redactor, build_redactor

_BUNDLED_RUN_FILES = ("config.toml", "report.html", "steps.jsonl", "validations.jsonl", "ranges.jsonl")
MAX_BUNDLED_TEXT_BYTES = 4 << 20
"""Of a long file the end is taken."""
_README_TEXT = """What is in here, for a bug report about finitune:

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
    redact = build_redactor(Path.cwd(), run)
    entries = {
        "README.txt": _README_TEXT,
        "environment.json": format_bundle_json(redact.value(environment.as_json())),
        "report.json": format_bundle_json(redact.value(report.as_json())),
        **collect_run_entries(run, redact),
    }

    def write(temporary: Path) -> None:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as bundle:
            for name, text in entries.items():
                bundle.writestr(name, text)

    write_atomically(path, write)
    with zipfile.ZipFile(path) as bundle:
        if bundle.testzip() is not None or set(bundle.namelist()) != set(entries):
            raise make_read_back_error(path, "Check the disk, and write it elsewhere.")
    return tuple(entries)


def require_run_files(run: Path) -> list[Path]:
    """The files of a run that go into the bundle. Raises UsageError (RUN-NOT-FOUND) where there are none."""
    found = [run / name for name in _BUNDLED_RUN_FILES if (run / name).is_file()]
    if not found:
        raise UsageError(
            f"--run {run}: there is no run in it",
            code="RUN-NOT-FOUND",
            subject="--run",
            evidence={"looked_for": list(_BUNDLED_RUN_FILES)},
            remedy="Name the output_dir of a training: it holds config.toml.",
        )
    return found


def collect_run_entries(run: Path | None, redact: Redactor) -> dict[str, str]:
    """The files of a run, redacted, by their names in the bundle; pages without their pictures."""
    entries = {}
    for path in require_run_files(run) if run else ():
        text = read_text_tail(path)
        if path.suffix == ".jsonl":
            entries[f"run/{path.name}"] = redact_json_lines(text, redact)
        else:
            lines = _DATA.sub("data:,", text).splitlines(keepends=True)
            entries[f"run/{path.name}"] = "".join(map(redact.text, lines))
    return entries


def read_text_tail(path: Path) -> str:
    """The last MAX_BUNDLED_TEXT_BYTES of a text file, from the beginning of a line."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(size - MAX_BUNDLED_TEXT_BYTES, 0))
        text = file.read().decode("utf-8", errors="replace")
    return text if size <= MAX_BUNDLED_TEXT_BYTES else text.partition("\n")[2]


def redact_json_lines(text: str, redact: Redactor) -> str:
    """JSON objects, one a line, each value by itself; a line that is none as text."""
    redacted = []
    for line in text.splitlines():
        try:
            redacted.append(json.dumps(redact.value(json.loads(line))))
        except ValueError:
            redacted.append(redact.text(line))
    return "".join(f"{line}\n" for line in redacted)


def format_bundle_json(value: object) -> str:
    return json.dumps(value, indent=2, default=str) + "\n"
