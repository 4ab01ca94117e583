"""What does it cost to check a dataset? `check_dataset` against a plain loop that decodes the same pictures.

Pictures of 0.3 megapixels, JPEG and PNG, with captions. The plain loop is Pillow's own: open, load, in as many threads
as the check uses. Both are measured in turns, warm, and the ratio is the median of the rounds' ratios; that of the
processor's time, too, which others on the machine disturb less.

Run: python benchmarks/check_dataset.py [--pictures 2000 --rounds 5 --threads N --json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from finitune.datasets.dataset_scan import MAX_DECODER_THREADS
from finitune.progress import SilentProgress
from finitune.report import Report
from finitune.verbs.check.dataset import check_dataset
from finitune.verbs.check.request import Request

SHAPES = ((640, 480), (480, 640), (560, 560), (720, 432))


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """On the wall, and of the processor."""
    start, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - used


def make_pictures(folder: Path, count: int) -> None:
    """Smooth pictures with some grain, so that both kinds are as large as photographs are; every third a PNG."""
    random = np.random.default_rng(0)
    grains = {shape: random.normal(0, 6, (*shape[::-1], 1)).astype(np.float32) for shape in SHAPES}
    for number in range(count):
        width, height = SHAPES[number % len(SHAPES)]
        coarse = Image.fromarray(random.integers(0, 256, (12, 12, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float32)
        picture = Image.fromarray((smooth + grains[width, height]).clip(0, 255).astype(np.uint8))
        path = folder / f"{number:05d}"
        if number % 3:
            picture.save(path.with_suffix(".jpg"), quality=92)
        else:
            picture.save(path.with_suffix(".png"), compress_level=6)
        path.with_suffix(".txt").write_text(f"sks, colour {number % 7}, shape {number % 11}, noise", encoding="utf-8")


def decode(path: Path) -> None:
    with Image.open(path) as picture:
        picture.load()


def plain_loop(folder: Path, threads: int) -> None:
    """Every picture decoded by Pillow, and nothing else."""
    paths = [path for path in folder.iterdir() if path.suffix != ".txt"]
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(decode, paths):
            pass


def check(folder: Path) -> None:
    report = Report("check")
    check_dataset(folder, Request(paths=(folder,)), report, SilentProgress())
    assert report.ok and not [f for f in report.findings if f.code == "PICTURE-ALIKE"], report.findings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=min(os.cpu_count() or 1, MAX_DECODER_THREADS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_pictures(folder, options.pictures)
        rounds = [
            (seconds(lambda: plain_loop(folder, options.threads)), seconds(lambda: check(folder)))
            for _ in range(options.rounds + 1)
        ][1:]
    figures = {
        "pictures": options.pictures,
        "threads": options.threads,
        "decode_s": statistics.median(plain[0] for plain, _ in rounds),
        "check_s": statistics.median(checked[0] for _, checked in rounds),
        "ratio": statistics.median(checked[0] / plain[0] for plain, checked in rounds),
        "processor_ratio": statistics.median(checked[1] / plain[1] for plain, checked in rounds),
        "pictures_per_s": options.pictures / statistics.median(checked[0] for _, checked in rounds),
    }
    for name, value in figures.items():
        print(f"{name:16s} {value:.4g}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
