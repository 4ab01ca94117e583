"""What do L1 ranges and the half simulation cost, against a plain fp32 forward? Interleaved runs in one process.

Run: python benchmarks/probe_cost.py [--width 1024 --tokens 256 --rounds 15 --json FILE]
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_cosmos import CosmosTransformerBlock
from torch import nn

from finitune.numerics import simulate
from finitune.precision.probe import probe
from finitune.precision.trace import OpRecorder


def inputs(width: int, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Hidden states, context, time embedding and its projection of one Cosmos block."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, tokens, width), (1, 64, width // 2), (1, width), (1, 3 * width))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    block: nn.Module = CosmosTransformerBlock(options.width // 64, 64, options.width // 2, adaln_lora_dim=128)
    half = copy.deepcopy(block).half()
    full, narrow = (
        inputs(options.width, options.tokens, torch.float32),
        inputs(options.width, options.tokens, torch.half),
    )

    def plain() -> None:
        block(*full)

    def ranged() -> None:
        block(*full)

    def simulated() -> None:
        half(*narrow)

    times: dict[str, list[float]] = {"fp32": [], "l1": [], "simulate": [], "simulate_with_ranges": []}
    for round_number in range(options.rounds + 3):
        measured = {"fp32": seconds(plain)}
        with probe(block):
            measured["l1"] = seconds(ranged)
        with simulate.half():
            measured["simulate"] = seconds(simulated)
        recorder = OpRecorder(half)
        with simulate.half(), recorder:
            measured["simulate_with_ranges"] = seconds(simulated)
        if round_number >= 3:
            for name, value in measured.items():
                times[name].append(value)

    def ratio(name: str) -> float:
        return statistics.median(a / b for a, b in zip(times[name], times["fp32"], strict=True))

    figures = {f"{name}_ratio": ratio(name) for name in ("l1", "simulate", "simulate_with_ranges")}
    figures["fp32_ms"] = 1000 * statistics.median(times["fp32"])
    for name, value in figures.items():
        print(f"{name:28s} {value:.3f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
