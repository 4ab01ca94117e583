"""Memory, previews and resuming in the field (kind 12: RES-01, RES-03, RES-04, RES-05): each report's own repro."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from finitune.errors import UsageError
from finitune.files.tensorfile import TensorFile
from finitune.report import Level
from finitune.training import compute_precision, events
from finitune.verbs.train import catch_interrupt, export
from finitune.verbs.train.prepare import PreparedRun
from tests.training_made import (
    FEW,
    FEW_BLOCKS,
    Outcome,
    Playground,
    a_model_that_is_read_once,
    a_playground,
    meddling_with_runs,
    one_cache,
    pico,
    trained,
)

__all__ = ["a_model_that_is_read_once", "a_playground", "meddling_with_runs", "one_cache"]

PREVIEWED = {
    "network": FEW,
    "training": {"max_train_steps": 10},
    "preview": {"sample_every_n_steps": 5, "sample_prompts": ["a pear"]},
    "saving": {"save_every_n_steps": 5},
}
"""Ten steps, with a picture and a file at every fifth."""


def resumed(playground: Playground, **sections: Any) -> Outcome:
    """Go on after four steps, under changed options."""
    playground.train(network=FEW, training={"max_train_steps": 4})
    saving = {"resume": "auto"}
    return playground.train(**{"network": FEW, **sections, "saving": saving})


# --- RES-01: resume with a changed rank or module set -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"network": {**FEW, "network_dim": 8, "network_alpha": 8}}, "rank"),
        ({"network": {"only_patterns": [*FEW_BLOCKS, r"blocks\.2\..*proj"]}}, "blocks.2.attn1.to_q"),
        ({"network": {"only_patterns": [r"blocks\.[15]\.(self_attn|mlp)\..*"]}}, "blocks.1.attn1.to_q"),
        ({"network": {**FEW, "algorithm": "loha"}}, "loha"),
        ({"optimizer": {"optimizer_type": "SGD"}}, "SGD"),
    ],
    ids=["rank", "more modules", "other modules of the same shapes", "algorithm", "optimiser"],
)
def test_res_01_a_state_of_another_training_is_refused_before_it_is_loaded(playground: Playground, changes, told: str):
    outcome = resumed(playground, **changes)
    (finding,) = outcome.findings("STATE-DIFFERS")
    assert finding.level is Level.ERROR
    assert told in f"{finding.message} {finding.evidence}"
    assert "network_weights" in finding.remedy or "optimi" in finding.remedy  # the adapter alone can be gone on from
    assert not outcome.of(events.StepTaken)


def test_res_01_a_changed_rate_goes_on_and_is_told(playground: Playground):
    outcome = resumed(playground, optimizer={"learning_rate": 1e-3})
    assert [step.step for step in outcome.of(events.StepTaken)] == [5, 6]
    assert outcome.reason == "done"
    changed = [
        finding for finding in outcome.report.findings if "learning_rate" in f"{finding.message}{finding.evidence}"
    ]
    assert len(changed) == 1 and changed[0].level is not Level.ERROR


def test_res_01_the_weights_alone_are_a_start_for_another_optimiser(playground: Playground):
    first = playground.train(network=FEW, training={"max_train_steps": 4})
    network = {**FEW, "network_weights": first.paths["kohya"]}
    outcome = playground.train(network=network, optimizer={"optimizer_type": "SGD", "learning_rate": 1e-2})
    assert outcome.reason == "done"
    assert outcome.validation[0] == pytest.approx(first.validation[-1], rel=1e-5)


# --- RES-03: a tensor is left on another device -----------------------------------------------------------------------


def test_res_03_nothing_is_offloaded_where_there_is_no_other_device(playground: Playground):
    outcome = playground.train(network=FEW, training={"offload_blocks": 2})
    (finding,) = outcome.findings("OFFLOAD-NEEDS-GPU")
    assert finding.subject == "training.offload_blocks" and finding.remedy
    assert outcome.events == []
    with (
        pytest.raises(UsageError, match="no GPU"),
        compute_precision.offload_blocks(nn.Linear(2, 2), 2, torch.device("cpu")),
    ):
        pass


def test_res_03_adapters_and_buffers_move_with_their_block():
    """As block offloading moves them: to the meta device, which stands for the other one; nothing stays behind."""
    from finitune.adapters.core import Target
    from finitune.adapters.layer import attach_adapters
    from finitune.adapters.new import create_adapter

    root = copy.deepcopy(pico().transformer).requires_grad_(False)
    block = root.transformer_blocks[1]
    name = "transformer_blocks.1.attn1.to_q"
    weight: Any = root.get_submodule(name).weight
    block.register_buffer("extra", torch.ones(3))
    with attach_adapters(
        root, {name: create_adapter(Target(weight, 2, 2.0), "lora", torch.Generator())}, trainable=True
    ):
        block.to("meta")
        devices = {tensor.device.type for tensor in (*block.parameters(), *block.buffers())}
        names = {tensor_name for tensor_name, _ in block.named_parameters()}
        assert any("held" in tensor_name for tensor_name in names)
        assert devices == {"meta"}
        rest = [p for n, p in root.named_parameters() if "transformer_blocks.1." not in n]
        assert {p.device.type for p in rest} == {"cpu"}


# --- RES-04: the preview kills the run before it is saved -------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA out of memory"), MemoryError(), ValueError("bad size")], ids=lambda e: type(e).__name__
)
def test_res_04_a_failing_preview_is_a_warning_after_the_file(
    playground: Playground, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    saved_before: list[bool] = []

    def fail(self, step: int):
        if step == 5:
            saved_before.append((playground.folder / "run" / "made-step00000005.safetensors").exists())
            raise error
        return ()

    monkeypatch.setattr(export.PreviewDrawer, "__call__", fail)
    outcome = playground.train(
        **PREVIEWED,
    )
    (finding,) = outcome.findings("PREVIEW-FAILED")
    assert saved_before == [True]
    assert finding.level is Level.WARNING and type(error).__name__ in finding.message and finding.remedy
    assert outcome.reason == "done" and outcome.report.exit_code == 0
    assert [event.step for event in outcome.of(events.PreviewsDrawn)] == [10]  # they do not stay off
    assert len(outcome.losses) == 10


def test_res_04_an_interrupted_preview_leaves_the_file_of_its_step(
    playground: Playground, monkeypatch: pytest.MonkeyPatch
):
    """A second Ctrl-C: at once, and the file of the step is there already."""

    def interrupt(self, step: int):
        if step == 5:
            raise KeyboardInterrupt
        return ()

    monkeypatch.setattr(export.PreviewDrawer, "__call__", interrupt)
    config = playground.config(
        **PREVIEWED,
    )
    with catch_interrupt(), pytest.raises(KeyboardInterrupt):
        trained(config)
    assert (playground.folder / "run" / "made-step00000005.safetensors").exists()
    rest = playground.train(network=FEW, training={"max_train_steps": 10}, saving={"resume": "auto"})
    assert [step.step for step in rest.of(events.StepTaken)] == [6, 7, 8, 9, 10]


# --- RES-05: nothing is learned ---------------------------------------------------------------------------------------


def test_res_05_a_cut_graph_ends_the_run_after_its_first_step(playground: Playground, meddle):
    def cut(ready: PreparedRun) -> None:
        whole = ready.run.learner.denoiser
        ready.run.learner.denoiser = lambda *asked: whole(*asked).detach()

    meddle(cut)
    outcome = playground.train(network=FEW)
    (finding,) = outcome.findings("TRAINS-NOTHING")
    assert finding.level is Level.ERROR and "non-reentrant" in finding.remedy
    assert outcome.report.exit_code == 1
    assert len(outcome.of(events.StepTaken)) == 1
    assert not list((playground.folder / "run").glob("*.safetensors"))


def test_res_05_an_optimiser_over_copies_ends_it_after_the_second(playground: Playground, meddle):
    def copies(ready: PreparedRun) -> None:
        make = ready.run.make_optimizer

        def over_copies():
            optimizer = make()
            for group in optimizer.param_groups:
                group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]
            return optimizer

        ready.run.make_optimizer = over_copies

    meddle(copies)
    outcome = playground.train(network=FEW)
    (finding,) = outcome.findings("TRAINS-NOTHING")
    assert "none of 24 trained tensors changed in 2 updates" in finding.message
    assert len(outcome.of(events.StepTaken)) == 2


def test_res_05_a_rate_of_zero_is_refused_before_the_start(playground: Playground):
    outcome = playground.train(network=FEW, optimizer={"learning_rate": 0.0})
    assert outcome.report.exit_code != 0
    assert any("learning_rate" in finding.subject for finding in outcome.report.findings)
    assert outcome.events == []


def test_res_05_a_module_that_is_never_called_is_a_warning_with_its_name(playground: Playground, meddle):
    unused = "transformer_blocks.4.attn1.to_v"

    def bypass(ready: PreparedRun) -> None:
        root: Any = ready.run.learner.precisions["transformer"].module
        block = root.get_submodule("transformer_blocks.4.attn1")
        block.to_v = block.to_v.base

    meddle(bypass)
    outcome = playground.train(network=FEW, training={"max_train_steps": 21})
    (finding,) = outcome.findings("TRAINS-NOTHING")
    assert finding.level is Level.WARNING
    assert finding.evidence["first sites"] == [f"transformer.{unused}"]
    assert outcome.reason == "done"
    assert TensorFile(outcome.paths["kohya"]).metadata["finitune_applied_steps"] == "21"


@pytest.mark.parametrize("precision", ["fp32", "current-half"])
def test_res_05_checkpointing_learns_in_every_module(playground: Playground, precision: str):
    outcome = playground.train(model={"precision": precision}, training={"gradient_checkpointing": True})
    ups = [t for name, t in TensorFile(outcome.paths["kohya"]).tensors() if "lora_up" in name]
    assert len(ups) == 60 and all(bool(up.any()) for up in ups)
    assert "TRAINS-NOTHING" not in outcome.codes
