"""A checkpoint as a table of contents: the header at once, the tensors one by one.

The header is not believed before it agrees with the size of the file: every byte behind it belongs to exactly one
tensor. Tensors are read, not memory-mapped: a file replaced while it is in use can then not change a loaded model.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from finitune.errors import FileError
from finitune.files.sniff import LENGTH_FIELD_BYTES, check_safetensors, get_file_size

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SAFETENSORS_DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""The file's name of a dtype: torch's name, and its size in bytes."""

INDEX_SUFFIX = ".index.json"


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: dtype as the file names it, shape, file, and its bytes [begin, begin + size_bytes)."""

    dtype: str
    shape: tuple[int, ...]
    path: Path
    begin: int
    size_bytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, SAFETENSORS_DTYPES[self.dtype][0])


@dataclass(frozen=True)
class NonfiniteElements:
    """How many elements of a tensor are NaN, how many are infinite, and how many it has."""

    nan: int
    inf: int
    size: int


class TensorFile:
    """A safetensors file, or a sharded one by its `*.safetensors.index.json`; raises FileError for anything else."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if self.path.name.endswith(INDEX_SUFFIX):
            self.entries, self.metadata = read_index(self.path)
        else:
            self.entries, self.metadata = read_header(self.path)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor."""
        return {name: entry.shape for name, entry in self.entries.items()}

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(entry.size_bytes for entry in self.entries.values())

    def read(self, name: str) -> Tensor:
        """One tensor, in the dtype and shape of the file; raises FileError where the file has shrunk since."""
        return self.read_hashed(name, hashed=False)[0]

    def read_hashed(self, name: str, hashed: bool = True) -> tuple[Tensor, str]:
        """One tensor and the SHA-256 of its dtype, shape and bytes, from one reading."""
        import torch

        entry = self.entries[name]
        raw = torch.empty(entry.size_bytes, dtype=torch.uint8)
        content: Any = raw.numpy()
        with entry.path.open("rb") as stream:
            stream.seek(entry.begin)
            got = stream.readinto(content) if entry.size_bytes else 0
        if got != entry.size_bytes:
            raise make_truncated_file_error(entry.path, entry.begin + got, entry.begin + entry.size_bytes)
        tensor = raw.view(entry.torch_dtype) if entry.size_bytes else raw.to(entry.torch_dtype)
        return tensor.reshape(entry.shape), hash_content(entry.dtype, entry.shape, content) if hashed else ""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) one by one, in the order of the bytes."""
        for name in self.entries:
            yield name, self.read(name)

    def fingerprint(self) -> str:
        """A SHA-256 of all tensors, the same whatever the metadata, the order of keys and the sharding."""
        return compute_tensor_digest({name: self.read_hashed(name)[1] for name in self.entries})

    def nonfinite(self) -> dict[str, NonfiniteElements]:
        """The tensors that hold NaN or inf, with their counts; reads one tensor at a time."""
        counts = ((name, count_nonfinite(tensor)) for name, tensor in self.tensors())
        return {name: count for name, count in counts if count.nan or count.inf}


def hash_content(dtype: str, shape: tuple[int, ...], content: bytes | memoryview) -> str:
    """SHA-256 of a tensor's dtype (as files name it), its shape and its bytes."""
    digest = hashlib.sha256(f"{dtype}{list(shape)}".encode())
    digest.update(content)
    return digest.hexdigest()


def hash_tensor(tensor: Tensor) -> str:
    """The hash that a tensor in memory would have in a file."""
    return hash_content(to_safetensors_dtype(tensor.dtype), tuple(tensor.shape), get_tensor_bytes(tensor))


def to_safetensors_dtype(dtype: torch.dtype) -> str:
    """A torch dtype as files name it; raises KeyError for one that they cannot hold."""
    return {torch_name: name for name, (torch_name, _) in SAFETENSORS_DTYPES.items()}[str(dtype).removeprefix("torch.")]


def get_tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, row-major, little-endian."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    content: Any = flat.view(torch.uint8).numpy()
    return memoryview(content)


def compute_tensor_digest(hashes: Mapping[str, str]) -> str:
    """A SHA-256 over named tensor hashes, independent of their order."""
    digest = hashlib.sha256()
    for name in sorted(hashes):
        digest.update(f"{name}\0{hashes[name]}\n".encode())
    return digest.hexdigest()


def count_nonfinite(tensor: Tensor) -> NonfiniteElements:
    """Counts NaN and inf in a tensor of any dtype."""
    import torch

    if not tensor.dtype.is_floating_point:
        return NonfiniteElements(0, 0, tensor.numel())
    if tensor.dtype.itemsize == 1:  # torch can neither compare nor test 8-bit floats
        tensor = tensor.float()
    if not tensor.numel() or all(math.isfinite(extreme) for extreme in torch.aminmax(tensor)):
        return NonfiniteElements(0, 0, tensor.numel())  # one pass, which a NaN or an infinity cannot hide from
    return NonfiniteElements(int(tensor.isnan().sum()), int(tensor.isinf().sum()), tensor.numel())


def read_header(path: Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The entries in the order of their bytes, and the metadata, of one safetensors file; raises FileError."""
    size = check_safetensors(path)
    with path.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(LENGTH_FIELD_BYTES))
        if LENGTH_FIELD_BYTES + length > size:
            raise make_truncated_file_error(path, size, LENGTH_FIELD_BYTES + length)
        header = parse_json_object(path, stream.read(length), "FILE-HEADER")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise make_bad_header_error(path, "its metadata is not a table of texts")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise make_bad_header_error(path, f"the metadata's {key!r} is {json.dumps(value)[:40]}, and no text")
    start = LENGTH_FIELD_BYTES + length
    entries = {name: parse_tensor_entry(path, name, fields, start) for name, fields in header.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].size_bytes)))
    check_byte_layout(path, ordered, start, size)
    return ordered, metadata


def parse_tensor_entry(path: Path, name: str, fields: object, start: int) -> TensorEntry:
    """One header field as a TensorEntry; raises FileError where its numbers contradict each other."""
    if not isinstance(fields, dict):
        raise make_bad_header_error(path, f"{name!r} is not a table")
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if dtype not in SAFETENSORS_DTYPES:
        raise FileError(
            f"the header of {path} is wrong: {name!r} has the unknown dtype {dtype!r}",
            code="FILE-HEADER",
            subject=str(path),
            evidence={"known": ", ".join(SAFETENSORS_DTYPES)},
            remedy="It is quantised, or of a newer kind than this program knows. Take the file in fp16, bf16 or fp32.",
        )
    if not is_count_list(shape) or not is_count_list(offsets) or len(offsets) != 2:
        raise make_bad_header_error(path, f"{name!r} has shape {shape!r} and offsets {offsets!r}")
    begin, end = offsets
    needed = math.prod(shape) * SAFETENSORS_DTYPES[dtype][1]
    if end - begin != needed:
        raise make_bad_header_error(
            path, f"{name!r} needs {needed} bytes and has {end - begin}", shape=list(shape), dtype=dtype
        )
    return TensorEntry(dtype, tuple(shape), path, start + begin, needed)


def check_byte_layout(path: Path, entries: Mapping[str, TensorEntry], start: int, size: int) -> None:
    """Every byte from `start` to `size` belongs to exactly one tensor; raises FileError."""
    end = start
    for name, entry in entries.items():
        if entry.begin < end:
            raise make_bad_header_error(
                path, f"{name!r} overlaps the tensor before it", begin=entry.begin, previous_end=end
            )
        if entry.begin > end:
            raise make_bad_header_error(path, f"{entry.begin - end} bytes before {name!r} belong to no tensor")
        end = entry.begin + entry.size_bytes
    if end > size:
        first = next(name for name, entry in entries.items() if entry.begin + entry.size_bytes > size)
        raise make_truncated_file_error(path, size, end, first)
    if end < size:
        raise FileError(
            f"{path} has {size - end} bytes behind its last tensor",
            code="FILE-TRAILING-BYTES",
            subject=str(path),
            evidence={"size_bytes": size, "expected_bytes": end},
            remedy="It was written over a longer file, or damaged in a transfer. Download or export it again; or copy "
            f"its first {end} bytes, which are whole: head -c {end} FILE > COPY",
        )


def read_index(path: Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The entries of all shards, and the metadata of the first, of a sharded checkpoint; raises FileError."""
    get_file_size(path)
    weight_map = parse_json_object(path, path.read_bytes(), "FILE-INDEX").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise make_bad_index_error(path, "it has no weight_map")
    shards = sorted(set(weight_map.values()), key=str)
    outside = [s for s in shards if not isinstance(s, str) or Path(s).name != s]
    if outside:
        raise make_bad_index_error(path, f"it names {outside[0]!r}, which is not a file beside it")
    read = {shard: read_header(path.parent / shard) for shard in shards}
    missing = [name for name, shard in weight_map.items() if name not in read[shard][0]]
    extra = [name for shard in shards for name in read[shard][0] if weight_map.get(name) != shard]
    if missing or extra:
        what = f"{len(missing)} of its tensors are missing from the shards, {len(extra)} of theirs from it"
        raise make_bad_index_error(path, what, first=(missing + extra)[0])
    entries = {name: entry for shard in shards for name, entry in read[shard][0].items()}
    return entries, read[shards[0]][1]


def parse_json_object(path: Path, content: bytes, code: str) -> dict[str, Any]:
    """JSON text as a table with distinct names; raises FileError with `code`."""
    broken = make_bad_index_error if code == "FILE-INDEX" else make_bad_header_error
    try:
        table = json.loads(content.decode(), object_pairs_hook=build_distinct_table)
    except (ValueError, RecursionError) as error:
        raise broken(path, f"it is not JSON ({error})") from error
    if not isinstance(table, dict):
        raise broken(path, "it is not a table")
    return table


def build_distinct_table(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A table from pairs; raises ValueError where a name comes twice."""
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} comes twice")
    return table


def is_count_list(value: object) -> TypeGuard[list[int]]:
    """Whether a value is a list of whole numbers, none negative."""
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def make_truncated_file_error(path: Path, size: int, expected: int, tensor: str = "") -> FileError:
    """The error for a file that ends before its tensors do; `tensor` is the first that is not whole."""
    where = f" ({100 * size // expected} %); the first tensor that is not whole is {tensor!r}" if tensor else ""
    return FileError(
        f"{path} is cut off: {size} of {expected} bytes{where}",
        code="FILE-TRUNCATED",
        subject=str(path),
        evidence={"size_bytes": size, "expected_bytes": expected, **({"tensor": tensor} if tensor else {})},
        remedy="The download or the copy stopped early. Fetch the file again.",
    )


def make_bad_header_error(path: Path, why: str, **evidence: object) -> FileError:
    """The error for a safetensors header that cannot be meant."""
    remedy = "The file is damaged, or was written by a faulty program. Download or export it again."
    return FileError(
        f"the header of {path} is wrong: {why}", code="FILE-HEADER", subject=str(path), evidence=evidence, remedy=remedy
    )


def make_bad_index_error(path: Path, why: str, **evidence: object) -> FileError:
    """The error for a sharded checkpoint's index that cannot be meant."""
    remedy = "Fetch the index and all its shards again, from one place."
    return FileError(
        f"the index {path} is wrong: {why}", code="FILE-INDEX", subject=str(path), evidence=evidence, remedy=remedy
    )
