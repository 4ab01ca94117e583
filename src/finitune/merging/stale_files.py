"""What killed runs left behind is named and removed by the next run that writes there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from finitune.files.writer import remove_partial_files
from finitune.report import Level, Report


def clear_stale_files(paths: Iterable[Path], report: Report) -> None:
    """Remove, and name, what killed runs left beside the files that are to be written."""
    for path in paths:
        for stray, size in remove_partial_files(path).items():
            message = f"a run that was killed had left {size} bytes; they are removed"
            report.add(Level.NOTE, "FILE-STRAY", str(stray), message, size_bytes=size)
