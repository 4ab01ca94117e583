"""What a fine-tuned model has learned, as an adapter: the difference of two checkpoints, one pair of tensors at a time.

A matrix or kernel becomes a LoRA through its singular values, cut where it was asked; norms and biases, which have no
rank, are kept as whole differences. What is the same in both is left out. What differs and fits into none of these
(embeddings, tables, parameters without a module) is either kept as a whole difference or named, with its share of all
that has changed: nothing is lost without a word. Nothing is clamped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from finitune.adapters import AdapterSet, SiteAdapter, find_algorithm
from finitune.adapters.core import is_same_weight_shape
from finitune.adapters.full import Full, make_difference
from finitune.adapters.lowrank import compute_squared_norm, decompose_delta, require_finite_matrices
from finitune.errors import FinituneError, ModelError, UsageError, suggest_nearest_name
from finitune.merging.adapterfile import SiteRecord
from finitune.merging.combine import build_unit_scale_lora
from finitune.merging.pairing import CheckpointTensorSource, PairableCheckpoint
from finitune.progress import Progress, SilentProgress

_EXTRACT_STAGE = "extract"
_EMBEDDING_MODULE_PATTERN = re.compile(
    r"(.+\.)?(embed|embed_tokens|(token|position)_embedding|shared|wte|wpe|relative_attention_bias)"
)
"""Modules that look a row up: their weight is a matrix, but no product that an adapter could join."""


@dataclass(frozen=True)
class ExtractionOptions:
    """What to extract: how far matrices are cut, which sites (shell patterns; none: all), and from what change on.

    `min_change` is the norm of a tensor's change over that of the tensor. `full` keeps whole differences of modules
    that cannot have a LoRA.
    """

    rank: int | None = None
    energy: float | None = None
    include: tuple[str, ...] = ()
    min_change: float = 0.0
    full: bool = False


@dataclass(frozen=True)
class LeftOutTensor:
    """A tensor that has changed and is not in the adapter: why, and the norm of its change over that of the tensor."""

    name: str
    why: str
    change: float


@dataclass
class ExtractionResult:
    """What has changed, site by site, and what became of every other tensor; filled as the tensors come by.

    `identical` tensors are the same in both, `small` ones changed by less than was asked, `excluded` ones belong to
    no site that was asked for.
    """

    weights: dict[str, SiteAdapter] = field(default_factory=dict)
    biases: dict[str, Tensor] = field(default_factory=dict)
    rows: list[SiteRecord] = field(default_factory=list)
    left_out: list[LeftOutTensor] = field(default_factory=list)
    identical: int = 0
    small: int = 0
    excluded: int = 0
    dtypes: set[tuple[torch.dtype, torch.dtype]] = field(default_factory=set)
    squared: float = 0.0
    left_squared: float = 0.0

    @property
    def left_out_share(self) -> float:
        """The share of the squared norm of all changes that has no place in the adapter; truncation not counted."""
        return self.left_squared / self.squared if self.squared else 0.0

    def adapter(self) -> AdapterSet:
        """All sites; a bias goes to its weight's adapter, in the role that this has for it."""
        sites = {site: self.weights.get(site, SiteAdapter(Full.name, {})) for site in {**self.weights, **self.biases}}
        for site, bias in self.biases.items():
            role = find_algorithm(sites[site].algorithm).bias_role
            sites[site] = sites[site].with_tensors(**{role: bias})
        return AdapterSet(sites)


def extract_adapter(
    base: PairableCheckpoint, tuned: PairableCheckpoint, wish: ExtractionOptions, progress: Progress | None = None
) -> ExtractionResult:
    """The way from one checkpoint to the other as an adapter; factors and differences are fp32, with scale 1.

    Raises ModelError where the checkpoints are of different models (MODELS-DIFFER) or the same in all tensors
    (MODELS-IDENTICAL), UsageError where `include` names nothing.
    """
    progress = progress or SilentProgress()
    names = [name for name in tuned.sources if name in base.sources]
    require_common_tensors(names, tuned, wish)
    done = ExtractionResult()
    progress.start(_EXTRACT_STAGE, len(names))
    for name in names:
        try:
            extract_tensor_change(name, base, tuned, wish, done)
        except FinituneError as error:
            error.subject = error.subject or name
            raise
        progress.advance(_EXTRACT_STAGE)
    progress.finish(_EXTRACT_STAGE)
    if not done.rows and not done.left_out:
        raise ModelError(
            f"the two models do not differ in any of the {len(names)} tensors that were compared",
            code="MODELS-IDENTICAL",
            evidence={"identical": done.identical, "small": done.small, "excluded": done.excluded},
            remedy="There is nothing to extract. Check that the second file is the tuned one.",
        )
    return done


def extract_tensor_change(
    name: str, base: PairableCheckpoint, tuned: PairableCheckpoint, wish: ExtractionOptions, done: ExtractionResult
) -> None:
    """Compare one pair of tensors, and put what has changed where it belongs."""
    source = tuned.sources[name]
    if not is_site_included(source, wish):
        done.excluded += 1
        return
    before, after = base.read(name), tuned.read(name)
    delta = compute_checkpoint_difference(before, after, name)
    if delta is None:
        done.identical += 1
        return
    norm = math.sqrt(compute_squared_norm(before.float().reshape(1, -1)))
    squared = compute_squared_norm(delta.reshape(1, -1))
    change = math.sqrt(squared) / norm if norm else math.inf
    if change < wish.min_change:
        done.small += 1
        return
    done.dtypes.add((before.dtype, after.dtype))
    done.squared += squared
    why = explain_unplaceable_change(source, delta)
    if why and not (wish.full and source.parameter == "weight"):
        done.left_out.append(LeftOutTensor(name, why, change))
        done.left_squared += squared
        return
    row = SiteRecord(source.name if source.parameter == "bias" else source.site, "difference", None, change=change)
    if source.parameter == "bias":
        done.biases[source.site] = delta
    elif why or delta.ndim == 1:
        done.weights[source.site] = make_difference(delta)
    else:
        up, down, books = decompose_delta(delta.flatten(1), rank=wish.rank, energy=wish.energy)
        done.weights[source.site] = build_unit_scale_lora(up, down, tuple(delta.shape))
        row = replace(row, how="svd", rank=books.rank, error=books.error, energy=books.energy)
    done.rows.append(row)


def is_site_included(source: CheckpointTensorSource, wish: ExtractionOptions) -> bool:
    """Whether a tensor's site, or the name of one that has none, is asked for."""
    return not wish.include or any(fnmatchcase(source.site or source.name, pattern) for pattern in wish.include)


def compute_checkpoint_difference(before: Tensor, after: Tensor, name: str) -> Tensor | None:
    """after - before in fp32, in the shape of `after`; None where they are the same.

    Raises ModelError (MODELS-DIFFER, MODELS-QUANTISED) and NumericsError where it is not finite.
    """
    if not is_same_weight_shape(tuple(before.shape), tuple(after.shape)):
        raise ModelError(
            f"{name} is {list(before.shape)} in the base and {list(after.shape)} in the tuned model",
            code="MODELS-DIFFER",
            subject=name,
            evidence={"base": list(before.shape), "tuned": list(after.shape)},
            remedy="The tuned model was made from another base, or another size of it. Name that one.",
        )
    delta = after.float() - before.reshape(after.shape).float()
    if not bool((delta != 0).any()):
        return None
    if any(t.dtype.itemsize == 1 and t.is_floating_point() for t in (before, after)):
        raise ModelError(
            f"{name} is quantised to 8 bits: what was learned is smaller than its steps",
            code="MODELS-QUANTISED",
            subject=name,
            evidence={"base": str(before.dtype), "tuned": str(after.dtype)},
            remedy="Use the releases of both models in bf16, fp16 or fp32.",
        )
    require_finite_matrices(delta)
    return delta


def explain_unplaceable_change(source: CheckpointTensorSource, delta: Tensor) -> str:
    """Why a change fits into no LoRA, and is no norm's or bias's either; '' where it does."""
    if not source.site:
        return "no table of the model's modules has it"
    if source.parameter == "weight" and delta.ndim > 1 and _EMBEDDING_MODULE_PATTERN.fullmatch(source.site):
        return "its rows are looked up, not multiplied"
    return ""


def list_unpaired_tensors(base: PairableCheckpoint, tuned: PairableCheckpoint) -> tuple[list[str], list[str]]:
    """The tensors that only the base has, of components that both have; and those that only the tuned model has."""
    components = {source.component for source in tuned.sources.values()}
    only_base = [n for n, source in base.sources.items() if n not in tuned.sources and source.component in components]
    return only_base, [name for name in tuned.sources if name not in base.sources]


def require_common_tensors(names: Sequence[str], tuned: PairableCheckpoint, wish: ExtractionOptions) -> None:
    """Raise where two checkpoints have nothing in common, or nothing that is asked for."""
    if not names:
        raise ModelError(
            "the two models have no tensor in common",
            code="MODELS-DIFFER",
            evidence={"tuned": sorted(tuned.sources)[:3]},
            remedy="Name the base that the tuned model was made from, as a file or a folder of the same components.",
        )
    if not any(is_site_included(tuned.sources[name], wish) for name in names):
        known = sorted({tuned.sources[name].site for name in names} - {""})
        raise UsageError(
            f"--include {' '.join(wish.include)}: no module is called "
            f"so.{suggest_nearest_name(wish.include[0], known)}",
            code="INCLUDE-NOTHING",
            subject="--include",
            evidence={"modules": known[:5]},
            remedy='Patterns are of whole names, component first: "transformer.*.to_q".',
        )
