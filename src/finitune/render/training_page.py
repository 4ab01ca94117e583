"""The page of a training run: first how it ended and whether it is safe, then its course, then everything else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from finitune.config.read import dump_config
from finitune.config.schema import TrainConfig
from finitune.render import format_value
from finitune.render.html import HtmlPage
from finitune.render.line_chart import (
    MAX_CURVE_MEDIANS,
    NARROW_CHART_WIDTH,
    WIDE_CHART_WIDTH,
    AxisMarkers,
    ChartMark,
    Curve,
    CurvePoint,
    ReferenceLine,
    compute_stretch_medians,
    has_drawable_points,
    render_line_chart,
)
from finitune.render.preview_grid import build_preview_grid
from finitune.render.range_chart import RangeBar, render_range_chart
from finitune.render.run_summary import (
    build_summary_cards,
    compute_headroom_bits,
    format_duration,
    format_grouped_count,
    is_bad_step,
)
from finitune.report import Level, Report, Table
from finitune.training.events import StepTaken
from finitune.training.history import TrainingHistory
from finitune.verbs.train import format_step_arithmetic

_LOG_SCALE_RATIO = 10  # a largest value this many times the median would leave a linear axis flat
_MAX_UNFOLDED_ROWS = 12
_VERIFIED_TABLE_TITLE = "verified"
_SPIKE_CODE = "TRAINING-SPIKE"


def render_training_page(config: TrainConfig, history: TrainingHistory, report: Report) -> str:
    page = HtmlPage(f"Training {config.saving.output_name}")
    network, figures = config.network, report.figures
    sizes = "".join(f", {format_value(figures[name])} {name}" for name in ("sites", "pictures") if name in figures)
    model = config.model.pretrained_model_name_or_path
    page.prose(
        f"{network.algorithm} of rank {network.network_dim} for {model}{sizes}. Files: {config.saving.output_dir}"
    )
    page.cards(build_summary_cards(config, history, report))
    serious = [finding for finding in report.findings if finding.level is not Level.NOTE]
    if serious:
        page.heading("What to know").findings(serious)
    add_curve_section(page, history)
    add_validation_section(page, history)
    add_headroom_section(page, history, report)
    add_preview_section(page, config, history)
    add_files_section(page, config, history, report)
    add_data_section(page, history, report)
    notes = [finding for finding in report.findings if finding.level is Level.NOTE]
    if notes:
        page.add_folded_page(HtmlPage(f"Notes ({len(notes)})").findings(notes))
    page.add_folded_page(HtmlPage("Effective configuration").code(dump_config(config)))
    return page.render()


def select_final_steps(steps: Sequence[StepTaken]) -> list[StepTaken]:
    """The steps in order, each as it went last: those that a roll-back took back were taken again."""
    return [step for _, step in sorted({one.step: one for one in steps}.items())]


def render_charts(
    series: Sequence[Curve],
    title: str,
    x_label: str = "step",
    *,
    log: bool | None = None,
    marks: Sequence[ChartMark] = (),
    width: float = NARROW_CHART_WIDTH,
) -> Iterator[str]:
    """A chart, on a logarithmic axis where a linear one would hide the most; none where nothing can be drawn."""
    if log is None:
        values = [value for line in series for _, value in line.points if math.isfinite(value)]
        log = bool(values) and min(values) > 0 and max(values) > _LOG_SCALE_RATIO * median(values)
    if has_drawable_points(series, log):
        yield render_line_chart(series, f"{title} (log)" if log else title, x_label, log=log, marks=marks, width=width)


def render_loss_chart(history: TrainingHistory) -> str:
    """The loss of each step, its smoothed course, and signs where something happened; '' where none is finite."""
    steps = select_final_steps(history.steps)
    curves = [
        Curve("loss", [(step.step, step.loss) for step in steps], faint=True),
        Curve("smoothed over finite values", [(step.step, step.smoothed) for step in steps]),
    ]
    return next(render_charts(curves, "Loss", marks=build_trouble_marks(history), width=WIDE_CHART_WIDTH), "")


def add_curve_section(page: HtmlPage, history: TrainingHistory) -> None:
    """Loss, learning rate, gradient norm and time over the steps."""
    loss, steps = render_loss_chart(history), select_final_steps(history.steps)
    if not loss:
        return
    page.heading("Course").chart(loss)
    rate = Curve("learning rate", [(step.step, step.rate) for step in steps])
    norms = build_median_curves("each step", [(step.step, step.grad_norm) for step in steps])
    seconds = build_median_curves("each step", [(step.step, step.seconds) for step in steps])
    memory = Curve("GiB", [(step.step, step.memory / 2**30) for step in steps if step.memory])
    page.charts(
        [
            *render_charts([rate], "Learning rate"),
            *render_charts(norms, "Gradient norm", log=True),
            *render_charts(seconds, "Seconds per step"),
            *render_charts([memory], "Peak memory in GiB"),
        ]
    )


def build_median_curves(label: str, points: Sequence[CurvePoint]) -> list[Curve]:
    """A line, and over one of many points its medians: what it comes to, through the noise."""
    if len(points) <= 2 * MAX_CURVE_MEDIANS:
        return [Curve(label, points)]
    middle, length = compute_stretch_medians(points)
    return [Curve(label, points, faint=True), Curve(f"median of {length} steps", middle)]


def build_trouble_marks(history: TrainingHistory) -> list[ChartMark]:
    bad = [step.step for step in history.steps if is_bad_step(step)]
    back = [one.step for one in history.returns]
    spikes = [one.step + 1 for one in history.told if one.finding.code == _SPIKE_CODE]
    signs = (
        AxisMarkers(f"{format_grouped_count(len(bad), 'non-finite step')}, left out", bad, "error"),
        AxisMarkers("rolled back from here", back, "curve-4"),
        AxisMarkers("spike", spikes, "warning"),
    )
    return [sign for sign in signs if sign.at]


def add_validation_section(page: HtmlPage, history: TrainingHistory) -> None:
    """The loss on pictures kept out: its mean, its shape over sigma, and each sigma over the steps."""
    measured = history.validations
    if not measured:
        return
    ends = measured if len(measured) < 2 else (measured[0], measured[-1])
    shape = [Curve(f"step {one.step}", sorted(one.by_sigma.items())) for one in ends]
    sigmas = sorted({sigma for one in measured for sigma in one.by_sigma})
    each = [Curve(f"sigma {s:g}", [(m.step, m.by_sigma[s]) for m in measured if s in m.by_sigma]) for s in sigmas]
    mean = Curve("mean over sigma", [(one.step, one.loss) for one in measured])
    pair = [*render_charts([mean], "Validation loss"), *render_charts(shape, "Validation loss by sigma", "sigma")]
    if pair:
        page.heading("Pictures kept out").charts(pair)
    if len(measured) > 1:
        for svg in render_charts(each, "Validation loss at each sigma", width=WIDE_CHART_WIDTH):
            page.chart(svg)


def add_headroom_section(page: HtmlPage, history: TrainingHistory, report: Report) -> None:
    """The room between the largest magnitude of the denoiser and the end of fp16."""
    ranges = [one for one in history.ranges if one.amax]
    if not ranges:
        return
    page.heading("Headroom")
    worst = min(ranges, key=compute_headroom_bits)
    site = max(worst.amax, key=lambda name: math.inf if math.isnan(worst.amax[name]) else worst.amax[name])
    bits = compute_headroom_bits(worst)
    meaning = f"That is {bits:.1f} bits below 65504, where fp16 ends."
    if bits < 0:
        precision = report.figures.get("precision", "the precision of the run")
        meaning = f"Plain fp16 ends at 65504 and would have overflowed there; this run computed in {precision}."
    magnitude = format_value(worst.amax[site])
    page.prose(f"The largest magnitude that left a block was {magnitude}, at step {worst.step} in {site}. {meaning}")
    curve = Curve("bits below 65504", [(one.step, compute_headroom_bits(one)) for one in ranges])
    limit = ReferenceLine("plain fp16 overflows below", 0.0)
    for svg in render_charts([curve], "Bits of headroom", marks=[limit], width=WIDE_CHART_WIDTH):
        page.chart(svg)
    last = ranges[-1]
    bars = render_range_chart([RangeBar(name, amax) for name, amax in last.amax.items()])
    page.add_folded_page(HtmlPage(f"Largest magnitude at each block, step {last.step}").chart(bars))


def add_preview_section(page: HtmlPage, config: TrainConfig, history: TrainingHistory) -> None:
    grid = build_preview_grid(history.previews)
    if grid is None:
        return
    page.heading("Previews").picture_grid(grid.columns, grid.rows)
    page.prose(f"All that were drawn, in full size: {config.saving.output_dir / 'previews'}")


def add_files_section(page: HtmlPage, config: TrainConfig, history: TrainingHistory, report: Report) -> None:
    """What was saved and when, the verdict on the last of it, and where everything is."""
    if not (history.saved or report.artifacts):
        return
    page.heading("Files")
    folder = config.saving.output_dir
    rows = []
    for one in history.saved:
        paths = (path.relative_to(folder) if path.is_relative_to(folder) else path for path in one.paths.values())
        rows.append((str(one.step), str(one.epoch), format_duration(one.seconds), ", ".join(map(str, paths))))
    if rows:
        add_foldable_table(page, Table("saved, read back and checked", ("step", "epoch", "took", "files"), tuple(rows)))
    for table in report.tables:
        if table.title == _VERIFIED_TABLE_TITLE:
            add_foldable_table(page, table)
    if report.artifacts:
        page.table(Table("where it is", ("what", "file"), tuple(report.artifacts.items())))


def add_data_section(page: HtmlPage, history: TrainingHistory, report: Report) -> None:
    """The pictures, what a step is made of, the sites, and what became of another program's keys."""
    started = history.started
    if not (started or report.tables):
        return
    page.heading("Data and adapter")
    if started:
        page.prose(
            f"{format_step_arithmetic(started)}; {format_grouped_count(started.parameters, 'number')} are trained."
        )
    for table in report.tables:
        if table.title != _VERIFIED_TABLE_TITLE:
            add_foldable_table(page, table)


def add_foldable_table(page: HtmlPage, table: Table) -> None:
    """Add a table, a long one folded; an empty one has nothing to say."""
    if len(table.rows) > _MAX_UNFOLDED_ROWS:
        page.add_folded_page(HtmlPage(f"{table.title} ({format_grouped_count(len(table.rows), 'row')})").table(table))
    elif table.rows:
        page.table(table)
