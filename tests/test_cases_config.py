"""Configurations from the field (CFG-01, -03, -04, -05): each report's own settings, and what is said of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finitune.config.arguments import parse_arguments
from finitune.config.conflicts import find_config_conflicts
from finitune.config.read import read_train_config
from finitune.errors import UsageError
from finitune.report import Finding, Level

BASE = '[model]\npretrained_model_name_or_path = "pico-anima"\n[saving]\noutput_dir = "out"\n'


def read(folder: Path, text: str) -> Any:
    path = folder / "train.toml"
    path.write_text(BASE + text, encoding="utf-8")
    return read_train_config(path)


def told(folder: Path, text: str) -> list[dict[str, Any]]:
    with pytest.raises(UsageError) as caught:
        read(folder, text)
    faults = caught.value.evidence["faults"]
    assert caught.value.code == "CONFIG-INVALID" and isinstance(faults, list)
    return faults


# --- CFG-01: a learning rate read as text ----------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", "0.0001", " 1e-4 "])
def test_cfg_01_a_number_in_quotes_is_taken_with_a_warning(tmp_path: Path, text: str):
    loaded = read(tmp_path, f'[optimizer]\nlearning_rate = "{text}"\n')
    assert loaded.config.optimizer.learning_rate == 1e-4
    (warning,) = loaded.findings
    assert (warning.level, warning.code) == (Level.WARNING, "CONFIG-NUMBER-AS-TEXT")
    assert warning.subject == f"{tmp_path / 'train.toml'}:6: optimizer.learning_rate"


@pytest.mark.parametrize("text", ["-1e-4", "1e-4 # low", "1,5e-4", "12:30", "None", "fast", "nan", "inf", ""])
def test_cfg_01_other_text_fails_with_file_line_key_and_what_is_expected(tmp_path: Path, text: str):
    (fault,) = told(tmp_path, f'[optimizer]\nlearning_rate = "{text}"\n')
    facts = {"file": str(tmp_path / "train.toml"), "line": 6, "key": "optimizer.learning_rate"}
    assert facts.items() <= fault.items() and fault["expected"] == "a number of at least 0"


@pytest.mark.parametrize(("text", "value"), [("True", True), ("false", False), ("FALSE", False)])
def test_cfg_01_truth_in_quotes_is_taken_with_a_warning(tmp_path: Path, text: str, value: bool):
    loaded = read(tmp_path, f'[training]\ntorch_compile = "{text}"\n')
    assert loaded.config.training.torch_compile is value
    assert [finding.code for finding in loaded.findings] == ["CONFIG-NUMBER-AS-TEXT"]


@pytest.mark.parametrize("value", ['"no"', '"yes"', '"on"', "1", "0.0"])
def test_cfg_01_the_truth_of_other_languages_is_refused(tmp_path: Path, value: str):
    (fault,) = told(tmp_path, f"[training]\ntorch_compile = {value}\n")
    assert fault["code"] == "CONFIG-TYPE" and fault["expected"] == "true or false"


def test_cfg_01_a_zero_in_front_makes_no_octal_number(tmp_path: Path):
    assert read(tmp_path, '[training]\nseed = "017"\n').config.training.seed == 17


# --- CFG-03: unknown and misplaced keys ------------------------------------------------------------------------------

STRAYS = (
    (
        "[optimizer]\nlearing_rate = 1e-4",
        "CONFIG-UNKNOWN-KEY",
        "[optimizer] has no option 'learing_rate'. Did you mean 'learning_rate'?",
    ),
    ("[network]\nnetwork_dims = 8", "CONFIG-UNKNOWN-KEY", "Did you mean 'network_dim'?"),
    ("[network]\nrank = 8", "CONFIG-UNKNOWN-KEY", "Did you mean 'network_dim'?"),
    ("[training]\nmixed_precision = 'fp16'", "CONFIG-UNKNOWN-KEY", "Did you mean 'precision' in [model]?"),
    ("[network]\nquantum_flux = 8", "CONFIG-UNKNOWN-KEY", "[network] has no option 'quantum_flux'"),
    (
        "[training]\nlearning_rate = 1e-4",
        "CONFIG-MISPLACED-KEY",
        "learning_rate belongs in [optimizer], not in [training]",
    ),
    (
        "[training.learning_rate]\nx = 1",
        "CONFIG-MISPLACED-KEY",
        "learning_rate belongs in [optimizer], not in [training]",
    ),
    ("[[dataset]]", "CONFIG-UNKNOWN-KEY", "there is no table [[dataset]]. Did you mean [[datasets]]?"),
    ("[optimiser]", "CONFIG-UNKNOWN-KEY", "there is no table [optimiser]. Did you mean [optimizer]?"),
    ("[settings]", "CONFIG-UNKNOWN-KEY", "there is no table [settings]"),
    (
        "[[subsets]]",
        "CONFIG-MISPLACED-KEY",
        "subsets belongs in [[datasets.subsets]], not in the file outside of its tables",
    ),
    ("[[general.subsets]]", "CONFIG-MISPLACED-KEY", "subsets belongs in [[datasets.subsets]], not in [general]"),
    (
        "[[datasets]]\nimage_dir = 'a'",
        "CONFIG-MISPLACED-KEY",
        "image_dir belongs in [[datasets.subsets]], not in [[datasets]]",
    ),
    (
        "[[datasets]]\n[[datasets.subsets]]\nbatch_size = 4",
        "CONFIG-MISPLACED-KEY",
        "batch_size belongs in [general] or [[datasets]], not in [[datasets.subsets]]",
    ),
    (
        "[training]\nnum_repeats = 2",
        "CONFIG-MISPLACED-KEY",
        "num_repeats belongs in [general], [[datasets]] or [[datasets.subsets]]",
    ),
)


@pytest.mark.parametrize(("text", "code", "says"), STRAYS, ids=[text for text, _, _ in STRAYS])
def test_cfg_03_a_stray_key_is_told_with_the_place_it_belongs_to(tmp_path: Path, text: str, code: str, says: str):
    (fault,) = told(tmp_path, text + "\n")
    assert fault["code"] == code and says in fault["message"]
    assert fault["line"] in (5, 6, 7) and fault["key"] in fault["subject"]


def test_cfg_03_the_same_key_in_two_tables_is_an_error_with_both_lines(tmp_path: Path):
    (fault,) = told(tmp_path, "[optimizer]\nlearning_rate = 1e-4\n[training]\nlearning_rate = 1e-5\n")
    assert fault["line"] == 8
    assert fault["message"] == "learning_rate belongs in [optimizer], where it is already (line 6), not in [training]"


def test_cfg_03_general_and_dataset_may_both_have_a_batch_size(tmp_path: Path):
    loaded = read(tmp_path, "[general]\nbatch_size = 2\n[[datasets]]\nbatch_size = 4\n")
    assert not loaded.findings
    assert (loaded.config.general.batch_size, loaded.config.datasets[0].batch_size) == (2, 4)


def test_cfg_03_what_is_below_a_misspelled_name_is_looked_at_too(tmp_path: Path):
    told_of = told(tmp_path, "[optimiser]\nlearing_rate = 'fast'\n[[dataset]]\nresolution = 'big'\n")
    assert [(fault["code"], fault["line"]) for fault in told_of] == [
        ("CONFIG-UNKNOWN-KEY", 5),
        ("CONFIG-UNKNOWN-KEY", 6),
        ("CONFIG-TYPE", 6),
        ("CONFIG-UNKNOWN-KEY", 7),
        ("CONFIG-TYPE", 8),
    ]
    assert told_of[2]["key"] == "optimiser.learing_rate"


# --- CFG-04: lists of key=value --------------------------------------------------------------------------------------

TAKEN: tuple[tuple[Any, dict[str, Any], tuple[str, ...]], ...] = (
    (["conv_dim=8", "algo=lokr", "factor=-1"], {"conv_dim": 8, "algo": "lokr", "factor": -1}, ()),
    (["flag=true", "other=False", "x=none"], {"flag": True, "other": False, "x": None}, ()),
    (["lr=0.5,"], {"lr": 0.5}, ("ARGUMENT-TRAILING-COMMA",)),
    (["preset=full,"], {"preset": "full"}, ("ARGUMENT-TRAILING-COMMA",)),
    (["betas=(0.9,", "0.99)"], {"betas": (0.9, 0.99)}, ("ARGUMENT-JOINED",)),
    (["betas=0.9,0.99"], {"betas": (0.9, 0.99)}, ()),
    (["betas = (0.9, 0.99)"], {"betas": (0.9, 0.99)}, ()),
    ("a=1 b=2", {"a": 1, "b": 2}, ()),
    ("a=1, b=(2, 3)\nc = 4", {"a": 1, "b": (2, 3), "c": 4}, ()),
    ("'betas=0.9,0.99' 'eps=1e-8'", {"betas": (0.9, 0.99), "eps": 1e-8}, ()),
    (["a=1 b=2"], {"a": 1, "b": 2}, ("ARGUMENT-SPLIT",)),
    ([""], {}, ("ARGUMENT-EMPTY",)),
    (["a=1", "", "b=2"], {"a": 1, "b": 2}, ("ARGUMENT-EMPTY",)),
    (["'x=1'"], {"x": 1}, ("ARGUMENT-QUOTED-TWICE",)),
    (
        ["exclude_patterns=[.*mlp.*,.*(q|k)_proj]"],
        {"exclude_patterns": (".*mlp.*", ".*(q|k)_proj")},
        ("ARGUMENT-QUOTES-LOST",),
    ),
    ([r"exclude_patterns=['.*\.mlp', '\d+']"], {"exclude_patterns": (r".*\.mlp", r"\d+")}, ()),
    (["exclude_patterns=['a=b', 'c']"], {"exclude_patterns": ("a=b", "c")}, ()),
    (["network_reg_dims=.*q.*=4,.*k.*=8"], {"network_reg_dims": ".*q.*=4,.*k.*=8"}, ()),
    ("dropout=0.1 network_reg_dims=q=4, k=8 x=1", {"dropout": 0.1, "network_reg_dims": "q=4, k=8", "x": 1}, ()),
    (["lr=1e-3", "n=017", "big=1_000"], {"lr": 1e-3, "n": 17, "big": 1000}, ()),
    (["eps=(None, 1e-3)", "name='1e-3'"], {"eps": (None, 1e-3), "name": "1e-3"}, ()),
    (["betas\uff1d\uff080.9\uff0c0.99\uff09"], {"betas": (0.9, 0.99)}, ("ARGUMENT-FULL-WIDTH",)),
    ({"eps": "1e-8", "betas": [0.9, 0.99]}, {"eps": 1e-8, "betas": (0.9, 0.99)}, ("CONFIG-NUMBER-AS-TEXT",)),
)
BROKEN: tuple[tuple[Any, str, int, str], ...] = (
    (["T_max"], "ARGUMENT-NO-VALUE", 0, "T_max"),
    (["x=1", "lr="], "ARGUMENT-NO-VALUE", 1, "lr="),
    (["x=1", "a=b=c"], "ARGUMENT-VALUE", 1, "a=b=c"),
    (["a=(1,"], "ARGUMENT-VALUE", 0, "a=(1,"),
    (["a=(1,", "b=2"], "ARGUMENT-VALUE", 0, "a=(1,"),
    (["a=1)"], "ARGUMENT-VALUE", 0, "a=1)"),
    (["=1"], "ARGUMENT-NAME", 0, "=1"),
    (["--lr=1"], "ARGUMENT-NAME", 0, "--lr=1"),
    (["a=1", "a=2"], "ARGUMENT-TWICE", 1, "a=2"),
    (["a={1, 2}"], "ARGUMENT-VALUE", 0, "a={1, 2}"),
    (["a=nan"], "ARGUMENT-VALUE", 0, "a=nan"),
    ([0.9], "ARGUMENT-NO-TEXT", 0, "0.9"),
)


@pytest.mark.parametrize(("items", "arguments", "codes"), TAKEN, ids=[str(items) for items, _, _ in TAKEN])
def test_cfg_04_what_can_be_meant_in_one_way_only_is_taken(
    items: Any, arguments: dict[str, Any], codes: tuple[str, ...]
):
    read_arguments, findings = parse_arguments(items, "network_args")
    assert read_arguments == arguments
    assert [type(value) for value in read_arguments.values()] == [type(value) for value in arguments.values()]
    assert tuple(finding.code for finding in findings) == codes
    assert all(finding.level is not Level.ERROR and "index" in finding.evidence for finding in findings)


@pytest.mark.parametrize(("items", "code", "index", "text"), BROKEN, ids=[str(items) for items, *_ in BROKEN])
def test_cfg_04_what_cannot_is_told_by_index_and_text(items: Any, code: str, index: int, text: str):
    with pytest.raises(UsageError) as caught:
        parse_arguments(items, "optimizer_args")
    assert caught.value.code == code and caught.value.remedy
    assert caught.value.evidence["items"] == [{"index": index, "text": text}]
    assert f"optimizer_args[{index}], {text!r}" in caught.value.message


def test_cfg_04_all_broken_items_are_told_at_once():
    with pytest.raises(UsageError) as caught:
        parse_arguments(["T_max", "x=1", "a=b=c"], "network_args")
    assert caught.value.code == "ARGUMENTS-INVALID"
    assert "network_args[0]" in caught.value.message and "network_args[2]" in caught.value.message


def test_cfg_04_nothing_is_evaluated():
    assert parse_arguments(["x=__import__('os').getcwd()"], "args")[0] == {"x": "__import__('os').getcwd()"}


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
words = st.text(st.characters(codec="ascii", exclude_categories=("Cc",)), max_size=6)
nested = st.recursive(plain | words, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.from_regex(r"[a-z][a-z_]{0,5}", fullmatch=True), nested, max_size=4))
def test_cfg_04_python_literals_come_back_as_they_are(arguments: dict[str, Any]):
    items = [f"{name}={value!r}" for name, value in arguments.items()]
    assert parse_arguments(items, "args") == (arguments, ())
    assert parse_arguments(" ".join(items) or (), "args") == (arguments, ())


@settings(deadline=None, max_examples=100)
@given(st.lists(st.text("ab=,()[]{}'\" 1.\\", max_size=10), max_size=3))
def test_cfg_04_whatever_comes_is_taken_or_refused_and_never_crashes(items: list[str]):
    try:
        arguments, findings = parse_arguments(items, "args")
    except UsageError as error:
        assert error.remedy and error.evidence["items"]
    else:
        assert isinstance(arguments, dict) and all(isinstance(finding, Finding) for finding in findings)


# --- CFG-05: options against each other ------------------------------------------------------------------------------

DATA = "[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'pictures'\n"
PAIRS = (
    (f"{DATA}color_aug = true\n", Level.NOTE, "LATENTS-NOT-CACHED", "datasets.subsets.color_aug"),
    (f"{DATA}random_crop = true\n", Level.NOTE, "LATENTS-NOT-CACHED", "datasets.subsets.random_crop"),
    (f"{DATA}[optimizer]\ntext_encoder_lr = 1e-5\n", Level.WARNING, "CONFIG-NO-EFFECT", "optimizer.text_encoder_lr"),
    (f"{DATA}keep_tokens = 1\n", Level.WARNING, "CONFIG-NO-EFFECT", "datasets.subsets.keep_tokens"),
    (
        f"{DATA}[training]\noffload_blocks = 4\n[network]\ntrain_text_encoder = true\n",
        Level.ERROR,
        "OFFLOAD-TEXT-ENCODER",
        "training.offload_blocks",
    ),
)


@pytest.mark.parametrize(("text", "level", "code", "option"), PAIRS)
def test_cfg_05_conflicts_are_told_as_what_they_are(tmp_path: Path, text: str, level: Level, code: str, option: str):
    found = {(finding.code, finding.subject): finding for finding in find_config_conflicts(read(tmp_path, text).config)}
    assert found[code, option].level is level


@pytest.mark.parametrize(
    "text",
    [
        f"{DATA}shuffle_caption = true\n",
        f"{DATA}caption_dropout_rate = 0.1\n",
        f"{DATA}shuffle_caption = true\n[network]\ntrain_text_encoder = true\n",
    ],
)
def test_cfg_05_captions_may_change_although_they_are_cached(tmp_path: Path, text: str):
    found = find_config_conflicts(read(tmp_path, text).config)
    assert not [finding for finding in found if finding.level is not Level.NOTE]
