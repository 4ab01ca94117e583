"""What each process of `finitune doctor --distributed` does: meet, name its device, and talk, one stage after another.

torchrun starts it (`finitune.machine.distributed_probe`), and says by variables who it is and where all meet. Into a
file of its own it writes, a JSON object a line, which stage it begins and what came of it: so the processes can hang or
be killed, and it is known where that was.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.cuda import nccl

from finitune.machine import processes
from finitune.machine.distributed_probe import (
    BARRIER_STAGE,
    BROADCAST_STAGE,
    CONNECT_STAGE,
    DEVICES_STAGE,
    DTYPE_BY_SUM_STAGE,
    FAILURE_GRACE_S,
    MEET_STAGE,
    SPEED_STAGE,
    SPEED_TEST_BYTES,
    STARTED_STAGE,
    PeerPretence,
    find_shared_devices,
)

CHECKED_ELEMENTS = 4099  # of a checked sum: a prime, so that no process has a whole number of turns
_AFTER_JUDGEMENT_S = 30.0
"""A process waits longer than the probe, which says who is late: its own time-out would only say that it waited."""


@dataclass
class Peer:
    """One process: who it is, its device, and, once it is made, the group that gradients would go over."""

    rank: int
    world: int
    device: torch.device
    limit: timedelta
    identity: str = ""
    group: Any = None

    def get_identity(self) -> str:
        """What tells this process's device from all others: a GPU's UUID; on a CPU every process is its own."""
        if self.identity or self.device.type != "cuda":
            return self.identity or f"process {self.rank}"
        return str(getattr(torch.cuda.get_device_properties(self.device), "uuid", self.device))

    def list_stages(self) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        """Each stage's name and work, which returns what to tell of it."""
        yield MEET_STAGE, self.meet
        yield DEVICES_STAGE, self.gather_devices
        yield CONNECT_STAGE, self.connect
        for stage, dtype in DTYPE_BY_SUM_STAGE.items():
            yield stage, lambda dtype=dtype: self.check_sum(getattr(torch, dtype))
        yield BROADCAST_STAGE, self.check_broadcast
        yield SPEED_STAGE, self.time_sum
        yield BARRIER_STAGE, self.wait_at_barrier

    def meet(self) -> dict[str, Any]:
        """Find the others, over gloo."""
        distributed.init_process_group("gloo", timeout=self.limit)
        return {}

    def gather_devices(self) -> dict[str, Any]:
        """Everybody's device, by rank: its identity, and its name for a person."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        devices: list[Any] = [None] * self.world
        distributed.all_gather_object(devices, [self.get_identity(), name])
        return {"devices": devices}

    def connect(self) -> dict[str, Any]:
        """Make the group that gradients would go over."""
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.group = distributed.new_group(backend=backend, timeout=self.limit)
        return {"backend": backend, "version": ".".join(map(str, nccl.version())) if backend == "nccl" else ""}

    def check_sum(self, dtype: torch.dtype) -> dict[str, Any]:
        """Add up over all processes, and compare every element.

        Process r gives 1 everywhere, and r + 1 at every `world`-th element from r on: each process is seen by itself,
        and every partial sum of up to 128 of them is a whole number that even bf16 holds.
        """
        places = torch.arange(CHECKED_ELEMENTS, device=self.device) % self.world
        given = torch.where(places == self.rank, self.rank + 1, 1).to(dtype)
        distributed.all_reduce(given, group=self.group)
        wanted = (places + self.world).to(dtype)
        wrong = given != wanted
        first = int(wrong.int().argmax())
        return {"wrong": int(wrong.sum()), "got": float(given[first]), "expected": float(wanted[first])}

    def check_broadcast(self) -> dict[str, Any]:
        """Take over the last process's numbers, and compare every one."""
        wanted = torch.arange(CHECKED_ELEMENTS, device=self.device, dtype=torch.float32)
        given = wanted.clone() if self.rank == self.world - 1 else torch.zeros_like(wanted)
        distributed.broadcast(given, self.world - 1, group=self.group)
        return {"wrong": int((given != wanted).sum())}

    def time_sum(self) -> dict[str, Any]:
        """Seconds that a sum of 64 MB takes: the second of two, which finds the buffers made."""
        numbers = torch.zeros(SPEED_TEST_BYTES // 4, device=self.device)
        seconds = 0.0
        for _ in range(2):
            distributed.barrier(self.group)
            begin = time.perf_counter()
            distributed.all_reduce(numbers, group=self.group)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds = time.perf_counter() - begin
        return {"seconds": seconds}

    def wait_at_barrier(self) -> dict[str, Any]:
        """Go on when everybody is here."""
        distributed.barrier(self.group)
        return {}


def run_peer(folder: Path, kind: str, limit_s: float, pretend: PeerPretence) -> int:
    """Run the stages of this process, told in `folder`; 0 when all have passed."""
    torch.set_num_threads(1)
    rank, world = processes.read_rank(), processes.read_world_size()
    device = torch.device("cuda", rank % max(1, torch.cuda.device_count())) if kind == "cuda" else torch.device("cpu")
    patience = timedelta(seconds=limit_s + _AFTER_JUDGEMENT_S)
    peer = Peer(rank, world, device, patience, pretend.get("identity", ""))
    with (folder / f"{rank}.jsonl").open("w", encoding="utf-8", buffering=1) as told:
        told.write(json.dumps({"stage": STARTED_STAGE}) + "\n")
        for stage, work in peer.list_stages():
            if stage == pretend.get("fails_at"):
                inject_peer_fault(pretend["fault"])
            told.write(json.dumps({"stage": stage}) + "\n")
            try:
                done = work()
            except Exception as error:
                told.write(json.dumps({"failed": stage, "error": f"{type(error).__name__}: {error}"}) + "\n")
                time.sleep(FAILURE_GRACE_S)  # torchrun ends the others when this one has ended
                return 1
            told.write(json.dumps({"done": stage, **done}) + "\n")
            if stage == DEVICES_STAGE and find_shared_devices(done["devices"]):
                return 0  # NCCL would refuse, or hang
    return 0


def inject_peer_fault(fault: str) -> None:
    """Hang, or end without a word: so that a test sees what is made of it."""
    if fault == "die":
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
    time.sleep(3600)


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    sys.exit(
        run_peer(Path(asked["folder"]), asked["device"], asked["limit_s"], asked["pretend"].get(os.environ["RANK"], {}))
    )
