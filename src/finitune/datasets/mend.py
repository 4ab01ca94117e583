"""What can be put right in a dataset without losing anything: how a text is written down, and what a file is called.

What is said is never touched: no tag is dropped, no pixel is turned. Each change is a function of the bytes alone, and
does nothing the second time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from finitune.datasets.captions_read import KNOWN_AS, guess_of, is_cut_off
from finitune.datasets.signatures import EXTENSIONS
from finitune.errors import FileError
from finitune.files.sniff import unreadable
from finitune.files.writer import write_bytes

MARK = b"\xef\xbb\xbf"
WIDE_MARKS = {b"\xff\xfe": "utf_16_le", b"\xfe\xff": "utf_16_be"}
CODECS = {name: codec for codec, name in KNOWN_AS.items()}
"""The codec of an encoding that people know by another name."""
ENDINGS = {kind: ending for ending, kind in EXTENSIONS.items() if ending not in (".jpeg", ".tiff")}
"""The usual ending of each kind of picture."""


def as_utf8(data: bytes) -> tuple[bytes, str] | None:
    """Bytes of another encoding as plain UTF-8, and the encoding that they were in.

    None for UTF-8, and where no guess gives these very bytes back when its text is written in it again.
    """
    if is_utf8(data) or is_cut(data):
        return None
    encoding, _ = guess_of(data)
    mark = next((mark for mark in WIDE_MARKS if data.startswith(mark)), b"")
    codec = WIDE_MARKS[mark] if mark and encoding == "utf_16" else CODECS.get(encoding, encoding)
    body = data[len(mark) :] if codec in WIDE_MARKS.values() else data
    try:
        text = body.decode(codec)
        faithful = text.encode(codec) == body
    except (LookupError, UnicodeError):  # no guess is no codec
        return None
    return (with_plain_ends(text.encode()), encoding) if faithful and "\0" not in text else None


def is_utf8(data: bytes) -> bool:
    """Whether bytes are UTF-8 text."""
    try:
        return "\0" not in data.decode()
    except UnicodeDecodeError:
        return False


def is_cut(data: bytes) -> bool:
    """Whether bytes are UTF-8 that ends within a character."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return is_cut_off(data, error.start, error.reason)
    return False


def without_mark(data: bytes) -> bytes:
    """UTF-8 without its byte order mark."""
    return data.removeprefix(MARK) if is_utf8(data) else data


def with_plain_ends(data: bytes) -> bytes:
    """UTF-8 with the line ends of Unix."""
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if is_utf8(data) else data


def encoded_plainly(data: bytes) -> bytes:
    """Bytes as `as_utf8` gives them, or as they are."""
    found = as_utf8(data)
    return found[0] if found else data


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Write a file as `change` wants it; raises FileError (FILE-UNREADABLE, FILE-NOT-WRITTEN)."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    if (changed := change(data)) != data:
        write_bytes(path, changed)


def rightly_named(path: Path, kind: str) -> Path | None:
    """A picture's name with the ending of its kind; None where that name is taken, by a file of any case."""
    ending = ENDINGS.get(kind)
    if ending is None:
        return None
    name = path.with_suffix(ending)
    taken = {other.name.casefold() for other in path.parent.iterdir()}
    return None if name.name.casefold() in taken else name


def rename(path: Path, kind: str) -> None:
    """Give a picture the ending of its kind; its caption, which goes by the stem, stays with it.

    Does nothing where the picture is no more. Raises FileError (FILE-NOT-RENAMED).
    """
    if not path.exists():
        return
    name = rightly_named(path, kind)
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
