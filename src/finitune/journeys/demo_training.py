"""The second half of the demo: learn a style in half precision, wear it, merge it, and check the file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from finitune.errors import FileError
from finitune.journeys import check, merge
from finitune.journeys.adapters import NamedAdapter, put_on
from finitune.journeys.model import ModelChoice, load_model
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
    without, worn = drawn(out, adapter, report, progress)
    merged = merge.run(merge.Request(model="pico-anima", adapters=(str(adapter),), out=out / "merged"))
    checked = check.run(check.Request(paths=(adapter,), model="pico-anima"))
    for told in (training, merged, checked):
        report.findings.extend(finding for finding in told.findings if finding.level is Level.ERROR)
    report.artifacts.update(adapter=str(adapter), merged=str(out / "merged"), plain=str(without), worn=str(worn))
    loads = training.figures["verified"]["kohya"]["loads"]  # type: ignore[index]
    return Lesson(PROMPT, history, adapter, out / "merged", without, worn, loads)


def drawn(out: Path, adapter: Path, report: Report, progress: Progress) -> tuple[Path, Path]:
    """The prompt as two pictures, without the adapter file and with it on; in current half, which needs no plan."""
    from finitune.files.writer import write_bytes
    from finitune.generation.draw import draw
    from finitune.generation.picture import png_bytes
    from finitune.generation.precisions import in_precision
    from finitune.generation.settings import Settings

    parts = load_model(ModelChoice(model="pico-anima"))
    paths = out / "plain.png", out / "worn.png"
    for path in paths:
        if path == paths[1]:
            put_on(parts, [NamedAdapter(adapter)], merge_first=False, report=Report("generate"))
        with in_precision(parts, "current-half") as running:
            drawing = draw(running, [Settings(prompt=PROMPT)], progress)
        write_bytes(path, png_bytes(drawing.pixels[0]))
    return paths
