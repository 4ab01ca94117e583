"""Dropout while an adapter is trained: three kinds, by kohya's names.

    network   neurons: of what is between the factors of a LoRA; of the input of the change, for everything else
    rank      a LoRA's ranks, one mask for each sample; for everything else the outputs of the change, one mask a call
    module    the whole adapter, in this call

What is kept of neurons and ranks is divided by the share that is kept, so that the mean over many draws is the change
without dropout; of module dropout it is (1 - p) times that, as in kohya's networks. Every draw is of torch's global
generators: for a module the CPU's, so that nobody waits for a GPU.

Source: sd-scripts networks/lora.py; the mask of its rank dropout fitted no input with axes between samples and
channels, or fell on the wrong one (pull request 2272).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from finitune.errors import AdapterError


@dataclass(frozen=True)
class Dropout:
    """Probabilities in [0, 1) of dropping a neuron, a rank and a whole module; raises AdapterError for others."""

    network: float = 0.0
    rank: float = 0.0
    module: float = 0.0

    def __post_init__(self) -> None:
        for kind in fields(self):
            share = getattr(self, kind.name)
            if not 0 <= share < 1:
                raise AdapterError(
                    f"{kind.name} dropout of {share} is no probability below 1",
                    code="ADAPTER-DROPOUT",
                    subject=f"{kind.name}_dropout",
                    evidence={"dropout": share},
                    remedy="Give a number from 0 (none) to below 1; 0.1 to 0.3 is usual.",
                )

    def __bool__(self) -> bool:
        return any(getattr(self, kind.name) > 0 for kind in fields(self))

    def skips(self) -> bool:
        """Whether the adapter is left out of this call; draws only where module dropout is asked for."""
        return self.module > 0 and float(torch.rand((), device="cpu")) < self.module

    def neurons(self, x: Tensor) -> Tensor:
        """`x` with single elements dropped, in fp32; x itself where none are."""
        return F.dropout(x.float(), self.network) if self.network else x

    def ranks(self, inner: Tensor, channels: int) -> Tensor:
        """fp32 `inner` with whole ranks dropped, by one mask over axis `channels` for each sample (axis 0)."""
        return self.masked(inner, {0: inner.shape[0], channels % inner.ndim: inner.shape[channels]})

    def inside(self, inner: Tensor, channels: int) -> Tensor:
        """What is between the factors of a LoRA, with neurons and ranks dropped."""
        return self.ranks(self.neurons(inner), channels)

    def outputs(self, change: Tensor, channels: int) -> Tensor:
        """An fp32 change with whole outputs dropped, by one mask over axis `channels`."""
        return self.masked(change, {channels % change.ndim: change.shape[channels]})

    def masked(self, x: Tensor, sizes: dict[int, int]) -> Tensor:
        """`x` by a mask that has these sizes along these axes and 1 along all others."""
        if not self.rank:
            return x
        shape = [sizes.get(axis, 1) for axis in range(x.ndim)]
        kept = torch.rand(shape, device=x.device) >= self.rank
        return x * (kept / (1 - self.rank))
