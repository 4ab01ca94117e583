"""Lists of key=value, as network_args and optimizer_args hold them: read kindly, and never evaluated.

They come through shells, forms and other programs, each of which takes off quotes, adds commas or cuts at blanks. What
can be meant in one way only is taken, and said; what cannot is an error with its place and its text.
"""

from __future__ import annotations

import ast
import math
import re
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from finitune.config.kinds import AS_TEXT, frozen, readable_number
from finitune.errors import UsageError
from finitune.report import Finding, Level

WORDS = {"true": True, "false": False, "none": None, "null": None}
OPENING = {")": "(", "]": "[", "}": "{"}
PATTERNED = ("network_reg_dims", "network_reg_alphas", "network_reg_lrs")
"""Arguments whose value holds `=` itself: pattern=number,pattern=number."""
WIDE = str.maketrans("\uff1d\uff0c\uff08\uff09\uff3b\uff3d\u201c\u201d\u2018\u2019", "=,()[]\"\"''")
"""What an input method makes of `= , ( ) [ ]` and of quotes."""
NAME = re.compile(r"[A-Za-z_][\w.]*")
NEXT = r"(?=[A-Za-z_][\w.]*\s*=)"
BLANKS = re.compile(rf"(?<![\s,;])\s+{NEXT}")
COMMAS = re.compile(rf"\s*[,;]\s*{NEXT}")
PLAIN = (bool, int, float, str, type(None), list, tuple, dict)
REMEDY = 'Write each argument as name=value: ["weight_decay=0.01", "betas=(0.9, 0.99)"].'


@dataclass
class Reading:
    """What was read so far, and what is said of it; `where` is the option that holds the list."""

    where: str
    arguments: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def say(self, level: Level, code: str, place: int, text: str, message: str, remedy: str = "") -> None:
        """A finding about the item at `place`, counted from 0."""
        evidence = {"index": place, "text": text}
        message = f"{self.where}[{place}], {text!r}: {message}"
        self.findings.append(Finding(level, code, f"{self.where}[{place}]", message, evidence, remedy))

    def note(self, code: str, place: int, text: str, message: str) -> None:
        self.say(Level.NOTE, code, place, text, message)

    def warn(self, code: str, place: int, text: str, message: str) -> None:
        self.say(Level.WARNING, code, place, text, message)

    def refuse(self, code: str, place: int, text: str, message: str, remedy: str = REMEDY) -> None:
        self.say(Level.ERROR, code, place, text, message, remedy)


def parse_arguments(
    items: Sequence[str] | str | Mapping[str, Any], where: str
) -> tuple[dict[str, Any], tuple[Finding, ...]]:
    """The arguments by name, and what was put right; `where` names the option that holds them.

    Values are numbers, truth values, None, text, tuples (also for lists) and mappings of these.
    Raises UsageError with every item that cannot be read, by index and text: under its own code where it is one
    (ARGUMENT-NO-VALUE, -NAME, -TWICE, -VALUE, -NO-TEXT), else ARGUMENTS-INVALID.

    >>> parse_arguments(["betas=(0.9, 0.99)", "decouple=true"], "optimizer_args")[0]
    {'betas': (0.9, 0.99), 'decouple': True}
    """
    reading = Reading(where)
    if isinstance(items, Mapping):
        for place, (name, value) in enumerate(items.items()):
            entry(reading, place, str(name), value)
    else:
        texts = shell_words(items) if isinstance(items, str) else list(items)
        for place, text in whole_items(reading, texts):
            for part in separated(reading, place, text, quietly=isinstance(items, str)):
                item(reading, place, part)
    wrong = [finding for finding in reading.findings if finding.level is Level.ERROR]
    if wrong:
        raise UsageError(
            "\n  ".join(finding.message for finding in wrong),
            code=wrong[0].code if len(wrong) == 1 else "ARGUMENTS-INVALID",
            subject=where,
            evidence={"items": [finding.evidence for finding in wrong]},
            remedy=wrong[0].remedy,
        )
    return reading.arguments, tuple(reading.findings)


def entry(reading: Reading, place: int, name: str, value: Any) -> None:
    """An argument of a mapping: text that is a number or a truth value is taken as one."""
    if isinstance(value, str):
        number = readable_number(value)
        word = value.strip().casefold()
        if number is not None or word in WORDS:
            reading.warn(AS_TEXT, place, f"{name}={value}", "is in quotes; it is taken without them")
            value = number if number is not None else WORDS[word]
    reading.arguments[name] = frozen(value)


def whole_items(reading: Reading, items: Sequence[Any]) -> Iterator[tuple[int, str]]:
    """The items, each with what was cut off it at a blank within brackets."""
    place = 0
    while place < len(items):
        start, text = place, items[place]
        place += 1
        if not isinstance(text, str):
            reading.refuse("ARGUMENT-NO-TEXT", start, str(text), "is not text")
            continue
        text = text.strip()
        while open_brackets(text) > 0 and place < len(items) and not starts_argument(items[place]):
            text += " " + str(items[place]).strip()
            place += 1
        if place > start + 1 and open_brackets(text) <= 0:
            reading.note(
                "ARGUMENT-JOINED", start, text, f"{place - start} items were one argument, cut within brackets"
            )
        yield start, text


def walked(text: str) -> Iterator[tuple[str, int, int]]:
    """Each sign outside of quotes with its place, and how deep in brackets the text is behind it."""
    depth, quote = 0, ""
    for place, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote else quote
            continue
        if sign in "\"'" and sign in text[place + 1 :]:
            quote = sign
            continue
        depth += (sign in "([{") - (sign in ")]}")
        yield sign, place, depth


def open_brackets(text: str) -> int:
    """How many brackets are open at the end."""
    return next((depth for _, _, depth in reversed(list(walked(text)))), 0)


def starts_argument(item: object) -> bool:
    """Whether an item begins with name=."""
    name, equals, _ = str(item).partition("=")
    return bool(equals) and bool(NAME.fullmatch(name.strip()))


def separated(reading: Reading, place: int, text: str, quietly: bool) -> list[str]:
    """The arguments in one text, where it holds several, apart by blanks or commas outside of brackets and quotes."""
    if text.translate(WIDE) != text:
        reading.note("ARGUMENT-FULL-WIDTH", place, text, "full-width signs are taken as the ASCII ones")
        text = text.translate(WIDE)
    text = unquoted(reading, place, text)
    if not text:
        reading.note("ARGUMENT-EMPTY", place, text, "is empty, and left out")
        return []
    pieces = [
        part for piece in cut(text, BLANKS) for part in ([piece] if piece.startswith(PATTERNED) else cut(piece, COMMAS))
    ]
    if len(pieces) > 1 and not quietly:
        reading.note("ARGUMENT-SPLIT", place, text, f"holds {len(pieces)} arguments; each should be an item")
    return pieces


def cut(text: str, between: re.Pattern[str]) -> list[str]:
    """A text cut where `between` matches behind an `=`, outside of brackets and quotes."""
    outside = {at for _, at, depth in walked(text) if not depth}
    found = [match.span() for match in between.finditer(text) if match.start() in outside]
    edges = [(0, 0), *(span for span in found if "=" in text[: span[0]]), (len(text), len(text))]
    return [text[begin:end] for (_, begin), (end, _) in pairwise(edges)]


def shell_words(text: str) -> list[str]:
    """One text as a list: items that are quoted as for a shell are taken apart as a shell does."""
    if text.lstrip()[:1] in ("'", '"'):
        with suppress(ValueError):
            return shlex.split(text)
    return [text]


def unquoted(reading: Reading, place: int, text: str) -> str:
    """An item without the second pair of quotes around all of it."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" and text[0] not in text[1:-1]:
        if text[1:-1].strip():
            reading.note("ARGUMENT-QUOTED-TWICE", place, text, "is quoted twice; the inner quotes are left out")
        return text[1:-1].strip()
    return text


def item(reading: Reading, place: int, text: str) -> None:
    """One name=value."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        remedy = f"Write {text}=VALUE." if NAME.fullmatch(text) else REMEDY
        reading.refuse("ARGUMENT-NO-VALUE", place, text, "has no `=`", remedy)
    elif not NAME.fullmatch(name):
        bare = name.lstrip("-").replace("-", "_")
        remedy = f"Write {bare}={value}." if NAME.fullmatch(bare) else REMEDY
        reading.refuse("ARGUMENT-NAME", place, text, f"{name!r} is no name", remedy)
    elif not value:
        reading.refuse("ARGUMENT-NO-VALUE", place, text, f"has no value behind `{name}=`")
    elif name in reading.arguments:
        reading.refuse("ARGUMENT-TWICE", place, text, f"{name} is there already", "Leave one of them out.")
    elif name in PATTERNED:
        reading.arguments[name] = value.strip("\"'")
    else:
        try:
            reading.arguments[name] = frozen(valued(reading, place, text, value))
        except ValueError as error:
            reading.refuse("ARGUMENT-VALUE", place, text, str(error))


def valued(reading: Reading, place: int, text: str, value: str) -> Any:
    """The value of a text: a Python literal, a number, a word; raises ValueError saying why it is none."""
    if value.casefold() in WORDS:
        return WORDS[value.casefold()]
    if open_brackets(value) != 0:
        raise ValueError("a bracket is not closed" if open_brackets(value) > 0 else "a bracket is closed, never opened")
    try:
        read = literal(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return bare(reading, place, text, value)
    if not isinstance(read, PLAIN):
        raise ValueError(f"a {type(read).__name__} cannot be an argument")
    if isinstance(read, tuple) and len(read) == 1 and not value.startswith("("):
        reading.warn("ARGUMENT-TRAILING-COMMA", place, text, f"the comma behind {read[0]} is left out")
        return read[0]
    return read


def literal(text: str) -> Any:
    """The Python literal that a text is; backslashes of regular expressions stay as they are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.literal_eval(text)


def bare(reading: Reading, place: int, text: str, value: str) -> Any:
    """What is no literal: a list whose quotes are lost, a number in another spelling, or a word."""
    if value[0] + value[-1] in ("[]", "()"):
        inner = [part for part in top_level(value[1:-1]) if part]
        reading.warn("ARGUMENT-QUOTES-LOST", place, text, "quotes are missing within the brackets; it is taken as text")
        return tuple(valued(reading, place, text, part) for part in inner)
    if "=" in value:
        raise ValueError("has two `=`: two arguments in one, or quotes that are missing around the value")
    if value.endswith(","):
        reading.warn("ARGUMENT-TRAILING-COMMA", place, text, "the comma at the end is left out")
        return valued(reading, place, text, value[:-1].rstrip())
    number = readable_number(value)
    if isinstance(number, float) and not math.isfinite(number):
        raise ValueError("is no number that can be used")
    return value if number is None else number


def top_level(text: str) -> list[str]:
    """The parts of a text between commas outside of brackets and quotes."""
    cuts = [at for sign, at, depth in walked(text) if sign == "," and not depth]
    return [text[begin + 1 : end].strip() for begin, end in zip([-1, *cuts], [*cuts, len(text)], strict=True)]
