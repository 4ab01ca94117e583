"""The module that an adapted layer becomes: y = base(x) + m * (x through W(1) - W), and the way in and out of a model.

The adapter keeps a precision of its own: fp32 tensors, products that are scaled half products where the base computes
in half and fp32 where it does not, one sum in fp32 and one rounding to the dtype that the base writes. W + dW is never
rounded to half: most of a small dW would be lost between two neighbouring weights. In fp32, one product through W + dW
is the cheapest way to train, and is taken there (`single`).

The base stays a child named `base`, so a precision plan made for the adapted model finds its products there. A plan
made before names the layers themselves: put it in force first, then attach; the powers of two that it left on the base
(`carried`, `carry`, `weight_exponent`) are read there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from finitune.adapters import find_algorithm
from finitune.adapters.core import SiteAdapter
from finitune.adapters.dropout import Dropout
from finitune.adapters.merged_linear import apply_adapted_linear, find_single_adapter
from finitune.adapters.modules import (
    AdapterModule,
    AdapterModuleList,
    SharedCopies,
    make_adapter_state_error,
    sum_bias_changes,
)
from finitune.adapters.weight import WeightedAdapter, combine_adapted_weight, compute_weight_delta
from finitune.errors import AdapterError, suggest_nearest_name

CONVOLUTION_TYPES = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NO_DROPOUT = Dropout()


class AdaptedLayer(nn.Module):
    """A Linear or convolution `base` and its adapters: x as the base takes it, the result in the dtype it writes.

    Every change is taken from the base as it stands. Attributes that are not found here are the base's. Raises
    AdapterError for a layer that computes anything else, and for adapters that do not fit it.
    """

    def __init__(
        self,
        base: nn.Module,
        adapters: Sequence[WeightedAdapter],
        trainable: bool = False,
        dropout: Dropout = NO_DROPOUT,
        shared: SharedCopies | None = None,
    ):
        super().__init__()
        require_adaptable_layer(base)
        weight: Any = base.weight
        for adapter, _ in adapters:
            require_layer_fit(adapter, base)
        self.base = base
        held = [AdapterModule(adapter, strength, trainable, weight.device, shared) for adapter, strength in adapters]
        self.held = AdapterModuleList(held, dropout)
        self.train(base.training)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base":
                raise
            return getattr(self.base, name)

    @property
    def adapters(self) -> list[WeightedAdapter]:
        return self.held.with_strengths()

    @property
    def adapter(self) -> SiteAdapter:
        """The adapter over the live tensors, where there is exactly one."""
        ((adapter, _),) = self.adapters
        return adapter

    def forward(self, x: Tensor) -> Tensor:
        trained = find_single_adapter(self.held, x, self.base)
        if trained is not None:
            return apply_adapted_linear(x, self.base, *trained)
        y = self.base(x)
        change = self.held(x, self.base, y)
        return y if change is None else (y.float() + change).to(y.dtype)


def require_known_module(root: nn.Module, known: Mapping[str, nn.Module], name: str) -> nn.Module:
    """The module of a name; raises AdapterError (ADAPTER-UNKNOWN-MODULE) where `root` has none."""
    if not name or name not in known:
        raise AdapterError(
            f"{type(root).__name__} has no module {name!r}.{suggest_nearest_name(name, known)}",
            code="ADAPTER-UNKNOWN-MODULE",
            subject=name,
            evidence={"modules": len(known)},
            remedy="The adapter was made for another model, or its names were not translated to this one's.",
        )
    return known[name]


def require_adaptable_layer(layer: nn.Module) -> None:
    """Raise AdapterError (ADAPTER-LAYER) for a module that is not a plain or planned Linear or convolution."""
    forward = type(layer).forward
    if isinstance(layer, nn.Linear):
        plain = forward is nn.Linear.forward or hasattr(layer, "arithmetic")
        plain = plain and not isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear)
    else:
        plain = isinstance(layer, CONVOLUTION_TYPES) and forward in [kind.forward for kind in CONVOLUTION_TYPES]
    if not plain:
        raise AdapterError(
            f"a {type(layer).__name__} computes more than a Linear or a convolution, or is not called as a module",
            code="ADAPTER-LAYER",
            evidence={"class": type(layer).__name__},
            remedy="Merge this adapter into the weights. Where one is attached already, attach both at once.",
        )


def require_layer_fit(adapter: SiteAdapter, layer: nn.Module) -> None:
    """Raise AdapterError where an adapter does not fit a layer's weight or bias; only shapes are computed."""
    weight: Any = layer.weight
    find_algorithm(adapter.algorithm).check(adapter, tuple(weight.shape))
    empty = replace(
        adapter,
        tensors={role: tensor.to("meta") for role, tensor in adapter.tensors.items()},
        magnitude=adapter.magnitude and replace(adapter.magnitude, tensor=adapter.magnitude.tensor.to("meta")),
    )
    delta = compute_weight_delta(torch.empty(weight.shape, device="meta"), empty)
    if delta.shape != weight.shape:
        raise AdapterError(
            f"the adapter makes a weight of {list(delta.shape)}; the layer has {list(weight.shape)} and its own inputs",
            code="ADAPTER-RESHAPES",
            evidence={"adapter": list(delta.shape), "model": list(weight.shape)},
            remedy="Merge the adapter into the weights, and build the model with the wider layer.",
        )


@dataclass(frozen=True)
class AttachedAdapters:
    """Adapters in force on `root`, by module name: `with` it, or take them off with `detach`."""

    root: nn.Module
    layers: Mapping[str, AdaptedLayer]
    originals: Mapping[str, nn.Module]

    def __enter__(self) -> nn.Module:
        return self.root

    def __exit__(self, *_: object) -> None:
        self.detach()

    def parameters(self) -> Iterator[nn.Parameter]:
        for layer in self.layers.values():
            yield from layer.held.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What is trained with its name, module and role, in the order of the layers.

        Where a layer has several adapters, the number of each stands between the two.
        """
        for module, layer in self.layers.items():
            for number, held in enumerate(layer.held):
                place = module if len(layer.held) == 1 else f"{module}.{number}"
                yield from ((f"{place}.{role}", parameter) for role, parameter in held.named_parameters())

    def adapters(self) -> dict[str, SiteAdapter]:
        """Copies of the adapters as they stand, by module: on the CPU, in fp32.

        What all modules share is one copy. Raises AdapterError (ADAPTER-STATE) where a layer has several.
        """
        copies: dict[int, Tensor] = {}

        def copy_once(tensor: Tensor) -> Tensor:
            if id(tensor) not in copies:
                dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
                copies[id(tensor)] = tensor.detach().to("cpu", dtype, copy=True)
            return copies[id(tensor)]

        return {module: held.over(copy_once) for module, held in self.single().items()}

    def load(self, adapters: Mapping[str, SiteAdapter]) -> None:
        """Copy tensors into the live ones, in place, for exactly the modules that are attached.

        Nothing is written where one does not fit. Raises AdapterError (ADAPTER-STATE) for other modules, algorithms,
        scales, options, roles or shapes.
        """
        held = self.single()
        if missing_or_more := sorted(held.keys() ^ adapters.keys()):
            raise make_adapter_state_error(
                "it is of other modules", modules=missing_or_more[:8], count=len(missing_or_more)
            )
        for module, one in held.items():
            try:
                one.require_alike(adapters[module])
            except AdapterError as error:
                error.subject = error.subject or module
                raise
        for module, one in held.items():
            one.load(adapters[module])

    def single(self) -> dict[str, AdapterModule]:
        """What each layer holds; raises AdapterError (ADAPTER-STATE) where that is not one adapter."""
        for module, layer in self.layers.items():
            if len(layer.held) != 1:
                error = make_adapter_state_error("a layer has more than one adapter", adapters=len(layer.held))
                error.subject = module
                raise error
        return {module: next(iter(layer.held)) for module, layer in self.layers.items()}

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


def attach_adapters(
    root: nn.Module,
    adapters: Mapping[str, SiteAdapter | Sequence[WeightedAdapter]],
    strength: float = 1.0,
    trainable: bool = False,
    dropout: Dropout = NO_DROPOUT,
) -> AttachedAdapters:
    """Put adapters on the modules of `root` that `adapters` names, each alone or as (adapter, strength) pairs.

    `strength` multiplies all of theirs. Their tensors are copied to fp32; with `trainable` the copies are parameters.
    `dropout` acts in training mode alone. Nothing is changed where one does not fit. Raises AdapterError:
    ADAPTER-UNKNOWN-MODULE, or as AdaptedLayer does.
    """
    known = dict(root.named_modules())
    layers: dict[str, AdaptedLayer] = {}
    shared: SharedCopies = {}
    for name, given in adapters.items():
        layer = require_known_module(root, known, name)
        pairs = [(given, 1.0)] if isinstance(given, SiteAdapter) else given
        try:
            layers[name] = AdaptedLayer(layer, [(a, strength * own) for a, own in pairs], trainable, dropout, shared)
        except AdapterError as error:
            error.subject = error.subject or name
            raise
    for name, layer in layers.items():
        root.set_submodule(name, layer)
    return AttachedAdapters(root, layers, {name: layer.base for name, layer in layers.items()})


def merge_into_weights(root: nn.Module, adapters: Mapping[str, Sequence[WeightedAdapter]]) -> None:
    """Put adapters into the weights of `root`, by module name: summed in fp64 on the base, rounded once to fp32.

    Adapted weights are fp32 afterwards, so that no half precision has taken its share yet. Nothing is changed where
    one does not fit. Raises AdapterError as `attach` does.
    """
    known = dict(root.named_modules())
    for name, strong in adapters.items():  # everything is looked at before anything is written
        layer = require_layer_weight(require_known_module(root, known, name), name)
        for adapter, _ in strong:
            require_layer_fit(adapter, layer)
    for name, strong in adapters.items():
        layer: Any = root.get_submodule(name)
        layer.weight.data = combine_adapted_weight(layer.weight.data.double(), list(strong)).float()
        change = sum_bias_changes(layer, [(adapter, strength) for adapter, strength in strong if strength != 0])
        if change is not None:
            require_layer_bias(layer, name)
            layer.bias.data = layer.bias.data.float() + change


def require_layer_weight(layer: nn.Module, name: str) -> nn.Module:
    """The layer; raises AdapterError (ADAPTER-LAYER) where it has no weight."""
    if getattr(layer, "weight", None) is None:
        raise AdapterError(
            f"{name} is a {type(layer).__name__} without a weight",
            code="ADAPTER-LAYER",
            subject=name,
            remedy="The adapter was made for another model: this one has nothing to change there.",
        )
    return layer


def require_layer_bias(layer: nn.Module, name: str) -> None:
    """Raise AdapterError (ADAPTER-BIAS) where an adapter changes a bias that the layer does not have."""
    if layer.bias is None:
        raise AdapterError(
            f"the adapter changes the bias of {name}, which has none",
            code="ADAPTER-BIAS",
            subject=name,
            remedy="Attach the adapter instead of merging it, or leave the bias out of its training.",
        )
