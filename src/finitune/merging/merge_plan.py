"""What a merge will do, before it does anything: every tensor of the base and every module of the adapters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from finitune.adapters import AdapterSet, SiteAdapter, find_algorithm
from finitune.adapters.core import Shape
from finitune.adapters.weight import WeightedAdapter
from finitune.errors import AdapterError, ModelError
from finitune.files.tensorfile import TensorEntry
from finitune.merging.base_model import BaseTensorKey, MergeBase
from finitune.merging.pairing import count_rows_by_site, identify_fused_module, map_module_inputs
from finitune.merging.rows import ModuleRows, RowRounder, TensorChange
from finitune.merging.stream import read_whole_tensor
from finitune.namings.core import SiteTarget
from finitune.namings.resolve import ModuleParameter
from finitune.namings.tensor_reader import to_meta_adapter
from finitune.report import Table

FP8_SCALE_SUFFIXES = (".scale_weight", ".weight_scale")
_FP8_DTYPES = ("F8_E4M3", "F8_E5M2")
FOREIGN_FP8_SCALE_SUFFIXES = (".weight_scale_inv", ".weight_scale_2", ".weight_block_scale")
"""Scales of blocks, or of scales: other formats."""


@dataclass(frozen=True)
class TensorScale:
    """Where the scale of a tensor of 8-bit floats lies: weight = code * scale.

    Sources: ComfyUI comfy/ops.py (`scale_weight`), Hugging Face's and NVIDIA's fp8 checkpoints (`weight_scale`).
    """

    key: str
    entry: TensorEntry

    def value(self) -> float:
        """The scale, a positive finite number; raises ModelError where it is none."""
        value = float(read_whole_tensor(self.entry))
        if not 0 < value < float("inf"):
            raise ModelError(
                f"the scale {self.key} is {value}",
                code="MERGE-FP8-SCALE",
                subject=self.key,
                evidence={"scale": value},
                remedy="The base is damaged. Fetch it again.",
            )
        return value


def find_fp8_scales(entries: Mapping[str, TensorEntry]) -> dict[str, TensorScale]:
    """{key of a weight in 8 bits: its scale}, where it has one for the whole tensor."""
    found: dict[str, TensorScale] = {}
    for key, entry in entries.items():
        stem = key.removesuffix(".weight")
        if entry.dtype in _FP8_DTYPES and stem != key:
            for name in (stem + suffix for suffix in FP8_SCALE_SUFFIXES):
                if name in entries and entries[name].size_bytes == entries[name].torch_dtype.itemsize:
                    found[key] = TensorScale(name, entries[name])
    return found


def require_single_scale(key: str, entries: Mapping[str, TensorEntry], scales: Mapping[str, TensorScale]) -> None:
    """Raise ModelError where a weight that is to change has scales of another kind than one for all."""
    stem = key.removesuffix(".weight")
    others = [
        stem + suffix for suffix in (*FP8_SCALE_SUFFIXES, *FOREIGN_FP8_SCALE_SUFFIXES) if stem + suffix in entries
    ]
    if others and key not in scales:
        raise ModelError(
            f"{key} is quantised with {others[0]} of shape {list(entries[others[0]].shape)}, not with one scale",
            code="MERGE-FP8-SCALE",
            subject=key,
            evidence={"dtype": entries[key].dtype, "scale_shape": list(entries[others[0]].shape)},
            remedy="Merge into the unquantised base and quantise the result.",
        )


def requantise_to_fp8(
    after: Tensor, scale: TensorScale, rounder: RowRounder, dtype: torch.dtype
) -> tuple[Tensor, float]:
    """fp64 `after` as codes and their new scale, as it can be stored; rounded once. Zeros keep scale 1.

    The scale maps the largest magnitude to the format's largest number: the base's own would cut off what has grown,
    and waste a bit of what has shrunk.
    """
    largest = float(after.abs().max()) if after.numel() else 0.0
    stored = torch.tensor(largest / torch.finfo(dtype).max or 1.0).to(scale.entry.torch_dtype)
    value = float(stored) or 1.0
    codes = torch.empty(after.shape, dtype=dtype)
    rounder(after / value, codes)
    return codes, value


@dataclass(frozen=True)
class MergeInput:
    """One adapter of a merge: its name for people, what it is, and how strongly it acts."""

    name: str
    adapter: AdapterSet
    strength: float


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the output: where it comes from, what becomes of it, in which dtype, and where its bytes go.

    `scale` where the base stores codes with a scale. `path`, `at` and `scale_at`, the places of the tensor and of its
    new scale, are known once the files are planned.
    """

    key: BaseTensorKey
    entry: TensorEntry
    dtype: torch.dtype
    change: TensorChange | None = None
    scale: TensorScale | None = None
    path: Path = Path()
    at: int = 0
    scale_at: int = 0

    @property
    def shape(self) -> Shape:
        return self.change.new_shape if self.change else self.entry.shape

    @property
    def is_copy(self) -> bool:
        return self.change is None and self.dtype == self.entry.torch_dtype

    @property
    def new_scale(self) -> TensorScale | None:
        """The scale that the output has, too: not where codes become plain numbers."""
        return self.scale if self.dtype == self.entry.torch_dtype else None

    @property
    def size_bytes(self) -> int:
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class MergePlan:
    """All tensors of the output; the scales among them belong to their weights (`scales`: their keys)."""

    tensors: tuple[PlannedTensor, ...]
    scales: Mapping[BaseTensorKey, BaseTensorKey] = field(default_factory=dict)
    matched: int = 0
    unmatched: tuple[tuple[str, str], ...] = ()
    """(adapter, site) of the modules that the base does not have."""

    @property
    def adapted(self) -> tuple[PlannedTensor, ...]:
        return tuple(one for one in self.tensors if one.change)

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in self.tensors)


def make_merge_plan(base: MergeBase, sources: Sequence[MergeInput], dtype: torch.dtype | None = None) -> MergePlan:
    """The plan of a merge; `dtype` for every tensor of floats, None to keep each as it is.

    Raises AdapterError where an adapter does not fit the base.
    """
    found = base.find_all_targets()
    widths = map_module_inputs(base, found)
    acting = group_adapters_by_site(sources)
    used: set[str] = set()
    tensors: list[PlannedTensor] = []
    hidden: dict[BaseTensorKey, BaseTensorKey] = {}
    for component, file in base.files.items():
        scales = find_fp8_scales(file.entries)
        by_scale = {scale.key: key for key, scale in scales.items()}
        for name, entry in file.entries.items():
            key = BaseTensorKey(component, name)
            if name in by_scale:
                hidden[key] = BaseTensorKey(component, by_scale[name])
                continue
            change = None
            if key in found:
                inputs = widths.get(identify_fused_module(found[key][0]), 0)
                change = plan_tensor_change(key, entry.shape, found[key], inputs, acting, used)
            if change and not entry.torch_dtype.is_floating_point:
                raise build_quantised_error(key, entry)
            if change:
                require_single_scale(name, file.entries, scales)
            to = dtype if dtype is not None and entry.torch_dtype.is_floating_point else entry.torch_dtype
            tensors.append(PlannedTensor(key, entry, to, change, scales.get(name)))
    require_base_biases(sources, used)
    unmatched = [(s.name, site) for s in sources for site in s.adapter if not used & {f"{site}.weight", f"{site}.bias"}]
    matched = len({site.rpartition(".")[0] for site in used})
    return MergePlan(tuple(tensors), hidden, matched, tuple(unmatched))


def group_adapters_by_site(sources: Sequence[MergeInput]) -> dict[str, list[WeightedAdapter]]:
    """{site: its adapters with their strengths}, over all sources."""
    acting: dict[str, list[WeightedAdapter]] = {}
    for source in sources:
        for site, adapter in source.adapter.sites.items():
            acting.setdefault(site, []).append((adapter, source.strength))
    return acting


def plan_tensor_change(
    key: BaseTensorKey,
    shape: Shape,
    found: tuple[SiteTarget, ModuleParameter],
    inputs: int,
    acting: Mapping[str, list[WeightedAdapter]],
    used: set[str],
) -> TensorChange | None:
    """What becomes of one tensor, None where nothing acts on it; adds the parameters it found to `used`.

    `inputs` are those of its module's weight. Raises AdapterError or ModelError where an adapter does not fit.
    """
    landing, parameter = found
    sites = [f"{landing.component}.{site}" for site in landing.sites]
    if not any(site in acting for site in sites):
        return None
    laid = shape[::-1] if landing.transposed else shape
    parts: list[ModuleRows] = []
    begin = 0
    for site, rows in zip(sites, count_rows_by_site(landing, laid[0] if laid else 1, inputs), strict=True):
        adapters = [strong for strong in acting.get(site, ()) if changes_parameter(strong[0], parameter, rows)]
        if adapters:
            used.add(f"{site}.{parameter}")
        for adapter, _ in adapters:
            require_adapter_fit(key, site, adapter, parameter, (rows, *laid[1:]))
        parts.append(ModuleRows(site, begin, begin + rows, tuple(strong for strong in adapters if strong[1] != 0)))
        begin += rows
    if not any(part.adapters for part in parts):
        return None
    wider = compute_merged_shape(shape, parts, parameter)
    return TensorChange(parameter, tuple(parts), shape, wider, landing.swapped, landing.transposed)


def changes_parameter(adapter: SiteAdapter, parameter: str, rows: int) -> bool:
    """Whether an adapter changes a module's weight, or its bias."""
    if parameter == "bias":
        return find_algorithm(adapter.algorithm).bias_delta(adapter, torch.zeros(rows)) is not None
    return bool(adapter.tensors.keys() - {"diff_b"})


def require_adapter_fit(key: BaseTensorKey, site: str, adapter: SiteAdapter, parameter: str, shape: Shape) -> None:
    """Raise AdapterError, with the tensor as its subject, where an adapter does not fit its module."""
    if parameter == "bias":
        return
    try:
        find_algorithm(adapter.algorithm).check(to_meta_adapter(adapter), shape)
    except AdapterError as error:
        error.subject = str(key)
        error.evidence["site"] = site
        raise


def require_base_biases(sources: Sequence[MergeInput], used: set[str]) -> None:
    """Raise AdapterError where an adapter changes a bias that the base does not have, while it has the weight."""
    for source in sources:
        for site, adapter in source.adapter.sites.items():
            lacks = f"{site}.bias" not in used and (f"{site}.weight" in used or set(adapter.tensors) == {"diff_b"})
            if lacks and find_algorithm(adapter.algorithm).bias_delta(adapter, None) is not None:
                raise AdapterError(
                    f"{source.name} changes the bias of {site}, and the base has none there",
                    code="ADAPTER-BIAS",
                    subject=site,
                    evidence={"adapter": source.name},
                    remedy="A bias that the module does not have would be read by no program. Attach the adapter "
                    "instead, or train it without the bias.",
                )


def compute_merged_shape(shape: Shape, parts: Sequence[ModuleRows], parameter: str) -> Shape:
    """The tensor's new shape: wider where an adapter reshapes it."""
    wider = [
        implied[1]
        for part in parts
        for adapter, _ in part.adapters
        if parameter == "weight"
        and (algorithm := find_algorithm(adapter.algorithm)).widens(adapter)
        and len(implied := algorithm.shape(to_meta_adapter(adapter)) or ()) > 1
    ]
    return shape if not wider else (shape[0], max(shape[1], *wider), *shape[2:])


def build_quantised_error(key: BaseTensorKey, entry: TensorEntry) -> ModelError:
    """The error for packed integers where a weight is to change."""
    return ModelError(
        f"{key} holds {entry.dtype}, not floats",
        code="MERGE-QUANTISED",
        subject=str(key),
        evidence={"dtype": entry.dtype, "shape": list(entry.shape)},
        remedy="Merge into the unquantised base and quantise the result.",
    )


def build_merge_plan_tables(plan: MergePlan, base: MergeBase, sources: Sequence[MergeInput]) -> list[Table]:
    """The plan for a person: the adapted tensors by kind, and, for a base with a map, each key's way."""
    kinds: Counter[tuple[str, ...]] = Counter()
    sizes: Counter[tuple[str, ...]] = Counter()
    for one in plan.tensors:
        dtypes = " to ".join(dict.fromkeys((format_torch_dtype(one.entry.torch_dtype), format_torch_dtype(one.dtype))))
        if one.change:
            acting = [strong for part in one.change.adapted for strong in part.adapters]
            algorithms = ", ".join(sorted({find_algorithm(a.algorithm).title for a, _ in acting}))
            strengths = ", ".join(f"{m:g}" for m in sorted({m for _, m in acting}))
            kind = (re.sub(r"\b\d+\b", "*", str(one.key)), algorithms, strengths, dtypes)
        else:
            kind = ("all others", "", "", dtypes)
        kinds[kind] += 1
        sizes[kind] += one.size_bytes
    rows = [(kind[0], str(count), *kind[1:], f"{sizes[kind] / 1e6:.1f} MB") for kind, count in kinds.items()]
    columns = ("tensors", "count", "algorithm", "strength", "dtype", "size")
    made = [Table("merge", columns, tuple(sorted(rows, key=lambda row: row[0] == "all others")))]
    if base.renames:
        ways = []
        for key in base:
            found = base.landing(key)
            where = f"{found[0].component}: {', '.join(found[0].sites)} ({found[1]})" if found else "nowhere"
            ways.append((str(key), base.known_name(key), where))
        made.append(Table("map", ("key", "known as", "lands at"), tuple(ways)))
    return made


def format_torch_dtype(dtype: torch.dtype) -> str:
    """A dtype's name for people."""
    return str(dtype).removeprefix("torch.")
