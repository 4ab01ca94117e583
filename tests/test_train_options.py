"""What the options of a training do to a run: how it computes, how it is held in memory, and what it is shown."""

from __future__ import annotations

import math
from functools import partialmethod
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from finitune.files.tensorfile import TensorFile
from finitune.training import events
from finitune.training.checkpoint import load_run_state
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


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return dict(TensorFile(path).tensors())


def same(one: Path, other: Path) -> bool:
    """Whether two files hold the same bits."""
    left, right = tensors_of(one), tensors_of(other)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# --- how it computes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["planned-half", "current-half", "bf16"])
def test_every_precision_learns_what_fp32_learns(playground: Playground, precision: str):
    wanted = playground.train()
    found = playground.train(model={"precision": precision})
    assert found.report.figures["precision"] == precision
    assert found.report.figures["non_finite_steps"] == 0
    assert found.validation[-1] == pytest.approx(wanted.validation[-1], rel=1e-3 if "half" in precision else 1e-2)


@pytest.mark.parametrize(
    ("storage", "dtype"), [("fp8", torch.float8_e4m3fn), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "current-half"])
def test_weights_are_held_narrow_and_learned_on(
    playground: Playground, meddle, storage: str, dtype: torch.dtype, precision: str
):
    held: list[tuple[torch.dtype, torch.dtype]] = []

    def look(ready: PreparedRun) -> None:
        root = ready.run.learner.precisions["transformer"].module
        layer = root.get_submodule("transformer_blocks.0.attn1.to_q.base")
        adapter = dict(ready.run.learner.named_parameters())["transformer.transformer_blocks.0.attn1.to_q.down"]
        held.append((layer.weight.dtype, adapter.dtype))  # type: ignore[arg-type]

    meddle(look)
    model = {"precision": precision, "storage": storage}
    outcome = playground.train(model=model, training={"max_train_steps": 3}, network=FEW)
    assert held == [(dtype, torch.float32)]
    first, last = outcome.validation
    assert math.isfinite(last) and last < first
    assert outcome.report.figures["non_finite_steps"] == 0


@pytest.mark.parametrize("precision", ["fp32", "current-half"])
def test_checkpointing_changes_no_bit(playground: Playground, precision: str):
    plain = playground.train(model={"precision": precision}, network={"network_dropout": 0.1})
    folder = {"output_dir": playground.folder / "checkpointed"}
    sparing = playground.train(
        model={"precision": precision},
        network={"network_dropout": 0.1},
        training={"gradient_checkpointing": True},
        saving=folder,
    )
    assert sparing.losses == plain.losses
    assert same(sparing.paths["kohya"], plain.paths["kohya"])


@pytest.mark.filterwarnings("ignore")  # the tracer's own
def test_compiled_blocks_compute_the_same(playground: Playground, monkeypatch: pytest.MonkeyPatch):
    """The blocks are traced, and what was traced runs without a compiler."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    short = {"max_train_steps": 2}
    plain = playground.train(network=FEW, training=short)
    compiled = playground.train(network=FEW, training={**short, "torch_compile": True})
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-5)
    torch.compiler.reset()


def test_the_average_is_what_is_saved_and_the_state_has_both(playground: Playground):
    decay = 0.6
    outcome = playground.train(
        network=FEW, optimizer={"ema_decay": decay}, saving={"save_every_n_steps": 1}, training={"max_train_steps": 4}
    )
    states = [load_run_state(saved.paths["state"])[0] for saved in outcome.of(events.CheckpointSaved)[:4]]
    weights = [(1 - decay) * decay ** (len(states) - 1 - i) for i in range(len(states))]
    name = "transformer.transformer_blocks.0.attn1.to_q.up"
    wanted = sum(w * state.adapter[name] for w, state in zip(weights, states, strict=True)) / sum(weights)
    found = tensors_of(outcome.paths["kohya"])["lora_unet_blocks_0_self_attn_q_proj.lora_up.weight"]
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-8)
    assert not torch.equal(found, states[-1].adapter[name])


def test_accumulation_counts_every_picture_once(playground: Playground):
    outcome = playground.train(
        training={"gradient_accumulation_steps": 3, "max_train_epochs": 2, "max_train_steps": None}, network=FEW
    )
    (started,) = outcome.of(events.TrainingStarted)
    assert (started.effective_batch, started.steps_per_epoch, started.steps) == (6, 1, 2)
    assert len(outcome.losses) == 2
    assert outcome.validation[-1] < outcome.validation[0]


def test_epochs_end_it_and_are_saved(playground: Playground):
    length = {"max_train_epochs": 2, "max_train_steps": None}
    outcome = playground.train(training=length, saving={"save_every_n_epochs": 1}, network=FEW)
    assert [event.epoch for event in outcome.of(events.StepTaken)] == [0, 0, 1, 1, 1, 2]
    names = [saved.paths["kohya"].name for saved in outcome.of(events.CheckpointSaved)]
    assert names == ["made-000001.safetensors", "made-000002.safetensors", "made.safetensors"]
    assert same(playground.folder / "run" / "made-000002.safetensors", outcome.paths["kohya"])


def test_rates_by_pattern_and_limited_norms(playground: Playground):
    outcome = playground.train(
        network={**FEW, "network_reg_lrs": {r"blocks\.4\..*": 1e-30}, "scale_weight_norms": 0.05},
        optimizer={"learning_rate": 1e-2},
    )
    tensors = tensors_of(outcome.paths["kohya"])
    norms = {
        name.partition(".")[0]: float(torch.linalg.matrix_norm(up @ tensors[name.replace("lora_up", "lora_down")]))
        for name, up in tensors.items()
        if "lora_up" in name
    }
    assert all(norm < 1e-20 for name, norm in norms.items() if "blocks_4" in name)
    moved = [norm for name, norm in norms.items() if "blocks_0" in name]
    assert max(moved) == pytest.approx(0.05, rel=1e-4)
    assert min(moved) > 1e-3


# --- what it is shown -------------------------------------------------------------------------------------------------


def test_where_the_mask_is_black_nothing_is_learned(playground: Playground):
    """A black mask over all of each picture leaves no loss, a white one leaves all of it."""
    masks = playground.folder / "masks"
    masks.mkdir()

    def run(value: int) -> list[float]:
        for picture in playground.pictures.glob("*.png"):
            Image.new("L", (64, 64), value).save(masks / picture.name)
        subset = {"image_dir": str(playground.pictures), "conditioning_data_dir": str(masks)}
        one = [{"subsets": [subset]}]
        short = {"max_train_steps": 2, "cache_dir": str(playground.folder / f"cache{value}")}
        return playground.train(objective={"masked_loss": True}, datasets=one, network=FEW, training=short).losses

    white = run(255)
    plain = playground.train(network=FEW, training={"max_train_steps": 2}).losses
    assert white == plain
    half = run(128)
    assert half[0] == pytest.approx(128 / 255 * plain[0], rel=1e-5)
    black = run(0)
    assert black == [0.0] * len(black)


def test_transparent_parts_are_left_out_with_alpha_mask(playground: Playground):
    for path in playground.pictures.glob("*.png"):
        pixels = np.array(Image.open(path).convert("RGBA"))
        pixels[:, :, 3] = 255
        Image.fromarray(pixels).save(path)
    opaque = playground.train(network=FEW, general={"alpha_mask": True}, training={"max_train_steps": 1})
    plain = playground.train(network=FEW, training={"max_train_steps": 1})
    assert opaque.losses == plain.losses
    for path in playground.pictures.glob("*.png"):
        pixels = np.array(Image.open(path))
        pixels[:32, :, 3] = 0
        Image.fromarray(pixels).save(path)
    half = playground.train(network=FEW, general={"alpha_mask": True}, training={"max_train_steps": 1})
    assert 0 < half.losses[0] < opaque.losses[0]


def test_regularisation_pictures_count_as_they_are_told_to(playground: Playground):
    regular = put_pictures(playground.folder / "regular", 2)
    datasets = [{"subsets": [{"image_dir": str(playground.pictures)}, {"image_dir": str(regular), "is_reg": True}]}]
    free, none = (
        playground.train(
            network=FEW, datasets=datasets, objective={"prior_loss_weight": weight}, general={"validation_split": 0}
        )
        for weight in (1.0, 0.0)
    )
    shown = free.report.figures["pictures"]
    assert shown == 10
    assert len(free.losses) == len(none.losses)
    assert none.losses[0] <= free.losses[0]
    assert sum(none.losses) < sum(free.losses)


def test_mirrored_and_cropped_pictures_are_encoded_as_they_are_shown(playground: Playground):
    """Mirrored ones have an entry each in the cache; what is cropped at random is never kept."""
    for path in playground.pictures.glob("*.png"):
        Image.open(path).resize((96, 64)).save(path)
    own = {"cache_dir": str(playground.folder / "own"), "max_train_epochs": 4, "max_train_steps": None}
    options = {"enable_bucket": False, "validation_split": 0}
    flipped = playground.train(general={**options, "flip_aug": True}, training=own, network=FEW)
    made = flipped.report.figures["latents_made"]
    assert 8 < made <= 16  # type: ignore[operator]
    cropped = playground.train(
        general={**options, "random_crop": True},
        training={**own, "cache_dir": str(playground.folder / "other"), "max_train_epochs": 1},
        network=FEW,
    )
    assert cropped.report.figures["latents_made"] == 0
    assert all(map(math.isfinite, cropped.losses))


def test_dropped_captions_are_the_empty_one(playground: Playground):
    own = {"cache_dir": str(playground.folder / "own"), "max_train_steps": 3}
    outcome = playground.train(general={"caption_dropout_rate": 1.0, "validation_split": 0}, training=own, network=FEW)
    assert outcome.report.figures["texts_made"] == 1
    subjects = {TensorFile(path).metadata["subject"] for path in (playground.folder / "own" / "texts").glob("*-*")}
    assert subjects == {"the caption ''"}
