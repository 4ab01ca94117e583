"""Trainings that cannot begin, or not go on: the model, the plan, the adapter to start from, the folder, the disk.

What was there before is there afterwards, byte for byte.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from finitune.files import writer
from finitune.files.tensorfile import TensorFile
from finitune.models.pico import get_pico_folder, get_pico_plan_path
from finitune.training.run_folder import RunFolder
from tests.train_asked import READ, Scene, Told, a_scene, ask, header_only, one_cache_for_all, pico_is_read_once

__all__ = ["a_scene", "one_cache_for_all", "pico_is_read_once"]

PICO = Path(get_pico_folder())


def refused(scene: Scene, told: Told, code: str) -> dict[str, Any]:
    """The error of a training that made nothing."""
    assert told.errors == [code]
    assert not scene.run.exists()
    return told.of(code)


# --- the base model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "code", "subject", "says"),
    [
        ("nowhere.safetensors", "MODEL-NOT-FOUND", "model.pretrained", "qwen3 and vae"),
        ("pico-animal", "MODEL-NOT-FOUND", "model.pretrained", "pico-anima"),
        ("circlestone-labs/Anima", "MODEL-NOT-FOUND", "model.pretrained", "Nothing is downloaded"),
        ("pictures/banana.png", "FILE-UNKNOWN", "banana.png", "checksum"),
        ("pictures/", "FILE-MISSING", "transformer", "subfolders"),
        (
            str(PICO / "vae/diffusion_pytorch_model.safetensors"),
            "MODEL-WRONG-PART",
            "vae",
            "pretrained_model_name_or_path=",
        ),
        (
            str(PICO / "transformer/diffusion_pytorch_model.safetensors"),
            "MODEL-WRONG-PART",
            "transformer",
            "whole folder",
        ),
    ],
)
def test_what_is_no_model_is_called_what_it_is(scene: Scene, name: str, code: str, subject: str, says: str):
    told = scene.train(model={"pretrained_model_name_or_path": name})
    finding = refused(scene, told, code)
    assert subject in finding["subject"]
    assert says in finding["remedy"]


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        (b"PK\3\4\0\0", "FILE-PICKLE", "weights_only=True"),
        (b"version https://git-lfs.github.com/spec/v1\nsize 4182218328\n", "FILE-LFS-POINTER", "git lfs pull"),
        (b"<!DOCTYPE html><title>Sign in</title>", "FILE-HTML", "Download it again"),
        (b"", "FILE-EMPTY", "again"),
    ],
)
def test_a_file_that_holds_no_tensors_is_called_what_it_is(scene: Scene, content: bytes, code: str, says: str):
    scene.put("anima.safetensors", content)
    told = scene.train(model={"pretrained_model_name_or_path": "anima.safetensors"})
    assert says in refused(scene, told, code)["remedy"]


def test_a_lora_is_no_model(scene: Scene):
    name = "lora_unet_blocks_0_mlp_layer1"
    tensors = {f"{name}.lora_down.weight": (4, 64), f"{name}.lora_up.weight": (256, 4), f"{name}.alpha": ()}
    header_only(scene.folder / "style.safetensors", tensors)
    told = scene.train(model={"pretrained_model_name_or_path": "style.safetensors"})
    assert "where adapters are asked for" in refused(scene, told, "MODEL-IS-ADAPTER")["remedy"]


def test_one_file_of_three_asks_for_the_others_by_option(scene: Scene):
    header_only(scene.folder / "anima.safetensors", {"net.x_embedder.proj.1.weight": (2048, 68)})
    told = scene.train(model={"pretrained_model_name_or_path": "anima.safetensors", "vae": "v.safetensors"})
    finding = refused(scene, told, "MODEL-FILES-MISSING")
    assert finding["message"] == "anima.safetensors is one file of three: qwen3 missing"
    assert "to [model]" in finding["remedy"]


def test_no_module_for_an_adapter(scene: Scene):
    told = scene.train(network={"only_patterns": ["unet.*"]})
    assert "--explain" in refused(scene, told, "SITES-NONE")["remedy"]


# --- the plan --------------------------------------------------------------------------------------------------------


@pytest.fixture(name="other_model", scope="module")
def a_model_no_plan_is_shipped_for(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pico-anima with one tensor changed."""
    place = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(PICO, place, ignore=lambda *_: ["plan.toml"])
    file = place / "transformer/diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["proj_out.weight"] *= 0.5
    save_file(tensors, file)
    return place


def test_planned_half_wants_a_plan(scene: Scene, other_model: Path):
    told = scene.train(model={"pretrained_model_name_or_path": str(other_model), "precision": "planned-half"})
    remedy = refused(scene, told, "PLAN-MISSING")["remedy"]
    assert f"finitune plan {other_model}" in remedy and "current-half" in remedy


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        (get_pico_plan_path().read_bytes(), "PLAN-OTHER-CHECKPOINT", "finitune plan"),
        (bytes(range(256)), "PLAN-UNREADABLE", "finitune plan"),
        (b"a = 1", "PLAN-UNREADABLE", "finitune plan"),
        (None, "PLAN-MISSING", "finitune plan"),
    ],
)
def test_a_plan_of_another_checkpoint_or_none(
    scene: Scene, other_model: Path, content: bytes | None, code: str, says: str
):
    if content is not None:
        scene.put("plan.toml", content)
    model = {"pretrained_model_name_or_path": str(other_model), "precision": "planned-half", "plan": "plan.toml"}
    assert says in refused(scene, scene.train(model=model), code)["remedy"]


# --- where to start and where to write -------------------------------------------------------------------------------


@pytest.fixture(name="finished")
def a_finished_run(scene: Scene) -> Scene:
    assert scene.train().exit_code == 0
    return scene


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("nowhere.safetensors", "FILE-MISSING", "Check the path"),
        ("pictures/banana.txt", "FILE-TEXT", "Check the path"),
        ("pictures/", "FILE-MISSING", "Check the path"),
        (str(PICO / "vae/diffusion_pytorch_model.safetensors"), "ADAPTER-NONE", "Give an adapter file"),
    ],
)
def test_network_weights_that_is_no_adapter(scene: Scene, name: str, code: str, says: str):
    caches = sorted(scene.cache.rglob("*"))
    told = scene.train(network={"network_weights": name}, training={"qwen3_max_token_length": 300})
    assert says in refused(scene, told, code)["remedy"]
    assert sorted(scene.cache.rglob("*")) == caches


def test_network_weights_of_another_rank(finished: Scene):
    start = finished.run.rename(finished.folder / "first") / "made.safetensors"
    told = finished.train(network={"network_weights": str(start), "network_dim": 4})
    assert "rank" in refused(finished, told, "START-DIFFERS")["remedy"]


def test_a_folder_in_use_by_another_run(finished: Scene):
    before = finished.files()
    with RunFolder(finished.run):
        told = finished.train()
    finding = told.of("RUN-FOLDER-LOCKED")
    assert (told.exit_code, finding["subject"]) == (2, str(finished.run))
    assert f"process {os.getpid()}" in finding["message"] and "another output_dir" in finding["remedy"]
    assert READ == []
    assert finished.files() == before


def test_a_full_disk_is_seen_before_the_first_step(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1000, 999, 1))
    finding = refused(scene, scene.train(), "DISK-FULL")
    assert finding["evidence"]["free_bytes"] == 1 and "save_state = false" in finding["remedy"]


def test_a_disk_that_fills_up_in_a_save_leaves_the_last_good_file(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    flush = writer.flush_to_disk

    def full(path: Path) -> None:
        if "step00000002" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(path)

    monkeypatch.setattr(writer, "flush_to_disk", full)
    told = scene.train(training={"max_train_steps": 3}, saving={"save_every_n_steps": 1})
    finding = told.of("FILE-NOT-WRITTEN")
    assert told.exit_code == 1
    assert finding["subject"].endswith("made-step00000002.safetensors") and "free space" in finding["remedy"]
    state = "made-step00000001-state"
    whole = {f"{state}/{name}" for name in ("SHA256SUMS", "state.json", "tensors.safetensors")}
    assert set(scene.files()) == {*whole, "made-step00000001.safetensors", "config.toml", "steps.jsonl"}
    assert len(list(TensorFile(scene.run / "made-step00000001.safetensors").tensors())) == 6
    monkeypatch.setattr(writer, "flush_to_disk", flush)
    again = scene.train("--resume", training={"max_train_steps": 3}, saving={"save_every_n_steps": 1})
    assert (again.exit_code, again.figures["steps"]) == (0, 3)


# --- going on --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"network": {"network_dim": 4}}, "rank 2 in the state, 4 now"),
        ({"network": {"network_alpha": 1}}, "alpha 2.0 in the state, 1.0 now"),
        ({"network": {"algorithm": "loha"}}, "algorithm lora in the state, loha now"),
        ({"network": {"only_patterns": [r"blocks\.1\.mlp\..*"]}}, "in the state alone"),
        ({"optimizer": {"optimizer_type": "SGD"}}, "torch.AdamW in the state, torch.SGD now"),
        ({"optimizer": {"optimizer_args": {"weight_decay": 0.5}}}, "weight_decay of torch.AdamW was absent, is 0.5"),
    ],
)
def test_the_state_of_another_training_is_refused_and_kept(finished: Scene, changes: dict[str, Any], says: str):
    before = finished.files()
    told = finished.train("--resume", **changes)
    finding = told.of("STATE-DIFFERS")
    assert told.errors == ["STATE-DIFFERS"]
    assert says in finding["message"] and "network_weights" in finding["remedy"]
    assert finished.files() == before


def test_other_pictures_are_told_and_trained_on(finished: Scene):
    shutil.copy(finished.pictures / "banana.png", finished.pictures / "twin.png")
    told = finished.train("--resume", training={"max_train_steps": 4})
    assert told.exit_code == 0 and told.figures["steps"] == 4
    assert "Put the pictures and captions back" in told.of("STATE-OTHER-DATA")["remedy"]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_that_was_over_says_so(finished: Scene, steps: int):
    before = (finished.run / "steps.jsonl").read_bytes()
    told = finished.train("--resume", training={"max_train_steps": steps})
    finding = told.of("RUN-WAS-OVER")
    assert finding["level"] == "warning" and "raise max_train_steps" in finding["remedy"]
    assert "saving.resume" not in [each["subject"] for each in told.findings]
    assert (finished.run / "steps.jsonl").read_bytes() == before  # no step was taken, and none is forgotten


@pytest.mark.parametrize("name", ["run/none-state", "run/made.safetensors", "pictures"])
def test_what_is_no_state_is_not_gone_on_from(finished: Scene, name: str):
    before = finished.files()
    told = finished.train(saving={"resume": name})
    (code,) = told.errors
    assert code in ("STATE-MISSING", "STATE-DAMAGED")
    assert name in told.of(code)["subject"] and "network_weights" in told.of(code)["remedy"]
    assert finished.files() == before


def test_a_damaged_state_is_not_begun_anew_over(finished: Scene):
    """Who asks to go on would not have what there is written over."""
    tensors = finished.run / "made-state" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-4])
    before = finished.files()
    told = finished.train("--resume", training={"max_train_steps": 4})
    assert told.exit_code == 1
    assert "network_weights" in told.of("STATE-DAMAGED")["remedy"]
    assert finished.files() == before


def test_a_new_run_over_an_old_one_is_told(finished: Scene):
    told = finished.train()
    assert told.exit_code == 0
    assert "--resume" in told.of("RUN-BEGINS-ANEW")["remedy"]
    assert ask(finished.folder / "train.toml", "--out", finished.folder / "elsewhere").exit_code == 0
    assert (finished.folder / "elsewhere" / "made.safetensors").exists()
