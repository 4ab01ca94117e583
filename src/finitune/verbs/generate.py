"""finitune generate: one picture, in a precision that holds, with a verdict on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from finitune import __version__
from finitune.files.writer import make_read_back_error
from finitune.generation.draw import draw_picture_batch
from finitune.generation.picture import read_picture_metadata, save_picture
from finitune.generation.picture_quality import judge_picture
from finitune.generation.planning import calibrate_model, draw_in_precision, make_model_plan, recheck_model_plan
from finitune.generation.precisions import RunningModel, check_drawing_precision, open_in_precision
from finitune.generation.settings import PictureSettings, parse_picture_size
from finitune.machine.hardware import advise, read_device_facts
from finitune.models import SHIPPED_MODELS
from finitune.models.loaded import LoadedModel
from finitune.precision.plan import PrecisionPlan
from finitune.progress import Progress
from finitune.report import Level, Report
from finitune.verbs.plan import compute_fp32_distances
from finitune.verbs.shared.adapters import (
    MIN_ADAPTED_HEADROOM_BITS,
    AppliedAdapters,
    NamedAdapter,
    apply_named_adapters,
)
from finitune.verbs.shared.model import (
    DEFAULT_OUTPUT_FOLDER,
    choose_device,
    format_model_name,
    get_default_picture_size,
    load_model,
    load_or_make_plan,
    write_plan,
)
from finitune.verbs.shared.options import AmbiguityRequest, DrawingOptions, OutPath


@dataclass(frozen=True, kw_only=True)
class Request(DrawingOptions, AmbiguityRequest):
    """What to draw, with what, and where to put it."""

    plan: Path | None = None
    """A precision plan, as `finitune plan` writes it."""
    out: OutPath = None
    """The PNG file to write."""
    adapter: tuple[str, ...] = ()
    """An adapter file, as FILE or FILE:STRENGTH; may be given several times."""
    merge_first: bool = False
    """Put the adapters into the weights, instead of attaching them to the layers."""


def run(request: Request, progress: Progress | None = None) -> Report:
    """Draw the picture, judge it, save it (as `.suspect.png` where it is bad), and report."""
    with Report("generate") as report:
        draw_checked_picture(request, report, progress)
    return report


def draw_checked_picture(request: Request, report: Report, progress: Progress | None) -> None:
    """Findings, figures and the artifact go to the report. Raises FinituneError."""
    settings, parts, precision, plan = prepare_generation(request, request.plan, report, progress)
    worn = None
    if request.adapter:
        named = [NamedAdapter.parse(text) for text in request.adapter]
        answers = request.answers()
        worn = apply_named_adapters(parts, named, merge_first=request.merge_first, report=report, answers=answers)
        plan = plan and recertify_adapted_plan(plan, parts, worn, settings, report, progress)
    with open_in_precision(parts, precision, plan) as running:
        drawing = draw_picture_batch(running, [settings], progress)
    if plan and running.guard.trips:
        _tell_of_trips(request, report, running, plan)
    command = f"finitune diagnose {request.to_command_words()} --precision {precision}"
    verdict = judge_picture(drawing.latents, drawing.pixels, remedy=f"Find out why: {command}")
    report.findings.extend(verdict.findings)
    report.figures.update(precision=precision, **verdict.figures(), guard_trips=len(running.guard.trips))
    if request.model in SHIPPED_MODELS and precision == "planned-half":
        others = {name: draw_in_precision(parts, name, [settings], progress=progress) for name in ("fp32", "bf16")}
        report.figures.update(compute_fp32_distances({"planned-half": drawing, **others}))
    metadata = build_picture_metadata(request, precision, parts.fingerprint, plan)
    if worn:
        metadata |= {"adapters": worn.receipts, "merged_first": request.merge_first}
    out = request.out or DEFAULT_OUTPUT_FOLDER / "{model}-{precision}-{seed}.png".format(**metadata)
    written = save_picture(out, drawing.pixels[0], metadata, good=verdict.good)
    if read_picture_metadata(written) != metadata:
        raise make_read_back_error(written, "Check the disk, and write the picture elsewhere: --out FILE")
    report.artifacts["picture"] = str(written)


def prepare_generation(
    request: DrawingOptions, plan: Path | None, report: Report, progress: Progress | None
) -> tuple[PictureSettings, LoadedModel, str, PrecisionPlan | None]:
    """Everything a picture needs, cheapest checks first: settings, parts, precision, and its plan if it has one.

    Raises UsageError for what cannot be drawn.
    """
    settings = build_picture_settings(request)
    check_drawing_precision(request.precision)
    parts = load_model(request)
    report.findings.extend(parts.notes)
    precision = choose_generation_precision(request, report)
    planned = precision == "planned-half"
    chosen = load_or_make_plan(request, parts, settings, plan, report, progress) if planned else None
    return settings, parts, precision, chosen


def build_picture_settings(request: DrawingOptions) -> PictureSettings:
    """The picture's settings; raises UsageError for what cannot be drawn."""
    width, height = parse_picture_size(request.size or get_default_picture_size(request))
    own = {name: getattr(request, name) for name in ("prompt", "negative", "steps", "cfg", "seed")}
    return PictureSettings(**own, width=width, height=height)


def recertify_adapted_plan(
    plan: PrecisionPlan,
    parts: LoadedModel,
    worn: AppliedAdapters,
    settings: PictureSettings,
    report: Report,
    progress: Progress | None,
) -> PrecisionPlan:
    """The plan for the model with its adapters: the model's own where it still holds on this prompt, else a new one."""
    own = {name: component.moved(worn.places.get(name, {})) for name, component in plan.components.items()}
    plan = replace(plan, components=own, proof={})
    calls, _ = calibrate_model(parts, [settings], progress)
    checks = recheck_model_plan(parts, plan, calls, progress)
    held = all(check.holds(min(MIN_ADAPTED_HEADROOM_BITS, plan.headroom_bits)) for check in checks.values())
    bits = min(check.headroom_bits for check in checks.values())
    denoiser = checks[parts.denoiser]
    report.figures.update(adapted_headroom_bits=bits, adapted_step_rel_l2=denoiser.step_rel_l2)
    report.figures.update(adapted_bf16_step_rel_l2=denoiser.bf16_step_rel_l2)
    report.add(
        Level.NOTE if held else Level.WARNING,
        "PLAN-CERTIFIED-AGAIN" if held else "PLAN-REMADE",
        plan.model,
        "the plan holds with the adapter, too" if held else "the plan does not hold with the adapter: it was made anew",
        headroom_bits=bits,
        step_rel_l2=denoiser.step_rel_l2,
        bf16_step_rel_l2=denoiser.bf16_step_rel_l2,
    )
    return plan if held else make_model_plan(parts, plan.model, calls, plan.headroom_bits, progress)


def _tell_of_trips(request: Request, report: Report, running: RunningModel, plan: PrecisionPlan) -> None:
    """Each event of the guard, and the plan as it was amended, written for the next picture."""
    for trip in running.guard.trips:
        report.add(
            Level.WARNING,
            "GUARD-TRIPPED",
            trip.site,
            f"{trip.operation} left the planned range; the step was run again with measured scales there",
            remedy="Draw by the amended plan from now on, or plan on more prompts: finitune plan MODEL --prompts FILE",
            input_amax=trip.amax,
        )
    if request.adapter:  # its lines name layers as they are with the adapter on
        return
    name = running.model.denoiser
    components = {**plan.components, name: running.guard.amend_plan(plan.components[name])}
    amended = replace(plan, components=components, proof={})
    path = DEFAULT_OUTPUT_FOLDER / f"{format_model_name(request)}.amended.plan.toml"
    report.artifacts["amended_plan"] = str(write_plan(path, amended))


def choose_generation_precision(request: DrawingOptions, report: Report) -> str:
    """The precision asked for, or the one for this machine, with its reason in the report."""
    if request.precision != "auto":
        return request.precision
    device = choose_device(request.device)
    if device == "cpu":
        chosen = "planned-half"
        reason = "on a CPU the plan runs with the tensor core's meaning, at the cost of fp32"
        report.add(Level.NOTE, "PRECISION-CHOSEN", device, f"{chosen}: {reason}")
        return chosen
    facts = read_device_facts(int(device.partition(":")[2] or 0))
    advice = advise(facts)
    for warning in advice.warnings:
        report.add(Level.WARNING, "DEVICE-WARNING", facts.name, warning)
    report.add(Level.NOTE, "PRECISION-CHOSEN", facts.name, f"{advice.compute}: {'; '.join(advice.reasons)}")
    return advice.compute


def build_picture_metadata(
    request: Request, precision: str, fingerprint: str, plan: PrecisionPlan | None
) -> dict[str, object]:
    """What a picture file says of itself: enough to draw it again."""
    return {
        "prompt": request.prompt,
        "negative": request.negative,
        "steps": request.steps,
        "cfg": request.cfg,
        "seed": request.seed,
        "size": request.size or get_default_picture_size(request),
        "model": format_model_name(request),
        "fingerprint": fingerprint,
        "precision": precision,
        "plan": plan.dumps() if plan else None,
        "finitune": __version__,
    }
