"""Pictures: their size without decoding, their pixels as seen, and a named reason where there are none."""

from __future__ import annotations

import io
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageFile, ImageOps, features

from finitune.datasets.picture_files import (
    MAX_PICTURE_PIXELS,
    TURNED_NOTE,
    DecodedPicture,
    list_picture_decoders,
    read_picture,
    read_picture_size,
)
from finitune.datasets.picture_formats import PICTURE_FORMAT_BY_EXTENSION, detect_picture_format
from finitune.errors import FileError, UsageError
from tests.picture_files import chunk, noise_picture, png, saved, written

KINDS = [".png", ".jpg", ".webp", ".tiff", *([".avif"] if features.check("avif") else [])]


def refused(path: Path, code: str) -> FileError:
    with pytest.raises(FileError) as error:
        read_picture(path)
    assert error.value.code == code and error.value.subject == str(path) and error.value.remedy
    assert str(path) in error.value.message
    return error.value


def told(picture: DecodedPicture) -> tuple[str, ...]:
    return tuple(map(str, picture.notes))


def by_pillow(path: Path) -> np.ndarray:
    """The slow, obvious twin for pictures without transparency."""
    with Image.open(path) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


@pytest.mark.parametrize("ending", KINDS)
@pytest.mark.parametrize("orientation", range(1, 10))
def test_a_picture_is_as_pillow_turns_it(tmp_path: Path, ending: str, orientation: int):
    if ending == ".avif" and orientation == 9:
        pytest.skip("AVIF holds turns, not numbers")
    path = saved(tmp_path / f"a{ending}", noise_picture(8, 5), orientation)
    twin = by_pillow(path)
    picture = read_picture(path)
    assert np.array_equal(picture.pixels, twin) and picture.alpha is None
    assert read_picture_size(path) == picture.size == twin.shape[1::-1] == ((5, 8) if 5 <= orientation <= 8 else (8, 5))
    assert any(note.what == TURNED_NOTE for note in picture.notes) is (2 <= orientation <= 8)


def test_exif_behind_the_pixels_of_a_png_counts(tmp_path: Path):
    exif = Image.Exif()
    exif[274] = 6
    path = written(tmp_path / "a.png", png((2, 1), 8, 2, b"\0\1\2\3\4\5\6", behind=chunk(b"eXIf", exif.tobytes()[6:])))
    assert read_picture_size(path) == read_picture(path).size == (1, 2)
    assert read_picture(path).pixels.tolist() == [[[1, 2, 3]], [[4, 5, 6]]]


@pytest.mark.parametrize(
    "ending",
    [
        ending
        for ending in PICTURE_FORMAT_BY_EXTENSION
        if PICTURE_FORMAT_BY_EXTENSION[ending] in list_picture_decoders()
    ],
)
def test_every_kind_is_measured_and_read(tmp_path: Path, ending: str):
    path = saved(tmp_path / f"a{ending.upper()}", noise_picture(7, 3))
    assert read_picture_size(path) == read_picture(path).size == (7, 3)
    assert read_picture(path).pixels.flags.writeable


def test_an_old_bitmap_is_measured(tmp_path: Path):
    core = struct.pack("<2sIHHI", b"BM", 26 + 8, 0, 0, 26) + struct.pack("<IHHHH", 12, 2, 1, 1, 24) + bytes(8)
    assert read_picture_size(written(tmp_path / "a.bmp", core)) == (2, 1)


@settings(max_examples=40)
@given(cut=st.integers(0, 10_000), flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), max_size=4))
@pytest.mark.parametrize("ending", [*KINDS, ".gif", ".bmp"])
def test_damage_never_escapes_as_anything_else(tmp_path_factory, ending: str, cut: int, flips: list[tuple[int, int]]):
    path = saved(tmp_path_factory.getbasetemp() / f"damaged{ending}", noise_picture(9, 9), orientation=None)
    data = bytearray(path.read_bytes())
    for place, bits in flips:
        data[place % len(data)] ^= bits
    path.write_bytes(data[: max(1, len(data) - cut % (2 * len(data)))] if cut % 3 == 0 else data)
    try:
        picture = read_picture(path)
    except FileError as error:
        assert error.code.startswith("PICTURE-") and error.remedy
    else:
        assert picture.pixels.shape[2] == 3 and picture.pixels.dtype == np.uint8


@pytest.mark.parametrize("ending", KINDS)
def test_a_picture_that_is_cut_off_is_named(tmp_path: Path, ending: str):
    path = saved(tmp_path / f"a{ending}", noise_picture(40, 40))
    path.write_bytes(path.read_bytes()[:-200])
    assert refused(path, "PICTURE-TRUNCATED").evidence["size_bytes"] == path.stat().st_size


FOREIGN = {
    "web page": b"<!DOCTYPE html><html>",
    "git-LFS pointer to 512 bytes": b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 512\n",
    "JSON": b'{"error": "not found"}',
    "video": b"\0\0\0\x18ftypmp42" + bytes(20),
    "Matroska": b"\x1aE\xdf\xa3" + bytes(20),
    "HEIC": b"\0\0\0\x18ftypheic" + bytes(20),
    "plain text": b"BMW, a car, driving",
    "safetensors": struct.pack("<Q", 2) + b"{}",
    "SVG": b'<?xml version="1.0"?><svg width="2" height="2"/>',
    "Photoshop": b"8BPS" + bytes(20),
    "unknown kind (it starts with 07 07": b"\7" * 40,
}


@pytest.mark.parametrize("what", FOREIGN)
def test_what_is_no_picture_is_told_for_what_it_is(tmp_path: Path, what: str):
    path = written(tmp_path / "a.bmp", FOREIGN[what])
    assert what in refused(path, "PICTURE-NOT-A-PICTURE").message
    with pytest.raises(FileError):
        read_picture_size(path)


def test_an_empty_file_and_an_empty_picture(tmp_path: Path):
    refused(written(tmp_path / "a.png", b""), "PICTURE-EMPTY")
    refused(written(tmp_path / "b.png", png((0, 4), 8, 2, b"")), "PICTURE-EMPTY")


def test_a_wrong_ending_is_a_note(tmp_path: Path):
    saved(tmp_path / "a.jpg").rename(tmp_path / "a.png")
    assert told(read_picture(tmp_path / "a.png")) == ("another kind than its name says: JPEG",)


def test_a_missing_picture_is_a_file_error(tmp_path: Path):
    with pytest.raises(FileError):
        read_picture(tmp_path / "none.png")


def test_pixels_lie_on_the_stated_colour(tmp_path: Path):
    values = np.array([[[255, 0, 0, 0], [0, 0, 255, 255], [10, 20, 30, 51]]], np.uint8)
    path = saved(tmp_path / "a.png", Image.fromarray(values))
    picture = read_picture(path, "#008000")
    assert picture.pixels.tolist() == [[[0, 128, 0], [0, 0, 255], [2, 106, 6]]]
    assert picture.alpha is not None and picture.alpha.dtype == np.float32
    assert picture.alpha.tolist() == [[0, 1, pytest.approx(0.2)]]
    assert told(picture) == ("transparent: 60 % of it, laid on #008000",)
    with pytest.raises(UsageError, match="'magenta'") as error:
        read_picture(path, "magneta")
    assert error.value.code == "BACKGROUND-UNKNOWN"


@settings(max_examples=20)
@given(alpha=st.integers(0, 255), grey=st.integers(0, 255), ground=st.integers(0, 255))
def test_laying_on_a_colour_is_pillows_to_one_level(tmp_path_factory, alpha: int, grey: int, ground: int):
    image = Image.new("RGBA", (1, 1), (grey, 255 - grey, 7, alpha))
    path = saved(tmp_path_factory.getbasetemp() / "layer.png", image)
    twin = Image.alpha_composite(Image.new("RGBA", (1, 1), (ground,) * 3), image).convert("RGB")
    pixels = read_picture(path, f"#{ground:02x}{ground:02x}{ground:02x}").pixels
    assert np.abs(pixels.astype(int) - np.asarray(twin)).max() <= 1


def test_a_profile_other_than_srgb_is_converted(tmp_path: Path):
    if not features.check("littlecms2"):
        pytest.skip("this Pillow has no LittleCMS")
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))
    image = Image.new("RGB", (2, 2), (10, 200, 30))
    same = read_picture(saved(tmp_path / "s.png", image, icc_profile=srgb.tobytes()))
    assert not same.notes and same.pixels[0, 0].tolist() == [10, 200, 30]
    unfit = read_picture(saved(tmp_path / "l.png", image, icc_profile=lab))
    assert "does not fit" in str(unfit.notes[0]) and unfit.pixels[0, 0].tolist() == [10, 200, 30]
    broken = read_picture(saved(tmp_path / "b.png", image, icc_profile=b"no profile"))
    assert told(broken) == ("colour profile: it cannot be read and is not used",)


def test_floats_are_scaled_and_must_be_finite(tmp_path: Path):
    values = np.array([[0, 0.5, 1, 1.5]], np.float32)
    picture = read_picture(saved(tmp_path / "a.tiff", Image.fromarray(values)))
    assert picture.pixels[0, :, 0].tolist() == [0, 128, 255, 255]
    assert told(picture) == ("floats: 0 .. 1 became 0 .. 255, 1 values beyond were cut",)
    values[0, 2:] = [np.nan, np.inf]
    error = refused(saved(tmp_path / "b.tiff", Image.fromarray(values)), "PICTURE-NONFINITE")
    assert (error.evidence["count"], error.evidence["first"]) == (2, (2, 0))


def test_lab_is_read_and_what_cannot_become_rgb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = saved(tmp_path / "a.tiff", Image.new("LAB", (2, 2), (255, 128, 128)))
    if features.check("littlecms2"):
        assert read_picture(path).pixels.min() >= 254

    def no_way(*_: object, **__: object):
        raise ValueError("conversion from LAB to RGB not supported")

    monkeypatch.setattr(Image.Image, "convert", no_way)
    assert refused(path, "PICTURE-MODE").evidence["mode"] == "LAB"


def test_pillows_own_settings_are_kept_and_its_warnings_become_notes(tmp_path: Path):
    before = (ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS, list(warnings.filters))
    apng = png((1, 1), 8, 0, b"\0\7", extra=chunk(b"acTL", struct.pack(">II", 0, 0)))
    picture = read_picture(written(tmp_path / "a.png", apng))
    assert picture.pixels.tolist() == [[[7, 7, 7]]]
    assert str(picture.notes[0]).startswith("Pillow: Invalid APNG")
    refused(written(tmp_path / "b.png", png((30_000, 30_000), 8, 0, b"")), "PICTURE-BOMB")
    assert before == (ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS, list(warnings.filters))


def test_the_limit_holds_where_pillows_was_lifted_or_lowered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = written(tmp_path / "a.png", png((20_000, 20_000), 8, 0, b""))
    assert Image.MAX_IMAGE_PIXELS == MAX_PICTURE_PIXELS
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert refused(path, "PICTURE-BOMB").evidence["limit_pixels"] == MAX_PICTURE_PIXELS
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 47)
    assert refused(saved(tmp_path / "b.gif"), "PICTURE-BOMB").remedy


def test_signatures_are_known_by_bytes():
    buffer = io.BytesIO()
    noise_picture().save(buffer, "WEBP")
    assert detect_picture_format(buffer.getvalue()[:32]) == "WEBP"
    assert detect_picture_format(b"RIFF\0\0\0\0WAVE") is None and detect_picture_format(b"") is None
    assert detect_picture_format(b"\xff\x0a" + bytes(8)) == "JXL"
