"""A decoded picture as plain colours: every mode of Pillow's becomes sRGB of 8 bits and, where there is one, alpha.

`convert("RGB")` alone would show colours hidden below transparency, turn 16-bit grey white, and ignore profiles.

- palettes, bilevel, grey, with or without alpha: their colours; alpha stays apart until it is laid on a background
- 16-bit grey: value / 257, rounded. 16-bit colour: Pillow's high byte, less than one level below that
- 32-bit floats: 0 .. 1 becomes 0 .. 255, and what is beyond is cut
- CMYK: by its profile; without one R = 255 (1 - C)(1 - K). Pillow has already undone Adobe's inversion
- a colour profile other than sRGB: converted by LittleCMS, relative colorimetric, with black point compensation
"""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageColor, features

from finitune.errors import FileError, UsageError, suggest_nearest_name

UInt8Array = NDArray[np.uint8]
Float32Array = NDArray[np.float32]
_ALPHA_MODES = ("LA", "La", "PA", "RGBA", "RGBa")
_PROFILE_MODES_BY_COLOR_SPACE = {
    "RGB ": ("RGB", ("RGB", "RGBX", "P", "YCbCr", "1", "L")),
    "GRAY": ("L", ("1", "L")),
    "CMYK": ("CMYK", ("CMYK",)),
}
"""By the colours that a profile is for: the mode it is given, and the modes that are turned into that one."""


class PictureNote(NamedTuple):
    """One thing that was done to a picture on reading it, and its details, if any."""

    what: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.detail}" if self.detail else self.what


@dataclass(frozen=True)
class PixelLayer:
    """Colours uint8 (H, W, 3), alpha float32 (H, W) in 0 .. 1 or None, and notes of what was done."""

    colours: UInt8Array
    alpha: Float32Array | None
    notes: tuple[PictureNote, ...] = ()


def extract_pixel_layer(image: Image.Image, path: Path) -> PixelLayer:
    """The colours and the alpha of a decoded picture of any mode.

    Raises FileError: PICTURE-NONFINITE for NaN or infinity, PICTURE-MODE for colours without a way to RGB.
    """
    if image.mode == "I" or image.mode.startswith("I;16"):
        return convert_integer_pixels(image)
    if image.mode == "F":
        return convert_float_pixels(image, path)
    try:
        return convert_color_pixels(image)
    except (ValueError, ImportError) as error:  # LAB needs LittleCMS
        raise FileError(
            f"{path}: its colours ({image.mode}) cannot be turned into RGB",
            code="PICTURE-MODE",
            subject=str(path),
            evidence={"mode": image.mode, "pillow": str(error)},
            remedy="Save it as RGB.",
        ) from error


def composite_on_background(layer: PixelLayer, background: str) -> PixelLayer:
    """The layer on a colour, by name or as #rrggbb: rgb * alpha + background * (1 - alpha), rounded; alpha is kept.

    Raises UsageError for an unknown colour.
    """
    ground = np.array(parse_background_color(background), np.float32)
    if layer.alpha is None:
        return layer
    if bool((layer.alpha == 1).all()):
        return replace(layer, alpha=None)
    opacity = layer.alpha[..., None]
    mixed = np.rint(layer.colours * opacity + ground * (1 - opacity)).astype(np.uint8)
    share = 100 * float(1 - layer.alpha.mean())
    note = PictureNote("transparent", f"{share:.3g} % of it, laid on {background}")
    return PixelLayer(mixed, layer.alpha, (*layer.notes, note))


def parse_background_color(name: str) -> tuple[int, int, int]:
    """The sRGB bytes of a colour by its CSS name or as #rrggbb; raises UsageError where there is none."""
    try:
        return ImageColor.getrgb(name)[:3]
    except ValueError as error:
        raise UsageError(
            f"there is no colour {name!r}.{suggest_nearest_name(name, ImageColor.colormap)}",
            code="BACKGROUND-UNKNOWN",
            subject="background",
            remedy="Give a CSS name such as white, or #rrggbb.",
        ) from error


def convert_integer_pixels(image: Image.Image) -> PixelLayer:
    """Grey of 16 bits; what a 32-bit file holds beyond them is cut."""
    values = np.asarray(image).astype(np.int64)
    alpha = None
    if isinstance(key := image.info.get("transparency"), int):
        alpha = (values != key).astype(np.float32)
    beyond = int(((values < 0) | (values > 65535)).sum())
    note = PictureNote("16 bits", "divided by 257" + (f", {beyond} values beyond were cut" if beyond else ""))
    return PixelLayer(repeat_grey_channel(values.clip(0, 65535) / 257), alpha, (note,))


def convert_float_pixels(image: Image.Image, path: Path) -> PixelLayer:
    values = np.asarray(image)
    finite = np.isfinite(values)
    if not finite.all():
        y, x = np.argwhere(~finite)[0]
        raise FileError(
            f"{path} holds {np.count_nonzero(~finite)} numbers that are not finite, the first at ({x}, {y})",
            code="PICTURE-NONFINITE",
            subject=str(path),
            evidence={"count": int(np.count_nonzero(~finite)), "first": (int(x), int(y)), "size": image.size},
            remedy="Mend it where it was made, or save it with 8 or 16 bits.",
        )
    beyond = int(((values < 0) | (values > 1)).sum())
    note = PictureNote("floats", "0 .. 1 became 0 .. 255" + (f", {beyond} values beyond were cut" if beyond else ""))
    return PixelLayer(repeat_grey_channel(values.clip(0, 1) * np.float32(255)), None, (note,))


def repeat_grey_channel(values: NDArray[Any]) -> UInt8Array:
    """Three equal channels of values in 0 .. 255."""
    return np.repeat(np.rint(values).astype(np.uint8)[..., None], 3, axis=2)


def convert_color_pixels(image: Image.Image) -> PixelLayer:
    """Everything of 8 bits a channel; raises ValueError where Pillow knows no way to RGB."""
    alpha = None
    if image.mode in _ALPHA_MODES or "transparency" in image.info:
        straight = (image.convert(image.mode.upper()) if image.mode in ("La", "RGBa") else image).convert("RGBA")
        alpha = np.array(straight.getchannel("A"), np.float32)
        alpha /= 255
        image = straight.convert("L" if image.mode in ("LA", "La", "L") else "RGB")
    notes = [PictureNote("CMYK", "turned into RGB")] if image.mode == "CMYK" else []
    if profile := image.info.get("icc_profile"):
        image, note = convert_to_srgb(image, profile)
        notes += [note] if note else []
    return PixelLayer(np.array(image.convert("RGB")), alpha, tuple(notes))


def convert_to_srgb(image: Image.Image, profile: bytes) -> tuple[Image.Image, PictureNote | None]:
    """The picture in sRGB, where its profile is another one and fits its mode; and a note of what was done."""
    if not features.check("littlecms2"):
        return image, PictureNote("colour profile", "not looked at, as this Pillow lacks LittleCMS")
    try:
        source: Any = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        name = ImageCms.getProfileDescription(source).strip()
        if "srgb" in name.lower():
            return image, None
        taken, modes = _PROFILE_MODES_BY_COLOR_SPACE.get(source.profile.xcolor_space, ("", ()))
        if image.mode not in modes:
            return image, PictureNote("colour profile", f"{name} does not fit its mode {image.mode} and is not used")
        done = ImageCms.profileToProfile(
            image.convert(taken),
            source,
            ImageCms.createProfile("sRGB"),
            renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
            outputMode="RGB",
            flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )
    except (ImageCms.PyCMSError, OSError, ValueError):
        return image, PictureNote("colour profile", "it cannot be read and is not used")
    assert done is not None  # only an in-place conversion returns nothing
    return done, PictureNote("colour profile", f"turned from {name} into sRGB")
