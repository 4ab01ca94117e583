"""One algorithm as another: exact where the rank holds it, its error stated where not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finitune.adapters import ADAPTER_ALGORITHMS, find_algorithm
from finitune.adapters.convert import Exactness, convert_adapter_to_lora
from finitune.adapters.core import AdapterSet, Magnitude, SiteAdapter, Target
from finitune.adapters.difference import compute_change_error
from finitune.adapters.weight import compute_adapted_bias, compute_weight_delta
from finitune.errors import AdapterError
from finitune.files.tensorfile import TensorFile
from finitune.files.writer import save_tensors
from finitune.models import MODEL_FAMILIES, ModelSpec
from finitune.namings.metadata import compute_kohya_hashes, read_applied_block_maps
from finitune.namings.read import read_adapter
from finitune.namings.write import write_adapter
from finitune.report import Report
from finitune.verbs.convert import Request, run

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "adapters"
ANIMA = next(family for family in MODEL_FAMILIES if family.name == "anima")
Q = "transformer.transformer_blocks.0.attn1.to_q"

ADDITIVE = tuple(a.name for a in ADAPTER_ALGORITHMS if a.additive and a.name not in ("norm", "tlora"))
SHAPES = ((12, 8), (6, 10), (8, 6, 3, 3))


def random_site(name: str, shape: tuple[int, ...], seed: int = 0, alpha: float | None = 3.0, **options) -> SiteAdapter:
    """An adapter of that shape with every tensor drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    target = Target(torch.randn(shape, generator=generator), 2, alpha, options)
    site = find_algorithm(name).init(target, generator)
    tensors = {role: torch.randn(tensor.shape, generator=generator) for role, tensor in site.tensors.items()}
    return replace(site, tensors=tensors)


def delta(site: SiteAdapter, shape: tuple[int, ...]) -> torch.Tensor:
    return find_algorithm(site.algorithm).delta(site, torch.zeros(shape, dtype=torch.float64))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(ADDITIVE),
    shape=st.sampled_from(SHAPES),
    tucker=st.booleans(),
    seed=st.integers(0, 99),
    alpha=st.sampled_from([None, 1.0, -3.0]),
)
def test_a_lora_of_enough_rank_is_the_same_change(name, shape, tucker, seed, alpha):
    site = random_site(name, shape, seed, alpha, use_tucker=tucker)
    converted = convert_adapter_to_lora(site, shape)
    assert converted.adapter.algorithm == "lora"
    assert converted.klass is not Exactness.LOSSY
    find_algorithm("lora").check(converted.adapter, shape)
    assert relative(delta(converted.adapter, shape), delta(site, shape)) < 1e-6


@settings(deadline=None, max_examples=20)
@given(name=st.sampled_from(ADDITIVE), shape=st.sampled_from(SHAPES), seed=st.integers(0, 99))
def test_a_cut_states_its_true_error_and_is_the_best(name, shape, seed):
    site = random_site(name, shape, seed)
    whole = delta(site, shape)
    converted = convert_adapter_to_lora(site, shape, rank=1)
    values = torch.linalg.svdvals(whole.flatten(1))
    best = float(values[1:].norm() / values.norm())
    assert converted.adapter.tensors["down"].shape[0] == 1
    assert converted.error == pytest.approx(relative(delta(converted.adapter, shape), whole), abs=1e-6)
    assert converted.error == pytest.approx(best, abs=1e-6)
    assert converted.klass is (Exactness.LOSSY if best > 1e-6 else converted.klass)


def test_lokr_is_the_kronecker_product_never_the_matrix_product_lyc_03():
    """Two square factors of one size multiply to a legal matrix, but of the wrong layer."""
    site = SiteAdapter("lokr", {"w1": torch.randn(4, 4), "w2": torch.randn(4, 4)}, 4.0)
    converted = convert_adapter_to_lora(site)
    kron = torch.kron(site.tensors["w1"].double(), site.tensors["w2"].double())
    assert find_algorithm("lora").shape(converted.adapter) == (16, 16)
    assert relative(delta(converted.adapter, (16, 16)), kron) < 1e-6


@pytest.mark.parametrize(("rank", "lossless"), [(4, True), (3, False), (64, True)])
def test_lokr_is_exact_from_the_product_of_the_ranks_on_lyc_03(rank, lossless):
    tensors = {
        "w1_a": torch.randn(4, 2),
        "w1_b": torch.randn(2, 4),
        "w2_a": torch.randn(8, 2),
        "w2_b": torch.randn(2, 8),
    }
    converted = convert_adapter_to_lora(SiteAdapter("lokr", tensors, 2.0), rank=rank)
    assert (converted.klass is Exactness.GROWING) is lossless
    assert (converted.error < 1e-6) is lossless


def test_a_lora_that_fits_is_left_alone():
    site = random_site("lora", (12, 8))
    converted = convert_adapter_to_lora(site, (12, 8), rank=2)
    assert converted.adapter is site
    assert (converted.klass, converted.error) == (Exactness.LOSSLESS, 0.0)


def test_a_core_is_written_out_exactly():
    shape = (8, 6, 3, 3)
    converted = convert_adapter_to_lora(random_site("lora", shape, use_tucker=True), shape)
    assert converted.klass is Exactness.EXACT
    assert "mid" not in converted.adapter.tensors


def test_biases_and_magnitudes_go_along():
    shape, base = (12, 8), torch.randn(12, 8, dtype=torch.float64)
    magnitude = Magnitude(torch.rand(12) + 0.5)
    site = replace(random_site("loha", shape), magnitude=magnitude).with_tensors(diff_b=torch.ones(12))
    converted = convert_adapter_to_lora(site, shape).adapter
    assert converted.magnitude is magnitude
    assert torch.equal(converted.tensors["diff_b"], torch.ones(12))
    assert relative(compute_weight_delta(base, converted), compute_weight_delta(base, site)) < 1e-6


def test_a_scaled_bias_keeps_its_strength():
    site = random_site("lora", (12, 8), alpha=1.0).with_tensors(up_bias=torch.ones(12))
    converted = convert_adapter_to_lora(site, (12, 8), rank=1).adapter
    bias = find_algorithm("lora").bias_delta(converted, None)
    assert bias is not None
    assert torch.allclose(bias, torch.full((12,), 0.5, dtype=bias.dtype))


@pytest.mark.parametrize("name", [a.name for a in ADAPTER_ALGORITHMS if not a.additive])
def test_what_depends_on_the_base_needs_it(name):
    shape = (8, 8)
    site = random_site(name, shape)
    if name != "norm":
        with pytest.raises(AdapterError) as caught:
            convert_adapter_to_lora(site, shape)
        assert caught.value.code == "CONVERT-IMPOSSIBLE"
        assert "merge it into the model" in caught.value.remedy
    base = torch.randn(shape, dtype=torch.float64)
    converted = convert_adapter_to_lora(site, base=base)
    assert relative(delta(converted.adapter, shape), compute_weight_delta(base, site)) < 1e-5


@pytest.mark.parametrize(
    "site",
    [
        SiteAdapter("ia3", {"weight": torch.linspace(-0.5, 0.5, 6)}),
        SiteAdapter("oft", {"blocks": torch.randn(3, 2, 2)}, options={"rotates_bias": True}),
    ],
    ids=lambda site: site.algorithm,
)
def test_a_bias_that_changes_with_the_base_changes_as_lora_too(site):
    base, bias = torch.randn(6, 4), torch.randn(6)
    lora = convert_adapter_to_lora(site, base=base, bias=bias).adapter
    torch.testing.assert_close(compute_adapted_bias(bias, lora), compute_adapted_bias(bias, site))
    torch.testing.assert_close(compute_weight_delta(base, lora), compute_weight_delta(base, site), atol=1e-5, rtol=1e-5)


def test_a_norm_is_no_matrix():
    with pytest.raises(AdapterError) as caught:
        convert_adapter_to_lora(SiteAdapter("norm", {"w_norm": torch.ones(4)}))
    assert caught.value.code == "CONVERT-IMPOSSIBLE"


def save(
    path: Path, sites: dict[str, SiteAdapter], spelling: str = "kohya", family: ModelSpec = ANIMA, **texts: str
) -> Path:
    written = write_adapter(AdapterSet(sites), family, spelling)
    save_tensors(path, written.tensors, {**written.metadata, **texts})
    return path


def convert(file: Path, to: str, **options) -> Report:
    return run(Request(file=file, to=to, out=options.pop("out", file.with_name(f"out-{to}.safetensors")), **options))


def codes(report: Report) -> set[str]:
    return {finding.code for finding in report.findings}


def sites_of(report: Report, family: ModelSpec = ANIMA) -> AdapterSet:
    return read_adapter(TensorFile(report.artifacts["adapter"]), family).adapter


@pytest.mark.parametrize("name", ["analog_svd_rank4", "lora_disney"])
def test_real_adapters_go_to_diffusers_and_back(name, tmp_path):
    source = DATA / f"{name}.safetensors"
    if not source.exists():
        pytest.skip("the real adapters are not at hand")
    kohya = convert(source, "kohya", out=tmp_path / "k.safetensors")
    there = convert(tmp_path / "k.safetensors", "diffusers", out=tmp_path / "d.safetensors")
    back = convert(tmp_path / "d.safetensors", "kohya", out=tmp_path / "b.safetensors")
    for report in (kohya, there, back):
        assert report.ok and report.figures["class"] == "lossless"
        assert report.figures["max_delta_error"] <= 1e-6 and report.figures["unmatched"] == 0
    first, last = (TensorFile(tmp_path / f"{n}.safetensors") for n in "kb")
    kept = {key for key in first if key.startswith("lora_")}
    assert kept == set(last)
    assert all(torch.equal(first.read(key), last.read(key)) for key in kept)
    assert ("embeddings" in there.artifacts) is (kept != set(first))
    assert (
        last.metadata["sshs_model_hash"] == compute_kohya_hashes(dict(last.tensors()), last.metadata)["sshs_model_hash"]
    )


@pytest.mark.parametrize("name", ["anima_lora_kohya", "anima_lora_kohya_with_te", "flux_lora_kohya"])
def test_names_of_real_files_go_round_bit_for_bit_key_01(name, tmp_path):
    """The keys of a real file over small random tensors, to every spelling and back."""
    listing = DATA.parent / "adapter-keys" / f"{name}.json"
    if not listing.exists():
        pytest.skip("the real names are not at hand")
    shapes = json.loads(listing.read_text())
    generator = torch.Generator().manual_seed(0)
    tensors = {
        key: torch.randn([n if n <= 64 else n // 64 for n in shape], generator=generator)
        if shape
        else torch.tensor(8.0)
        for key, shape in shapes.items()
        if "_blocks_" not in key or "_blocks_0_" in key
    }
    save_tensors(tmp_path / "a.safetensors", tensors, {})
    for to in ("comfy", "diffusers"):
        there = convert(tmp_path / "a.safetensors", to)
        back = convert(Path(there.artifacts["adapter"]), "kohya")
        assert there.ok and back.ok and there.figures["class"] == "lossless"
        again = TensorFile(back.artifacts["adapter"])
        assert set(again) == set(tensors)
        assert all(torch.equal(again.read(key), tensor) for key, tensor in tensors.items())


def test_a_peft_folder_is_written_and_read(tmp_path):
    source = save(tmp_path / "a.safetensors", {Q: random_site("lora", (12, 8))})
    there = convert(source, "peft", out=tmp_path / "folder")
    assert there.ok and {"adapter", "config"} <= there.artifacts.keys()
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    back = convert(tmp_path / "folder", "kohya", out=tmp_path / "b.safetensors", model="anima")
    assert back.ok and back.figures["max_delta_error"] == 0
    assert compute_change_error(sites_of(back)[Q], random_site("lora", (12, 8))) == 0


def test_the_report_says_who_loads_it(tmp_path):
    source = save(tmp_path / "a.safetensors", {Q: random_site("lora", (12, 8))})
    (table,) = convert(source, "diffusers").tables
    assert {row[:2] for row in table.rows} >= {("diffusers", "yes"), ("ComfyUI", "no"), ("PEFT", "no")}


def test_a_loss_is_told_and_not_made_without_leave(tmp_path):
    source = save(tmp_path / "a.safetensors", {Q: random_site("loha", (12, 8))})
    refused = convert(source, "diffusers", as_algorithm="lora", rank=2)
    assert refused.exit_code == 1 and codes(refused) >= {"CONVERT-LOSSY"}
    (error,) = (finding for finding in refused.findings if finding.code == "CONVERT-LOSSY")
    assert not refused.artifacts and not (tmp_path / "out-diffusers.safetensors").exists()
    done = convert(source, "diffusers", as_algorithm="lora", rank=2, allow_lossy=True)
    assert done.ok and done.figures["class"] == "lossy"
    assert done.figures["max_delta_error"] == pytest.approx(error.evidence["relative_delta_error"], rel=1e-4)
    exact = convert(source, "diffusers", as_algorithm="lora")
    assert exact.ok and exact.figures["class"] == "growing" and exact.figures["max_delta_error"] < 1e-6


def test_what_the_target_cannot_say_ends_with_the_way_out(tmp_path):
    source = save(tmp_path / "a.safetensors", {Q: random_site("lokr", (12, 8))})
    report = convert(source, "diffusers")
    assert report.exit_code == 1 and codes(report) >= {"WRITE-CANNOT-SAY"}
    assert "--as lora" in report.findings[-1].remedy


def test_nothing_is_left_out_without_leave_key_04(tmp_path):
    path = tmp_path / "a.safetensors"
    written = write_adapter(AdapterSet({Q: random_site("lora", (12, 8))}), ANIMA, "kohya")
    extra = {
        "lora_unet_nowhere_7.lora_down.weight": torch.ones(2, 8),
        "lora_unet_nowhere_7.lora_up.weight": torch.ones(4, 2),
    }
    save_tensors(path, {**written.tensors, **extra}, {})
    refused = convert(path, "comfy")
    assert refused.exit_code == 1 and refused.figures["unmatched"] == 2 and not refused.artifacts
    allowed = convert(path, "comfy", allow_unmatched=True)
    assert allowed.ok and allowed.figures["unmatched"] == 2 and "ADAPTER-UNMATCHED" in codes(allowed)


def test_blocks_are_renumbered_once(tmp_path):
    site = "transformer.transformer_blocks.{}.attn1.to_q"
    source = save(tmp_path / "a.safetensors", {site.format(n): random_site("lora", (12, 8), n) for n in (0, 2, 27)})
    moved = convert(source, "kohya", blocks="28 to 40")
    assert moved.ok and moved.figures["max_delta_error"] == 0
    assert set(sites_of(moved)) == {site.format(n) for n in (0, 3, 39)}
    again = convert(Path(moved.artifacts["adapter"]), "comfy", blocks="28 to 40")
    assert codes(again) >= {"BLOCKS-ALREADY-MAPPED"}
    later = convert(Path(moved.artifacts["adapter"]), "comfy")
    assert read_applied_block_maps(TensorFile(later.artifacts["adapter"]).metadata) == ("28 to 40",)
    larger = save(tmp_path / "b.safetensors", {site.format(39): random_site("lora", (12, 8))})
    assert codes(convert(larger, "kohya", blocks="28 to 40")) >= {"BLOCKS-OUT-OF-RANGE"}
    assert convert(source, "kohya", blocks="28 to 41").exit_code == 2


def test_a_portable_file_has_its_scale_in_the_factors_scl_04(tmp_path):
    source = save(tmp_path / "a.safetensors", {Q: random_site("lora", (12, 8), alpha=0.7)})
    report = convert(source, "diffusers", portable=True)
    assert report.ok and report.figures["max_delta_error"] < 1e-6
    assert find_algorithm("lora").scale(sites_of(report)[Q]) == 1


def test_half_precision_is_measured_scl_05(tmp_path):
    tiny = random_site("full", (12, 8)).with_tensors(diff=torch.randn(12, 8) * 1e-8)
    source = save(tmp_path / "a.safetensors", {Q: tiny})
    refused = convert(source, "kohya", dtype="fp16")
    assert refused.exit_code == 1 and codes(refused) >= {"CONVERT-LOSSY"} and not refused.artifacts
    report = convert(source, "kohya", dtype="fp16", allow_lossy=True)
    assert report.ok and report.figures["flushed_share"] > 0.9 and "NARROWED" in codes(report)
    assert report.figures["class"] == "lossy"
    wide = convert(source, "kohya", dtype="bf16")
    assert wide.figures["flushed_share"] == 0 and "NARROWED" not in codes(wide) and wide.figures["class"] == "exact"


@pytest.mark.parametrize("to", ["kohya", "diffusers"])
def test_a_narrower_dtype_is_within_its_rounding(to, tmp_path):
    source = save(tmp_path / "a.safetensors", {Q: random_site("lora", (12, 8))})
    report = convert(source, to, dtype="fp16")
    assert report.ok and 0 < report.figures["max_delta_error"] <= 2.0**-9
    assert report.figures["narrowing_error"] == pytest.approx(report.figures["max_delta_error"])


def test_texts_of_the_source_stay_fil_09(tmp_path):
    texts = {
        "ss_tag_frequency": "{broken",
        "ss_network_dim": "None",
        "modelspec.title": "\u732b",
        "sshs_model_hash": "x",
    }
    source = save(tmp_path / "a.safetensors", {Q: random_site("lora", (12, 8))}, **texts)
    kept = TensorFile(convert(source, "comfy").artifacts["adapter"]).metadata
    assert kept["ss_tag_frequency"] == "{broken" and kept["modelspec.title"] == "\u732b"
    assert kept["ss_network_dim"] == "2" and len(kept["sshs_model_hash"]) == 64
    receipt = json.loads(kept["finitune"])
    assert receipt["sources"] == [{"name": "a.safetensors", "fingerprint": TensorFile(source).fingerprint()}]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"rank": 4}, "CONVERT-RANK"),
        ({"as_algorithm": "lora", "rank": 0}, "CONVERT-RANK"),
        ({"model": "anina"}, "MODEL-UNKNOWN"),
        ({"out": "a.safetensors"}, "OUT-IS-SOURCE"),
    ],
)
def test_wrong_requests_are_usage_errors(options, code, tmp_path):
    source = save(tmp_path / "a.safetensors", {Q: random_site("lora", (12, 8))})
    if "out" in options:
        options = {"out": tmp_path / options["out"]}
    report = convert(source, "comfy", **options)
    assert report.exit_code == 2 and codes(report) >= {code}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors"]


def test_a_write_that_does_not_read_back_leaves_what_was_there(tmp_path, monkeypatch):
    source = save(tmp_path / "a.safetensors", {Q: random_site("lora", (12, 8))})
    good = convert(source, "comfy")
    before = Path(good.artifacts["adapter"]).read_bytes()
    monkeypatch.setattr("finitune.merging.adapterfile.compute_change_error", lambda *_: 0.5)
    bad = convert(source, "comfy")
    assert bad.exit_code == 1 and codes(bad) >= {"FILE-READ-BACK"} and not bad.artifacts
    assert Path(good.artifacts["adapter"]).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "out-comfy.safetensors"]
