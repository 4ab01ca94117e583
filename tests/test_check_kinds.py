"""finitune check finds out what a path is by looking, says it of each, and mends what is safe."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image

from finitune.errors import FileError
from finitune.files.writer import save_tensors, write_text
from finitune.models.pico import get_pico_folder, get_pico_plan_path
from finitune.progress import SilentProgress
from finitune.render.check_page import render_check_page
from finitune.report import Level, Report
from finitune.verbs import check
from finitune.verbs.check.kinds import PathKind, detect_path_kind
from finitune.verbs.check.request import FileFix, Request
from tests.adapter_files import lora
from tests.case_files import saved

OURS = '[network]\nalgorithm = "lora"\n[saving]\noutput_dir = "out"\n'
KOHYA_DATASET = '[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = "pictures"\n'
KOHYA = 'pretrained_model_name_or_path = "m.safetensors"\nnetwork_module = "networks.lora"\nnetwork_dim = 8\n'
API = {"1": {"class_type": "KSampler", "inputs": {"steps": 20}}}
EDITOR = {"nodes": [{"type": "KSampler", "widgets_values": [1, "fixed", 20]}], "links": []}


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def picture(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.effect_noise((32, 32), 80).convert("RGB").save(path)
    return path


def adapter(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return saved(path, lora("lora_unet_blocks_0_self_attn_q_proj", 192, 192, 2))


def model(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return saved(path, {"a.weight": torch.randn(8, 8)})


def cache(path: Path) -> Path:
    from finitune.datasets.cache import CacheSource, EncoderCache

    EncoderCache(path, "texts", {"encoder": "x"}).put(CacheSource.of("a caption", 1), {"t": torch.randn(3)})
    return path


MADE: dict[str, tuple[Callable[[Path], Path], PathKind]] = {
    "our configuration": (lambda at: write(at / "a.toml", OURS), PathKind.CONFIG),
    "another program's": (lambda at: write(at / "a.toml", KOHYA), PathKind.CONFIG),
    "a command line": (
        lambda at: write(at / "run.sh", "accelerate launch anima_train_network.py --x 1"),
        PathKind.CONFIG,
    ),
    "a broken configuration": (lambda at: write(at / "a.toml", "[model\nx=1"), PathKind.CONFIG),
    "a configuration by another ending": (lambda at: write(at / "a.txt", OURS), PathKind.CONFIG),
    "a dataset's TOML": (lambda at: write(at / "a.toml", KOHYA_DATASET), PathKind.DATASET),
    "a folder of pictures": (lambda at: picture(at / "d" / "a.png").parent, PathKind.DATASET),
    "a folder of N_name folders": (lambda at: picture(at / "d" / "3_cat" / "a.png").parents[1], PathKind.DATASET),
    "an adapter": (lambda at: adapter(at / "a.safetensors"), PathKind.ADAPTER),
    "an adapter of another name": (lambda at: adapter(at / "a.png"), PathKind.ADAPTER),
    "PEFT's folder": (lambda at: adapter(at / "p" / "adapter_model.safetensors").parent, PathKind.ADAPTER),
    "a model": (lambda at: model(at / "m.ckpt"), PathKind.MODEL),
    "a diffusers folder": (lambda at: get_pico_folder(), PathKind.MODEL),
    "a cache": (lambda at: cache(at / "c"), PathKind.CACHE),
    "one kind of a cache": (lambda at: cache(at / "c") / "texts", PathKind.CACHE),
    "an entry of a cache": (lambda at: next(cache(at / "c").rglob("*.safetensors")), PathKind.CACHE),
    "a picture": (lambda at: picture(at / "a.png"), PathKind.PICTURE),
    "a picture of another name": (lambda at: picture(at / "a.png").rename(at / "a.safetensors"), PathKind.PICTURE),
    "a page called a picture": (lambda at: write(at / "a.jpg", "<html>no</html>"), PathKind.PICTURE),
    "a workflow for the server": (lambda at: write(at / "w.json", json.dumps(API)), PathKind.WORKFLOW),
    "a workflow of the editor": (lambda at: write(at / "w.json", json.dumps(EDITOR)), PathKind.WORKFLOW),
    "a plan": (lambda at: get_pico_plan_path(), PathKind.PLAN),
    "a family": (lambda at: Path("sdxl"), PathKind.FAMILY),
    "a folder of adapters": (lambda at: adapter(at / "l" / "a.safetensors").parent, PathKind.FILES),
    "a run": (lambda at: write(at / "r" / "x-state" / "state.json", "{}").parents[1], PathKind.RUN),
}


@pytest.mark.parametrize("what", MADE)
def test_what_a_path_is_is_found_by_looking(tmp_path: Path, what: str):
    made, kind = MADE[what]
    assert detect_path_kind(made(tmp_path)) is kind


OTHERS = {
    "nothing": ("none.safetensors", None, "FILE-MISSING"),
    "an empty file": ("a.txt", b"", "FILE-EMPTY"),
    "an empty adapter": ("a.safetensors", b"", "FILE-EMPTY"),
    "a caption": ("a.txt", b"a red apple", "FILE-TEXT"),
    "some JSON": ("a.json", b'{"colour": "red"}', "FILE-TEXT"),
    "JSON as weights": ("a.safetensors", b'{"error": "gone"}', "FILE-TEXT"),
    "a pointer": ("a.safetensors", b"version https://git-lfs.github.com/spec/v1\nsize 1\n", "FILE-LFS-POINTER"),
    "a page as a configuration": ("a.toml", b"<!doctype html><html></html>", "FILE-HTML"),
    "GGUF": ("a.gguf", b"GGUF" + bytes(40), "FILE-GGUF"),
    "noise": ("a.dat", bytes(range(128, 256)), "FILE-UNKNOWN"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_anything_else_is_called_what_it_is(tmp_path: Path, what: str):
    name, content, code = OTHERS[what]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(FileError) as raised:
        detect_path_kind(tmp_path / name)
    assert raised.value.code == code and raised.value.remedy and str(tmp_path / name) in str(raised.value)


def test_a_folder_of_nothing_says_what_is_in_it(tmp_path: Path):
    write(tmp_path / "a.md", "text")
    with pytest.raises(FileError) as raised:
        detect_path_kind(tmp_path)
    assert raised.value.code == "FOLDER-UNKNOWN" and raised.value.evidence["holds"] == ["a.md"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "p")
    with pytest.raises(FileError) as raised:
        detect_path_kind(tmp_path / "p")
    assert raised.value.code == "FILE-NOT-REGULAR"


def test_several_paths_have_a_section_each_and_the_worst_decides(tmp_path: Path):
    good, bad = adapter(tmp_path / "good.safetensors"), write(tmp_path / "bad.safetensors", "<html>")
    report = check.run(Request(paths=(good, bad, tmp_path / "none")))
    figures = report.figures["checked"]
    assert isinstance(figures, dict) and list(figures) == [str(good), str(bad), str(tmp_path / "none")]
    assert [figures[name]["ok"] for name in figures] == [True, False, False] and report.exit_code == 1
    levels = [finding.level for finding in report.findings]
    assert levels == sorted(levels, key=list(Level).index), "the worst first"
    assert report.tables[0].title == "checked" and report.tables[0].rows[1][2] == "1 error"
    assert check.run(Request(paths=(good,))).ok


def test_a_folder_of_files_is_each_of_them(tmp_path: Path):
    adapter(tmp_path / "a.safetensors")
    model(tmp_path / "b.safetensors")
    report = check.run(Request(paths=(tmp_path,)))
    assert isinstance(report.figures["checked"], dict)
    assert [of["kind"] for of in report.figures["checked"].values()] == ["adapter", "model"]
    names = {"MODEL-FAMILY-UNKNOWN"}
    told = [finding for finding in report.findings if finding.code in names]
    assert told and all(str(tmp_path / "b.safetensors") in finding.subject for finding in told)


@pytest.mark.parametrize(
    ("options", "code"),
    [({"gpu": "T5"}, "GPU-UNKNOWN"), ({"scale": 0.0}, "SCALE-OUT-OF-RANGE"), ({"paths": ()}, "CHECK-NOTHING-NAMED")],
)
def test_a_request_that_cannot_be_meant_is_wrong_usage(tmp_path: Path, options: dict, code: str):
    report = check.run(Request(**{"paths": (adapter(tmp_path / "a.safetensors"),), **options}))
    assert report.exit_code == 2 and [finding.code for finding in report.findings] == [code]


def test_a_model_that_is_not_there_is_wrong_usage_and_a_file_that_is_not_there_is_not(tmp_path: Path):
    report = check.run(Request(paths=(adapter(tmp_path / "a.safetensors"),), model="animo"))
    assert report.exit_code == 2 and "anima" in report.findings[0].message
    assert check.run(Request(paths=(tmp_path / "none",))).exit_code == 1


def damaged(tmp_path: Path) -> Path:
    """A cache of two entries, one of them with a byte changed."""
    from finitune.datasets.cache import CacheSource, EncoderCache

    shelf = EncoderCache(tmp_path / "c", "texts", {"encoder": "x"})
    for number in range(2):
        shelf.put(CacheSource.of(f"caption {number}", number), {"t": torch.randn(3)})
    file = sorted(shelf.folder.iterdir())[0]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    return tmp_path / "c"


def test_without_fix_what_can_be_mended_is_only_told(tmp_path: Path):
    place = damaged(tmp_path)
    before = {path: path.read_bytes() for path in place.rglob("*.safetensors")}
    report = check.run(Request(paths=(place,)))
    assert report.exit_code == 1 and {f.code for f in report.findings} == {"CACHE-DAMAGED", "FIX-AVAILABLE"}
    refused = check.run(Request(paths=(place,), fix=True))
    assert {f.code for f in refused.findings} == {"CACHE-DAMAGED", "FIX-NOT-DONE"}, "nobody was there to be asked"
    asked: list[FileFix] = []
    request = Request(paths=(place,), fix=True, ask=lambda mendings: bool(asked.extend(mendings)))
    assert "FIX-NOT-DONE" in {finding.code for finding in check.run(request).findings}
    assert len(asked) == 1 and {path: path.read_bytes() for path in place.rglob("*.safetensors*")} == before


@pytest.mark.parametrize("how", ["yes", "asked"])
def test_fix_mends_keeps_a_copy_and_looks_again(tmp_path: Path, how: str):
    place = damaged(tmp_path)
    agreed = {"yes": True} if how == "yes" else {"ask": lambda mendings: True}
    report = check.run(Request(paths=(place,), fix=True, **agreed))
    assert report.ok and report.figures["entries"] == {"texts": 1}
    (done,) = report.findings
    assert done.code == "FIX-DONE" and done.evidence["mends"] == "CACHE-DAMAGED"
    (copy,) = place.rglob("*.orig")
    assert str(copy) == done.evidence["copy"]
    assert check.run(Request(paths=(place,))).findings == [], "the copy is not taken for an entry"


def test_an_entry_that_was_taken_away_is_not_missed(tmp_path: Path):
    place = damaged(tmp_path)
    file = next(path for path in sorted(place.rglob("*.safetensors")))
    report = check.run(Request(paths=(file,), fix=True, yes=True))
    assert report.ok and not file.exists()


def test_a_change_that_fails_is_an_error_and_a_copy_is_never_written_over(tmp_path: Path):
    from finitune.verbs.check.request import apply_fixes

    def refuse() -> None:
        raise FileError("the disk is full", code="FILE-NOT-WRITTEN", remedy="Make room.")

    file = write(tmp_path / "a.txt", "one")
    write(tmp_path / "a.txt.orig", "the first")
    changes = [
        FileFix("A", file, "Write two", partial(write_text, file, "two")),
        FileFix("B", file, "Write three", refuse),
    ]
    told = apply_fixes(changes, Request(paths=(file,), fix=True, yes=True))
    assert [finding.code for finding in told] == ["FIX-DONE", "FIX-FAILED"] and told[1].level is Level.ERROR
    assert (tmp_path / "a.txt.orig").read_text() == "the first" and (tmp_path / "a.txt.orig1").read_text() == "one"
    assert file.read_text() == "two"


def test_the_page_has_each_path_and_what_to_see_to(tmp_path: Path):
    good, bad = adapter(tmp_path / "good.safetensors"), write(tmp_path / "bad.safetensors", "<html>")
    page = tmp_path / "findings.html"
    report = check.run(Request(paths=(good, bad), html=page), SilentProgress(), render_check_page)
    text = page.read_text()
    assert report.artifacts["html"] == str(page) and "FILE-HTML" in text and "What to see to" in text
    assert text.count("<details>") == 2 and "<script" not in text
    one = render_check_page([check.CheckSection(good, PathKind.ADAPTER, Report("check"))], Report("check"))
    assert "<details>" not in one


def test_a_run_is_its_states_its_configuration_and_its_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from finitune.training.checkpoint import RunState, save_run_state
    from finitune.training.manifest import TrainingManifest

    run = tmp_path / "run"
    for step in (2, 4):
        state = RunState(step, 0, {"w": torch.randn(2, 2)}, {"state": {}, "param_groups": []})
        save_run_state(run / f"x-step{step:08d}-state", state, TrainingManifest("lora", {"w": (2, 2)}, "torch.AdamW"))
    adapter(run / "x.safetensors")
    write(run / "config.toml", OURS)
    looked: list[Path] = []
    monkeypatch.setitem(check.CHECKERS_BY_KIND, PathKind.CONFIG, ("run_folder", "check_run"))
    monkeypatch.setattr("finitune.verbs.check.run_folder.iterate_state_folders", lambda path: looked.append(path) or [])
    check.run(Request(paths=(run,)))
    assert looked == [run, run / "config.toml"]
    monkeypatch.undo()
    (run / "x-step00000004-state" / "tensors.safetensors").write_bytes(b"damaged")
    monkeypatch.setitem(check.CHECKERS_BY_KIND, PathKind.CONFIG, ("run_folder", "check_plan"))
    report = check.run(Request(paths=(run,)))
    figures = report.figures["checked"]
    assert isinstance(figures, dict) and list(figures) == [
        str(run),
        str(run / "config.toml"),
        str(run / "x.safetensors"),
    ]
    assert (figures[str(run)]["states"], figures[str(run)]["states_whole"], figures[str(run)]["resumes_at"]) == (
        2,
        1,
        2,
    )
    assert "STATE-DAMAGED" in {finding.code for finding in report.findings} and report.exit_code == 1
    assert check.run(Request(paths=(run / "x-step00000002-state",))).ok


def test_a_plan_is_read_and_compared_with_the_model_that_is_named(tmp_path: Path):
    report = check.run(Request(paths=(get_pico_plan_path(),), model="pico-anima"))
    assert report.ok and report.tables[0].title == "lines"
    save_tensors(tmp_path / "x.safetensors", {"a": torch.ones(1)})
    other = write(tmp_path / "p.toml", get_pico_plan_path().read_text().replace('fingerprint = "', 'fingerprint = "0'))
    report = check.run(Request(paths=(other,), model="pico-anima"))
    assert [finding.code for finding in report.findings] == ["PLAN-OTHER-CHECKPOINT"] and report.exit_code == 1
