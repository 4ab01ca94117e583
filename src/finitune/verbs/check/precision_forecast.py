"""What a model will do on a card that is not here, precision by precision: works, slow, wrong, or does not fit; why,
and who says so. `tell` is a pure function of the model's family and size and of the card's facts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Literal, cast

from finitune.machine.cards import find_gpu_model
from finitune.machine.hardware import WHEEL_REMEDY_BY_CAPABILITY, Advice, DeviceFacts, advise
from finitune.models import MODEL_FAMILIES
from finitune.models.spec import ModelSpec
from finitune.report import Finding, Level, Report, Table

ForecastVerdict = Literal["works", "slow", "wrong", "does not fit", "not known", "not offered"]
Judgement = tuple[ForecastVerdict, str, str]
"""The verdict, why, and what says so."""
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
        rows = tuple(
            (one.precision, one.verdict, format_gibibytes(one.weight_bytes), one.why, one.evidence)
            for one in self.lines
        )
        return Table("precision", (f"on {self.card.name}", *_FORECAST_COLUMNS), rows)

    def figures(self) -> dict[str, object]:
        return {
            "gpu": self.card.name,
            "gpu_memory_bytes": self.card.total_memory_bytes,
            "choice": self.choice or None,
            "reasons": list(self.reasons),
            "precisions": {
                one.precision: {name: value for name, value in asdict(one).items() if name != "precision"}
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
    lines = []
    for precision in FORECAST_PRECISIONS:
        line = PrecisionForecast(precision, *judge_precision(precision, family, card, advice, over))
        lines.append(apply_memory_limit(line, numbers, card))
    choice = ""
    if family and family.runtime:  # what is advised, else the first alternative that works, however slowly
        right = {line.precision for line in lines if line.verdict in ("works", "slow")}
        choice = next((one for one in (advice.compute, *advice.alternatives) if one in right), "")
    wheel = ""
    if card.kind == "cuda" and card.capability and card.capability < (7, 5):
        wheel = next(text for since, text in WHEEL_REMEDY_BY_CAPABILITY if card.capability >= since)
    reasons = tuple(text for text in (*advice.reasons, *advice.warnings, wheel) if text)
    return GpuForecast(card, tuple(lines), choice, reasons)


def judge_precision(
    precision: str, family: ModelSpec | None, card: DeviceFacts, advice: Advice, over: int
) -> Judgement:
    """The verdict on one precision, the size apart."""
    reason = advice.reasons[0]
    if precision == "fp32":
        if advice.tensor_cores:
            why = "right, but the tensor cores stay idle; a half precision is several times faster"
            return "slow", why, reason
        return "works", "right on every card", reason
    if precision == "bf16":  # native or emulated; never wrong, but coarse
        if advice.native_bf16:
            return "works", "native; 8 bits of significand, so coarser than a planned fp16", reason
        evidence = _BF16_SUPPORT_NOTE if card.kind in ("cuda", "rocm") else reason
        why = "emulated: right, and slower than fp32 on cards without tensor cores, than fp16 on those with them"
        return "slow", why, evidence
    relied_on = "planned-half" in (advice.compute, *advice.alternatives)
    gtx16 = card.kind == "cuda" and card.capability == (7, 5) and not relied_on  # Turing without tensor cores
    if precision == "raw-half":
        if gtx16:
            return "wrong", _GTX16_FAULT, _GTX16_FAULT_SOURCE
        return judge_raw_half(family, reason, over, fast=relied_on and advice.tensor_cores)
    if family is None or not family.runtime:
        titles = " and ".join(one.title for one in MODEL_FAMILIES if one.runtime)
        why = f"finitune computes pictures and trainings of {titles}; other modules can be planned from a script"
        return "not offered", why, ""
    if gtx16:
        return "wrong", _GTX16_FAULT, _GTX16_FAULT_SOURCE
    if not relied_on:
        return "wrong", "fp16 products of this card are not to be relied on", reason
    planned = precision == "planned-half"
    what = "scales from the plan" if planned else "each product measures its own scale, no plan needed"
    if advice.compute == "planned-half" or advice.native_bf16:
        slower = "" if planned else ", a pass more over each input"
        return "works", f"finite at every magnitude, {what}{slower}", reason
    return "slow", f"right, {what}; saves memory, and no time over fp32", reason


def judge_raw_half(family: ModelSpec | None, reason: str, over: int, *, fast: bool) -> Judgement:
    """Plain fp16 on a card that has it: the checkpoint's own fault first, then the family's."""
    if over:
        return "wrong", f"weights of {over} tensors become infinite when they are cast", "this file"
    hazard = family and family.fp16
    if hazard is None:
        why = "nothing is known of this model in plain fp16; large ones overflow more often than not"
        return "not known", why, ""
    if hazard.wrong:
        return "wrong", hazard.why, hazard.source
    if not fast:
        return "slow", f"{hazard.why}; not faster than fp32 here", reason
    return "works", hazard.why, hazard.source


def apply_memory_limit(line: PrecisionForecast, numbers: int | None, card: DeviceFacts) -> PrecisionForecast:
    """The line with the size of the weights, which has the last word on what would work."""
    if numbers is None:
        return line
    size = numbers * _BYTES_PER_WEIGHT[line.precision]
    limit = _MAX_MEMORY_SHARE * card.total_memory_bytes
    if limit and size > limit and line.verdict in ("works", "slow"):
        memory = format_gibibytes(card.total_memory_bytes)
        why = f"weights of {format_gibibytes(size)} in {memory} of memory; with room for them: {line.verdict}"
        return replace(line, verdict="does not fit", why=why, weight_bytes=size)
    return replace(line, weight_bytes=size)


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


def add_gpu_forecast(report: Report, gpu: str, subject: str) -> None:
    """What the model of a report, or the one of its adapter, does on a card; raises UsageError (GPU-UNKNOWN)."""
    figures = report.figures
    family = next((one for one in MODEL_FAMILIES if one.name == figures.get("family")), None)
    numbers, over = cast("int | None", figures.get("numbers")), cast("int", figures.get("tensors_beyond_fp16", 0))
    card, gib = find_gpu_model(gpu)
    story = forecast_gpu(family, card.facts(version("torch"), gib), numbers, over=over)
    report.findings += build_forecast_findings(story, subject)
    figures["precision"] = story.figures()
    report.tables.append(story.table())


def format_gibibytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**30:.2f} GiB"
