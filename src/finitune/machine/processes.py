"""The processes that torchrun or accelerate has started together, as their environment tells: torch's own variables."""

from __future__ import annotations

import os


def read_world_size() -> int:
    """How many there are on all machines; 1 where none of the launchers has started this one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def read_rank() -> int:
    """Which of them this is, from 0: the first one speaks and writes for all."""
    return int(os.environ.get("RANK", "0")) if read_world_size() > 1 else 0


def read_local_world_size() -> int:
    """How many there are on this machine, at least."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or read_local_rank() + 1)


def read_local_rank() -> int:
    """Which of those on this machine this one is, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))
