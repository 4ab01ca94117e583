"""Caption files as text: UTF-8, or refused with what they seem to be; and what can be mended without losing anything.

Nothing is dropped or replaced in silence. Source of the trouble: a cp1252 quotation mark in a caption stops other
trainers without the file's name. A mending changes how a text is written down and never what it says: it is a function
of the bytes alone, and does nothing the second time.
"""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from charset_normalizer import from_bytes
from ftfy import fix_encoding

from finitune.errors import FileError
from finitune.files.sniff import get_file_size, make_unreadable_file_error
from finitune.files.writer import write_bytes
from finitune.report import Finding, Level

_LIKELY_ENCODINGS = ("cp1252", "cp932", "gb18030", "utf_16")
_OTHER_ENCODINGS = ("cp1251", "cp1250", "euc_kr", "big5", "euc_jp", "utf_16_le", "utf_16_be", "cp1253", "cp1256")
_FAMILIAR_ENCODING_NAMES = {"cp932": "shift_jis"}
"""Codecs that people know by another name."""
UTF8_BOM = b"\xef\xbb\xbf"
_CODEC_BY_UTF16_BOM = {b"\xff\xfe": "utf_16_le", b"\xfe\xff": "utf_16_be"}
_MAX_SHOWN_CHARACTERS = 200
_SAVE_AS_UTF8 = "Save it as UTF-8."
MAX_CAPTION_BYTES = 256 << 10
"""Bytes; the longest prompt that a text encoder reads is a hundredth of it."""


@dataclass(frozen=True)
class CaptionText:
    """The text of a caption file: lines with LF between them, nothing blank around; and what is odd about it."""

    text: str
    findings: tuple[Finding, ...] = ()


def read_caption(path: Path) -> CaptionText:
    """The text of a UTF-8 file, with or without a byte order mark, any line ends.

    Findings: CAPTION-EMPTY, CAPTION-MOJIBAKE, CAPTION-LOST-CHARACTERS (warnings), CAPTION-CONTROL (note).
    Raises FileError: CAPTION-ENCODING with the byte, a guess and the text that it gives; CAPTION-TOO-LARGE;
    FILE-MISSING, FILE-UNREADABLE.
    """
    if (size := get_file_size(path)) > MAX_CAPTION_BYTES:
        raise FileError(
            f"{path} has {size} bytes, which no caption has; the limit is {MAX_CAPTION_BYTES}",
            code="CAPTION-TOO-LARGE",
            subject=str(path),
            evidence={"size_bytes": size, "limit_bytes": MAX_CAPTION_BYTES},
            remedy="It is another file under a caption's name, or grew by mistake: put the caption in its place.",
        )
    data = read_caption_bytes(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at = error.start + len(data) - len(error.object)  # the codec counts from behind the mark
        raise make_encoding_error(path, data, at, error.reason) from error
    if "\0" in text:
        raise make_encoding_error(path, data, data.index(b"\0"), "a zero byte")
    text = text.replace("\r\n", "\n").replace("\r", "\n").strip()
    return CaptionText(text, tuple(find_caption_oddities(path, text)))


def read_caption_bytes(path: Path) -> bytes:
    """All of a file; raises FileError (FILE-UNREADABLE)."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise make_unreadable_file_error(path, error) from error


def guess_encoding(data: bytes) -> str:
    """The codec that the bytes of a short text were most likely written with; "" where none fits."""
    if is_utf8_with_zeros(data):
        return ""
    guesses = (from_bytes(data, cp_isolation=list(some)).best() for some in (_LIKELY_ENCODINGS, _OTHER_ENCODINGS))
    return next((guess.encoding for guess in guesses if guess is not None), "")


def is_utf8_with_zeros(data: bytes) -> bool:
    """Whether bytes are UTF-8 with a stray zero byte or two; in UTF-16 a quarter of Latin text and more is zeros."""
    return 0 < 4 * data.count(0) < len(data) and is_utf8_text(data.replace(b"\0", b""))


def find_cut_character(data: bytes) -> int | None:
    """Where the unfinished last character begins, of bytes that are UTF-8 but for it; else None.

    A single high byte behind plain ASCII is more likely a letter of cp1252.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        decoder.decode(data)
    except UnicodeDecodeError:
        return None
    pending, _ = decoder.getstate()
    place = len(data) - len(pending)
    return place if len(pending) > 1 or (pending and not data[:place].isascii()) else None


def make_encoding_error(path: Path, data: bytes, at: int, reason: str) -> FileError:
    """The error for bytes that are no UTF-8 from a place on, with what they seem to be."""
    cut = find_cut_character(data)
    if cut is not None:
        guess, mended = "utf-8, cut off", data[:cut].decode("utf-8-sig")
        remedy = "It ends within a character: complete it."
    elif is_utf8_with_zeros(data):
        guess, mended = "utf-8 with zero bytes", data.replace(b"\0", b"").decode("utf-8-sig")
        remedy = "Take the zero bytes out."
    else:
        codec = guess_encoding(data)
        guess = _FAMILIAR_ENCODING_NAMES.get(codec, codec)
        mended = data.decode(codec, "replace") if codec else ""
        remedy = f"Read as {guess} it says {shorten_text(mended, 60)!r}. {_SAVE_AS_UTF8}" if guess else _SAVE_AS_UTF8
    byte = f"0x{data[at]:02x}"
    return FileError(
        f"{path} is not UTF-8: byte {at} is {byte}",
        code="CAPTION-ENCODING",
        subject=str(path),
        evidence={"at_byte": at, "byte": byte, "reason": reason, "guess": guess, "mended": shorten_text(mended)},
        remedy=remedy,
    )


def find_caption_oddities(path: Path, text: str) -> list[Finding]:
    """What is odd about the text of a caption, though it can be read."""
    if not text:
        remedy = "Write what the picture shows, or delete the file to use the class tokens."
        return [Finding(Level.WARNING, "CAPTION-EMPTY", str(path), f"{path} is empty", {}, remedy)]
    found: list[Finding] = []
    if (mended := mend_mojibake(text)) != text:
        message = (
            f"{path} was once read in a wrong encoding: {shorten_text(text, 60)!r} should be "
            f"{shorten_text(mended, 60)!r}"
        )
        evidence: dict[str, object] = {"mended": shorten_text(mended)}
        found.append(Finding(Level.WARNING, "CAPTION-MOJIBAKE", str(path), message, evidence, "Write it anew, mended."))
    if lost := text.count("\ufffd"):
        message = f"{path} holds {lost} replacement characters: some program could not read what stood there"
        remedy = "Write what is missing."
        found.append(Finding(Level.WARNING, "CAPTION-LOST-CHARACTERS", str(path), message, {"count": lost}, remedy))
    if control := [c for c in text if (unicodedata.category(c) == "Cc" and c != "\n") or c in "\u200b\ufeff"]:
        named = sorted({f"U+{ord(c):04X}" for c in control})
        message = f"{path} holds {len(control)} tabs or control characters: {', '.join(named[:5])}"
        evidence = {"count": len(control), "characters": named[:5]}
        found.append(Finding(Level.NOTE, "CAPTION-CONTROL", str(path), message, evidence, "Write spaces instead."))
    return found


def mend_mojibake(text: str) -> str:
    """The text without mojibake; quotation marks, widths and ligatures stay as they are."""
    return text if text.isascii() else fix_encoding(text)


def shorten_text(text: str, limit: int = _MAX_SHOWN_CHARACTERS) -> str:
    """The text, or its beginning where it is long."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def convert_to_utf8(data: bytes) -> tuple[bytes, str] | None:
    """Bytes of another encoding as plain UTF-8, and the encoding that they were in.

    None for UTF-8, and where no guess gives these very bytes back when its text is written in it again.
    """
    if is_utf8_text(data) or find_cut_character(data) is not None:
        return None
    encoding = codec = guess_encoding(data)
    mark = data[:2] if data[:2] in _CODEC_BY_UTF16_BOM else b""
    if mark and encoding == "utf_16":
        codec = _CODEC_BY_UTF16_BOM[mark]
    body = data[len(mark) :] if codec in _CODEC_BY_UTF16_BOM.values() else data
    try:
        text = body.decode(codec)
        faithful = text.encode(codec) == body
    except (LookupError, UnicodeError):  # no guess is no codec
        return None
    if not faithful or "\0" in text:
        return None
    return normalize_line_ends(text.encode()), _FAMILIAR_ENCODING_NAMES.get(encoding, encoding)


def is_utf8_text(data: bytes) -> bool:
    """Whether bytes are UTF-8 text."""
    try:
        return "\0" not in data.decode()
    except UnicodeDecodeError:
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
    data = read_caption_bytes(path)
    if (changed := change(data)) != data:
        write_bytes(path, changed)
