"""The page of a training run: first how it ended and whether it is safe, then its course, then everything else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from finitune.config.read import dump
from finitune.config.schema import TrainConfig
from finitune.journeys.train import arithmetic
from finitune.render import spelled
from finitune.render.answers import answers, counted, headroom, is_bad, shown_path, spelled_time
from finitune.render.curves import (
    MOST_MEDIANS,
    NARROW,
    WIDE,
    Line,
    Mark,
    Places,
    Point,
    Rule,
    line_chart,
    medians,
    worth_drawing,
)
from finitune.render.html import Page
from finitune.render.previews import preview_grid
from finitune.render.svg import RangeBar, range_chart
from finitune.report import Level, Report, Table
from finitune.training.events import Stepped
from finitune.training.history import History

UNEVEN = 10  # a largest value this many times the median would leave a linear axis flat
LONG_TABLE = 12
VERIFIED = "verified"
SPIKE = "TRAINING-SPIKE"


def training_page(config: TrainConfig, history: History, report: Report) -> str:
    """The self-contained HTML page of a run, finished or not."""
    page = Page(f"Training {config.saving.output_name}")
    page.prose(introduction(config, report))
    page.cards(answers(config, history, report))
    serious = [finding for finding in report.findings if finding.level is not Level.NOTE]
    if serious:
        page.heading("What to know").findings(serious)
    add_curves(page, history)
    add_validation(page, history)
    add_headroom(page, history, report)
    add_previews(page, config, history)
    add_files(page, config, history, report)
    add_data(page, history, report)
    notes = [finding for finding in report.findings if finding.level is Level.NOTE]
    if notes:
        page.folded(Page(f"Notes ({len(notes)})").findings(notes))
    page.folded(Page("Effective configuration").code(dump(config)))
    return page.render()


def introduction(config: TrainConfig, report: Report) -> str:
    """What was trained, on what, from where."""
    network, figures = config.network, report.figures
    sizes = "".join(f", {spelled(figures[name])} {name}" for name in ("sites", "pictures") if name in figures)
    model = config.model.pretrained_model_name_or_path
    return f"{network.algorithm} of rank {network.network_dim} for {model}{sizes}. Files: {config.saving.output_dir}"


def stayed(steps: Sequence[Stepped]) -> list[Stepped]:
    """The steps in order, each as it went last: those that a roll-back took back were taken again."""
    return [step for _, step in sorted({one.step: one for one in steps}.items())]


def chart(
    series: Sequence[Line],
    title: str,
    x_label: str = "step",
    *,
    log: bool | None = None,
    marks: Sequence[Mark] = (),
    width: float = NARROW,
) -> Iterator[str]:
    """A chart, on a logarithmic axis where a linear one would hide the most; none where nothing can be drawn."""
    log = uneven(series) if log is None else log
    if worth_drawing(series, log):
        yield line_chart(series, f"{title} (log)" if log else title, x_label, log=log, marks=marks, width=width)


def uneven(series: Sequence[Line]) -> bool:
    """Whether the largest value is far from most of them, and all are above zero."""
    values = [value for line in series for _, value in line.points if math.isfinite(value)]
    return bool(values) and min(values) > 0 and max(values) > UNEVEN * median(values)


def loss_chart(history: History) -> str:
    """The loss of each step, its smoothed course, and signs where something happened; '' where none is finite."""
    drawn = chart(loss_lines(stayed(history.steps)), "Loss", marks=troubles(history), width=WIDE)
    return next(drawn, "")


def loss_lines(steps: Sequence[Stepped]) -> list[Line]:
    """The loss as it was, and smoothed."""
    return [
        Line("loss", [(step.step, step.loss) for step in steps], faint=True),
        Line("smoothed over finite values", [(step.step, step.smoothed) for step in steps]),
    ]


def add_curves(page: Page, history: History) -> None:
    """Loss, learning rate, gradient norm and time over the steps."""
    loss, steps = loss_chart(history), stayed(history.steps)
    if not loss:
        return
    page.heading("Course").chart(loss)
    rate = Line("learning rate", [(step.step, step.rate) for step in steps])
    norms = with_medians("each step", [(step.step, step.grad_norm) for step in steps])
    seconds = with_medians("each step", [(step.step, step.seconds) for step in steps])
    memory = Line("GiB", [(step.step, step.memory / 2**30) for step in steps if step.memory])
    page.charts(
        [
            *chart([rate], "Learning rate"),
            *chart(norms, "Gradient norm", log=True),
            *chart(seconds, "Seconds per step"),
            *chart([memory], "Peak memory in GiB"),
        ]
    )


def with_medians(label: str, points: Sequence[Point]) -> list[Line]:
    """A line, and over one of many points its medians: what it comes to, through the noise."""
    if len(points) <= 2 * MOST_MEDIANS:
        return [Line(label, points)]
    middle, length = medians(points)
    return [Line(label, points, faint=True), Line(f"median of {length} steps", middle)]


def troubles(history: History) -> list[Mark]:
    """Signs at the steps where something happened."""
    bad = [step.step for step in history.steps if is_bad(step)]
    back = [one.step for one in history.returns]
    spikes = [one.step + 1 for one in history.told if one.finding.code == SPIKE]
    signs = (
        Places(f"{counted(len(bad), 'non-finite step')}, left out", bad, "error"),
        Places("rolled back from here", back, "curve-4"),
        Places("spike", spikes, "warning"),
    )
    return [sign for sign in signs if sign.at]


def add_validation(page: Page, history: History) -> None:
    """The loss on pictures kept out: its mean, its shape over sigma, and each sigma over the steps."""
    measured = history.validations
    if not measured:
        return
    ends = measured if len(measured) < 2 else (measured[0], measured[-1])
    shape = [Line(f"step {one.step}", sorted(one.by_sigma.items())) for one in ends]
    sigmas = sorted({sigma for one in measured for sigma in one.by_sigma})
    each = [Line(f"sigma {s:g}", [(m.step, m.by_sigma[s]) for m in measured if s in m.by_sigma]) for s in sigmas]
    mean = Line("mean over sigma", [(one.step, one.loss) for one in measured])
    pair = [*chart([mean], "Validation loss"), *chart(shape, "Validation loss by sigma", "sigma")]
    if pair:
        page.heading("Pictures kept out").charts(pair)
    if len(measured) > 1:
        for svg in chart(each, "Validation loss at each sigma", width=WIDE):
            page.chart(svg)


def add_headroom(page: Page, history: History, report: Report) -> None:
    """The room between the largest magnitude of the denoiser and the end of fp16."""
    ranges = [one for one in history.ranges if one.amax]
    if not ranges:
        return
    page.heading("Headroom")
    worst = min(ranges, key=headroom)
    site = max(worst.amax, key=lambda name: math.inf if math.isnan(worst.amax[name]) else worst.amax[name])
    page.prose(
        f"The largest magnitude that left a block was {spelled(worst.amax[site])}, at step {worst.step} in {site}. "
        + told_headroom(headroom(worst), str(report.figures.get("precision", "the precision of the run")))
    )
    bits = Line("bits below 65504", [(one.step, headroom(one)) for one in ranges])
    for svg in chart([bits], "Bits of headroom", marks=[Rule("plain fp16 overflows below", 0.0)], width=WIDE):
        page.chart(svg)
    last = ranges[-1]
    bars = range_chart([RangeBar(name, amax) for name, amax in last.amax.items()])
    page.folded(Page(f"Largest magnitude at each block, step {last.step}").chart(bars))


def told_headroom(bits: float, precision: str) -> str:
    """What that means."""
    if bits < 0:
        return f"Plain fp16 ends at 65504 and would have overflowed there; this run computed in {precision}."
    return f"That is {bits:.1f} bits below 65504, where fp16 ends."


def add_previews(page: Page, config: TrainConfig, history: History) -> None:
    """The pictures drawn on the way."""
    grid = preview_grid(history.previews)
    if grid is None:
        return
    page.heading("Previews").picture_grid(grid.columns, grid.rows)
    page.prose(f"All that were drawn, in full size: {config.saving.output_dir / 'previews'}")


def add_files(page: Page, config: TrainConfig, history: History, report: Report) -> None:
    """What was saved and when, the verdict on the last of it, and where everything is."""
    if not (history.saved or report.artifacts):
        return
    page.heading("Files")
    folder = config.saving.output_dir
    rows = tuple(
        (
            str(one.step),
            str(one.epoch),
            spelled_time(one.seconds),
            ", ".join(shown_path(path, folder) for path in one.paths.values()),
        )
        for one in history.saved
    )
    if rows:
        lay(page, Table("saved, read back and checked", ("step", "epoch", "took", "files"), rows))
    lay_named(page, report, (VERIFIED,))
    if report.artifacts:
        page.table(Table("where it is", ("what", "file"), tuple(report.artifacts.items())))


def add_data(page: Page, history: History, report: Report) -> None:
    """The pictures, what a step is made of, the sites, and what became of another program's keys."""
    started = history.started
    if not (started or report.tables):
        return
    page.heading("Data and adapter")
    if started:
        page.prose(f"{arithmetic(started)}; {counted(started.parameters, 'number')} are trained.")
    lay_named(page, report, [table.title for table in report.tables if table.title != VERIFIED])


def lay_named(page: Page, report: Report, titles: Sequence[str]) -> None:
    """Add the report's tables of these titles."""
    for table in report.tables:
        if table.title in titles:
            lay(page, table)


def lay(page: Page, table: Table) -> None:
    """Add a table, a long one folded; an empty one has nothing to say."""
    if len(table.rows) > LONG_TABLE:
        page.folded(Page(f"{table.title} ({counted(len(table.rows), 'row')})").table(table))
    elif table.rows:
        page.table(table)
