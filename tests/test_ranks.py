"""What processes say to each other: sums in one order, words that are waited for, and errors that end all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, distributed

from finitune.errors import FileError, NumericsError, UsageError
from finitune.training import ranks as module
from finitune.training.ranks import OrderedSum, ProcessRanks
from tests.together import environment, launched

ROUNDS, LENGTH = 3, 101


def vector(rank: int, number: int) -> Tensor:
    """Numbers whose sum depends on the order in which they are added up."""
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(LENGTH, generator=generator)


def in_order(world: int) -> Tensor:
    """The twin of OrderedSum: one process that takes every vector in its turn."""
    total = vector(0, 0)
    for turn in range(1, ROUNDS * world):
        total = total + vector(turn % world, turn // world)
    return total


def talk(_: Path) -> dict[str, object]:
    """Everything that processes do together; one of them is busy for longer than gradients are waited for."""
    module.PROCESS_GROUP_TIMEOUT = timedelta(seconds=2)
    with ProcessRanks.open_process_group("cpu") as ranks:
        total = OrderedSum(ranks)
        for number in range(ROUNDS):
            total.add(vector(ranks.rank, number))
        if ranks.main:
            time.sleep(3)
        answer: dict[str, object] = {
            "words": ranks.gathered(ranks.rank),
            "main": ranks.broadcast_from_main(ranks.rank),
            "sum": total.value().tolist(),
            "added": ranks.add(torch.tensor([1.0 + ranks.rank])).tolist(),
        }
        with ProcessRanks.open_process_group("cpu") as inner:
            answer["inner"] = inner.gathered(inner.rank)
        ranks.demand_same("seeds", 1)
        with pytest.raises(NumericsError, match="seeds") as caught:
            ranks.demand_same("seeds", ranks.rank, "training.seed")
        return {**answer, "code": caught.value.code, "evidence": caught.value.evidence, "open": is_open()}


def is_open() -> bool:
    return distributed.is_initialized()


def fail(_: Path) -> None:
    """The second process fails while the first one waits for it."""
    with ProcessRanks.open_process_group("cpu") as ranks:
        ranks.wait()
        if not ranks.main:
            raise FileError("a picture is gone", code="PICTURE-GONE", subject="a.png", evidence={"bytes": 3})
        ranks.gathered("waiting")


def fall_silent(_: Path) -> None:
    """The second process is killed while the first one waits for it."""
    with ProcessRanks.open_process_group("cpu") as ranks:
        ranks.wait()
        if not ranks.main:
            os.kill(os.getpid(), signal.SIGKILL)
        ranks.shares(torch.zeros(3))


def test_two_processes_add_up_in_the_order_of_one_and_are_patient_with_words(tmp_path: Path) -> None:
    done = launched(talk, tmp_path)
    assert [one.code for one in done] == [0, 0], done
    wanted = {
        "words": [0, 1],
        "main": 0,
        "sum": in_order(2).tolist(),
        "added": [3.0],
        "inner": [0, 1],
        "code": "RANKS-DIFFER",
        "evidence": {"differing_from_the_first": [1]},
        "open": True,
    }
    assert [one.answer for one in done] == [wanted, wanted]
    assert [one.stderr for one in done] == ["", ""]


def test_a_sum_in_another_order_has_other_bits() -> None:
    """Else the test above would say nothing."""
    by_rank = [sum((vector(rank, number) for number in range(1, ROUNDS)), vector(rank, 0)) for rank in (0, 1)]
    assert not torch.equal(by_rank[0] + by_rank[1], in_order(2))


def test_an_error_in_one_process_ends_all_with_its_words(tmp_path: Path) -> None:
    begin = time.monotonic()
    done = launched(fail, tmp_path)
    assert time.monotonic() - begin < 30  # not the half hour of a collective
    assert [one.answer["error"] for one in done] == ["PICTURE-GONE", "PICTURE-GONE"]
    assert done[0].answer["evidence"] == {"process": 1, "bytes": 3}


def test_a_process_that_is_killed_is_missed(tmp_path: Path) -> None:
    done = launched(fall_silent, tmp_path)
    assert done[1].code == -signal.SIGKILL
    assert done[0].answer["error"] == "PROCESS-LOST"


@given(st.integers(1, 5), st.integers(1, 4))
@settings(max_examples=10)
def test_alone_a_sum_is_a_sum_in_a_row(length: int, rounds: int) -> None:
    vectors = [torch.randn(length) for _ in range(rounds)]
    total = OrderedSum(ProcessRanks())
    wanted = torch.zeros(length)
    for one in vectors:
        total.add(one.clone())
        wanted = wanted + one
    assert torch.equal(total.value(), wanted)


def test_alone_nothing_is_joined() -> None:
    code = (
        "import os, sys; from finitune.training.ranks import ProcessRanks\n"
        "for launcher in ({}, {'WORLD_SIZE': '1', 'RANK': '0'}):\n"
        "    os.environ.update(launcher)\n"
        "    with ProcessRanks.open_process_group('cpu') as r:\n"
        "        print(r.world, r.device, r.gathered(7), 'accelerate' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert run.stdout.splitlines() == ["1 cpu [7] False"] * 2, run.stderr


def test_two_processes_for_one_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for variables in ({"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}, {"LOCAL_RANK": "1"}):
        for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UsageError) as caught:
            module.require_gpu_per_process("cuda")
        assert caught.value.code == "GPUS-TOO-FEW" and caught.value.evidence == {"processes": 2, "gpus": 1}
        assert "gradient_accumulation_steps" in caught.value.remedy
        module.require_gpu_per_process("cpu")
