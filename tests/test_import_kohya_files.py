"""kohya's command lines, dataset TOML, and N_name folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from finitune.config.imported_config import ImportedConfig, KeyStatus
from finitune.config.read import validate_config
from finitune.config.toml_text import format_key_path, read_toml
from finitune.errors import UsageError
from finitune.importers.kohya import import_kohya, import_kohya_flags
from finitune.importers.kohya_datasets import import_kohya_dataset
from finitune.importers.kohya_folders import scan_kohya_folder
from finitune.importers.mapping import iterate_config_leaves
from finitune.report import Level
from tests.test_import_kohya import BASE, SHARED, codes, config_of, line, ours

BASH = r"""CUDA_VISIBLE_DEVICES=0 accelerate launch --num_cpu_threads_per_process 1 --mixed_precision bf16 \
  anima_train_network.py --pretrained_model_name_or_path "models/my anima.safetensors" \
  --output_dir=out --network_module networks.lora_anima \
  --network_args "exclude_patterns=['.*mlp.*']" "rank_dropout=0.1" \
  --network_train_unet_only --learning_rate 1e-4 --max_train_epochs 5 --resolution 1024,1024"""
CMD = BASH.replace("CUDA_VISIBLE_DEVICES=0 ", "").replace("\\\n", "^\n")
POWERSHELL = CMD.replace("^\n", "`\n")


@pytest.mark.parametrize("command", [BASH, CMD, POWERSHELL])
def test_a_command_line_of_any_shell(command: str):
    account = import_kohya_flags(command)
    config = config_of(account)
    assert config.model.pretrained_model_name_or_path == "models/my anima.safetensors"
    assert config.network.exclude_patterns == (".*mlp.*",)
    assert config.network.rank_dropout == 0.1
    assert not config.network.train_text_encoder
    assert config.general.resolution == (1024, 1024)
    assert (config.optimizer.learning_rate, config.training.max_train_epochs) == (1e-4, 5)
    assert line(account, "script").fate is KeyStatus.TAKEN
    assert line(account, "launcher --num_cpu_threads_per_process").note.startswith("not needed here")
    assert line(account, "launcher accelerate").fate is KeyStatus.TAKEN
    assert line(account, "--learning_rate").fate is KeyStatus.TAKEN


def test_windows_paths_keep_their_backslashes():
    account = import_kohya_flags(r'anima_train_network.py --output_dir "C:\new train\out" --qwen3 D:\q.safetensors')
    assert ours(account, "saving.output_dir") == r"C:\new train\out"
    assert ours(account, "model.qwen3") == r"D:\q.safetensors"


def test_an_unclosed_quote_is_a_usage_error():
    with pytest.raises(UsageError) as raised:
        import_kohya_flags('anima_train_network.py --output_dir "out')
    assert raised.value.code == "CONFIG-FLAGS"
    assert raised.value.remedy


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("sdxl_train_network.py", "CONFIG-OTHER-FAMILY"),
        ("scripts/flux_train_network.py", "CONFIG-OTHER-FAMILY"),
        ("train_network.py", "CONFIG-OTHER-FAMILY"),
        ("anima_train.py", "CONFIG-WHOLE-MODEL"),
    ],
)
def test_another_script_is_said(script: str, code: str):
    assert code in codes(import_kohya_flags(f"python {script} --output_dir o"))


def test_the_command_line_stands_over_its_file(tmp_path: Path):
    file = tmp_path / "train.toml"
    file.write_text("[a]\nnetwork_dim = 8\nseed = 3\n", encoding="utf-8")
    account = import_kohya_flags(f"anima_train_network.py --network_dim 32 --config_file {tmp_path / 'train'}")
    assert ours(account, "network.network_dim") == 32
    assert ours(account, "training.seed") == 3
    assert line(account, "a.network_dim").fate is KeyStatus.NO_EFFECT
    assert "CONFIG-KEY-TWICE" not in codes(account)
    with pytest.raises(UsageError) as raised:
        import_kohya_flags("anima_train_network.py --config_file nowhere.toml")
    assert raised.value.code == "CONFIG-NO-FILE"


def test_dataset_config_is_read_and_merged(tmp_path: Path):
    data = tmp_path / "data.toml"
    data.write_text(
        "[general]\nshuffle_caption = true\n[[datasets]]\nresolution = '512,768'\nbatch_size = '2'\n"
        "[[datasets.subsets]]\nimage_dir = 'img'\nnum_repeats = 3\n",
        encoding="utf-8",
    )
    keys = {
        **BASE,
        "dataset_config": "data.toml",
        "enable_bucket": True,
        "shuffle_caption": False,
        "train_data_dir": "x",
    }
    account = import_kohya(keys, tmp_path / "train.toml")
    config = config_of(account)
    assert config.general.enable_bucket
    assert config.general.shuffle_caption
    assert config.datasets[0].resolution == (512, 768)
    assert config.datasets[0].batch_size == 2
    assert config.datasets[0].subsets[0].num_repeats == 3
    assert line(account, "data.toml: datasets[0].subsets[0].image_dir").ours == "datasets[0].subsets[0].image_dir"
    assert line(account, "train_data_dir").fate is KeyStatus.NO_EFFECT
    without = import_kohya({**BASE, "dataset_config": "other.toml"}, tmp_path / "train.toml")
    (finding,) = (one for one in without.findings if one.code == "CONFIG-NO-DATASETS")
    assert finding.level is Level.ERROR and finding.remedy and len(without.lines) >= len(BASE)


def test_datasets_in_the_same_file():
    document = {
        **BASE,
        "general": {"keep_tokens": 1},
        "datasets": [{"subsets": [{"image_dir": "a", "alpha_mask": True}]}],
    }
    config = config_of(import_kohya(document, Path("t.toml")))
    assert config.general.keep_tokens == 1
    assert config.objective.masked_loss


def paths_of(document: Mapping[str, Any]) -> list[str]:
    return [format_key_path(path) for path, _, _ in iterate_config_leaves(document)]


@pytest.mark.parametrize("name", ["dataset", "dataset-finetune", "dataset-masked_loss", "dataset-multires"])
def test_real_dataset_files(name: str):
    file = SHARED / "data" / "configs" / "kohya" / f"{name}.toml"
    if not file.exists():
        pytest.skip("the files are not here")
    document = read_toml(file).document
    account = import_kohya_dataset(document, file)
    assert [line.key for line in account.lines] == paths_of(document)
    assert {line.fate for line in account.lines} == {KeyStatus.TAKEN}
    model = {"model": {"pretrained_model_name_or_path": "x"}, "saving": {"output_dir": "o"}}
    config, _ = validate_config({**model, **account.document})
    assert len(config.datasets) == len(document["datasets"])
    assert not config.general.enable_bucket


@pytest.mark.parametrize(
    ("document", "key", "said"),
    [
        (
            {"datasets": [{"subsets": [{"image_dir": "a", "batch_size": 2}]}]},
            "datasets[0].subsets[0].batch_size",
            "belongs",
        ),
        ({"datasets": [{"image_dir": "a"}]}, "datasets[0].image_dir", "[[datasets.subsets]]"),
        ({"dataset": [{"batch_size": 2}]}, "dataset[0].batch_size", "no such table"),
        ({"datasets": [{"subsets": [{"num_repeat": 2}]}]}, "datasets[0].subsets[0].num_repeat", "'num_repeats'"),
    ],
)
def test_unknown_and_misplaced_options_of_datasets(document: dict[str, Any], key: str, said: str):
    account = import_kohya_dataset(document, Path("d.toml"))
    assert line(account, key).fate is KeyStatus.UNSUPPORTED
    assert said in line(account, key).note
    assert codes(account).count("CONFIG-UNKNOWN-KEY") == 1


def test_options_of_datasets_with_a_form_of_their_own():
    options = {"bucket_reso_steps": 8, "face_crop_aug_range": [2.0, 4.0], "custom_attributes": {"a": {"b": 1}}}
    document = {"datasets": [{"resolution": "768", "subsets": [{"image_dir": "3_cat"}]}], "general": options}
    account = import_kohya_dataset(document, Path("d.toml"))
    assert account.document["datasets"] == [{"resolution": 768, "subsets": [{"image_dir": "3_cat"}]}]
    assert account.document["general"] == {"bucket_reso_steps": 16, "enable_bucket": False}
    assert line(account, "general.face_crop_aug_range").fate is KeyStatus.UNSUPPORTED
    assert line(account, "general.custom_attributes.a.b").fate is KeyStatus.NO_EFFECT
    assert "DATASET-REPEATS" in codes(account)


def filled(folder: Path, *pictures: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in pictures:
        (folder / name).touch()
    return folder


def found(folder: Path, **options: Any) -> tuple[list[dict[str, Any]], list[str]]:
    part, findings = scan_kohya_folder(folder, {}, **options)
    return [subset for dataset in part["datasets"] for subset in dataset["subsets"]], [f.code for f in findings]


def test_numbered_folders_are_subsets(tmp_path: Path):
    filled(tmp_path / "10_sks girl", "a.png")
    filled(tmp_path / "2_land_scape", "b.JPG")
    part, findings = scan_kohya_folder(tmp_path, {"resolution": 512})
    assert findings == []
    assert part["datasets"][0]["resolution"] == 512
    assert part["datasets"][0]["subsets"] == [
        {"image_dir": str(tmp_path / "10_sks girl"), "num_repeats": 10, "class_tokens": "sks girl"},
        {"image_dir": str(tmp_path / "2_land_scape"), "num_repeats": 2, "class_tokens": "land_scape"},
    ]
    assert all(subset["is_reg"] for subset in found(tmp_path, is_reg=True)[0])


@pytest.mark.parametrize(
    ("name", "code", "subsets"),
    [
        ("CROP_old", "DATASET-FOLDER-IGNORED", 1),
        ("sks", "DATASET-FOLDER-IGNORED", 1),
        ("0_x", "DATASET-FOLDER-IGNORED", 1),
        ("-3_x", "DATASET-FOLDER-IGNORED", 1),
        ("10_", "DATASET-FOLDER-NAMELESS", 2),
        ("10", "DATASET-FOLDER-NAMELESS", 2),
        ("2024_trip", "DATASET-FOLDER-REPEATS", 2),
    ],
)
def test_odd_names_are_said(tmp_path: Path, name: str, code: str, subsets: int):
    filled(tmp_path / "1_good", "a.png")
    filled(tmp_path / name, "a.png")
    part, said = found(tmp_path)
    assert said == [code]
    assert len(part) == subsets


def test_nested_and_empty_folders_are_said(tmp_path: Path):
    filled(tmp_path / "10_a" / "10_b", "a.png")
    filled(tmp_path / "5_empty")
    subsets, said = found(tmp_path)
    assert [Path(subset["image_dir"]).name for subset in subsets] == ["5_empty"]
    assert said == ["DATASET-FOLDER-NESTED", "DATASET-FOLDER-EMPTY", "DATASET-FOLDER-EMPTY"]


def test_the_wrong_level_is_an_error_with_the_right_path(tmp_path: Path):
    inner = filled(tmp_path / "img" / "10_sks", "a.png")
    part, findings = scan_kohya_folder(inner, {})
    (finding,) = findings
    assert finding.code == "DATASET-FOLDER-LEVEL"
    assert f"'{tmp_path / 'img'}'" in finding.remedy
    assert part["datasets"][0]["subsets"][0]["num_repeats"] == 10


def test_a_plain_or_missing_folder_is_an_error(tmp_path: Path):
    plain = filled(tmp_path / "pictures", "a.png", "b.png")
    part, findings = scan_kohya_folder(plain, {})
    assert part["datasets"] == []
    assert findings[0].code == "DATASET-FOLDER-LEVEL"
    assert "2 pictures" in findings[0].message
    assert "10_pictures" in findings[0].remedy
    assert found(tmp_path / "nowhere") == ([], ["DATASET-FOLDER-MISSING"])
    assert found(plain / "a.png")[1] == ["DATASET-FOLDER-MISSING"]


def test_links_that_lead_back_end(tmp_path: Path):
    filled(tmp_path / "1_a", "a.png")
    try:
        (tmp_path / "2_loop").symlink_to(tmp_path)
        (tmp_path / "3_self").symlink_to(tmp_path / "3_self")
    except OSError:
        pytest.skip("links cannot be made here")
    subsets, said = found(tmp_path)
    assert len(subsets) == 1
    assert said == ["DATASET-FOLDER-LOOP"]


def test_folders_of_a_training(tmp_path: Path):
    filled(tmp_path / "img" / "10_a", "a.png")
    filled(tmp_path / "reg" / "1_b", "b.png")
    folders = {"train_data_dir": str(tmp_path / "img"), "reg_data_dir": str(tmp_path / "reg")}
    account: ImportedConfig = import_kohya({**BASE, **folders, "resolution": "512,512"}, Path("t.toml"))
    config = config_of(account)
    assert [subset.is_reg for subset in config.datasets[0].subsets] == [False, True]
    assert config.general.resolution == (512, 512)
    beside = import_kohya({**BASE, "train_data_dir": "img"}, tmp_path / "t.toml")
    assert len(config_of(beside).datasets[0].subsets) == 1
    listed = import_kohya({**BASE, "in_json": "m.json", "train_data_dir": "img", "dataset_repeats": 4}, Path("t.toml"))
    subset = {"metadata_file": "m.json", "image_dir": "img", "num_repeats": 4}
    assert listed.document["datasets"] == [{"subsets": [subset]}]
