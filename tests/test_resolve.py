"""Module names of files to modules and back; key suffixes; prefixes."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finitune.adapters import ADAPTER_ALGORITHMS
from finitune.errors import ModelError
from finitune.models import MODEL_FAMILIES
from finitune.models.sites import ComponentSites, ModulePlace, make_single_site_places
from finitune.namings.core import SiteTarget
from finitune.namings.identify import NameParser
from finitune.namings.keys import ADAPTER_SUFFIXES, find_suffix, split_adapter_key
from finitune.namings.resolve import Resolver
from finitune.namings.spellings import SPELLINGS, get_spelling

NUMBERS = {"{i}": "11", "{j}": "1", "{k}": "0"}


def concrete(template: str) -> str:
    return ".".join(NUMBERS.get(part, part) for part in template.split("."))


def model(name: str):
    return next(model for model in MODEL_FAMILIES if model.name == name)


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [model.name for model in MODEL_FAMILIES])
def test_every_site_of_a_family_is_found_by_each_of_its_names(name):
    resolver = Resolver.of_model(model(name))
    for component in resolver.components.values():
        for site in map(concrete, component.sites):
            for native in (False, True):
                written, landing = resolver.named(component.name, site, native=native) or pytest.fail(site)
                assert site in landing.sites
                assert resolver.resolve(written, [component.name]) == landing
                flat = resolver.flat_name(component.name, site, native=native)
                assert flat == written.replace(".", "_")
                assert resolver.resolve(flat, [component.name], flat=True) == landing


MODULES = ["layers.0.adaLN_modulation.1", "context_refiner.0.attention.to_q", "all_final_layer.2-1.linear"]


def test_flat_names_are_inverted_by_the_modules_that_there_are():  # KEY-03
    resolver = Resolver.of_modules(MODULES)
    for name in MODULES:
        assert resolver.resolve(name.replace(".", "_"), flat=True) == SiteTarget("transformer", (name,))
    assert resolver.resolve("conv_in", flat=True) is None


@pytest.mark.parametrize("other", ["a_b.c", "a.b.c"])
def test_a_flat_name_of_two_modules_is_refused_and_both_are_named(other):  # KEY-03
    resolver = Resolver.of_modules([*MODULES, "a.b_c", other])
    for name in (*MODULES, "a.b_c", other):
        assert resolver.resolve(name) == SiteTarget("transformer", (name,))
    for name in MODULES:
        assert resolver.resolve(name.replace(".", "_"), flat=True) == SiteTarget("transformer", (name,))
    for spelled in ("a_b_c", "lora_unet_a_b_c"):
        with pytest.raises(ModelError, match=re.escape(f"'{other}'")) as caught:
            resolver.find(spelled, flat=True) if spelled == "a_b_c" else NameParser(resolver).see(spelled)
        assert caught.value.code == "MODEL-FLAT-NAMES" and caught.value.subject == "a_b_c"
        assert caught.value.evidence["modules"] == ["a.b_c", other]


def test_templates_that_flatten_alike_are_refused_where_they_do():
    resolver = Resolver([ComponentSites("unet", ("unet",), ("a.{i}.b", "a_1.b"))])
    assert resolver.resolve("a_2_b", flat=True) == SiteTarget("unet", ("a.2.b",))
    with pytest.raises(ModelError, match=r"'a.1.b' and 'a_1.b' both flatten to 'a_1_b'"):
        resolver.resolve("a_1_b", flat=True)
    both = Resolver([ComponentSites(name, ("unet",), sites) for name, sites in (("one", ("a.b",)), ("two", ("a_b",)))])
    assert both.resolve("a_b", ["two"], flat=True) == SiteTarget("two", ("a_b",))
    with pytest.raises(ModelError, match="flatten"):
        both.resolve("a_b", flat=True)
    apart = [ComponentSites(name, (role,), ("a.b",)) for name, role in (("unet", "unet"), ("text_encoder", "te"))]
    assert Resolver(apart).resolve("a_b", ["text_encoder"], flat=True) == SiteTarget("text_encoder", ("a.b",))


@pytest.mark.parametrize("family", MODEL_FAMILIES, ids=lambda family: family.name)
def test_no_family_has_two_modules_of_one_flat_name(family):
    assert not Resolver.of_model(family).collisions


def test_modules_that_no_place_names_are_called_the_same_in_both_namings():
    places = make_single_site_places(("layers.{i}.q", "blocks.{i}.to_q"))
    resolver = Resolver([ComponentSites("t", ("unet",), ("blocks.{i}.to_q", "own.fc"), places)])
    landing = SiteTarget("t", ("own.fc",))
    assert resolver.resolve("own_fc", flat=True) == landing and resolver.parameter("own.fc.weight") == (
        landing,
        "weight",
    )
    assert [resolver.named("t", "own.fc", native=native) for native in (False, True)] == [("own.fc", landing)] * 2
    assert not resolver.collisions


words = st.lists(st.sampled_from(["a", "b", "to_q", "attn", "0", "12", "x_1"]), min_size=1, max_size=4)


@given(st.lists(words.map(".".join), min_size=1, max_size=8, unique=True), words.map("_".join))
@settings(deadline=None, max_examples=150)
def test_the_index_agrees_with_a_plain_table(names, probe):
    table: dict[str, list[str]] = {}
    for name in names:
        table.setdefault(name.replace(".", "_"), []).append(name)
    resolver = Resolver.of_modules(names)
    assert bool(resolver.collisions) == any(len(alike) > 1 for alike in table.values())
    for flat in {probe, *table}:
        if len(table.get(flat, ())) > 1:
            with pytest.raises(ModelError):
                resolver.resolve(flat, flat=True)
        else:
            found = resolver.resolve(flat, flat=True)
            assert (found and [found.sites[0]]) == table.get(flat)
        assert resolver.is_container(flat, flat=True) == any(name.startswith(f"{flat}_") for name in table)


@given(st.integers(0, 10**6))
@settings(deadline=None, max_examples=50)
def test_numbers_are_whole_and_written_one_way(number):
    resolver = Resolver([ComponentSites("t", ("unet",), ("blocks.{i}.ff",))])
    assert resolver.resolve(f"blocks_{number}_ff", flat=True) == SiteTarget("t", (f"blocks.{number}.ff",))
    assert resolver.resolve(f"blocks.0{number}.ff") is None


def test_original_names_come_first_where_a_prefix_covers_two_components():
    landing = Resolver.of_model(model("anima")).resolve("blocks_3_self_attn_q_proj", flat=True)
    assert landing == SiteTarget("transformer", ("transformer_blocks.3.attn1.to_q",))
    flat = "llm_adapter_blocks_3_self_attn_q_proj"
    landing = Resolver.of_model(model("anima")).resolve(flat, ["transformer", "text_conditioner"], flat=True)
    assert landing == SiteTarget("text_conditioner", ("blocks.3.self_attn.q_proj",))


def test_fused_places_name_all_their_sites():
    resolver = Resolver.of_model(model("flux"))
    single_sites = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
    sites = tuple(f"single_transformer_blocks.7.{part}" for part in single_sites)
    assert resolver.resolve("single_blocks_7_linear1", flat=True) == SiteTarget("transformer", sites, "by-input")
    assert resolver.native_name("transformer", sites[3]) == "single_blocks.7.linear1"
    swapped = resolver.resolve("final_layer.adaLN_modulation.1")
    assert swapped == SiteTarget("transformer", ("norm_out.linear",), swapped=True)


def test_a_container_is_no_module():
    resolver = Resolver.of_model(model("flux"))
    assert resolver.resolve("transformer_blocks.0") is None
    assert resolver.is_container("transformer_blocks.0")
    assert resolver.is_container("double_blocks_0_img_attn", flat=True)
    assert not resolver.is_container("transformer_blocks.0.attn.to_q")
    assert not resolver.is_container("nonsense")


def test_newer_libraries_leave_out_the_outer_name():
    resolver = Resolver.of_model(model("sd15"))
    full = "text_model.encoder.layers.0.self_attn.q_proj"
    assert resolver.resolve("encoder.layers.0.self_attn.q_proj") == resolver.resolve(full) != None  # noqa: E711
    assert resolver.native_name("text_encoder", full) == full


# --- tensors of checkpoints -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "key", "component", "sites", "parameter"),
    [
        ("sd15", "model.diffusion_model.input_blocks.0.0.bias", None, ("unet", "conv_in"), "bias"),
        ("sd15", "conv_in.weight", "unet", ("unet", "conv_in"), "weight"),
        ("flux", "double_blocks.3.img_attn.norm.query_norm.scale", None,
         ("transformer", "transformer_blocks.3.attn.norm_q"), "weight"),
        ("flux", "single_transformer_blocks.3.proj_mlp.weight", "transformer",
         ("transformer", "single_transformer_blocks.3.proj_mlp"), "weight"),
        ("anima", "net.blocks.3.mlp.layer1.weight", None, ("transformer", "transformer_blocks.3.ff.net.0.proj"),
         "weight"),
        ("anima", "model.norm.weight", None, ("text_encoder", "norm"), "weight"),
    ],
)  # fmt: skip
def test_a_checkpoints_tensor_is_a_parameter_of_a_module(family, key, component, sites, parameter):
    found = Resolver.of_model(model(family)).parameter(key, component)
    assert found == (SiteTarget(sites[0], sites[1:]), parameter)


def test_open_clips_fused_and_transposed_tensors():
    resolver = Resolver.of_model(model("sdxl"))
    prefix = next(c for c in model("sdxl").adapters.components if c.name == "text_encoder_2").single_file[0]
    landing, parameter = resolver.parameter(f"{prefix}transformer.resblocks.4.attn.in_proj_weight")
    assert [site.rpartition(".")[2] for site in landing.sites] == ["q_proj", "k_proj", "v_proj"]
    assert parameter == "weight" and not landing.transposed
    assert resolver.parameter(f"{prefix}transformer.resblocks.4.attn.in_proj_bias")[1] == "bias"
    landing, parameter = resolver.parameter(f"{prefix}text_projection")
    assert landing == SiteTarget("text_encoder_2", ("text_projection",), transposed=True)
    assert resolver.parameter("no.such.weight") is None


# --- prefixes and wrappers --------------------------------------------------------------------------------------------

CORE = ComponentSites(
    "transformer",
    ("unet",),
    ("blocks.{i}.attn.to_q",),
    make_single_site_places(("layers.{i}.q", "blocks.{i}.attn.to_q")),
)


@pytest.mark.parametrize(
    ("module", "prefix", "stripped"),
    [
        ("blocks.0.attn.to_q", "", ()),
        ("base_model.model.blocks.0.attn.to_q", "base_model.model.", ()),
        ("transformer.base_model.model.blocks.0.attn.to_q", "transformer.", ("base_model.model.",)),
        ("module.blocks.0.attn.to_q", "", ("module.",)),
        ("transformer._orig_mod.module.blocks.0.attn.to_q", "transformer.", ("_orig_mod.", "module.")),
        ("module._orig_mod.diffusion_model.layers.0.q", "diffusion_model.", ("module.", "_orig_mod.")),
        ("base_model.model.diffusion_model.layers.0.q", "diffusion_model.", ("base_model.model.",)),
        ("lora_unet_blocks_0_attn_to_q", "lora_unet_", ()),
        ("lora_unet__blocks_0_attn_to_q", "lora_unet__", ()),
        ("lora_unet__orig_mod_layers_0_q", "lora_unet_", ("_orig_mod.",)),
        ("lora_unet_blocks_0_attn_to_q_", "lora_unet_", ("_",)),
        ("lycoris_blocks_0_attn_to_q", "lycoris_", ()),
    ],
)
def test_wrappers_come_off_in_any_order(module, prefix, stripped):  # KEY-09
    sight = NameParser(Resolver([CORE])).see(module)
    assert sight.found is not None
    assert sight.found.landing == SiteTarget("transformer", ("blocks.0.attn.to_q",))
    assert (sight.prefix, sight.stripped) == (prefix, stripped)


def test_a_real_module_called_like_a_wrapper_stays():  # KEY-09, the control
    names = ["module.attn.to_q", "attn.to_q"]
    eyes = NameParser(Resolver.of_modules(names))
    for prefix in ("", "transformer.", "base_model.model."):
        sight = eyes.see(f"{prefix}module.attn.to_q")
        assert sight.found is not None and sight.stripped == ()
        assert sight.found.landing.sites == ("module.attn.to_q",)
    assert eyes.see("module.module.attn.to_q").stripped == ("module.",)


def test_spellings_have_distinct_names_and_prefixes_for_denoisers():
    assert len({spelling.name for spelling in SPELLINGS}) == len(SPELLINGS)
    for family in MODEL_FAMILIES:
        for component in family.adapters.components:
            if "unet" in component.roles:
                assert all(s.prefix(component) is not None for s in SPELLINGS)
                assert all(s.flat == s.prefix(component).endswith("_") for s in SPELLINGS)
    te = next(c for c in model("flux").adapters.components if c.name == "text_encoder_2")
    assert get_spelling("kohya").texts(te) == ("lora_te3_", "lora_te2_")
    assert get_spelling("comfy").prefix(te) == "text_encoders.t5xxl.transformer."
    assert get_spelling("diffusers").prefix(te) == "text_encoder_2."


# --- suffixes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ADAPTER_SUFFIXES, ids=lambda suffix: suffix.text)
def test_each_suffix_is_split_off_as_the_longest(suffix):
    module, found = split_adapter_key(f"blocks.0.to_q{suffix.text}")
    slow = max((s for s in ADAPTER_SUFFIXES if suffix.text.endswith(s.text)), key=lambda s: len(s.text))
    assert found == slow == suffix
    assert module == f"blocks.0.to_q{suffix.inner}"
    if suffix.named:
        head, dot, tail = suffix.text[1:].partition(".")
        assert split_adapter_key(f"blocks.0.to_q.{head}.default_0{dot}{tail}") == (module, suffix)


@pytest.mark.parametrize(
    "key", ["blocks.0.to_q", "lora_up.weight.x", ".alpha", "to_q.hada_w1_", "x.lora_A.weight.bias"]
)
def test_what_no_suffix_ends_is_nobodys(key):  # MRG-01
    assert split_adapter_key(key) is None


def test_every_role_of_every_algorithm_can_be_written():
    for algorithm in ADAPTER_ALGORITHMS:
        for role in {*algorithm.roles_where(shared_key=""), "diff_b"}:
            suffix = find_suffix(role, algorithm.name, ("kohya", "peft", "comfy"))
            assert suffix is not None, (algorithm.name, role)
            assert split_adapter_key(f"m{suffix.text}") == ("m", suffix)
    assert find_suffix("up", "lora", ("peft",)).text == ".lora_B.weight"
    assert find_suffix("magnitude", "lora", ("peft",)).text == ".lora_magnitude_vector.weight"
    assert find_suffix("mid", "lora", ("peft",)) is None


def test_places_keep_what_they_say():
    place = ModulePlace("qkv", ("q", "k", "v"))
    landing = Resolver([ComponentSites("t", ("unet",), place.sites, (place,))]).resolve("qkv")
    assert landing == SiteTarget("t", ("q", "k", "v"), place.division, place.swapped)
