"""finitune check and doctor on what is easily told wrongly: stray bytes, empty files, one file by two paths."""

from __future__ import annotations

import zlib
from pathlib import Path
from struct import pack

import numpy as np
import pytest
from PIL import Image

from finitune.datasets.caption_files import MAX_CAPTION_BYTES
from finitune.files.writer import save_tensors
from finitune.machine.rules.variables import find_broken_allocator
from finitune.report import Level, Report
from finitune.verbs import check, doctor


def checked(*paths: Path, **options: object) -> Report:
    return check.run(check.Request(paths=paths, **options))  # type: ignore[arg-type]


def picture(path: Path, seed: int = 0) -> Path:
    noise = np.random.default_rng(seed).integers(0, 256, (96, 96, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    return path


def subjects(report: Report, code: str) -> dict[str, str]:
    return {finding.subject: finding.message for finding in report.findings if finding.code == code}


def test_dat_04_and_dat_05_each_odd_picture_is_told_by_its_kind(tmp_path: Path):
    whole = Image.open(picture(tmp_path / "plain.png"))
    layer = whole.convert("RGBA")
    layer.putalpha(Image.new("L", whole.size, 0))
    layer.save(tmp_path / "clear.png")
    whole.convert("P").save(tmp_path / "palette.png", transparency=0)
    whole.save(tmp_path / "moving.webp", save_all=True, append_images=[whole.rotate(90)])
    whole.convert("CMYK").save(tmp_path / "print.jpg")
    Image.fromarray(np.arange(96 * 96, dtype=np.uint16).reshape(96, 96)).save(tmp_path / "deep.png")
    report = checked(tmp_path)
    told = subjects(report, "PICTURE-NOTE")
    assert report.ok and set(told) == {"transparent", "several frames", "CMYK", "16 bits"}
    names = {"transparent": "clear.png", "several frames": "moving.webp", "CMYK": "print.jpg", "16 bits": "deep.png"}
    assert all(name in told[kind] for kind, name in names.items()) and "more file" not in str(told)


def test_dat_01_a_zero_byte_is_no_other_encoding_and_is_not_mended(tmp_path: Path):
    picture(tmp_path / "a.png")
    (tmp_path / "a.txt").write_bytes(b"sks,\0hat")
    report = checked(tmp_path, fix=True, yes=True)
    (finding,) = (one for one in report.findings if one.code == "CAPTION-ENCODING")
    assert finding.evidence["mended"] == "sks,hat" and finding.remedy == "Take the zero bytes out."
    assert (tmp_path / "a.txt").read_bytes() == b"sks,\0hat"


def test_utf_16_without_a_mark_is_still_guessed(tmp_path: Path):
    picture(tmp_path / "a.png")
    (tmp_path / "a.txt").write_bytes("a hat of straw, on a chair".encode("utf-16-le"))
    (finding,) = (one for one in checked(tmp_path).findings if one.code == "CAPTION-ENCODING")
    assert finding.evidence["guess"] == "utf_16_le"


def test_a_caption_of_megabytes_is_refused_unread(tmp_path: Path):
    picture(tmp_path / "a.png")
    (tmp_path / "a.txt").write_bytes(b"x" * (MAX_CAPTION_BYTES + 1))
    assert list(subjects(checked(tmp_path), "CAPTION-TOO-LARGE")) == [str(tmp_path / "a.txt")]
    (tmp_path / "a.txt").write_bytes(b"x" * MAX_CAPTION_BYTES)
    assert checked(tmp_path).ok


def test_a_file_without_tensors_is_an_error(tmp_path: Path):
    save_tensors(tmp_path / "none.safetensors", {})
    report = checked(tmp_path / "none.safetensors")
    assert not report.ok and list(subjects(report, "FILE-NO-TENSORS")) == [str(tmp_path / "none.safetensors")]


def test_what_is_found_by_two_paths_is_told_and_mended_once(tmp_path: Path):
    folder = tmp_path / "data"
    folder.mkdir()
    picture(folder / "a.png")
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbfa hat")
    picture(folder / "b.png", 1)
    (folder / "b.png").write_bytes((folder / "b.png").read_bytes()[:900])
    config = tmp_path / "data.toml"
    config.write_text(f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = '{folder}'\n")
    report = checked(folder, config, fix=True, yes=True)
    damaged = [one for one in report.findings if one.code == "PICTURE-TRUNCATED"]
    done = [one for one in report.findings if one.code == "FIX-DONE"]
    assert len(damaged) == len(done) == 1 and (folder / "a.txt").read_bytes() == b"a hat"
    assert (folder / "a.txt.orig").read_bytes() == b"\xef\xbb\xbfa hat"


def test_json_that_is_no_configuration_is_not_told_to_be_called_json(tmp_path: Path):
    (tmp_path / "x.json").write_text("{}")
    (message,) = subjects(checked(tmp_path / "x.json"), "FILE-TEXT").values()
    assert "Did you mean" not in message


def test_a_folder_that_is_missing_is_not_told_as_no_data_sets_too(tmp_path: Path):
    config = tmp_path / "train.toml"
    config.write_text(
        'pretrained_model_name_or_path = "pico-anima"\nnetwork_module = "networks.lora_anima"\nnetwork_dim = 4\n'
        f'output_dir = "{tmp_path}/out"\nmax_train_steps = 2\ntrain_data_dir = "nowhere"\nlearning_rate = 1e-4\n'
    )
    report = checked(config)
    assert subjects(report, "DATASET-FOLDER-MISSING") and not subjects(report, "DATASET-NONE")


def test_a_card_on_which_fp16_goes_wrong_comes_with_what_is_right():
    (finding,) = (one for one in checked(Path("anima"), gpu="T4").findings if one.code == "FP16-GOES-WRONG")
    assert "planned-half" in finding.remedy and "fp32" in finding.remedy


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ("max_split_size_mb=128", "max_split_size_mb=128"),
        ("expandable_segments:True,foo", "foo"),
        ("max_split_size_mb:", "max_split_size_mb:"),
        ("expandable_segments:True,", None),
        ("expandable_segments:True,roundup_power2_divisions:[256:1,512:2]", None),
    ],
)
def test_settings_at_which_torch_aborts_are_told_before_it_is_imported(
    monkeypatch: pytest.MonkeyPatch, settings: str, part: str | None
):
    assert find_broken_allocator({"PYTORCH_CUDA_ALLOC_CONF": settings}) == (
        ("PYTORCH_CUDA_ALLOC_CONF", part) if part else None
    )
    if part:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
        (finding,) = doctor.run(doctor.Request(quick=True)).findings
        assert finding.level is Level.ERROR and finding.code == "ALLOCATOR-SETTING-BROKEN"


@pytest.mark.parametrize("count", [0, 1, -3, 65])
def test_a_count_of_processes_is_refused_before_anything_is_measured(count: int):
    report = doctor.run(doctor.Request(distributed=count))
    assert [finding.code for finding in report.findings] == ["DISTRIBUTED-COUNT"] and report.exit_code == 2


def test_dat_07_a_picture_that_unpacks_a_huge_text_is_named(tmp_path: Path):
    data = picture(tmp_path / "a.png").read_bytes()
    body = b"workflow\0\0" + zlib.compress(b"x" * (3 << 20))
    text = pack(">I", len(body)) + b"zTXt" + body + pack(">I", zlib.crc32(b"zTXt" + body))
    at = data.index(b"IDAT") - 4
    (tmp_path / "a.png").write_bytes(data[:at] + text + data[at:])
    assert list(subjects(checked(tmp_path), "PICTURE-TEXT-CHUNK")) == [str(tmp_path / "a.png")]
