"""How a training ends, before its time or not: by wish, by a full disk, a failing preview, a lack of memory."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from finitune.files import writer
from finitune.files.tensorfile import TensorFile
from finitune.models.loaded import DenoiserCallable
from finitune.progress import SilentProgress
from finitune.report import Level
from finitune.training import events
from finitune.training.checkpoint import find_last_state
from finitune.training.run_folder import RunFolder
from finitune.verbs.train import Request, TrainEventReporter, catch_interrupt, export, run
from finitune.verbs.train.prepare import PreparedRun
from tests.training_made import (
    FEW,
    Playground,
    a_model_that_is_read_once,
    a_playground,
    meddling_with_runs,
    one_cache,
)

__all__ = ["a_model_that_is_read_once", "a_playground", "meddling_with_runs", "one_cache"]


def files_in(folder: Path) -> set[str]:
    """What a user sees of a run."""
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


# --- by wish ---------------------------------------------------------------------------------------------------------


def test_a_wish_ends_it_after_the_step_with_a_file_and_code_0(playground: Playground):
    asked = iter([False, False, True])
    outcome = playground.train(stop=lambda: next(asked), network=FEW)
    assert outcome.reason == "stopped"
    assert [step.step for step in outcome.of(events.StepTaken)] == [1, 2, 3]
    assert outcome.report.exit_code == 0
    assert outcome.paths["kohya"].name == "made-step00000003.safetensors"
    assert find_last_state(playground.folder / "run", "made")[0] == outcome.paths["state"]


def test_what_was_stopped_goes_on_to_the_same_bits(playground: Playground):
    options = {"network": {**FEW, "network_dropout": 0.1}, "optimizer": {"ema_decay": 0.5, "lr_scheduler": "cosine"}}
    whole = playground.train(**options, saving={"output_dir": playground.folder / "whole"})
    asked = iter([False, False, True])
    playground.train(**options, stop=lambda: next(asked))
    rest = playground.train(**options, saving={"resume": "auto"})
    assert [step.step for step in rest.of(events.StepTaken)] == [4, 5, 6]
    assert rest.losses == whole.losses[3:]
    one, two = (dict(TensorFile(outcome.paths["kohya"]).tensors()) for outcome in (whole, rest))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_the_first_control_c_is_a_wish_and_the_second_stops_at_once():
    with catch_interrupt() as stop:
        assert not stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGINT of another process")
def test_control_c_in_a_shell(playground: Playground):
    """A real process, interrupted once it trains: code 0, and a file of the step that it was in."""
    from finitune.config.read import dump_config

    config = playground.folder / "train.toml"
    config.write_text(dump_config(playground.config(network=FEW, training={"max_train_steps": 1000})), encoding="utf-8")
    program = f"""
import os, signal, sys
from pathlib import Path
from finitune.verbs.train import Request, run
from finitune.progress import SilentProgress
class Impatient(SilentProgress):
    def advance(self, stage, count=1):
        if stage == "training":
            os.kill(os.getpid(), signal.SIGINT)
report = run(Request(config=Path({str(config)!r})), progress=Impatient())
sys.exit(report.exit_code or (report.figures["ended"] != "stopped"))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "made-step00000001.safetensors" in files_in(playground.folder / "run")


class CountedProgress(SilentProgress):
    """Where the bar stands after each event."""

    def __init__(self) -> None:
        self.done: list[int] = [0]

    def advance(self, name: str, count: int = 1) -> None:
        self.done.append(self.done[-1] + count)


def test_the_bar_goes_back_with_the_run_and_ends_at_its_end():
    """From step 2 to 6; step 4 is left out without a word; after 5 back to 3, and on."""
    progress = CountedProgress()
    tell = TrainEventReporter(progress)
    tell(events.TrainingStarted(2, 6, 6, 1, 1, 1, 10))
    taken = [events.StepTaken(step, 0, 1.0, 1.0, 1e-4, 1.0, 0.1, True) for step in (3, 5, 4, 5, 6)]
    for event in (*taken[:2], events.StepsRolledBack(5, 3, "NaN"), *taken[2:], events.TrainingFinished(6, 1, "done")):
        tell(event)
    assert progress.done == [0, 1, 3, 1, 2, 3, 4]


# --- what is asked for without training ------------------------------------------------------------------------------


def test_explain_lists_the_sites_and_writes_nothing(playground: Playground):
    outcome = playground.train(asked=Request(explain=True), network=FEW)
    assert outcome.events == []
    (table,) = (table for table in outcome.report.tables if table.title == "sites")
    assert sum(int(row[-1]) for row in table.rows) == 12
    assert outcome.report.ok
    assert not (playground.folder / "run").exists()


def test_a_dry_run_measures_and_leaves_no_adapter(playground: Playground):
    outcome = playground.train(asked=Request(dry_run=True), network=FEW)
    (measured,) = outcome.events
    assert isinstance(measured, events.TrialStepMeasured)
    assert measured.step_seconds > 0 and measured.batch == 2 and measured.bucket == (64, 64)
    assert outcome.findings("FITS")
    assert not any(name.endswith(".safetensors") for name in files_in(playground.folder / "run"))


def test_measuring_changes_nothing(playground: Playground, meddle):
    """The first loss of a run is that of a run that was not measured before."""
    measured = playground.train(network=FEW)
    first: list[float] = []

    def step(ready: PreparedRun) -> None:
        run = ready.run
        batches = [batch for micro in run.course.select_micro_batches(0, 0) if (batch := run.load(micro))]
        first.append(run.differentiator.gradient(batches, 0).loss)

    meddle(step)
    playground.train(network=FEW, training={"max_train_steps": 1})
    assert measured.losses[0] == first[0]


# --- the folder, the disk, the preview -------------------------------------------------------------------------------


def test_a_folder_in_use_is_refused_and_untouched(playground: Playground):
    with RunFolder(playground.folder / "run"):
        outcome = playground.train(network=FEW)
    (finding,) = outcome.findings("RUN-FOLDER-LOCKED")
    assert (outcome.report.exit_code, finding.level) == (2, Level.ERROR)
    assert files_in(playground.folder / "run") == set()


def test_the_last_files_are_kept_and_the_others_go(playground: Playground):
    playground.train(network=FEW, saving={"save_every_n_steps": 1, "save_last_n": 2, "save_as": ["kohya", "comfy"]})
    kept = {"made-step00000005", "made-step00000006"}
    wanted = {f"{name}{ending}" for name in kept for ending in (".safetensors", "-comfy.safetensors", "-state")}
    wanted |= {"made.safetensors", "made-comfy.safetensors", "made-state", "config.toml"}
    wanted |= {f"{name}.jsonl" for name in ("steps", "validations", "ranges")}
    assert files_in(playground.folder / "run") == wanted


def test_a_full_disk_is_told_before_the_first_step(playground: Playground, monkeypatch: pytest.MonkeyPatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1000, 999, 1))
    outcome = playground.train(network=FEW)
    (finding,) = outcome.findings("DISK-FULL")
    assert finding.evidence["free_bytes"] == 1 and finding.remedy
    assert not outcome.of(events.StepTaken)


def test_a_disk_that_fills_up_leaves_the_last_good_files(
    playground: Playground, monkeypatch: pytest.MonkeyPatch, meddle
):
    """The third save of the run finds no room: an error that names it; what was saved before is whole."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    original = writer.flush_to_disk

    def fill(ready: PreparedRun) -> None:
        export, number = ready.run.hooks.export, iter(range(10))

        def failing(*args):
            if next(number) == 3:  # after the measurement and two saves
                monkeypatch.setattr(writer, "flush_to_disk", refuse)
            return export(*args)

        def refuse(*_):
            raise full

        object.__setattr__(ready.run.hooks, "export", failing)

    meddle(fill)
    outcome = playground.train(network=FEW, saving={"save_every_n_steps": 2})
    monkeypatch.setattr(writer, "flush_to_disk", original)
    finding = outcome.findings("FILE-NOT-WRITTEN")[0]
    assert finding.subject.endswith("made-step00000006.safetensors")
    assert "space" in finding.message and finding.remedy
    assert outcome.report.exit_code == 1
    run_folder = playground.folder / "run"
    state, findings = find_last_state(run_folder, "made")
    assert state == run_folder / "made-step00000004-state" and findings == []
    assert not list(run_folder.glob(".discarded*")) and not list(run_folder.glob("*.partial*"))
    again = playground.train(network=FEW, saving={"save_every_n_steps": 2, "resume": "auto"})
    assert again.reason == "done" and again.report.ok


def test_a_preview_that_fails_is_told_once_and_costs_nothing(playground: Playground, monkeypatch: pytest.MonkeyPatch):
    def fail(self, step: int):
        if step:
            assert (playground.folder / "run" / f"made-step{step:08d}.safetensors").exists()  # files come first
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(export.PreviewDrawer, "__call__", fail)
    preview = {"sample_every_n_steps": 2, "sample_prompts": ["a pear"]}
    plain = playground.train(network=FEW)
    outcome = playground.train(network=FEW, preview=preview, saving={"save_every_n_steps": 2})
    (finding,) = outcome.findings("PREVIEW-FAILED")
    assert finding.level is Level.WARNING and "out of memory" in finding.message
    assert outcome.reason == "done" and outcome.report.exit_code == 0
    assert outcome.losses == plain.losses


def test_pictures_are_drawn_with_the_adapter_and_change_nothing(playground: Playground):
    preview = {"sample_every_n_steps": 3, "sample_at_first": True, "sample_prompts": ["a pear"], "sample_steps": 2}
    network = {**FEW, "network_dropout": 0.2}
    plain = playground.train(network=network)
    outcome = playground.train(network=network, preview=preview, optimizer={"learning_rate": 5e-3})
    drawn = [event.paths[0].read_bytes() for event in outcome.of(events.PreviewsDrawn)]
    assert [event.step for event in outcome.of(events.PreviewsDrawn)] == [0, 3, 6]
    assert len(set(drawn)) == 3
    assert outcome.losses == plain.losses


# --- memory ----------------------------------------------------------------------------------------------------------


def short_of_memory(denoiser: DenoiserCallable, largest: int, error: type[BaseException]) -> DenoiserCallable:
    """A denoiser that fails on more than `largest` samples in training."""

    def answer(noisy: Tensor, sigma: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
        if len(noisy) > largest and torch.is_grad_enabled():
            raise error("CUDA out of memory. Tried to allocate 2.00 GiB")
        return denoiser(noisy, sigma, conditioning)

    return answer


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, RuntimeError])
def test_a_lack_of_memory_halves_the_micro_batches_and_is_told(playground: Playground, meddle, error):
    batch = {"train_batch_size": 4}
    roomy = playground.train(network=FEW, training=batch)
    short: list[PreparedRun] = []

    def take_memory_at_step_2(ready: PreparedRun) -> None:
        learner, run = ready.run.learner, ready.run
        plenty = learner.denoiser

        def stop() -> bool:
            learner.denoiser = short_of_memory(plenty, 2, error)
            return False

        object.__setattr__(run.hooks, "stop", stop)
        short.append(ready)

    meddle(take_memory_at_step_2)
    outcome = playground.train(network=FEW, training=batch)
    (finding,) = outcome.findings("MEMORY-HALVED")
    assert finding.level is Level.WARNING and finding.evidence["split"] == 2
    assert finding.evidence["step"] != 0
    assert short[0].run.differentiator.split == 2
    assert outcome.reason == "done"
    assert outcome.losses == pytest.approx(roomy.losses, rel=1e-5)
    assert outcome.validation == pytest.approx(roomy.validation, rel=1e-5)


def test_a_run_that_does_not_fit_says_so_before_it_begins(playground: Playground, meddle):
    def take_memory(ready: PreparedRun) -> None:
        ready.run.learner.denoiser = short_of_memory(ready.run.learner.denoiser, 1, torch.OutOfMemoryError)

    meddle(take_memory)
    outcome = playground.train(network=FEW)
    (finding,) = outcome.findings("FITS-BARELY")
    assert finding.evidence["split"] == 2
    assert "gradient_checkpointing" in finding.remedy
    assert outcome.reason == "done"
    assert not outcome.findings("MEMORY-HALVED")  # told already


def test_one_sample_that_does_not_fit_ends_it(playground: Playground, meddle):
    def take_all_memory(ready: PreparedRun) -> None:
        ready.run.learner.denoiser = short_of_memory(ready.run.learner.denoiser, 0, torch.OutOfMemoryError)

    meddle(take_all_memory)
    outcome = playground.train(network=FEW)
    (finding,) = outcome.findings("OUT-OF-MEMORY")
    assert outcome.report.exit_code == 1 and "gradient_checkpointing" in finding.remedy
    assert not outcome.of(events.StepTaken)


def test_the_journey_reports_what_ends_it(playground: Playground):
    report = run(Request(config=playground.folder / "nothing.toml"))
    assert report.exit_code != 0
    assert report.findings[0].remedy
