"""From files to batches: made once, found again, live where it must be, and every fault told by its name."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from finitune.datasets.batch_schedule import BatchSchedule
from finitune.datasets.cache import EncoderCaches, LruTensorCache
from finitune.datasets.items import ExcludedExamples, TrainingBatch, TrainingExample
from finitune.datasets.loader import BatchLoader, LoaderOptions, prefetch_items
from finitune.datasets.picture_files import read_picture
from finitune.datasets.transforms import transform_pixels
from finitune.errors import FileError, NumericsError
from finitune.progress import SilentProgress
from finitune.report import Level
from tests.dataset_made import IDENTITY, QuickEncoders, course_of, dataset_of, examples_of, subset_of, write_pictures


def course_with_files(folder: Path, alpha: bool = False, repeats: int = 1, **options: object) -> BatchSchedule:
    examples = examples_of(folder / "emoji", subset_of(0, **options), repeats)
    write_pictures(examples, alpha)
    return course_of(examples, batch_size=2, accumulation=3)


def loader_of(
    course: BatchSchedule, folder: Path, encoders: QuickEncoders | None = None, **options: Any
) -> BatchLoader:
    encoders = encoders or QuickEncoders()
    return BatchLoader(course, encoders, EncoderCaches.beside(folder / "cache", encoders), LoaderOptions(**options))


def batches_of(loader: BatchLoader, steps: int) -> list[TrainingBatch]:
    micros = [micro for step in loader.schedule.iterate_steps(0, steps) for micro in step.micro_batches]
    return [batch for micro in micros if (batch := loader.load(micro)) is not None]


def encoders_in(loader: BatchLoader) -> QuickEncoders:
    assert isinstance(loader.encoders, QuickEncoders)
    return loader.encoders


def tensors_of(batch: TrainingBatch) -> list[torch.Tensor]:
    mask = [] if batch.mask is None else [batch.mask]
    return [batch.latents, batch.weights, *mask, *batch.conditioning.values()]


def assert_same(ones: list[TrainingBatch], others: list[TrainingBatch]) -> None:
    assert len(ones) == len(others) > 0
    for one, other in zip(ones, others, strict=True):
        assert (one.names, one.places) == (other.names, other.places)
        assert (one.mask is None) == (other.mask is None)
        for tensor, twin in zip(tensors_of(one), tensors_of(other), strict=True):
            assert torch.equal(tensor, twin)


def latents_by_hand(course: BatchSchedule, batch: TrainingBatch, number: int) -> torch.Tensor:
    """One sample's latents: read, fit, encode."""
    example = next(e for e in course.examples if e.name == batch.names[number])
    index = course.examples.index(example)
    pixels = transform_pixels(read_picture(example.path).pixels, course.placements[index], course.crop(index, 0), False)
    return QuickEncoders().latents(torch.from_numpy(pixels)[None])[0]


def test_a_batch_is_what_hand_work_gives(tmp_path: Path):
    course = course_with_files(tmp_path)
    loader = loader_of(course, tmp_path)
    places: list[int] = []
    for batch in batches_of(loader, 1):
        for number, name in enumerate(batch.names):
            assert torch.equal(batch.latents[number], latents_by_hand(course, batch, number)), name
            caption = next(e.caption for e in course.examples if e.name == name)
            length = int(batch.conditioning["length"][number])
            assert torch.equal(batch.conditioning["states"][number, :length], QuickEncoders().states(caption))
        assert batch.latents.shape[0] == len(batch) == batch.conditioning["states"].shape[0]
        assert batch.latents.dim() == 5
        assert batch.latents.dtype == torch.float32
        assert torch.equal(batch.weights, torch.ones(len(batch)))
        assert batch.mask is None
        places += batch.places
    assert places == list(range(course.at(0).samples))


def test_all_is_made_beforehand_and_only_once(tmp_path: Path):
    course = course_with_files(tmp_path, flip_aug=True, repeats=6, shuffle_caption=True)
    first = loader_of(course, tmp_path)
    prepared = first.prepare(course.steps_per_epoch, SilentProgress())
    captions = len(course.captions(course.steps_per_epoch))
    assert prepared.figures.pop("cache_seconds")
    assert prepared.figures["latents_made"] == len(course.latent_variants(course.steps_per_epoch)) == 14
    assert prepared.figures["texts_made"] == captions > 7
    assert prepared.findings == []
    assert not prepared.excluded.reasons
    calls = (list(encoders_in(first).seen), list(encoders_in(first).read))
    fresh = batches_of(first, course.steps_per_epoch)
    assert calls == (encoders_in(first).seen, encoders_in(first).read)

    second = loader_of(course, tmp_path)
    again = second.prepare(course.steps_per_epoch, SilentProgress())
    assert (again.figures["latents_reused"], again.figures["texts_reused"]) == (14, captions)
    assert not encoders_in(second).seen
    assert not encoders_in(second).read
    assert_same(fresh, batches_of(second, course.steps_per_epoch))


def test_what_was_prepared_is_what_would_have_been_made_live(tmp_path: Path):
    course = course_with_files(tmp_path, flip_aug=True, alpha=True, alpha_mask=True)
    live = loader_of(course, tmp_path / "live")
    cached = loader_of(course, tmp_path, memory_bytes=0, vae_batch_size=3)
    cached.prepare(20, SilentProgress())
    assert max(encoders_in(cached).seen) == 3
    assert_same(batches_of(live, 20), batches_of(cached, 20))


def test_processes_share_the_work(tmp_path: Path):
    course = replace(course_with_files(tmp_path, shuffle_caption=True), world=2)
    loaders = [loader_of(course, tmp_path) for _ in range(2)]
    shares = [loader.prepare(6, SilentProgress(), rank, 2).figures for rank, loader in enumerate(loaders)]
    whole = loader_of(course, tmp_path / "alone").prepare(6, SilentProgress()).figures
    for name in ("latents_made", "texts_made"):
        assert sum(int(str(share[name])) for share in shares) == whole[name]
        assert all(share[name] for share in shares)


def test_random_crops_and_colours_are_made_in_each_step(tmp_path: Path):
    course = course_with_files(tmp_path, random_crop=True, color_aug=True)
    loader = loader_of(course, tmp_path)
    assert loader.prepare(3, SilentProgress()).figures["latents_made"] == 0
    once, twice = batches_of(loader, 6), batches_of(loader_of(course, tmp_path), 6)
    assert_same(once, twice)
    assert not list((tmp_path / "cache").glob("latents/*"))
    shown = [batch.latents[i] for batch in once for i, name in enumerate(batch.names) if name == "emoji/0.png"]
    assert not torch.equal(shown[0], shown[1])


def test_another_dtype_makes_texts_and_latents_anew_and_says_so(tmp_path: Path):
    course = course_with_files(tmp_path)
    loader_of(course, tmp_path).prepare(3, SilentProgress())
    other = loader_of(course, tmp_path, QuickEncoders(identity={**IDENTITY, "texts.encoder": "c"}))
    prepared = other.prepare(3, SilentProgress())
    assert prepared.figures["latents_reused"] == 7
    assert (prepared.figures["texts_made"], prepared.figures["texts_stale"]) == (8, 8)
    (finding,) = prepared.findings
    assert finding.code == "CACHE-STALE"
    assert "encoder was b, is c" in finding.message


def test_a_changed_picture_and_a_damaged_entry_are_made_again(tmp_path: Path):
    course = course_with_files(tmp_path)
    loader_of(course, tmp_path).prepare(3, SilentProgress())
    Image.new("RGB", (64, 64), "red").save(course.examples[0].path)
    entry = sorted((tmp_path / "cache" / "texts").iterdir())[0]
    entry.write_bytes(entry.read_bytes()[:-8])
    prepared = loader_of(course, tmp_path).prepare(3, SilentProgress())
    assert prepared.figures["latents_made"] == 1
    assert (prepared.figures["texts_made"], prepared.figures["texts_remade"]) == (1, 1)
    assert [finding.code for finding in prepared.findings] == ["CACHE-REMADE"]
    assert "the caption" in prepared.findings[0].subject


def test_a_cut_off_entry_during_the_run_is_made_again(tmp_path: Path):
    course = course_with_files(tmp_path)
    expected = batches_of(loader_of(course, tmp_path), 3)
    for path in (tmp_path / "cache").rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-8])
    assert_same(expected, batches_of(loader_of(course, tmp_path), 3))


def test_pictures_may_go_away_once_they_are_in_the_cache(tmp_path: Path):
    course = course_with_files(tmp_path)
    loader = loader_of(course, tmp_path, memory_bytes=0)
    loader.prepare(3, SilentProgress())
    for example in course.examples:
        example.path.unlink()
    assert len(batches_of(loader, 3)) > 0


def test_a_non_finite_text_takes_its_pictures_out(tmp_path: Path):
    course = course_with_files(tmp_path)
    loader = loader_of(course, tmp_path, QuickEncoders(poison="tag3"))
    prepared = loader.prepare(3, SilentProgress())
    assert set(prepared.excluded.reasons) == {"emoji/3.png"}
    assert [(f.code, f.subject, f.level) for f in prepared.findings] == [
        ("PICTURE-QUARANTINED", "emoji/3.png", Level.WARNING)
    ]
    assert "the text encoder made" in prepared.findings[0].message
    micros = [micro for step in course.iterate_steps(0, course.steps_per_epoch) for micro in step.micro_batches]
    loaded = [batch for micro in micros if (batch := loader.load(micro, prepared.excluded.reasons))]
    assert sorted(name for batch in loaded for name in batch.names) == [f"emoji/{i}.png" for i in (0, 1, 2, 4, 5, 6)]
    with pytest.raises(NumericsError) as caught:
        batches_of(loader, course.steps_per_epoch)
    assert "emoji/3.png" in caught.value.subject


@pytest.mark.parametrize(
    ("encoders", "options", "blamed"),
    [
        (QuickEncoders(scale=float("nan")), {}, "the VAE"),
        (QuickEncoders(poison="tag"), {}, "the text encoder"),
        (QuickEncoders(poison="tag3"), {"quarantine": False}, "the text encoder"),
    ],
)
def test_an_encoder_that_fails_often_ends_the_run(tmp_path: Path, encoders: QuickEncoders, options: dict, blamed: str):
    loader = loader_of(course_with_files(tmp_path), tmp_path, encoders, **options)
    with pytest.raises(NumericsError) as caught:
        loader.prepare(3, SilentProgress())
    assert caught.value.code == "CACHE-NONFINITE"
    assert caught.value.message.startswith(blamed)


def test_a_hopeless_encoder_is_not_tried_on_all(tmp_path: Path):
    examples = examples_of(tmp_path / "emoji", subset_of(0), shapes=((64, 64),) * 20)
    write_pictures(examples)
    encoders = QuickEncoders(scale=float("nan"))
    with pytest.raises(NumericsError):
        loader_of(course_of(examples), tmp_path, encoders).prepare(20, SilentProgress())
    assert sum(encoders.seen) == 8


def test_a_live_picture_is_checked_too(tmp_path: Path):
    loader = loader_of(course_with_files(tmp_path, random_crop=True), tmp_path, QuickEncoders(scale=float("inf")))
    with pytest.raises(NumericsError) as caught:
        batches_of(loader, 1)
    assert caught.value.subject.startswith("emoji/")


def test_pictures_that_cannot_be_read_are_all_told(tmp_path: Path):
    course = course_with_files(tmp_path)
    for number in (1, 4):
        path = course.examples[number].path
        path.write_bytes(path.read_bytes()[:-900])
    prepared = loader_of(course, tmp_path, vae_batch_size=4).prepare(3, SilentProgress())
    errors = [finding for finding in prepared.findings if finding.level is Level.ERROR]
    assert len(errors) == 2
    assert set(prepared.excluded.reasons) == {"emoji/1.png", "emoji/4.png"}
    assert prepared.figures["latents_made"] == 5


def test_a_full_disk_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("finitune.files.writer.flush_to_disk", refuse)
    with pytest.raises(FileError) as caught:
        loader_of(course_with_files(tmp_path), tmp_path).prepare(3, SilentProgress())
    assert caught.value.code == "FILE-NOT-WRITTEN"
    assert not list((tmp_path / "cache").rglob("*.*"))


def masked_example(folder: Path, alpha_mask: bool) -> list[TrainingExample]:
    """Two pictures, the second with a mask file whose right half is white."""
    examples = examples_of(folder / "emoji", subset_of(0, alpha_mask=alpha_mask), shapes=((64, 64), (64, 64)))
    write_pictures(examples, alpha=alpha_mask)
    mask = np.zeros((64, 64, 3), np.uint8)
    mask[:, 32:, 0] = 255
    Image.fromarray(mask).save(folder / "mask.png")
    return [examples[0], replace(examples[1], mask=folder / "mask.png")]


def test_masks_come_from_files_and_from_alpha(tmp_path: Path):
    half = torch.cat([torch.zeros(8, 4), torch.ones(8, 4)], dim=1)
    for alpha, masked, expected in (
        (False, True, {"emoji/0.png": torch.ones(8, 8), "emoji/1.png": half}),
        (True, False, {"emoji/0.png": half, "emoji/1.png": half}),
        (False, False, {}),
    ):
        folder = tmp_path / f"{alpha}{masked}"
        folder.mkdir()
        course = course_of(masked_example(folder, alpha), batch_size=2)
        (batch,) = batches_of(loader_of(course, folder, masked_loss=masked), 1)
        found = {} if batch.mask is None else dict(zip(batch.names, batch.mask, strict=True))
        assert set(found) == set(expected)
        for name, mask in found.items():
            assert torch.equal(mask, expected[name][None, None])


def test_a_mask_of_another_shape_is_told(tmp_path: Path):
    course = course_of(masked_example(tmp_path, alpha_mask=False))
    Image.new("RGB", (64, 32)).save(tmp_path / "mask.png")
    prepared = loader_of(course, tmp_path, masked_loss=True).prepare(2, SilentProgress())
    assert [(f.code, f.level) for f in prepared.findings] == [("MASK-SHAPE", Level.ERROR)]
    Image.new("RGB", (32, 32)).save(tmp_path / "mask.png")
    assert loader_of(course, tmp_path, masked_loss=True).prepare(2, SilentProgress()).findings == []


def test_weights_and_multipliers(tmp_path: Path):
    examples = examples_of(tmp_path / "class", subset_of(0, is_reg=True))
    write_pictures(examples)
    course = course_of(examples, [dataset_of(network_multiplier=0.5)], batch_size=2)
    batch = batches_of(loader_of(course, tmp_path, prior_loss_weight=0.25), 1)[0]
    assert set(batch.weights.tolist()) == {0.25}
    assert batch.multiplier == 0.5


def test_what_is_left_of_a_batch_keeps_its_place(tmp_path: Path):
    course = course_with_files(tmp_path)
    loader = loader_of(course, tmp_path)
    micro = next(m for step in course.epoch(0) for m in step.micro_batches if len(m) == 2)
    whole = loader.load(micro)
    assert whole is not None
    rest = loader.load(micro, ExcludedExamples({whole.names[0]: "its loss is NaN"}).reasons)
    assert rest is not None
    assert rest.places == whole.places[1:]
    assert torch.equal(rest.latents, whole.latents[1:])
    assert loader.load(micro, frozenset(whole.names)) is None


def test_memory_is_bounded():
    recent = LruTensorCache(100)
    for number in range(10):
        recent.put(str(number), {"a": torch.zeros(10)})
        assert recent.get("0") is not None or number > 1
        assert recent.size_bytes <= 100
    assert len(recent) == 2
    recent.put("large", {"a": torch.zeros(1000)})
    assert len(recent) == recent.size_bytes == 0


def test_the_next_is_made_while_this_one_is_used():
    made: list[int] = []
    ready = [threading.Event() for _ in range(4)]

    def items() -> Iterator[int]:
        for number in range(3):
            made.append(number)
            ready[number].set()
            yield number
        ready[3].set()

    seen = []
    for number in prefetch_items(items()):
        assert ready[number + 1].wait(5)
        assert len(made) <= number + 2
        seen.append(number)
    assert seen == [0, 1, 2]


def test_errors_come_where_the_item_would_have_come():
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("the second")

    coming = prefetch_items(items())
    assert next(coming) == 1
    with pytest.raises(ValueError, match="the second"):
        next(coming)
    before = threading.active_count()
    abandoned = prefetch_items(iter(range(9)))
    assert next(abandoned) == 0
    abandoned.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
