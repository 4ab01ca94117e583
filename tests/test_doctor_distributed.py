"""finitune doctor --distributed: real processes that fail in the ways that matter, and what is made of each."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finitune.errors import UsageError
from finitune.machine.distributed_peer import Peer
from finitune.machine.distributed_probe import (
    DTYPE_BY_SUM_STAGE,
    PEER_STAGES,
    STARTED_STAGE,
    PeerStatus,
    ProbeResult,
    find_shared_devices,
    read_exit_codes,
)
from finitune.machine.peer_errors import explain_peer_error, read_peer_errors
from finitune.progress import SilentProgress
from finitune.report import Level, Report
from finitune.verbs.doctor.distributed import NCCL_WORKAROUNDS, find_meeting_faults, judge_meeting, run

LIMIT_S = 4.0
PATIENCE_S = 60.0  # processes import torch, on a machine that is busy with other tests
Pretended = Mapping[int, Mapping[str, str]]
SCENES: dict[str, Pretended] = {
    "passing": {},
    "killed": {1: {"fails_at": "sum-fp16", "fault": "die"}},
    "stalled": {0: {"fails_at": "sum-int32", "fault": "stall"}},
    "duplicate": {0: {"identity": "GPU-77"}, 1: {"identity": "GPU-77"}},
}


@pytest.fixture(scope="module")
def played() -> dict[str, Report]:
    """All scenes at the same time: most of it is waiting."""

    def play(pretend: Pretended) -> Report:
        # Who must come in time gets more of it here, where all come late.
        limit = LIMIT_S if pretend == SCENES["stalled"] else PATIENCE_S
        return run(2, Report("doctor"), SilentProgress(), "cpu", limit, pretend)

    with ThreadPoolExecutor() as threads:
        return dict(zip(SCENES, threads.map(play, SCENES.values()), strict=True))


# --- with real processes --------------------------------------------------------------------------------------------


def test_two_processes_pass(played: dict[str, Report]):
    report = played["passing"]
    assert report.ok and not report.findings
    assert report.figures["distributed_processes"] == 2 and report.figures["distributed_backend"] == "gloo"
    assert report.figures["all_reduce_64_mb_gb_per_s"] == report.figures["all_reduce_64_mb_bus_gb_per_s"]
    assert [row[-1] for row in report.tables[0].rows] == ["passed", "passed"]
    assert report.figures[report.tables[0].title] == report.tables[0].as_dicts()


def test_who_was_killed_is_named_and_who_noticed_is_not(played: dict[str, Report]):
    (finding,) = played["killed"].findings
    assert (finding.code, finding.subject) == ("DISTRIBUTED-PEER-DIED", "process 1")
    assert finding.evidence == {"process": 1, "exit_code": -9, "stage": "sum-int32"}
    assert "signal 9, after 'sum-int32'" in finding.message


def test_who_does_not_come_is_named_within_the_limit(played: dict[str, Report]):
    (finding,) = played["stalled"].findings
    assert (finding.code, finding.subject) == ("DISTRIBUTED-STALLED", "process 0")
    assert finding.evidence["late"] == [0] and finding.evidence["stages"] == {0: "connect", 1: "sum-int32"}
    assert "process 1 waits in 'sum-int32'" in finding.message and "4 s" in finding.message


def test_one_device_for_two_is_found_before_nccl(played: dict[str, Report]):
    report = played["duplicate"]
    (finding,) = report.findings
    assert finding.code == "DISTRIBUTED-DUPLICATE-DEVICE"
    assert finding.evidence == {"device": "GPU-77", "processes": [0, 1]}
    assert "distributed_backend" not in report.figures  # nothing was connected


def test_nobody_is_left_behind(played: dict[str, Report]):
    assert len(played) == len(SCENES)
    children = psutil.Process().children(recursive=True)
    left = [child for child in children if "finitune.machine.distributed" in " ".join(child.cmdline())]
    assert not left


def test_a_process_ends_when_whoever_started_it_has_gone():
    program = (
        "import threading, time\n"
        "from finitune.machine.distributed_probe import end_with_input\n"
        "threading.Thread(target=end_with_input, daemon=True).start()\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:
        assert process.stdout and process.stdout.readline() == "up\n" and process.poll() is None
        process.communicate(timeout=PATIENCE_S)  # closes its input, and waits
        assert process.returncode == -signal.SIGTERM


# --- what is asked --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "device", "code"), [(1, "cpu", "DISTRIBUTED-COUNT"), (2, "tpu", "DEVICE-NOT-THERE")])
def test_requests_that_cannot_be_meant_are_refused(count: int, device: str, code: str):
    with pytest.raises(UsageError) as caught:
        run(count, Report("doctor"), SilentProgress(), device)
    assert caught.value.code == code


# --- what was said --------------------------------------------------------------------------------------------------


def peer(rank: int, begun: str, **other) -> PeerStatus:
    """A process that is in stage `begun`, with all before it done."""
    stages = [STARTED_STAGE, *PEER_STAGES][: [STARTED_STAGE, *PEER_STAGES].index(begun) + 1]
    done = {stage: {"wrong": 0} if stage in DTYPE_BY_SUM_STAGE else {} for stage in stages[1:-1]}
    return PeerStatus(rank, stages, {**done, **other.pop("done", {})}, **other)


def passed(rank: int, **done) -> PeerStatus:
    told = {"devices": {"devices": [["GPU-0", "Card"], ["GPU-1", "Card"]]}, "speed": {"seconds": 0.01}}
    return peer(rank, "barrier", done={**told, "barrier": {}, **done}, ended=0)


def meeting(*found: PeerStatus) -> ProbeResult:
    return ProbeResult(found, 1.0, 30.0)


def codes(*found: PeerStatus) -> list[str]:
    return [one.code for one in find_meeting_faults(meeting(*found))]


def test_what_a_process_writes_is_read_up_to_the_last_whole_line(tmp_path: Path):
    assert PeerStatus.read(0, tmp_path).height == -1
    lines = ['{"stage": "started"}', '{"stage": "meet"}', '{"done": "meet", "wrong": 0}', '{"stage": "dev']
    (tmp_path / "0.jsonl").write_text("\n".join(lines))
    heard = PeerStatus.read(0, tmp_path)
    assert heard.begun == [STARTED_STAGE, "meet"] and heard.done == {"meet": {"wrong": 0}} and heard.height == 1
    (tmp_path / "1.jsonl").write_text('{"stage": "meet"}\n{"failed": "meet", "error": "OSError: no"}\n')
    assert (PeerStatus.read(1, tmp_path).failed, PeerStatus.read(1, tmp_path).error) == ("meet", "OSError: no")


def test_a_launcher_that_fails_itself_has_failed_for_all(tmp_path: Path):
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as launcher:
        launcher.wait()
        assert read_exit_codes(launcher, tmp_path, 2) == {0: 3, 1: 3}
        (tmp_path / "ended.json").write_text('{"1": -9}')
        assert read_exit_codes(launcher, tmp_path, 2) == {1: -9}


def test_nothing_that_gets_through_is_the_connection_and_nobody_s_fault():
    (finding,) = find_meeting_faults(meeting(peer(0, "sum-int32"), peer(1, "sum-int32")))
    assert finding.code == "DISTRIBUTED-STALLED" and finding.subject == "all processes"
    assert "nothing gets through for 30 s" in finding.message


def test_who_has_not_started_is_named():
    (finding,) = find_meeting_faults(meeting(PeerStatus(0), peer(1, "meet")))
    assert finding.subject == "process 0" and "has not started" in finding.message


def test_an_error_is_explained():
    error = "DistBackendError: NCCL error in: x.cpp:1, unhandled system error (run with NCCL_DEBUG=INFO), NCCL 2.30.7"
    (finding,) = find_meeting_faults(
        meeting(peer(0, "sum-int32", failed="sum-int32", error=error, ended=1), peer(1, "sum-int32"))
    )
    assert finding.code == "DISTRIBUTED-FAILED" and finding.subject == "process 0"
    assert "ncclSystemError" in finding.remedy and "/dev/shm" in finding.remedy


def test_the_last_words_of_who_is_gone_are_told():
    gone = PeerStatus(1, talk=["Traceback", "ImportError: libnccl.so.2: cannot open shared object file"], ended=1)
    (finding,) = find_meeting_faults(meeting(peer(0, "meet"), gone))
    assert finding.code == "DISTRIBUTED-PEER-DIED" and "libnccl.so.2" in finding.message
    assert "before it had started" in finding.message


def test_a_wrong_sum_is_told_with_its_numbers():
    wrong = passed(1, **{"sum-bf16": {"wrong": 7, "got": 2.0, "expected": 3.0}})
    (finding,) = find_meeting_faults(meeting(passed(0), wrong))
    assert finding.code == "DISTRIBUTED-WRONG-RESULT" and finding.subject == "process 1"
    assert "a sum in bfloat16" in finding.message and "2 for 3" in finding.message
    assert codes(passed(0), passed(1, broadcast={"wrong": 1})) == ["DISTRIBUTED-WRONG-RESULT"]
    assert codes(passed(0), passed(1)) == []


# --- what mends it --------------------------------------------------------------------------------------------------

GOOD = meeting(passed(0), passed(1))
STALLED = meeting(peer(0, "sum-int32"), peer(1, "sum-int32"))


def retried(first: ProbeResult, works_with: Mapping[str, str] | None, retry: bool = True) -> tuple[Report, list]:
    tried = []

    def held(variables: Mapping[str, str]) -> ProbeResult:
        tried.append(dict(variables))
        return first if not variables or variables != works_with else GOOD

    return judge_meeting(held, Report("doctor"), retry=retry), tried


@pytest.mark.parametrize(
    ("mends", "cause"), [(NCCL_WORKAROUNDS[0], "direct access"), (NCCL_WORKAROUNDS[1], "shared memory")]
)
def test_the_variable_that_mends_a_stall_is_named(mends: Mapping[str, str], cause: str):
    report, tried = retried(STALLED, mends)
    assert [one.code for one in report.findings] == ["DISTRIBUTED-STALLED", "DISTRIBUTED-MENDED"]
    assert report.figures["mended_by"] == " ".join(f"{name}=1" for name in mends)
    assert cause in report.findings[-1].message and tried == [
        {},
        *NCCL_WORKAROUNDS[: NCCL_WORKAROUNDS.index(mends) + 1],
    ]
    assert not report.ok  # as it is set up now, training would hang


def test_where_neither_variable_helps_that_is_said():
    report, tried = retried(STALLED, None)
    assert report.findings[-1].code == "DISTRIBUTED-NOT-MENDED" and tried == [{}, *NCCL_WORKAROUNDS]


@pytest.mark.parametrize(
    ("first", "retry"),
    [
        (STALLED, False),  # gloo
        (GOOD, True),
        (meeting(peer(0, "meet"), PeerStatus(1)), True),  # not NCCL's fault
        (meeting(peer(0, "devices"), peer(1, "meet")), True),
    ],
)
def test_nothing_is_tried_again_where_nccl_was_not_at_fault(first: ProbeResult, retry: bool):
    _, tried = retried(first, None, retry)
    assert tried == [{}]


# --- the arithmetic of the checks -----------------------------------------------------------------------------------


@given(world=st.integers(2, 128))
@settings(max_examples=20)
def test_every_partial_sum_is_exact_in_every_dtype(world: int):
    """Whole numbers up to 256 are exact in bf16, in whatever order they are added."""
    largest = (world - 1) + world
    assert largest <= 256
    sums = [sum(rank + 1 if place == rank else 1 for rank in range(world)) for place in range(world)]
    assert sums == [place + world for place in range(world)]


def test_a_device_that_is_shared_is_found():
    assert find_shared_devices([["a", "x"], ["b", "x"], ["a", "x"]]) == {"a": [0, 2]}
    assert find_shared_devices([["a", "x"], ["b", "x"]]) == {}
    assert Peer(3, 4, torch.device("cpu"), timedelta(seconds=1)).get_identity() == "process 3"


# --- NCCL's words ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("ncclUnhandledCudaError: Call to CUDA function failed.", "ncclUnhandledCudaError"),
        ("RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:32, unhandled cuda error, NCCL version 2.4.8",
         "ncclUnhandledCudaError"),
        ("NCCL Error 2: unhandled system error (run with NCCL_DEBUG=INFO for details)", "ncclSystemError"),
        ("ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nDuplicate GPU detected : "
         "rank 1 and rank 0 both on CUDA device 100", "Duplicate GPU"),
        ("ncclRemoteError: A call failed possibly due to a network error", "ncclRemoteError"),
        ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE, NumelIn=1, "
         "Timeout(ms)=600000)", "first collective timed out"),
        ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=17, OpType=ALLREDUCE, NumelIn=1, "
         "Timeout(ms)=1800000)", "collective timed out"),
        ("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1",
         "connection closed"),
        ("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation", "timed out"),
        ("internal error", None),  # of anything
        ("", None),
    ],
)  # fmt: skip
def test_error_texts_are_known(text: str, name: str | None):
    explanation = explain_peer_error(text)
    assert (explanation and explanation.name) == name


def test_each_result_code_has_a_sentence_and_a_cause():
    results = read_peer_errors("nccl")
    assert len(results) == 8 and len({result.name for result in results}) == 8
    for result in results:
        assert result.name.startswith("nccl") and result.phrase
        assert result.sentence.endswith(".") and result.cause.endswith(".")
        explanation = explain_peer_error(f"{result.name}: something")
        assert (explanation and explanation.name) == result.name


def test_a_meeting_passes_only_when_all_have():
    assert GOOD.passed and not STALLED.passed
    assert not replace(GOOD, peers=(passed(0), peer(1, "barrier"))).passed
    assert find_meeting_faults(GOOD) == [] and find_meeting_faults(STALLED)[0].level is Level.ERROR
