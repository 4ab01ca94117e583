"""`finitune check` on configurations: the cases of the field (CFG-01 to CFG-07), LyCORIS's rules, what is mended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finitune.config.lycoris import (
    LycorisOptions,
    check_lycoris_preset,
    find_lycoris_faults,
    parse_option_comments,
    read_lycoris_misconceptions,
    read_lycoris_rules,
)
from finitune.errors import UsageError
from finitune.files.writer import save_tensors
from finitune.models.anima import ANIMA
from finitune.report import Finding, Level, Report
from finitune.verbs import check
from finitune.verbs.check.request import Request
from tests.foreign_configs import AI_TOOLKIT, ONETRAINER
from tests.picture_files import noise_picture, saved, written

OURS = '[model]\npretrained_model_name_or_path = "pico-anima"\n[saving]\noutput_dir = "out"\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with three pictures in `img`."""
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        saved(tmp_path / "img" / f"{number}.png", noise_picture(96, 96, number))
        written(tmp_path / "img" / f"{number}.txt", f"sks, thing {number}")
    return tmp_path


DATA = "[general]\nresolution = 64\n[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'img'\n"


def checked(path: Path, **options: Any) -> Report:
    return check.run(Request(paths=(path,), **options))


def ours(folder: Path, text: str, **options: Any) -> Report:
    return checked(written(folder / "train.toml", OURS + text), **options)


def kohya(folder: Path, text: str, **options: Any) -> Report:
    """A TOML of sd-scripts over the folder's pictures."""
    base = (
        "pretrained_model_name_or_path = 'pico-anima'\noutput_dir = 'out'\nnetwork_train_unet_only = true\n"
        "[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = 'img'\ncaption_extension = '.txt'\n"
    )
    return checked(written(folder / "kohya.toml", text + "\n" + base), **options)


def told(report: Report, code: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.code == code]


def codes(report: Report) -> set[str]:
    return {finding.code for finding in report.findings}


def test_a_good_configuration_tells_how_long_it_runs_and_what_it_writes(folder: Path):
    text = DATA + "[training]\ntrain_batch_size = 2\ngradient_accumulation_steps = 3\nmax_train_epochs = 4\n"
    report = ours(folder, text + "[preview]\nsample_every_n_steps = 2\nsample_prompts = ['a cat']\n")
    assert report.ok, report.findings
    figures = report.figures
    assert (figures["pictures"], figures["effective_batch"]) == (3, 6)
    assert (figures["micro_batches_per_epoch"], figures["steps_per_epoch"], figures["steps"]) == (2, 1, 4)
    assert figures["sites"] == 60
    files = {row["what"]: Path(row["where"]).name for row in figures["files"]}  # type: ignore[attr-defined]
    assert files["adapter"] == "adapter.safetensors" and files["previews"] == "previews"
    assert not (folder / "out").exists()


def test_all_faults_at_once_and_the_rest_is_looked_at(folder: Path):
    text = (
        "[optimizer]\nlearing_rate = 1e-4\nlearning_rates = 'fast'\n[network]\nlearning_rate = 3\nnetwork_dim = 'big'\n"
        "conv_dim = 4\n[training]\nseed = -1\n"
    )
    report = ours(folder, text + DATA)
    found = [(f.evidence["line"], f.code) for f in report.findings if f.level is Level.ERROR]
    assert found == [
        (6, "CONFIG-UNKNOWN-KEY"),
        (7, "CONFIG-UNKNOWN-KEY"),
        (7, "CONFIG-TYPE"),
        (9, "CONFIG-MISPLACED-KEY"),
        (10, "CONFIG-TYPE"),
        (13, "CONFIG-RANGE"),
    ]
    assert report.figures["pictures"] == 3 and report.figures["sites"] == 60
    assert [f.subject for f in told(report, "CONFIG-NO-EFFECT")] == ["network.conv_dim"]


def test_cfg_01_a_number_in_quotes_is_told_and_mended(folder: Path):
    text = "[optimizer]\nlearning_rate = \"1e-4\" # low\n[training]\nseed = '7'\n" + DATA
    report = ours(folder, text)
    found = told(report, "CONFIG-NUMBER-AS-TEXT")
    assert report.ok and [finding.evidence["line"] for finding in found] == [6, 8]
    again = checked(folder / "train.toml", fix=True, yes=True)
    assert again.ok and not told(again, "CONFIG-NUMBER-AS-TEXT")
    mended = (folder / "train.toml").read_text()
    assert mended == (OURS + text).replace('"1e-4"', "1e-4").replace("'7'", "7")
    assert (folder / "train.toml.orig").read_text() == OURS + text


def test_cfg_01_numbers_as_text_of_another_program(folder: Path):
    report = checked(written(folder / "job.yaml", AI_TOOLKIT))
    (finding,) = told(report, "CONFIG-NUMBER-AS-TEXT")
    assert "lr = '1e-4'" in finding.message
    assert "ai-toolkit" in str(report.figures["program"]) and report.figures["keys"]


def test_cfg_03_a_misspelled_key_is_mended_where_one_name_alone_is_near(folder: Path):
    text = "[optimizer]\nlearing_rate = 2e-4 # high\n[network]\nalpha = 3\n" + DATA
    report = ours(folder, text)
    assert report.exit_code == 1 and len(told(report, "CONFIG-UNKNOWN-KEY")) == 2
    request = Request(paths=(folder / "train.toml",), fix=True)
    check.run(request)  # nobody was asked, so nothing is done
    assert (folder / "train.toml").read_text() == OURS + text
    again = checked(folder / "train.toml", fix=True, yes=True)
    assert (folder / "train.toml").read_text() == OURS + text.replace("learing_rate", "learning_rate")
    assert [finding.evidence["key"] for finding in told(again, "CONFIG-UNKNOWN-KEY")] == ["network.alpha"]


@pytest.mark.parametrize(
    "text",
    [
        "[optimizer]\nlearing_rate = 'fast'\n",
        "[optimizer]\nlearing_rate = 1\nlearning_rate = 2\n",
        "[networks]\nx = 1\n",
    ],
)
def test_cfg_03_no_guess_is_offered_where_it_may_be_wrong(folder: Path, text: str):
    request = Request(paths=(written(folder / "train.toml", OURS + text + DATA),))
    assert check.run(request).exit_code == 1 and not request.mendings


def test_cfg_03_unknown_keys_of_another_program_have_their_line(folder: Path):
    report = kohya(folder, "network_module = 'networks.lora'\nlearing_rate = 1e-4\nnetwrok_alpha = 8")
    found = told(report, "CONFIG-UNKNOWN-KEY")
    assert [finding.evidence["line"] for finding in found] == [2, 3] and report.ok
    assert "Did you mean 'network_alpha'?" in found[1].message


def test_cfg_03_a_dataset_toml_is_read_strictly(folder: Path):
    text = "[general]\nresolution = 64\nlearning_rate = 1\n[[datasets]]\nimage_dir = 'x'\n[[datasets.subsets]]\n"
    report = checked(written(folder / "data.toml", text + "image_dir = 'img'\nnum_repeat = 2\nbatch_size = 2\n"))
    found = {f.evidence["line"]: f.code for f in report.findings if "line" in f.evidence and f.level is Level.ERROR}
    assert found == {
        3: "CONFIG-MISPLACED-KEY",
        5: "CONFIG-MISPLACED-KEY",
        8: "CONFIG-UNKNOWN-KEY",
        9: "CONFIG-MISPLACED-KEY",
    }
    assert report.figures["pictures"] == 3


def test_cfg_04_arguments_that_cannot_be_read(folder: Path):
    report = kohya(folder, "network_module = 'lycoris.kohya'\nnetwork_args = ['algo=lokr', 'factor', 'a=b=c']")
    (finding,) = told(report, "ARGUMENTS-INVALID")
    assert finding.level is Level.ERROR and "network_args[1]" in finding.message


def test_cfg_05_conflicts_of_what_an_importer_makes(folder: Path):
    report = kohya(folder, "network_module = 'networks.lora'\nmasked_loss = true\nkeep_tokens = 2")
    assert "MASKS-MISSING" in codes(report) and "CONFIG-NO-EFFECT" in codes(report)
    assert report.figures["pictures"] == 3


def test_cfg_07_a_model_of_another_family(folder: Path):
    import torch

    name = "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"
    save_tensors(folder / "sd.safetensors", {name: torch.zeros(320, 768)})
    text = "[model]\npretrained_model_name_or_path = 'sd.safetensors'\n[saving]\noutput_dir = 'out'\n" + DATA
    report = checked(written(folder / "train.toml", text))
    found = [finding for finding in report.findings if finding.code in ("MODEL-OTHER-FAMILY", "MODEL-WRONG-PART")]
    assert len(found) == 1 and found[0].level is Level.ERROR and report.figures["pictures"] == 3
    missing = checked(written(folder / "train.toml", text.replace("sd.safe", "gone.safe")))
    assert "MODEL-NOT-FOUND" in codes(missing)
    other = kohya(folder, "network_module = 'networks.lora_flux'")
    assert "CONFIG-OTHER-FAMILY" in codes(other)


def test_an_escape_that_was_not_meant(folder: Path):
    report = ours(folder, DATA.replace("'img'", '"D:\\train\\new"'))
    (finding,) = told(report, "CONFIG-ESCAPE")
    assert finding.level is Level.ERROR and r"D:\train\new" in finding.remedy


@pytest.mark.parametrize("text", ["[model\n", "a = 1\na = 2\n", "\x00", "[a]\nb = \n", "{", "x: [1"])
def test_what_is_no_configuration_is_an_error_and_no_wrong_usage(folder: Path, text: str):
    assert checked(written(folder / "train.toml", text)).exit_code == 1


def test_patterns_that_fit_no_module(folder: Path):
    report = ours(folder, "[network]\nonly_patterns = ['down_blocks.*']\n" + DATA)
    assert "SITES-NONE" in codes(report) and report.figures["pictures"] == 3


def test_the_configuration_of_one_trainer_in_json(folder: Path):
    report = checked(written(folder / "config.json", json.dumps(ONETRAINER)))
    assert "OneTrainer" in str(report.figures["program"]) and report.tables[0].title == "keys"
    assert "CONFIG-SECOND-FILE" in codes(report)


# --- LyCORIS ---------------------------------------------------------------------------------------------------------


def lycoris(**arguments: str) -> dict[tuple[str, str], Finding]:
    """What is said of network_args, by code and option."""
    options = {"network_module": "lycoris.kohya", "network_dim": 16}
    return {(f.code, f.subject): f for f in find_lycoris_faults(LycorisOptions(options, arguments))}


SAID = (
    ({"algo": "lokrr"}, "LYCORIS-ALGO", "algo", Level.ERROR),
    ({"algo": "dylora", "block_size": "5"}, "LYCORIS-BLOCK-SIZE", "block_size", Level.ERROR),
    ({"algo": "loha", "block_size": "4"}, "LYCORIS-NO-EFFECT", "block_size", Level.WARNING),
    ({"algo": "lokr", "factor": "abc"}, "LYCORIS-FACTOR", "factor", Level.ERROR),
    ({"algo": "lokr", "factor": "4.5"}, "LYCORIS-FACTOR", "factor", Level.ERROR),
    ({"algo": "lora", "preset": "attn-mpl"}, "LYCORIS-PRESET", "preset", Level.ERROR),
    ({"algo": "lora", "preset": "attn-only"}, "LYCORIS-PRESET-EMPTY", "preset", Level.WARNING),
    ({"dora_wd": "True", "bypass_mode": "True", "algo": "lora"}, "LYCORIS-DORA-BYPASS", "bypass_mode", Level.WARNING),
    ({"algo": "glora", "dora_wd": "True"}, "LYCORIS-NO-EFFECT", "dora_wd", Level.WARNING),
    ({"algo": "glora", "use_tucker": "True"}, "LYCORIS-NO-EFFECT", "use_tucker", Level.NOTE),
    ({"algo": "lokr", "dropout": "0.1"}, "LYCORIS-NO-EFFECT", "dropout", Level.WARNING),
    ({"algo": "loha", "loraplus_lr_ratio": "4"}, "LYCORIS-NO-EFFECT", "loraplus_lr_ratio", Level.WARNING),
    ({"algo": "lora", "use_tucker": "no"}, "LYCORIS-BOOL", "network_args", Level.WARNING),
    ({"algo": "lora", "train_norm": "0"}, "LYCORIS-BOOL", "network_args", Level.WARNING),
    ({"algo": "lokr", "decompose_both": "False"}, "LYCORIS-BOOL", "decompose_both", Level.WARNING),
    ({"algo": "lora", "use_cp": "False", "use_tucker": "True"}, "LYCORIS-BOOL", "use_tucker", Level.WARNING),
    ({"algo": "lora", "linear_dim": "8"}, "LYCORIS-NO-EFFECT", "linear_dim", Level.WARNING),
    ({"algo": "lokr", "wd_on_output": "False"}, "LYCORIS-NOT-RELOADED", "wd_on_output", Level.NOTE),
    ({"algo": "ia3"}, "LYCORIS-VERSION", "algo", Level.NOTE),
    ({"algo": "lora", "conv_dim": "1"}, "LYCORIS-MYTH", "conv_dim", Level.NOTE),
)
GOOD = (
    {},
    {"algo": "LoCon", "conv_dim": "0"},
    {"algo": "lokr", "factor": "-1", "use_tucker": "False", "preset": "full"},
    {"algo": "dylora", "block_size": "4"},
    {"algo": "lora", "dora_wd": "True", "wd_on_output": "True", "dropout": "0.1", "loraplus_lr_ratio": "4"},
    {"algo": "diag-oft", "constraint": "1e-3", "rescaled": "true"},
)


@pytest.mark.parametrize(("arguments", "code", "option", "level"), SAID)
def test_the_true_rules_of_lycoris(arguments: dict[str, str], code: str, option: str, level: Level):
    assert lycoris(**arguments)[code, option].level is level


@pytest.mark.parametrize("arguments", GOOD)
def test_nothing_is_said_of_what_is_right(arguments: dict[str, str]):
    assert not lycoris(**arguments)


@pytest.mark.parametrize("rank", [1, 7, 12, 100])
def test_any_rank_is_right(rank: int):
    given = LycorisOptions(
        {"network_module": "lycoris.kohya", "network_dim": rank, "network_alpha": 3}, {"algo": "lora"}
    )
    assert not find_lycoris_faults(given)


def test_a_number_0_in_a_json_is_not_the_text_0():
    options = {"algo": "lora", "linear_dim": 8, "conv_dim": 0}
    assert [f.code for f in find_lycoris_faults(LycorisOptions(options))] == ["LYCORIS-CONV-DIM-ZERO"]


FOLLOWED = (
    ("network_dim = 64  # must divide the number of heads", "network_dim"),
    ("# \u5fc5\u987b\u6574\u9664\u6ce8\u610f\u529b\u5934\u6570\nnetwork_dim = 64", "network_dim"),
    ("network_args = ['algo=lora', 'conv_dim=1']", "conv_dim"),
    ("cache_latents = false\ngradient_checkpointing = true", "gradient_checkpointing"),
    ("enable_bucket = false", "enable_bucket"),
    ("use_lora = true", "use_lora"),
    ("lycoris_config = 'x.json'", "lycoris_config"),
    ("network_alpha = 8 # half of the rank", "network_alpha"),
)


@pytest.mark.parametrize(("text", "option"), FOLLOWED)
def test_a_myth_that_a_configuration_follows_is_named_with_its_source(folder: Path, text: str, option: str):
    report = kohya(folder, f"network_module = 'lycoris.kohya'\n{text}")
    (finding,) = told(report, "LYCORIS-MYTH")
    assert (finding.level, finding.subject) == (Level.NOTE, option) and finding.evidence["source"]


def test_a_myth_in_a_comment_of_our_own(folder: Path):
    report = ours(folder, "[network]\nnetwork_dim = 16 # must divide the heads\n" + DATA)
    assert [finding.subject for finding in told(report, "LYCORIS-MYTH")] == ["network_dim"] and report.ok


def test_every_rule_and_myth_was_seen():
    seen = {(code, option) for _, code, option, _ in SAID} | {("LYCORIS-CONV-DIM-ZERO", "conv_dim")}
    unseen = {(rule.code, rule.subject) for rule in read_lycoris_rules()} - seen
    spellings = {"weight_decompose", "linear_alpha", "unbalanced_factorization"}  # of rules that were
    assert {option for _, option in unseen} <= spellings
    myths = {rule.subject for rule in read_lycoris_misconceptions()} - {option for _, option in FOLLOWED}
    assert myths <= {"linear_dim", "conv_dim", "rank", "linear", "use_lycoris"}
    assert all(rule.source and rule.text for rule in read_lycoris_misconceptions())


def test_comments_belong_to_the_option_beside_or_below():
    text = "# a rank\n# of two lines\nrank = 4 # here\n\nalpha = 1\n- lr: 2 # yaml\n"
    assert parse_option_comments(text) == {"rank": "a rank  of two lines  here", "lr": "yaml"}


NAMES = ["blocks.0.self_attn.q_proj", "blocks.0.mlp.layer1", "llm_adapter.blocks.0.self_attn.q_proj"]
PRESETS = (
    ("unet_target_module = ['Block']", []),
    ("unet_target_name = ['blocks.*']", []),
    ("use_fnmatch = true\nunet_target_name = ['*q_proj']", []),
    ("unet_target_module = ['Transformer2DModel']", ["LYCORIS-PRESET-EMPTY"]),
    ("unet_target_name = ['q_proj']", ["LYCORIS-PRESET-EMPTY"]),
    ("unet_target_module = ['Block', 'ResnetBlock2D']", ["LYCORIS-PRESET-IDLE"]),
    ("unet_target_modules = ['Block']", ["LYCORIS-PRESET-KEY", "LYCORIS-PRESET-EMPTY"]),
    ("unet_target_name = ['(']", ["LYCORIS-PRESET-EMPTY"]),
)


@pytest.mark.parametrize(("text", "expected"), PRESETS)
def test_presets_are_held_against_the_modules(tmp_path: Path, text: str, expected: list[str]):
    found = check_lycoris_preset(written(tmp_path / "preset.toml", text), NAMES, ANIMA)
    assert [finding.code for finding in found] == expected


def test_a_preset_file_is_counted_on_the_model(folder: Path):
    written(folder / "mine.toml", "unet_target_module = ['CrossAttention']")
    text = "network_module = 'lycoris.kohya'\nnetwork_args = ['algo=lora', 'preset=mine.toml']"
    (finding,) = told(kohya(folder, text), "LYCORIS-PRESET-EMPTY")
    assert finding.level is Level.ERROR and finding.evidence["targets"] == {"CrossAttention": 0}
    whole = report_numbers(finding.message)
    assert whole and whole[0] > 60  # all that could be adapted, not only what is by default


def report_numbers(text: str) -> list[int]:
    return [int(word) for word in text.split() if word.isdigit()]


# --- faults never crash ----------------------------------------------------------------------------------------------

WHOLE = (
    OURS
    + "[network]\nalgorithm = 'lokr'\nfactor = 8\nnetwork_dim = \"4\"\n[optimizer]\noptimizer_args = ['eps=1e-8']\n"
    "learning_rate = 1e-4 # half\n" + DATA
)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_configuration_is_told_and_never_crashes(folder: Path, data: st.DataObject):
    content = bytearray(WHOLE.encode())
    for _ in range(data.draw(st.integers(1, 5))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = written(folder / "train.toml", bytes(content))
    report = checked(path)
    assert report.exit_code in (0, 1) and all(f.code and f.message for f in report.findings)
    if not report.exit_code:
        assert is_right(path)


def is_right(path: Path) -> bool:
    """Whether the strict reader takes a file."""
    from finitune.config.read import read_train_config

    try:
        read_train_config(path)
    except UsageError:
        return False
    return True
