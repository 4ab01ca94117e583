"""How the rows of one merged weight come about, in fp64, a few at a time.

A plain LoRA, or any number of them, is one product: W + [m1 s1 up1 | m2 s2 up2] @ [down1 ; down2], accumulated onto the
weight by the matrix library itself. What acts on each row apart from the others is cut into rows. Only the rest
(rotations, input-side magnitudes, other layouts) is made as a whole first. All three are the algebra of
`adapters.weight.combined_weight`, which the tests compare them with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from finitune.adapters import SiteAdapter, algorithm_of
from finitune.adapters.core import Shape
from finitune.adapters.weight import Strong, adapted_bias, combined_weight
from finitune.namings.fuse import row_roles, rows_of

ROWWISE = {"lora", "loha", "full"}
"""Algorithms whose row roles have one row for each row of the weight."""


@dataclass(frozen=True)
class Part:
    """The rows [begin, end) of a weight that are one module's, and what acts on it; no adapters: they stay."""

    site: str
    begin: int
    end: int
    adapters: tuple[Strong, ...] = ()


@dataclass(frozen=True)
class Change:
    """What becomes of one tensor: its parts from top to bottom, and how the file lays the weight out.

    `shape` is the tensor's in the file, `new_shape` what it will be. `swapped`: the halves of the rows stand in the
    other order than the modules'; `transposed`: the inputs come first.
    """

    parameter: str
    parts: tuple[Part, ...]
    shape: Shape
    new_shape: Shape
    swapped: bool = False
    transposed: bool = False

    @property
    def adapted(self) -> tuple[Part, ...]:
        """The parts that something acts on."""
        return tuple(part for part in self.parts if part.adapters)


class Recipe(Protocol):
    """Turns rows of the base weight into rows of the merged one."""

    def apply(self, block: Tensor, rows: slice) -> None:
        """Replace the base's `rows` (begin, end and step), in fp64 (rows, columns), by the merged ones, in place."""
        ...


@dataclass(frozen=True)
class Same:
    """Nothing changes but the format."""

    def apply(self, block: Tensor, rows: slice) -> None:
        """Leave the rows as they are."""


@dataclass(frozen=True)
class LowRank:
    """W + up @ down with fp64 factors (out, r) and (r, in * kernel), all scales and strengths inside of `up`."""

    up: Tensor
    down: Tensor

    def apply(self, block: Tensor, rows: slice) -> None:
        """Add these rows of the product."""
        block.addmm_(self.up[rows], self.down)


@dataclass(frozen=True)
class RowByRow:
    """Adapters that are cut into rows; `tail` is the shape behind the rows."""

    adapters: tuple[Strong, ...]
    tail: Shape

    def apply(self, block: Tensor, rows: slice) -> None:
        """Apply these rows of the adapters to these rows of the weight."""
        cut = [(cut_rows(adapter, rows), strength) for adapter, strength in self.adapters]
        block.copy_(combined_weight(block.view(-1, *self.tail), cut).view(block.shape))


@dataclass(frozen=True)
class Whole:
    """A merged weight (rows, columns) in fp64 that was made before."""

    merged: Tensor

    def apply(self, block: Tensor, rows: slice) -> None:
        """Take these rows."""
        block.copy_(self.merged[rows])


@dataclass(frozen=True)
class Stacked:
    """Several modules' rows, one below the other: (begin, end, recipe) of each that changes."""

    pieces: tuple[tuple[int, int, Recipe], ...]

    def apply(self, block: Tensor, rows: slice) -> None:
        """Apply each piece to its share of the rows."""
        numbers = range(rows.start, rows.stop, rows.step or 1)
        for begin, end, recipe in self.pieces:
            first, last = (-((numbers.start - edge) // numbers.step) for edge in (begin, end))
            first, last = max(0, first), min(len(numbers), last)
            if first < last:
                inside = numbers[first:last]
                recipe.apply(block[first:last], slice(inside.start - begin, inside[-1] + 1 - begin, inside.step))


def recipe_for(change: Change, base: Callable[[], Tensor]) -> Recipe:
    """The cheapest recipe of a change; `base` reads the whole tensor in fp64, where it is needed as a whole."""
    if change.parameter == "bias":
        return Whole(merged_bias(change, base()))
    if len(change.shape) < 2 or change.new_shape != change.shape:
        return Whole(merged_whole(change, base()))
    plain = [low_rank(part.adapters) for part in change.adapted]
    if (change.swapped or change.transposed) and not (len(change.parts) == 1 and plain[0]):
        return Whole(merged_whole(change, base()))
    if change.swapped or change.transposed:
        return turned(plain[0], change)  # type: ignore[arg-type]
    tail = change.shape[1:]
    pieces: list[tuple[int, int, Recipe]] = []
    for part, factors in zip(change.adapted, plain, strict=True):
        recipe: Recipe | None = factors
        if recipe is None and all(is_rowwise(adapter, part.end - part.begin) for adapter, _ in part.adapters):
            recipe = RowByRow(part.adapters, tail)
        if recipe is None:
            return Whole(merged_whole(change, base()))
        pieces.append((part.begin, part.end, recipe))
    return pieces[0][2] if len(change.parts) == 1 else Stacked(tuple(pieces))


def low_rank(adapters: Sequence[Strong]) -> LowRank | None:
    """All adapters as one pair of factors, or None where one of them is no plain LoRA."""
    if any(a.algorithm != "lora" or a.magnitude or a.options.get("reshape") or "mid" in a.tensors for a, _ in adapters):
        return None
    scaled = [
        strength * algorithm_of(adapter.algorithm).scale(adapter) * adapter.tensors["up"].double().flatten(1)
        for adapter, strength in adapters
    ]
    downs = [adapter.tensors["down"].double().flatten(1) for adapter, _ in adapters]
    return LowRank(torch.cat(scaled, dim=1), torch.cat(downs))


def turned(factors: LowRank, change: Change) -> LowRank:
    """The factors of a weight whose file has the halves of its rows exchanged, or its inputs first."""
    up = torch.cat(factors.up.chunk(2)[::-1]) if change.swapped else factors.up
    return LowRank(factors.down.T.contiguous(), up.T.contiguous()) if change.transposed else LowRank(up, factors.down)


def is_rowwise(adapter: SiteAdapter, rows: int) -> bool:
    """Whether each row of the change depends on the same row of the weight and of the tensors alone."""
    if adapter.algorithm not in ROWWISE or adapter.options.get("reshape") or rows_of(adapter) != rows:
        return False
    return adapter.magnitude is None or adapter.magnitude.side == "out"


def cut_rows(adapter: SiteAdapter, rows: slice) -> SiteAdapter:
    """The adapter of some rows of the weight; its scale stays."""
    tensors = dict(adapter.tensors)
    for role, axis in row_roles([adapter], "").items():
        tensors[role] = tensors[role].movedim(axis, 0)[rows].movedim(0, axis)
    magnitude = adapter.magnitude
    if magnitude is not None:
        magnitude = replace(magnitude, tensor=magnitude.tensor.flatten()[rows])
    return replace(adapter, tensors=tensors, magnitude=magnitude)


def merged_whole(change: Change, base: Tensor) -> Tensor:
    """The whole merged weight as a matrix: fp64 `base` as the file has it, every part adapted; laid out as the file."""
    weight = base.T if change.transposed else base
    weight = swap_halves(weight) if change.swapped else weight
    pieces = [
        combined_weight(weight[part.begin : part.end], list(part.adapters))
        if part.adapters
        else weight[part.begin : part.end]
        for part in change.parts
    ]
    merged = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    merged = swap_halves(merged) if change.swapped else merged
    return as_matrix(merged.T if change.transposed else merged)


def merged_bias(change: Change, base: Tensor) -> Tensor:
    """The whole merged bias as one row: fp64 `base` as the file has it, every part adapted."""
    bias = swap_halves(base) if change.swapped else base
    pieces: list[Tensor] = []
    for part in change.parts:
        piece = bias[part.begin : part.end]
        merged = piece
        for adapter, strength in part.adapters:  # each on the base, as for weights
            merged = merged + (adapted_bias(piece, adapter, strength) - piece)  # type: ignore[operator]
        pieces.append(merged)
    whole = torch.cat(pieces)
    return as_matrix(swap_halves(whole) if change.swapped else whole)


def swap_halves(tensor: Tensor) -> Tensor:
    """The lower half of the rows above the upper one."""
    return torch.cat(tensor.chunk(2)[::-1])


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """A tensor as (rows, columns): outputs by all the rest, or one row where there is no rest."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def as_matrix(tensor: Tensor) -> Tensor:
    """A tensor as rows and columns."""
    return tensor.reshape(matrix_shape(tuple(tensor.shape)))
