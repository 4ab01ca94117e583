"""A picture made to fit its bucket: scaled, cut, mirrored, recoloured; and its mask along the very same way."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from finitune.datasets.captions import draw_uniform
from finitune.datasets.items import BucketPlacement, PixelSize
from finitune.datasets.pixels import Float32Array, UInt8Array

_Scalar = TypeVar("_Scalar", bound=np.generic)

_PILLOW_FILTER_BY_INTERPOLATION = {
    "lanczos": Image.Resampling.LANCZOS,
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "linear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "cubic": Image.Resampling.BICUBIC,
    "area": Image.Resampling.BOX,  # to enlarge; shrinking is `shrunk`
    "box": Image.Resampling.BOX,
}
_AREA_INTERPOLATIONS = ("area", "box")

_MAX_HUE_DEGREES = 16.0
_MAX_GAMMA_CHANGE = 0.05
"""The changes of colour, as sd-scripts' AugHelper has them."""


def transform_pixels(
    pixels: UInt8Array,
    placement: BucketPlacement,
    crop: tuple[int, int],
    flipped: bool,
    interpolation: str | None = None,
    color: int | None = None,
) -> UInt8Array:
    """uint8 (H, W, 3) to uint8 (h, w, 3), the size of the bucket.

    `crop` is the (left, top) corner in the scaled picture; `interpolation` None is area to shrink, Lanczos to enlarge;
    `color` seeds a small change of hue and gamma.
    """
    scaled = resize_pixels(pixels, placement.scaled, interpolation)
    part = np.ascontiguousarray(crop_and_flip(scaled, placement.bucket, crop, flipped))
    return part if color is None else jitter_colors(part, color)


def transform_mask(
    mask: Float32Array, placement: BucketPlacement, crop: tuple[int, int], flipped: bool, latent: PixelSize
) -> Tensor:
    """A mask float32 (H, W) in 0 .. 1 to float32 (h, w): scaled, cut and mirrored as its picture, then to the latent.

    `latent` is (width, height). Sizes are reached by the mean over each area; to enlarge, linearly.
    """
    part = crop_and_flip(resize_mask(mask, placement.scaled), placement.bucket, crop, flipped)
    return torch.from_numpy(np.ascontiguousarray(resize_mask(part, latent)).clip(0, 1))


def resize_pixels(pixels: UInt8Array, size: PixelSize, interpolation: str | None) -> UInt8Array:
    """uint8 (H, W, 3) at another size (width, height)."""
    height, width = pixels.shape[:2]
    if (width, height) == size:
        return pixels
    shrinks = size[0] <= width and size[1] <= height
    if shrinks and (interpolation is None or interpolation in _AREA_INTERPOLATIONS):
        return np.rint(downscale_by_area(pixels, size)).astype(np.uint8)
    return np.asarray(Image.fromarray(pixels).resize(size, _PILLOW_FILTER_BY_INTERPOLATION[interpolation or "lanczos"]))


def resize_mask(mask: Float32Array, size: PixelSize) -> Float32Array:
    """float32 (H, W) at another size (width, height), within the range of its values."""
    height, width = mask.shape
    if size[0] <= width and size[1] <= height:
        return downscale_by_area(mask, size)
    return np.asarray(Image.fromarray(mask.astype(np.float32)).resize(size, Image.Resampling.BILINEAR))


def downscale_by_area(values: NDArray[Any], size: PixelSize) -> Float32Array:
    """(H, W, ...) to float32 (h, w, ...): each new pixel is the exact mean of the area that it covers."""
    return downscale_rows_by_area(downscale_rows_by_area(values, size[1]).swapaxes(0, 1), size[0]).swapaxes(0, 1)


def downscale_rows_by_area(values: NDArray[Any], count: int) -> Float32Array:
    """(H, ...) to float32 (count, ...), count <= H: means over count intervals of H / count rows.

    The sum over an interval [a, b) is that of its whole rows from floor(a) on, less the part before a, plus the part
    before b.
    """
    height = len(values)
    if count == height:
        return values.astype(np.float32)
    whole, part = np.divmod(np.arange(count + 1) * height, count)
    part = (part / count).astype(np.float32).reshape(-1, *[1] * (values.ndim - 1))
    sums = np.stack([values[begin:end].sum(axis=0, dtype=np.float32) for begin, end in pairwise(whole)])
    before = values[whole.clip(max=height - 1)] * part
    return (sums - before[:-1] + before[1:]) * np.float32(count / height)


def crop_and_flip(values: NDArray[_Scalar], size: PixelSize, crop: tuple[int, int], flipped: bool) -> NDArray[_Scalar]:
    """The part (h, w, ...) of a scaled picture that lies in the bucket, mirrored left to right if `flipped`."""
    (width, height), (left, top) = size, crop
    part = values[top : top + height, left : left + width]
    return part[:, ::-1] if flipped else part


def jitter_colors(pixels: UInt8Array, seed: int) -> UInt8Array:
    """uint8 (h, w, 3) with its hues turned by up to 16 degrees and a gamma of 0.95 .. 1.05, both drawn by the seed."""
    angle = math.radians(_MAX_HUE_DEGREES) * (2 * draw_uniform(seed, "hue") - 1)
    gamma = 1 + _MAX_GAMMA_CHANGE * (2 * draw_uniform(seed, "gamma") - 1)
    values = (pixels.astype(np.float32) / 255) @ compute_hue_rotation(angle).T
    return np.rint(values.clip(0, 1) ** np.float32(gamma) * 255).astype(np.uint8)


def compute_hue_rotation(angle: float) -> Float32Array:
    """float32 (3, 3): the rotation of RGB around grey by an angle in radians (Rodrigues' formula)."""
    axis = np.full(3, 1 / math.sqrt(3))
    cross = np.cross(np.eye(3), -axis)
    rotation = math.cos(angle) * np.eye(3) + math.sin(angle) * cross + (1 - math.cos(angle)) * np.outer(axis, axis)
    return rotation.astype(np.float32)
