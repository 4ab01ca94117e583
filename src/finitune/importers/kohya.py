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
from finitune.config.imported_config import ImportedConfig, ImportedKey, KeyStatus
from finitune.config.toml_text import format_key_path, read_toml
from finitune.errors import UsageError
from finitune.importers import kohya_network as network
from finitune.importers.kohya_command_line import FAMILY_BY_TRAINING_SCRIPT, parse_command_line
from finitune.importers.kohya_conversions import (
    KOHYA_OFF_VALUES,
    KOHYA_TRUE_VALUES,
    get_positive_sibling,
    is_text_encoder_trained,
)
from finitune.importers.kohya_datasets import (
    KOHYA_PROGRAM_NAME,
    collect_kohya_datasets,
    import_kohya_dataset,
    map_kohya_dataset,
)
from finitune.importers.kohya_folders import scan_kohya_folder
from finitune.importers.kohya_keys import KOHYA_DEFAULTS, KOHYA_NAME_BY_ALIAS, KOHYA_SECRET_KEYS, KOHYA_TRAINING_KEYS
from finitune.importers.mapping import UNREADABLE_VALUE, ImportAccount
from finitune.report import Finding, Level

__all__ = ["import_kohya", "import_kohya_dataset", "import_kohya_flags", "import_kohya_options"]

_LIST_OPTIONS = {"network_args", "optimizer_args", "lr_scheduler_args"}
_READ_FROM_TEXT_NOTES = ("text in the file; read as a number", "text in the file; read as true or false")


@dataclass(frozen=True)
class KohyaOption:
    """One key of the original: the place where it stands, its name in sd-scripts, its value, what was converted before.

    `shown` is the value as the original has it, where that is another.
    """

    path: str
    name: str
    value: Any
    note: str = ""
    shown: Any = None


def import_kohya(document: Mapping[str, Any], source: Path) -> ImportedConfig:
    """A training's TOML of sd-scripts (--config_file), or of lora-scripts, in our terms.

    The finding CONFIG-NO-DATASETS, an error, tells that dataset_config names a file that is not there.
    """
    levels = {name: document[name] for name in ("general", "datasets") if "datasets" in document and name in document}
    flat = list(flatten_kohya_options({name: value for name, value in document.items() if name not in levels}))
    return import_kohya_options(flat, source, KOHYA_PROGRAM_NAME, levels)


def import_kohya_flags(line: str) -> ImportedConfig:
    """A command line of sd-scripts in our terms: launcher, script, flags, and the files that they name.

    Raises UsageError: CONFIG-FLAGS, CONFIG-NO-FILE.
    """
    command = parse_command_line(line)
    own = [KohyaOption(name, name.lstrip("-").replace("-", "_"), value) for name, value in command.flags]
    written: list[KohyaOption] = []
    for entry in own:
        if entry.name == "config_file":
            name = str(entry.value)
            file = find_named_file(
                name if name.endswith(".toml") else f"{name}.toml", Path(), "config_file", "CONFIG-NO-FILE"
            )
            written += flatten_kohya_options(read_toml(file).document)
    imported = import_kohya_options(
        [*written, *own], Path("command line"), KOHYA_PROGRAM_NAME, {}, find_script_family(command.script)
    )
    launcher = [ImportedKey(*make_launcher_line(name, value)) for name, value in command.launcher]
    if command.script:
        fate = KeyStatus.TAKEN if command.script.endswith("anima_train_network.py") else KeyStatus.UNSUPPORTED
        launcher.append(ImportedKey("script", command.script, fate, "", "finitune train stands in its place"))
    lines = (drop_text_note(line) for line in imported.lines)
    findings = list(imported.findings)
    if re.search(r"(^|[\\/])anima_train\.py$", command.script):
        message = "anima_train.py trains the whole model; here an adapter is trained"
        remedy = "Set network.algorithm = 'full' for a change of full rank, and merge it afterwards."
        findings.append(Finding(Level.WARNING, "CONFIG-WHOLE-MODEL", command.script, message, {}, remedy))
    return replace(imported, lines=(*launcher, *lines), findings=tuple(findings))


def make_launcher_line(name: str, value: object) -> tuple[str, object, KeyStatus, str, str]:
    """The line of a word in front of the script."""
    if name.startswith("-"):
        note = "not needed here: accelerate launch takes it in front of finitune train, too"
        return f"launcher {name}", value, KeyStatus.UNSUPPORTED, "", note
    if "=" in name:
        variable, _, setting = name.partition("=")
        note = "an environment variable: set it in front of finitune train, too"
        return f"launcher {variable}", setting, KeyStatus.UNSUPPORTED, "", note
    return f"launcher {name}", name, KeyStatus.TAKEN, "", "finitune train stands in its place"


def drop_text_note(line: ImportedKey) -> ImportedKey:
    """A flag is always text: that its number was read from text says nothing."""
    plain = line.key.startswith("-") and line.note in _READ_FROM_TEXT_NOTES
    return replace(line, fate=KeyStatus.TAKEN, note="") if plain else line


def find_script_family(script: str) -> str:
    """The model family that a script of sd-scripts trains, where it is not Anima."""
    name = script.replace("\\", "/").rpartition("/")[2]
    return FAMILY_BY_TRAINING_SCRIPT.get(name, "")


def flatten_kohya_options(document: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[KohyaOption]:
    """Every key of a document, its sections taken off."""
    for key, value in document.items():
        place = (*path, key)
        if isinstance(value, Mapping) and not (key in _LIST_OPTIONS and path):
            yield from flatten_kohya_options(value, place)
        else:
            yield KohyaOption(format_key_path(place), KOHYA_NAME_BY_ALIAS.get(key, key), value)


def import_kohya_options(
    entries: Sequence[KohyaOption],
    source: Path,
    program: str,
    levels: Mapping[str, Any],
    family: str = "",
    absent: Mapping[str, object] = KOHYA_DEFAULTS,
) -> ImportedConfig:
    """The account of flat entries, a later one over an earlier of the same name, with sd-scripts' defaults.

    `levels` holds `general` and `datasets` where they stand in the same file; `family` is the model family that the
    configuration is known to be for, if it is not Anima; `absent` is what the original takes for absent keys.
    """
    book = ImportAccount(program, str(source))
    entries = [part for entry in entries for part in expand_option_items(entry, book)]
    last = {entry.name: entry for entry in entries}
    flat = {name: entry.value for name, entry in last.items()}
    for entry in entries:
        if last[entry.name] is entry:
            add_option_line(book, entry, flat)
        else:
            report_repeated_option(book, entry, last[entry.name])
    datasets = find_kohya_datasets(book, flat, source, levels)
    fill_kohya_defaults(book, flat, datasets, absent)
    for name in find_other_families(flat, family):
        book.report_other_family("the model family", name)
    return book.imported(datasets)


def expand_option_items(entry: KohyaOption, book: ImportAccount) -> Iterator[KohyaOption]:
    """network_args and optimizer_args by their items; other keys as they are."""
    if entry.name not in ("network_args", "optimizer_args") or entry.value in KOHYA_OFF_VALUES or entry.value is True:
        yield entry
        return
    try:
        arguments, findings = parse_arguments(entry.value, entry.path)
    except UsageError as error:
        book.findings.append(Finding.of(error))
        book.lines.append(ImportedKey(entry.path, entry.value, KeyStatus.UNSUPPORTED, "", error.message))
        return
    book.findings.extend(findings)
    if entry.name == "optimizer_args":
        yield replace(entry, value=arguments, shown=entry.value)
        return
    yield entry
    for name, value in arguments.items():
        yield KohyaOption(f"{entry.path}.{name}", f"network_args.{name}", value)


def add_option_line(book: ImportAccount, entry: KohyaOption, flat: Mapping[str, Any]) -> None:
    """The line of one entry, with its own place, and a warning where something is lost."""
    unknown = entry.name not in KOHYA_TRAINING_KEYS
    value = None if entry.value in KOHYA_OFF_VALUES else entry.value
    book.answer(tuple(entry.name.split(".")) if unknown else (entry.name,), value, flat, KOHYA_TRAINING_KEYS)
    line = book.lines[-1]
    fate = KeyStatus.CHANGED if entry.note and line.fate is KeyStatus.TAKEN else line.fate
    note = "; ".join(part for part in (entry.note, line.note) if part)
    shown = mask_hidden_option(entry)
    if unknown:
        note = line.note.replace(f"no option of {book.program} that is known here", f"no such key in {book.program}")
    book.lines[-1] = line = replace(line, key=entry.path, value=shown, fate=fate, note=note)
    if unknown:
        book.findings[-1] = replace(book.findings[-1], subject=f"{book.source}: {entry.path}")
    elif fate is KeyStatus.UNSUPPORTED and not note.startswith(("not needed", UNREADABLE_VALUE.note)):
        subject = f"{book.source}: {entry.path}"
        message = f"{entry.path} = {shown!r} is not supported"
        book.findings.append(
            Finding(Level.WARNING, "CONFIG-UNSUPPORTED-KEY", subject, message, {"value": shown}, f"Instead: {note}")
        )


def mask_hidden_option(entry: KohyaOption) -> object:
    """The value as the account shows it; a secret is hidden."""
    if entry.name in KOHYA_SECRET_KEYS and entry.value not in KOHYA_OFF_VALUES:
        return "(hidden)"
    return entry.value if entry.shown is None else entry.shown


def report_repeated_option(book: ImportAccount, entry: KohyaOption, last: KohyaOption) -> None:
    """The line of a key that stands again further on."""
    shown = mask_hidden_option(entry)
    book.lines.append(ImportedKey(entry.path, shown, KeyStatus.NO_EFFECT, "", f"{last.path} stands over it"))
    if entry.value != last.value and not (last.path.startswith("-") and not entry.path.startswith("-")):
        message = f"{entry.name} is given twice: {entry.path} = {shown!r}, then {last.path}, which counts"
        remedy = "Leave one of them out: sections count for nothing in sd-scripts."
        book.findings.append(
            Finding(Level.WARNING, "CONFIG-KEY-TWICE", f"{book.source}: {entry.path}", message, {}, remedy)
        )


def find_kohya_datasets(
    book: ImportAccount, flat: Mapping[str, Any], source: Path, levels: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The datasets: in the same file, in the file of dataset_config, in a JSON of captions, or in N_name folders."""
    named = book.sections.pop("datasets", {})
    file = flat.get("dataset_config")
    if levels:
        return merge_kohya_dataset(book, levels, source, "")
    if file not in KOHYA_OFF_VALUES:
        try:
            path = find_named_file(str(file), source, "dataset_config", "CONFIG-NO-DATASETS")
        except UsageError as error:  # an error of the account: the other keys are looked at all the same
            book.findings.append(Finding.of(error))
            return []
        return merge_kohya_dataset(book, read_toml(path).document, path, f"{path.name}: ")
    if "metadata_file" in named:
        folder = {"image_dir": flat["train_data_dir"]} if flat.get("train_data_dir") not in KOHYA_OFF_VALUES else {}
        return [{"subsets": [{**named, **folder}]}]
    mask = {name: named[name] for name in ("conditioning_data_dir",) if name in named}
    subsets: list[dict[str, Any]] = []
    for key in ("train_data_dir", "reg_data_dir"):
        if flat.get(key) not in KOHYA_OFF_VALUES:
            part, findings = scan_kohya_folder(
                resolve_named_folder(str(flat[key]), source), {}, is_reg=key == "reg_data_dir"
            )
            book.findings.extend(findings)
            subsets += [{**subset, **mask} for dataset in part["datasets"] for subset in dataset["subsets"]]
    return [{"subsets": subsets}] if subsets else []


def merge_kohya_dataset(
    book: ImportAccount, document: Mapping[str, Any], source: Path, prefix: str
) -> list[dict[str, Any]]:
    """The datasets of a dataset TOML; its [general] stands over what the training says."""
    inner = map_kohya_dataset(document, source)
    book.lines += [replace(line, key=f"{prefix}{line.key}") for line in inner.lines]
    datasets = collect_kohya_datasets(inner, document)
    book.findings += inner.findings
    book.sections.setdefault("general", {}).update(inner.sections.get("general", {}))
    return datasets


def fill_kohya_defaults(
    book: ImportAccount, flat: Mapping[str, Any], datasets: Sequence[Mapping[str, Any]], defaults: Mapping[str, object]
) -> None:
    """What follows from absent keys, and from several together."""
    absent: dict[str, object] = dict(defaults)
    if book.get("training.max_train_steps"):
        absent.pop("training.max_train_epochs", None)
    elif not book.get("training.max_train_epochs") and "training.max_train_epochs" not in absent:
        absent["training.max_train_steps"] = 1600
    absent["network.train_text_encoder"] = is_text_encoder_trained(flat)
    if network.is_lycoris_network(flat):
        del absent["network.conv_dim"]
    levels = (*datasets, *(subset for dataset in datasets for subset in dataset["subsets"]))
    if book.get("general.alpha_mask") or any(level.get("alpha_mask") for level in levels):
        book.set("objective.masked_loss", True)  # sd-scripts masks wherever a picture has a mask of its own
    book.fill(absent)
    if all(
        get_positive_sibling(flat, name) for name in ("save_last_n_epochs", "save_last_n_steps", "save_every_n_steps")
    ):
        message = "save_last_n_epochs and save_last_n_steps are one number of files here: the later key counts"
        book.findings.append(Finding(Level.WARNING, "CONFIG-SAVE-LAST", book.source, message))


def find_other_families(flat: Mapping[str, Any], family: str) -> Iterator[str]:
    """The other model family that a configuration is plainly for."""
    module = network.FAMILY_BY_NETWORK_MODULE.get(network.get_network_module_name(flat.get("network_module", "")), "")
    other = family or (module if module != "Anima" else "")
    if not other and flat.get("v2") in KOHYA_TRUE_VALUES:
        other = "Stable Diffusion 2"
    if not other and any(flat.get(name) not in KOHYA_OFF_VALUES for name in ("clip_l", "clip_g", "t5xxl", "ae")):
        other = "FLUX.1 or Stable Diffusion 3"
    form = str(flat.get("model_train_type", "anima"))
    if not other and not form.startswith("anima"):
        other = form
    if other:
        yield other


def resolve_named_folder(name: str, source: Path) -> Path:
    """A folder from where the command runs, or beside the file that names it."""
    here, beside = Path(name).expanduser() if name.startswith("~/") else Path(name), source.parent / name
    return beside if beside.is_dir() and not here.is_dir() else here


def find_named_file(name: str, source: Path, key: str, code: str) -> Path:
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
