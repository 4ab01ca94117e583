"""Pictures that look the same: the quick comparison against the slow one, and what counts as alike."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from finitune.datasets.near_duplicates import (
    MAX_FLAT_DEVIATION,
    MAX_HASH_DISTANCE,
    MIN_THUMBNAIL_CORRELATION,
    NearDuplicateFinder,
    compute_hash_signs,
    group_near_duplicates,
    iterate_near_duplicates,
    make_grey_thumbnail,
)
from finitune.datasets.picture_files import read_picture, read_pillow_picture
from tests.picture_files import noise_picture, saved


def scene(seed: int, size: tuple[int, int] = (160, 120)) -> Image.Image:
    """A smooth picture unlike that of any other seed."""
    blobs = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return Image.fromarray(blobs).resize(size, Image.Resampling.BICUBIC)


def greys(*pictures: Image.Image) -> np.ndarray:
    return np.array([make_grey_thumbnail(picture) for picture in pictures], np.uint8)


def slow_bits(grey: np.ndarray) -> list[bool]:
    """The hash of one picture by the definition of the cosine transform, a sum for each bit."""
    values = grey.astype(float)
    sums = [
        sum(
            values[y, x] * math.cos(math.pi / 32 * (y + 0.5) * v) * math.cos(math.pi / 32 * (x + 0.5) * u)
            for y in range(32)
            for x in range(32)
        )
        for v in range(8)
        for u in range(8)
    ]
    return [one > np.median(sums[1:]) for one in sums]


def slow_pairs(small: np.ndarray) -> list[tuple[int, int]]:
    """Every pair looked at by itself."""
    found = []
    for one, other in combinations(range(len(small)), 2):
        if min(small[one].std(), small[other].std()) <= MAX_FLAT_DEVIATION:
            continue
        bits = sum(a != b for a, b in zip(slow_bits(small[one]), slow_bits(small[other]), strict=True))
        likeness = np.corrcoef(small[one].ravel(), small[other].ravel())[0, 1]
        if bits <= MAX_HASH_DISTANCE and likeness >= MIN_THUMBNAIL_CORRELATION:
            found.append((one, other))
    return found


def test_the_quick_comparison_is_the_slow_one():
    pictures = [scene(0), scene(1), scene(0).resize((80, 60)), scene(2), Image.new("RGB", (9, 9)), scene(1)]
    small = greys(*pictures)
    quick = compute_hash_signs(small[:2]) > 0
    assert quick.tolist() == [slow_bits(grey) for grey in small[:2]]
    assert sorted(iterate_near_duplicates(small)) == slow_pairs(small) == [(0, 2), (1, 5)]


CHANGES = {
    "halved": lambda picture: picture.resize((80, 60)),
    "enlarged": lambda picture: picture.resize((400, 300), Image.Resampling.LANCZOS),
    "brighter": lambda picture: ImageEnhance.Brightness(picture).enhance(1.15),
    "paler": lambda picture: ImageEnhance.Contrast(picture).enhance(0.8),
    "cropped by a hair": lambda picture: picture.crop((1, 1, 159, 119)),
    "grey": lambda picture: picture.convert("L"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_copy_is_alike(change: str):
    small = greys(scene(1), scene(2), CHANGES[change](scene(1)))
    assert group_near_duplicates(small) == [[0, 2]]


def test_many_pictures_of_different_things_are_apart():
    small = greys(*(scene(seed, (48, 40)) for seed in range(300)))
    assert group_near_duplicates(small) == []
    assert (
        group_near_duplicates(np.zeros((0, 32, 32), np.uint8)) == []
        and group_near_duplicates(np.zeros((2, 32, 32), np.uint8)) == []
    )


def test_likes_of_likes_are_one_group():
    steps = [ImageEnhance.Brightness(scene(3)).enhance(1 + 0.02 * n) for n in range(4)]
    assert group_near_duplicates(greys(*steps, scene(4))) == [[0, 1, 2, 3]]


def test_identical_files_are_told_elsewhere(tmp_path: Path):
    paths = [saved(tmp_path / name, scene(5)) for name in ("a.png", "b.png")]
    paths.append(saved(tmp_path / "c.jpg", scene(5), quality=95))
    looks = NearDuplicateFinder()
    for path in paths:
        looks(path, *read_pillow_picture(path))
    (finding,) = looks.findings({path: path.name for path in paths})
    assert (finding.code, finding.evidence["first"]) == ("PICTURE-ALIKE", ["a.png = c.jpg"])


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "LA", "P", "1", "CMYK", "I;16"])
def test_a_look_is_the_picture_that_is_read(tmp_path: Path, mode: str):
    """The quick way for plain pictures against `read_picture`."""
    image = Image.new("I;16", (8, 6), 300) if mode == "I;16" else noise_picture().convert(mode)
    path = saved(tmp_path / ("a.tiff" if mode == "CMYK" else "a.png"), image)
    seen, notes = read_pillow_picture(path, "red")
    picture = read_picture(path, "red")
    assert notes == picture.notes and (np.asarray(seen.convert("RGB")) == picture.pixels).all()
