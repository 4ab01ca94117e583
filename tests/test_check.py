"""finitune check: what a file is, what is wrong with it, where it loads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from finitune.adapters import AdapterSet, Magnitude, SiteAdapter
from finitune.files.tensorfile import TensorFile
from finitune.files.writer import save_tensors
from finitune.models import MODEL_FAMILIES
from finitune.models.pico import get_pico_folder
from finitune.namings.write import write_adapter
from finitune.verbs import check

ANIMA = next(model for model in MODEL_FAMILIES if model.name == "anima")
DATA = Path(__file__).parents[2] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.exists(), reason="the folder of real files is not here")


def lora(out: int, into: int, rank: int = 2, alpha: float | None = 3.0, scale: float = 1.0) -> SiteAdapter:
    tensors = {"up": torch.randn(out, rank) * scale, "down": torch.randn(rank, into) * scale}
    return SiteAdapter("lora", tensors, alpha)


def anima_file(path: Path, adapter: AdapterSet, spelling: str = "kohya") -> Path:
    written = write_adapter(adapter, ANIMA, spelling)
    save_tensors(path, written.tensors, written.metadata)
    return path


def checked(file: Path, **options):
    return check.run(check.Request(paths=(file,), **options))


def codes(report):
    return {finding.code for finding in report.findings}


@needs_data
@pytest.mark.parametrize(("name", "rank", "embeddings"), [("analog_svd_rank4", 4, 0), ("lora_disney", 1, 2)])
def test_the_two_real_files(name: str, rank: int, embeddings: int):
    report = checked(DATA / "adapters" / f"{name}.safetensors", model="sd15")
    figures = report.figures
    assert report.ok and figures["spelling"] == "cloneofsimo" and figures["family"] == "sd15"
    assert figures["matched"] + figures["explained"] == figures["tensors"]
    assert (figures["unmatched"], figures["nonfinite_tensors"], figures["zero_deltas"]) == (0, 0, 0)
    assert (figures["rank_min"], figures["rank_max"], figures["embeddings"]) == (rank, rank, embeddings)


def test_a_good_file_is_named_and_says_where_it_loads(tmp_path: Path):
    sites = {f"transformer.transformer_blocks.0.attn1.to_{part}": lora(192, 192) for part in "qkv"}
    report = checked(anima_file(tmp_path / "x.safetensors", AdapterSet(sites)), model="pico-anima")
    assert report.ok, report.findings
    assert report.figures["algorithms"] == {"lora": 3} and report.figures["alphas"] == [3.0]
    tables = {table.title: table for table in report.tables}
    assert {row[0]: row[1] for row in tables["loads"].rows}["ComfyUI"] == "yes"
    assert {row[0]: row[1] for row in tables["loads"].rows} == report.figures["loads"]
    ((component, adapted, of_model),) = tables["components"].rows
    assert report.figures["components"] == {"transformer": {"sites": 3, "of": int(of_model)}}
    assert (component, adapted) == ("transformer", "3") and int(of_model) > 60
    assert dict(tables["what it says of itself"].rows)["modelspec.prediction_type"] == "flow"


def test_shapes_are_those_of_the_named_model(tmp_path: Path):
    adapter = AdapterSet({"transformer.transformer_blocks.0.attn1.to_q": lora(192, 256)})
    report = checked(anima_file(tmp_path / "x.safetensors", adapter), model="pico-anima")
    assert report.exit_code == 1
    (error,) = [finding for finding in report.findings if finding.code == "ADAPTER-DOES-NOT-FIT"]
    assert error.evidence["adapter"] == [192, 256] and error.evidence["model"] == [192, 192]


def test_what_is_wrong_with_numbers(tmp_path: Path):
    sites = {
        "transformer.transformer_blocks.0.attn1.to_q": lora(192, 192, scale=200.0),
        "transformer.transformer_blocks.0.attn1.to_k": lora(192, 192, scale=0.0),
        "transformer.transformer_blocks.0.attn1.to_v": lora(192, 192),
    }
    file = TensorFile(anima_file(tmp_path / "x.safetensors", AdapterSet(sites)))
    tensors = dict(file.tensors())
    key = "lora_unet_blocks_0_self_attn_v_proj.lora_down.weight"
    tensors[key][1, 5] = float("inf")
    save_tensors(tmp_path / "y.safetensors", tensors, file.metadata)
    report = checked(tmp_path / "y.safetensors")
    assert report.exit_code == 1 and report.figures["nonfinite_tensors"] == 1
    by_code = {finding.code: finding for finding in report.findings}
    assert by_code["ADAPTER-NONFINITE"].subject == key and by_code["ADAPTER-NONFINITE"].evidence["first"] == [1, 5]
    assert by_code["ADAPTER-ZERO-DELTA"].subject.endswith("to_k")
    assert by_code["ADAPTER-PRODUCT-OVERFLOWS"].subject.endswith("to_q")
    assert "METADATA-STALE-HASH" in by_code, "the tensors are no longer those that the hash was made of"


def test_a_key_that_matches_nothing_is_an_error_with_its_name(tmp_path: Path):
    file = TensorFile(
        anima_file(
            tmp_path / "x.safetensors",
            AdapterSet({"transformer.transformer_blocks.0.attn1.to_q": lora(192, 192)}),
        )
    )
    tensors = {key.replace("self_attn_q", "self_atn_q"): tensor for key, tensor in file.tensors()}
    extra = dict(file.tensors()) | tensors
    save_tensors(tmp_path / "y.safetensors", extra)
    report = checked(tmp_path / "y.safetensors")
    assert report.exit_code == 1 and report.figures["unmatched"] == 3
    assert any("self_atn_q" in finding.subject for finding in report.findings)


def test_a_model_is_scanned_tensor_by_tensor(tmp_path: Path):
    report = checked(get_pico_folder())
    assert report.ok and report.figures["kind"] == "model" and report.figures["family"] == "anima"
    assert report.figures["nonfinite_tensors"] == 0 and report.figures["tensors"] > 300
    tensors = dict(TensorFile(get_pico_folder() / "transformer" / "diffusion_pytorch_model.safetensors").tensors())
    tensors["proj_out.weight"] = tensors["proj_out.weight"].float() * 1e6
    tensors["patch_embed.proj.weight"][0, 0] = float("nan")
    save_tensors(tmp_path / "m.safetensors", tensors)
    report = checked(tmp_path / "m.safetensors")
    assert report.exit_code == 1 and {"WEIGHT-NONFINITE", "WEIGHTS-BEYOND-FP16"} <= codes(report)
    (broken,) = [finding for finding in report.findings if finding.code == "WEIGHT-NONFINITE"]
    assert broken.subject == "patch_embed.proj.weight" and broken.evidence == {"nan": 1, "inf": 0, "first": [0, 0]}


def test_what_is_not_there_or_not_a_tensor_file(tmp_path: Path):
    assert codes(checked(tmp_path / "none.safetensors")) == {"FILE-MISSING"}
    (tmp_path / "page.safetensors").write_text("<html>not found</html>")
    report = checked(tmp_path / "page.safetensors")
    assert report.exit_code == 1 and not report.figures


@pytest.mark.parametrize(("side", "told"), [("out", "one per output"), ("in", "one per input")])
def test_the_convention_of_dora_is_told(tmp_path: Path, side, told: str):
    sites = {
        f"transformer.transformer_blocks.{n}.attn1.to_q": replace(
            lora(192, 192), magnitude=Magnitude(torch.ones(192), side) if n else None
        )
        for n in range(3)
    }
    report = checked(anima_file(tmp_path / "x.safetensors", AdapterSet(sites)))
    assert report.figures["dora"] == [{"side": side, "norm_of": "adapted", "sites": 2}]
    (table,) = (table for table in report.tables if table.title == "dora")
    assert table.rows == ((told, "of the adapted weight", "2"),)
    assert report.figures["components"] == {"transformer": {"sites": 3, "of": None}}


@pytest.mark.parametrize("name", ["x.safetensors", "x.v1.safetensors", "x.ckpt", "x.safetensors.bak", "x"])
def test_a_name_that_misleads_is_noted(tmp_path: Path, name: str):
    adapter = AdapterSet({"transformer.transformer_blocks.0.attn1.to_q": lora(192, 192)})
    report = checked(anima_file(tmp_path / name, adapter))
    assert report.ok and ("FILE-NAME-MISLEADS" in codes(report)) is (not name.endswith(".safetensors"))


def test_the_report_is_json(tmp_path: Path):
    report = checked(
        anima_file(
            tmp_path / "x.safetensors",
            AdapterSet({"transformer.transformer_blocks.0.attn1.to_q": lora(192, 192, alpha=None)}),
        )
    )
    assert json.loads(json.dumps(report.as_json()))["figures"]["kind"] == "adapter"
