"""The maps for developers against the tree: what they name is there, and what is there is on the map."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_architecture import PACKAGE, ROOT, fences

MAP = ROOT / "docs" / "architecture.md"
PAGES = (MAP, ROOT / "CONTRIBUTING.md")
WALKS = {"One training step": 15, "One merge": 18, "One check of an adapter": 12}
"""The walks through the code that the map tells, and the files that each may need."""


def named_paths(text: str) -> set[str]:
    """What stands in backticks or in a fenced block and looks like a file or a folder; CAPITALS stand for any name."""
    said = [*(content for _, content in fences(text)), *re.findall(r"`([^`\n]+)`", text), ""]
    named = re.findall(r"(?<![\w./-])(?:[\w-]+/)+(?:[\w.-]*\.(?:py|toml|md)|(?=[\s,]))", " ".join(said))
    return {name for name in named if not re.search(r"\b[A-Z]{4,}\b", name)}


def found(name: str) -> bool:
    return any((base / name).exists() for base in (ROOT, ROOT / "src", PACKAGE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path):
    names = named_paths(page.read_text(encoding="utf-8"))
    assert len(names) > 10
    assert not {name for name in names if not found(name)}


def test_every_package_is_on_the_map():
    text = MAP.read_text(encoding="utf-8")
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    assert not {part for part in parts if not part.startswith("__") and not re.search(rf"\b{part}\b", text)}


@pytest.mark.parametrize(("walk", "most"), WALKS.items())
def test_a_walk_through_the_code_is_short(walk: str, most: int):
    section = re.search(rf"^### {walk}$(.*?)(?=^##|\Z)", MAP.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert section
    files = set(re.findall(r"[\w/]+\.py", section[1]))
    assert 5 < len(files) <= most and all(found(name) for name in files)
