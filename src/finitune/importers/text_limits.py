"""How deep and how large a foreign text may be: parsers of YAML and TOML take hours over what nobody has written."""

from __future__ import annotations

import re
from typing import Any

_MAX_BRACKET_DEPTH = 200
"""Brackets within brackets. Configurations have fewer than ten."""
_MAX_YAML_NODES = 1_000_000
"""Values of a document of YAML, those counted each time that an alias repeats."""
_BRACKET_PATTERN = re.compile(r"[\[\]{}]")


def is_nested_too_deeply(text: str) -> bool:
    """Whether a text has more brackets within brackets than any configuration, those in quotes counted, too."""
    depth = 0
    for bracket in _BRACKET_PATTERN.finditer(text):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > _MAX_BRACKET_DEPTH:
            return True
    return False


def has_too_many_yaml_nodes(node: Any) -> bool:
    """Whether a node of YAML stands for more values than MOST_NODES, as nine aliases of nine aliases of ... do."""
    return _count_yaml_nodes(node, {}) > _MAX_YAML_NODES


def _count_yaml_nodes(node: Any, known: dict[int, float]) -> float:
    """How many values a node stands for; infinitely many where it holds itself."""
    if id(node) not in known:
        known[id(node)] = float("inf")
        children = node.value if isinstance(getattr(node, "value", None), list) else []
        inner = (part for child in children for part in (child if isinstance(child, tuple) else (child,)))
        known[id(node)] = 1 + sum(_count_yaml_nodes(part, known) for part in inner)
    return known[id(node)]
