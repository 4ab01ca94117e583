"""finitune diagnose: why is my picture black? The ladder: each stage as the user runs it, then again in fp32.

A stage is guilty of precision only if fp32, from the very inputs that the stage was given, is finite. Where fp32 is
as bad, precision is acquitted, and the model's conditioning, latents and scheduler are checked instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from finitune.generation.draw import (
    CallRecording,
    DrawnPictures,
    build_decode_call,
    draw_picture_batch,
    record_component_calls,
)
from finitune.generation.picture import save_picture
from finitune.generation.picture_quality import judge_picture
from finitune.generation.planning import draw_in_precision
from finitune.generation.precisions import open_in_precision
from finitune.generation.settings import PictureSettings
from finitune.models.loaded import LoadedModel
from finitune.numerics.compare import psnr_db
from finitune.precision.apply import hold_parameters_in
from finitune.precision.certificate import cast_call_inputs, collect_call_outputs
from finitune.precision.origin import FaultOrigin, find_first_fault_origin
from finitune.precision.planner import RecordedCall
from finitune.precision.probe import Ranges, is_output_finite, probe
from finitune.progress import Progress
from finitune.report import Level, Report, Table
from finitune.verbs import generate
from finitune.verbs.shared.model import load_or_make_plan
from finitune.verbs.shared.options import DrawingOptions, DrawingPrecision, OutPath

_MAX_LISTED_SITES = 12


@dataclass(frozen=True, kw_only=True)
class Request(DrawingOptions):
    """The picture that went wrong, as it was asked for."""

    precision: DrawingPrecision = "raw-half"
    """How the picture was computed when it failed."""
    out: OutPath = None
    """A folder for the evidence: the picture as it was asked for, the one that a plan draws, the ranges."""


@dataclass(frozen=True)
class DiagnosisStage:
    """One call of one component in the user's run: where it stands, and whether its output was finite."""

    component: str
    number: int
    step: int
    call: RecordedCall
    finite: bool
    amax: float


def run(request: Request, progress: Progress | None = None) -> Report:
    """Run the picture as asked, find the first bad stage, judge it against fp32, name the operation and the cure."""
    with Report("diagnose") as report:
        diagnose_picture(request, report, progress)
    return report


def diagnose_picture(
    request: Request, report: Report, progress: Progress | None = None
) -> tuple[LoadedModel, DrawnPictures]:
    """Climb the ladder, everything found going into `report`; the model, and the picture as it was asked for."""
    settings, parts, precision, plan = generate.prepare_generation(request, None, report, progress)
    with open_in_precision(parts, precision, plan) as running:
        with record_component_calls(running) as recording:
            drawing = draw_picture_batch(running, [settings], progress)
        stages = collect_stages(parts, recording, drawing, settings.steps)
        report.tables.append(build_stage_table(stages))
        bad = next((stage for stage in stages if not stage.finite), None)
        origin = bad and find_first_fault_origin(running.modules[bad.component], bad.call, bad.number)
    verdict = judge_picture(drawing.latents, drawing.pixels, remedy="See the origin below.")
    report.figures.update(precision=precision, **verdict.figures())
    _keep(request, report, "asked", drawing, good=verdict.good)
    if bad is None:
        _judge_finite_run(parts, settings, drawing, report, progress)
        return parts, drawing
    report.findings.extend(verdict.findings)
    module = parts.module(bad.component)
    with hold_parameters_in(module, torch.float32), probe(module, parts.fingerprint) as ranges:
        found = collect_call_outputs(module, cast_call_inputs([bad.call], torch.float32))
    if request.out:
        ranges.save(request.out / "ranges.json")
        report.artifacts["ranges"] = str(request.out / "ranges.json")
    if is_output_finite(found):
        report.tables.append(build_overflow_table(ranges))
        _blame(bad, origin, report)
        _cure(request, parts, settings, report, progress)
    else:
        _acquit(parts, bad, report)
    return parts, drawing


def collect_stages(
    parts: LoadedModel, recording: CallRecording, drawing: DrawnPictures, steps: int
) -> list[DiagnosisStage]:
    """Every call of the run in the order of the ladder: text encoders, denoising steps, VAE."""
    stages = []
    for one in parts.modules:
        calls = recording.calls.get(one.name, [])
        if one.decoder:
            calls = [build_decode_call(parts, drawing.latents)]
        for number, (call, output) in enumerate(zip(calls, recording.outputs.get(one.name, []), strict=True)):
            step = number * steps // len(calls) if one.name == parts.denoiser else 0
            largest = float(output.float().abs().max())
            stages.append(DiagnosisStage(one.name, number, step, call, bool(output.isfinite().all()), largest))
    return stages


def build_stage_table(stages: list[DiagnosisStage]) -> Table:
    rows = []
    for component in dict.fromkeys(stage.component for stage in stages):
        own = [stage for stage in stages if stage.component == component]
        first = next((str(stage.number) for stage in own if not stage.finite), "-")
        finite = sum(stage.finite for stage in own)
        rows.append((component, str(len(own)), str(finite), first, f"{max(s.amax for s in own):.4g}"))
    return Table("stages", ("stage", "calls", "finite", "first bad call", "largest output"), tuple(rows))


def build_overflow_table(ranges: Ranges) -> Table:
    """The sites whose output fp16 could not hold, the largest first."""
    over = sorted(ranges.over_half().items(), key=lambda item: -item[1])
    rows = tuple((site, f"{amax:.4g}", f"{-ranges.headroom_bits[site]:.1f}") for site, amax in over[:_MAX_LISTED_SITES])
    title = f"beyond fp16 in this call, run in fp32: {len(over)} of {len(ranges.sites)} sites"
    return Table(title, ("site", "largest output", "bits too many"), rows)


def _blame(stage: DiagnosisStage, origin: FaultOrigin | None, report: Report) -> None:
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


def _acquit(parts: LoadedModel, stage: DiagnosisStage, report: Report) -> None:
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
    parts: LoadedModel, settings: PictureSettings, drawing: DrawnPictures, report: Report, progress: Progress | None
) -> None:
    """Everything was finite: is the picture good, and if not, is fp32's any better?"""
    reference = draw_in_precision(parts, "fp32", [settings], progress=progress)
    report.figures["psnr_vs_fp32"] = psnr_db(drawing.pixels.float(), reference.pixels.float(), 255.0)
    verdict = judge_picture(drawing.latents, drawing.pixels, remedy="fp32 draws this picture well: use a plan.")
    if verdict.good:
        report.add(Level.NOTE, "RUN-IS-FINITE", "picture", "every stage was finite, the picture is good")
        return
    report.findings.extend(verdict.findings)
    if judge_picture(reference.latents, reference.pixels, remedy="").good:
        return
    report.figures["precision_acquitted"] = True
    message = "fp32 draws the same bad picture: precision is not the cause"
    report.add(Level.ERROR, "PRECISION-ACQUITTED", "picture", message, remedy="Check the findings below.")
    _check_conditioning(parts, report)


def _check_conditioning(parts: LoadedModel, report: Report) -> None:
    """What else makes black pictures: weights, the scheduler's shift, the latents' scaling."""
    for component, module in parts.named_modules().items():
        for name, parameter in module.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                message = "the weight holds NaN or infinity"
                report.add(
                    Level.ERROR, "WEIGHT-NONFINITE", f"{component}.{name}", message, remedy="Get the file again."
                )
    report.findings.extend(parts.check_conditioning())


def _cure(
    request: Request, parts: LoadedModel, settings: PictureSettings, report: Report, progress: Progress | None
) -> None:
    """Draw the picture again by a plan, and say how it went."""
    plan = load_or_make_plan(request, parts, settings, None, report, progress)
    after = draw_in_precision(parts, "planned-half", [settings], plan, progress)
    good = judge_picture(after.latents, after.pixels, remedy="").good
    report.figures["cured_by_plan"] = good
    _keep(request, report, "by-plan", after, good=good)
    command = f"finitune generate {request.to_command_words()} --precision planned-half"
    message = "by the plan the same picture is finite and good" if good else "by the plan the picture is still bad"
    level, code = (Level.NOTE, "PLAN-CURES") if good else (Level.ERROR, "PLAN-DOES-NOT-CURE")
    report.add(level, code, "plan", message, remedy=f"Next: {command}")


def _keep(request: Request, report: Report, name: str, drawing: DrawnPictures, *, good: bool) -> None:
    if request.out:
        metadata: dict[str, object] = {"prompt": request.prompt, "seed": request.seed, "picture": name}
        path = save_picture(request.out / f"{name}.png", drawing.pixels[0], metadata, good=good)
        report.artifacts[name] = str(path)
