"""The gradient of a step: a mean over samples however they are grouped, noise by place, and who is to blame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from finitune.adapters.core import Target
from finitune.adapters.dropout import Dropout
from finitune.adapters.layer import attach_adapters
from finitune.adapters.new import create_adapter
from finitune.config.schema import ObjectiveSection
from finitune.datasets.items import TrainingBatch
from finitune.errors import NumericsError
from finitune.training.adapted_model import AdaptedModel
from finitune.training.objective import FlowObjective
from finitune.training.ranks import ProcessRanks
from finitune.training.step import GradientAccumulator, StepGradient, is_out_of_memory, split_batch

CHANNELS, SIDE = 4, 3
NAN = float("nan")
few = settings(max_examples=15)


class Root(nn.Module):
    """Two layers over the channels; the second is called only where it is `used`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(CHANNELS, CHANNELS)
        self.second = nn.Linear(CHANNELS, CHANNELS)
        self.used = True
        self.requires_grad_(False)

    def forward(self, noisy: Tensor, sigma: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
        x = noisy.movedim(1, -1)
        x = torch.tanh(self.first(x) + sigma.view(-1, 1, 1, 1, 1)) * conditioning["told"].view(-1, 1, 1, 1, 1)
        return (self.second(x) if self.used else x).movedim(-1, 1)


def differentiator(dropout: Dropout | float = 0.0, algorithm: str = "lora", **options: Any) -> GradientAccumulator:
    """A learner with two adapters that do something."""
    torch.manual_seed(0)
    root = Root()
    adapters = {}
    for name in ("first", "second"):
        weight: Any = root.get_submodule(name).weight
        adapter = create_adapter(Target(weight, 2, 2.0), algorithm, torch.Generator().manual_seed(1))
        adapter.tensors["up" if algorithm == "lora" else "w2_a"].normal_(std=0.3, generator=seeded(-98))
        adapters[name] = adapter
    attached = attach_adapters(
        root, adapters, trainable=True, dropout=dropout if isinstance(dropout, Dropout) else Dropout(dropout)
    )
    learner = AdaptedModel(root, {"transformer": attached})
    return GradientAccumulator(learner, FlowObjective(ObjectiveSection(**options)), ProcessRanks(), seed=7)


def batch_of(places: Sequence[int], **changes: Any) -> TrainingBatch:
    """Samples by their places, each with content that depends on its place alone."""
    latents = torch.stack([torch.randn(CHANNELS, 1, SIDE, SIDE, generator=seeded(place)) for place in places])
    told = torch.tensor([1.0 + 0.1 * place for place in places])
    names = tuple(f"{place}.png" for place in places)
    batch = TrainingBatch(latents, {"told": told}, torch.ones(len(places)), None, names, tuple(places))
    return replace(batch, **changes)


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 + number)


def vector(one: GradientAccumulator) -> Tensor:
    """The gradient as it lies in the parameters."""
    return torch.cat([p.grad.flatten().clone() for _, p in one.learner.named_parameters()])  # type: ignore[union-attr]


def step_of(batches: Sequence[TrainingBatch | None], split: int = 1, **options: Any) -> tuple[StepGradient, Tensor]:
    one = differentiator(**options)
    one.split = split
    return one.gradient(batches, step=3), vector(one)


def slow(places: Sequence[int], step: int = 3) -> tuple[float, Tensor]:
    """The obvious twin: every sample by itself, and the mean of their gradients."""
    gradients, losses = [], []
    for place in places:
        one = differentiator()
        loss = one.losses(batch_of([place]), step).mean()
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append(vector(one))
    return sum(losses) / len(losses), torch.stack(gradients).mean(0)


def cut(places: Sequence[int], sizes: Sequence[int]) -> list[TrainingBatch]:
    """The places in groups of these sizes, going round, until all are there."""
    batches, begin, turn = [], 0, 0
    while begin < len(places):
        end = begin + sizes[turn % len(sizes)]
        batches.append(batch_of(places[begin:end]))
        begin, turn = end, turn + 1
    return batches


@few
@given(count=st.integers(1, 6), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3), split=st.integers(1, 4))
def test_the_gradient_is_the_mean_over_samples_however_they_are_grouped(count: int, sizes: list[int], split: int):
    places = list(range(count))
    loss, wanted = slow(places)
    gradient, found = step_of(cut(places, sizes), split)
    assert gradient.samples == count and gradient.finite
    assert gradient.loss == pytest.approx(loss, rel=1e-5)
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-6)
    assert gradient.norm == pytest.approx(float(torch.linalg.vector_norm(wanted)), rel=1e-4)


@few
@given(order=st.permutations(range(5)))
def test_noise_goes_with_the_place_and_not_with_the_order(order: list[int]):
    _, wanted = step_of([batch_of(range(5))])
    _, found = step_of([batch_of(order[:2]), batch_of(order[2:])])
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_a_sample_that_is_left_out_leaves_the_others_their_noise():
    one = differentiator()
    whole = one.losses(batch_of([0, 1, 2]), 3)
    rest = one.losses(batch_of([0, 2]), 3)
    assert torch.allclose(rest, whole[[0, 2]], rtol=1e-6)


def test_steps_and_attempts_have_noise_of_their_own():
    one = differentiator()
    batch = batch_of([0, 1])
    losses = [one.losses(batch, step, attempt) for step, attempt in ((3, 0), (4, 0), (3, 1), (3, 0))]
    assert torch.equal(losses[0], losses[3])
    assert not torch.allclose(losses[0], losses[1]) and not torch.allclose(losses[0], losses[2])


def test_samples_count_by_their_weights_and_the_sum_is_over_all_of_them():
    weights = torch.tensor([1.0, 0.0, 0.5])
    gradient, _ = step_of([batch_of([0, 1, 2], weights=weights)])
    losses = differentiator().losses(batch_of([0, 1, 2]), 3).detach()
    assert gradient.loss == pytest.approx(float((losses * weights).sum() / 3), rel=1e-6)


def test_the_strength_of_a_dataset_is_in_force():
    one = differentiator()
    usual, none = one.losses(batch_of([0]), 3), one.losses(batch_of([0], multiplier=0.0), 3)
    assert not torch.allclose(usual, none)
    assert torch.allclose(one.losses(batch_of([0]), 3), usual)


def test_dropout_is_that_of_the_step():
    first, again, other = (differentiator(dropout=0.5) for _ in range(3))
    gradients = [one.gradient([batch_of([0, 1])], step) for one, step in ((first, 3), (again, 3), (other, 4))]
    assert torch.equal(vector(first), vector(again))
    assert gradients[0].loss == gradients[1].loss != gradients[2].loss
    assert gradients[0].loss != step_of([batch_of([0, 1])])[0].loss


@pytest.mark.parametrize("kind", ["network", "rank", "module"])
@pytest.mark.parametrize("algorithm", ["lora", "loha"])
def test_masks_are_of_the_samples_however_the_batch_is_cut(algorithm: str, kind: str):
    """What MEMORY-HALVED says of the gradient, and what a run on two devices relies on."""
    places, shapes = range(6), ([range(6)], [range(4), range(4, 6)], [range(3), range(3, 6)])
    found: list[Tensor] = []
    for cut, split in [(shapes[0], 1), (shapes[0], 2), (shapes[0], 6), (shapes[1], 2), (shapes[2], 1)]:
        one = differentiator(Dropout(**{kind: 0.4}), algorithm)
        one.split = split
        one.gradient([batch_of(list(part)) for part in cut], step=3)
        found.append(vector(one))
    for gradient in found[1:]:
        assert torch.allclose(gradient, found[0], rtol=1e-5, atol=1e-7)
    whole = differentiator(Dropout(), algorithm)
    whole.gradient([batch_of(list(places))], step=3)
    assert not torch.allclose(vector(whole), found[0], rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("kind", ["network", "rank", "module"])
def test_a_checkpointed_block_draws_its_masks_once_more(kind: str):
    gradients = []
    for checkpointed in (False, True):
        one = differentiator(Dropout(**{kind: 0.4}))
        denoiser = one.learner.denoiser
        if checkpointed:
            one.learner.denoiser = lambda *x, inner=denoiser: checkpoint(inner, *x, use_reentrant=False)
        one.gradient([batch_of([0, 1, 2])], step=3)
        gradients.append(vector(one))
    assert torch.equal(*gradients)


def test_samples_and_layers_have_masks_of_their_own():
    one = differentiator(Dropout(0.3, 0.3, 0.3))
    one.learner.seed_dropout((7, 3, 0, 0), (7, 3, 0, 1))
    layers = one.learner.attached["transformer"].layers.values()
    seeds = torch.cat([layer.held.dropout.seeds for layer in layers if layer.held.dropout.seeds is not None])
    assert len(seeds.unique()) == 4


# --- who is to blame --------------------------------------------------------------------------------------------------


def test_the_samples_whose_loss_is_not_finite_are_named():
    spoiled = batch_of([0, 1, 2, 3])
    spoiled.latents[2, 0, 0, 0, 0] = NAN
    one = differentiator()
    gradient = one.gradient([batch_of([4]), spoiled], 3)
    assert not gradient.finite
    assert gradient.bad == ("2.png",)
    assert gradient.names == ("4.png", "0.png", "1.png", "2.png", "3.png")
    assert one.find_nonfinite_samples(gradient.batches, 3) == ("2.png",)


class Root0(torch.autograd.Function):
    """One, whose gradient is not finite where it is told so: as of a root at zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bad: Tensor) -> Tensor:
        ctx.save_for_backward(bad)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (bad,) = ctx.saved_tensors
        return torch.where(bad.view(-1, 1, 1, 1, 1), NAN, gradient), None


def test_a_sample_with_a_bad_gradient_alone_is_found_by_trying_each():
    one = differentiator()
    plain = one.learner.denoiser
    one.learner.denoiser = lambda x, s, told: Root0.apply(plain(x, s, told), told["told"] > 1.15)  # type: ignore[assignment]
    gradient = one.gradient([batch_of([0, 1, 2])], 3)
    assert not gradient.finite and gradient.bad == () and gradient.loss == gradient.loss
    assert one.find_nonfinite_samples(gradient.batches, 3) == ("2.png",)


def test_good_samples_have_nobody_to_blame():
    one = differentiator()
    gradient = one.gradient([batch_of([0, 1])], 3)
    assert one.find_nonfinite_samples(gradient.batches, 3) == ()


def test_parameters_that_nothing_reaches_are_named():
    one = differentiator()
    root: Any = one.learner.denoiser
    root.used = False
    gradient = one.gradient([batch_of([0, 1])], 3)
    assert gradient.missing == ("transformer.second.down", "transformer.second.up")
    assert all(not bool(p.grad.any()) for n, p in one.learner.named_parameters() if n in gradient.missing)


def test_a_step_without_samples_is_known_as_one():
    one = differentiator()
    gradient = one.gradient([None, None], 3)
    assert (gradient.samples, gradient.names, gradient.missing) == (0, (), ())
    assert not vector(one).any()


def test_a_loss_that_no_adapter_has_touched_has_no_gradient():
    one = differentiator()
    one.learner.denoiser = lambda x, s, told: x
    gradient = one.gradient([batch_of([0])], 3)
    assert gradient.finite and gradient.norm == 0.0
    assert len(gradient.missing) == 4


# --- memory -----------------------------------------------------------------------------------------------------------


def short(one: GradientAccumulator, largest: int, error: BaseException) -> None:
    """Let the denoiser fail on more than `largest` samples."""
    plenty = one.learner.denoiser

    def answer(noisy: Tensor, sigma: Tensor, told: Mapping[str, Tensor]) -> Tensor:
        if len(noisy) > largest:
            raise error
        return plenty(noisy, sigma, told)

    one.learner.denoiser = answer


@few
@given(count=st.integers(2, 8), largest=st.integers(1, 7))
def test_halved_micro_batches_have_the_same_gradient(count: int, largest: int):
    places = list(range(count))
    gradient, wanted = step_of([batch_of(places)])
    one = differentiator()
    short(one, largest, torch.OutOfMemoryError("CUDA out of memory"))
    halved = one.gradient([batch_of(places)], 3)
    assert torch.allclose(vector(one), wanted, rtol=1e-4, atol=1e-6)
    assert halved.loss == pytest.approx(gradient.loss, rel=1e-5)
    assert halved.names == gradient.names
    assert max(map(len, split_batch(batch_of(places), one.split))) <= largest
    assert one.split == 1 or max(map(len, split_batch(batch_of(places), one.split // 2))) > largest


def test_a_single_sample_that_does_not_fit_is_an_error_with_a_way_out():
    one = differentiator()
    short(one, 0, RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    with pytest.raises(NumericsError) as caught:
        one.gradient([batch_of([0, 1, 2])], 3)
    assert caught.value.code == "OUT-OF-MEMORY"
    assert "gradient_checkpointing" in caught.value.remedy
    assert caught.value.evidence["split"] == 4


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    one = differentiator()
    short(one, 0, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="shapes"):
        one.gradient([batch_of([0, 1])], 3)
    assert one.split == 1


def test_what_is_a_lack_of_memory():
    assert is_out_of_memory(torch.OutOfMemoryError("x")) and is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
