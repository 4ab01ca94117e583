"""The module that an adapted layer becomes: y = base(x) + m * (x through W(1) - W), and the way in and out of a model.

The adapter keeps a precision of its own: fp32 tensors, products that are scaled half products where the base computes
in half and fp32 where it does not, one sum in fp32 and one rounding to the dtype that the base writes. W + dW is never
rounded to half: most of a small dW would be lost between two neighbouring weights.

The base stays a child named `base`, so a precision plan made for the adapted model finds its products there. A plan
made before names the layers themselves: put it in force first, then attach; the powers of two that it left on the base
(`carried`, `carry`, `weight_exponent`) are read there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finitune.adapters import algorithm_of
from finitune.adapters.core import SiteAdapter
from finitune.adapters.weight import Strong, combined_weight, weight_delta
from finitune.errors import AdapterError, did_you_mean
from finitune.numerics.conv import UNIT, Geometry, half_conv
from finitune.numerics.half import half_linear

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
MAGNITUDE = "magnitude"


class LayerProducts:
    """The products of one layer for its adapters: half where the layer computes in half, else fp32."""

    def __init__(self, layer: nn.Module):
        weight: Any = layer.weight
        self.layer: Any = layer
        self.axes = weight.ndim - 2
        self.half = getattr(layer, "arithmetic", weight.dtype) is torch.float16 and self.axes != 1
        self.groups: int = getattr(layer, "groups", 1)
        self.channels = 1 if self.axes else -1

    def walk(self, x: Tensor, weight: Tensor) -> Tensor:
        """x by `weight` (n, in / groups[, *kernel]) as the layer walks: its padding, stride, dilation and groups."""
        if not self.axes:
            return self.linear(x, weight.flatten(1))
        layer, padding = self.layer, self.layer.padding
        if layer.padding_mode != "zeros" or isinstance(padding, str):
            mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
            x, padding = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode), 0
        geometry = Geometry(layer.stride, padding, layer.dilation, layer.groups)
        return self.convolve(x, weight if weight.ndim > 2 else self.pointwise(weight), geometry)

    def mix(self, x: Tensor, weight: Tensor) -> Tensor:
        """x by `weight` (n, c) over the channels alone."""
        return self.convolve(x, self.pointwise(weight), UNIT) if self.axes else self.linear(x, weight)

    def pointwise(self, weight: Tensor) -> Tensor:
        """`weight` (n, c) with a kernel of length 1 along every axis."""
        return weight.reshape(*weight.shape, *[1] * self.axes)

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product of a Linear in the arithmetic that was chosen."""
        return half_linear(x, weight, exponent=None) if self.half else F.linear(x.float(), weight.float())

    def convolve(self, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
        """The product of a convolution in the arithmetic that was chosen."""
        if self.half:
            return half_conv(x, weight, None, geometry, exponent=None)
        convolve = getattr(F, f"conv{self.axes}d")
        return convolve(x.float(), weight.float(), None, *geometry)


class HeldAdapter(nn.Module):
    """One adapter's tensors in fp32: parameters where it is trained, else buffers. `strength` may be set."""

    def __init__(self, adapter: SiteAdapter, strength: float, trainable: bool, device: torch.device):
        super().__init__()
        self.strength = strength
        self.roles = tuple(adapter.tensors)
        magnitude = adapter.magnitude
        self.stated = replace(adapter, tensors={})
        for role, tensor in {**adapter.tensors, **({MAGNITUDE: magnitude.tensor} if magnitude else {})}.items():
            floating = tensor.is_floating_point()
            own = tensor.detach().to(device, torch.float32 if floating else tensor.dtype, copy=True)
            if floating and trainable:
                self.register_parameter(role, nn.Parameter(own))
            else:
                self.register_buffer(role, own)

    @property
    def adapter(self) -> SiteAdapter:
        """The adapter over the live tensors."""
        tensors = {role: getattr(self, role) for role in self.roles}
        magnitude = self.stated.magnitude
        live = replace(magnitude, tensor=getattr(self, MAGNITUDE)) if magnitude else None
        return replace(self.stated, tensors=tensors, magnitude=live)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HeldAdapter:
        """Follow the model to a device, but not to another dtype."""

        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        return super()._apply(moved, recurse)


class HeldAdapters(nn.ModuleList):
    """The adapters of one layer, and what they add to it together.

    `scales_itself`: its products keep in range by themselves and its tensors stay fp32, so that a precision plan has
    nothing to say about what happens inside.
    """

    scales_itself = True

    def strong(self) -> list[Strong]:
        """The adapters over the live tensors, each with its strength."""
        return [(held.adapter, held.strength) for held in cast("Iterable[HeldAdapter]", self)]

    def forward(self, x: Tensor, base: nn.Module) -> Tensor | None:
        """What is to be added to the stored result of `base`, in fp32: by the factors, or by one product for all
        others; None where no adapter acts.
        """
        acting = [(adapter, strength) for adapter, strength in self.strong() if strength != 0]
        if not acting:
            return None
        products = LayerProducts(base)
        added: list[Tensor] = []
        dense: list[Tensor] = []
        for adapter, strength in acting:
            algorithm = algorithm_of(adapter.algorithm)
            cheap = None if adapter.magnitude else algorithm.forward(adapter, x, products)
            if cheap is None:
                dense.append(strength * weight_delta(true_weight(base), adapter))
            else:
                added.append(strength * cheap)
        if dense:
            added.append(products.walk(x, total(dense)))
        carry, carried = (getattr(base, name, 0) for name in ("carry", "carried"))
        change = total(added) * 2.0 ** (carried - carry)
        bias = bias_change(base, acting)
        return change if bias is None else change + (bias * 2.0**-carry).view(-1, *[1] * products.axes)


def true_weight(base: nn.Module) -> Tensor:
    """A layer's weight in fp32, with the power of two undone by which it may be stored."""
    weight: Any = base.weight
    return weight.float() * 2.0 ** getattr(base, "weight_exponent", 0)


def bias_change(base: nn.Module, acting: Sequence[Strong]) -> Tensor | None:
    """The sum of m * (b(1) - b) in fp32, or None where every bias stays."""
    bias: Any = base.bias
    wide = None if bias is None else bias.float()
    deltas = [(algorithm_of(a.algorithm).bias_delta(a, wide), strength) for a, strength in acting]
    changes = [strength * delta.float() for delta, strength in deltas if delta is not None]
    return total(changes) if changes else None


class AdaptedLayer(nn.Module):
    """A Linear or convolution `base` and its adapters: x as the base takes it, the result in the dtype it writes.

    Every change is taken from the base as it stands. Attributes that are not found here are the base's. Raises
    AdapterError for a layer that computes anything else, and for adapters that do not fit it.
    """

    def __init__(self, base: nn.Module, adapters: Sequence[Strong], trainable: bool = False):
        super().__init__()
        demand_layer(base)
        weight: Any = base.weight
        for adapter, _ in adapters:
            demand_fit(adapter, base)
        self.base = base
        self.held = HeldAdapters(HeldAdapter(a, strength, trainable, weight.device) for a, strength in adapters)
        self.train(base.training)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base":
                raise
            return getattr(self.base, name)

    @property
    def adapters(self) -> list[Strong]:
        """The adapters over the live tensors, each with its strength."""
        return self.held.strong()

    @property
    def adapter(self) -> SiteAdapter:
        """The adapter over the live tensors, where there is exactly one."""
        ((adapter, _),) = self.adapters
        return adapter

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        change = self.held(x, self.base)
        return y if change is None else (y.float() + change).to(y.dtype)


def total(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of one or more tensors."""
    return sum(tensors[1:], start=tensors[0])


def demand_module(root: nn.Module, known: Mapping[str, nn.Module], name: str) -> nn.Module:
    """The module of a name; raises AdapterError (ADAPTER-UNKNOWN-MODULE) where `root` has none."""
    if not name or name not in known:
        raise AdapterError(
            f"{type(root).__name__} has no module {name!r}.{did_you_mean(name, known)}",
            code="ADAPTER-UNKNOWN-MODULE",
            subject=name,
            evidence={"modules": len(known)},
            remedy="The adapter was made for another model, or its names were not translated to this one's.",
        )
    return known[name]


def demand_layer(layer: nn.Module) -> None:
    """Raise AdapterError (ADAPTER-LAYER) for a module that is not a plain or planned Linear or convolution."""
    forward = type(layer).forward
    if isinstance(layer, nn.Linear):
        plain = forward is nn.Linear.forward or hasattr(layer, "arithmetic")
        plain = plain and not isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear)
    else:
        plain = isinstance(layer, CONVOLUTIONS) and forward in [kind.forward for kind in CONVOLUTIONS]
    if not plain:
        raise AdapterError(
            f"a {type(layer).__name__} computes more than a Linear or a convolution, or is not called as a module",
            code="ADAPTER-LAYER",
            evidence={"class": type(layer).__name__},
            remedy="Merge this adapter into the weights. Where one is attached already, attach both at once.",
        )


def demand_fit(adapter: SiteAdapter, layer: nn.Module) -> None:
    """Raise AdapterError where an adapter does not fit a layer's weight or bias; only shapes are computed."""
    weight: Any = layer.weight
    algorithm_of(adapter.algorithm).check(adapter, tuple(weight.shape))
    empty = replace(
        adapter,
        tensors={role: tensor.to("meta") for role, tensor in adapter.tensors.items()},
        magnitude=adapter.magnitude and replace(adapter.magnitude, tensor=adapter.magnitude.tensor.to("meta")),
    )
    delta = weight_delta(torch.empty(weight.shape, device="meta"), empty)
    if delta.shape != weight.shape:
        raise AdapterError(
            f"the adapter makes a weight of {list(delta.shape)}; the layer has {list(weight.shape)} and its own inputs",
            code="ADAPTER-RESHAPES",
            evidence={"adapter": list(delta.shape), "model": list(weight.shape)},
            remedy="Merge the adapter into the weights, and build the model with the wider layer.",
        )


@dataclass(frozen=True)
class Attached:
    """Adapters in force on `root`, by module name: `with` it, or take them off with `detach`."""

    root: nn.Module
    layers: Mapping[str, AdaptedLayer]
    originals: Mapping[str, nn.Module]

    def __enter__(self) -> nn.Module:
        return self.root

    def __exit__(self, *_: object) -> None:
        self.detach()

    def parameters(self) -> Iterator[nn.Parameter]:
        """What is trained, in the order of the layers."""
        for layer in self.layers.values():
            yield from layer.held.parameters()

    def detach(self) -> nn.Module:
        """Put the original modules back, which nothing has written to; returns the root.

        Raises AdapterError (ADAPTER-NESTED) where something else was put in place in between, and is there still.
        """
        for name, layer in self.layers.items():
            if self.root.get_submodule(name) is not layer or layer.base is not self.originals[name]:
                raise AdapterError(
                    f"{name} is not what was attached there",
                    code="ADAPTER-NESTED",
                    subject=name,
                    remedy="Undo what came after it first (a precision plan, another adapter), in reverse order.",
                )
        for name, original in self.originals.items():
            self.root.set_submodule(name, original)
        return self.root


def attach(
    root: nn.Module,
    adapters: Mapping[str, SiteAdapter | Sequence[Strong]],
    strength: float = 1.0,
    trainable: bool = False,
) -> Attached:
    """Put adapters on the modules of `root` that `adapters` names, each alone or as (adapter, strength) pairs.

    `strength` multiplies all of theirs. Their tensors are copied to fp32; with `trainable` the copies are parameters.
    Nothing is changed where one does not fit. Raises AdapterError: ADAPTER-UNKNOWN-MODULE, or as AdaptedLayer does.
    """
    known = dict(root.named_modules())
    layers: dict[str, AdaptedLayer] = {}
    for name, given in adapters.items():
        layer = demand_module(root, known, name)
        pairs = [(given, 1.0)] if isinstance(given, SiteAdapter) else given
        try:
            layers[name] = AdaptedLayer(layer, [(a, strength * own) for a, own in pairs], trainable)
        except AdapterError as error:
            error.subject = error.subject or name
            raise
    for name, layer in layers.items():
        root.set_submodule(name, layer)
    return Attached(root, layers, {name: layer.base for name, layer in layers.items()})


def merge(root: nn.Module, adapters: Mapping[str, Sequence[Strong]]) -> None:
    """Put adapters into the weights of `root`, by module name: summed in fp64 on the base, rounded once to fp32.

    Adapted weights are fp32 afterwards, so that no half precision has taken its share yet. Nothing is changed where
    one does not fit. Raises AdapterError as `attach` does.
    """
    known = dict(root.named_modules())
    for name, strong in adapters.items():  # everything is looked at before anything is written
        layer = demand_weight(demand_module(root, known, name), name)
        for adapter, _ in strong:
            demand_fit(adapter, layer)
    for name, strong in adapters.items():
        layer: Any = root.get_submodule(name)
        layer.weight.data = combined_weight(layer.weight.data.double(), list(strong)).float()
        change = bias_change(layer, [(adapter, strength) for adapter, strength in strong if strength != 0])
        if change is not None:
            demand_bias(layer, name)
            layer.bias.data = layer.bias.data.float() + change


def demand_weight(layer: nn.Module, name: str) -> nn.Module:
    """The layer; raises AdapterError (ADAPTER-LAYER) where it has no weight."""
    if getattr(layer, "weight", None) is None:
        raise AdapterError(
            f"{name} is a {type(layer).__name__} without a weight",
            code="ADAPTER-LAYER",
            subject=name,
            remedy="The adapter was made for another model: this one has nothing to change there.",
        )
    return layer


def demand_bias(layer: nn.Module, name: str) -> None:
    """Raise AdapterError (ADAPTER-BIAS) where an adapter changes a bias that the layer does not have."""
    if layer.bias is None:
        raise AdapterError(
            f"the adapter changes the bias of {name}, which has none",
            code="ADAPTER-BIAS",
            subject=name,
            remedy="Attach the adapter instead of merging it, or leave the bias out of its training.",
        )
