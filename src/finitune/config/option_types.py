"""What an option holds, said in words and taken kindly from a document; where it belongs; what others call it.

pydantic would take "yes" for true and true for 1 without a word. Here a value is looked at first: a number or a truth
value in quotes and a whole number written as 528.0 are taken, and that is said; everything else must be of the kind
that the schema names. Bounds are left to pydantic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from rapidfuzz import fuzz, process

from finitune.config.datasets import ConfigSection, Dataset, DatasetOptions, Subset
from finitune.config.schema import CONFIG_SECTION_NAMES, TrainConfig
from finitune.errors import suggest_nearest_name
from finitune.package_data import read_package_toml

NUMBER_AS_TEXT_CODE = "CONFIG-NUMBER-AS-TEXT"
_FLOAT_AS_INT_CODE = "CONFIG-FLOAT-AS-INT"
_BOOLEAN_BY_WORD = {"true": True, "false": False}
_PHRASE_BY_TYPE = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
_PLURAL_BY_TYPE = {int: "whole numbers", float: "numbers", str: "texts", Path: "paths"}
_FOREIGN_NAMES_PATH = Path(__file__).with_name("foreign_names.toml")
_MIN_NAME_SIMILARITY = 75
"""How like two names must be, in percent of their letters, for one to be a misspelling of the other."""
_PHRASE_BY_BOUND = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


class OptionTypeError(Exception):
    """A value that an option cannot hold: the code, and what is wrong or could be meant, beyond the kind."""

    def __init__(self, code: str = "CONFIG-TYPE", hint: str = ""):
        super().__init__(code, hint)
        self.code = code
        self.hint = hint


def describe_option_type(field: FieldInfo) -> str:
    """What an option holds, in words: "a number of at least 0".

    >>> from finitune.config.schema import OptimizerSection
    >>> describe_option_type(OptimizerSection.model_fields["ema_decay"])
    'a number above 0 and below 1'
    """
    bounds = [
        f"{words} {getattr(bound, name):g}"
        for name, words in _PHRASE_BY_BOUND.items()
        for bound in field.metadata
        if hasattr(bound, name)
    ]
    joint = " of " if bounds and bounds[0].startswith("at") else " "
    return (describe_annotation(field.annotation) + joint + " and ".join(bounds)).strip()


def describe_annotation(kind: Any) -> str:
    """What a type stands for, in words."""
    kinds = list_union_members(kind)
    if len(kinds) > 1:
        return " or ".join(describe_annotation(each) for each in kinds)
    origin, arguments = get_origin(kinds[0]), get_args(kinds[0])
    if origin is Literal:
        return f"one of {', '.join(arguments)}" if len(arguments) > 2 else " or ".join(map(repr, arguments))
    if origin is tuple and arguments[-1] is not Ellipsis:
        return f"a list of {len(arguments)} {_PLURAL_BY_TYPE[arguments[0]]}"
    if origin is tuple:
        each = arguments[0]
        return (
            f"a list of {_PLURAL_BY_TYPE[each]}"
            if each in _PLURAL_BY_TYPE
            else f"a list, each {describe_annotation(each)}"
        )
    if origin is dict:
        return f"a table of {_PLURAL_BY_TYPE.get(arguments[1], 'values')}"
    return _PHRASE_BY_TYPE.get(kinds[0], "any value")


def list_union_members(kind: Any) -> list[Any]:
    """The types of a union, without None."""
    if get_origin(kind) in (Union, UnionType):
        return [each for each in get_args(kind) if each is not NoneType]
    return [kind]


def coerce_option_value(kind: Any, value: Any) -> tuple[Any, str]:
    """A value as its type wants it, and the code of what was put right, "" if nothing; raises OptionTypeError."""
    chosen = choose_union_member(list_union_members(kind), value)
    origin, arguments = get_origin(chosen), get_args(chosen)
    if origin is Literal:
        if value not in arguments:
            text = value if isinstance(value, str) else ""
            near = suggest_nearest_name(text.casefold(), arguments).strip() if text else ""
            raise OptionTypeError("CONFIG-CHOICE" if isinstance(value, str) else "CONFIG-TYPE", near)
        return value, ""
    if origin is tuple:
        return coerce_option_list(arguments, value)
    if origin is dict:
        return coerce_option_table(arguments[1], value)
    if chosen is bool:
        return coerce_option_boolean(value)
    if chosen in (int, float):
        return coerce_option_number(chosen, value)
    if chosen is str and not isinstance(value, str):
        raise OptionTypeError(hint=f'Write it in quotes: "{value}".' if isinstance(value, (int, float)) else "")
    if chosen is Path and not isinstance(value, (str, Path)):
        raise OptionTypeError()
    if chosen is Path and not str(value).strip():
        raise OptionTypeError(hint="It is empty: name one, or leave the option out.")
    return (freeze_option_value(value) if chosen in (Any, object) else value), ""


def choose_union_member(kinds: Sequence[Any], value: Any) -> Any:
    """The type of a union that a value is meant for, by its shape."""
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    fitting = [kind for kind in kinds if (get_origin(kind) is tuple) == listed] or list(kinds)
    words = [choice for kind in fitting if get_origin(kind) is Literal for choice in get_args(kind)]
    if len(fitting) == 1 or not words:
        return fitting[0]
    # Text beside fixed words: what differs from one of them in case alone is a slip.
    meant = [word for word in words if str(value).casefold() == word]
    return next(kind for kind in fitting if (get_origin(kind) is Literal) == bool(meant))


def coerce_option_boolean(value: Any) -> tuple[bool, str]:
    """True or false; in quotes, too."""
    if isinstance(value, bool):
        return value, ""
    if isinstance(value, str) and value.strip().casefold() in _BOOLEAN_BY_WORD:
        return _BOOLEAN_BY_WORD[value.strip().casefold()], NUMBER_AS_TEXT_CODE
    raise OptionTypeError(hint=f"Write {str(bool(value)).lower()}." if value in (0, 1) else "")


def coerce_option_number(kind: type[int] | type[float], value: Any) -> tuple[int | float, str]:
    """A finite number; in quotes, too, and a whole one with .0 behind it."""
    code = NUMBER_AS_TEXT_CODE if isinstance(value, str) else ""
    read = parse_readable_number(value) if isinstance(value, str) else value
    if isinstance(read, bool) or not isinstance(read, (int, float)):
        raise OptionTypeError()
    if not math.isfinite(read):
        raise OptionTypeError("CONFIG-RANGE", "It must be finite.")
    if kind is int and isinstance(read, float):
        if not read.is_integer():
            raise OptionTypeError()
        return int(read), code or _FLOAT_AS_INT_CODE
    return read, code


def parse_readable_number(text: str) -> int | float | None:
    """The number that a text is, whole if it is written so; None if it is none.

    >>> parse_readable_number("1e-4"), parse_readable_number("017"), parse_readable_number("one")
    (0.0001, 17, None)
    """
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def coerce_option_list(kinds: Sequence[Any], value: Any) -> tuple[tuple[Any, ...], str]:
    """A list, each item of its type."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise OptionTypeError(hint=f'A list of one is ["{value}"].' if isinstance(value, str) else "")
    if kinds[-1] is Ellipsis:
        kinds = [kinds[0]] * len(value)
    if len(kinds) != len(value):
        raise OptionTypeError(hint=f"There are {len(value)}.")
    pairs = [coerce_option_value(kind, item) for kind, item in zip(kinds, value, strict=True)]
    return tuple(item for item, _ in pairs), next((code for _, code in pairs if code), "")


def coerce_option_table(kind: Any, value: Any) -> tuple[dict[str, Any], str]:
    """A table, each value of the type."""
    if not isinstance(value, Mapping):
        raise OptionTypeError(hint="Write { name = value, ... }.")
    pairs = {
        str(name): coerce_option_value(kind, item) for name, item in value.items() if item is not None or kind is Any
    }
    return {name: item for name, (item, _) in pairs.items()}, next((code for _, code in pairs.values() if code), "")


def freeze_option_value(value: Any) -> Any:
    """A free value with its lists as tuples, so that it is the same however it was written."""
    if isinstance(value, (list, tuple)):
        return tuple(freeze_option_value(item) for item in value)
    if isinstance(value, Mapping):
        return {str(name): freeze_option_value(item) for name, item in value.items()}
    return value


class OptionPlacement(NamedTuple):
    """The levels at which an option may stand, as headers of tables."""

    option: str
    levels: tuple[str, ...]

    def __str__(self) -> str:
        return join_alternatives(self.levels)


def join_alternatives(words: Sequence[str]) -> str:
    """'a', 'a or b', 'a, b or c'."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


SECTION_BY_HEADER: dict[str, type[ConfigSection]] = {
    **{f"[{name}]": TrainConfig.model_fields[name].annotation for name in CONFIG_SECTION_NAMES},  # type: ignore[dict-item]
    "[general]": DatasetOptions,
    "[[datasets]]": Dataset,
    "[[datasets.subsets]]": Subset,
}


def find_option_placement(option: str) -> OptionPlacement | None:
    """Where an option belongs; None where there is no such option.

    >>> str(find_option_placement("num_repeats")), str(find_option_placement("learning_rate"))
    ('[general], [[datasets]] or [[datasets.subsets]]', '[optimizer]')
    """
    if option == "subsets":
        return OptionPlacement(option, ("[[datasets.subsets]]",))
    levels = tuple(level for level, section in SECTION_BY_HEADER.items() if option in section.model_fields)
    return OptionPlacement(option, levels) if levels else None


def find_nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` is a misspelling of, if it is one.

    >>> find_nearest_name("learing_rate", ["learning_rate", "lr_scheduler"])
    'learning_rate'
    """
    match = process.extractOne(name.casefold(), list(known), scorer=fuzz.ratio, score_cutoff=_MIN_NAME_SIMILARITY)
    return match[0] if match else None


def guess_meant_option(name: str, siblings: Iterable[str]) -> OptionPlacement | None:
    """The option that an unknown name stands for: a sibling first, then what others call so, then any."""
    option = (
        find_nearest_name(name, siblings)
        or next((ours for ours, names in read_package_toml(_FOREIGN_NAMES_PATH).items() if name in names), None)
        or find_nearest_name(name, sorted({one for kind in SECTION_BY_HEADER.values() for one in kind.model_fields}))
    )
    return find_option_placement(option) if option else None
