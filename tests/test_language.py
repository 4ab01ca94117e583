"""How the code speaks, as rules that can be counted: one meaning for a name, imports at the top, few short detours.

Sources are read, not run. The numbers are bars that only go down: 41 000 lines and 80 short functions are the aim.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.test_architecture import PACKAGE, functions, place, sources, tree

MAX_SOURCE_LINES = 46_200
MAX_NESTED_IMPORTS = 60
MAX_CALLED_ONCE = 157
SHORT_FUNCTION_LINES = 6
VERB_PROTOCOL = {"run", "Request"}
"""What every verb has under the same name: its package is in the name that others use, as `merge.run`."""


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def public_names(path: Path) -> Iterator[str]:
    """The names that a module defines at its top, without those that it keeps to itself."""
    for node in tree(path).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found = [node.name]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        else:
            found = []
        yield from (name for name in found if not name.startswith("_"))


def test_a_public_name_means_one_thing():
    modules: dict[str, set[str]] = defaultdict(set)
    for path in sources("src/finitune"):
        for name in public_names(path):
            modules[name].add(module_of(path))
    several = {name: sorted(found) for name, found in modules.items() if len(found) > 1 and name not in VERB_PROTOCOL}
    assert not several


def test_imports_stand_at_the_top():
    nested = {
        place(path, node)
        for path in sources("src/finitune")
        for function in functions(path)
        for node in ast.walk(function)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    }
    assert len(nested) < MAX_NESTED_IMPORTS, sorted(nested)


def test_few_short_functions_are_called_once():
    """A short function with one caller is read faster where it is called; those that are handed over have a reason."""
    uses: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    defined: Counter[str] = Counter()
    short: dict[str, str] = {}
    for path in sources("src/finitune"):
        called = {id(node.func) for node in ast.walk(tree(path)) if isinstance(node, ast.Call)}
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.Name, ast.Attribute)):
                name = node.id if isinstance(node, ast.Name) else node.attr
                uses[name] += 1
                calls[name] += id(node) in called
        for function in functions(path):
            defined[function.name] += 1  # a method of several classes is chosen by the object, and cannot be moved
            if (function.end_lineno or 0) - function.lineno < SHORT_FUNCTION_LINES and not function.decorator_list:
                short[function.name] = place(path, function)
    once = {where: name for name, where in short.items() if uses[name] == calls[name] == defined[name] == 1}
    assert len(once) < MAX_CALLED_ONCE, once


def test_the_code_is_no_longer_than_it_has_to_be():
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources("src")) <= MAX_SOURCE_LINES
