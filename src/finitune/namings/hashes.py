"""The hashes that the field's programs look for in an adapter's metadata, computed from the tensors at each write.

`sshs_model_hash` is the SHA-256 of the tensor bytes as the safetensors library orders them; `sshs_legacy_hash` is
that of 64 KiB at the first MiB of the file with kohya's texts as its only metadata, eight digits of it.
Source: sd-scripts library/train_util.py, precalculate_safetensors_hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

from torch import Tensor

from finitune.files.tensorfile import TensorFile, get_tensor_bytes
from finitune.files.writer import encode_header, order_like_safetensors

_LEGACY_HASH_BEGIN, _LEGACY_HASH_END = 0x100000, 0x110000
_LEGACY_HASH_DIGITS = 8
_HASH_CHUNK_BYTES = 1 << 20


def compute_kohya_hashes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """`sshs_model_hash` (64 hex digits) and `sshs_legacy_hash` (8), for tensors and the metadata to go with them."""
    names = order_like_safetensors({name: tensor.dtype for name, tensor in tensors.items()})
    texts = {key: text for key, text in metadata.items() if key.startswith("ss_")}
    header = encode_header({name: (tensors[name].dtype, tuple(tensors[name].shape)) for name in names}, texts)
    whole, window, position = hashlib.sha256(), hashlib.sha256(), 0
    for chunk in iterate_file_chunks(header, tensors, names):
        if position:  # the header is the first chunk, and no part of the model's hash
            whole.update(chunk)
        window.update(chunk[max(_LEGACY_HASH_BEGIN - position, 0) : max(_LEGACY_HASH_END - position, 0)])
        position += len(chunk)
    return {"sshs_model_hash": whole.hexdigest(), "sshs_legacy_hash": window.hexdigest()[:_LEGACY_HASH_DIGITS]}


def iterate_file_chunks(header: bytes, tensors: Mapping[str, Tensor], names: list[str]) -> Iterator[bytes | memoryview]:
    """A file's bytes, in pieces."""
    yield header
    for name in names:
        yield get_tensor_bytes(tensors[name])


def compute_kohya_file_hash(file: TensorFile) -> str:
    """The `sshs_model_hash` that a file of one piece ought to state: the SHA-256 of its bytes behind the header."""
    entries = list(file.entries.values())
    digest = hashlib.sha256()
    with file.path.open("rb") as stream:
        stream.seek(entries[0].begin if entries else 0)
        while piece := stream.read(_HASH_CHUNK_BYTES if entries else 0):
            digest.update(piece)
    return digest.hexdigest()
