"""What each process of `finitune doctor --distributed` does: meet, name its device, and talk, one stage after another.

    python -m finitune.machine.distributed.peer '{"rank": 0, "world": 2, "port": 29500, "device": "cpu", "limit_s": 30}'

It tells on standard output, a JSON object a line, which stage it begins and what came of it. So whoever started it can
say of a process that hangs, or is gone, where that was. It ends when its standard input does: nobody is left behind.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

STARTED_STAGE = "started"
MEET_STAGE, DEVICES_STAGE, CONNECT_STAGE, BROADCAST_STAGE, SPEED_STAGE, BARRIER_STAGE = (
    "meet",
    "devices",
    "connect",
    "broadcast",
    "speed",
    "barrier",
)
DTYPE_BY_SUM_STAGE = {"sum-int32": "int32", "sum-fp16": "float16", "sum-bf16": "bfloat16", "sum-fp32": "float32"}
PEER_STAGES = (
    MEET_STAGE,
    DEVICES_STAGE,
    CONNECT_STAGE,
    *DTYPE_BY_SUM_STAGE,
    BROADCAST_STAGE,
    SPEED_STAGE,
    BARRIER_STAGE,
)
"""In this order. Until CONNECT all goes over gloo; what follows goes over NCCL where there are GPUs."""
SPEED_TEST_BYTES = 64 * 2**20
CHECKED_ELEMENTS = 4099  # of a checked sum: a prime, so that no process has a whole number of turns


@dataclass(frozen=True)
class PeerSpec:
    """Who this process is, and where all meet. `identity` stands in for the device's own; before stage `fails_at` this
    process stops answering (`fault` "stall") or is killed ("die"): so that a test sees what is made of it."""

    rank: int
    world: int
    port: int
    device: str
    limit_s: float
    identity: str = ""
    fails_at: str = ""
    fault: str = ""


def run_peer_stages(text: str) -> int:
    """Run the stages of a process; 0 when all have passed."""
    spec = PeerSpec(**json.loads(text))
    threading.Thread(target=end_with_input, daemon=True).start()
    import torch  # the slowest step of all, and everybody's own

    torch.set_num_threads(1)
    emit_peer_message(stage=STARTED_STAGE)
    for stage, work in list_peer_stages(spec):
        if stage == spec.fails_at:
            inject_peer_fault(spec.fault)
        emit_peer_message(stage=stage)
        try:
            told = work()
            emit_peer_message(done=stage, **told)
            if stage == DEVICES_STAGE and find_shared_devices(told["devices"]):
                return 0  # NCCL would refuse, or hang
        except Exception as error:
            emit_peer_message(failed=stage, error=f"{type(error).__name__}: {error}")
            return 1
    return 0


def find_shared_devices(devices: Any) -> dict[str, list[int]]:
    """The devices, by identity, that several processes were given, with their ranks; `devices`: (identity, name) by
    rank."""
    ranks: dict[str, list[int]] = {}
    for rank, (identity, _) in enumerate(devices):
        ranks.setdefault(identity, []).append(rank)
    return {identity: sharing for identity, sharing in ranks.items() if len(sharing) > 1}


def emit_peer_message(**words: object) -> None:
    """A line to whoever started this process."""
    print(json.dumps(words), flush=True)


def end_with_input() -> None:
    """End this process when its standard input ends: then whoever started it is gone."""
    while os.read(0, 1):
        pass
    os._exit(1)


def inject_peer_fault(fault: str) -> None:
    """Hang, or end without a word."""
    if fault == "die":
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
    time.sleep(3600)


def list_peer_stages(spec: PeerSpec) -> Iterator[tuple[str, Callable[[], dict[str, object]]]]:
    """Each stage's name and work, which returns what to tell of it."""
    import torch

    device = get_peer_device(spec)
    yield MEET_STAGE, lambda: join_peers(spec)
    yield (
        DEVICES_STAGE,
        lambda: {"devices": gather_peer_values(spec, [get_peer_identity(spec), describe_peer_device(device)])},
    )
    groups: list[Any] = []
    yield CONNECT_STAGE, lambda: create_gradient_group(spec, device, groups)
    for stage, dtype in DTYPE_BY_SUM_STAGE.items():
        yield stage, lambda dtype=dtype: check_peer_sum(spec, device, getattr(torch, dtype), groups[0])
    yield BROADCAST_STAGE, lambda: check_peer_broadcast(spec, device, groups[0])
    yield SPEED_STAGE, lambda: time_peer_sum(spec, device, groups[0])
    yield BARRIER_STAGE, lambda: wait_at_barrier(groups[0])


def get_peer_device(spec: PeerSpec) -> Any:
    """The torch device of this process: the GPU of its rank, around again where there are too few."""
    import torch

    if spec.device != "cuda":
        return torch.device("cpu")
    return torch.device("cuda", spec.rank % max(1, torch.cuda.device_count()))


def get_peer_identity(spec: PeerSpec) -> str:
    """What tells this process's device from all others: a GPU's UUID; on a CPU every process is its own."""
    import torch

    if spec.identity or spec.device != "cuda":
        return spec.identity or f"process {spec.rank}"
    found = torch.cuda.get_device_properties(get_peer_device(spec))
    return str(getattr(found, "uuid", f"cuda:{get_peer_device(spec).index}"))


def describe_peer_device(device: Any) -> str:
    """The device's name for a person."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def join_peers(spec: PeerSpec) -> dict[str, object]:
    """Find the others, over gloo."""
    from torch import distributed

    limit = timedelta(seconds=spec.limit_s)
    store = distributed.TCPStore("127.0.0.1", spec.port, None, False, timeout=limit)
    distributed.init_process_group("gloo", store=store, rank=spec.rank, world_size=spec.world, timeout=limit)
    return {}


def gather_peer_values(spec: PeerSpec, value: object) -> list[Any]:
    """Everybody's value, by rank."""
    from torch import distributed

    values: list[Any] = [None] * spec.world
    distributed.all_gather_object(values, value)
    return values


def create_gradient_group(spec: PeerSpec, device: Any, groups: list[Any]) -> dict[str, object]:
    """Make the group that gradients would go over, and keep it in `groups`."""
    import torch
    from torch import distributed
    from torch.cuda import nccl

    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    groups.append(distributed.new_group(backend=backend, timeout=timedelta(seconds=spec.limit_s)))
    version = ".".join(map(str, nccl.version())) if backend == "nccl" else ""
    return {"backend": backend, "version": version}


def check_peer_sum(spec: PeerSpec, device: Any, dtype: Any, group: Any) -> dict[str, object]:
    """Add up over all processes, and compare every element.

    Process r gives 1 everywhere, and r + 1 at every `world`-th element from r on: each process is seen by itself, and
    every partial sum of up to 128 of them is a whole number that even bf16 holds.
    """
    import torch
    from torch import distributed

    places = torch.arange(CHECKED_ELEMENTS, device=device) % spec.world
    given = torch.where(places == spec.rank, spec.rank + 1, 1).to(dtype)
    distributed.all_reduce(given, group=group)
    wanted = (places + spec.world).to(dtype)
    wrong = given != wanted
    first = int(wrong.int().argmax())
    return {"wrong": int(wrong.sum()), "got": float(given[first]), "expected": float(wanted[first])}


def check_peer_broadcast(spec: PeerSpec, device: Any, group: Any) -> dict[str, object]:
    """Take over the last process's numbers, and compare every one."""
    import torch
    from torch import distributed

    wanted = torch.arange(CHECKED_ELEMENTS, device=device, dtype=torch.float32)
    given = wanted.clone() if spec.rank == spec.world - 1 else torch.zeros_like(wanted)
    distributed.broadcast(given, spec.world - 1, group=group)
    return {"wrong": int((given != wanted).sum())}


def wait_at_barrier(group: Any) -> dict[str, object]:
    """Go on when everybody is here."""
    from torch import distributed

    distributed.barrier(group)
    return {}


def time_peer_sum(spec: PeerSpec, device: Any, group: Any) -> dict[str, object]:
    """Seconds that a sum of 64 MB takes: the second of two, which finds the buffers made."""
    import torch
    from torch import distributed

    numbers = torch.zeros(SPEED_TEST_BYTES // 4, device=device)
    seconds = 0.0
    for _ in range(2):
        distributed.barrier(group)
        begin = time.perf_counter()
        distributed.all_reduce(numbers, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begin
    return {"seconds": seconds}


if __name__ == "__main__":
    sys.exit(run_peer_stages(sys.argv[1]))
