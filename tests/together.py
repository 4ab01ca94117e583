"""Processes that are started together, as torchrun starts them, to do one of the things that a test module names.

`launched` starts this module once for each process; a duty is a function of a test module, called with the place of the
test. What it returns is read back as JSON, and so is the error that it ends with.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from finitune.errors import FinituneError

ROOT = Path(__file__).parents[1]
SECONDS = 600
SECONDS_BEHIND_A_FAILURE = 60


@dataclass(frozen=True)
class Done:
    """What became of a process: its exit code, what its duty returned, its error stream."""

    code: int
    answer: Any
    stderr: str


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def environment(**variables: object) -> dict[str, str]:
    """This process's environment without a launcher's variables, one thread for each process, and `variables`."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in launcher}
    return {**kept, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in variables.items()}}


def launched(duty: Callable[[Path], Any], place: Path, world: int = 2) -> list[Done]:
    """Have `world` processes do a duty together; what became of each, by rank."""
    port = free_port()
    command = [sys.executable, "-m", "tests.together", duty.__module__, duty.__name__, str(place)]
    started = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    with ThreadPoolExecutor(world) as listening:
        said = [listening.submit(process.communicate) for process in started]
        try:
            wait_for_all(started)
        finally:
            for process in started:
                process.kill()
    return [
        Done(process.returncode, json.loads(out) if out else None, err)
        for process, (out, err) in zip(started, (one.result() for one in said), strict=True)
    ]


def wait_for_all(started: list[subprocess.Popen[str]]) -> None:
    """Wait for processes, and not for long once one has failed: the others are to miss it. What is left is killed."""
    end = time.monotonic() + SECONDS
    failed = False
    while any(process.poll() is None for process in started) and time.monotonic() < end:
        if not failed and any(process.poll() for process in started):
            failed, end = True, time.monotonic() + SECONDS_BEHIND_A_FAILURE
        time.sleep(0.02)


def main() -> None:
    """Do a duty; its answer, or the code of its error, goes to the output stream."""
    module, name, place = sys.argv[1:]
    try:
        answer = getattr(import_module(module), name)(Path(place))
    except FinituneError as error:
        answer = {"error": error.code, "evidence": error.evidence, "exit": error.exit_code}
    print(json.dumps(answer, default=str))


if __name__ == "__main__":
    main()
