"""kohya's dataset TOML: our own levels and names, with sd-scripts' defaults and the forms of its values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from finitune.config.imported import Fate, Imported
from finitune.config.importers.kohya_keys import BELONGS, DATASETS
from finitune.config.importers.mapping import Account, find, general, leaves, spelled
from finitune.report import Finding, Level

PROGRAM = "sd-scripts"
LEVELS = {"dataset": "datasets", "subset": "subsets"}


def import_dataset_toml(document: Mapping[str, Any], source: Path) -> Imported:
    """The datasets of a dataset TOML of sd-scripts: the document holds `general` and `datasets` only.

    An absent enable_bucket is false, as there.
    """
    book = dataset_account(document, source)
    book.fill({"general.enable_bucket": False})
    return book.imported(datasets_of(book, document))


def dataset_account(document: Mapping[str, Any], source: Path) -> Account:
    """The account of a dataset TOML, without any defaults."""
    book = Account(PROGRAM, str(source))
    for path, value, beside in leaves(document):
        book.answer(path, value, beside, DATASETS)
        line = book.lines[-1]
        if line.ours:
            place = spelled((*path[:-1], line.ours.rpartition(".")[2]))
            book.lines[-1] = replace(line, ours=place)
        elif find(general(path), DATASETS) is None:
            misplaced(book, path)
    return book


def misplaced(book: Account, path: tuple[str | int, ...]) -> None:
    """Say of an unknown key at which level it would be known, and that sd-scripts refuses it."""
    level = BELONGS.get(str(path[-1]), "")
    if path[0] in ("dataset", "Datasets", "subsets") and len(path) > 1:
        why, remedy = "there is no such table", "Write [[datasets]], and [[datasets.subsets]] below it."
    elif level:
        why, remedy = f"it belongs into {level}", f"Move it into {level}."
    else:
        note = book.lines[-1].note.partition(". Did")
        why, remedy = "no such option" + note[1] + note[2], "Correct its spelling, or leave it out."
    line = book.lines[-1]
    message = f"{line.key}: {why}; sd-scripts refuses such a file"
    book.lines[-1] = replace(line, fate=Fate.UNSUPPORTED, note=why)
    evidence: dict[str, object] = {"value": line.value}
    subject = f"{book.source}: {line.key}"
    book.findings[-1] = Finding(Level.WARNING, "CONFIG-UNKNOWN-KEY", subject, message, evidence, remedy)


def datasets_of(book: Account, document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The datasets that the account amounts to, in their order; empty ones, too."""
    datasets = []
    for place, dataset in enumerate(tables(document, "datasets")):
        subsets = [subset_of(book, (place, n), subset) for n, subset in enumerate(tables(dataset, "subsets"))]
        datasets.append({**book.scoped["dataset"].get((place,), {}), "subsets": subsets})
    return datasets


def tables(document: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """The tables of a list of tables; none where something else has its name."""
    inside = document.get(name)
    return [table for table in inside if isinstance(table, Mapping)] if isinstance(inside, list) else []


def subset_of(book: Account, place: tuple[int, int], subset: Mapping[str, Any]) -> dict[str, Any]:
    """One subset; a folder `N_name` in it counts as any other folder: its number is not read."""
    options = book.scoped["subset"].get(place, {})
    folder = re.split(r"[\\/]", str(options.get("image_dir", "")).rstrip("\\/"))[-1]
    number = re.match(r"(\d+)_", folder)
    if number and "num_repeats" not in subset and int(number[1]) > 1:
        message = f"{folder!r} looks like {number[1]} repeats, but in a dataset TOML only num_repeats counts: it is 1"
        subject = f"{book.source}: datasets[{place[0]}].subsets[{place[1]}].image_dir"
        remedy = f"Add num_repeats = {number[1]}, or leave it so."
        book.findings.append(Finding(Level.NOTE, "DATASET-REPEATS", subject, message, {}, remedy))
    return options
