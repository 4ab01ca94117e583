"""What a person asks of a training run first, each with its answer: ended well, good files, safe, fits, how long."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from finitune.config.schema import TrainConfig
from finitune.render import numbers, spelled
from finitune.render.html import Card
from finitune.report import Report
from finitune.training.events import Ranged, Stepped
from finitune.training.history import History

ENDS = {"done": ("Done", True), "stopped": ("Stopped as asked", True), "given up": ("Given up by the guard", False)}
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def answers(config: TrainConfig, history: History, report: Report) -> list[Card]:
    """The first look at a run; only what is known."""
    cards = (
        ending(config, history),
        files(history, report),
        learning(history),
        safety(history),
        fit(history),
        speed(history),
        precision(config, report),
    )
    return [card for card in cards if card]


def ending(config: TrainConfig, history: History) -> Card:
    """Whether the run came to its end, and what can be done where it did not."""
    question = "Did it end well?"
    started, finished = history.started, history.finished
    if started is None:
        return Card(question, "Only measured" if history.measured else "Not begun", "no step was taken")
    if finished is None:
        saved = f"the last files are of step {history.saved[-1].step}" if history.saved else "no file was written"
        last = history.steps[-1].step if history.steps else started.first_step
        return Card(question, "Broken off", f"at step {spelled(last)} of {spelled(started.steps)}; {saved}", False)
    answer, good = ENDS.get(finished.reason, (finished.reason, None))
    begun = f" (from step {started.first_step})" if started.first_step else ""
    detail = f"{spelled(finished.step)} of {spelled(started.steps)} steps{begun} in {spelled_time(elapsed(history))}"
    if finished.reason == "stopped" and config.saving.save_state:
        detail += "; --resume goes on from here"
    return Card(question, answer, detail, good)


def files(history: History, report: Report) -> Card:
    """Whether there are adapter files that were read back, and what loads them."""
    question = "Are the files good?"
    written = {path for saved in history.saved for name, path in saved.paths.items() if name != "state"}
    if not written:
        return Card(question, "No file", "none was written", None if history.started is None else False)
    answer = f"{len(written)} read back and checked"
    verified = report.figures.get("verified")
    loads = {}
    for facts in verified.values() if isinstance(verified, Mapping) else ():
        loads |= facts.get("loads", {})
    programs = [program for program, verdict in loads.items() if verdict == "yes"]
    said = f"the last one loads in {', '.join(programs)}" if programs else "finite, and equal to what was trained"
    return Card(question, answer, said, True)


def learning(history: History) -> Card | None:
    """What became of the loss on pictures kept out, or, without them, of the smoothed loss."""
    held = [one.loss for one in history.validations]
    losses = held or [step.smoothed for step in history.steps]
    losses = [loss for loss in losses if math.isfinite(loss)]
    if len(losses) < 2:
        return None
    first, last = losses[0], losses[-1]
    change = f"{100 * (last / first - 1):+.0f} %" if first > 0 else f"{last - first:+.4g}"
    of = "loss on pictures kept out" if held else "smoothed loss; no pictures were kept out to measure on"
    return Card("Did it learn?", change, f"{of}: {spelled(first)} to {spelled(last)}", last < first if held else None)


def safety(history: History) -> Card | None:
    """How many steps were not finite, and what the guard did about them."""
    if not history.steps:
        return None
    bad = sum(map(is_bad, history.steps))
    answer = f"{spelled(bad)} of {counted(len(history.steps), 'step')} left out" if bad else "No step was non-finite"
    return Card("Was it safe?", answer, numbers(history.steps[-1].counts), not bad)


def fit(history: History) -> Card | None:
    """Peak memory, measured on one real step, and the most that the run took."""
    measured = history.measured
    if measured is None:
        return None
    width, height = measured.bucket
    total = f" of {spelled_bytes(measured.memory_total)}" if measured.memory_total else ""
    detail = f"measured at {width} x {height}, {counted(measured.batch, 'picture')}"
    if measured.split > 1:
        detail += f" in {measured.split} parts"
    peak = max((step.memory for step in history.steps), default=0)
    if peak:
        detail += f"; {spelled_bytes(peak)} in the run"
    fits = measured.memory_peak <= measured.memory_total if measured.memory_total else None
    return Card("Does it fit?", f"{spelled_bytes(measured.memory_peak)}{total}", detail, fits)


def speed(history: History) -> Card | None:
    """Seconds for a step, as measured before and as they were."""
    measured, steps = history.measured, history.steps
    said = []
    if measured:
        drawn = "" if measured.preview_seconds is None else f", the previews {spelled_time(measured.preview_seconds)}"
        said = [f"measured: a step {spelled_time(measured.step_seconds)}, a save {spelled_time(measured.save_seconds)}"]
        said[0] += drawn
    seconds = sum(step.seconds for step in steps) / len(steps) if steps else measured and measured.step_seconds
    if seconds is None:
        return None
    return Card("How long does it take?", f"{spelled_time(seconds)} a step", "; ".join(said))


def precision(config: TrainConfig, report: Report) -> Card | None:
    """What it computes in, and why."""
    chosen = report.figures.get("precision")
    if chosen is None:
        return None
    reasons = [finding.message.partition(": ")[2] for finding in report.findings if finding.code == "PRECISION-CHOSEN"]
    reason = reasons[0] if reasons else f"as asked: precision = {config.model.precision}"
    return Card("In what precision?", str(chosen), reason)


def is_bad(step: Stepped) -> bool:
    """Whether a step was left out, or shows a number that is not finite."""
    return not (step.taken and math.isfinite(step.loss))


def headroom(ranged: Ranged) -> float:
    """Powers of two between the largest magnitude and fp16's end; minus infinity where one is not finite."""
    return ranged.headroom_bits if all(map(math.isfinite, ranged.amax.values())) else -math.inf


def elapsed(history: History) -> float:
    """Seconds in steps, saves and previews together."""
    return sum(event.seconds for events in (history.steps, history.saved, history.previews) for event in events)


def shown_path(path: Path, folder: Path) -> str:
    """A file of the run's folder by its name there."""
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)


def counted(count: int, noun: str) -> str:
    """One thing, or many.

    >>> counted(1, "picture"), counted(12000, "picture")
    ('1 picture', '12 000 pictures')
    """
    return f"{spelled(count)} {noun}{'' if count == 1 else 's'}"


def spelled_time(seconds: float) -> str:
    """A duration as a person says it.

    >>> spelled_time(0.0213), spelled_time(41.7), spelled_time(192), spelled_time(15_120)
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


def spelled_bytes(count: int) -> str:
    """A size in the unit that suits it.

    >>> spelled_bytes(17), spelled_bytes(944_361_472), spelled_bytes(15 * 2**30)
    ('17 bytes', '901 MiB', '15 GiB')
    """
    for size, unit in UNITS:
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{spelled(round(count / size))} {unit}"
    return f"{count} bytes"
