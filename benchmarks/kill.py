"""Can a training be killed at any moment, and go on to the same bits?

A run of pico-anima that saves often is killed (kill -9) at a random moment of its life, from the first look at its
pictures to its last file; whatever it left is read and verified; another process goes on from there, and is killed in
turn. A run that has come to its end is compared with one that nobody disturbed, and the next begins anew. In the end
the last one is let go on undisturbed, and compared, too.

Run: python benchmarks/kill.py [--kills 25 --steps 20 --seed 0 --json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from finitune.config.read import validate_config
from finitune.config.schema import TrainConfig
from finitune.files.tensorfile import TensorFile
from finitune.merging.adapterfile import open_adapter
from finitune.merging.pairing import TargetModel
from finitune.models.anima import ANIMA
from finitune.models.anima.load import load_folder
from finitune.models.pico import get_pico_folder
from finitune.report import Report
from finitune.training.checkpoint import STATE_TENSORS_NAME, find_last_state, iterate_state_folders, load_run_state
from finitune.training.events import CheckpointSaved
from finitune.verbs.train import Request, iter_train_events

PICTURES = Path(__file__).parents[1] / "examples" / "emoji_style" / "pictures"
NAME = "killed"
SHOWN = 8
"""Pictures to learn from."""


def configured(pictures: Path, out: Path, steps: int) -> TrainConfig:
    """A short run that saves after every other step, with its caches in its own folder."""
    document = {
        "model": {"pretrained_model_name_or_path": "pico-anima", "device": "cpu", "precision": "fp32"},
        "network": {"network_dim": 4, "network_dropout": 0.1},
        "optimizer": {"learning_rate": 5e-3, "lr_scheduler": "cosine", "ema_decay": 0.8},
        "training": {"max_train_steps": steps, "train_batch_size": 2, "seed": 1},
        "saving": {"output_dir": out, "output_name": NAME, "save_every_n_steps": 2, "save_last_n": 3},
        "logging": {"report": False},
        "general": {"resolution": 64, "min_bucket_reso": 64, "caption_dropout_rate": 0.2},
        "datasets": [{"subsets": [{"image_dir": pictures, "flip_aug": True}]}],
    }
    return validate_config(document)[0]


@dataclass
class Life:
    """A process that trains, from its start; `saved` is the last step whose files it has called saved."""

    process: int
    told: int
    begun: float = field(default_factory=time.monotonic)
    saved: int = 0

    @classmethod
    def begin(cls, config: TrainConfig) -> Life:
        """Start training in a process of its own, from the last state if there is one."""
        told, tell = os.pipe()
        process = os.fork()
        if process:
            os.close(tell)
            return cls(process, told)
        code = 1
        try:
            report = Report("train")
            resumed = config.model_copy(update={"saving": config.saving.model_copy(update={"resume": "auto"})})
            for event in iter_train_events(resumed, report, request=Request()):
                if isinstance(event, CheckpointSaved):
                    os.write(tell, event.step.to_bytes(4, "big"))
            code = report.exit_code
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def last(self, seconds: float | None = None) -> bool:
        """Wait for its end, or kill it after so many seconds; whether it came to its end by itself."""
        ended = self.receive_line(None if seconds is None else self.begun + seconds)
        if not ended:
            os.kill(self.process, signal.SIGKILL)
            self.receive_line(None)
        os.close(self.told)
        _, status = os.waitpid(self.process, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status):
            raise SystemExit(f"the training failed by itself with code {os.WEXITSTATUS(status)}")
        return os.WIFEXITED(status)

    def receive_line(self, until: float | None) -> bool:
        """Listen for what is saved; whether the process has ended before `until`."""
        while True:
            left = None if until is None else max(until - time.monotonic(), 0)
            if not select.select([self.told], [], [], left)[0]:
                return False
            message = os.read(self.told, 4)
            if not message:
                return True
            self.saved = int.from_bytes(message, "big")


def faults_of(out: Path, saved: int, model: TargetModel) -> list[str]:
    """What is wrong with the files of a killed run, the last of which were called saved at a step."""
    faults: list[str] = []
    found, findings = find_last_state(out, NAME)
    faults += [f"{finding.code}: {finding.message}" for finding in findings]
    step = load_run_state(found)[0].step if found else 0
    if step < saved:
        faults.append(f"step {saved} was called saved, the last state is of step {step}")
    checks: dict[Path, Callable[[Path], object]] = dict.fromkeys(iterate_state_folders(out), load_run_state)
    checks |= dict.fromkeys(adapters_in(out), lambda path: open_adapter(path, Report("check"), model))
    for path, check in checks.items():
        try:
            check(path)
        except Exception as error:
            faults.append(f"{path.name}: {type(error).__name__}: {error}")
    return faults


def adapters_in(out: Path) -> list[Path]:
    """The adapter files of a run."""
    return [path for path in out.glob(f"{NAME}*.safetensors") if path.is_file()]


def differences(one: Path, other: Path) -> list[str]:
    """The tensors in which the ends of two runs are not the same bits: of their adapters and their states."""
    found: list[str] = []
    for name in (f"{NAME}.safetensors", f"{NAME}-state/{STATE_TENSORS_NAME}"):
        left, right = (dict(TensorFile(place / name).tensors()) for place in (one, other))
        same = {key for key in left if key in right and torch.equal(left[key], right[key])}
        found += [f"{name}: {key}" for key in {*left, *right} - same]
    return found


def killed(kills: int, steps: int, seed: int, place: Path, say: Callable[[str], None] = print) -> dict[str, object]:
    """Kill a run so many times; what was wrong with its files, and with its ends."""
    chance, model = random.Random(seed), TargetModel.loaded(ANIMA, load_folder(get_pico_folder()))
    pictures = place / "pictures"
    pictures.mkdir(parents=True)
    for path in sorted(PICTURES.iterdir())[: 2 * SHOWN]:
        shutil.copy(path, pictures)
    undisturbed, out = place / "undisturbed", place / "killed"
    begin = time.monotonic()
    Life.begin(configured(pictures, undisturbed, steps)).last()
    span = time.monotonic() - begin
    say(f"an undisturbed run of {steps} steps: {span:.1f} s")
    good, ends, done, wrong = 0, 0, 0, []
    saved = 0
    while done < kills:
        life = Life.begin(configured(pictures, out, steps))
        moment = chance.uniform(0, span)
        if life.last(moment):
            wrong += differences(undisturbed, out)
            ends, saved = ends + 1, 0
            shutil.rmtree(out)
            continue
        done, saved = done + 1, max(saved, life.saved)
        faults = faults_of(out, saved, model)
        good += not faults
        wrong += [f"kill {done} at {moment:.2f} s: {fault}" for fault in faults]
        say(f"kill {done} at {moment:.2f} s, step {saved} saved: {'; '.join(faults) or 'all files are good'}")
    Life.begin(configured(pictures, out, steps)).last()
    wrong += differences(undisturbed, out)
    return {"kills": kills, "good": good, "ends_compared": ends + 1, "steps": steps, "wrong": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        found = killed(options.kills, options.steps, options.seed, Path(place))
    for fault in found["wrong"]:  # type: ignore[attr-defined]
        print(fault)
    print(f"{found['good']} of {found['kills']}; {found['ends_compared']} ends compared bit for bit")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    raise SystemExit(bool(found["wrong"]))


if __name__ == "__main__":
    main()
