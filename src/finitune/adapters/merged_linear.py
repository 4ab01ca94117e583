"""Training in fp32 by one large product: y = x W(m)^T, and its gradients without a second one where there is a way.

W(m) = W + m * (W(1) - W) is made anew in every call, and once more on the way back: it costs about as much as some
rows of x do, and nothing of it is kept. In fp32 that loses no more of a change than the sum of two results does; in
half it would, so half keeps its two products (see `held`).

The gradient of the factors comes from those of a thin product where the algorithm has one (`factor_gradients`), and
else from grad^T x through the formula of the weight. A DoRA over outputs is its undirected product times c, which is a
pass over the outputs. Its norm is part of the gradient, as equation 5 of the paper has it: PEFT holds it constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from finitune.adapters import find_algorithm
from finitune.adapters.core import SiteAdapter
from finitune.adapters.modules import (
    AdapterModuleList,
    compute_row_ratio,
    get_tensors_by_role,
    multiply_unless_one,
    sum_bias_changes,
)
from finitune.adapters.weight import WeightedAdapter, compute_weight_delta


def find_single_adapter(held: AdapterModuleList, x: Tensor, base: nn.Module) -> WeightedAdapter | None:
    """The one adapter that is trained on a plain, frozen fp32 Linear by x, where one product is the cheapest way."""
    weight: Any = base.weight
    if type(base).forward is not nn.Linear.forward or not torch.is_grad_enabled() or has_call_hooks(base):
        return None
    if weight.requires_grad or not weight.dtype == x.dtype == torch.float32 or held.dropping:
        return None
    acting = [(one.adapter, one.strength) for one in held if one.strength]
    if len(acting) != 1 or not any(p.requires_grad for p in held.parameters()):
        return None
    out, into = weight.shape
    rows = x.numel() // max(into, 1)
    return acting[0] if rows * (into + out) >= 2 * into * out else None


def has_call_hooks(module: nn.Module) -> bool:
    """Whether something waits for the module to be called: a hook, or a forward of the instance's own."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module)


def apply_adapted_linear(x: Tensor, base: nn.Module, adapter: SiteAdapter, strength: float) -> Tensor:
    """x (..., in) through W(m) and b(m) of a frozen fp32 Linear, in fp32; differentiable in x and in the adapter."""
    weight: Any = base.weight
    bias: Any = base.bias
    change = sum_bias_changes(base, [(adapter, strength)])
    if change is not None:
        bias = change if bias is None else bias + change
    magnitude, additive = adapter.magnitude, find_algorithm(adapter.algorithm).additive
    if magnitude is None or magnitude.side != "out" or not additive or strength != 1:
        return multiply_by_adapted_weight(x, weight, bias, adapter, strength)
    undirected = multiply_by_adapted_weight(x, weight, None, replace(adapter, magnitude=None), 1.0)
    ratio = compute_row_ratio(adapter, base)
    return undirected * ratio if bias is None else torch.addcmul(bias, undirected, ratio)


def multiply_by_adapted_weight(
    x: Tensor, weight: Tensor, bias: Tensor | None, adapter: SiteAdapter, strength: float
) -> Tensor:
    """x (..., in) by W(m) (out, in), plus `bias`."""
    return _SingleProduct.apply(x, weight, bias, adapter, strength, *get_tensors_by_role(adapter).values())


def replace_adapter_tensors(adapter: SiteAdapter, tensors: Sequence[Tensor]) -> SiteAdapter:
    """The adapter over other tensors, in the order of its roles, its magnitude last."""
    roles = dict(zip(get_tensors_by_role(adapter), tensors, strict=True))
    magnitude = adapter.magnitude and replace(adapter.magnitude, tensor=tensors[-1])
    return replace(adapter, tensors={role: roles[role] for role in adapter.tensors}, magnitude=magnitude)


def compute_merged_weight(weight: Tensor, adapter: SiteAdapter, strength: float) -> Tensor:
    if adapter.magnitude is None:
        return find_algorithm(adapter.algorithm).merged_weight(adapter, weight, strength)
    return torch.add(weight, compute_weight_delta(weight, adapter), alpha=strength)


class _SingleProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        adapter: SiteAdapter,
        strength: float,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, *tensors)  # the tensors, so that writing to them in between is an error
        ctx.adapter, ctx.strength = adapter, strength
        return F.linear(x, compute_merged_weight(weight, adapter, strength), bias)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides a name
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, weight, *_ = ctx.saved_tensors
        adapter, strength = ctx.adapter, ctx.strength
        grad, rows = grads[0].reshape(-1, weight.shape[0]), x.reshape(-1, weight.shape[1])
        thin = None if adapter.magnitude else find_algorithm(adapter.algorithm).factor_gradients(adapter, rows, grad)
        if thin is None:
            adapted, found = compute_weight_gradients(weight, adapter, strength, grad.t() @ rows)
        else:
            adapted = compute_merged_weight(weight, adapter, strength) if ctx.needs_input_grad[0] else weight
            found = [multiply_unless_one(thin[role], strength) if role in thin else None for role in adapter.tensors]
        of_x = (grad @ adapted).view_as(x) if ctx.needs_input_grad[0] else None
        of_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return of_x, None, of_bias, None, None, *found


def compute_weight_gradients(
    weight: Tensor, adapter: SiteAdapter, strength: float, grad: Tensor
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """W(m), and the gradients of all tensors of the adapter for that of W(m)."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in get_tensors_by_role(adapter).values()]
        adapted = compute_merged_weight(weight, replace_adapter_tensors(adapter, leaves), strength)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(adapted, wanted, grad, allow_unused=True))
    return adapted.detach(), [next(found) if leaf.requires_grad else None for leaf in leaves]
