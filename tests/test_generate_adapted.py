"""Pictures with adapters that were trained on pico-anima: attached, merged first, and refused."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

import finitune as ft
from finitune.files.tensorfile import TensorFile
from finitune.files.writer import save_tensors
from finitune.generation.picture import read_picture_metadata
from finitune.models.anima.load import build_anima_pipeline, load_folder
from finitune.models.pico import get_pico_folder
from finitune.numerics.compare import psnr_db
from finitune.verbs import generate, merge
from tests.trained import saved, trained_adapter

STEPS = 4
ALGORITHMS = ("lora", "loha", "lokr")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """One file for each algorithm, trained for a few steps."""
    place, parts = tmp_path_factory.mktemp("adapters"), load_folder(get_pico_folder())
    return {name: saved(trained_adapter(parts, name), place / f"{name}.safetensors") for name in ALGORITHMS}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def drawn(out, model="pico-anima", **options):
    report = generate.run(generate.Request(model=model, steps=STEPS, out=out, **options))
    assert report.exit_code == 0, report.findings
    pixels = torch.frombuffer(bytearray(Image.open(out).tobytes()), dtype=torch.uint8)
    return report, pixels.float()


def codes(report):
    return {finding.code for finding in report.findings}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_attached_and_merged_first_draw_the_same_picture(name, files, tmp_path):
    file = str(files[name])
    _, plain = drawn(tmp_path / "plain.png", precision="fp32")
    _, attached = drawn(tmp_path / "attached.png", precision="fp32", adapter=(file,))
    _, merged = drawn(tmp_path / "merged.png", precision="fp32", adapter=(file,), merge_first=True)
    assert psnr_db(attached, plain, 255.0) < 35, "the adapter changes the picture"
    assert psnr_db(merged, attached, 255.0) > 50


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_merged_model_draws_what_the_attached_adapter_does(name, files, tmp_path):
    _, attached = drawn(tmp_path / "attached.png", precision="fp32", adapter=(str(files[name]),))
    psnr = {}
    for dtype in ("fp16", "bf16"):
        out = tmp_path / dtype
        report = merge.run(merge.Request(model="pico-anima", adapters=(str(files[name]),), out=out, dtype=dtype))
        assert report.exit_code == 0, report.findings
        assert report.figures["readback_mismatches"] == 0 and report.figures["unmatched"] == 0
        _, merged = drawn(tmp_path / f"{dtype}.png", model=str(out), size="64x64", precision="fp32")
        psnr[dtype] = psnr_db(merged, attached, 255.0)
    assert psnr["fp16"] > 40 and psnr["fp16"] > psnr["bf16"], psnr


def test_a_planned_picture_with_an_adapter_is_certified_again(files, tmp_path):
    _, reference = drawn(tmp_path / "fp32.png", precision="fp32", adapter=(str(files["lora"]),))
    report, planned = drawn(tmp_path / "half.png", precision="planned-half", adapter=(f"{files['lora']}:1.0",))
    assert codes(report) & {"PLAN-CERTIFIED-AGAIN", "PLAN-REMADE"}
    assert report.figures["adapted_step_rel_l2"] < report.figures["adapted_bf16_step_rel_l2"] / 2
    assert report.figures["adapted_headroom_bits"] >= 1
    assert psnr_db(planned, reference, 255.0) > 40
    metadata = read_picture_metadata(tmp_path / "half.png")
    fingerprint = TensorFile(files["lora"]).fingerprint()
    assert metadata["adapters"] == [{"file": "lora.safetensors", "strength": 1.0, "fingerprint": fingerprint}]


def test_strength_0_is_the_model_itself_and_two_halves_are_a_whole(files, tmp_path):
    file = files["lora"]
    _, plain = drawn(tmp_path / "plain.png", precision="fp32")
    _, silent = drawn(tmp_path / "silent.png", precision="fp32", adapter=(f"{file}:0",))
    assert torch.equal(plain, silent)
    _, whole = drawn(tmp_path / "whole.png", precision="fp32", adapter=(str(file),))
    _, halves = drawn(tmp_path / "halves.png", precision="fp32", adapter=(f"{file}:0.5", f"{file}:0.5"))
    assert psnr_db(halves, whole, 255.0) > 60


def test_a_bad_adapter_is_refused_before_anything_is_drawn(files, tmp_path):
    file = TensorFile(files["lora"])
    tensors = dict(file.tensors())
    key = next(key for key in tensors if key.endswith("lora_up.weight"))
    tensors[key][0, 0] = float("nan")
    save_tensors(tmp_path / "bad.safetensors", tensors, file.metadata)
    report = generate.run(
        generate.Request(model="pico-anima", steps=STEPS, adapter=("bad.safetensors",), out=tmp_path / "x.png")
    )
    assert report.exit_code == 1 and {"ADAPTER-NONFINITE", "ADAPTER-REFUSED"} <= codes(report)
    assert not (tmp_path / "x.png").exists()
    assert any(finding.subject == key for finding in report.findings)


def test_a_script_attaches_a_file_and_takes_it_off(files):
    pipe = build_anima_pipeline(load_folder(get_pico_folder()))
    modules, bits = dict(pipe.transformer.named_modules()), pipe.transformer.proj_out.weight.clone()

    def drawn_by(pipe):
        noise = torch.Generator().manual_seed(0)
        state = pipe(prompt="red apple", num_inference_steps=2, width=64, height=64, generator=noise, output_type="pt")
        return state.get("images").float()

    plain = drawn_by(pipe)
    with ft.attach(pipe, files["lora"], 0.5) as adapted:
        assert not torch.allclose(drawn_by(adapted), plain, atol=1e-2)
    assert dict(pipe.transformer.named_modules()) == modules and torch.equal(pipe.transformer.proj_out.weight, bits)
    assert torch.equal(drawn_by(pipe), plain)
