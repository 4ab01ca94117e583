"""Caption files as text: UTF-8, or refused with what they seem to be. Nothing is dropped or replaced in silence.

Source of the trouble: a cp1252 quotation mark in a caption stops other trainers without the file's name.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from pathlib import Path

from finitune.errors import FileError
from finitune.files.sniff import get_file_size, make_unreadable_file_error
from finitune.report import Finding, Level

_LIKELY_ENCODINGS = ("cp1252", "cp932", "gb18030", "utf_16")
_OTHER_ENCODINGS = ("cp1251", "cp1250", "euc_kr", "big5", "euc_jp", "utf_16_le", "utf_16_be", "cp1253", "cp1256")
ENCODING_NAME_BY_CODEC = {"cp932": "shift_jis"}
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
    try:
        data = path.read_bytes()
    except OSError as error:
        raise make_unreadable_file_error(path, error) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, data, error.start, error.reason) from error
    if "\0" in text:
        raise _not_utf8(path, data, data.index(b"\0"), "a zero byte")
    text = text.replace("\r\n", "\n").replace("\r", "\n").strip()
    return CaptionText(text, tuple(_oddities(path, text)))


def guess_encoding(data: bytes) -> tuple[str, str]:
    """The encoding that the bytes of a short text most likely have, and the text then; ("", "") where none fits."""
    from charset_normalizer import from_bytes

    if is_utf8_with_zeros(data):
        return "", ""
    for encodings in (_LIKELY_ENCODINGS, _OTHER_ENCODINGS):
        best = from_bytes(data, cp_isolation=list(encodings)).best()
        if best is not None:
            return ENCODING_NAME_BY_CODEC.get(best.encoding, best.encoding), str(best)
    return "", ""


def is_utf8_with_zeros(data: bytes) -> bool:
    """Whether bytes are UTF-8 with a stray zero byte or two; in UTF-16 a quarter of Latin text and more is zeros."""
    zeros = data.count(0)
    if not zeros or 4 * zeros >= len(data):
        return False
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def is_truncated_utf8(data: bytes, at: int, reason: str) -> bool:
    """Whether bytes that a UTF-8 decoder refuses at a place, for a reason, are UTF-8 that ends within a character."""
    return reason == "unexpected end of data" and (len(data) - at > 1 or not data[:at].isascii())  # else maybe cp1252


def _not_utf8(path: Path, data: bytes, at: int, reason: str) -> FileError:
    evidence: dict[str, object] = {"at_byte": at, "byte": f"0x{data[at]:02x}", "reason": reason}
    if is_truncated_utf8(data, at, reason):
        evidence |= {"guess": "utf-8, cut off", "mended": shorten_text(data[:at].decode("utf-8-sig"))}
        remedy = "It ends within a character: complete it."
    elif is_utf8_with_zeros(data):
        evidence |= {
            "guess": "utf-8 with zero bytes",
            "mended": shorten_text(data.replace(b"\0", b"").decode("utf-8-sig")),
        }
        remedy = "Take the zero bytes out."
    else:
        guess, mended = guess_encoding(data)
        evidence |= {"guess": guess, "mended": shorten_text(mended)}
        remedy = f"Read as {guess} it says {shorten_text(mended, 60)!r}. {_SAVE_AS_UTF8}" if guess else _SAVE_AS_UTF8
    return FileError(
        f"{path} is not UTF-8: byte {at} is 0x{data[at]:02x}",
        code="CAPTION-ENCODING",
        subject=str(path),
        evidence=evidence,
        remedy=remedy,
    )


def _oddities(path: Path, text: str) -> list[Finding]:
    if not text:
        remedy = "Write what the picture shows, or delete the file to use the class tokens."
        return [Finding(Level.WARNING, "CAPTION-EMPTY", str(path), f"{path} is empty", {}, remedy)]
    found: list[Finding] = []
    if (mended := _mended(text)) != text:
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


def _mended(text: str) -> str:
    """The text without mojibake; quotation marks, widths and ligatures stay as they are."""
    if text.isascii():
        return text
    from ftfy import fix_encoding

    return fix_encoding(text)


def shorten_text(text: str, limit: int = _MAX_SHOWN_CHARACTERS) -> str:
    """The text, or its beginning where it is long."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
