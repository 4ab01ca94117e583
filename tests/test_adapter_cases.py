"""What went wrong elsewhere, case by case: scales, biases, cores, the attributes of convolutions, wider inputs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from finitune.adapters import Magnitude, SiteAdapter, find_algorithm
from finitune.adapters.dora import compute_weight_norms
from finitune.adapters.tlora import convert_tlora_to_lora
from finitune.adapters.weight import (
    combine_adapted_weight,
    compute_adapted_bias,
    compute_adapted_weight,
    compute_weight_delta,
)
from finitune.errors import AdapterError
from tests.adapters_made import ALPHA, RANK, ExactProducts, random_adapter, random_base
from tests.test_algebra import CONV, LINEAR, input_for, layer_for, refusal, relative


def noise(*shape: int) -> Tensor:
    return torch.randn(shape)


def of_zero(adapter: SiteAdapter, *shape: int) -> Tensor:
    """W(1) - W in fp64 on a base of zeros."""
    return compute_weight_delta(torch.zeros(shape, dtype=torch.float64), adapter)


# Scales


@pytest.mark.parametrize("name", ["lora", "loha", "glora"])
@pytest.mark.parametrize("shape", [LINEAR, CONV], ids=str)
def test_the_scale_is_alpha_over_the_rank_of_the_shapes(name: str, shape: tuple[int, ...]):
    base, adapter = random_adapter(name, shape, 0)
    algorithm = find_algorithm(name)
    assert algorithm.scale(adapter) == ALPHA / RANK
    assert algorithm.scale(replace(adapter, rank_stabilised=True)) == ALPHA / math.sqrt(RANK)
    plain = replace(adapter, alpha=None)
    assert algorithm.scale(plain) == 1.0
    change = compute_weight_delta(base.double(), plain)
    assert relative(compute_weight_delta(base.double(), adapter), ALPHA / RANK * change) < 1e-14
    assert not compute_weight_delta(base.double(), replace(adapter, alpha=0.0)).any()


def test_lokr_of_two_full_factors_ignores_alpha():
    """LYC-01: no rank can be read off, so alpha counts only with a rank that was stated beside the tensors."""
    w1, w2 = noise(4, 4), noise(8, 8)
    adapter = SiteAdapter("lokr", {"w1": w1, "w2": w2}, alpha=1.0)
    kron = torch.kron(w1.double(), w2.double())
    assert torch.equal(of_zero(adapter, 32, 32), kron)
    assert torch.equal(of_zero(replace(adapter, alpha=1e5), 32, 32), kron)
    assert relative(of_zero(replace(adapter, options={"rank": 32}), 32, 32), kron / 32) < 1e-15


def test_lokr_of_low_rank_takes_the_rank_of_its_second_factor():
    """LYC-01: alpha over the rank of w2 where that is decomposed, else over that of w1."""
    w1, w2 = noise(4, 4), noise(8, 8)
    a1, b1, a2, b2 = noise(4, 3), noise(3, 4), noise(8, 2), noise(2, 8)
    first = (a1.double() @ b1.double(), {"w1_a": a1, "w1_b": b1})
    second = (a2.double() @ b2.double(), {"w2_a": a2, "w2_b": b2})
    for (left, lefts), (right, rights), rank in (
        ((w1.double(), {"w1": w1}), second, 2),
        (first, (w2.double(), {"w2": w2}), 3),
        (first, second, 2),
    ):
        adapter = SiteAdapter("lokr", {**lefts, **rights}, alpha=5.0)
        assert relative(of_zero(adapter, 32, 32), 5.0 / rank * torch.kron(left, right)) < 1e-15


@settings(max_examples=25)
@given(
    sizes=st.tuples(*[st.integers(1, 6)] * 4),
    ranks=st.tuples(*[st.none() | st.integers(1, 4)] * 2),
    kernel=st.sampled_from([(), (1, 1)]),
)
def test_lokr_is_the_kronecker_product(
    sizes: tuple[int, ...], ranks: tuple[int | None, int | None], kernel: tuple[int, ...]
):
    """Whichever factor is larger or decomposed; the forward pass of a Linear, which never makes it, agrees."""
    j, m, k, n = sizes
    tensors, factors = {}, []
    for name, shape, rank in (("w1", (j, m), ranks[0]), ("w2", (k, n), ranks[1])):
        a, b = (noise(*shape), None) if rank is None else (noise(shape[0], rank), noise(rank, shape[1]))
        tensors |= {name: a} if b is None else {f"{name}_a": a, f"{name}_b": b}
        factors.append(a.double() if b is None else a.double() @ b.double())
    if "w2" in tensors:
        tensors["w2"] = tensors["w2"].reshape(k, n, *kernel)
    adapter = SiteAdapter("lokr", tensors, alpha=1.7)
    expected = find_algorithm("lokr").scale(adapter) * torch.kron(*factors)
    assert torch.allclose(of_zero(adapter, j * k, m * n), expected, rtol=1e-12, atol=1e-12)
    layer = nn.Linear(m * n, j * k, bias=False)
    x = input_for(layer)
    fast = find_algorithm("lokr").forward(adapter, x, ExactProducts(layer))
    assert fast is not None and torch.allclose(fast, x @ expected.T, rtol=1e-12, atol=1e-12)


@settings(max_examples=25)
@given(
    name=st.sampled_from(["lora", "loha", "lokr", "glora", "full", "set"]),
    shape=st.tuples(st.integers(1, 13), st.integers(1, 13)) | st.tuples(*[st.integers(1, 5)] * 4),
)
def test_any_size_has_an_adapter(name: str, shape: tuple[int, ...]):
    """Primes and ones, too, and fewer channels than the rank."""
    base, adapter = random_adapter(name, shape, 0)
    find_algorithm(name).check(adapter, shape)
    assert relative(compute_adapted_weight(base, adapter), compute_adapted_weight(base.double(), adapter)) < 1e-6


def test_lokr_is_no_matrix_product():
    """LYC-03: where w1 @ w2 has a legal shape too, the size of the base decides."""
    adapter = SiteAdapter("lokr", {"w1": noise(4, 4), "w2": noise(4, 4)})
    assert of_zero(adapter, 16, 16).shape == (16, 16)
    assert refusal(torch.zeros(4, 4), adapter) == "ADAPTER-DOES-NOT-FIT"


@pytest.mark.parametrize("surplus", ["w1_a", "w2_b", "t2"])
def test_lokr_with_a_factor_twice_is_refused(surplus: str):
    adapter = SiteAdapter("lokr", {"w1": noise(4, 4), "w2": noise(8, 8), surplus: noise(4, 4)})
    assert refusal(torch.zeros(32, 32), adapter) == "ADAPTER-ROLES"


def test_dylora_is_lora_when_read():
    """Its blocks, put together, are a LoRA: the sum of the blocks, with alpha over the whole rank."""
    downs, ups = [noise(2, 24) for _ in range(3)], [noise(16, 2) for _ in range(3)]
    whole = SiteAdapter("lora", {"down": torch.cat(downs), "up": torch.cat(ups, dim=1)}, alpha=4.0)
    blocks = sum(up.double() @ down.double() for up, down in zip(ups, downs, strict=True))
    assert relative(of_zero(whole, 16, 24), 4.0 / 6 * blocks) < 1e-14


# Cores


def test_each_half_of_a_loha_has_its_own_core():
    """LYC-04: with t1 for both halves the change would be quite another."""
    a1, a2, b1, b2 = noise(4, 8), noise(4, 8), noise(4, 6), noise(4, 6)
    t1, t2 = noise(4, 4, 3, 3), noise(4, 4, 3, 3)
    tensors = {"w1_a": a1, "w1_b": b1, "t1": t1, "w2_a": a2, "w2_b": b2, "t2": t2}
    adapter = SiteAdapter("loha", tensors, alpha=2.0)
    first, second = (
        torch.einsum("pqhw,po,qi->oihw", t.double(), a.double(), b.double()) for t, a, b in ((t1, a1, b1), (t2, a2, b2))
    )
    assert relative(of_zero(adapter, 8, 6, 3, 3), 0.5 * first * second) < 1e-14
    assert relative(of_zero(adapter.with_tensors(t2=t1), 8, 6, 3, 3), 0.5 * first * second) > 0.5


@pytest.mark.parametrize("core", ["t1", "t2"])
def test_a_loha_with_one_core_is_refused(core: str):
    base, adapter = random_adapter("loha", CONV, 0, options={"use_tucker": True})
    rest = {role: tensor for role, tensor in adapter.tensors.items() if role != core}
    assert refusal(base, replace(adapter, tensors=rest)) == "ADAPTER-ROLES"


# Convolutions

CONVOLUTIONS = [
    {"padding": 1},
    {"stride": 2},
    {"dilation": 2, "padding": (2, 1)},
    {"padding": 1, "padding_mode": "reflect"},
    {"padding": "same", "padding_mode": "circular"},
    {"groups": 2, "padding": 1},
]


@pytest.mark.parametrize("attributes", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("options", [{}, {"use_tucker": True}], ids=str)
def test_the_attributes_of_a_convolution_hold_for_its_adapter(attributes: dict[str, object], options: dict[str, bool]):
    """LYC-05: through the factors or through the merged weight, for each attribute; groups take the merged weight."""
    base, adapter = random_adapter("lora", (16, 4, 3, 3), 0, options=options)
    layer = layer_for((16, 4, 3, 3), **attributes).double()
    with torch.no_grad():
        layer.weight.copy_(base)
    x, products = input_for(layer), ExactProducts(layer)
    change = find_algorithm("lora").forward(adapter, x, products)
    if layer.groups > 1:
        assert change is None
        change = products.apply_spatial(x, compute_weight_delta(base.double(), adapter))
    before = layer(x)
    with torch.no_grad():
        layer.weight.copy_(compute_adapted_weight(base.double(), adapter))
    assert relative(before + change, layer(x)) < 1e-13


@pytest.mark.parametrize("name", ["lora", "loha", "lokr", "glora", "full"])
def test_factors_of_a_linear_serve_a_convolution_of_one_pixel_and_the_reverse(name: str):
    base, adapter = random_adapter(name, LINEAR, 0)
    pixel = {role: tensor.reshape(*tensor.shape, 1, 1) for role, tensor in adapter.tensors.items()}
    wide = compute_adapted_weight(base[..., None, None], adapter)
    assert torch.equal(wide[..., 0, 0], compute_adapted_weight(base, adapter))
    if name in ("lora", "glora", "full"):
        assert torch.equal(compute_adapted_weight(base, replace(adapter, tensors=pixel)), wide[..., 0, 0])


def test_forward_takes_factors_of_a_linear_to_a_convolution_of_one_pixel_and_the_reverse():
    _, adapter = random_adapter("lora", LINEAR, 0)
    pixel = replace(adapter, tensors={role: tensor[..., None, None] for role, tensor in adapter.tensors.items()})
    for layer in (layer_for(LINEAR), layer_for((*LINEAR, 1, 1), stride=2)):
        x, products = input_for(layer), ExactProducts(layer)
        expected = products.apply_spatial(x, of_zero(adapter, *LINEAR))
        for form in (adapter, pixel):
            change = find_algorithm("lora").forward(form, x, products)
            assert change is not None and relative(change, expected) < 1e-13


# Biases


@pytest.mark.parametrize("with_bias", [True, False])
def test_the_bias_of_an_adapter_is_scaled(with_bias: bool):
    """SCL-09: merged is what base + adapter draw, with alpha 32 over rank 2 and a bias on the outer factor."""
    layer = nn.Linear(6, 5, bias=with_bias).double()
    down, up, up_bias = noise(2, 6), noise(5, 2), noise(5)
    adapter = SiteAdapter("lora", {"down": down, "up": up, "up_bias": up_bias}, alpha=32.0)
    outer = nn.Linear(2, 5).double()
    with torch.no_grad():
        outer.weight.copy_(up)
        outer.bias.copy_(up_bias)
        for x in (noise(3, 6).double(), torch.zeros(1, 6).double(), noise(6).double()):
            apart = layer(x) + 0.5 * (32.0 / 2) * outer(x @ down.double().T)
            bias = compute_adapted_bias(layer.bias, adapter, 0.5)
            merged = nn.functional.linear(x, compute_adapted_weight(layer.weight, adapter, 0.5), bias)
            assert relative(merged, apart) < 1e-13


def test_a_change_of_the_bias_is_never_scaled_by_alpha():
    bias, diff_b = noise(16), noise(16)
    for name in ("lora", "loha", "lokr", "glora", "full", "set"):
        base, adapter = random_adapter(name, LINEAR, 0)
        adapter = adapter.with_tensors(diff_b=diff_b)
        assert torch.equal(compute_adapted_bias(bias, adapter, 0.5), bias + 0.5 * diff_b)
        assert compute_adapted_bias(bias, adapter, 0.0) is bias
        assert compute_adapted_weight(base, adapter).shape == base.shape
    both = SiteAdapter(
        "lora", {"down": noise(2, 6), "up": noise(16, 2), "up_bias": diff_b, "diff_b": diff_b}, alpha=3.0
    )
    assert relative(compute_adapted_bias(bias, both), bias + 2.5 * diff_b) < 1e-6


def test_a_norm_changes_gain_and_bias():
    base, adapter = random_adapter("norm", (16,), 0, options={"bias": True})
    bias = noise(16)
    gain, shift = adapter.tensors["w_norm"], adapter.tensors["b_norm"]
    assert torch.equal(compute_adapted_weight(base, adapter, 0.5), base + 0.5 * gain)
    assert torch.equal(compute_adapted_bias(bias, adapter, 0.5), bias + 0.5 * shift)
    assert torch.equal(compute_adapted_bias(bias, adapter.with_tensors(diff_b=bias)), bias + (shift + bias))
    only_gain = replace(adapter, tensors={"w_norm": gain})
    assert compute_adapted_bias(bias, only_gain) is bias
    assert refusal(base, adapter.with_tensors(b_norm=noise(15))) == "ADAPTER-SHAPES"


def test_a_bias_alone_is_an_adapter_and_nothing_is_none():
    base, bias = noise(16, 24), noise(16)
    alone = SiteAdapter("full", {"diff_b": bias})
    assert torch.equal(compute_adapted_weight(base, alone), base)
    assert torch.equal(compute_adapted_bias(bias, alone), 2 * bias)
    assert torch.equal(compute_adapted_bias(None, alone), bias)
    assert refusal(base, SiteAdapter("full", {})) == "ADAPTER-ROLES"
    assert refusal(base, SiteAdapter("lora", {"down": noise(2, 24), "up": noise(16, 2), "up_bias": noise(15)})) == (
        "ADAPTER-SHAPES"
    )


# Wider inputs


def wider(options: dict[str, bool] | None = None) -> SiteAdapter:
    """A LoRA (16, 32) for a weight (16, 24), as a control adapter has it."""
    _, adapter = random_adapter("lora", (16, 32), 0)
    return replace(adapter, options=options or {})


def padded(base: Tensor) -> Tensor:
    return torch.cat([base, torch.zeros(16, 8)], dim=1)


def test_a_control_adapter_widens_the_inputs():
    base = random_base(LINEAR, 0)
    wide = compute_adapted_weight(base, wider({"reshape": True}), 0.5)
    assert torch.equal(wide, compute_adapted_weight(padded(base), wider(), 0.5))
    assert torch.equal(compute_adapted_weight(base, wider({"reshape": True}), 0.0), base)
    weight = noise(16, 32)
    replaced = SiteAdapter("set", {"weight": weight}, options={"reshape": True})
    assert relative(compute_adapted_weight(base, replaced), weight) < 1e-6
    dora = replace(wider({"reshape": True}), magnitude=Magnitude(torch.ones(16)))
    assert relative(compute_weight_norms(compute_adapted_weight(base, dora), "out"), torch.ones(16, 1)) < 1e-6


def test_other_adapters_beside_one_that_widens_change_the_first_inputs():
    base, plain = random_adapter("lora", LINEAR, 1)
    pairs = [(plain, 0.7), (wider({"reshape": True}), 1.0)]
    expected = compute_adapted_weight(padded(base), wider())
    expected[:, :24] += 0.7 * compute_weight_delta(base, plain)
    for order in (pairs, pairs[::-1]):
        assert relative(combine_adapted_weight(base, order), expected) < 1e-6


def test_a_kernel_keeps_its_size_when_inputs_widen():
    base, adapter = random_base((16, 4, 3, 3), 0), random_adapter("lora", CONV, 0)[1]
    wide = compute_adapted_weight(base, replace(adapter, options={"reshape": True}))
    assert torch.equal(wide, compute_adapted_weight(torch.cat([base, torch.zeros_like(base)], dim=1), adapter))


@pytest.mark.parametrize("shape", [(16, 40), (12, 24)], ids=str)
def test_widening_is_asked_for_and_goes_one_way(shape: tuple[int, int]):
    """More inputs than the model's need the option; fewer inputs, or other outputs, are refused with it, too."""
    assert refusal(random_base(LINEAR, 0), wider()) == "ADAPTER-DOES-NOT-FIT"
    assert refusal(random_base(shape, 0), wider({"reshape": True})) == "ADAPTER-DOES-NOT-FIT"


# Set, and T-LoRA's refusals


def test_set_replaces_the_weight():
    base, adapter = random_adapter("set", LINEAR, 0)
    assert relative(compute_adapted_weight(base, adapter), adapter.tensors["weight"]) < 1e-6
    half = compute_adapted_weight(base, adapter, 0.5)
    assert relative(half, (base + adapter.tensors["weight"]) / 2) < 1e-6


@pytest.mark.parametrize(
    ("base", "change"),
    [
        ((16, 24, 3, 3), {}),
        ((16, 24), {"p_layer": (15, 2)}),
        ((16, 24), {"lambda_layer": (1, 3)}),
        ((16, 24), {"surplus": (1,)}),
    ],
    ids=str,
)
def test_a_t_lora_that_cannot_be_read_is_refused(base: tuple[int, ...], change: dict[str, tuple[int, ...]]):
    shapes = {"q_layer": (2, 24), "p_layer": (16, 2), "lambda_layer": (1, 2), **change}
    with pytest.raises(AdapterError) as caught:
        convert_tlora_to_lora({role: noise(*shape) for role, shape in shapes.items()}, 2.0, noise(*base))
    assert caught.value.code == "ADAPTER-TLORA" and caught.value.remedy
