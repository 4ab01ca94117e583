"""The one rounding of a merge, by name; each tensor's own, so that results depend on neither threads nor order."""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch
from torch import Tensor

from finitune.errors import UsageError, suggest_nearest_name
from finitune.numerics.narrow import RoundingScratch, round_carrying, round_once_into, round_randomly


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
