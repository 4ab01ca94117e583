"""Adapters of fused weights, divided: the parts' changes are the rows of the whole's, for every algorithm that can."""

from __future__ import annotations

import pytest
import torch

from finitune.adapters.core import Magnitude, SiteAdapter
from finitune.adapters.weight import compute_adapted_bias, compute_weight_delta
from finitune.errors import AdapterError
from finitune.namings.core import SiteTarget
from finitune.namings.fused import split_fused_adapter
from finitune.namings.tensor_reader import DeferredTensors, PendingTensor
from tests.adapter_files import codes, lora, model, noise, read_back

QKV = SiteTarget("transformer", ("q", "k", "v"))
LINEAR1 = SiteTarget("transformer", ("q", "k", "v", "mlp"), "by-input")
HEADS = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")


@pytest.mark.parametrize("rank", [4, 3, 6, 64])
def test_up_is_cut_by_rows_and_down_is_kept_whole(tmp_path, rank):  # KEY-11
    name = "lora_unet_single_blocks_0_linear1"
    tensors = lora(name, 3 * 8 + 32, 8, rank) | {f"{name}.alpha": torch.tensor(2.0)}
    reading = read_back(tmp_path, tensors, family=model("flux"))
    parts = [reading.adapter[f"transformer.single_transformer_blocks.0.{head}"] for head in HEADS]
    assert [tuple(part.tensors["up"].shape) for part in parts] == [(8, rank)] * 3 + [(32, rank)]
    assert all(part.tensors["down"] is parts[0].tensors["down"] for part in parts)
    assert parts[0].tensors["down"].shape == (rank, 8)
    whole = 2 / rank * tensors[f"{name}.lora_up.weight"].double() @ tensors[f"{name}.lora_down.weight"].double()
    pieces = [
        compute_weight_delta(torch.zeros(part.tensors["up"].shape[0], 8, dtype=torch.float64), part) for part in parts
    ]
    torch.testing.assert_close(torch.cat(pieces), whole)
    assert len({line.site for line in reading.ledger}) == 1 and reading.matched == 3


def test_xlabs_adapts_the_first_three_parts_alone(tmp_path):
    words = "processor.qkv_lora.down.weight processor.qkv_lora.up.weight"
    reading = read_back(tmp_path, lora("single_blocks.0", 24, 8, words=words), family=model("flux"))
    assert reading.spelling == "xlabs"
    assert list(reading.adapter) == [f"transformer.single_transformer_blocks.0.{head}" for head in HEADS[:3]]
    shapes = {f"transformer.single_transformer_blocks.0.{head}": (8, 8) for head in HEADS}
    again = read_back(tmp_path, lora("single_blocks.0", 24, 8, words=words), family=model("flux"), shapes=shapes)
    assert list(again.adapter) == list(reading.adapter)


def test_swapped_halves_change_places(tmp_path):
    name = "lora_unet_final_layer_adaLN_modulation_1"
    reading = read_back(tmp_path, lora(name, 16, 8), family=model("flux"))
    scale, shift = noise(16, 2, seed=1).chunk(2)
    assert torch.equal(reading.adapter["transformer.norm_out.linear"].tensors["up"], torch.cat([shift, scale]))


def factors(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {role: 0.5 * noise(*shape, seed=n) for n, (role, shape) in enumerate(shapes.items())}


LOHA = factors(w1_a=(12, 2), w1_b=(2, 8), w2_a=(12, 2), w2_b=(2, 8))
TUCKER = factors(t1=(2, 2, 3, 3), w1_a=(2, 12), w1_b=(2, 8), t2=(2, 2, 3, 3), w2_a=(2, 12), w2_b=(2, 8))
DIVISIBLE = {
    "lora": SiteAdapter("lora", factors(up=(12, 2), down=(2, 8), up_bias=(12,), diff_b=(12,)), 3.0),
    "lora, tucker": SiteAdapter("lora", factors(up=(12, 2, 1, 1), mid=(2, 2, 3, 3), down=(2, 8, 1, 1)), 3.0),
    "loha": SiteAdapter("loha", LOHA, 1.0),
    "loha, tucker": SiteAdapter("loha", TUCKER, 1.0),
    "lokr": SiteAdapter("lokr", factors(w1=(6, 4), w2=(2, 2))),
    "lokr, low rank": SiteAdapter("lokr", factors(w1_a=(3, 2), w1_b=(2, 4), w2_a=(4, 2), w2_b=(2, 2)), 5.0),
    "lokr, its blocks across the parts": SiteAdapter("lokr", factors(w1=(4, 4), w2=(3, 2), diff_b=(12,))),
    "lokr, one block": SiteAdapter("lokr", factors(w1=(1, 4), w2_a=(12, 2), w2_b=(2, 2)), 5.0),
    "lokr, across, tucker": SiteAdapter(
        "lokr", factors(w1_a=(4, 1), w1_b=(1, 4), t2=(2, 2, 3, 3), w2_a=(2, 3), w2_b=(2, 2)), 3.0
    ),
    "lokr, across, dora": SiteAdapter("lokr", factors(w1=(2, 4), w2=(6, 2)), magnitude=Magnitude(noise(12, 1))),
    "glora": SiteAdapter("glora", factors(a1=(8, 2), a2=(2, 8), b1=(12, 2), b2=(2, 8)), 3.0),
    "full": SiteAdapter("full", factors(diff=(12, 8), diff_b=(12,))),
    "bias": SiteAdapter("full", factors(diff_b=(12,))),
    "set": SiteAdapter("set", factors(weight=(12, 8))),
    "ia3": SiteAdapter("ia3", factors(weight=(12, 1))),
    "ia3 on input": SiteAdapter("ia3", factors(weight=(1, 8)), options={"on_input": True}),
    "oft": SiteAdapter("oft", factors(blocks=(6, 2, 2), rescale=(12, 1))),
    "oft_v2": SiteAdapter("oft_v2", factors(packed=(2, 6))),
    "dora": SiteAdapter("lora", factors(up=(12, 2), down=(2, 8)), 3.0, magnitude=Magnitude(noise(12, 1))),
}


@pytest.mark.parametrize("name", DIVISIBLE)
def test_the_parts_are_the_rows_of_the_whole(name):
    adapter = DIVISIBLE[name]
    base = noise(12, 8, *((3, 3) if "tucker" in name else ())).double()
    bias = noise(12, seed=7).double()
    parts = split_fused_adapter(adapter, QKV)
    assert list(parts) == ["q", "k", "v"]
    cut = [compute_weight_delta(rows, part) for rows, part in zip(base.split(4), parts.values(), strict=True)]
    torch.testing.assert_close(torch.cat(cut), compute_weight_delta(base, adapter))
    biases = [compute_adapted_bias(rows, part) for rows, part in zip(bias.split(4), parts.values(), strict=True)]
    torch.testing.assert_close(torch.cat(biases), compute_adapted_bias(bias, adapter))


def test_a_deferred_difference_is_cut_when_it_is_read():
    reads: list[str] = []

    def read() -> torch.Tensor:
        reads.append("diff")
        return noise(12, 8)

    whole = SiteAdapter("full", DeferredTensors({"diff": PendingTensor((12, 8), read)}), magnitude=Magnitude(noise(12)))
    parts = split_fused_adapter(whole, QKV)
    assert not reads
    assert torch.equal(torch.cat([part.tensors["diff"] for part in parts.values()]), noise(12, 8))
    assert torch.equal(torch.cat([part.magnitude.tensor for part in parts.values()]), noise(12))
    assert len(reads) == 3


@pytest.mark.parametrize(
    ("adapter", "landing", "why"),
    [
        (SiteAdapter("oft", factors(blocks=(2, 6, 6))), QKV, "blocks of 6 rows"),
        (SiteAdapter("oft", factors(blocks=(6, 2, 2)), options={"constraint": 1.0}), QKV, "constraint"),
        (SiteAdapter("boft", factors(blocks=(2, 2, 6, 6))), QKV, "do not divide into rows"),
        (SiteAdapter("lora", factors(up=(11, 2), down=(2, 8))), QKV, "11 rows"),
        (SiteAdapter("lora", factors(up=(12, 2), down=(2, 8))), LINEAR1, "12 rows"),
        (SiteAdapter("full", factors(diff_b=(56,))), LINEAR1, "name the model"),
        (SiteAdapter("full", factors(diff=(12, 8)), magnitude=Magnitude(noise(1, 8), "in")), QKV, "norms mix"),
    ],
)  # fmt: skip
def test_what_has_no_exact_parts_is_named(adapter, landing, why):
    with pytest.raises(AdapterError, match=why) as caught:
        split_fused_adapter(adapter, landing)
    assert caught.value.code == "ADAPTER-FUSED" and caught.value.evidence["sites"] == list(landing.sites)


def test_the_models_own_shapes_decide_where_they_are_known():
    shapes = {"transformer.q": (8, 8), "transformer.k": (2, 8), "transformer.v": (2, 8)}
    parts = split_fused_adapter(SiteAdapter("lora", factors(up=(12, 2), down=(2, 8))), QKV, shapes)
    assert [part.tensors["up"].shape[0] for part in parts.values()] == [8, 2, 2]
    shapes = {f"transformer.{s}": (n, 8) for s, n in zip(LINEAR1.sites, (8, 8, 8, 32), strict=True)}
    bias = split_fused_adapter(SiteAdapter("full", factors(diff_b=(56,))), LINEAR1, shapes)
    assert [part.tensors["diff_b"].shape[0] for part in bias.values()] == [8, 8, 8, 32]


def test_one_module_twice_is_an_error_unless_it_is_the_same(tmp_path):
    fused = lora("diffusion_model.double_blocks.0.img_attn.qkv", 24, 8)
    rows = fused["diffusion_model.double_blocks.0.img_attn.qkv.lora_up.weight"].split(8)
    split: dict[str, torch.Tensor] = {}
    for part, up in zip("qkv", rows, strict=True):
        name = f"transformer.transformer_blocks.0.attn.to_{part}"
        split |= {f"{name}.lora_down.weight": noise(2, 8), f"{name}.lora_up.weight": up}
    reading = read_back(tmp_path, fused | split, family=model("flux"))
    assert not codes(reading) or "ADAPTER-DUPLICATE" not in codes(reading)
    assert {line.fate for line in reading.ledger} == {"applied", "explained"} and len(reading.adapter) == 3
    split["transformer.transformer_blocks.0.attn.to_k.lora_up.weight"] = noise(8, 2, seed=9)
    assert "ADAPTER-DUPLICATE" in codes(read_back(tmp_path, fused | split, family=model("flux")))
