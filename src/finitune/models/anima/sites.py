"""Where adapters of Anima lie: read off the key maps, whose parameters are these modules' weights and biases."""

from __future__ import annotations

from finitune.files.keymap import KeyMap
from finitune.models.anima.keys import ANIMA_CONDITIONER_KEYS, ANIMA_DENOISER_PREFIXES, ANIMA_TRANSFORMER_KEYS
from finitune.models.sites import (
    AdapterSites,
    ComponentSites,
    Hallmark,
    ModulePlace,
    list_place_sites,
    make_single_site_places,
)

_QWEN3_LINEARS = (
    *(f"self_attn.{part}_proj" for part in ("q", "k", "v", "o")),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
)
_QWEN3_SITES = (
    "embed_tokens",
    "norm",
    *(f"layers.{{i}}.{norm}" for norm in ("input_layernorm", "post_attention_layernorm")),
    *(f"layers.{{i}}.self_attn.{norm}_norm" for norm in ("q", "k")),
    *(f"layers.{{i}}.{linear}" for linear in _QWEN3_LINEARS),
)
"""The modules of transformers' Qwen3Model."""

_INSERTED_BLOCKS = frozenset((2, 5, 8, 11, 14, 17, 21, 24, 27, 30, 33, 36))
"""Where Anima-2.9B has put its 12 new blocks between the 28 of Anima. Source: Gazingstars123/Anima-2.9B."""


def list_keymap_places(parameters: KeyMap) -> tuple[ModulePlace, ...]:
    """The modules whose weights and biases a key map names: original name and site."""
    pairs = (tuple(name.rpartition(".")[0] for name in pair) for pair in parameters.pairs)
    return make_single_site_places(*dict.fromkeys((left, right) for left, right in pairs))


def make_denoiser_component(name: str, places: tuple[ModulePlace, ...]) -> ComponentSites:
    """A component that lies in the denoiser's file, and that kohya's prefix of the denoiser covers."""
    return ComponentSites(
        name, ("unet",), list_place_sites(places), places, single_file=ANIMA_DENOISER_PREFIXES, kohya_native=True
    )


ANIMA_SITES = AdapterSites(
    components=(
        make_denoiser_component("transformer", list_keymap_places(ANIMA_TRANSFORMER_KEYS)),
        make_denoiser_component("text_conditioner", list_keymap_places(ANIMA_CONDITIONER_KEYS)),
        ComponentSites(
            "text_encoder",
            ("te", "te1"),
            _QWEN3_SITES,
            make_single_site_places(*((f"model.{site}", site) for site in _QWEN3_SITES)),
            comfy="qwen3_06b",
            single_file=("",),
        ),
    ),
    hallmarks=(Hallmark("transformer", "transformer_blocks.{i}.attn2.to_k", 1024),),
    base_model_versions=("anima",),
    architecture="anima-preview/lora",
    prediction_type="flow",
    block_maps={
        "28 to 40": (
            "transformer_blocks.{i}",
            dict(enumerate(n for n in range(40) if n not in _INSERTED_BLOCKS)),
        )
    },
    depths={"transformer_blocks.{i}": 28},
    trained={"transformer": r".*", "text_conditioner": r"blocks\..*", "text_encoder": r"layers\..*"},
    switches={"text_conditioner": "train_llm_adapter", "text_encoder": "train_text_encoder"},
    rates={"text_conditioner": "llm_adapter_lr", "text_encoder": "text_encoder_lr"},
    untrained=r".*(_modulation|_norm|_embedder|final_layer).*",  # sd-scripts, networks/lora_anima.py
)
