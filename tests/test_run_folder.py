"""The folder of a run: one run at a time, names, what is kept, and a disk that is full."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from finitune.errors import FileError, UsageError
from finitune.training import run_folder as module
from finitune.training.checkpoint import RunState, load_run_state, save_run_state
from finitune.training.manifest import TrainingManifest
from finitune.training.run_folder import RUN_LOCK_NAME, RunFolder

MANIFEST = TrainingManifest("lora", {"a": (64, 64)}, "torch.AdamW")
HOLDER = (
    "import fcntl, sys; f = open(sys.argv[1], 'a+b'); fcntl.flock(f, 2); print('held', flush=True); sys.stdin.read()"
)
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="needs the system's locks and limits")


def state_at(step: int) -> RunState:
    content = torch.full((64, 64), float(step))
    return RunState(step, 0, {"a": content}, {"state": {}, "param_groups": []})


def touched(path: Path, second: int) -> Path:
    path.mkdir() if path.name.endswith("-state") else path.write_bytes(b"x")
    os.utime(path, (second, second))
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != RUN_LOCK_NAME)


def test_one_run_at_a_time(tmp_path: Path):
    with RunFolder(tmp_path / "run"), pytest.raises(UsageError) as caught, RunFolder(tmp_path / "run"):
        pass
    assert caught.value.code == "RUN-FOLDER-LOCKED"
    assert caught.value.evidence["pid"] == os.getpid()
    assert f"by process {os.getpid()} since 20" in caught.value.message
    with RunFolder(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / RUN_LOCK_NAME).read_text())["pid"] == os.getpid()
    assert names(tmp_path / "run") == []


@POSIX
def test_the_lock_ends_with_the_program(tmp_path: Path):
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / RUN_LOCK_NAME)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None
    assert other.stdout.readline() == b"held\n"
    with pytest.raises(UsageError, match="by another program"), RunFolder(tmp_path):
        pass
    other.kill()
    other.communicate()
    with RunFolder(tmp_path):
        pass


@pytest.mark.parametrize(("pid", "free"), [(os.getppid(), False), (2**22 + 1, True)])
def test_without_locks_a_process_number_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pid: int, free: bool):
    monkeypatch.setattr(module, "try_lock_file", lambda file: None)
    (tmp_path / RUN_LOCK_NAME).write_text(json.dumps({"pid": pid, "since": "yesterday"}))
    if free:
        with RunFolder(tmp_path):
            pass
    else:
        with pytest.raises(UsageError, match="since yesterday"), RunFolder(tmp_path):
            pass


def test_names_are_kohyas(tmp_path: Path):
    run = RunFolder(tmp_path)
    assert run.adapter_path("x").name == "x.safetensors"
    assert run.adapter_path("x", epoch=10).name == "x-000010.safetensors"
    assert run.adapter_path("x", step=10).name == "x-step00000010.safetensors"
    assert run.state_path("x", 10).name == "x-step00000010-state"
    assert run.state_path("x").name == "x-state"


def test_the_oldest_go_and_nothing_else(tmp_path: Path):
    run = RunFolder(tmp_path)
    for step in (100, 200, 300):
        touched(run.adapter_path("x.y", step=step), step)
        touched(run.adapter_path("x.y", step=step).with_suffix(".peft.safetensors"), step)
        touched(tmp_path / f"x.y-step{step:08d}-state", step)
        run.state_path("x.y", step)
    foreign = [
        *("x.y.safetensors", "x.y-state", "xzy-step00000001.safetensors", "other-step00000001.safetensors"),
        *("x.y-step00000001.txt", "x.y-best.safetensors", "x.y-step00000001"),
    ]
    for name in foreign:
        touched(tmp_path / name, 1)
    removed = run.prune(2)
    assert sorted(path.name for path in removed) == [
        "x.y-step00000100-state",
        "x.y-step00000100.peft.safetensors",
        "x.y-step00000100.safetensors",
    ]
    run.prune(1)
    last = ("x.y-step00000300-state", "x.y-step00000300.peft.safetensors", "x.y-step00000300.safetensors")
    assert names(tmp_path) == sorted([*foreign, *last])
    with pytest.raises(ValueError, match="always kept"):
        run.prune(0)


def test_the_last_written_stays_though_an_earlier_run_went_further(tmp_path: Path):
    run = RunFolder(tmp_path)
    old = [touched(run.adapter_path("x", step=step), 100 + step) for step in (2000, 3000)]
    new = touched(run.adapter_path("x", step=100), 9000)
    assert run.prune(1) == old
    assert names(tmp_path) == [new.name]


def test_nothing_is_pruned_of_names_that_were_not_asked_for(tmp_path: Path):
    touched(tmp_path / "x-step00000001.safetensors", 1)
    touched(tmp_path / "x-step00000002.safetensors", 2)
    assert RunFolder(tmp_path).prune(1) == []


def test_a_run_clears_away_what_killed_ones_left(tmp_path: Path):
    hour_ago = time.time() - 7200
    for name in (".partial-00000000-x-state", ".partial-00000001-x.safetensors"):
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (hour_ago, hour_ago))
    (tmp_path / ".partial-00000000-x-state.d").mkdir()
    (tmp_path / ".discarded-y-state").mkdir()
    (tmp_path / ".aside-00000002-z-state").mkdir()
    (tmp_path / ".notes").write_text("mine")
    with RunFolder(tmp_path):
        assert names(tmp_path) == [".notes", "z-state"]


def test_a_small_disk_is_refused_before_the_start(tmp_path: Path):
    run = RunFolder(tmp_path / "not" / "yet")
    run.require_space(1)
    with pytest.raises(FileError) as caught:
        run.require_space(2**62)
    assert caught.value.code == "DISK-FULL"
    assert caught.value.evidence["needed_bytes"] == 2**62


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def refuse(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@POSIX
def test_a_disk_that_fills_up_leaves_what_was_there(tmp_path: Path):
    save_run_state(tmp_path / "x-state", state_at(1), MANIFEST)
    for target in ("x-state", "y-state"):
        with pytest.raises(FileError) as caught, files_up_to(8192):
            save_run_state(tmp_path / target, state_at(2), MANIFEST)
        assert caught.value.code == "FILE-NOT-WRITTEN"
    assert load_run_state(tmp_path / "x-state")[0].step == 1
    assert names(tmp_path) == ["x-state"]


@pytest.mark.parametrize("call", ["fsync", "rename", "replace"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_whatever_fails_the_old_state_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, count: int):
    """The `count`-th call of the system is refused; the next ones work again."""
    save_run_state(tmp_path / "x-state", state_at(1), MANIFEST)
    calls, real = [0], getattr(os, call)

    def failing(*arguments: object, **options: object) -> object:
        calls[0] += 1
        return refuse() if calls[0] == count else real(*arguments, **options)

    monkeypatch.setattr(os, call, failing)
    try:
        save_run_state(tmp_path / "x-state", state_at(2), MANIFEST)
    except FileError as error:
        assert error.code == "FILE-NOT-WRITTEN"
        assert error.evidence["errno"] == errno.ENOSPC
        assert calls[0] >= count
    else:
        assert calls[0] < count
    monkeypatch.undo()
    assert load_run_state(tmp_path / "x-state")[0].step in (1, 2)
    assert names(tmp_path) == ["x-state"]


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError) as caught, RunFolder(tmp_path / "file" / "run"):
        pass
    assert caught.value.code == "FILE-NOT-WRITTEN"
