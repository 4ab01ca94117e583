"""Several processes, from the field (DDP-01): the repro of each report, and what is right."""

from __future__ import annotations

import pytest

from finitune.machine.peer_errors import explain_peer_error
from finitune.progress import SilentProgress
from finitune.report import Level, Report
from finitune.verbs.doctor.distributed import DEFAULT_NCCL_TIMEOUT_S, check_caching_timeout, run

# --- DDP-01: the watchdog ends a run while one process encodes all pictures ------------------------------------------


def test_ddp_01_caching_that_outlasts_the_timeout_is_told_beforehand():
    finding = check_caching_timeout(1818, 1.13)
    assert finding is not None and finding.level is Level.WARNING
    assert finding.code == "DISTRIBUTED-CACHING-OUTLASTS"
    assert finding.evidence == {"pictures": 1818, "seconds": 2054.3, "timeout_s": 1800.0}
    assert "34 minutes" in finding.message and "after 30" in finding.message


def test_ddp_01_caching_that_fits_is_no_matter():
    assert check_caching_timeout(500, 1.0) is None
    assert check_caching_timeout(1800, 1.0) is None  # they meet just in time
    assert check_caching_timeout(0, 100.0) is None


@pytest.mark.parametrize("timeout_s", [600.0, DEFAULT_NCCL_TIMEOUT_S, 7200.0])
def test_ddp_01_the_limit_is_the_one_that_was_set(timeout_s: float):
    assert (check_caching_timeout(1818, 1.13, timeout_s) is None) == (timeout_s >= 1818 * 1.13)


def test_ddp_01_who_is_late_at_the_barrier_is_named_when_the_limit_is_up():
    report = run(2, Report("doctor"), SilentProgress(), "cpu", 3.0, {0: {"fails_at": "barrier", "fault": "stall"}})
    (finding,) = report.findings
    assert finding.code == "DISTRIBUTED-STALLED" and finding.evidence["late"] == [0]
    assert finding.evidence["stages"] == {0: "speed", 1: "barrier"}
    assert not report.ok


def test_ddp_01_the_words_that_such_a_run_ends_with_are_explained():
    text = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=42, OpType=ALLREDUCE, Timeout(ms)=1800000)"
    explanation = explain_peer_error(text)
    assert explanation is not None and "encoding pictures" in explanation.cause
