"""What each process of `finitune doctor --distributed` does: meet, name its device, and talk, one stage after another.

    python -m finitune.device.peers.peer '{"rank": 0, "world": 2, "port": 29500, "device": "cpu", "limit_s": 30}'

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

STARTED = "started"
MEET, DEVICES, CONNECT, BROADCAST, SPEED, BARRIER = "meet", "devices", "connect", "broadcast", "speed", "barrier"
SUMS = {"sum-int32": "int32", "sum-fp16": "float16", "sum-bf16": "bfloat16", "sum-fp32": "float32"}
STAGES = (MEET, DEVICES, CONNECT, *SUMS, BROADCAST, SPEED, BARRIER)
"""In this order. Until CONNECT all goes over gloo; what follows goes over NCCL where there are GPUs."""
SPEED_BYTES = 64 * 2**20
ELEMENTS = 4099  # of a checked sum: a prime, so that no process has a whole number of turns


@dataclass(frozen=True)
class Spec:
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


def main(text: str) -> int:
    """Run the stages of a process; 0 when all have passed."""
    spec = Spec(**json.loads(text))
    threading.Thread(target=end_with_input, daemon=True).start()
    import torch  # the slowest step of all, and everybody's own

    torch.set_num_threads(1)
    say(stage=STARTED)
    for stage, work in stages(spec):
        if stage == spec.fails_at:
            fail(spec.fault)
        say(stage=stage)
        try:
            told = work()
            say(done=stage, **told)
            if stage == DEVICES and shared(told["devices"]):
                return 0  # NCCL would refuse, or hang
        except Exception as error:
            say(failed=stage, error=f"{type(error).__name__}: {error}")
            return 1
    return 0


def shared(devices: Any) -> dict[str, list[int]]:
    """The devices, by identity, that several processes were given, with their ranks; `devices`: (identity, name) by
    rank."""
    ranks: dict[str, list[int]] = {}
    for rank, (identity, _) in enumerate(devices):
        ranks.setdefault(identity, []).append(rank)
    return {identity: sharing for identity, sharing in ranks.items() if len(sharing) > 1}


def say(**words: object) -> None:
    """A line to whoever started this process."""
    print(json.dumps(words), flush=True)


def end_with_input() -> None:
    """End this process when its standard input ends: then whoever started it is gone."""
    while os.read(0, 1):
        pass
    os._exit(1)


def fail(fault: str) -> None:
    """Hang, or end without a word."""
    if fault == "die":
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
    time.sleep(3600)


def stages(spec: Spec) -> Iterator[tuple[str, Callable[[], dict[str, object]]]]:
    """Each stage's name and work, which returns what to tell of it."""
    import torch

    device = device_of(spec)
    yield MEET, lambda: meet(spec)
    yield DEVICES, lambda: {"devices": gathered(spec, [identity(spec), name(device)])}
    groups: list[Any] = []
    yield CONNECT, lambda: connect(spec, device, groups)
    for stage, dtype in SUMS.items():
        yield stage, lambda dtype=dtype: checked_sum(spec, device, getattr(torch, dtype), groups[0])
    yield BROADCAST, lambda: checked_broadcast(spec, device, groups[0])
    yield SPEED, lambda: timed_sum(spec, device, groups[0])
    yield BARRIER, lambda: wait(groups[0])


def device_of(spec: Spec) -> Any:
    """The torch device of this process: the GPU of its rank, around again where there are too few."""
    import torch

    if spec.device != "cuda":
        return torch.device("cpu")
    return torch.device("cuda", spec.rank % max(1, torch.cuda.device_count()))


def identity(spec: Spec) -> str:
    """What tells this process's device from all others: a GPU's UUID; on a CPU every process is its own."""
    import torch

    if spec.identity or spec.device != "cuda":
        return spec.identity or f"process {spec.rank}"
    found = torch.cuda.get_device_properties(device_of(spec))
    return str(getattr(found, "uuid", f"cuda:{device_of(spec).index}"))


def name(device: Any) -> str:
    """The device's name for a person."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def meet(spec: Spec) -> dict[str, object]:
    """Find the others, over gloo."""
    from torch import distributed

    limit = timedelta(seconds=spec.limit_s)
    store = distributed.TCPStore("127.0.0.1", spec.port, None, False, timeout=limit)
    distributed.init_process_group("gloo", store=store, rank=spec.rank, world_size=spec.world, timeout=limit)
    return {}


def gathered(spec: Spec, value: object) -> list[Any]:
    """Everybody's value, by rank."""
    from torch import distributed

    values: list[Any] = [None] * spec.world
    distributed.all_gather_object(values, value)
    return values


def connect(spec: Spec, device: Any, groups: list[Any]) -> dict[str, object]:
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


def checked_sum(spec: Spec, device: Any, dtype: Any, group: Any) -> dict[str, object]:
    """Add up over all processes, and compare every element.

    Process r gives 1 everywhere, and r + 1 at every `world`-th element from r on: each process is seen by itself, and
    every partial sum of up to 128 of them is a whole number that even bf16 holds.
    """
    import torch
    from torch import distributed

    places = torch.arange(ELEMENTS, device=device) % spec.world
    given = torch.where(places == spec.rank, spec.rank + 1, 1).to(dtype)
    distributed.all_reduce(given, group=group)
    wanted = (places + spec.world).to(dtype)
    wrong = given != wanted
    first = int(wrong.int().argmax())
    return {"wrong": int(wrong.sum()), "got": float(given[first]), "expected": float(wanted[first])}


def checked_broadcast(spec: Spec, device: Any, group: Any) -> dict[str, object]:
    """Take over the last process's numbers, and compare every one."""
    import torch
    from torch import distributed

    wanted = torch.arange(ELEMENTS, device=device, dtype=torch.float32)
    given = wanted.clone() if spec.rank == spec.world - 1 else torch.zeros_like(wanted)
    distributed.broadcast(given, spec.world - 1, group=group)
    return {"wrong": int((given != wanted).sum())}


def wait(group: Any) -> dict[str, object]:
    """Go on when everybody is here."""
    from torch import distributed

    distributed.barrier(group)
    return {}


def timed_sum(spec: Spec, device: Any, group: Any) -> dict[str, object]:
    """Seconds that a sum of 64 MB takes: the second of two, which finds the buffers made."""
    import torch
    from torch import distributed

    numbers = torch.zeros(SPEED_BYTES // 4, device=device)
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
    sys.exit(main(sys.argv[1]))
