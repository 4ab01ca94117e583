"""OFT, BOFT, OFT v2 and IA3: laws, and parity with the forwards of LyCORIS and PEFT, also where those contradict."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from finitune.adapters import SiteAdapter, Target, find_algorithm
from finitune.adapters.rotation import (
    clip_generator_norm,
    compute_cayley_turn,
    compute_neumann_turn,
    unpack_skew_matrices,
)
from finitune.adapters.weight import compute_adapted_bias, compute_adapted_weight, compute_weight_delta
from finitune.errors import AdapterError
from tests.adapters_made import fresh_adapter, random_adapter, random_base

ROTATIONS = ("oft", "boft", "oft_v2")
MULTIPLICATIVE = (*ROTATIONS, "ia3")
SHAPES = ((12, 8), (320, 64), (8, 6, 3, 3), (4, 6, 1, 3, 3))
EXACT = {"neumann_terms": 0}


def error(found: Tensor, wanted: Tensor) -> float:
    """The relative L2 error."""
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


def random_skew(size: int, spread: float, seed: int) -> Tensor:
    raw = spread * torch.randn(3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return raw - raw.mT


def called(layer: nn.Module, adapter: SiteAdapter, x: Tensor, *, bias: bool = False) -> Tensor:
    """`layer` on x with the adapted weight in place, and with `bias` the adapted bias."""
    inside = {"weight": compute_adapted_weight(layer.weight.detach(), adapter)}
    if bias:
        inside["bias"] = compute_adapted_bias(layer.bias.detach(), adapter)
    return torch.func.functional_call(layer, inside, (x,))


@settings(max_examples=20)
@given(st.integers(2, 9), st.floats(1e-6, 30.0), st.integers(0, 99))
def test_cayley_is_orthogonal_and_a_solve_is_what_the_inverse_says(size: int, spread: float, seed: int):
    q, eye = random_skew(size, spread, seed), torch.eye(size, dtype=torch.float64)
    step = compute_cayley_turn(q)
    slow = (eye + q) @ torch.linalg.inv(eye - q) - eye
    assert error(step, slow) < 1e-9
    assert torch.allclose((step + eye).mT @ (step + eye), eye.expand_as(q), atol=1e-12)
    assert error(compute_cayley_turn(q.float()), step) < 1e-5, "fp32 is safe at every magnitude"


def test_a_small_turn_keeps_its_digits():
    q = random_skew(4, 1e-6, 0)
    eye = torch.eye(4)
    cancelled = (eye + q.float()) @ torch.linalg.inv(eye - q.float()) - eye
    diagonal, wanted = (
        step.diagonal(dim1=1, dim2=2) for step in (compute_cayley_turn(q.float()), compute_cayley_turn(q))
    )
    assert error(compute_cayley_turn(q.float()), compute_cayley_turn(q)) < 1e-7 and error(diagonal, wanted) < 1e-5
    assert error(cancelled.diagonal(dim1=1, dim2=2), wanted) > 0.9, "rounded to R first, nothing of it is left"


@pytest.mark.parametrize("terms", [1, 2, 3, 4, 5, 8])
def test_the_series_is_the_one_that_was_cut(terms: int):
    q = random_skew(4, 0.05, 1)
    powers = [torch.linalg.matrix_power(q, k) for k in range(max(terms, 4))]
    whole = 2 * sum(powers[1:]) - powers[-1]
    assert torch.allclose(compute_neumann_turn(q, terms), {1: 0 * q, 2: 2 * q}.get(terms, whole))
    if terms == 8:
        assert error(compute_neumann_turn(q, terms), compute_cayley_turn(q)) < 1e-2


def test_packed_is_the_upper_triangle_row_by_row():
    skew = unpack_skew_matrices(torch.tensor([[1.0, 2.0, 3.0]]))
    assert skew.tolist() == [[[0, 1, 2], [-1, 0, 3], [-2, -3, 0]]]


def test_clipping_caps_the_norm_of_all_blocks_and_has_a_gradient_at_zero():
    q = random_skew(3, 1.0, 2)
    assert math.isclose(clip_generator_norm(q, 0.5).norm(), 0.5)
    assert torch.equal(clip_generator_norm(q, 1e3), q) and torch.equal(clip_generator_norm(q, 0), q)
    zero = torch.zeros(1, 2, 2, requires_grad=True)
    clip_generator_norm(zero, 0.5).sum().backward()
    assert torch.equal(zero.grad, torch.ones(1, 2, 2))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", MULTIPLICATIVE)
def test_a_new_adapter_changes_nothing_and_fp32_is_enough(name: str, shape: tuple[int, ...]):
    base, adapter = random_adapter(name, shape, seed=3)
    assert torch.equal(compute_adapted_weight(base, fresh_adapter(name, base, 3)), base)
    assert error(compute_adapted_weight(base, adapter), compute_adapted_weight(base.double(), adapter)) < 1e-6
    assert error(compute_weight_delta(base, adapter), compute_weight_delta(base.double(), adapter)) < 1e-6


@pytest.mark.parametrize("options", [{}, {"rescaled": True, "constraint": 0.5}, EXACT], ids=str)
@pytest.mark.parametrize("name", MULTIPLICATIVE)
def test_gradients_are_those_of_finite_differences(name: str, options: dict[str, float]):
    base, adapter = random_adapter(name, (8, 4), seed=4, options=options)
    roles = sorted(adapter.tensors)
    tensors = [adapter.tensors[role].double().requires_grad_() for role in roles]

    def delta(*values: Tensor) -> Tensor:
        return compute_weight_delta(base.double(), adapter.with_tensors(**dict(zip(roles, values, strict=True))))

    assert torch.autograd.gradcheck(delta, tensors)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ROTATIONS)
def test_a_rotation_keeps_every_length(name: str, shape: tuple[int, ...]):
    base, adapter = random_adapter(name, shape, seed=5, options=EXACT)
    turned, side = compute_adapted_weight(base.double(), adapter).flatten(1), int(name == "oft_v2")
    assert torch.allclose(turned.norm(dim=side), base.double().flatten(1).norm(dim=side))
    assert error(turned, base.flatten(1)) > 0.1


LAYERS = {
    "linear": (lambda: nn.Linear(8, 12), (5, 8)),
    "conv": (lambda: nn.Conv2d(6, 16, 3, padding=1, stride=2), (2, 6, 7, 7)),
}
LYCORIS = {"oft": ("diag_oft", "DiagOFTModule"), "boft": ("boft", "ButterflyOFTModule")}


def lycoris(name: str, layer: nn.Module, rescaled: bool, constraint: float) -> tuple[nn.Module, SiteAdapter]:
    """A LyCORIS module over `layer` with noise in all its tensors, and the adapter that says the same."""
    from importlib import import_module

    module, cls = LYCORIS[name]
    made = getattr(import_module(f"lycoris.modules.{module}"), cls)(
        "x", layer, 1.0, lora_dim=6, constraint=constraint, rescaled=rescaled, bypass_mode=False
    )
    tensors = {"blocks": made.oft_blocks.detach().normal_(std=0.3)}
    if rescaled:
        tensors["rescale"] = made.rescale.detach().normal_(1, 0.2)
    return made, SiteAdapter(name, tensors, options={"constraint": made.constraint})


@pytest.mark.parametrize("constraint", [0, 0.02])
@pytest.mark.parametrize("rescaled", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", LYCORIS)
def test_lycoris_forward(name: str, kind: str, rescaled: bool, constraint: float):
    make, shape = LAYERS[kind]
    layer, x = make(), torch.randn(shape)
    theirs, adapter = lycoris(name, layer, rescaled, constraint)
    assert torch.allclose(called(layer, adapter, x), theirs(x), atol=1e-5)
    find_algorithm(name).check(adapter, tuple(layer.weight.shape))
    theirs.multiplier = 0.0
    at_zero = theirs(x)
    assert torch.allclose(at_zero, layer(x), atol=1e-5) is not rescaled, "theirs keeps the rescale at strength 0"


def test_lycoris_bypass_and_kohya_turn_the_bias_too():
    layer, x = nn.Linear(8, 12), torch.randn(5, 8)
    theirs, adapter = lycoris("oft", layer, rescaled=False, constraint=0)
    theirs.bypass_mode = True
    with_bias = SiteAdapter("oft", adapter.tensors, options={"rotates_bias": True})
    assert torch.allclose(called(layer, with_bias, x, bias=True), theirs(x), atol=1e-5)
    assert error(called(layer, adapter, x), theirs(x)) > 0.1, "bypass and merge are two adapters there"
    both = with_bias.with_tensors(diff_b=torch.ones(12))
    assert torch.allclose(called(layer, both, x, bias=True), theirs(x) + 1, atol=1e-5)


def peft_layer(config: object, layer: nn.Module) -> nn.Module:
    from peft import inject_adapter_in_model

    return inject_adapter_in_model(config, nn.Sequential(layer)).requires_grad_(False)[0]


def peft_oft(layer: nn.Module, neumann_terms: int, share: bool) -> tuple[nn.Module, SiteAdapter]:
    from peft import OFTConfig

    config = OFTConfig(
        target_modules=["0"],
        oft_block_size=6,
        block_share=share,
        use_cayley_neumann=bool(neumann_terms),
        num_cayley_neumann_terms=neumann_terms or 5,
    )
    theirs = peft_layer(config, layer)
    packed = theirs.oft_R["default"].weight.data.normal_(std=0.1)
    return theirs, SiteAdapter("oft_v2", {"packed": packed.clone()}, options={"neumann_terms": neumann_terms})


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("neumann_terms", [0, 2, 3, 5])
def test_peft_oft_forward(neumann_terms: int, share: bool):
    layer, x = nn.Linear(24, 10), torch.randn(5, 24)
    theirs, adapter = peft_oft(layer, neumann_terms, share)
    find_algorithm("oft_v2").check(adapter, (10, 24))
    assert torch.allclose(called(layer, adapter, x), theirs(x), atol=1e-5)


def test_peft_oft_turns_the_other_way_with_the_exact_transform():
    layer, x = nn.Linear(24, 10), torch.randn(5, 24)
    exact, _ = peft_oft(layer, 0, share=False)
    reverse = SiteAdapter("oft_v2", {"packed": -exact.oft_R["default"].weight.data}, options={"neumann_terms": 12})
    assert torch.allclose(called(layer, reverse, x), exact(x), atol=1e-4)


def test_peft_oft_on_a_convolution_is_what_it_merges():
    layer, x = nn.Conv2d(4, 10, 3, padding=1), torch.randn(2, 4, 7, 7)
    plain = layer(x)
    theirs, adapter = peft_oft(layer, 5, share=False)
    ours = called(layer, adapter, x)
    theirs.oft_R["default"].weight.data.zero_()
    assert error(theirs(x), plain) > 1, "theirs adds overlapping patches, and does not even start at the base"
    theirs.oft_R["default"].weight.data.copy_(adapter.tensors["packed"])
    theirs.merge()
    assert torch.allclose(ours, theirs(x), atol=1e-5)


def test_the_scaled_variant_divides_by_twice_the_root_of_one_less_than_the_block():
    base, adapter = random_adapter("oft_v2", (5, 12), seed=6, options={"block_size": 4, "scaled": True})
    plain = SiteAdapter("oft_v2", {"packed": adapter.tensors["packed"] / (2 * math.sqrt(3))})
    assert torch.allclose(compute_adapted_weight(base, adapter), compute_adapted_weight(base, plain))


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("kind", ["linear", "conv", "grouped"])
def test_ia3_forwards_of_peft_and_lycoris(kind: str, on_input: bool):
    from lycoris.modules.ia3 import IA3Module
    from peft import IA3Config

    layers = {**LAYERS, "grouped": (lambda: nn.Conv2d(6, 16, 3, groups=2), (2, 6, 7, 7))}
    make, shape = layers[kind]
    layer, x = make(), torch.randn(shape)
    options = {"on_input": on_input, "groups": getattr(layer, "groups", 1)}
    adapter = find_algorithm("ia3").init(Target(layer.weight.detach(), options=options), torch.Generator())
    w = adapter.tensors["weight"].normal_(std=0.3)
    ours = called(layer, adapter, x, bias=True)

    config = IA3Config(target_modules=["0"], feedforward_modules=["0"] if on_input else [])
    theirs = peft_layer(config, layer)
    theirs.ia3_l["default"].data.copy_(1 + w.reshape(theirs.ia3_l["default"].shape))
    assert torch.allclose(ours, theirs(x), atol=1e-5)
    if kind == "grouped":
        return
    also = IA3Module("x", layer, 1.0, train_on_input=on_input, bypass_mode=True)
    also.weight.data.copy_(w)
    assert torch.allclose(ours, also(x), atol=1e-5)
    also.bypass_mode = False
    assert torch.allclose(called(layer, adapter, x), also(x), atol=1e-5), "theirs, rebuilt, leaves the bias alone"


def test_lycoris_cannot_reload_its_own_ia3():
    from lycoris.modules.ia3 import IA3Module

    made = IA3Module("x", nn.Linear(4, 8), 1.0)
    with pytest.raises(TypeError):
        IA3Module.make_module_from_state_dict("x", nn.Linear(4, 8), made.weight, made.on_input)


@pytest.mark.parametrize(
    ("shape", "on_input", "fits"), [((8, 4), 0, 1), ((8, 4), 1, 0), ((4, 8), 1, 1), ((4, 8), 0, 0)]
)
def test_ia3_factors_of_the_wrong_side_are_refused(shape: tuple[int, int], on_input: int, fits: int):
    adapter = SiteAdapter("ia3", {"weight": torch.randn(1, 8)}, options={"on_input": bool(on_input)})
    if fits:
        changed = compute_adapted_weight(base := random_base(shape, 0), adapter) / base - 1
        assert torch.allclose(changed.select(1 - on_input, 0), adapter.tensors["weight"].flatten(), atol=1e-5)
        return
    with pytest.raises(AdapterError) as caught:
        find_algorithm("ia3").check(adapter, shape)
    assert caught.value.code == "ADAPTER-DOES-NOT-FIT" and caught.value.evidence == {"adapter": [8], "model": [4]}


WRONG = [
    ("oft", {"blocks": (4, 3, 2)}, None, "ADAPTER-SHAPES"),
    ("oft", {"blocks": (4, 3, 3), "rescale": (11, 1)}, None, "ADAPTER-SHAPES"),
    ("oft", {"blocks": (4, 3, 3)}, (13, 8), "ADAPTER-DOES-NOT-FIT"),
    ("boft", {"blocks": (2, 4, 3, 3)}, None, "ADAPTER-SHAPES"),
    ("boft", {"blocks": (4, 4, 2, 2)}, None, "ADAPTER-SHAPES"),
    ("boft", {"blocks": (2, 4, 2, 2)}, (16, 8), "ADAPTER-DOES-NOT-FIT"),
    ("oft_v2", {"packed": (4, 5)}, None, "ADAPTER-SHAPES"),
    ("oft_v2", {"packed": (4, 3)}, (8, 16), "ADAPTER-DOES-NOT-FIT"),
    ("oft_v2", {"packed": (1, 3)}, (8, 16), "ADAPTER-DOES-NOT-FIT"),
]


@pytest.mark.parametrize(("name", "shapes", "weight", "code"), WRONG)
def test_wrong_shapes_are_refused(name, shapes, weight, code: str):
    adapter = SiteAdapter(name, {role: torch.zeros(shape) for role, shape in shapes.items()})
    with pytest.raises(AdapterError) as caught:
        find_algorithm(name).check(adapter, weight)
    assert caught.value.code == code and caught.value.remedy


@pytest.mark.parametrize(
    ("name", "out", "options", "blocks"),
    [
        ("oft", 320, {}, (40, 8, 8)),
        ("oft", 13, {}, (1, 13, 13)),
        ("oft", 12, {"block_size": 6}, (2, 6, 6)),
        ("boft", 64, {}, (4, 8, 8, 8)),
        ("boft", 320, {}, (6, 32, 10, 10)),
    ],
)
def test_block_sizes_of_new_adapters(name: str, out: int, options: dict[str, float], blocks: tuple[int, ...]):
    made = find_algorithm(name).init(Target(torch.zeros(out, 4), 8, options=options), torch.Generator())
    assert tuple(made.tensors["blocks"].shape) == blocks


@pytest.mark.parametrize(("name", "out", "asked"), [("oft", 12, 5), ("boft", 320, 8), ("boft", 15, 0)])
def test_impossible_block_sizes_are_refused(name: str, out: int, asked: int):
    with pytest.raises(AdapterError) as caught:
        find_algorithm(name).init(Target(torch.zeros(out, 4), 8, options={"block_size": asked}), torch.Generator())
    assert caught.value.code == "ROTATION-BLOCK-SIZE" and "possible" in caught.value.remedy.lower()
