"""The arguments of an optimiser, checked against the signature of its class before anything is built.

The libraries take unknown keywords and pass them over in silence, so none may get that far.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Mapping
from typing import Any, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from finitune.errors import UsageError, suggest_nearest_name
from finitune.training.optimizer_names import OptimizerClass

_ARGUMENT_ALIASES = {
    "decouple": "weight_decouple",
    "decoupled_weight_decay": "weight_decouple",
    "use_bias_correction": "bias_correction",
}
"""The names of the same arguments in prodigyopt, dadaptation and lion-pytorch, which kohya's configs use."""

_OPTION_BY_ARGUMENT = {
    "lr": "learning_rate",
    "params": "the [network] table",
    "max_grad_norm": "max_grad_norm of [optimizer]",
}
"""Arguments that an option of ours states."""

_REASON_BY_FORBIDDEN_ARGUMENT = {
    "maximize": "it would raise the loss",
    "differentiable": "it keeps the graph of every step, and memory grows without end",
    "relative_step": "it takes the learning rate out of the schedule's hands",
    "warmup_init": "it needs relative_step, which takes the learning rate out of the schedule's hands",
}
"""Arguments that must stay false, and why."""

_HALF_STATE_REASON = (
    "In fp16 an epsilon of 1e-8 is zero, and a gradient that is exactly zero, as those of down factors are at the "
    "first step, gives 0 / 0 = NaN; in bf16 an update below 1/256 of a weight is lost."
)
_DTYPE_NAME_BY_ALIAS = {"fp32": "float32", "float": "float32", "fp64": "float64", "fp16": "float16", "half": "float16"}
_DTYPE_NAME_BY_ALIAS["bf16"] = "bfloat16"


def check_optimizer_arguments(found: OptimizerClass, given: Mapping[str, Any]) -> dict[str, Any]:
    """The preset of the name and the given arguments over it, in the types of the signature.

    Numbers, booleans, None and tuples may be text ("0.9,0.99"). Raises UsageError: OPTIMIZER-ARGUMENT for a name that
    the class does not have or a value of another type, OPTIMIZER-HALF-STATE for a state in half precision.
    """
    known = get_optimizer_arguments(found.cls)
    arguments = dict(found.preset)
    for name, value in given.items():
        own = _ARGUMENT_ALIASES.get(name, name) if name not in known else name
        if own in _OPTION_BY_ARGUMENT and (own not in known or own != "max_grad_norm"):
            raise make_optimizer_argument_error(found, name, value, f"is stated by {_OPTION_BY_ARGUMENT[own]}")
        if own not in known:
            raise make_optimizer_argument_error(
                found, name, value, f"is no argument of it.{suggest_nearest_name(name, known)}"
            )
        typed = convert_optimizer_argument(found, name, value, known[own])
        if typed is True and own in _REASON_BY_FORBIDDEN_ARGUMENT:
            raise make_optimizer_argument_error(
                found, name, value, f"is not taken: {_REASON_BY_FORBIDDEN_ARGUMENT[own]}"
            )
        if isinstance(typed, torch.dtype) and typed not in (torch.float32, torch.float64):
            raise make_half_state_error(f"{name} = {value!r}", {name: str(value)})
        arguments[own] = typed
    return arguments


def get_optimizer_arguments(cls: type) -> dict[str, Any]:
    """The type of each argument of a class; that of its default, where the signature states none."""
    hints = get_type_hints(cls.__init__)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    arguments = list(inspect.signature(cls.__init__).parameters.values())[2:]  # behind self and params
    return {
        argument.name: hints.get(argument.name, infer_type_of_default(argument.default))
        for argument in arguments
        if argument.kind in kinds and argument.name != "lr"
    }


def infer_type_of_default(default: object) -> Any:
    """The type that an argument without annotation must have, as its default shows."""
    if isinstance(default, tuple):
        return tuple[tuple(type(item) for item in default)]  # pyright: ignore[reportInvalidTypeArguments]
    return float | None if default is None else type(default)


def convert_optimizer_argument(found: OptimizerClass, name: str, value: object, kind: Any) -> Any:
    """`value` as `kind`: text is read as a literal first, and a boolean is no number."""
    read = parse_optimizer_literal(value) if isinstance(value, str) and kind is not str else value
    if isinstance(read, str) and "torch.dtype" in str(kind):
        read = getattr(torch, _DTYPE_NAME_BY_ALIAS.get(read.lower(), read.removeprefix("torch.")), read)
    try:
        adapter = TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True))
        typed = adapter.validate_python(read, strict=isinstance(read, bool))
    except ValidationError as error:
        expected = getattr(kind, "__name__", None) if isinstance(kind, type) else str(kind)
        expected = str(expected).replace("typing.", "").replace("torch.Tensor", "tensor")
        raise make_optimizer_argument_error(found, name, value, f"should be {expected}") from error
    numbers = typed if isinstance(typed, tuple) else (typed,)
    if any(isinstance(number, float) and math.isnan(number) for number in numbers):
        raise make_optimizer_argument_error(found, name, value, "is not a number")
    return typed


def parse_optimizer_literal(text: str) -> Any:
    """What a text says as a Python literal; the text itself where it says none."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return text.strip()


def make_optimizer_argument_error(found: OptimizerClass, name: str, value: object, why: str) -> UsageError:
    """The refusal of one argument."""
    names = ", ".join(sorted(set(get_optimizer_arguments(found.cls)) - set(_REASON_BY_FORBIDDEN_ARGUMENT)))
    return UsageError(
        f"{found.cls.__name__} from {found.library}: {name} = {value!r} {why}",
        code="OPTIMIZER-ARGUMENT",
        subject=f"optimizer_args.{name}",
        evidence={name: value},
        remedy=f"It takes: {names}.",
    )


def make_half_state_error(what: str, evidence: Mapping[str, object]) -> UsageError:
    """The refusal of optimiser state, or of parameters, in half precision."""
    return UsageError(
        f"{what}: the optimiser works in fp32. {_HALF_STATE_REASON}",
        code="OPTIMIZER-HALF-STATE",
        subject="optimizer_args",
        evidence=evidence,
        remedy="Leave it out: what is saved is little, since only the adapter is trained.",
    )
