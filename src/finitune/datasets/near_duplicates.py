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

from finitune.datasets.picture_files import WRONG_EXTENSION_NOTE
from finitune.datasets.pixels import Float32Array, PictureNote, UInt8Array
from finitune.report import Finding, Level, summarize_names

_THUMBNAIL_SIDE = 32
_DCT_SIZE = 8
MAX_HASH_DISTANCE = 8
"""How many of the 64 bits may differ."""
MIN_THUMBNAIL_CORRELATION = 0.97
"""The correlation of the small versions from which on two pictures are alike."""
MAX_FLAT_DEVIATION = 1.5
"""Deviation of grey, in levels of 255, below which a picture shows nothing."""
_HASH_BLOCK_ROWS = 1024


@dataclass
class NearDuplicateFinder:
    """What is kept of each picture as it is decoded: a Look for `verify_pictures`."""

    small: dict[Path, UInt8Array] = field(default_factory=dict)
    misnamed: dict[Path, str] = field(default_factory=dict)
    """The kind of each picture whose name says another one."""

    def __call__(self, path: Path, picture: Image.Image, notes: tuple[PictureNote, ...]) -> None:
        """Keep a small version, uint8 (32, 32), and what the file is if its name says otherwise."""
        self.small[path] = make_grey_thumbnail(picture)
        for note in notes:
            if note.what == WRONG_EXTENSION_NOTE:
                self.misnamed[path] = note.detail

    def findings(self, names: Mapping[Path, str]) -> list[Finding]:
        """What is told of the pictures with these names: those that look alike, and those that show nothing."""
        paths = [path for path in names if path in self.small]
        greys = np.array([self.small[path] for path in paths], np.uint8).reshape(-1, _THUMBNAIL_SIDE, _THUMBNAIL_SIDE)
        groups = [[paths[one] for one in group] for group in group_near_duplicates(greys)]
        apart = [kept for group in groups if len(kept := drop_identical_files(group)) > 1]
        told = [" = ".join(names[path] for path in group) for group in apart]
        what = f"pictures look nearly the same ({len(told)} groups)"
        remedy = "Keep the best of each group: what is shown more often is learned more."
        found = summarize_names(Level.WARNING, "PICTURE-ALIKE", "datasets", what, told, remedy)
        flat = [names[paths[number]] for number in np.flatnonzero(greys.std(axis=(1, 2)) < MAX_FLAT_DEVIATION)]
        what = f"pictures are of one colour all over ({len(flat)})"
        return found + summarize_names(Level.WARNING, "DATASET-PICTURE-FLAT", "datasets", what, flat, "Take them out.")


def make_grey_thumbnail(picture: Image.Image) -> UInt8Array:
    """The grey of an RGB or grey picture, uint8 (32, 32), by means over areas."""
    return np.asarray(
        picture.resize((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE), Image.Resampling.BOX, reducing_gap=1.0).convert("L")
    )


def group_near_duplicates(greys: UInt8Array) -> list[list[int]]:
    """The groups of two or more among uint8 (N, 32, 32) that look alike, each by rising numbers.

    Whoever is like one of a group belongs to it. Pictures of one colour are like none.
    """
    leader = list(range(len(greys)))

    def first(number: int) -> int:
        while leader[number] != number:
            leader[number] = number = leader[leader[number]]
        return number

    for one, other in iterate_near_duplicates(greys):
        low, high = sorted((first(one), first(other)))
        leader[high] = low
    groups: dict[int, list[int]] = defaultdict(list)
    for number in range(len(greys)):
        groups[first(number)].append(number)
    return [group for group in groups.values() if len(group) > 1]


def iterate_near_duplicates(greys: UInt8Array) -> Iterator[tuple[int, int]]:
    """The pairs of numbers, the smaller first, of pictures uint8 (N, 32, 32) that are alike."""
    signs, unit = compute_hash_signs(greys), normalize_thumbnails(greys)
    shows = np.linalg.norm(unit.reshape(len(greys), _THUMBNAIL_SIDE * _THUMBNAIL_SIDE), axis=1) > 0
    for start in range(0, len(greys), _HASH_BLOCK_ROWS):
        # Products of +-1: 64 less twice the number of bits that differ.
        agreeing = signs[start : start + _HASH_BLOCK_ROWS] @ signs[start:].T
        for one, other in np.argwhere(agreeing >= _DCT_SIZE**2 - 2 * MAX_HASH_DISTANCE):
            one, other = start + int(one), start + int(other)
            if one < other and shows[one] and shows[other]:
                likeness = float(np.vdot(unit[one], unit[other]))
                if likeness >= MIN_THUMBNAIL_CORRELATION:
                    yield one, other


def compute_hash_signs(greys: UInt8Array) -> Float32Array:
    """uint8 (N, 32, 32) to the 64 bits of each as float32 (N, 64) of +1 and -1."""
    waves = compute_dct_rows()
    slow = (waves @ greys.astype(np.float32) @ waves.T).reshape(len(greys), _DCT_SIZE**2)
    median = np.median(slow[:, 1:], axis=1, keepdims=True)  # without the mean, which is no shape
    return np.where(slow > median, 1, -1).astype(np.float32)


def compute_dct_rows() -> Float32Array:
    """float32 (8, 32): the slowest rows of the discrete cosine transform."""
    places = np.arange(_THUMBNAIL_SIDE) + 0.5
    return np.cos(math.pi / _THUMBNAIL_SIDE * np.outer(np.arange(_DCT_SIZE), places)).astype(np.float32)


def normalize_thumbnails(greys: UInt8Array) -> Float32Array:
    """uint8 (N, 32, 32) to float32 of mean 0 and norm 1 each; zeros where there is nothing but one grey."""
    values: NDArray[np.float32] = greys.astype(np.float32)
    values -= values.mean(axis=(1, 2), keepdims=True)
    norm = np.linalg.norm(values.reshape(len(greys), _THUMBNAIL_SIDE * _THUMBNAIL_SIDE), axis=1)[:, None, None]
    return np.where(norm > MAX_FLAT_DEVIATION * _THUMBNAIL_SIDE, values / np.maximum(norm, 1e-9), 0).astype(np.float32)


def drop_identical_files(group: Sequence[Path]) -> list[Path]:
    """The files of a group without those whose bytes another one has: that is told elsewhere."""
    kept: list[Path] = []
    for path in group:
        if not any(filecmp.cmp(path, other, shallow=False) for other in kept):
            kept.append(path)
    return kept
