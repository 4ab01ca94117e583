"""From a model and prompts to a plan and its proof: record an fp32 run, plan each part, check it on every call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from finitune.generation.draw import DrawnPictures, build_decode_call, draw_picture_batch, record_component_calls
from finitune.generation.precisions import open_in_precision
from finitune.generation.settings import PictureSettings
from finitune.models.loaded import LoadedModel
from finitune.precision.certificate import PlanCertificate, PlanCheck, check_component_plan, prove_component_plan
from finitune.precision.plan import PrecisionPlan
from finitune.precision.planner import RecordedCall, plan_component
from finitune.progress import Progress, SilentProgress

CallsByComponent = Mapping[str, Sequence[RecordedCall]]


def calibrate_model(
    parts: LoadedModel, pictures: Sequence[PictureSettings], progress: Progress | None = None
) -> tuple[dict[str, list[RecordedCall]], DrawnPictures]:
    """Draw the pictures in fp32, as one batch; every call that was made of each component, and the drawing."""
    with open_in_precision(parts, "fp32") as running, record_component_calls(running) as recording:
        drawing = draw_picture_batch(running, pictures, progress)
    recording.calls |= {one.name: [build_decode_call(parts, drawing.latents)] for one in parts.modules if one.decoder}
    return recording.calls, drawing


def make_model_plan(
    parts: LoadedModel, name: str, calls: CallsByComponent, headroom_bits: float = 2, progress: Progress | None = None
) -> PrecisionPlan:
    """The smallest plan of every component."""
    progress = progress or SilentProgress()
    progress.start("planning", len(parts.modules))
    components = {}
    for one in parts.modules:
        components[one.name] = plan_component(parts.module(one.name), calls[one.name], headroom_bits, one.border)
        progress.advance("planning")
    progress.finish("planning")
    measured = ", ".join(f"{len(calls[one.name])} of {one.name}" for one in parts.modules)
    return PrecisionPlan(name, parts.fingerprint, headroom_bits, f"calls measured: {measured}", components)


def certify_model_plan(
    parts: LoadedModel, plan: PrecisionPlan, calls: CallsByComponent, progress: Progress | None = None
) -> dict[str, PlanCertificate]:
    """The certificate of every component, on every call."""
    progress = progress or SilentProgress()
    progress.start("proving", len(plan.components))
    certificates = {}
    for component, component_plan in plan.components.items():
        certificates[component] = prove_component_plan(
            parts.module(component), component_plan, calls[component], plan.headroom_bits
        )
        progress.advance("proving")
    progress.finish("proving")
    return certificates


def recheck_model_plan(
    parts: LoadedModel, plan: PrecisionPlan, calls: CallsByComponent, progress: Progress | None = None
) -> dict[str, PlanCheck]:
    """How a plan made for the parts as they were holds for the parts as they are, component by component."""
    progress = progress or SilentProgress()
    progress.start("certifying again", len(plan.components))
    checks: dict[str, PlanCheck] = {}
    for component, component_plan in plan.components.items():
        checks[component] = check_component_plan(parts.module(component), component_plan, calls[component])
        progress.advance("certifying again")
    progress.finish("certifying again")
    return checks


def draw_in_precision(
    parts: LoadedModel,
    precision: str,
    pictures: Sequence[PictureSettings],
    plan: PrecisionPlan | None = None,
    progress: Progress | None = None,
) -> DrawnPictures:
    """The pictures in one precision."""
    with open_in_precision(parts, precision, plan) as running:
        return draw_picture_batch(running, pictures, progress)
