"""PEFT's configuration of a LoRA: beside the tensors in a folder of PEFT's, in the metadata of a file of diffusers'."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from finitune.adapters import find_algorithm
from finitune.adapters.core import SiteAdapter
from finitune.errors import AdapterError
from finitune.models.spec import ModelSpec

LoraByModule = Mapping[str, SiteAdapter]
"""The LoRA of each module of one component, by the module's name."""


def build_diffusers_metadata(components: Mapping[str, LoraByModule], family: ModelSpec) -> dict[str, Any]:
    """The content of lora_adapter_metadata: each component's configuration, its keys behind the component's name.

    Source: diffusers loaders/lora_base.py, _pack_dict_with_prefix.
    """
    tables = {name: build_lora_config(adapters, family) for name, adapters in components.items()}
    return {f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()}


def build_peft_config(components: Mapping[str, LoraByModule], family: ModelSpec) -> dict[str, Any]:
    """The content of adapter_config.json; raises AdapterError (WRITE-ONE-COMPONENT) for several components."""
    if len(components) > 1:
        raise AdapterError(
            f"a PEFT folder holds the adapter of one model, and this one adapts {' and '.join(components)}",
            code="WRITE-ONE-COMPONENT",
            subject=", ".join(components),
            evidence={"components": list(components)},
            remedy="Write diffusers' spelling, which names the components: --to diffusers.",
        )
    (adapters,) = components.values()
    return {"peft_type": "LORA", "inference_mode": True, **build_lora_config(adapters, family)}


def build_lora_config(adapters: LoraByModule, family: ModelSpec) -> dict[str, Any]:
    """The fields of PEFT's LoraConfig. One rule for all scales: alpha / rank, unless every module is rsLoRA."""
    stabilised = all(adapter.rank_stabilised for adapter in adapters.values())
    ranks = {name: adapter.tensors["down"].shape[0] for name, adapter in adapters.items()}
    alphas = {name: compute_peft_alpha(adapter, ranks[name], stabilised) for name, adapter in adapters.items()}
    rank, alpha = find_most_common(ranks), find_most_common(alphas)
    return {
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {make_exact_module_pattern(name): own for name, own in ranks.items() if own != rank},
        "alpha_pattern": {make_exact_module_pattern(name): own for name, own in alphas.items() if own != alpha},
        "target_modules": build_target_modules(adapters, family),
        "use_rslora": stabilised,
        "use_dora": any(adapter.magnitude is not None for adapter in adapters.values()),
        "lora_bias": any("up_bias" in adapter.tensors for adapter in adapters.values()),
    }


def compute_peft_alpha(adapter: SiteAdapter, rank: int, stabilised: bool) -> float:
    """The alpha that gives the adapter's scale when it is divided by the rank or, if `stabilised`, by its root."""
    if adapter.alpha is not None and adapter.rank_stabilised == stabilised:
        return adapter.alpha
    return find_algorithm("lora").scale(adapter) * (math.sqrt(rank) if stabilised else rank)


def find_most_common(values: Mapping[str, float]) -> Any:
    """The value that most modules have; the first of them where several are equally common."""
    numbers = list(values.values())
    return max(dict.fromkeys(numbers), key=numbers.count)


def make_exact_module_pattern(name: str) -> str:
    """A pattern that means this module alone: PEFT lets one match the end of any name, and an anchor forbids that.

    Source: peft utils/other.py, get_pattern_key.
    """
    return f"^{re.escape(name)}"


def build_target_modules(adapters: LoraByModule, family: ModelSpec) -> list[str] | str:
    """PEFT's target_modules: names, or one expression where a name is also the end of another module's."""
    names = sorted(adapters)
    templates = (site for component in family.adapters.components for site in component.sites)
    sites = {blank_site_numbers(site.replace("{i}", "0")) for site in templates}
    if any(site.endswith(f".{name}") for name in set(map(blank_site_numbers, names)) for site in sites):
        return f"(?:{'|'.join(map(re.escape, names))})"
    return names


def blank_site_numbers(site: str) -> str:
    """A site with its numbers blanked: the same for the like modules of all blocks."""
    return re.sub(r"\d+", "#", site)
