"""Dropout while an adapter is trained: three kinds, by kohya's names.

    network   neurons: of what is between the factors of a LoRA; of the input of the change, for everything else
    rank      a LoRA's ranks; for everything else the outputs of the change; one mask for each sample
    module    the whole adapter, for a sample

What is kept of neurons and ranks is divided by the share that is kept, so that the mean over many draws is the change
without dropout; of module dropout it is (1 - p) times that, as in kohya's networks.

With `seeds` a mask is a pure function of the sample's seed and the place in it: the same whatever else is in the batch,
however it is cut, on every device, and when a checkpointed block is computed again. A layer that is called twice has
its masks twice. Without seeds torch's global generators are drawn from, module dropout is of the call as a whole, and
drawn on the CPU, so that nobody waits for a GPU.

Sources: sd-scripts networks/lora.py; the mask of its rank dropout fitted no input with axes between samples and
channels, or fell on the wrong one (pull request 2272). SplitMix64: Steele, Lea and Flood 2014.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from finitune.errors import AdapterError

_NEURONS, _RANKS, _MODULE = 1, 2, 3
"""Added to a seed, so that one kind of dropout does not move the masks of another."""


@dataclass(frozen=True)
class Dropout:
    """Probabilities in [0, 1) of dropping a neuron, a rank and a whole module; raises AdapterError for others.

    `seeds`: int64 (B,) on the device of the layer, for the samples of the batch that comes next.
    """

    network: float = 0.0
    rank: float = 0.0
    module: float = 0.0
    seeds: Tensor | None = None

    def __post_init__(self) -> None:
        for kind, share in (("network", self.network), ("rank", self.rank), ("module", self.module)):
            if not 0 <= share < 1:
                raise AdapterError(
                    f"{kind} dropout of {share} is no probability below 1",
                    code="ADAPTER-DROPOUT",
                    subject=f"{kind}_dropout",
                    evidence={"dropout": share},
                    remedy="Give a number from 0 (none) to below 1; 0.1 to 0.3 is usual.",
                )

    def __bool__(self) -> bool:
        return any(share > 0 for share in (self.network, self.rank, self.module))

    def skips(self) -> bool:
        """Whether the adapter is left out of this call; never where samples are told apart."""
        return self.module > 0 and self.seeds is None and float(torch.rand((), device="cpu")) < self.module

    def samples(self, change: Tensor) -> Tensor:
        """An fp32 change with the adapter left out of whole samples, where these are told apart."""
        if not self.module or self.seeds is None:
            return change
        samples = len(self._match_seeds(self.seeds, len(change)))
        kept = self._draw_kept([samples], self.module, _MODULE, change.device)
        kept = kept.repeat_interleave(len(change) // samples).view(-1, *[1] * (change.ndim - 1))
        return torch.where(kept, change, 0.0)

    def neurons(self, x: Tensor) -> Tensor:
        """`x` with single elements dropped, in fp32; x itself where none are."""
        if not self.network:
            return x
        if self.seeds is None:
            return F.dropout(x.float(), self.network)
        kept = self._draw_kept(x.shape, self.network, _NEURONS, x.device)
        return torch.where(kept, x.float() / (1 - self.network), 0.0)

    def ranks(self, inner: Tensor, channels: int) -> Tensor:
        """fp32 `inner` with whole ranks or outputs dropped, by one mask over axis `channels` a sample (axis 0)."""
        if not self.rank:
            return inner
        sizes = {0: inner.shape[0], channels % inner.ndim: inner.shape[channels]}
        shape = [sizes.get(axis, 1) for axis in range(inner.ndim)]
        kept = self._draw_kept(shape, self.rank, _RANKS, inner.device)
        return torch.where(kept, inner / (1 - self.rank), 0.0)  # backward keeps a byte an element, no mask in fp32

    def inside(self, inner: Tensor, channels: int) -> Tensor:
        """What is between the factors of a LoRA, with neurons and ranks dropped."""
        return self.ranks(self.neurons(inner), channels)

    def _draw_kept(self, shape: Sequence[int], share: float, kind: int, device: torch.device) -> Tensor:
        """A mask of `shape` that is True with probability 1 - share."""
        if self.seeds is None:
            return torch.rand(shape, device=device) >= share
        seeds = self._match_seeds(self.seeds, shape[0])
        bits = draw_counted_bits(seeds + kind, math.prod(shape) // len(seeds))
        return (bits >= int(share * 2**53)).view(shape)

    @staticmethod
    def _match_seeds(seeds: Tensor, rows: int) -> Tensor:
        """The seeds that so many rows go by: each sample's own, where all have as many rows, one sample behind another;
        else the first one for all, as for a text that is encoded once for several pictures.
        """
        return seeds if rows % len(seeds) == 0 else seeds[:1]


def draw_counted_bits(seeds: Tensor, count: int) -> Tensor:
    """53 random bits for each of `count` places of each seed: int64 (S,) to (S, count), by SplitMix64.

    Operations on tensors alone, so that a compiler can have them; the arithmetic is modulo 2^64.
    """
    z = seeds.unsqueeze(1) + torch.arange(1, count + 1, device=seeds.device) * -0x61C8864680B583EB
    z = (z ^ _shift_right(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ _shift_right(z, 27)) * -0x6B2FB644ECCEEE15
    return _shift_right(z ^ _shift_right(z, 31), 11)


def _shift_right(z: Tensor, places: int) -> Tensor:
    """The logical shift of int64 as 64 bits; torch's own keeps the sign."""
    return (z >> places) & ((1 << (64 - places)) - 1)
