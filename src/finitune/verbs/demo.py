"""finitune demo: the whole story on the shipped model, as a page to look at.

Plain fp16 makes a black picture; the operation that overflowed is named; a plan is made and proved; the same prompt is
drawn by the plan, in fp32 and in bf16. Then a style is learned in planned half, worn, merged, and its file checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from finitune.config.read import read_train_config
from finitune.errors import FileError
from finitune.files.writer import write_bytes, write_text
from finitune.generation.draw import DrawnPictures, draw_picture_batch
from finitune.generation.picture import encode_png
from finitune.generation.precisions import open_in_precision
from finitune.generation.settings import PictureSettings
from finitune.models.loaded import LoadedModel
from finitune.precision.probe import probe
from finitune.progress import Progress, SilentProgress
from finitune.report import Finding, Level, Report
from finitune.training import events
from finitune.training.history import TrainingHistory
from finitune.verbs import check, diagnose, merge, plan
from finitune.verbs.generate import build_picture_settings
from finitune.verbs.shared.adapters import NamedAdapter, apply_named_adapters
from finitune.verbs.shared.model import load_model, write_plan
from finitune.verbs.shared.options import ModelChoice
from finitune.verbs.train import iter_train_events

_EXAMPLE_FOLDER = Path("examples") / "emoji_style"
_BLOCK_PATTERN = re.compile(r"patch_embed|norm_out|proj_out|transformer_blocks\.\d+")
_DEMO_PROMPT = "blue ink panda face"
_PROGRESS_STAGE = "learning a style"


@dataclass(frozen=True, kw_only=True)
class Request:
    """Where the page, the plan and the pictures go."""

    out: Annotated[Path, Parameter(alias="-o")] = Path("finitune-out/demo")
    """The folder to write to."""
    steps: int = 28
    """Number of denoising steps of each picture."""
    train_steps: Annotated[int, Parameter(parse=False)] = 300


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
        figures = self.history.figures()
        names = ("steps", "seconds_per_step", "non_finite_steps", "validation_loss_first", "validation_loss")
        return {f"training_{name}": figures[name] for name in names if name in figures}


@dataclass(frozen=True)
class DemoResults:
    """Everything the page shows."""

    settings: PictureSettings
    drawings: dict[str, DrawnPictures]
    diagnosis: Report
    proof: plan.PlanProof
    ranges: dict[str, float]
    lesson: DemoTraining

    def distances(self) -> dict[str, object]:
        """How far the pictures on the page are from fp32's."""
        shown = {name: replace(d, latents=d.latents[:1], pixels=d.pixels[:1]) for name, d in self.drawings.items()}
        return plan.compute_fp32_distances(shown)


def run(request: Request, page: Callable[[DemoResults, Report], str], progress: Progress | None = None) -> Report:
    """Run the story, write the page that `page` makes of it, the plan and the pictures, and report what was shown."""
    with Report("demo") as report:
        choice = diagnose.Request(model="pico-anima", prompt=plan.DEFAULT_CALIBRATION_PROMPTS[0], steps=request.steps)
        story = _tell_story(choice, request, report, progress)
        report.figures.update(story.proof.figures() | story.lesson.figures())
        report.figures.update({k: v for k, v in story.diagnosis.figures.items() if k.startswith("origin_")})
        report.findings.extend(_demote_errors(story.diagnosis))
        report.tables.extend(plan.build_proof_tables(story.proof))
        plan.judge_plan_proof(report, story.proof, 2)
        _write_results(request.out, story, report, page)
    return report


def _tell_story(choice: diagnose.Request, request: Request, report: Report, progress: Progress | None) -> DemoResults:
    diagnosis = Report("diagnose")
    parts, raw = diagnose.diagnose_picture(choice, diagnosis, progress)
    pictures = plan.Request(model=choice.model, seed=choice.seed, steps=choice.steps).pictures()
    proof = plan.plan_and_prove(parts, choice.model, pictures, 2, progress)
    settings = build_picture_settings(choice)
    drawings = {"raw-half": raw, **proof.drawings}
    lesson = train_demo_style(request, report, progress or SilentProgress())
    return DemoResults(settings, drawings, diagnosis, proof, measure_block_ranges(parts, settings), lesson)


def measure_block_ranges(parts: LoadedModel, settings: PictureSettings) -> dict[str, float]:
    """The largest magnitude that leaves each block of the denoiser over a whole fp32 run."""
    with open_in_precision(parts, "fp32") as running, probe(running.modules[parts.denoiser]) as ranges:
        draw_picture_batch(running, [settings])
    return {site: amax for site, amax in ranges.amax.items() if _BLOCK_PATTERN.fullmatch(site)}


def _demote_errors(diagnosis: Report) -> list[Finding]:
    """The diagnosis as notes: in the demo the black picture is the point, not a failure."""
    return [
        Finding(Level.NOTE, f.code, f.subject, f.message, f.evidence, f.remedy)
        for f in diagnosis.findings
        if f.level is Level.ERROR
    ]


def _write_results(out: Path, story: DemoResults, report: Report, page: Callable[[DemoResults, Report], str]) -> None:
    for name, drawing in story.drawings.items():
        path = out / f"{name}{'.suspect' if name == 'raw-half' else ''}.png"
        write_bytes(path, encode_png(drawing.pixels[0]))
        report.artifacts[name] = str(path)
    report.artifacts["plan"] = str(write_plan(out / "pico-anima.plan.toml", story.proof.plan))
    write_text(out / "report.html", page(story, report))
    report.artifacts["report"] = str(out / "report.html")


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


def train_demo_style(request: Request, report: Report, progress: Progress) -> DemoTraining:
    """Train on the example in planned half, draw with and without the adapter, merge it, check it."""
    out, steps = request.out, request.train_steps
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
    without, worn = draw_adapter_comparison(request, adapter, progress)
    merged = merge.run(merge.Request(model="pico-anima", adapters=(str(adapter),), out=out / "merged"))
    checked = check.run(check.Request(paths=(adapter,), model="pico-anima"))
    for told in (training, merged, checked):
        report.findings.extend(finding for finding in told.findings if finding.level is Level.ERROR)
    report.artifacts.update(adapter=str(adapter), merged=str(out / "merged"), plain=str(without), worn=str(worn))
    loads = training.figures["verified"]["kohya"]["loads"]  # type: ignore[index]
    return DemoTraining(_DEMO_PROMPT, history, adapter, out / "merged", without, worn, loads)


def draw_adapter_comparison(request: Request, adapter: Path, progress: Progress) -> tuple[Path, Path]:
    """The prompt as two pictures, without the adapter file and with it on; in current half, which needs no plan."""
    parts = load_model(ModelChoice(model="pico-anima"))
    paths = request.out / "plain.png", request.out / "worn.png"
    for path in paths:
        if path == paths[1]:
            apply_named_adapters(parts, [NamedAdapter(adapter)], merge_first=False, report=Report("generate"))
        with open_in_precision(parts, "current-half") as running:
            drawing = draw_picture_batch(running, [PictureSettings(prompt=_DEMO_PROMPT, steps=request.steps)], progress)
        write_bytes(path, encode_png(drawing.pixels[0]))
    return paths
