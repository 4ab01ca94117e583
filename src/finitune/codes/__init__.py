"""What each stable code means, how it was found, and what to do: data, and the little that reads it.

One TOML file for each area, one table for each code. A page says what there is to say whenever the code is told; the
place, the numbers and the remedy of a single case stand in its finding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from finitune.package_data import read_package_toml

CODE_AREAS = {
    "files": "Files",
    "models": "Models",
    "adapters": "Adapters",
    "namings": "How adapters are spelled",
    "merging": "Merging, extracting, converting",
    "precision": "Precision",
    "device": "Devices and processes",
    "config": "Configurations",
    "data": "Datasets",
    "training": "Training runs",
    "generation": "Drawing",
    "usage": "The command line",
}
"""The files by name, in the order of the documentation, and what each is about."""


@dataclass(frozen=True, kw_only=True)
class CodePage:
    """What there is to say of a code: a line, then what it means, how it was measured or found, and what to do."""

    code: str
    area: str
    title: str
    level: tuple[str, ...]
    """The levels that it is told at: "error", "warning", "note"."""
    means: str
    found: str
    do: str
    source: tuple[str, ...] = ()
    """Addresses of cases in public that it was learned from."""
    see: tuple[str, ...] = ()
    """Other codes to look at."""


def read_code_pages() -> dict[str, CodePage]:
    """All pages by code, area by area."""
    return {page.code: page for area in CODE_AREAS for page in read_area_pages(area)}


@cache
def read_area_pages(area: str) -> tuple[CodePage, ...]:
    """The pages of one area, as they stand in its file."""
    return tuple(parse_code_page(code, area, entry) for code, entry in read_package_toml(get_area_file(area)).items())


def parse_code_page(code: str, area: str, entry: Mapping[str, Any]) -> CodePage:
    """A table of a file as a page; raises TypeError for a key that pages do not have, or lack."""
    lists = {name: tuple(value) for name, value in entry.items() if isinstance(value, list)}
    return CodePage(code=code, area=area, **{**entry, **lists})


def get_area_file(area: str) -> Path:
    """The file of an area."""
    return Path(__file__).parent / f"{area}.toml"


def normalise_code(text: str) -> str:
    """A code as people type it, in the one way that codes are written.

    >>> normalise_code(" picture_bomb: "), normalise_code("Picture bomb"), normalise_code("`FITS`")
    ('PICTURE-BOMB', 'PICTURE-BOMB', 'FITS')
    """
    return "-".join(re.findall(r"[^\W_]+", text)).upper()
