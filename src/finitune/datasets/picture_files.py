"""From a file to pixels, and to a size without pixels: pictures as people see them, refused with a reason.

`measure` reads headers only; `read_picture` decodes everything, which alone finds a file that is cut off. Both judge a
file by its bytes, turn it as EXIF says, and leave Pillow's global settings alone: its limits hold for every file.
"""

from __future__ import annotations

import struct
import threading
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import imagesize
from PIL import ExifTags, Image, UnidentifiedImageError

from finitune.datasets.items import PixelSize
from finitune.datasets.picture_formats import (
    PICTURE_FORMAT_BY_EXTENSION,
    describe_non_picture,
    detect_picture_format,
)
from finitune.datasets.pixels import Float32Array, PictureNote, UInt8Array, composite_on_background, extract_pixel_layer
from finitune.errors import FileError
from finitune.files.sniff import get_file_size, make_unreadable_file_error, peek_bytes

MAX_PICTURE_PIXELS = 1024**3 // 12
"""The largest picture: Pillow's own limit, about 89 million pixels."""

_TRANSPOSE_BY_ORIENTATION = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What undoes each EXIF orientation; 1 needs nothing, and other numbers mean nothing. Source: EXIF 2.3, tag 274."""

_SIDEWAYS_ORIENTATIONS = (5, 6, 7, 8)
_IMAGESIZE_FORMATS = ("PNG", "JPEG", "WEBP", "TIFF")
"""The kinds whose headers imagesize reads well; it stumbles over turned AVIF, and over old BMP."""

_MAX_EXIF_BYTES = 1 << 20
WRONG_EXTENSION_NOTE = "another kind than its name says"
TURNED_NOTE = "turned"
_DECODER_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    LookupError,
    EOFError,
    TypeError,
    AttributeError,
    OverflowError,
    SystemError,
    RuntimeError,
    struct.error,
    zlib.error,
)
"""What Pillow and imagesize raise on damaged files."""

_WARNINGS_LOCK = threading.Lock()
"""Held while Python's warnings are recorded: they are the process's, not a thread's."""


@dataclass(frozen=True)
class PictureHeader:
    """What a header says: the kind, width and height as stored, and the EXIF orientation (1 where there is none)."""

    kind: str
    stored: PixelSize
    orientation: int = 1

    @property
    def size(self) -> PixelSize:
        """Width and height as seen."""
        width, height = self.stored
        return (height, width) if self.orientation in _SIDEWAYS_ORIENTATIONS else (width, height)


@dataclass(frozen=True)
class DecodedPicture:
    """A picture as seen, in sRGB.

    `pixels` uint8 (H, W, 3), transparent parts laid on the background; `alpha` float32 (H, W) in 0 .. 1, None where
    nothing is transparent. `notes` tell what was done.
    """

    pixels: UInt8Array
    alpha: Float32Array | None
    notes: tuple[PictureNote, ...] = ()

    @property
    def size(self) -> PixelSize:
        """Width and height in pixels."""
        return self.pixels.shape[1], self.pixels.shape[0]


def read_picture_size(path: Path) -> PixelSize:
    """Width and height as seen, EXIF turned, from the header alone; raises what `header` does."""
    return read_picture_header(path).size


def read_picture_header(path: Path) -> PictureHeader:
    """What the header of a picture says.

    Raises FileError: PICTURE-EMPTY, PICTURE-NOT-A-PICTURE, PICTURE-NO-DECODER, PICTURE-BOMB, PICTURE-TRUNCATED.
    """
    start = peek_bytes(path)
    kind = identify_picture_format(path, start)
    try:
        found = measure_picture_header(path, kind, start) if kind in _IMAGESIZE_FORMATS else None
    except _DECODER_ERRORS:
        found = None  # imagesize knows less than Pillow, which has the last word
    if found is None or min(found.stored) < 0:
        with open_picture(path, kind) as (image, _):
            turned = kind != "TIFF"  # Pillow tells the size of a TIFF as seen
            found = PictureHeader(kind, image.size, get_exif_orientation(image) if turned else 1)
    check_picture_size(path, found.stored)
    return found


def read_picture(path: Path, background: str = "white") -> DecodedPicture:
    """The pixels of a picture, fully decoded, on a background (a CSS name or #rrggbb).

    Animations give their first frame. Raises what `header` does, and FileError: PICTURE-TRUNCATED, PICTURE-TEXT-CHUNK,
    PICTURE-NONFINITE, PICTURE-MODE; UsageError for an unknown colour.
    """
    image, notes = decode_picture(path)
    layer = composite_on_background(extract_pixel_layer(image, path), background)
    return DecodedPicture(layer.colours, layer.alpha, (*notes, *layer.notes))


def read_pillow_picture(path: Path, background: str = "white") -> tuple[Image.Image, tuple[PictureNote, ...]]:
    """The picture of `read_picture` as Pillow's, and its notes; quicker where it is plain RGB or grey already.

    Raises what `read_picture` does.
    """
    image, notes = decode_picture(path)
    if image.mode in ("RGB", "L") and not {"transparency", "icc_profile"} & image.info.keys():
        return image, notes
    layer = composite_on_background(extract_pixel_layer(image, path), background)
    return Image.fromarray(layer.colours), (*notes, *layer.notes)


def decode_picture(path: Path) -> tuple[Image.Image, tuple[PictureNote, ...]]:
    """All of a picture as Pillow reads it, turned as EXIF says, and notes of what was done."""
    expected = read_picture_header(path)
    with open_picture(path, expected.kind) as (image, notes):
        if PICTURE_FORMAT_BY_EXTENSION.get(path.suffix.lower()) not in (None, expected.kind):
            notes.append(PictureNote(WRONG_EXTENSION_NOTE, expected.kind))
        notes += list_picture_notes(image)
        image = apply_exif_orientation(image, notes)
    if image.size != expected.size:
        raise make_damage_error(path, f"the header says {expected.size}, but {image.size} was decoded")
    return image, tuple(notes)


def identify_picture_format(path: Path, start: bytes) -> str:
    """Pillow's name of the kind of picture whose first bytes are given; raises FileError if it is none, or not read."""
    size = get_file_size(path)
    if not start:
        raise make_picture_error(path, "PICTURE-EMPTY", "is empty", "Download or export it again.", size_bytes=size)
    kind = detect_picture_format(start)
    if kind is None:
        what, remedy = describe_non_picture(start)
        raise make_picture_error(
            path, "PICTURE-NOT-A-PICTURE", f"is no picture but {what}", remedy, size_bytes=size, is_=what
        )
    if kind not in list_picture_decoders():
        remedy = "Save it as PNG, or install a Pillow with a decoder for it."
        raise make_picture_error(
            path, "PICTURE-NO-DECODER", f"is {kind}, which this Pillow does not read", remedy, kind=kind
        )
    return kind


def list_picture_decoders() -> frozenset[str]:
    """The kinds of pictures that this Pillow decodes, of those that are read at all."""
    Image.init()  # does nothing the second time
    return frozenset(Image.OPEN) & frozenset(PICTURE_FORMAT_BY_EXTENSION.values())


@contextmanager
def open_picture(path: Path, kind: str) -> Iterator[tuple[Image.Image, list[PictureNote]]]:
    """A picture that Pillow has opened, and a list for notes that holds its warnings; what fails becomes FileError."""
    notes: list[PictureNote] = []
    try:
        with path.open("rb") as stream:
            with capture_warnings(notes):
                image = Image.open(stream, formats=(kind,))
            yield image, notes
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise make_picture_error(
            path, "PICTURE-BOMB", "is larger than Pillow's limit", _SMALLER, pillow=str(error)
        ) from error
    except UnidentifiedImageError as error:
        raise make_damage_error(path, "Pillow cannot make out its header") from error
    except _DECODER_ERRORS as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise make_unreadable_file_error(path, error) from error
        if "MAX_TEXT" in str(error):
            raise make_picture_error(
                path,
                "PICTURE-TEXT-CHUNK",
                "holds a text or a colour profile that is huge when unpacked",
                "Save it without metadata (exiftool -all= FILE removes them).",
                pillow=str(error),
            ) from error
        raise make_damage_error(path, str(error) or type(error).__name__) from error


@contextmanager
def capture_warnings(notes: list[PictureNote]) -> Iterator[None]:
    """Python's warnings, as notes; Pillow's warning of a huge picture is an error."""
    with _WARNINGS_LOCK, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield
    notes += dict.fromkeys(PictureNote("Pillow", " ".join(str(warning.message).split())) for warning in caught)


def read_exif_orientation(exif: bytes) -> int:
    """The orientation 1 .. 8 that an EXIF block holds; 1 where it holds none, or one without a meaning."""
    if not exif:
        return 1
    block = Image.Exif()
    try:
        with capture_warnings([]):  # a damaged block has no orientation: nothing else of it is used
            block.load(exif)
            turned = block.get(ExifTags.Base.Orientation)
    except _DECODER_ERRORS:
        return 1
    return turned if turned in _TRANSPOSE_BY_ORIENTATION else 1


def get_exif_orientation(image: Image.Image) -> int:
    """That of an opened picture, from its EXIF block alone: viewers do not follow XMP."""
    return read_exif_orientation(image.info.get("exif", b""))


def measure_picture_header(path: Path, kind: str, start: bytes) -> PictureHeader:
    """The header by imagesize, which reads no EXIF of PNG and WebP."""
    info = imagesize.get_info(path, dpi=False, colors=False, channels=False, exif_rotation=False)
    orientation = info.rotation
    if kind == "PNG" or (kind == "WEBP" and start[12:16] == b"VP8X" and start[20] & 8):
        with path.open("rb") as stream:
            exif = read_png_exif(stream) if kind == "PNG" else read_webp_exif(stream)
        orientation = read_exif_orientation(exif)
    return PictureHeader(
        kind, (info.width, info.height), orientation if orientation in _TRANSPOSE_BY_ORIENTATION else 1
    )


def read_png_exif(stream: BinaryIO) -> bytes:
    """The eXIf chunk, which may stand behind the pixels, or b"". Source: PNG 3rd edition, 5.3 and 11.3.4.5."""
    stream.seek(8)
    while len(start := stream.read(8)) == 8 and start[4:] != b"IEND":
        length = int.from_bytes(start[:4], "big")
        if start[4:] == b"eXIf":
            return stream.read(min(length, _MAX_EXIF_BYTES))
        stream.seek(length + 4, 1)
    return b""


def read_webp_exif(stream: BinaryIO) -> bytes:
    """The EXIF chunk, or b"". Source: RFC 9649, 2.3 and 2.7.1.5."""
    stream.seek(12)
    while len(start := stream.read(8)) == 8:
        length = int.from_bytes(start[4:], "little")
        if start[:4] == b"EXIF":
            return stream.read(min(length, _MAX_EXIF_BYTES))
        stream.seek(length + length % 2, 1)
    return b""


def list_picture_notes(image: Image.Image) -> list[PictureNote]:
    """What can be told of a picture before its pixels are read."""
    notes = []
    if getattr(image, "is_animated", False):
        notes.append(PictureNote("several frames", "the first one is taken"))
    # Pillow reads 16-bit colour as the raw modes "RGB;16B", "RGBA;16B" and so on; 16-bit grey is told of elsewhere.
    if ";16" in str(getattr(image, "tile", ())[:1]) and not image.mode.startswith("I"):
        notes.append(PictureNote("16 bits", "the high byte of each value is taken"))
    return notes


def apply_exif_orientation(image: Image.Image, notes: list[PictureNote]) -> Image.Image:
    """The decoded picture as seen. Pillow turns TIFF itself, and warns of it while it decodes."""
    if image.format == "TIFF":
        with capture_warnings(notes):
            turn = image.getexif().get(ExifTags.Base.Orientation)
            image.load()
    else:
        image.load()
        turn = get_exif_orientation(image)
    if turn not in _TRANSPOSE_BY_ORIENTATION:
        return image
    notes.append(PictureNote(TURNED_NOTE, f"as EXIF orientation {turn} says"))
    return image if image.format == "TIFF" else image.transpose(_TRANSPOSE_BY_ORIENTATION[turn])


def check_picture_size(path: Path, size: PixelSize) -> None:
    width, height = size
    if width <= 0 or height <= 0:
        raise make_picture_error(
            path, "PICTURE-EMPTY", f"is {width} x {height}: it has no pixels", "Export it again.", size=size
        )
    limit = min(MAX_PICTURE_PIXELS, Image.MAX_IMAGE_PIXELS or MAX_PICTURE_PIXELS)
    if width * height > limit:
        raise make_picture_error(
            path,
            "PICTURE-BOMB",
            f"claims {width} x {height} pixels; the limit is {limit}",
            _SMALLER,
            size=size,
            pixels=width * height,
            limit_pixels=limit,
        )


_SMALLER = "If it is a true picture, scale it down: training needs a few million pixels at most."


def make_damage_error(path: Path, why: str) -> FileError:
    return make_picture_error(
        path,
        "PICTURE-TRUNCATED",
        f"is damaged or cut off: {why}",
        "Download or export it again.",
        size_bytes=get_file_size(path),
        pillow=why,
    )


def make_picture_error(path: Path, code: str, what: str, remedy: str, **evidence: object) -> FileError:
    told = {name.rstrip("_"): value for name, value in evidence.items()}
    return FileError(f"{path} {what}", code=code, subject=str(path), evidence=told, remedy=remedy)
