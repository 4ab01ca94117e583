"""What is not finite is named by its place, never reaches the adapter, and costs next to nothing; kill -9, nothing.

Planted in a running training: in a picture's latents, in a caption's embedding, in a weight, in a gradient; and before
it: in the encoders, in the caches, in the base model. Each run is compared with the same one without the fault.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from finitune.datasets.items import TrainingBatch
from finitune.files.tensorfile import TensorFile
from finitune.models.anima.encode import AnimaEncoders
from finitune.models.pico import get_pico_plan_path
from finitune.precision.plan import PlanLine, PrecisionPlan
from finitune.report import Level
from finitune.training import events
from finitune.training.checkpoint import load_run_state
from finitune.training.guard import find_first_nonfinite
from finitune.verbs.train.prepare import PreparedRun
from tests.training_made import (
    FEW,
    Playground,
    a_model_that_is_read_once,
    a_playground,
    meddling_with_runs,
    one_cache,
    put_pictures,
)

__all__ = ["a_model_that_is_read_once", "a_playground", "meddling_with_runs", "one_cache"]

NAN = math.nan
LONG = {
    "training": {"max_train_steps": 60, "train_batch_size": 4},
    "optimizer": {"learning_rate": 3e-3, "lr_scheduler": "cosine"},
    "guard": {"snapshot_every": 10},
}
"""Long enough for the loss to say something."""
PARAMETER = "transformer.transformer_blocks.0.attn1.to_v.up"


def victim(ready: PreparedRun) -> str:
    """The picture that a fault is planted in."""
    return sorted(example.name for example in ready.run.course.examples)[3]


def spoil_batches(ready: PreparedRun, spoil: Callable[[TrainingBatch, int], TrainingBatch]) -> None:
    """Change every batch that the victim is in."""
    load, name = ready.run.load, victim(ready)

    def spoiled(micro, excluded=frozenset()):
        batch = load(micro, excluded)
        return spoil(batch, batch.names.index(name)) if batch and name in batch.names else batch

    ready.run.load = spoiled


def in_a_picture(ready: PreparedRun) -> str:
    def spoil(batch: TrainingBatch, place: int) -> TrainingBatch:
        latents = batch.latents.clone()
        latents[place, 0, 0, 0, 0] = NAN
        return replace(batch, latents=latents)

    spoil_batches(ready, spoil)
    return victim(ready)


def in_a_caption(ready: PreparedRun) -> str:
    def spoil(batch: TrainingBatch, place: int) -> TrainingBatch:
        context = batch.conditioning["context"].clone()
        context[place, 1, 0] = NAN
        return replace(batch, conditioning={"context": context})

    spoil_batches(ready, spoil)
    return victim(ready)


def after_step(ready: PreparedRun, step: int, change: Callable[[], None]) -> None:
    """Do something once, when that step is over."""
    counted = count(1)

    def stop() -> bool:
        if next(counted) == step:
            change()
        return False

    object.__setattr__(ready.run.hooks, "stop", stop)


def in_a_weight(ready: PreparedRun) -> str:
    parameter = dict(ready.run.learner.named_parameters())[PARAMETER]
    after_step(ready, 17, lambda: parameter.data.view(-1)[3].fill_(NAN) and None)
    return f"{PARAMETER}, element 3: nan"


def in_a_gradient(ready: PreparedRun) -> str:
    parameter = dict(ready.run.learner.named_parameters())[PARAMETER]
    armed = iter([True])

    def spoil(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        if next(armed, False):
            gradient.view(-1)[3] = NAN
        return gradient

    after_step(ready, 17, lambda: parameter.register_hook(spoil) and None)
    return f"{PARAMETER}, element 3: nan"


FAULTS = {
    "picture": (in_a_picture, "GUARD-QUARANTINED"),
    "caption": (in_a_caption, "GUARD-QUARANTINED"),
    "weight": (in_a_weight, "GUARD-ROLLED-BACK"),
    "gradient": (in_a_gradient, "GUARD-SKIPPED"),
}


def is_good(path: Path) -> bool:
    """Whether a file reads, is finite, and does something."""
    tensors = dict(TensorFile(path).tensors())
    ups = [tensor for name, tensor in tensors.items() if "lora_up" in name]
    return find_first_nonfinite(tensors.items()) is None and bool(ups) and all(bool(up.any()) for up in ups)


def test_a_planted_nan_is_named_and_the_run_ends_as_the_clean_one(playground: Playground, meddle):
    """Four of four: the place in a finding, a good file, and the last validation loss within 2 % of the clean run's."""
    put_pictures(playground.pictures, 24)
    clean = playground.train(**LONG)
    for name, (plant, code) in FAULTS.items():
        places: list[str] = []
        meddle(lambda ready, plant=plant, places=places: places.append(plant(ready)))
        outcome = playground.train(**LONG)
        (finding,) = outcome.findings(code)
        assert places[0] in f"{finding.subject} {finding.message}", name
        assert finding.level is Level.WARNING and finding.remedy
        assert len([found for found in outcome.codes if found.startswith("GUARD")]) == 1
        assert outcome.reason == "done" and outcome.report.exit_code == 0
        assert is_good(outcome.paths["kohya"])
        off = outcome.validation[-1] / clean.validation[-1] - 1
        print(f"NaN in a {name}: {outcome.validation[-1]:.5f} against {clean.validation[-1]:.5f}: {off:+.2%}")
        assert abs(off) <= 0.02, name


def test_a_picture_left_out_is_named_with_file_and_step(playground: Playground, meddle):
    meddle(in_a_picture)
    outcome = playground.train(network=FEW, training={"train_batch_size": 3})
    (finding,) = outcome.findings("GUARD-QUARANTINED")
    bad = [step for step in outcome.of(events.StepTaken) if not step.taken]
    assert len(bad) == 1
    assert finding.subject.startswith("pictures/")
    assert finding.evidence == {"step": bad[0].step - 1, "reason": "the loss is not finite"}
    assert f"from step {bad[0].step - 1} on" in finding.message
    assert bad[0].counts["quarantined"] == 1


def test_steps_without_a_picture_are_passed_over(playground: Playground, meddle):
    """One picture a step: that of the victim is empty from its second time on, which is no fault any more."""
    meddle(in_a_picture)
    options = {"train_batch_size": 1, "max_train_epochs": 6, "max_train_steps": None}
    outcome = playground.train(network=FEW, training=options)
    steps = outcome.of(events.StepTaken)
    assert sum(not step.taken for step in steps) == 1
    assert len(steps) == 6 * 6 - 5
    assert outcome.reason == "done" and "GUARD-ROLLED-BACK" not in outcome.codes


def test_a_weight_that_breaks_is_taken_back_to_the_same_bits(playground: Playground, meddle):
    options = {"network": FEW, "training": {"max_train_steps": 20}, "guard": {"snapshot_every": 5}}
    clean = playground.train(**options, saving={"output_dir": playground.folder / "clean"})
    meddle(in_a_weight)
    outcome = playground.train(**options)
    (back,) = outcome.of(events.StepsRolledBack)
    assert (back.step, back.to_step) == (18, 15)
    one, two = (load_run_state(run.paths["state"])[0] for run in (clean, outcome))
    assert all(torch.equal(one.adapter[name], two.adapter[name]) for name in one.adapter)
    assert two.facts["taken"] == one.facts["taken"] == 20


# --- before the first step -------------------------------------------------------------------------------------------


def test_a_picture_with_nan_is_refused_before_anything_is_made(playground: Playground):
    values = np.ones((64, 64), dtype=np.float32)
    values[5, 7] = NAN
    Image.fromarray(values).save(playground.pictures / "broken.tiff")
    (playground.pictures / "broken.txt").write_text("a broken one")
    outcome = playground.train(network=FEW)
    (finding,) = outcome.findings("PICTURE-NONFINITE")
    assert finding.evidence["first"] == (7, 5) and "broken.tiff" in finding.subject
    assert outcome.report.exit_code == 1 and outcome.events == []


def spoil_encoder(monkeypatch: pytest.MonkeyPatch, kind: str, is_victim: Callable[[object], bool]) -> None:
    """Let an encoder make NaN of what `is_victim` picks."""
    original = getattr(AnimaEncoders, kind)

    def spoiled(self, items):
        made = original(self, items)
        for item, result in zip(items, made, strict=True):
            if is_victim(item):
                (result if isinstance(result, Tensor) else result["context"]).view(-1)[0] = NAN
        return made

    monkeypatch.setattr(AnimaEncoders, kind, spoiled)


def own_cache(playground: Playground) -> dict[str, object]:
    return {"cache_dir": str(playground.folder / "own")}


def test_what_the_encoders_cannot_stand_is_left_out_by_name(playground: Playground, monkeypatch: pytest.MonkeyPatch):
    """A picture, and another one's caption."""
    first, second = sorted(playground.pictures.glob("*.png"))[:2]
    pixels, caption = np.array(Image.open(first).convert("RGB")), second.with_suffix(".txt").read_text().strip()
    spoil_encoder(monkeypatch, "latents", lambda shown: np.array_equal(shown.numpy(), pixels))  # type: ignore[attr-defined]
    spoil_encoder(monkeypatch, "texts", lambda told: told == caption)
    outcome = playground.train(network=FEW, training=own_cache(playground), general={"validation_split": 0})
    found = {finding.subject: finding.message for finding in outcome.findings("PICTURE-QUARANTINED")}
    assert found.keys() == {f"pictures/{first.name}", f"pictures/{second.name}"}
    assert "VAE" in found[f"pictures/{first.name}"] and "text encoder" in found[f"pictures/{second.name}"]
    assert outcome.reason == "done" and is_good(outcome.paths["kohya"])
    assert all(step.taken for step in outcome.of(events.StepTaken))


@pytest.mark.parametrize("kind", ["latents", "texts"])
def test_a_cache_entry_that_turned_into_nan_is_made_again(playground: Playground, kind: str):
    options = {"network": FEW, "training": own_cache(playground)}
    clean = playground.train(**options)
    path = sorted((playground.folder / "own" / kind).glob("*.safetensors"))[0]
    tensors = {name: torch.full_like(tensor, NAN) for name, tensor in load_file(path).items()}
    save_file(tensors, path, TensorFile(path).metadata)
    outcome = playground.train(**options)
    (finding,) = outcome.findings("CACHE-REMADE")
    assert finding.subject == TensorFile(path).metadata["subject"]
    assert outcome.losses == clean.losses
    assert find_first_nonfinite(load_file(path).items()) is None


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_base_model_with_nan_is_named_and_nothing_is_saved(playground: Playground, meddle, precision: str):
    site = "transformer_blocks.2.ff.net.2"

    def spoil(ready: PreparedRun) -> None:
        layer = ready.run.learner.precisions["transformer"].module.get_submodule(site)
        layer.weight.data[1, 2] = NAN  # type: ignore[union-attr, operator]

    meddle(spoil)
    outcome = playground.train(network=FEW, model={"precision": precision})
    (finding,) = outcome.findings("GUARD-STOPPED")
    assert finding.level is Level.ERROR and f"transformer.{site}.weight" in finding.message
    assert outcome.report.exit_code == 1 and outcome.reason == "given up"
    assert len(outcome.of(events.StepTaken)) == 1
    assert not list((playground.folder / "run").glob("*.safetensors"))


# --- when nothing helps ----------------------------------------------------------------------------------------------


def broken_from(step: int) -> Callable[[PreparedRun], None]:
    """A model that answers NaN to everything once that step is over."""

    def spoil(ready: PreparedRun) -> None:
        learner = ready.run.learner
        sound = learner.denoiser

        def answer(*asked) -> Tensor:
            return sound(*asked) * NAN

        after_step(ready, step, lambda: setattr(learner, "denoiser", answer))

    return spoil


def test_when_everything_is_nan_it_stops_with_the_last_good_file(playground: Playground, meddle):
    meddle(broken_from(8))
    options = {"training": {"max_train_steps": 500}, "guard": {"snapshot_every": 5}}
    outcome = playground.train(network=FEW, **options)
    assert outcome.reason == "given up" and outcome.report.exit_code == 1
    (finding,) = outcome.findings("GUARD-STOPPED")
    assert finding.level is Level.ERROR and finding.remedy
    steps = outcome.of(events.StepTaken)
    assert 0 < sum(not step.taken for step in steps) <= 16
    assert len({(found.code, found.subject) for found in outcome.report.findings}) == len(outcome.report.findings)
    assert outcome.paths["kohya"].name == "made-step00000005.safetensors"
    assert is_good(outcome.paths["kohya"])
    assert TensorFile(outcome.paths["kohya"]).metadata["finitune_applied_steps"] == "5"


# --- planned half ----------------------------------------------------------------------------------------------------


def plan_with(playground: Playground, exponent: int) -> Path:
    """The shipped plan with an exponent at one product that is far too small."""
    plan = PrecisionPlan.load(get_pico_plan_path())
    line = PlanLine("transformer_blocks.3.ff.net.2", exponent=exponent, reason="too small on purpose")
    changed = plan.components["transformer"].with_line(line)
    path = playground.folder / "plan.toml"
    replace(plan, components={**plan.components, "transformer": changed}).save(path)
    return path


def test_constants_that_are_exceeded_are_told_and_given_up(playground: Playground):
    measured = playground.train(model={"precision": "current-half"}, network=FEW)
    model = {"precision": "planned-half", "plan": plan_with(playground, -40)}
    outcome = playground.train(model=model, network=FEW)
    (finding,) = outcome.findings("PLAN-EXCEEDED")
    assert (
        finding.level is Level.WARNING and "measure their own" in finding.message and "current-half" in finding.remedy
    )
    assert all(step.taken for step in outcome.of(events.StepTaken))
    assert outcome.reason == "done"
    assert outcome.losses == pytest.approx(measured.losses, rel=1e-3)
    assert not load_run_state(outcome.paths["state"])[0].facts["planned"]


# --- kill -9 ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
def test_a_killed_training_leaves_whole_files_and_goes_on_to_the_same_bits(tmp_path: Path):
    """Three kills of the benchmark's 25."""
    program = Path(__file__).parents[1] / "benchmarks" / "kill.py"
    told = tmp_path / "kill.json"
    run = [sys.executable, str(program), "--kills", "3", "--steps", "8", "--json", str(told)]
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(told.read_text())
    assert (found["good"], found["kills"], found["wrong"]) == (3, 3, [])
    assert found["ends_compared"] >= 1


def test_pictures_are_not_blamed_for_a_rate_that_is_absurd(playground: Playground):
    """Weights of 1e30 are finite, and what they make of good pictures is not: the way leads back, and to a stop."""
    outcome = playground.train(network=FEW, optimizer={"learning_rate": 1e30})
    assert "GUARD-QUARANTINED" not in outcome.codes
    (stop,) = (finding for finding in outcome.findings("GUARD-STOPPED") if finding.subject.startswith("step"))
    assert "with the adapter of step" in stop.message and "rate" in stop.remedy
    assert outcome.reason == "given up" and outcome.report.exit_code == 1
    assert {back.to_step for back in outcome.of(events.StepsRolledBack)} == {0}


def test_a_bad_picture_is_still_told_from_an_adapter_that_went_too_far(playground: Playground, meddle):
    """Both at once: what is not finite with the last good adapter, either, is left out, and the adapter goes back."""
    meddle(in_a_picture)
    outcome = playground.train(network=FEW, optimizer={"learning_rate": 1e30}, guard={"max_rollbacks": 2})
    assert len({finding.subject for finding in outcome.findings("GUARD-QUARANTINED")}) <= 1
    assert len(outcome.of(events.StepsRolledBack)) == 3 and outcome.reason == "given up"
