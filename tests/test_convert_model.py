"""Conversions with the model at hand: its own modules, and changes that depend on its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from finitune.adapters import ADAPTER_ALGORITHMS
from finitune.adapters.core import AdapterSet, SiteAdapter
from finitune.adapters.weight import compute_adapted_bias, compute_weight_delta
from finitune.files.tensorfile import TensorFile
from finitune.namings.read import read_adapter
from finitune.namings.write import write_adapter
from finitune.report import Report
from finitune.verbs import check, convert
from tests.adapter_files import noise
from tests.adapters_made import random_adapter
from tests.case_files import own_model, saved, scaled
from tests.test_convert import ANIMA, Q, codes

OUT, INTO = 12, 8
KEY = "net.blocks.0.self_attn.q_proj"
MODULE = "lora_unet_blocks_0_self_attn_q_proj"
ON_BASE = tuple(
    one.name for one in ADAPTER_ALGORITHMS if not one.additive and one.name in ("glora", "ia3", "oft", "boft")
)


@pytest.fixture
def base(tmp_path: Path) -> dict[str, Tensor]:
    """A checkpoint of one module of Anima, with a bias."""
    tensors = {f"{KEY}.weight": noise(OUT, INTO, seed=7).bfloat16(), f"{KEY}.bias": noise(OUT, seed=8)}
    saved(tmp_path / "m.safetensors", tensors)
    return tensors


def as_lora(folder: Path, to: str = "kohya", **options) -> Report:
    return convert.run(
        convert.Request(
            file=folder / "a.safetensors", to=to, as_algorithm="lora", out=folder / "b.safetensors", **options
        )
    )


def changed(path: Path, weight: Tensor) -> Tensor:
    """What the LoRA in a file changes of a weight, fp64."""
    adapter = read_adapter(TensorFile(path)).adapter[Q]
    assert adapter.algorithm == "lora" and adapter.magnitude is None
    return compute_weight_delta(weight.double(), adapter)


@pytest.mark.parametrize("name", ON_BASE)
def test_what_depends_on_the_weight_becomes_a_lora_of_it(tmp_path, base, name):
    _, adapter = random_adapter(name, (OUT, INTO), 3)
    saved(tmp_path / "a.safetensors", write_adapter(AdapterSet({Q: adapter}), ANIMA, "kohya").tensors)
    refused = as_lora(tmp_path)
    assert codes(refused) >= {"CONVERT-IMPOSSIBLE"} and "--model" in refused.findings[-1].remedy
    report = as_lora(tmp_path, model=str(tmp_path / "m.safetensors"))
    assert report.ok, report.findings
    assert report.figures["class"] == "growing" and report.figures["max_delta_error"] < 1e-6
    source = read_adapter(TensorFile(tmp_path / "a.safetensors")).adapter[Q]
    weight, bias = base[f"{KEY}.weight"], base[f"{KEY}.bias"]
    torch.testing.assert_close(
        changed(tmp_path / "b.safetensors", weight), compute_weight_delta(weight.double(), source), rtol=1e-5, atol=1e-6
    )
    lora = read_adapter(TensorFile(tmp_path / "b.safetensors")).adapter[Q]
    torch.testing.assert_close(compute_adapted_bias(bias, lora), compute_adapted_bias(bias, source))


def dora(folder: Path, side: str) -> None:
    shape = (OUT, 1) if side == "out" else (1, INTO)
    tensors = scaled(MODULE, OUT, INTO, 2, alpha=1.0) | {f"{MODULE}.dora_scale": noise(*shape).abs() + 0.5}
    saved(folder / "a.safetensors", tensors)


def test_magnitudes_of_the_inputs_go_where_the_target_has_no_place_for_them(tmp_path, base):
    dora(tmp_path, "in")
    model, weight = str(tmp_path / "m.safetensors"), base[f"{KEY}.weight"]
    assert codes(as_lora(tmp_path, "diffusers")) >= {"CONVERT-IMPOSSIBLE"}
    report = as_lora(tmp_path, "diffusers", model=model)
    assert report.ok and report.figures["class"] == "growing"
    source = read_adapter(TensorFile(tmp_path / "a.safetensors")).adapter[Q]
    wanted = compute_weight_delta(weight.double(), source)
    torch.testing.assert_close(changed(tmp_path / "b.safetensors", weight), wanted, rtol=1e-5, atol=1e-6)
    cut = as_lora(tmp_path, "diffusers", model=model, rank=2, allow_lossy=True)
    found = changed(tmp_path / "b.safetensors", weight)
    error = float((found - wanted).norm() / wanted.norm())
    assert cut.figures["class"] == "lossy" and cut.figures["relative_delta_error"] == pytest.approx(error, rel=1e-4)


@pytest.mark.parametrize(("side", "to"), [("out", "diffusers"), ("in", "kohya")])
def test_magnitudes_stay_where_the_target_has_a_place_for_them(tmp_path, base, side, to):
    dora(tmp_path, side)
    report = as_lora(tmp_path, to, model=str(tmp_path / "m.safetensors"))
    assert report.ok and report.figures["class"] == "lossless"
    magnitude = read_adapter(TensorFile(tmp_path / "b.safetensors")).adapter[Q].magnitude
    assert magnitude is not None and magnitude.side == side


def t_lora(folder: Path) -> dict[str, Tensor]:
    tensors = {"q_layer.weight": noise(2, INTO), "p_layer.weight": noise(OUT, 2, seed=1), "lambda_layer": noise(1, 2)}
    saved(folder / "a.safetensors", {f"{MODULE}.{role}": tensor for role, tensor in tensors.items()})
    return tensors


@pytest.mark.parametrize("to", ["kohya", "diffusers"])
def test_a_t_lora_is_written_as_the_lora_that_it_is(tmp_path, base, to):
    tensors, weight = t_lora(tmp_path), base[f"{KEY}.weight"].double()
    request = {"file": tmp_path / "a.safetensors", "to": to, "out": tmp_path / "b.safetensors"}
    assert codes(convert.run(convert.Request(**request))) >= {"ADAPTER-TLORA", "ADAPTER-REFUSED"}
    report = convert.run(convert.Request(**request, model=str(tmp_path / "m.safetensors")))
    assert report.ok, report.findings
    q, p, lambdas = (tensors[role].double() for role in ("q_layer.weight", "p_layer.weight", "lambda_layer"))
    u, values, vt = torch.linalg.svd(weight)
    wanted = (p * lambdas) @ q - (u[:, :2] * values[:2]) @ vt[:2]
    torch.testing.assert_close(changed(request["out"], weight), wanted, rtol=1e-5, atol=1e-5)


def test_a_t_lora_is_not_said_to_load_because_it_was_baked_here(tmp_path, base):
    t_lora(tmp_path)
    report = check.run(check.Request(paths=(tmp_path / "a.safetensors",), model=str(tmp_path / "m.safetensors")))
    assert report.ok and set(report.figures["loads"].values()) == {"no"}
    done = convert.run(
        convert.Request(
            file=tmp_path / "a.safetensors",
            to="kohya",
            model=str(tmp_path / "m.safetensors"),
            out=tmp_path / "b.safetensors",
        )
    )
    assert done.figures["loads"]["ComfyUI"] == "yes"


@pytest.mark.parametrize("to", ["kohya", "comfy", "diffusers", "peft"])
def test_an_adapter_of_an_own_model_goes_everywhere_and_back(tmp_path, to):
    model = own_model(tmp_path / "m.safetensors", "blocks.0.img_mlp.fc1", "head", shape=(OUT, INTO))
    tensors = scaled("lora_unet_blocks_0_img_mlp_fc1", OUT, INTO, 2, alpha=1.0)
    tensors |= scaled("lora_unet_head", OUT, INTO, 2, alpha=3.0)
    source = saved(tmp_path / "a.safetensors", tensors)
    for file, spelling, name in ((source, to, "there"), (tmp_path / "there", "kohya", "back")):
        out = tmp_path / name
        report = convert.run(convert.Request(file=file, to=spelling, out=out, model=str(model)))
        assert report.ok and report.figures["class"] == "lossless" and report.figures["max_delta_error"] == 0
    back = TensorFile(tmp_path / "back")
    assert set(back) == set(tensors) and all(torch.equal(back.read(key), tensors[key]) for key in back)


def test_an_adapter_that_does_not_fit_the_named_model_is_refused(tmp_path, base):
    saved(tmp_path / "a.safetensors", scaled(MODULE, OUT, INTO + 1, 2, alpha=1.0))
    report = as_lora(tmp_path, model=str(tmp_path / "m.safetensors"))
    assert codes(report) >= {"ADAPTER-DOES-NOT-FIT"} and not report.artifacts
    assert as_lora(tmp_path, model="anima").ok


def test_a_norm_needs_no_weight(tmp_path, base):
    """What is no matrix has no LoRA, with the model or without."""
    site = SiteAdapter("norm", {"w_norm": noise(INTO)})
    name = "transformer.transformer_blocks.0.attn1.norm_q"
    saved(tmp_path / "a.safetensors", write_adapter(AdapterSet({name: site}), ANIMA, "kohya").tensors)
    assert codes(as_lora(tmp_path, model=str(tmp_path / "m.safetensors"))) & {"CONVERT-IMPOSSIBLE", "ADAPTER-UNMATCHED"}
