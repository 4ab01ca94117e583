"""Starts the processes of `finitune doctor --distributed`, hears what they say, and ends them, whatever happens.

Each process tells which stage it begins and which it has done. When the limit is up, or one is gone, those lines say
who it was: a process that others wait for has not come as far as they have.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from finitune.machine.distributed.peer import PEER_STAGES, STARTED_STAGE, PeerSpec
from finitune.progress import Progress

PEER_START_LIMIT_S = 60.0
"""How long processes may take to import torch, before the limit of the stages begins to count."""
FAILURE_GRACE_S = 1.0
"""How long the others are heard after the first failure: what they say tells the cause from the effects."""
LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_RANK",
)
_PEERS_BAR = "processes"

PeerLineQueue = queue.Queue[tuple[int, str | None]]


@dataclass
class PeerStatus:
    """One process as it is known from outside: what it has begun, done and said, and how it ended."""

    rank: int
    begun: list[str] = field(default_factory=list)
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: str = ""  # the stage that raised
    error: str = ""
    talk: list[str] = field(default_factory=list)  # other lines of its output: NCCL's own words
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

    def receive_line(self, line: str) -> None:
        """Take in a line of its output."""
        try:
            words = json.loads(line[line.index("{") :])
        except ValueError:
            words = {}
        if not words.keys() & {"stage", "done", "failed"}:
            self.talk.append(line)
        elif "stage" in words:
            self.begun.append(words["stage"])
        elif "done" in words:
            self.done[words.pop("done")] = words
        elif "failed" in words:
            self.failed, self.error = words["failed"], words["error"]


@dataclass(frozen=True)
class RendezvousResult:
    """What became of all: the processes by rank, the seconds it took, and the variables that were set for it."""

    peers: tuple[PeerStatus, ...]
    seconds: float
    limit_s: float
    variables: Mapping[str, str]

    @property
    def passed(self) -> bool:
        """Whether every process has done every stage; what they found is another question."""
        return all(peer.passed for peer in self.peers)

    def told(self, stage: str) -> dict[str, Any]:
        """What the first process that has done a stage tells of it; {} where none has."""
        return next((peer.done[stage] for peer in self.peers if stage in peer.done), {})


def supervise_peers(
    count: int,
    device: str,
    limit_s: float,
    progress: Progress,
    variables: Mapping[str, str],
    pretend: Mapping[int, Mapping[str, str]],
) -> RendezvousResult:
    """Start `count` processes on this machine, with `variables` beside the environment's, and see them through.

    Returns when all have ended, or one has failed, or they took longer than `limit_s` after they had started; by then
    every process is gone. `pretend`: by rank, the fields of a Spec that make a process fail, for tests.
    """
    from torch import distributed

    begin = time.perf_counter()
    store = distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    specs = [PeerSpec(rank, count, store.port, device, limit_s, **pretend.get(rank, {})) for rank in range(count)]
    peers = tuple(PeerStatus(spec.rank) for spec in specs)
    progress.start(_PEERS_BAR, count * len(PEER_STAGES))
    try:
        with _running(specs, variables) as (heard, processes):
            _listen(peers, heard, processes, limit_s, progress)
    finally:
        progress.finish(_PEERS_BAR)
    return RendezvousResult(peers, time.perf_counter() - begin, limit_s, dict(variables))


@contextlib.contextmanager
def _running(
    specs: list[PeerSpec], variables: Mapping[str, str]
) -> Iterator[tuple[PeerLineQueue, list[subprocess.Popen[str]]]]:
    """The processes, and the queue in which their lines arrive; killed at the end."""
    heard: PeerLineQueue = queue.Queue()
    kept = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    environment = {"NCCL_DEBUG": "WARN", **kept, **variables}
    processes: list[subprocess.Popen[str]] = []
    listeners: list[threading.Thread] = []
    try:
        for spec in specs:
            processes.append(_started(spec, environment))
            listener = threading.Thread(target=_forward, args=(spec.rank, processes[-1], heard), daemon=True)
            listener.start()
            listeners.append(listener)
        yield heard, processes
    finally:
        for process in processes:
            process.kill()
        for listener in listeners:
            listener.join()
        for process in processes:
            with process:  # waits, and closes what leads to it
                pass


def _started(spec: PeerSpec, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "finitune.machine.distributed.peer", json.dumps(asdict(spec))],
        env=environment,
        stdin=subprocess.PIPE,  # it ends when this process does
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def _forward(rank: int, process: subprocess.Popen[str], heard: PeerLineQueue) -> None:
    """Put a process's lines into the queue, and None when it has ended."""
    assert process.stdout is not None
    for line in process.stdout:
        heard.put((rank, line.strip()))
    heard.put((rank, None))


def _listen(
    peers: tuple[PeerStatus, ...],
    heard: PeerLineQueue,
    processes: list[subprocess.Popen[str]],
    limit_s: float,
    progress: Progress,
) -> None:
    """Take in what the processes say until all have passed or ended, or the time is up: sooner after a failure."""
    deadline, started, failing = time.monotonic() + PEER_START_LIMIT_S, False, False
    while (left := deadline - time.monotonic()) > 0 and not all(
        peer.passed or peer.ended is not None for peer in peers
    ):
        try:
            rank, line = heard.get(timeout=left)
        except queue.Empty:
            return
        peer, done = peers[rank], len(peers[rank].done)
        if line is None:
            peer.ended = processes[rank].wait()
        else:
            peer.receive_line(line)
        progress.say(_PEERS_BAR, f"process {rank}: {peer.at}")
        progress.advance(_PEERS_BAR, len(peer.done) - done)
        if not failing and (peer.failed or peer.crashed):
            failing, deadline = True, min(deadline, time.monotonic() + FAILURE_GRACE_S)
        elif not started and not failing and all(peer.height >= 0 for peer in peers):
            started, deadline = True, time.monotonic() + limit_s
