"""kohya's dataset TOML: our own levels and names, with sd-scripts' defaults and the forms of its values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from finitune.config.datasets import ConfigSection, Dataset, DatasetOptions, Subset, SubsetOptions
from finitune.config.imported_config import ImportedConfig, KeyReason, KeyStatus
from finitune.config.toml_text import format_key_path
from finitune.importers.key_tables import describe_option
from finitune.importers.kohya_conversions import read_kohya_table
from finitune.importers.mapping import (
    ForeignKeyPath,
    ImportAccount,
    KeyMapping,
    KeyTable,
    format_key_pattern,
    iterate_config_leaves,
    suggest_nearest_key,
)
from finitune.report import Level

_LEVELS: tuple[tuple[str, str, type[ConfigSection]], ...] = (
    ("general", "general", DatasetOptions),
    ("datasets[]", "dataset", Dataset),
    ("datasets[].subsets[]", "subset", Subset),
)
"""The levels of a dataset TOML, our section of each, and its options."""
_OUR_OWN_OPTIONS = {"subsets", "caption_variants", "background", "custom_attributes"}
_LEVEL_BY_OPTION = {
    **dict.fromkeys(Subset.model_fields, "[[datasets.subsets]]"),
    **dict.fromkeys(DatasetOptions.model_fields, "[[datasets]] or [general]"),
    **dict.fromkeys(SubsetOptions.model_fields, "[general], [[datasets]] or [[datasets.subsets]]"),
}


@cache
def read_kohya_keys() -> KeyTable:
    """Every key of a training: those of `kohya.toml`, and the options of datasets, which count for all of them."""
    table = read_kohya_table()
    names = DatasetOptions.model_fields.keys() - {*table.facts["options_without_flag"]}
    return {**table.keys, **build_option_rows("general", DatasetOptions, names - table.keys.keys())}


@cache
def read_kohya_dataset_keys() -> KeyTable:
    """Every key of a dataset TOML, by level."""
    reader = read_kohya_table().reader
    rows: dict[str, KeyMapping] = {}
    for level, section, model in _LEVELS:
        own = build_option_rows(section, model, model.model_fields.keys() - _OUR_OWN_OPTIONS)
        free_text = reader.parse_row("", {"no_effect": "free text for other programs"})
        own |= {"custom_attributes": free_text, "custom_attributes.*": free_text}
        own["cache_info"] = reader.parse_row("", {"unneeded": "sizes are read from headers each time, in a moment"})
        rows |= {f"{level}.{name}": row for name, row in own.items()}
    no_tables = {"unsupported": "write it as tables: [[datasets]], [[datasets.subsets]]"}
    return rows | dict.fromkeys(("datasets", "datasets[].subsets"), reader.parse_row("", no_tables))


def build_option_rows(section: str, model: type[ConfigSection], names: Iterable[str]) -> dict[str, KeyMapping]:
    """The rows of options with our name and meaning; those with a form of their own are converted on all levels."""
    table = read_kohya_table()
    structured = {name: table.keys[name]._replace(section=section) for name in table.facts["structured_options"]}
    return {
        name: structured.get(name) or table.reader.parse_row(name, describe_option(section, name, model))
        for name in sorted(names)
    }


def import_kohya_dataset(document: Mapping[str, Any], source: Path) -> ImportedConfig:
    """The datasets of a dataset TOML of sd-scripts: the document holds `general` and `datasets` only.

    An absent enable_bucket is false, as there.
    """
    book = map_kohya_dataset(document, source)
    book.fill({"general.enable_bucket": False})
    return book.imported(collect_kohya_datasets(book, document))


def map_kohya_dataset(document: Mapping[str, Any], source: Path) -> ImportAccount:
    """The account of a dataset TOML, without any defaults."""
    book = ImportAccount(read_kohya_table().program, str(source))
    for path, value, beside in iterate_config_leaves(document):
        book.answer(path, value, beside, read_kohya_dataset_keys())
        line = book.lines[-1]
        if line.ours:
            place = format_key_path((*path[:-1], line.ours.rpartition(".")[2]))
            book.lines[-1] = replace(line, ours=place)
        elif line.reason is KeyReason.UNKNOWN:
            explain_misplaced_key(book, path)
    return book


def explain_misplaced_key(book: ImportAccount, path: ForeignKeyPath) -> None:
    """Say of an unknown key at which level it would be known, and that sd-scripts refuses it."""
    level = _LEVEL_BY_OPTION.get(str(path[-1]), "")
    if path[0] in ("dataset", "Datasets", "subsets") and len(path) > 1:
        why, remedy = "there is no such table", "Write [[datasets]], and [[datasets.subsets]] below it."
    elif level:
        why, remedy = f"it belongs into {level}", f"Move it into {level}."
    else:
        guess = suggest_nearest_key(format_key_pattern(path), read_kohya_dataset_keys())
        why, remedy = "no such option" + (f".{guess}" if guess else ""), "Correct its spelling, or leave it out."
    line = book.lines[-1]
    message = f"{line.key}: {why}; sd-scripts refuses such a file"
    book.lines[-1] = replace(line, fate=KeyStatus.UNSUPPORTED, note=why)
    book.findings[-1] = replace(book.findings[-1], message=message, remedy=remedy)


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
        key = f"datasets[{place[0]}].subsets[{place[1]}].image_dir"
        book.report(Level.NOTE, "DATASET-REPEATS", key, message, {}, f"Add num_repeats = {number[1]}, or leave it so.")
    return options
