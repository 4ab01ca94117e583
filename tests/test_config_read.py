"""Reading a configuration: what is taken, what is refused with its place, and that what is written reads back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finitune.config.datasets import Dataset, DatasetOptions, Subset, resolve_datasets
from finitune.config.read import LoadedConfig, find_config_faults, read_train_config, validate_config
from finitune.config.toml_text import iterate_key_lines, read_toml
from finitune.errors import FileError, FinituneError, UsageError
from finitune.report import Finding, Level

BASE = '[model]\npretrained_model_name_or_path = "pico-anima"\n[saving]\noutput_dir = "out"\n'
LINES = BASE.count("\n")


def loaded(folder: Path, text: str | bytes, name: str = "train.toml") -> LoadedConfig:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_train_config(path)


def refusal(folder: Path, text: str | bytes, name: str = "train.toml") -> FinituneError:
    with pytest.raises(FinituneError) as caught:
        loaded(folder, text, name)
    return caught.value


def wrong(folder: Path, text: str) -> list[dict[str, Any]]:
    error = refusal(folder, BASE + text)
    assert isinstance(error, UsageError) and error.exit_code == 2
    assert error.code == "CONFIG-INVALID"
    told = error.evidence["faults"]
    assert isinstance(told, list)
    return told


def only(folder: Path, text: str) -> dict[str, Any]:
    (fault,) = wrong(folder, text)
    return fault


# --- what is taken ---------------------------------------------------------------------------------------------------


def test_a_small_configuration_has_the_defaults_and_its_source(tmp_path: Path):
    read = loaded(tmp_path, BASE + "[network]\nnetwork_dim = 8\n")
    assert read.config.network.network_dim == 8 and read.config.optimizer.learning_rate == 1e-4
    assert read.config.saving.output_dir == Path("out")
    assert (read.findings, read.imported, read.source) == ((), None, tmp_path / "train.toml")


@pytest.mark.parametrize("begins", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("ends", [b"\n", b"\r\n"])
def test_a_byte_order_mark_and_the_line_ends_of_windows_are_taken(tmp_path: Path, begins: bytes, ends: bytes):
    text = (BASE + '[saving2]\na = "x"\n').encode()
    assert loaded(tmp_path, begins + BASE.encode().replace(b"\n", ends)).config.saving.output_dir == Path("out")
    error = refusal(tmp_path, begins + text.replace(b"\n", ends))
    assert f"line {LINES + 1}: there is no table [saving2]" in error.message


def test_whole_numbers_may_have_a_point(tmp_path: Path):
    read = loaded(tmp_path, BASE + "[training]\nseed = 528.0\n")
    assert read.config.training.seed == 528 and type(read.config.training.seed) is int
    (note,) = read.findings
    assert (note.level, note.code, note.evidence["line"]) == (Level.NOTE, "CONFIG-FLOAT-AS-INT", LINES + 2)
    assert only(tmp_path, "[training]\nseed = 528.5\n")["code"] == "CONFIG-TYPE"


def test_an_argument_list_is_taken_as_kohya_writes_it(tmp_path: Path):
    read = loaded(tmp_path, BASE + '[optimizer]\noptimizer_args = ["betas=0.9,0.99", "eps=None"]\n')
    assert read.config.optimizer.optimizer_args == {"betas": (0.9, 0.99), "eps": None}


def test_a_document_of_python_may_have_sections_paths_and_none():
    document = {
        "model": {"pretrained_model_name_or_path": "pico-anima", "vae": None},
        "saving": {"output_dir": Path("out")},
        "general": DatasetOptions(num_repeats=3),
        "datasets": [Dataset(subsets=(Subset(image_dir=Path("a")),))],
    }
    config, findings = validate_config(document)
    assert not findings and config.model.vae is None
    assert [subset.num_repeats for dataset in resolve_datasets(config) for subset in dataset.subsets] == [3]
    assert not config.datasets[0].subsets[0].model_fields_set - {"image_dir"}


# --- paths -----------------------------------------------------------------------------------------------------------


def test_a_path_beside_the_configuration_is_taken_where_there_is_none_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "here").mkdir()
    beside = tmp_path / "configs"
    (beside / "pictures").mkdir(parents=True)
    (beside / "anima.safetensors").touch()
    monkeypatch.chdir(tmp_path / "here")
    text = (
        BASE.replace("pico-anima", "anima.safetensors") + '[[datasets]]\n[[datasets.subsets]]\nimage_dir = "pictures"\n'
    )
    read = loaded(beside, text)
    assert read.config.datasets[0].subsets[0].image_dir == beside / "pictures"
    assert read.config.model.pretrained_model_name_or_path == str(beside / "anima.safetensors")
    assert [finding.code for finding in read.findings] == ["CONFIG-PATH-BESIDE"] * 2
    (tmp_path / "here" / "pictures").mkdir()
    assert loaded(beside, text).config.datasets[0].subsets[0].image_dir == Path("pictures")


def test_what_is_written_to_and_what_is_a_name_is_never_looked_for_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "here").mkdir()
    for name in ("out", "pico-anima", "auto"):
        (tmp_path / "configs" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    read = loaded(tmp_path / "configs", BASE + 'resume = "auto"\n')
    assert not read.findings
    assert read.config.model.pretrained_model_name_or_path == "pico-anima"
    assert (read.config.saving.output_dir, read.config.saving.resume) == (Path("out"), "auto")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ('[[datasets]]\n[[datasets.subsets]]\nimage_dir = "D:\\train\\new"\n', r"D:\train\new"),
        ('[preview]\nsample_prompts = ["a cat", "a\\ttab"]\n', r"a\ttab"),
        ('[network]\nexclude_patterns = ["\\bmlp"]\n', r"\bmlp"),
        ('[network]\nnetwork_reg_dims = {"\\bmlp" = 4}\n', r"\bmlp"),
    ],
)
def test_an_escape_by_accident_is_told_with_what_was_meant(tmp_path: Path, text: str, meant: str):
    fault = only(tmp_path, text)
    assert fault["code"] == "CONFIG-ESCAPE" and f"'{meant}'" in fault["remedy"]
    assert ("/ for each backslash" in fault["remedy"]) == meant.startswith("D:")


def test_line_ends_are_free_where_text_is_written_around_captions(tmp_path: Path):
    assert loaded(tmp_path, BASE + '[general]\ncaption_prefix = "a\\nb"\n').config.general.caption_prefix == "a\nb"


# --- what is refused -------------------------------------------------------------------------------------------------

REFUSED = (
    ("[optimizer]\nlearning_rate = true", "CONFIG-TYPE", "a number of at least 0"),
    ("[optimizer]\nlearning_rate = nan", "CONFIG-RANGE", "finite"),
    ("[optimizer]\nlearning_rate = -1e-4", "CONFIG-RANGE", "at least 0"),
    ("[optimizer]\nlearning_rate = 2024-01-01", "CONFIG-TYPE", "a number"),
    ("[optimizer]\nlr_scheduler = 'Cosine'", "CONFIG-CHOICE", "Did you mean 'cosine'?"),
    ("[optimizer]\noptimizer_args = 3", "CONFIG-TYPE", "a table"),
    ("[optimizer]\noptimizer_args = ['T_max']", "ARGUMENT-NO-VALUE", "'T_max'"),
    ("[network]\nnetwork_dim = 0", "CONFIG-RANGE", "a whole number of at least 1"),
    ("[network]\ndora = 1", "CONFIG-TYPE", "Write true."),
    ("[network]\ndora = 'yes'", "CONFIG-TYPE", "true or false"),
    ("[network]\nonly_patterns = 'a.*'", "CONFIG-TYPE", 'A list of one is ["a.*"].'),
    ("[network]\nnetwork_reg_dims = {a = 'x'}", "CONFIG-TYPE", "a table of whole numbers"),
    ("[validation]\nvalidation_sigmas = [0.1, 'a']", "CONFIG-TYPE", "a list of numbers"),
    ("[general]\nresolution = [1, 2, 3]", "CONFIG-TYPE", "There are 3."),
    ("[general]\ncaption_prefix = 5", "CONFIG-TYPE", 'Write it in quotes: "5".'),
    ("[logging]\nreport = {}", "CONFIG-TYPE", "true or false"),
    ("resume = 'Auto'", "CONFIG-CHOICE", "Did you mean 'auto'?"),
    ("resume = true", "CONFIG-TYPE", "a path"),
    ("[training]\nmax_train_steps = 1e400", "CONFIG-RANGE", "finite"),
    ("[datasets]\nresolution = 512", "CONFIG-TYPE", "Write [[datasets]], in two brackets."),
    ("[[network]]\nnetwork_dim = 4", "CONFIG-TYPE", "[network] must be a table"),
    ("[general]\nvalidation_split = 1.0", "CONFIG-RANGE", "below 1"),
)


@pytest.mark.parametrize(("text", "code", "says"), REFUSED, ids=[text for text, _, _ in REFUSED])
def test_a_value_that_does_not_fit_is_told_with_what_would(tmp_path: Path, text: str, code: str, says: str):
    fault = only(tmp_path, text + "\n")
    assert fault["code"] == code and says in f"{fault['message']} {fault['remedy']}"
    assert fault["line"] == LINES + text.count("\n") + 1 - (text.startswith("[d") or text.startswith("[[n"))
    assert fault["file"] == str(tmp_path / "train.toml") and fault["key"] in fault["subject"]


def test_all_faults_are_told_at_once_in_the_order_of_the_file(tmp_path: Path):
    text = "[general]\nresolution = 'x'\n[[datasets]]\nbatch_size = 0\n"
    text += "[[datasets.subsets]]\nnum_repeat = 2\n[guard]\nx = 1\n"
    told = wrong(tmp_path, text)
    assert [fault["line"] for fault in told] == [LINES + n for n in (2, 4, 6, 8)]
    keys = ["general.resolution", "datasets[0].batch_size", "datasets[0].subsets[0].num_repeat", "guard.x"]
    assert [fault["key"] for fault in told] == keys
    message = refusal(tmp_path, BASE + text).message
    assert message.splitlines()[0].endswith("has 4 faults:") and len(message.splitlines()) == 5


def test_faults_are_there_for_a_checker(tmp_path: Path):
    (tmp_path / "c.toml").write_text(BASE + "[network]\nnetwork_dim = 'eight'\n", encoding="utf-8")
    written = read_toml(tmp_path / "c.toml")
    (fault,) = find_config_faults(written.document, "c.toml", written.locate)
    assert isinstance(fault, Finding) and fault.level is Level.ERROR
    assert fault.subject == f"c.toml:{LINES + 2}: network.network_dim"
    expected = {"value": "eight", "expected": "a whole number of at least 1", "line": LINES + 2}
    assert expected.items() <= fault.evidence.items()
    assert not find_config_faults({"model": {"pretrained_model_name_or_path": "x"}, "saving": {"output_dir": "x"}})


def test_what_is_missing_is_told_with_what_to_write(tmp_path: Path):
    error = refusal(tmp_path, "[general]\nresolution = 512\n[[datasets]]\n")
    assert [fault["code"] for fault in error.evidence["faults"]] == ["CONFIG-MISSING"] * 2  # type: ignore[attr-defined]
    assert '[saving] with output_dir = "runs/first"' in error.message
    assert "output_dir is missing in [saving]" in refusal(tmp_path, BASE.replace("output_dir", "#")).message


# --- files that are no TOML, or not ours -----------------------------------------------------------------------------


def test_bytes_that_are_no_utf8_are_told_by_their_place(tmp_path: Path):
    content = b"\xef\xbb\xbf" + BASE.encode() + "[general]\ncaption_prefix = 'caf\u00e9'\n".encode("latin-1")
    error = refusal(tmp_path, content)
    facts = {"at_byte": content.index(b"\xe9"), "line": LINES + 2, "byte": "0xe9"}
    assert error.code == "CONFIG-ENCODING" and facts.items() <= error.evidence.items()
    assert "UTF-16" in refusal(tmp_path, BASE.encode("utf-16")).message


SYNTAX = (
    ("[optimizer]\nlearning_rate = fast\n", LINES + 2, "quotes"),
    ('[model2]\nvae = "C:\\Users\\me"\n', LINES + 2, "single quotes"),
    ("[saving]\noutput_dir = 'again'\n", LINES + 1, "Leave one of them"),
    ("output_dir = 'again'\n", LINES + 1, "Leave one of them"),
    ("[training]\nlr: 1e-4\n", LINES + 2, "quotes"),
    ("[training\n", LINES + 1, "quotes"),
)


@pytest.mark.parametrize(("text", "line", "remedy"), SYNTAX)
def test_a_slip_in_the_syntax_is_told_by_its_line(tmp_path: Path, text: str, line: int, remedy: str):
    error = refusal(tmp_path, BASE + text)
    assert (error.code, error.evidence["line"], error.subject) == (
        "CONFIG-SYNTAX",
        line,
        f"{tmp_path / 'train.toml'}:{line}",
    )
    assert remedy in error.remedy and text.splitlines()[line - LINES - 1] in error.message


def test_depth_without_end_is_a_slip_too(tmp_path: Path):
    assert refusal(tmp_path, "a = " + "[" * 20000).code == "CONFIG-SYNTAX"


FOREIGN = (
    ("train.toml", "pretrained_model_name_or_path = 'x'\nnetwork_dim = 4\n"),
    ("train.toml", "[model_arguments]\npretrained_model_name_or_path = 'x'\n"),
    ("train.toml", "[model]\ntype = 'anima'\ntransformer_path = 'x'\n"),
    ("train.toml", "model_train_type = 'anima-lora'\n"),
    ("train.json", '{"pretrained_model_name_or_path": "x"}'),
    ("train.toml", '{"a": 1}'),
    ("train.yaml", "job: extension\n"),
)


@pytest.mark.parametrize(("name", "text"), FOREIGN)
def test_configurations_of_other_programs_are_sent_to_the_importer(tmp_path: Path, name: str, text: str):
    error = refusal(tmp_path, text, name)
    assert error.code == "CONFIG-FOREIGN" and f"finitune train --from {tmp_path / name}" in error.remedy


def test_a_misspelled_model_table_is_still_ours(tmp_path: Path):
    error = refusal(tmp_path, BASE.replace("[model]", "[modle]"))
    assert error.code == "CONFIG-INVALID" and "Did you mean [model]?" in error.message
    assert "missing" not in error.message


def test_a_file_that_is_not_there_and_a_folder_are_file_errors(tmp_path: Path):
    for path, code in ((tmp_path / "none.toml", "FILE-MISSING"), (tmp_path, "FILE-IS-FOLDER")):
        with pytest.raises(FileError) as caught:
            read_train_config(path)
        assert caught.value.code == code


def test_lines_of_keys_are_found_through_strings_comments_and_lists():
    text = (
        '# [not.a.table]\n[a] # comment [b]\nx = [ # ]\n  1,\n]\n\'q.r\' = """\n[no]\ny = 1\n"""\nu.v = \'#\'\n\n'
        "[[list]]\nz = {w = 1}\n[list.inner]\ns = ''\n[[list]]\n[[list.deep]]\nend = 1\n"
    )
    lines = dict(iterate_key_lines(text))
    assert lines == {
        ("a",): 2,
        ("a", "x"): 3,
        ("a", "q.r"): 6,
        ("a", "u", "v"): 10,
        ("list",): 16,
        ("list", 0): 12,
        ("list", 0, "z"): 13,
        ("list", 0, "inner"): 14,
        ("list", 0, "inner", "s"): 15,
        ("list", 1): 16,
        ("list", 1, "deep"): 17,
        ("list", 1, "deep", 0): 17,
        ("list", 1, "deep", 0, "end"): 18,
    }
