"""`finitune check` on pictures and captions: the cases of the field (DAT-01 to DAT-11), and all that can be mended."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from finitune.report import Finding, Level, Report
from finitune.verbs import check
from finitune.verbs.check.request import Request
from tests.picture_files import noise_picture, png, saved, written
from tests.test_look_alikes import scene


def checked(*paths: Path, **options: Any) -> Report:
    return check.run(Request(paths=paths, **options))


def told(report: Report, code: str) -> Finding:
    (finding,) = [finding for finding in report.findings if finding.code == code]
    return finding


def codes(report: Report) -> set[str]:
    return {finding.code for finding in report.findings}


def dataset(folder: Path, count: int = 3, **captions: bytes) -> Path:
    """A folder of small scenes, each with a caption."""
    for number in range(count):
        saved(folder / f"{number}.png", scene(number, (96, 64)))
        written(folder / f"{number}.txt", captions.get(f"c{number}", f"sks, thing {number}"))
    return folder


def test_a_good_folder_has_no_fault(tmp_path: Path):
    report = checked(dataset(tmp_path / "10_sks", 4))
    assert report.ok and {f.level for f in report.findings} <= {Level.NOTE, Level.WARNING}
    assert codes(report) <= {"PICTURE-ENLARGED"}
    figures = report.figures
    assert (figures["pictures"], figures["appearances"], figures["captions"]) == (4, 40, 4)
    assert (figures["steps_per_epoch"], figures["steps"], figures["epochs"]) == (40, 1600, 40)
    assert figures["enlarged"] == 4 and figures["largest_enlargement"] == pytest.approx(704 / 64)  # to 1024 x 704


def test_folders_with_repeats_and_a_dataset_toml(tmp_path: Path):
    dataset(tmp_path / "img" / "3_cat", 2)
    dataset(tmp_path / "img" / "1_dog", 1)
    report = checked(tmp_path / "img")
    assert (report.figures["pictures"], report.figures["appearances"]) == (3, 7)
    toml = written(
        tmp_path / "data.toml",
        "[general]\nresolution = 128\nbatch_size = 2\nenable_bucket = true\n[[datasets]]\n"
        "[[datasets.subsets]]\nimage_dir = 'img/3_cat'\nnum_repeats = 4\ncaption_extension = '.txt'\n",
    )
    report = checked(toml)
    assert report.ok and (report.figures["appearances"], report.figures["steps_per_epoch"]) == (8, 4)
    assert report.figures["effective_batch"] == 2


def test_dat_01_captions_of_other_encodings_are_mended(tmp_path: Path):
    data = {"c0": b"girl\x92s hat", "c1": "caf\u00e9".encode(), "c2": bytes.fromhex("93fa967b")}
    folder = dataset(tmp_path / "img", 4, **data)
    report = checked(folder)
    assert report.exit_code == 1
    guesses = {Path(f.subject).name: f.evidence["guess"] for f in report.findings if f.code == "CAPTION-ENCODING"}
    assert guesses == {"0.txt": "cp1252", "2.txt": "shift_jis"}
    mended = checked(folder, fix=True, yes=True)
    assert mended.ok and "CAPTION-ENCODING" not in codes(mended)
    assert (folder / "0.txt").read_text(encoding="utf-8") == "girl\u2019s hat"
    assert (folder / "2.txt").read_text(encoding="utf-8") == "\u65e5\u672c"
    assert (folder / "0.txt.orig").read_bytes() == data["c0"]
    assert (folder / "1.txt").read_bytes() == data["c1"] and not (folder / "1.txt.orig").exists()


def test_marks_and_line_ends_are_mended(tmp_path: Path):
    folder = dataset(tmp_path, 3, c0=b"\xef\xbb\xbfsks, a\r\n", c1=b"sks, b\r\nmore\r\n", c2=b"sks\ta, b, B")
    report = checked(folder)
    assert report.ok
    assert {"CAPTION-BOM", "CAPTION-CRLF", "CAPTION-LINES", "CAPTION-CONTROL", "CAPTION-TAG-TWICE"} <= codes(report)
    again = checked(folder, fix=True, yes=True)
    assert not {"CAPTION-BOM", "CAPTION-CRLF"} & codes(again)
    assert (folder / "0.txt").read_bytes() == b"sks, a\n" and (folder / "1.txt").read_bytes() == b"sks, b\nmore\n"


def test_dat_03_to_05_odd_pictures_are_told(tmp_path: Path):
    saved(tmp_path / "turned.jpg", scene(1, (200, 100)), orientation=6)
    saved(tmp_path / "clear.png", Image.new("RGBA", (200, 100), (255, 0, 0, 0)))
    saved(tmp_path / "moving.gif", scene(2, (200, 100)), save_all=True, append_images=[scene(3, (200, 100))])
    saved(tmp_path / "ink.jpg", scene(4, (200, 100)).convert("CMYK"))
    written(tmp_path / "deep.png", png((100, 100), 16, 0, b"".join(b"\0" + bytes(range(200)) for _ in range(100))))
    report = checked(tmp_path)
    kinds = {finding.subject for finding in report.findings if finding.code == "PICTURE-NOTE"}
    assert kinds == {"transparent", "several frames", "CMYK", "16 bits"}
    assert told(report, "PICTURE-TURNED").evidence["count"] == 1
    assert told(report, "DATASET-PICTURE-FLAT").evidence["first"] == [f"{tmp_path.name}/clear.png"]


def test_dat_07_damaged_pictures_and_bombs_are_errors(tmp_path: Path):
    whole = saved(tmp_path / "a.jpg", scene(1, (200, 200)), quality=95).read_bytes()
    written(tmp_path / "cut.jpg", whole[: len(whole) // 2])
    written(tmp_path / "bomb.png", png((20_000, 20_000), 8, 2, b"")[:65])
    written(tmp_path / "page.png", "<!DOCTYPE html><html>")
    report = checked(tmp_path)
    assert report.exit_code == 1
    found = {f.code: Path(f.subject).name for f in report.findings if f.level is Level.ERROR}
    assert found == {
        "PICTURE-TRUNCATED": "cut.jpg",
        "PICTURE-BOMB": "bomb.png",
        "PICTURE-NOT-A-PICTURE": "page.png",
    }


def test_a_misnamed_picture_is_renamed_with_its_caption(tmp_path: Path):
    folder = dataset(tmp_path / "img", 2)
    saved(folder / "x.jpg", scene(7), format="PNG")
    written(folder / "x.txt", "sks, x")
    report = checked(folder)
    assert told(report, "PICTURE-EXTENSION").evidence["count"] == 1
    again = checked(folder, fix=True, yes=True)
    assert "PICTURE-EXTENSION" not in codes(again) and again.figures["captions"] == 3
    assert (folder / "x.png").exists() and (folder / "x.jpg.orig").exists() and not (folder / "x.jpg").exists()


def test_a_misnamed_picture_of_a_metadata_file_is_left(tmp_path: Path):
    saved(tmp_path / "img" / "x.jpg", scene(7), format="PNG")
    written(tmp_path / "meta.json", '{"x.jpg": {"caption": "x"}}')
    toml = f"[[datasets]]\n[[datasets.subsets]]\nimage_dir = '{tmp_path / 'img'}'\n"
    toml = written(tmp_path / "data.toml", f"{toml}metadata_file = '{tmp_path / 'meta.json'}'\n")
    request = Request(paths=(toml,))
    assert "PICTURE-EXTENSION" in codes(check.run(request)) and not request.mendings


def test_duplicates_near_and_exact(tmp_path: Path):
    folder = dataset(tmp_path, 3)
    scene(0, (96, 64)).resize((192, 128)).save(folder / "big.jpg", quality=90)
    (folder / "copy.png").write_bytes((folder / "1.png").read_bytes())
    report = checked(folder)
    assert told(report, "PICTURE-ALIKE").evidence["first"] == [f"{folder.name}/0.png = {folder.name}/big.jpg"]
    assert told(report, "PICTURE-IDENTICAL").evidence["first"] == [f"{folder.name}/1.png = {folder.name}/copy.png"]


def test_dat_09_names_that_clash(tmp_path: Path):
    nfc, nfd = (unicodedata.normalize(form, "\u00e9") for form in ("NFC", "NFD"))
    for number, name in enumerate((f"{nfc}.png", f"{nfd}.png", "A.png", "a.png", "a.jpg", "CON.png", "b .png")):
        saved(tmp_path / name, scene(number))
    if len(list(tmp_path.iterdir())) < 7:
        pytest.skip("this file system takes some of the names for one")
    found = codes(checked(tmp_path))
    assert {"NAME-TWINS", "NAME-CASE", "NAME-RESERVED", "NAME-STEM-END", "PICTURE-SAME-STEM"} <= found


def test_dat_11_no_pictures_where_they_were_looked_for(tmp_path: Path):
    dataset(tmp_path / "data" / "sks")
    report = checked(tmp_path / "data")
    finding = told(report, "DATASET-EMPTY")
    assert report.exit_code == 1 and "sks" in finding.message and "image_dir" in finding.remedy


def test_shapes_and_sizes(tmp_path: Path):
    saved(tmp_path / "strip.png", scene(1, (900, 100)))
    saved(tmp_path / "dot.png", scene(2, (40, 40)))
    report = checked(tmp_path)
    assert {"PICTURE-STRIPE", "PICTURE-TINY", "PICTURE-ENLARGED", "PICTURE-CUT"} <= codes(report)
    (table,) = [table for table in report.tables if table.title == "pictures that lose most"]
    assert table.rows[0][0].endswith("strip.png")


def test_a_word_that_most_captions_have(tmp_path: Path):
    folder = dataset(tmp_path / "img", 12, c3=b"thing 3", c5=b"a thing of 5")
    finding = told(checked(folder), "TRIGGER-MISSING")
    assert (finding.level, finding.subject, finding.evidence["count"]) == (Level.NOTE, "sks", 2)
    config = written(
        tmp_path / "train.toml",
        "[model]\npretrained_model_name_or_path = 'pico-anima'\n[saving]\noutput_dir = 'out'\n"
        f"trigger_phrase = 'sks, thing'\n[[datasets]]\n[[datasets.subsets]]\nimage_dir = '{folder}'\n",
    )
    finding = told(checked(config), "TRIGGER-MISSING")
    assert (finding.level, finding.evidence["count"]) == (Level.WARNING, 2)


def test_captions_beyond_the_tokenizers_limit_show_what_is_lost(tmp_path: Path):
    folder = dataset(tmp_path, 2, c1=b"word " * 400 + b"the end")
    report = checked(folder, model="pico-anima")
    cut = {finding.subject: finding for finding in report.findings if finding.code == "CAPTION-CUT"}
    assert set(cut) == {"qwen3", "t5"} and all(one.evidence["count"] == 1 for one in cut.values())
    assert "word" in cut["t5"].message and "CAPTION-CUT" not in codes(checked(folder))


def test_findings_are_sorted_by_harm_and_bounded(tmp_path: Path):
    for number in range(40):
        written(tmp_path / f"{number}.png", "<!DOCTYPE html><html>")
    saved(tmp_path / "good.png", scene(1))
    report = checked(tmp_path)
    levels = [list(Level).index(finding.level) for finding in report.findings]
    assert levels == sorted(levels)
    errors = [finding for finding in report.findings if finding.level is Level.ERROR]
    assert len(errors) == 21 and errors[-1].evidence["count"] == 40


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_caption_is_read_or_told_and_mended_rightly(tmp_path: Path, data: st.DataObject):
    text = bytearray("\ufeffsks, caf\u00e9 {a|b}, \u65e5\u672c\r\ntwo, two\n".encode())
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    folder = tmp_path / "img"
    for file in folder.glob("*.orig*") if folder.exists() else ():
        file.unlink()
    saved(folder / "a.png", noise_picture(80, 80))
    written(folder / "a.txt", bytes(text))
    before, request = codes(checked(folder)), Request(paths=(folder,), fix=True, yes=True)
    after = codes(check.run(request))
    assert not {mending.code for mending in request.mendings} & after
    assert ("CAPTION-ENCODING" in after) <= ("CAPTION-ENCODING" in before)
    if request.mendings:
        assert (folder / "a.txt").read_bytes().decode() and (folder / "a.txt.orig").read_bytes() == bytes(text)
