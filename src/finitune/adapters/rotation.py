"""Rotations out of skew-symmetric matrices: what OFT, BOFT and OFT v2 share.

Cayley: R = (I + Q)(I - Q)^-1 is orthogonal for every skew Q, and I - Q is never singular (its singular values are at
least 1), so a solve in fp32 or fp64 is always safe and needs no check that would wait for a GPU. Everything here works
with the turn R - I = 2 (I - Q)^-1 Q: a small rotation keeps all its digits, and no rotation is exactly zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from finitune.adapters.algorithm import AdapterAlgorithm
from finitune.adapters.core import SiteAdapter, Target, make_shapes_error
from finitune.errors import AdapterError


def compute_cayley_turn(q: Tensor) -> Tensor:
    """R - I for skew `q` (..., b, b) in fp32 or fp64, exact up to rounding; zero where `q` is."""
    eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device).expand_as(q)
    return torch.linalg.solve_ex(eye - q, 2 * q)[0]


def compute_neumann_turn(q: Tensor, terms: int) -> Tensor:
    """R - I by the Neumann series of Cayley as PEFT cuts it: 2Q + 2Q^2 + ... + 2Q^(t-2) + Q^(t-1); 3 terms are as 4.

    Source: peft tuners/oft/layer.py, `_cayley_batch`.
    """
    if terms < 2:
        return torch.zeros_like(q)
    change, power = 2 * q, q
    if terms == 2:
        return change
    for _ in range(2, max(terms, 4) - 1):
        power = power @ q
        change = change + 2 * power
    return change + power @ q


def clip_generator_norm(q: Tensor, limit: float) -> Tensor:
    """q * min(1, limit / |q|), |q| over all blocks together; as it is for a limit of 0, which stands for none."""
    if not limit:
        return q
    return q * (limit / torch.linalg.vector_norm(q).clamp(min=limit))


def unpack_skew_matrices(packed: Tensor) -> Tensor:
    """Skew matrices (n, b, b) of their upper triangles, read row by row: (n, b * (b - 1) / 2)."""
    size = infer_packed_block_size(packed.shape[1])
    row, column = torch.triu_indices(size, size, 1, device=packed.device)
    upper = packed.new_zeros(packed.shape[0], size, size).index_put(
        (torch.arange(packed.shape[0], device=packed.device)[:, None], row, column), packed
    )
    return upper - upper.mT


def infer_packed_block_size(count: int) -> int:
    """The b whose upper triangle has `count` elements, rounded down."""
    return (1 + math.isqrt(1 + 8 * count)) // 2


def compute_skew_generators(adapter: SiteAdapter, dtype: torch.dtype) -> Tensor:
    """Q = B - B^T of the raw `blocks` (..., b, b), clipped to the option `constraint`, in `dtype`."""
    blocks = adapter.tensors["blocks"].to(dtype)
    return clip_generator_norm(blocks - blocks.mT, float(adapter.options.get("constraint", 0)))


def apply_rescale(adapter: SiteAdapter, change: Tensor, base: Tensor) -> Tensor:
    """s * (base + change) - base for the optional `rescale`, one factor per output: the change, rescale included."""
    if "rescale" not in adapter.tensors:
        return change
    rescale = adapter.tensors["rescale"].to(base.dtype).reshape(-1, *[1] * (base.ndim - 1))
    return rescale * change + (rescale - 1) * base


def choose_block_size(
    algorithm: AdapterAlgorithm, target: Target, dimension: int, sizes: Sequence[int], most: int
) -> int:
    """The block size for a new rotation: the option `block_size`, or the largest of `sizes` up to `most`.

    Where all of `sizes` are larger, the smallest. Raises AdapterError (ROTATION-BLOCK-SIZE) where the asked one is not
    among them, or there are none.
    """
    asked = int(target.options.get("block_size", 0))
    if (asked and asked not in sizes) or not sizes:
        raise AdapterError(
            f"{algorithm.title} cannot cut {dimension} channels into blocks of {asked or 'any size'}",
            code="ROTATION-BLOCK-SIZE",
            evidence={"dimension": dimension, "block_size": asked, "possible": list(sizes)},
            remedy=f"Possible block sizes: {', '.join(map(str, sizes)) or 'none; leave this module out'}.",
        )
    return asked or max((size for size in sizes if size <= most), default=min(sizes))


def list_divisors(dimension: int) -> list[int]:
    """The divisors of `dimension` from 2 on, rising."""
    return [size for size in range(2, dimension + 1) if dimension % size == 0]


def require_rescale_fit(algorithm: AdapterAlgorithm, adapter: SiteAdapter, turned: int) -> None:
    """Raise AdapterError (ADAPTER-SHAPES) where the optional `rescale` does not have one factor per turned output."""
    rescale = adapter.tensors.get("rescale")
    if rescale is not None and rescale.numel() != turned:
        raise make_shapes_error(algorithm, adapter, f"{rescale.numel()} factors in rescale for {turned} outputs")
