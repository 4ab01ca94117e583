"""Products of two thin factors: cut, balanced and made from a dense change, without ever forming what need not be.

up (out, r) @ down (r, in) is orthogonalised on both sides (two QR), which leaves an r x r matrix with the same singular
values: its SVD is that of the product, at the cost of r^2 * (out + in). By Eckart and Young, keeping the largest values
is the best approximation of that rank in the Frobenius norm. Nothing is clamped: the largest entries carry meaning.
A dense change goes through its SVD where it is small, and through a randomised range finder where it is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from finitune.errors import NumericsError
from finitune.numerics.formats import FP16

_MAX_EXACT_SVD_SIDE = 384
"""The shorter side up to which a dense change is decomposed exactly by default: some tenths of a second on a CPU."""

_SKETCH_OVERSAMPLING = 16
_SKETCH_POWER_ITERATIONS = 3
_FIRST_SEARCH_RANK = 32
"""The rank that a search for an energy begins with; it doubles."""
_SKETCH_SEED = 0
_CHUNK_COLUMNS = 1024
"""Columns that are in fp64 at a time."""
FACTOR_ROUNDING_ERROR = 2.0**-24
"""The relative error that fp32 factors make anyway: a tail below it is dropped even where all is to be kept."""


@dataclass(frozen=True)
class Truncation:
    """What a cut kept: its rank, the relative Frobenius error, the share of the squared norm kept, and the whole norm.

    `values` are the singular values that are known, fp64 and falling: all of them, unless the SVD was randomised.
    """

    rank: int
    error: float
    energy: float
    norm: float
    values: Tensor


TruncatedFactors = tuple[Tensor, Tensor, Truncation]


@dataclass(frozen=True)
class Spectrum:
    """u @ diag(values) @ vh in fp64, and the squared norm of what lies outside of it."""

    u: Tensor
    values: Tensor
    vh: Tensor
    outside: float = 0.0

    @property
    def total(self) -> float:
        return float(self.values.square().sum()) + self.outside

    def lost(self) -> Tensor:
        """The squared norm that is left out when the first 0, 1, 2 ... values are kept; summed from the small end."""
        tails = self.values.square().flip(0).cumsum(0).flip(0)
        return torch.cat([tails, tails.new_zeros(1)]) + self.outside

    def rank_for(self, rank: int | None, energy: float | None) -> int:
        """How many values to keep, at least 1: at most `rank`, and no more than `energy` asks for."""
        most = len(self.values) if rank is None else min(rank, len(self.values))
        if energy is None and rank is not None:
            return most
        allowed = max(0.0 if energy is None else 1 - energy, FACTOR_ROUNDING_ERROR**2) * self.total
        return max(1, min(most, int((self.lost() > allowed).sum())))

    def factors(self, rank: int | None, energy: float | None) -> TruncatedFactors:
        """The leading part as fp32 factors of equal weight: the root of each singular value goes to either side."""
        kept = self.rank_for(rank, energy)
        root = self.values[:kept].sqrt()
        up, down = self.u[:, :kept] * root, root[:, None] * self.vh[:kept]
        share = float(self.lost()[kept]) / self.total if self.total else 0.0
        return (
            up.float(),
            down.float(),
            Truncation(kept, math.sqrt(share), 1 - share, math.sqrt(self.total), self.values),
        )


def truncate_factors(
    up: Tensor, down: Tensor, *, rank: int | None = None, energy: float | None = None
) -> TruncatedFactors:
    """The best product of lower rank: up (out, r) and down (r, in) of any float dtype to fp32 factors, balanced.

    `rank` >= 1 is the most to keep, `energy` in (0, 1] the share of the squared norm that is enough; with both, the
    smaller rank wins; with neither, all that is more than rounding stays. A zero product keeps zeros, of rank 1 where
    the energy decides. Raises NumericsError (FACTORS-NOT-FINITE).
    """
    require_finite_matrices(up, down)
    q_up, r_up = torch.linalg.qr(up.double())
    q_down, r_down = torch.linalg.qr(down.double().mT)
    u, values, vh = torch.linalg.svd(r_up @ r_down.mT, full_matrices=False)
    return Spectrum(q_up @ u, values, vh @ q_down.mT).factors(rank, energy)


def decompose_delta(
    delta: Tensor, *, rank: int | None = None, energy: float | None = None, exact: bool | None = None
) -> TruncatedFactors:
    """Balanced fp32 factors of a dense change (out, in) in fp32 or fp64, cut as in `truncate`.

    `exact` True takes the whole SVD in fp64, False the randomised one wherever it pays; by default the size decides.
    The error is the true error of these factors in both cases. Raises NumericsError (FACTORS-NOT-FINITE).
    """
    require_finite_matrices(delta)
    short = min(delta.shape)
    whole = short <= _MAX_EXACT_SVD_SIDE if exact is None else exact
    width = _FIRST_SEARCH_RANK if rank is None else rank
    while not whole and 4 * (width + _SKETCH_OVERSAMPLING) < short and (rank, energy) != (None, None):
        spectrum = compute_randomised_svd(delta, width + _SKETCH_OVERSAMPLING)
        if rank is not None or spectrum.lost()[width] <= (1 - (energy or 1)) * spectrum.total:
            return spectrum.factors(rank, energy)
        width *= 2
    u, values, vh = torch.linalg.svd(delta.double(), full_matrices=False)
    return Spectrum(u, values, vh).factors(rank, energy)


def compute_randomised_svd(delta: Tensor, width: int) -> Spectrum:
    """The SVD, in fp64, of `delta` (out, in) projected onto `width` directions that hold nearly as much as any can.

    Source: Halko, Martinsson, Tropp 2011 (arXiv 0909.4061), algorithms 4.4 and 5.1. The random numbers are drawn on
    the CPU from a fixed seed, so that every run finds the same; the iterations run in the dtype of `delta`. What the
    projection loses is |A|^2 - |Q^T A|^2, both in fp64: no second pass over the residual.
    """
    noise = torch.randn(delta.shape[1], width, generator=torch.Generator().manual_seed(_SKETCH_SEED))
    basis = delta @ noise.to(delta)
    for _ in range(_SKETCH_POWER_ITERATIONS):
        basis = delta.mT @ torch.linalg.qr(basis)[0]
        basis = delta @ torch.linalg.qr(basis)[0]
    basis = torch.linalg.qr(basis.double())[0]
    projected = torch.cat([basis.mT @ columns.double() for columns in delta.split(_CHUNK_COLUMNS, dim=1)], dim=1)
    u, values, vh = torch.linalg.svd(projected, full_matrices=False)
    outside = compute_squared_norm(delta) - float(values.square().sum())
    return Spectrum(basis @ u, values, vh, max(0.0, outside))


def balance_factors(up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """The same product, bit for bit, with each column of `up` and row of `down` of about the same norm.

    Powers of two go from one to the other, so that neither sinks into the subnormals of a narrower format.
    """
    left, right = torch.linalg.vector_norm(up.double(), dim=0), torch.linalg.vector_norm(down.double(), dim=1)
    ratio = torch.where((left > 0) & (right > 0), right / left, 1.0)
    exponent = (torch.log2(ratio) / 2).round()
    return up * torch.exp2(exponent).to(up.dtype), down * torch.exp2(-exponent).to(down.dtype)[:, None]


def bound_product(up: Tensor, down: Tensor) -> float:
    """A bound on the elements of up (n, r, ...) @ down (r, ...): the cheapest that shows that fp16 holds them.

    r times the largest magnitudes, or by Cauchy and Schwarz the longest row times the longest column.
    """
    simple = down.shape[0] * find_largest_magnitude(up) * find_largest_magnitude(down)
    if simple < FP16.overflow_at:
        return simple
    rows = torch.linalg.vector_norm(up.float().flatten(1), dim=1)
    columns = torch.linalg.vector_norm(down.float().flatten(1), dim=0)
    return float(rows.max() * columns.max())


def find_largest_magnitude(tensor: Tensor) -> float:
    """The largest magnitude; NaN where the tensor holds one."""
    low, high = torch.aminmax(tensor.float() if tensor.dtype.itemsize == 1 else tensor)
    return max(-float(low), float(high))


def compute_squared_norm(matrix: Tensor) -> float:
    """The squared Frobenius norm of a matrix (out, in), summed in fp64."""
    return sum(float(columns.double().square().sum()) for columns in matrix.split(_CHUNK_COLUMNS, dim=1))


def require_finite_matrices(*matrices: Tensor) -> None:
    """Raise NumericsError (FACTORS-NOT-FINITE) where a matrix holds NaN or inf: it has no singular values."""
    count = sum(int((~torch.isfinite(matrix)).sum()) for matrix in matrices)
    if count:
        raise NumericsError(
            f"{count} numbers are NaN or infinite: such a matrix has no singular values",
            code="FACTORS-NOT-FINITE",
            evidence={"count": count, "shapes": [list(matrix.shape) for matrix in matrices]},
            remedy="The training that wrote them had diverged. Take an earlier checkpoint.",
        )
