"""Every code has a page, every page a code, and the page says what it should."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripts import make_codes

from finitune.codes import (
    CODE_AREAS,
    CodePage,
    get_area_file,
    normalise_code,
    parse_code_page,
    read_area_pages,
    read_code_pages,
)
from finitune.report import Level
from finitune.verbs import explain

PAGES = read_code_pages()
CODES = st.sampled_from(sorted(PAGES))
LONGEST_TITLE = 90
LONGEST_PAGE = 800
SENTENCE = re.compile(r"[.!?]`?(\s|$)")


@pytest.fixture(scope="module")
def told() -> dict[str, set[str]]:
    return make_codes.codes_in_source()


def test_every_code_has_a_page(told: dict[str, set[str]]):
    assert not sorted(set(told) - set(PAGES)), "write them into src/finitune/codes"


def test_every_page_has_a_code(told: dict[str, set[str]]):
    assert not sorted(set(PAGES) - set(told)), "no source tells them any more"


def test_levels_are_those_that_the_source_tells(told: dict[str, set[str]]):
    wrong = {code: levels for code, levels in told.items() if code in PAGES and not levels <= set(PAGES[code].level)}
    assert not wrong
    assert sum(map(bool, told.values())) > 300, "nearly all levels can be read from the source"


def test_a_code_has_one_page():
    counts = Counter(page.code for area in CODE_AREAS for page in read_area_pages(area))
    assert counts == dict.fromkeys(PAGES, 1)


def test_every_file_is_an_area():
    folder = get_area_file("files").parent
    assert {path.stem for path in folder.glob("*.toml")} == set(CODE_AREAS)


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_a_page_is_whole_and_short(page: CodePage):
    assert normalise_code(page.code) == page.code
    assert page.title and len(page.title) <= LONGEST_TITLE and not page.title.endswith(".")
    assert page.level and set(page.level) <= {level.value for level in Level}
    assert set(page.see) <= set(PAGES) - {page.code}
    assert all(re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", one) for one in page.source)
    prose = (page.means, page.found, page.do)
    assert all(text == text.strip() and SENTENCE.search(text[-2:]) for text in prose)
    assert sum(map(len, prose)) <= LONGEST_PAGE
    assert all(text.isascii() and "\n" not in text for text in (*prose, page.title))


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_a_page_is_plain_markdown(page: CodePage):
    for text in (page.title, page.means, page.found, page.do):
        assert text.count("`") % 2 == 0
        assert not re.search(r"[<>|*]|\]\(", re.sub(r"`[^`]*`", "", text))


def test_commands_that_pages_name_are_ours():
    from finitune.cli import CLI_VERBS, build_app

    options = {}
    for verb in CLI_VERBS:
        arguments = build_app(verb)[verb.name].assemble_argument_collection()
        options[verb.name] = {"--help", "--debug", *(option for argument in arguments for option in argument.names)}
    spans = {
        span for page in PAGES.values() for text in (page.means, page.do) for span in re.findall("`([^`]*)`", text)
    }
    commands = [re.findall(r"(?<![\w-])(?:--)?[a-z][\w-]*", span) for span in spans if span.startswith("finitune ")]
    assert len(commands) > 30
    for _, verb, *words in (words for words in commands if len(words) > 1 and not words[1].startswith("-")):
        if verb in options:
            assert {word for word in words if word.startswith("--")} <= options[verb], verb
        else:
            assert verb in ("doctor", "bench", "explain")


def test_the_document_is_in_step_with_the_data():
    assert make_codes.DOCUMENT.read_text(encoding="utf-8") == make_codes.document(), "run scripts/make_codes.py"


def test_anchors_of_the_document_are_distinct_and_lead_somewhere():
    text = make_codes.document()
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    anchors = Counter(make_codes.anchor(heading) for heading in headings)
    assert max(anchors.values()) == 1
    assert {code.lower() for code in PAGES} <= set(anchors)
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) <= set(anchors)


@settings(max_examples=30, deadline=None)
@given(CODES, st.randoms(use_true_random=False))
def test_a_code_is_found_however_it_is_typed(code: str, random):
    typed = "".join(random.choice((char.lower(), char)) for char in code)
    typed = f" {typed.replace('-', random.choice('-_ '))}{random.choice(('', ':', ' '))}"
    report = explain.run(explain.Request(code=typed))
    assert report.ok and report.figures["code"] == code
    assert {"title", "means", "found", "do", "level", "area"} <= set(report.figures)


@settings(max_examples=30, deadline=None)
@given(CODES)
def test_the_first_words_list_what_begins_with_them(code: str):
    word = code.partition("-")[0]
    report = explain.run(explain.Request(code=word.lower()))
    if word in PAGES:
        assert report.figures["code"] == word
    else:
        (table,) = report.tables
        assert [row[0] for row in table.rows] == [one for one in PAGES if one.startswith(f"{word}-")]
        assert report.figures["codes"] == table.as_dicts()


def test_nothing_asks_for_all():
    (table,) = explain.run(explain.Request()).tables
    assert [row[0] for row in table.rows] == list(PAGES)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("PICTURE-BOM", "PICTURE-BOMB"), ("adapter nonfinit", "ADAPTER-NONFINITE"), ("PICTUR", "PICTURE"), ("", None)],
)
def test_an_unknown_code_is_refused_with_the_nearest(typed: str, meant: str | None):
    report = explain.run(explain.Request(code=typed or "qqqq"))
    (finding,) = report.findings
    assert (report.exit_code, finding.code) == (2, "CODE-UNKNOWN")
    assert (f"Did you mean '{meant}'?" in finding.message) if meant else "Did you mean" not in finding.message


def test_half_a_word_is_no_beginning():
    assert explain.run(explain.Request(code="MERGE-DELT")).exit_code == 2


def test_a_page_with_an_unknown_or_a_missing_key_is_refused():
    entry = dict.fromkeys(("title", "means", "found", "do"), "x") | {"level": ["note"]}
    assert parse_code_page("X", "files", entry).level == ("note",)
    with pytest.raises(TypeError):
        parse_code_page("X", "files", entry | {"remedy": "x"})
    with pytest.raises(TypeError):
        parse_code_page("X", "files", {name: text for name, text in entry.items() if name != "do"})


def test_a_report_of_a_page_is_json():
    told = json.loads(json.dumps(explain.run(explain.Request(code="merge-unmatched")).as_json()))
    assert told["ok"] and told["figures"]["level"] == ["error", "warning"]


def test_the_pages_are_read_without_heavy_imports():
    program = (
        "import sys\n"
        "from finitune.verbs import explain\n"
        "assert explain.run(explain.Request(code='FITS')).ok\n"
        "heavy = {'torch', 'PIL', 'numpy', 'rich', 'diffusers', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("raise FileError('x', code='A-B')", {("A-B", "error")}),
        ("report.add(Level.NOTE, 'FITS', '')", {("FITS", "note")}),
        ("Finding(WARNING, 'A-B', '')", {("A-B", "warning"), ("A-B", "")}),
        ("Rule('WSL', Level.NOTE, 'system')", {("WSL", "note")}),
        ("report.add(Level.NOTE if x else Level.ERROR, 'FITS', '')", {("FITS", "")}),
        ("seen.add('PNG'); Finding(level, code, 'WSL'); Rule('CPU', 'cpu', 'fp32')", set()),
        ("report.add(level, 'C-D' if x else 'E-F', '')", {("C-D", ""), ("E-F", "")}),
        ("code = known.get(kind, 'USAGE')", {("USAGE", "")}),
        ("CODES = {Action.SKIP: 'GUARD-SKIPPED'}", {("GUARD-SKIPPED", "")}),
        ("x = 'UTF-8 text', 'utf-8', 'PLAIN'", set()),
    ],
)
def test_codes_are_found_in_source(source: str, found: set[tuple[str, str]]):
    assert found <= set(make_codes.codes_in(ast.parse(source)))
    assert {code for code, _ in found} == {code for code, _ in make_codes.codes_in(ast.parse(source))}


def test_a_hole_is_filled_with_the_words_of_its_kind():
    codes = {code for code, _ in make_codes.codes_in(ast.parse('f"ORIGIN-{origin.kind.upper()}"'))}
    kinds = make_codes.literals(make_codes.PACKAGE / "precision/origin.py", "FaultKind")
    assert codes == {f"ORIGIN-{kind.upper()}" for kind in kinds} and "ORIGIN-ADD" in codes
    with pytest.raises(KeyError):
        list(make_codes.codes_in(ast.parse('f"UNKNOWN-{kind}"')))
