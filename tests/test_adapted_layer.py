"""AdaptedLayer: a merged weight's forward without the rounding, its gradients, and the way in and out of a model."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from finitune.adapters import Magnitude, SiteAdapter
from finitune.adapters.dora import compute_weight_norms
from finitune.adapters.layer import AdaptedLayer, attach_adapters
from finitune.adapters.weight import combine_adapted_weight, compute_adapted_bias, compute_adapted_weight
from finitune.errors import AdapterError, PlanError
from finitune.numerics.compare import relative_l2
from finitune.precision.apply import apply_current_scaling, apply_plan
from finitune.precision.certificate import check_component_plan, collect_call_outputs, prove_component_plan
from finitune.precision.half_modules import make_half_product
from finitune.precision.plan import PlanLine
from finitune.precision.planner import plan_component
from finitune.precision.sites import find_product_sites
from tests.adapters_made import random_adapter
from tests.test_generality import flux, unet
from tests.tiny import cosmos, cosmos_calls
from tests.tiny_anima import tiny_modules

HALF = 2.0**-9

LAYERS = {
    "linear": (lambda: nn.Linear(6, 8), (2, 5, 6)),
    "pad": (lambda: nn.Conv2d(6, 8, 3, padding=1), (1, 6, 8, 8)),
    "stride": (lambda: nn.Conv2d(6, 8, 3, stride=2), (1, 6, 8, 8)),
    "dilation": (lambda: nn.Conv2d(6, 8, 3, dilation=2), (1, 6, 8, 8)),
    "same": (lambda: nn.Conv2d(6, 8, (2, 3), dilation=2, padding="same"), (1, 6, 8, 8)),
    "groups": (lambda: nn.Conv2d(12, 8, 3, groups=2), (1, 12, 8, 8)),
    "reflect": (lambda: nn.Conv2d(6, 8, (3, 1), padding=(1, 0), padding_mode="reflect"), (1, 6, 8, 8)),
    "pointwise": (lambda: nn.Conv2d(6, 8, 1, bias=False), (1, 6, 4, 4)),
    "conv1d": (lambda: nn.Conv1d(6, 8, 3, padding=1), (1, 6, 8)),
    "conv3d": (lambda: nn.Conv3d(6, 8, 3, padding=1), (1, 6, 4, 4, 4)),
}
KINDS = {
    "lora": {},
    "tucker": {"options": {"use_tucker": True}},
    "dora": {"magnitude": "out"},
    "dora_in": {"magnitude": "in"},
    **{name: {} for name in ("loha", "lokr", "glora", "full", "ia3", "oft", "boft", "oft_v2")},
}
NO_TWIN = ("same", "conv1d")
PLANS = {
    "plain": PlanLine("x", out="fp16"),
    "fp32 out": PlanLine("x", exponent=None),
    "scaled": PlanLine("x", exponent=3, weight_exponent=-2),
    "carry": PlanLine("x", exponent=1, carry=2, carried_to="y"),
}


def error(found: Tensor, wanted: Tensor) -> float:
    """The relative L2 error."""
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm())


def made(layer: str, kind: str = "lora", seed: int = 0) -> tuple[nn.Module, SiteAdapter, Tensor]:
    """A layer, an adapter over its weight with a change of its bias, and an input."""
    make, shape = LAYERS[layer]
    base = make().requires_grad_(False)
    name = {"tucker": "lora", "dora": "lora", "dora_in": "lora"}.get(kind, kind)
    weight, adapter = random_adapter(name, tuple(base.weight.shape), seed, **KINDS[kind])
    base.weight.data.copy_(weight)
    return base, adapter.with_tensors(diff_b=torch.randn(8)), torch.randn(shape)


def merged(layer: nn.Module, adapter: SiteAdapter, x: Tensor, strength: float = 1.0) -> Tensor:
    """The slow twin: the layer in fp64 with the adapted weight and bias in place."""
    wide = copy.deepcopy(layer).double()
    wide.weight.data = compute_adapted_weight(wide.weight.data, adapter, strength)
    bias = compute_adapted_bias(None if wide.bias is None else wide.bias.data, adapter, strength)
    wide.bias = None if bias is None else nn.Parameter(bias.double(), requires_grad=False)
    return wide(x.double())


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kind", KINDS)
def test_in_fp32_it_is_the_merged_weight(kind: str, layer: str):
    base, adapter, x = made(layer, kind)
    for strength in (1.0, -0.3):
        found = AdaptedLayer(base, [(adapter, strength)])(x)
        assert found.dtype == torch.float32 and error(found, merged(base, adapter, x, strength)) < 1e-5


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("layer", [name for name in LAYERS if name not in NO_TWIN])
@pytest.mark.parametrize("kind", ["lora", "tucker", "dora", "lokr", "oft_v2"])
def test_over_a_half_twin_the_change_is_as_exact_as_half_products_are(kind: str, layer: str, plan: str):
    base, adapter, x = made(layer, kind)
    line, carried = PLANS[plan], 1
    true = merged(base, adapter, x) - merged(base, adapter, x, 0.0)
    if not line.weight_exponent:
        base.half()
    twin = make_half_product(base, line, torch.float16, carried)
    stored = x * 2.0**-carried
    layered = AdaptedLayer(twin, [(adapter, 1.0)])
    change = layered.held(stored, twin) * 2.0**line.carry
    assert change.dtype == torch.float32 and error(change, true) < HALF
    found = layered(stored)
    assert found.dtype == twin.out_dtype
    whole = merged(base.float(), adapter, x)
    assert error(found * 2.0**line.carry, whole) < HALF


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_without_a_plan_the_result_is_rounded_once_to_what_the_base_writes(dtype: torch.dtype):
    base, adapter, x = made("pad")
    base, x = base.to(dtype), x.to(dtype)
    layered = AdaptedLayer(base, [(adapter, 0.5)])
    wanted = base(x).float() + layered.held(x, base)
    assert torch.equal(layered(x), wanted.to(dtype))
    exact = merged(base, adapter, x, 0.5) - merged(base, adapter, x, 0.0)
    assert error(layered.held(x, base), exact) < (HALF if dtype is torch.float16 else 1e-5)


def test_a_small_change_survives_where_merged_bf16_weights_lose_it():
    base, adapter, x = made("linear")
    base.bfloat16().float()
    strength = 1e-3
    change = merged(base, adapter, x, strength) - merged(base, adapter, x, 0.0)
    bias = (strength * adapter.tensors["diff_b"]).double()
    rounded = compute_adapted_weight(base.weight, adapter, strength).bfloat16().double() - base.weight.double()
    lost = F.linear(x.double(), rounded) + bias
    with apply_current_scaling(nn.Sequential(base)) as model:
        layered = AdaptedLayer(model[0], [(adapter, strength)])
        kept = layered(x) - model[0](x)
    assert error(kept, change) < HALF < 0.05 < error(lost, change)


@settings(max_examples=10)
@given(st.integers(-20, 20), st.sampled_from(["linear", "pad"]), st.sampled_from(["lora", "dora"]))
def test_any_magnitude_of_the_input_is_as_exact(exponent: int, layer: str, kind: str):
    base, adapter, x = made(layer, kind)
    x = x * 2.0**exponent
    twin = make_half_product(base.half(), PLANS["fp32 out"], torch.float16)
    found = AdaptedLayer(twin, [(adapter, 1.0)])(x)
    assert found.isfinite().all() and error(found, merged(base.float(), adapter, x)) < HALF


def test_inputs_of_a_million_stay_finite():
    base, adapter, x = made("linear", seed=3)
    x = 1e6 * x.sign()
    twin = make_half_product(base.half(), PLANS["fp32 out"], torch.float16)
    found = AdaptedLayer(twin, [(adapter, 100.0)])(x)
    assert found.abs().max() > 1e6 and error(found, merged(base.float(), adapter, x, 100.0)) < HALF


@pytest.mark.parametrize("arithmetic", [torch.float32, torch.float16])
@pytest.mark.parametrize("layer", ["linear", "groups", "reflect"])
@pytest.mark.parametrize("kind", ["lora", "dora", "loha", "boft"])
def test_gradients_are_those_of_the_merged_weight(kind: str, layer: str, arithmetic: torch.dtype):
    base, adapter, x = made(layer, kind)
    wide = copy.deepcopy(base).double()
    twin = make_half_product(base, PLANS["fp32 out"], arithmetic)
    layered = AdaptedLayer(twin, [(adapter, 0.7)], trainable=True)
    ours = [x.clone().requires_grad_(), *layered.held.parameters()]
    y = layered(ours[0])
    seen = torch.randn(y.shape)
    (y * seen).sum().backward()

    held = copy.deepcopy(layered.held[0]).double()
    for role in dict(held.named_parameters()):
        setattr(held, role, nn.Parameter(getattr(held, role).detach().double()))
    live, x64 = held.adapter, x.double().requires_grad_()
    weight, bias = compute_adapted_weight(wide.weight, live, 0.7), compute_adapted_bias(wide.bias, live, 0.7)
    (torch.func.functional_call(wide, {"weight": weight, "bias": bias}, (x64,)) * seen).sum().backward()
    theirs = [x64, *(getattr(held, role) for role in dict(layered.held[0].named_parameters()))]
    bar = 1e-4 if arithmetic is torch.float32 else 2 * HALF
    assert len(ours) == len(theirs) > 2
    assert all(error(a.grad, b.grad) < bar for a, b in zip(ours, theirs, strict=True))


def test_strength_0_is_the_base_bit_for_bit():
    base, adapter, x = made("pad", "oft")
    layered = AdaptedLayer(base, [(adapter, 0.0)])
    assert torch.equal(layered(x), base(x))
    layered.held[0].strength = 1.0
    assert error(layered(x), merged(base, adapter, x)) < 1e-5


def test_several_adapters_add_up_each_from_the_base():
    base, first, x = made("linear", "lora")
    strong = [(first, 0.5), (made("linear", "oft", 1)[1], 2.0), (made("linear", "dora", 2)[1], -1.0)]
    wide = copy.deepcopy(base).double()
    wide.weight.data = combine_adapted_weight(wide.weight.data, strong)
    for adapter, strength in strong:
        wide.bias.data = compute_adapted_bias(wide.bias.data, adapter, strength)
    assert error(AdaptedLayer(base, strong)(x), wide(x.double())) < 1e-5
    assert error(AdaptedLayer(base, strong[::-1])(x), wide(x.double())) < 1e-5


def test_trained_tensors_are_fp32_parameters_that_follow_to_no_other_dtype():
    base, adapter, _ = made("linear", "dora")
    halved = SiteAdapter("lora", {role: t.half() for role, t in adapter.tensors.items()}, 2.0)
    trained, fixed = (AdaptedLayer(base, [(halved, 1.0)], trainable=t).to(torch.float16) for t in (True, False))
    assert {p.dtype for p in trained.held.parameters()} == {torch.float32} == {b.dtype for b in fixed.held.buffers()}
    assert trained.weight.dtype == torch.float16 and list(fixed.held.parameters()) == []
    live = trained.adapter
    assert live.alpha == 2.0 and live.tensors["up"] is trained.held[0].up and live.tensors["up"].requires_grad
    assert AdaptedLayer(base, [(adapter, 1.0)], trainable=True).adapter.magnitude.tensor.requires_grad


def test_a_plan_put_in_force_afterwards_leaves_the_masters_alone():
    base, adapter, x = made("linear")
    layered = AdaptedLayer(base, [(adapter, 1.0)], trainable=True)
    wanted = merged(base, adapter, x)
    with apply_current_scaling(nn.Sequential(layered)) as model:
        assert {p.dtype for p in layered.held.parameters()} == {torch.float32}
        assert base.weight.dtype == torch.float16 and error(model(x), wanted) < 1e-3


def test_what_model_code_reads_is_that_of_the_base():
    base, adapter, _ = made("stride")
    layered = AdaptedLayer(base, [(adapter, 1.0)])
    assert layered.weight is base.weight and layered.bias is base.bias and layered.in_channels == 6
    assert copy.deepcopy(layered).stride == (2, 2)
    with pytest.raises(AttributeError):
        _ = layered.nothing_of_the_kind


def small_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))


def test_detach_puts_back_the_very_modules_and_every_bit():
    model, adapter = small_model(), made("linear")[1]
    modules = dict(model.named_modules())
    bits = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(3, 6)
    plain = model(x)
    pair = [(random_adapter("oft", (8, 8), 4)[1], 0.5), (random_adapter("lora", (8, 8), 5)[1], 1.0)]
    attached = attach_adapters(model, {"0": adapter, "2.0": pair}, strength=0.5, trainable=True)
    assert [strength for _, strength in attached.layers["2.0"].adapters] == [0.25, 0.5]
    assert len(list(attached.parameters())) == 6 and error(model(x), plain) > 0.01
    model(x).sum().backward()
    assert attached.detach() is model and dict(model.named_modules()) == modules
    assert all(torch.equal(bits[name], tensor) for name, tensor in model.state_dict().items())
    with attach_adapters(model, {"0": adapter}) as same:
        assert same is model and error(model(x), plain) > 0.01
    assert torch.equal(model(x), plain)


def misfits() -> dict[str, tuple[str, SiteAdapter, str]]:
    narrow, square = random_adapter("lora", (8, 5), 0)[1], random_adapter("lora", (8, 8), 0)[1]
    magnitude = random_adapter("lora", (8, 7), 0, magnitude="in")[1].magnitude
    wrong = SiteAdapter("lora", square.tensors, magnitude=magnitude)
    wide = SiteAdapter("lora", random_adapter("lora", (8, 9), 0)[1].tensors, options={"reshape": True})
    return {
        "a misspelt name": ("2.00", square, "ADAPTER-UNKNOWN-MODULE"),
        "the root": ("", square, "ADAPTER-UNKNOWN-MODULE"),
        "an activation": ("1", square, "ADAPTER-LAYER"),
        "a container": ("2", square, "ADAPTER-LAYER"),
        "another size": ("2.0", narrow, "ADAPTER-DOES-NOT-FIT"),
        "a wrong bias": ("2.0", square.with_tensors(diff_b=torch.ones(7)), "ADAPTER-DOES-NOT-FIT"),
        "wrong magnitudes": ("2.0", wrong, "ADAPTER-DORA"),
        "more inputs": ("2.0", wide, "ADAPTER-RESHAPES"),
        "an unknown algorithm": ("2.0", SiteAdapter("lara", square.tensors), "ADAPTER-ALGORITHM"),
    }


@pytest.mark.parametrize("case", misfits())
def test_what_does_not_fit_is_refused_and_nothing_is_changed(case: str):
    name, adapter, code = misfits()[case]
    model, good = small_model(), made("linear")[1]
    modules = dict(model.named_modules())
    with pytest.raises(AdapterError) as caught:
        attach_adapters(model, {"0": good, name: adapter})
    assert caught.value.code == code and caught.value.remedy
    assert dict(model.named_modules()) == modules


def test_layers_that_are_adapted_or_not_called_are_refused():
    model, adapter = small_model(), made("linear")[1]
    attention = nn.MultiheadAttention(8, 2)
    with attach_adapters(model, {"0": adapter}), pytest.raises(AdapterError) as caught:
        attach_adapters(model, {"0": adapter})
    assert caught.value.code == "ADAPTER-LAYER" and caught.value.subject == "0"
    with pytest.raises(AdapterError, match="NonDynamicallyQuantizableLinear"):
        attach_adapters(attention, {"out_proj": random_adapter("lora", (8, 8), 0)[1]})


def test_detaching_under_what_came_after_is_refused():
    model, adapter = small_model(), made("linear")[1]
    attached = attach_adapters(model, {"0": adapter})
    with apply_current_scaling(model), pytest.raises(AdapterError) as caught:
        attached.detach()
    assert caught.value.code == "ADAPTER-NESTED" and caught.value.subject == "0"
    attached.detach()
    assert type(model[0]) is nn.Linear


def adapted_sites(model: nn.Module, kinds: tuple[str, ...] = ("lora", "oft_v2", "dora")) -> dict[str, SiteAdapter]:
    """An adapter for every Linear and convolution of a model, of these kinds in turn, about as large as its base."""
    found = {}
    for number, (site, layer) in enumerate(find_product_sites(model).items()):
        base = layer.weight.detach().float()
        kind = kinds[number % len(kinds)]
        adapter = random_adapter("lora" if kind == "dora" else kind, tuple(base.shape), number)[1]
        if kind == "oft_v2":
            found[site] = adapter
            continue
        size = float(base.norm() / compute_adapted_weight(torch.zeros_like(base), adapter).norm())
        adapter = adapter.with_tensors(up=0.2 * size * adapter.tensors["up"])
        magnitude = Magnitude(1.05 * compute_weight_norms(base, "out")) if kind == "dora" else None
        found[site] = replace(adapter, magnitude=magnitude)
    return found


def merged_model(model: nn.Module, adapters: dict[str, SiteAdapter]) -> nn.Module:
    """The slow twin of a whole model: fp32, with every adapted weight in place."""
    wide = copy.deepcopy(model).float()
    for site, adapter in adapters.items():
        weight = wide.get_submodule(site).weight
        weight.data = compute_adapted_weight(weight.data, adapter)
    return wide


@pytest.fixture(scope="module")
def loud():
    """A Cosmos transformer whose stream leaves fp16, adapters for all of it, calls, and what fp32 makes of them."""
    model, calls = cosmos(stream_exponent=17), cosmos_calls()
    adapters = adapted_sites(model)
    return model, adapters, calls, collect_call_outputs(merged_model(model, adapters), calls)


def worst(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(relative_l2(a, b) for a, b in zip(found, wanted, strict=True))


def test_current_scaling_before_or_after(loud):
    model, adapters, calls, wanted = loud
    with attach_adapters(model, adapters), apply_current_scaling(model) as planned:
        assert set(find_product_sites(planned)) == {f"{site}.base" for site in adapters}
        first = collect_call_outputs(planned, calls)
    with apply_current_scaling(model) as planned, attach_adapters(planned, adapters):
        second = collect_call_outputs(planned, calls)
    assert worst(first, wanted) < 2e-3 and worst(second, wanted) < 2e-3


def test_a_plan_before_and_a_plan_of_the_adapted_model(loud):
    model, adapters, calls, wanted = loud
    plan = plan_component(model, calls, 2, "fp32")
    with apply_plan(model, plan) as planned, attach_adapters(planned, adapters):
        assert plan.lines and worst(collect_call_outputs(planned, calls), wanted) < 3e-3
    with attach_adapters(model, adapters):
        own = plan_component(model, calls, 2, "fp32")
        with apply_plan(model, own) as planned:
            assert own.lines and worst(collect_call_outputs(planned, calls), wanted) < 3e-3
        certificate = prove_component_plan(model, own, calls, 2)
        assert certificate.exact_rel_l2 == 0.0 and certificate.finite and certificate.droppable_lines == 0
        assert certificate.step_rel_l2 < certificate.bf16_step_rel_l2 / 2
        assert certificate.headroom_bits_min >= 2 and certificate.half_flops_share > 0.99
        with pytest.raises(PlanError, match="attached") as caught:
            apply_plan(model, plan)
        assert caught.value.code == "PLAN-NOT-A-PRODUCT"
        moved = plan.moved({site: f"{site}.base" for site in adapters})
        assert check_component_plan(model, moved, calls).holds(1)
        with apply_plan(model, moved) as planned:
            assert worst(collect_call_outputs(planned, calls), wanted) < 3e-3


@pytest.mark.parametrize("family", [flux, unet], ids=lambda family: family.__name__)
def test_other_families_run_when_every_layer_is_adapted(family):
    torch.manual_seed(0)
    model, shapes, rest = family()
    model = model.eval().requires_grad_(False)
    inputs = {**{name: torch.randn(shape) for name, shape in shapes.items()}, **rest, "return_dict": False}
    adapters = adapted_sites(model)
    wanted = merged_model(model, adapters)(**inputs)[0]
    with attach_adapters(model, adapters):
        assert relative_l2(model(**inputs)[0], wanted) < 1e-5


def test_a_text_encoder_runs_when_every_layer_is_adapted():
    model, tokens = tiny_modules()["text_encoder"].float().requires_grad_(False), torch.arange(7)[None]
    adapters = adapted_sites(model)
    wanted = merged_model(model, adapters)(tokens).last_hidden_state
    with attach_adapters(model, adapters):
        assert relative_l2(model(tokens).last_hidden_state, wanted) < 1e-5
