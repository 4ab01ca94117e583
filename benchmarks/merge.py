"""What does a merge cost against copying the file, and is every number right? Interleaved runs, each its own process.

A base of Anima's shapes (28 blocks of width 2048: 4.2 GB in bf16, random weights of std 0.02) and a rank-16 LoRA in
kohya's spelling on 280 sites. Both sides are timed to the end of their fsync, with nothing left to be written by the
run before and the base in the system's cache; of a merge's time the start of Python and torch is taken off. Memory is
the peak beyond that start. The ratio means something on an idle machine only: `cp` needs one processor, a merge two.

Run: python benchmarks/merge.py [--folder DIR --blocks 28 --width 2048 --rounds 5 --no-verify --json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from finitune.files.tensorfile import TensorFile
from finitune.files.writer import save_tensor_stream, save_tensors
from finitune.numerics.narrow import compute_spacing

RANK, ALPHA, STRENGTH = 16, 8.0, 0.8
STD = 0.02
POOL = 2**25
CHUNK = 256

MERGE = """
import sys, time
from pathlib import Path
import torch
def peak_kb():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
start, resting = time.perf_counter(), peak_kb()
from finitune.verbs.merge import Request, run
report = run(Request(model=sys.argv[1], adapters=(sys.argv[2],), out=Path(sys.argv[3])))
assert report.ok, report.findings
seconds = time.perf_counter() - start
print(seconds, (peak_kb() - resting) / 1024, report.figures["survival_min"], report.figures["readback_mismatches"])
"""


def block_shapes(width: int) -> dict[str, tuple[int, int]]:
    """The adapted weights of one block."""
    shapes = {f"self_attn.{part}_proj": (width, width) for part in ("q", "k", "v", "output")}
    shapes |= {f"cross_attn.{part}_proj": (width, width) for part in ("q", "output")}
    shapes |= {f"cross_attn.{part}_proj": (width, 1024) for part in ("k", "v")}
    return {**shapes, "mlp.layer1": (4 * width, width), "mlp.layer2": (width, 4 * width)}


def base_shapes(blocks: int, width: int) -> dict[str, tuple[int, ...]]:
    """The denoiser and its text conditioner, with the original names, without the smallest tensors."""
    shapes: dict[str, tuple[int, ...]] = {
        "x_embedder.proj.1": (width, 68),
        "t_embedder.1.linear_1": (width, width),
        "t_embedder.1.linear_2": (3 * width, width),
        "t_embedding_norm": (width,),
        "final_layer.adaln_modulation.1": (256, width),
        "final_layer.adaln_modulation.2": (2 * width, 256),
        "final_layer.linear": (64, width),
        "llm_adapter.embed": (32128, 1024),
        "llm_adapter.out_proj": (1024, 1024),
    }
    for i in range(blocks):
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in block_shapes(width).items()}
        for part in ("self_attn", "cross_attn", "mlp"):
            shapes[f"blocks.{i}.adaln_modulation_{part}.1"] = (256, width)
            shapes[f"blocks.{i}.adaln_modulation_{part}.2"] = (3 * width, 256)
    for j in range(6):
        for part in ("self_attn", "cross_attn"):
            shapes |= {f"llm_adapter.blocks.{j}.{part}.{p}_proj": (1024, 1024) for p in "qkvo"}
        shapes |= {f"llm_adapter.blocks.{j}.mlp.0": (4096, 1024), f"llm_adapter.blocks.{j}.mlp.2": (1024, 4096)}
    return {f"net.{name}.weight": shape for name, shape in shapes.items()}


def write_base(path: Path, blocks: int, width: int) -> None:
    """Random weights: stretches of one pool of normal numbers, each beginning somewhere else."""
    pool = (STD * torch.randn(POOL + 4096)).bfloat16()
    shapes = base_shapes(blocks, width)
    offsets = {name: 7919 * n % 4096 for n, name in enumerate(shapes)}

    def tensor_of(name: str) -> Tensor:
        size = math.prod(shapes[name])
        parts = pool[offsets[name] :].repeat(math.ceil(size / POOL))
        return parts[:size].view(shapes[name])

    save_tensor_stream(path, {name: (torch.bfloat16, shape) for name, shape in shapes.items()}, tensor_of)


def write_lora(path: Path, blocks: int, width: int) -> int:
    """The adapter; returns its number of sites."""
    tensors: dict[str, Tensor] = {}
    for i in range(blocks):
        for name, (out, into) in block_shapes(width).items():
            module = f"lora_unet_blocks_{i}_{name.replace('.', '_')}"
            tensors[f"{module}.lora_down.weight"] = STD * torch.randn(RANK, into)
            tensors[f"{module}.lora_up.weight"] = STD * torch.randn(out, RANK)
            tensors[f"{module}.alpha"] = torch.tensor(ALPHA)
    save_tensors(path, tensors)
    return len(tensors) // 3


def warm(path: Path) -> None:
    """Leave nothing to be written by the run before, and the whole file in the system's cache."""
    os.sync()
    with path.open("rb", buffering=0) as file:
        while file.read(POOL):
            pass


def copy_seconds(source: Path, out: Path) -> float:
    """`cp`, and the flush of what it wrote."""
    start = time.perf_counter()
    subprocess.run(["cp", str(source), str(out)], check=True)
    descriptor = os.open(out, os.O_RDWR)
    os.fsync(descriptor)
    os.close(descriptor)
    return time.perf_counter() - start


def merge_run(base: Path, lora: Path, out: Path) -> tuple[float, float, float, float]:
    """Seconds, MB beyond the start, the least survival, and mismatches found when reading back."""
    arguments = [sys.executable, "-c", MERGE, str(base), f"{lora}:{STRENGTH}", str(out)]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True)
    seconds, peak, survival, mismatches = map(float, done.stdout.split())
    return seconds, peak, survival, mismatches


def wrong_elements(base: TensorFile, lora: TensorFile, merged: TensorFile) -> tuple[int, int]:
    """(elements, those that are not the fp64 sum rounded once) over all adapted tensors, by arithmetic on each.

    An element is also right where the exact sum lies so near to a tie that fp64 itself cannot tell: none is known.
    """
    elements = wrong = 0
    for name in merged:
        module = "lora_unet_" + name.removeprefix("net.").removesuffix(".weight").replace(".", "_")
        if f"{module}.lora_up.weight" not in lora:
            continue
        up, down = (lora.read(f"{module}.lora_{part}.weight").double() for part in ("up", "down"))
        before, after = base.read(name), merged.read(name)
        for rows in torch.arange(len(before)).split(CHUNK):
            wanted = before[rows].double() + STRENGTH * (ALPHA / RANK) * (up[rows] @ down)
            step = compute_spacing(wanted, torch.bfloat16)
            wrong += int((torch.round(wanted / step) * step != after[rows].double()).sum())
        elements += before.numel()
    return elements, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "finitune-merge-benchmark")
    parser.add_argument("--blocks", type=int, default=28)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-verify", action="store_true")
    parser.add_argument("--keep", action="store_true", help="leave the files in the folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    options.folder.mkdir(parents=True, exist_ok=True)
    base, lora, out, copy = (options.folder / f"{name}.safetensors" for name in ("base", "lora", "out", "copy"))
    if not base.exists():
        write_base(base, options.blocks, options.width)
    sites = write_lora(lora, options.blocks, options.width)
    copies: list[float] = []
    merges: list[tuple[float, float, float, float]] = []
    for number in range(options.rounds + 1):
        warm(base)
        copied = copy_seconds(base, copy)
        copy.unlink()
        out.unlink(missing_ok=True)  # neither side is to wait for the removal of an older file
        warm(base)
        merged = merge_run(base, lora, out)
        print(f"cp {copied:.2f} s, merge {merged[0]:.2f} s, ratio {merged[0] / copied:.2f}", flush=True)
        if number:  # the first warms up
            copies.append(copied)
            merges.append(merged)
    figures: dict[str, float] = {
        "base_gb": base.stat().st_size / 1e9,
        "sites": sites,
        "cp_s": statistics.median(copies),
        "merge_s": statistics.median(merge[0] for merge in merges),
        "ratio": statistics.median(merge[0] / copied for merge, copied in zip(merges, copies, strict=True)),
        "ratio_of_best": min(merge[0] for merge in merges) / min(copies),
        "peak_rss_mb": max(merge[1] for merge in merges),
        "survival_min": merges[-1][2],
        "readback_mismatches": max(merge[3] for merge in merges),
    }
    if not options.no_verify:
        elements, wrong = wrong_elements(TensorFile(base), TensorFile(lora), TensorFile(out))
        figures |= {"elements": elements, "wrong": wrong, "correctly_rounded_share": 1 - wrong / elements}
    for name, value in figures.items():
        print(f"{name:26s} {value:.6g}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    if not options.keep:
        shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
