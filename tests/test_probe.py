"""L1 against a brute-force twin: every module's range, non-finite values in sight, and no trace left behind."""

from __future__ import annotations

import json
import math

import pytest
import torch
from diffusers.utils import BaseOutput
from torch import nn

from finitune.errors import FileError
from finitune.numerics.formats import FP16
from finitune.precision.probe import Ranges, is_output_finite, probe
from finitune.precision.sites import iterate_nested_tensors
from tests.tiny import cosmos, cosmos_calls


def brute_force(root, calls):
    """Site -> largest magnitude, one plain hook per module."""
    largest = {}

    def watch(site):
        def hook(_module, _inputs, output):
            for t in iterate_nested_tensors(output):
                if t.is_floating_point():
                    seen = [largest.get(site, 0.0), *t.abs().flatten().tolist()]
                    largest[site] = math.nan if any(map(math.isnan, seen)) else max(seen)

        return hook

    handles = [m.register_forward_hook(watch(site or "(root)")) for site, m in root.named_modules()]
    for call in calls:
        call.run(root)
    for handle in handles:
        handle.remove()
    return largest


@torch.no_grad()
def test_every_module_s_range_is_the_brute_force_one():
    model, calls = cosmos(stream_exponent=17).float(), cosmos_calls(2)
    with probe(model) as ranges:
        for call in calls:
            call.run(model)
    expected = brute_force(model, calls)
    assert ranges.amax == expected
    assert len(expected) > 40 and len(ranges.forwards) == 2
    assert ranges.over_half() == {site: amax for site, amax in expected.items() if amax > FP16.max} != {}
    assert all(ranges.headroom_bits[site] < 0 for site in ranges.over_half())


class Twice(nn.Module):
    """One layer called twice, the second time on a larger input; `returns` shapes the output."""

    def __init__(self, returns=lambda a, b: (a, b)):
        super().__init__()
        self.inner = nn.Identity()
        self.returns = returns

    def forward(self, x):
        return self.returns(self.inner(x), self.inner(-4.0 * x))


class Output(BaseOutput):
    first: torch.Tensor
    second: torch.Tensor


@pytest.mark.parametrize(
    "returns",
    [
        lambda a, b: (a, b),
        lambda a, b: [a, None, {"deep": (b,)}],
        lambda a, b: {"first": a, "second": b},
        lambda a, b: Output(first=a, second=b),
        lambda a, b: (a, b, torch.tensor([99])),
    ],
)
def test_a_module_called_twice_and_every_kind_of_output(returns):
    with probe(model := Twice(returns)) as ranges:
        model(torch.tensor([1.0, -2.0]))
    assert ranges.amax == {"inner": 8.0, "(root)": 8.0}


def test_a_module_that_gives_no_tensor_has_no_range():
    with probe(model := Twice(lambda a, b: None)) as ranges:
        model(torch.ones(2))
    assert ranges.amax == {"inner": 4.0, "(root)": 0.0}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_visible(value):
    model = nn.Sequential(nn.Identity(), nn.Identity())
    with probe(model) as ranges:
        for first in (1.0, value, 2.0):
            model(torch.tensor([first, 3.0]))
    assert ranges.first_nonfinite() == (1, "0")
    assert [math.isfinite(row[0]) for row in ranges.forwards] == [True, False, True]
    assert not math.isfinite(ranges.amax["(root)"]) and ranges.headroom_bits["0"] == -math.inf
    assert set(ranges.over_half()) == {"0", "1", "(root)"}
    assert not is_output_finite({"x": (torch.tensor(value),)}) and is_output_finite(
        (torch.ones(1), torch.tensor([2]), None)
    )


def test_several_forwards_are_merged_by_maximum_and_kept_one_by_one():
    model = nn.Sequential(nn.Identity())
    with probe(model) as ranges:
        for scale in (1.0, 5.0, 2.0):
            model(torch.tensor([-scale]))
    assert ranges.forwards == [[1.0, 1.0], [5.0, 5.0], [2.0, 2.0]]
    assert ranges.amax == {"0": 5.0, "(root)": 5.0}
    assert ranges.first_nonfinite() is None


def test_merge_takes_the_larger_and_a_nan_wins():
    a = Ranges(["x", "y", "z"], [[1.0, 7.0, 1.0]], "c")
    b = Ranges(["z", "x", "w"], [[math.nan, 3.0, 2.0]], "c")
    for one, other in ((a, b), (b, a)):
        merged = one.merge(other).amax
        assert math.isnan(merged.pop("z"))
        assert merged == {"x": 3.0, "y": 7.0, "w": 2.0}


def test_merge_refuses_another_checkpoint():
    with pytest.raises(FileError) as caught:
        Ranges(checkpoint="a").merge(Ranges(checkpoint="b"))
    assert caught.value.code == "RANGES-OTHER-CHECKPOINT"
    assert caught.value.evidence == {"this": "a", "other": "b"}


def test_save_and_load(tmp_path):
    ranges = Ranges(["a.b", "(root)"], [[0.1, math.inf], [3.0, 2.0]], "sha256:0")
    ranges.save(tmp_path / "ranges.json")
    loaded = Ranges.load(tmp_path / "ranges.json")
    assert loaded.amax == ranges.amax and loaded.checkpoint == "sha256:0"
    assert [path.name for path in tmp_path.iterdir()] == ["ranges.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\x00",
        "{",
        "[]",
        "null",
        "{}",
        '{"format": 1, "checkpoint": ""}',
        '{"format": 1, "checkpoint": "", "amax": 3}',
        '{"format": 1, "checkpoint": "", "amax": {"x": "wide"}}',
        '{"format": 1, "checkpoint": "", "amax": {"x": null}}',
        '{"format": 2, "checkpoint": "", "amax": {}}',
    ],
)
def test_what_is_not_a_ranges_file_is_refused(tmp_path, text):
    path = tmp_path / "ranges.json"
    path.write_text(text)
    with pytest.raises(FileError) as caught:
        Ranges.load(path)
    assert caught.value.code == "RANGES-UNREADABLE" and caught.value.subject == str(path)


def test_a_cut_or_missing_ranges_file_is_refused(tmp_path):
    path = tmp_path / "ranges.json"
    Ranges(["x"], [[1.0]], "c").save(path)
    assert json.loads(path.read_text())["format"] == 1
    path.write_bytes(path.read_bytes()[:-4])
    for damaged in (path, tmp_path / "missing.json"):
        with pytest.raises(FileError) as caught:
            Ranges.load(damaged)
        assert caught.value.code == "RANGES-UNREADABLE"


def hooks_of(root):
    return [hook for m in root.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]


def test_no_hook_is_left_behind():
    model = Twice()
    with probe(model):
        assert len(hooks_of(model)) == 4
        model(torch.ones(1))
    assert hooks_of(model) == []


class Failing(nn.Module):
    def forward(self, x):
        raise ArithmeticError("no")


def test_least_nonzero_magnitudes_are_measured_on_request(tmp_path):
    model = nn.Sequential(nn.Identity(), nn.ReLU())
    with probe(model, "c", least=True) as ranges:
        model(torch.tensor([-3.0, 0.0, 0.25, 8.0]))
        model(torch.tensor([-0.125, 0.5]))
    assert ranges.least == {"0": 0.125, "1": 0.25, "(root)": 0.25}
    ranges.save(tmp_path / "ranges.json")
    assert Ranges.load(tmp_path / "ranges.json").merge(ranges).least == ranges.least


def test_after_an_exception_no_hook_is_left_and_what_was_seen_is_kept():
    model = nn.Sequential(nn.Identity(), Failing())
    with pytest.raises(ArithmeticError), probe(model) as ranges:
        model(torch.tensor([6.0]))
    assert hooks_of(model) == []
    assert ranges.amax["0"] == 6.0


def test_a_forward_that_fails_inside_the_context_does_not_confuse_the_next():
    model = nn.Sequential(nn.Identity(), failing := Failing())
    with probe(model) as ranges:
        with pytest.raises(ArithmeticError):
            model(torch.tensor([6.0]))
        failing.forward = lambda x: x
        model(torch.tensor([2.0]))
    assert ranges.forwards[-1] == [2.0, 2.0, 2.0]


def test_the_output_is_the_same_with_and_without():
    model, (call,) = cosmos(), cosmos_calls(1)
    kwargs = {k: v.bfloat16() if isinstance(v, torch.Tensor) else v for k, v in call.kwargs.items()}
    expected = model(**kwargs)[0]
    with probe(model):
        assert torch.equal(model(**kwargs)[0], expected)
