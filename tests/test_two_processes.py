"""Two processes train what one trains: the same bits, no picture twice, one decision, one end."""

from __future__ import annotations

import copy
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from finitune.config.read import dump_config
from finitune.datasets.items import TrainingBatch
from finitune.datasets.loader import BatchLoader
from finitune.errors import FileError, FinituneError
from finitune.files.tensorfile import TensorFile
from finitune.numerics.compare import ulp_distance
from finitune.training import events
from finitune.training.loop import Trainer
from finitune.training.ranks import ProcessRanks
from finitune.verbs import verify_resume
from finitune.verbs.train import prepare
from finitune.verbs.verify_resume import compare_states
from tests.together import Done, environment, free_port, launched
from tests.training_made import Outcome, Playground, a_model_that_is_read_once, pico, put_pictures

__all__ = ["a_model_that_is_read_once"]

STEPS, PLANTED = 4, 2
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "lora": (1, {"optimizer": {"learning_rate": 5e-3, "ema_decay": 0.9}}),
    "lokr": (
        2,
        {
            "model": {"precision": "planned-half"},
            "network": {"algorithm": "lokr", "network_dropout": 0.2, "module_dropout": 0.2, "factor": 4},
        },
    ),
}
"""By name: micro-batches of a process in a step, where there are two processes, and the configuration."""


def trained(playground: Playground, name: str, run: str, world: int, stop: Callable[[], bool] = bool) -> Outcome:
    """One of KINDS, its global batch the same whatever the number of processes; 3 micro-batches make an epoch."""
    accumulation, sections = KINDS[name]
    own = {"max_train_steps": STEPS, "train_batch_size": 2, "seed": 1, "cache_dir": str(playground.cache)}
    return playground.train(
        stop,
        **sections,
        training={**own, "gradient_accumulation_steps": accumulation * 2 // world},
        saving={"output_dir": str(playground.folder / run), "save_every_n_steps": 1},
    )


class Watch:
    """What a process does in each step, and where the second one is led astray."""

    def __init__(self) -> None:
        self.names: list[tuple[str, ...]] = []
        self.made: list[int] = []
        self.harm: Callable[[Trainer], None] | None = None

    def put_on(self) -> None:
        gradient, prepare = Trainer.gradient, BatchLoader.prepare

        def watched(trainer: Trainer, step: int) -> Any:
            load = trainer.run.load
            if self.harm and step == PLANTED and trainer.run.ranks.rank == 1:
                self.harm(trainer)
            found = gradient(trainer, step)
            trainer.run.load = load
            self.names.append(found.names)
            return found

        def counted(*arguments: Any) -> Any:
            made = prepare(*arguments)
            self.made.append(int(str(made.figures["latents_made"])))
            return made

        Trainer.gradient, BatchLoader.prepare = watched, counted  # type: ignore[method-assign]


def poison(trainer: Trainer) -> None:
    """The first picture that this process loads has become NaN."""
    load = trainer.run.load

    def poisoned(*arguments: Any) -> TrainingBatch | None:
        batch = load(*arguments)
        assert batch is not None
        batch.latents[0].fill_(float("nan"))
        return batch

    trainer.run.load = poisoned  # type: ignore[assignment]


def drift(trainer: Trainer) -> None:
    """A number of the adapter changes in this process alone."""
    with torch.no_grad():
        next(iter(trainer.named.values())).view(-1)[0].add_(1e-6)


def lose(trainer: Trainer) -> None:
    """A picture can no longer be read in this process."""

    def lost(*_: Any) -> TrainingBatch | None:
        raise FileError("a picture is gone", code="PICTURE-GONE", subject="a.png")

    trainer.run.load = lost  # type: ignore[assignment]


def told(outcome: Outcome) -> dict[str, Any]:
    """What a process knows of a training, as JSON."""
    return {
        "codes": [finding.code for finding in outcome.report.findings if finding.level.value != "note"],
        "steps": [[one.step, one.loss, one.taken] for one in outcome.of(events.StepTaken)],
        "made": outcome.report.figures["latents_made"],
        "reason": outcome.reason if outcome.of(events.TrainingFinished) else "",
    }


def compare_late(first: Path, second: Path) -> verify_resume.StateDifference:
    """As a busy machine does: the first process is through, and has to leave both runs where they are."""
    time.sleep(2)
    return compare_states(first, second)


def train_together(place: Path) -> dict[str, Any]:
    """All that the second process has to take part in; the last training fails in it."""
    prepare.load_model = lambda _: copy.deepcopy(pico())
    playground, watch, answer = Playground(place, place / "cache"), Watch(), dict[str, Any]()
    watch.put_on()
    try:
        with ProcessRanks.open_process_group("cpu") as ranks:
            for name in KINDS:
                watch.names.clear()
                answer[name] = told(trained(playground, name, f"{name}-2", 2)) | {"names": list(watch.names)}
            answer["own"] = sum(watch.made[:2])  # of those to learn from, and those kept out
            for name, harm in (("poison", poison), ("drift", drift)):
                watch.harm = harm
                answer[name] = told(trained(playground, "lora", name, 2))
            watch.harm, begun = None, len(watch.names)
            stop = lambda: ranks.rank == 1 and len(watch.names) - begun == PLANTED  # noqa: E731
            answer["stop"] = told(trained(playground, "lora", "stop", 2, stop))
            if ranks.rank == 1:
                verify_resume.compare_states = compare_late
            proof = verify_resume.run(verify_resume.Request(config=place / "verify.toml", steps=4))
            answer["verify"] = {**proof.figures, "codes": [finding.code for finding in proof.findings]}
            watch.harm = lose
            for _ in trainer_events(playground):
                pass
    except prepare.TrainingStopped as stopped:
        assert isinstance(stopped.__cause__, FinituneError)
        answer["end"] = [stopped.__cause__.code, stopped.__cause__.evidence]
    return answer


def trainer_events(playground: Playground) -> Iterator[events.TrainingEvent]:
    """A training whose errors come out."""
    from finitune.report import Report
    from finitune.verbs.train import iter_train_events

    return iter_train_events(playground.config(saving={"output_dir": str(playground.folder / "lost")}), Report("train"))


@pytest.fixture(name="one_thread", scope="module")
def the_same_sums_in_every_process() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(name="done", scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Done]]:
    place = tmp_path_factory.mktemp("two")
    put_pictures(place / "pictures")
    playground = Playground(place, place / "cache")
    (place / "verify.toml").write_text(dump_config(playground.config(training={"gradient_accumulation_steps": 2})))
    done = launched(train_together, place)
    assert [one.code for one in done] == [0, 0], done
    return place, done


@pytest.mark.usefixtures("one_thread", "quick_model")
@pytest.mark.parametrize("name", KINDS)
def test_two_processes_give_the_adapter_of_one(name: str, done: tuple[Path, list[Done]], tmp_path: Path) -> None:
    """Bit for bit, after one step and after several, the last of an epoch short: sums have one order."""
    place, processes = done
    alone = trained(Playground(place, tmp_path), name, f"{name}-1", 1)
    assert [one.loss for one in alone.of(events.StepTaken)] == [
        loss for _, loss, _ in processes[0].answer[name]["steps"]
    ]
    for file in ("made-step00000001.safetensors", "made.safetensors"):
        one, two = (TensorFile(place / f"{name}-{world}" / file) for world in (1, 2))
        assert set(one) == set(two)
        assert max(int(ulp_distance(one.read(key), two.read(key), torch.float32).max()) for key in one) == 0


def test_each_picture_is_shown_once_an_epoch_and_encoded_once(done: tuple[Path, list[Done]]) -> None:
    first, second = (one.answer["lora"] for one in done[1])
    for epoch in ((0, 1), (2, 3)):
        shown = [name for step in epoch for names in (first["names"][step], second["names"][step]) for name in names]
        assert len(shown) == len(set(shown)) == 6
    assert second["names"][1] == []  # an epoch of 3 micro-batches
    own = [one.answer["own"] for one in done[1]]
    assert first["made"] == second["made"] == sum(own) == 8 and min(own) > 0
    assert len(list((done[0] / "cache" / "latents").iterdir())) == 8


def test_what_is_not_finite_in_one_process_is_skipped_in_all(done: tuple[Path, list[Done]]) -> None:
    first, second = (one.answer["poison"] for one in done[1])
    assert [taken for _, _, taken in first["steps"]] == [step != PLANTED for step in range(STEPS)]
    assert first["codes"] == second["codes"] and "GUARD-QUARANTINED" in first["codes"]
    assert str(first["steps"]) == str(second["steps"])
    assert first["reason"] == "done"  # and so they agreed on the adapter when it was saved


def test_a_process_that_goes_its_own_way_is_found_before_a_file_is_written(done: tuple[Path, list[Done]]) -> None:
    place, processes = done
    for one in processes:
        assert one.answer["drift"]["codes"][-1] == "RANKS-DIFFER"
    assert [path.name for path in sorted((place / "drift").glob("*.safetensors"))] == [
        f"made-step{step:08d}.safetensors" for step in range(1, PLANTED + 1)
    ]


def test_who_is_asked_to_stop_stops_all_after_the_same_step(done: tuple[Path, list[Done]]) -> None:
    place, processes = done
    for one in processes:
        assert one.answer["stop"]["reason"] == "stopped"
        assert [step for step, _, _ in one.answer["stop"]["steps"]] == list(range(1, PLANTED + 1))
    assert (place / "stop" / f"made-step{PLANTED:08d}-state").is_dir()


def test_two_processes_resume_to_the_same_bits(done: tuple[Path, list[Done]]) -> None:
    for one in done[1]:
        assert one.answer["verify"]["codes"] == []
        assert (one.answer["verify"]["max_difference"], one.answer["verify"]["resumed_at"]) == (0, 2)


def test_an_error_in_one_process_ends_all(done: tuple[Path, list[Done]]) -> None:
    assert [one.answer["end"][0] for one in done[1]] == ["PICTURE-GONE", "PICTURE-GONE"]
    assert done[1][0].answer["end"][1] == {"process": 1}
    assert not [one.stderr for one in done[1] if one.stderr]


def test_torchrun_prints_one_report_and_ctrl_c_on_one_process_saves(tmp_path: Path) -> None:
    playground = Playground(tmp_path, tmp_path / "cache")
    put_pictures(playground.pictures)
    config = tmp_path / "train.toml"
    config.write_text(dump_config(playground.config(training={"max_train_steps": 100_000, "train_batch_size": 1})))
    launcher = ["torch.distributed.run", "--nproc_per_node", "2", "--master-port", str(free_port())]
    command = [sys.executable, "-m", *launcher, "-m", "finitune", "train", str(config), "--json"]
    with (tmp_path / "err").open("w") as err:
        run = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=err, text=True)
    try:
        wait_until(lambda: "a step" in (tmp_path / "err").read_text())
        interrupt(run.pid, rank=1)
        out, _ = run.communicate(timeout=300)
    finally:
        run.kill()
    report = json.loads(out)
    assert run.returncode == 0 and report["ok"] and report["figures"]["ended"] == "stopped"
    assert report["figures"]["effective_batch"] == 2
    assert all(Path(path).exists() for name, path in report["artifacts"].items() if name in ("kohya", "state"))


def wait_until(so: Callable[[], bool], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < end
        time.sleep(0.1)


def interrupt(launcher: int, rank: int) -> None:
    """Press Ctrl-C in one of a launcher's processes."""
    for process in psutil.Process(launcher).children():
        if process.environ().get("RANK") == str(rank):
            process.send_signal(signal.SIGINT)
