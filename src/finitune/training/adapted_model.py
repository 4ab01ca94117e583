"""What learns: adapters attached to the components of a frozen model, and the model's answer with them on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from finitune.adapters import AdapterSet, SiteAdapter, find_algorithm
from finitune.adapters.core import get_factor_shapes
from finitune.adapters.dropout import Dropout
from finitune.adapters.layer import AttachedAdapters, attach_adapters
from finitune.adapters.modules import compute_true_weight
from finitune.adapters.new import create_adapter
from finitune.config.schema import NetworkSection
from finitune.datasets.items import derive_seed, make_generator
from finitune.errors import AdapterError
from finitune.models.loaded import DenoiserCallable
from finitune.training.compute_precision import PrecisionComponent
from finitune.training.sites import SelectedSite, SiteSelection


@dataclass
class AdaptedModel:
    """The adapters of a run by component, and the denoiser that they sit on."""

    denoiser: DenoiserCallable
    attached: Mapping[str, AttachedAdapters]
    precisions: Mapping[str, PrecisionComponent] = field(default_factory=dict)
    denoiser_name: str = ""
    """Which of `precisions` is the denoiser."""

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(site and role, parameter) of all that is trained, in one order for ever: "transformer.x.to_q.up"."""
        return [
            (f"{component}.{name}", parameter)
            for component, attached in self.attached.items()
            for name, parameter in attached.named_parameters()
        ]

    def adapter(self) -> AdapterSet:
        """The adapter as it is: fp32 copies on the CPU."""
        return AdapterSet(
            {
                f"{component}.{module}": adapter
                for component, attached in self.attached.items()
                for module, adapter in attached.adapters().items()
            }
        )

    def load(self, adapter: AdapterSet) -> None:
        """Take over the numbers of an adapter of the same sites, roles and shapes; raises AdapterError where not."""
        for component, attached in self.attached.items():
            attached.load(adapter.component(component))

    def tensors(self) -> dict[str, Tensor]:
        """What is trained, by name: fp32 copies where they are."""
        return {name: parameter.detach().clone() for name, parameter in self.named_parameters()}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name, parameter in self.named_parameters():
            parameter.copy_(tensors[name])

    def train(self, mode: bool) -> None:
        """Dropout on or off."""
        for attached in self.attached.values():
            for layer in attached.layers.values():
                layer.held.train(mode)

    def seed_dropout(self, *addresses: Sequence[object]) -> None:
        """Draw the masks of the next batch by the addresses of its samples, plain values, and by layer."""
        layers = [
            (f"{component}.{module}", layer.held)
            for component, attached in self.attached.items()
            for module, layer in attached.layers.items()
            if layer.held.dropout
        ]
        if layers:
            table = [[derive_seed(*address, "dropout", site) for address in addresses] for site, _ in layers]
            seeds = torch.tensor(table).to(next(layers[0][1].parameters()).device)
            for (_, held), own in zip(layers, seeds, strict=True):
                held.dropout = replace(held.dropout, seeds=own)

    def strength(self, value: float) -> None:
        for attached in self.attached.values():
            for layer in attached.layers.values():
                for held in layer.held:
                    held_any: Any = held
                    held_any.strength = value

    @torch.no_grad()
    def limit_norms(self, largest: float) -> int:
        """Scale down every change whose Frobenius norm is above `largest`, by one of its factors; how many there were.

        sd-scripts' scale_weight_norms, for all additive algorithms.
        """
        limited = 0
        for attached in self.attached.values():
            for layer in attached.layers.values():
                adapter = layer.adapter
                algorithm = find_algorithm(adapter.algorithm)
                if not algorithm.additive:
                    continue
                norm = float(
                    torch.linalg.vector_norm(
                        algorithm.delta(adapter, torch.zeros_like(compute_true_weight(layer.base)))
                    )
                )
                if norm > largest:
                    for role in algorithm.roles_where(scaled=True):
                        if role in adapter.tensors:
                            adapter.tensors[role].mul_(largest / norm)
                    limited += 1
        return limited

    def give_up_plans(self) -> list[str]:
        """Let every product measure its own scale from now on; the sites that had a constant of a plan."""
        return [f"{component}.{site}" for component, one in self.precisions.items() for site in one.measure()]


def make_training_adapters(
    roots: Mapping[str, nn.Module], choice: SiteSelection, network: NetworkSection, seed: int
) -> dict[str, dict[str, SiteAdapter]]:
    """Adapters that change nothing yet, by component and module; the same numbers for one seed and name everywhere."""
    made: dict[str, dict[str, SiteAdapter]] = {}
    for component, root in roots.items():
        chosen = choice.of(component)
        if chosen:
            layers = {module: root.get_submodule(module) for module in chosen}
            first = next(iter(chosen))
            target = chosen[first].target(cast(nn.Parameter, layers[first].weight), network)
            shared = find_algorithm(network.algorithm).draw_shared([one.shape for one in chosen.values()], target)
            made[component] = {
                module: make_layer_adapter(layers[module], one, network, seed, shared) for module, one in chosen.items()
            }
    return made


def make_layer_adapter(
    layer: nn.Module, one: SelectedSite, network: NetworkSection, seed: int, shared: Mapping[str, Tensor]
) -> SiteAdapter:
    weight: Any = layer.weight
    target = replace(one.target(weight.detach().float().cpu(), network), shared=shared)
    adapter = create_adapter(target, network.algorithm, make_generator(seed, "init", one.site), network.dora)
    return replace(adapter, rank_stabilised=network.rs_lora)


def match_initial_adapter(
    fresh: Mapping[str, Mapping[str, SiteAdapter]], given: AdapterSet
) -> dict[str, dict[str, SiteAdapter]]:
    """The adapters of a file in the places of the fresh ones; raises AdapterError (START-DIFFERS) where they differ."""
    wanted = {f"{component}.{module}": one for component, sites in fresh.items() for module, one in sites.items()}
    differing = sorted(set(wanted) ^ set(given.sites)) or [
        site for site, one in wanted.items() if get_factor_shapes(one) != get_factor_shapes(given[site])
    ]
    if differing:
        raise AdapterError(
            f"network_weights: {len(differing)} modules differ from what this run makes: {', '.join(differing[:3])}",
            code="START-DIFFERS",
            subject="network.network_weights",
            evidence={"differing": len(differing), "first": differing[:5]},
            remedy="Take the file's own algorithm, rank and modules; `finitune check FILE` tells them.",
        )
    return {
        component: {module: given[f"{component}.{module}"] for module in sites} for component, sites in fresh.items()
    }


def attach_training_adapters(
    roots: Mapping[str, nn.Module], adapters: Mapping[str, Mapping[str, SiteAdapter]], network: NetworkSection
) -> Iterator[tuple[str, AttachedAdapters]]:
    """(component, what is attached) for training, with the configured dropout."""
    dropout = Dropout(network.network_dropout, network.rank_dropout, network.module_dropout)
    for component, sites in adapters.items():
        yield component, attach_adapters(roots[component], sites, trainable=True, dropout=dropout)
