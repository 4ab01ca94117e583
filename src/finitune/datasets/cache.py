"""What an encoder has made of pictures and texts, on disk and in memory: found by content, checked, written whole.

An entry is a safetensors file `<source>-<key>.safetensors`. The source is what it was made of (the picture's bytes and
its cut; a caption), the key is that and what made it (`identity`). So an entry that is found is the right one: another
model, dtype or length has another name, and old entries stay until they are pruned. Two programs may write one entry
at once: each writes a file of its own and renames it, and both hold the same.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Generic, Protocol, TypeAlias, TypeVar

from torch import Tensor

from finitune.errors import FileError, NumericsError
from finitune.files.sniff import make_unreadable_file_error
from finitune.files.tensorfile import TensorFile, compute_tensor_digest, count_nonfinite, hash_tensor
from finitune.files.writer import is_abandoned_file, save_tensors
from finitune.models.loaded import FamilyEncoders
from finitune.report import Finding, Level

ENCODER_NAME_BY_CACHE_KIND = {"latents": "the VAE", "texts": "the text encoder"}
CACHE_SOURCE_DIGITS = 32
CACHE_KEY_DIGITS = 16
_HASH_CHUNK_BYTES = 1 << 20
MAX_CACHE_NAMES_SHOWN = 5

_TRANSFORM_VERSION = "1"
"""Goes up when `transform_pixels` makes other pixels of the same picture."""

EncodedTensors: TypeAlias = dict[str, Tensor]
_Item = TypeVar("_Item")
_Requested = TypeVar("_Requested", contravariant=True)
EntryValidator = Callable[[Mapping[str, Tensor]], str]
"""What is wrong with the tensors of an entry, "" if nothing."""


@dataclass(frozen=True)
class CacheSource:
    """What an entry is made of: a digest of all that matters, and its name for people."""

    digest: str
    subject: str

    @classmethod
    def of(cls, subject: str, *parts: object) -> CacheSource:
        """The source that consists of plain values, called `subject`."""
        return cls(compute_cache_digest(parts, CACHE_SOURCE_DIGITS), subject)


@dataclass
class CacheStatistics:
    """What became of a cache's entries: how many were found and made, and of the rest why they were made again."""

    reused: int = 0
    made: int = 0
    remade: dict[CacheSource, str] = field(default_factory=dict)
    """Entries that could not be used: {source: what is wrong}."""
    stale: dict[CacheSource, str] = field(default_factory=dict)
    """Entries that another encoder made, and that were left alone: {source: what differs}."""

    def figures(self, kind: str) -> dict[str, object]:
        """The counts, each under a name that begins with `kind`."""
        counts = {"made": self.made, "reused": self.reused, "remade": len(self.remade), "stale": len(self.stale)}
        return {f"{kind}_{name}": count for name, count in counts.items()}

    def findings(self, kind: str) -> list[Finding]:
        """What is to be said: CACHE-REMADE, a warning, and CACHE-STALE, a note."""
        found: list[Finding] = []
        if self.remade:
            what = f"{len(self.remade)} entries of the cache of {kind} were unusable and made again"
            found.append(summarize_cache_entries(Level.WARNING, "CACHE-REMADE", what, self.remade))
        if self.stale:
            what = f"{len(self.stale)} entries of the cache of {kind} are of other settings, and were left as they are"
            found.append(summarize_cache_entries(Level.NOTE, "CACHE-STALE", what, self.stale))
        return found


def summarize_cache_entries(level: Level, code: str, what: str, entries: Mapping[CacheSource, str]) -> Finding:
    """A finding about entries, with the reason of the first and the names of some."""
    named = [(source.subject, reason) for source, reason in entries.items()]
    subject, reason = named[0]
    evidence: dict[str, object] = {"count": len(named), "entries": dict(named[:MAX_CACHE_NAMES_SHOWN])}
    remedy = (
        "A damaged entry comes from a full or failing disk." if level is Level.WARNING else "Prune to free the space."
    )
    return Finding(level, code, subject, f"{what}; {subject}: {reason}", evidence, remedy)


class EncoderCache:
    """The entries of one kind ("latents", "texts") in `folder`, made by what `identity` tells."""

    def __init__(self, folder: str | Path, kind: str, identity: Mapping[str, str]):
        self.folder = Path(folder) / kind
        self.kind = kind
        self.identity = dict(identity)
        self.account = CacheStatistics()

    def path_of(self, source: CacheSource) -> Path:
        """The file of an entry, whether or not it is there."""
        key = compute_cache_digest((source.digest, sorted(self.identity.items())), CACHE_KEY_DIGITS)
        return self.folder / f"{source.digest}-{key}.safetensors"

    def get(self, source: CacheSource, fault: EntryValidator) -> dict[str, Tensor] | None:
        """The tensors of an entry; None where it is not there, or not whole, finite and as `fault` wants it.

        Entries that cannot be used, or are of another identity, are entered into the account.
        """
        path = self.path_of(source)
        if not path.is_file():
            self.record_stale(source)
            return None
        try:
            tensors, wrong = self.read(path, source)
            wrong = wrong or fault(tensors)
        except (FileError, OSError) as error:
            tensors, wrong = {}, str(error).partition("\n")[0]
        if wrong:
            self.account.remade[source] = wrong
            return None
        self.account.reused += 1
        return tensors

    def read(self, path: Path, source: CacheSource) -> tuple[dict[str, Tensor], str]:
        """The tensors of a file, and what is wrong with them; raises FileError where they cannot be read."""
        file = TensorFile(path)
        read = {name: file.read_hashed(name) for name in file}
        tensors = {name: tensor for name, (tensor, _) in read.items()}
        if file.metadata.get("checksum") != compute_tensor_digest({name: digest for name, (_, digest) in read.items()}):
            return tensors, "its content is not what was written"
        if read_cache_identity(file) != self.identity or file.metadata.get("source") != source.digest:
            return tensors, "it is of another source, under this one's name"
        return tensors, "" if are_tensors_finite(tensors) else "it holds NaN or infinities"

    def put(self, source: CacheSource, tensors: Mapping[str, Tensor]) -> None:
        """Write an entry, whole or not at all; raises NumericsError (CACHE-NONFINITE), FileError (FILE-NOT-WRITTEN)."""
        check_entry_finite(self.kind, source, tensors, self.identity)
        metadata = {
            "subject": source.subject,
            "source": source.digest,
            "identity": json.dumps(self.identity, sort_keys=True),
            "checksum": compute_tensor_digest({name: hash_tensor(tensor) for name, tensor in tensors.items()}),
        }
        path = self.path_of(source)
        save_tensors(path, tensors, metadata)
        self.account.made += 1
        self.present.setdefault(source.digest, set()).add(path)

    @cached_property
    def present(self) -> dict[str, set[Path]]:
        """The entries in the folder by source, as they were when first asked for, and those put since."""
        present: dict[str, set[Path]] = {}
        for path in self.folder.glob("*-*.safetensors"):
            if not path.name.startswith("."):
                present.setdefault(path.name.partition("-")[0], set()).add(path)
        return present

    def record_stale(self, source: CacheSource) -> None:
        """Enter into the account what differs in the entries of the same source."""
        for path in sorted(self.present.get(source.digest, ())):
            with suppress(FileError):
                self.account.stale[source] = describe_identity_change(
                    read_cache_identity(TensorFile(path)), self.identity
                )

    def prune(self, remove: bool = False) -> list[Path]:
        """The entries of another identity or unreadable, and what killed programs left; they are removed if asked."""
        useless = [path for paths in self.present.values() for path in paths if not self.is_own(path)]
        for path in self.folder.glob(".partial-*"):
            with suppress(OSError):  # its program has just finished
                useless += [path] * is_abandoned_file(path)
        if remove:
            for path in useless:
                path.unlink(missing_ok=True)
            del self.present
        return sorted(useless)

    def is_own(self, path: Path) -> bool:
        """Whether a file is an entry of this identity."""
        try:
            return read_cache_identity(TensorFile(path)) == self.identity
        except FileError:
            return False


@dataclass(frozen=True)
class EncoderCaches:
    """The two caches of a run."""

    latents: EncoderCache
    texts: EncoderCache

    @classmethod
    def beside(cls, folder: str | Path, encoders: FamilyEncoders) -> EncoderCaches:
        """The caches of these encoders in a folder.

        A name in `encoders.identity` that begins with "latents." or "texts." makes entries of that kind stale only.
        """
        latents = {**select_encoder_identity(encoders, "latents", "texts"), "fit": _TRANSFORM_VERSION}
        return cls(
            EncoderCache(folder, "latents", latents),
            EncoderCache(folder, "texts", select_encoder_identity(encoders, "texts", "latents")),
        )


def select_encoder_identity(encoders: FamilyEncoders, kind: str, other: str) -> dict[str, str]:
    """The part of the encoders' identity that is about entries of one kind."""
    named = {name.removeprefix(f"{kind}."): value for name, value in encoders.identity.items()}
    return {name: value for name, value in named.items() if not name.startswith(f"{other}.")}


class LruTensorCache:
    """The entries used last, as many as fit into `limit_bytes`."""

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._entries: OrderedDict[str, EncodedTensors] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, digest: str) -> EncodedTensors | None:
        """The entry of a source, if it is still here."""
        if digest in self._entries:
            self._entries.move_to_end(digest)
        return self._entries.get(digest)

    def put(self, digest: str, entry: EncodedTensors) -> None:
        """Keep an entry in place of those that were not used for longest."""
        if digest in self._entries:
            return
        self._entries[digest] = entry
        self.size_bytes += count_entry_bytes(entry)
        while self.size_bytes > self.limit_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.size_bytes -= count_entry_bytes(oldest)


def count_entry_bytes(entry: Mapping[str, Tensor]) -> int:
    """The memory that an entry takes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in entry.values())


class EntryEncoder(Protocol[_Requested]):
    """How entries of one kind are made, told apart, and judged."""

    at_once: int
    """How many are made at once."""

    def source_of(self, item: _Requested) -> CacheSource:
        """What the entry of an item is made of."""
        ...

    def keeps(self, item: _Requested) -> bool:
        """Whether the entry will be asked for again."""
        ...

    def fault(self, item: _Requested, entry: Mapping[str, Tensor]) -> str:
        """What is wrong with an entry's tensors, "" if nothing."""
        ...

    def make(self, items: Sequence[_Requested]) -> list[EncodedTensors]:
        """The entries of some items, that can be made at once."""
        ...


class EntryStore(Generic[_Item]):
    """The entries of one kind: from memory, from the cache on disk, or made by the encoder and then kept."""

    def __init__(self, maker: EntryEncoder[_Item], cache: EncoderCache, recent: LruTensorCache):
        self.maker = maker
        self.cache = cache
        self.recent = recent

    def of(self, items: Sequence[_Item]) -> list[EncodedTensors]:
        """The entries of these items; what is neither in memory nor on the disk is made.

        Raises NumericsError (CACHE-NONFINITE), FileError where a picture cannot be read or an entry not be written.
        """
        found = {item: self.look_up(item) for item in dict.fromkeys(items)}
        missing = [item for item, entry in found.items() if entry is None]
        made: dict[_Item, EncodedTensors] = {}
        for begin in range(0, len(missing), self.maker.at_once):
            some = missing[begin : begin + self.maker.at_once]
            for item, entry in zip(some, self.maker.make(some), strict=True):
                made[item] = self.keep(item, entry)
        return [made[item] if (entry := found[item]) is None else entry for item in items]

    def look_up(self, item: _Item) -> EncodedTensors | None:
        """The entry of an item from memory or from the disk, if it is there and good."""
        if not self.maker.keeps(item):
            return None
        source = self.maker.source_of(item)
        entry = self.recent.get(source.digest)
        if entry is None:
            entry = self.cache.get(source, lambda tensors: self.maker.fault(item, tensors))
            if entry is not None:
                self.recent.put(source.digest, entry)
        return entry

    def keep(self, item: _Item, entry: EncodedTensors) -> EncodedTensors:
        """The entry that was made, checked, and kept where it will be asked for again."""
        source = self.maker.source_of(item)
        if not self.maker.keeps(item):
            check_entry_finite(self.cache.kind, source, entry, self.cache.identity)
            return entry
        self.cache.put(source, entry)
        self.recent.put(source.digest, entry)
        return entry


def read_cache_identity(file: TensorFile) -> dict[str, str]:
    """What made an entry, as its metadata says; empty where they do not."""
    with suppress(ValueError):
        found = json.loads(file.metadata.get("identity", ""))
        if isinstance(found, dict):
            return found
    return {}


def describe_identity_change(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """What differs between two identities, in words."""
    names = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    return ", ".join(f"{name} was {old.get(name, 'unknown')}, is {new.get(name, 'not set')}" for name in names)


def are_tensors_finite(tensors: Mapping[str, Tensor]) -> bool:
    """Whether all numbers are finite."""
    counts = map(count_nonfinite, tensors.values())
    return not any(count.nan or count.inf for count in counts)


def check_entry_finite(
    kind: str, source: CacheSource, tensors: Mapping[str, Tensor], identity: Mapping[str, str]
) -> None:
    """Raises NumericsError (CACHE-NONFINITE), which blames the encoder: pixels and texts have no NaN to give."""
    if are_tensors_finite(tensors):
        return
    counts = {name: count_nonfinite(tensor) for name, tensor in tensors.items()}
    name, count = next((name, count) for name, count in counts.items() if count.nan or count.inf)
    maker = ENCODER_NAME_BY_CACHE_KIND.get(kind, f"the encoder of {kind}")
    raise NumericsError(
        f"{maker} made {count.nan} NaN and {count.inf} infinities of {count.size} numbers ({name}) of {source.subject}",
        code="CACHE-NONFINITE",
        subject=source.subject,
        evidence={"tensor": name, "nan": count.nan, "inf": count.inf, "of": count.size, **identity},
        remedy=f"The file is not at fault: {maker} left its range. Compute it in fp32 or bf16, and check its weights.",
    )


def compute_cache_digest(parts: object, digits: int) -> str:
    """A hexadecimal digest of plain values."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=digits // 2).hexdigest()


class FileDigestCache:
    """Digests of files' bytes, each remembered as long as the file's size and time of change stay the same."""

    def __init__(self) -> None:
        self._known: dict[tuple[Path, int, int], str] = {}

    def of(self, path: Path) -> str:
        """The BLAKE2b digest of a file; raises FileError (FILE-UNREADABLE) where it cannot be read."""
        try:
            facts = path.stat()
            key = (path, facts.st_size, facts.st_mtime_ns)
            if key not in self._known:
                digest = hashlib.blake2b(digest_size=CACHE_SOURCE_DIGITS // 2)
                with path.open("rb") as stream:
                    while chunk := stream.read(_HASH_CHUNK_BYTES):
                        digest.update(chunk)
                self._known[key] = digest.hexdigest()
        except OSError as error:
            raise make_unreadable_file_error(path, error) from error
        return self._known[key]
