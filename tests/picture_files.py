"""Small pictures for the tests of data sets: with EXIF, in every mode, and PNG made byte by byte."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from finitune.config.datasets import Dataset, DatasetConfig, ResolvedDataset, Subset, resolve_datasets
from finitune.datasets.dataset_scan import DatasetScan, scan_datasets
from finitune.progress import SilentProgress
from finitune.report import Finding

ORIENTATION = 274


def noise_picture(width: int = 8, height: int = 6, seed: int = 0) -> Image.Image:
    """An RGB picture of which no two pixels are alike."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def saved(path: Path, image: Image.Image | None = None, orientation: int | None = None, **options: object) -> Path:
    """A picture in a file, whose folders are made; the seed of an unstated picture is its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if orientation is not None:
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        options["exif"] = exif
    image = image or noise_picture(seed=zlib.crc32(path.name.encode(errors="surrogateescape")))
    image.save(path, **options)  # pyright: ignore[reportArgumentType]
    return path


def written(path: Path, content: str | bytes) -> Path:
    """A file of any bytes, whose folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(size: tuple[int, int], depth: int, colour: int, rows: bytes, extra: bytes = b"", behind: bytes = b"") -> bytes:
    """A PNG from its rows, each with its filter byte; `extra` and `behind` are chunks around the pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", *size, depth, colour, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + head + extra + pixels + behind + chunk(b"IEND", b"")


def resolved(*subsets: Subset) -> tuple[ResolvedDataset, ...]:
    return resolve_datasets(DatasetConfig(datasets=(Dataset(subsets=subsets),)))


def scanned(*subsets: Subset | Path) -> DatasetScan:
    """One data set of subsets, or of folders."""
    return scan_datasets(
        resolved(*(s if isinstance(s, Subset) else Subset(image_dir=s) for s in subsets)), SilentProgress()
    )


def found(scan_or_findings: DatasetScan | list[Finding], code: str) -> Finding:
    """The only finding of a code."""
    findings = scan_or_findings.findings if isinstance(scan_or_findings, DatasetScan) else scan_or_findings
    (finding,) = [finding for finding in findings if finding.code == code]
    return finding


def captions(found: DatasetScan) -> dict[str, str]:
    return {example.path.name: example.caption for examples in found.examples for example in examples}
