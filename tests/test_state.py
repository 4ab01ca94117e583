"""A state on disk: the same bits and types back, refused where it does not belong, and never half of one."""

from __future__ import annotations

import json
import random
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from finitune.errors import AdapterError, FileError, FinituneError, NumericsError, UsageError
from finitune.report import Level
from finitune.training.checkpoint import (
    RunState,
    decode_state_tree,
    encode_state_tree,
    find_last_state,
    get_random_states,
    iterate_state_folders,
    load_run_state,
    read_verified_state_facts,
    restore_random_states,
    save_run_state,
)
from finitune.training.manifest import TrainingManifest

SHAPES = {"a.down": (2, 3), "a.up": (3, 2), "b.down": (2, 3), "b.up": (3, 2)}
MANIFEST = TrainingManifest(
    algorithm="lora",
    shapes=SHAPES,
    sites={"a": {"rank": 2, "alpha": 2.0}, "b": {"rank": 2, "alpha": 2.0}},
    optimizer="torch.AdamW",
    optimizer_args={"betas": (0.9, 0.99)},
    config={"optimizer.learning_rate": 1e-4, "training.max_train_steps": 100, "saving.save_every_n_steps": 10},
    dataset="d1",
)


def state_at(step: int = 7) -> RunState:
    torch.manual_seed(step)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES.values()]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    adapter = {name: parameter.detach() for name, parameter in zip(SHAPES, parameters, strict=True)}
    average = {"decay": 0.99, "count": 3, "sums": {name: tensor / 3 for name, tensor in adapter.items()}}
    facts = {"seed": 2**70, "lowest": -0.0, "spikes": [0.1, float("inf")], "quarantine": ["a.png"], "taken": None}
    return RunState(step, 1, adapter, optimizer.state_dict(), average, facts)


def assert_same(one: Any, other: Any) -> None:
    """Equal to the bit, and of equal types."""
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.numpy().tobytes() == other.numpy().tobytes()
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple, deque)):
        assert len(one) == len(other)
        for first, second in zip(one, other, strict=True):
            assert_same(first, second)
    else:
        assert repr(one) == repr(other)  # tells -0.0 from 0.0, and nan is nan


plain_values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
trees = st.recursive(
    plain_values | st.sampled_from([torch.float32, torch.bfloat16]) | st.integers(0, 3).map(lambda n: torch.arange(n)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=5))
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$tensor", "$dict", "a/b", "a"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=150)
@given(tree=trees)
def test_every_tree_comes_back(tree: Any):
    tensors: dict[str, Tensor] = {}
    form = json.loads(json.dumps(encode_state_tree(tree, "root", tensors), allow_nan=False))
    assert_same(decode_state_tree(form, tensors), tree)


def test_what_has_no_form_is_refused():
    with pytest.raises(TypeError, match="root/a: object has no form"):
        encode_state_tree({"a": object()}, "root", {})


def test_a_state_comes_back(tmp_path: Path):
    state = state_at()
    save_run_state(tmp_path / "x-state", state, MANIFEST)
    loaded, findings = load_run_state(tmp_path / "x-state", MANIFEST)
    assert findings == []
    for part in ("step", "epoch", "adapter", "optimizer", "average", "facts", "rng"):
        assert_same(getattr(loaded, part), getattr(state, part))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x-state"]


def test_the_sums_are_those_of_the_shell(tmp_path: Path):
    save_run_state(tmp_path / "x-state", state_at(), MANIFEST)
    lines = (tmp_path / "x-state" / "SHA256SUMS").read_text().splitlines()
    assert [line[64:] for line in lines] == ["  tensors.safetensors", "  state.json"]
    assert json.loads((tmp_path / "x-state" / "state.json").read_text())["versions"]["torch"] == torch.__version__


def test_random_states_come_back(tmp_path: Path):
    save_run_state(tmp_path / "x-state", state_at(), MANIFEST)
    states = get_random_states()
    drawn = [(random.random(), np.random.rand(), torch.rand(1).item())]
    restore_random_states(states)
    drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    loaded, _ = load_run_state(tmp_path / "x-state")
    restore_random_states(loaded.rng)
    assert drawn[0] == drawn[1]


def test_a_state_is_replaced(tmp_path: Path):
    save_run_state(tmp_path / "x-state", state_at(1), MANIFEST)
    save_run_state(tmp_path / "x-state", state_at(2), MANIFEST)
    assert load_run_state(tmp_path / "x-state")[0].step == 2
    assert [path.name for path in tmp_path.iterdir()] == ["x-state"]


def test_trainable_tensors_come_back_as_fp32(tmp_path: Path):
    state = state_at()
    state.adapter = {name: tensor.half() for name, tensor in state.adapter.items()}
    save_run_state(tmp_path / "x-state", state, MANIFEST)
    loaded, _ = load_run_state(tmp_path / "x-state", MANIFEST)
    assert {tensor.dtype for tensor in loaded.adapter.values()} == {torch.float32}


def test_a_nonfinite_adapter_is_no_state(tmp_path: Path):
    save_run_state(tmp_path / "x-state", state_at(1), MANIFEST)
    state = state_at(2)
    state.adapter["b.up"][0, 0] = torch.nan
    with pytest.raises(NumericsError) as caught:
        save_run_state(tmp_path / "x-state", state, MANIFEST)
    assert caught.value.code == "STATE-NONFINITE"
    assert caught.value.evidence == {"tensor": "b.up"}
    assert load_run_state(tmp_path / "x-state")[0].step == 1


def shapes(rank: int) -> dict[str, tuple[int, ...]]:
    return {name: tuple(rank if n == 2 else n for n in shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (
            {"shapes": shapes(4), "sites": {site: {"rank": 4, "alpha": 2.0} for site in "ab"}},
            AdapterError,
            "rank 2 in the state, 4 now (2 places, such as a)",
        ),
        ({"shapes": shapes(4)}, AdapterError, "shape [2, 3] in the state, [4, 3] now (2 places, such as a.down)"),
        ({"sites": {"a": {"rank": 2, "alpha": 2.0}}}, AdapterError, "1 site in the state alone, such as b"),
        (
            {"sites": {s: {"rank": 2, "alpha": 1.0} for s in "ab"}},
            AdapterError,
            "alpha 2.0 in the state, 1.0 now (2 places, such as a)",
        ),
        ({"shapes": {**SHAPES, "c.up": (1,)}}, AdapterError, "1 tensor not in the state, such as c.up"),
        (
            {"shapes": {n: SHAPES[n] for n in ("b.down", "b.up", "a.down", "a.up")}},
            AdapterError,
            "4 tensors stand in another order, the first is a.down",
        ),
        ({"algorithm": "loha"}, AdapterError, "algorithm lora in the state, loha now"),
        ({"optimizer": "torch.SGD"}, UsageError, "optimiser torch.AdamW in the state, torch.SGD now"),
        (
            {"optimizer_args": {"betas": (0.9, 0.999)}},
            UsageError,
            "betas of torch.AdamW was [0.9, 0.99], is [0.9, 0.999]",
        ),
    ],
)
def test_the_state_of_another_training_is_refused(
    tmp_path: Path, change: dict[str, Any], kind: type[FinituneError], says: str
):
    save_run_state(tmp_path / "x-state", state_at(), MANIFEST)
    with pytest.raises(kind) as caught:
        load_run_state(tmp_path / "x-state", replace(MANIFEST, **change))
    assert caught.value.code == "STATE-DIFFERS"
    assert says in caught.value.message
    assert "network_weights" in caught.value.remedy


def test_other_data_and_settings_are_said(tmp_path: Path):
    save_run_state(tmp_path / "x-state", state_at(), MANIFEST)
    config = {"optimizer.learning_rate": 2e-4, "training.max_train_steps": 200, "saving.save_every_n_steps": 10}
    _, findings = load_run_state(tmp_path / "x-state", replace(MANIFEST, dataset="d2", config=config))
    assert [(finding.level, finding.code) for finding in findings] == [
        (Level.WARNING, "STATE-OTHER-DATA"),
        (Level.WARNING, "STATE-OTHER-SETTING"),
        (Level.NOTE, "STATE-NEW-SETTING"),
    ]
    assert findings[2].message.startswith("training.max_train_steps was 100")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "SHA256SUMS"])
@pytest.mark.parametrize("harm", [flip, Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-40])])
def test_damaged_states_are_passed_over(tmp_path: Path, name: str, harm: Any):
    for step in (1, 2, 3):
        save_run_state(tmp_path / f"x-step{step:08d}-state", state_at(step), MANIFEST)
    harm(tmp_path / "x-step00000003-state" / name)
    with pytest.raises(FileError) as caught:
        load_run_state(tmp_path / "x-step00000003-state", MANIFEST)
    assert caught.value.code == "STATE-DAMAGED"
    found, findings = find_last_state(tmp_path)
    assert found == tmp_path / "x-step00000002-state"
    assert [(f.level, f.code, f.subject) for f in findings] == [
        (Level.WARNING, "STATE-DAMAGED", str(tmp_path / "x-step00000003-state"))
    ]


def test_the_last_state_is_that_of_the_highest_step_of_the_name(tmp_path: Path):
    assert find_last_state(tmp_path / "nowhere") == (None, [])
    for name, step in (("x-step00000030", 30), ("x-step00000009", 9), ("x", 20), ("xy-step00000090", 90)):
        save_run_state(tmp_path / f"{name}-state", state_at(step), MANIFEST)
    (tmp_path / ".partial-00000000-x-state").mkdir()
    assert find_last_state(tmp_path, "x") == (tmp_path / "x-step00000030-state", [])
    assert find_last_state(tmp_path) == (tmp_path / "xy-step00000090-state", [])
    assert len(list(iterate_state_folders(tmp_path, "x"))) == 3


def test_other_formats_are_refused(tmp_path: Path):
    with pytest.raises(FileError) as caught:
        read_verified_state_facts(tmp_path / "none-state")
    assert caught.value.code == "STATE-MISSING"
