"""Files that are no configuration, two at once, none, and kohya's network_args in every broken form, by the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from finitune.models.pico import get_pico_folder
from tests.foreign_configs import AI_TOOLKIT
from tests.train_asked import READ, Scene, a_scene, ask, one_cache_for_all, pico_is_read_once

__all__ = ["a_scene", "one_cache_for_all", "pico_is_read_once"]

CONTENTS: dict[str, bytes] = {
    "junk.toml": bytes(range(256)),
    "zip.toml": b"PK\3\4" + bytes(100),
    "empty.toml": b"",
    "other.yaml": b"a: 1\nb: [2]\n",
    "tabs.yaml": b"a:\n\tb: 1\n",
    "half.json": b'{"a":',
    "empty.json": b"{}",
    "utf16.toml": "[model]\n".encode("utf-16"),
    "latin.toml": '[model]\npretrained_model_name_or_path = "caf\xe9"\n'.encode("latin-1"),
    "quotes.toml": b'[saving]\noutput_dir = "C:\\Users\\me"\n',
    "key.toml": b"[network]\nnetwork_dims = 4\n",
    "data.toml": b"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = 'pictures'\n",
    "twice.toml": b"[model]\na = 1\n[model]\nb = 2\n",
}


@pytest.mark.parametrize("by", ["plain", "--from"])
@pytest.mark.parametrize(
    ("name", "codes", "says"),
    [
        ("nowhere.toml", ("FILE-MISSING", "CONFIG-NO-FILE"), "path"),
        ("pictures", ("FILE-IS-FOLDER", "CONFIG-NO-FILE"), "the"),
        ("a" * 5000, ("FILE-UNREADABLE", "CONFIG-NO-FILE"), "the"),
        ("junk.toml", ("CONFIG-ENCODING",), "a TOML, JSON or YAML file"),
        ("zip.toml", ("CONFIG-ENCODING",), "a TOML, JSON or YAML file"),
        ("pictures/banana.png", ("CONFIG-ENCODING",), "a TOML, JSON or YAML file"),
        (
            str(get_pico_folder() / "vae/diffusion_pytorch_model.safetensors"),
            ("CONFIG-ENCODING",),
            "a TOML, JSON or YAML file",
        ),
        ("utf16.toml", ("CONFIG-ENCODING",), "as UTF-8"),
        ("latin.toml", ("CONFIG-ENCODING",), "as UTF-8"),
        ("empty.toml", ("CONFIG-INVALID", "CONFIG-UNRECOGNISED"), ""),
        ("empty.json", ("CONFIG-UNRECOGNISED",), "--init"),
        ("other.yaml", ("CONFIG-UNRECOGNISED",), "--init"),
        ("tabs.yaml", ("CONFIG-SYNTAX",), "spaces"),
        ("half.json", ("CONFIG-SYNTAX",), "line"),
        ("quotes.toml", ("CONFIG-SYNTAX",), "single quotes"),
        ("twice.toml", ("CONFIG-SYNTAX",), "Leave one"),
        ("key.toml", ("CONFIG-INVALID", "CONFIG-UNRECOGNISED"), ""),
        ("data.toml", ("CONFIG-INVALID",), ""),
    ],
)
def test_what_is_no_configuration_is_called_what_it_is(
    scene: Scene, by: str, name: str, codes: tuple[str, ...], says: str
):
    if name in CONTENTS:
        scene.put(name, CONTENTS[name])
    told = ask(*([] if by == "plain" else [by]), name)
    code = codes[by == "--from" and len(codes) > 1]
    finding = told.of(code)
    assert told.errors == [code]
    assert name[:100] in finding["subject"]
    assert says in finding["remedy"]
    assert told.exit_code in (1, 2)
    assert READ == [] and not scene.run.exists()


def test_all_faults_are_told_at_once_each_with_its_remedy(scene: Scene):
    told = scene.train(network={"network_dims": 4}, training={"max_train_steps": "many"}, general={"resolution": 0.5})
    faults = told.of("CONFIG-INVALID")["evidence"]["faults"]
    assert [fault["key"] for fault in faults] == [
        "network.network_dims",
        "training.max_train_steps",
        "general.resolution",
    ]
    assert all(fault["line"] and (fault["remedy"] or "Did you mean" in fault["message"]) for fault in faults)


def test_one_configuration_and_one_only(scene: Scene):
    config = scene.write()
    for words in ([], [config, "--from", config]):
        told = ask(*words)
        assert (told.exit_code, told.errors) == (2, ["CONFIG-NOT-NAMED"])
        assert "--init" in told.of("CONFIG-NOT-NAMED")["remedy"]
    assert ask("--from", "").errors == ["CONFIG-NO-FILE"]
    assert ask("--from").errors == ["OPTION-MISSING"]
    assert READ == []


def test_ours_is_taken_by_from_too_with_the_paths_beside_it(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    config = scene.write(**scene.subset(image_dir="pictures"))
    (scene.folder / "elsewhere").mkdir()
    monkeypatch.chdir(scene.folder / "elsewhere")
    for words in ([config], ["--from", config]):
        told = ask(*words, "--explain")
        assert told.exit_code == 0
        assert told.figures["pictures"] == 3
    assert told.figures["program"].startswith("finitune")


def test_a_yaml_of_another_program_is_known_without_from(scene: Scene):
    scene.put("moss.yaml", AI_TOOLKIT)
    told = ask("moss.yaml")
    assert "ai-toolkit" in told.figures["program"]
    assert len(told.figures["keys"]) > 40
    assert told.errors == ["DEVICE-NOT-THERE"]  # cuda:1, as the file wants it


def test_init_writes_over_nothing(scene: Scene):
    config = scene.put("train.toml", "mine")
    for words in (["--out", config], [], ["--out", scene.pictures]):
        told = ask("--init", *words)
        assert (told.exit_code, told.errors) == (2, ["OUT-EXISTS"])
    assert config.read_text() == "mine"
    assert ask("--init", "--out", config / "x.toml").errors == ["FILE-NOT-WRITTEN"]
    assert ask("--init", "--out", scene.folder / "new.toml").exit_code == 0
    assert ask(scene.folder / "new.toml", "--explain").errors == []


def test_init_does_not_pass_over_a_configuration(scene: Scene):
    told = ask(scene.write(), "--init", "--out", "new.toml")
    assert (told.exit_code, told.errors) == (2, ["CONFIG-NOT-NAMED"])
    assert not Path("new.toml").exists()


# --- network_args, as shells and forms leave them --------------------------------------------------------------------


def kohya(scene: Scene, arguments: str) -> Path:
    """A TOML of sd-scripts with these network_args."""
    return scene.put(
        "kohya.toml",
        f"""
        pretrained_model_name_or_path = "pico-anima"
        network_module = "networks.lora_anima"
        network_dim = 2
        network_alpha = 2
        network_train_unet_only = true
        optimizer_type = "AdamW"
        output_dir = "run"
        max_train_steps = 2
        network_args = {arguments}
        [[datasets]]
        resolution = 64
          [[datasets.subsets]]
          image_dir = "pictures"
        """,
    )


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ('["rank_dropout"]', "ARGUMENT-NO-VALUE", "rank_dropout=VALUE"),
        ('["rank_dropout="]', "ARGUMENT-NO-VALUE", "name=value"),
        ('["rank_dropout=0.1=0.2"]', "ARGUMENT-VALUE", "name=value"),
        ('["rank_dropout=(0.1"]', "ARGUMENT-VALUE", "name=value"),
        ('["rank_dropout=0.1", "rank_dropout=0.2"]', "ARGUMENT-TWICE", "Leave one"),
        ('["--rank-dropout=0.1"]', "ARGUMENT-NAME", "rank_dropout=0.1"),
        ("[0.1]", "ARGUMENT-NO-TEXT", "name=value"),
        ('["rank_dropout", "a=b=c"]', "ARGUMENTS-INVALID", "rank_dropout=VALUE"),
    ],
)
def test_broken_network_args_are_refused_with_the_account(scene: Scene, arguments: str, code: str, says: str):
    told = ask("--from", kohya(scene, arguments))
    finding = told.of(code)
    assert told.exit_code == 1
    assert "network_args" in finding["subject"] and says in finding["remedy"]
    assert {"key", "value", "fate", "ours", "note"} == told.figures["keys"][0].keys()
    assert READ == [] and not scene.run.exists()


@pytest.mark.parametrize("value", ["much", "1e400", "-1"])
def test_values_that_do_not_fit_are_told_in_our_terms_with_the_account(scene: Scene, value: str):
    told = ask("--from", kohya(scene, f'["rank_dropout={value}"]'))
    assert told.exit_code == 2
    assert "network.rank_dropout" in told.of("CONFIG-INVALID")["message"]
    assert {"network_args.rank_dropout": "network.rank_dropout"}.items() <= {
        line["key"]: line["ours"] for line in told.figures["keys"]
    }.items()
    assert READ == [] and not scene.run.exists()


@pytest.mark.parametrize(
    ("arguments", "code", "value"),
    [
        ('["rank_dropout=0.1,"]', "ARGUMENT-TRAILING-COMMA", 0.1),
        ('["rank_dropout=(0.1", ")"]', "ARGUMENT-JOINED", 0.1),
        ("\"rank_dropout=0.1 train_llm_adapter=false\"", None, 0.1),
        ('["", "rank_dropout=0.1"]', "ARGUMENT-EMPTY", 0.1),
        ("[\"'rank_dropout=0.1'\"]", "ARGUMENT-QUOTED-TWICE", 0.1),
        ('["rank_dropout = 0.1"]', None, 0.1),
        ('["rank_dropout=0.1 module_dropout=0.1"]', "ARGUMENT-SPLIT", 0.1),
        ('["conv_dim=8", "algo=lokr", "factor=-1", "rank_dropout=0.1"]', None, 0.1),
        ('["rank_dropuot=0.1"]', "CONFIG-UNKNOWN-KEY", 0.0),
    ],
)  # fmt: skip
def test_network_args_that_can_be_meant_one_way_are_taken(scene: Scene, arguments: str, code: str | None, value: float):
    told = ask("--from", kohya(scene, arguments), "--dry-run")
    assert told.exit_code == 0, told.findings
    if code:
        assert told.of(code)["level"] in ("note", "warning")
    config = (scene.run / "config.toml").read_text(encoding="utf-8")
    assert f"rank_dropout = {value}" in config
