"""What is odd about the captions of a dataset: how they are written down, and what they say, one beside the other.

That a caption cannot be read, is empty, or has tabs in it, `captions_read` tells of each file. Here is what only shows
beside the others (a word that all but a few have), by the options (lines that are not used), or in the bytes (a byte
order mark, which is harmless here: it is left out on reading).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from finitune.config.datasets import ResolvedSubset
from finitune.datasets.batch_schedule import disable_augmentation
from finitune.datasets.caption_files import UTF8_BOM, is_utf8_text, shorten_text
from finitune.datasets.captions import CaptionContext, build_final_caption, split_tags
from finitune.datasets.items import TrainingExample
from finitune.report import Finding, Level, summarize_names

_WORD_PATTERN = re.compile(r"[^\W_](?:[\w'-]*\w)?")
_TRIGGER_WINDOW_WORDS = 3
"""A trigger stands among so many words at the beginning."""
_MIN_TRIGGER_SHARE = 0.8
"""The share of captions that have a word from which on the others seem to lack it."""
_MIN_TRIGGER_CAPTIONS = 10
_STOP_WORDS = frozenset(
    (
        *("a", "an", "the", "of", "in", "on", "at", "by", "to", "is", "are", "was", "with", "and", "or", "from", "as"),
        *("his", "her", "its", "this", "that", "there", "one", "two", "man", "woman", "girl", "boy", "person"),
        *("photo", "picture", "image", "portrait", "illustration", "drawing", "painting"),
    )
)
"""Words that are no triggers."""

CaptionTruncator = Callable[[str], Mapping[str, tuple[int, str]]]
"""By tokenizer, how many tokens of a caption are beyond its limit, and the text that is lost; nothing where it fits."""


def check_captions(examples: Iterable[TrainingExample], trigger: str = "") -> list[Finding]:
    """Lines that are not used, tags that stand twice, and captions without the trigger.

    `trigger` is the phrase that every caption should have; without one, a word that nearly all have is looked for.
    """
    every = {example.name: example for example in examples if example.caption and not example.subset.is_reg}
    lines = [
        name
        for name, one in every.items()
        if not one.subset.enable_wildcard and len(split_caption_lines(one.caption)) > 1
    ]
    what = f"captions have several lines, of which only the first is used ({len(lines)})"
    remedy = "Write all on one line, or set enable_wildcard = true to draw one of them each time."
    found = summarize_names(Level.WARNING, "CAPTION-LINES", "captions", what, lines, remedy)
    tags = {name: find_repeated_tags(one.caption, one.subset) for name, one in every.items()}
    told = [f"{name} ({', '.join(repeated)})" for name, repeated in tags.items() if repeated]
    what = f"captions have a tag more than once ({len(told)})"
    found += summarize_names(Level.NOTE, "CAPTION-TAG-TWICE", "captions", what, told, "Leave one of them.")
    return found + check_trigger_word({name: one.caption for name, one in every.items()}, trigger)


def split_caption_lines(caption: str) -> list[str]:
    """The lines that are not blank."""
    return [line for line in caption.splitlines() if line.strip()]


def find_repeated_tags(caption: str, subset: ResolvedSubset) -> list[str]:
    """The tags that stand in one line of a caption more than once, in any case."""
    counts = (Counter(tag.casefold() for tag in split_tags(line, subset)) for line in split_caption_lines(caption))
    return [tag for line in counts for tag, count in line.items() if count > 1]


def check_trigger_word(captions: Mapping[str, str], trigger: str) -> list[Finding]:
    """The captions without the trigger phrase, or without a word that nearly all others begin with."""
    if trigger:
        lacking = [name for name, caption in captions.items() if trigger.casefold() not in caption.casefold()]
        what = f"captions lack the trigger {trigger!r} ({len(lacking)} of {len(captions)})"
        remedy = "Write it into them, or leave it out of the configuration."
        return summarize_names(Level.WARNING, "TRIGGER-MISSING", trigger, what, lacking, remedy)
    word = find_common_word(list(captions.values()))
    lacking = [name for name, caption in captions.items() if word not in split_caption_words(caption)] if word else []
    what = f"{word!r} is near the beginning of most captions, and {len(lacking)} of {len(captions)} lack it"
    remedy = "If it is the trigger, write it into them, too."
    return summarize_names(Level.NOTE, "TRIGGER-MISSING", word, what, lacking, remedy)


def find_common_word(captions: Sequence[str]) -> str:
    """The word that most captions have, mostly near the beginning, and some lack; '' where there is none."""
    if len(captions) < _MIN_TRIGGER_CAPTIONS:
        return ""
    split = [split_caption_words(caption) for caption in captions]
    counts = Counter(word for words in split for word in set(words))
    front = Counter(word for words in split for word in set(words[:_TRIGGER_WINDOW_WORDS]))
    likely = [
        (count, front[word], word)
        for word, count in counts.items()
        if _MIN_TRIGGER_SHARE * len(captions) <= count < len(captions)
        and 2 * front[word] > count
        and word not in _STOP_WORDS
    ]
    return max(likely)[2] if likely else ""


def split_caption_words(caption: str) -> list[str]:
    """The words of a caption in lower case.

    >>> split_caption_words("Sks-girl, long hair")
    ['sks-girl', 'long', 'hair']
    """
    return _WORD_PATTERN.findall(caption.casefold())


def check_caption_bytes(files: Mapping[Path, bytes]) -> list[Finding]:
    """Caption files, by their bytes, that begin with a byte order mark or have the line ends of Windows."""
    marked = [path.name for path, data in files.items() if data.startswith(UTF8_BOM)]
    what = f"captions begin with a byte order mark, which is left out here ({len(marked)})"
    remedy = "Other programs take it for a letter: save as UTF-8 without it."
    found = summarize_names(Level.NOTE, "CAPTION-BOM", "captions", what, marked, remedy)
    ends = [path.name for path, data in files.items() if b"\r" in data and is_utf8_text(data)]
    what = f"captions have the line ends of Windows, which are as good here ({len(ends)})"
    return found + summarize_names(
        Level.NOTE, "CAPTION-CRLF", "captions", what, ends, "Save them with LF for other programs."
    )


def check_caption_lengths(examples: Iterable[TrainingExample], cut: CaptionTruncator) -> list[Finding]:
    """Captions of which a text encoder does not see all: by how many tokens, and what is lost."""
    beyond: dict[str, list[str]] = {}
    seen: dict[str, Mapping[str, tuple[int, str]]] = {}
    for example in {example.name: example for example in examples}.values():
        text = build_unvaried_caption(example)
        if text not in seen:
            seen[text] = cut(text)
        for tokenizer, (count, lost) in seen[text].items():
            beyond.setdefault(tokenizer, []).append(f"{example.name} ({count} tokens: {shorten_text(lost, 40)!r})")
    return [
        finding
        for tokenizer, names in beyond.items()
        for finding in summarize_names(
            Level.WARNING,
            "CAPTION-CUT",
            tokenizer,
            f"captions are longer than {tokenizer} is given, and their ends are not seen ({len(names)})",
            names,
            f"Shorten them, put what matters first, or raise {tokenizer}_max_token_length.",
        )
    ]


def build_unvaried_caption(example: TrainingExample) -> str:
    """The caption as the encoder is given it, with nothing shuffled or dropped."""
    return build_final_caption(
        example.caption, disable_augmentation(example).subset, CaptionContext(0, example.name, 0, 0)
    )
