"""Runs the processes of `finitune doctor --distributed` under torchrun, sees how far each comes, and ends them.

    python -m finitune.machine.distributed_probe '{"count": 2, "folder": ..., "device": "cpu", "limit_s": 30, ...}'

is torchrun with the arguments that a probe needs. It is a process of its own, since torchrun takes over signals; it
tells at the end which processes ended by themselves, and ends with its standard input, so that nobody is left behind.
The processes (`distributed_peer`) write which stage they begin and have done: who is waited for has not come as far as
the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finitune.progress import Progress

STARTED_STAGE = "started"
MEET_STAGE, DEVICES_STAGE, CONNECT_STAGE = "meet", "devices", "connect"
BROADCAST_STAGE, SPEED_STAGE, BARRIER_STAGE = "broadcast", "speed", "barrier"
DTYPE_BY_SUM_STAGE = {"sum-int32": "int32", "sum-fp16": "float16", "sum-bf16": "bfloat16", "sum-fp32": "float32"}
PEER_STAGES = (
    *(MEET_STAGE, DEVICES_STAGE, CONNECT_STAGE),
    *DTYPE_BY_SUM_STAGE,
    *(BROADCAST_STAGE, SPEED_STAGE, BARRIER_STAGE),
)
"""In this order. Until CONNECT all goes over gloo; what follows goes over NCCL where there are GPUs."""
SPEED_TEST_BYTES = 64 * 2**20
PEER_START_LIMIT_S = 60.0
"""How long processes may take to import torch, before the limit of the stages begins to count."""
FAILURE_GRACE_S = 1.0
"""How long the others are heard after the first failure: what they say tells the cause from the effects."""
LAUNCHER_END_LIMIT_S = 10.0
_POLL_S = 0.05
_PEERS_BAR = "processes"

PeerPretence = Mapping[str, str]
"""Of a process, for tests: `identity` stands in for its device's own; before stage `fails_at` it stops answering
(`fault` "stall") or is killed ("die")."""


@dataclass
class PeerStatus:
    """One process as it is known from outside: what it has begun, done and said, and how it ended."""

    rank: int
    begun: list[str] = field(default_factory=list)
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: str = ""  # the stage that raised
    error: str = ""
    talk: list[str] = field(default_factory=list)  # the lines of its output: NCCL's own words
    ended: int | None = None  # its exit code, if it ended by itself

    @property
    def at(self) -> str:
        """The stage that it is in, or the last one it was in; '' before it has started."""
        return self.begun[-1] if self.begun else ""

    @property
    def height(self) -> int:
        """How far it has come: the stages begun; -1 before it has started."""
        return PEER_STAGES.index(self.at) + 1 if self.at in PEER_STAGES else (0 if self.at == STARTED_STAGE else -1)

    @property
    def passed(self) -> bool:
        """Whether it has done every stage."""
        return all(stage in self.done for stage in PEER_STAGES)

    @property
    def crashed(self) -> bool:
        """Whether it ended in the middle, without an error of its own."""
        return self.ended is not None and not self.failed and not self.passed

    @classmethod
    def read(cls, rank: int, folder: Path) -> PeerStatus:
        """What a process has written so far, without a last line that is not whole yet."""
        status, path = cls(rank), folder / f"{rank}.jsonl"
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        for words in map(json.loads, lines):
            if "stage" in words:
                status.begun.append(words["stage"])
            elif "done" in words:
                status.done[words.pop("done")] = words
            else:
                status.failed, status.error = words["failed"], words["error"]
        return status


@dataclass(frozen=True)
class ProbeResult:
    """What became of all: the processes by rank, and the seconds it took."""

    peers: tuple[PeerStatus, ...]
    seconds: float
    limit_s: float

    @property
    def passed(self) -> bool:
        """Whether every process has done every stage; what they found is another question."""
        return all(peer.passed for peer in self.peers)

    def told(self, stage: str) -> dict[str, Any]:
        """What the first process that has done a stage tells of it; {} where none has."""
        return next((peer.done[stage] for peer in self.peers if stage in peer.done), {})


def find_shared_devices(devices: Any) -> dict[str, list[int]]:
    """The devices, by identity, that several processes were given, with their ranks; `devices`: (identity, name) by
    rank."""
    ranks: dict[str, list[int]] = {}
    for rank, (identity, _) in enumerate(devices):
        ranks.setdefault(identity, []).append(rank)
    return {identity: sharing for identity, sharing in ranks.items() if len(sharing) > 1}


def probe_peers(
    count: int,
    device: str,
    limit_s: float,
    progress: Progress,
    variables: Mapping[str, str],
    pretend: Mapping[int, PeerPretence],
) -> ProbeResult:
    """Start `count` processes on this machine, with `variables` beside the environment's, and see them through.

    Returns when all have ended, or one has failed, or they took longer than `limit_s` after they had started; by then
    every process is gone.
    """
    begin = time.monotonic()
    deadline, started, done = begin + PEER_START_LIMIT_S, False, 0
    progress.start(_PEERS_BAR, count * len(PEER_STAGES))
    try:
        with tempfile.TemporaryDirectory(prefix="finitune-distributed-") as name:
            folder = Path(name)
            asked = {"count": count, "folder": name, "device": device, "limit_s": limit_s, "pretend": pretend}
            with hold_launcher(asked, variables) as launcher:
                while launcher.poll() is None and time.monotonic() < deadline:
                    time.sleep(_POLL_S)
                    peers = tuple(PeerStatus.read(rank, folder) for rank in range(count))
                    if not started and all(peer.height >= 0 for peer in peers):
                        started, deadline = True, time.monotonic() + limit_s
                    before, done = done, sum(len(peer.done) for peer in peers)
                    progress.advance(_PEERS_BAR, done - before)
                    progress.say(_PEERS_BAR, ", ".join(f"process {peer.rank}: {peer.at}" for peer in peers))
                ended = read_exit_codes(launcher, folder, count)
                peers = tuple(PeerStatus.read(rank, folder) for rank in range(count))
                for peer in peers:
                    peer.ended = ended.get(peer.rank)
                    logs = sorted(folder.glob(f"**/{peer.rank}/std*.log"), reverse=True) or [folder / "launcher.log"]
                    peer.talk = [line for log in logs for line in log.read_text(errors="replace").split("\n") if line]
    finally:
        progress.finish(_PEERS_BAR)
    return ProbeResult(peers, time.monotonic() - begin, limit_s)


@contextlib.contextmanager
def hold_launcher(asked: Mapping[str, Any], variables: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """torchrun as a process, which has ended when this is left."""
    command = [sys.executable, "-m", "finitune.machine.distributed_probe", json.dumps(asked)]
    environment = {"NCCL_DEBUG": "WARN", **os.environ, **variables}
    with (
        Path(asked["folder"], "launcher.log").open("wb") as log,
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log) as launcher,
    ):
        try:
            yield launcher
        finally:
            launcher.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(LAUNCHER_END_LIMIT_S)
            launcher.kill()


def read_exit_codes(launcher: subprocess.Popen[bytes], folder: Path, count: int) -> dict[int, int]:
    """The exit codes of the processes that ended by themselves, and not well; torchrun's own for all if it failed."""
    path, code = folder / "ended.json", launcher.poll()
    if path.exists():
        return {int(rank): ended for rank, ended in json.loads(path.read_text()).items()}
    return dict.fromkeys(range(count), code) if code else {}


def launch_peers(count: int, folder: str, **asked: Any) -> None:
    """Be torchrun for `count` processes of this machine, and tell in ended.json which of them failed by themselves."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=_POLL_S,
        logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=Std.ALL),
    )
    ended: dict[int, int] = {}
    try:
        peer = json.dumps({"folder": folder, **asked})
        elastic_launch(config, sys.executable)("-m", "finitune.machine.distributed_peer", peer)
    except ChildFailedError as error:
        ended = {rank: failure.exitcode for rank, failure in error.failures.items()}
        by_torchrun = {rank for rank, code in ended.items() if code == -signal.SIGTERM}
        if by_torchrun != set(ended):
            ended = {rank: code for rank, code in ended.items() if rank not in by_torchrun}
    Path(folder, "ended.json").write_text(json.dumps(ended))


def end_with_input() -> None:
    """End this process when its standard input ends: then whoever started it is gone. torchrun ends its own first."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=end_with_input, daemon=True).start()
    launch_peers(**json.loads(sys.argv[1]))
