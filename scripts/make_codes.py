"""Write docs/codes.md, the page of each code, from src/finitune/codes; and find the codes that the source tells.

python scripts/make_codes.py             # writes the document
python scripts/make_codes.py --check     # lists codes without a page, and pages without a code
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import tomlkit

from finitune.codes import CODE_AREAS, CodePage, read_code_pages

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "finitune"
DOCUMENT = ROOT / "docs" / "codes.md"

CODE = re.compile(r"[A-Z][A-Z0-9]*(-[A-Z0-9]+)+")
WORD = re.compile(r"[A-Z]{3,}")
"""A code of one word: told from other words by its place alone."""
NO_CODES: frozenset[str] = frozenset()
"""Texts in the source that look like codes and are none."""
HOLES = {"ORIGIN-{}": ("precision/origin.py", "FaultKind")}
"""Codes that are put together, with the Literal whose words fill the hole."""
LEVELS = {"ERROR": "error", "WARNING": "warning", "NOTE": "note"}
TELLING = re.compile("add|several|told|.*Finding|.*Rule|.*Truth")
"""Calls that have the code and its level as their first two arguments, and a third."""

INTRODUCTION = """\
# Codes

Every finding and every error of finitune has a code that stays the same from version to version. This is what each
means, how it was measured or found, and what to do; `finitune explain CODE` prints the same. An error ends the command
with exit code 1 (2 where the request itself cannot be meant); a warning or a note does not.

<!-- Made by scripts/make_codes.py from src/finitune/codes: edit there. -->
"""


def document() -> str:
    """The whole of docs/codes.md."""
    by_area: dict[str, list[CodePage]] = defaultdict(list)
    for page in read_code_pages().values():
        by_area[page.area].append(page)
    contents = [
        f"- [{CODE_AREAS[area]}](#{anchor(CODE_AREAS[area])}): {listed(found)}" for area, found in by_area.items()
    ]
    chapters = [
        f"## {CODE_AREAS[area]}\n\n" + "\n".join(map(section, sorted(found, key=lambda page: page.code)))
        for area, found in by_area.items()
    ]
    return "\n".join([INTRODUCTION, *contents, "", *chapters])


def section(page: CodePage) -> str:
    """A page under its heading, whose anchor is the code in lower case."""
    level = " or ".join(page.level)
    lines = [
        f"### {page.code}",
        f"**{page.title}** ({level})",
        page.means,
        f"*Found:* {page.found}",
        f"*Do:* {page.do}",
    ]
    more = []
    if page.see:
        more.append("*See:* " + ", ".join(f"[{code}](#{anchor(code)})" for code in page.see))
    if page.source:
        more.append("*Cases:* " + ", ".join(f"[{named(address)}]({address})" for address in page.source))
    return "\n\n".join([*lines, *([". ".join(more) + "."] if more else [])]) + "\n"


def anchor(heading: str) -> str:
    """The anchor that GitHub makes of a heading.

    >>> anchor("PICTURE-BOMB"), anchor("Merging, extracting, converting")
    ('picture-bomb', 'merging-extracting-converting')
    """
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def named(address: str) -> str:
    """A case on GitHub by its repository and number.

    >>> named("https://github.com/pytorch/pytorch/issues/103749")
    'pytorch#103749'
    """
    *_, repository, _, number = address.split("/")
    return f"{repository}#{number}"


def listed(found: list[CodePage]) -> str:
    """How many codes there are, and with which words they begin."""
    words = sorted({page.code.partition("-")[0] for page in found})
    return f"{len(found)} codes; {', '.join(words)}"


def codes_in_source() -> dict[str, set[str]]:
    """Every code that the source can tell, with the levels that are written beside it (none where they are not)."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(PACKAGE.rglob("*.py")):
        for code, level in codes_in(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            found[code] |= {level} - {""}
    for path in sorted(PACKAGE.rglob("*.toml")):
        if path.parent.name != "codes":
            for code, level in codes_in_table(tomlkit.parse(path.read_text(encoding="utf-8")).unwrap()):
                found[code] |= {level} - {""}
    return {code: levels for code, levels in sorted(found.items()) if code not in NO_CODES}


def codes_in(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The codes in one file: every text that looks like one, wherever it stands, and words in a code's place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and CODE.fullmatch(node.value):
            yield node.value, ""
        elif isinstance(node, ast.JoinedStr):
            yield from ((code, "") for code in filled(node))
        elif isinstance(node, ast.Call):
            yield from codes_told(node)
        elif isinstance(node, ast.Assign) and "code" in names_in(node.targets):
            yield from ((code, "") for code in texts(node.value))


def codes_in_table(value: object) -> Iterator[tuple[str, str]]:
    """The codes in a file of rules: each table with a `code`, and its level where it says one."""
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from codes_in_table(inner)
    if isinstance(value, dict) and isinstance(value.get("code"), str):
        yield value["code"], str(value.get("level", ""))


def codes_told(call: ast.Call) -> Iterator[tuple[str, str]]:
    """The codes that a call tells, with their level."""
    callee = ast.unparse(call.func).rpartition(".")[2]
    level = "error" if callee.endswith("Error") else ""
    level = next((LEVELS.get(name_of(keyword.value), "") for keyword in call.keywords if keyword.arg == "level"), level)
    for keyword in call.keywords:
        if keyword.arg == "code":
            yield from ((code, level) for code in texts(keyword.value))
    if TELLING.fullmatch(callee) and len(call.args) > 2:
        first = call.args[:2]
        if {name_of(node) for argument in first for node in ast.walk(argument)} & {*LEVELS, "level"}:
            known = "".join(LEVELS.get(name_of(argument), "") for argument in first)
            yield from ((code, known) for argument in first for code in texts(argument))


def name_of(node: ast.AST) -> str:
    """The last word of a plain or dotted name, as ERROR of CONFIG_ERROR; "" for anything else."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        return re.split(r"[._]", ast.unparse(node))[-1]
    return ""


def texts(node: ast.expr) -> Iterator[str]:
    """The texts within an expression that a code could be."""
    for inner in ast.walk(node):
        text = inner.value if isinstance(inner, ast.Constant) else None
        if isinstance(text, str) and (CODE.fullmatch(text) or WORD.fullmatch(text)):
            yield text


def names_in(targets: list[ast.expr]) -> set[str]:
    """The plain names among the targets of an assignment."""
    return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}


def filled(text: ast.JoinedStr) -> Iterator[str]:
    """The codes that a text with one hole can become; raises KeyError for a hole that is not in HOLES."""
    form = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in text.values)
    if re.fullmatch(r"[A-Z{][A-Z0-9{}]*(-[A-Z0-9{}]+)+", form) and re.search(r"[A-Z]{2}", form):
        file, name = HOLES[form]
        yield from (form.format(word.upper()) for word in literals(PACKAGE / file, name))


def literals(path: Path, name: str) -> Iterator[str]:
    """The words of `name = Literal[...]` in a file."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and name in names_in(node.targets):
            yield from (str(word.value) for word in ast.walk(node.value) if isinstance(word, ast.Constant))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        DOCUMENT.write_text(document(), encoding="utf-8")
        return
    known, told = read_code_pages(), codes_in_source()
    print("without a page:", *sorted(set(told) - set(known)), sep="\n  ")
    print("without a code:", *sorted(set(known) - set(told)), sep="\n  ")


if __name__ == "__main__":
    main()
