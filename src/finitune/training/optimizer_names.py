"""Which optimisers there are: kohya's spellings first, then torch, then pytorch-optimizer; and which are not offered.

A name is looked up in these tables and lists only; no class is imported because a config names it. A test takes steps
with every one that is offered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from finitune.errors import UsageError, did_you_mean

Arguments = Mapping[str, Any]
NONE: Arguments = MappingProxyType({})


class Found(NamedTuple):
    """A class, the library that it is from, and the arguments that its name, or good sense, implies."""

    cls: type[torch.optim.Optimizer]
    library: str
    preset: Arguments = NONE


TORCH = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop", "SGD")
"""Those of torch.optim that are taken; each by the name of its class."""

BITSANDBYTES = (
    *("Adam8bit", "AdamW8bit", "PagedAdam8bit", "PagedAdamW", "PagedAdamW8bit", "PagedAdamW32bit"),
    *("Lion8bit", "PagedLion", "PagedLion8bit", "AdEMAMix8bit", "PagedAdEMAMix8bit", "SGD8bit", "RMSprop8bit"),
)
"""Those of bitsandbytes.optim; each by the name of its class."""

KOHYA: Mapping[str, tuple[str, str, Arguments]] = MappingProxyType(
    {
        "SGDNesterov": ("torch", "SGD", {"nesterov": True, "momentum": 0.9}),
        "SGDNesterov8bit": ("bitsandbytes", "SGD8bit", {"nesterov": True, "momentum": 0.9}),
        "Adafactor": ("transformers", "Adafactor", {"scale_parameter": False, "relative_step": False}),
        "AdamWScheduleFree": ("pytorch_optimizer", "ScheduleFreeAdamW", NONE),
        "RAdamScheduleFree": ("pytorch_optimizer", "ScheduleFreeRAdam", NONE),
        "SGDScheduleFree": ("pytorch_optimizer", "ScheduleFreeSGD", NONE),
        "DAdaptation": ("pytorch_optimizer", "DAdaptAdam", {"growth_rate": 1.02}),
        "DAdaptAdam": ("pytorch_optimizer", "DAdaptAdam", {"growth_rate": 1.02}),
        "DAdaptAdan": ("pytorch_optimizer", "DAdaptAdan", {"growth_rate": 1.02}),
        "DAdaptSGD": ("pytorch_optimizer", "DAdaptSGD", {"growth_rate": 1.02}),
    }
)
"""sd-scripts' names (library/train_util.py, get_optimizer) where they are no class names, or where the class needs an
argument: (library, class, arguments). Without a bound on its growth D-Adaptation overshoots on adapters whose up
factors begin at zero, and does not come back; 1.02 is what its authors offer (facebookresearch/dadaptation)."""

CLOSURE = "its step evaluates the loss again, or needs its value"
HESSIAN = "it needs second derivatives, which the backward of half products does not have"
WRAPPER = "it wraps another optimiser"
MODEL = "it takes the whole model, and updates it within the backward"
MARKED = "it needs to be told which parameters are hidden matrices; torch's Muon takes them all"
CLUSTER = "it does the communication between processes itself"
OBJECTS = "its state holds objects that no file of tensors can keep, so that a run could not be resumed"
NO_RATE = "it does not follow the learning rate: the schedule would have no effect"
ZERO_RATE = "it divides by the learning rate, which is 0 at the beginning of a warm-up"

NOT_OFFERED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("LBFGS", "AliG", "BSAM", "SAM", "GSAM", "WSAM", "LookSAM", "FriendlySAM"), CLOSURE),
        **dict.fromkeys(("EmoNavi", "EmoFact", "EmoLynx"), CLOSURE),
        **dict.fromkeys(("AdaHessian", "SophiaH"), HESSIAN),
        **dict.fromkeys(("Lookahead", "OrthoGrad", "PCGrad", "TRAC"), WRAPPER),
        **dict.fromkeys(("ScheduleFreeWrapper", "SafeFP16Optimizer", "Magma"), WRAPPER),
        **dict.fromkeys(("LOMO", "AdaLOMO", "AdamMini"), MODEL),
        **dict.fromkeys(("AdaGO", "AdaMuon", "MuonClip", "NorMuon"), MARKED),
        **dict.fromkeys(("DistributedMuon", "DeMo"), CLUSTER),
        **dict.fromkeys(("Conda", "ScalableShampoo"), OBJECTS),
        **dict.fromkeys(("A2Grad", "ApolloDQN", "FTRL", "Nero", "SRMM", "Rprop"), NO_RATE),
        "Gravity": ZERO_RATE,
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

SELF_TUNED = frozenset({"Prodigy", "DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD"})
"""Classes that find their own learning rate; ours multiplies it, and all parameters must share one."""


def find_optimizer(name: str) -> Found:
    """The class that `name` stands for, by kohya's spelling, torch's or pytorch-optimizer's, upper or lower case.

    A module in front of the name is passed over. Raises UsageError: OPTIMIZER-UNKNOWN, OPTIMIZER-NOT-OFFERED with the
    reason, OPTIMIZER-NEEDS-CUDA, OPTIMIZER-NEEDS-PACKAGE.
    """
    wanted = plain(name)
    if reason := {plain(known): why for known, why in NOT_OFFERED.items()}.get(wanted):
        raise UsageError(
            f"{name} is not offered: {reason}.",
            code="OPTIMIZER-NOT-OFFERED",
            subject="optimizer_type",
            evidence={"optimizer_type": name},
            remedy="AdamW does well for adapters; Prodigy where the learning rate is not known.",
        )
    sources = {plain(known): known for known in reversed(list(offered()))}
    if wanted not in sources:
        raise UsageError(
            f"There is no optimiser {name!r}.{did_you_mean(name, offered())}",
            code="OPTIMIZER-UNKNOWN",
            subject="optimizer_type",
            evidence={"optimizer_type": name},
            remedy="Names are those of kohya, torch.optim and pytorch-optimizer; classes of other modules are not "
            "imported.",
        )
    return load(sources[wanted])


def offered() -> Iterator[str]:
    """Every name that can be asked for, in the order in which names are looked up."""
    refused = {plain(name) for name in NOT_OFFERED}
    seen: set[str] = set()
    here = [name for name in TORCH if hasattr(torch.optim, name)]  # Muon is there from torch 2.9 on
    for name in (*KOHYA, *here, *BITSANDBYTES, *collected()):
        if plain(name) not in refused | seen:
            seen.add(plain(name))
            yield name


def collected() -> list[str]:
    """The class names that pytorch-optimizer lists."""
    from pytorch_optimizer import get_supported_optimizers, load_optimizer

    return [load_optimizer(name).__name__ for name in get_supported_optimizers()]


def load(name: str) -> Found:
    """The class of an offered name."""
    library, class_name, preset = KOHYA.get(name, ("", name, NONE))
    if library == "transformers":
        from transformers.optimization import Adafactor

        return Found(Adafactor, library, preset)
    if library == "bitsandbytes" or name in BITSANDBYTES:
        return Found(getattr(bitsandbytes_for(name), class_name), "bitsandbytes", preset)
    if library == "torch" or name in TORCH:
        return Found(getattr(torch.optim, class_name), "torch", preset)
    from pytorch_optimizer import load_optimizer

    return Found(load_optimizer(class_name.lower()), "pytorch_optimizer", preset)


def bitsandbytes_for(name: str) -> Any:
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


def plain(name: str) -> str:
    """A name as it is compared: its last part, in lower case, without dashes."""
    return name.rpartition(".")[2].lower().replace("_", "").replace("-", "")
