"""finitune train: an adapter for Anima, from a configuration to files that were checked."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from finitune.config.read import LoadedConfig, dump_config, read_train_config, validate_config
from finitune.config.schema import TrainConfig
from finitune.config.template import build_config_template
from finitune.errors import FileError, FinituneError, UsageError
from finitune.files.writer import make_not_written_error, write_text
from finitune.importers.recognise import is_file, read_foreign_config
from finitune.machine import processes
from finitune.progress import Progress, SilentProgress
from finitune.report import Finding, Level, Report
from finitune.training import events
from finitune.training.checkpoint import find_last_state, iterate_state_folders, load_run_state
from finitune.training.history import TensorBoardLogger, TrainingHistory
from finitune.training.loop import Trainer
from finitune.training.measurements import check_memory_fit
from finitune.training.train_state import TrainingRun, TrainState
from finitune.verbs.shared.options import OutPath
from finitune.verbs.train.export import restore_run_history
from finitune.verbs.train.inputs import iter_measurement_events
from finitune.verbs.train.prepare import PreparedRun, TrainingStopped, open_prepared_run, stop_on_report_errors

_PROGRESS_STAGE = "training"
_SIGNAL_ECHO_SECONDS = 2.0
"""torchrun sends its processes once more what the terminal has sent to all: that is no second wish."""
EFFECTIVE_CONFIG_NAME = "config.toml"
RUN_PAGE_NAME = "report.html"
_SITES_TABLE_TITLE = "sites"


@dataclass(frozen=True)
class Request:
    """What to train by, and how far to go."""

    config: Path | None = None
    """A training configuration of ours, as `--init` writes one."""
    _: KW_ONLY
    source: Annotated[str | None, Parameter(name="--from")] = None
    """Another program's configuration, or its command line in quotes: kohya's sd-scripts (TOML, flags, dataset TOML),
    kohya_ss GUI, ai-toolkit, OneTrainer, SimpleTuner, diffusion-pipe. The report tells what became of each key."""
    init: bool = False
    """Write a configuration with every option explained, and stop."""
    explain: bool = False
    """List the modules that would get an adapter, with the reason for each, and stop."""
    dry_run: bool = False
    """Look at everything, make the caches, measure one step, a save and a preview, and stop."""
    resume: bool = False
    """Go on from the last state in the output folder."""
    out: OutPath = None
    """The file for `--init`; else the folder of the run, in place of the configuration's."""


TrainPageRenderer = Callable[["TrainConfig", "TrainingHistory", Report], str]


def run(request: Request, page: TrainPageRenderer | None = None, progress: Progress | None = None) -> Report:
    """Train as `request` says; `page` makes the run's report.html of its history."""
    report = Report("train")
    try:
        if request.init:
            return write_commented_config(request, report)
        loaded = load_requested_config(request, report)
        report.findings.extend(loaded.findings)
        config = update_saving_options(loaded.config, resume="auto") if request.resume else loaded.config
        with catch_interrupt() as stop:
            tell = TrainEventReporter(progress or SilentProgress())
            for event in iter_train_events(config, report, progress, request=request, page=page, stop=stop):
                tell(event)
    except TrainingStopped:
        pass
    except FinituneError as error:
        return report.fail(error)
    return report


def write_commented_config(request: Request, report: Report) -> Report:
    """Write a configuration with every option explained."""
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
    write_text(path, build_config_template())
    report.artifacts["config"] = str(path)
    return report


def load_requested_config(request: Request, report: Report) -> LoadedConfig:
    """The configuration file, or the imported one; raises UsageError where neither or both are named."""
    if (request.config is None) == (request.source is None):
        raise UsageError(
            "name one configuration: our own, or another program's with --from",
            code="CONFIG-NOT-NAMED",
            subject="train",
            remedy="finitune train CONFIG.toml, or finitune train --from FILE; finitune train --init writes a new one.",
        )
    if request.config is None:
        return import_foreign_config(request.source or "", request.out, report)
    try:
        loaded = read_train_config(request.config)
    except UsageError as error:
        if error.code != "CONFIG-FOREIGN":
            raise
        return import_foreign_config(str(request.config), request.out, report)
    return (
        loaded
        if request.out is None
        else replace(loaded, config=update_saving_options(loaded.config, output_dir=request.out))
    )


def update_saving_options(config: TrainConfig, **saving: object) -> TrainConfig:
    """The same configuration with other options of [saving]."""
    return config.model_copy(update={"saving": config.saving.model_copy(update=saving)})


def import_foreign_config(source: str, out: Path | None, report: Report) -> LoadedConfig:
    """Another program's configuration in our terms; `out` is the run's folder where it names none, or another.

    The account of its keys is in the report, whatever comes of it. Raises Stopped where the account has errors.
    """
    imported = read_foreign_config(source)
    report.tables.append(imported.table())
    report.figures.update(program=imported.program, keys=imported.table().as_dicts())
    report.findings.extend(imported.findings)
    stop_on_report_errors(report)
    document = dict(imported.document)
    if out is not None:
        saving = document.get("saving")
        document["saving"] = {**(saving if isinstance(saving, dict) else {}), "output_dir": str(out)}
    path = Path(source)
    beside = path.parent if is_file(path) else None
    config, findings = validate_config(document, source[:60] if beside is None else source, beside=beside)
    return LoadedConfig(config, findings, imported, path)


@contextmanager
def catch_interrupt() -> Iterator[Callable[[], bool]]:
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
        if wished and not (processes.read_world_size() > 1 and now - wished[0] < _SIGNAL_ECHO_SECONDS):
            signal.signal(signal.SIGINT, signal.default_int_handler)  # `before` may ignore it: in the background, say
            signal.raise_signal(number)
        wished.append(now)

    signal.signal(signal.SIGINT, hear)
    try:
        yield lambda: bool(wished)
    finally:
        signal.signal(signal.SIGINT, before)


def iter_train_events(
    config: TrainConfig,
    report: Report,
    progress: Progress | None = None,
    *,
    request: Request | None = None,
    page: TrainPageRenderer | None = None,
    stop: Callable[[], bool] = bool,
) -> Iterator[events.TrainingEvent]:
    """Prepare, measure and train, yielding what happens; at the end the report has findings, figures and files."""
    request = request or Request()
    history = TrainingHistory()
    with open_prepared_run(config, report, progress, explain=request.explain, stop=stop) as ready:
        progressing = TrainState.create(ready.run)
        state = resume_training(config, ready.run, progressing, report)
        if state:
            restore_run_history(history, state.parent, progressing.step)
        if ready.run.ranks.main:  # only now: a run that is refused leaves that of the run before
            path = ready.run.folder.path / EFFECTIVE_CONFIG_NAME
            write_text(path, dump_config(config))
            report.artifacts["config"] = str(path)
        board = open_run_tensorboard(config, ready.run)
        try:
            for event in iter_run_events(config, ready.run, progressing, report, dry=request.dry_run):
                history.add(event)
                if board:
                    board.add(event)
                if isinstance(event, events.CheckpointSaved) and ready.run.ranks.main:
                    history.log(ready.run.folder.path)  # whoever goes on from this state finds the steps to it
                yield event
        except FinituneError as error:
            report.fail(error)  # before the page is made, which should say why
            raise TrainingStopped from error
        finally:
            report.findings.extend(history.findings(progressing.guard.findings()))
            report.figures.update(history.figures())
            if ready.run.ranks.main:
                write_run_results(config, ready, history, report, page)


def iter_run_events(
    config: TrainConfig, run: TrainingRun, progressing: TrainState, report: Report, *, dry: bool
) -> Iterator[events.TrainingEvent]:
    """The measurement, and the run itself from its first step or from where it was left."""
    for event in iter_measurement_events(run, progressing.step):
        if isinstance(event, events.TrialStepMeasured):
            report.findings.append(check_memory_fit(event, config))
        yield event
    if not dry:
        yield from Trainer(run, progressing).events()


def resume_training(config: TrainConfig, run: TrainingRun, progressing: TrainState, report: Report) -> Path | None:
    """Go on from the state that is asked for, and return it if one is there; raises where it is of another training."""
    saving = config.saving
    if saving.resume == "never":
        if next(iterate_state_folders(run.folder.path, saving.output_name), None):
            message = "states of an earlier run are here; this one begins anew and will write over them"
            remedy = "To go on from them: finitune train CONFIG --resume"
            report.add(Level.WARNING, "RUN-BEGINS-ANEW", str(run.folder.path), message, remedy=remedy)
        return None
    path: Path | None = saving.resume if isinstance(saving.resume, Path) else None
    if path is None:
        path, findings = find_last_state(run.folder.path, saving.output_name)
        if path is None and findings:
            raise make_no_whole_state_error(findings[0])
        report.findings.extend(findings)
    if path is None:
        report.add(Level.NOTE, "NOTHING-TO-RESUME", str(run.folder.path), "no state is here; the run begins anew")
        return None
    state, findings = load_run_state(path, run.manifest)
    report.findings.extend(findings)
    progressing.load(run, state)
    report.add(Level.NOTE, "RESUMED", str(path), f"the run goes on at step {state.step}")
    if state.step >= run.total_steps:
        message = f"the run was over: {run.total_steps} steps are asked for, and {state.step} are done"
        remedy = "To train on, raise max_train_steps or max_train_epochs."
        report.add(Level.WARNING, "RUN-WAS-OVER", str(path), message, remedy=remedy, step=state.step)
    return path


def make_no_whole_state_error(damaged: Finding) -> FileError:
    """The error where states are here and none can be gone on from: a new run would write over what they belong to."""
    return FileError(
        f"no state here is whole: {damaged.message}",
        code=damaged.code,
        subject=damaged.subject,
        remedy="Begin from the adapter file beside it: network_weights. To begin anew, delete it, or resume = 'never'.",
    )


def open_run_tensorboard(config: TrainConfig, run: TrainingRun) -> TensorBoardLogger | None:
    """TensorBoard's writer, where it is asked for, of the main process."""
    if config.logging.log_with == "none" or not run.ranks.main:
        return None
    folder = config.logging.logging_dir or run.folder.path / "logs"
    try:
        return TensorBoardLogger(folder)
    except OSError as error:
        raise make_not_written_error(folder, error) from error


def write_run_results(
    config: TrainConfig, ready: PreparedRun, history: TrainingHistory, report: Report, page: TrainPageRenderer | None
) -> None:
    """The last words of a run: its files, the verdict on them, every step as a line, and the page."""
    folder = ready.run.folder.path
    finished = history.finished
    if finished:
        report.artifacts.update({name: str(path) for name, path in finished.paths.items()})
        report.figures["ended"] = finished.reason
        report.figures["verified"] = ready.exporter.last
        report.tables.append(ready.exporter.table())
    report.artifacts.update({name: str(path) for name, path in history.log(folder).items()})
    if page and config.logging.report:
        write_text(folder / RUN_PAGE_NAME, page(config, history, report))
        report.artifacts["report"] = str(folder / RUN_PAGE_NAME)
    report.tables = [
        table for table in report.tables if table.title != _SITES_TABLE_TITLE
    ]  # told by --explain, and on the page


class TrainEventReporter:
    """Tells the person who waits what happens: a status line, and what should stay to be read."""

    def __init__(self, progress: Progress):
        self.progress, self.step, self.end, self.started = progress, 0, 0, False

    def move(self, step: int) -> None:
        """Show a step as done, and none behind it: a run may go back, or pass a step that has no picture left."""
        self.progress.advance(_PROGRESS_STAGE, step - self.step)
        self.step = step

    def __call__(self, event: events.TrainingEvent) -> None:
        """Show one event."""
        match event:
            case events.TrainingStarted():
                self.step, self.end = event.first_step, event.steps
                self.progress.tell(format_step_arithmetic(event))
                self.progress.start(_PROGRESS_STAGE, event.steps - event.first_step)
                self.started = True
            case events.StepTaken():
                self.move(event.step)
                self.progress.say(_PROGRESS_STAGE, format_train_status(event, self.end))
            case events.FindingRaised():
                self.progress.tell(f"step {event.step}: {event.finding.code}: {event.finding.message}")
            case events.CheckpointSaved():
                names = ", ".join(str(path) for path in event.paths.values())
                self.progress.tell(f"step {event.step}: saved, read back and checked: {names}")
            case events.ValidationMeasured():
                self.progress.tell(f"step {event.step}: validation loss {event.loss:.5f}")
            case events.StepsRolledBack():
                self.move(event.to_step)
                self.progress.tell(f"step {event.step}: back to step {event.to_step}: {event.reason}")
            case events.PreviewsDrawn():
                self.progress.tell(f"step {event.step}: drawn: {', '.join(map(str, event.paths))}")
            case events.TrialStepMeasured():
                self.progress.tell(format_measured_forecast(event))
            case events.TrainingFinished():
                if self.started:
                    self.progress.finish(_PROGRESS_STAGE)


def format_step_arithmetic(started: events.TrainingStarted) -> str:
    """What a step is made of, in a line."""
    return (
        f"{started.batch} (batch) x {started.accumulation} (accumulated) x {started.devices} (devices)"
        f" = {started.effective_batch} pictures a step;"
        f" {started.steps_per_epoch} steps an epoch, {started.steps} in all"
    )


def format_measured_forecast(measured: events.TrialStepMeasured) -> str:
    """What one measured step says of the run, in a line."""
    width, height = measured.bucket
    end = time.strftime("%a %H:%M", time.localtime(time.time() + measured.left_seconds))
    return (
        f"measured: {measured.step_seconds:.2f} s a step at {width} x {height}, {measured.save_seconds:.1f} s a save,"
        f" {measured.memory_peak / 2**30:.1f} GiB at the peak;"
        f" {measured.left_seconds / 60:.0f} min to the end, at {end}"
    )


def format_train_status(step: events.StepTaken, end: int) -> str:
    """The status line: losses, rate, speed, memory, time left, and what the guard has counted."""
    left = max(end - step.step, 0) * step.seconds
    counted = ", ".join(f"{count} {name}" for name, count in step.counts.items() if count and name != "ok")
    line = (
        f"loss {step.loss:.4f} ({step.smoothed:.4f}), lr {step.rate:.3g}, {1 / max(step.seconds, 1e-9):.2f} step/s,"
        f" {step.memory / 2**30:.1f} GiB, {left / 60:.0f} min left"
    )
    return f"{line}; {counted}" if counted else line
