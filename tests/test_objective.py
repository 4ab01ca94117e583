"""The lesson and the loss: numbers by address, kohya's formulas in fp64, masks, and fp32 throughout."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from finitune.config.schema import ObjectiveSection
from finitune.datasets.items import TrainingBatch
from finitune.errors import NumericsError
from finitune.training.objective import (
    FlowObjective,
    NoisePurpose,
    add_noise,
    compute_elementwise_error,
    compute_flux_shift,
    compute_sample_losses,
    draw_addressed_noise,
    draw_addressed_uniform,
    sample_sigmas,
)

SHAPE = (4, 1, 6, 8)
KINDS = ("l2", "l1", "huber", "smooth_l1")


def batch_of(count: int, first: int = 0, mask: Tensor | None = None) -> TrainingBatch:
    names = tuple(f"{first + i}.png" for i in range(count))
    places = tuple(range(first, first + count))
    return TrainingBatch(torch.randn(count, *SHAPE), {}, torch.ones(count), mask, names, places)


def mask_of(count: int) -> Tensor:
    return torch.rand(count, 1, 1, *SHAPE[-2:])


# --- numbers by address ----------------------------------------------------------------------------------------------


@given(cuts=st.lists(st.integers(0, 12), max_size=5), purpose=st.sampled_from(NoisePurpose))
@settings(max_examples=20)
def test_a_batch_may_be_split_anyhow(cuts: list[int], purpose: NoisePurpose):
    edges = sorted({0, 12, *cuts})
    spans = [range(a, b) for a, b in pairwise(edges)]
    whole = draw_addressed_noise(3, 5, range(12), (2, 3), purpose)
    assert torch.equal(torch.cat([draw_addressed_noise(3, 5, span, (2, 3), purpose) for span in spans]), whole)
    drawn = torch.cat([draw_addressed_uniform(3, 5, span, purpose) for span in spans])
    assert torch.equal(drawn, draw_addressed_uniform(3, 5, range(12), purpose))


def test_each_part_of_the_address_counts():
    addresses = [(0, 1, [0]), (1, 1, [0]), (0, 2, [0]), (0, 1, [1]), ((0, 1), 1, [0])]
    noises = [draw_addressed_noise(*address, (8,), purpose) for address in addresses for purpose in NoisePurpose]
    uniforms = [draw_addressed_uniform(*address, purpose) for address in addresses for purpose in NoisePurpose]
    for drawn in (noises, uniforms):
        assert len({tuple(x.flatten().tolist()) for x in drawn}) == len(drawn)


def test_noise_is_normal_and_scalars_are_noise_without_a_shape():
    noise = draw_addressed_noise(0, 0, range(8), (64, 64), NoisePurpose.NOISE)
    assert noise.dtype is torch.float32
    assert abs(float(noise.mean())) < 0.02
    assert float(noise.std()) == pytest.approx(1, abs=0.02)
    assert draw_addressed_noise(0, 0, range(8), (), NoisePurpose.NOISE).shape == (8,)
    assert draw_addressed_noise(0, 0, [], (2, 2), NoisePurpose.NOISE).shape == (0, 2, 2)


def test_uniform_numbers_are_even_and_never_at_an_end():
    u = draw_addressed_uniform(0, 0, range(20_000), NoisePurpose.SIGMA)
    assert u.dtype is torch.float64
    assert 0 < u.min() < 1e-3
    assert 1 - 1e-3 < u.max() < 1
    assert torch.histc(u, 10, 0, 1).sub(2000).abs().max() < 150
    assert abs(float(torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1])) < 0.02


def test_the_numbers_of_today_are_those_of_tomorrow():
    """A golden: a change here makes every resumed run another run."""
    assert draw_addressed_uniform(0, 1, [2], NoisePurpose.SIGMA).tolist() == [0.20087451877633822]
    noise = draw_addressed_noise(0, 1, [2], (4,), NoisePurpose.NOISE)[0]
    assert noise.tolist() == pytest.approx([-1.65082002, -0.75399470, 1.28143621, 1.65425277], abs=1e-6)


# --- the lesson ------------------------------------------------------------------------------------------------------


def test_a_lesson_is_rectified_flow():
    batch = batch_of(3)
    objective = FlowObjective(ObjectiveSection(timestep_sampling="uniform"))
    lesson = objective.draw(batch, seed=1, step=7)
    noise = lesson.target + batch.latents
    sigma = lesson.sigma.view(3, 1, 1, 1, 1)
    torch.testing.assert_close(lesson.x_t, (1 - sigma) * batch.latents + sigma * noise)
    torch.testing.assert_close(noise, draw_addressed_noise(1, 7, batch.places, SHAPE, NoisePurpose.NOISE))
    torch.testing.assert_close(lesson.x_t - sigma * lesson.target, batch.latents)  # one Euler step back to the picture
    assert {lesson.x_t.dtype, lesson.sigma.dtype, lesson.target.dtype} == {torch.float32}
    assert lesson.sigma.unique().numel() == 3


def test_a_split_batch_has_the_same_lesson():
    batch, objective = batch_of(5), FlowObjective(ObjectiveSection(ip_noise_gamma=0.2))
    whole = objective.draw(batch, 0, 3)
    parts = [objective.draw(batch.part(a, b), 0, 3) for a, b in ((0, 2), (2, 5))]
    for name in ("x_t", "sigma", "target"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))


def test_input_noise_reaches_the_model_but_not_the_target():
    batch = batch_of(2)
    plain = FlowObjective(ObjectiveSection()).draw(batch, 0, 0)
    rough = FlowObjective(ObjectiveSection(ip_noise_gamma=0.1)).draw(batch, 0, 0)
    assert torch.equal(rough.target, plain.target)
    assert torch.equal(rough.sigma, plain.sigma)
    extra = draw_addressed_noise(0, 0, batch.places, SHAPE, NoisePurpose.INPUT_NOISE)
    torch.testing.assert_close(rough.x_t - plain.x_t, plain.sigma.view(2, 1, 1, 1, 1) * 0.1 * extra, atol=1e-6, rtol=0)


def test_flux_shift_sees_the_patches_of_the_latents():
    batch = batch_of(2)
    settings_ = ObjectiveSection(timestep_sampling="flux_shift")
    u = draw_addressed_uniform(0, 0, batch.places, NoisePurpose.SIGMA)
    assert torch.equal(FlowObjective(settings_).draw(batch, 0, 0).sigma, sample_sigmas(u, settings_, 3 * 4))
    assert compute_flux_shift(12) != compute_flux_shift(48)


def test_a_measurement_asks_the_same_each_time():
    batch, objective = batch_of(2), FlowObjective(ObjectiveSection(ip_noise_gamma=0.5))
    low, high = objective.at(batch, 0.25, seed=9), objective.at(batch, 0.75, seed=9)
    assert low.sigma.tolist() == [0.25, 0.25]
    assert torch.equal(low.target, high.target)
    torch.testing.assert_close(low.x_t, 0.75 * batch.latents + 0.25 * (low.target + batch.latents))


@pytest.mark.parametrize("sigma", [torch.rand(2).bfloat16(), torch.rand(2).double(), torch.rand(2).half()])
def test_a_sigma_in_another_precision_is_refused(sigma: Tensor):
    latents = torch.randn(2, *SHAPE)
    with pytest.raises(NumericsError, match="sigma") as caught:
        add_noise(latents, latents, sigma)
    assert caught.value.code == "OBJECTIVE-DTYPE"
    with pytest.raises(NumericsError, match="sigma"):
        compute_sample_losses(latents, latents, sigma, None, ObjectiveSection())


# --- the loss --------------------------------------------------------------------------------------------------------


def kohya_error(d: Tensor, kind: str, c: float) -> Tensor:
    """sd-scripts' formulas as they are written there, in fp64."""
    d = d.double()
    match kind:
        case "l2":
            return d**2
        case "l1":
            return d.abs()
        case "huber":
            return 2 * c * (torch.sqrt(d**2 + c**2) - c)
    return 2 * (torch.sqrt(d**2 + c**2) - c)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("c", [0.01, 0.1, 2.0])
def test_errors_are_kohyas(kind: str, c: float):
    d = torch.cat([torch.randn(500) * 10.0**e for e in (-2, 0, 2)])
    torch.testing.assert_close(
        compute_elementwise_error(d, kind, c).double(), kohya_error(d, kind, c), rtol=2e-6, atol=1e-18
    )


def test_huber_keeps_what_the_plain_root_cancels_and_overflows_with_nothing():
    small = torch.tensor([1e-5])
    assert float(2 * 0.1 * (torch.sqrt(small**2 + 0.1**2) - 0.1)) == 0
    assert float(compute_elementwise_error(small, "huber", 0.1)) == pytest.approx(1e-10, rel=1e-5)
    assert compute_elementwise_error(torch.tensor([1e30]), "huber", 0.1).isfinite()
    assert compute_elementwise_error(torch.tensor([1e30]), "l2").isinf()


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_an_error_is_finite_at_zero(kind: str):
    d = torch.zeros(3, requires_grad=True)
    compute_elementwise_error(d, kind, 0.1).sum().backward()
    assert d.grad is not None
    assert d.grad.tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["none", "sigma_sqrt", "cosmap"])
@pytest.mark.parametrize("masked", [False, True])
def test_losses_are_those_of_a_slow_twin(kind: str, scheme: str, masked: bool):
    objective = ObjectiveSection(loss_type=kind, weighting_scheme=scheme)
    prediction, target, sigma = torch.randn(3, *SHAPE), torch.randn(3, *SHAPE), torch.tensor([0.1, 0.5, 0.9])
    mask = mask_of(3) if masked else None
    expected = []
    for b in range(3):
        s = sigma[b].double()
        weight = {"sigma_sqrt": s**-2, "cosmap": 2 / (torch.pi * (1 - 2 * s + 2 * s * s))}.get(scheme, 1.0)
        loss = kohya_error(prediction[b] - target[b], kind, 0.1) * weight
        expected.append((loss * mask[b].double() if mask is not None else loss).mean())
    losses = compute_sample_losses(prediction, target, sigma, mask, objective)
    torch.testing.assert_close(losses.double(), torch.stack(expected), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_loss_is_fp32_whatever_the_model_answers_in(dtype: torch.dtype):
    prediction, target = torch.full((1, *SHAPE), 300.0, dtype=dtype), torch.zeros(1, *SHAPE)
    losses = compute_sample_losses(prediction, target, torch.tensor([0.5]), None, ObjectiveSection())
    assert losses.dtype is torch.float32
    assert losses.tolist() == [90_000.0]  # beyond fp16


def test_the_gradient_goes_through_the_half_answer():
    prediction = torch.zeros(1, *SHAPE, dtype=torch.float16, requires_grad=True)
    target = torch.ones(1, *SHAPE)
    compute_sample_losses(prediction, target, torch.tensor([0.5]), None, ObjectiveSection()).sum().backward()
    assert prediction.grad is not None
    torch.testing.assert_close(prediction.grad.float(), torch.full((1, *SHAPE), -2 / target.numel()), rtol=1e-3, atol=0)


@pytest.mark.parametrize("normalised", [False, True])
def test_a_mask_without_area_makes_no_loss_and_no_nan(normalised: bool):
    batch = batch_of(2, mask=torch.zeros(2, 1, 1, *SHAPE[-2:]))
    objective = FlowObjective(ObjectiveSection(mask_normalised=normalised))
    lesson = objective.draw(batch, 0, 0)
    prediction = torch.randn(2, *SHAPE, requires_grad=True)
    losses = objective.losses(lesson, prediction, batch)
    losses.sum().backward()
    assert losses.tolist() == [0, 0]
    assert prediction.grad is not None
    assert not prediction.grad.any()


def test_a_normalised_mask_makes_the_size_of_the_area_not_matter_down_to_the_floor():
    target, prediction, sigma = torch.zeros(1, *SHAPE), torch.ones(1, *SHAPE), torch.tensor([0.5])
    rows = {height: torch.zeros(1, 1, 1, 6, 8) for height in (1, 3, 6)}
    for height, mask in rows.items():
        mask[..., :height, :] = 1
    plain = {h: float(compute_sample_losses(prediction, target, sigma, m, ObjectiveSection())) for h, m in rows.items()}
    assert plain == pytest.approx({1: 1 / 6, 3: 1 / 2, 6: 1})
    settings_ = ObjectiveSection(mask_normalised=True, mask_area_floor=0.5)
    even = {h: float(compute_sample_losses(prediction, target, sigma, m, settings_)) for h, m in rows.items()}
    assert even == pytest.approx({1: 1 / 3, 3: 1, 6: 1})


def test_what_a_mask_covers_has_no_gradient():
    mask = torch.ones(1, 1, 1, *SHAPE[-2:])
    mask[..., 2:] = 0
    prediction = torch.randn(1, *SHAPE, requires_grad=True)
    compute_sample_losses(
        prediction, torch.zeros(1, *SHAPE), torch.tensor([0.5]), mask, ObjectiveSection()
    ).sum().backward()
    assert prediction.grad is not None
    assert not prediction.grad[..., 2:].any()
    assert prediction.grad[..., :2].all()


def test_one_samples_nan_is_its_own():
    prediction, target = torch.randn(3, *SHAPE), torch.randn(3, *SHAPE)
    prediction[1, 0, 0, 0, 0] = float("nan")
    losses = compute_sample_losses(prediction, target, torch.full((3,), 0.5), None, ObjectiveSection())
    assert losses.isfinite().tolist() == [True, False, True]


def test_an_answer_of_another_shape_is_refused():
    with pytest.raises(NumericsError) as caught:
        compute_sample_losses(
            torch.zeros(1, 4, 6, 8), torch.zeros(1, *SHAPE), torch.tensor([0.5]), None, ObjectiveSection()
        )
    assert caught.value.code == "OBJECTIVE-SHAPE"
