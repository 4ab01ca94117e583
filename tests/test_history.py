"""What a run has told is there again when it is gone on with: in its log, and on its page."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finitune.report import Report
from finitune.training import events
from finitune.training.history import TrainingHistory, keep_events_until
from finitune.training.measurements import PeakMemoryTracker, check_memory_fit
from finitune.verbs.train import Request, format_measured_forecast, iter_train_events
from tests.training_made import FEW_BLOCKS, Playground, a_model_that_is_read_once, a_playground, one_cache  # noqa: F401

FEW = {"only_patterns": FEW_BLOCKS}
ANY = st.floats(allow_nan=False)
COUNTS = st.dictionaries(st.sampled_from(["ok", "skipped"]), st.integers(0, 9))
STEPPED = st.builds(
    events.StepTaken, st.integers(1, 9), st.integers(0, 3), ANY, ANY, ANY, ANY, ANY.filter(math.isfinite),
    st.booleans(), COUNTS, st.integers(0, 1 << 40),
)  # fmt: skip
VALIDATED = st.builds(events.ValidationMeasured, st.integers(0, 9), ANY, st.dictionaries(st.floats(0, 1), ANY))
RANGED = st.builds(events.RangesMeasured, st.integers(0, 9), st.dictionaries(st.text(max_size=5), ANY))


@given(st.lists(STEPPED, min_size=1), st.lists(VALIDATED), st.lists(RANGED))
@settings(deadline=None, max_examples=30)
def test_what_was_logged_is_read_back(tmp_path_factory, steps, validations, ranges):
    told, again = TrainingHistory(), TrainingHistory()
    for event in (*steps, *validations, *ranges):
        told.add(event)
    folder = tmp_path_factory.mktemp("run")
    told.log(folder)
    again.load_log(folder, 10)
    assert (again.steps, again.validations, again.ranges) == (told.steps, told.validations, told.ranges)


def step(number: int, loss: float = 0.5) -> events.StepTaken:
    return events.StepTaken(number, 0, loss, loss, 1e-3, 1.0, 0.1, True)


def test_a_nan_is_read_back_and_lines_that_are_no_steps_are_left_out(tmp_path: Path):
    history = TrainingHistory(steps=[step(1), step(2, math.nan)])
    path = history.log(tmp_path)["steps"]
    path.write_text(path.read_text() + '{"step": 3}\n[]\n3\n{"st\n')
    again = TrainingHistory()
    again.load_log(tmp_path, 3)
    assert [one.step for one in again.steps] == [1, 2] and math.isnan(again.steps[1].loss)


def test_steps_that_were_taken_twice_are_kept_to_the_last_time():
    steps = [step(number) for number in (1, 2, 3, 2, 3, 4)]
    assert [one.step for one in keep_events_until(steps, 3)] == [1, 2, 3, 2, 3]
    assert [one.step for one in keep_events_until(steps, 5)] == [1, 2, 3, 2, 3, 4]


def logged(folder: Path, name: str = "steps") -> list[int]:
    return [json.loads(line)["step"] for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_a_run_in_three_lives_has_one_log_and_one_page(playground: Playground):
    pages: list[TrainingHistory] = []

    def page(_config, history: TrainingHistory, _report) -> str:
        pages.append(history)
        return "a page"

    preview = {"sample_prompts": ["a red apple"], "sample_steps": 1, "sample_every_n_steps": 2}
    options = {"network": FEW, "preview": preview, "saving": {"resume": "auto"}}
    options["validation"] = {"validate_every_n_steps": 2}
    for end in (3, 6, 6):
        config = playground.config(**options, training={"max_train_steps": 6})
        taken: list[int] = []
        report = Report("train")
        for event in iter_train_events(config, report, page=page, stop=lambda: bool(taken) and taken[-1] == end):  # noqa: B023
            taken += [event.step] if isinstance(event, events.StepTaken) else []
        assert report.exit_code == 0 and report.figures["steps"] == end
    run = playground.folder / "run"
    assert [finding.code for finding in report.findings].count("RUN-WAS-OVER") == 1
    assert logged(run) == [1, 2, 3, 4, 5, 6] == [one.step for one in pages[-1].steps]
    assert logged(run, "validations") == [0, 2, 4, 6] == logged(run, "ranges")
    drawn = {one.step: one.paths for one in pages[-1].previews}
    assert {2, 4, 6} <= drawn.keys() and all(path.exists() for paths in drawn.values() for path in paths)


def test_a_run_that_is_killed_has_logged_what_its_last_state_needs(playground: Playground):
    run, seen = playground.folder / "run", []

    def stop() -> bool:
        seen.append(logged(run) if (run / "steps.jsonl").exists() else [])
        return False

    playground.train(stop=stop, network=FEW, saving={"save_every_n_steps": 2})
    assert seen == [[], [1, 2], [1, 2], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]


def test_measuring_alone_leaves_the_log_of_the_run_before(playground: Playground):
    playground.train(network=FEW)
    playground.train(asked=Request(dry_run=True), network=FEW)
    assert logged(playground.folder / "run") == [1, 2, 3, 4, 5, 6]


def test_a_new_run_does_not_keep_what_it_does_not_measure(playground: Playground):
    playground.train(network=FEW)
    playground.train(network=FEW, general={"validation_split": 0.0})
    assert not (playground.folder / "run" / "validations.jsonl").exists()


def test_measuring_tells_when_the_end_will_be(playground: Playground):
    saving = {"save_every_n_steps": 2, "save_every_n_epochs": 1}
    outcome = playground.train(asked=Request(dry_run=True), network=FEW, saving=saving)
    (measured,) = outcome.of(events.TrialStepMeasured)
    saves = 1 + 6 // 2 + 6 // 3  # the end, every two steps, and two epochs of three
    expected = 6 * measured.step_seconds + saves * measured.save_seconds
    assert measured.left_seconds == pytest.approx(expected)
    assert "0 min to the end, at " in format_measured_forecast(measured)
    hours = format_measured_forecast(dataclasses.replace(measured, left_seconds=7200.0))
    assert "120 min to the end" in hours


def test_what_is_done_already_is_not_offered_as_a_way_to_fit(playground: Playground):
    gib = 1 << 30
    measured = events.TrialStepMeasured(1.0, 1.0, None, 11 * gib, 10 * gib, (64, 64), 1)
    finding = check_memory_fit(
        measured, playground.config(training={"gradient_checkpointing": True, "train_batch_size": 1})
    )
    assert finding.code == "FITS-BARELY" and "1.80 more than is safe" in finding.message
    assert "gradient_checkpointing" not in finding.remedy and "train_batch_size" not in finding.remedy
    assert "fp8" in finding.remedy and "offload_blocks" in finding.remedy
    assert "gradient_checkpointing" in check_memory_fit(measured, playground.config()).remedy


def test_a_container_has_the_memory_that_it_is_given(monkeypatch):
    import psutil

    machine = psutil.virtual_memory().total
    for limit, total in ((None, machine), (1 << 20, 1 << 20), (machine + 1, machine)):
        monkeypatch.setattr("finitune.training.measurements.read_cgroup_memory", lambda limit=limit: (limit, 0))
        assert PeakMemoryTracker(torch.device("cpu")).total() == total
