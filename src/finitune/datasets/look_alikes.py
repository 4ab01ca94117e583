"""Pictures that show the same, though their files differ: saved anew, scaled, recoloured a little, cropped by a hair.

A perceptual hash: the grey picture at 32 x 32, its 8 x 8 slowest cosines, one bit for each that is above their median
(the scheme known as pHash; C. Zauner, "Implementation and Benchmarking of Perceptual Image Hash Functions", 2010).
Two pictures are candidates where few bits differ, and alike where their small versions agree as well: bits alone take
any two calm pictures for one.
"""

from __future__ import annotations

import filecmp
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from finitune.datasets.pictures import OTHER_KIND
from finitune.datasets.pixels import Bytes, Floats
from finitune.datasets.telling import several
from finitune.report import Finding, Level

SIDE = 32
COSINES = 8
MOST_BITS = 8
"""How many of the 64 bits may differ."""
LEAST_LIKENESS = 0.97
"""The correlation of the small versions from which on two pictures are alike."""
FLAT = 1.5
"""Deviation of grey, in levels of 255, below which a picture shows nothing."""
ROWS = 1024


@dataclass
class Looks:
    """What is kept of each picture as it is decoded: a Look for `verify_pictures`."""

    small: dict[Path, Bytes] = field(default_factory=dict)
    misnamed: dict[Path, str] = field(default_factory=dict)
    """The kind of each picture whose name says another one."""

    def __call__(self, path: Path, picture: Image.Image, notes: tuple[str, ...]) -> None:
        """Keep a small version, uint8 (32, 32), and what the file is if its name says otherwise."""
        self.small[path] = small_grey(picture)
        for note in notes:
            what, _, kind = note.partition(": ")
            if what == OTHER_KIND:
                self.misnamed[path] = kind

    def findings(self, names: Mapping[Path, str]) -> list[Finding]:
        """What is told of the pictures with these names: those that look alike, and those that show nothing."""
        paths = [path for path in names if path in self.small]
        greys = np.array([self.small[path] for path in paths], np.uint8).reshape(-1, SIDE, SIDE)
        groups = [[paths[one] for one in group] for group in alike(greys)]
        apart = [kept for group in groups if len(kept := different_files(group)) > 1]
        told = [" = ".join(names[path] for path in group) for group in apart]
        what = f"pictures look nearly the same ({len(told)} groups)"
        remedy = "Keep the best of each group: what is shown more often is learned more."
        found = several(Level.WARNING, "PICTURE-ALIKE", "datasets", what, told, remedy)
        flat = [names[paths[number]] for number in np.flatnonzero(greys.std(axis=(1, 2)) < FLAT)]
        what = f"pictures are of one colour all over ({len(flat)})"
        return found + several(Level.WARNING, "DATASET-PICTURE-FLAT", "datasets", what, flat, "Take them out.")


def small_grey(picture: Image.Image) -> Bytes:
    """The grey of an RGB or grey picture, uint8 (32, 32), by means over areas."""
    return np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BOX, reducing_gap=1.0).convert("L"))


def alike(greys: Bytes) -> list[list[int]]:
    """The groups of two or more among uint8 (N, 32, 32) that look alike, each by rising numbers.

    Whoever is like one of a group belongs to it. Pictures of one colour are like none.
    """
    leader = list(range(len(greys)))

    def first(number: int) -> int:
        while leader[number] != number:
            leader[number] = number = leader[leader[number]]
        return number

    for one, other in pairs(greys):
        low, high = sorted((first(one), first(other)))
        leader[high] = low
    groups: dict[int, list[int]] = defaultdict(list)
    for number in range(len(greys)):
        groups[first(number)].append(number)
    return [group for group in groups.values() if len(group) > 1]


def pairs(greys: Bytes) -> Iterator[tuple[int, int]]:
    """The pairs of numbers, the smaller first, of pictures uint8 (N, 32, 32) that are alike."""
    signs, unit = signs_of(greys), centred(greys)
    shows = np.linalg.norm(unit.reshape(len(greys), SIDE * SIDE), axis=1) > 0
    for start in range(0, len(greys), ROWS):
        # Products of +-1: 64 less twice the number of bits that differ.
        agreeing = signs[start : start + ROWS] @ signs[start:].T
        for one, other in np.argwhere(agreeing >= COSINES**2 - 2 * MOST_BITS):
            one, other = start + int(one), start + int(other)
            if one < other and shows[one] and shows[other]:
                likeness = float(np.vdot(unit[one], unit[other]))
                if likeness >= LEAST_LIKENESS:
                    yield one, other


def signs_of(greys: Bytes) -> Floats:
    """uint8 (N, 32, 32) to the 64 bits of each as float32 (N, 64) of +1 and -1."""
    waves = cosines()
    slow = (waves @ greys.astype(np.float32) @ waves.T).reshape(len(greys), COSINES**2)
    median = np.median(slow[:, 1:], axis=1, keepdims=True)  # without the mean, which is no shape
    return np.where(slow > median, 1, -1).astype(np.float32)


def cosines() -> Floats:
    """float32 (8, 32): the slowest rows of the discrete cosine transform."""
    places = np.arange(SIDE) + 0.5
    return np.cos(math.pi / SIDE * np.outer(np.arange(COSINES), places)).astype(np.float32)


def centred(greys: Bytes) -> Floats:
    """uint8 (N, 32, 32) to float32 of mean 0 and norm 1 each; zeros where there is nothing but one grey."""
    values: NDArray[np.float32] = greys.astype(np.float32)
    values -= values.mean(axis=(1, 2), keepdims=True)
    norm = np.linalg.norm(values.reshape(len(greys), SIDE * SIDE), axis=1)[:, None, None]
    return np.where(norm > FLAT * SIDE, values / np.maximum(norm, 1e-9), 0).astype(np.float32)


def different_files(group: Sequence[Path]) -> list[Path]:
    """The files of a group without those whose bytes another one has: that is told elsewhere."""
    kept: list[Path] = []
    for path in group:
        if not any(filecmp.cmp(path, other, shallow=False) for other in kept):
            kept.append(path)
    return kept
