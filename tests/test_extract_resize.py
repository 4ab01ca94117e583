"""What a tuned model has learned comes out as an adapter, and adapters get smaller; with the true error of both."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from finitune.adapters import SiteAdapter
from finitune.adapters.difference import compute_change_error
from finitune.adapters.weight import compute_adapted_bias, compute_adapted_weight, compute_weight_delta
from finitune.errors import FinituneError, ModelError, NumericsError, UsageError
from finitune.files.tensorfile import TensorFile
from finitune.files.writer import save_tensors
from finitune.merging.base_model import open_merge_base
from finitune.merging.extract import ExtractionOptions, ExtractionResult, extract_adapter, list_unpaired_tensors
from finitune.merging.pairing import assign_family, find_model_spec, open_pairable_checkpoint
from finitune.namings.read import read_adapter
from finitune.verbs import extract as extract_journey
from finitune.verbs import resize as resize_journey

Tensors = dict[str, Tensor]
SITE = "transformer.layer"


def noise(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def lora(out: int, into: int, rank: int, alpha: float | None, seed: int = 0) -> SiteAdapter:
    return SiteAdapter("lora", {"up": noise(out, rank, seed=seed), "down": noise(rank, into, seed=seed + 1)}, alpha)


def compared(tmp_path: Path, base: Tensors, tuned: Tensors, wish: ExtractionOptions) -> ExtractionResult:
    """What extract makes of two files."""
    files = []
    for name, tensors in (("base", base), ("tuned", tuned)):
        save_tensors(tmp_path / f"{name}.safetensors", tensors)
        files.append(open_merge_base(tmp_path / f"{name}.safetensors"))
    family = find_model_spec(files[1])
    return extract_adapter(*(open_pairable_checkpoint(assign_family(one, family)) for one in files), wish)


def optimum(matrix: Tensor, rank: int) -> float:
    values = torch.linalg.svdvals(matrix.double().flatten(1))
    return float(values[rank:].norm() / values.norm())


def test_a_merged_lora_comes_out_again(tmp_path: Path):
    base = {"layer.weight": noise(40, 30, size=0.05)}
    adapter = lora(40, 30, 4, 0.1)
    tuned = {"layer.weight": compute_adapted_weight(base["layer.weight"], adapter)}
    done = compared(tmp_path, base, tuned, ExtractionOptions(rank=4))
    found = done.adapter()[SITE]
    assert found.alpha == 4
    assert compute_change_error(found, adapter) < 1e-6  # the rounding of the sum
    (row,) = done.rows
    assert row.rank == 4 and row.error < 1e-6
    assert row.change == pytest.approx(
        float(compute_weight_delta(base["layer.weight"], adapter).norm() / base["layer.weight"].norm())
    )


@settings(max_examples=10)
@given(rank=st.integers(1, 16), seed=st.integers(0, 99), kernel=st.booleans())
def test_an_extracted_change_is_the_best_of_its_rank(tmp_path_factory, rank: int, seed: int, kernel: bool):
    shape = (16, 6, 3, 3) if kernel else (16, 20)
    base, tuned = ({"layer.weight": noise(*shape, seed=seed + i)} for i in (0, 1))
    done = compared(tmp_path_factory.mktemp("pair"), base, tuned, ExtractionOptions(rank=rank))
    delta = tuned["layer.weight"] - base["layer.weight"]
    best = optimum(delta, rank)
    assert done.rows[0].error == pytest.approx(best, abs=1e-9)
    found = done.adapter()[SITE]
    assert found.tensors["down"].shape == (rank, *shape[1:])
    error = (compute_weight_delta(torch.zeros(shape, dtype=torch.float64), found) - delta).norm() / delta.norm()
    assert float(error) == pytest.approx(best, abs=1e-6)


def test_an_energy_decides_the_rank_of_each_layer(tmp_path: Path):
    base = {"a.weight": torch.zeros(20, 20), "b.weight": torch.zeros(20, 20)}
    tuned = {"a.weight": noise(20, 1) @ noise(1, 20, seed=1), "b.weight": noise(20, 20)}
    rows = {row.site: row for row in compared(tmp_path, base, tuned, ExtractionOptions(energy=0.9)).rows}
    assert rows["transformer.a"].rank == 1 < (rows["transformer.b"].rank or 0) < 20
    assert all(row.energy >= 0.9 for row in rows.values())
    assert rows["transformer.a"].change == math.inf  # of a weight that was zero


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_checkpoints_are_subtracted_in_fp32(tmp_path: Path, dtype: torch.dtype):
    base = {"layer.weight": noise(12, 10).to(dtype)}
    tuned = {"layer.weight": (base["layer.weight"].float() + noise(12, 10, seed=1, size=0.02)).to(dtype)}
    done = compared(tmp_path, base, tuned, ExtractionOptions(energy=1.0))
    merged = compute_adapted_weight(base["layer.weight"].float(), done.adapter()[SITE])
    assert torch.equal(merged.to(dtype), tuned["layer.weight"])
    assert done.dtypes == {(dtype, dtype)}


def test_norms_and_biases_are_kept_whole(tmp_path: Path):
    base = {"norm.weight": torch.ones(8), "norm.bias": torch.zeros(8), "layer.weight": noise(8, 6)}
    base |= {"layer.bias": torch.zeros(8), "other.weight": noise(8, 6), "other.bias": torch.zeros(8)}
    tuned = {key: tensor + noise(*tensor.shape, seed=3) for key, tensor in base.items()}
    tuned["other.weight"] = base["other.weight"]
    adapter = compared(tmp_path, base, tuned, ExtractionOptions(rank=6)).adapter()
    assert {site: one.algorithm for site, one in adapter.sites.items()} == {
        "transformer.norm": "norm",
        "transformer.layer": "lora",
        "transformer.other": "full",
    }
    for site, one in adapter.sites.items():
        name = site.removeprefix("transformer.")
        assert torch.equal(
            compute_adapted_weight(base[f"{name}.weight"], one).round(decimals=4),
            tuned[f"{name}.weight"].round(decimals=4),
        )
        bias = compute_adapted_bias(base[f"{name}.bias"], one)
        assert bias is not None
        torch.testing.assert_close(bias, tuned[f"{name}.bias"])


def test_the_same_is_left_out_and_counted(tmp_path: Path):
    base = {name: noise(8, 6, seed=i) for i, name in enumerate(("a.weight", "b.weight", "c.weight"))}
    tuned = {**base, "b.weight": base["b.weight"] + 1e-6, "c.weight": base["c.weight"] + 1}
    done = compared(tmp_path, base, tuned, ExtractionOptions(rank=2, min_change=1e-4))
    assert (done.identical, done.small, [*done.adapter()]) == (1, 1, ["transformer.c"])
    with pytest.raises(ModelError) as caught:
        compared(tmp_path, base, base, ExtractionOptions(rank=2))
    assert caught.value.code == "MODELS-IDENTICAL"


def test_what_has_no_place_is_named_with_its_share(tmp_path: Path):
    base = {"embed_tokens.weight": torch.zeros(8, 6), "layer.weight": torch.zeros(8, 6), "table": torch.zeros(4)}
    tuned = {"embed_tokens.weight": noise(8, 6), "layer.weight": noise(8, 6, seed=1), "table": torch.ones(4)}
    done = compared(tmp_path, base, tuned, ExtractionOptions(rank=6))
    assert {one.name for one in done.left_out} == {"transformer.embed_tokens.weight", "table"}
    squares = {key: float(tensor.square().sum()) for key, tensor in tuned.items()}
    kept = squares["layer.weight"] / sum(squares.values())
    assert done.left_out_share == pytest.approx(1 - kept, rel=1e-5)
    done = compared(tmp_path, base, tuned, ExtractionOptions(rank=6, full=True))
    assert [one.name for one in done.left_out] == ["table"]
    assert torch.equal(done.adapter()["transformer.embed_tokens"].tensors["diff"], tuned["embed_tokens.weight"])


def test_only_what_is_asked_for(tmp_path: Path):
    base = {name: noise(8, 6) for name in ("blocks.0.to_q.weight", "blocks.0.to_k.weight", "blocks.1.to_q.weight")}
    tuned = {name: tensor + 1 for name, tensor in base.items()}
    done = compared(tmp_path, base, tuned, ExtractionOptions(rank=1, include=("transformer.*.to_q",)))
    assert [*done.adapter()] == ["transformer.blocks.0.to_q", "transformer.blocks.1.to_q"] and done.excluded == 1
    with pytest.raises(UsageError) as caught:
        compared(tmp_path, base, tuned, ExtractionOptions(rank=1, include=("to_v",)))
    assert caught.value.code == "INCLUDE-NOTHING"


FAULTS: list[tuple[Tensors, type[FinituneError], str, str]] = [
    ({"a.weight": torch.zeros(8, 7)}, ModelError, "MODELS-DIFFER", "transformer.a.weight"),
    ({"z.weight": torch.zeros(8, 6)}, ModelError, "MODELS-DIFFER", ""),
    ({"a.weight": torch.ones(8, 6).to(torch.float8_e4m3fn)}, ModelError, "MODELS-QUANTISED", "transformer.a.weight"),
    ({"a.weight": torch.full((8, 6), math.nan)}, NumericsError, "FACTORS-NOT-FINITE", "transformer.a.weight"),
]


@pytest.mark.parametrize(("tuned", "kind", "code", "subject"), FAULTS)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, tuned: Tensors, kind, code: str, subject: str):
    with pytest.raises(kind) as caught:
        compared(tmp_path, {"a.weight": torch.zeros(8, 6)}, tuned, ExtractionOptions(rank=2))
    assert (caught.value.code, caught.value.subject) == (code, subject)


def flux(hidden: int = 8) -> tuple[Tensors, Tensors]:
    """One block of each kind of Flux, small: in the original naming, and the same in diffusers'."""
    single = noise(7 * hidden, hidden)
    double = noise(3 * hidden, hidden, seed=1)
    bias = noise(7 * hidden, seed=2)
    final = noise(2 * hidden, hidden, seed=3)
    original = {
        "single_blocks.0.linear1.weight": single,
        "single_blocks.0.linear1.bias": bias,
        "double_blocks.0.img_attn.qkv.weight": double,
        "final_layer.adaLN_modulation.1.weight": final,
    }
    sizes = [hidden, hidden, hidden, 4 * hidden]
    names = [*(f"single_transformer_blocks.0.attn.to_{p}" for p in "qkv"), "single_transformer_blocks.0.proj_mlp"]
    ours = {f"{name}.weight": part for name, part in zip(names, single.split(sizes), strict=True)}
    ours |= {f"{name}.bias": part for name, part in zip(names, bias.split(sizes), strict=True)}
    ours |= {f"transformer_blocks.0.attn.to_{p}.weight": w for p, w in zip("qkv", double.chunk(3), strict=True)}
    ours["norm_out.linear.weight"] = torch.cat(final.chunk(2)[::-1])
    return original, ours


def test_the_original_naming_meets_diffusers(tmp_path: Path):
    """Fused weights part by part, and halves put right: two namings of one model do not differ at all."""
    original, ours = flux()
    with pytest.raises(ModelError) as caught:
        compared(tmp_path, original, ours, ExtractionOptions(rank=2))
    assert (caught.value.code, caught.value.evidence["identical"]) == ("MODELS-IDENTICAL", len(ours))
    changed = "single_transformer_blocks.0.attn.to_k"
    ours[f"{changed}.weight"] = ours[f"{changed}.weight"] + 1
    done = compared(tmp_path, original, ours, ExtractionOptions(rank=2))
    assert [*done.adapter()] == [f"transformer.{changed}"]
    family = open_merge_base(tmp_path / "base.safetensors").family
    assert family is not None and family.name == "flux"


def test_folders_and_what_only_one_of_them_has(tmp_path: Path):
    original, ours = flux()
    save_tensors(tmp_path / "base.safetensors", {"model.diffusion_model." + key: t for key, t in original.items()})
    ours["norm_out.linear.bias"] = torch.ones(16)
    save_tensors(tmp_path / "tuned" / "transformer" / "diffusion_pytorch_model.safetensors", ours)
    save_tensors(tmp_path / "tuned" / "vae" / "diffusion_pytorch_model.safetensors", {"decoder.weight": torch.ones(2)})
    files = [open_merge_base(tmp_path / name) for name in ("base.safetensors", "tuned")]
    assert list(files[1].files) == ["transformer", "vae"]
    base, tuned = (open_pairable_checkpoint(assign_family(one, find_model_spec(files[0]))) for one in files)
    only_base, only_tuned = list_unpaired_tensors(base, tuned)
    assert only_base == []
    assert only_tuned == ["transformer.norm_out.linear.bias", "vae.decoder.weight"]


def test_a_module_that_a_file_has_twice_is_said(tmp_path: Path):
    original, _ = flux()
    key = "single_blocks.0.linear1.weight"
    save_tensors(tmp_path / "base.safetensors", {**original, f"model.diffusion_model.{key}": original[key]})
    save_tensors(tmp_path / "tuned.safetensors", {**original, key: original[key] + 1, "gone": torch.ones(2)})
    request = extract_journey.Request(
        base=tmp_path / "base.safetensors",
        tuned=tmp_path / "tuned.safetensors",
        rank=1,
        out=tmp_path / "out.safetensors",
    )
    report = extract_journey.run(request)
    assert report.ok and report.figures["sites"] == 4, report.findings
    said = {finding.code: finding for finding in report.findings}
    assert said["EXTRACT-DOUBLED"].subject.endswith(key)
    assert said["EXTRACT-UNPAIRED"].subject == "gone"


def test_one_pair_of_tensors_at_a_time(tmp_path: Path):
    save_tensors(tmp_path / "a.safetensors", {"a.weight": torch.ones(4, 4), "b.weight": torch.ones(4, 4)})
    files = open_merge_base(tmp_path / "a.safetensors")
    checkpoint = open_pairable_checkpoint(assign_family(files, find_model_spec(files)))
    first = checkpoint.read("transformer.a.weight")
    assert checkpoint.last is not None and checkpoint.last[1] is first
    checkpoint.read("transformer.b.weight")
    assert checkpoint.last[1] is not first


def anima_files(tmp_path: Path) -> tuple[Path, Path, Tensors]:
    """A few tensors of a model that calls itself as Anima does, a tuned one, and what was added to it."""
    shape = {"q_proj": (12, 10), "k_proj": (12, 10)}
    base = {f"net.blocks.{i}.cross_attn.{p}.weight": noise(*s, seed=i) for i in range(2) for p, s in shape.items()}
    base["net.blocks.0.cross_attn.q_norm.weight"] = torch.ones(6)
    base["net.x_embedder.proj.1.weight"] = noise(12, 8)
    changed = {key: noise(*t.shape, seed=9, size=0.1) for key, t in base.items() if "q_" in key}
    tuned = {key: tensor + changed.get(key, torch.zeros(())) for key, tensor in base.items()}
    for name, tensors in (("base", base), ("tuned", tuned)):
        save_tensors(tmp_path / f"{name}.safetensors", tensors)
    return tmp_path / "base.safetensors", tmp_path / "tuned.safetensors", changed


@pytest.mark.parametrize("to", ["kohya", "comfy"])
@pytest.mark.parametrize("dtype", [None, "fp16"])
def test_extract_writes_a_file_that_reads_back(tmp_path: Path, to, dtype):
    base, tuned, changed = anima_files(tmp_path)
    out = tmp_path / "out.safetensors"
    report = extract_journey.run(extract_journey.Request(base=base, tuned=tuned, rank=10, to=to, dtype=dtype, out=out))
    assert report.ok, report.findings
    assert (report.figures["sites"], report.figures["identical"], report.figures["left_out"]) == (3, 3, 0)
    reading = read_adapter(TensorFile(out))
    assert reading.family is not None and reading.family.name == "anima" and reading.spelling == to
    site = "transformer.transformer_blocks.1.attn2.to_q"
    found = compute_weight_delta(torch.zeros(12, 10), reading.adapter[site])
    torch.testing.assert_close(
        found, changed["net.blocks.1.cross_attn.q_proj.weight"], rtol=0, atol=2e-3 if dtype else 1e-6
    )
    assert reading.adapter["transformer.transformer_blocks.0.attn2.norm_q"].algorithm == "norm"
    assert report.artifacts["adapter"] == str(out) and [p.name for p in tmp_path.glob(".partial*")] == []


def test_resize_writes_a_file_that_reads_back(tmp_path: Path):
    base, tuned, _ = anima_files(tmp_path)
    large, small = tmp_path / "large.safetensors", tmp_path / "small.safetensors"
    made = extract_journey.run(extract_journey.Request(base=base, tuned=tuned, rank=8, dtype="fp16", out=large))
    assert made.ok, made.findings
    report = resize_journey.run(resize_journey.Request(file=large, rank=3, out=small))
    assert report.ok, report.findings
    assert (report.figures["rank_min"], report.figures["rank_max"], report.figures["sites_passed"]) == (3, 3, 1)
    assert 0 < report.figures["relative_error_median"] <= report.figures["relative_error_max"] < 1
    assert report.figures["energy_min"] == pytest.approx(1 - report.figures["relative_error_max"] ** 2)
    before, after = (read_adapter(TensorFile(path)).adapter for path in (large, small))
    for site in before:
        assert compute_change_error(after[site], before[site]) <= report.figures["relative_error_max"] + 1e-3
        assert all(t.dtype == torch.float16 for t in after[site].tensors.values())
    again = resize_journey.run(resize_journey.Request(file=small, rank=3, out=tmp_path / "again.safetensors"))
    assert "RESIZE-KEPT" in {finding.code for finding in again.findings}
    first, second = (TensorFile(tmp_path / f"{name}.safetensors") for name in ("small", "again"))
    assert first.fingerprint() == second.fingerprint()


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({}, "CUT-MISSING"),
        ({"rank": 0}, "CUT-OUT-OF-RANGE"),
        ({"energy": 1.5}, "CUT-OUT-OF-RANGE"),
        ({"rank": 2, "min_change": 2.0}, "MIN-CHANGE-OUT-OF-RANGE"),
        ({"rank": 2, "out": "base.safetensors"}, "OUT-IS-SOURCE"),
        ({"rank": 2, "include": ("text*",)}, "INCLUDE-NOTHING"),
    ],
)
def test_a_request_that_cannot_be_meant_is_refused(tmp_path: Path, options: dict, code: str):
    base, tuned, _ = anima_files(tmp_path)
    if "out" in options:
        options = {**options, "out": tmp_path / options["out"]}
    report = extract_journey.run(extract_journey.Request(base=base, tuned=tuned, **options))
    assert report.exit_code == 2 and [finding.code for finding in report.findings] == [code]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    base, tuned, _ = anima_files(tmp_path)
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    out = blocked / "out.safetensors"
    report = extract_journey.run(extract_journey.Request(base=base, tuned=tuned, rank=2, out=out))
    assert report.exit_code == 1 and report.findings[-1].code == "FILE-NOT-WRITTEN"
