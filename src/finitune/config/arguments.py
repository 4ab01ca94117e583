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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from finitune.config.option_types import NUMBER_AS_TEXT_CODE, freeze_option_value, parse_readable_number
from finitune.errors import UsageError
from finitune.report import Finding, Level

_VALUE_BY_WORD = {"true": True, "false": False, "none": None, "null": None}
_OPENING_BRACKETS = {")": "(", "]": "[", "}": "{"}
_PATTERN_ARGUMENTS = ("network_reg_dims", "network_reg_alphas", "network_reg_lrs")
"""Arguments whose value holds `=` itself: pattern=number,pattern=number."""
_ASCII_BY_FULL_WIDTH = str.maketrans("\uff1d\uff0c\uff08\uff09\uff3b\uff3d\u201c\u201d\u2018\u2019", "=,()[]\"\"''")
"""What an input method makes of `= , ( ) [ ]` and of quotes."""
_ARGUMENT_NAME_PATTERN = re.compile(r"[A-Za-z_][\w.]*")
_NEXT_ARGUMENT_LOOKAHEAD = r"(?=[A-Za-z_][\w.]*\s*=)"
_BLANK_SEPARATOR_PATTERN = re.compile(rf"(?<![\s,;])\s+{_NEXT_ARGUMENT_LOOKAHEAD}")
_COMMA_SEPARATOR_PATTERN = re.compile(rf"\s*[,;]\s*{_NEXT_ARGUMENT_LOOKAHEAD}")
_ARGUMENT_VALUE_TYPES = (bool, int, float, str, type(None), list, tuple, dict)
_ARGUMENT_SYNTAX_REMEDY = 'Write each argument as name=value: ["weight_decay=0.01", "betas=(0.9, 0.99)"].'


@dataclass
class ArgumentParse:
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

    def refuse(self, code: str, place: int, text: str, message: str, remedy: str = _ARGUMENT_SYNTAX_REMEDY) -> None:
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
    reading = ArgumentParse(where)
    if isinstance(items, Mapping):
        for place, (name, value) in enumerate(items.items()):
            add_mapping_argument(reading, place, str(name), value)
    else:
        whole = items if isinstance(items, (str, Iterable)) else str(items)  # another program's may be one number
        texts = split_shell_quoted(whole) if isinstance(whole, str) else list(whole)
        for place, text in join_bracketed_items(reading, texts):
            for part in split_argument_text(reading, place, text, quietly=isinstance(whole, str)):
                parse_argument_item(reading, place, part)
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


def add_mapping_argument(reading: ArgumentParse, place: int, name: str, value: Any) -> None:
    """An argument of a mapping: text that is a number or a truth value is taken as one."""
    if isinstance(value, str):
        number = parse_readable_number(value)
        word = value.strip().casefold()
        if number is not None or word in _VALUE_BY_WORD:
            reading.warn(NUMBER_AS_TEXT_CODE, place, f"{name}={value}", "is in quotes; it is taken without them")
            value = number if number is not None else _VALUE_BY_WORD[word]
    reading.arguments[name] = freeze_option_value(value)


def join_bracketed_items(reading: ArgumentParse, items: Sequence[Any]) -> Iterator[tuple[int, str]]:
    """The items, each with what was cut off it at a blank within brackets."""
    place = 0
    while place < len(items):
        start, text = place, items[place]
        place += 1
        if not isinstance(text, str):
            reading.refuse("ARGUMENT-NO-TEXT", start, str(text), "is not text")
            continue
        text = text.strip()
        while count_open_brackets(text) > 0 and place < len(items) and not is_argument_start(items[place]):
            text += " " + str(items[place]).strip()
            place += 1
        if place > start + 1 and count_open_brackets(text) <= 0:
            reading.note(
                "ARGUMENT-JOINED", start, text, f"{place - start} items were one argument, cut within brackets"
            )
        yield start, text


def iterate_unquoted_characters(text: str) -> Iterator[tuple[str, int, int]]:
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


def count_open_brackets(text: str) -> int:
    """How many brackets are open at the end."""
    return next((depth for _, _, depth in reversed(list(iterate_unquoted_characters(text)))), 0)


def is_argument_start(item: object) -> bool:
    """Whether an item begins with name=."""
    name, equals, _ = str(item).partition("=")
    return bool(equals) and bool(_ARGUMENT_NAME_PATTERN.fullmatch(name.strip()))


def split_argument_text(reading: ArgumentParse, place: int, text: str, quietly: bool) -> list[str]:
    """The arguments in one text, where it holds several, apart by blanks or commas outside of brackets and quotes."""
    if text.translate(_ASCII_BY_FULL_WIDTH) != text:
        reading.note("ARGUMENT-FULL-WIDTH", place, text, "full-width signs are taken as the ASCII ones")
        text = text.translate(_ASCII_BY_FULL_WIDTH)
    text = strip_outer_quotes(reading, place, text)
    if not text:
        reading.note("ARGUMENT-EMPTY", place, text, "is empty, and left out")
        return []
    pieces = [
        part
        for piece in split_behind_equals(text, _BLANK_SEPARATOR_PATTERN)
        for part in (
            [piece] if piece.startswith(_PATTERN_ARGUMENTS) else split_behind_equals(piece, _COMMA_SEPARATOR_PATTERN)
        )
    ]
    if len(pieces) > 1 and not quietly:
        reading.note("ARGUMENT-SPLIT", place, text, f"holds {len(pieces)} arguments; each should be an item")
    return pieces


def split_behind_equals(text: str, between: re.Pattern[str]) -> list[str]:
    """A text cut where `between` matches behind an `=`, outside of brackets and quotes."""
    outside = {at for _, at, depth in iterate_unquoted_characters(text) if not depth}
    found = [match.span() for match in between.finditer(text) if match.start() in outside]
    edges = [(0, 0), *(span for span in found if "=" in text[: span[0]]), (len(text), len(text))]
    return [text[begin:end] for (_, begin), (end, _) in pairwise(edges)]


def split_shell_quoted(text: str) -> list[str]:
    """One text as a list: items that are quoted as for a shell are taken apart as a shell does."""
    if text.lstrip()[:1] in ("'", '"'):
        with suppress(ValueError):
            return shlex.split(text)
    return [text]


def strip_outer_quotes(reading: ArgumentParse, place: int, text: str) -> str:
    """An item without the second pair of quotes around all of it."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" and text[0] not in text[1:-1]:
        if text[1:-1].strip():
            reading.note("ARGUMENT-QUOTED-TWICE", place, text, "is quoted twice; the inner quotes are left out")
        return text[1:-1].strip()
    return text


def parse_argument_item(reading: ArgumentParse, place: int, text: str) -> None:
    """One name=value."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        remedy = f"Write {text}=VALUE." if _ARGUMENT_NAME_PATTERN.fullmatch(text) else _ARGUMENT_SYNTAX_REMEDY
        reading.refuse("ARGUMENT-NO-VALUE", place, text, "has no `=`", remedy)
    elif not _ARGUMENT_NAME_PATTERN.fullmatch(name):
        bare = name.lstrip("-").replace("-", "_")
        remedy = f"Write {bare}={value}." if _ARGUMENT_NAME_PATTERN.fullmatch(bare) else _ARGUMENT_SYNTAX_REMEDY
        reading.refuse("ARGUMENT-NAME", place, text, f"{name!r} is no name", remedy)
    elif not value:
        reading.refuse("ARGUMENT-NO-VALUE", place, text, f"has no value behind `{name}=`")
    elif name in reading.arguments:
        reading.refuse("ARGUMENT-TWICE", place, text, f"{name} is there already", "Leave one of them out.")
    elif name in _PATTERN_ARGUMENTS:
        reading.arguments[name] = value.strip("\"'")
    else:
        try:
            reading.arguments[name] = freeze_option_value(parse_argument_value(reading, place, text, value))
        except ValueError as error:
            reading.refuse("ARGUMENT-VALUE", place, text, str(error))


def parse_argument_value(reading: ArgumentParse, place: int, text: str, value: str) -> Any:
    """The value of a text: a Python literal, a number, a word; raises ValueError saying why it is none."""
    if value.casefold() in _VALUE_BY_WORD:
        return _VALUE_BY_WORD[value.casefold()]
    if count_open_brackets(value) != 0:
        raise ValueError(
            "a bracket is not closed" if count_open_brackets(value) > 0 else "a bracket is closed, never opened"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of backslashes in regular expressions, which stay as they are
            read = ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return parse_bare_argument(reading, place, text, value)
    if not isinstance(read, _ARGUMENT_VALUE_TYPES):
        raise ValueError(f"a {type(read).__name__} cannot be an argument")
    if isinstance(read, tuple) and len(read) == 1 and not value.startswith("("):
        reading.warn("ARGUMENT-TRAILING-COMMA", place, text, f"the comma behind {read[0]} is left out")
        return read[0]
    return read


def parse_bare_argument(reading: ArgumentParse, place: int, text: str, value: str) -> Any:
    """What is no literal: a list whose quotes are lost, a number in another spelling, or a word."""
    if value[0] + value[-1] in ("[]", "()"):
        inner = [part for part in split_top_level_commas(value[1:-1]) if part]
        reading.warn("ARGUMENT-QUOTES-LOST", place, text, "quotes are missing within the brackets; it is taken as text")
        return tuple(parse_argument_value(reading, place, text, part) for part in inner)
    if "=" in value:
        raise ValueError("has two `=`: two arguments in one, or quotes that are missing around the value")
    if value.endswith(","):
        reading.warn("ARGUMENT-TRAILING-COMMA", place, text, "the comma at the end is left out")
        return parse_argument_value(reading, place, text, value[:-1].rstrip())
    number = parse_readable_number(value)
    if isinstance(number, float) and not math.isfinite(number):
        raise ValueError("is no number that can be used")
    return value if number is None else number


def split_top_level_commas(text: str) -> list[str]:
    """The parts of a text between commas outside of brackets and quotes."""
    cuts = [at for sign, at, depth in iterate_unquoted_characters(text) if sign == "," and not depth]
    return [text[begin + 1 : end].strip() for begin, end in zip([-1, *cuts], [*cuts, len(text)], strict=True)]
