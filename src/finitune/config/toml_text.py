"""A TOML file as text: its encoding, its syntax, and the line on which each key stands.

tomlkit parses it (the standard library has a parser from Python 3.11 on only). A parsed document does not know its
lines, so a small scanner reads the text once more: strings, comments and brackets are all it has to tell apart.

Two slips can be mended in the text, which keeps its comments: a number in quotes, and a misspelled key. Both change one
line, and are offered only where the text, read again, says what was meant and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import KeyAlreadyPresent, TOMLKitError
from tomlkit.items import Item

from finitune.errors import FinituneError, UsageError
from finitune.files.sniff import PEEK_BYTES, get_file_size, is_safetensors_start, make_unreadable_file_error

TomlKeyPath = tuple[str | int, ...]
KeyLocator = Callable[[TomlKeyPath], int | None]
"""The line, from 1, on which the key of a path stands."""

_TOML_TOKEN_PATTERN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*|[\[{]|[\]}]|\n', re.DOTALL
)
_KEY_PART_PATTERN = r'(?:[\w-]+|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\')'
_DOTTED_KEY_PATTERN = rf"{_KEY_PART_PATTERN}(?:[ \t]*\.[ \t]*{_KEY_PART_PATTERN})*"
_TABLE_HEADER_PATTERN = re.compile(rf"\[(\[?)[ \t]*({_DOTTED_KEY_PATTERN})[ \t]*\]")
_KEY_VALUE_PATTERN = re.compile(rf"({_DOTTED_KEY_PATTERN})[ \t]*=")

_SINGLE_QUOTES_REMEDY = (
    r"Within double quotes a backslash begins an escape. Write paths in single quotes, 'C:\train\new', "
    'or with forward slashes, "C:/train/new".'
)
_QUOTES_REMEDY = 'Text needs quotes; true and false are lower case; a list is ["a", "b"].'


@dataclass(frozen=True)
class TomlDocument:
    """A TOML document with its file, and the lines of its keys."""

    source: Path
    document: dict[str, Any]
    lines: dict[TomlKeyPath, int]

    def locate(self, path: TomlKeyPath) -> int | None:
        """The line of a key, or of the nearest one around it."""
        return next((self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines), None)


def read_toml(path: Path) -> TomlDocument:
    """A TOML file; raises FileError where there is none, UsageError (CONFIG-ENCODING, -SYNTAX, -FOREIGN)."""
    text = read_config_text(path)
    return TomlDocument(path, parse_toml_text(text, path), dict(reversed(list(iterate_key_lines(text)))))


def read_config_text(path: Path) -> str:
    """The text of a UTF-8 file, without a byte order mark; raises FileError, UsageError (CONFIG-ENCODING)."""
    try:
        get_file_size(path)
        content = path.read_bytes()
    except OSError as error:
        raise make_unreadable_file_error(path, error) from error
    wide = content.startswith((b"\xff\xfe", b"\xfe\xff"))
    if b"\0" in content[:PEEK_BYTES] and not wide:
        raise make_binary_file_error(path, content[:PEEK_BYTES])
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        # The codec counts from behind the mark.
        at = error.start + len(content) - len(error.object)
        line = content.count(b"\n", 0, at) + 1
        raise UsageError(
            f"{path} is not UTF-8 text: byte {at}, on line {line}, {'begins UTF-16' if wide else 'cannot stand there'}",
            code="CONFIG-ENCODING",
            subject=f"{path}:{line}",
            evidence={"file": str(path), "at_byte": at, "line": line, "byte": f"0x{content[at]:02x}"},
            remedy="Save it as UTF-8 in a text editor.",
        ) from error


def make_binary_file_error(path: Path, start: bytes) -> UsageError:
    """The error for a file that is no text at all: a picture, a model, an archive."""
    kind = "a safetensors file" if is_safetensors_start(start) else "a binary file"
    return UsageError(
        f"{path} is {kind}, not the text of a configuration",
        code="CONFIG-ENCODING",
        subject=str(path),
        evidence={"file": str(path), "starts_with": start[:8].hex(" ")},
        remedy="Name the configuration itself: a TOML, JSON or YAML file.",
    )


def parse_toml_text(text: str, path: Path) -> dict[str, Any]:
    """The document of a TOML text; raises UsageError (CONFIG-SYNTAX, CONFIG-FOREIGN)."""
    try:
        return tomlkit.parse(text).unwrap()
    except RecursionError:
        raise make_toml_syntax_error(path, "it is nested too deeply", (1, 0), text) from None
    except TOMLKitError as error:
        again = find_repeated_key(text)
        if again and any(isinstance(one, KeyAlreadyPresent) for one in (error, error.__cause__)):
            key, first, line = again
            what = f"{key} stands on line {first} already"
            raise make_toml_syntax_error(
                path, what, (line, 0), text, "Leave one of them, with what belongs to both."
            ) from error
        line, column = getattr(error, "line", 0), getattr(error, "col", 0)
        what = re.sub(r" at line \d+ col \d+$", "", str(error))
        raise make_toml_syntax_error(path, what[:1].lower() + what[1:], (line, column + 1), text) from error


def make_toml_syntax_error(path: Path, what: str, place: tuple[int, int], text: str, remedy: str = "") -> UsageError:
    """The error for text that is no TOML, with its line and column; for JSON and YAML, the way to import it."""
    line, column = place
    if path.suffix.lower() in (".json", ".yaml", ".yml") or text.lstrip()[:1] == "{":
        return make_foreign_config_error(path, "it is not TOML")
    shown = text.split("\n")[line - 1].strip() if 0 < line <= text.count("\n") + 1 else ""
    escape = "\\" in shown and '"' in shown
    told = f"line {line}, column {column}" if column else f"line {line}"
    if not remedy:
        remedy = _SINGLE_QUOTES_REMEDY if escape else _QUOTES_REMEDY
    return UsageError(
        f"{path} is not TOML: {what}, {told}" + (f":\n  {shown}" if shown else ""),
        code="CONFIG-SYNTAX",
        subject=f"{path}:{line}",
        evidence={"file": str(path), "line": line, "column": column, "text": shown},
        remedy=remedy,
    )


def make_foreign_config_error(path: Path, why: str) -> UsageError:
    """The error for a configuration of another program."""
    return UsageError(
        f"{path} is not a configuration of finitune: {why}",
        code="CONFIG-FOREIGN",
        subject=str(path),
        evidence={"file": str(path)},
        remedy=f"`finitune train --from {path}` takes those of kohya's scripts and other trainers, and tells what "
        "becomes of each key.",
    )


def iterate_key_lines(text: str) -> Iterator[tuple[TomlKeyPath, int]]:
    """The path and line of every header and every key outside of inline tables, in the order of the file."""
    counts: dict[TomlKeyPath, int] = {}
    table: TomlKeyPath = ()
    for line, statement in iterate_toml_statements(text):
        header, pair = _TABLE_HEADER_PATTERN.match(statement), _KEY_VALUE_PATTERN.match(statement)
        if header:
            *outer, name = split_dotted_key(header[2])
            table = ()
            for part in outer:
                table = (*table, part)
                table = (*table, counts[table] - 1) if table in counts else table
            table = (*table, name)
            if header[1]:
                yield table, line
                counts[table] = counts.get(table, 0) + 1
                table = (*table, counts[table] - 1)
            yield table, line
        elif pair:
            yield (*table, *split_dotted_key(pair[1])), line


def find_repeated_key(text: str) -> tuple[str, int, int] | None:
    """The first key or table that stands twice, as written, with both lines."""
    seen: dict[TomlKeyPath, int] = {}
    for path, line in iterate_key_lines(text):
        a_list_item = isinstance(path[-1], int) or (*path, 0) in seen
        if path in seen and not a_list_item:
            return ".".join(map(str, path)), seen[path], line
        seen.setdefault(path, line)
    return None


def iterate_toml_statements(text: str) -> Iterator[tuple[int, str]]:
    """Each header or assignment, with its comments blanked out, and the line on which it begins."""
    depth, start, kept = 0, 0, ""
    for piece in _TOML_TOKEN_PATTERN.finditer(text + "\n"):
        kept += text[start : piece.start()]
        start = piece.end()
        what = piece[0]
        if what == "\n" and depth <= 0:
            if kept.strip():
                yield text.count("\n", 0, piece.start() - len(kept.lstrip())) + 1, kept.strip()
            depth, kept = 0, ""
        else:
            depth += (what in ("[", "{")) - (what in ("]", "}"))
            kept += " " * len(what) if what.startswith("#") else what


def split_dotted_key(dotted: str) -> list[str]:
    """The names in a dotted key, without quotes."""
    return [part.strip("\"'") for part in re.findall(_KEY_PART_PATTERN, dotted)]


def make_toml_item(value: Any) -> Item:
    """A plain value as an item of TOML, tables in one line; paths are text, and what is None is left out."""
    if isinstance(value, Mapping):
        table = tomlkit.inline_table()
        for name, inner in value.items():
            if inner is not None:
                table.append(name, make_toml_item(inner))
        return table
    if isinstance(value, (list, tuple)):
        array = tomlkit.array()
        array.extend(make_toml_item(inner) for inner in value if inner is not None)
        return array
    return tomlkit.item(str(value) if isinstance(value, Path) else value)


def format_key_path(path: TomlKeyPath) -> str:
    """A path as people write it: config.process[0].train.lr."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def unquote_toml_value(text: str, line: int, key: TomlKeyPath) -> str | None:
    """The text with the value of `key`, which stands on `line` (from 1), out of its quotes; None where that fails."""
    name = re.escape(str(key[-1]))
    found = rf"^(\s*[\"']?{name}[\"']?\s*=\s*)([\"'])\s*([-+.\w]+)\s*\2"
    return change_toml_line(text, line, found, lambda m: m[1] + (m[3].lower() if m[3].isalpha() else m[3]), key, key)


def rename_toml_key(text: str, line: int, key: TomlKeyPath, name: str) -> str | None:
    """The text with `key`, which stands on `line`, under another name in its place; None where that fails."""
    written = re.escape(str(key[-1]))
    found = rf"^(\s*[\"']?){written}([\"']?\s*=)"
    return change_toml_line(text, line, found, lambda m: m[1] + name + m[2], key, (*key[:-1], name))


def change_toml_line(text: str, line: int, found: str, change: Any, old: TomlKeyPath, new: TomlKeyPath) -> str | None:
    """The text with one line changed where `found` is, if nothing but that value or name is another then."""
    lines = text.split("\n")
    if not 0 < line <= len(lines) or not re.search(found, lines[line - 1]):
        return None
    lines[line - 1] = re.sub(found, change, lines[line - 1], count=1)
    mended = "\n".join(lines)
    before, after = read_toml_leaves(text), read_toml_leaves(mended)
    if before is None or after is None or old not in before or new not in after:
        return None
    if old != new and before[old] != after[new]:
        return None
    rest = {path: value for path, value in before.items() if path != old}
    return mended if rest == {path: value for path, value in after.items() if path != new} else None


def read_toml_leaves(text: str) -> dict[TomlKeyPath, Any] | None:
    """Every value of a TOML by its path; None for text that is no TOML."""
    try:
        document = tomlkit.parse(text).unwrap()
    except (TOMLKitError, FinituneError, RecursionError, ValueError):
        return None
    return dict(flatten_toml_values(document))


def flatten_toml_values(value: Any, path: TomlKeyPath = ()) -> list[tuple[TomlKeyPath, Any]]:
    """The values in tables and lists of tables, by their paths."""
    if isinstance(value, Mapping):
        return [leaf for name, item in value.items() for leaf in flatten_toml_values(item, (*path, str(name)))]
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return [leaf for place, item in enumerate(value) for leaf in flatten_toml_values(item, (*path, place))]
    return [(path, value)]


def parse_key_path(key: str) -> TomlKeyPath:
    """The path that a spelled one is: datasets[0].resolution.

    >>> parse_key_path("datasets[0].subsets[1].image_dir")
    ('datasets', 0, 'subsets', 1, 'image_dir')
    """
    return tuple(int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", key))


def find_key_line(text: str, key: str) -> int | None:
    """The line of the only key of that name in a TOML, JSON or YAML; None where there is none, or several."""
    name = re.escape(key.rpartition(".")[2].partition("[")[0])
    found = re.compile(rf"(?:^|[{{,[])\s*(?:- )?[\"']?(?:--)?{name}[\"']?\s*[:=]", re.MULTILINE)
    places = [match.end() for match in found.finditer(text)]
    return text.count("\n", 0, places[0]) + 1 if len(places) == 1 else None
