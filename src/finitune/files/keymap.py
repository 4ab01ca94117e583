"""Renaming tensors by templates, both ways, and never by guess.

A template is a dotted name in which a segment may be a number field: "blocks.{i}.mlp.layer1.weight". A pair of
templates with the same fields is a rename; a KeyMap is a set of pairs that no name can match twice, on either side.
So it is a bijection between the names it knows, and any other name is unknown: reported, not guessed. Substring
replacement has no such law: "blocks.1" is found in "blocks.12" too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

NUMBER = re.compile(r"0|[1-9][0-9]*")  # "01" is not a number: it would come back as "1"
FIELD = re.compile(r"\{[a-z_]+\}")

Pair = tuple[str, str]
Choice = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Renamed:
    """The outcome of renaming many names: {new name: old name}, and the names that no template knows."""

    names: dict[str, str]
    unknown: tuple[str, ...]


class KeyMap:
    """A bijection between two namings, given as pairs of templates; raises ValueError where it would not be one."""

    def __init__(self, pairs: Iterable[Pair]):
        self.pairs = tuple(pairs)
        for left, right in self.pairs:
            if sorted(fields_of(left)) != sorted(fields_of(right)) or len(set(fields_of(left))) != len(fields_of(left)):
                raise ValueError(f"{left!r} and {right!r} do not have the same fields, once each")
        self._forward = _index(self.pairs)
        self._backward = _index((right, left) for left, right in self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def forward(self, name: str) -> str | None:
        """The right-hand name of a left-hand name; None where no template matches."""
        return _rename(name, self._forward)

    def backward(self, name: str) -> str | None:
        """The left-hand name of a right-hand name; None where no template matches."""
        return _rename(name, self._backward)

    def rename(self, names: Iterable[str]) -> Renamed:
        """All names forward, at once."""
        known: dict[str, str] = {}
        unknown: list[str] = []
        for name in names:
            new = self.forward(name)
            if new is None:
                unknown.append(name)
            else:
                known[new] = name
        return Renamed(known, tuple(unknown))


def spell(left: str, right: str, **choices: Choice) -> list[Pair]:
    """Pairs of templates for all combinations of choices, each a tuple of (left word, right word).

    >>> spell("{part}.{i}.weight", "{part}s.{i}.weight", part=(("a", "A"), ("b", "B")))
    [('a.{i}.weight', 'As.{i}.weight'), ('b.{i}.weight', 'Bs.{i}.weight')]
    """
    pairs: list[Pair] = []
    for words in itertools.product(*choices.values()):
        new_left, new_right = left, right
        for field, (left_word, right_word) in zip(choices, words, strict=True):
            new_left = new_left.replace(f"{{{field}}}", left_word)
            new_right = new_right.replace(f"{{{field}}}", right_word)
        pairs.append((new_left, new_right))
    return pairs


def same(*words: str) -> Choice:
    """Words that both namings spell alike."""
    return tuple((word, word) for word in words)


def fields_of(template: str) -> list[str]:
    """The number fields of a template, in order."""
    return [segment for segment in template.split(".") if FIELD.fullmatch(segment)]


def match(name: str, template: str) -> dict[str, str] | None:
    """The numbers of a name's fields where the whole name fits the template, else None."""
    segments, wanted = name.split("."), template.split(".")
    if len(segments) != len(wanted):
        return None
    numbers: dict[str, str] = {}
    for segment, want in zip(segments, wanted, strict=True):
        if FIELD.fullmatch(want) and NUMBER.fullmatch(segment):
            numbers[want] = segment
        elif segment != want:
            return None
    return numbers


def can_clash(a: str, b: str) -> bool:
    """Whether some name fits both templates."""
    first, second = a.split("."), b.split(".")
    return len(first) == len(second) and all(map(_segments_clash, first, second))


def _segments_clash(a: str, b: str) -> bool:
    if FIELD.fullmatch(a):
        return bool(FIELD.fullmatch(b) or NUMBER.fullmatch(b))
    return a == b or bool(FIELD.fullmatch(b) and NUMBER.fullmatch(a))


def _skeleton(name: str) -> tuple[str, ...]:
    """The segments with every number or field blanked: names and templates that match share it."""
    return tuple("#" if NUMBER.fullmatch(s) or FIELD.fullmatch(s) else s for s in name.split("."))


def _index(pairs: Iterable[Pair]) -> dict[tuple[str, ...], list[Pair]]:
    """Pairs by the skeleton of their left side; raises ValueError where two left sides can match one name."""
    index: dict[tuple[str, ...], list[Pair]] = {}
    for left, right in pairs:
        siblings = index.setdefault(_skeleton(left), [])
        for other, _ in siblings:
            if can_clash(left, other):
                raise ValueError(f"{left!r} and {other!r} can match the same name")
        siblings.append((left, right))
    return index


def _rename(name: str, index: dict[tuple[str, ...], list[Pair]]) -> str | None:
    for left, right in index.get(_skeleton(name), ()):
        numbers = match(name, left)
        if numbers is not None:
            return ".".join(numbers.get(segment, segment) for segment in right.split("."))
    return None
