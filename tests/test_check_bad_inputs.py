"""Two hundred bad inputs: finitune check ends soon, in bounded memory, with a finding, and calls none of them good.

Files are damaged by flipped, cut and inserted bytes, or made of noise that begins as something does. What a flip leaves
whole (a comment, a space) may be called good; what is known to be damaged may not.
"""

from __future__ import annotations

import json
import random
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from finitune.errors import FinituneError
from finitune.files.writer import save_tensors
from finitune.report import Level, Report
from finitune.verbs import check
from finitune.verbs.check.request import Request
from tests.adapter_files import lora

SECONDS = 10.0
MEMORY_BYTES = 64 << 20
SLOW = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow)
PER_KIND = 24


def bounded(path: Path) -> Report:
    """The report on a path, that came in time and in bounds."""
    begin = time.monotonic()
    tracemalloc.start()
    try:
        report = check.run(Request(paths=(path,)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.monotonic() - begin < SECONDS, "it hangs"
    assert peak < MEMORY_BYTES, f"{peak} bytes for a small file"
    for finding in report.findings:
        assert finding.code != "UNEXPECTED" and finding.code == finding.code.upper() and finding.message
    assert report.exit_code in (0, 1)
    assert report.ok is not any(finding.level is Level.ERROR for finding in report.findings)
    json.dumps(report.as_json(), default=str)
    return report


@pytest.fixture(autouse=True, scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is imported once is not counted against a file."""
    place = tmp_path_factory.mktemp("warm")
    for make in MAKERS.values():
        check.run(Request(paths=(make(place),)))
    for name, text in (("x.toml", KOHYA), ("x.json", '{"a": 1}'), ("x.txt", "text")):
        (place / name).write_text(text)
        check.run(Request(paths=(place / name,)))


# --- files that are whole ---------------------------------------------------------------------------------------------

KOHYA = """pretrained_model_name_or_path = "m.safetensors"
network_module = "networks.lora"
network_dim = 8
network_args = ["algo=lokr", "factor=8"]
train_data_dir = "nowhere"
learning_rate = 1e-4
"""


def adapter(place: Path) -> Path:
    tensors = lora("lora_unet_blocks_0_self_attn_q_proj", 16, 16, 2)
    save_tensors(place / "a.safetensors", tensors, {"ss_network_dim": "2", "modelspec.title": "x"})
    return place / "a.safetensors"


def model(place: Path) -> Path:
    save_tensors(place / "m.safetensors", {"a.weight": torch.randn(16, 16), "a.bias": torch.randn(16)})
    return place / "m.safetensors"


def picture(place: Path) -> Path:
    Image.effect_noise((48, 48), 80).convert("RGB").save(place / "p.png")
    return place / "p.png"


def jpeg(place: Path) -> Path:
    Image.effect_noise((48, 48), 80).convert("RGB").save(place / "p.jpg")
    return place / "p.jpg"


def config(place: Path) -> Path:
    (place / "c.toml").write_text(KOHYA)
    return place / "c.toml"


def workflow(place: Path) -> Path:
    nodes = {"3": {"class_type": "KSampler", "inputs": {"seed": 7, "steps": 30, "cfg": 4.5, "model": ["9", 0]}}}
    (place / "w.json").write_text(json.dumps(nodes))
    return place / "w.json"


def cached(place: Path) -> Path:
    from finitune.datasets.cache import CacheSource, EncoderCache

    cache = EncoderCache(place / "cache", "texts", {"encoder": "x"})
    source = CacheSource.of("a caption", 1)
    cache.put(source, {"t": torch.randn(4, 4)})
    return cache.path_of(source)


MAKERS: dict[str, Callable[[Path], Path]] = {
    "adapter": adapter,
    "model": model,
    "picture": picture,
    "jpeg": jpeg,
    "config": config,
    "workflow": workflow,
    "cache": cached,
}


def damages(content: bytes, seed: int) -> Iterator[bytes]:
    """PER_KIND damaged forms of a file: bits and bytes changed, mostly near the beginning, cut, doubled, stuffed."""
    dice = random.Random(seed)
    for number in range(PER_KIND):
        damaged = bytearray(content)
        span = min(len(content), 400) if number % 3 else len(content)
        at = dice.randrange(span)
        match number % 6:
            case 0:
                del damaged[at:]
            case 1:
                damaged[at] ^= 1 << dice.randrange(8)
            case 2:
                damaged[at : at + 4] = dice.randbytes(4)
            case 3:
                damaged[at:at] = dice.randbytes(dice.randrange(1, 64))
            case 4:
                damaged[at : at + dice.randrange(1, 16)] = b""
            case _:
                damaged += damaged[at:]
        yield bytes(damaged)


@pytest.mark.parametrize("kind", MAKERS)
def test_damaged_files_are_told_in_time_and_in_bounds(tmp_path: Path, kind: str):
    path = MAKERS[kind](tmp_path)
    whole = path.read_bytes()
    codes: set[str] = set()
    for damaged in damages(whole, seed=len(kind)):
        path.write_bytes(damaged)
        codes |= {finding.code for finding in bounded(path).findings}
    assert len(codes) > 1, "different damages are told apart"


@pytest.mark.parametrize("kind", ["adapter", "model", "cache"])
def test_a_file_of_another_length_is_never_good(tmp_path: Path, kind: str):
    path = MAKERS[kind](tmp_path)
    whole = path.read_bytes()
    for cut in (0, 1, 7, 8, 9, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert not bounded(path).ok
    path.write_bytes(whole + b"\0")
    assert not bounded(path).ok


def test_every_flipped_bit_of_a_cached_entry_is_found(tmp_path: Path):
    path = cached(tmp_path)
    whole = path.read_bytes()
    data = 8 + struct.unpack("<Q", whole[:8])[0]
    for at in range(data, len(whole), 5):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        assert not bounded(path).ok


@pytest.mark.parametrize("kind", ["picture", "jpeg"])
def test_a_picture_that_is_cut_off_is_never_good(tmp_path: Path, kind: str):
    path = MAKERS[kind](tmp_path)
    whole = path.read_bytes()
    for share in (0.01, 0.2, 0.5, 0.9):
        path.write_bytes(whole[: int(len(whole) * share)])
        assert not bounded(path).ok


# --- headers that lie -------------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["a.weight", "lora_unet_x.lora_down.weight", "__metadata__", "", "\ud83d\ude00"[:0] + "\u00e9"])
COUNTS = st.integers(-1, 2**63) | st.integers(0, 16)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F16", "BF16", "F8_E4M3", "I64", "Q4_0", 3, None]),
        "shape": st.lists(COUNTS, max_size=4) | st.none(),
        "data_offsets": st.lists(COUNTS, min_size=2, max_size=2) | st.text(max_size=3),
    },
)
HEADERS = st.dictionaries(NAMES, FIELDS | st.integers() | st.dictionaries(st.text(max_size=3), st.text(max_size=3)))


@settings(deadline=None, max_examples=40, suppress_health_check=SLOW)
@given(header=HEADERS, data=st.binary(max_size=64), lie=st.sampled_from((0, 0, 0, 1, -1, 10**6, 2**62)))
def test_headers_that_lie(tmp_path: Path, header: dict, data: bytes, lie: int):
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", max(0, len(text) + lie)) + text + data)
    report = bounded(path)
    if lie:
        assert not report.ok


# --- text of whatever content -----------------------------------------------------------------------------------------

BEGINNINGS = (
    "",
    "{",
    "[",
    "a = ",
    "[model]\n",
    "- a: ",
    "accelerate launch x.py --",
    "\ufeff",
    "version https://git-lfs",
)


@settings(deadline=None, max_examples=40, suppress_health_check=SLOW)
@given(
    beginning=st.sampled_from(BEGINNINGS),
    rest=st.text(max_size=60) | st.binary(max_size=60).map(lambda raw: raw.decode("latin-1")),
    ending=st.sampled_from([".toml", ".json", ".yaml", ".txt", ".sh", ""]),
    encoding=st.sampled_from(["utf-8", "utf-16", "latin-1"]),
)
def test_text_of_whatever_content(tmp_path: Path, beginning: str, rest: str, ending: str, encoding: str):
    path = tmp_path / f"x{ending}"
    path.write_bytes((beginning + rest).encode(encoding, errors="replace"))
    assert not bounded(path).ok, "none of these is a training"


@pytest.mark.parametrize("deep", ["[" * 100_000, '{"a":' * 50_000, "a = " + "[" * 20_000, "a: " * 2000])
@pytest.mark.parametrize("ending", [".json", ".toml", ".yaml"])
def test_text_that_is_nested_without_end(tmp_path: Path, deep: str, ending: str):
    path = tmp_path / f"x{ending}"
    path.write_text(deep)
    assert not bounded(path).ok


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, after in zip("abcdefghij", "bcdefghijk", strict=True)
)


@pytest.mark.parametrize("text", [BOMB, "a: &a [*a]\n", "a: &a {b: *a}\n"], ids=["laughs", "itself", "its own key"])
def test_aliases_without_end(tmp_path: Path, text: str):
    (tmp_path / "x.yaml").write_text(text)
    assert not bounded(tmp_path / "x.yaml").ok


# --- captions beside a picture ----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=20, suppress_health_check=SLOW)
@given(caption=st.binary(max_size=200), name=st.sampled_from(["p.txt", "P.TXT", "p.caption"]))
def test_captions_of_whatever_bytes(tmp_path: Path, caption: bytes, name: str):
    place = tmp_path / "d"
    place.mkdir(exist_ok=True)
    picture(place)
    (place / name).write_bytes(caption)
    bounded(place)
    (place / name).unlink()


def test_a_request_for_what_is_not_there_never_raises(tmp_path: Path):
    names = ("none", "a/b/c", "x" * 300, "nul\0l")
    for name in names:
        try:
            report = check.run(Request(paths=(tmp_path / name,)))
        except FinituneError:  # pragma: no cover
            pytest.fail(name)
        assert not report.ok and report.findings[0].code.startswith("FILE-")
