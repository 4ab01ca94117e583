"""The laws that every algorithm keeps. One that joins ALGORITHMS is held to them without a line here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from finitune.adapters import ADAPTER_ALGORITHMS, Magnitude, SiteAdapter, find_algorithm
from finitune.adapters.core import MagnitudeSide
from finitune.adapters.dora import compute_weight_norms
from finitune.adapters.weight import combine_adapted_weight, compute_adapted_weight, compute_weight_delta
from finitune.errors import AdapterError
from finitune.namings.fused import fold_scale_into_factor, multiply_change
from tests.adapters_made import ExactProducts, Options, fresh_adapter, random_adapter, random_base

LINEAR, CONV, NORM = (16, 24), (16, 8, 3, 3), (16,)
TUCKER = {"use_tucker": True}
OPTIONS: dict[str, tuple[Options, ...]] = {
    "lora": ({}, TUCKER),
    "loha": ({}, TUCKER),
    "lokr": (
        {},
        {"factor": 2},
        {"factor": 2, "unbalanced": True},
        {"factor": 8, "full_matrix": True},
        {"factor": 8, "decompose_both": True, "unbalanced": True},
        {"factor": 2, **TUCKER},
    ),
    "norm": ({}, {"bias": True}),
}


@dataclass(frozen=True)
class Case:
    name: str
    shape: tuple[int, ...]
    options: Options = field(default_factory=dict)
    side: MagnitudeSide | None = None

    def __str__(self) -> str:
        where = {LINEAR: "linear", CONV: "conv", NORM: "norm"}[self.shape]
        parts = [self.name, where, *(f"{key}={value}" for key, value in self.options.items()), self.side]
        return "-".join(part for part in parts if part)

    def made(self, seed: int = 0) -> tuple[Tensor, SiteAdapter]:
        return random_adapter(self.name, self.shape, seed, magnitude=self.side, options=self.options)


def cases() -> Iterator[Case]:
    for algorithm in ADAPTER_ALGORITHMS:
        for shape in [NORM] if algorithm.name == "norm" else [LINEAR, CONV]:
            for options in OPTIONS.get(algorithm.name, ({},)):
                if shape == LINEAR and "use_tucker" in options:
                    continue
                for side in (None, "out", "in") if algorithm.additive and len(shape) > 1 else (None,):
                    yield Case(algorithm.name, shape, options, side)
    yield Case("set", NORM)


CASES = list(cases())
CHEAP = {("lora", 2), ("lora", 4), ("lokr", 2)}
PLAIN = [case for case in CASES if case.side is None]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_plain_case = pytest.mark.parametrize("case", PLAIN, ids=str)


def relative(a: Tensor, b: Tensor, unit: Tensor | None = None) -> float:
    """|a - b| / |unit|, or / |b|, in fp64."""
    return float((a.double() - b.double()).norm().detach() / (b if unit is None else unit).double().norm().detach())


@every_case
def test_a_new_adapter_changes_nothing(case: Case):
    base = random_base(case.shape, seed=1)
    adapter = fresh_adapter(case.name, base, seed=2, magnitude=case.side, options=case.options)
    for strength in (1.0, 0.6, -1.0):
        assert torch.equal(compute_adapted_weight(base, adapter, strength), base)


@every_plain_case
def test_a_new_adapter_is_the_same_every_time(case: Case):
    base = random_base(case.shape, seed=1)
    one, other, another = (fresh_adapter(case.name, base, seed, options=case.options) for seed in (2, 2, 3))
    assert all(torch.equal(one.tensors[role], other.tensors[role]) for role in one.tensors)
    assert all(tensor.dtype == torch.float32 for tensor in one.tensors.values() if tensor.is_floating_point())
    assert one.tensors.keys() == another.tensors.keys()


@every_case
def test_strength_zero_is_the_base_to_the_bit(case: Case):
    base, adapter = case.made()
    assert torch.equal(compute_adapted_weight(base, adapter, 0.0), base)


@every_case
def test_strength_one_is_the_trained_weight_and_strength_is_linear(case: Case):
    base, adapter = case.made()
    base = base.double()
    trained = base + compute_weight_delta(base, adapter)
    assert relative(compute_adapted_weight(base, adapter), trained) < 1e-14
    assert relative(trained, base) > 0.02
    for strength in (-1.0, 0.3, 2.5):
        line = base + strength * (trained - base)
        assert relative(compute_adapted_weight(base, adapter, strength), line) < 1e-13


@every_plain_case
def test_additive_means_that_the_base_does_not_matter(case: Case):
    base, adapter = case.made()
    one, other = (find_algorithm(case.name).delta(adapter, b.double()) for b in (base, random_base(case.shape, seed=9)))
    assert torch.equal(one, other) == find_algorithm(case.name).additive


@every_plain_case
def test_a_scale_that_is_folded_into_the_factors_is_the_same_change(case: Case):
    base, adapter = case.made()
    wide = base.double()
    change = compute_weight_delta(wide, adapter)
    folded = fold_scale_into_factor(adapter)
    assert find_algorithm(case.name).scale(folded) == 1.0 or find_algorithm(case.name).rank(adapter) is None
    assert relative(compute_weight_delta(wide, folded), change) < 1e-6
    if find_algorithm(case.name).alpha_means == "scale":
        assert relative(compute_weight_delta(wide, multiply_change(adapter, -0.3)), -0.3 * change) < 1e-6


@every_case
def test_single_precision_is_close_to_double(case: Case):
    for seed in range(3):
        base, adapter = case.made(seed)
        single, double = compute_adapted_weight(base, adapter), compute_adapted_weight(base.double(), adapter)
        assert single.dtype == torch.float32 and double.dtype == torch.float64
        assert relative(single, double) <= 1e-6
        delta = compute_weight_delta(base.double(), adapter)
        assert relative(compute_weight_delta(base, adapter), delta) <= (1e-5 if case.side else 1e-6)


@every_plain_case
def test_half_tensors_are_read_before_they_are_multiplied(case: Case):
    """A file's fp16 factors give the same weight as their values in fp32."""
    base, adapter = case.made()
    half = adapter.with_tensors(**{r: t.half() for r, t in adapter.tensors.items() if t.is_floating_point()})
    single = half.with_tensors(**{r: t.float() for r, t in half.tensors.items() if t.is_floating_point()})
    assert torch.equal(compute_adapted_weight(base, half), compute_adapted_weight(base, single))


def layer_for(shape: tuple[int, ...], **attributes: object) -> nn.Linear | nn.Conv2d:
    if len(shape) == 2:
        return nn.Linear(shape[1], shape[0], bias=False)
    groups = int(attributes.get("groups", 1))  # type: ignore[call-overload]
    return nn.Conv2d(shape[1] * groups, shape[0], shape[2:], bias=False, **attributes)  # type: ignore[arg-type]


def input_for(layer: nn.Linear | nn.Conv2d, dtype: torch.dtype = torch.float64) -> Tensor:
    if isinstance(layer, nn.Linear):
        return torch.randn(2, 5, layer.in_features, dtype=dtype)
    return torch.randn(2, layer.in_channels, 9, 8, dtype=dtype)


@pytest.mark.parametrize("case", [case for case in PLAIN if len(case.shape) > 1], ids=str)
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float64, 1e-13), (torch.float32, 1e-5)], ids=str)
def test_forward_is_the_merged_weight(case: Case, dtype: torch.dtype, bar: float):
    base, adapter = case.made()
    layer = layer_for(case.shape, padding=1) if len(case.shape) > 2 else layer_for(case.shape)
    x, products = input_for(layer, dtype), ExactProducts(layer)
    fast = find_algorithm(case.name).forward(adapter, x, products)
    if fast is None:
        assert (case.name, len(case.shape)) not in CHEAP
        pytest.skip("no cheaper way than the merged weight")
    assert relative(fast, products.apply_spatial(x, compute_weight_delta(base.to(dtype), adapter))) <= bar


@every_case
def test_gradients_are_those_of_differences(case: Case):
    base, adapter = case.made()
    base = base.double()
    roles = [role for role, tensor in adapter.tensors.items() if tensor.is_floating_point()]
    inputs = [adapter.tensors[role].double().requires_grad_() for role in roles]
    if adapter.magnitude is not None:
        inputs.append(adapter.magnitude.tensor.double().requires_grad_())

    def delta(*tensors: Tensor) -> Tensor:
        changed = adapter.with_tensors(**dict(zip(roles, tensors, strict=False)))
        if adapter.magnitude is not None:
            changed = replace(changed, magnitude=replace(adapter.magnitude, tensor=tensors[-1]))
        return compute_weight_delta(base, changed)

    assert torch.autograd.gradcheck(delta, inputs, fast_mode=True, atol=1e-6)


@every_plain_case
def test_the_tensors_imply_the_weight_they_were_made_for(case: Case):
    _, adapter = case.made()
    algorithm = find_algorithm(case.name)
    algorithm.check(adapter, case.shape)
    implied = algorithm.shape(adapter)
    assert implied is None or algorithm.fits(adapter, implied, case.shape)
    with pytest.raises(AdapterError) as caught:
        algorithm.check(adapter, tuple(n if n == 3 else 3 * n + 1 for n in case.shape))
    assert caught.value.code in ("ADAPTER-DOES-NOT-FIT", "ADAPTER-SHAPES")


@every_plain_case
def test_missing_and_surplus_roles_are_refused(case: Case):
    base, adapter = case.made()
    algorithm = find_algorithm(case.name)
    for role in algorithm.required:
        rest = {r: t for r, t in adapter.tensors.items() if r != role}
        assert refusal(base, replace(adapter, tensors=rest)) == "ADAPTER-ROLES"
    assert refusal(base, replace(adapter, tensors={})) == "ADAPTER-ROLES"
    assert refusal(base, adapter.with_tensors(surplus=torch.zeros(1))) == "ADAPTER-ROLES"
    assert refusal(base, adapter.with_tensors(diff_b=torch.zeros(case.shape[0] + 1))) == "ADAPTER-DOES-NOT-FIT"


@every_plain_case
def test_wrong_shapes_are_refused(case: Case):
    base, adapter = case.made()
    for role, tensor in adapter.tensors.items():
        for axis in range(tensor.ndim):
            longer = torch.cat([tensor, tensor.narrow(axis, 0, 1)], dim=axis)
            if is_free_axis(adapter, role, axis):  # a module has its first rows, or columns, of what all share
                assert torch.equal(
                    compute_adapted_weight(base, adapter.with_tensors(**{role: longer})),
                    compute_adapted_weight(base, adapter),
                )
                continue
            code = refusal(base, adapter.with_tensors(**{role: longer}))
            assert code in ("ADAPTER-SHAPES", "ADAPTER-DOES-NOT-FIT"), f"{role}, axis {axis}"


def is_free_axis(adapter: SiteAdapter, role: str, axis: int) -> bool:
    shared = find_algorithm(adapter.algorithm).roles.get(role)
    return (
        bool(shared and shared.shared_key) and adapter.tensors[role].shape[axis] != adapter.tensors["lambda_d"].numel()
    )


def refusal(base: Tensor, adapter: SiteAdapter) -> str:
    """The code of the error that an adapter on a base meets."""
    with pytest.raises(AdapterError) as caught:
        compute_adapted_weight(base, adapter)
    assert caught.value.remedy and caught.value.evidence
    return caught.value.code


def test_every_name_is_known_once():
    names = [algorithm.name for algorithm in ADAPTER_ALGORITHMS]
    assert len(set(names)) == len(names) and all(find_algorithm(name).name == name for name in names)
    with pytest.raises(AdapterError, match="Did you mean 'lora'"):
        find_algorithm("lorra")


@pytest.mark.parametrize("case", [case for case in CASES if case.side], ids=str)
def test_dora_gives_the_weight_its_magnitudes(case: Case):
    base, adapter = case.made()
    assert adapter.magnitude is not None
    trained = compute_weight_norms(compute_adapted_weight(base.double(), adapter), adapter.magnitude.side)
    assert relative(trained, adapter.magnitude.tensor) < 1e-12
    short = replace(adapter.magnitude, tensor=adapter.magnitude.tensor.flatten()[1:])
    assert refusal(base, replace(adapter, magnitude=short)) == "ADAPTER-DORA"


@pytest.mark.parametrize("norm_of", ["adapted", "base"])
def test_an_empty_row_stays_and_its_gradients_are_numbers(norm_of: Literal["adapted", "base"]):
    """A layer that began at zero has norms of zero, and so has its DoRA."""
    base, adapter = random_adapter("lora", LINEAR, 0)
    base[3:5] = 0
    up = adapter.tensors["up"].clone()
    up[3] = 0
    up.requires_grad_()
    magnitude = Magnitude(compute_weight_norms(base, "out").requires_grad_(), norm_of=norm_of)
    weight = compute_adapted_weight(base, replace(adapter.with_tensors(up=up), magnitude=magnitude))
    assert not weight[3].any() and weight.isfinite().all()
    weight.square().sum().backward()
    assert up.grad is not None and up.grad.isfinite().all()
    assert magnitude.tensor.grad is not None and magnitude.tensor.grad.isfinite().all()


@pytest.mark.parametrize("name", [algorithm.name for algorithm in ADAPTER_ALGORITHMS if not algorithm.additive])
def test_dora_over_what_is_not_additive_is_refused(name: str):
    base, adapter = random_adapter(name, LINEAR, 0)
    assert refusal(base, replace(adapter, magnitude=Magnitude(compute_weight_norms(base, "out")))) == "ADAPTER-DORA"


def test_strengths_of_several_adapters_add_their_changes():
    """MRG-05: any strengths, negative and zero too, and no cross terms between factors."""
    made = [case.made(seed) for seed, case in enumerate(CASES) if case.shape == LINEAR]
    base, adapters = made[0][0].double(), [adapter for _, adapter in made]
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        strengths = [round(float(s), 2) for s in torch.randn(len(adapters), generator=generator)]
        strengths[0] = 0.0
        pairs = list(zip(adapters, strengths, strict=True))
        expected = base + sum(m * (compute_adapted_weight(base, a) - base) for a, m in pairs)
        assert relative(combine_adapted_weight(base, pairs), expected) < 1e-13
        assert relative(combine_adapted_weight(base, pairs[::-1]), expected) < 1e-13


def test_factors_are_not_added():
    """MRG-05 by hand: 0.6 * 0.6 + 1.1 * 0.2 is 0.58, where (0.6 + 1.1) * (0.6 + 0.2) is 1.36."""
    ones = [
        SiteAdapter("lora", {"up": torch.tensor([[up]]), "down": torch.tensor([[down]])})
        for up, down in ((0.6, 0.6), (1.1, 0.2))
    ]
    base = torch.zeros(1, 1, dtype=torch.float64)
    assert float(combine_adapted_weight(base, [(one, 1.0) for one in ones])) == pytest.approx(0.58)
    assert float(combine_adapted_weight(base, list(zip(ones, (0.7, 0.4), strict=True)))) == pytest.approx(
        0.7 * 0.36 + 0.4 * 0.22
    )
    assert float(combine_adapted_weight(base, list(zip(ones, (1.0, -0.5), strict=True)))) == pytest.approx(0.36 - 0.11)
