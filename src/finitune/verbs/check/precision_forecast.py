"""What a model will do on a card that is not here, precision by precision: works, slow, wrong, or does not fit; why,
and who says so. `tell` is a pure function of the model's family and size and of the card's facts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

from finitune.machine.cards import find_gpu_model
from finitune.machine.hardware import WHEEL_REMEDY_BY_CAPABILITY, Advice, DeviceFacts, advise
from finitune.models import MODEL_FAMILIES
from finitune.models.spec import ModelSpec
from finitune.report import Finding, Level, Report, Table

ForecastVerdict = Literal["works", "slow", "wrong", "does not fit", "not known", "not offered"]
FORECAST_PRECISIONS = ("fp32", "bf16", "raw-half", "planned-half", "current-half")
_BYTES_PER_WEIGHT = {"fp32": 4, "bf16": 2, "raw-half": 2, "planned-half": 2, "current-half": 2}
"""Of one weight, as it lies on the card."""
_MAX_MEMORY_SHARE = 0.9
"""The share of a card's memory that weights may take; the rest is the system's and the activations'."""
_FORECAST_COLUMNS = ("verdict", "weights", "why", "evidence")


_BF16_SUPPORT_NOTE = (
    "torch.cuda.is_bf16_supported() says True here since torch 2.3, because a bf16 tensor can be made; programs that "
    "decide by it choose emulated bf16"
)
_GTX16_FAULT = (
    "fp16 convolutions give NaN on this card, and fp16 products of several rows are many times slower than fp32"
)
_GTX16_FAULT_SOURCE = "pytorch issues #58123, #77955, #195716"
_IDLE_CORES_NOTE = "right, but the tensor cores stay idle"


@dataclass(frozen=True)
class PrecisionForecast:
    """One precision on a card."""

    precision: str
    verdict: ForecastVerdict
    why: str
    evidence: str = ""
    weight_bytes: int | None = None


@dataclass(frozen=True)
class GpuForecast:
    """All precisions on a card, and the one that finitune would take; "" where it computes no such model."""

    card: DeviceFacts
    lines: tuple[PrecisionForecast, ...]
    choice: str
    reasons: tuple[str, ...]

    def table(self) -> Table:
        """The lines for a person."""
        rows = tuple(
            (one.precision, one.verdict, format_gibibytes(one.weight_bytes), one.why, one.evidence)
            for one in self.lines
        )
        return Table("precision", (f"on {self.card.name}", *_FORECAST_COLUMNS), rows)

    def figures(self) -> dict[str, object]:
        """The same for a program."""
        return {
            "gpu": self.card.name,
            "gpu_memory_bytes": self.card.total_memory_bytes,
            "choice": self.choice or None,
            "reasons": list(self.reasons),
            "precisions": {
                one.precision: {
                    "verdict": one.verdict,
                    "why": one.why,
                    "evidence": one.evidence,
                    "weight_bytes": one.weight_bytes,
                }
                for one in self.lines
            },
        }


def forecast_gpu(
    family: ModelSpec | None, card: DeviceFacts, numbers: int | None = None, *, over: int = 0
) -> GpuForecast:
    """The story of a model of a family (None: of no known one) on a card.

    `numbers` counts the weights that must lie on the card at once, None where that is not known; `over` counts the
    tensors whose weights themselves leave fp16's range.
    """
    advice = advise(card)
    lines = [forecast_precision(precision, family, card, advice, over) for precision in FORECAST_PRECISIONS]
    lines = [apply_memory_limit(line, numbers, card) for line in lines]
    return GpuForecast(
        card,
        tuple(lines),
        choose_forecast_precision(lines, advice) if family and family.runtime else "",
        list_advice_reasons(card, advice),
    )


def forecast_precision(
    precision: str, family: ModelSpec | None, card: DeviceFacts, advice: Advice, over: int
) -> PrecisionForecast:
    """The verdict on one precision, the size apart."""
    if precision == "fp32":
        if advice.tensor_cores:
            return PrecisionForecast(
                precision, "slow", f"{_IDLE_CORES_NOTE}; a half precision is several times faster", advice.reasons[0]
            )
        return PrecisionForecast(precision, "works", "right on every card", advice.reasons[0])
    if precision == "bf16":
        return forecast_bf16(card, advice)
    if precision == "raw-half":
        return forecast_raw_half(family, card, advice, over)
    return forecast_scaled_half(precision, family, card, advice)


def forecast_bf16(card: DeviceFacts, advice: Advice) -> PrecisionForecast:
    """bf16 is native or emulated; never wrong, but coarse."""
    if advice.native_bf16:
        return PrecisionForecast(
            "bf16", "works", "native; 8 bits of significand, so coarser than a planned fp16", advice.reasons[0]
        )
    evidence = _BF16_SUPPORT_NOTE if card.kind in ("cuda", "rocm") else advice.reasons[0]
    why = "emulated: right, and slower than fp32 on cards without tensor cores, than fp16 on those with them"
    return PrecisionForecast("bf16", "slow", why, evidence)


def forecast_raw_half(family: ModelSpec | None, card: DeviceFacts, advice: Advice, over: int) -> PrecisionForecast:
    """Plain fp16: the card's own faults first, then the checkpoint's, then the family's."""
    if is_gtx16(card, advice):
        return PrecisionForecast("raw-half", "wrong", _GTX16_FAULT, _GTX16_FAULT_SOURCE)
    if over:
        return PrecisionForecast(
            "raw-half", "wrong", f"weights of {over} tensors become infinite when they are cast", "this file"
        )
    hazard = family and family.fp16
    if hazard is None:
        return PrecisionForecast(
            "raw-half",
            "not known",
            "nothing is known of this model in plain fp16; large ones overflow more often than not",
        )
    if hazard.wrong:
        return PrecisionForecast("raw-half", "wrong", hazard.why, hazard.source)
    if "planned-half" not in (advice.compute, *advice.alternatives) or not advice.tensor_cores:
        return PrecisionForecast("raw-half", "slow", f"{hazard.why}; not faster than fp32 here", advice.reasons[0])
    return PrecisionForecast("raw-half", "works", hazard.why, hazard.source)


def forecast_scaled_half(
    precision: str, family: ModelSpec | None, card: DeviceFacts, advice: Advice
) -> PrecisionForecast:
    """fp16 with scales, by a plan or by each call's own measurement."""
    if family is None or not family.runtime:
        titles = " and ".join(one.title for one in MODEL_FAMILIES if one.runtime)
        why = f"finitune computes pictures and trainings of {titles}; other modules can be planned from a script"
        return PrecisionForecast(precision, "not offered", why)
    if is_gtx16(card, advice):
        return PrecisionForecast(precision, "wrong", _GTX16_FAULT, _GTX16_FAULT_SOURCE)
    if "planned-half" not in (advice.compute, *advice.alternatives):
        return PrecisionForecast(
            precision, "wrong", "fp16 products of this card are not to be relied on", advice.reasons[0]
        )
    what = (
        "scales from the plan" if precision == "planned-half" else "each product measures its own scale, no plan needed"
    )
    if advice.compute == "planned-half" or advice.native_bf16:
        slower = "" if precision == "planned-half" else ", a pass more over each input"
        return PrecisionForecast(precision, "works", f"finite at every magnitude, {what}{slower}", advice.reasons[0])
    return PrecisionForecast(
        precision, "slow", f"right, {what}; saves memory, and no time over fp32", advice.reasons[0]
    )


def is_gtx16(card: DeviceFacts, advice: Advice) -> bool:
    """Whether it is a Turing card that is known to be without tensor cores."""
    no_half = "planned-half" not in (advice.compute, *advice.alternatives)
    return card.kind == "cuda" and card.capability == (7, 5) and no_half


def apply_memory_limit(line: PrecisionForecast, numbers: int | None, card: DeviceFacts) -> PrecisionForecast:
    """The line with the size of the weights, which has the last word on what would work."""
    if numbers is None:
        return line
    size = numbers * _BYTES_PER_WEIGHT[line.precision]
    limit = _MAX_MEMORY_SHARE * card.total_memory_bytes
    if limit and size > limit and line.verdict in ("works", "slow"):
        memory = format_gibibytes(card.total_memory_bytes)
        why = f"weights of {format_gibibytes(size)} in {memory} of memory; with room for them: {line.verdict}"
        return PrecisionForecast(line.precision, "does not fit", why, line.evidence, size)
    return PrecisionForecast(line.precision, line.verdict, line.why, line.evidence, size)


def choose_forecast_precision(lines: Iterable[PrecisionForecast], advice: Advice) -> str:
    """What finitune would take: what it is advised to, else the first alternative that works, however slowly."""
    verdicts = {line.precision: line.verdict for line in lines}
    ranked = [one for one in (advice.compute, *advice.alternatives) if verdicts[one] in ("works", "slow")]
    return ranked[0] if ranked else ""


def list_advice_reasons(card: DeviceFacts, advice: Advice) -> tuple[str, ...]:
    """The reasons and warnings of the advice, and the wheel that such a card needs."""
    wheel = ""
    if card.kind == "cuda" and card.capability and card.capability < (7, 5):
        wheel = next(text for since, text in WHEEL_REMEDY_BY_CAPABILITY if card.capability >= since)
    return tuple(text for text in (*advice.reasons, *advice.warnings, wheel) if text)


def build_forecast_findings(story: GpuForecast, subject: str) -> list[Finding]:
    """What a person should know first: the choice, an emulated bf16, and that it does not fit."""
    found: list[Finding] = []
    card, by_name = story.card, {line.precision: line for line in story.lines}
    bf16, raw = by_name["bf16"], by_name["raw-half"]
    homeless = [line.precision for line in story.lines if line.verdict == "does not fit"]
    if homeless and not any(line.verdict in ("works", "slow") for line in story.lines):
        found.append(
            Finding(
                Level.WARNING,
                "GPU-TOO-SMALL",
                subject,
                f"on {card.name} its weights fit in no precision that gives a right picture",
                {"memory": card.total_memory_bytes, **{line.precision: line.weight_bytes for line in story.lines}},
                "Parts can take turns on the card, or lie in the computer's memory: offload_blocks in training.",
            )
        )
    if card.kind == "cuda" and bf16.verdict == "slow":
        message = f"on {card.name} bf16 is emulated. {_BF16_SUPPORT_NOTE}"
        remedy = "Set fp16 with a plan, or fp32, in programs that would choose bf16; finitune does so by itself."
        evidence: dict[str, object] = {"capability": card.capability}
        found.append(Finding(Level.WARNING, "BF16-EMULATED", card.name, message, evidence, remedy))
    if raw.verdict == "wrong":
        message = f"on {card.name} plain fp16 goes wrong: {raw.why}"
        right = [line.precision for line in story.lines if line.verdict in ("works", "slow")]
        remedy = f"Right there: {', '.join(right)}; the table says at what speed." if right else ""
        found.append(Finding(Level.WARNING, "FP16-GOES-WRONG", subject, message, {"evidence": raw.evidence}, remedy))
    if story.choice:
        message = f"on {card.name} finitune would compute in {story.choice}. {'. '.join(story.reasons)}"
        found.append(Finding(Level.NOTE, "GPU-PRECISION", card.name, message, {"choice": story.choice}))
    return found


def add_gpu_forecast(
    report: Report, gpu: str, subject: str, family: ModelSpec | None, numbers: int | None = None, over: int = 0
) -> None:
    """Add the story on the card `gpu` to a report; raises UsageError (GPU-UNKNOWN)."""

    card, gib = find_gpu_model(gpu)
    story = forecast_gpu(family, card.facts(version("torch"), gib), numbers, over=over)
    report.findings += build_forecast_findings(story, subject)
    report.figures["precision"] = story.figures()
    report.tables.append(story.table())


def format_gibibytes(count: int | None) -> str:
    """A size for a person; "-" where it is not known."""
    return "-" if count is None else f"{count / 2**30:.2f} GiB"
