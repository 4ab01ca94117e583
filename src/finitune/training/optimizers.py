"""The optimiser of a run: made by name over groups of fp32 parameters, each with a learning rate of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from finitune.config.schema import OptimizerSection
from finitune.errors import UsageError
from finitune.training.ema import hold_parameter_values
from finitune.training.optimizer_args import check_optimizer_arguments, make_half_state_error
from finitune.training.optimizer_names import SELF_TUNING_OPTIMIZERS, find_optimizer

OptimizerParamGroup = dict[str, Any]
"""`params` (list of parameters), `lr` and `base_lr` (the rate at factor 1), and `name`."""

_LORAPLUS_ROLES_BY_ALGORITHM = {"lora": {"up"}, "loha": {"w2_a"}, "lokr": {"w1", "w1_a"}}
"""The factors that LoRA+ gives a larger rate, by algorithm: those that sd-scripts takes (lora_up, hada_w2_a, lokr_w1).
LoRA+: Hayou et al. 2024, arXiv 2402.12354."""

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
    ratio, up_roles = settings.loraplus_lr_ratio, _LORAPLUS_ROLES_BY_ALGORITHM.get(algorithm, set())
    groups: dict[tuple[float, bool], OptimizerParamGroup] = {}
    for name, parameter in named:
        stated = rate_of(name)
        rate = settings.learning_rate if stated is None else stated
        up = ratio is not None and name.rpartition(".")[2] in up_roles
        if rate:
            group = groups.setdefault((rate, up), make_param_group(rate, ratio if up else None))
            group["params"].append(parameter)
    if ratio is not None and groups and not any(up for _, up in groups):
        raise UsageError(
            f"loraplus_lr_ratio = {ratio:g} has no effect: {algorithm} has no up factors.",
            code="LORAPLUS-WITHOUT-EFFECT",
            subject="loraplus_lr_ratio",
            evidence={"loraplus_lr_ratio": ratio, "algorithm": algorithm},
            remedy=f"Leave it out; it is for {', '.join(_LORAPLUS_ROLES_BY_ALGORITHM)}.",
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
        """The groups, live."""
        return self.base.param_groups

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters, in the order of the groups."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def step(self) -> None:
        """Update the parameters by their gradients."""
        self.base.step()

    def zero_grad(self) -> None:
        """Forget the gradients."""
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
        for parameter, saved in zip(self.parameters, list_saved_parameter_states(state), strict=True):
            if saved is not None:
                self.base.state[parameter] = restore_saved_dtype(self.base.state[parameter], saved)


def list_saved_parameter_states(state: Mapping[str, Any]) -> list[Mapping[str, Any] | None]:
    """What a state holds of each parameter, in the order of the groups."""
    return [state["state"].get(index) for group in state["param_groups"] for index in group["params"]]


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
    if name in SELF_TUNING_OPTIMIZERS and len(rates) > 1:
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
