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
from types import MappingProxyType
from typing import Any, NamedTuple, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from finitune.errors import UsageError, suggest_nearest_name

_Arguments = Mapping[str, Any]
_NO_ARGUMENTS: _Arguments = MappingProxyType({})


class OptimizerClass(NamedTuple):
    """A class, the library that it is from, and the arguments that its name, or good sense, implies."""

    cls: type[torch.optim.Optimizer]
    library: str
    preset: _Arguments = _NO_ARGUMENTS


_TORCH_OPTIMIZERS = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "SGD",
)
"""Those of torch.optim that are taken; each by the name of its class."""

BITSANDBYTES_OPTIMIZERS = (
    *("Adam8bit", "AdamW8bit", "PagedAdam8bit", "PagedAdamW", "PagedAdamW8bit", "PagedAdamW32bit"),
    *("Lion8bit", "PagedLion", "PagedLion8bit", "AdEMAMix8bit", "PagedAdEMAMix8bit", "SGD8bit", "RMSprop8bit"),
)
"""Those of bitsandbytes.optim; each by the name of its class."""

KOHYA_OPTIMIZERS: Mapping[str, tuple[str, str, _Arguments]] = MappingProxyType(
    {
        "SGDNesterov": ("torch", "SGD", {"nesterov": True, "momentum": 0.9}),
        "SGDNesterov8bit": ("bitsandbytes", "SGD8bit", {"nesterov": True, "momentum": 0.9}),
        "Adafactor": ("transformers", "Adafactor", {"scale_parameter": False, "relative_step": False}),
        "AdamWScheduleFree": ("pytorch_optimizer", "ScheduleFreeAdamW", _NO_ARGUMENTS),
        "RAdamScheduleFree": ("pytorch_optimizer", "ScheduleFreeRAdam", _NO_ARGUMENTS),
        "SGDScheduleFree": ("pytorch_optimizer", "ScheduleFreeSGD", _NO_ARGUMENTS),
        "DAdaptation": ("pytorch_optimizer", "DAdaptAdam", {"growth_rate": 1.02}),
        "DAdaptAdam": ("pytorch_optimizer", "DAdaptAdam", {"growth_rate": 1.02}),
        "DAdaptAdan": ("pytorch_optimizer", "DAdaptAdan", {"growth_rate": 1.02}),
        "DAdaptSGD": ("pytorch_optimizer", "DAdaptSGD", {"growth_rate": 1.02}),
    }
)
"""sd-scripts' names (library/train_util.py, get_optimizer) where they are no class names, or where the class needs an
argument: (library, class, arguments). Without a bound on its growth D-Adaptation overshoots on adapters whose up
factors begin at zero, and does not come back; 1.02 is what its authors offer (facebookresearch/dadaptation)."""

_NEEDS_CLOSURE = "its step evaluates the loss again, or needs its value"
_NEEDS_HESSIAN = "it needs second derivatives, which the backward of half products does not have"
_WRAPS_OPTIMIZER = "it wraps another optimiser"
_NEEDS_WHOLE_MODEL = "it takes the whole model, and updates it within the backward"
_NEEDS_MARKED_MATRICES = "it needs to be told which parameters are hidden matrices; torch's Muon takes them all"
_COMMUNICATES_ITSELF = "it does the communication between processes itself"
_KEEPS_OBJECTS = "its state holds objects that no file of tensors can keep, so that a run could not be resumed"
_IGNORES_LEARNING_RATE = "it does not follow the learning rate: the schedule would have no effect"
_DIVIDES_BY_LEARNING_RATE = "it divides by the learning rate, which is 0 at the beginning of a warm-up"

REASON_BY_REFUSED_OPTIMIZER: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("LBFGS", "AliG", "BSAM", "SAM", "GSAM", "WSAM", "LookSAM", "FriendlySAM"), _NEEDS_CLOSURE),
        **dict.fromkeys(("EmoNavi", "EmoFact", "EmoLynx"), _NEEDS_CLOSURE),
        **dict.fromkeys(("AdaHessian", "SophiaH"), _NEEDS_HESSIAN),
        **dict.fromkeys(("Lookahead", "OrthoGrad", "PCGrad", "TRAC"), _WRAPS_OPTIMIZER),
        **dict.fromkeys(("ScheduleFreeWrapper", "SafeFP16Optimizer", "Magma"), _WRAPS_OPTIMIZER),
        **dict.fromkeys(("LOMO", "AdaLOMO", "AdamMini"), _NEEDS_WHOLE_MODEL),
        **dict.fromkeys(("AdaGO", "AdaMuon", "MuonClip", "NorMuon"), _NEEDS_MARKED_MATRICES),
        **dict.fromkeys(("DistributedMuon", "DeMo"), _COMMUNICATES_ITSELF),
        **dict.fromkeys(("Conda", "ScalableShampoo"), _KEEPS_OBJECTS),
        **dict.fromkeys(("A2Grad", "ApolloDQN", "FTRL", "Nero", "SRMM", "Rprop"), _IGNORES_LEARNING_RATE),
        "Gravity": _DIVIDES_BY_LEARNING_RATE,
        "Ranger21": "it has a warm-up and a decay of its own",
        "LoRARite": "it pairs factors by their order, and takes two-dimensional ones only",
        "SparseAdam": "an adapter's gradients are not sparse",
        "SaRA": "it trains the weights of a pretrained model that are nearly zero; an adapter has none",
        "Kate": "its first steps raise the loss where up factors begin at zero",
        "AdaShift": "its first steps are NaN where a gradient is exactly zero, as those of down factors are",
        "FlashAdamW": "it keeps its state in 8 and 16 bits",
        "ProdigyPlusScheduleFree": "pytorch-optimizer does not have it; Prodigy and AdamWScheduleFree are there",
        "DAdaptAdamPreprint": "it is an early form of DAdaptAdam",
        "DAdaptAdanIP": "it is a variant of DAdaptAdan that pytorch-optimizer does not have",
    }
)
"""Why a known optimiser cannot be had."""

SELF_TUNING_OPTIMIZERS = frozenset({"Prodigy", "DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD"})
"""Classes that find their own learning rate; ours multiplies it, and all parameters must share one."""


def find_optimizer(name: str) -> OptimizerClass:
    """The class that `name` stands for, by kohya's spelling, torch's or pytorch-optimizer's, upper or lower case.

    A module in front of the name is passed over. Raises UsageError: OPTIMIZER-UNKNOWN, OPTIMIZER-NOT-OFFERED with the
    reason, OPTIMIZER-NEEDS-CUDA, OPTIMIZER-NEEDS-PACKAGE.
    """
    wanted = normalize_optimizer_name(name)
    if reason := {normalize_optimizer_name(known): why for known, why in REASON_BY_REFUSED_OPTIMIZER.items()}.get(
        wanted
    ):
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


def iterate_optimizer_names() -> Iterator[str]:
    """Every name that can be asked for, in the order in which names are looked up."""
    refused = {normalize_optimizer_name(name) for name in REASON_BY_REFUSED_OPTIMIZER}
    seen: set[str] = set()
    here = [name for name in _TORCH_OPTIMIZERS if hasattr(torch.optim, name)]  # Muon is there from torch 2.9 on
    for name in (*KOHYA_OPTIMIZERS, *here, *BITSANDBYTES_OPTIMIZERS, *list_pytorch_optimizer_classes()):
        if normalize_optimizer_name(name) not in refused | seen:
            seen.add(normalize_optimizer_name(name))
            yield name


def list_pytorch_optimizer_classes() -> list[str]:
    """The class names that pytorch-optimizer lists."""
    from pytorch_optimizer import get_supported_optimizers, load_optimizer

    return [load_optimizer(name).__name__ for name in get_supported_optimizers()]


def load_optimizer_class(name: str) -> OptimizerClass:
    """The class of an offered name."""
    library, class_name, preset = KOHYA_OPTIMIZERS.get(name, ("", name, _NO_ARGUMENTS))
    if library == "transformers":
        from transformers.optimization import Adafactor

        return OptimizerClass(Adafactor, library, preset)
    if library == "bitsandbytes" or name in BITSANDBYTES_OPTIMIZERS:
        return OptimizerClass(getattr(import_bitsandbytes_optim(name), class_name), "bitsandbytes", preset)
    if library == "torch" or name in _TORCH_OPTIMIZERS:
        return OptimizerClass(getattr(torch.optim, class_name), "torch", preset)
    from pytorch_optimizer import load_optimizer

    return OptimizerClass(load_optimizer(class_name.lower()), "pytorch_optimizer", preset)


def import_bitsandbytes_optim(name: str) -> Any:
    """bitsandbytes.optim, where it can work."""
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
