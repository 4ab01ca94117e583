"""Captions in a JSON file: sd-scripts' metadata of "fine-tuning" subsets, {picture: {"caption": ..., "tags": ...}}.

A picture is named by its path (from here, from image_dir, or from the file), its name, or its stem; only those that are
named are used.
Source: sd-scripts library/train_util.py, FineTuningDataset.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from finitune.config.datasets import ResolvedSubset
from finitune.datasets.finding_summaries import summarize_names
from finitune.datasets.folder_listing import compute_name_sort_key
from finitune.datasets.picture_signatures import PICTURE_FORMAT_BY_EXTENSION
from finitune.errors import FileError
from finitune.files.sniff import read_utf8_text
from finitune.report import Finding, Level


@dataclass(frozen=True)
class MetadataCaptions:
    """The pictures that a metadata file names, sorted by name, with their captions."""

    captions: Mapping[Path, str]
    findings: tuple[Finding, ...] = ()


def read_caption_metadata(path: Path, separator: str = ",") -> dict[str, str]:
    """The caption of each key: "caption" and "tags", joined by the separator where both are there.

    Raises FileError: METADATA-JSON, METADATA-ENTRY, and those of reading a text.
    """
    text = read_utf8_text(path)
    try:
        entries = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise FileError(
            f"{path} is not JSON: {error.msg} in {where}",
            code="METADATA-JSON",
            subject=str(path),
            evidence={"line": error.lineno, "column": error.colno},
            remedy="Mend it there.",
        ) from error
    if not isinstance(entries, dict):
        raise _bad_entry(path, f"is a {type(entries).__name__}, not an object of pictures", "")
    return {key: _caption(path, key, entry, separator) for key, entry in entries.items()}


def match_metadata_pictures(subset: ResolvedSubset, listed: Sequence[Path]) -> MetadataCaptions:
    """The pictures and captions of a subset that has a metadata file; `listed` are those in its image_dir, if any."""
    assert subset.metadata_file is not None
    file = subset.metadata_file
    entries = read_caption_metadata(file, subset.caption_separator)
    bases = [base for base in (Path(), subset.image_dir, file.parent) if base is not None]
    by_name = {path.stem: path for path in reversed(listed)} | {path.name: path for path in listed}
    by_place = {path.resolve(): path for path in listed}
    captions: dict[Path, str] = {}
    lost, twice = [], []
    for key, caption in entries.items():
        picture = _find(key, bases) or by_name.get(key.replace("\\", "/").rpartition("/")[2])
        picture = picture and by_place.get(picture.resolve(), picture)
        if picture is None:
            lost.append(key)
        elif picture in captions:
            twice.append(key)
        else:
            captions[picture] = caption
    unnamed = [path.name for path in listed if path not in captions]
    empty = [path.name for path, caption in captions.items() if not caption]
    subject = str(file)
    findings = (
        *summarize_names(
            Level.WARNING, "CAPTION-EMPTY", subject, f"pictures in {file} have neither caption nor tags", empty
        ),
        *summarize_names(
            Level.WARNING, "METADATA-WITHOUT-PICTURE", subject, f"{file} names pictures that are not there", lost
        ),
        *summarize_names(
            Level.WARNING, "METADATA-TWICE", subject, f"{file} names pictures twice; the first counts", twice
        ),
        *summarize_names(Level.WARNING, "METADATA-LEFT-OUT", subject, f"pictures not in {file} are left out", unnamed),
    )
    return MetadataCaptions(
        {path: captions[path] for path in sorted(captions, key=lambda path: compute_name_sort_key(path.name))}, findings
    )


def _find(key: str, bases: Sequence[Path]) -> Path | None:
    """The picture at the path that a key is, below one of the bases; a path of another machine leads nowhere."""
    if Path(key).suffix.lower() not in PICTURE_FORMAT_BY_EXTENSION:
        return None
    try:
        return next((base / key for base in bases if (base / key).is_file()), None)
    except (OSError, ValueError):  # longer than a path may be, or with a zero in it
        return None


def _caption(path: Path, key: str, entry: object, separator: str) -> str:
    if not isinstance(entry, dict):
        raise _bad_entry(path, f"gives {key!r} a {type(entry).__name__}, not an object", key)
    texts = []
    for name in ("caption", "tags"):
        value = entry.get(name)
        if isinstance(value, list) and all(isinstance(tag, str) for tag in value):
            value = f"{separator} ".join(value)
        if value is not None and not isinstance(value, str):
            raise _bad_entry(path, f"gives {key!r} a {name} that is no text but {value!r:.40}", key)
        texts += [value.strip()] if value else []
    return f"{separator} ".join(texts)


def _bad_entry(path: Path, what: str, key: str) -> FileError:
    return FileError(
        f"{path} {what}",
        code="METADATA-ENTRY",
        subject=str(path),
        evidence={"key": key} if key else {},
        remedy='It should read {"picture.png": {"caption": "..."}, ...}.',
    )
