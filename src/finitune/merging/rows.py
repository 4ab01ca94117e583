"""How the rows of one merged weight come about, in fp64, a few at a time, and how they are rounded.

A plain LoRA, or any number of them, is one product: W + [m1 s1 up1 | m2 s2 up2] @ [down1 ; down2], accumulated onto the
weight by the matrix library itself. What acts on each row apart from the others is cut into rows. Only the rest
(rotations, input-side magnitudes, other layouts) is made as a whole first. All three are the algebra of
`adapters.weight.combine_adapted_weight`, which the tests compare them with.

Each tensor has a rounding of its own, so that results depend on neither threads nor order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from finitune.adapters import SiteAdapter, find_algorithm
from finitune.adapters.core import Shape
from finitune.adapters.lora import is_plain_lora
from finitune.adapters.weight import WeightedAdapter, combine_adapted_weight, compute_adapted_bias
from finitune.errors import UsageError, suggest_nearest_name
from finitune.namings.fused import find_row_roles, infer_weight_rows
from finitune.numerics.narrow import RoundingScratch, round_carrying, round_once_into, round_randomly


@dataclass(frozen=True)
class ModuleRows:
    """The rows [begin, end) of a weight that are one module's, and what acts on it; no adapters: they stay."""

    site: str
    begin: int
    end: int
    adapters: tuple[WeightedAdapter, ...] = ()


@dataclass(frozen=True)
class TensorChange:
    """What becomes of one tensor: its parts from top to bottom, and how the file lays the weight out.

    `shape` is the tensor's in the file, `new_shape` what it will be. `swapped`: the halves of the rows stand in the
    other order than the modules'; `transposed`: the inputs come first.
    """

    parameter: str
    parts: tuple[ModuleRows, ...]
    shape: Shape
    new_shape: Shape
    swapped: bool = False
    transposed: bool = False

    @property
    def adapted(self) -> tuple[ModuleRows, ...]:
        """The parts that something acts on."""
        return tuple(part for part in self.parts if part.adapters)


class RowMerger(Protocol):
    """Turns rows of the base weight into rows of the merged one."""

    def apply(self, block: Tensor, rows: slice) -> None:
        """Replace the base's `rows` (begin, end and step), in fp64 (rows, columns), by the merged ones, in place."""
        ...


@dataclass(frozen=True)
class IdentityMerger:
    """Nothing changes but the format."""

    def apply(self, block: Tensor, rows: slice) -> None:
        """Leave the rows as they are."""


@dataclass(frozen=True)
class LowRankMerger:
    """W + up @ down with fp64 factors (out, r) and (r, in * kernel), all scales and strengths inside of `up`."""

    up: Tensor
    down: Tensor

    def apply(self, block: Tensor, rows: slice) -> None:
        """Add these rows of the product."""
        block.addmm_(self.up[rows], self.down)


@dataclass(frozen=True)
class RowwiseMerger:
    """Adapters that are cut into rows; `tail` is the shape behind the rows."""

    adapters: tuple[WeightedAdapter, ...]
    tail: Shape

    def apply(self, block: Tensor, rows: slice) -> None:
        """Apply these rows of the adapters to these rows of the weight."""
        cut = [(slice_adapter_rows(adapter, rows), strength) for adapter, strength in self.adapters]
        block.copy_(combine_adapted_weight(block.view(-1, *self.tail), cut).view(block.shape))


@dataclass(frozen=True)
class PrecomputedMerger:
    """A merged weight (rows, columns) in fp64 that was made before."""

    merged: Tensor

    def apply(self, block: Tensor, rows: slice) -> None:
        """Take these rows."""
        block.copy_(self.merged[rows])


@dataclass(frozen=True)
class StackedMerger:
    """Several modules' rows, one below the other: (begin, end, recipe) of each that changes."""

    pieces: tuple[tuple[int, int, RowMerger], ...]

    def apply(self, block: Tensor, rows: slice) -> None:
        """Apply each piece to its share of the rows."""
        numbers = range(rows.start, rows.stop, rows.step or 1)
        for begin, end, recipe in self.pieces:
            first, last = (-((numbers.start - edge) // numbers.step) for edge in (begin, end))
            first, last = max(0, first), min(len(numbers), last)
            if first < last:
                inside = numbers[first:last]
                recipe.apply(block[first:last], slice(inside.start - begin, inside[-1] + 1 - begin, inside.step))


def choose_row_merger(change: TensorChange, base: Callable[[], Tensor]) -> RowMerger:
    """The cheapest recipe of a change; `base` reads the whole tensor in fp64, where it is needed as a whole."""
    if change.parameter == "bias":
        return PrecomputedMerger(merge_whole_bias(change, base()))
    if len(change.shape) < 2 or change.new_shape != change.shape:
        return PrecomputedMerger(merge_whole_weight(change, base()))
    plain = [build_low_rank_merger(part.adapters) for part in change.adapted]
    if (change.swapped or change.transposed) and not (len(change.parts) == 1 and plain[0]):
        return PrecomputedMerger(merge_whole_weight(change, base()))
    if change.swapped or change.transposed:
        return reorder_low_rank_factors(plain[0], change)  # type: ignore[arg-type]
    tail = change.shape[1:]
    pieces: list[tuple[int, int, RowMerger]] = []
    for part, factors in zip(change.adapted, plain, strict=True):
        recipe: RowMerger | None = factors
        if recipe is None and all(is_rowwise_adapter(adapter, part.end - part.begin) for adapter, _ in part.adapters):
            recipe = RowwiseMerger(part.adapters, tail)
        if recipe is None:
            return PrecomputedMerger(merge_whole_weight(change, base()))
        pieces.append((part.begin, part.end, recipe))
    return pieces[0][2] if len(change.parts) == 1 else StackedMerger(tuple(pieces))


def build_low_rank_merger(adapters: Sequence[WeightedAdapter]) -> LowRankMerger | None:
    """All adapters as one pair of factors, or None where one of them is no plain LoRA."""
    if any(not is_plain_lora(a) or a.magnitude or a.options.get("reshape") for a, _ in adapters):
        return None
    scaled = [
        strength * find_algorithm(adapter.algorithm).scale(adapter) * adapter.tensors["up"].double().flatten(1)
        for adapter, strength in adapters
    ]
    downs = [adapter.tensors["down"].double().flatten(1) for adapter, _ in adapters]
    return LowRankMerger(torch.cat(scaled, dim=1), torch.cat(downs))


def reorder_low_rank_factors(factors: LowRankMerger, change: TensorChange) -> LowRankMerger:
    """The factors of a weight whose file has the halves of its rows exchanged, or its inputs first."""
    up = torch.cat(factors.up.chunk(2)[::-1]) if change.swapped else factors.up
    return (
        LowRankMerger(factors.down.T.contiguous(), up.T.contiguous())
        if change.transposed
        else LowRankMerger(up, factors.down)
    )


def is_rowwise_adapter(adapter: SiteAdapter, rows: int) -> bool:
    """Whether each row of the change depends on the same row of the weight and of the tensors alone."""
    if (
        not find_algorithm(adapter.algorithm).rowwise
        or adapter.options.get("reshape")
        or infer_weight_rows(adapter) != rows
    ):
        return False
    return adapter.magnitude is None or adapter.magnitude.side == "out"


def slice_adapter_rows(adapter: SiteAdapter, rows: slice) -> SiteAdapter:
    """The adapter of some rows of the weight; its scale stays."""
    tensors = dict(adapter.tensors)
    for role, axis in find_row_roles([adapter]).items():
        tensors[role] = tensors[role].movedim(axis, 0)[rows].movedim(0, axis)
    magnitude = adapter.magnitude
    if magnitude is not None:
        magnitude = replace(magnitude, tensor=magnitude.tensor.flatten()[rows])
    return replace(adapter, tensors=tensors, magnitude=magnitude)


def merge_whole_weight(change: TensorChange, base: Tensor) -> Tensor:
    """The whole merged weight as a matrix: fp64 `base` as the file has it, every part adapted; laid out as the file."""
    weight = base.T if change.transposed else base
    weight = swap_row_halves(weight) if change.swapped else weight
    pieces = [
        combine_adapted_weight(weight[part.begin : part.end], list(part.adapters))
        if part.adapters
        else weight[part.begin : part.end]
        for part in change.parts
    ]
    merged = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    merged = swap_row_halves(merged) if change.swapped else merged
    return to_matrix(merged.T if change.transposed else merged)


def merge_whole_bias(change: TensorChange, base: Tensor) -> Tensor:
    """The whole merged bias as one row: fp64 `base` as the file has it, every part adapted."""
    bias = swap_row_halves(base) if change.swapped else base
    pieces: list[Tensor] = []
    for part in change.parts:
        piece = bias[part.begin : part.end]
        merged = piece
        for adapter, strength in part.adapters:  # each on the base, as for weights
            merged = merged + (compute_adapted_bias(piece, adapter, strength) - piece)  # type: ignore[operator]
        pieces.append(merged)
    whole = torch.cat(pieces)
    return to_matrix(swap_row_halves(whole) if change.swapped else whole)


def swap_row_halves(tensor: Tensor) -> Tensor:
    """The lower half of the rows above the upper one."""
    return torch.cat(tensor.chunk(2)[::-1])


def to_matrix_shape(shape: Shape) -> tuple[int, int]:
    """A tensor as (rows, columns): outputs by all the rest, or one row where there is no rest."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def to_matrix(tensor: Tensor) -> Tensor:
    """A tensor as rows and columns."""
    return tensor.reshape(to_matrix_shape(tuple(tensor.shape)))


class RowRounder(Protocol):
    """Rounds the rows of one tensor, from top to bottom."""

    def __call__(self, wide: Tensor, narrow: Tensor) -> Tensor:
        """Round fp64 `wide` (rows, columns) into `narrow` of the same shape; returns it, or its fp32 form, flat."""
        ...


class NearestRounder:
    """To nearest, half to even: the best for every single number."""

    def __init__(self, scratch: RoundingScratch, key: str, seed: int):
        self.scratch = scratch

    def __call__(self, wide: Tensor, narrow: Tensor) -> Tensor:
        """Round without allocating."""
        return round_once_into(wide.view(-1), narrow.view(-1), self.scratch)


class StochasticRounder:
    """To either neighbour at random: what is too small to survive survives on average. Seeded by the tensor's key."""

    def __init__(self, scratch: RoundingScratch, key: str, seed: int):
        digest = hashlib.sha256(f"{seed}\0{key}".encode()).digest()
        self.generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    def __call__(self, wide: Tensor, narrow: Tensor) -> Tensor:
        """Draw the next rows."""
        narrow.copy_(round_randomly(wide, narrow.dtype, self.generator))
        return wide.view(-1)


class CompensatedRounder:
    """To nearest, with the error of each element carried to the next of its row: sums along a row survive."""

    def __init__(self, scratch: RoundingScratch, key: str, seed: int):
        pass

    def __call__(self, wide: Tensor, narrow: Tensor) -> Tensor:
        """Carry along each row."""
        narrow.copy_(round_carrying(wide, narrow.dtype))
        return wide.view(-1)


ROUNDER_BY_NAME: dict[str, type[NearestRounder] | type[StochasticRounder] | type[CompensatedRounder]] = {
    "nearest": NearestRounder,
    "stochastic": StochasticRounder,
    "compensated": CompensatedRounder,
}


def find_rounder_class(name: str) -> type[NearestRounder] | type[StochasticRounder] | type[CompensatedRounder]:
    """The rounding of a name; raises UsageError for one that we do not have."""
    if name in ROUNDER_BY_NAME:
        return ROUNDER_BY_NAME[name]
    raise UsageError(
        f"--rounding {name}: there is no such rounding.{suggest_nearest_name(name, ROUNDER_BY_NAME)}",
        code="MERGE-ROUNDING",
        subject="--rounding",
        remedy=f"It is one of {', '.join(ROUNDER_BY_NAME)}.",
    )
