"""Captions: the order and meaning of sd-scripts, by a twin of its rules, and what each option promises."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finitune.config.datasets import ResolvedSubset
from finitune.datasets.captions import (
    CaptionContext,
    build_final_caption,
    compute_token_warmup_steps,
    expand_wildcards,
    has_random_captions,
)
from finitune.datasets.items import make_generator

FIRST = CaptionContext(seed=1, name="0/cat.png", epoch=0, time=0)


def subset(**options: object) -> ResolvedSubset:
    return ResolvedSubset.model_validate(options)


def drawings(text: str, count: int = 60, **options: Any) -> set[str]:
    """All captions that many showings have."""
    chosen = subset(caption_variants=0, **options)
    return {build_final_caption(text, chosen, replace(FIRST, time=time)) for time in range(count)}


def wildcards_of_kohya(text: str) -> set[str]:
    """Every text that sd-scripts could make of its wildcards: all choices of {a|b}, with {{ and }} as braces."""
    text = text.replace("{{", "<").replace("}}", ">")
    rows = [re.split(r"\|", found) for found in re.findall(r"\{([^}]+)\}", text)]
    made = set()
    for choice in itertools.product(*rows):
        chosen = iter(choice)
        made.add(re.sub(r"\{([^}]+)\}", lambda _, c=chosen: next(c), text).replace("<", "{").replace(">", "}"))
    return made


def test_a_plain_caption_stays_as_it_is():
    assert build_final_caption(" 1girl,smile ,  sky ", subset(), FIRST) == "1girl,smile ,  sky"
    assert not has_random_captions(subset(caption_prefix="x", keep_tokens=2))


def test_the_first_line_counts_unless_lines_are_drawn():
    text = "\n a cat \r\n\na dog\n"
    assert build_final_caption(text, subset(), FIRST) == "a cat"
    assert drawings(text, enable_wildcard=True) == {"a cat", "a dog"}


def test_prefix_and_suffix_stand_at_whichever_line_was_drawn():
    options: dict[str, Any] = {"caption_prefix": "emoji style,", "caption_suffix": ", flat"}
    assert drawings("a cat\na dog", enable_wildcard=True, **options) == {
        "emoji style, a cat , flat",
        "emoji style, a dog , flat",
    }
    assert drawings("", **options) == {"emoji style, , flat"}


@pytest.mark.parametrize(
    "text",
    ["a {red|blue} {cat|dog}", "{{a|b}}", "{a}", "{}", "a | b", "{|big} cat", "x {{y}} {p|q}", "{a|b", "a}b", "{a|b}}"],
)
def test_wildcards_are_those_of_kohya(text: str):
    assert {expand_wildcards(text, make_generator(seed)) for seed in range(80)} == wildcards_of_kohya(text)


def test_wildcards_may_be_nested():
    text = "{a {red|blue} cat|two {dogs|{big|small} birds}}"
    expected = {"a red cat", "a blue cat", "two dogs", "two big birds", "two small birds"}
    assert {expand_wildcards(text, make_generator(seed)) for seed in range(150)} == expected
    assert expand_wildcards("{a|{b", make_generator(0)) == "{a|{b"


@given(st.text(alphabet="ab{}|,", max_size=12), st.integers(0, 9))
@settings(max_examples=80)
def test_no_text_breaks_the_wildcards(text: str, seed: int):
    made = expand_wildcards(text, make_generator(seed))
    assert set(made) <= set(text)
    assert "{" in text or "}}" in text or made == text


def test_shuffling_moves_all_but_the_kept():
    made = drawings("trigger, a, b, c", count=200, shuffle_caption=True, keep_tokens=1)
    assert made == {", ".join(["trigger", *rest]) for rest in itertools.permutations("abc")}


def test_two_marks_keep_both_ends_and_are_not_seen():
    text = "1girl, sara ||| a, b ||| best, art"
    made = drawings(text, keep_tokens_separator="|||", shuffle_caption=True, keep_tokens=9)
    assert made == {"1girl, sara, a, b, best, art", "1girl, sara, b, a, best, art"}
    assert drawings(text, keep_tokens_separator="|||") == {"1girl, sara, a, b, best, art"}


def test_bound_tags_move_as_one():
    made = drawings("a, sky;;;cloud, b", shuffle_caption=True, secondary_separator=";;;", count=100)
    assert {caption.count("sky,cloud") for caption in made} == {1}
    assert len(made) == 6


def test_tags_are_joined_by_their_own_separator():
    assert drawings("a. b. c", shuffle_caption=True, keep_tokens=3, caption_separator=".") == {"a. b. c"}


def test_tags_drop_at_the_rate_and_kept_ones_never():
    options = subset(caption_tag_dropout_rate=0.25, keep_tokens=1, caption_variants=0)
    text = ", ".join(["trigger", *(f"t{i}" for i in range(20))])
    counts: Counter[str] = Counter()
    for time in range(400):
        counts.update(build_final_caption(text, options, replace(FIRST, time=time)).split(", "))
    assert counts["trigger"] == 400
    assert sum(counts.values()) - 400 == pytest.approx(0.75 * 20 * 400, rel=0.03)
    assert drawings("a, b", caption_tag_dropout_rate=1.0) == {""}


def test_warm_up_adds_tags_step_by_step():
    options = subset(token_warmup_min=2, token_warmup_step=8)
    lengths = [
        len(build_final_caption("a, b, c, d, e, f", options, replace(FIRST, step=s)).split(", ")) for s in range(10)
    ]
    # sd-scripts: floor(step * (tags - min) / steps) + min
    assert lengths == [2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert compute_token_warmup_steps(subset(token_warmup_step=0.1), 1605) == 160
    assert build_final_caption("a", options, FIRST) == "a"


def test_captions_drop_at_the_rate():
    options = subset(caption_dropout_rate=0.3)
    dropped = sum(build_final_caption("a", options, replace(FIRST, time=time)) == "" for time in range(4000))
    assert dropped / 4000 == pytest.approx(0.3, abs=0.02)


def test_every_nth_epoch_is_without_captions():
    options = subset(caption_dropout_every_n_epochs=3)
    captions = [build_final_caption("a", options, replace(FIRST, epoch=epoch, time=epoch)) for epoch in range(6)]
    assert captions == ["a", "a", "", "a", "a", ""]


def test_variants_go_round_and_dropout_is_drawn_apart():
    text = ", ".join("abcdefgh")
    options = subset(shuffle_caption=True, caption_variants=3)
    made = [build_final_caption(text, options, replace(FIRST, time=time)) for time in range(9)]
    assert made[:3] == made[3:6] == made[6:]
    assert len(set(made)) == 3
    dropping = options.model_copy(update={"caption_dropout_rate": 0.5})
    kept = [build_final_caption(text, dropping, replace(FIRST, time=time)) for time in range(9)]
    assert {(a, b) for a, b in zip(kept, made, strict=True) if a} <= set(zip(made, made, strict=True))
    assert "" in kept


def test_chance_depends_on_seed_and_picture_alone():
    options = subset(shuffle_caption=True, caption_dropout_rate=0.2, enable_wildcard=True)
    text = "a, b, c, {d|e}"
    assert build_final_caption(text, options, FIRST) == build_final_caption(text, options, FIRST)
    others = [replace(FIRST, seed=seed) for seed in range(20)] + [replace(FIRST, name=f"{n}") for n in range(20)]
    assert len({build_final_caption(text, options, other) for other in others}) > 10
