"""Configurations of six programs, as people write them for Anima, from the file to an adapter that was checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from finitune.config.imported_config import KeyStatus
from finitune.config.read import read_train_config
from finitune.files.tensorfile import TensorFile
from tests.foreign_anima import FLAGS, PROGRAMS
from tests.train_asked import READ, Scene, Told, a_scene, ask, one_cache_for_all, pico_is_read_once
from tests.training_made import put_pictures

__all__ = ["a_scene", "one_cache_for_all", "pico_is_read_once"]

DONE: dict[str, tuple[Told, Path]] = {}
"""What a program's training said, and its folder: it is trained once for all that is asked of it."""


def written(scene: Scene, program: str) -> str:
    """What to give to --from: the file, whose second file lies beside it, or the command line."""
    for name, text in PROGRAMS[program].items():
        scene.put(name, text)
    return next(iter(PROGRAMS[program])) if PROGRAMS[program] else FLAGS


@pytest.fixture(name="trained")
def a_trained_program(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Told, Path]]:
    put_pictures(scene.folder / "numbered" / "2_blue ink", 3)

    def train(program: str) -> tuple[Told, Path]:
        if program not in DONE:
            out = tmp_path_factory.mktemp("imported") / "run"
            told = ask("--from", written(scene, program), "--out", out)
            assert told.exit_code == 0, told.findings
            DONE[program] = told, out
        return DONE[program]

    return train


@pytest.mark.parametrize("program", PROGRAMS)
def test_it_trains_to_a_checked_file(trained: Callable[[str], tuple[Told, Path]], program: str):
    told, out = trained(program)
    assert told.figures["ended"] == "done"
    assert len(told.steps()) == 2
    assert told.figures["non_finite_steps"] == 0
    assert told.figures["pictures"] == 3
    (verified,) = told.figures["verified"].values()
    assert verified["sites"] == told.figures["sites"] > 0
    assert verified["loads"]
    file = TensorFile(Path(verified["file"]))
    assert file.path.parent == out
    assert all(bool(tensor.isfinite().all()) for _, tensor in file.tensors())
    assert any(bool(tensor.any()) for name, tensor in file.tensors() if "lora_up" in name or "lora_B" in name)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_key_has_its_line(trained: Callable[[str], tuple[Told, Path]], program: str):
    told, _ = trained(program)
    keys = told.figures["keys"]
    assert len({line["key"] for line in keys}) == len(keys) > 15
    assert {line["fate"] for line in keys} <= {fate.value for fate in KeyStatus}
    assert "CONFIG-UNKNOWN-KEY" not in [finding["code"] for finding in told.findings]
    assert program.split()[0].lower() in told.figures["program"].lower()


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_effective_configuration_trains_the_same(trained: Callable[[str], tuple[Told, Path]], program: str):
    """It is read without a word, and gives the same losses and the same file, bit for bit."""
    told, out = trained(program)
    loaded = read_train_config(out / "config.toml")
    assert loaded.imported is None
    assert loaded.findings == ()
    again = ask(out / "config.toml", "--out", "again")
    assert again.exit_code == 0
    assert again.steps() == told.steps()
    one, other = (Path(next(iter(each.figures["verified"].values()))["file"]) for each in (told, again))
    assert one.name == other.name and other.parent.name == "again"
    before, now = (dict(TensorFile(path).tensors()) for path in (one, other))
    assert before.keys() == now.keys()
    assert all(torch.equal(before[name], now[name]) for name in before)


def test_kohyas_file_is_known_without_from(scene: Scene, trained: Callable[[str], tuple[Told, Path]]):
    told, _ = trained("sd-scripts training TOML")
    plain = ask(written(scene, "sd-scripts training TOML"))
    assert plain.exit_code == 0
    assert plain.figures["keys"] == told.figures["keys"]
    assert plain.steps() == told.steps()
    assert (scene.run / "blue_ink.safetensors").exists()  # where the file itself says


def test_a_command_line_is_taken_from_a_script_too(scene: Scene, trained: Callable[[str], tuple[Told, Path]]):
    scene.put("train.sh", f"#!/bin/sh\ncd sd-scripts\n{FLAGS}\n")
    told = ask("--from", "train.sh", "--dry-run")
    assert told.exit_code == 0
    assert told.figures["keys"] == trained("sd-scripts command line")[0].figures["keys"]


# --- configurations for other models ---------------------------------------------------------------------------------


def changed(program: str, *changes: tuple[str, str]) -> str:
    """The first file of a program with some text replaced."""
    text = next(iter(PROGRAMS[program].values()))
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return text


OTHERS = {
    "flux.toml": changed("sd-scripts training TOML", ("networks.lora_anima", "networks.lora_flux")),
    "flux.sh": FLAGS.replace("anima_train_network.py", "flux_train_network.py"),
    "sdxl.json": changed("kohya_ss GUI JSON", ('"sdxl": false', '"sdxl": true'), ('"anima_checkbox": true, ', "")),
    "flux.yaml": changed("ai-toolkit", ("arch: anima", "arch: flux")),
    "flux.json": changed("OneTrainer", ("ANIMA", "FLUX_DEV_1")),
    "pixart.json": changed("SimpleTuner", ("anima", "pixart_sigma")),
    "wan.toml": changed("diffusion-pipe", ("type = 'anima'", "type = 'wan'")),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_family_is_refused_with_the_account_of_every_key(scene: Scene, name: str):
    for files in (PROGRAMS["OneTrainer"], PROGRAMS["SimpleTuner"], PROGRAMS["sd-scripts training TOML"]):
        for beside, text in files.items():
            scene.put(beside, text)
    put_pictures(scene.folder / "numbered" / "2_blue ink", 3)
    told = ask("--from", scene.put(name, OTHERS[name]))
    assert told.exit_code == 1
    assert set(told.errors) == {"CONFIG-OTHER-FAMILY"}
    assert "account" in told.of("CONFIG-OTHER-FAMILY")["remedy"] or "Anima" in told.of("CONFIG-OTHER-FAMILY")["remedy"]
    assert len(told.figures["keys"]) > 15
    assert READ == [] and not scene.run.exists()
