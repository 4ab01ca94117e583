"""LoCon: a LoRA whose convolutions have ranks of their own. Anima's denoiser has none, so a small U-Net learns.

It goes the way of every training: sites by pattern, new adapters, gradients of rectified flow, a file in kohya's
spelling that reads back.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from finitune.adapters import AdapterSet
from finitune.config.schema import NetworkSection, ObjectiveSection, OptimizerSection
from finitune.datasets.items import MicroBatch, TrainingBatch
from finitune.files.tensorfile import TensorFile
from finitune.merging.adapterfile import OutputFormat, open_adapter, put_adapter
from finitune.merging.pairing import TargetModel
from finitune.models.sd15 import SD15
from finitune.namings.metadata import Receipt
from finitune.report import Report
from finitune.training.adapted_model import AdaptedModel, attach_training_adapters, make_training_adapters
from finitune.training.measurements import HeldOutValidation
from finitune.training.objective import FlowObjective
from finitune.training.optimizers import build_param_groups, make_optimizer
from finitune.training.ranks import ProcessRanks
from finitune.training.sites import choose_sites
from finitune.training.step import GradientAccumulator

WIDTH = 16


def unet() -> Any:
    """Two levels, one of them with attention."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=WIDTH,
        attention_head_dim=8,
        norm_num_groups=8,
    ).requires_grad_(False)


def batch() -> TrainingBatch:
    generator = torch.Generator().manual_seed(3)
    latents = 0.5 + 0.1 * torch.randn(4, 4, 1, 8, 8, generator=generator)
    told = {"text": torch.randn(4, 5, WIDTH, generator=generator)}
    return TrainingBatch(latents, told, torch.ones(4), None, tuple("abcd"), (0, 1, 2, 3))


def learner_of(root: Any, network: NetworkSection) -> AdaptedModel:
    """Fresh adapters on the U-Net."""

    def denoiser(noisy: Tensor, sigma: Tensor, told: Mapping[str, Tensor]) -> Tensor:
        return root(noisy.squeeze(2), 1000 * sigma, told["text"]).sample.unsqueeze(2)

    choice = choose_sites({"unet": root}, SD15, network)
    fresh = make_training_adapters({"unet": root}, choice, network, 0)
    return AdaptedModel(denoiser, dict(attach_training_adapters({"unet": root}, fresh, network)))


def measured(learner: AdaptedModel) -> float:
    """The loss at fixed sigmas."""
    validation = HeldOutValidation([MicroBatch((64, 64), ())], (0.25, 0.5, 0.75), 0)
    objective = FlowObjective(ObjectiveSection())
    by_sigma = validation.measure(learner, objective, lambda _: batch(), ProcessRanks())
    return sum(by_sigma.values()) / len(by_sigma)


def trained(learner: AdaptedModel, steps: int) -> None:
    """Take a few steps."""
    rates = OptimizerSection(learning_rate=1e-2)
    named = learner.named_parameters()
    optimizer = make_optimizer(rates, build_param_groups(named, rates, lambda _: None, "lora"))
    differentiator = GradientAccumulator(learner, FlowObjective(ObjectiveSection()), ProcessRanks(), seed=0)
    for step in range(steps):
        assert differentiator.gradient([batch()], step).finite
        optimizer.step()


@pytest.mark.parametrize("algorithm", ["lora", "loha", "lokr"])
def test_convolutions_learn_are_saved_and_read_back(tmp_path: Path, algorithm: str):
    network = NetworkSection(algorithm=algorithm, network_dim=4, network_alpha=4, conv_dim=2, conv_alpha=1)  # type: ignore[arg-type]
    root = unet()
    before = copy.deepcopy(root)
    learner = learner_of(root, network)
    first = measured(learner)
    trained(learner, 8)
    last = measured(learner)
    assert last < 0.9 * first
    adapter = learner.adapter()
    kernels = {f"unet.{name}" for name, layer in before.named_modules() if is_kernel(layer)}
    assert len(kernels & adapter.sites.keys()) > 5 and len(adapter) > 20
    path = tmp_path / "locon.safetensors"
    put_adapter(path, adapter, SD15, OutputFormat("kohya"), Receipt("train", ()), Report("train"))
    found = read_back(path, before)
    assert found.sites.keys() == adapter.sites.keys()
    again = learner_of(before, network)
    again.load(found)
    assert measured(again) == pytest.approx(last, rel=1e-5)
    if algorithm == "lora":
        tensors = dict(TensorFile(path).tensors())
        assert tensors["lora_unet_mid_block_resnets_0_conv1.lora_down.weight"].shape == (2, 32, 3, 3)
        assert tensors["lora_unet_mid_block_resnets_0_conv1.lora_up.weight"].shape == (32, 2, 1, 1)


def is_kernel(layer: nn.Module) -> bool:
    """Whether a layer is a convolution with a kernel."""
    return isinstance(layer, nn.Conv2d) and layer.kernel_size == (3, 3)


def read_back(path: Path, root: Any) -> AdapterSet:
    """The adapter in a file."""
    shapes = TargetModel.loaded(only_unet(), SimpleNamespace(unet=root)).shapes
    return open_adapter(path, Report("check"), TargetModel(SD15, shapes)).reading.adapter


def only_unet() -> Any:
    """SD 1.5 as far as its U-Net goes."""
    from dataclasses import replace

    components = tuple(one for one in SD15.adapters.components if one.name == "unet")
    return replace(SD15, adapters=replace(SD15.adapters, components=components))
