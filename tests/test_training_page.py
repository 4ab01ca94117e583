"""The page of a run tells how it ended, shows its course, and holds, whatever the run was."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from finitune.config.read import dump_config, validate_config
from finitune.config.schema import TrainConfig
from finitune.generation.picture import save_picture
from finitune.render.html import SummaryCard
from finitune.render.preview_grid import MAX_PREVIEW_SIDE, build_preview_grid, sample_evenly
from finitune.render.run_summary import (
    build_summary_cards,
    compute_headroom_bits,
    format_byte_size,
    format_duration,
    format_grouped_count,
)
from finitune.render.training_page import render_loss_chart, render_training_page, select_final_steps
from finitune.report import Finding, Level, Report, Table
from finitune.training import events as e
from finitune.training.history import TrainingHistory

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</title><script>alert(1)</script>\x1b[31m'\"&"
ANY = st.floats() | st.sampled_from([0.0, math.nan, math.inf, -math.inf])
MEASURED = e.TrialStepMeasured(0.25, 0.5, 3.0, 3 * 2**30, 12 * 2**30, (512, 768), 4)
STARTED = e.TrainingStarted(0, 6, 3, 4, 2, 1, 1000)
few = settings(max_examples=25, deadline=None)


@cache
def config(**saving: bool) -> TrainConfig:
    written = {
        "model": {"pretrained_model_name_or_path": "pico-anima"},
        "saving": {"output_dir": "out", "output_name": "ink", **saving},
        "datasets": [{"subsets": [{"image_dir": "pictures"}]}],
    }
    return validate_config(written)[0]


def stepped(step: int, loss: float = 1.0, *, taken: bool = True, seconds: float = 0.5) -> e.StepTaken:
    counts = {"ok": step, "skipped": int(not taken), "rolled_back": 0, "quarantined": 0}
    return e.StepTaken(step, step // 3, loss, loss, 1e-4, loss / 2, seconds, taken, counts, 2**31)


def history_of(*told: e.TrainingEvent) -> TrainingHistory:
    history = TrainingHistory()
    for event in told:
        history.add(event)
    return history


def whole(folder: Path = Path("out")) -> TrainingHistory:
    """A run of six steps, with everything that can happen, that ends well."""
    paths = {"kohya": folder / "ink-step00000006.safetensors", "state": folder / "ink-state"}
    steps = [stepped(step, 2.0 / step) for step in range(1, 7)]
    spike = Finding(Level.WARNING, "TRAINING-SPIKE", "step 4", "the loss jumped")
    held = [e.ValidationMeasured(step, loss, {0.25: loss * 2, 0.75: loss / 2}) for step, loss in ((0, 2.0), (6, 1.0))]
    ranges = [e.RangesMeasured(step, {"blocks.0": 1e3, "blocks.1": 2.0**17 + step}) for step in (0, 6)]
    rest = (e.FindingRaised(4, spike), e.CheckpointSaved(6, 2, paths, 0.5), e.TrainingFinished(6, 2, "done", paths))
    return history_of(MEASURED, STARTED, *steps, *held, *ranges, *rest)


def report_of(history: TrainingHistory, *tables: Table) -> Report:
    report = Report("train", list(history.findings()), {"precision": "current-half", "sites": 60}, tables=list(tables))
    report.add(Level.NOTE, "PRECISION-CHOSEN", "cuda", "current-half: this GPU has no bf16")
    report.figures["verified"] = {"kohya": {"loads": {"ComfyUI": "yes", "PEFT": "no"}}}
    report.artifacts["report"] = "out/report.html"
    return report


class Seen(HTMLParser):
    """The tags, the pictures' alternative texts, and the text of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[str] = []
        self.alts: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.alts += [value or "" for name, value in attrs if name == "alt"]

    def handle_data(self, data: str) -> None:
        self.text += data


def charts_of(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def titles_of(page: str) -> list[str]:
    return [chart.findtext(f"{SVG}title") or "" for chart in charts_of(page)]


def by_question(cards: Sequence[SummaryCard]) -> dict[str, SummaryCard]:
    return {card.question: card for card in cards}


def test_a_whole_run_is_told_from_its_end_to_its_configuration():
    history = whole()
    tables = [Table(name, ("a", "b"), (("x", name * 2),)) for name in ("pictures", "buckets", "sites", "verified")]
    page = render_training_page(config(), history, report_of(history, *tables))
    seen = Seen(page)
    order = ("Did it end well?", "Done", "What to know", "TRAINING-SPIKE", "Course", "Pictures kept out", "Headroom")
    order += ("Files", "read back and checked", "Data and adapter", "Notes (1)", "Effective configuration")
    assert re.search(".*".join(map(re.escape, order)), seen.text, re.DOTALL)
    assert dump_config(config()) in seen.text and all(
        name * 2 in seen.text for name in ("pictures", "buckets", "sites")
    )
    assert seen.text.count("verifiedverified") == 1
    for told in ("4 (batch) x 2 (accumulated)", "1000 numbers are trained", "-50 %", "this GPU has no bf16"):
        assert told in seen.text
    expected = ["Loss", "Learning rate", "Gradient norm (log)", "Seconds per step", "Peak memory in GiB"]
    expected += ["Validation loss", "Validation loss by sigma", "Validation loss at each sigma", "Bits of headroom"]
    assert titles_of(page) == [*expected, "Largest magnitude at each site"]
    assert not {"script", "link", "iframe", "object", "a"} & set(seen.tags)
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", page)


def test_cards_answer_what_was_measured():
    history = whole()
    cards = by_question(build_summary_cards(config(), history, report_of(history)))
    assert [card.good for card in cards.values()] == [True, True, True, True, True, None, None]
    assert cards["Did it end well?"].detail == "6 of 6 steps in 3.5 s"
    assert cards["Are the files good?"].answer == "1 read back and checked"
    assert cards["Are the files good?"].detail == "the last one loads in ComfyUI"
    assert cards["Does it fit?"][1:3] == ("3 GiB of 12 GiB", "measured at 512 x 768, 4 pictures; 2 GiB in the run")
    assert cards["How long does it take?"].detail == "measured: a step 0.25 s, a save 0.5 s, the previews 3 s"
    assert cards["In what precision?"][1:3] == ("current-half", "this GPU has no bf16")


@pytest.mark.parametrize(
    ("told", "answer", "detail", "good"),
    [
        ((), "Not begun", "no step was taken", None),
        ((MEASURED,), "Only measured", "no step was taken", None),
        ((STARTED,), "Broken off", "at step 0 of 6; no file was written", False),
        (
            (STARTED, stepped(1), e.CheckpointSaved(1, 0, {}, 1.0)),
            "Broken off",
            "at step 1 of 6; the last files are of",
            False,
        ),
        (
            (STARTED, stepped(1), e.TrainingFinished(1, 0, "stopped")),
            "Stopped as asked",
            "--resume goes on from here",
            True,
        ),
        ((STARTED, stepped(1), e.TrainingFinished(0, 0, "given up")), "Given up by the guard", "0 of 6 steps", False),
    ],
)
def test_every_end_has_its_word(told: tuple[e.TrainingEvent, ...], answer: str, detail: str, good: bool | None):
    history = history_of(*told)
    stateful = config(save_state=True)
    card = by_question(build_summary_cards(stateful, history, Report("train")))["Did it end well?"]
    assert (card.answer, card.good) == (answer, good) and detail in card.detail
    page = render_training_page(stateful, history, Report("train"))
    assert answer in page
    assert len(titles_of(page)) == (5 if history.steps else 0) and "Previews" not in page


def test_a_run_without_a_finite_number_has_no_empty_chart():
    nothing = [stepped(step, math.nan, taken=False, seconds=math.nan) for step in (1, 2)]
    held = e.ValidationMeasured(2, math.nan, {0.5: math.inf})
    history = history_of(STARTED, *nothing, held, e.RangesMeasured(2, {}), e.TrainingFinished(0, 0, "given up"))
    page = render_training_page(config(), history, Report("train"))
    assert titles_of(page) == [] and render_loss_chart(history) == "" and "2 of 2 steps left out" in page


def test_what_went_wrong_is_marked_where_it_happened():
    steps = [stepped(1), stepped(2, math.nan, taken=False), stepped(3), stepped(2), stepped(3, 0.5)]
    history = history_of(STARTED, *steps, e.StepsRolledBack(3, 1, "NaN"))
    assert [(step.step, step.loss) for step in select_final_steps(history.steps)] == [(1, 1.0), (2, 1.0), (3, 0.5)]
    chart = ElementTree.fromstring(render_loss_chart(history))
    signs = [path.attrib["d"].count("M") for path in chart if path.get("class") == "places"]
    assert signs == [1, 1]
    keys = [text.text for text in chart if text.get("class") == "key"]
    assert keys[2:] == ["1 non-finite step, left out", "rolled back from here"]


@few
@given(st.lists(st.tuples(ANY, ANY, ANY, ANY, st.booleans()), max_size=30), ANY, ANY)
@example([(math.nan, math.inf, 0.0, -1.0, False)] * 3, math.inf, math.nan)
def test_no_number_breaks_the_page_or_reaches_a_chart_as_nan(rows: list[Any], held: float, amax: float):
    history = history_of(MEASURED, STARTED, e.ValidationMeasured(0, held, {0.5: amax, held: held}))
    for place, (loss, norm, rate, seconds, taken) in enumerate(rows):
        history.add(e.StepTaken(place + 1, 0, loss, norm, rate, norm, seconds, taken))
        history.add(e.RangesMeasured(place, {"a": abs(amax), "b": abs(held)}))
    page = render_training_page(config(), history, report_of(history))
    for chart in charts_of(page):
        if chart.findtext(f"{SVG}title") != "Largest magnitude at each site":  # which spells an overflow as it was
            assert not re.search(r"\b(nan|inf)\b", ElementTree.tostring(chart, "unicode"))


@few
@given(st.text(min_size=1))
@example(HOSTILE)
def test_no_text_steers_the_page(text: str):
    def tags(text: str) -> list[str]:
        history = whole()
        history.add(e.FindingRaised(1, Finding(Level.ERROR, "X", text, text, {"name": text}, f"x{text}")))
        history.add(e.RangesMeasured(7, {text: 1e9}))
        report = report_of(history, Table(text, (text,), ((text,),)))
        report.artifacts[text] = text
        return Seen(render_training_page(config(), history, report)).tags

    assert tags(text) == tags("plain")


def test_ten_thousand_steps_stay_small():
    history = history_of(MEASURED, STARTED)
    for step in range(1, 10_001):
        history.add(stepped(step, 1 + math.sin(step * step) / 2 + (step == 777) * 50, taken=step % 9 != 0))
    for step in range(0, 10_001, 20):
        history.add(e.ValidationMeasured(step, 1.0, {sigma / 10: math.cos(step + sigma) for sigma in range(1, 10)}))
    page = render_training_page(config(), history, Report("train"))
    assert len(page) < 400_000
    assert "largest 51" in (charts_of(page)[0].findtext(f"{SVG}desc") or "")


def picture(path: Path, value: int, side: int, *, good: bool = True) -> Path:
    pixels = torch.full((side, side, 3), value, dtype=torch.uint8)
    return save_picture(path, pixels, {"prompt": "red <apple>", "seed": 7}, good=good)


def test_previews_stand_in_a_grid_of_prompts_and_steps(tmp_path: Path):
    drawn = [
        e.PreviewsDrawn(
            step,
            (
                picture(tmp_path / f"step{step:08d}-00.png", step, 64, good=step != 2),
                picture(tmp_path / f"step{step:08d}-01.png", step, 300),
            ),
            1.0,
        )
        for step in range(20)
    ]
    drawn[0].paths[0].write_bytes(b"no picture")
    grid = build_preview_grid(drawn)
    assert grid is not None and grid.columns[0] == "step 0" and grid.columns[-1] == "step 19"
    assert len(grid.columns) == 8 and [name for name, _ in grid.rows] == ["red <apple> (seed 7)"] * 2
    first, second = (pictures for _, pictures in grid.rows)
    assert first[0] is None and all(one and one.png.startswith(b"\x89PNG") for one in (*first[1:], *second))
    for one in (first[1], second[0]):
        assert one is not None and int.from_bytes(one.png[16:20], "big") == MAX_PREVIEW_SIDE
    history = history_of(STARTED, *drawn[:3])
    seen = Seen(render_training_page(config(), history, Report("train")))
    assert seen.tags.count("img") == 5 and "red <apple>, step 2: suspect" in seen.alts and "suspect" in seen.text


@few
@given(st.lists(st.integers(), max_size=50), st.integers(2, 9))
def test_columns_are_chosen_evenly(items: list[int], most: int):
    numbered = list(enumerate(items))
    chosen = sample_evenly(numbered, most)
    assert len(chosen) == min(most, len(items)) and chosen == sorted(set(chosen))
    assert not items or (chosen[0] == numbered[0] and chosen[-1] == numbered[-1])
    gaps = [later[0] - earlier[0] for earlier, later in pairwise(chosen)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_long_tables_are_folded_and_empty_ones_left_out():
    long = Table("sites", ("site",), tuple((f"blocks.{place}",) for place in range(40)))
    page = render_training_page(
        config(), TrainingHistory(), Report("train", tables=[long, Table("buckets", ("size",), ())])
    )
    assert "<summary>sites (40 rows)</summary>" in page and "buckets" not in page


def test_headroom_is_known_where_a_block_overflowed():
    assert (
        compute_headroom_bits(e.RangesMeasured(0, {"a": 65504.0})) == 0.0
        and compute_headroom_bits(e.RangesMeasured(0, {"a": 32752.0, "b": 1.0})) == 1.0
    )
    assert (
        compute_headroom_bits(e.RangesMeasured(0, {"a": 1.0, "b": math.inf}))
        == compute_headroom_bits(e.RangesMeasured(0, {"a": math.nan}))
        == -math.inf
    )


def test_quantities_are_spelled_for_people():
    times = (math.nan, 0.0213, 9.99, 41.7, 59.9, 192, 15_120)
    spelled = ["an unknown time", "0.021 s", "10 s", "42 s", "1 min 00 s", "3 min 12 s", "4 h 12 min"]
    assert [format_duration(seconds) for seconds in times] == spelled
    sizes = (17, 944_361_472, 1023 * 2**20, 15 * 2**30)
    assert [format_byte_size(size) for size in sizes] == ["17 bytes", "901 MiB", "1023 MiB", "15 GiB"]
    assert (format_grouped_count(1, "row"), format_grouped_count(0, "row"), format_grouped_count(12_000, "row")) == (
        "1 row",
        "0 rows",
        "12 000 rows",
    )
