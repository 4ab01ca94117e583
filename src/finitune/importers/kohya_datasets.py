"""kohya's dataset TOML: our own levels and names, with sd-scripts' defaults and the forms of its values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from finitune.config.imported_config import ImportedConfig, KeyStatus
from finitune.config.toml_text import format_key_path
from finitune.importers.kohya_keys import DATASET_LEVEL_BY_OPTION, KOHYA_DATASET_KEYS
from finitune.importers.mapping import (
    ImportAccount,
    find_key_mapping,
    format_key_pattern,
    iterate_config_leaves,
)
from finitune.report import Finding, Level

KOHYA_PROGRAM_NAME = "sd-scripts"
_LIST_BY_LEVEL = {"dataset": "datasets", "subset": "subsets"}


def import_kohya_dataset(document: Mapping[str, Any], source: Path) -> ImportedConfig:
    """The datasets of a dataset TOML of sd-scripts: the document holds `general` and `datasets` only.

    An absent enable_bucket is false, as there.
    """
    book = map_kohya_dataset(document, source)
    book.fill({"general.enable_bucket": False})
    return book.imported(collect_kohya_datasets(book, document))


def map_kohya_dataset(document: Mapping[str, Any], source: Path) -> ImportAccount:
    """The account of a dataset TOML, without any defaults."""
    book = ImportAccount(KOHYA_PROGRAM_NAME, str(source))
    for path, value, beside in iterate_config_leaves(document):
        book.answer(path, value, beside, KOHYA_DATASET_KEYS)
        line = book.lines[-1]
        if line.ours:
            place = format_key_path((*path[:-1], line.ours.rpartition(".")[2]))
            book.lines[-1] = replace(line, ours=place)
        elif find_key_mapping(format_key_pattern(path), KOHYA_DATASET_KEYS) is None:
            explain_misplaced_key(book, path)
    return book


def explain_misplaced_key(book: ImportAccount, path: tuple[str | int, ...]) -> None:
    """Say of an unknown key at which level it would be known, and that sd-scripts refuses it."""
    level = DATASET_LEVEL_BY_OPTION.get(str(path[-1]), "")
    if path[0] in ("dataset", "Datasets", "subsets") and len(path) > 1:
        why, remedy = "there is no such table", "Write [[datasets]], and [[datasets.subsets]] below it."
    elif level:
        why, remedy = f"it belongs into {level}", f"Move it into {level}."
    else:
        note = book.lines[-1].note.partition(". Did")
        why, remedy = "no such option" + note[1] + note[2], "Correct its spelling, or leave it out."
    line = book.lines[-1]
    message = f"{line.key}: {why}; sd-scripts refuses such a file"
    book.lines[-1] = replace(line, fate=KeyStatus.UNSUPPORTED, note=why)
    evidence: dict[str, object] = {"value": line.value}
    subject = f"{book.source}: {line.key}"
    book.findings[-1] = Finding(Level.WARNING, "CONFIG-UNKNOWN-KEY", subject, message, evidence, remedy)


def collect_kohya_datasets(book: ImportAccount, document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The datasets that the account amounts to, in their order; empty ones, too."""
    datasets = []
    for place, dataset in enumerate(get_table_list(document, "datasets")):
        subsets = [
            read_kohya_subset(book, (place, n), subset) for n, subset in enumerate(get_table_list(dataset, "subsets"))
        ]
        datasets.append({**book.scoped["dataset"].get((place,), {}), "subsets": subsets})
    return datasets


def get_table_list(document: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """The tables of a list of tables; none where something else has its name."""
    inside = document.get(name)
    return [table for table in inside if isinstance(table, Mapping)] if isinstance(inside, list) else []


def read_kohya_subset(book: ImportAccount, place: tuple[int, int], subset: Mapping[str, Any]) -> dict[str, Any]:
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
