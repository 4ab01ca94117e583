"""The law of a sum of adapters, dW = sum of m_i * dW_i, for every algorithm that has one; and who has none."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from finitune.adapters import AdapterSet, Magnitude, SiteAdapter
from finitune.adapters.weight import combine_adapted_weight, compute_adapted_bias, compute_weight_delta
from finitune.errors import AdapterError, FileError, UsageError
from finitune.files.tensorfile import TensorFile
from finitune.files.writer import save_tensors
from finitune.merging.combine import CombineRequest, combine_adapter_files, combine_adapters, scale_adapter_change
from finitune.models import MODEL_FAMILIES, ModelSpec
from finitune.models.anima import ANIMA
from finitune.namings.read import read_adapter
from finitune.namings.write import AdapterFileContent, write_adapter
from finitune.report import Level, Report
from tests.adapters_made import random_adapter

LINEAR, CONV = (12, 10), (8, 6, 3, 3)
SITE = "unet.layer"
strengths = st.one_of(st.just(0.0), st.just(1.0), st.floats(-3, 3).filter(lambda m: abs(m) > 1e-3))


def lora(out: int, into: int, rank: int, alpha: float | None, seed: int = 0) -> SiteAdapter:
    generator = torch.Generator().manual_seed(seed)
    up, down = torch.randn(out, rank, generator=generator), torch.randn(rank, into, generator=generator)
    return SiteAdapter("lora", {"up": up, "down": down}, alpha)


def one(adapter: SiteAdapter) -> AdapterSet:
    return AdapterSet({SITE: adapter})


def true_sum(parts: list[tuple[SiteAdapter, float]], shape: tuple[int, ...]) -> Tensor:
    return combine_adapted_weight(torch.zeros(shape, dtype=torch.float64), parts)


def distance(adapter: SiteAdapter, wanted: Tensor) -> float:
    """The error of an adapter's change against the wanted one, relative to it."""
    difference = compute_weight_delta(torch.zeros_like(wanted), adapter) - wanted
    return float(difference.norm() / wanted.norm()) if wanted.any() else float(difference.norm())


def test_ranks_and_layers_may_differ():
    """MRG-04: ranks 4, 6, 2, and the sum exact."""
    first = AdapterSet({"unet.a": lora(16, 12, 4, 4.0), "unet.b": lora(16, 12, 4, 4.0, 1)})
    second = AdapterSet({"unet.b": lora(16, 12, 2, 1.0, 2), "unet.c": lora(16, 12, 2, 1.0, 3)})
    combined = combine_adapters([(first, 0.7), (second, 0.5)])
    assert [row.rank for row in combined.rows] == [4, 6, 2]
    assert [row.how for row in combined.rows] == ["scaled", "side by side", "scaled"]
    for site, adapter in combined.adapter.sites.items():
        parts = [(s.sites[site], m) for s, m in ((first, 0.7), (second, 0.5)) if site in s.sites]
        assert distance(adapter, true_sum(parts, (16, 12))) <= 1e-6
    assert combined.adapter["unet.b"].alpha == 6


def test_factors_are_not_added():
    """MRG-05, one number by one: 0.36 + 0.22 is 0.58, not 1.7 * 0.8."""
    first = SiteAdapter("lora", {"up": torch.tensor([[0.6]]), "down": torch.tensor([[0.6]])}, 1.0)
    second = SiteAdapter("lora", {"up": torch.tensor([[1.1]]), "down": torch.tensor([[0.2]])}, 1.0)
    combined = combine_adapters([(one(first), 1.0), (one(second), 1.0)]).adapter[SITE]
    assert compute_weight_delta(torch.zeros(1, 1, dtype=torch.float64), combined).item() == pytest.approx(
        0.58, abs=1e-7
    )


@pytest.mark.parametrize("ratios", [(0.7, 0.4), (1.0, -0.5), (0.0, 1.0), (-1.0, -2.0)])
def test_ratios_go_in_once(ratios: tuple[float, float]):
    """MRG-05: twice as strong, not four times; a negative one turns the sign, once."""
    parts = [(lora(9, 7, 2, 3.0, seed), ratio) for seed, ratio in enumerate(ratios)]
    combined = combine_adapters([(one(adapter), ratio) for adapter, ratio in parts])
    assert distance(combined.adapter[SITE], true_sum(parts, (9, 7))) <= 1e-6


@settings(max_examples=40)
@given(
    names=st.lists(st.sampled_from(["lora", "loha", "lokr", "full"]), min_size=1, max_size=3),
    ratios=st.lists(strengths, min_size=3, max_size=3),
    shape=st.sampled_from([LINEAR, CONV]),
    tucker=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_law_holds_for_all_that_can_be_added(
    names: list[str], ratios: list[float], shape: tuple[int, ...], tucker: bool, seed: int
):
    parts = [
        (random_adapter(name, shape, seed + 7 * i, options={"use_tucker": tucker})[1], ratio)
        for i, (name, ratio) in enumerate(zip(names, ratios, strict=False))
    ]
    combined = combine_adapters([(one(adapter), m) for adapter, m in parts], shapes={SITE: shape})
    acting = [part for part in parts if part[1] != 0]
    if not acting:
        assert combined.silent == (SITE,) and not combined.adapter.sites
        return
    scale = max(float(true_sum([part], shape).norm()) for part in acting)
    wanted = true_sum(parts, shape)
    difference = compute_weight_delta(torch.zeros_like(wanted), combined.adapter[SITE]) - wanted
    assert float(difference.norm()) <= 1e-6 * scale


def test_biases_are_added_with_their_scales():
    """SCL-09: a LoRA's bias is scaled as its weight is, a plain difference is not."""
    first = lora(6, 5, 2, 32.0).with_tensors(up_bias=torch.arange(6.0))
    second = lora(6, 5, 3, None, 1).with_tensors(diff_b=torch.ones(6))
    combined = combine_adapters([(one(first), 0.5), (one(second), -2.0)]).adapter[SITE]
    bias = compute_adapted_bias(torch.zeros(6), combined)
    assert bias is not None
    torch.testing.assert_close(bias, 0.5 * 16 * torch.arange(6.0) - 2.0)


def test_a_bias_alone_joins_a_lora():
    bare = SiteAdapter("full", {"diff_b": torch.ones(6)})
    adapter = lora(6, 5, 2, 2.0)
    combined = combine_adapters([(one(adapter), 2.0), (one(bare), 3.0)]).adapter[SITE]
    assert combined.algorithm == "lora" and torch.equal(combined.tensors["diff_b"], torch.full((6,), 3.0))
    assert distance(combined, true_sum([(adapter, 2.0)], (6, 5))) <= 1e-6
    twice = combine_adapters([(one(bare), 2.0), (one(bare), 3.0)]).adapter[SITE]
    assert twice.tensors.keys() == {"diff_b"} and torch.equal(twice.tensors["diff_b"], torch.full((6,), 5.0))


def test_norms_are_added():
    first = SiteAdapter("norm", {"w_norm": torch.ones(4), "b_norm": torch.ones(4)})
    second = SiteAdapter("norm", {"w_norm": torch.arange(4.0)})
    combined = combine_adapters([(one(first), -1.0), (one(second), 2.0)]).adapter[SITE]
    assert combined.algorithm == "norm"
    assert torch.equal(combined.tensors["w_norm"], torch.tensor([-1.0, 1.0, 3.0, 5.0]))
    assert torch.equal(combined.tensors["b_norm"], -torch.ones(4))


def test_a_layer_of_one_adapter_at_full_strength_stays_bit_for_bit():
    for name in ("lora", "loha", "lokr", "ia3", "oft", "glora"):
        _, adapter = random_adapter(name, LINEAR, 3)
        other = AdapterSet({"unet.elsewhere": lora(4, 4, 1, 1.0)})
        combined = combine_adapters([(one(adapter), 1.0), (other, 0.3)])
        assert combined.adapter[SITE] is adapter and combined.rows[0].how == "kept"


def test_lora_and_loha_say_who_needed_a_decomposition():
    """MRG-01: nothing is dropped, and it is said that 1 of the 2 layers of the second needed an SVD."""
    loha = {site: random_adapter("loha", (8, 8), i)[1] for i, site in enumerate(("unet.a", "unet.b"))}
    combined = combine_adapters([(AdapterSet({"unet.a": lora(8, 8, 2, 1.0)}), 1.0), (AdapterSet(loha), 1.0)])
    assert [(row.site, row.how, row.parts) for row in combined.rows] == [
        ("unet.a", "svd", (0, 1)),
        ("unet.b", "kept", (1,)),
    ]


def test_a_missing_alpha_means_the_rank():
    """SCL-01: scale 1, and not 1 / 16."""
    adapter = lora(32, 32, 16, None)
    combined = combine_adapters([(one(adapter), 0.5), (one(adapter), 0.5)]).adapter[SITE]
    assert distance(combined, true_sum([(adapter, 1.0)], (32, 32))) <= 1e-6


@settings(max_examples=15)
@given(rank=st.integers(1, 9), seed=st.integers(0, 99))
def test_an_asked_rank_is_the_best_approximation(rank: int, seed: int):
    parts = [(lora(20, 16, 4, 2.0, seed), 0.7), (lora(20, 16, 3, 5.0, seed + 1), -0.4)]
    combined = combine_adapters([(one(adapter), m) for adapter, m in parts], rank=rank)
    wanted = true_sum(parts, (20, 16))
    values = torch.linalg.svdvals(wanted)
    best = float(values[rank:].norm() / values.norm())
    (row,) = combined.rows
    assert row.rank == min(rank, 7)
    assert row.error == pytest.approx(best, abs=1e-9)
    assert distance(combined.adapter[SITE], wanted) == pytest.approx(best, abs=1e-6)


def test_an_asked_rank_cuts_full_differences_too():
    _, full = random_adapter("full", LINEAR, 0)
    combined = combine_adapters([(one(full), 1.0)], rank=2)
    assert combined.adapter[SITE].algorithm == "lora" and combined.rows[0].rank == 2
    values = torch.linalg.svdvals(full.tensors["diff"].double())
    assert combined.rows[0].error == pytest.approx(float(values[2:].norm() / values.norm()))


def test_a_rank_that_is_large_enough_changes_nothing():
    adapter = lora(8, 8, 2, 1.0)
    assert combine_adapters([(one(adapter), 1.0)], rank=4).adapter[SITE] is adapter
    doubled = combine_adapters([(one(adapter), 1.0), (one(adapter), 1.0)], rank=4)
    assert doubled.rows[0].how == "side by side"
    assert combine_adapters([(one(adapter), 1.0), (one(adapter), 1.0)], energy=1.0).rows[0].rank == 2


@pytest.mark.parametrize("name", ["ia3", "oft", "boft", "glora", "set", "dora"])
def test_what_depends_on_the_base_has_no_sum(name: str):
    _, adapter = random_adapter("lora" if name == "dora" else name, LINEAR, 1)
    if name == "dora":
        adapter = replace(adapter, magnitude=Magnitude(torch.ones(12)))
    for sets in ([(one(adapter), 1.0), (one(lora(12, 10, 2, 1.0)), 1.0)], [(one(adapter), 0.5)]):
        with pytest.raises(AdapterError) as caught:
            combine_adapters(sets)
        assert (caught.value.code, caught.value.subject) == ("ADAPTER-NOT-ADDABLE", SITE)
    assert combine_adapters([(one(adapter), 1.0), (one(lora(12, 10, 2, 1.0)), 0.0)]).adapter[SITE] is adapter


def test_adapters_of_different_models_are_refused():
    with pytest.raises(AdapterError) as caught:
        combine_adapters([(one(lora(8, 6, 2, 1.0)), 1.0), (one(lora(8, 7, 2, 1.0)), 1.0)])
    assert caught.value.code == "ADAPTER-DOES-NOT-FIT" and caught.value.subject == SITE


def test_a_linear_and_a_convolution_of_one_are_the_same():
    flat, conv = lora(8, 6, 2, 1.0), lora(8, 6, 2, 1.0, 1)
    conv = conv.with_tensors(**{role: tensor[..., None, None] for role, tensor in conv.tensors.items()})
    combined = combine_adapters([(one(flat), 1.0), (one(conv), 1.0)]).adapter[SITE]
    assert combined.tensors["down"].shape == (4, 6, 1, 1)
    assert distance(combined, true_sum([(flat, 1.0), (conv, 1.0)], (8, 6, 1, 1))) <= 1e-6


def test_a_control_adapter_with_more_inputs_keeps_them():
    wide = replace(lora(8, 10, 2, 1.0), options={"reshape": True})
    narrow = lora(8, 6, 3, 3.0, 1)
    combined = combine_adapters([(one(narrow), 0.5), (one(wide), 1.0)]).adapter[SITE]
    assert combined.options == {"reshape": True}
    assert distance(combined, true_sum([(narrow, 0.5), (wide, 1.0)], (8, 6))) <= 1e-6


def test_strength_goes_into_one_factor_only():
    for name in ("lora", "loha", "lokr", "full"):
        _, adapter = random_adapter(name, LINEAR, 5)
        assert distance(scale_adapter_change(adapter, -0.3), true_sum([(adapter, -0.3)], LINEAR)) <= 1e-6


def test_learned_tokens_come_along_and_may_not_clash():
    first = AdapterSet({SITE: lora(4, 4, 1, 1.0)}, {"<cat>": torch.ones(3)})
    second = AdapterSet({SITE: lora(4, 4, 1, 1.0)}, {"<dog>": torch.zeros(3)})
    assert combine_adapters([(first, 1.0), (second, 0.5)]).adapter.embeddings.keys() == {"<cat>", "<dog>"}
    with pytest.raises(AdapterError):
        combine_adapters([(first, 1.0), (replace(second, embeddings={"<cat>": torch.zeros(3)}), 1.0)])


def test_a_large_alpha_survives():
    adapter = lora(8, 8, 2, 1e5)
    combined = combine_adapters([(one(adapter), 1e-5), (one(adapter), 1e-5)]).adapter[SITE]
    assert combined.alpha == 4 and all(math.isfinite(float(t.sum())) for t in combined.tensors.values())
    assert distance(combined, true_sum([(adapter, 2e-5)], (8, 8))) <= 1e-6


QUERY, KEY = "transformer.transformer_blocks.0.attn2.to_q", "transformer.transformer_blocks.0.attn2.to_k"


def write_file(path: Path, sites: dict[str, SiteAdapter], family: ModelSpec = ANIMA) -> Path:
    written = write_adapter(AdapterSet(sites), family, "kohya")
    save_tensors(path, written.tensors, written.metadata)
    return path


def add_up(*files: tuple[Path, float], out: Path, **options: Any) -> Report:
    report = Report("merge")
    combine_adapter_files(CombineRequest(files=files, out=out, **options), report)
    return report


def test_files_are_added_up(tmp_path: Path):
    """MRG-01, MRG-05: a LoRA and a LoHa with strengths of either sign; one file of which all is accounted for."""
    first = {QUERY: lora(12, 10, 4, 8.0)}
    second = {QUERY: random_adapter("loha", LINEAR, 1)[1], KEY: random_adapter("loha", LINEAR, 2)[1]}
    files = [write_file(tmp_path / f"{i}.safetensors", sites) for i, sites in enumerate((first, second))]
    out = tmp_path / "out.safetensors"
    report = add_up((files[0], 0.7), (files[1], -0.4), out=out)
    assert report.ok, report.findings
    (note,) = [finding for finding in report.findings if finding.code == "MERGE-SVD"]
    assert note.message == "1 of its 2 layers needed an SVD" and note.subject == str(files[1])
    assert (report.figures["sites"], report.figures["sites_svd"], report.figures["max_delta_error"]) == (2, 1, 0.0)
    back = read_adapter(TensorFile(out))
    assert not back.unmatched and back.spelling == "kohya" and set(back.adapter) == {QUERY, KEY}
    assert distance(back.adapter[QUERY], true_sum([(first[QUERY], 0.7), (second[QUERY], -0.4)], LINEAR)) <= 1e-6
    assert distance(back.adapter[KEY], true_sum([(second[KEY], -0.4)], LINEAR)) <= 1e-6
    receipt = json.loads(back.metadata["finitune"])
    assert [source["name"] for source in receipt["sources"]] == ["0.safetensors", "1.safetensors"]


def test_a_cut_file_states_its_error(tmp_path: Path):
    files = [write_file(tmp_path / f"{i}.safetensors", {QUERY: lora(12, 10, 4, 8.0, i)}) for i in range(2)]
    out = tmp_path / "out.safetensors"
    report = add_up(*((file, 1.0) for file in files), out=out, rank=3, dtype=torch.float16)
    back = read_adapter(TensorFile(out)).adapter[QUERY]
    parts = [(read_adapter(TensorFile(file)).adapter[QUERY], 1.0) for file in files]
    error = float(report.figures["relative_error_max"])  # type: ignore[arg-type]
    assert 0.1 < error < 1 and distance(back, true_sum(parts, LINEAR)) == pytest.approx(error, rel=1e-3)
    assert back.tensors["up"].dtype == torch.float16 and back.tensors["up"].shape == (12, 3)


def test_what_is_not_accounted_for_stops_the_merge(tmp_path: Path):
    adapter = lora(12, 10, 2, 2.0)
    good = write_file(tmp_path / "good.safetensors", {QUERY: adapter})
    tensors = dict(TensorFile(good).tensors()) | {"lora_unet_nowhere.lora_up.weight": torch.ones(4, 2)}
    save_tensors(tmp_path / "bad.safetensors", tensors)
    out = tmp_path / "out.safetensors"
    with pytest.raises(AdapterError) as caught:
        add_up((good, 1.0), (tmp_path / "bad.safetensors", 1.0), out=out)
    assert caught.value.code == "ADAPTER-REFUSED" and not out.exists()
    report = add_up((good, 1.0), (tmp_path / "bad.safetensors", 1.0), out=out, allow_unmatched=True)
    assert report.ok and Level.WARNING in {finding.level for finding in report.findings}
    assert distance(read_adapter(TensorFile(out)).adapter[QUERY], true_sum([(adapter, 2.0)], LINEAR)) <= 1e-6


def test_files_of_two_families_are_refused(tmp_path: Path):
    anima = write_file(tmp_path / "anima.safetensors", {QUERY: lora(12, 10, 2, 2.0)})
    flux = next(model for model in MODEL_FAMILIES if model.name == "flux")
    other = write_file(tmp_path / "flux.safetensors", {"transformer.proj_out": lora(12, 10, 2, 2.0)}, flux)
    with pytest.raises(AdapterError) as caught:
        add_up((anima, 1.0), (other, 1.0), out=tmp_path / "out.safetensors")
    assert caught.value.code == "MERGE-FAMILIES" and "Anima" in caught.value.message


@pytest.mark.parametrize(
    ("strength", "options", "code"),
    [
        (math.nan, {}, "MERGE-STRENGTH"),
        (0.0, {}, "MERGE-STRENGTH"),
        (1.0, {"rank": 0}, "CUT-OUT-OF-RANGE"),
        (1.0, {"out": "in.safetensors"}, "OUT-IS-SOURCE"),
    ],
)
def test_a_request_that_cannot_be_meant_is_refused(tmp_path: Path, strength: float, options: dict[str, Any], code: str):
    file = write_file(tmp_path / "in.safetensors", {QUERY: lora(12, 10, 2, 2.0)})
    out = tmp_path / options.pop("out", "out.safetensors")
    with pytest.raises(UsageError) as caught:
        add_up((file, strength), out=out, **options)
    assert caught.value.code == code and file.exists() and not (tmp_path / "out.safetensors").exists()


def test_a_file_that_does_not_read_back_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = write_file(tmp_path / "in.safetensors", {QUERY: lora(12, 10, 2, 2.0)})

    def forgetful(*arguments: Any, **options: Any) -> AdapterFileContent:
        written = write_adapter(*arguments, **options)
        written.tensors.update({key: 1.01 * tensor for key, tensor in written.tensors.items() if "up" in key})
        return written

    monkeypatch.setattr("finitune.merging.adapterfile.write_adapter", forgetful)
    with pytest.raises(FileError) as caught:
        add_up((file, 1.0), out=tmp_path / "out.safetensors")
    assert caught.value.code == "FILE-READ-BACK" and caught.value.evidence["error"] == pytest.approx(0.01, rel=1e-3)
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]
