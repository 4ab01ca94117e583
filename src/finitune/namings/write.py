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

from finitune.adapters import algorithm_of
from finitune.adapters.convert import Exactness
from finitune.adapters.core import AdapterSet, SiteAdapter
from finitune.adapters.lokr import stretch_of
from finitune.adapters.narrow import Narrowed, narrowed, narrowed_class, overflows, too_large
from finitune.adapters.oft import turned
from finitune.errors import AdapterError, NumericsError, UsageError
from finitune.models.spec import ModelSpec
from finitune.namings.core import Landing
from finitune.namings.fuse import fuse, rows_of, swap_halves, unscaled
from finitune.namings.metadata import DIFFUSERS, Receipt, with_hashes, written_metadata
from finitune.namings.peft_config import diffusers_table, numberless, peft_config
from finitune.namings.resolve import Resolver
from finitune.namings.shelf import outlined
from finitune.namings.spellings import Spelling, spelling_of
from finitune.namings.suffixes import suffix_of
from finitune.report import Finding

WRITABLE = ("kohya", "comfy", "diffusers", "peft")
KOHYA_FIRST = ("magnitude", "alpha", "diff_b")
"""Roles that ComfyUI reads best in kohya's words, whatever surrounds them."""
TO_LORA = "Convert it: --as lora (with --rank N if it may be approximate)."


@dataclass(frozen=True)
class Written:
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
        """The share of the numbers that became zero."""
        return self.flushed / self.nonzero if self.nonzero else 0.0


@dataclass(frozen=True)
class Module:
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
) -> Written:
    """The tensors and texts of `adapter` in a spelling of WRITABLE; factors in `dtype`, or in their own.

    `metadata` are the source's texts. Raises UsageError for another spelling, AdapterError where the spelling cannot
    say what the adapter is (WRITE-...) or fused modules cannot be exact (FUSE-...), NumericsError for numbers that
    are not finite in the dtype.
    """
    form = writable(spelling)
    modules: list[Module] = []
    klass, flushed, nonzero, error = Exactness.LOSSLESS, 0, 0, 0.0
    for module, how in modules_of(adapter, family, form):
        small = finite(module, dtype)
        modules.append(replace(module, adapter=small.adapter))
        klass = max(klass, how, key=lambda one: one.cost)
        flushed, nonzero, error = flushed + small.flushed, nonzero + small.nonzero, max(error, small.error)
    narrowing = narrowed_class(flushed, nonzero, error, dtype)
    klass = max(klass, narrowing, key=lambda one: one.cost)
    if not modules:
        raise AdapterError(
            "there is no module in this adapter: nothing to write",
            code="WRITE-NOTHING",
            subject=family.name,
            remedy="Check that the file is an adapter. Learned token embeddings need no conversion.",
        )
    tensors = {key: tensor for module in modules for key, tensor in spelled(module, form)}
    components = {module.component: {} for module in modules}
    for module in modules:
        components[module.component][module.name] = module.adapter
    apart = dict(adapter.embeddings) if form.alpha == "metadata" else {}
    if not apart:
        tensors |= adapter.embeddings
    texts, findings = written_metadata(
        metadata or {},
        AdapterSet({module.path: module.adapter for module in modules}),
        family,
        with_cost(receipt or Receipt("convert"), klass),
        {DIFFUSERS: json.dumps(diffusers_table(components, family))} if form.name == "diffusers" else {},
    )
    return Written(
        tensors,
        with_hashes(texts, tensors),
        peft_config(components, family) if form.name == "peft" else None,
        apart,
        klass,
        narrowing,
        flushed,
        nonzero,
        error,
        tuple(findings),
    )


def with_cost(receipt: Receipt, klass: Exactness) -> Receipt:
    """The receipt with the costlier of its own class and another."""
    own = Exactness(receipt.klass or Exactness.LOSSLESS)
    return replace(receipt, klass=max(own, klass, key=lambda one: one.cost).value)


def writable(spelling: str) -> Spelling:
    """The spelling of a name; raises UsageError (SPELLING-NOT-WRITTEN) for one that we read only, or do not know."""
    if spelling not in WRITABLE:
        raise UsageError(
            f"adapters are not written as {spelling!r}",
            code="SPELLING-NOT-WRITTEN",
            subject=spelling,
            remedy=f"Choose one of {', '.join(WRITABLE)}.",
        )
    return spelling_of(spelling)


def modules_of(adapter: AdapterSet, family: ModelSpec, form: Spelling) -> Iterator[tuple[Module, Exactness]]:
    """The modules of the file in the order of the sites, and how each was made."""
    resolver = Resolver.of_model(family)
    rows = known_rows(adapter)
    done: set[str] = set()
    for site in adapter:
        if site in done:
            continue
        component, _, name = site.partition(".")
        sites = resolver.components.get(component)
        found = sites and resolver.named(component, name, native=form.native(sites))
        prefix = sites and form.prefix(sites)
        if not sites or not found or prefix is None:
            raise no_name(site, family, form)
        path, landing = found
        parts = [adapter.sites.get(f"{component}.{part}") for part in landing.sites]
        done.update(f"{component}.{part}" for part in landing.sites)
        whole, how = joined(parts, landing, rows)
        spellable, cost = form_of(whole, form, site)
        if spellable.options.get("rotates_bias"):  # the prefix alone tells kohya's OFT from LyCORIS'
            prefix = spelling_of("kohya-oft").prefix(sites) or prefix
        yield Module(prefix, path, component, spellable), max(how, cost, key=lambda one: one.cost)


def joined(
    parts: Sequence[SiteAdapter | None], landing: Landing, rows: Mapping[str, int]
) -> tuple[SiteAdapter, Exactness]:
    """The adapter of one module of the file, from those of the sites that its rows are."""
    whole, how = next(part for part in parts if part is not None), Exactness.LOSSLESS
    first = f"{landing.component}.{landing.sites[0]}"
    if len(parts) > 1:
        fused = fuse(parts, [rows_at(i, parts, landing, rows) for i in range(len(parts))], first)
        whole, how = fused.adapter, fused.exactness
    return (swap_halves(whole, first) if landing.swapped else whole), how


def known_rows(adapter: AdapterSet) -> dict[str, int]:
    """How many rows the weights of a kind of site have, by the site with its numbers blanked."""
    counts = ((numberless(site), rows_of(outlined(one))) for site, one in adapter.sites.items())
    return {site: count for site, count in counts if count is not None}


def rows_at(i: int, parts: Sequence[SiteAdapter | None], landing: Landing, rows: Mapping[str, int]) -> int:
    """How many rows the i-th part of a fused module has: its own, its like's in other blocks, or its neighbours'."""
    part = parts[i]
    own = None if part is None else rows_of(part)
    site = f"{landing.component}.{landing.sites[i]}"
    like = own or rows.get(numberless(site))
    if like is not None:
        return like
    present = next(part for part in parts if part is not None)
    shape = algorithm_of(present.algorithm).shape(present)
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


def form_of(adapter: SiteAdapter, form: Spelling, site: str) -> tuple[SiteAdapter, Exactness]:
    """The adapter as the spelling can say it, and what that cost; raises AdapterError (WRITE-...) where it cannot."""
    if form.alpha == "metadata" and adapter.algorithm != "lora":
        remedy = TO_LORA if algorithm_of(adapter.algorithm).additive else ""
        raise cannot_say(site, adapter, form, "it knows LoRA alone", remedy)
    if stretch_of(adapter) is not None:
        why = "it is some rows of a larger Kronecker product, and no other module has the rest"
        raise cannot_say(site, adapter, form, why, TO_LORA)
    magnitude = adapter.magnitude
    if magnitude is not None and magnitude.norm_of != "adapted":
        raise cannot_say(site, adapter, form, f"its magnitudes (DoRA) are of the {magnitude.norm_of} weight's norm")
    if magnitude is not None and magnitude.side == "in" and form.alpha == "metadata":
        raise cannot_say(site, adapter, form, "its magnitudes (DoRA) are of the inputs")
    roles = [*adapter.tensors, *(("magnitude",) if magnitude is not None else ())]
    if adapter.options.get("reshape") and form.alpha == "tensor":
        roles.append("reshape")
    for role in roles:
        if suffix_of(role, adapter.algorithm, form.dialects) is None:
            raise cannot_say(site, adapter, form, f"it has no word for {role}")
    if adapter.algorithm == "lokr" and "rank" in adapter.options:
        # Only PEFT divides alpha by a rank that no tensor has.
        return replace(unscaled(adapter), alpha=None, options={}), Exactness.EXACT
    if adapter.alpha is not None and adapter.alpha <= 0:  # which programs read in several ways
        return unscaled(adapter), Exactness.EXACT
    if form.alpha == "tensor" and adapter.rank_stabilised:
        rank = algorithm_of(adapter.algorithm).rank(adapter)
        alpha = None if adapter.alpha is None or rank is None else adapter.alpha * math.sqrt(rank)
        return replace(adapter, alpha=alpha, rank_stabilised=False), Exactness.LOSSLESS
    return adapter, Exactness.LOSSLESS


def finite(module: Module, dtype: torch.dtype | None) -> Narrowed:
    """The module's adapter in the dtype (None: each tensor's own); raises NumericsError with the module's name."""
    try:
        if dtype is not None:
            return narrowed(module.adapter, dtype)
        for role, tensor in module.adapter.tensors.items():
            if overflows(tensor, tensor.dtype):
                raise too_large(role, tensor, tensor.dtype)
        return Narrowed(module.adapter, 0, 0, 0.0)
    except NumericsError as error:
        error.subject = f"{module.path}: {error.subject}"
        raise


def spelled(module: Module, form: Spelling) -> Iterator[tuple[str, Tensor]]:
    """The keys and tensors of one module."""
    adapter, algorithm = module.adapter, module.adapter.algorithm
    base = module.prefix + (module.name.replace(".", "_") if form.flat else module.name)
    roles = dict(adapter.tensors)
    if adapter.magnitude is not None:
        roles["magnitude"] = magnitude_tensor(adapter, form)
    if form.alpha == "tensor":
        alpha = stated_alpha(adapter)
        if alpha is not None:
            roles["alpha"] = torch.tensor(alpha, dtype=torch.float32)
        if algorithm == "ia3":
            roles["on_input"] = torch.tensor(bool(adapter.options.get("on_input")))
        if adapter.options.get("reshape"):
            roles["reshape"] = torch.tensor(algorithm_of(algorithm).shape(adapter))
    for role, tensor in roles.items():
        dialects = ("kohya", *form.dialects) if role in KOHYA_FIRST and form.alpha == "tensor" else form.dialects
        suffix = suffix_of(role, algorithm, dialects)
        assert suffix is not None  # form_of has seen to it
        yield base + suffix.text, tensor.contiguous()


def stated_alpha(adapter: SiteAdapter) -> float | None:
    """What the alpha tensor says: the numerator of the scale, or a rotation's constraint per output.

    Where none was stated, the rank: left out, some programs would take 1. A LoKr without a rank has 1, which LyCORIS
    cannot load without and nothing is changed by.
    """
    algorithm = algorithm_of(adapter.algorithm)
    if adapter.algorithm in ("oft", "boft"):
        return float(adapter.options.get("constraint", 0.0)) / turned(adapter)
    if adapter.alpha is not None:
        return adapter.alpha
    rank = algorithm.rank(adapter)
    return 1.0 if rank is None and adapter.algorithm == "lokr" else rank


def magnitude_tensor(adapter: SiteAdapter, form: Spelling) -> Tensor:
    """The magnitudes in fp32, shaped as the spelling's programs expect them.

    kohya: (out, 1, ...) or (1, in, ...). PEFT: (out) of a Linear, (1, out, 1, 1) of a convolution.
    """
    assert adapter.magnitude is not None
    values, shape = adapter.magnitude.tensor.float().flatten(), algorithm_of(adapter.algorithm).shape(adapter)
    kernel = [1] * len((shape or ())[2:])
    if form.alpha == "metadata":
        return values.reshape(1, -1, *kernel) if kernel else values
    return values.reshape(-1, 1, *kernel) if adapter.magnitude.side == "out" else values.reshape(1, -1, *kernel)


def no_name(site: str, family: ModelSpec, form: Spelling) -> AdapterError:
    """The error for a site that the spelling cannot name."""
    return AdapterError(
        f"{site} has no name in {form.title}'s spelling of {family.title}",
        code="WRITE-NO-NAME",
        subject=site,
        evidence={"family": family.name, "spelling": form.name},
        remedy="Name the model that the adapter is for, or choose a spelling that has the component: --to diffusers.",
    )


def cannot_say(site: str, adapter: SiteAdapter, form: Spelling, why: str, remedy: str = "") -> AdapterError:
    """The error for an adapter that a spelling has no words for, with a spelling that has them."""
    title = algorithm_of(adapter.algorithm).title
    able = [name for name in ("kohya", "comfy") if name != form.name and all_words(adapter, spelling_of(name))]
    other = f"Write another spelling: --to {able[0]}." if able else "None of the spellings that we write has it."
    return AdapterError(
        f"{form.title} cannot hold the {title} at {site}: {why}",
        code="WRITE-CANNOT-SAY",
        subject=site,
        evidence={"algorithm": adapter.algorithm, "spelling": form.name},
        remedy=remedy or other,
    )


def all_words(adapter: SiteAdapter, form: Spelling) -> bool:
    """Whether a spelling has a word for every role of an adapter."""
    return all(suffix_of(role, adapter.algorithm, form.dialects) for role in adapter.tensors)
