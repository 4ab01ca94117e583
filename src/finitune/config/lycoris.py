"""What LyCORIS makes of a configuration: the rules of lycoris.toml, evaluated, and presets held against the modules.

A preset that names no module trains nothing, in silence. Facts on presets: LyCORIS 4.1, lycoris/config.py (the keys
that there are) and lycoris/kohya.py (`unet_target_name` is matched at the beginning of a dotted name,
`unet_target_module` by the name of a class).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from finitune.config.imported_config import ImportedKey
from finitune.config.toml_text import read_toml
from finitune.errors import suggest_nearest_name
from finitune.models.spec import ModelSpec
from finitune.package_data import read_package_toml
from finitune.report import Finding, Level
from finitune.rules import Rule, evaluate_rules, parse_rule
from finitune.rules.conditions import parse_condition

_FACTS_PATH = Path(__file__).with_name("lycoris.toml")


@dataclass(frozen=True)
class LycorisOptions:
    """A configuration as it was written: options by the last part of their names, network_args as text, and comments.

    `comments` are by the name of the option on whose line, or below which, they stand.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)
    comments: Mapping[str, str] = field(default_factory=dict)

    @property
    def given(self) -> Mapping[str, Any]:
        """What is given as an argument or else as an option."""
        return {name: value for name, value in {**self.options, **self.arguments}.items() if value is not None}

    @property
    def on(self) -> Mapping[str, bool]:
        """What LyCORIS takes for true: any text but false, in any case."""
        return {
            name: value.lower() != "false" if isinstance(value, str) else bool(value)
            for name, value in self.given.items()
        }

    @property
    def numbers(self) -> Mapping[str, float]:
        """What can be read as a number."""
        numbers: dict[str, float] = {}
        for name, value in self.given.items():
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError):
                continue
        return numbers

    @property
    def algorithm(self) -> str:
        """LyCORIS's algo in lower case; "" for a network that is not LyCORIS's."""
        given = self.given
        network, _, kind = str(given.get("LoRA_type", "")).partition("/")
        if network == "LyCORIS" and kind:
            return kind.lower()
        named = given.get("algo") or given.get("lycoris_algo")
        return str(named or "lora").lower() if named or "lycoris" in str(given.get("network_module", "")) else ""

    @property
    def preset(self) -> str:
        """The preset by its name or file; "" where none is named."""
        return str(self.given.get("preset") or self.given.get("LyCORIS_preset") or "")


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


def find_lycoris_faults(given: LycorisOptions) -> list[Finding]:
    """Every rule that holds for a configuration, and every misconception that it follows, worst first."""
    return evaluate_rules((*read_lycoris_rules(), *read_lycoris_misconceptions()), given)


@cache
def read_lycoris_rules() -> tuple[Rule, ...]:
    """What LyCORIS really does; raises ValueError for what is wrong in the file."""
    return tuple(parse_rule(entry, LYCORIS_PREDICATES) for entry in read_package_toml(_FACTS_PATH)["rule"])


@cache
def read_lycoris_misconceptions() -> tuple[Rule, ...]:
    """What is said of it that is not so: a rule for each option that shows it."""
    entries = read_package_toml(_FACTS_PATH)["misconception"]
    return tuple(make_misconception_rule(entry, option) for entry in entries for option in entry["options"])


def make_misconception_rule(entry: Mapping[str, Any], option: str) -> Rule:
    """The note that a comment at an option repeats a claim, or that options are set as it asks for."""
    predicates = {"stands_alone": lambda facts: option in facts.given and not facts.given.get("lora_type")}
    asked = parse_condition(entry["when"], predicates) if "when" in entry else lambda _: ()

    def follows(facts: LycorisOptions) -> bool:
        said = "comment" in entry and re.search(entry["comment"], facts.comments.get(option, ""), re.IGNORECASE)
        return bool(said) or any(True for _ in asked(facts))

    text = f"it is said that {entry['claim'].format(option=option)}; that is not so: {entry['fact']}"
    return Rule(level=Level.NOTE, code="LYCORIS-MYTH", subject=option, when=follows, text=text, source=entry["source"])


# --- predicates: something false where all is well, else the fields of the message -----------------------------------


def find_unknown_lycoris_algorithm(facts: LycorisOptions) -> object:
    """The algorithm that there is not, and the nearest."""
    name, known = facts.algorithm, read_package_toml(_FACTS_PATH)["algorithms"]
    if not name or name in known or (facts.given.get("LoRA_type") and not facts.given.get("algo")):
        return {}
    return {"algo": name, "guess": suggest_nearest_name(name, known), "do": ", ".join(known)}


def find_indivisible_block_size(facts: LycorisOptions) -> object:
    """DyLoRA's rank and block size where one does not divide the other."""
    rank, block = facts.numbers.get("network_dim") or 4, facts.numbers.get("block_size") or 4
    return facts.algorithm == "dylora" and rank % block and {"rank": f"{rank:g}", "block": f"{block:g}"}


def find_misread_switches(facts: LycorisOptions) -> object:
    """The switches that were meant as no and that LyCORIS takes for yes."""
    table = read_package_toml(_FACTS_PATH)
    words = {name: facts.arguments.get(name, "x").strip("'\"").lower() for name in table["switches"]}
    wrong = [f"{name}={facts.arguments[name]}" for name, word in words.items() if word in table["words_meaning_no"]]
    return facts.algorithm and wrong and {"names": ", ".join(wrong)}


def find_masked_tucker(facts: LycorisOptions) -> object:
    """An older name of use_tucker that says false and stands over a newer one that says true."""
    names = [name for name in ("use_conv_cp", "use_cp", "use_tucker") if name in facts.arguments]
    masked = facts.algorithm and not facts.on.get(names[0], True) if names else False
    return masked and any(facts.on[name] for name in names[1:]) and {"first": names[0]}


def find_unknown_lycoris_preset(facts: LycorisOptions) -> object:
    """The preset that is neither built in nor a file."""
    name, known = facts.preset, read_package_toml(_FACTS_PATH)["built_in_presets"]
    if not facts.algorithm or not name or name in known:
        return {}
    try:
        found = Path(name).is_file()
    except (OSError, ValueError):
        found = False
    return not found and {"preset": name, "guess": suggest_nearest_name(name, known), "do": ", ".join(known)}


def find_invalid_lokr_factor(facts: LycorisOptions) -> object:
    """LoKr's factor where it is no whole number."""
    factor, number = facts.given.get("factor"), facts.numbers.get("factor")
    return facts.algorithm == "lokr" and factor is not None and (number is None or number % 1) and {"factor": factor}


LYCORIS_PREDICATES = {
    predicate.__name__: predicate
    for predicate in (
        find_unknown_lycoris_algorithm,
        find_indivisible_block_size,
        find_misread_switches,
        find_masked_tucker,
        find_unknown_lycoris_preset,
        find_invalid_lokr_factor,
    )
}


# --- presets ---------------------------------------------------------------------------------------------------------


def check_lycoris_preset(path: Path, names: Sequence[str], family: ModelSpec) -> list[Finding]:
    """Keys of a preset that LyCORIS does not know, and what in it names none of the modules, by their original names.

    Raises what `read_toml` does.
    """
    preset, known = read_toml(path).document, read_package_toml(_FACTS_PATH)["preset_keys"]
    found = [
        Finding(
            Level.WARNING,
            "LYCORIS-PRESET-KEY",
            f"{path}: {key}",
            f"LyCORIS's presets have no key {key!r}: version 3 passes over it, 4 "
            f"stops.{suggest_nearest_name(key, known)}",
            {"key": key},
            f"These are: {', '.join(known)}.",
        )
        for key in preset
        if key not in known
    ]
    targets = {
        target: count_preset_matches(target, names, preset, by, family) for target, by in iterate_preset_targets(preset)
    }
    idle = [target for target, number in targets.items() if not number]
    if idle and any(targets.values()):
        message = f"{', '.join(idle)}: no module of this model is called so"
        found.append(Finding(Level.NOTE, "LYCORIS-PRESET-IDLE", str(path), message, {"targets": targets}))
    elif not any(targets.values()):
        message = f"the preset names none of the model's {len(names)} modules: LyCORIS trains nothing, and says nothing"
        remedy = f"Classes of {family.title} are {', '.join(family.classes)} (LyCORIS 4); or name modules by pattern."
        found.append(Finding(Level.ERROR, "LYCORIS-PRESET-EMPTY", str(path), message, {"targets": targets}, remedy))
    return found


def iterate_preset_targets(preset: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a preset names of the denoiser, each by "name" or by "module"."""
    for by in ("name", "module"):
        for key in (f"unet_target_{by}", f"target_{by}"):
            yield from ((str(target), by) for target in preset.get(key) or ())


def count_preset_matches(
    target: str, names: Sequence[str], preset: Mapping[str, Any], by: str, family: ModelSpec
) -> int:
    """How many of the modules a target names."""
    if by == "name" and preset.get("use_fnmatch"):
        return sum(fnmatch(name, target) for name in names)
    pattern = target if by == "name" else family.classes.get(target)
    try:
        return sum(bool(re.match(pattern, name)) for name in names) if pattern is not None else 0
    except re.error:
        return 0
