"""What an update is made of: the optimiser over groups of fp32 parameters, learning rates, and the moving average.

The course of the learning rate is a pure function of the step: nothing to save, nothing to resume wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from finitune.adapters import ADAPTER_ALGORITHMS, find_algorithm
from finitune.config.schema import OptimizerSection
from finitune.errors import UsageError
from finitune.training.optimizer_classes import (
    check_optimizer_arguments,
    find_optimizer,
    make_half_state_error,
    read_optimizer_facts,
)

OptimizerParamGroup = dict[str, Any]
"""`params` (list of parameters), `lr` and `base_lr` (the rate at factor 1), and `name`."""

_GROUP_KEYS_FROM_CONFIG = ("params", "lr", "base_lr", "name")
"""What a group keeps from its config, whatever a state says."""


def build_param_groups(
    named: Iterable[tuple[str, Tensor]],
    settings: OptimizerSection,
    rate_of: Callable[[str], float | None],
    algorithm: str = "lora",
) -> list[OptimizerParamGroup]:
    """Trainable parameters by learning rate, in the order of their first appearance.

    `rate_of(name)` is the rate of a pattern or a component, None for `learning_rate`; the last part of a name is the
    role of the tensor. A parameter whose rate is 0 is in no group. Raises UsageError (LORAPLUS-WITHOUT-EFFECT) where
    there is a ratio and no up factor to use it.
    """
    ratio, up_roles = settings.loraplus_lr_ratio, find_algorithm(algorithm).roles_where(up=True)
    groups: dict[tuple[float, bool], OptimizerParamGroup] = {}
    for name, parameter in named:
        stated = rate_of(name)
        rate = settings.learning_rate if stated is None else stated
        up = ratio is not None and name.rpartition(".")[2] in up_roles
        if rate:
            group = groups.setdefault((rate, up), make_param_group(rate, ratio if up else None))
            group["params"].append(parameter)
    if ratio is not None and groups and not any(up for _, up in groups):
        able = [one.name for one in ADAPTER_ALGORITHMS if one.roles_where(up=True)]
        raise UsageError(
            f"loraplus_lr_ratio = {ratio:g} has no effect: {algorithm} has no up factors.",
            code="LORAPLUS-WITHOUT-EFFECT",
            subject="loraplus_lr_ratio",
            evidence={"loraplus_lr_ratio": ratio, "algorithm": algorithm},
            remedy=f"Leave it out; it is for {', '.join(able)}.",
        )
    return list(groups.values())


def make_param_group(rate: float, ratio: float | None) -> OptimizerParamGroup:
    """An empty group; the rate times the ratio of LoRA+, where it is for up factors."""
    if ratio is None:
        return {"name": f"{rate:g}", "params": [], "lr": rate, "base_lr": rate}
    return {"name": f"{rate:g} x {ratio:g} up", "params": [], "lr": rate * ratio, "base_lr": rate * ratio}


class OptimizerHandle:
    """An optimiser with the parameters that it trains; in training mode, but for what happens in `evaluating`.

    A state is taken in training mode, too, together with the parameters of that mode: schedule-free optimisers cannot
    go from one to the other and back without rounding.
    """

    def __init__(self, base: torch.optim.Optimizer, name: str, arguments: Mapping[str, Any]):
        self.base = base
        self.name = name
        self.arguments = dict(arguments)
        self.train()

    @property
    def param_groups(self) -> list[OptimizerParamGroup]:
        return self.base.param_groups

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters, in the order of the groups."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def step(self) -> None:
        self.base.step()

    def zero_grad(self) -> None:
        self.base.zero_grad(set_to_none=True)

    def train(self) -> None:
        """Show the parameters that gradients are taken at, where there is a difference."""
        self.switch("train")

    def eval(self) -> None:
        """Show the parameters that are to be used, where there is a difference; `evaluating` also finds back."""
        self.switch("eval")

    def switch(self, mode: str) -> None:
        """Call the optimiser's own `train` or `eval`, if it has one."""
        getattr(self.base, mode, lambda: None)()

    @contextmanager
    def apply_eval_mode(self) -> Iterator[None]:
        """The parameters are those to save and to measure within; behind it they have the bits that they had."""
        if not hasattr(self.base, "eval"):
            yield
            return
        with hold_parameter_values(self.parameters):
            self.eval()
            try:
                yield
            finally:
                self.train()

    def state_dict(self) -> dict[str, Any]:
        """The state, live: tensors, numbers, text, and lists, tuples and dictionaries of them."""
        return self.base.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of an optimiser of the same kind over the same parameters; learning rates stay ours."""
        ours = [{key: group[key] for key in _GROUP_KEYS_FROM_CONFIG if key in group} for group in self.param_groups]
        self.base.load_state_dict(deepcopy(dict(state)))
        for group, own in zip(self.param_groups, ours, strict=True):
            group.update(own)
        places = [index for group in state["param_groups"] for index in group["params"]]
        for parameter, place in zip(self.parameters, places, strict=True):
            saved = state["state"].get(place)
            if saved is not None:
                self.base.state[parameter] = restore_saved_dtype(self.base.state[parameter], saved)


def restore_saved_dtype(loaded: Any, saved: Any) -> Any:
    """`loaded`, with the bits that were saved: torch casts what it loads to the parameter's dtype."""
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device, copy=True)
    if isinstance(loaded, Mapping):
        return {key: restore_saved_dtype(value, saved[key]) if key in saved else value for key, value in loaded.items()}
    if isinstance(loaded, (list, tuple)):
        return type(loaded)(restore_saved_dtype(one, other) for one, other in zip(loaded, saved, strict=True))
    return loaded


def make_optimizer(settings: OptimizerSection, groups: list[OptimizerParamGroup]) -> OptimizerHandle:
    """The optimiser that the settings name, over groups of fp32 parameters.

    Raises UsageError: see `find_optimizer` and `check_optimizer_arguments`; OPTIMIZER-NOTHING-TO-TRAIN,
    OPTIMIZER-HALF-STATE for parameters of another dtype, OPTIMIZER-ONE-RATE where the optimiser finds one rate for all
    and the groups have several.
    """
    found = find_optimizer(settings.optimizer_type)
    arguments = check_optimizer_arguments(found, settings.optimizer_args)
    require_trainable_parameters(groups)
    rates = sorted({group["base_lr"] for group in groups})
    name = found.cls.__name__
    if name in read_optimizer_facts()["self_tuning"] and len(rates) > 1:
        raise UsageError(
            f"{name} finds one learning rate for all parameters; {len(rates)} are given.",
            code="OPTIMIZER-ONE-RATE",
            subject="learning_rate",
            evidence={"rates": rates},
            remedy="Leave out loraplus_lr_ratio, network_reg_lrs and the rates of components, or use AdamW.",
        )
    try:
        base = found.cls([dict(group) for group in groups], lr=settings.learning_rate or rates[0], **arguments)  # pyright: ignore[reportCallIssue]
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"{name} from {found.library} refuses its arguments: {error}",
            code="OPTIMIZER-ARGUMENT",
            subject="optimizer_args",
            evidence={**arguments, "lr": settings.learning_rate},
            remedy="Correct optimizer_args.",
        ) from error
    return OptimizerHandle(base, f"{found.library}.{name}", arguments)


def require_trainable_parameters(groups: list[OptimizerParamGroup]) -> None:
    """Raise unless there is something to train, and all of it is fp32."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    if not parameters:
        raise UsageError(
            "No parameter has a learning rate above 0: nothing would be trained.",
            code="OPTIMIZER-NOTHING-TO-TRAIN",
            subject="learning_rate",
            remedy="Give a learning rate.",
        )
    narrow = {str(parameter.dtype) for parameter in parameters if parameter.dtype != torch.float32}
    if narrow:
        raise make_half_state_error(f"parameters of {', '.join(sorted(narrow))}", {"dtypes": sorted(narrow)})


RateFactor = Callable[[int], float]

_POLYNOMIAL_END_RATE = 1e-7
"""Where diffusers' polynomial ends, as a rate."""


def make_rate_factor(settings: OptimizerSection, total_steps: int) -> RateFactor:
    """The share of its learning rate that each group has in the update with `step` updates before it.

    The curves are diffusers' (optimization.py); cosine_with_min_lr is transformers'. Behind `total_steps` the last
    value holds. With a warm-up the first update has rate 0, as there. Raises UsageError (WARMUP-TOO-LONG, ...).
    """
    warmup = compute_warmup_steps(settings, total_steps)
    if settings.lr_scheduler == "cosine_with_min_lr":
        curve = make_cosine_with_floor(warmup, total_steps, settings.lr_scheduler_min_lr_ratio)
    else:
        curve = make_diffusers_curve(settings, warmup, total_steps)

    def factor(step: int) -> float:
        return float(curve(min(step, total_steps)))

    return factor


def compute_warmup_steps(settings: OptimizerSection, total_steps: int) -> int:
    """The steps of warm-up; a number below 1 is a share of all steps, rounded down as by kohya.

    Raises UsageError for a part of a step, and for a warm-up that the run does not outlast.
    """
    asked = settings.lr_warmup_steps
    count = math.floor(asked * total_steps) if asked < 1 else math.floor(asked)
    if asked >= 1 and asked != count:
        raise UsageError(
            f"lr_warmup_steps is {asked}: neither a whole number of steps nor a share below 1.",
            code="WARMUP-FRACTION",
            subject="lr_warmup_steps",
            evidence={"lr_warmup_steps": asked},
            remedy=f"Write {count}, or a share such as 0.05.",
        )
    if count and count >= total_steps:
        raise UsageError(
            f"The warm-up of {count} steps is not over when the run ends after {total_steps}.",
            code="WARMUP-TOO-LONG",
            subject="lr_warmup_steps",
            evidence={"warmup_steps": count, "total_steps": total_steps},
            remedy="Write a share of the run, such as lr_warmup_steps = 0.05.",
        )
    return count


def make_cosine_with_floor(warmup: int, total_steps: int, floor: float) -> RateFactor:
    """Linear warm-up, then half a cosine from 1 to `floor`."""

    def factor(step: int) -> float:
        if step < warmup:
            return step / max(1, warmup)
        progress = (step - warmup) / max(1, total_steps - warmup)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


def make_diffusers_curve(settings: OptimizerSection, warmup: int, total_steps: int) -> RateFactor:
    """The function that diffusers' scheduler of the same name multiplies rates by."""
    from diffusers.optimization import get_scheduler

    rate = settings.learning_rate if settings.learning_rate > _POLYNOMIAL_END_RATE else 1.0
    placeholder = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    cycles = settings.lr_scheduler_num_cycles
    scheduler: LambdaLR = get_scheduler(
        settings.lr_scheduler,
        placeholder,
        num_warmup_steps=warmup,
        num_training_steps=total_steps,
        num_cycles=cycles,  # pyright: ignore[reportArgumentType]
        power=settings.lr_scheduler_power,
    )
    (curve,) = scheduler.lr_lambdas
    return curve


def set_learning_rates(optimizer: OptimizerHandle | torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor


class Ema:
    """The exponential moving average of parameters in fp32, without bias: the weighted mean of all steps so far.

    sums <- decay * sums + (1 - decay) * parameters from zero, and the average is sums / (1 - decay**count), as Adam
    corrects its moments (arXiv 1412.6980, algorithm 1). So the first average is the first step itself, and no warm-up
    of the decay is needed.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], decay: float):
        self.parameters = dict(named)
        self.decay = decay
        self.count = 0
        self.sums = {
            name: torch.zeros_like(parameter, dtype=torch.float32) for name, parameter in self.parameters.items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Take in the parameters as they are after a step."""
        self.count += 1
        for name, parameter in self.parameters.items():
            self.sums[name].mul_(self.decay).add_(parameter.detach().float(), alpha=1 - self.decay)

    def values(self) -> dict[str, Tensor]:
        """The average by name, fp32; before the first update, the parameters themselves."""
        if not self.count:
            return {name: parameter.detach().float().clone() for name, parameter in self.parameters.items()}
        weight = 1 - self.decay**self.count
        return {name: total / weight for name, total in self.sums.items()}

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The parameters are their averages within; behind it they have the bits that they had."""
        with hold_parameter_values(self.parameters.values()):
            with torch.no_grad():
                for name, value in self.values().items():
                    self.parameters[name].copy_(value)
            yield

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes: the decay, the number of updates, and the sums."""
        return {"decay": self.decay, "count": self.count, "sums": dict(self.sums)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of the same parameters; the decay stays this one's. Raises KeyError for others."""
        self.count = state["count"]
        for name, total in self.sums.items():
            total.copy_(state["sums"][name])


@contextmanager
def hold_parameter_values(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Give parameters back the bits that they had, whatever is done to them within."""
    held = [(parameter, parameter.detach().clone()) for parameter in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in held:
                parameter.copy_(value)
