"""The processes of a run: which one this is, the few things that they say to each other, and how they end together.

Words, which are plain values, go over gloo on the CPU. There a process that has ended is missed at once, so that one
may be patient with those that still encode pictures, draw or save. Gradients go over NCCL where there are GPUs, and
only after a word from everybody: no GPU waits for a process that has failed.

Who fails says why, at the place where all have met (the store of the process group), before it goes. The others notice
at their next word that somebody is missing, and end with those words. So the first process's report has what went wrong
in any of them, and nobody waits for one that will not come.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed.rendezvous import rendezvous

from finitune.errors import FinituneError, NumericsError, UsageError
from finitune.machine import processes
from finitune.report import to_json_value

_T = TypeVar("_T")
_CPU = torch.device("cpu")

_ERROR_MESSAGE_KEY, _DEPARTED_COUNT_KEY = "finitune/last-words", "finitune/gone"
_PROCESS_LOST_CODE = "PROCESS-LOST"
_DEPARTURE_TIMEOUT_SECONDS = 5.0
"""How long who has failed waits for the others to hear of it: they may be at work for longer, and find out alone."""
_EXIT_DELAY_SECONDS = 1.0
"""How much later than the first process the others end after a failure: launchers kill all when one has ended, and the
first has to tell why."""
_POLL_SECONDS = 0.05

_OBJECT_EXCHANGE_TIMEOUT = timedelta(hours=12)
"""How long a word is waited for: longer than one process encodes pictures that another has found in the cache.
NCCL's half an hour has ended such runs (sd-scripts#971)."""
PROCESS_GROUP_TIMEOUT = timedelta(minutes=10)
"""How long is waited for processes to start, and for gradients, which all have ready at about the same time."""


class ProcessLostError(FinituneError):
    """Another process has ended: its last words, or that it had none."""


_OPEN: list[ProcessRanks] = []
"""The processes that are joined: torch, too, has one process group in a program."""


@dataclass(frozen=True)
class ProcessRanks:
    """This process among `world`; alone by default. `words` holds the group that words go over while it is joined, and
    `store` the place of the meeting; nothing where somebody else has made the process group.
    """

    rank: int = 0
    world: int = 1
    device: torch.device = _CPU
    words: list[Any] = field(default_factory=list)
    store: list[distributed.Store] = field(default_factory=list)

    @classmethod
    @contextmanager
    def open_process_group(cls, device: str) -> Iterator[ProcessRanks]:
        """The processes that accelerate or torchrun has started, each with its device; alone, nothing is joined.

        At the end all part together. An error in one ends all: the others raise it, too, at their next word. Opened
        within itself, it is the one that is open; who has made torch's process group before keeps it. Raises UsageError
        (GPUS-TOO-FEW) where two would share one.
        """
        if processes.read_world_size() == 1:
            yield cls(device=torch.device(device))
            return
        require_gpu_per_process(device)
        if _OPEN:
            yield _OPEN[-1]
            _OPEN[-1].wait()
            return
        ranks = cls.join_process_group(device)
        _OPEN.append(ranks)
        try:
            with leave_process_group(ranks):
                yield ranks
                ranks.wait()
        finally:
            _OPEN.remove(ranks)

    @classmethod
    def join_process_group(cls, device: str) -> ProcessRanks:
        """This process after the meeting: with NCCL and the GPU of its place on this machine where there is one."""
        own, store = torch.device(device), list[distributed.Store]()
        if own.type == "cuda":
            own = torch.device("cuda", processes.read_local_rank())
            torch.cuda.set_device(own)
        if not distributed.is_initialized():
            backend = "nccl" if own.type == "cuda" and distributed.is_nccl_available() else "gloo"
            place, rank, world = next(rendezvous("env://", timeout=PROCESS_GROUP_TIMEOUT))
            distributed.init_process_group(
                backend, store=place, rank=rank, world_size=world, timeout=PROCESS_GROUP_TIMEOUT
            )
            store.append(place)
        words = distributed.new_group(backend="gloo", timeout=_OBJECT_EXCHANGE_TIMEOUT)
        return cls(distributed.get_rank(), distributed.get_world_size(), own, [words], store)

    @property
    def main(self) -> bool:
        return self.rank == 0

    @contextmanager
    def raise_process_loss(self) -> Iterator[None]:
        """What all do together: an error there means that one of them has left, and its last words are raised."""
        try:
            yield
        except RuntimeError as error:
            raise make_process_lost_error(error, self.store) from error

    def wait(self) -> None:
        if self.world > 1:
            with self.raise_process_loss():
                distributed.barrier(*self.words)

    def gathered(self, value: _T) -> list[_T]:
        """Everybody's plain value, by rank."""
        values: list[Any] = [value] * self.world
        if self.world > 1:
            with self.raise_process_loss():
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
        with self.raise_process_loss():
            distributed.all_to_all_single(shares, padded)
        return list(shares.view(self.world, -1))

    def whole(self, share: Tensor, length: int) -> Tensor:
        """The vector (length,) of which each process has a share, as `shares` gave it."""
        if self.world == 1:
            return share
        vector = share.new_empty(self.world, len(share))
        with self.raise_process_loss():
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


@contextmanager
def leave_process_group(ranks: ProcessRanks) -> Iterator[None]:
    """Leave the process group at the end; with an error, tell it to the others and see that they hear it."""
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised.__cause__ if isinstance(raised.__cause__, FinituneError) else raised
        with suppress(RuntimeError):
            for store in ranks.store:
                store.compare_set(_ERROR_MESSAGE_KEY, "", json.dumps(encode_process_error(error, ranks.rank)))
        raise
    finally:
        ranks.words.clear()  # gloo hangs up when nobody refers to a group any more, and the others miss this process
        of_this_process = isinstance(error, Exception) and not isinstance(error, ProcessLostError)
        if ranks.store:
            distributed.destroy_process_group()
            with suppress(RuntimeError):  # the place itself is gone with the process that kept it
                wait_for_others(ranks.store.pop(), ranks.world, compute_departure_timeout(error, ranks.rank))
        if ranks.rank and of_this_process:
            time.sleep(_EXIT_DELAY_SECONDS)


def compute_departure_timeout(error: BaseException | None, rank: int) -> float:
    """Seconds to wait for the others: who failed has to be heard, and the first process may keep the meeting place."""
    if isinstance(error, (KeyboardInterrupt, GeneratorExit)):
        return 0.0
    if isinstance(error, ProcessLostError):
        return _DEPARTURE_TIMEOUT_SECONDS if rank == 0 and error.code != _PROCESS_LOST_CODE else 0.0
    return _DEPARTURE_TIMEOUT_SECONDS if error or rank == 0 else 0.0


def wait_for_others(store: distributed.Store, world: int, seconds: float) -> None:
    """Say that this process leaves, and wait until all do, or for so many seconds."""
    end = time.monotonic() + seconds
    gone = store.add(_DEPARTED_COUNT_KEY, 1)
    while gone < world and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
        gone = store.add(_DEPARTED_COUNT_KEY, 0)
    time.sleep(2 * _POLL_SECONDS if seconds else 0.0)  # so that others who look see the same


def encode_process_error(error: BaseException, rank: int) -> dict[str, Any]:
    """An error of a process as JSON: what `FinituneError` is made of."""
    if isinstance(error, FinituneError):
        return {
            "message": error.message,
            "code": error.code,
            "subject": error.subject,
            "evidence": to_json_value({"process": rank, **error.evidence}),
            "remedy": error.remedy,
            "exit_code": error.exit_code,
        }
    why = f"{type(error).__name__} {error}".strip().splitlines()[0]
    return {"message": f"process {rank} has ended: {why}", "code": "PROCESS-ENDED", "evidence": {"process": rank}}


def make_process_lost_error(error: RuntimeError, stores: Sequence[distributed.Store]) -> ProcessLostError:
    """What the process that is missed has said; PROCESS-LOST where it could not say anything."""
    words: dict[str, Any] = {}
    with suppress(RuntimeError):
        for store in stores:
            if store.check([_ERROR_MESSAGE_KEY]):
                words = json.loads(store.get(_ERROR_MESSAGE_KEY))
    if not words:
        return ProcessLostError(
            "a process of the run has ended without a word, or cannot be reached",
            code=_PROCESS_LOST_CODE,
            subject="processes",
            evidence={"error": str(error).splitlines()[0]},
            remedy="Its own output and the system's log say why; often memory was short. Then go on from the last "
            "state: finitune train CONFIG --resume",
        )
    exit_code = words.pop("exit_code", ProcessLostError.exit_code)
    heard = ProcessLostError(words.pop("message"), **words)
    heard.exit_code = exit_code
    return heard
