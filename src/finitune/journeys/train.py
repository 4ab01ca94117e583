"""finitune train: an adapter for Anima, from a configuration to files that were checked."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from finitune.device import processes
from finitune.errors import FileError, FinituneError, UsageError
from finitune.journeys.training import Stopped, prepared, stop_on_errors
from finitune.progress import Progress, Silent
from finitune.report import Finding, Level, Report

if TYPE_CHECKING:
    from finitune.config.read import Loaded
    from finitune.config.schema import TrainConfig
    from finitune.journeys.training import Prepared
    from finitune.training import events
    from finitune.training.board import Board
    from finitune.training.history import History
    from finitune.training.run import Progressing, Run

STAGE = "training"
ECHO_SECONDS = 2.0
"""torchrun sends its processes once more what the terminal has sent to all: that is no second wish."""
EFFECTIVE = "config.toml"
PAGE = "report.html"
SITES = "sites"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to train by: a configuration file, ours or another program's, or with `source` a command line, too."""

    config: Path | None = None
    source: str | None = None
    init: bool = False
    explain: bool = False
    dry_run: bool = False
    resume: bool = False
    out: Path | None = None


Page = Callable[["TrainConfig", "History", Report], str]


def run(request: Request, page: Page | None = None, progress: Progress | None = None) -> Report:
    """Train as `request` says; `page` makes the run's report.html of its history."""
    report = Report("train")
    try:
        if request.init:
            return write_commented(request, report)
        config = configured(request, report)
        with asked_to_stop() as stop:
            tell = Teller(progress or Silent())
            for event in events_of(config, report, progress, request=request, page=page, stop=stop):
                tell(event)
    except Stopped:
        pass
    except FinituneError as error:
        return report.fail(error)
    return report


def write_commented(request: Request, report: Report) -> Report:
    """Write a configuration with every option explained."""
    from finitune.config.init import commented
    from finitune.files.writer import write_text

    path = request.out or Path("train.toml")
    if request.config or request.source:
        raise UsageError(
            "--init writes a new configuration, and reads none",
            code="CONFIG-NOT-NAMED",
            subject="--init",
            remedy=f"finitune train --init --out {request.config or path}",
        )
    if path.exists():
        raise UsageError(
            f"{path} is there already",
            code="OUT-EXISTS",
            subject="--out",
            remedy="Name another file: finitune train --init --out FILE",
        )
    write_text(path, commented())
    report.artifacts["config"] = str(path)
    return report


def configured(request: Request, report: Report) -> TrainConfig:
    """The configuration of a request; what became of another program's keys is in the report's tables."""
    loaded = loaded_for(request, report)
    report.findings.extend(loaded.findings)
    return into(loaded.config, resume="auto") if request.resume else loaded.config


def loaded_for(request: Request, report: Report) -> Loaded:
    """The configuration file, or the imported one; raises UsageError where neither or both are named."""
    from finitune.config.read import read_config

    if (request.config is None) == (request.source is None):
        raise UsageError(
            "name one configuration: our own, or another program's with --from",
            code="CONFIG-NOT-NAMED",
            subject="train",
            remedy="finitune train CONFIG.toml, or finitune train --from FILE; finitune train --init writes a new one.",
        )
    if request.config is None:
        return foreign(request.source or "", request.out, report)
    try:
        loaded = read_config(request.config)
    except UsageError as error:
        if error.code != "CONFIG-FOREIGN":
            raise
        return foreign(str(request.config), request.out, report)
    return loaded if request.out is None else replace(loaded, config=into(loaded.config, output_dir=request.out))


def into(config: TrainConfig, **saving: object) -> TrainConfig:
    """The same configuration with other options of [saving]."""
    return config.model_copy(update={"saving": config.saving.model_copy(update=saving)})


def foreign(source: str, out: Path | None, report: Report) -> Loaded:
    """Another program's configuration in our terms; `out` is the run's folder where it names none, or another.

    The account of its keys is in the report, whatever comes of it. Raises Stopped where the account has errors.
    """
    from finitune.config.importers.recognise import is_file, read_foreign
    from finitune.config.read import Loaded, validate

    imported = read_foreign(source)
    report.tables.append(imported.table())
    report.figures.update(program=imported.program, keys=imported.table().as_dicts())
    report.findings.extend(imported.findings)
    stop_on_errors(report)
    document = dict(imported.document)
    if out is not None:
        saving = document.get("saving")
        document["saving"] = {**(saving if isinstance(saving, dict) else {}), "output_dir": str(out)}
    path = Path(source)
    beside = path.parent if is_file(path) else None
    config, findings = validate(document, source[:60] if beside is None else source, beside=beside)
    return Loaded(config, findings, imported, path)


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed while this is open: the first is a wish, the second stops at once.

    Only the main thread of a program can hear it.
    """
    wished: list[float] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.getsignal(signal.SIGINT)

    def hear(number: int, _frame: object) -> None:
        now = time.monotonic()
        if wished and not (processes.count() > 1 and now - wished[0] < ECHO_SECONDS):
            signal.signal(signal.SIGINT, signal.default_int_handler)  # `before` may ignore it: in the background, say
            signal.raise_signal(number)
        wished.append(now)

    signal.signal(signal.SIGINT, hear)
    try:
        yield lambda: bool(wished)
    finally:
        signal.signal(signal.SIGINT, before)


def events_of(
    config: TrainConfig,
    report: Report,
    progress: Progress | None = None,
    *,
    request: Request | None = None,
    page: Page | None = None,
    stop: Callable[[], bool] = bool,
) -> Iterator[events.Event]:
    """Prepare, measure and train, yielding what happens; at the end the report has findings, figures and files."""
    from finitune.journeys.train_files import recall
    from finitune.training import events
    from finitune.training.history import History
    from finitune.training.run import Progressing

    request = request or Request()
    history = History()
    with prepared(config, report, progress, explain=request.explain, stop=stop) as ready:
        progressing = Progressing.fresh(ready.run)
        state = resume(config, ready.run, progressing, report)
        if state:
            recall(history, state.parent, progressing.step)
        write_effective(config, ready, report)  # a run that is refused leaves that of the run before
        board = board_of(config, ready.run)
        try:
            for event in run_events(config, ready.run, progressing, report, dry=request.dry_run):
                history.add(event)
                if board:
                    board.add(event)
                if isinstance(event, events.Saved) and ready.run.ranks.main:
                    history.log(ready.run.folder.path)  # whoever goes on from this state finds the steps to it
                yield event
        except FinituneError as error:
            report.fail(error)  # before the page is made, which should say why
            raise Stopped from error
        finally:
            report.findings.extend(history.findings(progressing.guard.findings()))
            report.figures.update(history.figures())
            if ready.run.ranks.main:
                leave(config, ready, history, report, page)


def run_events(
    config: TrainConfig, run: Run, progressing: Progressing, report: Report, *, dry: bool
) -> Iterator[events.Event]:
    """The measurement, and the run itself from its first step or from where it was left."""
    from finitune.journeys.train_run import measured
    from finitune.training import events
    from finitune.training.loop import Trainer
    from finitune.training.measure import fit

    for event in measured(run, progressing.step):
        if isinstance(event, events.Measured):
            report.findings.append(fit(event, config))
        yield event
    if not dry:
        yield from Trainer(run, progressing).events()


def write_effective(config: TrainConfig, ready: Prepared, report: Report) -> None:
    """Write the configuration as it is in force, every option stated, into the run's folder."""
    from finitune.config.read import dump
    from finitune.files.writer import write_text

    if ready.run.ranks.main:
        path = ready.run.folder.path / EFFECTIVE
        write_text(path, dump(config))
        report.artifacts["config"] = str(path)


def resume(config: TrainConfig, run: Run, progressing: Progressing, report: Report) -> Path | None:
    """Go on from the state that is asked for, and return it if one is there; raises where it is of another training."""
    from finitune.training.state import last_state, load_state, state_folders

    saving = config.saving
    if saving.resume == "never":
        if next(state_folders(run.folder.path, saving.output_name), None):
            message = "states of an earlier run are here; this one begins anew and will write over them"
            remedy = "To go on from them: finitune train CONFIG --resume"
            report.add(Level.WARNING, "RUN-BEGINS-ANEW", str(run.folder.path), message, remedy=remedy)
        return None
    path: Path | None = saving.resume if isinstance(saving.resume, Path) else None
    if path is None:
        path, findings = last_state(run.folder.path, saving.output_name)
        if path is None and findings:
            raise none_whole(findings[0])
        report.findings.extend(findings)
    if path is None:
        report.add(Level.NOTE, "NOTHING-TO-RESUME", str(run.folder.path), "no state is here; the run begins anew")
        return None
    state, findings = load_state(path, run.manifest)
    report.findings.extend(findings)
    progressing.load(run, state)
    report.add(Level.NOTE, "RESUMED", str(path), f"the run goes on at step {state.step}")
    if state.step >= run.total_steps:
        message = f"the run was over: {run.total_steps} steps are asked for, and {state.step} are done"
        remedy = "To train on, raise max_train_steps or max_train_epochs."
        report.add(Level.WARNING, "RUN-WAS-OVER", str(path), message, remedy=remedy, step=state.step)
    return path


def none_whole(damaged: Finding) -> FileError:
    """The error where states are here and none can be gone on from: a new run would write over what they belong to."""
    return FileError(
        f"no state here is whole: {damaged.message}",
        code=damaged.code,
        subject=damaged.subject,
        remedy="Begin from the adapter file beside it: network_weights. To begin anew, delete it, or resume = 'never'.",
    )


def board_of(config: TrainConfig, run: Run) -> Board | None:
    """TensorBoard's writer, where it is asked for, of the main process."""
    from finitune.files.writer import not_written
    from finitune.training.board import Board

    if config.logging.log_with == "none" or not run.ranks.main:
        return None
    folder = config.logging.logging_dir or run.folder.path / "logs"
    try:
        return Board(folder)
    except OSError as error:
        raise not_written(folder, error) from error


def leave(config: TrainConfig, ready: Prepared, history: History, report: Report, page: Page | None) -> None:
    """The last words of a run: its files, the verdict on them, every step as a line, and the page."""
    from finitune.files.writer import write_text

    folder = ready.run.folder.path
    finished = history.finished
    if finished:
        report.artifacts.update({name: str(path) for name, path in finished.paths.items()})
        report.figures["ended"] = finished.reason
        report.figures["verified"] = ready.exporter.last
        report.tables.append(ready.exporter.table())
    report.artifacts.update({name: str(path) for name, path in history.log(folder).items()})
    if page and config.logging.report:
        write_text(folder / PAGE, page(config, history, report))
        report.artifacts["report"] = str(folder / PAGE)
    report.tables = [table for table in report.tables if table.title != SITES]  # told by --explain, and on the page


class Teller:
    """Tells the person who waits what happens: a status line, and what should stay to be read."""

    def __init__(self, progress: Progress):
        self.progress, self.end, self.started = progress, 0, False

    def __call__(self, event: events.Event) -> None:
        """Show one event."""
        from finitune.training import events

        match event:
            case events.Started():
                self.end = event.steps
                self.progress.tell(arithmetic(event))
                self.progress.start(STAGE, event.steps - event.first_step)
                self.started = True
            case events.Stepped():
                self.progress.advance(STAGE, 1)
                self.progress.say(STAGE, status(event, self.end))
            case events.Told():
                self.progress.tell(f"step {event.step}: {event.finding.code}: {event.finding.message}")
            case events.Saved():
                names = ", ".join(str(path) for path in event.paths.values())
                self.progress.tell(f"step {event.step}: saved, read back and checked: {names}")
            case events.Validated():
                self.progress.tell(f"step {event.step}: validation loss {event.loss:.5f}")
            case events.RolledBack():
                self.progress.tell(f"step {event.step}: back to step {event.to_step}: {event.reason}")
            case events.Previewed():
                self.progress.tell(f"step {event.step}: drawn: {', '.join(map(str, event.paths))}")
            case events.Measured():
                self.progress.tell(forecast(event))
            case events.Finished():
                if self.started:
                    self.progress.finish(STAGE)


def arithmetic(started: events.Started) -> str:
    """What a step is made of, in a line."""
    return (
        f"{started.batch} (batch) x {started.accumulation} (accumulated) x {started.devices} (devices)"
        f" = {started.effective_batch} pictures a step;"
        f" {started.steps_per_epoch} steps an epoch, {started.steps} in all"
    )


def forecast(measured: events.Measured) -> str:
    """What one measured step says of the run, in a line."""
    width, height = measured.bucket
    end = time.strftime("%a %H:%M", time.localtime(time.time() + measured.left_seconds))
    return (
        f"measured: {measured.step_seconds:.2f} s a step at {width} x {height}, {measured.save_seconds:.1f} s a save,"
        f" {measured.memory_peak / 2**30:.1f} GiB at the peak;"
        f" {measured.left_seconds / 60:.0f} min to the end, at {end}"
    )


def status(step: events.Stepped, end: int) -> str:
    """The status line: losses, rate, speed, memory, time left, and what the guard has counted."""
    left = max(end - step.step, 0) * step.seconds
    counted = ", ".join(f"{count} {name}" for name, count in step.counts.items() if count and name != "ok")
    line = (
        f"loss {step.loss:.4f} ({step.smoothed:.4f}), lr {step.rate:.3g}, {1 / max(step.seconds, 1e-9):.2f} step/s,"
        f" {step.memory / 2**30:.1f} GiB, {left / 60:.0f} min left"
    )
    return f"{line}; {counted}" if counted else line
