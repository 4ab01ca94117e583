"""LyCORIS 4.1 draws what we compute, in its forward pass; and where it does not agree with itself, that is stated.

A test whose name says "lycoris" states a fault of that library: if it fails one day, the fault was mended there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from finitune.adapters import Magnitude, SiteAdapter, Target, find_algorithm
from finitune.adapters.core import MagnitudeSide
from finitune.adapters.lokr import split_dimension
from finitune.adapters.tlora import convert_tlora_to_lora
from finitune.adapters.weight import compute_adapted_bias, compute_adapted_weight, compute_weight_delta
from finitune.errors import AdapterError
from tests.adapters_made import ALPHA, RANK, ExactProducts
from tests.test_algebra import input_for, relative

CLASSES = {
    "lora": "LoConModule",
    "loha": "LohaModule",
    "lokr": "LokrModule",
    "glora": "GLoRAModule",
    "full": "FullModule",
    "dylora": "DyLoraModule",
    "tlora": "TLoraModule",
}
ADDITIVE = [
    ("lora", {}),
    ("lora", {"use_tucker": True}),
    ("loha", {}),
    ("loha", {"use_tucker": True}),
    ("lokr", {"factor": 2}),
    ("lokr", {"factor": 2, "use_tucker": True}),
    ("lokr", {"factor": 2, "full_matrix": True}),
    ("lokr", {"factor": 8, "decompose_both": True, "unbalanced_factorization": True}),
]
LAYERS = ["linear", "conv"]


@pytest.fixture(scope="module")
def lycoris() -> Iterator[ModuleType]:
    """Its modules, on torch alone: without kernels of its own, and without compiling."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LYCORIS_KERNEL_BACKEND", "torch")
        yield pytest.importorskip("lycoris.modules")


def a_layer(kind: str, **attributes: object) -> nn.Linear | nn.Conv2d:
    if kind == "linear":
        return nn.Linear(24, 16).double()
    return nn.Conv2d(8, 16, 3, **{"padding": 1, **attributes}).double()  # type: ignore[arg-type]


def trained(library: ModuleType, name: str, layer: nn.Module, **options: object) -> nn.Module:
    """One of its modules on a layer, in fp64, with every parameter away from zero."""
    kind = getattr(library, CLASSES[name])
    module = kind("site", layer, **{"lora_dim": RANK, "alpha": ALPHA, **options}).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_().mul_(0.5)
        if hasattr(module, "dora_scale"):
            module.dora_scale.abs_().add_(0.5)
    return module


def read(name: str, module: nn.Module, side: MagnitudeSide = "out") -> SiteAdapter:
    """What its file would hold, as our adapter; alpha as it was asked for, since a file rounds it to fp32."""
    saved = {key: value.detach() for key, value in module.custom_state_dict().items() if key != "alpha"}
    scale = saved.pop("dora_scale", None)
    roles = {
        key.removesuffix(".weight").split("_", 1)[1] if key[:2] in ("lo", "ha") else key: t for key, t in saved.items()
    }
    magnitude = None if scale is None else Magnitude(scale, side, eps=torch.finfo(scale.dtype).eps)
    return SiteAdapter(name, {role.removesuffix(".weight"): t for role, t in roles.items()}, ALPHA, magnitude=magnitude)


def change_through(module: nn.Module, layer: nn.Module, x: Tensor) -> Tensor:
    return (module(x) - layer(x)).detach()


def change_by_weight(layer: nn.Linear | nn.Conv2d, adapter: SiteAdapter, x: Tensor, strength: float = 1.0) -> Tensor:
    return strength * ExactProducts(layer).apply_spatial(x, compute_weight_delta(layer.weight.detach(), adapter))


@pytest.mark.parametrize(("name", "options"), [*ADDITIVE, ("glora", {})], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("strength", [1.0, -0.4])
def test_the_forward_pass_is_ours(lycoris: ModuleType, name: str, options: dict, kind: str, strength: float):
    layer = a_layer(kind)
    module, x = trained(lycoris, name, layer, multiplier=strength, **options), input_for(layer)
    ours = change_by_weight(layer, read(name, module), x, strength)
    assert relative(ours, change_through(module, layer, x)) < 1e-12


@pytest.mark.parametrize(("name", "options"), ADDITIVE, ids=str)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("side", ["out", "in"])
def test_its_dora_is_ours_at_strength_one(
    lycoris: ModuleType, name: str, options: dict, kind: str, side: MagnitudeSide
):
    layer = a_layer(kind)
    options = {**options, "weight_decompose": True, "wd_on_out": side == "out"}
    module, x = trained(lycoris, name, layer, **options), input_for(layer)
    assert relative(change_by_weight(layer, read(name, module, side), x), change_through(module, layer, x)) < 1e-12


@pytest.mark.parametrize("attributes", [{"stride": 2}, {"dilation": 2}, {"groups": 2}], ids=str)
@pytest.mark.parametrize("name", ["lora", "loha", "lokr"])
def test_the_attributes_of_convolutions_agree(lycoris: ModuleType, name: str, attributes: dict):
    layer = a_layer("conv", **attributes)
    module, x = trained(lycoris, name, layer), input_for(layer)
    assert relative(change_by_weight(layer, read(name, module), x), change_through(module, layer, x)) < 1e-12


@pytest.mark.parametrize("name", ["lora", "loha", "lokr"])
def test_a_rank_stabilised_file_is_read_with_or_without_the_word(lycoris: ModuleType, name: str):
    """It saves alpha * sqrt(r): a reader that divides by r is right, without knowing of it."""
    layer = a_layer("linear")
    module, x = trained(lycoris, name, layer, rs_lora=True, factor=2), input_for(layer)
    adapter, there = read(name, module), change_through(module, layer, x)
    stated = SiteAdapter(name, adapter.tensors, ALPHA, rank_stabilised=True)
    saved = SiteAdapter(name, adapter.tensors, float(module.alpha))
    assert relative(change_by_weight(layer, stated, x), there) < 1e-12
    assert relative(change_by_weight(layer, saved, x), there) < 1e-6


@pytest.mark.parametrize("kind", LAYERS)
def test_a_full_difference_is_ours(lycoris: ModuleType, kind: str):
    layer = a_layer(kind)
    module, x = trained(lycoris, "full", layer), input_for(layer)
    diff, diff_b = module.weight.detach(), module.bias.detach()
    adapter = SiteAdapter("full", {"diff": diff, "diff_b": diff_b})
    with torch.no_grad():
        there = module(x)
        layer.weight.copy_(compute_adapted_weight(layer.weight, adapter))
        layer.bias.copy_(compute_adapted_bias(layer.bias, adapter))
        assert relative(layer(x), there) < 1e-12


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.GroupNorm(2, 8)], ids=["layer", "group"])
def test_a_norm_difference_is_ours(lycoris: ModuleType, norm: nn.LayerNorm | nn.GroupNorm):
    norm = norm.double()
    module, x = lycoris.NormModule("site", norm).double(), torch.randn(3, 8, dtype=torch.float64)
    with torch.no_grad():
        module.w_norm.normal_()
        module.b_norm.normal_()
        adapter = SiteAdapter("norm", {"w_norm": module.w_norm, "b_norm": module.b_norm})
        there = module(x)
        norm.weight.copy_(compute_adapted_weight(norm.weight, adapter))
        norm.bias.copy_(compute_adapted_bias(norm.bias, adapter))
        assert relative(norm(x), there) < 1e-12


@pytest.mark.parametrize(("name", "options"), [*ADDITIVE, ("glora", {}), ("lokr", {"decompose_both": True})], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_new_adapters_have_its_shapes(lycoris: ModuleType, name: str, options: dict, kind: str):
    layer = a_layer(kind)
    theirs = read(name, trained(lycoris, name, layer, **options))
    ours = {("unbalanced" if key == "unbalanced_factorization" else key): value for key, value in options.items()}
    target = Target(layer.weight.detach(), rank=RANK, alpha=ALPHA, options=ours)
    made = find_algorithm(name).init(target, torch.Generator())
    assert {r: t.shape for r, t in made.tensors.items()} == {r: t.shape for r, t in theirs.tensors.items()}


def test_dimensions_are_split_as_it_splits_them(lycoris: ModuleType):
    for factor in (-1, 1, 2, 3, 4, 7, 8, 16, 64):
        for dimension in range(1, 400):
            assert split_dimension(dimension, factor) == lycoris.factorization(dimension, factor)


@pytest.mark.parametrize("pixel", [False, True])
def test_t_lora_is_a_lora_of_twice_the_rank(lycoris: ModuleType, pixel: bool):
    layer = nn.Conv2d(24, 16, 1).double() if pixel else a_layer("linear")
    module, x = trained(lycoris, "tlora", layer), input_for(layer)
    adapter = convert_tlora_to_lora(t_lora_tensors(module), ALPHA, layer.weight.detach())
    assert find_algorithm("lora").rank(adapter) == 2 * RANK
    assert relative(change_by_weight(layer, adapter, x), change_through(module, layer, x)) < 1e-5


def t_lora_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {key.removesuffix(".weight"): t.detach() for key, t in module.custom_state_dict().items() if key != "alpha"}


@pytest.mark.parametrize("selection", ["principal", "middle", "last"])
def test_an_untrained_t_lora_changes_nothing(lycoris: ModuleType, selection: str):
    layer = a_layer("linear")
    module = lycoris.TLoraModule("site", layer, lora_dim=RANK, alpha=ALPHA, sig_type=selection)
    adapter = convert_tlora_to_lora(t_lora_tensors(module), ALPHA, layer.weight.detach(), selection)
    assert relative(compute_adapted_weight(layer.weight.detach(), adapter), layer.weight) < 1e-6


# Faults of the library


@pytest.mark.parametrize("name", ["loha", "lokr"])
def test_lycoris_merges_loha_and_lokr_with_the_scale_twice(lycoris: ModuleType, name: str):
    layer = a_layer("linear")
    module = trained(lycoris, name, layer, factor=2)
    delta = compute_weight_delta(layer.weight.detach(), read(name, module))
    assert relative(module.get_diff_weight(1.0)[0].detach(), ALPHA / RANK * delta) < 1e-12
    assert relative(module.get_weight(module.shape).detach(), delta) < 1e-12


@pytest.mark.parametrize("name", ["lora", "loha", "lokr"])
def test_lycoris_has_another_meaning_of_strength_with_dora(lycoris: ModuleType, name: str):
    """Its strength scales the ratio of the norms alone: at 0 that is W + dW, where ours is W."""
    layer = a_layer("linear")
    module, x = trained(lycoris, name, layer, weight_decompose=True, multiplier=0.0), input_for(layer)
    adapter = read(name, module)
    plain = SiteAdapter(name, adapter.tensors, adapter.alpha)
    assert relative(change_through(module, layer, x), change_by_weight(layer, plain, x)) < 1e-12
    assert compute_adapted_weight(layer.weight, adapter, 0.0) is layer.weight


def test_lycoris_saves_the_alpha_of_a_rank_stabilised_glora_as_it_was(lycoris: ModuleType):
    layer = a_layer("linear")
    module, x = trained(lycoris, "glora", layer, rs_lora=True), input_for(layer)
    as_saved = SiteAdapter("glora", read("glora", module).tensors, float(module.alpha))
    there = change_through(module, layer, x)
    assert relative(math.sqrt(RANK) * change_by_weight(layer, as_saved, x), there) < 1e-6


def test_lycoris_cannot_load_its_own_unbalanced_lokr(lycoris: ModuleType):
    layer = a_layer("linear")
    module = trained(lycoris, "lokr", layer, factor=8, unbalanced_factorization=True)
    saved = {f"site.{key}": value.detach() for key, value in module.custom_state_dict().items()}
    kind, parameters = lycoris.get_module(saved, "site")
    with pytest.raises(RuntimeError):
        lycoris.make_module(kind, parameters, "site", layer)
    find_algorithm("lokr").check(read("lokr", module), tuple(layer.weight.shape))


def test_lycoris_trains_dylora_stronger_than_it_loads(lycoris: ModuleType):
    """By the block size: alpha / blocks while training, alpha / rank in every loader of the file, and here."""
    layer = a_layer("linear")
    module = trained(lycoris, "dylora", layer, lora_dim=6, block_size=2)
    trained_change = module.get_diff_weight(1.0, rank=4)[0].detach()
    loaded = compute_weight_delta(layer.weight.detach(), read("lora", module))
    assert relative(trained_change, 2 * loaded) < 1e-6


@pytest.mark.parametrize("name", ["lora", "loha", "lokr"])
def test_lycoris_pads_with_zeros_whatever_the_layer_does(lycoris: ModuleType, name: str):
    layer = a_layer("conv", padding_mode="reflect")
    module, x = trained(lycoris, name, layer), input_for(layer)
    adapter, there = read(name, module), change_through(module, layer, x)
    assert relative(change_by_weight(layer, adapter, x), there) > 0.1
    assert relative(change_by_weight(a_layer("conv"), adapter, x), there) < 1e-12


def test_lycoris_reads_every_t_lora_as_principal(lycoris: ModuleType):
    """So an untrained one that began at the last singular values changes the weight; said which, ours does not."""
    layer = a_layer("linear")
    module = lycoris.TLoraModule("site", layer, lora_dim=RANK, alpha=ALPHA, sig_type="last")
    tensors = t_lora_tensors(module)
    saved = {f"site.{key}": value for key, value in module.custom_state_dict().items()}
    again = lycoris.make_module(*lycoris.get_module(saved, "site"), "site", layer)
    delta = again.get_diff_weight(1.0)[0].detach()
    assert delta.norm() > 0.1 * layer.weight.norm()
    assert (
        relative(
            compute_weight_delta(layer.weight.detach(), convert_tlora_to_lora(tensors, ALPHA, layer.weight.detach())),
            delta,
        )
        < 1e-5
    )


def test_lycoris_has_no_t_lora_of_a_kernel(lycoris: ModuleType):
    layer = a_layer("conv")
    module = trained(lycoris, "tlora", layer)
    with pytest.raises(RuntimeError):
        module(input_for(layer))
    with pytest.raises(AdapterError):
        convert_tlora_to_lora(t_lora_tensors(module), ALPHA, layer.weight.detach())
