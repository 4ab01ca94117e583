"""What training runs: one product in fp32 with exact gradients, every algorithm in every precision, and its state."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from finitune.adapters import ADAPTER_ALGORITHMS, Magnitude, SiteAdapter, Target, find_algorithm
from finitune.adapters.dora import compute_weight_norms
from finitune.adapters.layer import AdaptedLayer, AttachedAdapters, attach_adapters
from finitune.adapters.merged_linear import find_single_adapter
from finitune.adapters.modules import compute_row_ratio
from finitune.adapters.new import create_adapter
from finitune.adapters.weight import compute_adapted_bias, compute_adapted_weight
from finitune.errors import AdapterError
from finitune.precision.apply import apply_current_scaling
from tests.adapters_made import Options, random_adapter
from tests.test_algebra import relative

OUT, INTO = 16, 24
LOKR: dict[str, Options] = {
    "lokr": {},
    "lokr-2": {"factor": 2},
    "lokr-unbalanced": {"factor": 2, "unbalanced": True},
    "lokr-both": {"factor": 8, "decompose_both": True, "unbalanced": True},
    "lokr-full": {"factor": 8, "full_matrix": True},
}
KINDS: dict[str, dict] = {
    **{kind: {"name": "lokr", "options": options} for kind, options in LOKR.items()},
    "dora": {"name": "lora", "magnitude": "out"},
    "dora-in": {"name": "lora", "magnitude": "in"},
    "dora-loha": {"name": "loha", "magnitude": "out"},
    "dora-lokr": {"name": "lokr", "magnitude": "out"},
    **{name: {"name": name} for name in ("lora", "loha", "glora", "full", "ia3", "oft", "boft", "oft_v2", "set")},
}
LINEAR_ALGORITHMS = [algorithm.name for algorithm in ADAPTER_ALGORITHMS if algorithm.name != "norm"]


def made(kind: str, bias: bool = True, seed: int = 0) -> tuple[nn.Linear, SiteAdapter]:
    """A frozen Linear and an adapter away from zero."""
    options = dict(KINDS[kind])
    weight, adapter = random_adapter(options.pop("name"), (OUT, INTO), seed, **options)
    base = nn.Linear(INTO, OUT, bias=bias).requires_grad_(False)
    base.weight.copy_(weight)
    return base, adapter


def rows(count: int = 40, seed: int = 0) -> Tensor:
    return torch.randn(3, count, INTO, generator=torch.Generator().manual_seed(seed))


def backward(layer: AdaptedLayer, x: Tensor, seen: Tensor) -> list[Tensor]:
    """The result, and the gradients of the input and of all parameters, for given gradients of the result."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    (y * seen).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.held.parameters())]


def by_merged_weight(layer: AdaptedLayer, x: Tensor, seen: Tensor) -> list[Tensor]:
    """The slow twin: everything in fp64 through the adapted weight."""
    held, base = copy.deepcopy(layer.held[0]), copy.deepcopy(layer.base).double()
    for role, parameter in list(held.named_parameters()):
        setattr(held, role, nn.Parameter(parameter.detach().double()))
    x = x.double().requires_grad_()
    weight = compute_adapted_weight(base.weight, held.adapter, held.strength)
    bias = compute_adapted_bias(base.bias, held.adapter, held.strength)
    y = nn.functional.linear(x, weight, bias)
    (y * seen).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in held.parameters())]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("strength", [1.0, -0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_one_product_has_the_results_and_gradients_of_the_merged_weight(kind: str, strength: float, bias: bool):
    base, adapter = made(kind, bias)
    if bias:
        adapter = adapter.with_tensors(diff_b=torch.randn(OUT))
    layer, x, seen = AdaptedLayer(base, [(adapter, strength)], trainable=True), rows(), torch.randn(3, 40, OUT)
    assert find_single_adapter(layer.held, x, base) is not None
    found, wanted = backward(layer, x, seen), by_merged_weight(layer, x, seen)
    assert len(found) == len(wanted) > 2
    assert all(relative(a, b) < 2e-6 for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", ["lora", "dora", *LOKR])
def test_few_rows_or_a_watched_base_take_the_factors_to_the_same_end(kind: str):
    base, adapter = made(kind)
    layer, x, seen = AdaptedLayer(base, [(adapter, 0.7)], trainable=True), rows(), torch.randn(3, 40, OUT)
    single = backward(layer, x, seen)
    calls: list[int] = []
    handle = base.register_forward_hook(lambda *_: calls.append(1))
    assert all(relative(a, b) < 2e-6 for a, b in zip(backward(layer, x, seen), single, strict=True))
    assert calls == [1]
    handle.remove()
    few, seen = rows(2), torch.randn(3, 2, OUT)
    assert find_single_adapter(layer.held, few, base) is None
    found, wanted = backward(layer, few, seen), by_merged_weight(layer, few, seen)
    assert all(relative(a, b) < 2e-6 for a, b in zip(found, wanted, strict=True))


def test_one_product_is_for_what_is_trained_alone_in_fp32():
    base, adapter = made("lora")
    trained, x = AdaptedLayer(base, [(adapter, 1.0)], trainable=True), rows()
    assert find_single_adapter(trained.held, x, base) is not None
    assert find_single_adapter(AdaptedLayer(base, [(adapter, 1.0)]).held, x, base) is None
    assert find_single_adapter(AdaptedLayer(base, [(adapter, 1.0)] * 2, trainable=True).held, x, base) is None
    assert find_single_adapter(trained.held, x.double(), base) is None
    with torch.no_grad():
        assert find_single_adapter(trained.held, x, base) is None
    for other in (copy.deepcopy(base).bfloat16(), copy.deepcopy(base).requires_grad_()):
        assert find_single_adapter(trained.held, x, other) is None


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(["lora", *LOKR]), st.integers(1, 9), st.integers(0, 9))
def test_gradients_by_the_factors_are_those_of_the_change(kind: str, count: int, seed: int):
    base, adapter = made(kind, seed=seed)
    algorithm = find_algorithm(adapter.algorithm)
    wide = adapter.with_tensors(**{r: t.double().requires_grad_() for r, t in adapter.tensors.items()})
    x, grad = (torch.randn(count, n, dtype=torch.float64) for n in (INTO, OUT))
    delta = algorithm.delta(wide, base.weight.double())
    wanted = torch.autograd.grad(x @ delta.t(), list(wide.tensors.values()), grad)
    with torch.no_grad():
        found = algorithm.factor_gradients(wide, x, grad)
        added = algorithm.merged_weight(wide, base.weight.double(), 0.3)
    assert found is not None and found.keys() == wide.tensors.keys()
    for role, expected in zip(wide.tensors, wanted, strict=True):
        assert found[role].shape == expected.shape and relative(found[role], expected) < 1e-12
    assert relative(added, base.weight.double() + 0.3 * delta) < 1e-12


@pytest.mark.parametrize("shape", [(OUT, INTO), (8, 6, 3, 3)], ids=str)
def test_row_norms_without_the_weight_are_exact_and_so_are_their_gradients(shape: tuple[int, ...]):
    base, adapter = random_adapter("lora", shape, 0)
    base = base.double()
    base[3:5] = 0
    tensors = {role: t.double() for role, t in adapter.tensors.items()}
    tensors["up"][3] = 0  # an empty row: its norm is 0, and the gradient a number
    algorithm, roles = find_algorithm("lora"), list(tensors)

    def row_norms(*values: Tensor) -> Tensor:
        return algorithm.row_norms(adapter.with_tensors(**dict(zip(roles, values, strict=True))), base)

    inputs = [t.requires_grad_() for t in tensors.values()]
    dense = compute_weight_norms(base + algorithm.delta(adapter.with_tensors(**tensors), base), "out").flatten()
    assert relative(row_norms(*inputs), dense) < 1e-14 and not row_norms(*inputs)[3].any()
    gradients = torch.autograd.grad(row_norms(*inputs).sum(), inputs)
    wanted = torch.autograd.grad(dense.sum(), inputs)
    assert all(relative(a, b) < 1e-12 for a, b in zip(gradients, wanted, strict=True))


def test_the_norm_is_part_of_the_gradient_where_peft_holds_it_constant():
    """Equation 5 of the paper; its section 4.3 and PEFT detach the norm, which is another gradient."""
    from peft import LoraConfig, inject_adapter_in_model

    base, adapter = made("dora", bias=False)
    config = LoraConfig(r=3, lora_alpha=1.7, use_dora=True, target_modules=["0"])
    theirs = inject_adapter_in_model(config, nn.Sequential(copy.deepcopy(base)))[0]
    theirs.lora_A["default"].weight.data.copy_(adapter.tensors["down"])
    theirs.lora_B["default"].weight.data.copy_(adapter.tensors["up"])
    assert adapter.magnitude is not None
    theirs.lora_magnitude_vector["default"].weight.data.copy_(adapter.magnitude.tensor.flatten())
    layer, x, seen = AdaptedLayer(base, [(adapter, 1.0)], trainable=True), rows(), torch.randn(3, 40, OUT)
    ours = dict(zip(("y", "x", "down", "up", "magnitude"), backward(layer, x, seen), strict=True))
    y = theirs(x)
    (y * seen).sum().backward()
    assert relative(ours["y"], y) < 2e-6
    assert relative(ours["magnitude"].flatten(), theirs.lora_magnitude_vector["default"].weight.grad) < 2e-6
    assert relative(ours["up"], theirs.lora_B["default"].weight.grad) > 0.01


# Where training starts, and that it moves.


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("name", LINEAR_ALGORITHMS)
def test_a_new_adapter_changes_no_bit(name: str, dora: bool):
    layer = nn.Linear(INTO, OUT, bias=False).requires_grad_(False)
    target, generator = Target(layer.weight, rank=4, alpha=2.0), torch.Generator().manual_seed(0)
    if dora and not find_algorithm(name).additive:
        with pytest.raises(AdapterError) as caught:
            create_adapter(target, name, generator, dora)
        assert caught.value.code == "ADAPTER-DORA"
        return
    adapter = create_adapter(target, name, generator, dora)
    assert (adapter.magnitude is not None) == dora
    adapted, x = AdaptedLayer(layer, [(adapter, 1.0)], trainable=True), rows()
    assert torch.equal(adapted(x), layer(x))
    with torch.no_grad():
        assert torch.equal(adapted(x), layer(x))
    if dora:
        assert torch.equal(compute_row_ratio(adapted.adapter, layer), torch.ones(OUT))


@pytest.mark.parametrize("seed", range(5))
def test_a_new_dora_divides_by_its_own_norms_exactly(seed: int):
    torch.manual_seed(seed)
    for make in (nn.Linear(37, 53), nn.Conv2d(5, 7, 3), nn.Linear(300, 200).bfloat16()):
        adapter = create_adapter(Target(make.weight), "lora", torch.Generator().manual_seed(0), dora=True)
        assert torch.equal(compute_row_ratio(adapter, make), torch.ones(make.weight.shape[0]))


def small_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(INTO, OUT), nn.SiLU(), nn.Linear(OUT, INTO)).requires_grad_(False)


def new_adapters(model: nn.Module, name: str, dora: bool = False) -> dict[str, SiteAdapter]:
    generator = torch.Generator().manual_seed(0)
    return {
        site: create_adapter(Target(model.get_submodule(site).weight, 4, 4.0), name, generator, dora)
        for site in ("0", "2")
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16", "current half"])
@pytest.mark.parametrize("name", [*LINEAR_ALGORITHMS, "dora"])
def test_every_algorithm_trains_under_checkpointing(name: str, precision: str):
    model, x = small_model(), rows()
    adapters = new_adapters(model, "lora" if name == "dora" else name, dora=name == "dora")
    if precision == "bf16":
        model, x = model.bfloat16(), x.bfloat16()
    applied = apply_current_scaling(model).module if precision == "current half" else model
    attached = attach_adapters(applied, adapters, trainable=True)
    optimiser = torch.optim.AdamW(attached.parameters(), lr=1e-2)
    x = x.requires_grad_()
    for _ in range(2):
        optimiser.zero_grad()
        checkpoint(applied, x, use_reentrant=False).float().square().mean().backward()
        gradients = {key: p.grad for key, p in attached.named_parameters()}
        optimiser.step()
    dead = [key for key, grad in gradients.items() if grad is None or not grad.isfinite().all() or not grad.any()]
    assert gradients and not dead


@pytest.mark.parametrize(("kind", "most"), [("lora", 0), ("dora", 0), ("dora-lokr", 0), ("loha", 1), ("dora-in", 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_as_large_as_the_weight_is_kept_but_what_a_product_reads(kind: str, most: int, dtype: torch.dtype):
    base, adapter = made(kind)
    base, x = base.to(dtype), rows().to(dtype).requires_grad_()
    layer, kept = AdaptedLayer(base, [(adapter, 1.0)], trainable=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    own = {base.weight.data_ptr(), *(p.data_ptr() for p in layer.held.parameters())}
    large = [t for t in kept if t.numel() == OUT * INTO and t.dtype == torch.float32 and t.data_ptr() not in own]
    assert len(large) <= (0 if dtype is torch.float32 else most)


# State.


def test_names_are_modules_and_roles_in_the_order_of_the_parameters():
    model = small_model()
    attached = attach_adapters(model, new_adapters(model, "lora", dora=True), trainable=True)
    names, parameters = zip(*attached.named_parameters(), strict=True)
    assert names == ("0.down", "0.up", "0.magnitude", "2.down", "2.up", "2.magnitude")
    assert all(a is b for a, b in zip(parameters, attached.parameters(), strict=True))
    attached.detach()
    pair = [(new_adapters(model, "lora")["0"], 1.0)] * 2
    several = attach_adapters(model, {"0": pair}, trainable=True)
    assert [name for name, _ in several.named_parameters()] == ["0.0.down", "0.0.up", "0.1.down", "0.1.up"]
    with pytest.raises(AdapterError) as caught:
        several.adapters()
    assert caught.value.code == "ADAPTER-STATE" and caught.value.subject == "0"


def trained() -> AttachedAdapters:
    model = small_model()
    attached = attach_adapters(model, new_adapters(model, "lora", dora=True), trainable=True)
    with torch.no_grad():
        for parameter in attached.parameters():
            parameter.add_(torch.randn(parameter.shape))
    return attached


def test_state_goes_out_as_copies_and_comes_back_in_place():
    attached, x = trained(), rows()
    state, wanted = attached.adapters(), attached.root(x)
    before = list(attached.parameters())
    for adapter in state.values():
        assert all(not t.requires_grad and t.dtype == torch.float32 for t in adapter.tensors.values())
    with torch.no_grad():
        for parameter in before:
            parameter.zero_()
    assert state["0"].tensors["up"].any() and not torch.equal(attached.root(x), wanted)
    attached.load(state)
    assert torch.equal(attached.root(x), wanted)
    assert all(a is b for a, b in zip(before, attached.parameters(), strict=True))


BROKEN = {
    "a module less": lambda s: {"0": s["0"]},
    "another module": lambda s: {**s, "4": s["0"]},
    "another shape": lambda s: {**s, "2": s["0"]},
    "a role more": lambda s: {**s, "2": s["2"].with_tensors(diff_b=torch.zeros(INTO))},
    "no magnitude": lambda s: {**s, "2": replace(s["2"], magnitude=None)},
    "another side": lambda s: {**s, "2": replace(s["2"], magnitude=Magnitude(s["2"].magnitude.tensor, side="in"))},
    "another alpha": lambda s: {**s, "2": replace(s["2"], alpha=1.0)},
    "another algorithm": lambda s: {**s, "2": new_adapters(small_model(), "loha")["2"]},
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_state_of_something_else_is_refused_and_nothing_is_written(case: str):
    attached = trained()
    state = attached.adapters()
    kept = [p.detach().clone() for p in attached.parameters()]
    with pytest.raises(AdapterError) as caught:
        attached.load(BROKEN[case]({s: replace(a, tensors=dict(a.tensors)) for s, a in state.items()}))
    assert caught.value.code == "ADAPTER-STATE" and caught.value.remedy and caught.value.evidence
    assert all(torch.equal(a, b) for a, b in zip(kept, attached.parameters(), strict=True))
