"""A LoKr of a fused weight whose blocks of rows lie across the parts: exact in parts, and whole again when written."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from finitune.adapters import SiteAdapter, find_algorithm
from finitune.adapters.convert import Exactness, convert_adapter_to_lora
from finitune.adapters.core import AdapterSet, Shape
from finitune.adapters.difference import compute_change_error
from finitune.adapters.health import compute_product_peak, is_zero_adapter
from finitune.adapters.layer import attach_adapters, merge_into_weights
from finitune.adapters.lokr import get_row_range, restrict_to_rows
from finitune.adapters.weight import compute_weight_delta
from finitune.errors import AdapterError
from finitune.files.tensorfile import TensorFile
from finitune.files.writer import save_tensors
from finitune.merging.combine import combine_adapters
from finitune.merging.rows import ModuleRows, PrecomputedMerger, TensorChange, choose_row_merger
from finitune.namings.fused import fuse_site_adapters, swap_site_adapter_halves
from finitune.namings.read import read_adapter
from finitune.namings.write import write_adapter
from finitune.verbs.convert import Request, run
from tests.adapter_files import codes, model, noise, read_back
from tests.adapters_made import ExactProducts, random_adapter

FLUX = model("flux")
QKV = "lora_unet_double_blocks_0_img_attn_qkv"
LINEAR1 = "lora_unet_single_blocks_0_linear1"
SITES = {
    QKV: [f"transformer.transformer_blocks.0.attn.to_{part}" for part in "qkv"],
    LINEAR1: [
        *(f"transformer.single_transformer_blocks.0.attn.to_{part}" for part in "qkv"),
        "transformer.single_transformer_blocks.0.proj_mlp",
    ],
}
SIZES = [(4, 24), (8, 24), (16, 96)]
"""factor, hidden: as in Flux itself (3072), no part of a fused weight is a whole number of blocks."""

flux_sizes = pytest.mark.parametrize(("factor", "hidden"), SIZES)
full_or_not = pytest.mark.parametrize("full", [True, False], ids=["full", "low-rank"])


@pytest.fixture
def read(tmp_path):
    """Write tensors to a file, and read it as an adapter of Flux."""
    return partial(read_back, tmp_path, family=FLUX)


def rows_of_parts(module: str, hidden: int) -> list[int]:
    return [hidden] * 3 + ([4 * hidden] if module == LINEAR1 else [])


def a_lokr(shape: Shape, factor: int, full: bool) -> SiteAdapter:
    return random_adapter("lokr", shape, factor, options={"factor": factor, "full_matrix": full})[1]


def kohya(adapter: SiteAdapter, module: str) -> dict[str, Tensor]:
    tensors = {f"{module}.lokr_{role}": tensor.bfloat16() for role, tensor in adapter.tensors.items()}
    return {**tensors, f"{module}.alpha": torch.tensor(1.7)}


def a_flux_file(factor: int, hidden: int, full: bool) -> dict[str, Tensor]:
    """What ai-toolkit and LyCORIS write for one block of either kind."""
    tensors: dict[str, Tensor] = {}
    for module in SITES:
        tensors |= kohya(a_lokr((sum(rows_of_parts(module, hidden)), hidden), factor, full), module)
    return tensors


def kron(tensors: dict[str, Tensor], module: str) -> Tensor:
    """The whole change in fp64: the slow twin."""
    own = {key.rpartition("_")[2]: t.double() for key, t in tensors.items() if key.startswith(f"{module}.")}
    if f"{module}.lokr_w2" in tensors:
        return torch.kron(tensors[f"{module}.lokr_w1"].double(), own["w2"])
    a, b = (tensors[f"{module}.lokr_w2_{side}"].double() for side in "ab")
    return float(tensors[f"{module}.alpha"]) / b.shape[0] * torch.kron(own["w1"], a @ b)


def zeros(part: SiteAdapter) -> Tensor:
    shape = find_algorithm("lokr").shape(part)
    assert shape is not None
    return torch.zeros(shape, dtype=torch.float64)


@flux_sizes
@full_or_not
def test_the_parts_are_the_rows_of_the_product(read, factor: int, hidden: int, full: bool):
    tensors = a_flux_file(factor, hidden, full)
    reading = read(tensors)
    assert "error" not in {finding.level.value for finding in reading.findings}
    for module, sites in SITES.items():
        parts = [reading.adapter[site] for site in sites]
        assert all(get_row_range(part) for part in parts)
        for role in parts[0].tensors:
            assert all(part.tensors[role] is parts[0].tensors[role] for part in parts)
        deltas = [compute_weight_delta(zeros(part), part) for part in parts]
        assert [len(delta) for delta in deltas] == rows_of_parts(module, hidden)
        torch.testing.assert_close(torch.cat(deltas), kron(tensors, module), rtol=1e-13, atol=1e-15)


@flux_sizes
@full_or_not
@pytest.mark.parametrize("to", ["kohya", "comfy"])
def test_a_file_is_written_again_bit_for_bit(read, tmp_path: Path, factor: int, hidden: int, full: bool, to: str):
    tensors = a_flux_file(factor, hidden, full)
    written = write_adapter(read(tensors).adapter, FLUX, to)
    assert written.klass is Exactness.LOSSLESS
    if to == "kohya":
        assert written.tensors.keys() == tensors.keys()
        assert all(torch.equal(written.tensors[key], tensor) for key, tensor in tensors.items())
        assert all(written.tensors[key].dtype == tensor.dtype for key, tensor in tensors.items())
    save_tensors(tmp_path / "again.safetensors", written.tensors, written.metadata)
    again = read_adapter(TensorFile(tmp_path / "again.safetensors"), FLUX)
    first = read(tensors)
    assert all(compute_change_error(again.adapter[site], first.adapter[site]) == 0 for site in first.adapter)


@flux_sizes
def test_a_part_as_a_lora_has_the_change_of_its_rows(read, factor: int, hidden: int):
    reading = read(a_flux_file(factor, hidden, full=False))
    for part in reading.adapter.sites.values():
        lora = convert_adapter_to_lora(part)
        delta = compute_weight_delta(zeros(part), part)
        assert lora.klass is Exactness.GROWING
        assert lora.adapter.tensors["down"].shape[0] == torch.linalg.matrix_rank(delta)
        assert compute_change_error(lora.adapter, part) < 1e-6
        cut = convert_adapter_to_lora(part, rank=1)
        values = torch.linalg.svdvals(delta)
        assert cut.error == pytest.approx(float(values[1:].norm() / values.norm()), rel=1e-6)
        assert compute_change_error(cut.adapter, part) == pytest.approx(cut.error, rel=1e-5)


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.tuples(*[st.integers(1, 6)] * 4),
    ranks=st.tuples(*[st.none() | st.integers(1, 3)] * 2),
    edges=st.tuples(st.integers(0, 99), st.integers(0, 99)),
)
def test_any_rows_of_any_kronecker_product(
    sizes: tuple[int, ...], ranks: tuple[int | None, ...], edges: tuple[int, ...]
):
    """The delta and the forward pass, which makes no product at all, against the rows of the whole product."""
    j, m, k, n = sizes
    begin, end = sorted(edge % (j * k + 1) for edge in edges)
    tensors: dict[str, Tensor] = {}
    for name, (out, into), rank in (("w1", (j, m), ranks[0]), ("w2", (k, n), ranks[1])):
        tensors |= {name: noise(out, into)} if rank is None else {
            f"{name}_a": noise(out, rank), f"{name}_b": noise(rank, into)
        }  # fmt: skip
    adapter = SiteAdapter("lokr", tensors, 1.7)
    if begin == end:
        with pytest.raises(AdapterError):
            find_algorithm("lokr").check(restrict_to_rows(adapter, begin, end))
        return
    part = restrict_to_rows(adapter, begin, end)
    first, second = (tensors[f] if f in tensors else tensors[f"{f}_a"] @ tensors[f"{f}_b"] for f in ("w1", "w2"))
    rows = find_algorithm("lokr").scale(adapter) * torch.kron(first.double(), second.double())[begin:end]
    torch.testing.assert_close(compute_weight_delta(zeros(part), part), rows, rtol=1e-5, atol=1e-5)
    x = noise(3, m * n).double()
    fast = find_algorithm("lokr").forward(part, x, ExactProducts(nn.Linear(m * n, end - begin)))
    assert fast is not None
    torch.testing.assert_close(fast, x @ compute_weight_delta(zeros(part), part).T)


def test_a_silent_part_is_a_lora_of_zeros():
    whole = SiteAdapter("lokr", {"w1": noise(4, 4).tril(-1), "w2": noise(3, 2)})
    part = restrict_to_rows(whole, 1, 3)
    lora = convert_adapter_to_lora(part)
    assert lora.error == 0 and not compute_weight_delta(torch.zeros(2, 8), lora.adapter).any()
    assert compute_change_error(part, None) == 0 and not is_zero_adapter(whole)


def test_a_flux_lokr_goes_to_diffusers_as_lora(tmp_path: Path):
    tensors = {key: tensor.float() / 3 for key, tensor in a_flux_file(4, 24, full=False).items()}
    save_tensors(tmp_path / "a.safetensors", tensors)
    request = Request(file=tmp_path / "a.safetensors", to="diffusers", out=tmp_path / "b.safetensors")
    assert run(request).exit_code == 1
    report = run(replace(request, as_algorithm="lora"))
    assert report.ok and report.figures["class"] == "growing" and report.figures["max_delta_error"] < 1e-6
    plain = run(replace(request, to="kohya", dtype="fp16"))
    assert plain.ok and 0 < plain.figures["max_delta_error"] < 2e-3


@full_or_not
def test_layers_wear_their_parts_as_the_fused_layer_the_whole(full: bool):
    """Attached by the factors alone, and merged into the weights."""
    whole = a_lokr((72, 24), 4, full)
    fused, parts = nn.Linear(24, 72), nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
    for n, layer in enumerate(parts):
        layer.load_state_dict({name: tensor.split(24)[n] for name, tensor in fused.state_dict().items()})
    x = noise(2, 5, 24)
    adapters = {str(n): [(restrict_to_rows(whole, 24 * n, 24 * n + 24), 0.7)] for n in range(3)}
    with (
        attach_adapters(nn.ModuleDict({"fused": fused}), {"fused": [(whole, 0.7)]}) as root,
        attach_adapters(parts, adapters),
    ):
        expected = root["fused"](x)
        torch.testing.assert_close(torch.cat([layer(x) for layer in parts], dim=-1), expected)
    merge_into_weights(parts, adapters)
    torch.testing.assert_close(torch.cat([layer(x) for layer in parts], dim=-1), expected)


def test_a_merge_takes_the_parts_as_wholes():
    """LoKr is no algorithm of rows there: the changed tensor is made whole, of a fused base as of its parts."""
    whole, base = a_lokr((72, 24), 4, full=False), noise(72, 24).double()
    parts = tuple(ModuleRows(f"{n}", n, n + 24, ((restrict_to_rows(whole, n, n + 24), 0.5),)) for n in (0, 24, 48))
    recipe = choose_row_merger(TensorChange("weight", parts, (72, 24), (72, 24)), lambda: base)
    assert isinstance(recipe, PrecomputedMerger)
    torch.testing.assert_close(recipe.merged, base + 0.5 * compute_weight_delta(base, whole))
    alone = (ModuleRows("k", 0, 24, parts[1].adapters),)
    recipe = choose_row_merger(TensorChange("weight", alone, (24, 24), (24, 24)), lambda: base[24:48])
    assert isinstance(recipe, PrecomputedMerger)
    torch.testing.assert_close(recipe.merged, (base + 0.5 * compute_weight_delta(base, whole))[24:48])


def test_sums_with_other_adapters(read):
    reading = read(a_flux_file(4, 24, full=True))
    halved = combine_adapters([(reading.adapter, 0.5)]).adapter
    written = write_adapter(halved, FLUX, "kohya")
    assert written.klass is Exactness.LOSSLESS and f"{QKV}.lokr_w1" in written.tensors
    for site in SITES[QKV]:
        part = reading.adapter[site]
        torch.testing.assert_close(
            compute_weight_delta(zeros(part), halved[site]), 0.5 * compute_weight_delta(zeros(part), part)
        )
    site = SITES[QKV][1]
    both = combine_adapters(
        [(reading.adapter, 0.5), (AdapterSet({site: a_lokr((24, 24), 2, full=True)}), -2.0)]
    ).adapter
    other = compute_weight_delta(zeros(reading.adapter[site]), a_lokr((24, 24), 2, full=True))
    expected = 0.5 * compute_weight_delta(zeros(reading.adapter[site]), reading.adapter[site]) - 2.0 * other
    torch.testing.assert_close(
        compute_weight_delta(torch.zeros(24, 24), both[site]).double(), expected, rtol=1e-5, atol=1e-6
    )


def test_the_peak_of_the_product_is_that_of_the_rows():
    w1 = torch.tensor([[1.0], [1e5]])
    whole = SiteAdapter("lokr", {"w1": w1, "w2": noise(3, 8).clamp(-1, 1)})
    assert compute_product_peak(whole) > 65504 > compute_product_peak(restrict_to_rows(whole, 0, 2))


@pytest.mark.parametrize(("options", "code"), [
    ({"first_row": 5, "rows": 8}, "ADAPTER-SHAPES"),
    ({"first_row": -1, "rows": 8}, "ADAPTER-SHAPES"),
    ({"first_row": 5}, "ADAPTER-SHAPES"),
    ({"first_row": 4, "rows": 7}, "ADAPTER-DOES-NOT-FIT"),
])  # fmt: skip
def test_rows_that_are_not_there_are_refused(options: dict[str, int], code: str):
    adapter = SiteAdapter("lokr", {"w1": noise(4, 4), "w2": noise(3, 2)}, options=options)
    with pytest.raises(AdapterError) as caught:
        compute_weight_delta(torch.zeros(8, 8), adapter)
    assert caught.value.code == code


def test_only_all_rows_of_one_product_are_whole_again():
    whole = SiteAdapter("lokr", {"w1_a": noise(4, 2), "w1_b": noise(2, 4), "w2": noise(3, 2)}, 5.0)
    parts = [restrict_to_rows(whole, begin, begin + 4) for begin in (0, 4, 8)]
    bias = [part.with_tensors(diff_b=noise(4, seed=n)) for n, part in enumerate(parts)]
    copied = [replace(part, tensors={r: t.clone() for r, t in part.tensors.items()}) for part in parts]
    for good in (parts, copied):
        again = fuse_site_adapters(good, [4, 4, 4])
        assert again.exactness is Exactness.LOSSLESS and again.adapter.options == {} and again.adapter.alpha == 5.0
        assert all(torch.equal(again.adapter.tensors[role], t) for role, t in whole.tensors.items())
    with_bias = fuse_site_adapters([bias[0], parts[1], bias[2]], [4, 4, 4]).adapter.tensors["diff_b"]
    assert torch.equal(with_bias, torch.cat([noise(4), torch.zeros(4), noise(4, seed=2)]))
    wrong = {
        "one is missing": [parts[0], None, parts[2]],
        "the last is missing": [parts[0], parts[1]],
        "another order": [parts[1], parts[0], parts[2]],
        "another scale": [parts[0], replace(parts[1], alpha=1.0), parts[2]],
        "another factor": [parts[0], parts[1].with_tensors(w2=noise(3, 2, seed=1)), parts[2]],
        "a whole one": [parts[0], restrict_to_rows(whole, 4, 12), replace(whole, options={})],
    }
    for name, bad in wrong.items():
        with pytest.raises(AdapterError, match="all the rows of one Kronecker product") as caught:
            fuse_site_adapters(bad, [4] * len(bad))
        assert caught.value.code == "FUSE-IMPOSSIBLE" and "--as lora" in caught.value.remedy, name
    with pytest.raises(AdapterError):
        swap_site_adapter_halves(parts[0])


def test_a_part_alone_has_no_spelling():
    part = restrict_to_rows(SiteAdapter("lokr", {"w1": noise(4, 4), "w2": noise(3, 2)}), 4, 8)
    with pytest.raises(AdapterError, match="some rows of a larger") as caught:
        write_adapter(AdapterSet({"transformer.x_embedder": part}), FLUX, "kohya")
    assert caught.value.code == "WRITE-CANNOT-SAY" and "--as lora" in caught.value.remedy


def test_blocks_that_end_with_the_parts_are_cut_as_before(read):
    tensors = kohya(SiteAdapter("lokr", {"w1": noise(6, 4), "w2": noise(12, 6)}), QKV)
    reading = read(tensors)
    assert [reading.adapter[site].tensors["w1"].shape[0] for site in SITES[QKV]] == [2, 2, 2]
    assert not any(get_row_range(part) for part in reading.adapter.sites.values())
    assert "ADAPTER-FUSED" not in codes(reading)


def test_equal_tensors_need_no_product_to_be_the_same_change():
    """The shortcut says what the whole changes say, whatever is different about the parts."""
    whole = SiteAdapter("lokr", {"w1_a": noise(4, 2), "w1_b": noise(2, 4), "w2": noise(3, 2)}, 5.0)
    part = restrict_to_rows(whole, 4, 8)
    copied = replace(part, tensors={role: tensor.clone() for role, tensor in part.tensors.items()})
    others = [
        copied,
        restrict_to_rows(whole, 0, 4),
        replace(part, alpha=1.0),
        part.with_tensors(w2=noise(3, 2, seed=1)),
    ]
    for other in (*others, part.with_tensors(w2=noise(3, 2).double())):
        slow = (compute_weight_delta(zeros(other), other) - compute_weight_delta(zeros(part), part)).norm()
        assert compute_change_error(other, part) == pytest.approx(
            float(slow / compute_weight_delta(zeros(part), part).norm())
        )
    assert [compute_change_error(other, part) > 0 for other in others] == [False, True, True, True]
