"""Safetensors files: what is read is what was written, and whatever is not one says what it is."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from finitune.errors import FileError
from finitune.files.sniff import is_safetensors_start, read_utf8_text
from finitune.files.tensorfile import SAFETENSORS_DTYPES, NonfiniteElements, TensorFile, hash_tensor
from finitune.files.writer import save_tensor_stream, save_tensors, write_atomically, write_bytes, write_text


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "b": torch.randn(3, 5, generator=generator),
        "a": torch.randn(7, generator=generator).bfloat16(),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 4, dtype=torch.float16),
        "eight": torch.randn(5, generator=generator).to(torch.float8_e4m3fn),
        "mask": torch.tensor([True, False, True]),
    }


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)


def raw_file(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin: int, end: int, dtype: str = "F32", shape: list | None = None) -> dict:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def code_of(path: Path) -> str:
    with pytest.raises(FileError) as caught:
        TensorFile(path)
    assert caught.value.subject and caught.value.remedy
    return caught.value.code


def test_reads_what_the_reference_writes(tmp_path):
    tensors = some_tensors()
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    file = TensorFile(tmp_path / "x.safetensors")
    assert file.metadata == {"format": "pt"}
    assert set(file) == set(tensors) and len(file) == 6 and "a" in file
    assert file.shapes["b"] == (3, 5)
    assert all(same_bits(file.read(name), tensor) for name, tensor in tensors.items())


def test_the_reference_reads_what_is_written(tmp_path):
    tensors = some_tensors() | {"strided": torch.arange(12.0).reshape(3, 4).T}
    save_tensors(tmp_path / "x.safetensors", tensors, {"k": "v"})
    again = load_file(tmp_path / "x.safetensors")
    assert set(again) == set(tensors)
    assert all(same_bits(again[name], tensor) for name, tensor in tensors.items())
    assert TensorFile(tmp_path / "x.safetensors").metadata == {"k": "v"}


@settings(deadline=None, max_examples=20)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(SAFETENSORS_DTYPES)), st.lists(st.integers(0, 4), max_size=3)), max_size=5
    )
)
def test_every_dtype_and_shape_comes_back(tmp_path_factory, drawn):
    folder = tmp_path_factory.mktemp("dtypes")
    tensors = {}
    for number, (dtype, shape) in enumerate(drawn):
        count = int(torch.tensor(shape).prod()) if shape else 1
        raw = torch.randint(0, 2, (count * SAFETENSORS_DTYPES[dtype][1],), dtype=torch.uint8)
        tensors[f"t{number}"] = raw.view(getattr(torch, SAFETENSORS_DTYPES[dtype][0])).reshape(shape)
    save_tensors(folder / "x.safetensors", tensors)
    file = TensorFile(folder / "x.safetensors")
    assert set(file) == set(tensors)
    assert all(same_bits(file.read(name), tensor) for name, tensor in tensors.items())
    assert all(file.read_hashed(name)[1] == hash_tensor(tensor) for name, tensor in tensors.items())


def test_a_fingerprint_is_of_the_tensors_alone(tmp_path):
    tensors = some_tensors()
    save_file(tensors, tmp_path / "a.safetensors", {"one": "1"})
    save_tensors(tmp_path / "b.safetensors", dict(reversed(tensors.items())), {"other": "2"})
    first = TensorFile(tmp_path / "a.safetensors").fingerprint()
    assert TensorFile(tmp_path / "b.safetensors").fingerprint() == first
    for change in ({"b": tensors["b"].reshape(5, 3)}, {"b": tensors["b"] + 1}, {"b": tensors["b"].view(torch.int32)}):
        save_tensors(tmp_path / "c.safetensors", tensors | change)
        assert TensorFile(tmp_path / "c.safetensors").fingerprint() != first


def shard(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    weight_map = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        weight_map[name] = f"m-{number}.safetensors"
        save_file({name: tensor}, folder / weight_map[name])
    index = folder / "m.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def test_shards_are_one_file(tmp_path):
    tensors = some_tensors()
    save_file(tensors, tmp_path / "whole.safetensors")
    sharded, whole = TensorFile(shard(tmp_path, tensors)), TensorFile(tmp_path / "whole.safetensors")
    assert sharded.fingerprint() == whole.fingerprint()
    assert sharded.shapes == whole.shapes


def test_bad_indices(tmp_path):
    index = shard(tmp_path, some_tensors())
    good = json.loads(index.read_text())

    def with_map(weight_map) -> str:
        index.write_text(json.dumps({"weight_map": weight_map}))
        return code_of(index)

    assert with_map({}) == "FILE-INDEX"
    assert with_map({"a": "../outside.safetensors"}) == "FILE-INDEX"
    assert with_map({"a": 3}) == "FILE-INDEX"
    assert with_map(good["weight_map"] | {"ghost": "m-0.safetensors"}) == "FILE-INDEX"
    assert with_map({"b": "m-0.safetensors", "a": "m-0.safetensors"}) == "FILE-INDEX"
    assert with_map({"a": "absent.safetensors"}) == "FILE-MISSING"
    index.write_text("{")
    assert code_of(index) == "FILE-INDEX"


def test_nonfinite_elements_are_counted(tmp_path):
    bad = torch.tensor([[1.0, float("nan")], [float("inf"), -float("inf")]])
    eight = torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)
    save_tensors(tmp_path / "x.safetensors", {"good": torch.ones(3), "n": torch.ones(2).int(), "bad": bad, "e": eight})
    assert TensorFile(tmp_path / "x.safetensors").nonfinite() == {
        "bad": NonfiniteElements(1, 2, 4),
        "e": NonfiniteElements(1, 0, 2),
    }


BY_CONTENT = {
    "FILE-EMPTY": b"",
    "FILE-LFS-POINTER": b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 4182218328\n",
    "FILE-HTML": b"\n<!DOCTYPE html><html><body>Log in</body></html>",
    "FILE-TEXT": b'{"error": "Repository not found"}',
    "FILE-GGUF": b"GGUF\x03\x00\x00\x00" + bytes(64),
    "FILE-UNKNOWN": bytes(range(128, 256)),
}


@pytest.mark.parametrize("code", BY_CONTENT)
def test_other_kinds_are_named_by_their_bytes(tmp_path, code):
    (tmp_path / "x.safetensors").write_bytes(BY_CONTENT[code])
    assert code_of(tmp_path / "x.safetensors") == code


def test_a_pointer_tells_the_size_it_stands_for(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(BY_CONTENT["FILE-LFS-POINTER"])
    with pytest.raises(FileError) as caught:
        TensorFile(tmp_path / "x.safetensors")
    assert caught.value.evidence["promised_bytes"] == 4182218328


@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_are_refused_and_the_remedy_works(tmp_path, zipped, monkeypatch):
    torch.save({"state_dict": {"w": torch.ones(2, 2)}}, tmp_path / "m.ckpt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(FileError) as caught:
        TensorFile(tmp_path / "m.ckpt")
    assert caught.value.code == "FILE-PICKLE"
    monkeypatch.chdir(tmp_path)
    recipe = caught.value.remedy.split("\n", 1)[1]
    exec("\n".join(line.strip() for line in recipe.splitlines()), {})
    assert torch.equal(TensorFile(tmp_path / "m.safetensors").read("w"), torch.ones(2, 2))


def test_archives_are_not_pickles(tmp_path):
    with zipfile.ZipFile(tmp_path / "m.safetensors", "w") as archive:
        archive.writestr("model.safetensors", b"x")
    assert code_of(tmp_path / "m.safetensors") == "FILE-ARCHIVE"
    (tmp_path / "cut.pt").write_bytes((tmp_path / "m.safetensors").read_bytes()[:20])
    assert code_of(tmp_path / "cut.pt") == "FILE-PICKLE"


def test_missing_and_folders(tmp_path):
    save_tensors(tmp_path / "near.safetensors", {"a": torch.ones(1)})
    assert code_of(tmp_path / "absent.safetensors") == "FILE-MISSING"
    assert code_of(tmp_path) == "FILE-IS-FOLDER"
    with pytest.raises(FileError, match=r"near\.safetensors"):
        TensorFile(tmp_path / "absent.safetensors")


def test_a_length_that_looks_like_a_pickle_is_still_a_length(tmp_path):
    start = struct.pack("<Q", 0x0280)
    assert start.startswith(b"\x80\x02") and is_safetensors_start(start + b"{")
    raw_file(tmp_path / "x.safetensors", json.dumps({"a": entry(0, 4)}).encode().ljust(0x0280), bytes(4))
    assert TensorFile(tmp_path / "x.safetensors").shapes == {"a": (1,)}


@pytest.mark.parametrize("keep", [3, 8, 20, -1])
def test_every_cut_is_seen(tmp_path, keep):
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"a": torch.ones(100)})
    path.write_bytes(path.read_bytes()[:keep])
    assert code_of(path) == "FILE-TRUNCATED"


def test_cut_after_opening(tmp_path):
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"a": torch.ones(100)})
    file = TensorFile(path)
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(FileError) as caught:
        file.read("a")
    assert caught.value.code == "FILE-TRUNCATED"
    assert caught.value.evidence["expected_bytes"] - caught.value.evidence["size_bytes"] == 4


def test_trailing_bytes_and_giant_headers(tmp_path):
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"a": torch.ones(4)})
    path.write_bytes(path.read_bytes() + b"more")
    assert code_of(path) == "FILE-TRAILING-BYTES"
    assert code_of(raw_file(path, {"a": entry(0, 4)}, bytes(4), length=10**12)) == "FILE-HEADER-TOO-LONG"
    assert code_of(raw_file(path, {"a": entry(0, 4)}, bytes(4), length=10**6)) == "FILE-TRUNCATED"


BAD_HEADERS = {
    "not JSON": b'{"a": ',
    "twice": b'{"a": %b, "a": %b}' % ((json.dumps(entry(0, 12)).encode(),) * 2),
    "metadata": {"__metadata__": {"a": 1}},
    "fields": {"a": [1]},
    "dtype": {"a": entry(0, 4, "F31")},
    "negative": {"a": entry(-4, 0)},
    "backwards": {"a": entry(8, 4)},
    "shape": {"a": entry(0, 4, shape=[2])},
    "bool shape": {"a": entry(0, 4, shape=[True])},
    "huge shape": {"a": entry(0, 4, shape=[2**40, 2**40])},
    "overlap": {"a": entry(0, 8), "b": entry(4, 12)},
    "gap": {"a": entry(0, 4), "b": entry(8, 12)},
    "late": {"a": entry(4, 8)},
}


@pytest.mark.parametrize("why", BAD_HEADERS)
def test_contradicting_headers(tmp_path, why):
    assert code_of(raw_file(tmp_path / "x.safetensors", BAD_HEADERS[why], bytes(12))) == "FILE-HEADER"


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=200))
def test_no_bytes_get_past_with_another_error(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    path.write_bytes(content)
    assert code_of(path).startswith("FILE-")


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_flipped_header_byte_never_reads_outside(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("flip") / "x.safetensors"
    save_tensors(path, {"a": torch.ones(3), "b": torch.ones(2).half()})
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 17))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        file = TensorFile(path)
    except FileError:
        return
    assert sum(tensor.nbytes for _, tensor in file.tensors()) == 16


def test_text_is_read_or_refused(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xef\xbb\xbfred \xe2\x9d\xa4\n")
    assert read_utf8_text(path) == "red \u2764\n"
    for content, code in ((b"caf\xe9", "FILE-NOT-TEXT"), (None, "FILE-MISSING")):
        path.unlink()
        if content:
            path.write_bytes(content)
        with pytest.raises(FileError) as caught:
            read_utf8_text(path)
        assert caught.value.code == code
        path.write_bytes(b"")


def test_writing_leaves_all_or_nothing(tmp_path):
    path = tmp_path / "new" / "x.txt"
    write_text(path, "old")

    def fail(temporary: Path) -> None:
        assert temporary.parent == path.parent and temporary.suffix == ".txt"
        temporary.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    write_bytes(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in path.parent.iterdir()] == ["x.txt"]


def test_a_refusing_system_is_a_file_error(tmp_path):
    def full(temporary: Path) -> None:
        temporary.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(FileError, match="No space left") as caught:
        write_atomically(tmp_path / "x", full)
    assert caught.value.code == "FILE-NOT-WRITTEN" and caught.value.evidence == {"errno": 28}
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "plain").write_text("")
    with pytest.raises(FileError, match="could not be written"):
        write_text(tmp_path / "plain" / "below.txt", "x")


def test_a_broken_promise_writes_nothing(tmp_path):
    entries = {"a": (torch.float32, (2,)), "b": (torch.float32, (2,))}
    with pytest.raises(ValueError, match="promised"):
        save_tensor_stream(tmp_path / "x.safetensors", entries, lambda name: torch.ones(2 if name == "a" else 3))
    assert list(tmp_path.iterdir()) == []
