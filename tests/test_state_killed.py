"""A writer of states that is killed at any moment leaves states that are whole, and nothing that the next one keeps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = '''
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from finitune.training.manifest import TrainingManifest
from finitune.training.run_folder import clean_run_folder
from finitune.training.checkpoint import (
    RunState, find_last_state, load_run_state, save_run_state, iterate_state_folders
)

torch.set_num_threads(1)
place, way, times = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
MANIFEST = TrainingManifest("lora", {"a": (256, 256)}, "torch.AdamW")


def state(step):
    content = torch.full((256, 256), float(step))
    return RunState(step, 0, {"a": content}, {"state": {0: {"m": content}}, "param_groups": []}, rng={})


def save(step):
    save_run_state(place / f"x-step{step % 3:08d}-state", state(step), MANIFEST)


def dies_at_random(step):
    while True:
        save(step)


def dies_at_event(number):
    """Before its `number`-th change to the disk; ends well where there are fewer."""
    seen = 0

    def count(event, arguments):
        nonlocal seen
        changes = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")
        if changes or (event == "open" and str(place) in str(arguments[0])):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    save(4)
    os._exit(0)


kills, wrong = 0, []
for step in (1, 2, 3):
    save(step)
for number in range(1, times + 1):
    child = os.fork()
    if not child:
        dies_at_random(3 + number) if way == "random" else dies_at_event(number)
    if way == "random":
        time.sleep(random.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and way == "event":
        break
    kills += 1
    if number % 2:
        clean_run_folder(place)
    states = list(iterate_state_folders(place))
    try:
        for folder in states:
            loaded, _ = load_run_state(folder, MANIFEST)
            same = bool((loaded.adapter["a"] == loaded.step).all())
            if not same:
                wrong.append([number, str(folder), "content"])
    except Exception as error:
        wrong.append([number, str(folder), repr(error)])
    clean_run_folder(place)
    if len(list(iterate_state_folders(place))) != 3:
        wrong.append([number, "lost", [path.name for path in place.iterdir()]])
    found, findings = find_last_state(place)
    if found is None or findings:
        wrong.append([number, "last", str(found)])
left = sorted(path.name for path in place.iterdir() if not path.name.endswith("-state"))
print(json.dumps({"kills": kills, "wrong": wrong, "left": left, "partial": [p.name for p in place.glob(".*")]}))
'''


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
@pytest.mark.parametrize(("way", "times", "least"), [("random", 15, 15), ("event", 200, 30)])
def test_every_state_is_whole_after_a_kill(tmp_path: Path, way: str, times: int, least: int):
    """At random moments, and before every single change to the disk that a replacing save makes."""
    run = [sys.executable, "-c", PROGRAM, str(tmp_path), way, str(times)]
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["wrong"] == []
    assert result["left"] == result["partial"] == []
    assert result["kills"] >= least
