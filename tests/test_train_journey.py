"""Each kind of adapter learns, is saved and read back, and can be started from; every spelling; every component."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from finitune.adapters import AdapterSet
from finitune.errors import AdapterError
from finitune.files.tensorfile import TensorFile
from finitune.merging.adapterfile import WRITTEN_AMBIGUITY_ANSWERS, open_adapter
from finitune.merging.pairing import TargetModel
from finitune.models.anima import ANIMA
from finitune.namings.core import find_adapter_tensor_file
from finitune.report import Level, Report
from finitune.training import events
from finitune.verbs.train import Request, run
from tests.training_made import (
    FEW_BLOCKS,
    Playground,
    a_model_that_is_read_once,
    a_playground,
    one_cache,
    pico,
    trained,
)

__all__ = ["a_model_that_is_read_once", "a_playground", "one_cache"]

KINDS: dict[str, tuple[dict[str, Any], float]] = {
    "lora": ({}, 1e-2),
    "dora": ({"dora": True}, 1e-2),
    "loha": ({"algorithm": "loha"}, 1e-2),
    "lokr": ({"algorithm": "lokr", "factor": 8}, 1e-2),
    "glora": ({"algorithm": "glora"}, 5e-3),
    "ia3": ({"algorithm": "ia3"}, 1e-2),
    "oft": ({"algorithm": "oft"}, 5e-3),
    "boft": ({"algorithm": "boft"}, 2e-3),
    "full": ({"algorithm": "full"}, 2e-3),
    "vera": ({"algorithm": "vera"}, 5e-2),
}
"""Options of the network, and a learning rate that suits it."""


def read_back(path: Path) -> AdapterSet:
    """The adapter in a file, every tensor of it accounted for."""
    return open_adapter(
        path, Report("check"), TargetModel.loaded(ANIMA, pico()), answers=WRITTEN_AMBIGUITY_ANSWERS
    ).reading.adapter


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_learns_is_saved_and_can_be_started_from(playground: Playground, kind: str):
    network, rate = KINDS[kind]
    network = {**network, "only_patterns": FEW_BLOCKS}
    spelling = "peft" if kind == "vera" else "kohya"  # kohya's files have no place for what modules share
    saving = {"save_as": [spelling]}
    outcome = playground.train(network=network, optimizer={"learning_rate": rate}, saving=saving)
    assert outcome.report.ok, outcome.codes
    assert outcome.reason == "done"
    first, last = outcome.validation
    assert last < 0.97 * first
    path = outcome.paths[spelling]
    adapter = read_back(path)
    assert len(adapter) == outcome.report.figures["sites"] == 12
    assert TensorFile(find_adapter_tensor_file(path)).metadata["finitune_applied_steps"] == "6"
    saving |= {"output_dir": playground.folder / "second"}
    changes = {"network": {**network, "network_weights": path}, "saving": saving}
    again = playground.train(**changes, optimizer={"learning_rate": rate}, training={"max_train_steps": 1})
    assert again.validation[0] == pytest.approx(last, rel=1e-5)


def test_all_spellings_hold_the_same_adapter(playground: Playground):
    spellings = ["kohya", "comfy", "diffusers", "peft"]
    outcome = playground.train(saving={"save_as": spellings}, network={"only_patterns": FEW_BLOCKS})
    names = {spelling: path.name for spelling, path in outcome.paths.items()}
    assert names == {
        "kohya": "made.safetensors",
        "comfy": "made-comfy.safetensors",
        "diffusers": "made-diffusers.safetensors",
        "peft": "made-peft",
        "state": "made-state",
    }
    wanted = read_back(outcome.paths["kohya"])
    for spelling in spellings:
        found = read_back(outcome.paths[spelling])
        assert found.sites.keys() == wanted.sites.keys()
        for site in wanted.sites:
            assert torch.allclose(delta_of(found, site), delta_of(wanted, site), rtol=1e-5, atol=1e-7), (spelling, site)
        assert outcome.report.figures["verified"][spelling]["sites"] == len(wanted)  # type: ignore[index]


def delta_of(adapter: AdapterSet, site: str) -> torch.Tensor:
    """The change of a LoRA's weight."""
    one = adapter[site]
    scale = one.alpha / one.tensors["down"].shape[0] if one.alpha is not None else 1.0
    return scale * one.tensors["up"] @ one.tensors["down"]


def test_what_a_spelling_cannot_say_is_refused_before_the_first_step(playground: Playground):
    outcome = playground.train(network={"algorithm": "oft_v2", "only_patterns": FEW_BLOCKS})
    (finding,) = outcome.findings("WRITE-CANNOT-SAY")
    assert finding.level is Level.ERROR and finding.remedy
    assert not outcome.of(events.StepTaken)
    assert not list((playground.folder / "run").glob("*.safetensors"))


def test_oft_v2_has_a_spelling_that_can_say_it(playground: Playground):
    outcome = playground.train(
        network={"algorithm": "oft_v2", "only_patterns": FEW_BLOCKS}, saving={"save_as": ["comfy"]}
    )
    first, last = outcome.validation
    assert last < first
    assert {one.algorithm for one in read_back(outcome.paths["comfy"]).sites.values()} == {"oft_v2"}


def levels_in(cache: Path) -> set[str]:
    """How far the texts in a cache are encoded."""
    return {json.loads(TensorFile(path).metadata["identity"])["level"] for path in (cache / "texts").glob("*-*")}


@pytest.mark.parametrize(
    ("option", "level", "component"),
    [("train_llm_adapter", "states", "text_conditioner"), ("train_text_encoder", "tokens", "text_encoder")],
)
def test_the_texts_modules_are_trained_on_request(playground: Playground, option: str, level: str, component: str):
    own = playground.folder / "cache"
    outcome = playground.train(
        network={option: True}, optimizer={"learning_rate": 2e-3}, training={"cache_dir": own, "max_train_steps": 4}
    )
    first, last = outcome.validation
    assert last < first
    adapter = read_back(outcome.paths["kohya"])
    by_component = {name: adapter.component(name) for name in ("transformer", component)}
    for sites in by_component.values():
        assert all(bool(one.tensors["up"].any()) for one in sites.values())
    assert len(by_component["transformer"]) == 60
    assert levels_in(own) == {level}


def test_the_rate_of_a_component_is_its_own(playground: Playground):
    options = {"learning_rate": 2e-3, "llm_adapter_lr": 0.0}
    outcome = playground.train(network={"train_llm_adapter": True}, optimizer=options)
    adapter = read_back(outcome.paths["kohya"])
    assert not any(bool(one.tensors["up"].any()) for one in adapter.component("text_conditioner").values())
    assert all(bool(one.tensors["up"].any()) for one in adapter.component("transformer").values())


def test_a_file_of_another_rank_is_no_start(playground: Playground):
    first = playground.train(network={"only_patterns": FEW_BLOCKS}, training={"max_train_steps": 1})
    network = {"only_patterns": FEW_BLOCKS, "network_dim": 8, "network_weights": first.paths["kohya"]}
    outcome = playground.train(network=network)
    (finding,) = outcome.findings("START-DIFFERS")
    assert finding.evidence["differing"] == 12
    assert not outcome.of(events.StepTaken)


def test_by_the_command_of_a_file(playground: Playground):
    from finitune.config.read import dump_config

    config = playground.folder / "train.toml"
    config.write_text(dump_config(playground.config(training={"max_train_steps": 2})), encoding="utf-8")
    report = run(Request(config=config))
    assert report.ok, report.findings
    assert {"config", "kohya", "state", "steps"} <= report.artifacts.keys()
    assert report.figures["ended"] == "done"
    assert report.figures["effective_batch"] == 2
    effective = Path(report.artifacts["config"])
    again = run(Request(config=effective))
    assert again.ok
    assert again.figures["loss"] == report.figures["loss"]


def test_the_same_configuration_makes_the_same_bits(playground: Playground):
    config = playground.config(network={"network_dropout": 0.2, "rank_dropout": 0.1})
    other = config.model_copy(
        update={"saving": config.saving.model_copy(update={"output_dir": playground.folder / "other"})}
    )
    one, two = (dict(TensorFile(trained(c).paths["kohya"]).tensors()) for c in (config, other))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_file_that_is_damaged_is_no_start(playground: Playground):
    path = playground.folder / "bad.safetensors"
    first = playground.train(network={"only_patterns": FEW_BLOCKS}, training={"max_train_steps": 1})
    tensors = dict(TensorFile(first.paths["kohya"]).tensors())
    tensors[next(iter(tensors))].view(-1)[0] = float("nan")
    from safetensors.torch import save_file

    save_file(tensors, path)
    with pytest.raises(AdapterError):
        read_back(path)
    outcome = playground.train(network={"only_patterns": FEW_BLOCKS, "network_weights": path})
    assert outcome.report.exit_code == 1
    assert not outcome.of(events.StepTaken)
