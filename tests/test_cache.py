"""The cache: what is found is right, whole and finite; what is not is made again, and said."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from finitune.datasets.cache import CacheSource, EncoderCache, FileDigestCache
from finitune.errors import FileError, NumericsError
from finitune.files.writer import save_tensors
from finitune.report import Level

CAT = CacheSource.of("emoji/cat.png", "latents", "abc", (64, 64), False)
IDENTITY = {"vae": "1234", "dtype": "fp32"}


def tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"latents": torch.randn(4, 1, 8, 8, generator=generator), "ids": torch.arange(5)}


def cache(folder: Path, **identity: str) -> EncoderCache:
    return EncoderCache(folder, "latents", {**IDENTITY, **identity})


def no_fault(entry: object) -> str:
    return ""


def filled(folder: Path) -> Path:
    """A cache with one entry; its file."""
    cache(folder).put(CAT, tensors())
    return cache(folder).path_of(CAT)


def test_what_is_put_is_found_again(tmp_path: Path):
    filled(tmp_path)
    reader = cache(tmp_path)
    found = reader.get(CAT, no_fault)
    assert found is not None
    torch.testing.assert_close(found, tensors(), rtol=0, atol=0)
    assert reader.account.figures("latents") == {
        "latents_made": 0,
        "latents_reused": 1,
        "latents_remade": 0,
        "latents_stale": 0,
    }
    assert reader.account.findings("latents") == []


def test_what_was_never_put_is_not_found(tmp_path: Path):
    reader = cache(tmp_path)
    assert reader.get(CAT, no_fault) is None
    assert reader.account.findings("latents") == []
    assert not tmp_path.joinpath("latents").exists()


def test_other_sources_have_other_entries():
    sources = [
        CacheSource.of("x", *parts) for parts in (("a", "b"), ("ab",), ("a", ("b",)), ("a", "b", False), ("b", "a"))
    ]
    assert len({source.digest for source in sources}) == len(sources)


@pytest.mark.parametrize(("changed", "said"), [("vae", "vae was 1234, is 5"), ("dtype", "dtype was fp32, is 5")])
def test_another_encoders_entry_is_stale_and_stays(tmp_path: Path, changed: str, said: str):
    old = filled(tmp_path)
    reader = cache(tmp_path, **{changed: "5"})
    assert reader.get(CAT, no_fault) is None
    (finding,) = reader.account.findings("latents")
    assert (finding.code, finding.level, finding.subject) == ("CACHE-STALE", Level.NOTE, "emoji/cat.png")
    assert said in finding.message
    reader.put(CAT, tensors(1))
    assert old.exists()
    assert cache(tmp_path).get(CAT, no_fault) is not None


def damage_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def rewrite(path: Path, entry: dict[str, Tensor]) -> None:
    """The same metadata, with the right checksum, over other numbers."""
    other = EncoderCache(path.parent.parent, "latents", IDENTITY)
    from finitune.files.tensorfile import TensorFile, compute_tensor_digest, hash_tensor

    metadata = TensorFile(other.path_of(CAT)).metadata
    checksum = compute_tensor_digest({name: hash_tensor(tensor) for name, tensor in entry.items()})
    save_tensors(path, entry, {**metadata, "checksum": checksum})


DAMAGE = {
    "cut off": lambda path: os.truncate(path, path.stat().st_size - 100),
    "empty": lambda path: path.write_bytes(b""),
    "not what was written": damage_bit,
    "NaN": lambda path: rewrite(path, {"latents": torch.full((4, 1, 8, 8), float("nan"))}),
    "infinities": lambda path: rewrite(path, {"latents": torch.full((4, 1, 8, 8), float("inf"))}),
    "two sides": lambda path: rewrite(path, {"latents": torch.zeros(8, 8)}),
}


@pytest.mark.parametrize("reason", DAMAGE)
def test_a_damaged_entry_is_made_again_and_said(tmp_path: Path, reason: str):
    DAMAGE[reason](filled(tmp_path))
    reader = cache(tmp_path)

    def fault(entry: object) -> str:
        return "" if isinstance(entry, dict) and entry["latents"].dim() == 4 else "it has two sides"

    assert reader.get(CAT, fault) is None
    (finding,) = reader.account.findings("latents")
    assert (finding.code, finding.level, finding.subject) == ("CACHE-REMADE", Level.WARNING, "emoji/cat.png")
    assert reason in finding.message
    reader.put(CAT, tensors())
    assert cache(tmp_path).get(CAT, fault) is not None


def test_an_entry_under_a_wrong_name_is_not_believed(tmp_path: Path):
    path = filled(tmp_path)
    dog = CacheSource.of("emoji/dog.png", "other")
    reader = cache(tmp_path)
    path.rename(reader.path_of(dog))
    assert reader.get(dog, no_fault) is None
    assert "another source" in reader.account.remade[dog]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_encoder_is_blamed_not_the_picture(tmp_path: Path, bad: float):
    entry = tensors()
    entry["latents"][0, 0, 0, :3] = bad
    with pytest.raises(NumericsError) as caught:
        cache(tmp_path).put(CAT, entry)
    error = caught.value
    assert (error.code, error.subject) == ("CACHE-NONFINITE", "emoji/cat.png")
    assert error.message.startswith("the VAE made ")
    assert error.evidence["nan"] == (3 if bad != bad else 0)
    assert error.evidence["inf"] == (0 if bad != bad else 3)
    assert error.evidence["vae"] == "1234"
    assert "not at fault" in error.remedy
    assert not list(tmp_path.rglob("*.*"))


def test_two_writers_of_one_entry_do_no_harm(tmp_path: Path):
    failures: list[BaseException] = []

    def work() -> None:
        own = cache(tmp_path)
        try:
            for _ in range(8):
                own.put(CAT, tensors())
                found = own.get(CAT, no_fault)
                assert found is not None
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [path.name for path in tmp_path.joinpath("latents").iterdir()] == [cache(tmp_path).path_of(CAT).name]


def test_pruning_lists_then_removes_what_is_not_its_own(tmp_path: Path):
    own = filled(tmp_path)
    old = cache(tmp_path, vae="old")
    old.put(CAT, tensors())
    damaged = own.with_name(f"{'0' * 32}-{'1' * 16}.safetensors")
    damaged.write_bytes(b"x")
    stray = own.with_name(f".partial-01234567-{own.name}")
    stray.write_bytes(b"half")
    useless = {old.path_of(CAT), damaged, stray}
    keeper = cache(tmp_path)
    assert set(keeper.prune()) == useless
    assert all(path.exists() for path in useless)
    assert set(keeper.prune(remove=True)) == useless
    assert list(own.parent.iterdir()) == [own]
    assert keeper.prune() == []


def test_a_files_digest_follows_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.png"
    path.write_bytes(b"one")
    digests = FileDigestCache()
    first = digests.of(path)
    path.write_bytes(b"three")
    assert digests.of(path) != first
    assert FileDigestCache().of(path) == digests.of(path)
    opened: list[Path] = []
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *rest: opened.append(self) or real(self, *rest))
    assert digests.of(path) != first
    assert not opened
    with pytest.raises(FileError) as caught:
        digests.of(tmp_path / "gone.png")
    assert caught.value.code == "FILE-UNREADABLE"
