"""The second half of the demo: learn a style in half precision, wear it, merge it, and check the file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from finitune.errors import FileError
from finitune.journeys import check, generate, merge
from finitune.journeys.train import events_of
from finitune.report import Level, Report

if TYPE_CHECKING:
    from finitune.progress import Progress
    from finitune.training.history import History

EXAMPLE = Path("examples") / "emoji_style"
PROMPT = "blue ink panda face"
STAGE = "learning a style"


@dataclass(frozen=True)
class Lesson:
    """What was learned: the history of the training, the files, and one picture without and with the adapter."""

    prompt: str
    history: History
    adapter: Path
    merged: Path
    without: Path
    worn: Path
    loads: dict[str, str]

    def figures(self) -> dict[str, object]:
        """The numbers of the training that the demo tells."""
        figures = self.history.figures()
        names = ("steps", "seconds_per_step", "non_finite_steps", "validation_loss_first", "validation_loss")
        return {f"training_{name}": figures[name] for name in names if name in figures}


def example_folder() -> Path:
    """Where the example lies: in the source tree, or in the installed package; raises FileError where in neither."""
    package = Path(__file__).parents[1]
    for folder in (package / EXAMPLE, package.parents[1] / EXAMPLE):
        if folder.is_dir():
            return folder
    raise FileError(
        "the example with the pictures is not part of this installation",
        code="EXAMPLE-MISSING",
        subject=str(EXAMPLE),
        remedy="Run the demo from a checkout of the source: make demo",
    )


def learn(out: Path, steps: int, report: Report, progress: Progress) -> Lesson:
    """Train on the example in planned half, draw with and without the adapter, merge it, check it; into `out`."""
    from finitune.config.read import read_config
    from finitune.training import events
    from finitune.training.history import History

    config = read_config(example_folder() / "train.toml").config
    config = config.model_copy(
        update={
            "saving": config.saving.model_copy(update={"output_dir": out / "training"}),
            "preview": config.preview.model_copy(update={"sample_every_n_steps": None, "sample_prompts": ()}),
            "training": config.training.model_copy(update={"max_train_steps": steps}),
        }
    )
    history, training = History(), Report("train")
    progress.start(STAGE, steps)
    for event in events_of(config, training):
        history.add(event)
        if isinstance(event, events.Stepped):
            progress.advance(STAGE)
    progress.finish(STAGE)
    adapter = Path(training.artifacts["kohya"])
    pictures = {
        name: drawn(out / f"{name}.png", worn, progress) for name, worn in (("plain", ()), ("worn", (adapter,)))
    }
    merged = merge.run(merge.Request(model="pico-anima", adapters=(str(adapter),), out=out / "merged"))
    checked = check.run(check.Request(file=adapter, model="pico-anima"))
    for told in (training, *(report for report, _ in pictures.values()), merged, checked):
        report.findings.extend(finding for finding in told.findings if finding.level is Level.ERROR)
    report.artifacts.update(adapter=str(adapter), merged=str(out / "merged"), plain=str(pictures["plain"][1]))
    report.artifacts["worn"] = str(pictures["worn"][1])
    loads = training.figures["verified"]["kohya"]["loads"]  # type: ignore[index]
    return Lesson(PROMPT, history, adapter, out / "merged", pictures["plain"][1], pictures["worn"][1], loads)


def drawn(path: Path, adapters: tuple[Path, ...], progress: Progress) -> tuple[Report, Path]:
    """The prompt as a picture, in planned half, with the adapters."""
    request = generate.Request(
        model="pico-anima", prompt=PROMPT, precision="planned-half", out=path, adapter=tuple(map(str, adapters))
    )
    report = generate.run(request, progress)
    return report, Path(report.artifacts.get("picture", path))
