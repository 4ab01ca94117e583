"""What can be put right in a dataset without losing anything: how a text is written down, and what a file is called.

What is said is never touched: no tag is dropped, no pixel is turned. Each change is a function of the bytes alone, and
does nothing the second time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from finitune.datasets.captions_read import ENCODING_NAME_BY_CODEC, guess_encoding, is_truncated_utf8
from finitune.datasets.picture_signatures import PICTURE_FORMAT_BY_EXTENSION
from finitune.errors import FileError
from finitune.files.sniff import make_unreadable_file_error
from finitune.files.writer import write_bytes

UTF8_BOM = b"\xef\xbb\xbf"
_CODEC_BY_UTF16_BOM = {b"\xff\xfe": "utf_16_le", b"\xfe\xff": "utf_16_be"}
_CODEC_BY_ENCODING_NAME = {name: codec for codec, name in ENCODING_NAME_BY_CODEC.items()}
"""The codec of an encoding that people know by another name."""
_EXTENSION_BY_PICTURE_FORMAT = {
    kind: ending for ending, kind in PICTURE_FORMAT_BY_EXTENSION.items() if ending not in (".jpeg", ".tiff")
}
"""The usual ending of each kind of picture."""


def convert_to_utf8(data: bytes) -> tuple[bytes, str] | None:
    """Bytes of another encoding as plain UTF-8, and the encoding that they were in.

    None for UTF-8, and where no guess gives these very bytes back when its text is written in it again.
    """
    if is_utf8_text(data) or ends_within_character(data):
        return None
    encoding, _ = guess_encoding(data)
    mark = next((mark for mark in _CODEC_BY_UTF16_BOM if data.startswith(mark)), b"")
    codec = (
        _CODEC_BY_UTF16_BOM[mark] if mark and encoding == "utf_16" else _CODEC_BY_ENCODING_NAME.get(encoding, encoding)
    )
    body = data[len(mark) :] if codec in _CODEC_BY_UTF16_BOM.values() else data
    try:
        text = body.decode(codec)
        faithful = text.encode(codec) == body
    except (LookupError, UnicodeError):  # no guess is no codec
        return None
    return (normalize_line_ends(text.encode()), encoding) if faithful and "\0" not in text else None


def is_utf8_text(data: bytes) -> bool:
    """Whether bytes are UTF-8 text."""
    try:
        return "\0" not in data.decode()
    except UnicodeDecodeError:
        return False


def ends_within_character(data: bytes) -> bool:
    """Whether bytes are UTF-8 that ends within a character."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return is_truncated_utf8(data, error.start, error.reason)
    return False


def remove_bom(data: bytes) -> bytes:
    """UTF-8 without its byte order mark."""
    return data.removeprefix(UTF8_BOM) if is_utf8_text(data) else data


def normalize_line_ends(data: bytes) -> bytes:
    """UTF-8 with the line ends of Unix."""
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if is_utf8_text(data) else data


def ensure_utf8(data: bytes) -> bytes:
    """Bytes as `convert_to_utf8` gives them, or as they are."""
    found = convert_to_utf8(data)
    return found[0] if found else data


def rewrite_file(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Write a file as `change` wants it; raises FileError (FILE-UNREADABLE, FILE-NOT-WRITTEN)."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise make_unreadable_file_error(path, error) from error
    if (changed := change(data)) != data:
        write_bytes(path, changed)


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
