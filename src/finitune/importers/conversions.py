"""Conversions that rows of all programs may name, and what several importers do alike.

A conversion takes a value, the keys beside it, and the arguments of its row; a value that it cannot read may raise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from finitune.config.imported_config import KeyReason
from finitune.importers.key_tables import read_shared_choices
from finitune.importers.mapping import (
    ConvertedValue,
    ImportAccount,
    mark_no_effect,
    mark_unsupported,
    take_changed,
    take_value,
)

DEFAULT_IMPORT_RANK = 16
"""Our rank where none is given, and that of most."""
Siblings = Mapping[str, Any]


def convert_as_is(value: Any, beside: Siblings) -> ConvertedValue:
    return take_value(value)


def convert_number(value: Any, beside: Siblings) -> ConvertedValue:
    """A number; text that looks like one (YAML 1.1 reads 1e-4 as text) is converted, other text left to be refused."""
    if not isinstance(value, str):
        return take_value(value)
    try:
        return replace(
            take_changed(float(value), "text in the file; read as a number"), reason=KeyReason.READ_FROM_TEXT
        )
    except ValueError:
        return take_value(value)


def convert_whole_number(value: Any, beside: Siblings) -> ConvertedValue:
    """A whole number; 1e6 and "1e6" are ones, too."""
    answer = convert_number(value, beside)
    if isinstance(answer.value, float) and answer.value.is_integer():
        return replace(answer, value=int(answer.value))
    return answer


def convert_positive(value: Any, beside: Siblings) -> ConvertedValue:
    """A whole number where 0 and less mean never."""
    answer = convert_whole_number(value, beside)
    never = isinstance(answer.value, (int, float)) and answer.value <= 0
    return mark_no_effect("never") if never else answer


def convert_boolean(value: Any, beside: Siblings) -> ConvertedValue:
    words = {"true": True, "false": False}
    if isinstance(value, str) and value.lower() in words:
        note = "text in the file; read as true or false"
        return replace(take_changed(words[value.lower()], note), reason=KeyReason.READ_FROM_TEXT)
    return take_value(value)


def convert_size_list(value: Any, beside: Siblings, note: str) -> ConvertedValue:
    """One size or several; `note` says what becomes of {count}."""
    if not isinstance(value, list):
        return convert_whole_number(value, beside)
    return take_changed(value, note.format(count=len(value))) if len(value) != 1 else take_value(value)


def convert_storage_dtype(value: Any, beside: Siblings) -> ConvertedValue:
    """How the frozen weights are held: 8-bit floats, or a plain dtype."""
    name = re.sub(r"^q(?=float)", "", str(value).lower())
    if name.startswith(("float8", "fp8", "float_8")):
        if "w8a8" in name:
            return take_changed("fp8", "weights in 8 bits; products in the full dtype")
        return take_value("fp8")
    answer = read_shared_choices()["saved_precision"].get(name)
    return answer or mark_unsupported(f"{value!r}: 8-bit floats are the smallest storage here; set storage to fp8.")


def convert_optimizer(value: Any, beside: Siblings) -> ConvertedValue:
    name = re.sub(r"^(bnb|optimi|ao|torch)[-_]|[-_](optimi|paged|bnb)$", "", str(value).lower().partition("+")[0])
    answer = read_shared_choices()["optimizer"].get(re.sub(r"[-_ ]", "", name))
    todo = "choose one of torch, pytorch-optimizer or bitsandbytes; AdamW is taken."
    return answer or mark_unsupported(f"{value!r}: {todo}")


def convert_betas(value: Any, beside: Siblings, first: str, second: str) -> ConvertedValue:
    """Two keys that are one pair here; each writes both."""
    return take_value([float(beside.get(first) or 0.9), float(beside.get(second) or 0.999)])


def convert_name_parts(value: Any, beside: Siblings) -> ConvertedValue:
    """Parts of module names, as regular expressions of whole ones."""
    return take_value([build_name_part_pattern(str(part)) for part in wrap_in_list(value)])


def convert_lokr_rank(value: Any, beside: Siblings, kind_key: str, full: int) -> ConvertedValue:
    """A rank; from `full` on it means a full second factor where `kind_key` says LoKr."""
    if beside.get(kind_key) == "lokr" and to_whole_number(value) >= full:
        return take_changed(1, "so large a rank means a full second factor", network__full_matrix=True)
    return convert_whole_number(value, beside)


SHARED_CONVERTERS = (
    *(convert_as_is, convert_number, convert_whole_number, convert_positive, convert_boolean, convert_size_list),
    *(convert_storage_dtype, convert_optimizer, convert_betas, convert_name_parts, convert_lokr_rank),
)


def build_name_part_pattern(part: str) -> str:
    return f".*{re.escape(part)}.*"


def set_lokr_unit_scale(account: ImportAccount) -> None:
    """LoKr with a full second factor has no alpha in LyCORIS and its kin: the scale is 1, as with alpha = rank."""
    if account.get("network.full_matrix") and not account.get("network.decompose_both"):
        account.set("network.network_alpha", account.get("network.network_dim") or DEFAULT_IMPORT_RANK)


def format_prompt_line(prompt: str, options: Mapping[str, object]) -> str:
    """A prompt with kohya's flags for what it sets itself: --n --w --h --d --s --l."""
    flags = (f"--{flag} {value}" for flag, value in options.items() if value not in (None, "", False))
    return " ".join((prompt, *flags))


def build_datasets_by_resolution(
    options: Mapping[str, object], subset: Mapping[str, object], resolutions: Sequence[object]
) -> list[dict[str, object]]:
    """One [[datasets]] for each resolution, over the same folder: pictures are shown at each of them."""
    return [{**options, "resolution": resolution, "subsets": [dict(subset)]} for resolution in resolutions]


def wrap_in_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def to_whole_number(value: Any) -> Any:
    try:
        return int(float(value))
    except (TypeError, ValueError):
        return value
