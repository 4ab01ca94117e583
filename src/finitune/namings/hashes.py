"""The hashes that the field's programs look for in an adapter's metadata, computed from the tensors at each write.

`sshs_model_hash` is the SHA-256 of the tensor bytes as the safetensors library orders them; `sshs_legacy_hash` is
that of 64 KiB at the first MiB of the file with kohya's texts as its only metadata, eight digits of it.
Source: sd-scripts library/train_util.py, precalculate_safetensors_hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

from torch import Tensor

from finitune.files.tensorfile import TensorFile, content_of, dtype_name
from finitune.files.writer import encode_header

LEGACY_BEGIN, LEGACY_END = 0x100000, 0x110000
LEGACY_DIGITS = 8
PIECE_BYTES = 1 << 20

ORDER: tuple[str, ...] = (
    *("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3"),
    *("I16", "U16", "F16", "BF16"),
    *("I32", "U32", "F32"),
    *("F64", "I64", "U64"),
)
"""The dtypes as the safetensors library ranks them; the last comes first in its files."""


def kohya_hashes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """`sshs_model_hash` (64 hex digits) and `sshs_legacy_hash` (8), for tensors and the metadata to go with them."""
    names = library_order(tensors)
    texts = {key: text for key, text in metadata.items() if key.startswith("ss_")}
    header = encode_header({name: (tensors[name].dtype, tuple(tensors[name].shape)) for name in names}, texts)
    whole, window, position = hashlib.sha256(), hashlib.sha256(), 0
    for chunk in chunks(header, tensors, names):
        if position:  # the header is the first chunk, and no part of the model's hash
            whole.update(chunk)
        window.update(chunk[max(LEGACY_BEGIN - position, 0) : max(LEGACY_END - position, 0)])
        position += len(chunk)
    return {"sshs_model_hash": whole.hexdigest(), "sshs_legacy_hash": window.hexdigest()[:LEGACY_DIGITS]}


def library_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Tensor names in the order in which the safetensors library writes them: by dtype, then by name."""
    return sorted(tensors, key=lambda name: (-ORDER.index(dtype_name(tensors[name].dtype)), name))


def chunks(header: bytes, tensors: Mapping[str, Tensor], names: list[str]) -> Iterator[bytes | memoryview]:
    """A file's bytes, in pieces."""
    yield header
    for name in names:
        yield content_of(tensors[name])


def file_hash(file: TensorFile) -> str:
    """The `sshs_model_hash` that a file of one piece ought to state: the SHA-256 of its bytes behind the header."""
    entries = list(file.entries.values())
    digest = hashlib.sha256()
    with file.path.open("rb") as stream:
        stream.seek(entries[0].begin if entries else 0)
        while piece := stream.read(PIECE_BYTES if entries else 0):
            digest.update(piece)
    return digest.hexdigest()
