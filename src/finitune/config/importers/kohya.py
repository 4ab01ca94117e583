"""Importing kohya's sd-scripts: a training's TOML, its command line, and its dataset TOML.

sd-scripts makes one flat namespace of everything: sections of the TOML count for nothing, a later key stands over an
earlier one, the command line stands over the file, and unknown keys are dropped in silence. Here each has its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finitune.config.arguments import parse_arguments
from finitune.config.imported import Fate, Imported, KeyLine
from finitune.config.importers import kohya_network as network
from finitune.config.importers.kohya_datasets import PROGRAM, dataset_account, datasets_of, import_dataset_toml
from finitune.config.importers.kohya_flags import SCRIPTS, taken_apart
from finitune.config.importers.kohya_folders import datasets_of_folder
from finitune.config.importers.kohya_keys import ABSENT, HIDDEN, RENAMED, TRAINING
from finitune.config.importers.kohya_rules import OFF, TRUE, positive_of, trains_text_encoder
from finitune.config.importers.mapping import UNREADABLE, Account, spelled
from finitune.config.text import read_toml
from finitune.errors import UsageError
from finitune.report import Finding, Level

__all__ = ["import_dataset_toml", "import_flags", "import_kohya", "settle"]

LISTS = {"network_args", "optimizer_args", "lr_scheduler_args"}
TEXT_NOTES = ("text in the file; read as a number", "text in the file; read as true or false")


@dataclass(frozen=True)
class Entry:
    """One key of the original: the place where it stands, its name in sd-scripts, its value, what was converted before.

    `shown` is the value as the original has it, where that is another.
    """

    path: str
    name: str
    value: Any
    note: str = ""
    shown: Any = None


def import_kohya(document: Mapping[str, Any], source: Path) -> Imported:
    """A training's TOML of sd-scripts (--config_file), or of lora-scripts, in our terms.

    The finding CONFIG-NO-DATASETS, an error, tells that dataset_config names a file that is not there.
    """
    levels = {name: document[name] for name in ("general", "datasets") if "datasets" in document and name in document}
    flat = list(entries_of({name: value for name, value in document.items() if name not in levels}))
    return settle(flat, source, PROGRAM, levels)


def import_flags(line: str) -> Imported:
    """A command line of sd-scripts in our terms: launcher, script, flags, and the files that they name.

    Raises UsageError: CONFIG-FLAGS, CONFIG-NO-FILE.
    """
    command = taken_apart(line)
    own = [Entry(name, name.lstrip("-").replace("-", "_"), value) for name, value in command.flags]
    written: list[Entry] = []
    for entry in own:
        if entry.name == "config_file":
            name = str(entry.value)
            file = found(name if name.endswith(".toml") else f"{name}.toml", Path(), "config_file", "CONFIG-NO-FILE")
            written += entries_of(read_toml(file).document)
    imported = settle([*written, *own], Path("command line"), PROGRAM, {}, family_of_script(command.script))
    launcher = [KeyLine(*launched(name, value)) for name, value in command.launcher]
    if command.script:
        fate = Fate.TAKEN if command.script.endswith("anima_train_network.py") else Fate.UNSUPPORTED
        launcher.append(KeyLine("script", command.script, fate, "", "finitune train stands in its place"))
    lines = (argparse_line(line) for line in imported.lines)
    findings = list(imported.findings)
    if re.search(r"(^|[\\/])anima_train\.py$", command.script):
        message = "anima_train.py trains the whole model; here an adapter is trained"
        remedy = "Set network.algorithm = 'full' for a change of full rank, and merge it afterwards."
        findings.append(Finding(Level.WARNING, "CONFIG-WHOLE-MODEL", command.script, message, {}, remedy))
    return replace(imported, lines=(*launcher, *lines), findings=tuple(findings))


def launched(name: str, value: object) -> tuple[str, object, Fate, str, str]:
    """The line of a word in front of the script."""
    if name.startswith("-"):
        note = "not needed here: accelerate launch takes it in front of finitune train, too"
        return f"launcher {name}", value, Fate.UNSUPPORTED, "", note
    if "=" in name:
        variable, _, setting = name.partition("=")
        note = "an environment variable: set it in front of finitune train, too"
        return f"launcher {variable}", setting, Fate.UNSUPPORTED, "", note
    return f"launcher {name}", name, Fate.TAKEN, "", "finitune train stands in its place"


def argparse_line(line: KeyLine) -> KeyLine:
    """A flag is always text: that its number was read from text says nothing."""
    plain = line.key.startswith("-") and line.note in TEXT_NOTES
    return replace(line, fate=Fate.TAKEN, note="") if plain else line


def family_of_script(script: str) -> str:
    """The model family that a script of sd-scripts trains, where it is not Anima."""
    name = script.replace("\\", "/").rpartition("/")[2]
    return SCRIPTS.get(name, "")


def entries_of(document: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[Entry]:
    """Every key of a document, its sections taken off."""
    for key, value in document.items():
        place = (*path, key)
        if isinstance(value, Mapping) and not (key in LISTS and path):
            yield from entries_of(value, place)
        else:
            yield Entry(spelled(place), RENAMED.get(key, key), value)


def settle(
    entries: Sequence[Entry],
    source: Path,
    program: str,
    levels: Mapping[str, Any],
    family: str = "",
    absent: Mapping[str, object] = ABSENT,
) -> Imported:
    """The account of flat entries, a later one over an earlier of the same name, with sd-scripts' defaults.

    `levels` holds `general` and `datasets` where they stand in the same file; `family` is the model family that the
    configuration is known to be for, if it is not Anima; `absent` is what the original takes for absent keys.
    """
    book = Account(program, str(source))
    entries = [part for entry in entries for part in itemised(entry, book)]
    last = {entry.name: entry for entry in entries}
    flat = {name: entry.value for name, entry in last.items()}
    for entry in entries:
        if last[entry.name] is entry:
            one_line(book, entry, flat)
        else:
            twice(book, entry, last[entry.name])
    datasets = datasets_named(book, flat, source, levels)
    complete(book, flat, datasets, absent)
    for name in families(flat, family):
        book.other_family("the model family", name)
    return book.imported(datasets)


def itemised(entry: Entry, book: Account) -> Iterator[Entry]:
    """network_args and optimizer_args by their items; other keys as they are."""
    if entry.name not in ("network_args", "optimizer_args") or entry.value in OFF or entry.value is True:
        yield entry
        return
    try:
        arguments, findings = parse_arguments(entry.value, entry.path)
    except UsageError as error:
        book.findings.append(Finding.of(error))
        book.lines.append(KeyLine(entry.path, entry.value, Fate.UNSUPPORTED, "", error.message))
        return
    book.findings.extend(findings)
    if entry.name == "optimizer_args":
        yield replace(entry, value=arguments, shown=entry.value)
        return
    yield entry
    for name, value in arguments.items():
        yield Entry(f"{entry.path}.{name}", f"network_args.{name}", value)


def one_line(book: Account, entry: Entry, flat: Mapping[str, Any]) -> None:
    """The line of one entry, with its own place, and a warning where something is lost."""
    unknown = entry.name not in TRAINING
    value = None if entry.value in OFF else entry.value
    book.answer(tuple(entry.name.split(".")) if unknown else (entry.name,), value, flat, TRAINING)
    line = book.lines[-1]
    fate = Fate.CHANGED if entry.note and line.fate is Fate.TAKEN else line.fate
    note = "; ".join(part for part in (entry.note, line.note) if part)
    shown = visible(entry)
    if unknown:
        note = line.note.replace(f"no option of {book.program} that is known here", f"no such key in {book.program}")
    book.lines[-1] = line = replace(line, key=entry.path, value=shown, fate=fate, note=note)
    if unknown:
        book.findings[-1] = replace(book.findings[-1], subject=f"{book.source}: {entry.path}")
    elif fate is Fate.UNSUPPORTED and not note.startswith(("not needed", UNREADABLE.note)):
        subject = f"{book.source}: {entry.path}"
        message = f"{entry.path} = {shown!r} is not supported"
        book.findings.append(
            Finding(Level.WARNING, "CONFIG-UNSUPPORTED-KEY", subject, message, {"value": shown}, f"Instead: {note}")
        )


def visible(entry: Entry) -> object:
    """The value as the account shows it; a secret is hidden."""
    if entry.name in HIDDEN and entry.value not in OFF:
        return "(hidden)"
    return entry.value if entry.shown is None else entry.shown


def twice(book: Account, entry: Entry, last: Entry) -> None:
    """The line of a key that stands again further on."""
    shown = visible(entry)
    book.lines.append(KeyLine(entry.path, shown, Fate.NO_EFFECT, "", f"{last.path} stands over it"))
    if entry.value != last.value and not (last.path.startswith("-") and not entry.path.startswith("-")):
        message = f"{entry.name} is given twice: {entry.path} = {shown!r}, then {last.path}, which counts"
        remedy = "Leave one of them out: sections count for nothing in sd-scripts."
        book.findings.append(
            Finding(Level.WARNING, "CONFIG-KEY-TWICE", f"{book.source}: {entry.path}", message, {}, remedy)
        )


def datasets_named(
    book: Account, flat: Mapping[str, Any], source: Path, levels: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The datasets: in the same file, in the file of dataset_config, in a JSON of captions, or in N_name folders."""
    named = book.sections.pop("datasets", {})
    file = flat.get("dataset_config")
    if levels:
        return merged_levels(book, levels, source, "")
    if file not in OFF:
        try:
            path = found(str(file), source, "dataset_config", "CONFIG-NO-DATASETS")
        except UsageError as error:  # an error of the account: the other keys are looked at all the same
            book.findings.append(Finding.of(error))
            return []
        return merged_levels(book, read_toml(path).document, path, f"{path.name}: ")
    if "metadata_file" in named:
        folder = {"image_dir": flat["train_data_dir"]} if flat.get("train_data_dir") not in OFF else {}
        return [{"subsets": [{**named, **folder}]}]
    mask = {name: named[name] for name in ("conditioning_data_dir",) if name in named}
    subsets: list[dict[str, Any]] = []
    for key in ("train_data_dir", "reg_data_dir"):
        if flat.get(key) not in OFF:
            part, findings = datasets_of_folder(folder_of(str(flat[key]), source), {}, is_reg=key == "reg_data_dir")
            book.findings.extend(findings)
            subsets += [{**subset, **mask} for dataset in part["datasets"] for subset in dataset["subsets"]]
    return [{"subsets": subsets}] if subsets else []


def merged_levels(book: Account, document: Mapping[str, Any], source: Path, prefix: str) -> list[dict[str, Any]]:
    """The datasets of a dataset TOML; its [general] stands over what the training says."""
    inner = dataset_account(document, source)
    book.lines += [replace(line, key=f"{prefix}{line.key}") for line in inner.lines]
    datasets = datasets_of(inner, document)
    book.findings += inner.findings
    book.sections.setdefault("general", {}).update(inner.sections.get("general", {}))
    return datasets


def complete(
    book: Account, flat: Mapping[str, Any], datasets: Sequence[Mapping[str, Any]], defaults: Mapping[str, object]
) -> None:
    """What follows from absent keys, and from several together."""
    absent: dict[str, object] = dict(defaults)
    if book.get("training.max_train_steps"):
        absent.pop("training.max_train_epochs", None)
    elif not book.get("training.max_train_epochs") and "training.max_train_epochs" not in absent:
        absent["training.max_train_steps"] = 1600
    absent["network.train_text_encoder"] = trains_text_encoder(flat)
    if network.is_lycoris(flat):
        del absent["network.conv_dim"]
    levels = (*datasets, *(subset for dataset in datasets for subset in dataset["subsets"]))
    if book.get("general.alpha_mask") or any(level.get("alpha_mask") for level in levels):
        book.set("objective.masked_loss", True)  # sd-scripts masks wherever a picture has a mask of its own
    book.fill(absent)
    if all(positive_of(flat, name) for name in ("save_last_n_epochs", "save_last_n_steps", "save_every_n_steps")):
        message = "save_last_n_epochs and save_last_n_steps are one number of files here: the later key counts"
        book.findings.append(Finding(Level.WARNING, "CONFIG-SAVE-LAST", book.source, message))


def families(flat: Mapping[str, Any], family: str) -> Iterator[str]:
    """The other model family that a configuration is plainly for."""
    module = network.MODULES.get(network.module_name(flat.get("network_module", "")), "")
    other = family or (module if module != "Anima" else "")
    if not other and flat.get("v2") in TRUE:
        other = "Stable Diffusion 2"
    if not other and any(flat.get(name) not in OFF for name in ("clip_l", "clip_g", "t5xxl", "ae")):
        other = "FLUX.1 or Stable Diffusion 3"
    form = str(flat.get("model_train_type", "anima"))
    if not other and not form.startswith("anima"):
        other = form
    if other:
        yield other


def folder_of(name: str, source: Path) -> Path:
    """A folder from where the command runs, or beside the file that names it."""
    here, beside = Path(name).expanduser() if name.startswith("~/") else Path(name), source.parent / name
    return beside if beside.is_dir() and not here.is_dir() else here


def found(name: str, source: Path, key: str, code: str) -> Path:
    """The file that a key names, from where the command runs, or beside the file that names it."""
    relative = name.replace("\\", "/")
    places = [Path(name), Path(relative), source.parent / relative, source.parent / relative.rpartition("/")[2]]
    for place in places:
        if place.is_file():
            return place
    raise UsageError(
        f"{key} names {name!r}, which is not there",
        code=code,
        subject=f"{source}: {key}",
        evidence={"looked_at": [str(place) for place in dict.fromkeys(places)]},
        remedy=f"Correct the path: a relative one counts from {Path.cwd()}, or from the file that names it.",
    )
