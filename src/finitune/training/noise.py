"""Random numbers by address: (seed, step, place in the optimiser step, purpose), never by the order of asking.

The place of a sample counts over all devices and micro-batches of a step, so a run gives every sample the same numbers
however its batch is split, and a resumed run needs no state of a generator. Purposes are streams of their own: another
noise does not move the sigmas.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from finitune.datasets.items import derive_seed, make_generator

NoiseSeed = int | tuple[int, ...]
"""The seed of a run; with the number of an attempt where a step is tried again with other numbers."""

_UNIFORM_BITS = 52


class NoisePurpose(str, Enum):
    """What random numbers are for; each has a stream of its own."""

    NOISE = "noise"
    SIGMA = "sigma"
    INPUT_NOISE = "ip-noise"
    VALIDATION = "validation"


def draw_addressed_noise(
    seed: NoiseSeed, step: int, places: Sequence[int], shape: Sequence[int], purpose: NoisePurpose
) -> Tensor:
    """Normal numbers, fp32 (B, *shape) on the CPU, one stream for each of the B places; a shape of () is one number."""
    streams = [make_generator(seed, step, place, purpose.value) for place in places]
    drawn = [torch.randn(tuple(shape), generator=stream, dtype=torch.float32) for stream in streams]
    return torch.stack(drawn) if drawn else torch.empty((0, *shape))


def draw_addressed_uniform(seed: NoiseSeed, step: int, places: Sequence[int], purpose: NoisePurpose) -> Tensor:
    """One uniform number for each place, fp64 (B,) on the CPU, strictly between 0 and 1; the same on every machine.

    It is the middle of one of 2**52 equal cells, taken from the hash of the address.
    """
    cells = [derive_seed(seed, step, place, purpose.value) >> (63 - _UNIFORM_BITS) for place in places]
    return torch.tensor([(cell + 0.5) * 2.0**-_UNIFORM_BITS for cell in cells], dtype=torch.float64)
