"""Which optimisers there are, which are not offered and why, and what arguments their classes take.

A name is looked up in these tables and lists only, kohya's spellings first, then torch's and pytorch-optimizer's; no
class is imported because a config names it. A test takes steps with every one that is offered. Arguments are checked
against the signature before anything is built: the libraries take unknown keywords and pass them over in silence.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from finitune.errors import UsageError, suggest_nearest_name
from finitune.package_data import read_package_toml


class OptimizerClass(NamedTuple):
    """A class, the library that it is from, and the arguments that its name, or good sense, implies."""

    cls: type[torch.optim.Optimizer]
    library: str
    preset: Mapping[str, Any] = MappingProxyType({})


def read_optimizer_facts() -> Mapping[str, Any]:
    """What is known of optimisers, by table; what the tables say stands in the file."""
    return read_package_toml(Path(__file__).parent / "optimizers.toml")


def find_optimizer(name: str) -> OptimizerClass:
    """The class that `name` stands for, by kohya's spelling, torch's or pytorch-optimizer's, upper or lower case.

    A module in front of the name is passed over. Raises UsageError: OPTIMIZER-UNKNOWN, OPTIMIZER-NOT-OFFERED with the
    reason, OPTIMIZER-NEEDS-CUDA, OPTIMIZER-NEEDS-PACKAGE.
    """
    wanted = normalize_optimizer_name(name)
    if reason := find_refusal_reason(name):
        raise UsageError(
            f"{name} is not offered: {reason}.",
            code="OPTIMIZER-NOT-OFFERED",
            subject="optimizer_type",
            evidence={"optimizer_type": name},
            remedy="AdamW does well for adapters; Prodigy where the learning rate is not known.",
        )
    sources = {normalize_optimizer_name(known): known for known in reversed(list(iterate_optimizer_names()))}
    if wanted not in sources:
        raise UsageError(
            f"There is no optimiser {name!r}.{suggest_nearest_name(name, iterate_optimizer_names())}",
            code="OPTIMIZER-UNKNOWN",
            subject="optimizer_type",
            evidence={"optimizer_type": name},
            remedy="Names are those of kohya, torch.optim and pytorch-optimizer; classes of other modules are not "
            "imported.",
        )
    return load_optimizer_class(sources[wanted])


def find_refusal_reason(name: str) -> str | None:
    """Why a known optimiser cannot be had; None where it can, or is not known."""
    wanted = normalize_optimizer_name(name)
    refused = read_optimizer_facts()["refused"].items()
    return next((why for why, names in refused if wanted in map(normalize_optimizer_name, names)), None)


def iterate_optimizer_names() -> Iterator[str]:
    """Every name that can be asked for, in the order in which names are looked up."""
    seen: set[str] = set()
    facts = read_optimizer_facts()
    here = [name for name in facts["torch"] if hasattr(torch.optim, name)]  # Muon is there from torch 2.9 on
    for name in (*facts["kohya"], *here, *facts["bitsandbytes"], *list_pytorch_optimizer_classes()):
        key = normalize_optimizer_name(name)
        if key not in seen and find_refusal_reason(name) is None:
            seen.add(key)
            yield name


def list_pytorch_optimizer_classes() -> list[str]:
    from pytorch_optimizer import get_supported_optimizers, load_optimizer

    return [load_optimizer(name).__name__ for name in get_supported_optimizers()]


def load_optimizer_class(name: str) -> OptimizerClass:
    facts = read_optimizer_facts()
    own = facts["kohya"].get(name, {})
    library, class_name, preset = own.get("library", ""), own.get("class", name), own.get("preset", {})
    if library == "transformers":
        from transformers.optimization import Adafactor

        return OptimizerClass(Adafactor, library, preset)
    if library == "bitsandbytes" or name in facts["bitsandbytes"]:
        return OptimizerClass(getattr(import_bitsandbytes_optim(name), class_name), "bitsandbytes", preset)
    if library == "torch" or name in facts["torch"]:
        return OptimizerClass(getattr(torch.optim, class_name), "torch", preset)
    from pytorch_optimizer import load_optimizer

    return OptimizerClass(load_optimizer(class_name.lower()), "pytorch_optimizer", preset)


def import_bitsandbytes_optim(name: str) -> Any:
    if not torch.cuda.is_available():
        raise UsageError(
            f"{name} is from bitsandbytes, which needs a CUDA device; there is none here.",
            code="OPTIMIZER-NEEDS-CUDA",
            subject="optimizer_type",
            evidence={"optimizer_type": name},
            remedy="Use AdamW or Lion: an adapter is small, and so is its state in fp32.",
        )
    try:
        import bitsandbytes.optim  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UsageError(
            f"{name} is from bitsandbytes, which is not installed.",
            code="OPTIMIZER-NEEDS-PACKAGE",
            subject="optimizer_type",
            evidence={"optimizer_type": name},
            remedy="pip install bitsandbytes",
        ) from error
    return bitsandbytes.optim


def normalize_optimizer_name(name: str) -> str:
    """A name as it is compared: its last part, in lower case, without dashes."""
    return name.rpartition(".")[2].lower().replace("_", "").replace("-", "")


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
    arguments, facts = dict(found.preset), read_optimizer_facts()
    stated, forbidden = facts["stated_by"], facts["forbidden_arguments"]
    for name, value in given.items():
        own = facts["argument_aliases"].get(name, name) if name not in known else name
        if own in stated and (own not in known or own != "max_grad_norm"):
            raise make_optimizer_argument_error(found, name, value, f"is stated by {stated[own]}")
        if own not in known:
            raise make_optimizer_argument_error(
                found, name, value, f"is no argument of it.{suggest_nearest_name(name, known)}"
            )
        typed = convert_optimizer_argument(found, name, value, known[own])
        if typed is True and own in forbidden:
            raise make_optimizer_argument_error(found, name, value, f"is not taken: {forbidden[own]}")
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
        argument.name: hints.get(argument.name, _infer_type(argument.default))
        for argument in arguments
        if argument.kind in kinds and argument.name != "lr"
    }


def _infer_type(default: object) -> Any:
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
    names = ", ".join(
        sorted(set(get_optimizer_arguments(found.cls)) - set(read_optimizer_facts()["forbidden_arguments"]))
    )
    return UsageError(
        f"{found.cls.__name__} from {found.library}: {name} = {value!r} {why}",
        code="OPTIMIZER-ARGUMENT",
        subject=f"optimizer_args.{name}",
        evidence={name: value},
        remedy=f"It takes: {names}.",
    )


def make_half_state_error(what: str, evidence: Mapping[str, object]) -> UsageError:
    return UsageError(
        f"{what}: the optimiser works in fp32. {_HALF_STATE_REASON}",
        code="OPTIMIZER-HALF-STATE",
        subject="optimizer_args",
        evidence=evidence,
        remedy="Leave it out: what is saved is little, since only the adapter is trained.",
    )
