"""The model that adapters are merged into: a file, a sharded one, or a diffusers folder; and what its tensors are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finitune.adapters.core import Shape
from finitune.errors import FileError, ModelError
from finitune.files.keymap import KeyMap, match
from finitune.files.sniff import read_text
from finitune.files.tensorfile import INDEX_SUFFIX, TensorFile
from finitune.models import MODELS
from finitune.models.spec import ModelSpec
from finitune.namings.core import Landing
from finitune.namings.resolve import Parameter, Resolver

ENDING = ".safetensors"
KNOWN_BY = 200
"""How many keys, evenly spaced, tell the family."""

SAMPLED_BYTES = 4096


@dataclass(frozen=True)
class Key:
    """One tensor of a base: the file it is in, by its place in `Base.files`, and its name there."""

    file: str
    name: str

    def __str__(self) -> str:
        return f"{self.file}/{self.name}" if self.file else self.name


@dataclass(frozen=True)
class Base:
    """A model on disk. `files` are its safetensors by component, or one under "" where it is no folder.

    `others` are the files of a folder that are copied as they are, `left_out` those that are not: other forms of the
    same weights. `renames` takes odd keys to known ones.
    """

    path: Path
    files: Mapping[str, TensorFile]
    family: ModelSpec | None
    others: tuple[Path, ...] = ()
    left_out: tuple[Path, ...] = ()
    renames: KeyMap | None = None
    resolver: Resolver | None = field(default=None)

    def __iter__(self) -> Iterator[Key]:
        for component, file in self.files.items():
            yield from (Key(component, name) for name in file)

    @property
    def is_folder(self) -> bool:
        return self.path.is_dir()

    def known_name(self, key: Key) -> str:
        """The tensor's name as the family's tables may know it."""
        return (self.renames.forward(key.name) if self.renames else None) or key.name

    def landing(self, key: Key) -> tuple[Landing, Parameter] | None:
        """The module and parameter that a tensor is, or None where no table knows it."""
        return find(self.resolver, self, key) if self.resolver else None

    def landings(self) -> dict[Key, tuple[Landing, Parameter]]:
        """Those of all tensors."""
        found = ((key, self.landing(key)) for key in self)
        return {key: landing for key, landing in found if landing is not None}

    def shape(self, key: Key) -> Shape:
        return self.files[key.file].entries[key.name].shape

    def fingerprint(self) -> str:
        """A SHA-256 of all headers and of the first 4 KiB of each tensor: enough to know the file again, at no cost."""
        digest = hashlib.sha256()
        for component, file in sorted(self.files.items()):
            for name in sorted(file):
                entry = file.entries[name]
                digest.update(f"{component}\0{name}\0{entry.dtype}{list(entry.shape)}".encode())
                with entry.path.open("rb", buffering=0) as stream:
                    stream.seek(entry.begin)
                    digest.update(stream.read(min(SAMPLED_BYTES, entry.size_bytes)))
        return digest.hexdigest()

    def sources(self) -> list[Path]:
        """Every file that is read."""
        return sorted({e.path for f in self.files.values() for e in f.entries.values()} | set(self.others))

    def state(self) -> dict[Path, tuple[int, int]]:
        """Size and time of change of each source: what a program that replaces a file cannot keep."""
        return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in self.sources()}


def open_base(path: Path, renames: KeyMap | None = None) -> Base:
    """The base at a path, with all headers checked; raises FileError, or ModelError where it holds no weights."""
    if not path.is_dir():
        files, others, left_out = {"": TensorFile(path)}, (), ()
    else:
        files, others, left_out = open_folder(path)
    bare = Base(path, files, None, others, left_out, renames)
    family = family_of(bare)
    resolver = Resolver.of_model(family) if family else None
    return Base(path, files, family, others, left_out, renames, resolver)


def open_folder(folder: Path) -> tuple[dict[str, TensorFile], tuple[Path, ...], tuple[Path, ...]]:
    """The weights by component of a diffusers folder, the other files, and other forms of the weights."""
    files: dict[str, TensorFile] = {}
    weights: set[Path] = set()
    for place in (folder, *sorted(p for p in folder.iterdir() if p.is_dir())):
        found = chosen_weights(place)
        if found is not None:
            component = "" if place == folder else place.name
            files[component] = TensorFile(found)
            weights |= {found, *(entry.path for entry in files[component].entries.values())}
    if not files:
        raise ModelError(
            f"{folder} holds no safetensors files, neither itself nor in its folders",
            code="MODEL-FILES-MISSING",
            subject=str(folder),
            remedy="MODEL is a safetensors file, its .index.json, or a diffusers folder.",
        )
    rest = [p for p in sorted(folder.rglob("*")) if p.is_file() and p not in weights and not hidden(p, folder)]
    left_out = tuple(p for p in rest if p.suffix in (ENDING, ".bin", ".ckpt", ".msgpack") or is_index(p))
    return files, tuple(p for p in rest if p not in left_out), left_out


def chosen_weights(place: Path) -> Path | None:
    """The weights of one component: the index where there is one, the file with the shortest name otherwise."""
    visible = [path for path in place.iterdir() if not hidden(path, place)]
    candidates = [path for path in visible if path.name.endswith((ENDING, ENDING + INDEX_SUFFIX))]
    indices = [p for p in candidates if is_index(p)]
    sharded = {e.path for p in indices for e in TensorFile(p).entries.values()}
    whole = [p for p in candidates if p not in sharded and not is_index(p)]
    return min([*indices, *whole], key=lambda p: (p.name.count("."), len(p.name), p.name), default=None)


def is_index(path: Path) -> bool:
    return path.name.endswith(INDEX_SUFFIX)


def hidden(path: Path, folder: Path) -> bool:
    """Whether a file, or a folder around it, has a name that starts with a dot."""
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def family_of(base: Base) -> ModelSpec | None:
    """The family whose tables know most of the tensors, by its widths where two know as many; None under a half."""
    keys = list(base)
    keys = keys[:: max(1, len(keys) // KNOWN_BY)]
    scores = [(score(base, keys, model), model) for model in MODELS]
    highest = max(points for points, _ in scores)
    best = [model for points, model in scores if points == highest]
    return best[0] if 2 * highest[0] >= len(keys) and len(best) == 1 else None


def score(base: Base, keys: list[Key], model: ModelSpec) -> tuple[int, int]:
    """(tensors known to the family, widths that agree with it less those that do not)."""
    resolver = Resolver.of_model(model)
    known = agreeing = 0
    for key in keys:
        found = find(resolver, base, key)
        if found is None:
            continue
        known += 1
        landing, parameter = found
        for hallmark in model.adapters.hallmarks:
            same = landing.component == hallmark.component and match(landing.sites[0], hallmark.site) is not None
            if same and parameter == "weight":
                agreeing += 1 if base.shape(key)[1] == hallmark.inputs else -1
    return known, agreeing


def find(resolver: Resolver, base: Base, key: Key) -> tuple[Landing, Parameter] | None:
    """Where a tensor lands; in a folder only in the component of its name."""
    if key.file and key.file not in resolver.components:
        return None
    return resolver.parameter(base.known_name(key), key.file or None)


def read_renames(path: Path) -> KeyMap:
    """The renames of a TOML file: [[map]] tables with templates `from` and `to`; raises FileError."""
    try:
        pairs = parse_renames(read_text(path))
        return KeyMap(pairs)
    except (ValueError, KeyError, TypeError) as error:
        raise FileError(
            f"{path}: {error}",
            code="MAP-FILE",
            subject=str(path),
            remedy='It holds [[map]] tables: from = "blk.{i}.wq.weight", to = "blocks.{i}.self_attn.q_proj.weight".',
        ) from error


def parse_renames(text: str) -> list[tuple[str, str]]:
    """The pairs of templates in TOML text; raises ValueError."""
    import tomlkit

    table: dict[str, Any] = tomlkit.parse(text).unwrap()
    rows = table.pop("map", None)
    if table or not isinstance(rows, list) or not rows:
        raise ValueError("it must hold [[map]] tables and nothing else")
    for row in rows:
        if not isinstance(row, dict) or set(row) != {"from", "to"} or not all(isinstance(v, str) for v in row.values()):
            raise ValueError(f"a [[map]] table has `from` and `to`, both texts; this one has {row}")
    return [(row["from"], row["to"]) for row in rows]
