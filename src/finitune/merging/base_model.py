"""The model that adapters are merged into: a file, a sharded one, or a diffusers folder; and what its tensors are."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finitune.adapters.core import Shape
from finitune.errors import FileError, ModelError
from finitune.files.keymap import KeyMap, match_template
from finitune.files.sniff import read_utf8_text
from finitune.files.tensorfile import INDEX_SUFFIX, TensorFile
from finitune.models import MODEL_FAMILIES
from finitune.models.sites import AdapterSites, ComponentSites
from finitune.models.spec import ModelSpec
from finitune.namings.core import SiteTarget
from finitune.namings.resolve import ModuleParameter, Resolver

SAFETENSORS_EXTENSION = ".safetensors"
_MAX_KEYS_SCORED = 200
"""How many keys, evenly spaced, tell which family is likeliest."""

MIN_FAMILY_WEIGHT_SHARE = 0.9
"""The share of the weights where the denoiser lies that a family's tables must know.

They know all in every release of the family. Models derived from one add a few (a guidance embedder is about a
twentieth), and adapters of the family still fit; one that merely shares some words of its names falls far below.
"""

DENOISER_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "net.")
"""What stands before all names of a denoiser in some checkpoints, and before none in adapters."""

_ROLES_BY_COMPONENT = {
    **dict.fromkeys(("transformer", "unet"), ("unet", "transformer")),
    **{"text_encoder": ("te", "te1"), "text_encoder_2": ("te2",), "text_encoder_3": ("te3",)},
}
"""kohya's names of the components of a model that no table knows."""

_SAMPLED_TENSOR_BYTES = 4096


@dataclass(frozen=True)
class BaseTensorKey:
    """One tensor of a base: the file it is in, by its place in `Base.files`, and its name there."""

    file: str
    name: str

    def __str__(self) -> str:
        return f"{self.file}/{self.name}" if self.file else self.name


@dataclass(frozen=True)
class MergeBase:
    """A model on disk. `files` are its safetensors by component, or one under "" where it is no folder.

    `others` are the files of a folder that are copied as they are, `left_out` those that are not: other forms of the
    same weights. `renames` takes odd keys to known ones. `resolver` knows its modules: the family's, or its own.
    """

    path: Path
    files: Mapping[str, TensorFile]
    family: ModelSpec | None
    others: tuple[Path, ...] = ()
    left_out: tuple[Path, ...] = ()
    renames: KeyMap | None = None
    resolver: Resolver | None = None

    def __iter__(self) -> Iterator[BaseTensorKey]:
        for component, file in self.files.items():
            yield from (BaseTensorKey(component, name) for name in file)

    @property
    def is_folder(self) -> bool:
        return self.path.is_dir()

    def known_name(self, key: BaseTensorKey) -> str:
        """The tensor's name as the family's tables may know it."""
        return (self.renames.forward(key.name) if self.renames else None) or key.name

    def landing(self, key: BaseTensorKey) -> tuple[SiteTarget, ModuleParameter] | None:
        """The module and parameter that a tensor is, or None where no table knows it."""
        return find_tensor_target(self.resolver, self, key) if self.resolver else None

    def find_all_targets(self) -> dict[BaseTensorKey, tuple[SiteTarget, ModuleParameter]]:
        """Those of all tensors."""
        found = ((key, self.landing(key)) for key in self)
        return {key: landing for key, landing in found if landing is not None}

    def shape(self, key: BaseTensorKey) -> Shape:
        return self.files[key.file].entries[key.name].shape

    def compute_sampled_digest(self) -> str:
        """A SHA-256 of all headers and of the first 4 KiB of each tensor: enough to know the file again, at no cost."""
        digest = hashlib.sha256()
        for component, file in sorted(self.files.items()):
            for name in sorted(file):
                entry = file.entries[name]
                digest.update(f"{component}\0{name}\0{entry.dtype}{list(entry.shape)}".encode())
                with entry.path.open("rb", buffering=0) as stream:
                    stream.seek(entry.begin)
                    digest.update(stream.read(min(_SAMPLED_TENSOR_BYTES, entry.size_bytes)))
        return digest.hexdigest()

    def sources(self) -> list[Path]:
        """Every file that is read."""
        return sorted({e.path for f in self.files.values() for e in f.entries.values()} | set(self.others))

    def state(self) -> dict[Path, tuple[int, int]]:
        """Size and time of change of each source: what a program that replaces a file cannot keep."""
        return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in self.sources()}


def open_merge_base(path: Path, renames: KeyMap | None = None) -> MergeBase:
    """The base at a path, with all headers checked; raises FileError, or ModelError where it holds no weights."""
    if not path.is_dir():
        files, others, left_out = {"": TensorFile(path)}, (), ()
    else:
        files, others, left_out = open_diffusers_folder(path)
    bare = MergeBase(path, files, None, others, left_out, renames)
    family = identify_base_family(bare)
    return replace(bare, family=family, resolver=Resolver.of_model(family or build_unknown_model(bare)))


def open_diffusers_folder(folder: Path) -> tuple[dict[str, TensorFile], tuple[Path, ...], tuple[Path, ...]]:
    """The weights by component of a diffusers folder, the other files, and other forms of the weights."""
    files: dict[str, TensorFile] = {}
    weights: set[Path] = set()
    for place in (folder, *sorted(p for p in folder.iterdir() if p.is_dir())):
        found = choose_component_weights(place)
        if found is not None:
            component = "" if place == folder else place.name
            files[component] = TensorFile(found)
            weights |= {found, *(entry.path for entry in files[component].entries.values())}
    if not files:
        raise ModelError(
            f"{folder} holds no safetensors files, neither itself nor in its folders",
            code="MODEL-WITHOUT-WEIGHTS",
            subject=str(folder),
            remedy="MODEL is a safetensors file, its .index.json, or a diffusers folder.",
        )
    rest = [
        p for p in sorted(folder.rglob("*")) if p.is_file() and p not in weights and not is_hidden_in_folder(p, folder)
    ]
    left_out = tuple(
        p for p in rest if p.suffix in (SAFETENSORS_EXTENSION, ".bin", ".ckpt", ".msgpack") or is_shard_index(p)
    )
    return files, tuple(p for p in rest if p not in left_out), left_out


def choose_component_weights(place: Path) -> Path | None:
    """The weights of one component: the index where there is one, the file with the shortest name otherwise."""
    visible = [path for path in place.iterdir() if not is_hidden_in_folder(path, place)]
    candidates = [
        path for path in visible if path.name.endswith((SAFETENSORS_EXTENSION, SAFETENSORS_EXTENSION + INDEX_SUFFIX))
    ]
    indices = [p for p in candidates if is_shard_index(p)]
    sharded = {e.path for p in indices for e in TensorFile(p).entries.values()}
    whole = [p for p in candidates if p not in sharded and not is_shard_index(p)]
    return min([*indices, *whole], key=lambda p: (p.name.count("."), len(p.name), p.name), default=None)


def is_shard_index(path: Path) -> bool:
    return path.name.endswith(INDEX_SUFFIX)


def is_hidden_in_folder(path: Path, folder: Path) -> bool:
    """Whether a file, or a folder around it, has a name that starts with a dot."""
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def identify_base_family(base: MergeBase) -> ModelSpec | None:
    """The family that a model is of, with the modules that it has beside the family's; None for one of no family.

    It is the one whose tables know most of the tensors, by its widths where two know as many; if it passes
    `is_of_family`.
    """
    keys = list(base)
    keys = keys[:: max(1, len(keys) // _MAX_KEYS_SCORED)]
    scores = [(score_family_match(base, keys, model), model) for model in MODEL_FAMILIES]
    highest = max(points for points, _ in scores)
    best = [model for points, model in scores if points == highest]
    if not highest[0] or len(best) > 1:
        return None
    weights = list_family_weights(base, best[0])
    return add_own_modules(best[0], weights) if is_of_family(best[0], weights) else None


@dataclass(frozen=True)
class FamilyWeight:
    """A weight as a family sees it: the component that it is known to be in, or None for a stranger.

    `place` is the component's folder, or the prefix in a whole checkpoint; `name` is the module's, without it.
    """

    place: str
    name: str
    component: str | None


def list_family_weights(base: MergeBase, model: ModelSpec) -> list[FamilyWeight]:
    """What adapters can be for: the tensors of two dimensions or more that are a module's weight."""
    resolver = Resolver.of_model(model)
    prefixes = sorted({p for c in model.adapters.components for p in (*c.single_file, "")}, key=len, reverse=True)
    weights: list[FamilyWeight] = []
    for key in base:
        found, (module, _, last) = find_tensor_target(resolver, base, key), base.known_name(key).rpartition(".")
        if len(base.shape(key)) > 1 and (found[1] if found else last) == "weight":
            prefix = "" if key.file else next(prefix for prefix in prefixes if f"{module}.".startswith(prefix))
            component = found[0].component if found else None
            weights.append(FamilyWeight(key.file or prefix, module.removeprefix(prefix), component))
    return weights


def is_of_family(model: ModelSpec, weights: Sequence[FamilyWeight]) -> bool:
    """Whether a family's tables know NEARLY_ALL weights where they find the denoiser; without one, of all.

    Beside the denoiser there may be what no table has, a VAE for one. And a text encoder does not make a family: others
    have it too.
    """
    denoisers = {component.name for component in model.adapters.components if "unet" in component.roles}
    places = {weight.place for weight in weights if weight.component in denoisers}
    judged = [weight for weight in weights if weight.place in places] or weights
    known = sum(weight.component is not None for weight in judged)
    return known > 0 and known >= MIN_FAMILY_WEIGHT_SHARE * len(judged)


def add_own_modules(model: ModelSpec, weights: Sequence[FamilyWeight]) -> ModelSpec:
    """The family, and in its denoiser the modules that a checkpoint has there and the tables do not."""
    places = {weight.place: weight.component for weight in reversed(weights) if weight.component}
    own: dict[str | None, list[str]] = {}
    for weight in weights:
        if weight.component is None:
            own.setdefault(places.get(weight.place), []).append(weight.name)
    components = tuple(
        replace(one, sites=(*one.sites, *own[one.name])) if one.name in own and "unet" in one.roles else one
        for one in model.adapters.components
    )
    return replace(model, adapters=replace(model.adapters, components=components))


def build_unknown_model(base: MergeBase) -> ModelSpec:
    """A model of no family: the modules that its tensors name, in the components that its folders name."""
    names: dict[str, dict[str, None]] = {}
    for key in base:
        module, _, last = base.known_name(key).rpartition(".")
        if module and last in ("weight", "bias"):
            names.setdefault(key.file or "transformer", {})[module] = None
    sites = AdapterSites(tuple(map(build_unknown_component, names.items())))
    return ModelSpec("unknown", tuple(names), (), sites, "an unknown model")


def build_unknown_component(item: tuple[str, Collection[str]]) -> ComponentSites:
    """A component by its folder's name, and the modules in it."""
    name, modules = item
    prefix = next((prefix for prefix in DENOISER_PREFIXES if all(module.startswith(prefix) for module in modules)), "")
    sites = tuple(module.removeprefix(prefix) for module in modules)
    return ComponentSites(name, _ROLES_BY_COMPONENT.get(name, (name,)), sites, single_file=(prefix,))


def score_family_match(base: MergeBase, keys: list[BaseTensorKey], model: ModelSpec) -> tuple[int, int]:
    """(tensors known to the family, widths that agree with it less those that do not)."""
    resolver = Resolver.of_model(model)
    known = agreeing = 0
    for key in keys:
        found = find_tensor_target(resolver, base, key)
        if found is None:
            continue
        known += 1
        landing, parameter = found
        for hallmark in model.adapters.hallmarks:
            same = (
                landing.component == hallmark.component and match_template(landing.sites[0], hallmark.site) is not None
            )
            if same and parameter == "weight":
                agreeing += 1 if base.shape(key)[1] == hallmark.inputs else -1
    return known, agreeing


def find_tensor_target(
    resolver: Resolver, base: MergeBase, key: BaseTensorKey
) -> tuple[SiteTarget, ModuleParameter] | None:
    """Where a tensor lands; in a folder only in the component of its name."""
    if key.file and key.file not in resolver.components:
        return None
    return resolver.parameter(base.known_name(key), key.file or None)


def read_key_renames(path: Path) -> KeyMap:
    """The renames of a TOML file: [[map]] tables with templates `from` and `to`; raises FileError."""
    try:
        pairs = parse_key_renames(read_utf8_text(path))
        return KeyMap(pairs)
    except (ValueError, KeyError, TypeError) as error:
        raise FileError(
            f"{path}: {error}",
            code="MAP-FILE",
            subject=str(path),
            remedy='It holds [[map]] tables: from = "blk.{i}.wq.weight", to = "blocks.{i}.self_attn.q_proj.weight".',
        ) from error


def parse_key_renames(text: str) -> list[tuple[str, str]]:
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
