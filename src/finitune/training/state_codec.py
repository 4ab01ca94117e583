"""Trees of tensors and plain values as named tensors and JSON, and back to the same bits and the same types.

What JSON has no form for is an object with one marked key: {"$tensor": name}, {"$tuple": [...]}, and so on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_Json = Any


def encode_state_tree(tree: object, path: str, tensors: dict[str, Tensor]) -> _Json:
    """`tree` as JSON; its tensors go into `tensors`, under names that begin with `path`.

    Takes None, booleans, integers, floats, text, dtypes, tensors of any dtype, and lists, tuples, deques and
    dictionaries of them. Raises TypeError for anything else: better than a state that is not whole.
    """
    if tree is None or isinstance(tree, (bool, int, str)):
        return tree
    if isinstance(tree, float):
        return float(tree) if math.isfinite(tree) else {"$float": repr(float(tree))}
    if isinstance(tree, Tensor):
        name = path
        while name in tensors:
            name += "'"
        tensors[name] = tree.detach()
        return {"$tensor": name}
    if isinstance(tree, torch.dtype):
        return {"$dtype": str(tree).removeprefix("torch.")}
    if isinstance(tree, Mapping):
        return encode_state_mapping(tree, path, tensors)
    if isinstance(tree, (list, tuple, deque)):
        items = [encode_state_tree(item, f"{path}/{index}", tensors) for index, item in enumerate(tree)]
        if isinstance(tree, deque):
            return {"$deque": items, "maxlen": tree.maxlen}
        return {"$tuple": items} if isinstance(tree, tuple) else items
    raise TypeError(f"{path}: {type(tree).__name__} has no form in a state")


def encode_state_mapping(tree: Mapping[Any, Any], path: str, tensors: dict[str, Tensor]) -> _Json:
    """A dictionary as a JSON object where its keys are plain text, else as a list of pairs."""
    if all(isinstance(key, str) and not key.startswith("$") for key in tree):
        return {key: encode_state_tree(value, f"{path}/{key}", tensors) for key, value in tree.items()}
    pairs = [
        [encode_state_tree(key, f"{path}/key", tensors), encode_state_tree(value, f"{path}/{key}", tensors)]
        for key, value in tree.items()
    ]
    return {"$dict": pairs}


def decode_state_tree(form: _Json, tensors: Mapping[str, Tensor]) -> Any:
    """The tree that `flatten` took apart. Raises KeyError where a tensor or a form is not known."""
    if isinstance(form, list):
        return [decode_state_tree(item, tensors) for item in form]
    if not isinstance(form, dict):
        return form
    mark = next(iter(form), "")
    if mark.startswith("$"):
        return _DECODER_BY_MARK[mark](form, tensors)
    return {key: decode_state_tree(value, tensors) for key, value in form.items()}


_DECODER_BY_MARK: dict[str, Callable[[dict[str, Any], Mapping[str, Tensor]], Any]] = {
    "$float": lambda form, tensors: float(form["$float"]),
    "$tensor": lambda form, tensors: tensors[form["$tensor"]],
    "$dtype": lambda form, tensors: getattr(torch, form["$dtype"]),
    "$tuple": lambda form, tensors: tuple(decode_state_tree(form["$tuple"], tensors)),
    "$deque": lambda form, tensors: deque(decode_state_tree(form["$deque"], tensors), maxlen=form["maxlen"]),
    "$dict": lambda form, tensors: {
        decode_state_tree(key, tensors): decode_state_tree(value, tensors) for key, value in form["$dict"]
    },
}
