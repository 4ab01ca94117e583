"""From the text that was written for a picture to the text that the encoder is given.

Order and meaning are those of sd-scripts (library/train_util.py, process_caption): dropout, one line of several,
prefix and suffix, wildcards, tags kept, warmed up, shuffled and dropped, the secondary separator. It differs in four
places, each where the original loses something: the prefix and the suffix stand at the line that was chosen, whichever
it is; the mark of `keep_tokens_separator` never reaches the encoder; tags are joined by their own separator, not always
by a comma; and wildcards may be nested.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TypeAlias

import torch

from finitune.config.datasets import ResolvedSubset
from finitune.datasets.items import derive_seed, make_generator

CaptionWildcard: TypeAlias = "list[list[str | CaptionWildcard]]"
"""The alternatives of `{a|b}`; each is a row of texts and of wildcards in it."""

_WILDCARD_TOKEN_PATTERN = re.compile(r"\{\{|\}\}|[{}|]|[^{}|]+")


@dataclass(frozen=True)
class CaptionContext:
    """When a caption is shown: all that chance and progress depend on.

    `time` counts how often the picture `name` was shown before in the run; `step` of `steps` is the optimiser step.
    """

    seed: int
    name: str
    epoch: int
    time: int
    step: int = 0
    steps: int = 0


def draw_uniform(*key: object) -> float:
    """A number in [0, 1) that depends on the key alone."""
    return derive_seed(*key) / 2**63


def has_random_captions(subset: ResolvedSubset) -> bool:
    """Whether the captions of a subset are drawn: one written text has several final ones."""
    return subset.shuffle_caption or subset.enable_wildcard or subset.caption_tag_dropout_rate > 0


def build_final_caption(text: str, subset: ResolvedSubset, showing: CaptionContext) -> str:
    """The caption that the encoder is given, "" where it is dropped; `text` holds the lines of the caption file."""
    if is_caption_dropped(subset, showing):
        return ""
    draw = make_generator(showing.seed, "caption", showing.name, find_caption_variant(subset, showing.time))
    line = choose_caption_line(text, subset.enable_wildcard, draw)
    caption = " ".join(part for part in (subset.caption_prefix, line, subset.caption_suffix) if part)
    if subset.enable_wildcard:
        caption = expand_wildcards(caption, draw)
    caption = arrange_tags(caption, subset, showing, draw)
    if subset.secondary_separator:
        caption = caption.replace(subset.secondary_separator, subset.caption_separator)
    return caption.strip()


def find_caption_version(subset: ResolvedSubset, time: int) -> int:
    """Which of its `ways` a picture's caption is made in when it is shown for the `time`-th time, from 0."""
    return find_caption_variant(subset, time) if has_random_captions(subset) else 0


def count_caption_versions(subset: ResolvedSubset) -> float:
    """In how many ways a picture's caption can be made once a warm-up is over, but for being dropped; may be inf."""
    if subset.caption_dropout_rate >= 1 or subset.caption_dropout_every_n_epochs == 1:
        return 0
    return (subset.caption_variants or math.inf) if has_random_captions(subset) else 1


def is_caption_dropped(subset: ResolvedSubset, showing: CaptionContext) -> bool:
    """Whether a caption is left out: by chance, or because the epoch's number, from 1, is a multiple."""
    every = subset.caption_dropout_every_n_epochs
    if every and (showing.epoch + 1) % every == 0:
        return True
    rate = subset.caption_dropout_rate
    return rate > 0 and draw_uniform(showing.seed, "dropout", showing.name, showing.time) < rate


def find_caption_variant(subset: ResolvedSubset, time: int) -> int:
    """Which drawing of its caption a picture has when it is shown for the `time`-th time, from 0."""
    return time % subset.caption_variants if subset.caption_variants else time


def choose_caption_line(text: str, drawn: bool, draw: torch.Generator) -> str:
    """One line of the text that is not empty: any one, or the first."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return lines[draw_index(len(lines), draw)] if drawn else lines[0]


def draw_index(count: int, draw: torch.Generator) -> int:
    """A number below `count`."""
    return int(torch.randint(count, (), generator=draw))


def expand_wildcards(text: str, draw: torch.Generator) -> str:
    """`text` with each `{a|b|c}` replaced by one of its alternatives; `{{` and `}}` are braces.

    In a nested wildcard `}}` closes two; a brace without its partner stands for itself.
    """
    return choose_alternatives(parse_wildcards(text), draw)


def parse_wildcards(text: str) -> list[str | CaptionWildcard]:
    """The texts and wildcards that a text consists of."""
    stack: list[CaptionWildcard] = [[[]]]  # the wildcards that are open; the first is the text itself
    for piece in _WILDCARD_TOKEN_PATTERN.findall(text):
        depth = len(stack) - 1
        if piece == "{":
            stack.append([[]])
        elif piece == "|" and depth:
            stack[-1].append([])
        elif (piece == "}" and depth) or (piece == "}}" and depth > 1):
            for _ in piece:
                closed = stack.pop()
                stack[-1][-1].append("{}" if closed == [[]] else closed)
        else:
            stack[-1][-1].append(piece[0] if piece in ("{{", "}}") else piece)
    while len(stack) > 1:
        rows = stack.pop()
        stack[-1][-1] += ["{", *rows[0], *(part for row in rows[1:] for part in ("|", *row))]
    return stack[0][0]


def choose_alternatives(parts: list[str | CaptionWildcard], draw: torch.Generator) -> str:
    """The parts as text, one alternative of each wildcard taken."""
    return "".join(
        part if isinstance(part, str) else choose_alternatives(part[draw_index(len(part), draw)], draw)
        for part in parts
    )


def arrange_tags(caption: str, subset: ResolvedSubset, showing: CaptionContext, draw: torch.Generator) -> str:
    """The caption with its tags warmed up, shuffled and dropped, but for those that are kept at either end."""
    mark = subset.keep_tokens_separator
    marked = bool(mark) and mark in caption
    warm_up = compute_token_warmup_steps(subset, showing.steps)
    if not (marked or subset.shuffle_caption or warm_up or subset.caption_tag_dropout_rate):
        return caption
    if marked:
        head, tags, *rest = (split_tags(part, subset) for part in caption.split(mark))
        tail = [tag for tags_kept in rest for tag in tags_kept]
    else:
        tags, tail = split_tags(caption, subset), []
        head, tags = tags[: subset.keep_tokens], tags[subset.keep_tokens :]
    if showing.step < warm_up:
        first = subset.token_warmup_min
        tags = tags[: first + showing.step * (len(tags) - first) // warm_up]
    if subset.shuffle_caption:
        tags = [tags[place] for place in torch.randperm(len(tags), generator=draw).tolist()]
    if subset.caption_tag_dropout_rate:
        kept = torch.rand(len(tags), generator=draw, dtype=torch.float64) >= subset.caption_tag_dropout_rate
        tags = [tag for tag, keep in zip(tags, kept.tolist(), strict=True) if keep]
    return f"{subset.caption_separator.rstrip()} ".join([*head, *tags, *tail])


def split_tags(text: str, subset: ResolvedSubset) -> list[str]:
    """The tags of a text, without empty ones."""
    return [tag.strip() for tag in text.split(subset.caption_separator or ",") if tag.strip()]


def compute_token_warmup_steps(subset: ResolvedSubset, steps: int) -> int:
    """Optimiser steps until all tags are used; below 1, `token_warmup_step` is a share of all `steps`."""
    asked = subset.token_warmup_step
    return math.floor(asked * steps if asked < 1 else asked)
