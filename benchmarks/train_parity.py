"""Does half precision learn what fp32 learns, and what would plain fp16 do?

The example's pictures, configuration and seed on pico-anima, whose residual stream goes far beyond fp16's end, once in
each precision; the last validation loss of each against fp32's. Then the same run as mixed precision in fp16 has
it: every product of the frozen model with fp16 operands and results, adapters in fp32, no guard; a tensor core's
meaning is simulated. Reported is its first non-finite step, and whether that of a control is finite, whose stream is
small. Only losses count here, not times.

Run: python benchmarks/train_parity.py [--steps 300 --json FILE]
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finitune.config.read import read_train_config
from finitune.config.schema import TrainConfig
from finitune.models.pico import STREAM_EXPONENT, STREAM_WRITERS
from finitune.numerics import simulate
from finitune.report import Report
from finitune.training import events
from finitune.training.optimizers import set_learning_rates
from finitune.training.train_state import TrainingRun
from finitune.verbs.train import iter_train_events
from finitune.verbs.train.prepare import open_prepared_run

EXAMPLE = Path(__file__).parents[1] / "examples" / "emoji_style"
PRECISIONS = ("fp32", "planned-half", "current-half", "bf16")
BAR = 0.01
"""The largest relative difference of the halves' last validation loss to fp32's."""
BARRED = ("planned-half", "current-half")


def configured(precision: str, steps: int, place: Path) -> TrainConfig:
    """The example's configuration in a precision, for so many steps, without previews."""
    config = read_train_config(place / EXAMPLE.name / "train.toml").config
    changes: dict[str, dict[str, Any]] = {
        "model": {"precision": precision, "device": "cpu"},
        "training": {"max_train_steps": steps, "cache_dir": place / "cache"},
        "saving": {"output_dir": place / precision, "save_state": False},
        "preview": {"sample_prompts": (), "sample_every_n_steps": None},
        "logging": {"report": False},
    }
    sections = {name: getattr(config, name).model_copy(update=update) for name, update in changes.items()}
    return config.model_copy(update=sections)


def learned(precision: str, steps: int, place: Path) -> dict[str, float]:
    """What a run in one precision comes to."""
    report, largest = Report("train"), 0.0
    for event in iter_train_events(configured(precision, steps, place), report):
        if isinstance(event, events.RangesMeasured):
            largest = max(largest, *event.amax.values())
        if isinstance(event, events.StepTaken) and event.step % 50 == 0:
            print(f"  {precision} step {event.step}: loss {event.smoothed:.4f}", flush=True)
    figures: Any = report.figures
    return {
        "first_validation_loss": figures["validation_loss_first"],
        "validation_loss": figures["validation_loss"],
        "non_finite_steps": figures["non_finite_steps"],
        "amax": largest,
    }


def first_nonfinite_step(run: TrainingRun, steps: int) -> int | None:
    """The first step, from 1, with a loss or a gradient that is not finite, where nobody looks before the update."""
    optimizer = run.make_optimizer()
    for step in range(steps):
        batches = [batch for micro in run.course.select_micro_batches(step, 0) if (batch := run.load(micro))]
        gradient = run.differentiator.gradient(batches, step)
        if not gradient.finite:
            return step + 1
        set_learning_rates(optimizer, run.rate_of(step))
        optimizer.step()
    return None


def plain_half(steps: int, place: Path, exponent: int = 0) -> int | None:
    """The first non-finite step of plain fp16, the residual stream multiplied by 2**exponent."""
    with open_prepared_run(configured("fp32", steps, place), Report("train")) as ready:
        transformer = ready.run.learner.precisions["transformer"].module
        scale_base_stream(transformer, exponent)
        transformer.half()
        with simulate.half():
            return first_nonfinite_step(ready.run, steps)


def scale_base_stream(transformer: nn.Module, exponent: int) -> None:
    """Multiply the residual stream by 2**exponent in place, under adapters that change nothing yet."""
    for name, parameter in transformer.named_parameters():
        if name.replace(".base.", ".").endswith(STREAM_WRITERS):
            parameter.data.mul_(2.0**exponent)


def compared(rows: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """The rows, each with its relative difference to fp32."""
    wanted = rows["fp32"]["validation_loss"]
    return {
        name: {**row, "relative_difference": abs(row["validation_loss"] - wanted) / wanted}
        for name, row in rows.items()
    }


def show(rows: Mapping[str, Mapping[str, float]], plain: int | None, control: int | None) -> bool:
    """Print the rows; whether the bars are met."""
    print(f"{'precision':14s} {'validation loss':>24s} {'to fp32':>9s} {'non-finite':>11s} {'amax':>10s}  bar")
    met = True
    for name, row in rows.items():
        fine = not row["non_finite_steps"] and row["relative_difference"] <= BAR
        met = met and (fine or name not in BARRED)
        verdict = ("met" if fine else "MISSED") if name in BARRED else ""
        course = f"{row['first_validation_loss']:.4f} -> {row['validation_loss']:.5f}"
        difference, count, amax = row["relative_difference"], int(row["non_finite_steps"]), row["amax"]
        print(f"{name:14s} {course:>24s} {difference:9.3%} {count:11d} {amax:10.3g}  {verdict}")
    print(f"plain fp16, simulated: first non-finite step {plain or 'none'}")
    print(
        f"  with the stream divided by 2**{STREAM_EXPONENT}, its first step is {'not finite' if control else 'finite'}"
    )
    return met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the same sums in every run
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(EXAMPLE, Path(place) / EXAMPLE.name)
        plain = plain_half(options.steps, Path(place))
        control = plain_half(1, Path(place), -STREAM_EXPONENT)
        rows = compared({name: learned(name, options.steps, Path(place)) for name in PRECISIONS})
    met = show(rows, plain, control)
    if options.json:
        half = {"first_nonfinite_step": plain, "first_step_of_control_is_finite": control is None}
        found = {"steps": options.steps, "rows": rows, "plain_fp16": half, "met": met}
        options.json.write_text(json.dumps(found, indent=1))
    raise SystemExit(not met)


if __name__ == "__main__":
    main()
