"""Everything that is known has one owner: no table by an algorithm, a spelling or a family stands elsewhere.

Sources are read, not run. A table is a literal with two such names or more; the members of a `Literal` type are none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from finitune.adapters import ADAPTER_ALGORITHMS, ADAPTER_FORMS, AdapterAlgorithm
from finitune.adapters.algorithm import AdapterForm
from finitune.config.schema import SpellingName
from finitune.models import MODEL_FAMILIES
from finitune.namings.keys import ADAPTER_SUFFIXES
from finitune.namings.spellings import SPELLINGS, WritableSpelling

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "finitune"
OWNERS = {
    "algorithm": ({form.name for form in ADAPTER_FORMS}, ("adapters/",)),
    "spelling": ({spelling.name for spelling in SPELLINGS}, ("namings/spellings.py", "adapters/")),
    "family": ({family.name for family in MODEL_FAMILIES}, ("models/",)),
}
"""The names of each kind, and where they may stand together. An algorithm knows how spellings write it."""
HOMONYMS = {
    "importers/recognise.py": {"kohya", "onetrainer"},  # names of programs
    "config/lycoris.py": {"full", "ia3"},  # names of LyCORIS's presets
    "machine/reading/packages.py": {"diffusers", "peft"},  # names of Python packages
}


def literal_tables(path: Path) -> Iterator[tuple[int, set[str]]]:
    """Each tuple, list, set and dictionary of a file with its texts; those of a dictionary are its keys."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    types = {
        id(node.slice)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and "Literal" in ast.unparse(node.value)
    }
    for node in ast.walk(tree):
        if id(node) in types or not isinstance(node, (ast.Tuple, ast.List, ast.Set, ast.Dict)):
            continue
        items = node.keys if isinstance(node, ast.Dict) else node.elts
        yield node.lineno, {one.value for one in items if isinstance(one, ast.Constant) and isinstance(one.value, str)}


@pytest.mark.parametrize("kind", OWNERS)
def test_no_table_by_name_stands_outside_of_its_owner(kind: str):
    names, owners = OWNERS[kind]
    wrong = [
        f"{place}:{line} {sorted(found)}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not (place := path.relative_to(PACKAGE).as_posix()).startswith(owners)
        for line, texts in literal_tables(path)
        if len(found := (texts & names) - HOMONYMS.get(place, set())) >= 2
    ]
    assert not wrong


def list_traits() -> set[str]:
    """What the base classes declare and give no value: every algorithm has to state it."""
    declared = {name for base in (AdapterForm, AdapterAlgorithm) for name in base.__annotations__}
    return {name for name in declared if not hasattr(AdapterAlgorithm, name)}


@pytest.mark.parametrize("algorithm", ADAPTER_ALGORITHMS, ids=lambda one: one.name)
def test_every_algorithm_states_all_traits(algorithm: AdapterAlgorithm):
    assert list_traits() >= {"name", "roles", "terms", "programs", "suffixes", "rank_means", "alpha_means", "trainable"}
    assert not {name for name in list_traits() if not hasattr(algorithm, name)}
    assert frozenset().union(*algorithm.terms) <= algorithm.roles.keys()
    spelled = {suffix.role for suffix in algorithm.suffixes}
    assert {name for name, role in algorithm.roles.items() if not role.shared_key} <= spelled
    if algorithm.alpha_means == "scale":
        scaled = set(algorithm.roles_where(scaled=True))
        assert scaled and all(term & scaled for term in algorithm.terms)


@pytest.mark.parametrize("algorithm", ADAPTER_ALGORITHMS, ids=lambda one: one.name)
def test_who_has_a_name_in_peft_has_a_configuration_there(algorithm: AdapterAlgorithm):
    assert bool(algorithm.peft_type) == (type(algorithm).peft_config is not AdapterAlgorithm.peft_config)


def test_what_is_spelled_alike_has_one_meaning():
    texts = [suffix.text for suffix in ADAPTER_SUFFIXES]
    assert len(set(texts)) == len(texts)


def test_training_writes_the_spellings_that_there_are():
    assert SpellingName == WritableSpelling
