"""Importing kohya's sd-scripts: a training's TOML, its command line, and its dataset TOML.

sd-scripts makes one flat namespace of everything: sections of the TOML count for nothing, a later key stands over an
earlier one, the command line stands over the file, and unknown keys are dropped in silence. Here each has its line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finitune.config.arguments import parse_arguments
from finitune.config.imported_config import ImportedConfig, ImportedKey, KeyReason, KeyStatus
from finitune.config.toml_text import format_key_path, read_toml
from finitune.errors import UsageError
from finitune.importers.foreign_text import parse_command_line
from finitune.importers.kohya_conversions import (
    KOHYA_OFF_VALUES,
    find_kohya_algorithm,
    get_kohya_number,
    get_network_module_name,
    is_kohya_switch_on,
    is_kohya_value_given,
    is_lycoris_network,
    is_text_encoder_trained,
    read_kohya_table,
)
from finitune.importers.kohya_datasets import collect_kohya_datasets, map_kohya_dataset, read_kohya_keys
from finitune.importers.kohya_folders import scan_kohya_folder
from finitune.importers.mapping import ImportAccount
from finitune.report import Finding, Level

_LIST_OPTIONS = {"network_args", "optimizer_args", "lr_scheduler_args"}


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
    return import_kohya_options(flat, source, read_kohya_table().program, levels)


def import_kohya_flags(line: str) -> ImportedConfig:
    """A command line of sd-scripts in our terms: launcher, script, flags, and the files that they name.

    Raises UsageError: CONFIG-FLAGS, CONFIG-NO-FILE.
    """
    table, command = read_kohya_table(), parse_command_line(line)
    own = [KohyaOption(name, name.lstrip("-").replace("-", "_"), value) for name, value in command.flags]
    written: list[KohyaOption] = []
    for entry in own:
        if entry.name == "config_file":
            name = str(entry.value) if str(entry.value).endswith(".toml") else f"{entry.value}.toml"
            file = find_named_file(name, Path(), "config_file", "CONFIG-NO-FILE")
            written += flatten_kohya_options(read_toml(file).document)
    script = command.script.replace("\\", "/").rpartition("/")[2]
    family = table.facts["family_by_script"].get(script, "")
    imported = import_kohya_options([*written, *own], Path("command line"), table.program, {}, family)
    launcher = [make_launcher_line(name, value) for name, value in command.launcher]
    if script:
        fate = KeyStatus.TAKEN if script.endswith("anima_train_network.py") else KeyStatus.UNSUPPORTED
        launcher.append(ImportedKey("script", command.script, fate, "", "finitune train stands in its place"))
    findings = list(imported.findings)
    if script == "anima_train.py":
        message = "anima_train.py trains the whole model; here an adapter is trained"
        remedy = "Set network.algorithm = 'full' for a change of full rank, and merge it afterwards."
        findings.append(Finding(Level.WARNING, "CONFIG-WHOLE-MODEL", command.script, message, {}, remedy))
    lines = (
        # A flag is always text: that its number was read from text says nothing.
        replace(line, fate=KeyStatus.TAKEN, note="", reason=None)
        if line.key.startswith("-") and line.reason is KeyReason.READ_FROM_TEXT
        else line
        for line in imported.lines
    )
    return replace(imported, lines=(*launcher, *lines), findings=tuple(findings))


def make_launcher_line(name: str, value: object) -> ImportedKey:
    if name.startswith("-"):
        note = "not needed here: accelerate launch takes it in front of finitune train, too"
        return ImportedKey(f"launcher {name}", value, KeyStatus.UNSUPPORTED, "", note, KeyReason.UNNEEDED)
    if "=" in name:
        variable, _, setting = name.partition("=")
        note = "an environment variable: set it in front of finitune train, too"
        return ImportedKey(f"launcher {variable}", setting, KeyStatus.UNSUPPORTED, "", note)
    return ImportedKey(f"launcher {name}", name, KeyStatus.TAKEN, "", "finitune train stands in its place")


def flatten_kohya_options(document: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[KohyaOption]:
    """Every key of a document, its sections taken off."""
    aliases = read_kohya_table().facts["name_by_alias"]
    for key, value in document.items():
        if isinstance(value, Mapping) and not (key in _LIST_OPTIONS and path):
            yield from flatten_kohya_options(value, (*path, key))
        else:
            yield KohyaOption(format_key_path((*path, key)), aliases.get(key, key), value)


def import_kohya_options(
    entries: Sequence[KohyaOption],
    source: Path,
    program: str,
    levels: Mapping[str, Any],
    family: str = "",
    absent: Mapping[str, object] | None = None,
) -> ImportedConfig:
    """The account of flat entries, a later one over an earlier of the same name, with sd-scripts' defaults.

    `levels` holds `general` and `datasets` where they stand in the same file; `family` is the model family that the
    configuration is known to be for, if it is not Anima; `absent` is what the original takes for absent keys.
    """
    book = ImportAccount(program, str(source), unknown_note=f"no such key in {program}")
    entries = [part for entry in entries for part in expand_option_items(entry, book)]
    last = {entry.name: entry for entry in entries}
    flat = {name: entry.value for name, entry in last.items()}
    flat["our_algorithm"] = find_kohya_algorithm(flat)  # rows ask for it
    for entry in entries:
        if last[entry.name] is entry:
            add_option_line(book, entry, flat)
        else:
            report_repeated_option(book, entry, last[entry.name])
    datasets = find_kohya_datasets(book, flat, source, levels)
    fill_kohya_defaults(book, flat, datasets, read_kohya_table().defaults if absent is None else absent)
    if other := find_imported_family(flat, family):
        book.report_other_family("the model family", other)
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
    value = None if entry.value in KOHYA_OFF_VALUES else entry.value
    known = entry.name in read_kohya_keys()
    book.answer((entry.name,) if known else tuple(entry.name.split(".")), value, flat, read_kohya_keys())
    line = book.lines[-1]
    fate = KeyStatus.CHANGED if entry.note and line.fate is KeyStatus.TAKEN else line.fate
    note = "; ".join(part for part in (entry.note, line.note) if part)
    shown = mask_hidden_option(entry)
    if line.reason is KeyReason.UNKNOWN:
        book.findings[-1] = replace(book.findings[-1], subject=f"{book.source}: {entry.path}")
    elif fate is KeyStatus.UNSUPPORTED and line.reason not in (KeyReason.UNNEEDED, KeyReason.UNREADABLE):
        message, remedy = f"{entry.path} = {shown!r} is not supported", f"Instead: {note}"
        book.report(Level.WARNING, "CONFIG-UNSUPPORTED-KEY", entry.path, message, {"value": shown}, remedy)
    book.lines[-1] = replace(line, key=entry.path, value=shown, fate=fate, note=note)


def mask_hidden_option(entry: KohyaOption) -> object:
    """The value as the account shows it; a secret is hidden."""
    if entry.name in read_kohya_table().facts["secret_keys"] and entry.value not in KOHYA_OFF_VALUES:
        return "(hidden)"
    return entry.value if entry.shown is None else entry.shown


def report_repeated_option(book: ImportAccount, entry: KohyaOption, last: KohyaOption) -> None:
    """The line of a key that stands again further on."""
    shown = mask_hidden_option(entry)
    book.lines.append(ImportedKey(entry.path, shown, KeyStatus.NO_EFFECT, "", f"{last.path} stands over it"))
    if entry.value != last.value and not (last.path.startswith("-") and not entry.path.startswith("-")):
        message = f"{entry.name} is given twice: {entry.path} = {shown!r}, then {last.path}, which counts"
        remedy = "Leave one of them out: sections count for nothing in sd-scripts."
        book.report(Level.WARNING, "CONFIG-KEY-TWICE", entry.path, message, {}, remedy)


def find_kohya_datasets(
    book: ImportAccount, flat: Mapping[str, Any], source: Path, levels: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The datasets: in the same file, in the file of dataset_config, in a JSON of captions, or in N_name folders."""
    named = book.sections.pop("datasets", {})
    if levels:
        return merge_kohya_dataset(book, levels, source, "")
    if is_kohya_value_given(flat, "dataset_config"):
        try:
            path = find_named_file(str(flat["dataset_config"]), source, "dataset_config", "CONFIG-NO-DATASETS")
        except UsageError as error:  # an error of the account: the other keys are looked at all the same
            book.findings.append(Finding.of(error))
            return []
        return merge_kohya_dataset(book, read_toml(path).document, path, f"{path.name}: ")
    if "metadata_file" in named:
        folder = {"image_dir": flat["train_data_dir"]} if is_kohya_value_given(flat, "train_data_dir") else {}
        return [{"subsets": [{**named, **folder}]}]
    mask = {name: named[name] for name in ("conditioning_data_dir",) if name in named}
    subsets: list[dict[str, Any]] = []
    for key in ("train_data_dir", "reg_data_dir"):
        if is_kohya_value_given(flat, key):
            name = str(flat[key])
            here, beside = Path(name).expanduser() if name.startswith("~/") else Path(name), source.parent / name
            folder = beside if beside.is_dir() and not here.is_dir() else here
            part, findings = scan_kohya_folder(folder, {}, is_reg=key == "reg_data_dir")
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
    if is_lycoris_network(flat):
        del absent["network.conv_dim"]
    levels = (*datasets, *(subset for dataset in datasets for subset in dataset["subsets"]))
    if book.get("general.alpha_mask") or any(level.get("alpha_mask") for level in levels):
        book.set("objective.masked_loss", True)  # sd-scripts masks wherever a picture has a mask of its own
    book.fill(absent)
    names = ("save_last_n_epochs", "save_last_n_steps", "save_every_n_steps")
    if all(get_kohya_number(flat, name) > 0 for name in names):
        message = "save_last_n_epochs and save_last_n_steps are one number of files here: the later key counts"
        book.findings.append(Finding(Level.WARNING, "CONFIG-SAVE-LAST", book.source, message))


def find_imported_family(flat: Mapping[str, Any], family: str) -> str:
    """The other model family that a configuration is plainly for; '' where there is none."""
    modules = read_kohya_table().facts["family_by_network_module"]
    module = modules.get(get_network_module_name(flat.get("network_module", "")), "")
    if other := family or (module if module != "Anima" else ""):
        return other
    if is_kohya_switch_on(flat, "v2"):
        return "Stable Diffusion 2"
    if any(is_kohya_value_given(flat, name) for name in ("clip_l", "clip_g", "t5xxl", "ae")):
        return "FLUX.1 or Stable Diffusion 3"
    form = str(flat.get("model_train_type", "anima"))
    return "" if form.startswith("anima") else form


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
