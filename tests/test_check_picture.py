"""finitune check of pictures and workflows: what made them, with which settings and files, and whether they are any."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from finitune.generation.picture import save_picture
from finitune.generation.provenance import parse_a1111_parameters, parse_comfyui_json, read_picture_provenance
from finitune.report import Finding, Level, Report
from finitune.verbs import check
from finitune.verbs.check.picture import EXIF_IFD_TAG, EXIF_USER_COMMENT_TAG
from finitune.verbs.check.request import Request

A1111 = """red apple, <lora:shiny:0.8>
Negative prompt: text
Steps: 20, Sampler: Euler a, CFG scale: 7.5, Seed: 123, Size: 512x768, Model hash: abc, Model: dreamy, \
VAE: kl-f8.ckpt, Lora hashes: "shiny: e3b0, other: 1", Version: v1.10"""
API = {
    "3": {"class_type": "KSampler", "inputs": {"seed": 7, "steps": 30, "cfg": 4.5, "sampler_name": "euler",
                                               "scheduler": "simple", "model": ["9", 0]}},
    "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 1000, "height": 1024, "batch_size": 1}},
    "9": {"class_type": "UNETLoader", "inputs": {"unet_name": "anima\\anima-base-v1.0.safetensors",
                                                 "weight_dtype": "default"}},
    "11": {"class_type": "ModelSamplingAuraFlow", "inputs": {"shift": 5.0, "model": ["9", 0]}},
    "12": {"class_type": "VAELoader", "inputs": {"vae_name": "qwen_image_vae.safetensors"}},
}  # fmt: skip
EDITOR = {
    "nodes": [
        {"type": "KSampler", "widgets_values": [7, "randomize", 30, 4.5, "euler", "simple", 1]},
        {"type": "EmptyLatentImage", "widgets_values": [1000, 1024, 1]},
        {"type": "UNETLoader", "widgets_values": ["anima\\anima-base-v1.0.safetensors", "default"]},
        {"type": "ModelSamplingAuraFlow", "widgets_values": [5.0]},
        {"type": "VAELoader", "widgets_values": ["qwen_image_vae.safetensors"]},
        {"type": "Note", "widgets_values": None},
        {"type": "Reroute"},
    ],
    "links": [],
}
WANTED = {"seed": 7, "steps": 30, "cfg": 4.5, "sampler": "euler", "scheduler": "simple", "width": 1000, "height": 1024,
          "shift": 5.0, "weight_dtype": "default"}  # fmt: skip
FILES = ("anima\\anima-base-v1.0.safetensors", "qwen_image_vae.safetensors")


def drawn(path: Path, size: tuple[int, int] = (64, 64), **texts: str) -> Path:
    information = PngInfo()
    for name, text in texts.items():
        information.add_itxt(name, text)
    Image.effect_noise(size, 80).convert("RGB").save(path, pnginfo=information)
    return path


def checked(path: Path, **options) -> Report:
    return check.run(Request(paths=(path,), **options))


def by_code(report: Report) -> dict[str, Finding]:
    return {finding.code: finding for finding in report.findings}


def test_a_picture_of_ours_says_how_it_was_made(tmp_path: Path):
    facts = {"prompt": "red apple", "steps": 28, "cfg": 4.0, "seed": 3, "size": "64x64", "model": "pico-anima",
             "precision": "planned-half"}  # fmt: skip
    pixels = torch.randint(0, 256, (64, 64, 3), dtype=torch.uint8)
    report = checked(save_picture(tmp_path / "a.png", pixels, facts, good=True), model="anima")
    assert report.ok and report.figures["made_by"] == "finitune" and not report.findings
    assert report.figures["settings"] == {
        **{name: facts[name] for name in ("steps", "cfg", "seed", "precision")},
        "width": 64,
        "height": 64,
    }


@pytest.mark.parametrize("graph_of", ["prompt", "workflow"])
def test_both_forms_of_a_workflow_say_the_same(tmp_path: Path, graph_of: str):
    text = json.dumps(API if graph_of == "prompt" else EDITOR)
    report = checked(drawn(tmp_path / "a.png", (1000, 1024), **{graph_of: text}))
    assert report.figures["made_by"] == "ComfyUI" and report.figures["settings"] == WANTED
    assert report.figures["files"] == dict.fromkeys(FILES)
    (tmp_path / "w.json").write_text(text)
    alone = checked(tmp_path / "w.json")
    assert alone.figures["settings"] == WANTED and alone.figures["kind"] == "ComfyUI workflow"


def test_the_line_of_a1111_is_read_from_png_and_from_exif(tmp_path: Path):
    wanted = {"steps": 20, "cfg": 7.5, "seed": 123, "sampler": "Euler a", "width": 512, "height": 768}
    report = checked(drawn(tmp_path / "a.png", (512, 768), parameters=A1111))
    assert report.figures["settings"] == wanted
    assert list(report.figures["files"]) == ["dreamy.safetensors", "kl-f8.ckpt", "shiny.safetensors"]  # type: ignore[call-overload]
    exif = Image.Exif()
    exif.get_ifd(EXIF_IFD_TAG)[EXIF_USER_COMMENT_TAG] = b"UNICODE\0" + A1111.encode("utf-16-be")
    Image.effect_noise((64, 64), 80).convert("RGB").save(tmp_path / "a.jpg", exif=exif)
    report = checked(tmp_path / "a.jpg")
    assert report.figures["settings"] == wanted
    assert by_code(report)["PICTURE-RESIZED"].level is Level.NOTE


def test_settings_that_break_the_model_are_told_with_the_rule(tmp_path: Path):
    found = [f for f in checked(drawn(tmp_path / "a.png", prompt=json.dumps(API))).findings if f.level is Level.WARNING]
    assert {f.evidence["invariant"] for f in found} == {"picture-size", "scheduler-shift"}
    assert any("width 1000" in f.message and "multiples of 16" in f.message for f in found)
    good = {
        **API,
        "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 1024, "height": 1024}},
        "11": {"class_type": "ModelSamplingAuraFlow", "inputs": {"shift": 3.0}},
    }
    assert "SETTINGS-BREAK-MODEL" not in by_code(checked(drawn(tmp_path / "b.png", prompt=json.dumps(good))))
    flat = {**good, "3": {"class_type": "KSampler", "inputs": {"cfg": 1.0}}}
    found = by_code(checked(drawn(tmp_path / "c.png", prompt=json.dumps(flat))))["SETTINGS-BREAK-MODEL"]
    assert found.evidence["invariant"] == "guidance"
    other = {"1": {"class_type": "EmptyLatentImage", "inputs": {"width": 1000, "height": 1000}}}
    assert "SETTINGS-BREAK-MODEL" not in by_code(checked(drawn(tmp_path / "d.png", prompt=json.dumps(other))))


def test_files_are_looked_for_beside_it_and_where_comfyui_keeps_them(tmp_path: Path):
    place = tmp_path / "ComfyUI" / "models" / "diffusion_models" / "anima"
    place.mkdir(parents=True)
    (place / "anima-base-v1.0.safetensors").write_bytes(b"x")
    (tmp_path / "ComfyUI" / "output").mkdir()
    report = checked(drawn(tmp_path / "ComfyUI" / "output" / "a.png", prompt=json.dumps(API)))
    files = report.figures["files"]
    assert isinstance(files, dict) and files[FILES[0]] == place / "anima-base-v1.0.safetensors"
    assert by_code(report)["PICTURE-FILES-ELSEWHERE"].evidence["missing"] == [FILES[1]]


@pytest.mark.parametrize(("colour", "code"), [(0, "PICTURE-FLAT"), (120, "PICTURE-FLAT")])
def test_a_black_or_flat_picture_is_an_error(tmp_path: Path, colour: int, code: str):
    Image.new("RGB", (64, 64), (colour,) * 3).save(tmp_path / "a.png")
    report = checked(tmp_path / "a.png")
    assert report.exit_code == 1 and by_code(report)[code].level is Level.ERROR
    assert ("black" in by_code(report)[code].message) is (colour == 0)
    assert "diagnose" in by_code(report)[code].remedy


def test_precision_is_acquitted_where_the_picture_says_it_was_safe(tmp_path: Path):
    pixels = torch.zeros(64, 64, 3, dtype=torch.uint8)
    report = checked(save_picture(tmp_path / "a.png", pixels, {"precision": "fp32"}, good=True))
    assert "acquitted" in by_code(report)["PICTURE-FLAT"].remedy


def test_a_silent_picture_says_so_and_a_damaged_one_is_refused(tmp_path: Path):
    path = drawn(tmp_path / "a.png")
    assert by_code(checked(path))["PICTURE-SAYS-NOTHING"].level is Level.NOTE
    path.write_bytes(path.read_bytes()[:-200])
    assert checked(path).exit_code == 1
    (tmp_path / "w.json").write_text('{"nodes": [], "links": []}')
    assert [finding.code for finding in checked(tmp_path / "w.json").findings] == ["WORKFLOW-EMPTY"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["nodes", "links", "inputs", "class_type", "widgets_values", "type", "a"]), inner
        )
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=100)
@given(JSON)
def test_no_graph_of_whatever_shape_stops_the_reading(document):
    text = json.dumps(document)
    found = parse_comfyui_json(text)
    assert found is None or isinstance(found.files, tuple)
    assert read_picture_provenance({"prompt": text, "parameters": text, "finitune": text}) is None or isinstance(
        document, dict
    )


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=60))
def test_no_line_of_whatever_text_stops_the_reading(text: str):
    made = parse_a1111_parameters(f"{text}\nSteps: 3, Size: {text}, CFG scale: {text}")
    assert made is None or made.program.startswith("A1111")
