"""What a model will do on a card that is not here, precision by precision: works, slow, wrong, or does not fit; why,
and who says so. `tell` is a pure function of the model's family and size and of the card's facts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from finitune.device.hardware import WHEELS, Advice, DeviceFacts, advise
from finitune.report import Finding, Level, Report, Table

if TYPE_CHECKING:
    from finitune.models.spec import ModelSpec

Verdict = Literal["works", "slow", "wrong", "does not fit", "not known", "not offered"]
PRECISIONS = ("fp32", "bf16", "raw-half", "planned-half", "current-half")
BYTES = {"fp32": 4, "bf16": 2, "raw-half": 2, "planned-half": 2, "current-half": 2}
"""Of one weight, as it lies on the card."""
FIT = 0.9
"""The share of a card's memory that weights may take; the rest is the system's and the activations'."""
COLUMNS = ("verdict", "weights", "why", "evidence")


@dataclass(frozen=True)
class Hazard:
    """What becomes of a family in plain fp16, and where that was found out."""

    wrong: bool
    why: str
    source: str


HAZARDS: Mapping[str, Hazard] = {
    "anima": Hazard(True, "its residual stream leaves fp16's range: NaN, and a black picture",
                    "ComfyUI PR #12249; sd-scripts PR #2277, after which NaN was still reported"),
    "flux": Hazard(True, "two places of its residual streams overflow, and clamping changes the picture",
                   "diffusers issue #9096, PR #9097"),
    "qwen-image": Hazard(True, "its residual stream reaches about 2e7: NaN, and a black picture",
                         "ComfyUI issues #10751 and #10668"),
    "sd15": Hazard(False, "it was trained and released in fp16; a VAE can still overflow on bright pictures",
                   "its release"),
    "sd2": Hazard(True, "attention logits overflow where they are made in fp16; fused attention does not make them",
                  "diffusers issue #1614"),
    "sdxl": Hazard(True, "the UNet works, but its VAE overflows unless it is the mended one (fp16-fix) or fp32",
                   "madebyollin/sdxl-vae-fp16-fix; force_upcast in the VAE's configuration"),
}  # fmt: skip
"""By family. See also the certificate of a plan, which measures it for one checkpoint."""

PLANNED = ("anima",)
"""The families whose pictures and trainings finitune computes, and so plans."""
SAYS_TRUE = (
    "torch.cuda.is_bf16_supported() says True here since torch 2.3, because a bf16 tensor can be made; programs that "
    "decide by it choose emulated bf16"
)
GTX = "fp16 convolutions give NaN on this card, and fp16 products of several rows are many times slower than fp32"
GTX_SOURCE = "pytorch issues #58123, #77955, #195716"
IDLE = "right, but the tensor cores stay idle"


@dataclass(frozen=True)
class Line:
    """One precision on a card."""

    precision: str
    verdict: Verdict
    why: str
    evidence: str = ""
    weight_bytes: int | None = None


@dataclass(frozen=True)
class Story:
    """All precisions on a card, and the one that finitune would take; "" where it computes no such model."""

    card: DeviceFacts
    lines: tuple[Line, ...]
    choice: str
    reasons: tuple[str, ...]

    def table(self) -> Table:
        """The lines for a person."""
        rows = tuple(
            (one.precision, one.verdict, gigabytes(one.weight_bytes), one.why, one.evidence) for one in self.lines
        )
        return Table("precision", (f"on {self.card.name}", *COLUMNS), rows)

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


def tell(family: ModelSpec | None, card: DeviceFacts, numbers: int | None = None, *, over: int = 0) -> Story:
    """The story of a model of a family (None: of no known one) on a card.

    `numbers` counts the weights that must lie on the card at once, None where that is not known; `over` counts the
    tensors whose weights themselves leave fp16's range.
    """
    advice = advise(card)
    name = family.name if family else ""
    lines = [line_of(precision, name, card, advice, over) for precision in PRECISIONS]
    lines = [fitted(line, numbers, card) for line in lines]
    return Story(card, tuple(lines), choice_of(lines, advice) if name in PLANNED else "", grounds(card, advice))


def line_of(precision: str, family: str, card: DeviceFacts, advice: Advice, over: int) -> Line:
    """The verdict on one precision, the size apart."""
    if precision == "fp32":
        if advice.tensor_cores:
            return Line(precision, "slow", f"{IDLE}; a half precision is several times faster", advice.reasons[0])
        return Line(precision, "works", "right on every card", advice.reasons[0])
    if precision == "bf16":
        return bf16_line(card, advice)
    if precision == "raw-half":
        return raw_line(family, card, advice, over)
    return scaled_line(precision, family, card, advice)


def bf16_line(card: DeviceFacts, advice: Advice) -> Line:
    """bf16 is native or emulated; never wrong, but coarse."""
    if advice.native_bf16:
        return Line("bf16", "works", "native; 8 bits of significand, so coarser than a planned fp16", advice.reasons[0])
    evidence = SAYS_TRUE if card.kind in ("cuda", "rocm") else advice.reasons[0]
    why = "emulated: right, and slower than fp32 on cards without tensor cores, than fp16 on those with them"
    return Line("bf16", "slow", why, evidence)


def raw_line(family: str, card: DeviceFacts, advice: Advice, over: int) -> Line:
    """Plain fp16: the card's own faults first, then the checkpoint's, then the family's."""
    if is_gtx16(card, advice):
        return Line("raw-half", "wrong", GTX, GTX_SOURCE)
    if over:
        return Line("raw-half", "wrong", f"weights of {over} tensors become infinite when they are cast", "this file")
    hazard = HAZARDS.get(family)
    if hazard is None:
        return Line(
            "raw-half",
            "not known",
            "nothing is known of this model in plain fp16; large ones overflow more often than not",
        )
    if hazard.wrong:
        return Line("raw-half", "wrong", hazard.why, hazard.source)
    if "planned-half" not in (advice.compute, *advice.alternatives) or not advice.tensor_cores:
        return Line("raw-half", "slow", f"{hazard.why}; not faster than fp32 here", advice.reasons[0])
    return Line("raw-half", "works", hazard.why, hazard.source)


def scaled_line(precision: str, family: str, card: DeviceFacts, advice: Advice) -> Line:
    """fp16 with scales, by a plan or by each call's own measurement."""
    if family not in PLANNED:
        why = "finitune computes pictures and trainings of Anima; other modules can be planned from a script"
        return Line(precision, "not offered", why)
    if is_gtx16(card, advice):
        return Line(precision, "wrong", GTX, GTX_SOURCE)
    if "planned-half" not in (advice.compute, *advice.alternatives):
        return Line(precision, "wrong", "fp16 products of this card are not to be relied on", advice.reasons[0])
    what = (
        "scales from the plan" if precision == "planned-half" else "each product measures its own scale, no plan needed"
    )
    if advice.compute == "planned-half" or advice.native_bf16:
        slower = "" if precision == "planned-half" else ", a pass more over each input"
        return Line(precision, "works", f"finite at every magnitude, {what}{slower}", advice.reasons[0])
    return Line(precision, "slow", f"right, {what}; saves memory, and no time over fp32", advice.reasons[0])


def is_gtx16(card: DeviceFacts, advice: Advice) -> bool:
    """Whether it is a Turing card that is known to be without tensor cores."""
    no_half = "planned-half" not in (advice.compute, *advice.alternatives)
    return card.kind == "cuda" and card.capability == (7, 5) and no_half


def fitted(line: Line, numbers: int | None, card: DeviceFacts) -> Line:
    """The line with the size of the weights, which has the last word on what would work."""
    if numbers is None:
        return line
    size = numbers * BYTES[line.precision]
    limit = FIT * card.total_memory_bytes
    if limit and size > limit and line.verdict in ("works", "slow"):
        memory = gigabytes(card.total_memory_bytes)
        why = f"weights of {gigabytes(size)} in {memory} of memory; with room for them: {line.verdict}"
        return Line(line.precision, "does not fit", why, line.evidence, size)
    return Line(line.precision, line.verdict, line.why, line.evidence, size)


def choice_of(lines: Iterable[Line], advice: Advice) -> str:
    """What finitune would take: what it is advised to, else the first alternative that works, however slowly."""
    verdicts = {line.precision: line.verdict for line in lines}
    ranked = [one for one in (advice.compute, *advice.alternatives) if verdicts[one] in ("works", "slow")]
    return ranked[0] if ranked else ""


def grounds(card: DeviceFacts, advice: Advice) -> tuple[str, ...]:
    """The reasons and warnings of the advice, and the wheel that such a card needs."""
    wheel = ""
    if card.kind == "cuda" and card.capability and card.capability < (7, 5):
        wheel = next(text for since, text in WHEELS if card.capability >= since)
    return tuple(text for text in (*advice.reasons, *advice.warnings, wheel) if text)


def findings_of(story: Story, subject: str) -> list[Finding]:
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
        message = f"on {card.name} bf16 is emulated. {SAYS_TRUE}"
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


def story_into(
    report: Report, gpu: str, subject: str, family: ModelSpec | None, numbers: int | None = None, over: int = 0
) -> None:
    """Add the story on the card `gpu` to a report; raises UsageError (GPU-UNKNOWN)."""
    from importlib.metadata import version

    from finitune.device.cards import card_named

    card, gib = card_named(gpu)
    story = tell(family, card.facts(version("torch"), gib), numbers, over=over)
    report.findings += findings_of(story, subject)
    report.figures["precision"] = story.figures()
    report.tables.append(story.table())


def gigabytes(count: int | None) -> str:
    """A size for a person; "-" where it is not known."""
    return "-" if count is None else f"{count / 2**30:.2f} GiB"
