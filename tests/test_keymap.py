"""Key maps are bijections: there and back is nothing, and what no template knows stays unknown."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finitune.files.keymap import (
    KeyMap,
    can_templates_clash,
    expand_templates,
    get_template_fields,
    match_template,
    pair_same_words,
)
from finitune.models import MODEL_FAMILIES
from finitune.models.anima.keys import (
    ANIMA_CONDITIONER_KEYS,
    ANIMA_TRANSFORMER_KEYS,
    build_vae_keymap,
    infer_vae_layout,
    sort_dit,
    sort_vae,
)
from finitune.models.spec import find_file_part, has_adapter_names

MAPS = {
    "transformer": ANIMA_TRANSFORMER_KEYS,
    "conditioner": ANIMA_CONDITIONER_KEYS,
    "vae": build_vae_keymap(4, 2),
    "vae 3x1": build_vae_keymap(3, 1),
}

WORDS = st.sampled_from(["a", "b", "{i}", "{j}", "0", "1", "12"])
TEMPLATES = st.lists(WORDS, min_size=1, max_size=4).map(".".join)


def fill_in(template: str, numbers: dict[str, int]) -> str:
    return ".".join(str(numbers.get(segment, segment)) for segment in template.split("."))


@pytest.mark.parametrize("name", MAPS)
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_there_and_back(name, data):
    keymap = MAPS[name]
    left, right = data.draw(st.sampled_from(keymap.pairs))
    numbers = {field: data.draw(st.integers(0, 200)) for field in get_template_fields(left)}
    old, new = fill_in(left, numbers), fill_in(right, numbers)
    assert keymap.forward(old) == new
    assert keymap.backward(new) == old


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("spoil", ["{}.extra", "x.{}", "{}x", " {}", "{}\n"])
def test_names_are_matched_whole(name, spoil):
    for left, right in MAPS[name].pairs:
        numbers = dict.fromkeys(get_template_fields(left), 1)
        assert MAPS[name].forward(spoil.format(fill_in(left, numbers))) is None
        assert MAPS[name].backward(spoil.format(fill_in(right, numbers))) is None


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(TEMPLATES, TEMPLATES), max_size=4),
    st.lists(st.sampled_from(["a", "b", "0", "1", "12", "7"]), min_size=1, max_size=4),
)
def test_whatever_is_accepted_is_a_bijection(pairs, segments):
    try:
        keymap = KeyMap(pairs)
    except ValueError:
        return
    name = ".".join(segments)
    there, back = keymap.forward(name), keymap.backward(name)
    assert there is None or keymap.backward(there) == name
    assert back is None or keymap.forward(back) == name
    assert sum(match_template(name, left) is not None for left, _ in pairs) == (there is not None)


@settings(deadline=None, max_examples=200)
@given(TEMPLATES, TEMPLATES, st.integers(0, 13), st.integers(0, 13))
def test_a_clash_is_seen_before_it_happens(a, b, i, j):
    name = fill_in(a, {"{i}": i, "{j}": j})
    if match_template(name, a) is not None and match_template(name, b) is not None:
        assert can_templates_clash(a, b) and can_templates_clash(b, a)


@pytest.mark.parametrize(
    "pairs",
    [
        [("a.{i}", "b")],
        [("a.{i}", "b.{j}")],
        [("a.{i}.{i}", "b.{i}.{i}")],
        [("a.{i}", "b.{i}"), ("a.3", "c")],
        [("a.{i}", "c.{i}"), ("b.{i}", "c.{i}")],
        [("a", "b"), ("a", "c")],
    ],
)
def test_what_is_no_bijection_is_refused(pairs):
    with pytest.raises(ValueError, match=r"fields|same name"):
        KeyMap(pairs)


def test_numbers_are_written_one_way_only():
    keymap = KeyMap([("blocks.{i}.w", "layers.{i}.w")])
    assert keymap.forward("blocks.10.w") == "layers.10.w"
    for name in ("blocks.01.w", "blocks.-1.w", "blocks.1a.w", "blocks..w", "blocks.\u0661.w"):
        assert keymap.forward(name) is None


def test_unknown_names_are_reported():
    renamed = KeyMap([("a.{i}", "b.{i}")]).rename(["a.1", "z", "a.2", "a.x"])
    assert renamed.names == {"b.1": "a.1", "b.2": "a.2"}
    assert renamed.unknown == ("z", "a.x")


def test_spell_makes_every_combination():
    pairs = expand_templates("{x}.{i}.{y}", "{y}.{i}.{x}", x=pair_same_words("p", "q"), y=(("r", "R"),))
    assert pairs == [("p.{i}.r", "R.{i}.p"), ("q.{i}.r", "R.{i}.q")]


# The full key list of the published 28-block model: reference table of names, written out independently of the map.
BLOCK = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.output_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "cross_attn.q_proj",
    "cross_attn.k_proj",
    "cross_attn.v_proj",
    "cross_attn.output_proj",
    "cross_attn.q_norm",
    "cross_attn.k_norm",
    "mlp.layer1",
    "mlp.layer2",
    "adaln_modulation_self_attn.1",
    "adaln_modulation_self_attn.2",
    "adaln_modulation_cross_attn.1",
    "adaln_modulation_cross_attn.2",
    "adaln_modulation_mlp.1",
    "adaln_modulation_mlp.2",
]
ADAPTER_BLOCK = [
    "norm_self_attn",
    "norm_cross_attn",
    "norm_mlp",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "cross_attn.q_proj",
    "cross_attn.k_proj",
    "cross_attn.v_proj",
    "cross_attn.o_proj",
    "cross_attn.q_norm",
    "cross_attn.k_norm",
    "mlp.0",
    "mlp.2",
]
OUTER = ["x_embedder.proj.1", "t_embedder.1.linear_1", "t_embedder.1.linear_2", "t_embedding_norm"]
FINAL = ["final_layer.adaln_modulation.1", "final_layer.adaln_modulation.2", "final_layer.linear"]


def anima_names(num_blocks: int = 28) -> list[str]:
    dit = [*OUTER, *FINAL, *(f"blocks.{i}.{layer}" for i in range(num_blocks) for layer in BLOCK)]
    adapter = ["embed", "out_proj", "norm", *(f"blocks.{j}.{layer}" for j in range(6) for layer in ADAPTER_BLOCK)]
    biases = ["out_proj", *(f"blocks.{j}.mlp.{n}" for j in range(6) for n in (0, 2))]
    names = [f"{name}.weight" for name in dit]
    names += [f"llm_adapter.{name}.weight" for name in adapter]
    return names + [f"llm_adapter.{name}.bias" for name in biases]


@pytest.mark.parametrize("num_blocks", [28, 40, 52])
def test_the_map_is_total_on_the_published_model_both_ways(num_blocks):
    import torch
    from diffusers import AnimaTextConditioner, CosmosTransformer3DModel

    names = anima_names(num_blocks)
    with torch.device("meta"):
        settings = {"num_layers": num_blocks, "num_attention_heads": 16, "extra_pos_embed_type": None}
        modules = {
            "transformer": CosmosTransformer3DModel(**settings),
            "text_conditioner": AnimaTextConditioner(),
        }
    sorted_names = sort_dit(f"net.{name}" for name in names)
    assert sorted_names.unknown == ()
    for component, keymap in (("transformer", ANIMA_TRANSFORMER_KEYS), ("text_conditioner", ANIMA_CONDITIONER_KEYS)):
        renamed = sorted_names.names[component]
        assert set(renamed) == set(modules[component].state_dict())
        assert {f"net.{keymap.backward(new)}" for new in renamed} == set(renamed.values())
    assert sum(len(part) for part in sorted_names.names.values()) == len(names) == len(set(names))


@pytest.mark.parametrize("num_res_blocks", [1, 2, 3])
@pytest.mark.parametrize("temporal", [[], [True], [False, True], [False, True, True], [True, False, True, False]])
def test_any_vae_can_be_spelled_both_ways(num_res_blocks, temporal):
    import torch
    from diffusers import AutoencoderKLQwenImage

    num_levels = len(temporal) + 1
    with torch.device("meta"):
        vae = AutoencoderKLQwenImage(
            base_dim=4,
            dim_mult=[1, 2, 2, 4, 4][:num_levels],
            num_res_blocks=num_res_blocks,
            temperal_downsample=temporal,
        )
    keymap, names = build_vae_keymap(num_levels, num_res_blocks), list(vae.state_dict())
    wan = [keymap.backward(name) for name in names]
    assert None not in wan
    assert infer_vae_layout(wan) == infer_vae_layout(names) == (num_levels, num_res_blocks)
    assert list(sort_vae(wan).names["vae"]) == names and sort_vae(wan).unknown == ()


def test_the_published_vae_is_spelled_as_diffusers_converts_it():
    import torch
    from diffusers import AutoencoderKLQwenImage
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

    with torch.device("meta"):
        names = list(AutoencoderKLQwenImage().state_dict())
    wan = {build_vae_keymap(4, 2).backward(name): name for name in names}
    assert convert_wan_vae_to_diffusers(dict(wan)) == {name: name for name in names}


def test_files_are_recognised_by_their_names():
    def title(*names: str) -> str | None:
        part = find_file_part(names, MODEL_FAMILIES)
        return part and part.title

    assert title(*(f"net.{name}" for name in anima_names())) == "the denoiser of Anima"
    assert title("decoder.conv1.weight") == title("decoder.conv_in.weight") == "the VAE"
    assert title("model.layers.0.self_attn.q_norm.weight") == "the text encoder"
    assert title("first_stage.weight") is None
    adapters = [
        "lora_unet_blocks_0_mlp_layer1.lora_down.weight",
        "transformer.x.lora_A.weight",
        "x.lora_B.default.weight",
        "diffusion_model.blocks.0.mlp.layer1.lora_up.weight",
        "x.hada_w1_a",
        "x.lokr_w2_b",
        "x.dora_scale",
    ]
    assert all(has_adapter_names([name]) for name in adapters)
    assert not has_adapter_names(anima_names())
