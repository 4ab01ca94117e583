"""What is mended without losing anything: texts, names, and two slips in a configuration."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finitune.config.amend import leaves_of, line_of, path_of, renamed, without_quotes
from finitune.config.text import key_lines
from finitune.datasets.mend import (
    MARK,
    as_utf8,
    encoded_plainly,
    is_utf8,
    rename,
    rewrite,
    rightly_named,
    with_plain_ends,
    without_mark,
)
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
    assert as_utf8(data) == (text.encode(), encoding)
    path = written(tmp_path / "a.txt", data)
    for _ in range(2):
        rewrite(path, encoded_plainly)
        assert path.read_bytes() == text.encode()


@pytest.mark.parametrize(
    "data", [b"", b"a girl", "caf\u00e9".encode(), b"a \xf0\x9f", b"\xff\x00\x81", b"\xff\xfe\x00"]
)
def test_what_is_utf8_or_of_no_encoding_stays(data: bytes):
    assert as_utf8(data) is None and encoded_plainly(data) == data


def test_big_end_first_is_read_by_its_mark():
    data = b"\xfe\xff" + "a girl in the rain".encode("utf-16-be")
    assert encoded_plainly(data) in (b"a girl in the rain", data)


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=60) | st.text(max_size=30).map(str.encode))
def test_changes_of_bytes_are_safe_and_done_once(data: bytes):
    for change in (encoded_plainly, without_mark, with_plain_ends):
        changed = change(data)
        assert change(changed) == changed
        if change is not encoded_plainly and is_utf8(data):
            plain = data.decode().removeprefix("\ufeff")
            assert changed.decode().removeprefix("\ufeff") in (plain, plain.replace("\r\n", "\n").replace("\r", "\n"))
        if not is_utf8(data):
            assert changed == data or is_utf8(changed)


def test_a_mark_and_the_ends_of_windows_go():
    assert without_mark(MARK + b"a") == b"a" and without_mark(b"\xff" + MARK) == b"\xff" + MARK
    assert with_plain_ends(b"a\r\nb\rc\n") == b"a\nb\nc\n"


def test_a_file_that_is_gone_is_told(tmp_path: Path):
    with pytest.raises(FileError, match="cannot be read"):
        rewrite(tmp_path / "a.txt", without_mark)


def test_a_picture_gets_the_ending_of_its_kind_and_keeps_its_caption(tmp_path: Path):
    path = saved(tmp_path / "a.jpg", noise_picture(), format="PNG")
    caption = written(tmp_path / "a.txt", "a cat")
    for _ in range(2):
        rename(path, "PNG")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.png", "a.txt"]
    assert caption.read_text() == "a cat" and rightly_named(tmp_path / "b.png", "JPEG") == tmp_path / "b.jpg"


@pytest.mark.parametrize("there", ["a.png", "A.PNG"])
def test_a_name_that_is_taken_is_left(tmp_path: Path, there: str):
    path = saved(tmp_path / "a.jpg", noise_picture(), format="PNG")
    saved(tmp_path / there, noise_picture(), format="PNG")
    assert rightly_named(path, "PNG") is None
    with pytest.raises(FileError) as caught:
        rename(path, "PNG")
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
    mended = without_quotes(TOML, 3, ("optimizer", "learning_rate"))
    assert mended == TOML.replace('"1e-4"', "1e-4")
    assert without_quotes(mended, 3, ("optimizer", "learning_rate")) is None
    assert without_quotes(TOML, 4, ("optimizer", "weight")) == TOML.replace("'True'", "true")
    assert without_quotes(TOML, 5, ("optimizer", "lr_scheduler")) is None  # cosine without quotes is no TOML


def test_a_misspelled_key_is_renamed_where_its_name_is_free():
    place = ("network", "network_dims")
    mended = renamed(TOML, 8, place, "network_dim")
    assert mended == TOML.replace("network_dims", "network_dim")
    assert renamed(mended, 8, place, "network_dim") is None
    taken = TOML + "network_dim = 4\n"
    assert renamed(taken, 8, place, "network_dim") is None and renamed(TOML, 99, place, "x") is None


def test_paths_and_lines_of_keys():
    assert path_of("datasets[0].subsets[1].image_dir") == ("datasets", 0, "subsets", 1, "image_dir")
    assert line_of(TOML, "network.network_dims") == 8 and line_of(TOML, "nothing") is None
    assert line_of('{\n "a": 1,\n "lr": "1e-4", "b": {"a": 2}}', "x.lr") == 3
    assert line_of("a: 1\nb:\n  - lr: 1e-4\n", "b[0].lr") == 3
    assert line_of("a = 1\n[b]\na = 2\n", "a") is None  # two of them


flips = st.tuples(st.integers(0, len(TOML) - 1), st.characters(codec="ascii"))


@settings(deadline=None, max_examples=80)
@given(st.lists(flips, min_size=1, max_size=4))
def test_a_flipped_toml_is_changed_rightly_or_not_at_all(changes: list[tuple[int, str]]):
    text = TOML
    for place, letter in changes:
        text = text[:place] + letter + text[place + 1 :]
    before = leaves_of(text)
    for place in before or {}:
        for line in {found for key, found in key_lines(text) if key == place}:
            mended = without_quotes(text, line, place)
            if mended is not None:
                after = leaves_of(mended)
                assert before is not None and after is not None
                assert {**after, place: None} == {**before, place: None}
                assert str(after[place]).lower() != "" and isinstance(before[place], str)


def test_a_folder_that_may_not_be_written_to_keeps_its_file(tmp_path: Path):
    folder = tmp_path / "gone"
    path = written(folder / "a.txt", b"a\r\n")

    def change(data: bytes) -> bytes:
        shutil.rmtree(folder)
        folder.write_text("a file in its place")
        return with_plain_ends(data)

    with pytest.raises(FileError):
        rewrite(path, change)
