"""The schema told to people: a commented TOML to begin with, and the same as rows for the documentation."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from finitune.config.datasets import ConfigSection, DatasetOptions, Subset, SubsetOptions
from finitune.config.option_types import describe_option_type, list_union_members
from finitune.config.schema import CONFIG_SECTION_NAMES, TrainConfig
from finitune.config.toml_text import make_toml_item

_TEMPLATE_LINE_WIDTH = 100
_TEMPLATE_INTRODUCTION = """\
# A training of finitune. What is not commented out is a small example; a line `#option = value` is
# the default, or an example where there is none. Relative paths are meant from the current folder,
# or else from the folder of this file. Write the paths of Windows in single quotes.
"""
_TEMPLATE_TABLE_ORDER = ("model", "general", "datasets", *CONFIG_SECTION_NAMES[1:])
"""Tables in the order in which people need them."""


def build_config_template() -> str:
    """A TOML with every section and option, its meaning above it, defaults commented out; `read_config` takes it.

    A line that begins with `#` and no blank is an option: without its `#` it is valid, and where it has a default, it
    is the default.
    """
    return (
        "\n".join(
            [
                _TEMPLATE_INTRODUCTION,
                *(line for name in _TEMPLATE_TABLE_ORDER for line in (*iterate_section_lines(name), "")),
            ]
        ).rstrip()
        + "\n"
    )


def list_option_documentation() -> list[tuple[str, str, str, str, str]]:
    """(section, option, type, default, text) of every option, in the order of the commented TOML."""
    return [
        (title, option, describe_option_type(field), format_option_default(field), get_option_description(field))
        for name in _TEMPLATE_TABLE_ORDER
        for title, fields in iterate_config_tables(name)
        for option, field in fields.items()
    ]


def iterate_config_tables(name: str) -> Iterator[tuple[str, Mapping[str, FieldInfo]]]:
    """The tables that a part of the configuration makes, with the options that are told of there."""
    if name == "datasets":
        yield "[[datasets]]", {}
        yield "[[datasets.subsets]]", get_level_options(Subset, SubsetOptions)
    elif name == "general":
        yield "[general]", {**get_level_options(DatasetOptions, SubsetOptions), **SubsetOptions.model_fields}
    else:
        kind = TrainConfig.model_fields[name].annotation
        assert isinstance(kind, type) and issubclass(kind, ConfigSection)
        yield f"[{name}]", kind.model_fields


def get_level_options(kind: type[ConfigSection], above: type[ConfigSection]) -> dict[str, FieldInfo]:
    """The options that a level has beyond those of another."""
    return {name: field for name, field in kind.model_fields.items() if name not in above.model_fields}


def iterate_section_lines(name: str) -> Iterator[str]:
    """The lines of one part."""
    about = {
        "general": "The pictures. What stands here holds for all datasets; each option may stand further down, too.",
        "[[datasets]]": "One resolution and batch size. Every option of [general] may stand here; repeat it for more.",
        "[[datasets.subsets]]": "One folder. Every option below `num_repeats` in [general] may stand here.",
    }
    for title, fields in iterate_config_tables(name):
        text = about.get(title) or about.get(name) or TrainConfig.model_fields[name].description or ""
        yield from wrap_toml_comment(text)
        yield title
        for option, field in fields.items():
            yield from wrap_toml_comment(f"{get_option_description(field)} {describe_option_choices(field)}".strip())
            yield format_option_line(option, field)
        if name == "datasets" and not fields:
            yield ""


def format_option_line(option: str, field: FieldInfo) -> str:
    """The option as a line of TOML; commented out unless it must be given, as a folder of pictures must."""
    must = field.is_required() or option == "image_dir"
    default = None if must else field.get_default(call_default_factory=True)
    value = (field.examples or [None])[0] if default is None else default
    line = f"{option} = {make_toml_item(value).as_string()}"
    return line if must else f"#{line}" + ("  # example" if default is None else "")


def format_option_default(field: FieldInfo) -> str:
    """The default as TOML; "required", or "" where it is left out."""
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    return "required" if field.is_required() else "" if default is None else make_toml_item(default).as_string()


def describe_option_choices(field: FieldInfo) -> str:
    """The words that an option is one of, where it is of one of a few."""
    words = [
        word for kind in list_union_members(field.annotation) if get_origin(kind) is Literal for word in get_args(kind)
    ]
    return f"One of {', '.join(words)}." if len(words) > 2 else ""


def get_option_description(field: FieldInfo) -> str:
    """What an option means, on one line."""
    return " ".join((field.description or "").split())


def wrap_toml_comment(text: str) -> list[str]:
    """A text as comment lines."""
    return textwrap.wrap(
        text,
        _TEMPLATE_LINE_WIDTH,
        initial_indent="# ",
        subsequent_indent="# ",
        break_long_words=False,
        break_on_hyphens=False,
    )
