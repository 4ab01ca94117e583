"""The pictures drawn during a run, as a grid: a row for each prompt, a column for each of some steps."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from PIL import Image

from finitune.generation.picture import read_picture_metadata
from finitune.render.html import HtmlImage
from finitune.training.events import PreviewsDrawn

_MAX_PREVIEW_COLUMNS = 8
MAX_PREVIEW_SIDE = 256  # the longer side in the page, in pixels: sharp, and a hundred of them can be mailed
_PROMPT_NUMBER_PATTERN = re.compile(r"-(\d+)(?:\.suspect)?\.png$")
_UNREADABLE_IMAGE_ERRORS = (OSError, ValueError, SyntaxError)  # Pillow's, for a file that is gone, cut or no picture

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class PreviewGrid:
    """The names of the columns, and each row's name with its pictures; None where there is none to be shown."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[HtmlImage | None, ...]], ...]


def sample_evenly(items: Sequence[_Item], most: int) -> list[_Item]:
    """At most `most` > 1 of the items: the first, the last, and others at even distances."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def build_preview_grid(previews: Sequence[PreviewsDrawn], most: int = _MAX_PREVIEW_COLUMNS) -> PreviewGrid | None:
    """The pictures of at most `most` steps; where a step was drawn twice, the later ones. None without pictures."""
    by_step: dict[int, dict[int, Path]] = {}  # by the number of the prompt, which stands in the file's name
    for one in previews:
        numbers = (_PROMPT_NUMBER_PATTERN.search(path.name) for path in one.paths)
        by_step[one.step] = {
            int(number[1]) if number else place: path
            for place, (number, path) in enumerate(zip(numbers, one.paths, strict=True))
        }
    steps = sample_evenly(sorted(step for step, paths in by_step.items() if paths), most)
    rows = []
    for number in sorted({number for step in steps for number in by_step[step]}):
        paths = {step: by_step[step].get(number) for step in steps}
        facts = next(filter(None, map(read_preview_metadata, filter(None, paths.values()))), {})
        prompt = str(facts.get("prompt", f"prompt {number + 1}"))
        name = f"{prompt} (seed {facts['seed']})" if "seed" in facts else prompt
        images = (path and load_preview_image(path, f"{prompt}, step {step}") for step, path in paths.items())
        rows.append((name, tuple(images)))
    return PreviewGrid(tuple(f"step {step}" for step in steps), tuple(rows)) if rows else None


def read_preview_metadata(path: Path) -> dict[str, object]:
    """What a picture says of itself; nothing where it cannot be read."""
    try:
        return read_picture_metadata(path)
    except _UNREADABLE_IMAGE_ERRORS:
        return {}


def load_preview_image(path: Path, caption: str) -> HtmlImage | None:
    """The picture at the grid's size, a small one with each pixel as a square; None where it cannot be read."""
    try:
        with Image.open(path) as image:
            picture = image.convert("RGB")
    except _UNREADABLE_IMAGE_ERRORS:
        return None
    width, height = picture.size
    times = MAX_PREVIEW_SIDE // max(width, height)
    if times > 1:
        picture = picture.resize((width * times, height * times), Image.Resampling.NEAREST)
    picture.thumbnail((MAX_PREVIEW_SIDE, MAX_PREVIEW_SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    suspect = ".suspect" in path.suffixes
    return HtmlImage(caption, buffer.getvalue(), "suspect" if suspect else "a picture", good=not suspect)
