"""What a file really is, judged by its bytes and never by its name.

A safetensors file is eight bytes of length (little-endian), a JSON header of that length, then the tensors. So byte
eight is "{" and the length is modest; that is looked at first, because a length of 640 bytes begins with the same two
bytes as a pickle. Everything else is recognised by the magic number it starts with.
Source: safetensors README, "Format".
"""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

from finitune.errors import FileError

MAX_SAFETENSORS_HEADER_BYTES = 100_000_000
LENGTH_FIELD_BYTES = 8
_JSON_WHITESPACE = b" \t\r\n"
PEEK_BYTES = 1024

_PICKLE_CONVERSION_REMEDY = """\
A pickle can run any program when it is opened, so it is not opened here. Convert it once, safely:
    import torch
    from safetensors.torch import save_file
    state = torch.load({source!r}, map_location="cpu", weights_only=True)
    state = state.get("state_dict", state)
    tensors = {{k: v.contiguous().clone() for k, v in state.items() if isinstance(v, torch.Tensor)}}
    save_file(tensors, {target!r})"""

_REMEDY_BY_CODE = {
    "FILE-EMPTY": "Download or export the file again.",
    "FILE-LFS-POINTER": "Only git-LFS's note about the file is here. Run `git lfs pull`, or download the file itself.",
    "FILE-HTML": "A web page was saved in its place, often a log-in or error page. Download it again.",
    "FILE-TEXT": "A safetensors file was expected here. Check the path.",
    "FILE-GGUF": "GGUF files hold quantised weights for another program. Use the original safetensors file.",
    "FILE-ARCHIVE": "Unpack the archive and pass the safetensors file inside.",
    "FILE-UNKNOWN": "The bytes are of no kind known here. Download the file again and compare its checksum.",
}


def check_safetensors(path: Path) -> int:
    """The size in bytes of a file that begins as safetensors does; raises FileError naming what else it is."""
    size = get_file_size(path)
    if size == 0:
        raise _refusal("FILE-EMPTY", path, "is empty", size)
    start = peek_bytes(path)
    if not is_safetensors_start(start):
        raise make_not_safetensors_error(path, start, size)
    return size


def read_utf8_text(path: Path) -> str:
    """A UTF-8 text file, without a byte order mark; raises FileError where it is missing or of another kind."""
    get_file_size(path)
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise make_unreadable_file_error(path, error) from error
    except UnicodeDecodeError as error:
        raise FileError(
            f"{path} is not UTF-8 text",
            code="FILE-NOT-TEXT",
            subject=str(path),
            evidence={"at_byte": error.start},
            remedy="Save it as UTF-8 in a text editor.",
        ) from error


def get_file_size(path: Path) -> int:
    """The size in bytes of a regular file; raises FileError if there is none."""
    if path.is_dir():
        remedy = "Pass the file itself. A diffusers folder goes where a folder is asked for."
        raise FileError(f"{path} is a folder, not a file", code="FILE-IS-FOLDER", subject=str(path), remedy=remedy)
    if not path.exists():
        near = sorted(p.name for p in path.parent.glob("*.safetensors*"))[:5] if path.parent.is_dir() else []
        remedy = f"Beside it are: {', '.join(near)}." if near else "Check the path."
        raise FileError(f"{path} does not exist", code="FILE-MISSING", subject=str(path), remedy=remedy)
    return path.stat().st_size


def peek_bytes(path: Path) -> bytes:
    """The first bytes of a file, at most PEEK_BYTES; raises FileError if it cannot be read."""
    try:
        with path.open("rb") as stream:
            return stream.read(PEEK_BYTES)
    except OSError as error:
        raise make_unreadable_file_error(path, error) from error


def make_unreadable_file_error(path: Path, error: OSError) -> FileError:
    """The error for a file that is there and that the system does not hand out."""
    return FileError(
        f"{path} cannot be read: {error.strerror}",
        code="FILE-UNREADABLE",
        subject=str(path),
        evidence={"errno": error.errno},
        remedy="Check the permissions and the disk.",
    )


def is_safetensors_start(start: bytes) -> bool:
    """Whether the bytes are a modest length followed by "{"."""
    if len(start) <= LENGTH_FIELD_BYTES:
        return False
    (length,) = struct.unpack("<Q", start[:LENGTH_FIELD_BYTES])
    return (
        2 <= length <= MAX_SAFETENSORS_HEADER_BYTES and start[LENGTH_FIELD_BYTES:].lstrip(_JSON_WHITESPACE)[:1] == b"{"
    )


def make_not_safetensors_error(path: Path, start: bytes, size: int) -> FileError:
    """The error for a file that does not begin as safetensors: what it is instead, and the way out."""
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith(b"version https://git-lfs.github.com/spec"):
        facts = parse_lfs_pointer(start)
        what = "is a git-LFS pointer" + (f" to {facts['promised_bytes']} bytes" if "promised_bytes" in facts else "")
        return _refusal("FILE-LFS-POINTER", path, what, size, **facts)
    if text.startswith((b"<!doctype html", b"<html", b"<?xml", b"<head")):
        return _refusal("FILE-HTML", path, "is a web page", size)
    if start.startswith(b"GGUF"):
        return _refusal("FILE-GGUF", path, "is a GGUF file", size)
    if start.startswith(b"PK\x03\x04") and not has_pickle_member(path):
        return _refusal("FILE-ARCHIVE", path, "is a zip archive", size)
    if start.startswith(b"PK\x03\x04") or (start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05"):
        target = path.with_suffix(".safetensors").name
        remedy = _PICKLE_CONVERSION_REMEDY.format(
            source=path.name, target=target if target != path.name else f"{path.stem}-new.safetensors"
        )
        return FileError(
            f"{path} is a pickle (.pt, .ckpt, .bin), not a safetensors file",
            code="FILE-PICKLE",
            subject=str(path),
            evidence={"size_bytes": size},
            remedy=remedy,
        )
    if is_utf8_bytes(start):
        kind = "is JSON text" if text.startswith((b"{", b"[")) else "is plain text"
        return _refusal("FILE-TEXT", path, kind, size, starts_with=start[:40].decode(errors="replace"))
    return _explain_length(path, start, size)


def _explain_length(path: Path, start: bytes, size: int) -> FileError:
    """The error for bytes that could only be a damaged safetensors file, or nothing known."""
    if size == LENGTH_FIELD_BYTES and (header := int.from_bytes(start, "little")) <= MAX_SAFETENSORS_HEADER_BYTES:
        expected = LENGTH_FIELD_BYTES + header
        return FileError(
            f"{path} is cut off behind its length field: {size} of at least {expected} bytes",
            code="FILE-TRUNCATED",
            subject=str(path),
            evidence={"size_bytes": size, "expected_bytes": expected},
            remedy="Download or export the file again.",
        )
    if size <= LENGTH_FIELD_BYTES:
        return FileError(
            f"{path} is cut off after {size} bytes, inside its length field",
            code="FILE-TRUNCATED",
            subject=str(path),
            evidence={"size_bytes": size, "least_bytes": LENGTH_FIELD_BYTES + 2},
            remedy="Download or export the file again.",
        )
    (length,) = struct.unpack("<Q", start[:LENGTH_FIELD_BYTES])
    if start[LENGTH_FIELD_BYTES : LENGTH_FIELD_BYTES + 1] == b"{" and length > MAX_SAFETENSORS_HEADER_BYTES:
        return FileError(
            f"{path} claims a header of {length} bytes; the limit is {MAX_SAFETENSORS_HEADER_BYTES}",
            code="FILE-HEADER-TOO-LONG",
            subject=str(path),
            evidence={"header_bytes": length, "limit_bytes": MAX_SAFETENSORS_HEADER_BYTES, "size_bytes": size},
            remedy="The first eight bytes are damaged. Download the file again."
            if LENGTH_FIELD_BYTES + length > size
            else "No reader takes a header of more than 100 MB: its texts (metadata) must be made shorter.",
        )
    if start[LENGTH_FIELD_BYTES:].startswith(b"\xef\xbb\xbf{"):
        return FileError(
            f"the header of {path} is wrong: a byte order mark stands before it",
            code="FILE-HEADER",
            subject=str(path),
            evidence={"size_bytes": size},
            remedy="It was edited as text. Download or export the file again.",
        )
    return _refusal("FILE-UNKNOWN", path, "is of an unknown kind", size, starts_with=start[:8].hex(" "))


def parse_lfs_pointer(start: bytes) -> dict[str, object]:
    """The size in bytes and the SHA-256 that a git-LFS pointer promises, where it says so."""
    facts: dict[str, object] = {}
    for line in start.decode(errors="replace").splitlines():
        if line.startswith("size ") and line[5:].isdigit():
            facts["promised_bytes"] = int(line[5:])
        elif line.startswith("oid sha256:"):
            facts["sha256"] = line.removeprefix("oid sha256:")
    return facts


def has_pickle_member(path: Path) -> bool:
    """Whether a zip archive is one of torch's, which keep their pickle in a member named data.pkl."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".pkl") for name in archive.namelist())
    except zipfile.BadZipFile:  # cut off: torch's archives are by far the likeliest
        return True


def is_utf8_bytes(start: bytes) -> bool:
    """Whether the bytes are UTF-8 without control characters; a character cut at the end is forgiven."""
    for cut in range(4):
        try:
            text = start[: len(start) - cut].decode()
        except UnicodeDecodeError:
            continue
        return bool(text) and all(c.isprintable() or c in "\t\r\n\f\ufeff" for c in text)
    return False


def _refusal(code: str, path: Path, what: str, size: int, **evidence: object) -> FileError:
    return FileError(
        f"{path} {what}" + ("" if size == 0 else ", not a safetensors file"),
        code=code,
        subject=str(path),
        evidence={"size_bytes": size, **evidence},
        remedy=_REMEDY_BY_CODE[code],
    )
