"""Headers and texts from the field (FIL-09): what may be odd, what is kept, and what is refused with its place."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from finitune.files.tensorfile import TensorFile
from finitune.namings.read import read_adapter
from tests.adapter_files import lora, noise
from tests.case_files import by_code, only, saved, told

MODULE = "lora_unet_blocks_0_self_attn_q_proj"
DOWN, UP = "lora_down.weight", "lora_up.weight"
DATA = noise(64).numpy().tobytes()
ABSENT = object()


def header(metadata: object = ABSENT, dtype: str = "F32") -> bytes:
    table = {} if metadata is ABSENT else {"__metadata__": metadata}
    table[f"{MODULE}.{DOWN}"] = {"dtype": dtype, "shape": [4, 8], "data_offsets": [0, 128]}
    table[f"{MODULE}.{UP}"] = {"dtype": "F32", "shape": [8, 4], "data_offsets": [128, 256]}
    return json.dumps(table, ensure_ascii=False).encode()


def raw(path: Path, text: bytes) -> Path:
    path.write_bytes(struct.pack("<Q", len(text)) + text + DATA)
    return path


TAGS = json.dumps({"猫": {f"tag {n}": n for n in range(15_000)}}, ensure_ascii=False)
GOOD = {
    "absent": (header(), {}),
    "empty": (header({}), {}),
    "long tags": (header({"ss_tag_frequency": TAGS}), {"ss_tag_frequency": TAGS}),
    "not ASCII": (header({"modelspec.title": "猫 é ☃ 🐈"}), {"modelspec.title": "猫 é ☃ 🐈"}),
    "padded": (header() + b" " * 37, {}),
    "odd length": (header() + b" " * ((1 - len(header())) % 2), {}),
}


@pytest.mark.parametrize("case", GOOD)
def test_fil_09_all_of_the_metadata_is_optional_and_kept(tmp_path: Path, case: str):
    text, metadata = GOOD[case]
    assert case != "odd length" or len(text) % 2
    path, out = raw(tmp_path / "a.safetensors", text), tmp_path / "b.safetensors"
    code, report = told("check", path)
    assert code == 0 and (report["figures"]["matched"], report["figures"]["metadata_keys"]) == (2, len(metadata))
    assert told("convert", path, "--to", "kohya", "-o", out)[0] == 0
    kept = TensorFile(out)
    assert metadata.items() <= kept.metadata.items()
    assert kept.read(f"{MODULE}.{DOWN}").numpy().tobytes() == DATA[:128]


def doubled() -> bytes:
    up = f'"{MODULE}.{UP}":'.encode()
    entry = header().partition(up)[2]
    return header()[:-1] + b"," + up + entry


REFUSED = {
    "an int": (header({"a": 1}), "FILE-HEADER", "metadata"),
    "a table": (header({"a": {"b": "c"}}), "FILE-HEADER", "metadata"),
    "a tensor twice": (doubled().replace(b'": {', b'":{'), "FILE-HEADER", f"'{MODULE}.{UP}' comes twice"),
    "a text twice": (b'{"__metadata__":{"a":"1","a":"2"},' + header()[1:], "FILE-HEADER", "'a' comes twice"),
    "F8_E8M0": (header(dtype="F8_E8M0"), "FILE-HEADER", f"'{MODULE}.{DOWN}' has the unknown dtype 'F8_E8M0'"),
    "Q4_0": (header(dtype="Q4_0"), "FILE-HEADER", f"'{MODULE}.{DOWN}' has the unknown dtype 'Q4_0'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_fil_09_what_no_header_may_hold_is_refused_with_its_place(tmp_path: Path, case: str):
    text, code, words = REFUSED[case]
    said = only(raw(tmp_path / "a.safetensors", text))
    assert said["code"] == code and words in said["message"]


def test_fil_09_metadata_that_is_null_is_none(tmp_path: Path):
    path = raw(tmp_path / "a.safetensors", header(None))
    assert TensorFile(path).metadata == {}


@pytest.mark.parametrize("value", [1, {"b": "c"}, None])
def test_fil_09_the_text_that_is_none_is_named(tmp_path: Path, value: object):
    said = only(raw(tmp_path / "a.safetensors", header({"good": "text", "ss_epoch": value})))
    assert "'ss_epoch'" in said["message"]


@pytest.mark.parametrize("lead", [b" ", b"\n", b"\xef\xbb\xbf"])
def test_fil_09_what_stands_before_a_header_is_told_or_forgiven(tmp_path: Path, lead: bytes):
    path = raw(tmp_path / "a.safetensors", lead + header())
    if lead.isspace():
        assert TensorFile(path).shapes[f"{MODULE}.{DOWN}"] == (4, 8)
    else:
        said = only(path)
        assert said["code"] == "FILE-HEADER" and "byte order mark" in said["message"]


def test_fil_09_a_dtype_of_the_format_that_we_do_not_know_is_no_damage(tmp_path: Path):
    said = only(raw(tmp_path / "a.safetensors", header(dtype="F8_E8M0")))
    assert "damaged" not in said["remedy"]


ODD = {"ss_network_dim": "None", "ss_network_alpha": "sixteen", "ss_network_args": "{broken", "ss_epoch": "7"}


def test_fil_09_odd_texts_of_a_trainer_stop_nothing(tmp_path: Path):
    path, out = raw(tmp_path / "a.safetensors", header(ODD)), tmp_path / "b.safetensors"
    assert told("check", path)[0] == 0
    assert told("convert", path, "--to", "kohya", "-o", out)[0] == 0
    kept = TensorFile(out).metadata
    assert (kept["ss_network_args"], kept["ss_epoch"]) == ("{broken", "7")
    assert (kept["ss_network_dim"], kept["ss_network_alpha"]) == ("4", "4")


def test_fil_09_odd_texts_of_a_trainer_are_told(tmp_path: Path):
    _, report = told("check", raw(tmp_path / "a.safetensors", header(ODD)))
    said = {finding["subject"] for finding in report["findings"] if finding["code"] == "METADATA-UNREADABLE"}
    assert {"ss_network_alpha", "ss_network_args"} <= said


def test_fil_09_hashes_are_of_the_tensors_that_are_there(tmp_path: Path):
    stale = {"sshs_model_hash": "0" * 64, "sshs_legacy_hash": "0" * 8}
    path, out = saved(tmp_path / "a.safetensors", lora(MODULE), stale), tmp_path / "b.safetensors"
    assert "METADATA-STALE-HASH" in by_code(told("check", path)[1])
    assert told("convert", path, "--to", "kohya", "-o", out)[0] == 0
    assert "METADATA-STALE-HASH" not in by_code(told("check", out)[1])
    assert TensorFile(out).metadata["sshs_model_hash"] != "0" * 64
    assert list(read_adapter(TensorFile(out)).adapter) == ["transformer.transformer_blocks.0.attn1.to_q"]
