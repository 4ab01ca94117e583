"""Two slips in a TOML that can be mended in its text, which keeps its comments: a number in quotes, a misspelled key.

Both change one line, and are offered only where the text, read again, says what was meant and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from finitune.config.toml_text import TomlKeyPath
from finitune.errors import FinituneError


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
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

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

    >>> path_of("datasets[0].subsets[1].image_dir")
    ('datasets', 0, 'subsets', 1, 'image_dir')
    """
    return tuple(int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", key))


def find_key_line(text: str, key: str) -> int | None:
    """The line of the only key of that name in a TOML, JSON or YAML; None where there is none, or several."""
    name = re.escape(key.rpartition(".")[2].partition("[")[0])
    found = re.compile(rf"(?:^|[{{,[])\s*(?:- )?[\"']?(?:--)?{name}[\"']?\s*[:=]", re.MULTILINE)
    places = [match.end() for match in found.finditer(text)]
    return text.count("\n", 0, places[0]) + 1 if len(places) == 1 else None
