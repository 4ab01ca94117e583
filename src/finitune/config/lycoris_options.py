"""A configuration as rules about LyCORIS look at it: what was written, before any program has made sense of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from finitune.config.imported_config import ImportedKey
from finitune.report import Finding, Level


@dataclass(frozen=True)
class LycorisOptions:
    """A configuration as it was written: options by the last part of their names, network_args as text, and comments.

    `comments` are by the name of the option on whose line, or below which, they stand.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)
    comments: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """An argument or option, None where it is not given."""
        return self.arguments.get(name, self.options.get(name))

    @property
    def algorithm(self) -> str:
        """LyCORIS's algo in lower case; "" for a network that is not LyCORIS's."""
        module, form = str(self["network_module"] or ""), str(self["LoRA_type"] or "")
        if form.startswith("LyCORIS/"):
            return form.partition("/")[2].lower()
        if "lycoris" in module or self["algo"] or self["lycoris_algo"]:
            return str(self["algo"] or self["lycoris_algo"] or "lora").lower()
        return ""

    def is_on(self, name: str) -> bool:
        """Whether LyCORIS takes an option for true: any text but false, in any case."""
        value = self[name]
        return value.lower() != "false" if isinstance(value, str) else bool(value)

    def number(self, name: str) -> float | None:
        """An option as a number, None where it is none."""
        try:
            return float(self[name])
        except (TypeError, ValueError):
            return None


LycorisCondition = Callable[[LycorisOptions], object]
"""Something false, or the numbers that the message names."""


@dataclass(frozen=True)
class LycorisRule:
    """A rule: how bad it is, its code, the option, when it holds, what happens, what to do."""

    level: Level
    code: str
    option: str
    when: LycorisCondition
    message: str
    remedy: str = ""

    def finding(self, given: LycorisOptions) -> Finding | None:
        """What there is to say of a configuration."""
        found = self.when(given)
        if not found:
            return None
        facts = dict(found) if isinstance(found, Mapping) else {"value": given[self.option]}
        return Finding(self.level, self.code, self.option, self.message.format(**facts), facts, self.remedy)


@dataclass(frozen=True)
class LycorisMisconception:
    """A claim that is not so: what is said, what is so, where that can be read, and when a configuration follows it."""

    option: str
    claim: str
    fact: str
    source: str
    followed: LycorisCondition

    def finding(self, given: LycorisOptions) -> Finding | None:
        """The note that a configuration was written by it."""
        if not self.followed(given):
            return None
        message = f"it is said that {self.claim}; that is not so: {self.fact}"
        return Finding(Level.NOTE, "LYCORIS-MYTH", self.option, message, {"source": self.source})


def collect_lycoris_options(lines: Iterable[ImportedKey], text: str) -> LycorisOptions:
    """What a configuration says, from the account of its keys and from its text."""
    options: dict[str, Any] = {}
    arguments: dict[str, str] = {}
    for line in lines:
        name = line.key.rpartition(".")[2].lstrip("-").replace("-", "_")
        if name == "network_args":
            items = line.value if isinstance(line.value, (list, tuple)) else str(line.value).split()
            arguments |= {str(item).partition("=")[0].strip(" '\""): str(item).partition("=")[2] for item in items}
        elif "network_args." not in line.key:
            options[name] = line.value
    return LycorisOptions(options, arguments, parse_option_comments(text))


def parse_option_comments(text: str) -> dict[str, str]:
    """The comments by the name of the option on whose line they stand, or which stands below them."""
    comments: dict[str, str] = {}
    above = ""
    for line in text.splitlines():
        code, _, comment = line.partition("#")
        name = re.match(r"[-\s\"']*(\w+)[\"']?\s*[:=]", code)
        if name:
            comments[name[1]] = f"{above} {comment}".strip()
        above = f"{above} {comment}".strip() if not code.strip() and comment else ""
    return {name: comment for name, comment in comments.items() if comment}
