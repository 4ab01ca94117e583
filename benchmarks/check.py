"""What does it cost to look at every number? `finitune check` against reading the file, interleaved.

A bf16 base of Anima's shapes: the range and the finiteness of every tensor, against reading every tensor into memory
without a look at it. Beside them, once: passing the file through a buffer that stays in the processor's cache, which
is the least that any program can take, and the usual way (isnan, isinf, min and max of whole tensors). And a rank-16
adapter, as a whole process, start included.

Run: python benchmarks/check.py [--folder DIR --blocks 28 --width 2048 --rounds 5 --json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from merge import write_base, write_lora

from finitune.files.tensorfile import TensorFile
from finitune.verbs import check

PIECE = 1 << 20


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def read_all(path: Path) -> None:
    """Every tensor, into memory of its own."""
    for name, _ in TensorFile(path).tensors():
        assert name


def pass_through(path: Path) -> None:
    """Every byte of a file, through one small buffer."""
    buffer = bytearray(PIECE)
    with path.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass


def check_all(path: Path) -> None:
    report = check.run(check.Request(paths=(path,)))
    assert report.ok and report.figures["nonfinite_tensors"] == 0


def usual_way(path: Path) -> None:
    """What a script does: whole tensors, four looks at each."""
    for _, tensor in TensorFile(path).tensors():
        assert not tensor.isnan().any() and not tensor.isinf().any()
        tensor.min(), tensor.max()


def adapter_process(path: Path) -> float:
    """One whole `finitune check` of an adapter, from the start of Python to its end."""
    command = [sys.executable, "-m", "finitune", "check", str(path), "--json"]
    return seconds(lambda: subprocess.run(command, check=True, capture_output=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "finitune-check-benchmark")
    parser.add_argument("--blocks", type=int, default=28)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    base, lora = (options.folder / f"{name}.safetensors" for name in ("base", "lora"))
    if not base.exists():
        write_base(base, options.blocks, options.width)
    write_lora(lora, options.blocks, options.width)
    os.sync()
    rounds = [(seconds(lambda: read_all(base)), seconds(lambda: check_all(base))) for _ in range(options.rounds + 1)]
    adapters = [adapter_process(lora) for _ in range(options.rounds)]
    torch_alone = [
        seconds(lambda: subprocess.run([sys.executable, "-c", "import torch"], check=True))
        for _ in range(options.rounds)
    ]
    warm = rounds[1:]
    figures = {
        "base_gb": base.stat().st_size / 1e9,
        "read_s": statistics.median(read for read, _ in warm),
        "check_s": statistics.median(checked for _, checked in warm),
        "ratio": statistics.median(checked / read for read, checked in warm),
        "pass_through_s": seconds(lambda: pass_through(base)),
        "usual_way_s": seconds(lambda: usual_way(base)),
        "adapter_mb": lora.stat().st_size / 1e6,
        "adapter_process_s": statistics.median(adapters),
        "import_torch_s": statistics.median(torch_alone),
    }
    for name, value in figures.items():
        print(f"{name:20s} {value:.4g}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
