"""Files that diffusers and PEFT load as they were meant; and the table of who else does."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from finitune.adapters.core import AdapterSet, LoadVerdict, Magnitude, SiteAdapter
from finitune.adapters.weight import compute_adapted_weight
from finitune.files.writer import save_tensors, write_text
from finitune.models import MODEL_FAMILIES
from finitune.namings.core import ParsedAdapter
from finitune.namings.loaders import ADAPTER_LOADERS, predict_all_loaders, read_loader_rules
from finitune.namings.write import AdapterFileContent, write_adapter

ANIMA, FLUX, SD15 = (next(f for f in MODEL_FAMILIES if f.name == name) for name in ("anima", "flux", "sd15"))


def lora(shape: tuple[int, ...], rank: int, seed: int, alpha: float | None = None, dora: bool = False) -> SiteAdapter:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "up": torch.randn((shape[0], rank, *[1] * len(shape[2:])), generator=generator),
        "down": torch.randn((rank, *shape[1:]), generator=generator),
    }
    magnitude = Magnitude(torch.rand(shape[0], generator=generator) + 0.5) if dora else None
    return SiteAdapter("lora", tensors, alpha, magnitude=magnitude)


@cache
def cosmos() -> torch.nn.Module:
    from diffusers import CosmosTransformer3DModel

    torch.manual_seed(0)
    return CosmosTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=24,
        num_layers=2,
        text_embed_dim=32,
        adaln_lora_dim=8,
        extra_pos_embed_type=None,
        rope_scale=(1.0, 4.0, 4.0),
    )


@cache
def flux() -> torch.nn.Module:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    return FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )


@cache
def unet() -> torch.nn.Module:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=12,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )


CASES = {
    "anima": (ANIMA, cosmos, "transformer", ("transformer_blocks.0.attn1.to_q", "transformer_blocks.1.ff.net.2")),
    "flux": (FLUX, flux, "transformer", ("proj_out", "single_transformer_blocks.1.proj_out", "norm_out.linear")),
    "sd15": (SD15, unet, "unet", ("conv_in", "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k")),
}


def made_for(case: str, dora: bool = False, stabilised: bool = False) -> AdapterSet:
    """A LoRA over some modules of a tiny model, with mixed ranks and alphas unless PEFT has one rule for all."""
    _, model, component, names = CASES[case]
    sites = {}
    for i, name in enumerate(names):
        weight = model().get_submodule(name).weight
        site = lora(
            tuple(weight.shape), 3 if stabilised else 2 + i, i, 5.0 if stabilised else (3.0, None, 1.0)[i], dora
        )
        sites[f"{component}.{name}"] = replace(site, rank_stabilised=stabilised)
    return AdapterSet(sites)


def adapted_by(layers: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What the PEFT layers of a model make of their weights."""
    from peft.tuners.lora import LoraLayer

    result = {}
    for name, layer in layers.named_modules():
        if isinstance(layer, LoraLayer):
            base = layer.get_base_layer()
            before = base.weight.detach().clone()
            layer.merge()
            result[name] = base.weight.detach().clone()
            layer.unmerge()
            base.weight.data.copy_(before)
    return result


def demand_equal(adapted: dict[str, torch.Tensor], adapter: AdapterSet, model: torch.nn.Module, component: str):
    assert adapted.keys() == {site.removeprefix(f"{component}.") for site in adapter}
    for site, one in adapter.sites.items():
        name = site.removeprefix(f"{component}.")
        base = model.get_submodule(name)
        weight = (base.get_base_layer() if hasattr(base, "get_base_layer") else base).weight.detach().double()
        ours = compute_adapted_weight(weight, one)
        assert float((adapted[name].double() - ours).norm() / (ours - weight).norm()) < 1e-6


def save(written: AdapterFileContent, path: Path) -> Path:
    save_tensors(path, written.tensors, written.metadata)
    return path


@pytest.mark.parametrize("stabilised", [False, True])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_diffusers_loads_what_was_meant(case, dora, stabilised, tmp_path, caplog):
    family, model, component, _ = CASES[case]
    adapter = made_for(case, dora, stabilised)
    path = save(write_adapter(adapter, family, "diffusers"), tmp_path / "adapter.safetensors")
    with warnings.catch_warnings(), caplog.at_level("WARNING"):
        warnings.simplefilter("ignore")
        model().load_lora_adapter(tmp_path, prefix=component, weight_name=path.name, adapter_name="ours")
    try:
        assert not [
            record for record in caplog.records if "unexpected" in record.message or "missing" in record.message
        ]
        demand_equal(adapted_by(model()), adapter, model(), component)
    finally:
        model().unload_lora()


@pytest.mark.parametrize("stabilised", [False, True])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_peft_loads_what_was_meant_scl_04(case, dora, stabilised, tmp_path):
    from peft import PeftModel
    from peft.utils import load_peft_weights

    family, model, component, _ = CASES[case]
    adapter = made_for(case, dora, stabilised)
    written = write_adapter(adapter, family, "peft")
    save(written, tmp_path / "adapter_model.safetensors")
    write_text(tmp_path / "adapter_config.json", json.dumps(written.config))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = PeftModel.from_pretrained(model(), tmp_path)
        loaded = wrapped.load_adapter(tmp_path, "again")
        wrapped.delete_adapter("again")
    try:
        assert not loaded.unexpected_keys
        assert not [key for key in loaded.missing_keys if "again" in key]
        assert len(load_peft_weights(str(tmp_path))) == len(written.tensors)
        wrapped.set_adapter("default")
        adapted = adapted_by(wrapped.base_model.model)
        demand_equal(adapted, adapter, wrapped.base_model.model, component)
    finally:
        wrapped.unload()


def reading(adapter: AdapterSet, spelling: str = "kohya", family=ANIMA) -> ParsedAdapter:
    return ParsedAdapter(adapter, spelling, family, ())


def verdicts(adapter: AdapterSet, spelling: str = "kohya", family=ANIMA) -> dict[str, str]:
    return {one.loader: one.verdict.value for one in predict_all_loaders(reading(adapter, spelling, family))}


def of(*sites: SiteAdapter, component: str = "unet") -> AdapterSet:
    return AdapterSet({f"{component}.{i}": site for i, site in enumerate(sites)})


PLAIN = lora((4, 4), 2, 0)


def test_a_kohya_lora_of_sd_loads_everywhere_but_in_peft():
    table = verdicts(of(PLAIN), family=SD15)
    assert {loader for loader, verdict in table.items() if verdict == "yes"} == set(ADAPTER_LOADERS) - {"PEFT"}


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("kohya", {"ComfyUI", "sd-scripts"}),
        ("comfy", {"ComfyUI", "diffusers"}),
        ("diffusers", {"diffusers"}),
        ("peft", {"PEFT"}),
        ("cloneofsimo", set()),
    ],
)
def test_anima_loads_where_its_names_are_known_key_01(spelling, expected):
    table = verdicts(of(PLAIN, component="transformer"), spelling)
    assert {loader for loader, verdict in table.items() if verdict == "yes"} == expected


def test_diffusers_refuses_alpha_tensors_of_anima_in_comfyui_s_names():
    table = verdicts(of(replace(PLAIN, alpha=1.0), component="transformer"), "comfy")
    assert (table["ComfyUI"], table["diffusers"]) == ("yes", "no")


def test_every_program_says_which_spelling_to_convert_to():
    for one in predict_all_loaders(reading(of(PLAIN), "cloneofsimo", SD15)):
        assert one.verdict is LoadVerdict.NO and "convert with --to" in one.reason


@pytest.mark.parametrize(
    ("side", "loader", "verdict"),
    [
        ("out", "ComfyUI", "wrong"),
        ("out", "Forge", "wrong"),
        ("out", "A1111", "wrong"),
        ("out", "diffusers", "wrong"),
        ("out", "sd-scripts", "no"),
        ("in", "ComfyUI", "yes"),
        ("in", "A1111", "yes"),
        ("in", "diffusers", "wrong"),
    ],
)
def test_dora_is_told_by_its_side_scl_07(side, loader, verdict):
    assert verdicts(of(replace(PLAIN, magnitude=Magnitude(torch.ones(4), side))), family=SD15)[loader] == verdict


def test_a_scale_in_metadata_is_lost_on_comfyui_scl_04():
    assert verdicts(of(replace(PLAIN, alpha=1.0)), "diffusers", SD15)["ComfyUI"] == "wrong"
    assert verdicts(of(replace(PLAIN, alpha=2.0)), "diffusers", SD15)["ComfyUI"] == "yes"


def test_a_scale_that_is_no_power_of_two_is_worth_a_word():
    third = replace(PLAIN, alpha=0.7, tensors={role: t.half() for role, t in PLAIN.tensors.items()})
    said = {one.loader: one for one in predict_all_loaders(reading(of(third), family=SD15))}["diffusers"]
    assert said.verdict is LoadVerdict.YES and "rounded once more" in said.reason
    assert not {one.loader: one for one in predict_all_loaders(reading(of(PLAIN), family=SD15))}["diffusers"].reason


@pytest.mark.parametrize(
    ("algorithm", "loader", "verdict"),
    [
        ("loha", "diffusers", "no"),
        ("lokr", "ComfyUI", "yes"),
        ("oft", "ComfyUI", "wrong"),
        ("oft", "Forge", "no"),
        ("oft", "A1111", "yes"),
        ("ia3", "ComfyUI", "no"),
        ("ia3", "A1111", "yes"),
        ("glora", "A1111", "wrong"),
        ("full", "sd-scripts", "no"),
    ],
)
def test_algorithms_are_told_as_measured(algorithm, loader, verdict):
    tensors = {role: torch.ones(4, 4) for role in ("w1", "w2", "w1_a", "w1_b", "w2_a", "w2_b", "a2")}
    tensors = {**tensors, "blocks": torch.ones(2, 2, 2), "weight": torch.ones(4), "diff": torch.ones(4, 4)}
    assert verdicts(of(SiteAdapter(algorithm, tensors)), family=SD15)[loader] == verdict


def test_every_row_names_its_programs_and_a_reason():
    rules = [*read_loader_rules("names"), *read_loader_rules("contents")]
    assert all(rule.text and rule.programs and set(rule.programs) <= set(ADAPTER_LOADERS) for rule in rules)
