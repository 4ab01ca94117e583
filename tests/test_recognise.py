"""Whose configuration it is: each format recognised as itself and as nothing else, and what breaks on the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finitune.config.imported_config import KeyStatus
from finitune.config.read import validate_config
from finitune.config.toml_text import format_key_path
from finitune.errors import FileError, FinituneError, UsageError
from finitune.importers.foreign_text import (
    find_command_line,
    find_surprising_yaml_values,
    parse_foreign_text,
    parse_foreign_yaml,
)
from finitune.importers.mapping import iterate_config_leaves
from finitune.importers.recognise import (
    KOHYA_COMMAND_LINE,
    rank_config_kinds,
    read_config_signatures,
    read_foreign_config,
    recognise_config_kind,
    score_config_marks,
)
from tests import foreign_configs as made

REAL = Path(__file__).resolve().parents[2] / "shared" / "data" / "configs"
REAL_KINDS = {
    "ai-toolkit": "ai-toolkit",
    "diffusion_pipe/dataset.toml": "diffusion-pipe dataset",
    "diffusion_pipe/main_example.toml": "diffusion-pipe",
    "kohya": "sd-scripts dataset TOML",
    "kohya_gui": "kohya_ss GUI JSON",
    "onetrainer": "OneTrainer",
    "sd_scripts_anima/anima_dataset_config.toml": "sd-scripts dataset TOML",
    "sd_scripts_anima/anima_train_config.toml": "sd-scripts training TOML",
    "simpletuner/anima_config.json": "SimpleTuner",
    "simpletuner/anima_multidatabackend.json": "SimpleTuner data backends",
    "simpletuner/cosmos_config.json": "SimpleTuner",
}
"""What a folder of real files, or one of them, is. Of programs that are not known yet nothing is said here."""
REAL_FILES = sorted(path for path in REAL.rglob("*") if path.is_file()) if REAL.is_dir() else []
NAMED_FILES = [path for path in REAL_FILES if {path.parent.name, f"{path.parent.name}/{path.name}"} & REAL_KINDS.keys()]
NAMES = list(read_config_signatures())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with every example, and the pictures' folders that they name."""
    for name, text in made.FILES.values():
        (tmp_path / name).write_text(text, encoding="utf-8")
    for name in ("moss", "others", "plain"):
        (tmp_path / "data" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", NAMES)
def test_confusion_matrix(kind: str):
    """The strongest kind is its own, twice as strong as any other; the ending of the file counts for nothing."""
    text = made.FILES[kind][1]
    document = parse_foreign_text(text, Path("unnamed")).document
    weights = {name: score_config_marks(name, marks) for name, marks in rank_config_kinds(document)}
    assert recognise_config_kind(document) == kind
    assert all(2 * weights.get(other, 0) <= weights[kind] for other in NAMES if other != kind), weights


@pytest.mark.parametrize("kind", NAMES)
def test_one_option_less_is_recognised_still(kind: str):
    document = parse_foreign_text(made.FILES[kind][1], Path("unnamed")).document
    if isinstance(document, list) or len(document) < 4:
        pytest.skip("too few options to go without one")
    assert {
        recognise_config_kind({key: document[key] for key in document if key != left_out}) for left_out in document
    } == {kind}


@pytest.mark.parametrize("path", NAMED_FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_real_files(path: Path):
    document = parse_foreign_text(path.read_text(encoding="utf-8"), path).document
    kind = REAL_KINDS.get(path.parent.name) or REAL_KINDS[f"{path.parent.name}/{path.name}"]
    assert recognise_config_kind(document) == kind


@pytest.mark.parametrize("path", REAL_FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_real_files_are_refused_in_words_or_every_key_is_accounted_for(path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whatever program wrote it: no crash, and no key of the file without its line."""
    monkeypatch.chdir(path.parent)
    document = parse_foreign_text(path.read_text(encoding="utf-8"), path).document
    try:
        imported = read_foreign_config(path)
    except UsageError as error:
        assert error.code == "CONFIG-UNRECOGNISED" and not recognise_config_kind(document)
        return
    # A list of backends stands in a file of its own: the account calls its elements by the key that names the file.
    told = {key for line in imported.lines for key in (line.key, line.key.removeprefix("data_backend_config")) if key}
    leaves = [format_key_path(where) for where, value, _ in iterate_config_leaves(document) if value != {}]
    assert leaves and not [
        leaf for leaf in leaves if not any(leaf == key or leaf.startswith((f"{key}.", f"{key}[")) for key in told)
    ]
    assert imported.kind == recognise_config_kind(document)


@pytest.mark.parametrize("kind", NAMES)
def test_files_become_accounts(folder: Path, kind: str):
    imported = read_foreign_config(folder / made.FILES[kind][0])
    assert imported.program.startswith(f"{kind} (known by ")
    assert imported.lines and imported.document
    if "model" in imported.document:
        validate_config(dict(imported.document), kind)


@pytest.mark.parametrize("name", ["run.sh", "run.bat"])
def test_command_lines(folder: Path, name: str):
    mark = {"run.sh": "\\", "run.bat": "^"}[name]
    script = f"#!/bin/bash\ncd here\n{made.COMMAND_LINE.replace(' --', f' {mark}{chr(10)}  --')}\npause\n"
    (folder / name).write_text(script, encoding="utf-8")
    for source in (folder / name, made.COMMAND_LINE, "--network_module networks.lora_anima --network_dim 4"):
        imported = read_foreign_config(source)
        assert imported.program.startswith(KOHYA_COMMAND_LINE)
        assert "network.network_dim" in {line.ours for line in imported.lines}


def test_our_own_is_taken_as_it_is(folder: Path):
    imported = read_foreign_config(folder / "ours.toml")
    assert {line.fate for line in imported.lines} == {KeyStatus.TAKEN}
    config, _ = validate_config(dict(imported.document), "ours")
    assert config.network.algorithm == "lokr"


def test_second_files_are_found_beside(folder: Path):
    """SimpleTuner names config/multidatabackend.json; it lies next to the file."""
    imported = read_foreign_config(folder / "config.json")
    assert len(imported.document["datasets"]) == 2  # type: ignore[arg-type]
    (folder / "multidatabackend.json").unlink()
    codes = {finding.code for finding in read_foreign_config(folder / "config.json").findings}
    assert "CONFIG-SECOND-FILE" in codes


def test_unrecognised_lists_what_was_tried(tmp_path: Path):
    path = tmp_path / "odd.yaml"
    path.write_text("model: anima\nsteps: 3\njob: paint\n", encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        read_foreign_config(path)
    assert caught.value.code == "CONFIG-UNRECOGNISED"
    assert caught.value.evidence["tried"] == [*NAMES, KOHYA_COMMAND_LINE]
    assert caught.value.evidence["nearest"] == {"ai-toolkit": ["job"]}
    assert "The nearest is ai-toolkit, by job." in caught.value.message


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("job: extension\nconfig:\n\tname: a\n", 3, 1),
        ("job: extension\nconfig: [1, 2\nname: a\n", 3, 5),
        ('{"model_type": "ANIMA",\n "epochs": 3,}', 2, 14),
        ("[model]\ntype = 'anima'\nshift = 3.0.1\n", 3, None),
    ],
    ids=["yaml tab", "yaml bracket", "json comma", "toml number"],
)
def test_broken_text_has_its_place(tmp_path: Path, text: str, line: int, column: int | None):
    path = tmp_path / "broken"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        read_foreign_config(path)
    assert caught.value.code == "CONFIG-SYNTAX" and caught.value.evidence["line"] == line
    assert column is None or caught.value.evidence["column"] == column
    if "\t" in text:
        assert "spaces" in caught.value.remedy


def test_yaml_1_1_is_told():
    """1e-4 is text (the importers read it as a number); 017 is 15, 12:30 is 750, no and yes are false and true."""
    text = 'lr: 1e-4\nseed: 017\nratio: 12:30\nflag: no\nother: yes\nquoted: "017"\nplain: 17\nname: 2026-01-31\n'
    found = {
        finding.evidence["written"]: finding.evidence["value"]
        for finding in find_surprising_yaml_values(text, Path("a.yaml"))
    }
    assert found == {"017": 15, "12:30": 750, "no": False, "yes": True}
    document = parse_foreign_yaml(text, Path("a.yaml"))
    assert (document["lr"], document["name"]) == ("1e-4", "2026-01-31")
    assert next(find_surprising_yaml_values(text, Path("a.yaml"))).subject == "a.yaml:2"


def test_surprises_reach_the_user(folder: Path):
    path = folder / "moss.yaml"
    path.write_text(made.AI_TOOLKIT.replace("steps: 1200", "steps: 0o17\n        seed: 017"), encoding="utf-8")
    findings = {finding.code: finding for finding in read_foreign_config(path).findings}
    assert findings["CONFIG-YAML-VALUE"].evidence == {"written": "017", "value": 15}


def test_files_that_are_not_there():
    with pytest.raises(FileError, match="no command line"):
        read_foreign_config("nowhere/at/all.toml")
    with pytest.raises(FileError):
        read_foreign_config(Path("nowhere.toml"))


def test_other_encodings(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(made.SIMPLETUNER).encode())
    assert read_foreign_config(path).program.startswith("SimpleTuner")
    path.write_bytes(json.dumps(made.SIMPLETUNER).encode("utf-16"))
    with pytest.raises(UsageError, match="UTF-16"):
        read_foreign_config(path)


def test_aliases_that_hold_themselves(tmp_path: Path):
    path = tmp_path / "loop.yaml"
    path.write_text("job: &a\n  config: *a\n", encoding="utf-8")
    with pytest.raises(UsageError):
        read_foreign_config(path)


def test_comments_are_no_commands():
    assert find_command_line("# python train.py --config a.toml\nname = 1") is None


@given(text=st.text(max_size=40))
@settings(deadline=None, max_examples=150)
def test_any_text_is_refused_with_an_error_of_ours(text: str, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(FinituneError):
        read_foreign_config(path)
