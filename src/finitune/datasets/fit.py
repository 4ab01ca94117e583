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

from finitune.datasets.captions import chance
from finitune.datasets.items import Placement, Size
from finitune.datasets.pixels import Bytes, Floats

Number = TypeVar("Number", bound=np.generic)

PILLOW = {
    "lanczos": Image.Resampling.LANCZOS,
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "linear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "cubic": Image.Resampling.BICUBIC,
    "area": Image.Resampling.BOX,  # to enlarge; shrinking is `shrunk`
    "box": Image.Resampling.BOX,
}
AREA = ("area", "box")

MAX_HUE_DEGREES = 16.0
MAX_GAMMA_CHANGE = 0.05
"""The changes of colour, as sd-scripts' AugHelper has them."""


def fit(
    pixels: Bytes,
    placement: Placement,
    crop: tuple[int, int],
    flipped: bool,
    interpolation: str | None = None,
    color: int | None = None,
) -> Bytes:
    """uint8 (H, W, 3) to uint8 (h, w, 3), the size of the bucket.

    `crop` is the (left, top) corner in the scaled picture; `interpolation` None is area to shrink, Lanczos to enlarge;
    `color` seeds a small change of hue and gamma.
    """
    scaled = resized(pixels, placement.scaled, interpolation)
    part = np.ascontiguousarray(cut_out(scaled, placement.bucket, crop, flipped))
    return part if color is None else recoloured(part, color)


def fit_mask(mask: Floats, placement: Placement, crop: tuple[int, int], flipped: bool, latent: Size) -> Tensor:
    """A mask float32 (H, W) in 0 .. 1 to float32 (h, w): scaled, cut and mirrored as its picture, then to the latent.

    `latent` is (width, height). Sizes are reached by the mean over each area; to enlarge, linearly.
    """
    part = cut_out(resized_mask(mask, placement.scaled), placement.bucket, crop, flipped)
    return torch.from_numpy(np.ascontiguousarray(resized_mask(part, latent)).clip(0, 1))


def resized(pixels: Bytes, size: Size, interpolation: str | None) -> Bytes:
    """uint8 (H, W, 3) at another size (width, height)."""
    height, width = pixels.shape[:2]
    if (width, height) == size:
        return pixels
    shrinks = size[0] <= width and size[1] <= height
    if shrinks and (interpolation is None or interpolation in AREA):
        return np.rint(shrunk(pixels, size)).astype(np.uint8)
    return np.asarray(Image.fromarray(pixels).resize(size, PILLOW[interpolation or "lanczos"]))


def resized_mask(mask: Floats, size: Size) -> Floats:
    """float32 (H, W) at another size (width, height), within the range of its values."""
    height, width = mask.shape
    if size[0] <= width and size[1] <= height:
        return shrunk(mask, size)
    return np.asarray(Image.fromarray(mask.astype(np.float32)).resize(size, Image.Resampling.BILINEAR))


def shrunk(values: NDArray[Any], size: Size) -> Floats:
    """(H, W, ...) to float32 (h, w, ...): each new pixel is the exact mean of the area that it covers."""
    return shrunk_rows(shrunk_rows(values, size[1]).swapaxes(0, 1), size[0]).swapaxes(0, 1)


def shrunk_rows(values: NDArray[Any], count: int) -> Floats:
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


def cut_out(values: NDArray[Number], size: Size, crop: tuple[int, int], flipped: bool) -> NDArray[Number]:
    """The part (h, w, ...) of a scaled picture that lies in the bucket, mirrored left to right if `flipped`."""
    (width, height), (left, top) = size, crop
    part = values[top : top + height, left : left + width]
    return part[:, ::-1] if flipped else part


def recoloured(pixels: Bytes, seed: int) -> Bytes:
    """uint8 (h, w, 3) with its hues turned by up to 16 degrees and a gamma of 0.95 .. 1.05, both drawn by the seed."""
    angle = math.radians(MAX_HUE_DEGREES) * (2 * chance(seed, "hue") - 1)
    gamma = 1 + MAX_GAMMA_CHANGE * (2 * chance(seed, "gamma") - 1)
    values = (pixels.astype(np.float32) / 255) @ hue_rotation(angle).T
    return np.rint(values.clip(0, 1) ** np.float32(gamma) * 255).astype(np.uint8)


def hue_rotation(angle: float) -> Floats:
    """float32 (3, 3): the rotation of RGB around grey by an angle in radians (Rodrigues' formula)."""
    axis = np.full(3, 1 / math.sqrt(3))
    cross = np.cross(np.eye(3), -axis)
    rotation = math.cos(angle) * np.eye(3) + math.sin(angle) * cross + (1 - math.cos(angle)) * np.outer(axis, axis)
    return rotation.astype(np.float32)
