"""finitune demo: the whole story on the shipped model, as a page to look at.

Plain fp16 makes a black picture; the operation that overflowed is named; a plan is made and proved; the same prompt is
drawn by the plan, in fp32 and in bf16. Then a style is learned in planned half, worn, merged, and its file checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from finitune.errors import FinituneError
from finitune.journeys import diagnose, plan
from finitune.journeys.demo_training import Lesson, learn
from finitune.journeys.model import write_plan
from finitune.progress import Progress, Silent
from finitune.report import Finding, Level, Report

if TYPE_CHECKING:
    from finitune.generation.draw import Drawing
    from finitune.generation.settings import Settings
    from finitune.models.anima.load import AnimaParts


@dataclass(frozen=True, kw_only=True)
class Request:
    """Where the page, the plan and the pictures go."""

    out: Path = Path("finitune-out/demo")
    steps: int = 28
    train_steps: int = 300


@dataclass(frozen=True)
class Story:
    """Everything the page shows."""

    settings: Settings
    drawings: dict[str, Drawing]
    diagnosis: Report
    proof: plan.Proof
    ranges: dict[str, float]
    lesson: Lesson

    def distances(self) -> dict[str, object]:
        """How far the pictures on the page are from fp32's."""
        shown = {name: replace(d, latents=d.latents[:1], pixels=d.pixels[:1]) for name, d in self.drawings.items()}
        return plan.distances(shown)


def run(request: Request, page: Callable[[Story, Report], str], progress: Progress | None = None) -> Report:
    """Run the story, write the page that `page` makes of it, the plan and the pictures, and report what was shown."""
    report = Report("demo")
    try:
        choice = diagnose.Request(model="pico-anima", prompt=plan.DEFAULT_PROMPTS[0], steps=request.steps)
        story = _tell(choice, request, report, progress)
        report.figures.update(story.proof.figures() | story.lesson.figures())
        report.figures.update({k: v for k, v in story.diagnosis.figures.items() if k.startswith("origin_")})
        report.findings.extend(_as_shown(story.diagnosis))
        report.tables.extend(plan.tables(story.proof))
        plan.judge_proof(report, story.proof, 2)
        _write(request.out, story, report, page)
    except FinituneError as error:
        return report.fail(error)
    return report


def _tell(choice: diagnose.Request, request: Request, report: Report, progress: Progress | None) -> Story:
    diagnosis = Report("diagnose")
    parts, raw = diagnose.examine(choice, diagnosis, progress)
    pictures = plan.Request(model=choice.model, seed=choice.seed, steps=choice.steps).pictures()
    proof = plan.plan_and_prove(parts, choice.model, pictures, 2, progress)
    settings = choice.settings()
    drawings = {"raw-half": raw, **proof.drawings}
    lesson = learn(request.out, request.train_steps, report, progress or Silent())
    return Story(settings, drawings, diagnosis, proof, block_ranges(parts, settings), lesson)


def block_ranges(parts: AnimaParts, settings: Settings) -> dict[str, float]:
    """The largest magnitude that leaves each block of the denoiser over a whole fp32 run."""
    from finitune.generation.draw import draw
    from finitune.generation.precisions import in_precision
    from finitune.precision.probe import probe

    with in_precision(parts, "fp32") as running, probe(running.modules["transformer"]) as ranges:
        draw(running, [settings])
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


def _write(out: Path, story: Story, report: Report, page: Callable[[Story, Report], str]) -> None:
    from finitune.files.writer import write_bytes, write_text
    from finitune.generation.picture import png_bytes

    for name, drawing in story.drawings.items():
        path = out / f"{name}{'.suspect' if name == 'raw-half' else ''}.png"
        write_bytes(path, png_bytes(drawing.pixels[0]))
        report.artifacts[name] = str(path)
    report.artifacts["plan"] = str(write_plan(out / "pico-anima.plan.toml", story.proof.plan))
    write_text(out / "report.html", page(story, report))
    report.artifacts["report"] = str(out / "report.html")
