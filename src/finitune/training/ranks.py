"""The processes of a run: which one this is, and the few things that they say to each other.

Words, which are plain values, go over gloo on the CPU. There a process that has ended is missed at once, so that one
may be patient with those that still encode pictures, draw or save. Gradients go over NCCL where there are GPUs, and
only after a word from everybody: no GPU waits for a process that has failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from finitune.errors import NumericsError, UsageError
from finitune.machine import processes
from finitune.training.distributed_errors import leave_process_group, make_process_lost_error

_T = TypeVar("_T")
_CPU = torch.device("cpu")

_OBJECT_EXCHANGE_TIMEOUT = timedelta(hours=12)
"""How long a word is waited for: longer than one process encodes pictures that another has found in the cache.
NCCL's half an hour has ended such runs (sd-scripts#971)."""
PROCESS_GROUP_TIMEOUT = timedelta(minutes=10)
"""How long is waited for processes to start, and for gradients, which all have ready at about the same time."""


@dataclass(frozen=True)
class ProcessRanks:
    """This process among `world`; alone by default. `words` holds the group that words go over, while it is joined."""

    rank: int = 0
    world: int = 1
    device: torch.device = _CPU
    words: list[Any] = field(default_factory=list)

    @classmethod
    @contextmanager
    def open_process_group(cls, device: str) -> Iterator[ProcessRanks]:
        """The processes that accelerate or torchrun has started, each with its device; alone, nothing is joined.

        At the end all part together. An error in one ends all: the others raise it, too, at their next word. Who has
        made torch's process group before keeps it. Raises UsageError (GPUS-TOO-FEW) where two would share one.
        """
        if processes.read_world_size() == 1:
            yield cls(device=torch.device(device))
            return
        require_gpu_per_process(device)
        made_before = distributed.is_initialized()
        ranks = cls.join_process_group(device)
        with nullcontext() if made_before else leave_process_group(ranks.rank, ranks.world):
            try:
                yield ranks
                ranks.wait()
            finally:
                ranks.words.clear()  # gloo hangs up when nobody refers to a group any more

    @classmethod
    def join_process_group(cls, device: str) -> ProcessRanks:
        """This process after the meeting, which is accelerate's work: it picks NCCL or gloo, and sets the device."""
        from accelerate import PartialState

        state = PartialState(cpu=device == "cpu", timeout=PROCESS_GROUP_TIMEOUT)
        words = distributed.new_group(backend="gloo", timeout=_OBJECT_EXCHANGE_TIMEOUT)
        return cls(state.process_index, state.num_processes, state.device or torch.device(device), [words])

    @property
    def main(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def wait(self) -> None:
        """Go on when everybody is here."""
        if self.world > 1:
            with raise_process_loss():
                distributed.barrier(*self.words)

    def gathered(self, value: _T) -> list[_T]:
        """Everybody's plain value, by rank."""
        values: list[Any] = [value] * self.world
        if self.world > 1:
            with raise_process_loss():
                distributed.all_gather_object(values, value, *self.words)
        return values

    def broadcast_from_main(self, value: _T) -> _T:
        """The main process's value, everywhere."""
        return self.gathered(value)[0]

    def demand_same(self, what: str, value: object, where: str = "") -> None:
        """Raise NumericsError (RANKS-DIFFER) in all processes where they have different values of `what`."""
        values = self.gathered(value)
        differing = [rank for rank, other in enumerate(values) if other != values[0]]
        if differing:
            raise NumericsError(
                f"the processes have different {what}",
                code="RANKS-DIFFER",
                subject=where,
                evidence={"differing_from_the_first": differing},
                remedy="Give all machines the same files, and resume from the last state. If it comes back, one of the "
                "devices computes wrongly.",
            )

    def shares(self, own: Tensor) -> list[Tensor]:
        """This process's share of everybody's vector (n,), by rank: (ceil(n / world),) each, zeros behind the end."""
        if self.world == 1:
            return [own]
        self.wait()
        padded = torch.nn.functional.pad(own, (0, -len(own) % self.world))
        shares = torch.empty_like(padded)
        with raise_process_loss():
            distributed.all_to_all_single(shares, padded)
        return list(shares.view(self.world, -1))

    def whole(self, share: Tensor, length: int) -> Tensor:
        """The vector (length,) of which each process has a share, as `shares` gave it."""
        if self.world == 1:
            return share
        vector = share.new_empty(self.world, len(share))
        with raise_process_loss():
            distributed.all_gather(list(vector), share)
        return vector.view(-1)[:length]

    def add(self, own: Tensor) -> Tensor:
        """The sum of everybody's vector (n,), the same bits everywhere."""
        total = OrderedSum(self)
        total.add(own)
        return total.value()


class OrderedSum:
    """A sum of vectors over rounds and processes, added up in one order: round by round, and in each by rank.

    So it has the bits of one process that takes the same vectors in a row; `all_reduce` promises no order. Each process
    adds up a share of the vector, and the shares are put together once: a round costs half of what `all_reduce` costs.
    """

    def __init__(self, ranks: ProcessRanks):
        self.ranks = ranks
        self.length = 0
        self.share: Tensor | None = None

    def add(self, own: Tensor) -> None:
        """One round: this process's vector (n,), which is not to be used afterwards. All processes take part."""
        self.length = len(own)
        for share in self.ranks.shares(own):
            self.share = share if self.share is None else self.share.add_(share)

    def value(self) -> Tensor:
        """The sum so far (n,), everywhere; there must have been a round."""
        assert self.share is not None
        return self.ranks.whole(self.share, self.length)


@contextmanager
def raise_process_loss() -> Iterator[None]:
    """What all processes do together: an error there means that one of them has left, and its last words are raised."""
    try:
        yield
    except RuntimeError as error:
        raise make_process_lost_error(error) from error


def require_gpu_per_process(device: str) -> None:
    """Raise UsageError (GPUS-TOO-FEW) where more processes than GPUs were started on this machine."""
    if not device.startswith("cuda"):
        return
    there, wanted = torch.cuda.device_count(), processes.read_local_world_size()
    if wanted > there:
        raise UsageError(
            f"{wanted} processes were started here, for {there} GPUs: each needs one of its own",
            code="GPUS-TOO-FEW",
            subject="processes",
            evidence={"processes": wanted, "gpus": there},
            remedy=f"torchrun --nproc_per_node {there}, or accelerate launch --num_processes {there}. Two on one GPU "
            "need twice the memory and are no faster; gradient_accumulation_steps gives the same batch.",
        )
