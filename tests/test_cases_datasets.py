"""Data sets from the field (DAT-01 to DAT-11): each with the values that are right."""

from __future__ import annotations

import struct
import unicodedata
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms, features

from finitune.config.datasets import DatasetConfig, Subset, resolve_datasets
from finitune.datasets.caption_files import read_caption
from finitune.datasets.dataset_scan import scan_datasets, verify_pictures
from finitune.datasets.picture_files import read_picture, read_picture_size
from finitune.errors import FileError
from finitune.importers.kohya_folders import scan_kohya_folder
from finitune.progress import SilentProgress
from finitune.report import Level
from tests.picture_files import captions, chunk, found, noise_picture, png, saved, scanned, written

NFC, NFD = (unicodedata.normalize(form, "\u00e9") for form in ("NFC", "NFD"))


def refusal(path: Path) -> FileError:
    with pytest.raises(FileError) as error:
        read_picture(path)
    return error.value


ENCODED = {
    "cp1252": (b"girl\x92s hat", 4, "girl\u2019s hat"),
    "shift_jis": (bytes.fromhex("93fa967b"), 0, "日本"),
    "gb18030": ("1girl, 长发".encode("gb18030"), 7, "1girl, 长发"),
    "utf-8, cut off": (b"a \xf0\x9f", 2, "a "),
    "utf_16": ("a girl".encode("utf-16"), 0, "a girl"),
    "utf_16_le": ("a girl".encode("utf-16-le"), 1, "a girl"),
}


@pytest.mark.parametrize("guess", ENCODED)
def test_dat_01_a_caption_that_is_not_utf8_is_named_with_its_byte(tmp_path: Path, guess: str):
    data, at, mended = ENCODED[guess]
    path = written(tmp_path / "a.txt", data)
    with pytest.raises(FileError) as error:
        read_caption(path)
    evidence = error.value.evidence
    assert (error.value.code, error.value.subject) == ("CAPTION-ENCODING", str(path))
    assert (evidence["at_byte"], evidence["guess"], evidence["mended"]) == (at, guess, mended)
    assert path.read_bytes() == data


def test_dat_01_a_byte_is_counted_from_the_beginning_of_the_file(tmp_path: Path):
    with pytest.raises(FileError) as error:
        read_caption(written(tmp_path / "a.txt", b"\xef\xbb\xbfgirl\x92s hat"))
    assert error.value.evidence["at_byte"] == 7


def test_dat_01_bytes_of_no_encoding_and_long_ones(tmp_path: Path):
    with pytest.raises(FileError) as error:
        read_caption(written(tmp_path / "a.txt", b"\xff\x00\x81"))
    assert (error.value.evidence["guess"], error.value.remedy) == ("", "Save it as UTF-8.")
    with pytest.raises(FileError) as error:
        read_caption(written(tmp_path / "b.txt", b"girl\x92s hat, " * 500))
    assert len(str(error.value.evidence["mended"])) == 200


def test_dat_01_every_bad_file_of_a_folder_is_listed_and_good_ones_are_not_touched(tmp_path: Path):
    texts = {"a": b"girl\x92s hat", "b": "caf\u00e9".encode(), "c": bytes.fromhex("93fa967b")}
    for stem, text in texts.items():
        saved(tmp_path / f"{stem}.png")
        written(tmp_path / f"{stem}.txt", text)
    result = scanned(tmp_path)
    listed = [finding.subject for finding in result.findings if finding.code == "CAPTION-ENCODING"]
    assert listed == [str(tmp_path / "a.txt"), str(tmp_path / "c.txt")]
    assert captions(result)["b.png"] == "caf\u00e9"


@pytest.mark.parametrize(
    ("data", "text", "codes"),
    [
        (b"\xef\xbb\xbfa cat\r\nsecond\rthird\n", "a cat\nsecond\nthird", []),
        (
            "caf\u00c3\u00a9, girl\u00e2\u20ac\u2122s".encode(),
            "caf\u00c3\u00a9, girl\u00e2\u20ac\u2122s",
            ["CAPTION-MOJIBAKE"],
        ),
        ("na\u00efve \u201ccaf\u00e9\u201d, 日本".encode(), "na\u00efve \u201ccaf\u00e9\u201d, 日本", []),
        (b"a\tb\x07", "a\tb\x07", ["CAPTION-CONTROL"]),
        ("a \ufffd b".encode(), "a \ufffd b", ["CAPTION-LOST-CHARACTERS"]),
        (b" \r\n", "", ["CAPTION-EMPTY"]),
    ],
)
def test_dat_01_what_is_odd_in_a_caption_is_told(tmp_path: Path, data: bytes, text: str, codes: list[str]):
    caption = read_caption(written(tmp_path / "a.txt", data))
    assert caption.text == text and [finding.code for finding in caption.findings] == codes
    if codes == ["CAPTION-MOJIBAKE"]:
        assert caption.findings[0].evidence["mended"] == "caf\u00e9, girl\u2019s"


@pytest.mark.parametrize("ending", ["jpg", "png"])
def test_dat_03_the_size_is_that_of_the_turned_picture(tmp_path: Path, ending: str):
    path = saved(tmp_path / "img" / f"a.{ending}", noise_picture(80, 40), orientation=6)
    assert read_picture_size(path) == (40, 80) and read_picture(path).pixels.shape == (80, 40, 3)
    assert read_picture_size(saved(tmp_path / f"b.{ending}", noise_picture(80, 40), orientation=9)) == (80, 40)
    result = scanned(tmp_path / "img")
    assert result.examples[0][0].size == (40, 80)
    assert found(result, "PICTURE-TURNED").evidence == {"count": 1, "first": [f"img/a.{ending}"]}


@pytest.mark.parametrize(("mask", "fits"), [((40, 80), True), ((20, 40), True), ((80, 40), False)])
def test_dat_03_a_mask_must_be_turned_as_its_picture_is(tmp_path: Path, mask: tuple[int, int], fits: bool):
    saved(tmp_path / "img" / "a.jpg", noise_picture(80, 40), orientation=6)
    saved(tmp_path / "mask" / "a.png", Image.new("L", mask))
    result = scanned(Subset(image_dir=tmp_path / "img", conditioning_data_dir=tmp_path / "mask"))
    shapes = [finding for finding in result.findings if finding.code == "MASK-SHAPE"]
    assert (not shapes) is fits
    assert fits or shapes[0].remedy.startswith("Turn it")


def test_dat_04_transparency_shows_the_stated_colour(tmp_path: Path):
    red = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    picture = read_picture(saved(tmp_path / "rgba.png", red))
    assert picture.pixels.min() == 255 and picture.alpha is not None and picture.alpha.max() == 0
    assert read_picture(tmp_path / "rgba.png", "black").pixels.max() == 0
    grey = Image.new("LA", (4, 4), (100, 51))
    assert read_picture(saved(tmp_path / "la.png", grey)).pixels[0, 0].tolist() == [224] * 3
    palette = Image.new("P", (2, 1))
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.putpixel((1, 0), 1)
    assert read_picture(saved(tmp_path / "p.png", palette)).pixels.tolist() == [[[255, 0, 0], [0, 0, 255]]]
    for transparency in (b"\0\xff", 0):
        clear = read_picture(saved(tmp_path / "pt.png", palette, transparency=transparency))
        assert clear.pixels.tolist() == [[[255] * 3, [0, 0, 255]]] and clear.alpha is not None
        assert clear.alpha.tolist() == [[0, 1]]
    bits = Image.new("1", (2, 1))
    bits.putpixel((1, 0), 1)
    assert read_picture(saved(tmp_path / "bit.png", bits)).pixels.tolist() == [[[0] * 3, [255] * 3]]


@pytest.mark.parametrize("ending", ["gif", "webp", "png"])
def test_dat_04_the_first_frame_of_an_animation_is_taken_and_told(tmp_path: Path, ending: str):
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    options = {"lossless": True} if ending == "webp" else {}
    path = saved(tmp_path / f"a.{ending}", frames[0], save_all=True, append_images=frames[1:], **options)
    picture = read_picture(path)
    assert picture.pixels.reshape(-1, 3).tolist() == [[255, 0, 0]] * 16
    assert [str(note) for note in picture.notes] == ["several frames: the first one is taken"]
    note = found(verify_pictures(scanned(tmp_path).examples[0], SilentProgress()), "PICTURE-NOTE")
    assert note.level is Level.NOTE and f"a.{ending}" in note.message


def wide_profile() -> bytes:
    """A made profile like Display P3's: sRGB's own, with red and green changed places, under another name."""
    data = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    named = data.replace("sRGB".encode("utf-16-be"), "wide".encode("utf-16-be")).replace(
        b"sRGB built-in", b"wide built-in"
    )
    return named.replace(b"rXYZ", b"tXYZ").replace(b"gXYZ", b"rXYZ").replace(b"tXYZ", b"gXYZ")


def test_dat_04_a_colour_profile_is_turned_into_srgb(tmp_path: Path):
    if not features.check("littlecms2"):
        pytest.skip("this Pillow has no LittleCMS")
    path = saved(tmp_path / "a.png", Image.new("RGB", (2, 2), (255, 0, 0)), icc_profile=wide_profile())
    picture = read_picture(path)
    assert np.abs(picture.pixels[0, 0].astype(int) - [0, 255, 0]).max() <= 2
    assert str(picture.notes[0]).startswith("colour profile: turned from wide")
    alpha = saved(tmp_path / "b.png", Image.new("RGBA", (1, 1), (255, 0, 0, 0)), icc_profile=wide_profile())
    assert read_picture(alpha).pixels.tolist() == [[[255, 255, 255]]]


def test_dat_05_sixteen_bits_are_scaled_not_cut(tmp_path: Path):
    values = (0, 256, 32768, 65535)
    grey = read_picture(written(tmp_path / "g.png", png((4, 1), 16, 0, b"\0" + struct.pack(">4H", *values))))
    assert grey.pixels[0].tolist() == [[v] * 3 for v in (0, 1, 128, 255)]
    assert [str(note) for note in grey.notes] == ["16 bits: divided by 257"]
    colour = read_picture(written(tmp_path / "c.png", png((1, 1), 16, 2, b"\0" + struct.pack(">3H", *values[1:]))))
    assert colour.pixels.tolist() == [[[1, 128, 255]]] and colour.pixels.dtype == np.uint8
    assert str(colour.notes[0]).startswith("16 bits")


def test_dat_05_cmyk_is_turned_into_rgb_whoever_inverted_it(tmp_path: Path):
    path = saved(tmp_path / "a.jpg", Image.new("CMYK", (8, 8), (255, 0, 0, 0)), quality=100)
    picture = read_picture(path)
    assert picture.pixels.shape == (8, 8, 3) and [str(note) for note in picture.notes] == ["CMYK: turned into RGB"]
    assert np.abs(picture.pixels[0, 0].astype(int) - [0, 255, 255]).max() <= 2
    exact = read_picture(saved(tmp_path / "a.tiff", Image.new("CMYK", (1, 1), (0, 51, 255, 102))))
    assert exact.pixels[0, 0].tolist() == [153, 122, 0]  # 255 (1 - C)(1 - K)


@pytest.mark.parametrize("side", [20_000, 10_000])
def test_dat_07_a_bomb_is_refused_by_its_header(tmp_path: Path, side: int):
    path = written(tmp_path / "a.png", png((side, side), 8, 2, b"")[:65])
    error = refusal(path)
    assert error.code == "PICTURE-BOMB" and "scale it down" in error.remedy
    assert error.evidence == {"size": (side, side), "pixels": side**2, "limit_pixels": 89_478_485}
    assert Image.MAX_IMAGE_PIXELS == 89_478_485
    assert found(scanned(tmp_path), "PICTURE-BOMB").subject == str(path)


@pytest.mark.parametrize(
    "start", [(b"zTXt", b"workflow\0\0"), (b"iCCP", b"profile\0\0"), (b"iTXt", b"workflow\0\1\0\0\0")]
)
def test_dat_07_a_huge_text_is_told_by_name(tmp_path: Path, start: tuple[bytes, bytes]):
    kind, keyword = start
    extra = chunk(kind, keyword + zlib.compress(b"a" * (2 << 20)))
    assert len(extra) < 4096
    path = written(tmp_path / "a.png", png((1, 1), 8, 2, b"\0abc", extra=extra))
    error = refusal(path)
    assert (error.code, error.subject) == ("PICTURE-TEXT-CHUNK", str(path)) and "exiftool" in error.remedy
    assert read_picture_size(path) == (1, 1)


def test_dat_09_names_are_matched_by_their_whole_stem(tmp_path: Path):
    for name in ("a.b.png", "IMG.JPG", "x[1].png", "日本.png", f"{NFC}.png", "CON.png"):
        saved(tmp_path / name)
        written((tmp_path / name).with_suffix(".txt"), name)
    written(tmp_path / "a.txt", "another")
    result = scanned(tmp_path)
    assert captions(result) == {example.path.name: example.path.name for example in result.examples[0]}
    assert len(result.examples[0]) == 6
    assert found(result, "CAPTION-WITHOUT-PICTURE").evidence["first"] == ["a.txt"]
    assert found(result, "NAME-RESERVED").evidence["first"] == ["CON.png"]


def test_dat_09_names_that_clash_are_told(tmp_path: Path):
    for name in (f"{NFC}.png", f"{NFD}.png", "A.png", "a.png", "a.jpg", "b .png", "c.png.", f"{'l' * 240}.png"):
        saved(tmp_path / "img" / name, format="PNG")
    if len(list((tmp_path / "img").iterdir())) < 8:
        pytest.skip("this file system takes some of the names for one")
    result = scanned(tmp_path / "img")
    told = {finding.code: finding.evidence["first"] for finding in result.findings if finding.code.startswith("NAME")}
    assert told == {
        "NAME-TWINS": [f"{NFD}.png = {NFC}.png"],
        "NAME-CASE": ["A.png = a.png"],
        "NAME-STEM-END": ["b .png"],
        "NAME-END": ["c.png."],
        "NAME-LONG": [f"{'l' * 240}.png"],
    }
    assert found(result, "PICTURE-SAME-STEM").evidence["first"] == ["a.jpg = a.png"]
    assert len({example.name for example in result.examples[0]}) == 7


def test_dat_09_a_caption_in_the_other_unicode_form_is_found(tmp_path: Path):
    saved(tmp_path / f"{NFC}.png")
    written(tmp_path / f"{NFD}.txt", "accent")
    result = scanned(tmp_path)
    assert captions(result) == {f"{NFC}.png": "accent"} and result.findings == ()


def test_dat_09_a_name_that_is_no_text_is_left_out(tmp_path: Path):
    try:
        saved(tmp_path / "a\udcff.png")
    except OSError:
        pytest.skip("this file system takes no such name")
    saved(tmp_path / "b.png")
    result = scanned(tmp_path)
    finding = found(result, "NAME-NOT-TEXT")
    assert finding.level is Level.ERROR and finding.message.isascii() and len(result.examples[0]) == 1


def test_dat_11_the_layout_of_kohya(tmp_path: Path):
    img = tmp_path / "img"
    for folder in ("10_sks girl", "2_a_b", "3_", "CROP_old", "0_x", "10_a/10_b"):
        saved(img / folder / "a.png", noise_picture(seed=len(folder)))
    (img / "empty").mkdir()
    (img / "loop").symlink_to(img / "loop")
    part, findings = scan_kohya_folder(img, {})
    ignored = {Path(finding.subject).name for finding in findings if finding.code == "DATASET-FOLDER-IGNORED"}
    assert {"0_x", "CROP_old", "empty"} <= ignored
    assert [finding.code for finding in findings].count("DATASET-FOLDER-NESTED") == 1
    result = scan_datasets(resolve_datasets(DatasetConfig(**part)), SilentProgress())
    shown = {example.name: (example.repeats, example.caption) for example in result.examples[0]}
    assert shown == {"10_sks girl/a.png": (10, "sks girl"), "2_a_b/a.png": (2, "a_b"), "3_/a.png": (3, "")}


def test_dat_11_a_numbered_folder_in_place_of_its_parent(tmp_path: Path):
    inner = saved(tmp_path / "img" / "10_sks" / "a.png").parent
    finding = found(scan_kohya_folder(inner, {})[1], "DATASET-FOLDER-LEVEL")
    assert finding.level is Level.ERROR and f"train_data_dir = '{inner.parent}'" in finding.remedy
    typo = found(scanned(tmp_path / "imgs"), "DATASET-FOLDER-MISSING")
    assert "Did you mean 'img'?" in typo.remedy


def test_dat_11_the_wrong_level_of_image_dir(tmp_path: Path):
    img = tmp_path / "img"
    saved(img / "10_sks" / "a.png")
    finding = found(scanned(img), "DATASET-EMPTY")
    assert finding.evidence["first"] == ["10_sks"]
    assert f"image_dir = '{img / '10_sks'}', num_repeats = 10" in finding.remedy
    assert f"train_data_dir = '{img}'" in finding.remedy
    saved(img / "b.png")
    assert found(scanned(img), "DATASET-FOLDER-IGNORED").evidence["first"] == ["10_sks"]
