"""Full disks, kills, spoilt bytes: there is the whole model, or nothing, and the next run cleans up."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from finitune.files.writer import find_partial_files, stage_files
from finitune.merging import output
from tests.merge_made import a_base, a_lora, finding, merged, refused

__all__ = ["a_base", "a_lora"]  # fixtures


def test_too_little_space_is_told_before(base, lora, monkeypatch):
    usage = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    report = refused("DISK-FULL", base, lora)
    assert report.findings[-1].evidence["free_bytes"] == 1000


LIMITED = """
import resource, sys
from pathlib import Path
from finitune.verbs.merge import Request, run
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
report = run(Request(model=sys.argv[1], adapters=(sys.argv[2],), out=Path(sys.argv[3])))
print(report.findings[-1].code, report.exit_code)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limits on the size of files")
def test_a_full_disk_leaves_nothing(base, lora):
    before = sorted(base.parent.iterdir())
    out = base.with_name("out.safetensors")
    arguments = [sys.executable, "-c", LIMITED, str(base), str(lora), str(out)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["FILE-NOT-WRITTEN", "1"]
    assert sorted(base.parent.iterdir()) == before


SLOW = """
import sys, time
from pathlib import Path
from finitune.merging import work
from finitune.verbs.merge import Request, run
whole = work.merge_tensor_rows
def slowly(*arguments):
    sys.stdout.write("writing\\n")  # at once, for there is more than one thread
    sys.stdout.flush()
    time.sleep(60)
    return whole(*arguments)
work.merge_tensor_rows = slowly
run(Request(model=sys.argv[1], adapters=(sys.argv[2],), out=Path(sys.argv[3])))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no kill that cannot be caught")
def test_a_killed_run_leaves_no_model_and_the_next_cleans_up(base, lora):
    out = base.with_name("out.safetensors")
    arguments = [sys.executable, "-c", SLOW, str(base), str(lora), str(out)]
    running = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None and running.stdout.readline().strip() == "writing"
    assert find_partial_files(out) == [], "the file of a program that runs is no stray"
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    running.stdout.close()
    assert not out.exists() and len(find_partial_files(out)) == 1
    other = out.with_name(".partial-00000000-else.safetensors")
    other.write_bytes(b"not ours")
    report, _ = merged(base, lora)
    assert finding(report, "FILE-STRAY").evidence["size_bytes"] > 0
    assert sorted(p.name for p in base.parent.glob(".partial-*")) == [other.name]


def test_files_are_staged_together(tmp_path):
    with pytest.raises(KeyError), stage_files([tmp_path / "a" / "x.bin", tmp_path / "y.bin"]) as places:
        places[0].write_bytes(b"1")
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with stage_files([tmp_path / "a" / "x.bin", tmp_path / "y.bin"]) as places:
        for place in places:
            place.write_bytes(b"1")
        assert not (tmp_path / "y.bin").exists()
    assert (tmp_path / "a" / "x.bin").read_bytes() == b"1" and sorted(p.name for p in tmp_path.iterdir()) == [
        "a",
        "y.bin",
    ]


def test_a_wrong_byte_is_found_before_the_file_is_put_in_place(base, lora, monkeypatch):
    filled = output.run_in_copy_workers

    def then_spoil(units, *arguments):
        results = filled(units, *arguments)
        job = next(unit for unit in units if not unit.is_copy)
        with job.path.open("r+b") as file:
            file.seek(job.at)
            byte = file.read(1)
            file.seek(job.at)
            file.write(bytes([byte[0] ^ 1]))
        return results

    monkeypatch.setattr(output, "run_in_copy_workers", then_spoil)
    refused("FILE-READ-BACK", base, lora)


def test_a_source_that_changes_meanwhile_is_an_error(base, lora, monkeypatch):
    filled = output.run_in_copy_workers

    def then_touch(*arguments):
        results = filled(*arguments)
        os.utime(base, (time.time() + 5, time.time() + 5))
        return results

    monkeypatch.setattr(output, "run_in_copy_workers", then_touch)
    refused("MERGE-SOURCE-CHANGED", base, lora)
