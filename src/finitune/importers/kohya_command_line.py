"""A whole command line of sd-scripts, taken apart: the launcher and its flags, the script, the script's flags."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from finitune.errors import UsageError

_CONTINUED_LINE_PATTERN = re.compile(r"[\\^`][ \t]*\r?\n")
_WINDOWS_SHELL_PATTERN = re.compile(r"[A-Za-z]:\\|\^[ \t]*\r?\n|`[ \t]*\r?\n")
_NEGATIVE_NUMBER_PATTERN = re.compile(r"-\.?\d")


FAMILY_BY_TRAINING_SCRIPT = {
    "train_network.py": "Stable Diffusion 1.5 or 2",
    "sdxl_train_network.py": "Stable Diffusion XL",
    "sd3_train_network.py": "Stable Diffusion 3",
    "flux_train_network.py": "FLUX.1",
    "lumina_train_network.py": "Lumina",
    "hunyuan_image_train_network.py": "HunyuanImage",
    "sdxl_train.py": "Stable Diffusion XL",
    "flux_train.py": "FLUX.1",
    "sd3_train.py": "Stable Diffusion 3",
    "lumina_train.py": "Lumina",
    "fine_tune.py": "Stable Diffusion 1.5 or 2",
    "train_db.py": "Stable Diffusion 1.5 or 2",
    "qwen_image_train_network.py": "Qwen-Image",
    "wan_train_network.py": "Wan",
    "flux_kontext_train_network.py": "FLUX.1",
    "zimage_train_network.py": "Z-Image",
}
"""The model family of a script of sd-scripts or musubi-tuner, where it is not Anima."""


@dataclass(frozen=True)
class CommandLine:
    """The words before the script, the script, and its flags with their values, in order."""

    launcher: tuple[tuple[str, object], ...]
    script: str
    flags: tuple[tuple[str, object], ...]


def parse_command_line(line: str) -> CommandLine:
    """A command line by its parts; raises UsageError (CONFIG-FLAGS) where a quote is not closed."""
    tokens = split_command_line(line)
    place = next((n for n, word in enumerate(tokens) if re.search(r"\.py$", word)), -1)
    before, after = tokens[: max(place, 0)], tokens[place + 1 :]
    return CommandLine(
        tuple(parse_command_flags(before)), tokens[place] if place >= 0 else "", tuple(parse_command_flags(after))
    )


def split_command_line(line: str) -> list[str]:
    """The words of a command line of any shell: continued lines joined; a backslash is part of a Windows path."""
    lexer = shlex.shlex(_CONTINUED_LINE_PATTERN.sub(" ", line), posix=True, punctuation_chars=False)
    lexer.whitespace_split = True
    lexer.commenters = ""
    if _WINDOWS_SHELL_PATTERN.search(line):
        lexer.escape = ""
    try:
        return list(lexer)
    except ValueError as error:
        raise UsageError(
            f"the command line cannot be taken apart: {str(error).lower()}",
            code="CONFIG-FLAGS",
            subject="--from",
            evidence={"line": line[-80:]},
            remedy="Close the quote; a quote within quotes is written with a backslash.",
        ) from error


def parse_command_flags(tokens: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Each flag with its value: True without one, a list where there are several; other words by themselves."""
    place = 0
    while place < len(tokens):
        word = tokens[place]
        place += 1
        if not word.startswith("-") or _NEGATIVE_NUMBER_PATTERN.match(word):
            yield word, None
            continue
        name, equals, value = word.partition("=")
        if equals:
            yield name, value
            continue
        end = place
        while end < len(tokens) and (not tokens[end].startswith("-") or _NEGATIVE_NUMBER_PATTERN.match(tokens[end])):
            end += 1
        values = list(tokens[place:end])
        yield name, True if not values else values[0] if len(values) == 1 else values
        place = end
