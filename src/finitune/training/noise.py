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

from finitune.datasets.items import generator_of, seed_of

Seed = int | tuple[int, ...]
"""The seed of a run; with the number of an attempt where a step is tried again with other numbers."""

UNIFORM_BITS = 52


class Purpose(str, Enum):
    """What random numbers are for; each has a stream of its own."""

    NOISE = "noise"
    SIGMA = "sigma"
    INPUT_NOISE = "ip-noise"
    VALIDATION = "validation"


def noise_for(seed: Seed, step: int, places: Sequence[int], shape: Sequence[int], purpose: Purpose) -> Tensor:
    """Normal numbers, fp32 (B, *shape) on the CPU, one stream for each of the B places; a shape of () is one number."""
    streams = [generator_of(seed, step, place, purpose.value) for place in places]
    drawn = [torch.randn(tuple(shape), generator=stream, dtype=torch.float32) for stream in streams]
    return torch.stack(drawn) if drawn else torch.empty((0, *shape))


def uniform_for(seed: Seed, step: int, places: Sequence[int], purpose: Purpose) -> Tensor:
    """One uniform number for each place, fp64 (B,) on the CPU, strictly between 0 and 1; the same on every machine.

    It is the middle of one of 2**52 equal cells, taken from the hash of the address.
    """
    cells = [seed_of(seed, step, place, purpose.value) >> (63 - UNIFORM_BITS) for place in places]
    return torch.tensor([(cell + 0.5) * 2.0**-UNIFORM_BITS for cell in cells], dtype=torch.float64)
