"""The part of `finitune check` that looks at a training's configuration: ours, or one of another program.

Everything at once: what the file says that cannot be, what excludes each other, what has no effect, what LyCORIS would
make of it, which modules get an adapter, what is wrong with the pictures by their headers, how long the run is, and
what it will write. A fault in one place hides none in another: what is refused is left out, and the rest looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finitune.config.amend import line_of, path_of, renamed, without_quotes
from finitune.config.conflicts import conflicts
from finitune.config.conflicts_run import previews_wanted
from finitune.config.imported import Fate, Imported, KeyLine
from finitune.config.importers.mapping import leaves, spelled
from finitune.config.importers.program_marks import BACKENDS, CONCEPTS, DIFFUSION_PIPE_DATASET, KOHYA_DATASET
from finitune.config.importers.recognise import is_file
from finitune.config.inspection import Inspection
from finitune.config.kinds import AS_TEXT, alternatives, readable_number
from finitune.config.lycoris import lycoris_findings
from finitune.config.lycoris_given import Given, given_of
from finitune.config.read import nowhere, refuse_foreign
from finitune.config.schema import TrainConfig
from finitune.config.text import decoded, read_toml
from finitune.errors import FinituneError, UsageError
from finitune.journeys.check_pictures import look_at_data
from finitune.journeys.check_sites import check_sites
from finitune.journeys.checks import UNNAMED, Mending, Request, sort_by_harm
from finitune.progress import Progress
from finitune.report import Finding, Level, Report, Table

if TYPE_CHECKING:
    from finitune.config.text import Locate

READ_AS = "text in the file; read as"
"""How the account of a foreign configuration tells of a number in quotes."""
WHY_NO_DATASETS = ("CONFIG-NO-DATASETS", "DATASET-FOLDER-MISSING")
"""Where one of these is told, it is no news that there are no pictures."""
NEAR = 90
"""How like an option a misspelled key must be, in percent of their letters, for the right name to be offered."""
DATASET_ONLY = {"general", "datasets"}
DATASETS_ALONE = (BACKENDS, CONCEPTS, DIFFUSION_PIPE_DATASET, KOHYA_DATASET)
"""The files of other programs that name pictures only."""
NAMELESS = {"model": {"pretrained_model_name_or_path": UNNAMED}, "saving": {"output_dir": UNNAMED}}


@dataclass(frozen=True)
class Opened:
    """A configuration file: its text, its keys, the configuration (None where too much of it is wrong)."""

    text: str
    lines: tuple[KeyLine, ...]
    config: TrainConfig | None


def check_config(path: Path, request: Request, report: Report, progress: Progress) -> None:
    """Everything about a configuration file of ours or of a program that `finitune train` imports, and of its data."""
    begin = len(report.findings)
    report.figures["kind"] = "config"
    try:
        opened = opened_config(path, request, report)
        given = given_of(opened.lines, opened.text)
        report.findings.extend(lycoris_findings(given))
        if opened.config is not None:
            look_at_run(opened.config, preset_of(given, path), request, report, progress)
    except FinituneError as error:
        report.findings.append(Finding.of(error))
    sort_by_harm(report, begin)


def config_in(path: Path, request: Request, report: Report) -> TrainConfig | None:
    """The configuration in a file, for its datasets alone; what is wrong with it is in the report."""
    return opened_config(path, request, report).config


def preset_of(given: Given, path: Path) -> Path | None:
    """The preset file that a configuration of LyCORIS names, from here or beside the configuration."""
    name = given.algorithm and (given["preset"] or given["LyCORIS_preset"])
    places = (Path(str(name)), path.parent / str(name)) if name else ()
    return next((place for place in places if is_file(place)), None)


def look_at_run(config: TrainConfig, preset: Path | None, request: Request, report: Report, progress: Progress) -> None:
    """What a run of a configuration would meet: conflicts, the model, the pictures; and what it would write."""
    whole = config.model.pretrained_model_name_or_path != UNNAMED
    found = [one for one in conflicts(config) if whole or one.subject.startswith("datasets")]
    known = any(one.code in WHY_NO_DATASETS for one in report.findings)
    report.findings += [one for one in found if not (known and one.code == "DATASET-NONE")]
    looks = [partial(check_sites, preset), tell_files, check_options] if whole else []
    for look in looks:
        try:
            look(config, request, report)
        except FinituneError as error:
            report.findings.append(Finding.of(error))
    if any(dataset.subsets for dataset in config.datasets):
        look_at_data(config, request, report, progress, decode=False)


def check_options(config: TrainConfig, request: Request, report: Report) -> None:
    """What a training looks at before its data: the optimiser, the folders to write to, the prompts of previews."""
    from finitune.journeys.model import default_size
    from finitune.journeys.train_checks import look_at_options
    from finitune.journeys.train_files import preview_pictures
    from finitune.journeys.training import choice_of

    preview_pictures(config.preview, default_size(choice_of(config)))
    report.findings.extend(look_at_options(config))


def opened_config(path: Path, request: Request, report: Report) -> Opened:
    """The file read strictly, with every fault of it in the report; raises for what cannot be read at all."""
    text = decoded(path)
    try:
        written = read_toml(path)
        if written.document.keys() <= DATASET_ONLY and written.document:
            return opened_dataset(path, text, request, report)
        refuse_foreign(written)
    except UsageError as error:
        if error.code != "CONFIG-FOREIGN" and not is_foreign(path):
            raise
        return opened_foreign(path, text, request, report)
    if is_foreign(path):
        return opened_foreign(path, text, request, report)
    lines = tuple(KeyLine(spelled(where), value, Fate.TAKEN) for where, value, _ in leaves(written.document))
    config = inspected(written.document, path, text, request, report, written.locate)
    return Opened(text, lines, config)


def is_foreign(path: Path) -> bool:
    """Whether a file is the configuration of another program, for sure."""
    from finitune.config.importers.foreign_text import read_text
    from finitune.config.importers.program_marks import OURS
    from finitune.config.importers.recognise import recognise

    try:
        text = read_text(path)
    except FinituneError:
        return False
    return text.language == "command line" or recognise(text.document) not in ("", OURS)


def opened_dataset(path: Path, text: str, request: Request, report: Report) -> Opened:
    """A dataset TOML alone: each key as strictly as in a configuration, then with sd-scripts' defaults."""
    from finitune.config.importers.recognise import read_foreign

    written = read_toml(path)
    report.figures["program"] = "dataset TOML"
    inspected(completed(written.document), path, text, request, report, written.locate)
    imported = read_foreign(path)
    report.findings += [one for one in imported.findings if one.code != "CONFIG-UNKNOWN-KEY"]  # told with its line
    return Opened(text, imported.lines, kept(completed(imported.document), path.parent))


def opened_foreign(path: Path, text: str, request: Request, report: Report) -> Opened:
    """The configuration of another program in our terms, with the account of its keys."""
    from finitune.config.importers.recognise import read_foreign

    imported = read_foreign(path)
    report.figures.update(program=imported.program, keys=imported.table().as_dicts())
    report.tables.append(imported.table())
    report.findings += [placed(finding, path, text) for finding in imported.findings]
    report.findings += account_findings(imported, path)
    alone = imported.program.startswith(DATASETS_ALONE)
    document = completed(imported.document) if alone else imported.document
    return Opened(text, imported.lines, inspected(document, path, text, request, report, nowhere))


def completed(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document with a model and a folder, where it names none: datasets can be looked at without."""
    return {**document, **{name: {**options, **section(document, name)} for name, options in NAMELESS.items()}}


def inspected(
    document: Mapping[str, Any], path: Path, text: str, request: Request, report: Report, locate: Locate
) -> TrainConfig | None:
    """The configuration of a document; where there are faults, of what is left without them."""
    ours = locate is not nowhere
    beside = path.parent if ours else None  # as `finitune train` reads it
    inspection = Inspection(str(path), locate, document, beside)
    config = inspection.config()
    report.findings.extend(inspection.findings)
    if ours:
        request.mendings.extend(mendings(inspection.findings, path, text))
    if config is not None:
        return config
    return kept(pruned(document, {inspection.shown(place) for place in inspection.refused}), beside)


def kept(document: Mapping[str, Any], beside: Path | None) -> TrainConfig | None:
    """The configuration of a document whose faults were told; None where it still has some."""
    return Inspection("", nowhere, completed(document), beside).config()


def section(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table of a document; empty where there is none."""
    found = document.get(name)
    return found if isinstance(found, Mapping) else {}


def pruned(value: Any, without: Iterable[tuple[str | int, ...]], path: tuple[str | int, ...] = ()) -> Any:
    """A document without what stands at some paths."""
    refused = set(without)
    if isinstance(value, Mapping):
        return {
            name: pruned(item, refused, (*path, str(name)))
            for name, item in value.items()
            if (*path, str(name)) not in refused
        }
    if isinstance(value, (list, tuple)):
        return [pruned(item, refused, (*path, n)) for n, item in enumerate(value) if (*path, n) not in refused]
    return value


def placed(finding: Finding, path: Path, text: str) -> Finding:
    """A finding about a key of a foreign configuration, with the line on which the key stands."""
    source, _, key = finding.subject.partition(": ")
    line = line_of(text, key) if key and source == str(path) else None
    if line is None:
        return finding
    evidence = {"file": str(path), "line": line, "key": key, **finding.evidence}
    return replace(finding, subject=f"{path}:{line}: {key}", evidence=evidence)


def account_findings(imported: Imported, path: Path) -> list[Finding]:
    """What the account of the keys says beside its table: numbers as text, keys without effect."""
    from finitune.datasets.telling import several

    texts = [f"{line.key} = {line.value!r}" for line in imported.lines if is_number_as_text(line)]
    what = f"numbers or truth values are written as text, and taken as what they look like ({len(texts)})"
    found = several(Level.WARNING, AS_TEXT, str(path), what, texts, "Write them without quotes.")
    idle = [f"{line.key} ({line.note})" for line in imported.lines if line.fate is Fate.NO_EFFECT and said(line)]
    what = f"keys have no effect in {imported.program.partition(' (')[0]} either ({len(idle)})"
    return found + several(Level.NOTE, "CONFIG-KEYS-IDLE", str(path), what, idle)


def is_number_as_text(line: KeyLine) -> bool:
    """Whether a key of a file, not of a command line, has a number in quotes; YAML 1.1 reads 1e-4 as text, too."""
    if READ_AS in line.note:
        return True
    name, _, key = line.ours.partition(".")
    known = section_fields(name)
    kinds = alternatives(known[key].annotation) if key in known else []
    written = isinstance(line.value, str) and not line.key.rpartition(".")[2].startswith("-")
    return written and readable_number(str(line.value)) is not None and bool({int, float} & {*kinds})


def section_fields(name: str) -> Mapping[str, Any]:
    """The options of one of our sections; none where there is no such section."""
    field = TrainConfig.model_fields.get(name)
    return getattr(field.annotation, "model_fields", {}) if field else {}


def said(line: KeyLine) -> bool:
    """Whether a key was given for something: being off is no slip."""
    return line.value not in (None, "", [], {}, False, 0) and line.note not in ("off", "never")


def mendings(findings: Iterable[Finding], path: Path, text: str) -> list[Mending]:
    """What can be mended in the text of a configuration of ours: numbers out of their quotes, misspelled keys.

    A misspelled key is a guess: it is offered where one option alone is near, its place is free, and its value fits.
    """
    offered: list[Mending] = []
    for finding in findings:
        line, key = finding.evidence.get("line"), finding.evidence.get("key")
        if not isinstance(line, int) or not isinstance(key, str):
            continue
        where = path_of(key)
        if finding.code == AS_TEXT and without_quotes(text, line, where):
            what = f"Write the value of {key} without quotes (line {line})"
            offered.append(Mending(AS_TEXT, path, what, partial(unquote, path, line, key)))
        if finding.code == "CONFIG-UNKNOWN-KEY" and (name := only_near(where, text)):
            what = f"Write {name} in place of {where[-1]} (line {line})"
            offered.append(Mending("CONFIG-UNKNOWN-KEY", path, what, partial(respell, path, line, key, name)))
    return offered


def only_near(where: tuple[str | int, ...], text: str) -> str | None:
    """The only option of its table that an unknown key is near to, if it is free there; None elsewhere."""
    from rapidfuzz import fuzz

    from finitune.config.homes import LEVELS
    from finitune.config.inspection import header

    level = LEVELS.get(header(where[:-1]))
    name = str(where[-1])
    if level is None:
        return None
    near = [option for option in level.model_fields if fuzz.ratio(name.casefold(), option) >= NEAR]
    if len(near) != 1:
        return None
    line = line_of(text, name)
    mended = renamed(text, line, where, near[0]) if line else None
    return near[0] if mended and fits(mended, (*where[:-1], near[0])) else None


def fits(text: str, where: tuple[str | int, ...]) -> bool:
    """Whether what stands at a path of a TOML of ours is a value for that option."""
    import tomlkit

    inspection = Inspection("", nowhere, tomlkit.parse(text).unwrap())
    inspection.config()
    return where not in inspection.refused


def unquote(path: Path, line: int, key: str) -> None:
    """Write the value of a key without its quotes; nothing where it has none."""
    write_amended(path, without_quotes(decoded(path), line, path_of(key)))


def respell(path: Path, line: int, key: str, name: str) -> None:
    """Give a key its right name; nothing where it is there no more."""
    write_amended(path, renamed(decoded(path), line, path_of(key), name))


def write_amended(path: Path, text: str | None) -> None:
    """Write a configuration's changed text."""
    from finitune.files.writer import write_text

    if text is not None:
        write_text(path, text)


def tell_files(config: TrainConfig, request: Request, report: Report) -> None:
    """The files that the run will write, and a warning of those that are there already."""
    from finitune.journeys.train import EFFECTIVE, PAGE
    from finitune.training.folder import RunFolder
    from finitune.training.state import state_folders

    saving = config.saving
    folder = RunFolder(saving.output_dir)
    name, step, epoch = saving.output_name, saving.save_every_n_steps, saving.save_every_n_epochs
    places = {
        "adapter": folder.adapter_path(name),
        "adapter by step": step and folder.adapter_path(name, step=step),
        "adapter by epoch": epoch and folder.adapter_path(name, epoch=epoch),
        "state to resume from": saving.save_state and folder.state_path(name),
        "configuration in force": folder.path / EFFECTIVE,
        "cached latents and texts": config.training.cache_dir or folder.path / "cache",
        "previews": previews_wanted(config) and folder.path / "previews",
        "report": config.logging.report and folder.path / PAGE,
    }
    table = Table("files that will be written", ("what", "where"), tuple((k, str(v)) for k, v in places.items() if v))
    report.tables.append(table)
    report.figures["files"] = table.as_dicts()
    if saving.resume == "never" and folder.path.is_dir() and next(state_folders(folder.path, saving.output_name), None):
        report.add(
            Level.WARNING,
            "RUN-BEGINS-ANEW",
            str(folder.path),
            "states of an earlier run are here; this one would begin anew and write over them",
            remedy="To go on from them: finitune train CONFIG --resume",
        )
