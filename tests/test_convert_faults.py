"""Files that are wrong in part, converted: nothing is lost or mended without leave, and mending is on record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from finitune.adapters.core import AdapterSet
from finitune.files.tensorfile import TensorFile
from finitune.files.writer import save_tensors
from finitune.namings.read import read_adapter
from finitune.namings.write import write_adapter
from tests.adapter_files import model
from tests.test_convert import ANIMA, Q, codes, convert, random_site, sites_of


def test_a_module_that_fails_is_left_out_only_with_leave(tmp_path):
    """Its tensors are explained by the error, which refuses the file or is forgiven."""
    written = write_adapter(AdapterSet({Q: random_site("lora", (12, 8))}), ANIMA, "kohya")
    half = {"lora_unet_blocks_1_self_attn_q_proj.lora_down.weight": torch.ones(2, 8)}
    save_tensors(tmp_path / "a.safetensors", {**written.tensors, **half}, {})
    refused = convert(tmp_path / "a.safetensors", "comfy")
    assert refused.exit_code == 1 and codes(refused) >= {"ADAPTER-ROLES"} and not refused.artifacts
    assert (refused.figures["unmatched"], refused.figures["left_out"]) == (0, 1)
    allowed = convert(tmp_path / "a.safetensors", "comfy", allow_unmatched=True)
    assert allowed.ok and codes(allowed) >= {"ADAPTER-ROLES"} and set(sites_of(allowed)) == {Q}


def trained_in_parts(path: Path) -> Path:
    """A kohya file of Flux: qkv trained as three LoRA of rank 4 and alpha 4, which were saved as one of rank 12."""
    tensors: dict[str, torch.Tensor] = {}
    for name, rank in (("img_attn_qkv", 12), ("txt_attn_qkv", 12), ("img_attn_proj", 4), ("img_mlp_0", 4), ("x", 4)):
        module = "lora_unet_single_blocks_0_linear2" if name == "x" else f"lora_unet_double_blocks_0_{name}"
        up = (
            torch.block_diag(*(torch.randn(8, 4) for _ in range(3)))
            if name == "img_attn_qkv"
            else torch.randn(24, rank)
        )
        tensors |= {f"{module}.lora_up.weight": up, f"{module}.lora_down.weight": torch.randn(rank, 8)}
        tensors[f"{module}.alpha"] = torch.tensor(4.0)
    save_tensors(path, tensors, {})
    return path


@pytest.mark.parametrize("to", ["kohya", "diffusers"])
def test_a_scale_that_was_split_is_mended_only_when_asked_scl_03(to, tmp_path):
    flux, source = model("flux"), trained_in_parts(tmp_path / "a.safetensors")
    sites = {f"transformer.transformer_blocks.0.attn.to_{part}" for part in "qkv"}
    before = read_adapter(TensorFile(source), flux)
    plain = convert(source, to, out=tmp_path / "plain.safetensors")
    assert plain.ok and "alpha_times" not in json.loads(TensorFile(plain.artifacts["adapter"]).metadata["finitune"])
    assert {site: one.alpha for site, one in sites_of(plain, flux).sites.items()} == dict.fromkeys(before.adapter, 4.0)
    (warned,) = (finding for finding in plain.findings if finding.code == "ADAPTER-SPLIT-SCALE")
    assert warned.remedy.endswith("finitune convert FILE --to kohya --fix-split-scale")
    report = convert(source, to, fix_split_scale=True)
    assert report.ok and report.figures["max_delta_error"] == 0
    assert "ADAPTER-SPLIT-SCALE" not in codes(report) and "CONVERT-SPLIT-SCALE" in codes(report)
    after = read_adapter(TensorFile(report.artifacts["adapter"]), flux)
    assert {site: one.alpha for site, one in after.adapter.sites.items()} == {
        site: 12.0 if site in sites else 4.0 for site in before.adapter
    }
    assert not after.split_scale
    assert json.loads(after.metadata["finitune"])["alpha_times"] == dict.fromkeys(sorted(sites), 3)
    if to == "kohya":
        first, last = TensorFile(source), TensorFile(report.artifacts["adapter"])
        changed = [key for key in first if not torch.equal(first.read(key), last.read(key))]
        assert changed == ["lora_unet_double_blocks_0_img_attn_qkv.alpha"]
    again = convert(Path(report.artifacts["adapter"]), "comfy", fix_split_scale=True)
    (nothing,) = (finding for finding in again.findings if finding.code == "CONVERT-SPLIT-SCALE")
    assert again.ok and "nothing was multiplied" in nothing.message
    kept = json.loads(TensorFile(again.artifacts["adapter"]).metadata["finitune"])
    assert kept["alpha_times"] == dict.fromkeys(sorted(sites), 3), "what was done stays on record"
