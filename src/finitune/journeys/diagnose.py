"""finitune diagnose: why is my picture black? The ladder: each stage as the user runs it, then again in fp32.

A stage is guilty of precision only if fp32, from the very inputs that the stage was given, is finite. Where fp32 is
as bad, precision is acquitted, and the model's conditioning, latents and scheduler are checked instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finitune.errors import FinituneError
from finitune.journeys import generate
from finitune.journeys.model import plan_for
from finitune.report import Level, Report, Table

if TYPE_CHECKING:
    from torch import Tensor, nn

    from finitune.generation.draw import Drawing, Recording
    from finitune.generation.precisions import Running
    from finitune.generation.settings import Settings
    from finitune.models.anima.load import AnimaParts
    from finitune.precision.origin import Origin
    from finitune.precision.planner import Call
    from finitune.precision.probe import Ranges
    from finitune.progress import Progress


SHOWN_SITES = 12


@dataclass(frozen=True, kw_only=True)
class Request(generate.Request):
    """The picture that went wrong, as it was asked for."""

    precision: str = "raw-half"


@dataclass(frozen=True)
class Stage:
    """One call of one component in the user's run: where it stands, and whether its output was finite."""

    component: str
    number: int
    step: int
    call: Call
    finite: bool
    amax: float


def run(request: Request, progress: Progress | None = None) -> Report:
    """Run the picture as asked, find the first bad stage, judge it against fp32, name the operation and the cure."""
    report = Report("diagnose")
    try:
        examine(request, report, progress)
    except FinituneError as error:
        return report.fail(error)
    return report


def examine(request: Request, report: Report, progress: Progress | None = None) -> tuple[AnimaParts, Drawing]:
    """Climb the ladder, everything found going into `report`; the model, and the picture as it was asked for."""
    from finitune.generation.draw import draw, recorded
    from finitune.generation.precisions import in_precision
    from finitune.generation.verdict import judge

    settings, parts, precision, plan = generate.prepare(request, report, progress)
    with in_precision(parts, precision, plan) as running:
        with recorded(running) as recording:
            drawing = draw(running, [settings], progress)
        stages = stages_of(parts, recording, drawing, settings.steps)
        report.tables.append(stage_table(stages))
        bad = next((stage for stage in stages if not stage.finite), None)
        origin = None if bad is None else origin_of(running, bad)
    verdict = judge(drawing.latents, drawing.pixels, remedy="See the origin below.")
    report.figures.update(precision=precision, **verdict.figures())
    _keep(request, report, "asked", drawing, good=verdict.good)
    if bad is None:
        _judge_finite_run(parts, settings, drawing, report, progress)
        return parts, drawing
    report.findings.extend(verdict.findings)
    finite, ranges = replay_in_fp32(parts, bad)
    if request.out:
        ranges.save(request.out / "ranges.json")
        report.artifacts["ranges"] = str(request.out / "ranges.json")
    if finite:
        report.tables.append(range_table(ranges))
        _blame(bad, origin, report)
        _cure(request, parts, settings, report, progress)
    else:
        _acquit(parts, bad, report)
    return parts, drawing


def stages_of(parts: AnimaParts, recording: Recording, drawing: Drawing, steps: int) -> list[Stage]:
    """Every call of the run in the order of the ladder: text encoder, conditioner, denoising steps, VAE."""
    from finitune.generation.draw import decode_call
    from finitune.generation.precisions import COMPONENTS

    stages = []
    for component in COMPONENTS:
        calls = recording.calls.get(component, [])
        if component == "vae":
            calls = [decode_call(parts.vae, drawing.latents)]
        for number, (call, output) in enumerate(zip(calls, recording.outputs.get(component, []), strict=True)):
            step = number * steps // len(calls) if component == "transformer" else 0
            stages.append(Stage(component, number, step, call, bool(output.isfinite().all()), _amax(output)))
    return stages


def stage_table(stages: list[Stage]) -> Table:
    """One row per component: its calls, how many were finite, the largest output."""
    rows = []
    for component in dict.fromkeys(stage.component for stage in stages):
        own = [stage for stage in stages if stage.component == component]
        first = next((str(stage.number) for stage in own if not stage.finite), "-")
        finite = sum(stage.finite for stage in own)
        rows.append((component, str(len(own)), str(finite), first, f"{max(s.amax for s in own):.4g}"))
    return Table("stages", ("stage", "calls", "finite", "first bad call", "largest output"), tuple(rows))


def origin_of(running: Running, stage: Stage) -> Origin | None:
    """The operation that made the first non-finite number of a stage, in the precision of the run."""
    from finitune.precision.origin import first_origin

    return first_origin(running.modules[stage.component], stage.call, stage.number)


def replay_in_fp32(parts: AnimaParts, stage: Stage) -> tuple[bool, Ranges]:
    """Run a stage in fp32 from the inputs that it was given: is its output finite, and how large does it get inside?"""
    import torch

    from finitune.precision.apply import stored_as
    from finitune.precision.certificate import in_dtype, outputs
    from finitune.precision.probe import is_finite, probe

    module: nn.Module = getattr(parts, stage.component)
    with stored_as(module, torch.float32), probe(module, parts.fingerprint) as ranges:
        found = outputs(module, in_dtype([stage.call], torch.float32))
    return is_finite(found), ranges


def range_table(ranges: Ranges) -> Table:
    """The sites whose output fp16 could not hold, the largest first."""
    over = sorted(ranges.over_half().items(), key=lambda item: -item[1])
    rows = tuple((site, f"{amax:.4g}", f"{-ranges.headroom_bits[site]:.1f}") for site, amax in over[:SHOWN_SITES])
    title = f"beyond fp16 in this call, run in fp32: {len(over)} of {len(ranges.sites)} sites"
    return Table(title, ("site", "largest output", "bits too many"), rows)


def _blame(stage: Stage, origin: Origin | None, report: Report) -> None:
    if origin is None:
        message = f"call {stage.number} was not finite in the run, and is finite when it is repeated"
        remedy = "Run it again; where this comes back, the computation is not deterministic or the memory is faulty."
        report.add(Level.ERROR, "ORIGIN-NOT-FOUND", stage.component, message, remedy=remedy)
        return
    report.figures.update(
        origin_stage=stage.component,
        origin_site=origin.site,
        origin_op=origin.op,
        origin_kind=origin.kind,
        origin_value=origin.value,
        origin_source=f"{origin.file}:{origin.line}",
        origin_step=stage.step,
    )
    report.add(
        Level.ERROR,
        f"ORIGIN-{origin.kind.upper()}",
        f"{stage.component}.{origin.site}",
        str(origin),
        remedy="fp32 is finite from the same inputs: precision is the cause, and a plan is the cure.",
        call=stage.number,
        step=stage.step,
    )


def _acquit(parts: AnimaParts, stage: Stage, report: Report) -> None:
    report.figures["precision_acquitted"] = True
    report.add(
        Level.ERROR,
        "PRECISION-ACQUITTED",
        stage.component,
        f"fp32 is not finite either, from the inputs of call {stage.number}: precision is not the cause",
        remedy="Check the file that this component came from, and the findings below.",
    )
    _check_conditioning(parts, report)


def _judge_finite_run(
    parts: AnimaParts, settings: Settings, drawing: Drawing, report: Report, progress: Progress | None
) -> None:
    """Everything was finite: is the picture good, and if not, is fp32's any better?"""
    from finitune.generation.planning import draw_in
    from finitune.generation.verdict import judge
    from finitune.numerics.compare import psnr_db

    reference = draw_in(parts, "fp32", [settings], progress=progress)
    report.figures["psnr_vs_fp32"] = psnr_db(drawing.pixels.float(), reference.pixels.float(), 255.0)
    verdict = judge(drawing.latents, drawing.pixels, remedy="fp32 draws this picture well: use a plan.")
    if verdict.good:
        report.add(Level.NOTE, "RUN-IS-FINITE", "picture", "every stage was finite, the picture is good")
        return
    report.findings.extend(verdict.findings)
    if judge(reference.latents, reference.pixels, remedy="").good:
        return
    report.figures["precision_acquitted"] = True
    message = "fp32 draws the same bad picture: precision is not the cause"
    report.add(Level.ERROR, "PRECISION-ACQUITTED", "picture", message, remedy="Check the findings below.")
    _check_conditioning(parts, report)


def _check_conditioning(parts: AnimaParts, report: Report) -> None:
    """What else makes black pictures: weights, the scheduler's shift, the latents' scaling."""
    import torch

    from finitune.generation.precisions import COMPONENTS

    for component in COMPONENTS:
        for name, parameter in getattr(parts, component).named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                message = "the weight holds NaN or infinity"
                report.add(
                    Level.ERROR, "WEIGHT-NONFINITE", f"{component}.{name}", message, remedy="Get the file again."
                )
    shift = parts.scheduler.config.get("shift")
    if shift != 3.0:
        message = f"the scheduler's shift is {shift}; Anima's is 3"
        report.add(Level.WARNING, "SCHEDULER-SHIFT", "scheduler", message, remedy="Set shift = 3.0.")
    config: Any = parts.vae.config
    channels = config.z_dim
    if len(config.latents_std) != channels or min(config.latents_std) <= 0:
        message = f"latents_std does not give {channels} positive numbers"
        report.add(Level.ERROR, "LATENTS-SCALING", "vae", message, remedy="Use the VAE that belongs to this model.")


def _cure(request: Request, parts: AnimaParts, settings: Settings, report: Report, progress: Progress | None) -> None:
    """Draw the picture again by a plan, and say how it went."""
    from finitune.generation.planning import draw_in
    from finitune.generation.verdict import judge

    plan = plan_for(request, parts, settings, None, report, progress)
    after = draw_in(parts, "planned-half", [settings], plan, progress)
    good = judge(after.latents, after.pixels, remedy="").good
    report.figures["cured_by_plan"] = good
    _keep(request, report, "by-plan", after, good=good)
    command = f"finitune generate {request.typed()} --precision planned-half"
    message = "by the plan the same picture is finite and good" if good else "by the plan the picture is still bad"
    level, code = (Level.NOTE, "PLAN-CURES") if good else (Level.ERROR, "PLAN-DOES-NOT-CURE")
    report.add(level, code, "plan", message, remedy=f"Next: {command}")


def _keep(request: Request, report: Report, name: str, drawing: Drawing, *, good: bool) -> None:
    """Save a picture as evidence, where a folder for it was given."""
    from finitune.generation.picture import save_picture

    if request.out:
        metadata: dict[str, object] = {"prompt": request.prompt, "seed": request.seed, "picture": name}
        path = save_picture(request.out / f"{name}.png", drawing.pixels[0], metadata, good=good)
        report.artifacts[name] = str(path)


def _amax(output: Tensor) -> float:
    return float(output.float().abs().max())
