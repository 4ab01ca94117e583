"""T-LoRA files: read as plain LoRA where the model that they were trained on is at hand, and asked for where not."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from finitune.adapters.tlora import compute_principal_triples
from finitune.report import Level
from tests.adapter_files import codes, delta, finding, model, noise, read_back

Q = "transformer.a.to_q"


@pytest.fixture
def read(tmp_path):
    """Write tensors and texts to a file, and read it."""
    return partial(read_back, tmp_path)


def t_lora(module: str, out: int, into: int, rank: int = 2) -> dict[str, Tensor]:
    q, p = noise(rank, into), noise(out, rank, seed=1)
    lambdas = noise(1, rank, seed=2)
    return {f"{module}.q_layer.weight": q, f"{module}.p_layer.weight": p, f"{module}.lambda_layer": lambdas}


def change_of(tensors: dict[str, Tensor], base: Tensor, scale: float = 1.0) -> Tensor:
    """s * (P diag(l) Q - P0 diag(l0) Q0) in fp64, P0, l0 and Q0 being the largest singular triples of the base."""
    q, p, lambdas = (tensor.double() for tensor in tensors.values())
    u, values, vt = torch.linalg.svd(base.double(), full_matrices=False)
    rank = lambdas.numel()
    return scale * ((p * lambdas) @ q - (u[:, :rank] * values[:rank]) @ vt[:rank])


@pytest.mark.parametrize("alpha", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_t_lora_is_a_lora_where_the_model_is_at_hand(read, alpha, dtype):
    base, tensors = noise(16, 8, seed=5).to(dtype), t_lora("lycoris_a_to_q", 16, 8)
    stated = {} if alpha is None else {"lycoris_a_to_q.alpha": torch.tensor(alpha)}
    reading = read(tensors | stated, weight_of={Q: base}.get)
    adapter = reading.adapter[Q]
    assert adapter.algorithm == "lora" and adapter.tensors["down"].shape == (4, 8) and not codes(reading, Level.ERROR)
    expected = change_of(tensors, base, 1.0 if alpha is None else alpha / 2)
    torch.testing.assert_close(delta(reading, Q, 16, 8), expected, rtol=1e-5, atol=1e-5)
    assert reading.matched == len(tensors) + len(stated) and not reading.left_out
    said = finding(reading, "ADAPTER-TLORA-PRINCIPAL")
    assert said.level is Level.NOTE and "sig_type" in said.message
    assert said.evidence["selection"] == "principal" and said.evidence["weight"] == str(dtype)
    assert ("ADAPTER-NO-ALPHA" in codes(reading)) is (alpha is None)


def test_a_t_lora_of_a_fused_weight_is_taken_from_all_of_it(read):
    """q, k and v were one weight when it was trained; scale and shift had changed places."""
    qkv = t_lora("lora_unet_double_blocks_0_img_attn_qkv", 24, 8)
    ada = t_lora("lora_unet_final_layer_adaLN_modulation_1", 16, 8)
    sites = [f"transformer.transformer_blocks.0.attn.to_{part}" for part in "qkv"]
    weights = {site: noise(8, 8, seed=n) for n, site in enumerate(sites)}
    norm = noise(16, 8, seed=9)
    weight_of = {**weights, "transformer.norm_out.linear": norm}.get
    reading = read(qkv | ada, family=model("flux"), weight_of=weight_of)
    deltas = torch.cat([delta(reading, site, 8, 8) for site in sites])
    torch.testing.assert_close(deltas, change_of(qkv, torch.cat(list(weights.values()))), rtol=1e-5, atol=1e-5)
    swapped = torch.cat(norm.chunk(2)[::-1])
    expected = torch.cat(change_of(ada, swapped).chunk(2)[::-1])
    torch.testing.assert_close(delta(reading, "transformer.norm_out.linear", 16, 8), expected, rtol=1e-5, atol=1e-5)
    some = read(qkv | ada, family=model("flux"), weight_of={sites[0]: weights[sites[0]]}.get)
    assert codes(some, Level.ERROR) == ["ADAPTER-TLORA"] and not some.adapter.sites


@pytest.mark.parametrize(
    ("base", "change", "why"),
    [
        (None, {}, "does not hold"),
        (noise(16, 9), {}, "weight's inputs"),
        (noise(15, 8), {}, "weight's outputs"),
        (torch.full((16, 8), math.nan), {}, "NaN"),
        (noise(16, 8), {"q_layer.weight": noise(8)}, "weight's inputs"),
        (noise(16, 8), {"diff_b": noise(16)}, "its tensors are not"),
        (noise(16, 8, 3, 3), {}, "kernel"),
    ],
)
def test_a_t_lora_that_cannot_be_told_asks_for_the_model(read, base, change, why):
    for weight_of in [{Q: base}.get, *([None] if base is None else [])]:
        changed = {f"lycoris_a_to_q.{role}": tensor for role, tensor in change.items()}
        reading = read(t_lora("lycoris_a_to_q", 16, 8) | changed, weight_of=weight_of)
        said = finding(reading, "ADAPTER-TLORA")
        assert said.level is Level.ERROR and why in said.message and said.remedy
        assert not reading.adapter.sites and len(reading.left_out) == len(reading.ledger) and not reading.unmatched
        assert base is not None or "Give the model" in said.remedy


@pytest.mark.parametrize(("width", "name"), [(768, "sd15"), (1024, "sd2")])
def test_its_width_tells_the_family(read, width, name):
    reading = read(
        t_lora("lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k", 640, width), resolver=None
    )
    assert reading.family is model(name) and codes(reading, Level.ERROR) == ["ADAPTER-TLORA"]


@pytest.mark.parametrize("shape", [(12, 7), (7, 12), (8, 8)])
@pytest.mark.parametrize("rank", [1, 3, 20])
def test_the_largest_values_by_the_gram_matrix_are_those_of_the_svd(shape, rank):
    weight = noise(*shape).double()
    q, found, p = compute_principal_triples(weight, rank)
    u, values, vt = torch.linalg.svd(weight, full_matrices=False)
    torch.testing.assert_close(found, values[:rank])
    torch.testing.assert_close((p * found) @ q, (u[:, :rank] * values[:rank]) @ vt[:rank])
    torch.testing.assert_close(q @ q.mT, torch.eye(len(found), dtype=q.dtype))


def test_a_weight_of_lower_rank_has_values_of_zero():
    weight = torch.outer(noise(5), noise(4)).double()
    q, found, p = compute_principal_triples(weight, 3)
    torch.testing.assert_close((p * found) @ q, weight)
    assert bool(torch.isfinite(q).all()) and float(found[1:].max()) < 1e-7
