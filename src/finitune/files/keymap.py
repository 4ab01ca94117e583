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

KEY_NUMBER_PATTERN = re.compile(r"0|[1-9][0-9]*")  # "01" is not a number: it would come back as "1"
KEY_FIELD_PATTERN = re.compile(r"\{[a-z_]+\}")

TemplatePair = tuple[str, str]
WordPairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class RenamedKeys:
    """The outcome of renaming many names: {new name: old name}, and the names that no template knows."""

    names: dict[str, str]
    unknown: tuple[str, ...]


class KeyMap:
    """A bijection between two namings, given as pairs of templates; raises ValueError where it would not be one."""

    def __init__(self, pairs: Iterable[TemplatePair]):
        self.pairs = tuple(pairs)
        for left, right in self.pairs:
            if sorted(get_template_fields(left)) != sorted(get_template_fields(right)) or len(
                set(get_template_fields(left))
            ) != len(get_template_fields(left)):
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

    def rename(self, names: Iterable[str]) -> RenamedKeys:
        """All names forward, at once."""
        known: dict[str, str] = {}
        unknown: list[str] = []
        for name in names:
            new = self.forward(name)
            if new is None:
                unknown.append(name)
            else:
                known[new] = name
        return RenamedKeys(known, tuple(unknown))


def expand_templates(left: str, right: str, **choices: WordPairs) -> list[TemplatePair]:
    """Pairs of templates for all combinations of choices, each a tuple of (left word, right word).

    >>> expand_templates("{part}.{i}.weight", "{part}s.{i}.weight", part=(("a", "A"), ("b", "B")))
    [('a.{i}.weight', 'As.{i}.weight'), ('b.{i}.weight', 'Bs.{i}.weight')]
    """
    pairs: list[TemplatePair] = []
    for words in itertools.product(*choices.values()):
        new_left, new_right = left, right
        for field, (left_word, right_word) in zip(choices, words, strict=True):
            new_left = new_left.replace(f"{{{field}}}", left_word)
            new_right = new_right.replace(f"{{{field}}}", right_word)
        pairs.append((new_left, new_right))
    return pairs


def pair_same_words(*words: str) -> WordPairs:
    """Words that both namings spell alike."""
    return tuple((word, word) for word in words)


def get_template_fields(template: str) -> list[str]:
    """The number fields of a template, in order."""
    return [segment for segment in template.split(".") if KEY_FIELD_PATTERN.fullmatch(segment)]


def match_template(name: str, template: str) -> dict[str, str] | None:
    """The numbers of a name's fields where the whole name fits the template, else None."""
    segments, wanted = name.split("."), template.split(".")
    if len(segments) != len(wanted):
        return None
    numbers: dict[str, str] = {}
    for segment, want in zip(segments, wanted, strict=True):
        if KEY_FIELD_PATTERN.fullmatch(want) and KEY_NUMBER_PATTERN.fullmatch(segment):
            numbers[want] = segment
        elif segment != want:
            return None
    return numbers


def can_templates_clash(a: str, b: str) -> bool:
    """Whether some name fits both templates."""
    first, second = a.split("."), b.split(".")
    return len(first) == len(second) and all(map(_segments_clash, first, second))


def _segments_clash(a: str, b: str) -> bool:
    if KEY_FIELD_PATTERN.fullmatch(a):
        return bool(KEY_FIELD_PATTERN.fullmatch(b) or KEY_NUMBER_PATTERN.fullmatch(b))
    return a == b or bool(KEY_FIELD_PATTERN.fullmatch(b) and KEY_NUMBER_PATTERN.fullmatch(a))


def _skeleton(name: str) -> tuple[str, ...]:
    """The segments with every number or field blanked: names and templates that match share it."""
    return tuple(
        "#" if KEY_NUMBER_PATTERN.fullmatch(s) or KEY_FIELD_PATTERN.fullmatch(s) else s for s in name.split(".")
    )


def _index(pairs: Iterable[TemplatePair]) -> dict[tuple[str, ...], list[TemplatePair]]:
    """Pairs by the skeleton of their left side; raises ValueError where two left sides can match one name."""
    index: dict[tuple[str, ...], list[TemplatePair]] = {}
    for left, right in pairs:
        siblings = index.setdefault(_skeleton(left), [])
        for other, _ in siblings:
            if can_templates_clash(left, other):
                raise ValueError(f"{left!r} and {other!r} can match the same name")
        siblings.append((left, right))
    return index


def _rename(name: str, index: dict[tuple[str, ...], list[TemplatePair]]) -> str | None:
    for left, right in index.get(_skeleton(name), ()):
        numbers = match_template(name, left)
        if numbers is not None:
            return ".".join(numbers.get(segment, segment) for segment in right.split("."))
    return None
