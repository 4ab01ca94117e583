"""From folders to examples: what is matched, what is told, and that all of it is told at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from finitune.config.datasets import Subset
from finitune.datasets.dataset_scan import (
    build_dataset_summary,
    compute_matched_repeats,
    scan_datasets,
    split_validation,
    verify_pictures,
)
from finitune.datasets.folder_listing import build_folder_labels
from finitune.datasets.items import TrainingExample
from finitune.progress import SilentProgress
from finitune.report import Finding, Level, limit_findings
from tests.picture_files import captions, found, noise_picture, resolved, saved, scanned, written


def codes(findings: object) -> list[str]:
    return sorted(finding.code for finding in getattr(findings, "findings", findings))


def folder(base: Path, *names: str) -> Path:
    """A folder with pictures, each with a caption of its own name."""
    for name in names:
        saved(base / name)
        written((base / name).with_suffix(".txt"), name)
    return base


def test_a_clean_folder_has_nothing_to_tell(tmp_path: Path):
    folder(tmp_path / "cats", "b.png", "a.JPG", "c.webp")
    written(tmp_path / "cats" / ".hidden.png", b"")
    written(tmp_path / "cats" / "a.safetensors", b"")
    result = scanned(Subset(image_dir=tmp_path / "cats", num_repeats=3))
    assert result.findings == ()
    (examples,) = result.examples
    assert [example.name for example in examples] == ["cats/a.JPG", "cats/b.png", "cats/c.webp"]
    assert {example.repeats for example in examples} == {3} and {example.size for example in examples} == {(8, 6)}
    assert captions(result) == {name: name for name in ("a.JPG", "b.png", "c.webp")}
    assert result.figures == {
        "pictures": 3,
        "appearances": 9,
        "captions": 3,
        "masks": 0,
        "smallest": "8x6",
        "largest": "8x6",
    }
    assert build_dataset_summary(result).rows == (("1", "cats", "3", "3", "9", "3", "0", "8x6"),)


@pytest.mark.parametrize("extension", ["txt2", ".txt2", None])
def test_the_ending_of_captions(tmp_path: Path, extension: str | None):
    saved(tmp_path / "a.png")
    written(tmp_path / "a.TXT2", "two")
    written(tmp_path / "a.caption", "other")
    result = scanned(Subset(image_dir=tmp_path, caption_extension=extension))
    assert captions(result) == {"a.png": "two" if extension else "other"}
    assert result.findings == ()


def test_two_captions_of_one_picture(tmp_path: Path):
    folder(tmp_path, "a.png")
    written(tmp_path / "a.caption", "other")
    result = scanned(tmp_path)
    assert captions(result) == {"a.png": "a.png"} and codes(result) == ["CAPTION-TWICE"]


def test_captions_and_pictures_that_lack_each_other(tmp_path: Path):
    folder(tmp_path, "a.png")
    for number in range(7):
        saved(tmp_path / f"b{number}.png")
    written(tmp_path / "c.txt", "nobody")
    result = scanned(Subset(image_dir=tmp_path, class_tokens="sks cat"))
    missing = found(result, "CAPTION-MISSING")
    assert missing.level is Level.WARNING and missing.evidence["count"] == 7
    assert missing.evidence["first"] == [f"b{number}.png" for number in range(5)]
    assert "'sks cat'" in missing.message and "and 2 more" in missing.message
    assert found(result, "CAPTION-WITHOUT-PICTURE").evidence == {"count": 1, "first": ["c.txt"]}
    assert captions(result)["b3.png"] == "sks cat"


def test_class_tokens_for_all_are_meant_and_another_ending_is_seen(tmp_path: Path):
    saved(tmp_path / "a.png")
    assert found(scanned(Subset(image_dir=tmp_path, class_tokens="cat")), "CAPTION-MISSING").level is Level.NOTE
    assert found(scanned(tmp_path), "CAPTION-MISSING").level is Level.WARNING
    written(tmp_path / "a.png.tags", "cat")
    assert "caption_extension = '.png.tags'" in found(scanned(tmp_path), "CAPTION-MISSING").remedy
    (example,) = scanned(Subset(image_dir=tmp_path, caption_extension=".png.tags")).examples[0]
    assert example.caption == "cat"


def metadata(base: Path, entries: object) -> Subset:
    file = written(base / "meta.json", entries if isinstance(entries, str) else json.dumps(entries))
    return Subset(image_dir=base / "img", metadata_file=file)


def test_metadata_names_pictures_in_any_way(tmp_path: Path):
    for name in ("a.png", "b.png", "c.d.png", "e.png", "left.png"):
        saved(tmp_path / "img" / name)
    outside = saved(tmp_path / "outside.png")
    entries = {
        "a": {"caption": "A cat", "tags": "cat, grass"},
        "b.png": {"tags": ["x", "y"]},
        "c.d": {"caption": " C "},
        "C:\\far\\e.png": {},
        str(outside): {"caption": "O"},
        "gone.png": {"caption": "G"},
    }
    result = scanned(metadata(tmp_path, entries))
    wanted = {"a.png": "A cat, cat, grass", "b.png": "x, y", "c.d.png": "C", "e.png": "", "outside.png": "O"}
    assert captions(result) == wanted
    assert found(result, "CAPTION-EMPTY").evidence["first"] == ["e.png"]
    assert found(result, "METADATA-LEFT-OUT").evidence["first"] == ["left.png"]
    assert found(result, "METADATA-WITHOUT-PICTURE").evidence["first"] == ["gone.png"]


@pytest.mark.parametrize(
    ("entries", "code", "told"),
    [
        ('{"a": {"caption": "x"}\n "b"', "METADATA-JSON", "line 2, column 2"),
        (["a.png"], "METADATA-ENTRY", "is a list"),
        ({"a": "text"}, "METADATA-ENTRY", "gives 'a' a str"),
        ({"a": {"caption": 3}}, "METADATA-ENTRY", "no text but 3"),
        ({"gone": {}}, "DATASET-EMPTY", "names no picture"),
    ],
)
def test_faults_of_metadata(tmp_path: Path, entries: object, code: str, told: str):
    saved(tmp_path / "img" / "a.png")
    finding = found(scanned(metadata(tmp_path, entries)), code)
    assert finding.level is Level.ERROR and told in finding.message and finding.remedy


def test_masks_are_matched_and_have_the_shape_of_their_pictures(tmp_path: Path):
    images, masks = folder(tmp_path / "img", "a.png", "b.png", "c.png"), tmp_path / "masks"
    saved(masks / "a.jpg", Image.new("L", (16, 12)))
    saved(masks / "b.png", Image.new("L", (8, 8)))
    saved(masks / "z.png")
    result = scanned(Subset(image_dir=images, conditioning_data_dir=masks))
    assert codes(result) == ["MASK-MISSING", "MASK-SHAPE", "MASK-WITHOUT-PICTURE"]
    shape = found(result, "MASK-SHAPE")
    assert shape.level is Level.ERROR and shape.evidence["mask"] == (8, 8)
    assert [example.mask and example.mask.name for example in result.examples[0]] == ["a.jpg", "b.png", None]
    lost = scanned(Subset(image_dir=images, conditioning_data_dir=tmp_path / "mask"))
    assert "Did you mean 'masks'?" in found(lost, "DATASET-FOLDER-MISSING").remedy


def test_all_faults_are_told_at_once_and_bad_pictures_are_left_out(tmp_path: Path):
    folder(tmp_path / "img", "good.png")
    for number in range(30):
        written(tmp_path / "img" / f"bad{number:02}.png", b"<html>")
    written(tmp_path / "img" / "good.txt", b"girl\x92s hat")
    result = scanned(tmp_path / "img", tmp_path / "imgs", Subset())
    assert [example.name for example in result.examples[0]] == ["img/good.png"]
    bad = [finding for finding in result.findings if finding.code == "PICTURE-NOT-A-PICTURE"]
    assert len(bad) == 21 and bad[-1].evidence["count"] == 30 and bad[-1].evidence["more"] == 10
    told = {"CAPTION-ENCODING", "DATASET-FOLDER-MISSING", "SUBSET-WITHOUT-FOLDER", "CAPTION-MISSING"}
    assert told <= set(codes(result))


def test_empty_data_sets(tmp_path: Path):
    assert codes(scan_datasets((), SilentProgress())) == ["DATASET-EMPTY"]
    assert codes(scan_datasets(resolved(), SilentProgress())) == ["DATASET-EMPTY"]
    written(tmp_path / "img" / "notes.txt", "x")
    result = scanned(tmp_path / "img")
    assert found(result, "DATASET-EMPTY").remedy == "Its files end with .txt."
    assert found(scanned(tmp_path / "img" / "notes.txt"), "DATASET-FOLDER-MISSING").message.endswith("is a file")


def test_the_same_file_and_the_same_folder_twice(tmp_path: Path):
    folder(tmp_path, "a.png", "b.png")
    written(tmp_path / "c.png", (tmp_path / "a.png").read_bytes())
    written(tmp_path / "c.txt", "c")
    name = tmp_path.name
    assert found(scanned(tmp_path), "PICTURE-IDENTICAL").evidence["first"] == [f"{name}/a.png = {name}/c.png"]
    assert "DATASET-FOLDER-TWICE" in codes(scanned(tmp_path, tmp_path))


def test_folders_of_one_name_are_told_apart():
    labels = build_folder_labels([Path("x/img"), Path("y/img"), Path("z")])
    assert list(labels.values()) == ["x/img", "y/img", "z"]


def by_loop(wanted: int, repeats: list[int]) -> list[int]:
    """The slow, obvious twin, as sd-scripts does it."""
    matched, reached, first = [0] * len(repeats), 0, True
    while reached < wanted:
        for place, own in enumerate(repeats):
            matched[place] += own if first else 1
            reached += own if first else 1
            if reached >= wanted:
                break
        first = False
    return matched


@settings(max_examples=60)
@given(st.integers(1, 60), st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_regularisation_is_repeated_as_by_sd_scripts(wanted: int, repeats: list[int]):
    assert compute_matched_repeats(wanted, repeats) == by_loop(wanted, repeats)


def test_regularisation_matches_the_training_pictures(tmp_path: Path):
    folder(tmp_path / "img", "a.png", "b.png")
    folder(tmp_path / "reg", *(f"{letter}.png" for letter in "rstuvw"))
    reg = Subset(image_dir=tmp_path / "reg", is_reg=True)
    result = scanned(Subset(image_dir=tmp_path / "img", num_repeats=10), reg)
    assert [example.repeats for example in result.examples[0]] == [10, 10, 4, 4, 3, 3, 3, 3]
    assert codes(result) == ["REGULARISATION-REPEATS"]
    few = scanned(tmp_path / "img", reg)
    assert found(few, "REGULARISATION-UNUSED").evidence["count"] == 4 and len(few.examples[0]) == 4
    assert found(scanned(reg), "DATASET-EMPTY").level is Level.ERROR


@settings(max_examples=40)
@given(count=st.integers(0, 40), rate=st.floats(0, 0.9), seed=st.integers(0, 9))
def test_the_split_is_stable_and_leaves_both_sides_something(count: int, rate: float, seed: int):
    plain, regular = (resolved(Subset(is_reg=is_reg))[0].subsets[0] for is_reg in (False, True))
    every = [TrainingExample(Path(f"{n}.png"), f"{n}.png", (8, 8), "", plain) for n in range(count)]
    every.append(TrainingExample(Path("r.png"), "r.png", (8, 8), "", regular))
    train, held = split_validation(every, rate, seed)
    assert sorted([*train, *held], key=every.index) == every and every[-1] in train
    assert len(held) == (0 if rate == 0 or count < 2 else min(max(1, round(rate * count)), count - 1))
    again = split_validation(every[::-1], rate, seed)[1]
    assert {example.name for example in again} == {example.name for example in held}


def test_every_picture_is_decoded_and_bad_ones_are_named(tmp_path: Path):
    folder(tmp_path, "a.png", "b.png")
    saved(tmp_path / "c.png", noise_picture(60, 60))
    written(tmp_path / "c.png", (tmp_path / "c.png").read_bytes()[:-500])
    saved(tmp_path / "d.png", Image.new("RGBA", (4, 4)))
    (examples,) = scanned(tmp_path).examples
    findings = verify_pictures(examples, SilentProgress(), workers=2)
    assert codes(findings) == ["PICTURE-NOTE", "PICTURE-TRUNCATED"]
    assert found(findings, "PICTURE-TRUNCATED").subject == str(tmp_path / "c.png")
    assert "100 % of it, laid on white" in found(findings, "PICTURE-NOTE").message


def test_of_many_findings_some_are_told_and_all_are_counted():
    many = [Finding(Level.NOTE, "N", f"{n}", "said") for n in range(9)]
    told = limit_findings([*many, *many])
    assert [finding.subject for finding in told] == ["0", "1", "2", "3", "4", ""]
    assert told[-1].evidence == {"count": 9, "more": 4, "first": ["5", "6", "7", "8"]}


class Counter(SilentProgress):
    """Progress that counts."""

    def __init__(self) -> None:
        self.total, self.done = 0, 0

    def start(self, name: str, total: int | None) -> None:
        self.total += total or 0

    def advance(self, name: str, count: int = 1) -> None:
        self.done += count


@pytest.mark.parametrize(
    "ask",
    [
        scan_datasets,
        lambda data, progress: verify_pictures(scan_datasets(data, SilentProgress()).examples[0], progress),
    ],
)
def test_progress_counts_to_its_end(tmp_path: Path, ask: Callable[..., object]):
    folder(tmp_path, "a.png", "b.png")
    counter = Counter()
    ask(resolved(Subset(image_dir=tmp_path)), counter)
    assert (counter.total, counter.done) == (2, 2)
