"""The one way in which the package reads its own tables: TOML files beside the code that owns them."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any


@cache
def read_package_toml(path: Path) -> dict[str, Any]:
    """A TOML file of this package, read once; what is returned is shared, so nobody may change it."""
    text = path.read_text(encoding="utf-8")
    if sys.version_info >= (3, 11):
        import tomllib  # four times as fast as tomlkit, and not there on 3.10

        return tomllib.loads(text)
    import tomlkit

    return tomlkit.parse(text).unwrap()
