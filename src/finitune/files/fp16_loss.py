"""What storing a checkpoint's tensors in fp16 would lose at the small end, counted as the bytes pass by.

From 2**-14 on fp16 keeps all 11 bits that it promises, and below it has a bit less with each power of two, until from
2**-25 on nothing is left. bf16 has 8 bits to lose, and so loses the first below 2**-17. Only what is that small is
looked at one by one; it is found by its bits, in three short passes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from finitune.numerics.formats import BF16, FP16

_WordType: TypeAlias = type[np.unsignedinteger[Any]]
_WORD_TYPE_BY_DTYPE: Mapping[torch.dtype, tuple[_WordType, float]] = {
    torch.bfloat16: (np.uint16, FP16.least * 2.0 ** (BF16.significand_bits - 1)),
    torch.float32: (np.uint32, FP16.tiny),
}
"""The dtypes with more range than fp16: numbers of their size, and the least magnitude from which all is kept.

fp64 goes by way of fp32.
"""

_GROUP_SIZE = 8
"""So many truth values are looked at as one number."""

_FP16_ROUNDING_ERROR = 2.0**-FP16.significand_bits
"""How much fp16's own rounding of its normal numbers may change one, relatively; more than that is a loss."""


@dataclass(frozen=True)
class Fp16Loss:
    """Of `size` elements that are not zero or are: how many would become zero, and how many lose bits otherwise."""

    size: int = 0
    flushed: int = 0
    worn: int = 0

    @property
    def lost(self) -> int:
        """Both together."""
        return self.flushed + self.worn

    @property
    def share(self) -> float:
        """The share of the elements that are lost."""
        return self.lost / self.size if self.size else 0.0

    def __add__(self, other: Fp16Loss) -> Fp16Loss:
        return Fp16Loss(self.size + other.size, self.flushed + other.flushed, self.worn + other.worn)


class PieceScratch:
    """Memory of one thread for pieces of up to `size` bytes, so that a loop allocates nothing large."""

    def __init__(self, size: int):
        self.size = size
        self.shifted = np.empty(size, dtype=np.uint8)
        self.found = np.zeros(size + _GROUP_SIZE, dtype=np.bool_)


class Fp16LossCounter:
    """The losses by tensor, of the pieces that it is shown; each tensor's pieces by one thread."""

    def __init__(self) -> None:
        self.losses: dict[str, Fp16Loss] = {}
        self.own = threading.local()

    def __call__(self, name: str, piece: Tensor) -> None:
        """Count what fp16 loses of a flat piece of tensor `name`."""
        if piece.dtype not in _WORD_TYPE_BY_DTYPE and piece.dtype != torch.float64:
            return
        scratch = getattr(self.own, "scratch", None)
        if scratch is None or scratch.size < piece.nbytes:
            scratch = self.own.scratch = PieceScratch(piece.nbytes)
        self.losses[name] = self.losses.get(name, Fp16Loss()) + count_fp16_loss(piece, scratch)


def count_fp16_loss(piece: Tensor, scratch: PieceScratch | None = None) -> Fp16Loss:
    """What fp16 loses of a flat bf16, fp32 or fp64 tensor, infinities and what is beyond fp16's range apart."""
    piece = piece.float() if piece.dtype == torch.float64 else piece
    small = select_fp16_tiny(piece, scratch or PieceScratch(piece.nbytes))
    stored = small.half().float()
    flushed = int((stored == 0).sum())
    worn = int(((stored - small).abs() > _FP16_ROUNDING_ERROR * small.abs()).sum()) - flushed
    return Fp16Loss(piece.numel(), flushed, worn)


def compute_fp16_lost_norm(tensor: Tensor) -> float:
    """|fp16(W) - W| / |W| of what fp16 loses of a bf16, fp32 or fp64 tensor; its rounding of larger numbers apart."""
    flat = tensor.flatten().float() if tensor.dtype == torch.float64 else tensor.flatten()
    small = select_fp16_tiny(flat, PieceScratch(flat.nbytes)).double()
    whole = float(torch.linalg.vector_norm(flat, dtype=torch.float32))
    return float(torch.linalg.vector_norm(small.float().half().double() - small)) / whole if whole else 1.0


def count_fp16_loss_slowly(tensor: Tensor) -> Fp16Loss:
    """The obvious twin of `count_fp16_loss`."""
    exact = tensor.float()
    stored = exact.half().float()
    small = (exact != 0) & (exact.abs() < FP16.tiny)
    flushed = small & (stored == 0)
    worn = small & ~flushed & ((stored - exact).abs() > _FP16_ROUNDING_ERROR * exact.abs())
    return Fp16Loss(tensor.numel(), int(flushed.sum()), int(worn.sum()))


def select_fp16_tiny(piece: Tensor, scratch: PieceScratch) -> Tensor:
    """The elements of a flat bf16 or fp32 piece, not zero, that are too small for fp16 to hold all, as fp32.

    Twice the bits, less one, is a magnitude without sign in which zero is the largest.
    """
    words, least = _WORD_TYPE_BY_DTYPE[piece.dtype]
    size = piece.numel()
    limit = view_as_words(torch.tensor([least], dtype=piece.dtype), words)[0]
    bits, shifted, found = view_as_words(piece, words), scratch.shifted.view(words)[:size], scratch.found
    np.add(bits, bits, out=shifted)
    np.subtract(shifted, words(1), out=shifted)
    np.less(shifted, words(2 * int(limit) - 1), out=found[:size])
    found[size : size + _GROUP_SIZE] = False
    return piece[torch.from_numpy(find_sparse_true(found[: size + _GROUP_SIZE - size % _GROUP_SIZE]))].float()


def view_as_words(piece: Tensor, words: _WordType) -> Any:
    """The bits of a flat tensor as unsigned numbers."""
    raw: Any = piece.view(torch.uint8).numpy()
    return raw.view(words)


def find_sparse_true(found: Any) -> Any:
    """The indices of what is true in a flat array of a multiple of TOGETHER; fast where that is little."""
    groups = np.flatnonzero(found.view(np.uint64) != 0)
    inside, which = np.nonzero(found.reshape(-1, _GROUP_SIZE)[groups])
    return groups[inside] * _GROUP_SIZE + which
