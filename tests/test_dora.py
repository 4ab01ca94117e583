"""DoRA: the conventions that are about, the rule for strength, and parity with the forwards of PEFT and LyCORIS."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from finitune.adapters import Magnitude, SiteAdapter
from finitune.adapters.dora import compute_weight_norms
from finitune.adapters.weight import compute_adapted_weight, compute_weight_delta
from finitune.errors import AdapterError
from tests.adapters_made import random_adapter

LYCORIS_EPS = torch.finfo(torch.float32).eps
CONVENTIONS = [(side, norm_of) for side in ("out", "in") for norm_of in ("adapted", "base")]
LAYERS = {
    "linear": (lambda: nn.Linear(8, 12), (5, 8)),
    "conv": (lambda: nn.Conv2d(6, 16, 3, padding=1, stride=2), (2, 6, 7, 7)),
}


def error(found: Tensor, wanted: Tensor) -> float:
    """The relative L2 error."""
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


def square_case(side: str = "out", norm_of: str = "adapted") -> tuple[Tensor, SiteAdapter]:
    """W (8, 8), a small LoRA with alpha / rank = 0.5, and magnitudes that are 1.1 times the adapted norms; fp64."""
    torch.manual_seed(7)
    base = torch.randn(8, 8).double()
    adapter = SiteAdapter("lora", {"down": torch.randn(2, 8), "up": 0.5 * torch.randn(8, 2)}, alpha=1.0)
    magnitude = 1.1 * compute_weight_norms(base + compute_weight_delta(base, adapter), side)
    return base, replace(adapter, magnitude=Magnitude(magnitude, side=side, norm_of=norm_of))


@pytest.mark.parametrize(("side", "norm_of"), CONVENTIONS)
def test_each_convention_is_its_formula(side: str, norm_of: str):
    base, adapter = square_case(side, norm_of)
    direction = base + 0.5 * adapter.tensors["up"].double() @ adapter.tensors["down"].double()
    axis = 1 if side == "out" else 0
    divisor = (direction if norm_of == "adapted" else base).square().sum(axis, keepdim=True).sqrt()
    wanted = adapter.magnitude.tensor * direction / divisor
    assert torch.allclose(compute_adapted_weight(base, adapter), wanted)


@pytest.mark.parametrize("side", ["out", "in"])
def test_at_strength_1_the_norms_are_the_magnitudes(side: str):
    base, adapter = square_case(side)
    assert torch.allclose(compute_weight_norms(compute_adapted_weight(base, adapter), side), adapter.magnitude.tensor)


@pytest.mark.parametrize(("side", "norm_of"), CONVENTIONS)
def test_strength_is_the_straight_line_from_the_base_to_what_was_trained(side: str, norm_of: str):
    base, adapter = square_case(side, norm_of)
    assert compute_adapted_weight(base, adapter, 0) is base
    halfway = (base + compute_adapted_weight(base, adapter)) / 2
    assert torch.allclose(compute_adapted_weight(base, adapter, 0.5), halfway)


def test_a_wrong_convention_shows():
    base, adapter = square_case()
    right = compute_adapted_weight(base, adapter)
    errors = {}
    for side, norm_of in CONVENTIONS[1:]:
        other = Magnitude(adapter.magnitude.tensor, side=side, norm_of=norm_of)
        errors[side, norm_of] = error(compute_adapted_weight(base, replace(adapter, magnitude=other)), right)
    assert min(errors.values()) > 0.05, errors


@pytest.mark.parametrize("shape", [(12, 8), (8, 6, 3, 3)], ids=str)
@pytest.mark.parametrize("side", ["out", "in"])
@pytest.mark.parametrize("name", ["lora", "loha", "lokr"])
def test_fp32_is_enough(name: str, side: str, shape: tuple[int, ...]):
    base, adapter = random_adapter(name, shape, seed=1, magnitude=side)
    assert error(compute_adapted_weight(base, adapter), compute_adapted_weight(base.double(), adapter)) < 1e-6


@pytest.mark.parametrize("eps", [0.0, LYCORIS_EPS])
def test_a_row_of_zeros_stays_finite_and_so_does_its_gradient(eps: float):
    base, adapter = square_case()
    base[3] = 0
    tensors = {"down": adapter.tensors["down"].requires_grad_(), "up": torch.zeros(8, 2).requires_grad_()}
    magnitude = Magnitude(compute_weight_norms(base, "out").requires_grad_(), eps=eps)
    found = compute_adapted_weight(base, replace(adapter, tensors=tensors, magnitude=magnitude))
    assert torch.allclose(found, base) and not found[3].any()
    found.square().sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (*tensors.values(), magnitude.tensor))
    assert magnitude.tensor.grad.count_nonzero() == 7


@pytest.mark.parametrize("kind", LAYERS)
def test_peft_forward(kind: str):
    from peft import LoraConfig, inject_adapter_in_model

    make, shape = LAYERS[kind]
    layer, x = make(), torch.randn(shape)
    config = LoraConfig(r=3, lora_alpha=2, use_dora=True, target_modules=["0"])
    theirs = inject_adapter_in_model(config, nn.Sequential(layer)).requires_grad_(False)[0]
    up = theirs.lora_B["default"].weight.data.normal_(std=0.2)
    magnitude = theirs.lora_magnitude_vector["default"].weight.data.mul_(1.1)
    tensors = {"down": theirs.lora_A["default"].weight.data, "up": up}
    adapter = SiteAdapter("lora", tensors, alpha=2, magnitude=Magnitude(magnitude))
    weight = compute_adapted_weight(layer.weight.detach(), adapter)
    assert torch.allclose(torch.func.functional_call(layer, {"weight": weight}, (x,)), theirs(x), atol=1e-5)
    assert error(weight, compute_adapted_weight(layer.weight.detach(), replace(adapter, alpha=3))) > 0.01, (
        "alpha is not rank"
    )


@pytest.mark.parametrize("on_output", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_lycoris_forward(kind: str, on_output: bool):
    from lycoris.modules.locon import LoConModule

    make, shape = LAYERS[kind]
    layer, x = make(), torch.randn(shape)
    theirs = LoConModule(
        "x", layer, 1.0, lora_dim=3, alpha=2, weight_decompose=True, wd_on_out=on_output, bypass_mode=False
    ).requires_grad_(False)
    up, magnitude = theirs.lora_up.weight.normal_(std=0.2), theirs.dora_scale.mul_(1.1)
    adapter = SiteAdapter(
        "lora",
        {"down": theirs.lora_down.weight, "up": up},
        alpha=2,
        magnitude=Magnitude(magnitude, side="out" if on_output else "in", eps=LYCORIS_EPS),
    )
    weight = layer.weight.detach()
    ours = torch.func.functional_call(layer, {"weight": compute_adapted_weight(weight, adapter)}, (x,))
    assert torch.allclose(ours, theirs(x), atol=1e-5)
    theirs.multiplier = 0.0
    undirected = weight + compute_weight_delta(weight, replace(adapter, magnitude=None))
    assert torch.allclose(torch.func.functional_call(layer, {"weight": undirected}, (x,)), theirs(x), atol=1e-5)
    assert error(theirs(x), layer(x)) > 0.01, "theirs is not the base at strength 0"


def test_lycoris_bypass_forgets_the_magnitude():
    from lycoris.modules.locon import LoConModule

    layer, x = nn.Linear(8, 12), torch.randn(5, 8)
    theirs = LoConModule("x", layer, 1.0, lora_dim=3, alpha=2, weight_decompose=True, bypass_mode=True)
    theirs.dora_scale.data.mul_(10)
    assert torch.allclose(theirs(x), layer(x)), "trained as if it were not there, and saved as if it were"


@pytest.mark.parametrize("count", [7, 9])
def test_magnitudes_of_another_number_are_refused(count: int):
    base, adapter = square_case()
    with pytest.raises(AdapterError) as caught:
        compute_adapted_weight(base, replace(adapter, magnitude=Magnitude(torch.ones(count))))
    assert caught.value.code == "ADAPTER-DORA" and caught.value.evidence["magnitudes"] == [count]


@pytest.mark.parametrize("name", ["ia3", "oft", "boft", "oft_v2"])
def test_a_magnitude_over_a_multiplicative_algorithm_is_refused(name: str):
    base, adapter = random_adapter(name, (8, 4), seed=2)
    with pytest.raises(AdapterError) as caught:
        compute_adapted_weight(base, replace(adapter, magnitude=Magnitude(compute_weight_norms(base, "out"))))
    assert caught.value.code == "ADAPTER-DORA"
