"""The second half of the demo: learn a style in half precision, wear it, merge it, and check the file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from finitune.errors import FileError
from finitune.report import Level, Report
from finitune.verbs import check, merge
from finitune.verbs.shared.adapters import NamedAdapter, apply_named_adapters
from finitune.verbs.shared.model import load_model
from finitune.verbs.shared.options import ModelChoice
from finitune.verbs.train import iter_train_events

if TYPE_CHECKING:
    from finitune.progress import Progress
    from finitune.training.history import TrainingHistory

_EXAMPLE_FOLDER = Path("examples") / "emoji_style"
_DEMO_PROMPT = "blue ink panda face"
_PROGRESS_STAGE = "learning a style"


@dataclass(frozen=True)
class DemoTraining:
    """What was learned: the history of the training, the files, and one picture without and with the adapter."""

    prompt: str
    history: TrainingHistory
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


def find_example_folder() -> Path:
    """Where the example lies: in the source tree, or in the installed package; raises FileError where in neither."""
    package = Path(__file__).parents[1]
    for folder in (package / _EXAMPLE_FOLDER, package.parents[1] / _EXAMPLE_FOLDER):
        if folder.is_dir():
            return folder
    raise FileError(
        "the example with the pictures is not part of this installation",
        code="EXAMPLE-MISSING",
        subject=str(_EXAMPLE_FOLDER),
        remedy="Run the demo from a checkout of the source: make demo",
    )


def train_demo_style(out: Path, steps: int, report: Report, progress: Progress) -> DemoTraining:
    """Train on the example in planned half, draw with and without the adapter, merge it, check it; into `out`."""
    from finitune.config.read import read_train_config
    from finitune.training import events
    from finitune.training.history import TrainingHistory

    config = read_train_config(find_example_folder() / "train.toml").config
    config = config.model_copy(
        update={
            "saving": config.saving.model_copy(update={"output_dir": out / "training"}),
            "preview": config.preview.model_copy(update={"sample_every_n_steps": None, "sample_prompts": ()}),
            "training": config.training.model_copy(update={"max_train_steps": steps}),
        }
    )
    history, training = TrainingHistory(), Report("train")
    progress.start(_PROGRESS_STAGE, steps)
    for event in iter_train_events(config, training):
        history.add(event)
        if isinstance(event, events.StepTaken):
            progress.advance(_PROGRESS_STAGE)
    progress.finish(_PROGRESS_STAGE)
    adapter = Path(training.artifacts["kohya"])
    without, worn = draw_adapter_comparison(out, adapter, report, progress)
    merged = merge.run(merge.Request(model="pico-anima", adapters=(str(adapter),), out=out / "merged"))
    checked = check.run(check.Request(paths=(adapter,), model="pico-anima"))
    for told in (training, merged, checked):
        report.findings.extend(finding for finding in told.findings if finding.level is Level.ERROR)
    report.artifacts.update(adapter=str(adapter), merged=str(out / "merged"), plain=str(without), worn=str(worn))
    loads = training.figures["verified"]["kohya"]["loads"]  # type: ignore[index]
    return DemoTraining(_DEMO_PROMPT, history, adapter, out / "merged", without, worn, loads)


def draw_adapter_comparison(out: Path, adapter: Path, report: Report, progress: Progress) -> tuple[Path, Path]:
    """The prompt as two pictures, without the adapter file and with it on; in current half, which needs no plan."""
    from finitune.files.writer import write_bytes
    from finitune.generation.draw import draw_picture_batch
    from finitune.generation.picture import encode_png
    from finitune.generation.precisions import open_in_precision
    from finitune.generation.settings import PictureSettings

    parts = load_model(ModelChoice(model="pico-anima"))
    paths = out / "plain.png", out / "worn.png"
    for path in paths:
        if path == paths[1]:
            apply_named_adapters(parts, [NamedAdapter(adapter)], merge_first=False, report=Report("generate"))
        with open_in_precision(parts, "current-half") as running:
            drawing = draw_picture_batch(running, [PictureSettings(prompt=_DEMO_PROMPT)], progress)
        write_bytes(path, encode_png(drawing.pixels[0]))
    return paths
