"""Running numbers that a NaN cannot spoil, spikes that an outlier cannot hide, and silence that noise cannot drown."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from finitune.report import Finding, Level
from finitune.training.telemetry import (
    MIN_SPIKE_HISTORY,
    NO_TRAINING_CHECK_UPDATES,
    NoTrainingDetector,
    RunningLoss,
    SpikeDetector,
    compute_robust_zscore,
    digest_tensors,
)

FLOATS = st.floats(allow_nan=True, allow_infinity=True, width=32)


# --- the meter -------------------------------------------------------------------------------------------------------


@given(values=st.lists(FLOATS, max_size=30))
@settings(max_examples=50)
def test_a_meter_is_that_of_its_finite_values(values: list[float]):
    meter, finite = RunningLoss(decay=0.9), [value for value in values if math.isfinite(value)]
    for value in values:
        meter.add(value)
    assert (meter.count, meter.nonfinite) == (len(finite), len(values) - len(finite))
    assert meter.last == (finite[-1] if finite else None)
    if not finite:
        assert meter.mean is None
        assert meter.smoothed is None
        return
    weights = [0.9**age for age in reversed(range(len(finite)))]
    smoothed = math.fsum(w * v for w, v in zip(weights, finite, strict=True)) / math.fsum(weights)
    size = max(abs(value) for value in finite)
    assert meter.mean == pytest.approx(math.fsum(finite) / len(finite), abs=1e-9 * size)
    assert meter.smoothed == pytest.approx(smoothed, abs=1e-9 * size)


def test_a_steady_loss_is_smoothed_to_itself_from_the_first_value():
    meter = RunningLoss()
    for _ in range(3):
        meter.add(0.25)
        assert meter.smoothed == pytest.approx(0.25, rel=1e-12)


def test_a_new_epoch_begins_its_mean_anew_and_nothing_else():
    meter = RunningLoss()
    meter.add(1.0)
    meter.start_epoch()
    assert meter.mean is None
    assert meter.smoothed == 1.0
    meter.add(3.0)
    assert (meter.mean, meter.count) == (3.0, 2)


@given(values=st.lists(FLOATS, min_size=1, max_size=20), cut=st.integers(0, 20))
@settings(max_examples=30)
def test_a_meter_goes_on_from_json_to_the_same_bits(values: list[float], cut: int):
    whole, half = RunningLoss(), RunningLoss()
    for value in values[:cut]:
        half.add(value)
    resumed = RunningLoss()
    resumed.load_state_dict(json.loads(json.dumps(half.state_dict(), allow_nan=False)))
    for value in values[cut:]:
        resumed.add(value)
    for value in values:
        whole.add(value)
    assert resumed == whole


# --- spikes ----------------------------------------------------------------------------------------------------------


def losses(count: int, seed: int = 0) -> list[float]:
    """Losses as a run with random sigmas has them: over a factor of ten or so, without fault."""
    generator = torch.Generator().manual_seed(seed)
    return (0.1 * torch.exp(0.6 * torch.randn(count, generator=generator))).tolist()


def test_ordinary_losses_are_no_spikes_and_a_real_one_is():
    spikes = SpikeDetector()
    assert [spikes.add(i, loss, 0.01) for i, loss in enumerate(losses(2000))] == [None] * 2000
    finding = spikes.add(2000, 50.0, 0.01)
    assert finding is not None
    assert finding.code == "TRAINING-SPIKE"
    assert finding.subject == "step 2000"
    assert "loss" in finding.message
    assert "gradient" not in finding.message
    assert finding.evidence["loss"] == 50.0
    assert spikes.count == 1


def test_an_outlier_does_not_hide_the_next_one():
    spikes = SpikeDetector()
    for i, loss in enumerate(losses(60)):
        spikes.add(i, loss, 1.0)
    for start in (100, 200, 300):
        assert spikes.add(start, 1e6, 1.0) is not None
        assert spikes.add(start + 1, 0.1, 1.0) is None
    assert spikes.count == 3


def test_spikes_in_a_row_are_told_once_and_become_the_usual():
    spikes = SpikeDetector()
    for i in range(40):
        spikes.add(i, 0.1, 1.0)
    found = [spikes.add(40 + i, 10.0, 1.0) for i in range(200)]
    assert [finding is not None for finding in found] == [True] + [False] * 199


def test_a_gradient_can_spike_alone_and_low_values_never_do():
    spikes = SpikeDetector()
    for i in range(30):
        spikes.add(i, 0.1, 1.0)
    assert spikes.add(30, 1e-6, 1e-6) is None
    finding = spikes.add(31, 0.1, 30.0)
    assert finding is not None
    assert "gradient norm" in finding.message
    assert "loss" not in finding.message


def test_what_is_not_finite_or_zero_is_no_spike_and_leaves_no_trace():
    spikes = SpikeDetector()
    for i in range(30):
        spikes.add(i, 0.1, 1.0)
    before = spikes.state_dict()
    for value in (math.nan, math.inf, 0.0, -1.0):
        assert spikes.add(31, value, value) is None
    assert spikes.state_dict() == before


def test_nothing_is_told_without_a_history():
    spikes = SpikeDetector()
    assert [spikes.add(i, 10.0**i, 10.0**i) for i in range(MIN_SPIKE_HISTORY)] == [None] * MIN_SPIKE_HISTORY


def test_the_score_is_that_of_a_normal_distribution_where_there_is_one():
    history = [math.exp(x) for x in torch.randn(20_001).tolist()]
    assert compute_robust_zscore(math.exp(3.0), history) == pytest.approx(3.0, abs=0.1)
    assert compute_robust_zscore(1.0, [1.0] * 5) == 0


def test_spikes_go_on_from_json():
    whole, half = SpikeDetector(), SpikeDetector()
    values = [*losses(50), 100.0, 100.0, 0.1]
    for i, loss in enumerate(values[:51]):
        half.add(i, loss, loss)
    resumed = SpikeDetector()
    resumed.load_state_dict(json.loads(json.dumps(half.state_dict(), allow_nan=False)))
    assert [resumed.add(51 + i, loss, loss) for i, loss in enumerate(values[51:])] == [None, None]
    for i, loss in enumerate(values):
        whole.add(i, loss, loss)
    assert resumed == whole


# --- silence ---------------------------------------------------------------------------------------------------------


class TwoSites(nn.Module):
    """Two low-rank sites whose up factors begin as zeros; the second one is called only if asked."""

    def __init__(self, both: bool = True):
        super().__init__()
        self.both = both
        for site in ("a", "b"):
            setattr(self, f"{site}_down", nn.Parameter(torch.randn(2, 3)))
            setattr(self, f"{site}_up", nn.Parameter(torch.zeros(3, 2)))

    def named(self) -> dict[str, nn.Parameter]:
        return {name.replace("_", "."): parameter for name, parameter in self.named_parameters()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + x @ self.a_down.T @ self.a_up.T
        return y + y @ self.b_down.T @ self.b_up.T if self.both else y


def watched(model: TwoSites, optimizer: torch.optim.Optimizer, updates: int = 20) -> dict[int, Finding]:
    """Train on noise, and what was said by update."""
    silence, found = NoTrainingDetector(model.named()), {}
    for update in range(1, updates + 1):
        optimizer.zero_grad(set_to_none=True)
        (model(torch.randn(4, 3)) - 1).square().mean().backward()
        gradients = {name: parameter.grad for name, parameter in model.named().items()}
        optimizer.step()
        finding = silence.watch(update, gradients, [group["lr"] for group in optimizer.param_groups])
        if finding:
            found[update] = finding
    return found


def test_a_run_that_learns_is_not_disturbed():
    model = TwoSites()
    assert watched(model, torch.optim.AdamW(model.parameters(), lr=1e-6)) == {}


def test_a_rate_that_rounding_swallows_is_told():
    model = TwoSites()
    ((update, finding),) = watched(model, torch.optim.AdamW(model.parameters(), lr=1e-9, weight_decay=0)).items()
    assert update == 20
    assert finding.evidence["first"] == ["a.down", "b.down"]
    assert finding.evidence["sites without effect"] == 0
    assert "too small" in finding.remedy


def test_a_site_that_is_never_called_is_named_after_the_last_look():
    model = TwoSites(both=False)
    ((update, finding),) = watched(model, torch.optim.AdamW(model.parameters(), lr=1e-3)).items()
    assert update == NO_TRAINING_CHECK_UPDATES[-1]
    assert (finding.level, finding.code) == (Level.WARNING, "TRAINS-NOTHING")
    assert finding.message == "only 2 of 4 trained tensors changed in 20 updates"
    assert finding.evidence["first"] == ["b.down", "b.up"]
    assert finding.evidence["first sites"] == ["b"]
    assert finding.evidence["without gradient"] == 2
    assert "does not call" in finding.remedy


def test_names_are_bounded():
    parameters = {f"site{i}.up": torch.zeros(2) for i in range(1000)} | {"x.up": torch.ones(1)}
    silence = NoTrainingDetector(parameters)
    parameters["x.up"].mul_(2)
    finding = silence.watch(20, {})
    assert finding is not None
    assert finding.evidence["unchanged"] == finding.evidence["sites without effect"] == 1000
    assert len(str(finding.evidence)) < 400


def test_between_the_looks_nothing_is_looked_at():
    silence = NoTrainingDetector({"a.up": torch.zeros(2)})
    assert [silence.watch(update, {}) for update in range(3, 20)] == [None] * 17
    assert silence.watch(1000, {}) is None


@given(
    values=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=12),
    place=st.integers(0, 11),
    bit=st.integers(0, 31),
)
@settings(max_examples=60)
def test_a_fingerprint_tells_one_flipped_bit(values: list[float], place: int, bit: int):
    tensor = torch.tensor(values)
    changed = tensor.clone()
    changed.view(torch.int32)[place % len(values)] ^= torch.tensor(1 << bit).to(torch.int32)
    same, other = digest_tensors([tensor, changed])
    assert digest_tensors([tensor.clone()]) == [same]
    assert other != same


def test_a_fingerprint_tells_steps_that_cancel_and_swapped_elements():
    before = torch.tensor([1.0, 1.0, 2.0, 3.0])
    stepped, swapped = before + torch.tensor([1e-4, -1e-4, 0, 0]), before[[0, 1, 3, 2]]
    assert len(set(digest_tensors([before, stepped, swapped]))) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_a_fingerprint_takes_any_dtype_and_stride(dtype: torch.dtype):
    tensor = torch.arange(6.0).view(2, 3).to(dtype)
    assert digest_tensors([tensor.T, tensor.T.contiguous()])[0] == digest_tensors([tensor.T.contiguous()])[0]
    assert digest_tensors([]) == []


def test_a_long_digest_is_that_of_its_pieces(monkeypatch: pytest.MonkeyPatch):
    tensor = torch.randn(100)
    whole = digest_tensors([tensor])
    monkeypatch.setattr("finitune.training.telemetry._DIGEST_CHUNK_ELEMENTS", 7)
    assert digest_tensors([tensor]) == whole
