"""What a layer holds of its adapters, and what these add to its result, in fp32.

By the factors alone where the algorithm can; a DoRA over outputs needs no product beside those of its factors either:

    W(1) x = c * (W x + dW x),  c = magnitude / |W + dW|

where W x is the base's own result without its bias. All else goes through one product with the sum of the changes.
Strength, scale and carried powers of two are multiplied into what is between the factors, or into the change of the
weight, whichever is there: never in a pass of their own over the outputs.

What is as large as a weight is made again on the way back, not kept: a model's layers together would need several
times its own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from finitune.adapters import dora, find_algorithm
from finitune.adapters.core import FactorRole, SiteAdapter
from finitune.adapters.dropout import Dropout
from finitune.adapters.products import LayerProducts
from finitune.adapters.weight import WeightedAdapter, compute_weight_delta
from finitune.errors import AdapterError

_MAGNITUDE_ROLE = "magnitude"
_TRAINED_ROLE = FactorRole()
SharedCopies = dict[tuple[int, torch.device], tuple[Tensor, Tensor]]


class AdapterModule(nn.Module):
    """One adapter's tensors in fp32: parameters where they are trained, else buffers. `strength` may be set.

    `shared` are the copies of tensors that all modules have, by the given one's id and the device, and the given one.
    """

    def __init__(
        self,
        adapter: SiteAdapter,
        strength: float,
        trainable: bool,
        device: torch.device,
        shared: SharedCopies | None = None,
    ):
        super().__init__()
        self.strength = strength
        self.roles = tuple(adapter.tensors)
        self.stated = replace(adapter, tensors={})
        roles, shared = find_algorithm(adapter.algorithm).roles, {} if shared is None else shared
        for role, tensor in get_tensors_by_role(adapter).items():
            known = roles.get(role, _TRAINED_ROLE)
            floating = tensor.is_floating_point()
            place = (id(tensor), device)
            if known.shared_key and place in shared:
                own = shared[place][0]
            else:
                own = tensor.detach().to(device, torch.float32 if floating else tensor.dtype, copy=True)
            if known.shared_key:
                shared[place] = own, tensor
            if floating and trainable and known.trained:
                self.register_parameter(role, nn.Parameter(own))
            else:
                self.register_buffer(role, own)

    @property
    def adapter(self) -> SiteAdapter:
        """The adapter over the live tensors."""
        return self.over(lambda tensor: tensor)

    def over(self, view: Callable[[Tensor], Tensor]) -> SiteAdapter:
        """The adapter over what `view` makes of each live tensor."""
        tensors = {role: view(getattr(self, role)) for role in self.roles}
        magnitude = self.stated.magnitude
        live = replace(magnitude, tensor=view(getattr(self, _MAGNITUDE_ROLE))) if magnitude else None
        return replace(self.stated, tensors=tensors, magnitude=live)

    def require_alike(self, given: SiteAdapter) -> None:
        """Raise AdapterError (ADAPTER-STATE) unless `given` means the same by its roles, and has their shapes."""
        own = self.adapter
        for what, here, there in (
            ("the algorithm", own.algorithm, given.algorithm),
            ("the scale", find_algorithm(own.algorithm).scale(own), find_algorithm(given.algorithm).scale(given)),
            ("the options", dict(own.options), dict(given.options)),
            ("the rule of the magnitude", get_magnitude_convention(own), get_magnitude_convention(given)),
            ("the tensors", get_shapes_by_role(own), get_shapes_by_role(given)),
        ):
            if here != there:
                raise make_adapter_state_error(f"{what} differs from what is attached", attached=here, given=there)

    @torch.no_grad()
    def load(self, given: SiteAdapter) -> None:
        """Copy tensors into the live ones, in place; they must be alike."""
        for role, tensor in get_tensors_by_role(given).items():
            getattr(self, role).copy_(tensor)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AdapterModule:
        """Follow the model to a device, but not to another dtype."""

        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        return super()._apply(moved, recurse)


class AdapterModuleList(nn.ModuleList):
    """The adapters of one layer, and what they add to it together; `dropout` acts in training mode alone.

    `scales_itself`: its products keep in range by themselves and its tensors stay fp32, so that a precision plan has
    nothing to say about what happens inside.
    """

    scales_itself = True

    def __init__(self, adapters: Iterable[AdapterModule], dropout: Dropout):
        super().__init__(adapters)
        self.dropout = dropout

    def __iter__(self) -> Iterator[AdapterModule]:
        return cast("Iterator[AdapterModule]", super().__iter__())

    @property
    def dropping(self) -> Dropout:
        return self.dropout if self.training else Dropout()

    def with_strengths(self) -> list[WeightedAdapter]:
        return [(held.adapter, held.strength) for held in self]

    def forward(self, x: Tensor, base: nn.Module, y: Tensor | None = None) -> Tensor | None:
        """What is to be added to the stored result `y` of `base` (made here where not given), in fp32; None where no
        adapter acts.
        """
        dropping = self.dropping
        acting = [
            (adapter, strength) for adapter, strength in self.with_strengths() if strength and not dropping.skips()
        ]
        if not acting:
            return None
        products = LayerProducts(base)
        carry, carried = (getattr(base, name, 0) for name in ("carry", "carried"))
        shift = 2.0 ** (carried - carry)
        added: list[Tensor] = []
        dense: list[Tensor] = []
        for adapter, strength in acting:
            cheap = apply_factors(adapter, x, products, strength * shift, dropping)
            if cheap is None:
                dense.append(recompute_in_backward(compute_scaled_delta, adapter, base, strength * shift))
            elif adapter.magnitude is None:
                added.append(cheap)
            else:
                stored: Tensor = base(x) if y is None else y
                added.append(apply_dora_direction(adapter, cheap, stored, base, strength))
        if dense:
            through = products.apply_spatial(dropping.neurons(x), sum_tensors(dense))
            added.append(dropping.ranks(through, products.channels))
        change, bias = sum_tensors(added), sum_bias_changes(base, acting)
        if bias is not None:
            change = change + reshape_per_output(multiply_unless_one(bias, 2.0**-carry), base)
        return dropping.samples(change)


def apply_factors(
    adapter: SiteAdapter, x: Tensor, products: LayerProducts, factor: float, dropping: Dropout
) -> Tensor | None:
    """factor * (x through dW) by the factors, or None where the whole W(1) - W is needed."""
    algorithm = find_algorithm(adapter.algorithm)
    if adapter.magnitude is not None and not (algorithm.additive and adapter.magnitude.side == "out"):
        return None
    if algorithm.drops_inside:
        return algorithm.forward(adapter, x, products, factor, dropping)
    change = algorithm.forward(adapter, dropping.neurons(x), products, factor)
    return None if change is None else dropping.ranks(change, products.channels)


def apply_dora_direction(adapter: SiteAdapter, change: Tensor, y: Tensor, base: nn.Module, strength: float) -> Tensor:
    """strength * (W(1) - W) x of a DoRA over outputs, for strength * dW x and the base's stored result `y`."""
    ratio = reshape_per_output(compute_row_ratio(adapter, base), base)
    bias: Any = base.bias
    plain = y.float()
    if bias is not None:
        plain = plain - reshape_per_output(multiply_unless_one(bias.float(), 2.0 ** -getattr(base, "carry", 0)), base)
    return torch.addcmul(ratio * change, multiply_unless_one(ratio - 1, strength), plain)


def recompute_in_backward(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """The function's result, with nothing kept for its gradient but the way to make it again."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    return cast(Tensor, checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False))


def compute_scaled_delta(adapter: SiteAdapter, base: nn.Module, factor: float) -> Tensor:
    """factor * (W(1) - W) in fp32."""
    return multiply_unless_one(compute_weight_delta(compute_true_weight(base), adapter), factor)


def compute_row_ratio(adapter: SiteAdapter, base: nn.Module) -> Tensor:
    """fp32 c = magnitude / |W + dW|, one for each output; 1 where there is nothing to scale."""
    return recompute_in_backward(_compute_row_ratio, adapter, base)


def _compute_row_ratio(adapter: SiteAdapter, base: nn.Module) -> Tensor:
    """The same, with all that it reads kept for the gradient."""
    assert adapter.magnitude is not None
    weight = compute_true_weight(base)
    adapted = adapter.magnitude.norm_of == "adapted"
    bare = replace(adapter, magnitude=None)
    norm = find_algorithm(adapter.algorithm).row_norms(bare, weight) if adapted else dora.compute_row_norms(weight)
    return dora.compute_dora_ratio(adapter.magnitude, norm.view(-1, *[1] * (weight.ndim - 1)), weight).flatten()


def reshape_per_output(vector: Tensor, base: nn.Module) -> Tensor:
    """One number for each output of `base`, broadcastable to its result."""
    weight: Any = base.weight
    return vector.view(-1, *[1] * (weight.ndim - 2))


def multiply_unless_one(tensor: Tensor, factor: float) -> Tensor:
    """`tensor` by a factor, without a pass over it for a factor of 1."""
    return tensor if factor == 1 else tensor * factor


def compute_true_weight(base: nn.Module) -> Tensor:
    """A layer's weight in fp32, with the power of two undone by which it may be stored."""
    weight: Any = base.weight
    return multiply_unless_one(weight.float(), 2.0 ** getattr(base, "weight_exponent", 0))


def sum_bias_changes(base: nn.Module, acting: Sequence[WeightedAdapter]) -> Tensor | None:
    """The sum of m * (b(1) - b) in fp32, or None where every bias stays."""
    bias: Any = base.bias
    wide = None if bias is None else bias.float()
    deltas = [(find_algorithm(a.algorithm).bias_delta(a, wide), strength) for a, strength in acting]
    changes = [strength * delta.float() for delta, strength in deltas if delta is not None]
    return sum_tensors(changes) if changes else None


def sum_tensors(tensors: Sequence[Tensor]) -> Tensor:
    return sum(tensors[1:], start=tensors[0])


def get_tensors_by_role(adapter: SiteAdapter) -> dict[str, Tensor]:
    magnitude = adapter.magnitude
    return {**adapter.tensors, **({_MAGNITUDE_ROLE: magnitude.tensor} if magnitude else {})}


def get_shapes_by_role(adapter: SiteAdapter) -> dict[str, list[int]]:
    return {role: list(tensor.shape) for role, tensor in sorted(get_tensors_by_role(adapter).items())}


def get_magnitude_convention(adapter: SiteAdapter) -> list[object] | None:
    """What a magnitude means, its numbers aside."""
    magnitude = adapter.magnitude
    return magnitude and [magnitude.side, magnitude.norm_of, magnitude.eps]


def make_adapter_state_error(why: str, **evidence: object) -> AdapterError:
    return AdapterError(
        f"this state cannot be put into the attached adapters: {why}",
        code="ADAPTER-STATE",
        evidence=evidence,
        remedy="Attach adapters of the state's own algorithm, rank and targets, or start anew.",
    )
