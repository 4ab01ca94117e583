"""Whole journeys on pico-anima: from a black picture to the right one, and back out of every wrong turn."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from finitune.cli import main
from finitune.files.writer import save_tensors
from finitune.generation.picture import read_picture_metadata
from finitune.generation.planning import calibrate_model, draw_in_precision, make_model_plan
from finitune.generation.precisions import open_in_precision
from finitune.generation.settings import PictureSettings
from finitune.models.anima.load import load_folder
from finitune.models.pico import STREAM_EXPONENT, get_pico_folder, get_pico_plan_path, scale_stream_
from finitune.precision.plan import PrecisionPlan
from finitune.precision.probe import Ranges
from finitune.render.demo_page import render_demo_page
from finitune.verbs import demo, diagnose, generate, plan
from tests.anima_files import save_three_files
from tests.brute import first_bad

PROMPT = "red apple"
STEPS = 4


@pytest.fixture(scope="module")
def parts():
    return load_folder(get_pico_folder())


@pytest.fixture(scope="module")
def shipped_plan():
    return PrecisionPlan.load(get_pico_plan_path())


@pytest.fixture(scope="module")
def three_files(parts, tmp_path_factory):
    return save_three_files(parts, tmp_path_factory.mktemp("three"))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path_factory, monkeypatch):
    """Default outputs go to a folder of the test's own."""
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))


def codes(report):
    return {finding.code for finding in report.findings}


def test_plain_half_is_black_and_says_so(tmp_path):
    out = tmp_path / "apple.png"
    report = generate.run(generate.Request(model="pico-anima", precision="raw-half", steps=STEPS, out=out))
    assert report.exit_code == 1 and "LATENTS-NONFINITE" in codes(report)
    assert f"finitune diagnose pico-anima --steps {STEPS} --precision raw-half" in report.findings[-1].remedy
    suspect = tmp_path / "apple.suspect.png"
    assert report.artifacts == {"picture": str(suspect)} and not out.exists()
    assert Image.open(suspect).getextrema() == ((0, 0),) * 3


def test_the_plan_draws_the_right_picture_closer_to_fp32_than_bf16_does(tmp_path):
    out = tmp_path / "apple.png"
    report = generate.run(generate.Request(model="pico-anima", prompt=PROMPT, steps=STEPS, out=out))
    assert report.exit_code == 0 and report.figures["precision"] == "planned-half"
    assert report.figures["psnr_vs_fp32"] > report.figures["bf16_psnr_vs_fp32"]
    assert report.figures["rel_l2_vs_fp32"] <= report.figures["bf16_rel_l2_vs_fp32"] / 2
    metadata = read_picture_metadata(out)
    assert metadata["prompt"] == PROMPT and metadata["seed"] == 0
    assert PrecisionPlan.loads(metadata["plan"]) == PrecisionPlan.load(get_pico_plan_path())


def test_the_guard_repairs_a_step_and_amends_the_plan(shipped_plan, tmp_path):
    denoiser = shipped_plan.components["transformer"]
    line = next(line for line in denoiser.lines if line.site.endswith("ff.net.2"))
    wrong = denoiser.with_line(replace(line, exponent=-20))
    tight = replace(shipped_plan, components={**shipped_plan.components, "transformer": wrong})
    tight.save(tmp_path / "tight.toml")
    request = generate.Request(model="pico-anima", steps=2, plan=tmp_path / "tight.toml", precision="planned-half")
    report = generate.run(request)
    assert report.exit_code == 0 and "GUARD-TRIPPED" in codes(report)
    assert report.figures["guard_trips"] == 1
    amended = PrecisionPlan.load(Path(report.artifacts["amended_plan"])).components["transformer"]
    assert next(other for other in amended.lines if other.site == line.site).exponent is None


@pytest.mark.parametrize("precision", ["current-half", "bf16", "fp32"])
def test_every_other_precision_draws_the_same_picture(parts, precision):
    settings = [PictureSettings(prompt=PROMPT, steps=STEPS)]
    reference = draw_in_precision(parts, "fp32", settings)
    ours = draw_in_precision(parts, precision, settings)
    error = (ours.latents - reference.latents).norm() / reference.latents.norm()
    assert error < {"current-half": 5e-3, "bf16": 5e-2, "fp32": 1e-6}[precision]


def test_every_precision_leaves_the_model_as_it_was(parts, shipped_plan):
    bits = {name: tensor.clone() for name, tensor in parts.transformer.state_dict().items()}
    for precision in ("raw-half", "planned-half", "current-half"):
        with open_in_precision(parts, precision, shipped_plan):
            pass
    assert all(torch.equal(bits[name], tensor) for name, tensor in parts.transformer.state_dict().items())


def test_diagnosis_names_what_a_brute_force_run_names(parts, tmp_path):
    request = diagnose.Request(model="pico-anima", prompt=PROMPT, steps=STEPS, out=tmp_path)
    report = diagnose.run(request)
    assert report.exit_code == 1 and report.figures["cured_by_plan"] is True
    with open_in_precision(parts, "raw-half") as running:
        from finitune.generation.draw import draw_picture_batch, record_component_calls

        with record_component_calls(running) as recording:
            draw_picture_batch(running, [generate.build_picture_settings(request)])
        brute = first_bad(running.modules["transformer"], recording.calls["transformer"][0])
    named = [report.figures[key] for key in ("origin_site", "origin_op", "origin_value")]
    assert named == [*brute.found, brute.value]
    assert report.figures["origin_value"] > 65504 and report.figures["origin_step"] == 0
    assert (tmp_path / "asked.suspect.png").exists() and (tmp_path / "by-plan.png").exists()
    over = Ranges.load(tmp_path / "ranges.json").over_half()
    assert "transformer_blocks.5" in over and [table.title for table in report.tables][-1].startswith("beyond fp16")


def test_diagnosis_acquits_precision_where_fp32_is_as_bad(parts, monkeypatch):
    broken = load_folder(get_pico_folder())
    broken.transformer.proj_out.weight.data.fill_(3e38)
    monkeypatch.setattr("finitune.verbs.generate.load_model", lambda _: broken)
    report = diagnose.run(diagnose.Request(model="pico-anima", precision="bf16", steps=2))
    assert report.exit_code == 1
    assert "PRECISION-ACQUITTED" in codes(report) and report.figures["precision_acquitted"] is True
    assert not any(code.startswith("ORIGIN") for code in codes(report))


def test_diagnosis_of_a_good_run_finds_nothing():
    report = diagnose.run(diagnose.Request(model="pico-anima", precision="planned-half", steps=STEPS))
    assert report.exit_code == 0 and "RUN-IS-FINITE" in codes(report)


def test_plan_keeps_its_promises(tmp_path):
    out = tmp_path / "plan.toml"
    report = plan.run(plan.Request(model="pico-anima", steps=STEPS, out=out))
    figures = report.figures
    assert report.exit_code == 0
    assert figures["half_flops_share"] >= 0.99
    assert figures["rel_l2_vs_fp32"] <= figures["bf16_rel_l2_vs_fp32"] / 2
    assert figures["headroom_bits_min"] >= 2
    assert figures["lines"] > 0 and figures["droppable_lines"] == 0
    assert figures["exact_rel_l2"] == 0
    assert PrecisionPlan.load(out).dumps() == out.read_text()


def test_the_unscaled_twin_needs_no_plan():
    twin = load_folder(get_pico_folder())
    scale_stream_(twin.transformer, -STREAM_EXPONENT)
    calls, _ = calibrate_model(twin, [PictureSettings(prompt=PROMPT, steps=STEPS)])
    made = make_model_plan(twin, "twin", calls)
    assert [component.lines for component in made.components.values()] == [()] * 4


def test_three_files_draw_the_same_picture(three_files, parts, tmp_path):
    out = tmp_path / "apple.png"
    arguments = ["generate", str(three_files["dit"]), "--qwen3", str(three_files["qwen3"])]
    arguments += ["--vae", str(three_files["vae"]), "--tokenizers", str(three_files["tokenizers"])]
    arguments += ["--plan", str(get_pico_plan_path()), "--precision", "planned-half"]
    code = main([*arguments, "--size", "64", "--steps", str(STEPS), "--prompt", PROMPT, "--out", str(out)])
    assert code == 0
    expected = draw_in_precision(
        parts, "planned-half", [PictureSettings(prompt=PROMPT, steps=STEPS)], PrecisionPlan.load(get_pico_plan_path())
    )
    assert torch.equal(
        torch.frombuffer(bytearray(Image.open(out).tobytes()), dtype=torch.uint8), expected.pixels.flatten()
    )


def test_demo_tells_the_story_on_one_page(tmp_path):
    report = demo.run(demo.Request(out=tmp_path, steps=STEPS, train_steps=10), render_demo_page)
    assert report.exit_code == 0, [f.message for f in report.findings]
    assert report.figures["psnr_vs_fp32"] > report.figures["bf16_psnr_vs_fp32"]
    page = (tmp_path / "report.html").read_text()
    assert page.count('class="bad">the picture is black<') == 1 and page.count('class="good"') == 3
    assert page.count("data:image/png;base64,") == 6 and page.count("<svg") == 2 and "patch_embed" in page
    assert report.figures["training_steps"] == 10 and report.figures["training_non_finite_steps"] == 0
    assert report.figures["training_validation_loss"] < report.figures["training_validation_loss_first"]
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "bf16.png",
        "fp32.png",
        "merged",
        "pico-anima.plan.toml",
        "plain.png",
        "planned-half.png",
        "raw-half.suspect.png",
        "report.html",
        "training",
        "worn.png",
    ]


WRONG = {
    "empty prompt": (["generate", "pico-anima", "--prompt", " "], 2, "PROMPT-EMPTY"),
    "size": (["generate", "pico-anima", "--size", "72x64"], 2, "SIDE-NOT-MULTIPLE"),
    "size text": (["generate", "pico-anima", "--size", "big"], 2, "SIZE-UNREADABLE"),
    "negative seed": (["generate", "pico-anima", "--seed", "-1"], 2, "SEED-OUT-OF-RANGE"),
    "no steps": (["generate", "pico-anima", "--steps", "0"], 2, "STEPS-TOO-FEW"),
    "guidance": (["generate", "pico-anima", "--cfg", "-2"], 2, "CFG-OUT-OF-RANGE"),
    "headroom": (["plan", "pico-anima", "--headroom-bits", "99"], 2, "HEADROOM-OUT-OF-RANGE"),
    "device": (["generate", "pico-anima", "--device", "cuda:77"], 2, "DEVICE-NOT-THERE"),
    "no such model": (["generate", "pico-anina"], 1, "MODEL-NOT-FOUND"),
    "missing plan": (["generate", "pico-anima", "--plan", "{tmp}/none.toml"], 1, "PLAN-UNREADABLE"),
    "missing prompts": (["plan", "pico-anima", "--prompts", "{tmp}/none.txt"], 1, "FILE-MISSING"),
    "html as model": (["generate", "{tmp}/page.safetensors"], 1, "FILE-HTML"),
    "lfs pointer": (["diagnose", "{tmp}/pointer.safetensors"], 1, "FILE-LFS-POINTER"),
    "truncated": (["plan", "{tmp}/cut.safetensors"], 1, "FILE-TRUNCATED"),
    "pickle": (["generate", "{tmp}/model.ckpt"], 1, "FILE-PICKLE"),
    "two files missing": (["generate", "{dit}"], 2, "MODEL-FILES-MISSING"),
    "lora as model": (["generate", "{tmp}/lora.safetensors"], 1, "MODEL-IS-ADAPTER"),
    "vae as dit": (["generate", "{vae}", "--qwen3", "{qwen3}", "--vae", "{dit}"], 1, "MODEL-WRONG-PART"),
    "text encoder as dit": (["generate", "{qwen3}", "--qwen3", "{qwen3}", "--vae", "{vae}"], 1, "MODEL-WRONG-PART"),
    "text as model": (["generate", "{tmp}/notes.safetensors"], 1, "FILE-TEXT"),
    "empty folder": (["generate", "{tmp}"], 1, "FILE-MISSING"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_requests_are_refused_with_code_and_remedy(case, three_files, tmp_path, capsys):
    bad_files(tmp_path, three_files["vae"])
    arguments, exit_code, code = WRONG[case]
    places = {"tmp": tmp_path, **three_files}
    arguments = [argument.format(**places) for argument in arguments]
    out = tmp_path / "out"
    before = sorted(tmp_path.iterdir())
    assert main([*arguments, "--out", str(out / "it.png"), "--json"]) == exit_code
    report = json.loads(capsys.readouterr().out)
    found = next(finding for finding in report["findings"] if finding["level"] == "error")
    assert found["code"] == code and found["remedy"] and not report["ok"]
    assert sorted(tmp_path.iterdir()) == before


def test_a_plan_is_made_once_and_used_again(three_files, tmp_path, capsys):
    arguments = ["generate", str(three_files["dit"]), "--qwen3", str(three_files["qwen3"]), "--vae"]
    arguments += [str(three_files["vae"]), "--size", "64", "--steps", "2", "--precision", "planned-half", "--json"]
    seen = []
    for _ in range(2):
        assert main(arguments) == 0
        seen.append({finding["code"] for finding in json.loads(capsys.readouterr().out)["findings"]})
    assert "PLAN-MADE" in seen[0] and "PLAN-LOADED" in seen[1]


def test_a_plan_of_another_checkpoint_is_refused(shipped_plan, tmp_path, capsys):
    other = tmp_path / "other.toml"
    replace(shipped_plan, fingerprint="0" * 64).save(other)
    assert main(["generate", "pico-anima", "--plan", str(other), "--precision", "planned-half", "--json"]) == 1
    assert "PLAN-OTHER-CHECKPOINT" in capsys.readouterr().out


def bad_files(tmp: Path, real: Path) -> None:
    """What people really save under a model's name."""
    (tmp / "page.safetensors").write_text("<!DOCTYPE html><html><body>401 Unauthorized</body></html>")
    (tmp / "notes.safetensors").write_text("the weights are on the other disk\n" * 9)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 4182218328\n"
    (tmp / "pointer.safetensors").write_text(pointer)
    (tmp / "cut.safetensors").write_bytes(real.read_bytes()[:100_000])
    lora = {f"lora_unet_blocks_0_mlp_layer1.lora_{part}.weight": torch.zeros(4, 4) for part in ("down", "up")}
    save_tensors(tmp / "lora.safetensors", lora)
    torch.save({"weight": torch.zeros(2)}, tmp / "model.ckpt")


def test_a_plan_that_breaks_a_promise_is_kept_as_suspect(monkeypatch, tmp_path):
    from finitune.generation import planning

    certify = planning.certify_model_plan
    monkeypatch.setattr(
        "finitune.verbs.plan.certify_model_plan",
        lambda *a, **k: {name: replace(c, headroom_bits_min=1.0) for name, c in certify(*a, **k).items()},
    )
    report = plan.run(plan.Request(model="pico-anima", steps=1, out=tmp_path / "mine.toml"))
    assert report.exit_code == 1 and "PLAN-HEADROOM" in codes(report)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.suspect.toml"]


def test_the_next_command_repeats_the_whole_request():
    request = generate.Request(model="my model", prompt="it's", seed=3, cfg=2.5, precision="bf16", out=Path("x.png"))
    assert request.to_command_words() == "'my model' --prompt 'it'\"'\"'s' --cfg 2.5 --seed 3"


def test_a_cpu_that_was_asked_for_is_not_given_the_precision_of_a_gpu(monkeypatch):
    from finitune.report import Report

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    report = Report("generate")
    assert (
        generate.choose_generation_precision(generate.Request(model="pico-anima", device="cpu"), report)
        == "planned-half"
    )
    assert [finding.subject for finding in report.findings] == ["cpu"]
