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

from finitune.numerics.formats import BFLOAT, HALF

Word: TypeAlias = type[np.unsignedinteger[Any]]
WORDS: Mapping[torch.dtype, tuple[Word, float]] = {
    torch.bfloat16: (np.uint16, HALF.least * 2.0 ** (BFLOAT.significand_bits - 1)),
    torch.float32: (np.uint32, HALF.tiny),
}
"""The dtypes with more range than fp16: numbers of their size, and the least magnitude from which all is kept.

fp64 goes by way of fp32.
"""

TOGETHER = 8
"""So many truth values are looked at as one number."""

OWN_ROUNDING = 2.0**-HALF.significand_bits
"""How much fp16's own rounding of its normal numbers may change one, relatively; more than that is a loss."""


@dataclass(frozen=True)
class Loss:
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

    def __add__(self, other: Loss) -> Loss:
        return Loss(self.size + other.size, self.flushed + other.flushed, self.worn + other.worn)


class Scratch:
    """Memory of one thread for pieces of up to `size` bytes, so that a loop allocates nothing large."""

    def __init__(self, size: int):
        self.size = size
        self.shifted = np.empty(size, dtype=np.uint8)
        self.found = np.zeros(size + TOGETHER, dtype=np.bool_)


class Halving:
    """The losses by tensor, of the pieces that it is shown; each tensor's pieces by one thread."""

    def __init__(self) -> None:
        self.losses: dict[str, Loss] = {}
        self.own = threading.local()

    def __call__(self, name: str, piece: Tensor) -> None:
        """Count what fp16 loses of a flat piece of tensor `name`."""
        if piece.dtype not in WORDS and piece.dtype != torch.float64:
            return
        scratch = getattr(self.own, "scratch", None)
        if scratch is None or scratch.size < piece.nbytes:
            scratch = self.own.scratch = Scratch(piece.nbytes)
        self.losses[name] = self.losses.get(name, Loss()) + loss_of(piece, scratch)


def loss_of(piece: Tensor, scratch: Scratch | None = None) -> Loss:
    """What fp16 loses of a flat bf16, fp32 or fp64 tensor, infinities and what is beyond fp16's range apart."""
    piece = piece.float() if piece.dtype == torch.float64 else piece
    small = tiny_of(piece, scratch or Scratch(piece.nbytes))
    stored = small.half().float()
    flushed = int((stored == 0).sum())
    worn = int(((stored - small).abs() > OWN_ROUNDING * small.abs()).sum()) - flushed
    return Loss(piece.numel(), flushed, worn)


def lost_norm(tensor: Tensor) -> float:
    """|fp16(W) - W| / |W| of what fp16 loses of a bf16, fp32 or fp64 tensor; its rounding of larger numbers apart."""
    flat = tensor.flatten().float() if tensor.dtype == torch.float64 else tensor.flatten()
    small = tiny_of(flat, Scratch(flat.nbytes)).double()
    whole = float(torch.linalg.vector_norm(flat, dtype=torch.float32))
    return float(torch.linalg.vector_norm(small.float().half().double() - small)) / whole if whole else 1.0


def loss_slowly(tensor: Tensor) -> Loss:
    """The obvious twin of `loss_of`."""
    exact = tensor.float()
    stored = exact.half().float()
    small = (exact != 0) & (exact.abs() < HALF.tiny)
    flushed = small & (stored == 0)
    worn = small & ~flushed & ((stored - exact).abs() > OWN_ROUNDING * exact.abs())
    return Loss(tensor.numel(), int(flushed.sum()), int(worn.sum()))


def tiny_of(piece: Tensor, scratch: Scratch) -> Tensor:
    """The elements of a flat bf16 or fp32 piece, not zero, that are too small for fp16 to hold all, as fp32.

    Twice the bits, less one, is a magnitude without sign in which zero is the largest.
    """
    words, least = WORDS[piece.dtype]
    size = piece.numel()
    limit = bits_of(torch.tensor([least], dtype=piece.dtype), words)[0]
    bits, shifted, found = bits_of(piece, words), scratch.shifted.view(words)[:size], scratch.found
    np.add(bits, bits, out=shifted)
    np.subtract(shifted, words(1), out=shifted)
    np.less(shifted, words(2 * int(limit) - 1), out=found[:size])
    found[size : size + TOGETHER] = False
    return piece[torch.from_numpy(places_of(found[: size + TOGETHER - size % TOGETHER]))].float()


def bits_of(piece: Tensor, words: Word) -> Any:
    """The bits of a flat tensor as unsigned numbers."""
    raw: Any = piece.view(torch.uint8).numpy()
    return raw.view(words)


def places_of(found: Any) -> Any:
    """The indices of what is true in a flat array of a multiple of TOGETHER; fast where that is little."""
    groups = np.flatnonzero(found.view(np.uint64) != 0)
    inside, which = np.nonzero(found.reshape(-1, TOGETHER)[groups])
    return groups[inside] * TOGETHER + which
