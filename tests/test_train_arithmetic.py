"""How a frozen model computes while an adapter learns on it: gradients as fp32's, and every bit back afterwards."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from finitune.config.schema import NetworkSection, ObjectiveSection
from finitune.datasets.items import TrainingBatch
from finitune.errors import UsageError
from finitune.models.anima import ANIMA
from finitune.models.anima.attention import apply_attention_function
from finitune.models.anima.encode import AnimaDenoiser, AnimaEncoders
from finitune.models.pico import get_pico_plan_path, scale_stream_
from finitune.numerics.compare import relative_l2
from finitune.precision.plan import ComponentPlan, PrecisionPlan
from finitune.training import compute_precision
from finitune.training.adapted_model import AdaptedModel, attach_training_adapters, make_training_adapters
from finitune.training.objective import FlowObjective
from finitune.training.ranks import ProcessRanks
from finitune.training.sites import choose_sites
from finitune.training.step import GradientAccumulator
from tests.training_made import PICTURES, pico

HALVES = ("current-half", "planned-half")
USUAL = NetworkSection()
BAR = 2e-3
"""The largest relative error of the gradient in half."""


@cache
def batch() -> TrainingBatch:
    """Three pictures with their captions."""
    parts = copy.deepcopy(pico())
    for module in (parts.vae, parts.text_encoder, parts.text_conditioner):
        module.float()
    encoders = AnimaEncoders.of(parts, "context")
    files = sorted(PICTURES.glob("*.png"))[:3]
    pixels = torch.stack([torch.from_numpy(np.array(Image.open(file).convert("RGB"))) for file in files])
    captions = [file.with_suffix(".txt").read_text(encoding="utf-8").strip() for file in files]
    told = encoders.collate([*encoders.texts(captions)])
    return TrainingBatch(encoders.latents(pixels), told, torch.ones(3), None, tuple(f.name for f in files), (0, 1, 2))


@cache
def plan() -> ComponentPlan:
    """The shipped plan of the denoiser."""
    return PrecisionPlan.load(get_pico_plan_path()).components["transformer"]


def transformer() -> nn.Module:
    """The denoiser, a copy."""
    return copy.deepcopy(pico().transformer).requires_grad_(False)


@contextmanager
def learning(root: nn.Module, precision: str, network: NetworkSection = USUAL) -> Iterator[GradientAccumulator]:
    """A denoiser with an adapter that has learned something, computing in a precision."""
    roots = {"transformer": root}
    fresh = make_training_adapters(roots, choose_sites(roots, ANIMA, network), network, 0)
    generator = torch.Generator().manual_seed(1)
    for adapter in fresh["transformer"].values():
        for tensor in adapter.tensors.values():
            tensor.add_(0.02 * torch.randn(tensor.shape, generator=generator))
    with ExitStack() as stack:
        own = plan() if precision == "planned-half" else None
        running = stack.enter_context(
            compute_precision.apply_training_precision(root, precision, own, attend=apply_attention_function)
        )
        attached = dict(attach_training_adapters({"transformer": running.module}, fresh, network))
        stack.enter_context(attached["transformer"])
        denoiser = AnimaDenoiser(running.module, pico().text_conditioner, pico().text_encoder)
        learner = AdaptedModel(denoiser, attached, {"transformer": running}, "transformer")
        yield GradientAccumulator(learner, FlowObjective(ObjectiveSection()), ProcessRanks(), seed=0)


def gradient(root: nn.Module, precision: str, network: NetworkSection = USUAL) -> Tensor:
    """The gradient of a step, as one vector."""
    with learning(root, precision, network) as differentiator:
        found = differentiator.gradient([batch()], 1)
        assert found.finite
        return torch.cat([p.grad.flatten().clone() for _, p in differentiator.learner.named_parameters()])  # type: ignore[union-attr]


@pytest.mark.parametrize("algorithm", ["lora", "loha", "lokr"])
def test_the_gradient_in_half_is_fp32s_and_closer_than_bf16s(algorithm: str):
    network = NetworkSection(algorithm=algorithm, network_dim=4, network_alpha=4)  # type: ignore[arg-type]
    wanted = gradient(transformer(), "fp32", network)
    errors = {name: relative_l2(gradient(transformer(), name, network), wanted) for name in (*HALVES, "bf16")}
    assert errors["bf16"] > 5e-3
    for half in HALVES:
        assert errors[half] <= BAR, errors
        assert errors[half] < errors["bf16"] / 4


@pytest.mark.parametrize("exponent", [-13, 0, 8])
def test_the_gradient_in_half_does_not_depend_on_the_size_of_the_stream(exponent: int):
    """From a stream of ordinary size to one of 2^28, whose gradient is 2^-8 of what it was."""
    root = transformer().float()
    scale_stream_(root, exponent)
    network = NetworkSection(network_dim=4, network_alpha=4, only_patterns=(r".*(q|k|v)_proj",))
    wanted = gradient(copy.deepcopy(root), "fp32", network)
    assert relative_l2(gradient(root, "current-half", network), wanted) <= BAR


def bits(root: nn.Module) -> dict[str, tuple[torch.dtype, str]]:
    """A digest of every tensor of a module."""
    return {
        name: (t.dtype, hashlib.blake2b(t.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest())
        for name, t in root.state_dict().items()
    }


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("precision", compute_precision.DESCRIPTION_BY_PRECISION)
def test_afterwards_every_bit_and_every_module_is_back(precision: str, stored: torch.dtype):
    root = transformer().to(stored)
    with torch.no_grad():
        for parameter in root.parameters():
            parameter.add_(1e-9)  # what fp16 cannot hold, where the weights are fp32
    before, kinds = bits(root), {name: type(module) for name, module in root.named_modules()}
    gradient(root, precision)
    assert bits(root) == before
    assert {name: type(module) for name, module in root.named_modules()} == kinds


def test_the_frozen_model_has_no_gradient_and_the_masters_are_fp32():
    root = transformer()
    with learning(root, "current-half") as differentiator:
        differentiator.gradient([batch()], 1)
        module = differentiator.learner.precisions["transformer"].module
        trained = {id(p) for _, p in differentiator.learner.named_parameters()}
        frozen = [p for p in module.parameters() if id(p) not in trained]
        assert {p.dtype for _, p in differentiator.learner.named_parameters()} == {torch.float32}
        assert all(p.grad is None and not p.requires_grad for p in frozen)
        assert torch.float16 in {p.dtype for p in frozen}


def test_giving_up_a_plan_makes_it_current_scaling():
    root = transformer()
    with learning(root, "planned-half") as differentiator:
        learner = differentiator.learner
        sites = learner.give_up_plans()
        assert len(sites) > 60 and all(site.startswith("transformer.") for site in sites)
        assert learner.give_up_plans() == []
        differentiator.gradient([batch()], 1)
        found = torch.cat([p.grad.flatten() for _, p in learner.named_parameters()])  # type: ignore[union-attr]
    assert relative_l2(found, gradient(transformer(), "current-half")) < 3e-4


def test_planned_half_needs_a_plan():
    with (
        pytest.raises(ValueError, match="needs a plan"),
        compute_precision.apply_training_precision(transformer(), "planned-half"),
    ):
        pass


def test_blocks_are_held_in_main_memory_only_where_there_is_another():
    with pytest.raises(UsageError) as caught, compute_precision.offload_blocks(transformer(), 1, torch.device("cpu")):
        pass
    assert caught.value.code == "OFFLOAD-NEEDS-GPU"


class FarFromDevice(compute_precision.BlockSwapper):
    """Weights of a block that is not on the device are NaN, as good as absent; `peak` blocks were there at once."""

    inside = peak = 0

    def move_in(self, block: nn.Module) -> None:
        super().move_in(block)
        self.inside += 1
        self.peak = max(self.peak, self.inside)

    def send_home(self, block: nn.Module) -> None:
        self.inside -= block is self.resident
        for parameter, _ in self.held[block]:
            parameter.data = torch.full_like(parameter.data, float("nan"))


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("precision", ["fp32", *HALVES])
@pytest.mark.parametrize("count", [1, 2, 99])
def test_so_many_blocks_take_turns_on_the_device_and_nothing_else_changes(
    count: int, precision: str, checkpointed: bool
):
    root = transformer()
    before, wanted = bits(root), gradient(transformer(), precision)
    if checkpointed:
        compute_precision.enable_block_checkpointing(root)
    with learning(root, precision) as differentiator:
        module = differentiator.learner.precisions["transformer"].module
        blocks = compute_precision.find_blocks(module)
        assert len(blocks) >= 2
        with FarFromDevice.install(blocks[:count], torch.device("cpu")) as swapper:
            assert isinstance(swapper, FarFromDevice)
            assert [bool(p.isnan().any()) for block in blocks for p in block.parameters() if not p.requires_grad] == [
                place < count for place, block in enumerate(blocks) for p in block.parameters() if not p.requires_grad
            ]
            for _ in range(2):
                differentiator.gradient([batch()], 1)
            found = torch.cat([p.grad.flatten() for _, p in differentiator.learner.named_parameters()])  # type: ignore[union-attr]
            assert swapper.peak == 1
    assert torch.equal(found, wanted)
    assert bits(root) == before


def test_every_precision_and_storage_of_the_schema_is_known():
    from typing import get_args

    from finitune.config.schema import ModelSection, PrecisionMode

    assert (
        set(compute_precision.DESCRIPTION_BY_PRECISION)
        == set(get_args(PrecisionMode)) - {"auto"}
        == set(compute_precision.COMPUTE_DTYPE_BY_PRECISION)
    )
    storage = ModelSection.model_fields["storage"].annotation
    assert set(compute_precision.STORAGE_DTYPE_BY_OPTION) == set(get_args(storage)) - {"auto"}
