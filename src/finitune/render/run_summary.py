"""What a person asks of a training run first, each with its answer: ended well, good files, safe, fits, how long."""

from __future__ import annotations

import math
from collections.abc import Mapping

from finitune.config.schema import TrainConfig
from finitune.render import format_evidence, format_value
from finitune.render.html import SummaryCard
from finitune.report import Report
from finitune.training.events import RangesMeasured, StepTaken
from finitune.training.history import TrainingHistory

_ANSWER_BY_FINISH_REASON = {
    "done": ("Done", True),
    "stopped": ("Stopped as asked", True),
    "given up": ("Given up by the guard", False),
}
_BYTE_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def build_summary_cards(config: TrainConfig, history: TrainingHistory, report: Report) -> list[SummaryCard]:
    """The first look at a run; only what is known."""
    cards = (
        build_outcome_card(config, history),
        build_files_card(history, report),
        build_learning_card(history),
        build_safety_card(history),
        build_memory_card(history),
        build_speed_card(history),
        build_precision_card(config, report),
    )
    return [card for card in cards if card]


def build_outcome_card(config: TrainConfig, history: TrainingHistory) -> SummaryCard:
    """Whether the run came to its end, and what can be done where it did not."""
    question = "Did it end well?"
    started, finished = history.started, history.finished
    if started is None:
        return SummaryCard(question, "Only measured" if history.measured else "Not begun", "no step was taken")
    if finished is None:
        saved = f"the last files are of step {history.saved[-1].step}" if history.saved else "no file was written"
        last = history.steps[-1].step if history.steps else started.first_step
        return SummaryCard(
            question, "Broken off", f"at step {format_value(last)} of {format_value(started.steps)}; {saved}", False
        )
    answer, good = _ANSWER_BY_FINISH_REASON.get(finished.reason, (finished.reason, None))
    begun = f" (from step {started.first_step})" if started.first_step else ""
    seconds = sum(event.seconds for events in (history.steps, history.saved, history.previews) for event in events)
    detail = (
        f"{format_value(finished.step)} of {format_value(started.steps)} steps{begun} in {format_duration(seconds)}"
    )
    if finished.reason == "stopped" and config.saving.save_state:
        detail += "; --resume goes on from here"
    return SummaryCard(question, answer, detail, good)


def build_files_card(history: TrainingHistory, report: Report) -> SummaryCard:
    """Whether there are adapter files that were read back, and what loads them."""
    question = "Are the files good?"
    written = {path for saved in history.saved for name, path in saved.paths.items() if name != "state"}
    if not written:
        return SummaryCard(question, "No file", "none was written", None if history.started is None else False)
    answer = f"{len(written)} read back and checked"
    verified = report.figures.get("verified")
    loads = {}
    for facts in verified.values() if isinstance(verified, Mapping) else ():
        loads |= facts.get("loads", {})
    programs = [program for program, verdict in loads.items() if verdict == "yes"]
    said = f"the last one loads in {', '.join(programs)}" if programs else "finite, and equal to what was trained"
    return SummaryCard(question, answer, said, True)


def build_learning_card(history: TrainingHistory) -> SummaryCard | None:
    """What became of the loss on pictures kept out, or, without them, of the smoothed loss."""
    held = [one.loss for one in history.validations]
    losses = held or [step.smoothed for step in history.steps]
    losses = [loss for loss in losses if math.isfinite(loss)]
    if len(losses) < 2:
        return None
    first, last = losses[0], losses[-1]
    change = f"{100 * (last / first - 1):+.0f} %" if first > 0 else f"{last - first:+.4g}"
    of = "loss on pictures kept out" if held else "smoothed loss; no pictures were kept out to measure on"
    return SummaryCard(
        "Did it learn?", change, f"{of}: {format_value(first)} to {format_value(last)}", last < first if held else None
    )


def build_safety_card(history: TrainingHistory) -> SummaryCard | None:
    """How many steps were not finite, and what the guard did about them."""
    if not history.steps:
        return None
    bad = sum(map(is_bad_step, history.steps))
    answer = "No step was non-finite"
    if bad:
        answer = f"{format_value(bad)} of {format_grouped_count(len(history.steps), 'step')} left out"
    return SummaryCard("Was it safe?", answer, format_evidence(history.steps[-1].counts), not bad)


def build_memory_card(history: TrainingHistory) -> SummaryCard | None:
    """Peak memory, measured on one real step, and the most that the run took."""
    measured = history.measured
    if measured is None:
        return None
    width, height = measured.bucket
    total = f" of {format_byte_size(measured.memory_total)}" if measured.memory_total else ""
    detail = f"measured at {width} x {height}, {format_grouped_count(measured.batch, 'picture')}"
    if measured.split > 1:
        detail += f" in {measured.split} parts"
    peak = max((step.memory for step in history.steps), default=0)
    if peak:
        detail += f"; {format_byte_size(peak)} in the run"
    fits = measured.memory_peak <= measured.memory_total if measured.memory_total else None
    return SummaryCard("Does it fit?", f"{format_byte_size(measured.memory_peak)}{total}", detail, fits)


def build_speed_card(history: TrainingHistory) -> SummaryCard | None:
    """Seconds for a step, as measured before and as they were."""
    measured, steps = history.measured, history.steps
    said = ""
    if measured:
        step, save = format_duration(measured.step_seconds), format_duration(measured.save_seconds)
        said = f"measured: a step {step}, a save {save}"
        if measured.preview_seconds is not None:
            said += f", the previews {format_duration(measured.preview_seconds)}"
    seconds = sum(step.seconds for step in steps) / len(steps) if steps else measured and measured.step_seconds
    if seconds is None:
        return None
    return SummaryCard("How long does it take?", f"{format_duration(seconds)} a step", said)


def build_precision_card(config: TrainConfig, report: Report) -> SummaryCard | None:
    chosen = report.figures.get("precision")
    if chosen is None:
        return None
    told = [finding.message for finding in report.findings if finding.code == "PRECISION-CHOSEN"]
    reason = told[0].removeprefix(f"{chosen}: ") if told else f"as asked: precision = {config.model.precision}"
    return SummaryCard("In what precision?", str(chosen), reason)


def is_bad_step(step: StepTaken) -> bool:
    """Whether a step was left out, or shows a number that is not finite."""
    return not (step.taken and math.isfinite(step.loss))


def compute_headroom_bits(ranged: RangesMeasured) -> float:
    """Powers of two between the largest magnitude and fp16's end; minus infinity where one is not finite."""
    return ranged.headroom_bits if all(map(math.isfinite, ranged.amax.values())) else -math.inf


def format_grouped_count(count: int, noun: str) -> str:
    """One thing, or many.

    >>> format_grouped_count(1, "picture"), format_grouped_count(12000, "picture")
    ('1 picture', '12 000 pictures')
    """
    return f"{format_value(count)} {noun}{'' if count == 1 else 's'}"


def format_duration(seconds: float) -> str:
    """A duration as a person says it.

    >>> format_duration(0.0213), format_duration(41.7), format_duration(192), format_duration(15_120)
    ('0.021 s', '42 s', '3 min 12 s', '4 h 12 min')
    """
    if not math.isfinite(seconds):
        return "an unknown time"
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_byte_size(count: int) -> str:
    """A size in the unit that suits it.

    >>> format_byte_size(17), format_byte_size(944_361_472), format_byte_size(15 * 2**30)
    ('17 bytes', '901 MiB', '15 GiB')
    """
    for size, unit in _BYTE_UNITS:
        if count >= size:
            number = f"{count / size:.3g}" if count < 1000 * size else format_value(round(count / size))
            return f"{number} {unit}"
    return f"{count} bytes"
