"""The text of a configuration of any program: JSON, TOML, YAML or a command line, told apart by its content."""

from __future__ import annotations

import datetime
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from finitune.config.toml_text import parse_toml_text, read_config_text
from finitune.errors import UsageError
from finitune.report import Finding, Level

_JSON_START_PATTERN = re.compile(r"\s*(?:\{|\[\s*[{\]])")
_TOML_ASSIGNMENT_PATTERN = re.compile(r"^\s*[\w\"'.-]+\s*=(?!=)", re.MULTILINE)
_TRAINING_COMMAND_PATTERN = re.compile(
    r"(?:\.py\b|\baccelerate\b|\bpython\d?\b|\btorchrun\b|\bsimpletuner\b).*?\s--?\w", re.DOTALL
)
_CONTINUED_LINE_PATTERN = re.compile(r"[\\^`][ \t]*\r?\n")
_WINDOWS_SHELL_PATTERN = re.compile(r"[A-Za-z]:\\|\^[ \t]*\r?\n|`[ \t]*\r?\n")
_NEGATIVE_NUMBER_PATTERN = re.compile(r"-\.?\d")
_MAX_BRACKET_DEPTH = 200
"""Brackets within brackets: parsers take hours over what nobody has written. Configurations have fewer than ten."""
_MAX_YAML_NODES = 1_000_000
"""Values of a document of YAML, those counted each time that an alias repeats."""
_BRACKET_PATTERN = re.compile(r"[\[\]{}]")
_YAML_BOOLEAN_WORDS = ("yes", "no", "on", "off", "y", "n")


@dataclass(frozen=True)
class ForeignText:
    """A configuration's content: a document and its language, or a command line; and what is odd about it."""

    language: str
    document: Any
    findings: tuple[Finding, ...] = ()


def read_foreign_text(path: Path) -> ForeignText:
    """A file of any language; raises FileError, UsageError (CONFIG-ENCODING, CONFIG-SYNTAX)."""
    return parse_foreign_text(read_config_text(path), path)


def parse_foreign_text(text: str, path: Path) -> ForeignText:
    """The language of a text, by its first mark and its lines; raises UsageError (CONFIG-SYNTAX) where it breaks it."""
    if is_nested_too_deeply(text):
        raise make_foreign_syntax_error(path, "a configuration", "it is nested too deeply", 1, 1)
    if _JSON_START_PATTERN.match(text):
        return ForeignText("JSON", parse_foreign_json(text, path))
    if line := find_command_line(text):
        return ForeignText("command line", line)
    if _TOML_ASSIGNMENT_PATTERN.search(text) and not re.search(r"^\w+:(\s|$)", text, re.MULTILINE):
        return ForeignText("TOML", parse_toml_text(text, path))
    document = parse_foreign_yaml(text, path)
    return ForeignText("YAML", document, tuple(find_surprising_yaml_values(text, path)))


def find_command_line(text: str) -> str | None:
    """The command of a shell or batch file, or of a terminal, that starts a training; None where there is none."""
    joined = _CONTINUED_LINE_PATTERN.sub(" ", text)
    lines = (line.strip() for line in joined.splitlines())
    commands = [
        line
        for line in lines
        if _TRAINING_COMMAND_PATTERN.search(line) and not line.lower().startswith(("#", "rem ", "::"))
    ]
    return max(commands, key=len, default=None)


def parse_foreign_json(text: str, path: Path) -> Any:
    """The document of a JSON text; raises UsageError (CONFIG-SYNTAX) with line and column."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        what = error.msg[:1].lower() + error.msg[1:]
        raise make_foreign_syntax_error(path, "JSON", what, error.lineno, error.colno) from error
    except RecursionError:
        raise make_foreign_syntax_error(path, "JSON", "it is nested too deeply", 1, 1) from None


def parse_foreign_yaml(text: str, path: Path) -> Any:
    """The document of a YAML text, by the safe loader; raises UsageError (CONFIG-SYNTAX) with line and column."""
    try:
        if _count_yaml_nodes(yaml.compose(text, Loader=yaml.SafeLoader), {}) > _MAX_YAML_NODES:
            raise make_foreign_syntax_error(path, "YAML", "its aliases stand for more values than can be meant", 1, 1)
        return restore_date_texts(yaml.safe_load(text))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        tab = "\t" in text.split("\n")[line - 1] if line <= text.count("\n") + 1 else False
        remedy = "Indent with spaces: YAML allows no tabs." if tab else ""
        raise make_foreign_syntax_error(
            path, "YAML", str(error.problem or error.context), line, column, remedy
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        raise make_foreign_syntax_error(path, "YAML", str(error).split("\n", maxsplit=1)[0], 1, 1) from error
    except RecursionError:
        raise make_foreign_syntax_error(
            path, "YAML", "it is nested too deeply, or an alias holds itself", 1, 1
        ) from None


def restore_date_texts(value: Any) -> Any:
    """The same with dates as the text that they were: a name like 2026-01-31 is no date."""
    if isinstance(value, dict):
        return {key: restore_date_texts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [restore_date_texts(item) for item in value]
    return value.isoformat() if isinstance(value, datetime.date) else value


def make_foreign_syntax_error(
    path: Path, language: str, what: str, line: int, column: int, remedy: str = ""
) -> UsageError:
    return UsageError(
        f"{path} is not {language}: {what}, line {line}, column {column}",
        code="CONFIG-SYNTAX",
        subject=f"{path}:{line}",
        evidence={"file": str(path), "line": line, "column": column, "language": language},
        remedy=remedy or "Correct that line in the original.",
    )


def find_surprising_yaml_values(text: str, path: Path) -> Iterator[Finding]:
    """A warning for each plain value that YAML 1.1 reads as another one: 017 is 15, 12:30 is 750, no is false."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    for key, node in iterate_yaml_scalars(root, set()):
        raw, tag = str(node.value), node.tag.rpartition(":")[2]
        odd = (
            (tag == "int" and re.fullmatch(r"[-+]?0[0-7_]+", raw))
            or (tag in ("int", "float") and ":" in raw)
            or (tag == "bool" and raw.lower() in _YAML_BOOLEAN_WORDS)
        )
        if node.style is None and odd:
            value = yaml.safe_load(raw)
            yield Finding(
                Level.WARNING,
                "CONFIG-YAML-VALUE",
                f"{path}:{node.start_mark.line + 1}",
                f"{key}: YAML reads {raw} as {value!r}, and so did the original",
                {"written": raw, "value": value},
                f"Write {raw!r} in quotes if it was meant as text, or the number that was meant.",
            )


def iterate_yaml_scalars(node: Any, seen: set[int], key: str = "") -> Iterator[tuple[str, Any]]:
    """Each scalar node that is a value, with the name of its key."""
    if node is None or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.ScalarNode):
        yield key, node
    elif isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield from iterate_yaml_scalars(value, seen, str(name.value))
    else:
        for item in node.value:
            yield from iterate_yaml_scalars(item, seen, key)


def is_nested_too_deeply(text: str) -> bool:
    """Whether a text has more brackets within brackets than any configuration, those in quotes counted, too."""
    depth = 0
    for bracket in _BRACKET_PATTERN.finditer(text):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > _MAX_BRACKET_DEPTH:
            return True
    return False


def _count_yaml_nodes(node: Any, known: dict[int, float]) -> float:
    """How many values a node stands for; infinitely many where it holds itself."""
    if id(node) not in known:
        known[id(node)] = float("inf")
        children = node.value if isinstance(getattr(node, "value", None), list) else []
        inner = (part for child in children for part in (child if isinstance(child, tuple) else (child,)))
        known[id(node)] = 1 + sum(_count_yaml_nodes(part, known) for part in inner)
    return known[id(node)]


@dataclass(frozen=True)
class CommandLine:
    """The words before the script, the script, and its flags with their values, in order."""

    launcher: tuple[tuple[str, object], ...]
    script: str
    flags: tuple[tuple[str, object], ...]


def parse_command_line(line: str) -> CommandLine:
    """A command line by its parts; raises UsageError (CONFIG-FLAGS) where a quote is not closed."""
    tokens = split_command_line(line)
    place = next((n for n, word in enumerate(tokens) if re.search(r"\.py$", word)), -1)
    before, after = tokens[: max(place, 0)], tokens[place + 1 :]
    return CommandLine(
        tuple(parse_command_flags(before)), tokens[place] if place >= 0 else "", tuple(parse_command_flags(after))
    )


def split_command_line(line: str) -> list[str]:
    """The words of a command line of any shell: continued lines joined; a backslash is part of a Windows path."""
    lexer = shlex.shlex(_CONTINUED_LINE_PATTERN.sub(" ", line), posix=True, punctuation_chars=False)
    lexer.whitespace_split = True
    lexer.commenters = ""
    if _WINDOWS_SHELL_PATTERN.search(line):
        lexer.escape = ""
    try:
        return list(lexer)
    except ValueError as error:
        raise UsageError(
            f"the command line cannot be taken apart: {str(error).lower()}",
            code="CONFIG-FLAGS",
            subject="--from",
            evidence={"line": line[-80:]},
            remedy="Close the quote; a quote within quotes is written with a backslash.",
        ) from error


def parse_command_flags(tokens: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Each flag with its value: True without one, a list where there are several; other words by themselves."""
    place = 0
    while place < len(tokens):
        word = tokens[place]
        place += 1
        if not word.startswith("-") or _NEGATIVE_NUMBER_PATTERN.match(word):
            yield word, None
            continue
        name, equals, value = word.partition("=")
        if equals:
            yield name, value
            continue
        end = place
        while end < len(tokens) and (not tokens[end].startswith("-") or _NEGATIVE_NUMBER_PATTERN.match(tokens[end])):
            end += 1
        values = list(tokens[place:end])
        yield name, True if not values else values[0] if len(values) == 1 else values
        place = end
