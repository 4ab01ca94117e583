"""finitune generate: one picture, in a precision that holds, with a verdict on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from finitune.errors import FinituneError
from finitune.journeys.adapters import HOLDING_BITS, Doubts, NamedAdapter, Worn, put_on
from finitune.journeys.model import (
    OUTPUT,
    SHIPPED,
    ModelChoice,
    choose_device,
    default_size,
    display_name,
    load_model,
    plan_for,
    write_plan,
)
from finitune.report import Level, Report

if TYPE_CHECKING:
    from finitune.generation.draw import Drawing
    from finitune.generation.settings import Settings
    from finitune.models.anima.load import AnimaParts
    from finitune.precision.guard import Guard
    from finitune.precision.plan import PrecisionPlan
    from finitune.progress import Progress

DEFAULT_PROMPT = "red apple"


@dataclass(frozen=True, kw_only=True)
class Request(ModelChoice, Doubts):
    """What to draw, with what, and where to put it."""

    prompt: str = DEFAULT_PROMPT
    negative: str = ""
    steps: int = 28
    cfg: float = 4.0
    seed: int = 0
    size: str | None = None
    out: Path | None = None
    precision: str = "auto"
    plan: Path | None = None
    adapter: tuple[str, ...] = ()
    merge_first: bool = False

    def settings(self) -> Settings:
        """The picture's settings; raises UsageError for what cannot be drawn."""
        from finitune.generation.settings import Settings, parse_size

        width, height = parse_size(self.size or default_size(self))
        return Settings(
            prompt=self.prompt,
            negative=self.negative,
            steps=self.steps,
            cfg=self.cfg,
            seed=self.seed,
            width=width,
            height=height,
        )


def run(request: Request, progress: Progress | None = None) -> Report:
    """Draw the picture, judge it, save it (as `.suspect.png` where it is bad), and report."""
    report = Report("generate")
    try:
        return _run(request, report, progress)
    except FinituneError as error:
        return report.fail(error)


def _run(request: Request, report: Report, progress: Progress | None) -> Report:
    from finitune.generation.draw import draw
    from finitune.generation.precisions import in_precision
    from finitune.generation.verdict import judge

    settings, parts, precision, plan = prepare(request, report, progress)
    worn = None
    if request.adapter:
        named = [NamedAdapter.parse(text) for text in request.adapter]
        answers = request.answers()
        worn = put_on(parts, named, merge_first=request.merge_first, report=report, answers=answers)
        plan = plan and certified_again(plan, parts, worn, settings, report, progress)
    with in_precision(parts, precision, plan) as running:
        drawing = draw(running, [settings], progress)
    if plan and running.guard.trips:
        _tell_of_trips(request, report, running.guard, plan)
    command = f"finitune diagnose {request.typed()} --precision {precision}"
    verdict = judge(drawing.latents, drawing.pixels, remedy=f"Find out why: {command}")
    report.findings.extend(verdict.findings)
    report.figures.update(precision=precision, **verdict.figures(), guard_trips=len(running.guard.trips))
    if request.model in SHIPPED and precision == "planned-half":
        report.figures.update(compare_with_bf16(parts, settings, drawing, progress))
    metadata = receipt(request, precision, parts.fingerprint, plan)
    if worn:
        metadata |= {"adapters": worn.receipts, "merged_first": request.merge_first}
    report.artifacts["picture"] = str(_save(request.out, drawing, metadata, good=verdict.good))
    return report


def prepare(
    request: Request, report: Report, progress: Progress | None
) -> tuple[Settings, AnimaParts, str, PrecisionPlan | None]:
    """Everything a picture needs, cheapest checks first: settings, parts, precision, and its plan if it has one."""
    from finitune.generation.precisions import check_precision

    settings = request.settings()
    check_precision(request.precision)
    parts = load_model(request)
    report.findings.extend(parts.notes)
    precision = choose_precision(request, report)
    planned = precision == "planned-half"
    plan = plan_for(request, parts, settings, request.plan, report, progress) if planned else None
    return settings, parts, precision, plan


def certified_again(
    plan: PrecisionPlan,
    parts: AnimaParts,
    worn: Worn,
    settings: Settings,
    report: Report,
    progress: Progress | None,
) -> PrecisionPlan:
    """The plan for the model with its adapters: the model's own where it still holds on this prompt, else a new one."""
    from finitune.generation.planning import calibrate, certify_again, plan_model

    own = {name: component.moved(worn.places.get(name, {})) for name, component in plan.components.items()}
    plan = replace(plan, components=own, proof={})
    calls, _ = calibrate(parts, [settings], progress)
    checks = certify_again(parts, plan, calls, progress)
    held = all(check.holds(min(HOLDING_BITS, plan.headroom_bits)) for check in checks.values())
    bits = min(check.headroom_bits for check in checks.values())
    denoiser = checks["transformer"]
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
    return plan if held else plan_model(parts, plan.model, calls, plan.headroom_bits, progress)


def _tell_of_trips(request: Request, report: Report, guard: Guard, plan: PrecisionPlan) -> None:
    """Each event of the guard, and the plan as it was amended, written for the next picture."""
    for trip in guard.trips:
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
    components = {**plan.components, "transformer": guard.amended(plan.components["transformer"])}
    amended = replace(plan, components=components, proof={})
    path = OUTPUT / f"{display_name(request)}.amended.plan.toml"
    report.artifacts["amended_plan"] = str(write_plan(path, amended))


def choose_precision(request: Request, report: Report) -> str:
    """The precision asked for, or the one for this machine, with its reason in the report."""
    if request.precision != "auto":
        return request.precision
    from finitune.device.hardware import advise, read_facts

    device = choose_device(request.device)
    if device == "cpu":
        chosen = "planned-half"
        reason = "on a CPU the plan runs with the tensor core's meaning, at the cost of fp32"
        report.add(Level.NOTE, "PRECISION-CHOSEN", device, f"{chosen}: {reason}")
        return chosen
    facts = read_facts(int(device.partition(":")[2] or 0))
    advice = advise(facts)
    for warning in advice.warnings:
        report.add(Level.WARNING, "DEVICE-WARNING", facts.name, warning)
    report.add(Level.NOTE, "PRECISION-CHOSEN", facts.name, f"{advice.compute}: {'; '.join(advice.reasons)}")
    return advice.compute


def compare_with_bf16(
    parts: AnimaParts, settings: Settings, drawing: Drawing, progress: Progress | None
) -> dict[str, object]:
    """Distance of this picture, and of bf16's, to the one that fp32 draws."""
    from finitune.generation.planning import draw_in
    from finitune.journeys.plan import distances

    others = {name: draw_in(parts, name, [settings], progress=progress) for name in ("fp32", "bf16")}
    return distances({"planned-half": drawing, **others})


def receipt(request: Request, precision: str, fingerprint: str, plan: PrecisionPlan | None) -> dict[str, object]:
    """What a picture file says of itself: enough to draw it again."""
    from finitune import __version__

    return {
        "prompt": request.prompt,
        "negative": request.negative,
        "steps": request.steps,
        "cfg": request.cfg,
        "seed": request.seed,
        "size": request.size or default_size(request),
        "model": display_name(request),
        "fingerprint": fingerprint,
        "precision": precision,
        "plan": plan.dumps() if plan else None,
        "finitune": __version__,
    }


def _save(out: Path | None, drawing: Drawing, metadata: dict[str, object], *, good: bool) -> Path:
    from finitune.files.writer import not_read_back
    from finitune.generation.picture import read_metadata, save_picture

    out = out or OUTPUT / "{model}-{precision}-{seed}.png".format(**metadata)
    written = save_picture(out, drawing.pixels[0], metadata, good=good)
    if read_metadata(written) != metadata:
        raise not_read_back(written, "Check the disk, and write the picture elsewhere: --out FILE")
    return written
