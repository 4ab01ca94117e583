"""What cannot be trained is refused before anything is made, with its place and its way out; the rest is told.

`train_asked.ask` holds every answer to the law: no traceback, no bug, a subject and a remedy with each error.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train_asked import READ, Scene, a_scene, one_cache_for_all, pico_is_read_once
from tests.train_refusal_cases import OPTIONS, PICTURES, TOLD

__all__ = ["a_scene", "one_cache_for_all", "pico_is_read_once"]


@pytest.mark.parametrize("what", [*PICTURES, *OPTIONS])
def test_it_is_refused_before_the_model_is_read_and_leaves_nothing(scene: Scene, what: str):
    arrange, code, subject, remedy = {**PICTURES, **OPTIONS}[what]
    sections = arrange(scene) or {}
    before = sorted(scene.folder.rglob("*"))
    told = scene.train(**sections)
    finding = told.of(code)
    assert told.errors[0] == code
    assert subject in finding["subject"]
    assert remedy in finding["remedy"]
    assert told.exit_code in (1, 2)
    assert READ == []
    assert sorted(scene.folder.rglob("*")) == sorted({*before, scene.folder / "train.toml"})


@pytest.mark.parametrize("what", TOLD)
def test_it_is_told_and_the_run_goes_on(scene: Scene, what: str):
    arrange, level, code, subject, remedy = TOLD[what]
    told = scene.train(**(arrange(scene) or {}))
    finding = told.of(code)
    assert finding["level"] == level
    assert subject in finding["subject"]
    assert remedy in finding["remedy"]
    assert (told.exit_code, told.figures["ended"]) == (0, "done")
    assert len(told.steps()) == 2


def test_a_batch_is_measured_as_large_as_it_is(scene: Scene):
    told = scene.train("--dry-run", training={"train_batch_size": 64})
    assert "with 3 pictures" in told.of("FITS")["message"]


def test_an_ending_without_its_dot_is_understood(scene: Scene):
    told = scene.train("--explain", **scene.subset(caption_extension="txt"))
    assert told.exit_code == 0
    assert "CAPTION-MISSING" not in [finding["code"] for finding in told.findings]


@pytest.mark.parametrize("split", [0.5, 0.99])
def test_one_picture_at_least_is_left_to_learn_from(scene: Scene, split: float):
    told = scene.train("--explain", general={"validation_split": split})
    assert told.figures["pictures"] >= 1
    assert told.figures["pictures"] + told.figures["held_out"] == 3


def test_the_home_folder_is_meant_by_its_sign(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(scene.folder))
    monkeypatch.setenv("USERPROFILE", str(scene.folder))
    told = scene.train("--dry-run", saving={"output_dir": "~/run"}, **scene.subset(image_dir="~/pictures"))
    assert told.exit_code == 0
    assert Path(told.report["artifacts"]["config"]) == scene.run / "config.toml"
    assert not (scene.folder / "~").exists()


def test_without_a_gpu_cuda_is_not_there(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    import torch

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("Found no NVIDIA driver on your system. Please check that you have one.")

    monkeypatch.setattr(torch, "empty", refuse)
    told = scene.train(model={"device": "cuda"})
    finding = told.of("DEVICE-NOT-THERE")
    assert finding["subject"] == "model.device"
    assert finding["message"] == "device = 'cuda': Found no NVIDIA driver on your system"
    assert not scene.run.exists()
