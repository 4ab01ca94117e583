"""The course of a run: every picture its due, whatever the devices; the same bits at every resume."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finitune.datasets.batch_schedule import (
    BatchSchedule,
    LatentVariant,
    ScheduledStep,
    disable_augmentation,
    exclude_examples,
    has_fixed_latents,
    to_latent_variant,
)
from finitune.datasets.items import BucketPlacement, ExampleAppearance
from finitune.errors import UsageError
from tests.dataset_made import course_of, dataset_of, examples_of, subset_of

FOLDER = Path("10_emoji")
CHANCES = ("flip_aug", "shuffle_caption", "random_crop", "color_aug")
VARIED = {**dict.fromkeys(CHANCES, True), "caption_dropout_rate": 0.3}


def varied_course(repeats: int = 3, batch_size: int = 2, **named: int) -> BatchSchedule:
    """Two datasets, one of them with a batch size of its own."""
    first = examples_of(FOLDER, subset_of(0, **VARIED), repeats)
    second = examples_of(Path("1_other"), subset_of(1, keep_tokens=1, shuffle_caption=True))
    datasets = [dataset_of(), dataset_of(batch_size=3)]
    return course_of([*first, *second], datasets, batch_size=batch_size, **named)


GOLDEN = [
    (6, True, "c, b, a, tag6"),
    (3, True, "c, tag3, a, b"),
    (1, True, "tag1, b, c, a"),
    (5, True, "b, a, tag5, c"),
]


def shown(steps: tuple[ScheduledStep, ...]) -> list[ExampleAppearance]:
    return [appearance for step in steps for micro in step.micro_batches for appearance in micro.appearances]


COURSES = st.builds(
    varied_course,
    repeats=st.integers(1, 4),
    batch_size=st.integers(1, 5),
    accumulation=st.integers(1, 3),
    world=st.integers(1, 3),
    seed=st.integers(0, 3),
)


@given(COURSES, st.integers(0, 5))
@settings(max_examples=30)
def test_every_example_has_its_repeats_in_an_epoch(course: BatchSchedule, epoch: int):
    counts = Counter(appearance.example for appearance in shown(course.epoch(epoch)))
    assert counts == {number: example.repeats for number, example in enumerate(course.examples)}
    assert sum(step.samples for step in course.epoch(epoch)) == course.samples_per_epoch


@given(COURSES)
@settings(max_examples=30)
def test_devices_share_a_step_without_repetition(course: BatchSchedule):
    for number, step in enumerate(course.epoch(0)):
        shares = [course.select_micro_batches(number, rank) for rank in range(course.world)]
        together = [micro for share in shares for micro in share]
        assert sorted(together, key=lambda micro: micro.first) == list(step.micro_batches)
        places = [micro.first + i for micro in step.micro_batches for i in range(len(micro))]
        assert places == list(range(step.samples))
        assert max(map(len, shares)) <= course.accumulation


@given(COURSES)
@settings(max_examples=30)
def test_the_micro_batches_do_not_depend_on_the_devices(course: BatchSchedule):
    alone = replace(course, accumulation=1, world=1)
    listed = [micro.appearances for step in course.epoch(1) for micro in step.micro_batches]
    assert listed == [micro.appearances for step in alone.epoch(1) for micro in step.micro_batches]


def test_two_devices_see_what_one_that_accumulates_sees():
    one, two = varied_course(accumulation=2), varied_course(world=2)
    assert one.steps_per_epoch == two.steps_per_epoch
    assert [one.at(step) for step in range(30)] == [two.at(step) for step in range(30)]


@given(COURSES)
@settings(max_examples=20)
def test_micro_batches_are_of_one_dataset_and_bucket_and_full_but_for_the_tail(course: BatchSchedule):
    rooms: Counter[tuple[int, tuple[int, int]]] = Counter()
    for step in course.epoch(2):
        for micro in step.micro_batches:
            examples = [course.examples[one.example] for one in micro.appearances]
            assert {course.placements[one.example].bucket for one in micro.appearances} == {micro.bucket}
            assert len({example.subset.dataset for example in examples}) == 1
            dataset = examples[0].subset.dataset
            assert len(micro) <= course.room(dataset)
            rooms[dataset, micro.bucket] += len(micro) < course.room(dataset)
    assert max(rooms.values()) <= 1


def test_steps_are_the_same_from_wherever_they_are_asked():
    course = varied_course()
    forward = list(course.iterate_steps(0, 40))
    backward = [varied_course().at(step) for step in reversed(range(40))]
    assert forward == backward[::-1]
    assert tuple(forward[: course.steps_per_epoch]) == course.epoch(0)


def test_epochs_and_seeds_differ():
    course = varied_course()
    orders = [tuple(one.example for one in shown(course.epoch(epoch))) for epoch in range(4)]
    orders.append(tuple(one.example for one in shown(varied_course(seed=6).epoch(0))))
    assert len(set(orders)) == 5


def test_order_and_chance_are_pinned():
    course = course_of(examples_of(FOLDER, subset_of(0, flip_aug=True, shuffle_caption=True)), batch_size=2)
    found = [(one.example, one.flipped, one.caption) for step in range(3) for one in shown((course.at(step),))]
    assert found == GOLDEN


def test_chance_is_as_it_should_be():
    course = course_of(examples_of(FOLDER, subset_of(0, flip_aug=True, random_crop=True), repeats=100))
    appearances = shown(course.epoch(0))
    assert sum(one.flipped for one in appearances) / len(appearances) == pytest.approx(0.5, abs=0.06)
    for number, placement in enumerate(course.placements):
        (wide, high), (width, height) = placement.scaled, placement.bucket
        corners = {one.crop for one in appearances if one.example == number}
        assert {left for left, _ in corners} == set(range(wide - width + 1))
        assert {top for _, top in corners} == set(range(high - height + 1))
    assert all(one.color is None for one in appearances)


def test_crops_are_in_the_middle_unless_random():
    course = course_of(examples_of(FOLDER, subset_of(0), shapes=((200, 100),)))
    (one,) = shown(course.epoch(0))
    assert course.placements[0] == BucketPlacement((80, 48), (96, 48))
    assert one.crop == (8, 0)
    assert not one.flipped


def test_one_more_picture_leaves_the_others_chances():
    examples = examples_of(FOLDER, subset_of(0, **VARIED), repeats=2)
    few, many = (
        {(one.example, one.caption, one.crop, one.flipped, one.color) for one in shown(course_of(some).epoch(3))}
        for some in (examples[:5], examples)
    )
    assert few < many


def test_captions_and_variants_are_all_that_the_run_shows():
    course = varied_course()
    steps = 2 * course.steps_per_epoch + 1
    run = shown(tuple(course.iterate_steps(0, steps)))
    assert set(course.captions(steps)) == {"", *(one.caption for one in run)}
    variants = course.latent_variants(steps)
    assert {course.examples[variant.example].subset.dataset for variant in variants} == {1}
    assert len(variants) == len(set(variants)) == 7
    flipping = course_of(examples_of(FOLDER, subset_of(0, flip_aug=True), repeats=20))
    assert len(flipping.latent_variants(flipping.steps_per_epoch)) == 14
    assert len(flipping.latent_variants(1)) == 1


def all_captions(course: BatchSchedule, steps: int) -> dict[str, str]:
    """The slow twin: every appearance of every step."""
    found = {"": ""}
    for one in shown(tuple(course.iterate_steps(0, steps))):
        found.setdefault(one.caption, course.examples[one.example].name)
    return found


def all_variants(course: BatchSchedule, steps: int) -> list[LatentVariant]:
    """The slow twin: every appearance of every step."""
    every = shown(tuple(course.iterate_steps(0, steps)))
    return list(
        dict.fromkeys(to_latent_variant(one) for one in every if has_fixed_latents(course.examples[one.example]))
    )


OPTIONS = st.fixed_dictionaries(
    {
        "flip_aug": st.booleans(),
        "random_crop": st.booleans(),
        "shuffle_caption": st.booleans(),
        "caption_variants": st.integers(0, 3),
        "caption_dropout_rate": st.sampled_from([0.0, 0.4, 1.0]),
        "caption_dropout_every_n_epochs": st.integers(0, 3),
        "caption_tag_dropout_rate": st.sampled_from([0.0, 0.3]),
        "token_warmup_step": st.sampled_from([0, 0.5, 7]),
        "token_warmup_min": st.integers(1, 2),
        "keep_tokens": st.integers(0, 2),
    }
)


@given(OPTIONS, OPTIONS, st.integers(1, 3), st.integers(0, 40))
@settings(deadline=None, max_examples=40)
def test_what_is_to_be_encoded_is_what_every_single_step_would_tell(first, second, repeats: int, steps: int):
    examples = examples_of(FOLDER, subset_of(0, **first), repeats)
    course = course_of([*examples, *examples_of(Path("1_other"), subset_of(1, **second))], [dataset_of()] * 2, steps=40)
    assert list(course.captions(steps).items()) == list(all_captions(course, steps).items())
    assert list(course.latent_variants(steps)) == all_variants(course, steps)


def test_a_million_steps_are_not_walked_where_nothing_new_can_come():
    options = {"flip_aug": True, "shuffle_caption": True, "caption_variants": 4, "token_warmup_step": 30}
    course = course_of(examples_of(FOLDER, subset_of(0, **options), repeats=2), steps=1_000_000)
    walked = Counter[int]()

    class Watched(BatchSchedule):
        def shown(self, steps: int):
            for one in super().shown(steps):
                walked[one[2]] += 1
                yield one

    watched = Watched(**{name: getattr(course, name) for name in course.__dataclass_fields__})
    assert watched.captions(1_000_000) == all_captions(course, 200)
    assert list(watched.latent_variants(1_000_000)) == all_variants(course, 200)
    assert max(walked) < 200


def test_a_warm_up_follows_the_steps():
    subset = subset_of(0, token_warmup_step=0.5)
    course = replace(course_of(examples_of(FOLDER, subset)), steps=28)
    lengths = [len(one.caption.split(", ")) for one in shown(tuple(course.iterate_steps(0, 28)))]
    assert lengths == [1 + 3 * step // 14 for step in range(14)] + [4] * 14


def test_what_is_left_keeps_its_place():
    course = course_of(examples_of(FOLDER, subset_of(0)), batch_size=8, accumulation=9)
    for micro in course.at(0).micro_batches:
        names = [course.examples[one.example].name for one in micro.appearances]
        left = exclude_examples(micro, course, {names[0]})
        assert left == list(enumerate(micro.appearances, micro.first))[1:]


def test_an_unvaried_example_is_shown_whole():
    options = {**VARIED, "num_repeats": 3, "token_warmup_step": 5}
    course = course_of([disable_augmentation(one) for one in examples_of(FOLDER, subset_of(0, **options), repeats=3)])
    for epoch in (0, 7):
        assert {(one.caption, one.flipped, one.color) for one in shown(course.epoch(epoch))} == {
            (f"tag{i}, a, b, c", False, None) for i in range(7)
        }


def test_nothing_to_show_is_an_error():
    with pytest.raises(UsageError) as caught:
        BatchSchedule((), (), (), seed=0)
    assert caught.value.code == "COURSE-EMPTY"
