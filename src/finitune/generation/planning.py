"""From a model and prompts to a plan and its proof: record an fp32 run, plan each part, check it on every call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from finitune.generation.draw import Drawing, decode_call, draw, recorded
from finitune.generation.precisions import COMPONENTS, in_precision
from finitune.generation.settings import Settings
from finitune.models.anima.load import AnimaParts
from finitune.precision.certificate import Certificate, Check, check, prove
from finitune.precision.plan import PrecisionPlan
from finitune.precision.planner import Call, plan_component
from finitune.progress import Progress, Silent

#: Components that take latents: their border is fp32, so that latents and timesteps stay exact.
FP32_BORDERS = ("transformer", "vae")

Calls = Mapping[str, Sequence[Call]]


def calibrate(
    parts: AnimaParts, pictures: Sequence[Settings], progress: Progress | None = None
) -> tuple[dict[str, list[Call]], Drawing]:
    """Draw the pictures in fp32, as one batch; every call that was made of each component, and the drawing."""
    with in_precision(parts, "fp32") as running, recorded(running) as recording:
        drawing = draw(running, pictures, progress)
    recording.calls["vae"] = [decode_call(parts.vae, drawing.latents)]
    return recording.calls, drawing


def plan_model(
    parts: AnimaParts, name: str, calls: Calls, headroom_bits: float = 2, progress: Progress | None = None
) -> PrecisionPlan:
    """The smallest plan of every component."""
    progress = progress or Silent()
    progress.start("planning", len(COMPONENTS))
    components = {}
    for component in COMPONENTS:
        border = "fp32" if component in FP32_BORDERS else "fp16"
        components[component] = plan_component(getattr(parts, component), calls[component], headroom_bits, border)
        progress.advance("planning")
    progress.finish("planning")
    measured = ", ".join(f"{len(calls[component])} of {component}" for component in COMPONENTS)
    return PrecisionPlan(name, parts.fingerprint, headroom_bits, f"calls measured: {measured}", components)


def certify(
    parts: AnimaParts, plan: PrecisionPlan, calls: Calls, progress: Progress | None = None
) -> dict[str, Certificate]:
    """The certificate of every component, on every call."""
    progress = progress or Silent()
    progress.start("proving", len(COMPONENTS))
    certificates = {}
    for component, component_plan in plan.components.items():
        certificates[component] = prove(getattr(parts, component), component_plan, calls[component], plan.headroom_bits)
        progress.advance("proving")
    progress.finish("proving")
    return certificates


def certify_again(
    parts: AnimaParts, plan: PrecisionPlan, calls: Calls, progress: Progress | None = None
) -> dict[str, Check]:
    """How a plan made for the parts as they were holds for the parts as they are, component by component."""
    progress = progress or Silent()
    progress.start("certifying again", len(plan.components))
    checks: dict[str, Check] = {}
    for component, component_plan in plan.components.items():
        checks[component] = check(getattr(parts, component), component_plan, calls[component])
        progress.advance("certifying again")
    progress.finish("certifying again")
    return checks


def draw_in(
    parts: AnimaParts,
    precision: str,
    pictures: Sequence[Settings],
    plan: PrecisionPlan | None = None,
    progress: Progress | None = None,
) -> Drawing:
    """The pictures in one precision."""
    with in_precision(parts, precision, plan) as running:
        return draw(running, pictures, progress)
