"""PEFT draws and merges what we compute, for the adapters that both have; the one difference in scale is stated."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from finitune.adapters import Magnitude, SiteAdapter, find_algorithm
from finitune.adapters.weight import compute_adapted_bias, compute_adapted_weight, compute_weight_delta
from finitune.errors import AdapterError
from tests.adapters_made import ExactProducts
from tests.test_algebra import input_for, relative

RANK, ALPHA = 3, 5.0
ROLES = {"lora_A": "down", "lora_B": "up"}
LAYERS = ["linear", "conv"]


@pytest.fixture(scope="module")
def peft() -> Iterator[ModuleType]:
    yield pytest.importorskip("peft")


class Small(nn.Module):
    """One layer under a name, as PEFT wants to find it."""

    def __init__(self, kind: str, **attributes: object):
        super().__init__()
        made = nn.Linear(24, 16) if kind == "linear" else nn.Conv2d(8, 16, 3, **{"padding": 1, **attributes})  # type: ignore[arg-type]
        self.layer = made.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def trained(
    library: ModuleType, kind: str, config: object, **attributes: object
) -> tuple[nn.Module, nn.Module, nn.Module]:
    """A model with an adapter away from zero, the adapted layer in it, and its base layer; all fp64."""
    model = library.get_peft_model(Small(kind, **attributes), config).double().eval()
    layer = model.base_model.model.layer
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "base_layer" not in name:
                parameter.normal_().mul_(0.5)
            if "magnitude" in name:
                parameter.abs_().add_(0.5)
    return model, layer, layer.get_base_layer()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Roles as we name them, of what its state dict holds beside the base."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if "base_layer" in name:
            continue
        parts = [part for part in name.split(".") if part not in ("base_model", "model", "layer", "default")]
        kind = "_bias" if parts[-1] == "bias" else ""
        found[ROLES.get(parts[0], parts[0].split("_", 1)[1]) + kind] = parameter.detach()
    return found


def compare(model: nn.Module, layer: nn.Module, base: nn.Linear | nn.Conv2d, adapter: SiteAdapter, bar: float = 1e-12):
    """Its forward pass, its merged weight and bias, and ours."""
    x = input_for(base)
    weight, bias = base.weight.detach().clone(), base.bias.detach().clone()
    with torch.no_grad():
        there = model(x)
        ours = ExactProducts(base).apply_spatial(x, compute_adapted_weight(weight, adapter))
        shift = compute_adapted_bias(bias, adapter)
        ours += shift if isinstance(base, nn.Linear) else shift[:, None, None]
        assert relative(ours, there) < bar
        layer.merge()
        assert relative(compute_adapted_weight(weight, adapter), base.weight) < bar
        assert relative(compute_adapted_bias(bias, adapter), base.bias) < bar


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("stabilised", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_lora(peft: ModuleType, kind: str, stabilised: bool, with_bias: bool):
    """SCL-09: the bias of the outer factor is scaled in the merged layer, too."""
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=["layer"], use_rslora=stabilised, lora_bias=with_bias
    )
    model, layer, base = trained(peft, kind, config)
    tensors = tensors_of(model)
    assert set(tensors) == {"down", "up", "up_bias"} if with_bias else {"down", "up"}
    compare(model, layer, base, SiteAdapter("lora", tensors, ALPHA, rank_stabilised=stabilised))


@pytest.mark.parametrize("kind", LAYERS)
def test_dora(peft: ModuleType, kind: str):
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["layer"], use_dora=True)
    model, layer, base = trained(peft, kind, config)
    tensors = tensors_of(model)
    magnitude = Magnitude(tensors.pop("magnitude_vector"), "out")
    compare(model, layer, base, SiteAdapter("lora", tensors, ALPHA, magnitude=magnitude))


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("effective", [False, True])
def test_loha(peft: ModuleType, kind: str, effective: bool):
    config = peft.LoHaConfig(r=RANK, alpha=ALPHA, target_modules=["layer"], use_effective_conv2d=effective)
    model, layer, base = trained(peft, kind, config)
    tensors = tensors_of(model)
    assert ("t2" in tensors) == (effective and kind == "conv")
    compare(model, layer, base, SiteAdapter("loha", tensors, ALPHA), bar=1e-7)  # its scale is rounded to fp32


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("effective", [False, True])
@pytest.mark.parametrize("both", [False, True])
def test_lokr(peft: ModuleType, kind: str, effective: bool, both: bool):
    config = peft.LoKrConfig(
        r=1,
        alpha=ALPHA,
        target_modules=["layer"],
        use_effective_conv2d=effective,
        decompose_both=both,
        decompose_factor=4,
    )
    model, layer, base = trained(peft, kind, config)
    tensors = tensors_of(model)
    assert "w2_b" in tensors and ("w1_b" in tensors) == both
    compare(model, layer, base, SiteAdapter("lokr", tensors, ALPHA))


@pytest.mark.parametrize("kind", LAYERS)
def test_lokr_of_two_full_factors_has_another_scale(peft: ModuleType, kind: str):
    """LYC-01: PEFT divides alpha by the rank of its configuration, LyCORIS and we ignore it, unless it is stated."""
    config = peft.LoKrConfig(r=32, alpha=ALPHA, target_modules=["layer"])
    model, layer, base = trained(peft, kind, config)
    tensors = tensors_of(model)
    assert set(tensors) == {"w1", "w2"}
    weight = base.weight.detach()
    alone = SiteAdapter("lokr", tensors, ALPHA)
    assert (
        relative(compute_weight_delta(weight, alone), 32 / ALPHA * layer.get_delta_weight("default").detach()) < 1e-12
    )
    compare(model, layer, base, SiteAdapter("lokr", tensors, ALPHA, options={"rank": 32}))


def a_convolution(library: ModuleType, **attributes: object) -> tuple[nn.Module, nn.Conv2d, SiteAdapter]:
    config = library.LoraConfig(r=4, lora_alpha=ALPHA, target_modules=["layer"])
    model, _, base = trained(library, "conv", config, **attributes)
    return model, base, SiteAdapter("lora", tensors_of(model), ALPHA)


def change_in(base: nn.Conv2d, adapter: SiteAdapter, x: Tensor) -> Tensor:
    return ExactProducts(base).apply_spatial(x, compute_weight_delta(base.weight.detach(), adapter))


@torch.no_grad()
def test_lora_of_a_strided_convolution(peft: ModuleType):
    model, base, adapter = a_convolution(peft, stride=2)
    x = input_for(base)
    assert relative(base(x) + change_in(base, adapter, x), model(x)) < 1e-12


# Faults of the library (LYC-05): if one of these fails one day, it was mended there.


@torch.no_grad()
def test_peft_pads_with_zeros_whatever_the_layer_does(peft: ModuleType):
    model, base, adapter = a_convolution(peft, padding_mode="reflect")
    x = input_for(base)
    there = model(x) - base(x)
    assert relative(change_in(base, adapter, x), there) > 0.1
    assert relative(change_in(nn.Conv2d(8, 16, 3, padding=1).double(), adapter, x), there) < 1e-12


@torch.no_grad()
def test_peft_cannot_run_a_dilated_convolution(peft: ModuleType):
    model, base, adapter = a_convolution(peft, dilation=2)
    x = input_for(base)
    with pytest.raises(RuntimeError, match="must match the size"):
        model(x)
    assert change_in(base, adapter, x).shape == base(x).shape


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups:UserWarning")
def test_peft_mixes_the_groups_of_a_convolution(peft: ModuleType):
    """Its inner factor sees all inputs at once, so there is no grouped weight that does the same: it is refused."""
    _, base, adapter = a_convolution(peft, groups=2)
    assert adapter.tensors["down"].shape[1] == 2 * base.weight.shape[1]
    with pytest.raises(AdapterError):
        find_algorithm("lora").check(adapter, tuple(base.weight.shape))
