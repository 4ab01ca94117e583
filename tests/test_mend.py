"""What is mended without losing anything: texts, names, and two slips in a configuration."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finitune.config.toml_text import (
    find_key_line,
    iterate_key_lines,
    parse_key_path,
    read_toml_leaves,
    rename_toml_key,
    unquote_toml_value,
)
from finitune.datasets.caption_files import (
    UTF8_BOM,
    convert_to_utf8,
    ensure_utf8,
    is_utf8_text,
    normalize_line_ends,
    remove_bom,
    rewrite_file,
)
from finitune.datasets.picture_formats import find_matching_name, rename_to_format
from finitune.errors import FileError
from tests.picture_files import noise_picture, saved, written

ENCODED = {
    "cp1252": (b"girl\x92s hat", "girl\u2019s hat"),
    "shift_jis": (bytes.fromhex("93fa967b"), "\u65e5\u672c"),
    "gb18030": ("1girl, \u957f\u53d1".encode("gb18030"), "1girl, \u957f\u53d1"),
    "utf_16": ("a girl\r\nin rain".encode("utf-16"), "a girl\nin rain"),
}


@pytest.mark.parametrize("encoding", ENCODED)
def test_another_encoding_becomes_utf8_once(tmp_path: Path, encoding: str):
    data, text = ENCODED[encoding]
    assert convert_to_utf8(data) == (text.encode(), encoding)
    path = written(tmp_path / "a.txt", data)
    for _ in range(2):
        rewrite_file(path, ensure_utf8)
        assert path.read_bytes() == text.encode()


@pytest.mark.parametrize(
    "data", [b"", b"a girl", "caf\u00e9".encode(), b"a \xf0\x9f", b"\xff\x00\x81", b"\xff\xfe\x00"]
)
def test_what_is_utf8_or_of_no_encoding_stays(data: bytes):
    assert convert_to_utf8(data) is None and ensure_utf8(data) == data


def test_big_end_first_is_read_by_its_mark():
    data = b"\xfe\xff" + "a girl in the rain".encode("utf-16-be")
    assert ensure_utf8(data) in (b"a girl in the rain", data)


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=60) | st.text(max_size=30).map(str.encode))
def test_changes_of_bytes_are_safe_and_done_once(data: bytes):
    for change in (ensure_utf8, remove_bom, normalize_line_ends):
        changed = change(data)
        assert change(changed) == changed
        if change is not ensure_utf8 and is_utf8_text(data):
            plain = data.decode().removeprefix("\ufeff")
            assert changed.decode().removeprefix("\ufeff") in (plain, plain.replace("\r\n", "\n").replace("\r", "\n"))
        if not is_utf8_text(data):
            assert changed == data or is_utf8_text(changed)


def test_a_mark_and_the_ends_of_windows_go():
    assert remove_bom(UTF8_BOM + b"a") == b"a" and remove_bom(b"\xff" + UTF8_BOM) == b"\xff" + UTF8_BOM
    assert normalize_line_ends(b"a\r\nb\rc\n") == b"a\nb\nc\n"


def test_a_file_that_is_gone_is_told(tmp_path: Path):
    with pytest.raises(FileError, match="cannot be read"):
        rewrite_file(tmp_path / "a.txt", remove_bom)


def test_a_picture_gets_the_ending_of_its_kind_and_keeps_its_caption(tmp_path: Path):
    path = saved(tmp_path / "a.jpg", noise_picture(), format="PNG")
    caption = written(tmp_path / "a.txt", "a cat")
    for _ in range(2):
        rename_to_format(path, "PNG")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.png", "a.txt"]
    assert caption.read_text() == "a cat" and find_matching_name(tmp_path / "b.png", "JPEG") == tmp_path / "b.jpg"


@pytest.mark.parametrize("there", ["a.png", "A.PNG"])
def test_a_name_that_is_taken_is_left(tmp_path: Path, there: str):
    path = saved(tmp_path / "a.jpg", noise_picture(), format="PNG")
    saved(tmp_path / there, noise_picture(), format="PNG")
    assert find_matching_name(path, "PNG") is None
    with pytest.raises(FileError) as caught:
        rename_to_format(path, "PNG")
    assert caught.value.code == "FILE-NOT-RENAMED" and path.exists()


TOML = """# mine
[optimizer]
learning_rate = "1e-4"  # low
"weight" = 'True'
lr_scheduler = "cosine"

[network]
network_dims = 8 # of blocks
"""


def test_a_number_leaves_its_quotes_and_nothing_else_changes():
    mended = unquote_toml_value(TOML, 3, ("optimizer", "learning_rate"))
    assert mended == TOML.replace('"1e-4"', "1e-4")
    assert unquote_toml_value(mended, 3, ("optimizer", "learning_rate")) is None
    assert unquote_toml_value(TOML, 4, ("optimizer", "weight")) == TOML.replace("'True'", "true")
    assert unquote_toml_value(TOML, 5, ("optimizer", "lr_scheduler")) is None  # cosine without quotes is no TOML


def test_a_misspelled_key_is_renamed_where_its_name_is_free():
    place = ("network", "network_dims")
    mended = rename_toml_key(TOML, 8, place, "network_dim")
    assert mended == TOML.replace("network_dims", "network_dim")
    assert rename_toml_key(mended, 8, place, "network_dim") is None
    taken = TOML + "network_dim = 4\n"
    assert rename_toml_key(taken, 8, place, "network_dim") is None and rename_toml_key(TOML, 99, place, "x") is None


def test_paths_and_lines_of_keys():
    assert parse_key_path("datasets[0].subsets[1].image_dir") == ("datasets", 0, "subsets", 1, "image_dir")
    assert find_key_line(TOML, "network.network_dims") == 8 and find_key_line(TOML, "nothing") is None
    assert find_key_line('{\n "a": 1,\n "lr": "1e-4", "b": {"a": 2}}', "x.lr") == 3
    assert find_key_line("a: 1\nb:\n  - lr: 1e-4\n", "b[0].lr") == 3
    assert find_key_line("a = 1\n[b]\na = 2\n", "a") is None  # two of them


flips = st.tuples(st.integers(0, len(TOML) - 1), st.characters(codec="ascii"))


@settings(deadline=None, max_examples=80)
@given(st.lists(flips, min_size=1, max_size=4))
def test_a_flipped_toml_is_changed_rightly_or_not_at_all(changes: list[tuple[int, str]]):
    text = TOML
    for place, letter in changes:
        text = text[:place] + letter + text[place + 1 :]
    before = read_toml_leaves(text)
    for place in before or {}:
        for line in {found for key, found in iterate_key_lines(text) if key == place}:
            mended = unquote_toml_value(text, line, place)
            if mended is not None:
                after = read_toml_leaves(mended)
                assert before is not None and after is not None
                assert {**after, place: None} == {**before, place: None}
                assert str(after[place]).lower() != "" and isinstance(before[place], str)


def test_a_folder_that_may_not_be_written_to_keeps_its_file(tmp_path: Path):
    folder = tmp_path / "gone"
    path = written(folder / "a.txt", b"a\r\n")

    def change(data: bytes) -> bytes:
        shutil.rmtree(folder)
        folder.write_text("a file in its place")
        return normalize_line_ends(data)

    with pytest.raises(FileError):
        rewrite_file(path, change)
