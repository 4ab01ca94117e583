"""Buckets: the list against a slow twin and goldens, and the laws of a placement."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from finitune.config.datasets import ResolvedDataset, ResolvedSubset
from finitune.datasets.buckets import (
    BucketPlacements,
    build_bucket_table,
    check_bucket_sides,
    compute_bucket_sizes,
    compute_cropped_share,
    compute_enlargement,
    place_examples,
    place_in_bucket,
)
from finitune.datasets.items import BucketPlacement, PixelSize, TrainingExample
from finitune.datasets.transforms import downscale_by_area, transform_mask, transform_pixels
from finitune.errors import UsageError
from finitune.report import Level

SIDES = st.integers(16, 3000)


def options(**named: object) -> ResolvedDataset:
    return ResolvedDataset.model_validate(named)


def example(size: PixelSize, name: str = "a.png", repeats: int = 1) -> TrainingExample:
    return TrainingExample(Path(name), name, size, "", ResolvedSubset(), repeats)


def sizes_by_trial(side: int, low: int, high: int, step: int) -> list[PixelSize]:
    """Every pair of multiples, kept where one more step on the shorter reach would break the area or the bound."""
    multiples = range(low, high + 1, step)
    largest = {w: max((h for h in multiples if w * h <= side * side), default=0) for w in multiples}
    pairs = {(w, h) for w, h in largest.items() if h}
    square = max(s for s in range(step, side + 1, step) if s * s <= side * side)
    return sorted(pairs | {(h, w) for w, h in pairs} | {(square, square)})


@pytest.mark.parametrize(
    ("side", "low", "high", "step"), [(1024, 256, 1024, 64), (512, 256, 1024, 64), (768, 64, 2048, 32)]
)
def test_sizes_are_those_of_trial(side: int, low: int, high: int, step: int):
    assert list(compute_bucket_sizes((side, side), low, high, step)) == sizes_by_trial(side, low, high, step)


def test_sizes_at_1024_and_512():
    sides = range(256, 1025, 64)
    assert set(compute_bucket_sizes((1024, 1024), 256, 1024, 64)) == {(s, 1024) for s in sides} | {
        (1024, s) for s in sides
    }
    tall = [(256, 832), (256, 896), (256, 960), (256, 1024), (320, 704), (320, 768), (384, 640), (448, 576)]
    wide = [(576, 448), (640, 384), (704, 320), (768, 320), (832, 256), (896, 256), (960, 256), (1024, 256)]
    assert list(compute_bucket_sizes((512, 512), 256, 1024, 64)) == [*tall, (512, 512), *wide]


def test_bounds_are_widened_to_the_resolution():
    assert compute_bucket_sizes((64, 64), 256, 1024, 64) == ((64, 64),)
    assert max(max(size) for size in compute_bucket_sizes((1536, 1536), 256, 1024, 64)) == 1536


@given(SIDES, SIDES, st.booleans(), st.sampled_from([16, 32, 64]))
@settings(max_examples=150)
def test_a_placement_covers_its_bucket(width: int, height: int, no_upscale: bool, step: int):
    dataset = options(resolution=512, bucket_reso_steps=step, bucket_no_upscale=no_upscale, min_bucket_reso=64)
    found = place_in_bucket((width, height), dataset)
    if found is None:
        assert no_upscale
        assert min(width, height) * min(1, 512 / math.sqrt(width * height)) < 2 * step
        return
    (wide, high), (scaled_wide, scaled_high) = found.bucket, found.scaled
    assert not wide % step
    assert not high % step
    assert scaled_wide >= wide > 0
    assert scaled_high >= high > 0
    if no_upscale:
        assert compute_enlargement((width, height), found) < 1.1
        assert scaled_wide - wide < step
        assert scaled_high - high < step
        assert wide * high <= 512 * 512 * 1.02 + step * (wide + high)
    else:
        assert found.bucket in compute_bucket_sizes((512, 512), 64, 1024, step)
        assert scaled_wide == wide or scaled_high == high
    assert abs(scaled_wide / width - scaled_high / height) * min(width, height) < 4 + step * no_upscale


def test_an_exact_match_stays():
    assert place_in_bucket((640, 384), options(resolution=512)) == BucketPlacement((640, 384), (640, 384))


def test_other_pictures_take_the_nearest_shape():
    assert place_in_bucket((1000, 500), options(resolution=512)) == BucketPlacement((704, 320), (704, 352))
    assert place_in_bucket((300, 700), options(resolution=512, enable_bucket=False)) == BucketPlacement(
        (512, 512), (512, 1195)
    )


def test_nothing_is_enlarged_without_upscaling():
    dataset = options(resolution=512, bucket_no_upscale=True)
    assert place_in_bucket((200, 130), dataset) == BucketPlacement((192, 128), (200, 130))
    assert place_in_bucket((200, 60), dataset) is None
    assert place_in_bucket((20000, 60), dataset) is None
    assert place_in_bucket((2048, 1024), dataset) == BucketPlacement((640, 320), (640, 320))
    assert place_in_bucket((1000, 600), dataset) == BucketPlacement((640, 384), (640, 384))


@pytest.mark.parametrize(
    ("named", "subject"),
    [
        ({"bucket_reso_steps": 24}, "bucket_reso_steps"),
        ({"resolution": 1000, "enable_bucket": False}, "resolution"),
        ({"resolution": (512, 8)}, "resolution"),
    ],
)
def test_sides_are_multiples_of_16(named: dict[str, object], subject: str):
    with pytest.raises(UsageError) as caught:
        check_bucket_sides(options(**named))
    assert (caught.value.code, caught.value.subject) == ("SIDE-NOT-MULTIPLE", subject)
    check_bucket_sides(options(resolution=1000))


def test_findings_name_what_is_enlarged_cut_and_too_small():
    examples = [example((100, 90), "small.png"), example((20000, 60), "strip.png"), example((512, 512), "good.png")]
    placed = place_examples(examples, [options(resolution=512)], 2)
    found = {finding.code: finding for finding in placed.findings}
    assert set(found) == {"PICTURE-ENLARGED", "PICTURE-CUT", "BUCKET-SHORT"}
    assert found["PICTURE-ENLARGED"].subject == "small.png"
    assert found["PICTURE-CUT"].message == "strip.png (20000 x 60): more than half is lost to the crop (99%)"
    assert found["BUCKET-SHORT"].evidence == {"buckets": 2, "short": 1, "of_one": 1}
    small = place_examples(examples, [options(resolution=512, bucket_no_upscale=True)], 1)
    assert [e.name for e in small.examples] == ["small.png", "good.png"]
    assert [(f.code, f.subject) for f in small.findings] == [
        ("PICTURE-TOO-SMALL", "strip.png"),
        ("PICTURE-CUT", "small.png"),
    ]
    assert {f.level for f in small.findings} == {Level.WARNING}


def test_pictures_of_another_resolution_are_skipped():
    placed = place_examples([example((512, 512)), example((600, 600))], [options(skip_image_resolution=512)], 1)
    assert [e.size for e in placed.examples] == [(600, 600)]
    assert placed.findings[0].code == "PICTURE-SKIPPED"


def test_the_table_counts_appearances():
    examples = (example((512, 512), repeats=5), example((1000, 500), repeats=2), example((500, 500)))
    placed = place_examples(examples, [options(resolution=512, batch_size=4)], 1)
    rows = build_bucket_table(placed, [options(resolution=512, batch_size=4)], 1).rows
    assert rows == (("1", "512 x 512", "2", "6", "1 x 4 + 1 x 2"), ("1", "704 x 320", "1", "2", "1 x 2"))
    assert build_bucket_table(BucketPlacements((), (), ()), [], 1).rows == ()


def mean_by_area(values: np.ndarray, size: PixelSize) -> np.ndarray:
    """Each new pixel as the sum over old ones of their common area."""
    (height, width), (new_width, new_height) = values.shape[:2], size

    def shares(old: int, new: int) -> np.ndarray:
        edges = np.arange(new + 1) * old / new
        cells = np.arange(old)
        common = np.minimum(edges[1:, None], cells + 1) - np.maximum(edges[:-1, None], cells)
        return common.clip(min=0) * new / old

    return np.einsum("yi,xj,ij...->yx...", shares(height, new_height), shares(width, new_width), values)


@given(st.integers(1, 40), st.integers(1, 40), st.data())
@settings(max_examples=60)
def test_shrinking_is_the_mean_over_areas(height: int, width: int, data: st.DataObject):
    size = (data.draw(st.integers(1, width)), data.draw(st.integers(1, height)))
    values = np.random.default_rng(height * 41 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    np.testing.assert_allclose(downscale_by_area(values, size), mean_by_area(values, size), atol=2e-3)


@pytest.mark.parametrize("way", [None, "lanczos", "nearest", "bilinear", "bicubic", "area", "box"])
@pytest.mark.parametrize("size", [(300, 200), (90, 70)])
def test_a_fitted_picture_is_close_to_pillows(way: str | None, size: PixelSize):
    y, x = np.mgrid[: size[1], : size[0]]
    pixels = np.stack([x * 255 / size[0], y * 255 / size[1], (x + y) % 255], -1).astype(np.uint8)
    scaled = place_in_bucket(size, options(resolution=128)).scaled  # type: ignore[union-attr]
    placement = BucketPlacement((128, 64), scaled)
    made = transform_pixels(pixels, placement, (5, 3), False, way)
    whole = np.asarray(Image.fromarray(pixels).resize(scaled, Image.Resampling.BICUBIC)).astype(float)
    assert made.shape == (64, 128, 3)
    assert np.abs(made[..., :2] - whole[3:67, 5:133, :2]).mean() < 2.5
    np.testing.assert_array_equal(transform_pixels(pixels, placement, (5, 3), True, way), made[:, ::-1])


def test_a_mask_goes_the_way_of_its_picture():
    picture = np.zeros((90, 150, 3), np.uint8)
    picture[20:60, 30:100] = 255
    placement, crop = BucketPlacement((64, 64), (107, 64)), (20, 0)
    pixels = transform_pixels(picture, placement, crop, True)
    mask = transform_mask((picture[..., 0] / 255).astype("float32"), placement, crop, True, (8, 8))
    expected = torch.from_numpy(pixels[..., 0].astype(np.float32) / 255).view(8, 8, 8, 8).mean((1, 3))
    assert mask.shape == (8, 8)
    torch.testing.assert_close(mask, expected, atol=0.01, rtol=0)
    larger = transform_mask(np.eye(5, dtype=np.float32), BucketPlacement((64, 64), (64, 64)), (0, 0), False, (8, 8))
    assert 0 <= larger.min() < larger.max() <= 1


def test_colours_change_a_little_by_the_seed():
    pixels = np.random.default_rng(0).integers(30, 220, (64, 64, 3), dtype=np.uint8)
    placement = BucketPlacement((64, 64), (64, 64))
    made = [transform_pixels(pixels, placement, (0, 0), False, None, seed).astype(int) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(made[0], made[1])
    assert (made[0] != made[2]).any()
    assert 0.5 < np.abs(made[0] - pixels).mean() < 30
    grey = np.full((64, 64, 3), 128, np.uint8)
    assert np.ptp(transform_pixels(grey, placement, (0, 0), False, None, 3), axis=-1).max() == 0


def test_cut_is_the_share_outside():
    assert compute_cropped_share(BucketPlacement((64, 64), (128, 64))) == 0.5
