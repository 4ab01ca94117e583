"""Do two processes train the adapter that one trains? The example's pictures on pico-anima, started by torchrun (gloo).

One process accumulates twice what each of two does, so that the pictures of a step are the same. Compared are the
adapter files after the first step and after the last one: the largest difference, also in units in the last place of
fp32. All sums are added up in one order, so both are to be 0; the bar is one unit. Seconds a step are told, not judged:
on a machine with few cores two processes get in each other's way.

Run: python benchmarks/two_processes.py [--steps 20 --json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from finitune.config.read import dump_config, read_train_config
from finitune.files.tensorfile import TensorFile
from finitune.files.writer import write_text
from finitune.numerics.compare import ulp_distance

EXAMPLE = Path(__file__).parents[1] / "examples" / "emoji_style" / "train.toml"
BAR_ULP = 1
KINDS: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "LoRA, AdamW, fp32": (1, {"model": {"precision": "fp32"}}),
    "LoRA, AdamW, current-half, accumulated": (2, {"model": {"precision": "current-half"}}),
    "LoKr, AdamW, planned-half, dropout, average": (
        1,
        {"network": {"algorithm": "lokr", "network_dropout": 0.1}, "optimizer": {"ema_decay": 0.9}},
    ),
    "DoRA, Prodigy, planned-half": (
        1,
        {"network": {"dora": True}, "optimizer": {"optimizer_type": "Prodigy", "learning_rate": 1.0}},
    ),
}
"""By name: micro-batches of each of two processes in a step, and what differs from the example."""


def configured(name: str, world: int, steps: int, place: Path) -> Path:
    """The configuration of a kind for so many processes, as a file; 5 pictures at once leave epochs with a tail."""
    accumulation, sections = KINDS[name]
    config = read_train_config(EXAMPLE).config
    common: dict[str, dict[str, Any]] = {
        "model": {"device": "cpu"},
        "training": {
            "max_train_steps": steps,
            "train_batch_size": 5,
            "gradient_accumulation_steps": accumulation * 2 // world,
            "cache_dir": place / "cache",
        },
        "saving": {
            "output_dir": place / f"{world}",
            "output_name": "made",
            "save_every_n_steps": 1,
            "save_state": False,
        },
        "preview": {"sample_prompts": (), "sample_every_n_steps": None},
        "logging": {"report": False},
    }
    changed = {
        section: getattr(config, section).model_copy(update={**common.get(section, {}), **sections.get(section, {})})
        for section in {**common, **sections}
    }
    path = place / f"{world}.toml"
    write_text(path, dump_config(config.model_copy(update=changed)))
    return path


def trained(config: Path, world: int) -> dict[str, Any]:
    """The figures of a training by so many processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)] if world > 1 else []
    command = [sys.executable, *launcher, "-m", "finitune", "train", str(config), "--json"]
    run = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(run.stdout + run.stderr)
    return json.loads(run.stdout)["figures"]


def difference(one: Path, two: Path) -> dict[str, float]:
    """How far two adapter files are apart."""
    first, second = TensorFile(one), TensorFile(two)
    pairs = [(first.read(name), second.read(name)) for name in first]
    return {
        "max_difference": max(float((a.double() - b.double()).abs().max()) for a, b in pairs),
        "max_ulp": max(int(ulp_distance(a, b, torch.float32).max()) for a, b in pairs),
    }


def compared(name: str, steps: int) -> dict[str, Any]:
    """One process and two for a kind."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        figures = {world: trained(configured(name, world, steps, place), world) for world in (1, 2)}
        files = {"first": "made-step00000001.safetensors", "last": "made.safetensors"}
        return {
            **{when: difference(place / "1" / file, place / "2" / file) for when, file in files.items()},
            "loss": [figures[world]["loss"] for world in (1, 2)],
            "effective_batch": [figures[world]["effective_batch"] for world in (1, 2)],
            "seconds_per_step": [figures[world]["seconds_per_step"] for world in (1, 2)],
        }


def show(rows: dict[str, dict[str, Any]], steps: int) -> bool:
    """Print the rows; whether the bar is met."""
    after = f"after {steps}"
    print(f"{'':44s} {'batch':>5s} {'after 1':>14s} {after:>14s} {'loss equal':>11s} {'s/step':>12s}  bar")
    met = True
    for name, row in rows.items():
        fine = max(row["first"]["max_ulp"], row["last"]["max_ulp"]) <= BAR_ULP
        met = met and fine
        apart = [f"{row[when]['max_difference']:.1e}, {row[when]['max_ulp']} ulp" for when in ("first", "last")]
        equal = "yes" if row["loss"][0] == row["loss"][1] else "no"
        one, two = row["seconds_per_step"]
        batch, verdict = row["effective_batch"][1], "met" if fine else "MISSED"
        print(f"{name:44s} {batch:5d} {apart[0]:>14s} {apart[1]:>14s} {equal:>11s} {one:5.2f} -> {two:.2f}  {verdict}")
    return met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = {name: compared(name, options.steps) for name in KINDS}
    met = show(rows, options.steps)
    if options.json:
        write_text(options.json, json.dumps({"steps": options.steps, "rows": rows, "met": met}, indent=1))
    raise SystemExit(not met)


if __name__ == "__main__":
    main()
