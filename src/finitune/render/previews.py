"""The pictures drawn during a run, as a grid: a row for each prompt, a column for each of some steps."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from PIL import Image

from finitune.generation.picture import read_metadata
from finitune.render.html import Picture
from finitune.training.events import Previewed

MOST_COLUMNS = 8
SIDE = 256  # the longer side of a picture in the page, in pixels: sharp, and a hundred of them can be mailed
NUMBER = re.compile(r"-(\d+)(?:\.suspect)?\.png$")
UNREADABLE = (OSError, ValueError, SyntaxError)  # what Pillow raises for a file that is gone, cut or no picture

Item = TypeVar("Item")


@dataclass(frozen=True)
class Grid:
    """The names of the columns, and each row's name with its pictures; None where there is none to be shown."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Picture | None, ...]], ...]


def evenly(items: Sequence[Item], most: int) -> list[Item]:
    """At most `most` > 1 of the items: the first, the last, and others at even distances."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def preview_grid(previews: Sequence[Previewed], most: int = MOST_COLUMNS) -> Grid | None:
    """The pictures of at most `most` steps; where a step was drawn twice, the later ones. None without pictures."""
    by_step = {one.step: {number_of(path, place): path for place, path in enumerate(one.paths)} for one in previews}
    steps = evenly(sorted(step for step, paths in by_step.items() if paths), most)
    numbers = sorted({number for step in steps for number in by_step[step]})
    if not numbers:
        return None
    rows = tuple(row_of(number, {step: by_step[step].get(number) for step in steps}) for number in numbers)
    return Grid(tuple(f"step {step}" for step in steps), rows)


def number_of(path: Path, place: int) -> int:
    """The prompt's number in a file's name, or its place among its step's pictures."""
    found = NUMBER.search(path.name)
    return int(found[1]) if found else place


def row_of(number: int, paths: dict[int, Path | None]) -> tuple[str, tuple[Picture | None, ...]]:
    """One prompt over the steps."""
    facts = next(filter(None, map(facts_of, filter(None, paths.values()))), {})
    prompt = str(facts.get("prompt", f"prompt {number + 1}"))
    name = f"{prompt} (seed {facts['seed']})" if "seed" in facts else prompt
    return name, tuple(path and picture_of(path, f"{prompt}, step {step}") for step, path in paths.items())


def facts_of(path: Path) -> dict[str, object]:
    """What a picture says of itself; nothing where it cannot be read."""
    try:
        return read_metadata(path)
    except UNREADABLE:
        return {}


def picture_of(path: Path, caption: str) -> Picture | None:
    """The picture at the grid's size, a small one with each pixel as a square; None where it cannot be read."""
    try:
        with Image.open(path) as image:
            picture = image.convert("RGB")
    except UNREADABLE:
        return None
    width, height = picture.size
    times = SIDE // max(width, height)
    if times > 1:
        picture = picture.resize((width * times, height * times), Image.Resampling.NEAREST)
    picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    suspect = ".suspect" in path.suffixes
    return Picture(caption, buffer.getvalue(), "suspect" if suspect else "a picture", good=not suspect)
