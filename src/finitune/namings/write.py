"""An adapter as the tensors and texts of a file, in any of the spellings that we write.

Modules that the spelling's naming keeps fused are fused again, and rows that it orders otherwise are put back. alpha
and DoRA's magnitudes are always fp32: in bf16 either would be off by up to 0.2 %, for the whole module at once.
The scale stands in alpha tensors, or for diffusers and PEFT in their metadata; the factors are not touched for it, so
that what is read back is what was written, bit for bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from finitune.adapters import find_algorithm
from finitune.adapters.convert import Exactness
from finitune.adapters.core import AdapterSet, SiteAdapter
from finitune.adapters.lokr import get_row_range
from finitune.adapters.lora import LoRA
from finitune.adapters.narrow import (
    NarrowedAdapter,
    classify_narrowing,
    has_dtype_overflow,
    make_dtype_overflow_error,
    narrow_adapter,
)
from finitune.errors import AdapterError, NumericsError, UsageError
from finitune.models.spec import ModelSpec
from finitune.namings.core import SiteTarget
from finitune.namings.fused import (
    fold_scale_into_factor,
    fuse_site_adapters,
    infer_weight_rows,
    is_same_tensor,
    swap_site_adapter_halves,
)
from finitune.namings.keys import find_suffix
from finitune.namings.metadata import (
    DIFFUSERS_METADATA_KEY,
    Receipt,
    add_kohya_hashes,
    blank_site_numbers,
    build_adapter_metadata,
    build_diffusers_metadata,
    build_peft_config,
)
from finitune.namings.resolve import Resolver
from finitune.namings.spellings import WRITABLE_SPELLINGS, AdapterSpelling, get_spelling
from finitune.namings.tensor_reader import to_meta_adapter
from finitune.report import Finding

_KOHYA_PREFERRED_ROLES = ("magnitude", "alpha", "diff_b")
"""Roles that ComfyUI reads best in kohya's words, whatever surrounds them."""
_CONVERT_TO_LORA_REMEDY = "Convert it: --as lora (with --rank N if it may be approximate)."


@dataclass(frozen=True)
class AdapterFileContent:
    """The content of an adapter file.

    `config` is PEFT's adapter_config.json where the spelling has one; `embeddings` are learned token vectors that the
    spelling has no place for. `klass` is the costliest kind of conversion of any module, `narrowing` that of the dtype
    alone; `flushed` of `nonzero` numbers became zero in it; `narrowing_error` is the largest relative error that it
    made in the change of a module.
    """

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    config: dict[str, Any] | None = None
    embeddings: dict[str, Tensor] = field(default_factory=dict)
    klass: Exactness = Exactness.LOSSLESS
    narrowing: Exactness = Exactness.LOSSLESS
    flushed: int = 0
    nonzero: int = 0
    narrowing_error: float = 0.0
    findings: tuple[Finding, ...] = ()

    @property
    def flushed_share(self) -> float:
        return self.flushed / self.nonzero if self.nonzero else 0.0


@dataclass(frozen=True)
class OutputModule:
    """One module of the file: its prefix and name there, its component, and what it gets."""

    prefix: str
    name: str
    component: str
    adapter: SiteAdapter

    @property
    def path(self) -> str:
        return f"{self.component}.{self.name}"


def write_adapter(
    adapter: AdapterSet,
    family: ModelSpec,
    spelling: str,
    *,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
    receipt: Receipt | None = None,
) -> AdapterFileContent:
    """The tensors and texts of `adapter` in a spelling of WRITABLE; factors in `dtype`, or in their own.

    `metadata` are the source's texts. Raises UsageError for another spelling, AdapterError where the spelling cannot
    say what the adapter is (WRITE-...) or fused modules cannot be exact (FUSE-...), NumericsError for numbers that
    are not finite in the dtype.
    """
    form = require_writable_spelling(spelling)
    modules: list[OutputModule] = []
    klass, flushed, nonzero, error = Exactness.LOSSLESS, 0, 0, 0.0
    for module, how in build_output_modules(adapter, family, form):
        small = require_finite_module(module, dtype)
        modules.append(replace(module, adapter=small.adapter))
        klass = max(klass, how, key=lambda one: one.cost)
        flushed, nonzero, error = flushed + small.flushed, nonzero + small.nonzero, max(error, small.error)
    narrowing = classify_narrowing(flushed, nonzero, error, dtype)
    klass = max(klass, narrowing, key=lambda one: one.cost)
    if not modules:
        raise AdapterError(
            "there is no module in this adapter: nothing to write",
            code="WRITE-NOTHING",
            subject=family.name,
            remedy="Check that the file is an adapter. Learned token embeddings need no conversion.",
        )
    tensors = {key: tensor for one in require_one_shared(modules) for key, tensor in encode_module_tensors(one, form)}
    components: dict[str, dict[str, SiteAdapter]] = {}
    for module in modules:
        components.setdefault(module.component, {})[module.name] = module.adapter
    apart = dict(adapter.embeddings) if form.alpha == "metadata" else {}
    if not apart:
        tensors |= adapter.embeddings
    texts, findings = build_adapter_metadata(
        metadata or {},
        AdapterSet({module.path: module.adapter for module in modules}),
        family,
        update_receipt_class(receipt or Receipt("convert"), klass),
        {DIFFUSERS_METADATA_KEY: json.dumps(build_diffusers_metadata(components, family))}
        if form.name == "diffusers"
        else {},
    )
    return AdapterFileContent(
        tensors,
        add_kohya_hashes(texts, tensors),
        build_peft_config(components, family) if form.name == "peft" else None,
        apart,
        klass,
        narrowing,
        flushed,
        nonzero,
        error,
        tuple(findings),
    )


def update_receipt_class(receipt: Receipt, klass: Exactness) -> Receipt:
    own = Exactness(receipt.klass or Exactness.LOSSLESS)
    return replace(receipt, klass=max(own, klass, key=lambda one: one.cost).value)


def require_writable_spelling(spelling: str) -> AdapterSpelling:
    """The spelling of a name; raises UsageError (SPELLING-NOT-WRITTEN) for one that we read only, or do not know."""
    if spelling not in WRITABLE_SPELLINGS:
        raise UsageError(
            f"adapters are not written as {spelling!r}",
            code="SPELLING-NOT-WRITTEN",
            subject=spelling,
            remedy=f"Choose one of {', '.join(WRITABLE_SPELLINGS)}.",
        )
    return get_spelling(spelling)


def build_output_modules(
    adapter: AdapterSet, family: ModelSpec, form: AdapterSpelling
) -> Iterator[tuple[OutputModule, Exactness]]:
    """The modules of the file in the order of the sites, and how each was made."""
    resolver = Resolver.of_model(family)
    rows = count_rows_by_site_kind(adapter)
    done: set[str] = set()
    for site in adapter:
        if site in done:
            continue
        component, _, name = site.partition(".")
        sites = resolver.components.get(component)
        found = sites and resolver.named(component, name, native=form.native(sites))
        prefix = sites and form.prefix(sites)
        if not sites or not found or prefix is None:
            raise make_no_name_error(site, family, form)
        path, landing = found
        parts = [adapter.sites.get(f"{component}.{part}") for part in landing.sites]
        done.update(f"{component}.{part}" for part in landing.sites)
        whole, how = join_module_parts(parts, landing, rows)
        spellable, cost = to_spellable_adapter(whole, form, site)
        if spellable.options.get("rotates_bias"):  # the prefix alone tells kohya's OFT from LyCORIS'
            prefix = get_spelling("kohya-oft").prefix(sites) or prefix
        yield OutputModule(prefix, path, component, spellable), max(how, cost, key=lambda one: one.cost)


def join_module_parts(
    parts: Sequence[SiteAdapter | None], landing: SiteTarget, rows: Mapping[str, int]
) -> tuple[SiteAdapter, Exactness]:
    """The adapter of one module of the file, from those of the sites that its rows are."""
    whole, how = next(part for part in parts if part is not None), Exactness.LOSSLESS
    first = f"{landing.component}.{landing.sites[0]}"
    if len(parts) > 1:
        fused = fuse_site_adapters(parts, [infer_part_rows(i, parts, landing, rows) for i in range(len(parts))], first)
        whole, how = fused.adapter, fused.exactness
    return (swap_site_adapter_halves(whole, first) if landing.swapped else whole), how


def count_rows_by_site_kind(adapter: AdapterSet) -> dict[str, int]:
    counts = (
        (blank_site_numbers(site), infer_weight_rows(to_meta_adapter(one))) for site, one in adapter.sites.items()
    )
    return {site: count for site, count in counts if count is not None}


def infer_part_rows(i: int, parts: Sequence[SiteAdapter | None], landing: SiteTarget, rows: Mapping[str, int]) -> int:
    """How many rows the i-th part of a fused module has: its own, its like's in other blocks, or its neighbours'."""
    part = parts[i]
    own = None if part is None else infer_weight_rows(part)
    site = f"{landing.component}.{landing.sites[i]}"
    like = own or rows.get(blank_site_numbers(site))
    if like is not None:
        return like
    present = next(part for part in parts if part is not None)
    shape = find_algorithm(present.algorithm).shape(present)
    if shape is not None and landing.division == "equal":
        return shape[0]
    if shape is not None and i < len(parts) - 1:
        return shape[1]
    raise AdapterError(
        f"{site} has no adapter, and nothing tells how many rows it has in the fused module",
        code="FUSE-ROWS-UNKNOWN",
        subject=site,
        remedy="Write diffusers' spelling, which keeps these modules apart: --to diffusers.",
    )


def require_spellable(adapters: Mapping[str, SiteAdapter], spelling: str) -> None:
    """Raise AdapterError (WRITE-CANNOT-SAY) where a spelling cannot hold one of the adapters, by site."""
    for site, adapter in adapters.items():
        to_spellable_adapter(adapter, require_writable_spelling(spelling), site)


def to_spellable_adapter(adapter: SiteAdapter, form: AdapterSpelling, site: str) -> tuple[SiteAdapter, Exactness]:
    """The adapter as the spelling can say it, and what that cost; raises AdapterError (WRITE-...) where it cannot."""
    algorithm = find_algorithm(adapter.algorithm)
    held = {"any": True, "peft": bool(algorithm.peft_type), "lora": adapter.algorithm == LoRA.name}[form.holds]
    if not held:
        remedy = _CONVERT_TO_LORA_REMEDY if algorithm.additive else ""
        raise make_cannot_say_error(site, adapter, form, "it knows LoRA alone", remedy)
    if get_row_range(adapter) is not None:
        why = "it is some rows of a larger Kronecker product, and no other module has the rest"
        raise make_cannot_say_error(site, adapter, form, why, _CONVERT_TO_LORA_REMEDY)
    magnitude = adapter.magnitude
    if magnitude is not None and magnitude.norm_of != "adapted":
        raise make_cannot_say_error(
            site, adapter, form, f"its magnitudes (DoRA) are of the {magnitude.norm_of} weight's norm"
        )
    if magnitude is not None and magnitude.side == "in" and form.alpha == "metadata":
        raise make_cannot_say_error(site, adapter, form, "its magnitudes (DoRA) are of the inputs")
    roles = [*adapter.tensors, *(("magnitude",) if magnitude is not None else ())]
    if adapter.options.get("reshape") and form.alpha == "tensor":
        roles.append("reshape")
    for role in roles:
        if not has_word(role, adapter, form):
            raise make_cannot_say_error(site, adapter, form, f"it has no word for {role}")
    if "rank" in adapter.options:
        # Only PEFT divides alpha by a rank that no tensor has.
        return replace(fold_scale_into_factor(adapter), alpha=None, options={}), Exactness.EXACT
    if adapter.alpha is not None and adapter.alpha <= 0:  # which programs read in several ways
        return fold_scale_into_factor(adapter), Exactness.EXACT
    if form.alpha == "tensor" and adapter.rank_stabilised:
        rank = algorithm.rank(adapter)
        alpha = None if adapter.alpha is None or rank is None else adapter.alpha * math.sqrt(rank)
        return replace(adapter, alpha=alpha, rank_stabilised=False), Exactness.LOSSLESS
    return adapter, Exactness.LOSSLESS


def require_finite_module(module: OutputModule, dtype: torch.dtype | None) -> NarrowedAdapter:
    """The module's adapter in the dtype (None: each tensor's own); raises NumericsError with the module's name."""
    try:
        if dtype is not None:
            return narrow_adapter(module.adapter, dtype)
        for role, tensor in module.adapter.tensors.items():
            if has_dtype_overflow(tensor, tensor.dtype):
                raise make_dtype_overflow_error(role, tensor, tensor.dtype)
        return NarrowedAdapter(module.adapter, 0, 0, 0.0)
    except NumericsError as error:
        error.subject = f"{module.path}: {error.subject}"
        raise


def encode_module_tensors(module: OutputModule, form: AdapterSpelling) -> Iterator[tuple[str, Tensor]]:
    adapter, algorithm = module.adapter, find_algorithm(module.adapter.algorithm)
    base = module.prefix + (module.name.replace(".", "_") if form.flat else module.name)
    roles = dict(adapter.tensors)
    if adapter.magnitude is not None:
        roles["magnitude"] = build_magnitude_tensor(adapter, form)
    if form.alpha == "tensor":
        alpha = algorithm.stored_alpha(adapter)
        roles |= algorithm.to_file(adapter)
        if alpha is not None:
            roles["alpha"] = torch.tensor(alpha, dtype=torch.float32)
        if adapter.options.get("reshape"):
            roles["reshape"] = torch.tensor(algorithm.shape(adapter))
    for role, tensor in roles.items():
        known = algorithm.roles.get(role)
        if known is not None and known.shared_key:
            yield known.shared_key, tensor.contiguous()
            continue
        by_kohya = role in _KOHYA_PREFERRED_ROLES and form.alpha == "tensor"
        suffix = find_suffix(role, algorithm.name, ("kohya", *form.dialects) if by_kohya else form.dialects)
        assert suffix is not None  # to_spellable_adapter has seen to it
        yield base + suffix.text, tensor.contiguous()


def build_magnitude_tensor(adapter: SiteAdapter, form: AdapterSpelling) -> Tensor:
    """The magnitudes in fp32, shaped as the spelling's programs expect them.

    kohya: (out, 1, ...) or (1, in, ...). PEFT: (out) of a Linear, (1, out, 1, 1) of a convolution.
    """
    assert adapter.magnitude is not None
    values, shape = adapter.magnitude.tensor.float().flatten(), find_algorithm(adapter.algorithm).shape(adapter)
    kernel = [1] * len((shape or ())[2:])
    if form.alpha == "metadata":
        return values.reshape(1, -1, *kernel) if kernel else values
    return values.reshape(-1, 1, *kernel) if adapter.magnitude.side == "out" else values.reshape(1, -1, *kernel)


def require_one_shared(modules: Sequence[OutputModule]) -> Sequence[OutputModule]:
    """The modules; raises AdapterError (WRITE-SHARED) where they have different tensors in a role of all modules."""
    seen: dict[str, tuple[str, Tensor]] = {}
    for module in modules:
        for role, known in find_algorithm(module.adapter.algorithm).roles.items():
            if not known.shared_key:
                continue
            path, first = seen.setdefault(known.shared_key, (module.path, module.adapter.tensors[role]))
            if not is_same_tensor(first, module.adapter.tensors[role]):
                raise AdapterError(
                    f"{path} and {module.path} have different tensors for {known.shared_key}, which a file holds once",
                    code="WRITE-SHARED",
                    subject=module.path,
                    evidence={"role": role, "modules": [path, module.path]},
                    remedy="They are of two trainings: convert each by itself, or --as lora.",
                )
    return modules


def make_no_name_error(site: str, family: ModelSpec, form: AdapterSpelling) -> AdapterError:
    return AdapterError(
        f"{site} has no name in {form.title}'s spelling of {family.title}",
        code="WRITE-NO-NAME",
        subject=site,
        evidence={"family": family.name, "spelling": form.name},
        remedy="Name the model that the adapter is for, or choose a spelling that has the component: --to diffusers.",
    )


def make_cannot_say_error(
    site: str, adapter: SiteAdapter, form: AdapterSpelling, why: str, remedy: str = ""
) -> AdapterError:
    title = find_algorithm(adapter.algorithm).title
    others = [name for name in WRITABLE_SPELLINGS if name != form.name and get_spelling(name).holds == "any"]
    able = [name for name in others if all(has_word(r, adapter, get_spelling(name)) for r in adapter.tensors)]
    other = f"Write another spelling: --to {able[0]}." if able else "None of the spellings that we write has it."
    return AdapterError(
        f"{form.title} cannot hold the {title} at {site}: {why}",
        code="WRITE-CANNOT-SAY",
        subject=site,
        evidence={"algorithm": adapter.algorithm, "spelling": form.name},
        remedy=remedy or other,
    )


def has_word(role: str, adapter: SiteAdapter, form: AdapterSpelling) -> bool:
    """Whether a spelling can name a role; what all modules share has a place in PEFT's files alone."""
    known = find_algorithm(adapter.algorithm).roles.get(role)
    if known is not None and known.shared_key:
        return form.holds == "peft"
    return find_suffix(role, adapter.algorithm, form.dialects) is not None
