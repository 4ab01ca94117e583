"""Files from the field (FIL-01 to FIL-07): each report's own bytes, and what is said of them."""

from __future__ import annotations

import json
import math
import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from finitune.report import Finding, Report
from finitune.verbs import check, merge
from tests.adapter_files import noise
from tests.case_files import by_code, only, saved, scaled, told

MODULE = "lora_unet_blocks_0_self_attn_q_proj"


# --- FIL-01: git-LFS pointers ----------------------------------------------------------------------------------------

OID = "4c4c" * 16
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{OID}\nsize 151108832\n"


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("name", ["a.safetensors", "a.ckpt"])
def test_fil_01_a_pointer_is_called_one_by_every_verb(tmp_path: Path, name: str, ends: str):
    path = tmp_path / name
    path.write_bytes(POINTER.replace("\n", ends).encode())
    said = only(path)
    assert said["code"] == "FILE-LFS-POINTER" and said["evidence"]["promised_bytes"] == 151108832
    assert "git lfs pull" in said["remedy"]
    for words in (("convert", path, "--to", "comfy", "-o", tmp_path / "out"), ("resize", path, "--rank", 2)):
        code, report = told(*words)
        assert code == 1 and list(by_code(report)) == ["FILE-LFS-POINTER"]
    report = merge.run(merge.Request(model=str(path), adapters=("b.safetensors",), out=tmp_path / "o.safetensors"))
    assert [finding.code for finding in report.findings] == ["FILE-LFS-POINTER"]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_fil_01_the_real_size_and_checksum_are_told(tmp_path: Path, ends: str):
    path = tmp_path / "a.safetensors"
    path.write_bytes(POINTER.replace("\n", ends).encode())
    said = only(path)
    assert "151108832" in said["message"] and OID in json.dumps(said["evidence"])


# --- FIL-03: cut off -------------------------------------------------------------------------------------------------


def whole(path: Path) -> bytes:
    """The repro: two (64, 64) tensors in fp32, 'a' then 'b'."""
    save_file({"a": noise(64, 64), "b": noise(64, 64, seed=1)}, path)
    return path.read_bytes()


def header_end(content: bytes) -> int:
    return 8 + struct.unpack("<Q", content[:8])[0]


CUTS = {"the last byte": -1, "half of the data": -16384, "within b": -5000, "within the first tensor": -20000}


@pytest.mark.parametrize("cut", CUTS)
def test_fil_03_a_cut_tells_both_sizes_and_nothing_is_read(tmp_path: Path, cut: str):
    path = tmp_path / "x.safetensors"
    content = whole(path)
    path.write_bytes(content[: CUTS[cut]])
    said = only(path)
    assert said["code"] == "FILE-TRUNCATED"
    assert said["evidence"]["size_bytes"] == len(content) + CUTS[cut]
    assert said["evidence"]["expected_bytes"] == len(content) == header_end(content) + 2 * 64 * 64 * 4
    assert f"{len(content) + CUTS[cut]} of {len(content)} bytes" in said["message"]


@pytest.mark.parametrize("cut", CUTS)
def test_fil_03_a_cut_tells_the_share_and_the_first_tensor(tmp_path: Path, cut: str):
    path = tmp_path / "x.safetensors"
    content = whole(path)
    path.write_bytes(content[: CUTS[cut]])
    said = only(path)
    assert f"{100 * (len(content) + CUTS[cut]) // len(content)}" in said["message"] and "%" in said["message"]
    first = "a" if CUTS[cut] < -16384 else "b"
    assert f"'{first}'" in said["message"] and first in said["evidence"].values()


@pytest.mark.parametrize("size", [3, 9, 72])
def test_fil_03_a_cut_before_the_data(tmp_path: Path, size: int):
    """Within the length field, and within the header, whose end is known by then."""
    path = tmp_path / "x.safetensors"
    content = whole(path)
    path.write_bytes(content[:size])
    said = only(path)
    assert said["code"] == "FILE-TRUNCATED" and said["evidence"]["size_bytes"] == size
    if size > 8:
        assert said["evidence"]["expected_bytes"] == header_end(content)
        assert f"{size} of {header_end(content)} bytes" in said["message"]


def test_fil_03_a_cut_at_byte_8_knows_how_long_the_header_is(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    content = whole(path)
    path.write_bytes(content[:8])
    said = only(path)
    assert said["code"] == "FILE-TRUNCATED" and said["evidence"]["expected_bytes"] == header_end(content)


# --- FIL-04: other containers ----------------------------------------------------------------------------------------


class Trap:
    """What a pickle may do: run a program when it is opened."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('unpickled')",))


def test_fil_04_what_a_file_is_is_told_by_its_bytes(tmp_path: Path):
    torch.save({"w": torch.ones(2)}, tmp_path / "x")
    (tmp_path / "x").rename(tmp_path / "a.safetensors")
    torch.save({"w": torch.ones(2)}, tmp_path / "x", _use_new_zipfile_serialization=False)
    (tmp_path / "x").rename(tmp_path / "b.safetensors")
    with zipfile.ZipFile(tmp_path / "d.ckpt", "w") as archive:
        archive.writestr("1.png", b"\x89PNG\r\n\x1a\n")
    (tmp_path / "e.safetensors").write_bytes(b"GGUF" + bytes(60))
    wanted = {"a.safetensors": "PICKLE", "b.safetensors": "PICKLE", "d.ckpt": "ARCHIVE", "e.safetensors": "GGUF"}
    words = {"PICKLE": "is a pickle", "ARCHIVE": "is a zip archive", "GGUF": "is a GGUF file"}
    for name, kind in wanted.items():
        said = only(tmp_path / name)
        assert said["code"] == f"FILE-{kind}" and f"{words[kind]}" in said["message"]
        assert "not a safetensors file" in said["message"]


@pytest.mark.parametrize("zipped", [True, False])
def test_fil_04_no_pickle_is_opened_to_find_out(tmp_path: Path, zipped: bool):
    path = tmp_path / "a.safetensors"
    if zipped:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(Trap()))
    else:
        path.write_bytes(pickle.dumps(Trap(), protocol=2))
    assert only(path)["code"] == "FILE-PICKLE"
    assert told("convert", path, "--to", "comfy", "-o", tmp_path / "o")[0] == 1


def test_fil_04_a_safetensors_file_of_any_name_is_read(tmp_path: Path):
    path = tmp_path / "c.ckpt"
    content = whole(path)
    code, report = told("check", path)
    assert code == 0 and report["figures"]["tensors"] == 2 and path.read_bytes() == content


def test_fil_04_a_misleading_name_is_told(tmp_path: Path):
    whole(tmp_path / "c.ckpt")
    _, report = told("check", tmp_path / "c.ckpt")
    assert any("ckpt" in finding["message"] and "safetensors" in finding["message"] for finding in report["findings"])


def test_fil_04_the_recipe_never_writes_onto_its_source(tmp_path: Path):
    torch.save({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    assert only(tmp_path / "a.safetensors")["remedy"].count("'a.safetensors'") == 1


# --- FIL-05: too long ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [b"abc", bytes(2**20)])
def test_fil_05_bytes_behind_the_last_tensor_are_no_truncation(tmp_path: Path, more: bytes):
    path = tmp_path / "x.safetensors"
    content = whole(path)
    path.write_bytes(content + more)
    said = only(path)
    assert said["code"] == "FILE-TRAILING-BYTES" and f"{len(more)} bytes behind" in said["message"]
    assert said["evidence"] == {"size_bytes": len(content) + len(more), "expected_bytes": len(content)}


def test_fil_05_a_clean_copy_is_offered(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    content = whole(path)
    path.write_bytes(content + b"abc")
    assert str(len(content)) in only(path)["remedy"]


@pytest.mark.parametrize("claimed", [132095296, 2**63])
@pytest.mark.parametrize("rest", [b"{}", b'{"', b"\0\0"])
def test_fil_05_a_claimed_length_is_not_believed(tmp_path: Path, claimed: int, rest: bytes):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", claimed) + rest)
    check.run(check.Request(paths=(path,)))  # what it imports is not counted
    tracemalloc.start()
    report = check.run(check.Request(paths=(path,)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    (said,) = report.findings
    assert report.exit_code == 1 and peak < 2**20 and said.remedy
    if rest.startswith(b"{"):
        assert said.code == "FILE-HEADER-TOO-LONG" and str(claimed) in said.message
        assert said.evidence == {"header_bytes": claimed, "limit_bytes": 100_000_000, "size_bytes": 10}


def test_fil_05_a_long_header_that_is_there_is_not_called_damaged(tmp_path: Path):
    """A sparse file: 132095296 bytes of header are there, and no reader takes more than 100 MB."""
    path = tmp_path / "x.safetensors"
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", 132095296) + b"{")
        stream.truncate(8 + 132095296)
    said = only(path)
    assert said["code"] == "FILE-HEADER-TOO-LONG" and "damaged" not in said["remedy"]


# --- FIL-07: numbers that are none -----------------------------------------------------------------------------------


def eight_bits(code: int, dtype: torch.dtype) -> torch.Tensor:
    raw = noise(4, 8).to(dtype).view(torch.uint8)
    raw[1, 2] = code
    return raw.view(dtype)


def with_one(role: str, place: tuple[int, int], value: float) -> dict[str, torch.Tensor]:
    tensors = scaled(MODULE, 8, 8, 4, alpha=2.0)
    tensors[f"{MODULE}.{role}"][place] = value
    return tensors


DOWN, UP = "lora_down.weight", "lora_up.weight"
PLAIN = scaled(MODULE, 8, 8, 4, alpha=2.0)
BROKEN = {
    "one NaN": (with_one(DOWN, (2, 5), math.nan), DOWN, 1, 0, [2, 5]),
    "one -inf": (with_one(UP, (3, 1), -math.inf), UP, 0, 1, [3, 1]),
    "e4m3 7F": (PLAIN | {f"{MODULE}.{DOWN}": eight_bits(0x7F, torch.float8_e4m3fn)}, DOWN, 1, 0, [1, 2]),
    "e4m3 FF": (PLAIN | {f"{MODULE}.{DOWN}": eight_bits(0xFF, torch.float8_e4m3fn)}, DOWN, 1, 0, [1, 2]),
    "e5m2 7C": (PLAIN | {f"{MODULE}.{DOWN}": eight_bits(0x7C, torch.float8_e5m2)}, DOWN, 0, 1, [1, 2]),
    "e5m2 7D": (PLAIN | {f"{MODULE}.{DOWN}": eight_bits(0x7D, torch.float8_e5m2)}, DOWN, 1, 0, [1, 2]),
    "all NaN": (PLAIN | {f"{MODULE}.{UP}": torch.full((8, 4), math.nan)}, UP, 32, 0, [0, 0]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_fil_07_what_is_no_number_is_counted_and_placed(tmp_path: Path, case: str):
    tensors, role, nan, inf, first = BROKEN[case]
    source, out = saved(tmp_path / "a.safetensors", tensors), tmp_path / "out"
    for words in (("check", source), ("convert", source, "--to", "comfy", "-o", out, "--allow-unmatched")):
        code, report = told(*words)
        said = by_code(report)["ADAPTER-NONFINITE"]
        assert code == 1 and said["subject"] == f"{MODULE}.{role}"
        wanted = {"nan": nan, "inf": inf, "size": 32, "first": first, "all": nan == 32}
        assert wanted.items() <= said["evidence"].items()
    assert not out.exists()


def test_fil_07_an_alpha_that_is_none(tmp_path: Path):
    code, report = told("check", saved(tmp_path / "a.safetensors", scaled(MODULE, 8, 8, 4, alpha=math.nan)))
    said = by_code(report)
    assert code == 1 and report["figures"]["matched"] == 0
    assert said["ADAPTER-ALPHA"]["subject"] == MODULE and said["ADAPTER-NONFINITE"]["subject"] == f"{MODULE}.alpha"


@pytest.mark.parametrize("up", [torch.full((8, 4), 1e-41), torch.full((8, 4), 6e-8).half()])
def test_fil_07_subnormal_numbers_are_numbers(tmp_path: Path, up: torch.Tensor):
    code, report = told("check", saved(tmp_path / "a.safetensors", PLAIN | {f"{MODULE}.{UP}": up}))
    figures = report["figures"]
    assert code == 0 and (figures["nonfinite_tensors"], figures["zero_deltas"]) == (0, 0)


def broken_model(path: Path) -> Path:
    tensors = {
        "net.a.weight": eight_bits(0x7F, torch.float8_e4m3fn),
        "net.b.weight": eight_bits(0x7C, torch.float8_e5m2),
        "net.c.weight": torch.full((4, 4), math.nan),
        "net.d.weight": torch.full((4, 4), 1e-41),
        "net.e.weight": noise(4, 4),
    }
    return saved(path, tensors)


def test_fil_07_every_tensor_of_a_base_is_looked_at(tmp_path: Path):
    code, report = told("check", broken_model(tmp_path / "m.safetensors"))
    said = {finding["subject"]: finding for finding in report["findings"] if finding["level"] == "error"}
    assert code == 1 and report["figures"]["nonfinite_tensors"] == 3
    assert set(said) == {"net.a.weight", "net.b.weight", "net.c.weight"}
    counts = {name: (said[name]["evidence"]["nan"], said[name]["evidence"]["inf"]) for name in said}
    assert counts == {"net.a.weight": (1, 0), "net.b.weight": (0, 1), "net.c.weight": (16, 0)}
    assert "16 NaN and 0 infinite of 16" in said["net.c.weight"]["message"]


def test_fil_07_the_first_place_in_a_base_is_told(tmp_path: Path):
    _, report = told("check", broken_model(tmp_path / "m.safetensors"))
    said = {finding["subject"]: finding["evidence"] for finding in report["findings"]}
    assert said["net.a.weight"]["first"] == [1, 2]


def test_fil_07_the_remedy_is_one_that_can_be_followed(tmp_path: Path):
    said = by_code(told("check", saved(tmp_path / "a.safetensors", BROKEN["one NaN"][0]))[1])["ADAPTER-NONFINITE"]
    assert "leave this module out" not in said["remedy"] or "--" in said["remedy"]


KEY, OTHER = (f"net.blocks.{block}.self_attn.q_proj.weight" for block in (0, 1))


def merged(model: Path, adapter: Path, out: Path, **options) -> Report:
    return merge.run(merge.Request(model=str(model), adapters=(str(adapter),), out=out, **options))


def found(report: Report, code: str) -> Finding:
    return next(finding for finding in report.findings if finding.code == code)


def test_fil_07_an_adapter_with_nan_is_never_merged(tmp_path: Path):
    tensors = scaled(MODULE, 8, 8, 2, alpha=1.0)
    tensors[f"{MODULE}.lora_up.weight"][1, 1] = float("nan")
    base = saved(tmp_path / "m.safetensors", {KEY: noise(8, 8)})
    out = tmp_path / "out.safetensors"
    report = merged(base, saved(tmp_path / "a.safetensors", tensors), out=out, allow_unmatched=True)
    assert report.exit_code == 1 and not out.exists()
    assert found(report, "ADAPTER-NONFINITE").evidence["first"] == [1, 1]


def test_fil_07_a_base_with_nan_is_told(tmp_path: Path):
    weight = noise(8, 8).half()
    weight[2, 3] = float("nan")
    base = saved(tmp_path / "m.safetensors", {KEY: weight})
    adapter = saved(tmp_path / "a.safetensors", scaled(MODULE, 8, 8, 2, alpha=1.0))
    report = merged(base, adapter, out=tmp_path / "out.safetensors")
    said = found(report, "MERGE-BASE-NONFINITE")
    assert said.subject == KEY and said.evidence == {"numbers": 1, "tensors": 1, "first": [2, 3]}


def test_fil_07_survival_is_of_the_finite_numbers(tmp_path: Path):
    weight = noise(8, 8)
    weight[2, 3] = float("nan")
    base = saved(tmp_path / "m.safetensors", {KEY: weight})
    adapter = saved(tmp_path / "a.safetensors", scaled(MODULE, 8, 8, 2, alpha=1.0))
    report = merged(base, adapter, out=tmp_path / "out.safetensors")
    assert report.figures["survival_min"] == pytest.approx(1.0, abs=1e-3)
    assert not [finding for finding in report.findings if finding.code == "MERGE-DELTA-LOST"]


def test_fil_07_a_nan_beside_the_adapted_tensors_is_told(tmp_path: Path):
    weights = {KEY: noise(8, 8), OTHER: torch.full((8, 8), float("nan"))}
    adapter = saved(tmp_path / "a.safetensors", scaled(MODULE, 8, 8, 2, alpha=1.0))
    report = merged(saved(tmp_path / "m.safetensors", weights), adapter, out=tmp_path / "out.safetensors")
    assert OTHER in {finding.subject for finding in report.findings}
