"""What a file is by its first bytes: one of the kinds of pictures that are read here, or what it is instead.

The bytes decide, never the name: a JPEG named .png is a JPEG, and a web page named .jpg is a web page.
"""

from __future__ import annotations

from pathlib import Path

from finitune.errors import FileError
from finitune.files.sniff import is_safetensors_start, is_utf8_bytes, parse_lfs_pointer

PICTURE_FORMAT_BY_EXTENSION = {
    ".png": "PNG",
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".webp": "WEBP",
    ".bmp": "BMP",
    ".gif": "GIF",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".avif": "AVIF",
    ".jxl": "JXL",
}
"""The endings that are taken for pictures, and Pillow's name of the kind that each promises."""

_EXTENSION_BY_PICTURE_FORMAT = {
    kind: ending for ending, kind in PICTURE_FORMAT_BY_EXTENSION.items() if ending not in (".jpeg", ".tiff")
}
"""The usual ending of each kind of picture."""

UNSUPPORTED_PICTURE_EXTENSIONS = frozenset(
    {".heic", ".heif", ".psd", ".jp2", ".svg", ".cr2", ".nef", ".arw", ".dng", ".raw"}
)
"""Endings of pictures of which none is read."""

_PICTURE_FORMAT_BY_MAGIC = {
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"\xff\xd8\xff": "JPEG",
    b"GIF87a": "GIF",
    b"GIF89a": "GIF",
    b"II*\x00": "TIFF",
    b"MM\x00*": "TIFF",
    b"II+\x00": "TIFF",
    b"MM\x00+": "TIFF",
    b"BM": "BMP",
    b"\xff\x0a": "JXL",
    b"\x00\x00\x00\x0cJXL ": "JXL",
}

_NON_PICTURE_BY_MAGIC = {
    b"8BPS": ("a Photoshop file", "Export it as PNG."),
    b"\x00\x00\x00\x0cjP  ": ("a JPEG 2000 picture", "Save it as PNG."),
    b"%PDF": ("a PDF document", "Export the picture from it as PNG."),
    b"\x1aE\xdf\xa3": ("a video (Matroska, WebM)", "Take single pictures out of it, as PNG."),
    b"PK\x03\x04": ("a zip archive", "Unpack it."),
    b"Rar!": ("a RAR archive", "Unpack it."),
    b"\x1f\x8b": ("a gzip archive", "Unpack it."),
}

_HEIC = ("a HEIC picture, as phones make them", "Save it as JPEG or PNG.")
_VIDEO = ("a video", "Take single pictures out of it, as PNG.")
_DOWNLOAD_AGAIN = "Download it again."


def detect_picture_format(start: bytes) -> str | None:
    """Pillow's name of the kind of picture that begins with these bytes (32 are enough), None for anything else."""
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "WEBP"
    if start[4:8] == b"ftyp":
        return "AVIF" if b"avi" in start[8:32] else None  # the brands avif and avis; HEIC has others
    if start[:2] == b"BM" and is_utf8_bytes(start):
        return None
    return next((name for magic, name in _PICTURE_FORMAT_BY_MAGIC.items() if start.startswith(magic)), None)


def describe_non_picture(start: bytes) -> tuple[str, str]:
    """What a file that is no picture is instead, and what to do about it."""
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith(b"version https://git-lfs.github.com/spec"):
        promised = parse_lfs_pointer(start).get("promised_bytes", "an unknown number of")
        return f"a git-LFS pointer to {promised} bytes", "Run `git lfs pull`, or download the file itself."
    if b"<svg" in text:
        return "an SVG drawing", "Export it as PNG."
    if text.startswith((b"<!doctype html", b"<html", b"<?xml", b"<head")):
        return "a web page, often of a log-in or an error", _DOWNLOAD_AGAIN
    if start[4:8] == b"ftyp":
        return _HEIC if start[8:12] in (b"heic", b"heix", b"hevc", b"mif1", b"msf1") else _VIDEO
    if start[:4] == b"RIFF" and start[8:12] == b"AVI ":
        return _VIDEO
    if is_safetensors_start(start):
        return "a safetensors file", "Move it elsewhere."
    for magic, told in _NON_PICTURE_BY_MAGIC.items():
        if start.startswith(magic):
            return told
    if is_utf8_bytes(start):
        return ("JSON text, often of an error" if text.startswith((b"{", b"[")) else "plain text"), _DOWNLOAD_AGAIN
    return f"of an unknown kind (it starts with {start[:8].hex(' ')})", _DOWNLOAD_AGAIN


def find_matching_name(path: Path, kind: str) -> Path | None:
    """A picture's name with the ending of its kind; None where that name is taken, by a file of any case."""
    ending = _EXTENSION_BY_PICTURE_FORMAT.get(kind)
    if ending is None:
        return None
    name = path.with_suffix(ending)
    taken = {other.name.casefold() for other in path.parent.iterdir()}
    return None if name.name.casefold() in taken else name


def rename_to_format(path: Path, kind: str) -> None:
    """Give a picture the ending of its kind; its caption, which goes by the stem, stays with it.

    Does nothing where the picture is no more. Raises FileError (FILE-NOT-RENAMED).
    """
    if not path.exists():
        return
    name = find_matching_name(path, kind)
    try:
        if name is None:
            raise FileExistsError(17, "that name is taken")
        path.rename(name)
    except OSError as error:
        raise FileError(
            f"{path} cannot be renamed: {error.strerror}",
            code="FILE-NOT-RENAMED",
            subject=str(path),
            evidence={"kind": kind},
            remedy=f"Give it an ending of {kind} yourself.",
        ) from error
