"""Adapter files of every spelling, read: real ones, maps of real ones, and small ones for each known case."""

from __future__ import annotations

import json
import math
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finitune.errors import AdapterError
from finitune.files.tensorfile import TensorEntry, TensorFile
from finitune.models.sites import AdapterSites, ComponentSites, ModulePlace, make_single_site_places
from finitune.models.spec import ModelSpec
from finitune.namings.core import ParsedAdapter
from finitune.namings.keys import ADAPTER_SUFFIXES
from finitune.namings.read import read_adapter
from finitune.namings.resolve import Resolver
from finitune.report import Level
from tests.adapter_files import TOY, codes, delta, finding, lora, model, noise, read_back

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.exists(), reason="the adapters of others are not here")


class MapFile(TensorFile):
    """A file of small random fp16 numbers in given shapes, all out of one buffer."""

    buffer = 0.01 * torch.randn(21504 * 128, generator=torch.Generator().manual_seed(0)).half()

    def __init__(self, shapes: dict[str, list[int]], metadata: dict[str, str] | None = None):
        self.path, self.metadata = Path("map.safetensors"), metadata or {}
        self.entries = {key: TensorEntry("F16", tuple(shape), self.path, 0, 0) for key, shape in shapes.items()}

    def read(self, name: str) -> torch.Tensor:
        shape = self.entries[name].shape
        return self.buffer[: math.prod(shape)].abs()[0] if not shape else self.buffer[: math.prod(shape)].view(shape)


@pytest.fixture
def read(tmp_path):
    """Write tensors and texts to a file, and read it."""
    return partial(read_back, tmp_path)


# --- files of others --------------------------------------------------------------------------------------------------

MAPS = {
    "anima_lora_kohya": ("anima", "kohya", 11),
    "anima_lora_kohya_with_te": ("anima", "kohya", 9),
    "anima_lora_peft": ("anima", "comfy", 6),
    "flux_control_lora": ("flux", "bfl-control", 656),
    "flux_lora_aitoolkit": ("flux", "comfy", 418),
    "flux_lora_diffusers": ("flux", "diffusers", 494),
    "flux_lora_diffusers_base_model": ("flux", "peft", 381),
    "flux_lora_kohya": ("flux", "kohya", 494),
    "flux_lora_xlabs": ("flux", "xlabs", 24),
    "qwen_image_lora_diffusers": ("qwen-image", "diffusers-bare", 3),
}


@cache
def read_map(name: str) -> ParsedAdapter:
    return read_adapter(MapFile(json.loads((DATA / "adapter-keys" / f"{name}.json").read_text())))


@needs_data
@pytest.mark.parametrize("name", MAPS)
def test_a_real_files_keys_are_all_accounted_for(name):
    reading = read_map(name)
    family, spelling, sites = MAPS[name]
    assert reading.family is not None and reading.family.name == family
    assert reading.spelling == spelling
    assert len(reading.adapter) == sites
    shapes = json.loads((DATA / "adapter-keys" / f"{name}.json").read_text())
    assert [line.key for line in reading.ledger] == list(shapes)
    assert reading.matched == len(shapes) and not reading.unmatched
    assert not codes(reading, Level.ERROR)


@needs_data
def test_modules_that_are_found_and_fail_are_explained():
    """The map's qkv and linear1 have factors of other sizes than Flux: their rows are no whole parts."""
    reading = read_map("flux_lokr_bfl")
    assert (reading.family.name, reading.spelling) == ("flux", "comfy")
    assert codes(reading, Level.ERROR) == ["ADAPTER-FUSED"] * 2 == [error.code for error in reading.errors]
    assert not reading.unmatched and reading.matched == 8
    assert {line.key.split(".")[-2] for line in reading.left_out} == {"qkv", "linear1"} and len(reading.left_out) == 6
    assert {line.why for line in reading.left_out} == {error.message for error in reading.errors}
    alphas = [line for line in reading.ledger if line.role == "alpha"]
    assert len(alphas) == 4 and {line.fate for line in alphas} == {"explained"} and not {*alphas} & {*reading.left_out}


@needs_data
@pytest.mark.parametrize("name", [*MAPS, "flux_lokr_bfl"])
def test_every_tensor_of_a_map_is_applied_or_explained(name):
    reading = read_map(name)
    shapes = json.loads((DATA / "adapter-keys" / f"{name}.json").read_text())
    assert reading.matched + sum(line.fate == "explained" for line in reading.ledger) == len(shapes)


@needs_data
@pytest.mark.parametrize(("name", "rank", "embeddings"), [("analog_svd_rank4", 4, 0), ("lora_disney", 1, 2)])
def test_the_oldest_files_are_read_whole(name, rank, embeddings):
    reading = read_adapter(TensorFile(DATA / "adapters" / f"{name}.safetensors"))
    assert (reading.family.name, reading.spelling) == ("sd15", "cloneofsimo")
    assert reading.matched == 384 and len(reading.ledger) == 384 + embeddings and not reading.unmatched
    assert set(codes(reading)) == {"ADAPTER-NO-ALPHA"}
    assert len(reading.adapter) == 192 and list(reading.adapter.embeddings) == ["<s1>", "<s2>"][:embeddings]
    adapters = reading.adapter.sites.values()
    assert {(a.algorithm, a.alpha, a.tensors["down"].shape[0]) for a in adapters} == {("lora", None, rank)}
    geglu = reading.adapter["unet.down_blocks.0.attentions.0.transformer_blocks.0.ff.net.0.proj"]
    assert geglu.tensors["up"].shape == (2560, rank)
    context = reading.adapter["unet.mid_block.attentions.0.transformer_blocks.0.attn2.to_k"]
    assert context.tensors["down"].shape == (rank, 768) and context.tensors["up"].shape == (1280, rank)


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        "lora_down.weight lora_up.weight",
        "lora_A.weight lora_B.weight",
        "lora_A.default.weight lora_B.default.weight",
        "lora_A.default_0.weight lora_B.default_0.weight",
        "lora.down.weight lora.up.weight",
        "lora_linear_layer.down.weight lora_linear_layer.up.weight",
        "lora_A lora_B",
    ],
)
@pytest.mark.parametrize("prefix", ["", "module.", "base_model.model.", "transformer.base_model.model.", "_orig_mod."])
def test_all_spellings_of_one_module_are_one(read, prefix, words):  # KEY-09
    plain = read(lora("a.to_q"))
    reading = read(lora(f"{prefix}a.to_q", words=words))
    assert list(reading.adapter) == ["transformer.a.to_q"]
    assert torch.equal(delta(reading, "transformer.a.to_q", 16, 8), delta(plain, "transformer.a.to_q", 16, 8))
    assert ("ADAPTER-WRAPPED" in codes(reading)) == (
        prefix in ("module.", "transformer.base_model.model.", "_orig_mod.")
    )


@pytest.mark.parametrize("te", ["lora_te_", "lora_te1_", "text_encoders.qwen3_06b.transformer.model.", "text_encoder."])
def test_animas_text_encoder_is_found_behind_every_prefix(read, te):  # KEY-07
    names = ["layers.25.mlp.down_proj", "layers.0.self_attn.q_proj"]
    spelled = [te + (name.replace(".", "_") if te.endswith("_") else name) for name in names]
    tensors = lora("lora_unet_blocks_0_mlp_layer1") | lora("lora_unet_blocks_1_mlp_layer2")
    for module in spelled:
        tensors |= lora(module)
    reading = read(tensors, family=model("anima"))
    assert {f"text_encoder.{name}" for name in names} == {
        f"text_encoder.{n}" for n in reading.adapter.component("text_encoder")
    }
    assert reading.matched == 8


def test_coverage_is_said_for_each_prefix(read):  # KEY-07
    tensors = lora("lora_unet_blocks_0_mlp_layer1") | lora("lora_te1_layers_0_mlp_nonsense")
    reading = read(tensors, family=model("anima"))
    said = finding(reading, "ADAPTER-UNMATCHED")
    assert said.level is Level.ERROR and "1 of 1 modules behind 'lora_te1_' are none of Anima" in said.message
    assert [line.fate for line in reading.ledger].count("unmatched") == 2


def test_rare_layers_are_read_like_all_others(read):  # KEY-04
    tensors = {
        "lora_unet_conv_in.lora_down.weight": noise(4, 4, 3, 3),
        "lora_unet_conv_in.lora_up.weight": noise(320, 4, 1, 1),
    }
    names = ("time_embedding_linear_1", "add_embedding_linear_2", "conv_out", "down_blocks_1_attentions_0_proj_in")
    for module in (*(f"lora_unet_{name}" for name in names), "lora_te2_text_projection"):
        tensors |= lora(module)
    reading = read(tensors, family=model("sdxl"))
    assert (len(reading.adapter), reading.matched) == (6, 12)
    assert "unet.add_embedding.linear_2" in reading.adapter.sites
    assert "text_encoder_2.text_projection" in reading.adapter.sites


def test_every_layer_is_optional_and_leftovers_are_classed(read):  # KEY-05
    block = lora("lora_unet_double_blocks_0_img_mlp_0")
    assert read(block, family=model("flux")).matched == 2
    assert read(block | lora("lora_unet_final_layer_linear"), family=model("flux")).matched == 4
    orphan = read(block | {"lora_unet_single_blocks_9_linear2.alpha": torch.tensor(4.0)}, family=model("flux"))
    assert codes(orphan, Level.ERROR) == [] and "ADAPTER-ORPHAN-ALPHA" in codes(orphan, Level.WARNING)
    assert [line.fate for line in orphan.ledger if line.key.endswith("alpha")] == ["explained"]
    half = read(block | {"lora_unet_double_blocks_1_img_mlp_0.lora_down.weight": noise(2, 8)}, family=model("flux"))
    assert codes(half, Level.ERROR) == ["ADAPTER-ROLES"] and not half.unmatched
    assert [(line.fate, line.key[-16:]) for line in half.left_out] == [("explained", "lora_down.weight")]
    container = read(block | lora("transformer.transformer_blocks.0"), family=model("flux"))
    assert codes(container, Level.ERROR) == ["ADAPTER-CONTAINER"] and len(container.unmatched) == 2


def test_names_of_a_users_own_model(read):  # KEY-01
    own = Resolver.of_modules(["double_blocks.0.img_mlp.fc1", "double_blocks.0.img_attn.qkv"])
    tensors = lora("lora_unet_double_blocks_0_img_mlp_fc1") | lora("diffusion_model.double_blocks.0.img_attn.qkv", 24)
    reading = read(tensors, resolver=own)
    assert sorted(reading.adapter) == [f"transformer.double_blocks.0.{m}" for m in ("img_attn.qkv", "img_mlp.fc1")]
    assert "ADAPTER-MIXED-SPELLING" in codes(reading)


def test_unknown_keys_are_listed(read):  # MRG-01
    reading = read(lora("a.to_q") | {"a.to_k.hada_w1_": noise(8, 2)})
    assert [line.key for line in reading.unmatched] == ["a.to_k.hada_w1_"]
    assert finding(reading, "ADAPTER-UNKNOWN-KEYS").evidence["first"] == ["a.to_k.hada_w1_"]


def test_one_file_may_mix_algorithms(read):  # MRG-01
    hada = {f"b.to_q.hada_{role}": noise(*shape) for role, shape in zip(
        ("w1_a", "w1_b", "w2_a", "w2_b"), ((8, 2), (2, 8), (8, 2), (2, 8)), strict=True)}  # fmt: skip
    reading = read(lora("a.to_q") | hada)
    assert {site: adapter.algorithm for site, adapter in reading.adapter.sites.items()} == {
        "transformer.a.to_q": "lora",
        "transformer.b.to_q": "loha",
    }


def test_bundled_embeddings_are_kept(read):
    bundle = {
        "bundle_emb.cat.clip_l": noise(2, 8),
        "emb_params": noise(1, 8),
        "bundle_emb.x.string_to_param.*": noise(1, 8),
    }
    reading = read(lora("a.to_q") | bundle)
    assert set(reading.adapter.embeddings) == set(bundle)
    assert {line.key for line in reading.ledger if line.fate == "explained"} == set(bundle)


def test_a_model_is_no_adapter(read):
    with pytest.raises(AdapterError, match="whole weights") as caught:
        read({"a.to_q.weight": noise(16, 8), "a.to_q.bias": noise(16)})
    assert caught.value.code == "ADAPTER-NONE"


@st.composite
def strange_modules(draw) -> dict[str, list[int]]:
    """A module with any roles, of any shapes."""
    suffixes = draw(st.lists(st.sampled_from(ADAPTER_SUFFIXES), min_size=1, max_size=5, unique=True))
    sizes = st.lists(st.sampled_from([1, 2, 4, 8, 0]), max_size=4)
    return {f"a.to_q{suffix.text}": draw(sizes) for suffix in suffixes}


@given(strange_modules(), st.booleans())
@settings(deadline=None, max_examples=300)
def test_whatever_is_in_a_file_its_reading_ends_in_findings(shapes, known):
    model_shapes = {"transformer.a.to_q": (8, 4)} if known else None
    file = MapFile(shapes | {"b.to_q.lora_down.weight": [2, 8], "b.to_q.lora_up.weight": [4, 2]})
    weight_of = (lambda site: noise(8, 4)) if known else None
    reading = read_adapter(file, resolver=TOY, shapes=model_shapes, weight_of=weight_of)
    assert [line.key for line in reading.ledger] == list(file)
    assert {line.why for line in reading.unmatched} <= {"no such module"}
    assert bool(reading.left_out) <= bool(reading.errors)
    assert "transformer.b.to_q" in reading.adapter.sites


# --- families ---------------------------------------------------------------------------------------------------------


def cross(width: int):
    name = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k"
    return lora(name, 640, width)


@pytest.mark.parametrize(("width", "name"), [(768, "sd15"), (1024, "sd2"), (2048, "sdxl")])
def test_the_width_of_the_cross_attention_tells_the_family(read, width, name):  # MRG-03
    reading = read(cross(width), {"ss_base_model_version": "sd_v1"}, resolver=None)
    assert reading.family is not None and reading.family.name == name
    assert ("ADAPTER-FAMILY-METADATA" in codes(reading, Level.WARNING)) == (name != "sd15")


@pytest.mark.parametrize(("name", "title"), [("sdxl", "Stable Diffusion XL"), ("sd2", "Stable Diffusion 2")])
def test_an_adapter_of_another_family_is_told_before_any_maths(read, name, title):  # LYC-07, MRG-03
    with pytest.raises(AdapterError, match=r"adapter of Stable Diffusion 1.5; the model is " + title) as caught:
        read(cross(768), family=model(name))
    assert caught.value.code == "ADAPTER-OTHER-FAMILY"


def test_an_inpainting_model_is_named(read):  # MRG-03
    tensors = {"conv_in.lora_down.weight": noise(2, 4, 3, 3), "conv_in.lora_up.weight": noise(32, 2, 1, 1)}
    reading = read(tensors, shapes={"transformer.conv_in": (32, 9, 3, 3)})
    assert "inpainting" in finding(reading, "ADAPTER-DOES-NOT-FIT").remedy
    assert len(reading.left_out) == 2 and not reading.unmatched and not reading.adapter.sites


def test_shapes_of_the_model_are_checked(read):  # LYC-03
    kron = {"a.to_q.lokr_w1": noise(4, 4), "a.to_q.lokr_w2": noise(4, 4)}
    assert codes(read(kron, shapes={"transformer.a.to_q": (16, 16)}), Level.ERROR) == []
    reading = read(kron, shapes={"transformer.a.to_q": (4, 4)})  # what a product of the factors would fit
    assert finding(reading, "ADAPTER-DOES-NOT-FIT").evidence["adapter"] == [16, 16]


def test_a_small_family_is_read_by_name(read):
    fused = ModulePlace("qkv", ("to_q", "to_k", "to_v"))
    sites = ComponentSites("transformer", ("unet",), fused.sites, (fused, *make_single_site_places(("in", "conv_in"))))
    small = ModelSpec("small", ("transformer",), (), AdapterSites((sites,)), title="Small")
    reading = read(lora("diffusion_model.qkv", 24, words="lora_A.weight lora_B.weight"), family=small)
    assert reading.family is small and list(reading.adapter.component("transformer")) == ["to_q", "to_k", "to_v"]
