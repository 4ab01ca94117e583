"""Several adapters as one: dW = sum of m_i * dW_i, for every strength, negative and zero too.

Factors are never averaged. LoRAs are put side by side: [m1 s1 up1 | m2 s2 up2] @ [down1 ; down2] is the sum itself, at
the sum of the ranks. Only where a smaller rank is asked for, or an algorithm has no such form of its own (LoHa, LoKr),
is there a singular value decomposition, and its error is stated. What acts on the weight by more than an addition
(DoRA, IA3, OFT, GLoRA) has no sum: it stays as it is where it is alone at strength 1, and is refused elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from finitune.adapters import AdapterSet, SiteAdapter, find_algorithm
from finitune.adapters.convert import convert_adapter_to_lora
from finitune.adapters.core import AmbiguityOptions, Shape
from finitune.adapters.full import Full, make_difference
from finitune.adapters.lora import LoRA, to_lora_matrices
from finitune.adapters.lowrank import balance_factors, decompose_delta, truncate_factors
from finitune.adapters.weight import widen_inputs
from finitune.errors import AdapterError, UsageError
from finitune.merging.adapterfile import (
    OpenedAdapter,
    SiteRecord,
    build_site_receipt,
    build_site_table,
    choose_output_format,
    compute_site_figures,
    open_adapter,
    put_adapter,
    require_other_output,
)
from finitune.namings.fused import is_same_tensor, multiply_change, multiply_exactly
from finitune.report import Level, Report

_WeightedAdapter = tuple[SiteAdapter, float]
_CombineMethod = Literal["kept", "scaled", "added", "side by side", "svd"]
_MERGE_VERB = "merge"


@dataclass(frozen=True)
class RankLimit:
    """What is asked of the ranks: at most `rank`, and no more than the share `energy` of the squared norm needs.

    Raises UsageError for a rank under 1 and an energy outside of (0, 1].
    """

    rank: int | None = None
    energy: float | None = None

    def __post_init__(self) -> None:
        if (self.rank is None or self.rank >= 1) and (self.energy is None or 0 < self.energy <= 1):
            return
        raise UsageError(
            f"--rank {self.rank} and --energy {self.energy}: a rank is at least 1, an energy in (0, 1]",
            code="CUT-OUT-OF-RANGE",
            subject="--rank" if self.rank is not None and self.rank < 1 else "--energy",
            remedy="--rank 32 keeps the 32 largest singular values, --energy 0.99 as many as hold 99 % of the change.",
        )


@dataclass(frozen=True)
class CombinedAdapter:
    """The sum of several adapters, and a row for each of its sites; `silent` are the sites left out at strength 0."""

    adapter: AdapterSet
    rows: tuple[SiteRecord, ...]
    silent: tuple[str, ...] = ()


@dataclass(frozen=True)
class SiteSum:
    """One site of a sum, before it has a name."""

    adapter: SiteAdapter
    how: _CombineMethod
    error: float = 0.0
    energy: float = 1.0


def combine_adapters(
    sets: Sequence[tuple[AdapterSet, float]],
    *,
    rank: int | None = None,
    energy: float | None = None,
    shapes: Mapping[str, Shape] | None = None,
) -> CombinedAdapter:
    """The adapter whose change is the sum of strength * change over `sets`; new factors are fp32, with scale 1.

    Without `rank` and `energy` the sum is exact (to fp32's rounding). `shapes` are weights' shapes by site, needed
    only where no adapter tells a kernel. Raises AdapterError (ADAPTER-NOT-ADDABLE, ADAPTER-DOES-NOT-FIT) with the
    site as its subject.
    """
    cut = RankLimit(rank, energy)
    sites = list(dict.fromkeys(site for adapters, _ in sets for site in adapters))
    made: dict[str, SiteAdapter] = {}
    rows: list[SiteRecord] = []
    for site in sites:
        acting = {i: (a[site], m) for i, (a, m) in enumerate(sets) if site in a.sites and m != 0}
        if not acting:
            continue
        try:
            total = combine_adapters_at_site(list(acting.values()), cut, (shapes or {}).get(site))
        except AdapterError as error:
            error.subject = error.subject or site
            raise
        made[site] = total.adapter
        size = find_algorithm(total.adapter.algorithm).rank(total.adapter)
        rows.append(SiteRecord(site, total.how, size, total.error, total.energy, tuple(acting)))
    silent = tuple(site for site in sites if site not in made)
    return CombinedAdapter(AdapterSet(made, merge_learned_embeddings(sets)), tuple(rows), silent)


def combine_adapters_at_site(
    parts: Sequence[_WeightedAdapter], cut: RankLimit = RankLimit(), shape: Shape | None = None
) -> SiteSum:
    """The sum of strength * change at one site; no strength is 0. Raises AdapterError where there is no sum."""
    alone = parts[0] if len(parts) == 1 else None
    if alone and alone[1] == 1 and not is_rank_reduced(alone[0], cut):
        return SiteSum(alone[0], "kept")
    for adapter, strength in parts:
        require_addable(adapter, strength, len(parts))
    if alone and not is_rank_reduced(alone[0], cut):
        return SiteSum(scale_adapter_change(*alone), "scaled")
    bias = add_weighted_tensors(
        [(bias, m) for adapter, m in parts if (bias := compute_bias_change(adapter)) is not None]
    )
    weights = [part for part in parts if part[0].tensors.keys() - {"diff_b"}]
    if not weights:
        return add_bias_change(SiteSum(SiteAdapter(Full.name, {}), "added"), bias)
    shape = find_joint_weight_shape(weights, shape)
    if are_all_factored(weights):
        total = add_factored_adapters(weights, cut, shape)
    else:
        total = add_dense_adapters(weights, cut, shape)
    reshapes = any(adapter.options.get("reshape") for adapter, _ in weights)
    options = {"reshape": True} if reshapes else {}
    return add_bias_change(replace(total, adapter=replace(total.adapter, options=options)), bias)


def add_factored_adapters(parts: Sequence[_WeightedAdapter], cut: RankLimit, shape: Shape) -> SiteSum:
    """LoRAs side by side, cut where that is asked for; LoHa and LoKr become LoRAs of the rank that they need."""
    lora = LoRA()
    ups, downs, error = [], [], 0.0
    for adapter, strength in parts:
        if adapter.algorithm != LoRA.name:
            converted = convert_adapter_to_lora(adapter, shape)
            adapter, error = converted.adapter, max(error, converted.error)
        up, down = to_lora_matrices(adapter)
        ups.append(strength * lora.scale(adapter) * up)
        downs.append(widen_inputs(down.view(len(down), -1, *shape[2:]), shape).flatten(1))
    up, down = torch.cat(ups, dim=1), torch.cat(downs)
    largest = min(up.shape[0], down.shape[1]) if cut.rank is None else cut.rank
    if cut.energy is not None or up.shape[1] > largest:
        up, down, books = truncate_factors(up, down, rank=cut.rank, energy=cut.energy)
        return SiteSum(build_unit_scale_lora(up, down, shape), "svd", books.error, books.energy)
    plain = all(adapter.algorithm == LoRA.name for adapter, _ in parts)
    up, down = balance_factors(up.float(), down.float())
    return SiteSum(build_unit_scale_lora(up, down, shape), "side by side" if plain else "svd", error, 1 - error**2)


def add_dense_adapters(parts: Sequence[_WeightedAdapter], cut: RankLimit, shape: Shape) -> SiteSum:
    """Full differences, and whatever stands beside them, added up; a matrix is cut to factors where that is asked."""
    zeros = torch.zeros(shape, dtype=torch.float64)
    total = zeros.clone()
    for adapter, strength in parts:
        total += strength * find_algorithm(adapter.algorithm).delta(adapter, zeros)
    if cut != RankLimit() and len(shape) > 1:
        up, down, books = decompose_delta(total.flatten(1), rank=cut.rank, energy=cut.energy)
        return SiteSum(build_unit_scale_lora(up, down, shape), "svd", books.error, books.energy)
    return SiteSum(make_difference(total.float()), "added")


def are_all_factored(parts: Sequence[_WeightedAdapter]) -> bool:
    """Whether every change is known as a product of thin matrices."""
    return all(find_algorithm(adapter.algorithm).factored for adapter, _ in parts)


def scale_adapter_change(adapter: SiteAdapter, strength: float) -> SiteAdapter:
    """The adapter whose change is `strength` times as large, of the same algorithm; alpha stays as it was stated."""
    scaled = multiply_change(adapter, strength)
    bias = adapter.tensors.get("diff_b")
    return scaled if bias is None else scaled.with_tensors(diff_b=multiply_exactly(bias, strength))


def build_unit_scale_lora(up: Tensor, down: Tensor, shape: Shape) -> SiteAdapter:
    """A LoRA at scale 1 from factors (out, r) and (r, in * kernel), for a weight of `shape` (out, in, *kernel)."""
    tensors = {"up": up.reshape(*up.shape, *[1] * len(shape[2:])), "down": down.reshape(-1, *shape[1:])}
    return SiteAdapter(LoRA.name, tensors, float(up.shape[1]))


def add_bias_change(total: SiteSum, bias: Tensor | None) -> SiteSum:
    """The sum with the change of a bias, in the role that its algorithm has for it."""
    if bias is None:
        return total
    role = find_algorithm(total.adapter.algorithm).bias_role
    return replace(total, adapter=total.adapter.with_tensors(**{role: bias}))


def compute_bias_change(adapter: SiteAdapter) -> Tensor | None:
    """The change of the bias, scale included; None where there is none."""
    return find_algorithm(adapter.algorithm).bias_delta(adapter, None)


def add_weighted_tensors(terms: Sequence[tuple[Tensor, float]]) -> Tensor | None:
    """strength * tensor summed in fp64, in fp32; None for no terms."""
    total = None
    for tensor, strength in terms:
        total = strength * tensor.double() + (0 if total is None else total)
    return None if total is None else total.float()


def find_joint_weight_shape(parts: Sequence[_WeightedAdapter], shape: Shape | None) -> Shape:
    """The weight's shape that all parts agree on: `shape` where it is known, else the fullest that one of them tells.

    Raises AdapterError (ADAPTER-DOES-NOT-FIT) where they do not.
    """
    own = [find_algorithm(adapter.algorithm).shape(adapter) or () for adapter, _ in parts]
    whole = max([*own, shape or ()], key=lambda s: (len(s), math.prod(s)))
    widens = any(a.options.get("reshape") for a, _ in parts) and are_all_factored(parts)
    for (adapter, _), implied in zip(parts, own, strict=True):
        narrower = widens and len(implied) == len(whole) and implied[1:2] < whole[1:2]
        as_wide = (*implied[:1], *whole[1:2], *implied[2:]) if narrower else implied
        if not find_algorithm(adapter.algorithm).fits(adapter, as_wide, whole):
            raise AdapterError(
                f"the adapters are of different sizes here: {list(implied)} and {list(whole)}",
                code="ADAPTER-DOES-NOT-FIT",
                evidence={"shapes": [list(s) for s in own]},
                remedy="They were made for different models, or for different sizes of one. Only like goes with like.",
            )
    return whole


def is_rank_reduced(adapter: SiteAdapter, cut: RankLimit) -> bool:
    """Whether a cut changes the adapter: there is more than it asks for, and the change does not depend on the base."""
    algorithm = find_algorithm(adapter.algorithm)
    if not algorithm.additive or adapter.magnitude is not None or len(algorithm.shape(adapter) or ()) < 2:
        return False
    small = adapter.algorithm == LoRA.name and cut.rank is not None and (algorithm.rank(adapter) or 0) <= cut.rank
    return cut.energy is not None or (cut.rank is not None and not small)


def require_addable(adapter: SiteAdapter, strength: float, count: int) -> None:
    """Raise AdapterError (ADAPTER-NOT-ADDABLE) for a change that depends on the base weight."""
    algorithm = find_algorithm(adapter.algorithm)
    if algorithm.additive and adapter.magnitude is None:
        return
    title = algorithm.title if adapter.magnitude is None else "DoRA"
    where = f"be one of {count} adapters on a module" if count > 1 else f"be written at strength {strength:g}"
    raise AdapterError(
        f"{title} cannot {where}: its change depends on the base weight",
        code="ADAPTER-NOT-ADDABLE",
        evidence={"algorithm": adapter.algorithm, "dora": adapter.magnitude is not None, "strength": strength},
        remedy="Merge all of them into the model, where each acts on the base weight; or give it strength 1 and "
        "leave out the others on its modules.",
    )


def merge_learned_embeddings(sets: Sequence[tuple[AdapterSet, float]]) -> dict[str, Tensor]:
    """All learned token vectors that came along; raises AdapterError where two differ under one name."""
    kept: dict[str, Tensor] = {}
    for adapters, _ in sets:
        for name, tensor in adapters.embeddings.items():
            if name in kept and not is_same_tensor(kept[name], tensor):
                raise AdapterError(
                    f"two adapters bring different vectors for the token {name!r}",
                    code="ADAPTER-NOT-ADDABLE",
                    subject=name,
                    remedy="Vectors of a token have no sum. Rename one of them in its file.",
                )
            kept[name] = tensor
    return kept


@dataclass(frozen=True, kw_only=True)
class CombineRequest:
    """Which adapter files to add up, each at its strength, and where to write the sum.

    It is spelled as the first file is. Without `dtype` new factors are fp32, what stays as it was keeps its own.
    `answers` decide what the files leave open.
    """

    files: tuple[tuple[Path, float], ...]
    out: Path
    rank: int | None = None
    energy: float | None = None
    dtype: torch.dtype | None = None
    allow_unmatched: bool = False
    answers: AmbiguityOptions | None = None


def combine_adapter_files(request: CombineRequest, report: Report) -> None:
    """Read, add up, write, read back, compare; findings, figures, the table and the artifact go to the report.

    Figures: those of `compute_site_figures`, `sites_kept`, `sites_svd`, and what `put_adapter` says. Raises
    FinituneError.
    """
    cut = RankLimit(request.rank, request.energy)
    require_usable_strengths(request.files)
    require_other_output(request.out, [path for path, _ in request.files])
    sources = [
        open_adapter(path, report, allow_unmatched=request.allow_unmatched, answers=request.answers)
        for path, _ in request.files
    ]
    require_one_family(sources)
    strengths = [strength for _, strength in request.files]
    combined = combine_adapters(
        [(source.reading.adapter, strength) for source, strength in zip(sources, strengths, strict=True)],
        rank=cut.rank,
        energy=cut.energy,
    )
    report_combined_adapter(combined, sources, cut, report)
    receipt = build_site_receipt(_MERGE_VERB, combined.rows, [source.receipt for source in sources])
    form = choose_output_format(sources[0], request.dtype, report)
    put_adapter(request.out, combined.adapter, sources[0].family, form, receipt, report)


def require_usable_strengths(files: Sequence[tuple[Path, float]]) -> None:
    """Raise UsageError where no file, or only strengths of 0, or a strength that is no number is given."""
    wrong = [path for path, strength in files if not math.isfinite(strength)]
    if files and not wrong and any(strength for _, strength in files):
        return
    what = f"the strength of {wrong[0]} is no number" if wrong else "nothing is added at a strength other than 0"
    raise UsageError(what, code="MERGE-STRENGTH", subject="--adapter", remedy="Give each file a strength: FILE:0.7.")


def require_one_family(sources: Sequence[OpenedAdapter]) -> None:
    """Raise AdapterError (MERGE-FAMILIES) for adapters of different models."""
    first = sources[0]
    for other in sources[1:]:
        if other.family.name != first.family.name:
            raise AdapterError(
                f"{first.path.name} is for {first.family.title}, {other.path.name} for {other.family.title}",
                code="MERGE-FAMILIES",
                subject=str(other.path),
                evidence={"families": [source.family.name for source in sources]},
                remedy="Only adapters of one model family have modules in common. Merge those of each family.",
            )


def report_combined_adapter(
    combined: CombinedAdapter, sources: Sequence[OpenedAdapter], cut: RankLimit, report: Report
) -> None:
    """What was made of the sites, file by file; raises AdapterError where nothing is left."""
    rows = combined.rows
    if not rows:
        raise AdapterError(
            "no module is left: those of every file are at strength 0",
            code="MERGE-NOTHING",
            evidence={"silent": len(combined.silent)},
            remedy="Give a file with modules a strength other than 0.",
        )
    report.figures |= compute_site_figures(rows)
    report.figures |= {f"sites_{how}": sum(row.how == how for row in rows) for how in ("kept", "svd")}
    report.tables.append(build_site_table(rows, "the merged adapter"))
    for i, source in enumerate(sources):
        mine = [row for row in rows if i in row.parts]
        plain = {site for site, adapter in source.reading.adapter.sites.items() if adapter.algorithm == LoRA.name}
        svd = [row.site for row in mine if row.how == "svd" and (cut != RankLimit() or row.site not in plain)]
        if svd:
            message = f"{len(svd)} of its {len(mine)} layers needed an SVD"
            worst = max(row.error for row in mine)
            report.add(
                Level.NOTE, "MERGE-SVD", str(source.path), message, layers=len(svd), of=len(mine), error_max=worst
            )
    if combined.silent:
        message = f"{len(combined.silent)} layers are only in files of strength 0, and were left out"
        report.add(Level.NOTE, "MERGE-SILENT", combined.silent[0], message, layers=len(combined.silent))
    uncut = [row.site for row in rows if row.how == "kept" and cut.rank is not None and (row.rank or 0) > cut.rank]
    if uncut:
        message = f"{len(uncut)} layers keep a rank above {cut.rank}: their change depends on the base weight (DoRA)"
        report.add(Level.WARNING, "MERGE-NOT-CUT", uncut[0], message, layers=len(uncut))
