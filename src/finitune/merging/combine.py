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

from finitune.adapters import AdapterSet, SiteAdapter, algorithm_of
from finitune.adapters.convert import as_lora, thin_lora
from finitune.adapters.core import Shape
from finitune.adapters.lowrank import balance, svd_delta, truncate
from finitune.adapters.weight import widened
from finitune.errors import AdapterError, UsageError
from finitune.merging.adapterfile import Source, demand_other, form_for, open_adapter, put_adapter
from finitune.merging.rows import Row, figures_of, receipt_for, table_of
from finitune.namings.core import Answers
from finitune.namings.fuse import ROWS, SCALED, same, times
from finitune.report import Level, Report

Strong = tuple[SiteAdapter, float]
How = Literal["kept", "scaled", "added", "side by side", "svd"]
FACTORED = {"lora", "loha", "lokr"}
VERB = "merge"


@dataclass(frozen=True)
class Cut:
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
class Combined:
    """The sum of several adapters, and a row for each of its sites; `silent` are the sites left out at strength 0."""

    adapter: AdapterSet
    rows: tuple[Row, ...]
    silent: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sum:
    """One site of a sum, before it has a name."""

    adapter: SiteAdapter
    how: How
    error: float = 0.0
    energy: float = 1.0


def combine(
    sets: Sequence[tuple[AdapterSet, float]],
    *,
    rank: int | None = None,
    energy: float | None = None,
    shapes: Mapping[str, Shape] | None = None,
) -> Combined:
    """The adapter whose change is the sum of strength * change over `sets`; new factors are fp32, with scale 1.

    Without `rank` and `energy` the sum is exact (to fp32's rounding). `shapes` are weights' shapes by site, needed
    only where no adapter tells a kernel. Raises AdapterError (ADAPTER-NOT-ADDABLE, ADAPTER-DOES-NOT-FIT) with the
    site as its subject.
    """
    cut = Cut(rank, energy)
    sites = list(dict.fromkeys(site for adapters, _ in sets for site in adapters))
    made: dict[str, SiteAdapter] = {}
    rows: list[Row] = []
    for site in sites:
        acting = {i: (a[site], m) for i, (a, m) in enumerate(sets) if site in a.sites and m != 0}
        if not acting:
            continue
        try:
            total = combine_site(list(acting.values()), cut, (shapes or {}).get(site))
        except AdapterError as error:
            error.subject = error.subject or site
            raise
        made[site] = total.adapter
        size = algorithm_of(total.adapter.algorithm).rank(total.adapter)
        rows.append(Row(site, total.how, size, total.error, total.energy, tuple(acting)))
    silent = tuple(site for site in sites if site not in made)
    return Combined(AdapterSet(made, embeddings_of(sets)), tuple(rows), silent)


def combine_site(parts: Sequence[Strong], cut: Cut = Cut(), shape: Shape | None = None) -> Sum:
    """The sum of strength * change at one site; no strength is 0. Raises AdapterError where there is no sum."""
    alone = parts[0] if len(parts) == 1 else None
    if alone and alone[1] == 1 and not is_cut(alone[0], cut):
        return Sum(alone[0], "kept")
    for adapter, strength in parts:
        demand_addable(adapter, strength, len(parts))
    if alone and not is_cut(alone[0], cut):
        return Sum(strengthened(*alone), "scaled")
    bias = sum_of([(bias, m) for adapter, m in parts if (bias := bias_of(adapter)) is not None])
    weights = [part for part in parts if part[0].tensors.keys() - {"diff_b"}]
    if not weights:
        return with_bias(Sum(SiteAdapter("full", {}), "added"), bias)
    shape = joint_shape(weights, shape)
    algorithms = {adapter.algorithm for adapter, _ in weights}
    if algorithms <= FACTORED:
        total = factored_sum(weights, cut, shape)
    else:
        total = dense_sum(weights, cut, shape, "norm" if algorithms == {"norm"} else "full")
    reshapes = any(adapter.options.get("reshape") for adapter, _ in weights)
    options = {"reshape": True} if reshapes else {}
    return with_bias(replace(total, adapter=replace(total.adapter, options=options)), bias)


def factored_sum(parts: Sequence[Strong], cut: Cut, shape: Shape) -> Sum:
    """LoRAs side by side, cut where that is asked for; LoHa and LoKr become LoRAs of the rank that they need."""
    lora = algorithm_of("lora")
    ups, downs, error = [], [], 0.0
    for adapter, strength in parts:
        if adapter.algorithm != "lora":
            converted = as_lora(adapter, shape)
            adapter, error = converted.adapter, max(error, converted.error)
        up, down = thin_lora(adapter)
        ups.append(strength * lora.scale(adapter) * up)
        downs.append(widened(down.view(len(down), -1, *shape[2:]), shape).flatten(1))
    up, down = torch.cat(ups, dim=1), torch.cat(downs)
    largest = min(up.shape[0], down.shape[1]) if cut.rank is None else cut.rank
    if cut.energy is not None or up.shape[1] > largest:
        up, down, books = truncate(up, down, rank=cut.rank, energy=cut.energy)
        return Sum(lora_of(up, down, shape), "svd", books.error, books.energy)
    plain = all(adapter.algorithm == "lora" for adapter, _ in parts)
    up, down = balance(up.float(), down.float())
    return Sum(lora_of(up, down, shape), "side by side" if plain else "svd", error, 1 - error**2)


def dense_sum(parts: Sequence[Strong], cut: Cut, shape: Shape, algorithm: Literal["full", "norm"]) -> Sum:
    """Full differences, and whatever stands beside them, added up; a matrix is cut to factors where that is asked."""
    zeros = torch.zeros(shape, dtype=torch.float64)
    total = zeros.clone()
    for adapter, strength in parts:
        total += strength * algorithm_of(adapter.algorithm).delta(adapter, zeros)
    if cut != Cut() and len(shape) > 1:
        up, down, books = svd_delta(total.flatten(1), rank=cut.rank, energy=cut.energy)
        return Sum(lora_of(up, down, shape), "svd", books.error, books.energy)
    role = "w_norm" if algorithm == "norm" else "diff"
    return Sum(SiteAdapter(algorithm, {role: total.float()}), "added")


def strengthened(adapter: SiteAdapter, strength: float) -> SiteAdapter:
    """The adapter whose change is `strength` times as large, of the same algorithm; alpha stays as it was stated."""
    roles = {*SCALED.get(adapter.algorithm, ROWS[adapter.algorithm]), "diff_b"} & adapter.tensors.keys()
    return adapter.with_tensors(**{role: times(adapter.tensors[role], strength) for role in roles})


def lora_of(up: Tensor, down: Tensor, shape: Shape) -> SiteAdapter:
    """A LoRA at scale 1 from factors (out, r) and (r, in * kernel), for a weight of `shape` (out, in, *kernel)."""
    tensors = {"up": up.reshape(*up.shape, *[1] * len(shape[2:])), "down": down.reshape(-1, *shape[1:])}
    return SiteAdapter("lora", tensors, float(up.shape[1]))


def with_bias(total: Sum, bias: Tensor | None) -> Sum:
    """The sum with the change of a bias, in the role that its algorithm has for it."""
    if bias is None:
        return total
    role = "b_norm" if total.adapter.algorithm == "norm" else "diff_b"
    return replace(total, adapter=total.adapter.with_tensors(**{role: bias}))


def bias_of(adapter: SiteAdapter) -> Tensor | None:
    """The change of the bias, scale included; None where there is none."""
    return algorithm_of(adapter.algorithm).bias_delta(adapter, None)


def sum_of(terms: Sequence[tuple[Tensor, float]]) -> Tensor | None:
    """strength * tensor summed in fp64, in fp32; None for no terms."""
    total = None
    for tensor, strength in terms:
        total = strength * tensor.double() + (0 if total is None else total)
    return None if total is None else total.float()


def joint_shape(parts: Sequence[Strong], shape: Shape | None) -> Shape:
    """The weight's shape that all parts agree on: `shape` where it is known, else the fullest that one of them tells.

    Raises AdapterError (ADAPTER-DOES-NOT-FIT) where they do not.
    """
    own = [algorithm_of(adapter.algorithm).shape(adapter) or () for adapter, _ in parts]
    whole = max([*own, shape or ()], key=lambda s: (len(s), math.prod(s)))
    widens = any(a.options.get("reshape") for a, _ in parts) and all(a.algorithm in FACTORED for a, _ in parts)
    for (adapter, _), implied in zip(parts, own, strict=True):
        narrower = widens and len(implied) == len(whole) and implied[1:2] < whole[1:2]
        as_wide = (*implied[:1], *whole[1:2], *implied[2:]) if narrower else implied
        if not algorithm_of(adapter.algorithm).fits(adapter, as_wide, whole):
            raise AdapterError(
                f"the adapters are of different sizes here: {list(implied)} and {list(whole)}",
                code="ADAPTER-DOES-NOT-FIT",
                evidence={"shapes": [list(s) for s in own]},
                remedy="They were made for different models, or for different sizes of one. Only like goes with like.",
            )
    return whole


def is_cut(adapter: SiteAdapter, cut: Cut) -> bool:
    """Whether a cut changes the adapter: there is more than it asks for, and the change does not depend on the base."""
    algorithm = algorithm_of(adapter.algorithm)
    if not algorithm.additive or adapter.magnitude is not None or len(algorithm.shape(adapter) or ()) < 2:
        return False
    small = adapter.algorithm == "lora" and cut.rank is not None and (algorithm.rank(adapter) or 0) <= cut.rank
    return cut.energy is not None or (cut.rank is not None and not small)


def demand_addable(adapter: SiteAdapter, strength: float, count: int) -> None:
    """Raise AdapterError (ADAPTER-NOT-ADDABLE) for a change that depends on the base weight."""
    algorithm = algorithm_of(adapter.algorithm)
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


def embeddings_of(sets: Sequence[tuple[AdapterSet, float]]) -> dict[str, Tensor]:
    """All learned token vectors that came along; raises AdapterError where two differ under one name."""
    kept: dict[str, Tensor] = {}
    for adapters, _ in sets:
        for name, tensor in adapters.embeddings.items():
            if name in kept and not same(kept[name], tensor):
                raise AdapterError(
                    f"two adapters bring different vectors for the token {name!r}",
                    code="ADAPTER-NOT-ADDABLE",
                    subject=name,
                    remedy="Vectors of a token have no sum. Rename one of them in its file.",
                )
            kept[name] = tensor
    return kept


@dataclass(frozen=True, kw_only=True)
class Combination:
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
    answers: Answers | None = None


def combine_files(request: Combination, report: Report) -> None:
    """Read, add up, write, read back, compare; findings, figures, the table and the artifact go to the report.

    Figures: those of `figures_of`, `sites_kept`, `sites_svd`, and what `put_adapter` says. Raises FinituneError.
    """
    cut = Cut(request.rank, request.energy)
    demand_strengths(request.files)
    demand_other(request.out, [path for path, _ in request.files])
    sources = [
        open_adapter(path, report, allow_unmatched=request.allow_unmatched, answers=request.answers)
        for path, _ in request.files
    ]
    demand_one_family(sources)
    strengths = [strength for _, strength in request.files]
    combined = combine(
        [(source.reading.adapter, strength) for source, strength in zip(sources, strengths, strict=True)],
        rank=cut.rank,
        energy=cut.energy,
    )
    tell(combined, sources, cut, report)
    receipt = receipt_for(VERB, combined.rows, [source.receipt for source in sources])
    form = form_for(sources[0], request.dtype, report)
    put_adapter(request.out, combined.adapter, sources[0].family, form, receipt, report)


def demand_strengths(files: Sequence[tuple[Path, float]]) -> None:
    """Raise UsageError where no file, or only strengths of 0, or a strength that is no number is given."""
    wrong = [path for path, strength in files if not math.isfinite(strength)]
    if files and not wrong and any(strength for _, strength in files):
        return
    what = f"the strength of {wrong[0]} is no number" if wrong else "nothing is added at a strength other than 0"
    raise UsageError(what, code="MERGE-STRENGTH", subject="--adapter", remedy="Give each file a strength: FILE:0.7.")


def demand_one_family(sources: Sequence[Source]) -> None:
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


def tell(combined: Combined, sources: Sequence[Source], cut: Cut, report: Report) -> None:
    """What was made of the sites, file by file; raises AdapterError where nothing is left."""
    rows = combined.rows
    if not rows:
        raise AdapterError(
            "no module is left: those of every file are at strength 0",
            code="MERGE-NOTHING",
            evidence={"silent": len(combined.silent)},
            remedy="Give a file with modules a strength other than 0.",
        )
    report.figures |= figures_of(rows)
    report.figures |= {f"sites_{how}": sum(row.how == how for row in rows) for how in ("kept", "svd")}
    report.tables.append(table_of(rows, "the merged adapter"))
    for i, source in enumerate(sources):
        mine = [row for row in rows if i in row.parts]
        plain = {site for site, adapter in source.reading.adapter.sites.items() if adapter.algorithm == "lora"}
        svd = [row.site for row in mine if row.how == "svd" and (cut != Cut() or row.site not in plain)]
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
