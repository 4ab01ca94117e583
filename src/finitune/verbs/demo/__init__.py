"""finitune demo: the whole story on the shipped model, as a page to look at.

Plain fp16 makes a black picture; the operation that overflowed is named; a plan is made and proved; the same prompt is
drawn by the plan, in fp32 and in bf16. Then a style is learned in planned half, worn, merged, and its file checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from finitune.errors import FinituneError
from finitune.progress import Progress, SilentProgress
from finitune.report import Finding, Level, Report
from finitune.verbs import diagnose, plan
from finitune.verbs.demo.training import DemoTraining, train_demo_style
from finitune.verbs.generate import build_picture_settings
from finitune.verbs.shared.model import write_plan

if TYPE_CHECKING:
    from finitune.generation.draw import DrawnPictures
    from finitune.generation.settings import PictureSettings
    from finitune.models.anima.load import AnimaParts


@dataclass(frozen=True, kw_only=True)
class Request:
    """Where the page, the plan and the pictures go."""

    out: Annotated[Path, Parameter(alias="-o")] = Path("finitune-out/demo")
    """The folder to write to."""
    steps: int = 28
    """Number of denoising steps of each picture."""
    train_steps: Annotated[int, Parameter(parse=False)] = 300


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
    report = Report("demo")
    try:
        choice = diagnose.Request(model="pico-anima", prompt=plan.DEFAULT_CALIBRATION_PROMPTS[0], steps=request.steps)
        story = _tell(choice, request, report, progress)
        report.figures.update(story.proof.figures() | story.lesson.figures())
        report.figures.update({k: v for k, v in story.diagnosis.figures.items() if k.startswith("origin_")})
        report.findings.extend(_as_shown(story.diagnosis))
        report.tables.extend(plan.build_proof_tables(story.proof))
        plan.judge_plan_proof(report, story.proof, 2)
        _write(request.out, story, report, page)
    except FinituneError as error:
        return report.fail(error)
    return report


def _tell(choice: diagnose.Request, request: Request, report: Report, progress: Progress | None) -> DemoResults:
    diagnosis = Report("diagnose")
    parts, raw = diagnose.diagnose_picture(choice, diagnosis, progress)
    pictures = plan.Request(model=choice.model, seed=choice.seed, steps=choice.steps).pictures()
    proof = plan.plan_and_prove(parts, choice.model, pictures, 2, progress)
    settings = build_picture_settings(choice)
    drawings = {"raw-half": raw, **proof.drawings}
    lesson = train_demo_style(request.out, request.train_steps, report, progress or SilentProgress())
    return DemoResults(settings, drawings, diagnosis, proof, measure_block_ranges(parts, settings), lesson)


def measure_block_ranges(parts: AnimaParts, settings: PictureSettings) -> dict[str, float]:
    """The largest magnitude that leaves each block of the denoiser over a whole fp32 run."""
    from finitune.generation.draw import draw_picture_batch
    from finitune.generation.precisions import open_in_precision
    from finitune.precision.probe import probe

    with open_in_precision(parts, "fp32") as running, probe(running.modules["transformer"]) as ranges:
        draw_picture_batch(running, [settings])
    return {s: amax for s, amax in ranges.amax.items() if s in ("patch_embed", "norm_out", "proj_out") or _is_block(s)}


def _is_block(site: str) -> bool:
    head, _, number = site.rpartition(".")
    return head == "transformer_blocks" and number.isdigit()


def _as_shown(diagnosis: Report) -> list[Finding]:
    """The diagnosis as notes: in the demo the black picture is the point, not a failure."""
    return [
        Finding(Level.NOTE, f.code, f.subject, f.message, f.evidence, f.remedy)
        for f in diagnosis.findings
        if f.level is Level.ERROR
    ]


def _write(out: Path, story: DemoResults, report: Report, page: Callable[[DemoResults, Report], str]) -> None:
    from finitune.files.writer import write_bytes, write_text
    from finitune.generation.picture import encode_png

    for name, drawing in story.drawings.items():
        path = out / f"{name}{'.suspect' if name == 'raw-half' else ''}.png"
        write_bytes(path, encode_png(drawing.pixels[0]))
        report.artifacts[name] = str(path)
    report.artifacts["plan"] = str(write_plan(out / "pico-anima.plan.toml", story.proof.plan))
    write_text(out / "report.html", page(story, report))
    report.artifacts["report"] = str(out / "report.html")
