"""What an adapter file's tensors mean: scales, sides, orders, fused weights; with the programs that write them."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest
import torch

from finitune.adapters.core import AmbiguityOptions
from finitune.adapters.weight import compute_weight_delta
from finitune.namings.tensor_reader import DeferredTensors
from finitune.report import Level
from tests.adapter_files import codes, delta, finding, lora, model, noise, read_back

Q = "transformer.a.to_q"


@pytest.fixture
def read(tmp_path):
    """Write tensors and texts to a file, and read it."""
    return partial(read_back, tmp_path)


def named(module: str, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"{module}.{role}": tensor for role, tensor in tensors.items()}


def product(tensors: dict[str, torch.Tensor], module: str = "a.to_q") -> torch.Tensor:
    up, down = (tensors[f"{module}.lora_{side}.weight"].double() for side in ("up", "down"))
    return up @ down


# --- scales -----------------------------------------------------------------------------------------------------------


def test_no_alpha_is_scale_one_and_not_alpha_one(read):  # SCL-01
    tensors = lora("a.to_q", 32, 32, 16)
    reading = read(tensors)
    assert reading.adapter[Q].alpha is None
    torch.testing.assert_close(delta(reading, Q, 32, 32), product(tensors))
    assert finding(reading, "ADAPTER-NO-ALPHA").level is Level.NOTE
    some = read(tensors | lora("b.to_q", 32, 32, 16) | {"b.to_q.alpha": torch.tensor(4.0)})
    assert some.adapter[Q].alpha is None and some.adapter["transformer.b.to_q"].alpha == 4.0
    assert finding(some, "ADAPTER-SCALE-SOURCE").evidence == {"alpha tensors": 1}


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_alpha_is_taken_exactly_from_any_single_element(read, shape, dtype):
    tensors = lora("a.to_q") | {"a.to_q.alpha": torch.full(shape, 6.0).to(dtype)}
    reading = read(tensors)
    assert reading.adapter[Q].alpha == 6.0
    torch.testing.assert_close(delta(reading, Q, 16, 8), 3 * product(tensors))


@pytest.mark.parametrize("alpha", [0.0, -4.0, math.nan, math.inf])
def test_an_alpha_that_cannot_be_meant_fails_with_its_reason(read, alpha):  # SCL-01, FIL-07
    reading = read(lora("a.to_q") | {"a.to_q.alpha": torch.tensor(alpha)})
    said = finding(reading, "ADAPTER-ALPHA")
    assert said.level is Level.ERROR and said.remedy and len(reading.left_out) == 3
    words = {0.0: "diffusers as nothing", -4.0: "negative", math.inf: "overflowed"}
    assert words.get(alpha, "not a number") in said.message


@pytest.mark.parametrize(("meaning", "scale"), [("rank", 1.0), ("zero", 0.0)])
def test_alpha_zero_is_what_the_user_says(read, meaning, scale):
    tensors = lora("a.to_q") | {"a.to_q.alpha": torch.tensor(0.0)}
    reading = read(tensors, answers=AmbiguityOptions(zero_alpha=meaning))
    assert not codes(reading, Level.ERROR)
    torch.testing.assert_close(delta(reading, Q, 16, 8), scale * product(tensors))


def peft(module: str = "a.to_q", rank: int = 8) -> dict[str, torch.Tensor]:
    return lora(f"base_model.model.{module}", rank=rank, words="lora_A.weight lora_B.weight")


@pytest.mark.parametrize(("rslora", "scale"), [(False, 2.0), (True, 16 / math.sqrt(8))])
def test_a_peft_folders_configuration_states_the_scale(read, rslora, scale):  # SCL-04
    tensors = peft()
    reading = read(tensors, config={"r": 8, "lora_alpha": 16, "use_rslora": rslora})
    up, down = tensors["base_model.model.a.to_q.lora_B.weight"], tensors["base_model.model.a.to_q.lora_A.weight"]
    torch.testing.assert_close(delta(reading, Q, 16, 8), scale * (up.double() @ down.double()))
    assert reading.adapter[Q].rank_stabilised is rslora
    assert finding(reading, "ADAPTER-SCALE-SOURCE").evidence == {"adapter_config.json": 1}


def test_peft_tensors_alone_have_an_unknown_scale(read):  # SCL-04
    reading = read(peft())
    assert reading.adapter[Q].alpha is None
    said = finding(reading, "ADAPTER-SCALE-UNKNOWN")
    assert said.level is Level.WARNING and "1 is assumed" in said.message
    software = {"software": json.dumps({"name": "ai-toolkit", "version": "0.7"})}
    words = "lora_A.weight lora_B.weight"
    reading = read(lora("diffusion_model.double_blocks.0.img_mlp.0", words=words), software, family=model("flux"))
    assert reading.spelling == "ai-toolkit" and "ai-toolkit" in finding(reading, "ADAPTER-NO-ALPHA").message


def test_two_scales_that_differ_are_both_named(read):  # SCL-04
    tensors = peft() | {"base_model.model.a.to_q.alpha": torch.tensor(4.0)}
    said = finding(read(tensors, config={"r": 8, "lora_alpha": 16}), "ADAPTER-SCALE-CONFLICT")
    assert (said.evidence["alpha tensor"], said.evidence["adapter_config.json"]) == (4.0, 16.0)
    assert said.evidence["scales"] == [0.5, 2.0]
    agreeing = read(tensors, config={"r": 8, "lora_alpha": 4 / math.sqrt(8), "use_rslora": True})
    assert not codes(agreeing, Level.ERROR) and agreeing.adapter[Q].alpha == 4.0


def test_the_metadata_of_diffusers_states_scales_by_component_and_pattern(read):
    words = "lora_A.weight lora_B.weight"
    blocks = [lora(f"transformer.transformer_blocks.{n}.attn.to_q", words=words) for n in (0, 1)]
    clip = lora("text_encoder.text_model.encoder.layers.0.self_attn.q_proj", words=words)
    table = {
        "transformer.r": 2,
        "transformer.lora_alpha": 4,
        "transformer.alpha_pattern": {"transformer_blocks.1.attn.to_q": 8},
        "text_encoder.r": 4,
        "text_encoder.lora_alpha": 1,
        "text_encoder.use_rslora": True,
    }
    metadata = {"lora_adapter_metadata": json.dumps(table)}
    reading = read({**blocks[0], **blocks[1], **clip}, metadata, family=model("flux"))
    alphas = [reading.adapter[f"transformer.transformer_blocks.{n}.attn.to_q"].alpha for n in (0, 1)]
    text = reading.adapter["text_encoder.text_model.encoder.layers.0.self_attn.q_proj"]
    assert (alphas, text.alpha, text.rank_stabilised) == ([4.0, 8.0], 1.0, True)
    assert finding(reading, "ADAPTER-RANK").evidence["stated"] == 4.0  # the tensors have 2, and are believed


def test_texts_that_are_not_what_they_should_be_only_warn(read):  # FIL-09
    metadata = {"ss_network_alpha": "None", "ss_network_dim": "x", "lora_adapter_metadata": "{", "software": "[1]"}
    reading = read(lora("a.to_q"), metadata | {"ss_tag_frequency": "ü" * 200_000})
    assert not codes(reading, Level.ERROR) and "METADATA-UNREADABLE" in codes(reading, Level.WARNING)
    assert reading.metadata["lora_adapter_metadata"] == "{"


def test_a_scalar_multiplies(read):
    tensors = lora("a.to_q")
    reading = read(tensors | {"a.to_q.scalar": torch.tensor(0.3)})
    torch.testing.assert_close(delta(reading, Q, 16, 8), float(torch.tensor(0.3)) * product(tensors), rtol=1e-6, atol=0)


FIX = "finitune convert FILE --to kohya --fix-split-scale"


def blocks_apart(rank: int = 4) -> dict[str, torch.Tensor]:
    up = torch.block_diag(*(noise(32, rank, seed=n) for n in range(3)))
    return named(
        "a.to_q", **{"lora_up.weight": up, "lora_down.weight": noise(3 * rank, 32), "alpha": torch.tensor(4.0)}
    )


def test_parts_trained_apart_and_saved_as_one_are_seen(read):  # SCL-03
    others = [lora(m, 32, 32, 4) | {f"{m}.alpha": torch.tensor(4.0)} for m in ("a.to_k", "b.to_q")]
    reading = read({**blocks_apart(), **others[0], **others[1]})
    said = finding(reading, "ADAPTER-SPLIT-SCALE")
    assert said.level is Level.WARNING and said.evidence["right alpha"] == 12.0 and said.evidence["modules"] == 1
    dense = lora("a.to_q", 96, 32, 12) | {"a.to_q.alpha": torch.tensor(4.0)}
    assert (said.remedy.split(": ")[1], reading.split_scale) == (FIX, {Q: 3})
    control = read({**dense, **others[0], **others[1]})
    assert "ADAPTER-SPLIT-SCALE" not in codes(control) and not control.split_scale
    fixed = blocks_apart() | {"a.to_q.alpha": torch.tensor(12.0)}
    assert "ADAPTER-SPLIT-SCALE" not in codes(read({**fixed, **others[0], **others[1]}))


# --- LoKr -------------------------------------------------------------------------------------------------------------


def test_two_full_factors_have_no_rank_for_alpha(read):  # LYC-01
    w1, w2 = noise(4, 4), noise(8, 8)
    reading = read(named("a.to_q", lokr_w1=w1, lokr_w2=w2, alpha=torch.tensor(1.0)), {"ss_network_dim": "32"})
    torch.testing.assert_close(delta(reading, Q, 32, 32), torch.kron(w1.double(), w2.double()))
    said = finding(reading, "ADAPTER-LOKR-ALPHA")
    assert said.level is Level.WARNING and said.evidence["candidate scale"] == 1 / 32
    (line,) = [line for line in reading.ledger if line.role == "alpha"]
    assert line.fate == "explained" and "rank" in line.why and not reading.left_out
    assert reading.adapter[Q].alpha == 1.0  # as it was stated, though nothing is divided by it
    overflown = read(named("a.to_q", lokr_w1=w1, lokr_w2=w2, alpha=torch.tensor(1e5).half()))
    assert codes(overflown, Level.ERROR) == ["ADAPTER-NONFINITE"] and overflown.adapter[Q].alpha is None


def test_a_factor_of_low_rank_has_one(read):  # LYC-01
    w1, a, b = noise(4, 4), noise(8, 2), noise(2, 8, seed=5)
    reading = read(named("a.to_q", lokr_w1=w1, lokr_w2_a=a, lokr_w2_b=b, alpha=torch.tensor(1.0)))
    torch.testing.assert_close(delta(reading, Q, 32, 32), 0.5 * torch.kron(w1.double(), a.double() @ b.double()))
    low = named("a.to_q", lokr_w1_a=noise(4, 3), lokr_w1_b=noise(3, 4), lokr_w2_a=a, lokr_w2_b=b)
    reading = read(low | {"a.to_q.alpha": torch.tensor(1.0)})
    first = noise(4, 3).double() @ noise(3, 4).double()
    torch.testing.assert_close(delta(reading, Q, 32, 32), 0.5 * torch.kron(first, a.double() @ b.double()))


# --- sides and orders that shapes decide ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "shape", "out", "into", "side"),
    [
        ("dora_scale", (16, 1), 16, 16, "out"),
        ("dora_scale", (1, 16), 16, 16, "in"),
        ("dora_scale", (16,), 16, 8, "out"),
        ("dora_scale", (8,), 16, 8, "in"),
        ("lora_magnitude_vector.weight", (16,), 16, 16, "out"),
        ("lora_magnitude_vector", (16,), 16, 16, "out"),
        ("lora_magnitude_vector.default.weight", (16,), 16, 16, "out"),
        ("magnitude", (16,), 16, 16, "out"),
    ],
)
def test_magnitudes_are_of_the_side_that_their_shape_says(read, word, shape, out, into, side):
    reading = read(lora("a.to_q", out, into) | {f"a.to_q.{word}": noise(*shape)})
    assert reading.adapter[Q].magnitude is not None and reading.adapter[Q].magnitude.side == side
    assert reading.matched == 3


def test_magnitudes_that_fit_both_sides_are_asked_about(read):
    tensors = lora("a.to_q", 16, 16) | {"a.to_q.dora_scale": noise(16)}
    reading = read(tensors)
    assert codes(reading, Level.ERROR) == ["ADAPTER-UNDECIDED"] and len(reading.left_out) == 3
    answered = read(tensors, answers=AmbiguityOptions(dora_side="in"))
    assert answered.adapter[Q].magnitude.side == "in"
    wrong = read(lora("a.to_q") | {"a.to_q.dora_scale": noise(5)})
    assert codes(wrong, Level.ERROR) == ["ADAPTER-DORA"]


def glora(out: int, into: int, rank: int, module: str = "a.to_q", old: bool = False) -> dict[str, torch.Tensor]:
    a1, a2, b1, b2 = noise(into, rank), noise(rank, into, seed=1), noise(out, rank, seed=2), noise(rank, into, seed=3)
    factors = (a2, a1, b2, b1) if old else (a1, a2, b1, b2)
    return {f"{module}.{role}.weight": t for role, t in zip(("a1", "a2", "b1", "b2"), factors, strict=True)}


@pytest.mark.parametrize("old", [False, True])
def test_gloras_order_follows_from_a_weight_that_is_not_square(read, old):
    square = glora(16, 16, 2, "b.to_q", old)
    reading = read(glora(16, 8, 2, "a.to_q", old) | square)
    for site, (out, into) in {Q: (16, 8), "transformer.b.to_q": (16, 16)}.items():
        tensors = reading.adapter[site].tensors
        assert [tuple(tensors[r].shape) for r in ("a1", "a2", "b1", "b2")] == [
            (into, 2),
            (2, into),
            (out, 2),
            (2, into),
        ]
        assert torch.equal(tensors["b1"], noise(out, 2, seed=2))
    assert codes(read(square), Level.ERROR) == ["ADAPTER-UNDECIDED"]
    order = "old" if old else "new"
    for known in ({"shapes": {"transformer.b.to_q": (16, 16)}}, {"answers": AmbiguityOptions(glora_order=order)}):
        assert torch.equal(read(square, **known).adapter["transformer.b.to_q"].tensors["b1"], noise(16, 2, seed=2))


@pytest.mark.parametrize(("shape", "on_input", "base"), [((1, 8), True, (4, 8)), ((8, 1), False, (8, 4))])
def test_ia3_has_the_side_that_it_says(read, shape, on_input, base):  # LYC-07
    weight = noise(*shape)
    reading = read(named("a.to_q", weight=weight, on_input=torch.tensor(on_input)), shapes={Q: base})
    w = noise(*base, seed=3).double()
    torch.testing.assert_close(compute_weight_delta(w, reading.adapter[Q]), w * weight.double())
    factor = read({"base_model.model.a.to_q.ia3_l": 1 + weight}, shapes={Q: base})
    torch.testing.assert_close(compute_weight_delta(w, factor.adapter[Q]), w * weight.double(), rtol=1e-6, atol=1e-6)
    assert codes(read({"a.to_q.weight": weight, **lora("b.to_q")}), Level.ERROR) == ["ADAPTER-ROLES"]


def test_a_rotations_alpha_is_its_constraint(read):
    blocks = 0.1 * noise(4, 4, 4)
    for alpha, options in ((0.0, {}), (0.5, {"constraint": 8.0})):
        reading = read(named("lora_unet_a_to_q", oft_blocks=blocks, alpha=torch.tensor(alpha)))
        assert dict(reading.adapter[Q].options) == options and reading.matched == 2
    kohya = read(named("oft_unet_a_to_q", oft_blocks=blocks, alpha=torch.tensor(0.0)))
    assert kohya.spelling == "kohya-oft" and dict(kohya.adapter[Q].options) == {"rotates_bias": True}
    assert "turns nothing" in finding(kohya, "ADAPTER-OFT-ALPHA").message
    stages = read(named("lora_unet_a_to_q", oft_blocks=0.1 * noise(3, 4, 4, 4), alpha=torch.tensor(0.5)))
    assert (stages.adapter[Q].algorithm, stages.adapter[Q].options["constraint"]) == ("boft", 8.0)


def test_r_itself_is_turned_into_its_generator(read):
    blocks = 0.1 * noise(4, 4, 4)
    w, q = noise(16, 8).double(), (blocks - blocks.mT).double()
    eye = torch.eye(4, dtype=torch.float64)
    reading = read(named("lycoris_a_to_q", oft_diag=(eye + q) @ torch.linalg.inv(eye - q)))
    expected = read(named("lycoris_a_to_q", oft_blocks=blocks))
    found = compute_weight_delta(w, reading.adapter[Q])
    torch.testing.assert_close(found, compute_weight_delta(w, expected.adapter[Q]), rtol=1e-5, atol=1e-6)


def test_a_sparse_rest_of_an_extraction_belongs_to_the_weight(read):
    tensors = lora("a.to_q")
    rest = (
        torch.zeros(16, 8)
        .index_put((torch.tensor([3, 5]), torch.tensor([0, 7])), torch.tensor([2.0, -1.0]))
        .to_sparse()
    )
    parts = {
        "bias_indices": rest.indices().short(),
        "bias_values": rest.values().half(),
        "bias_size": torch.tensor([16, 8]),
    }
    reading = read(tensors | named("lora_unet_b_to_q", **parts) | named("a.to_q", **parts))
    torch.testing.assert_close(
        delta(reading, Q, 16, 8), product(tensors) + rest.to_dense().double(), rtol=1e-6, atol=1e-6
    )
    assert codes(reading, Level.ERROR) == ["ADAPTER-ROLES"]  # the rest alone is no adapter
    bias = {"bias_indices": torch.tensor([[3]]), "bias_values": torch.tensor([2.0]), "bias_size": torch.tensor([16])}
    assert (
        read(tensors | named("a.to_q", **bias)).adapter[Q].tensors["diff_b"].tolist() == [0.0] * 3 + [2.0] + [0.0] * 12
    )


def test_control_adapters_widen_and_replace(read):
    control = lora("img_in", 16, 16, words="lora_A.weight lora_B.weight") | {"img_in.lora_B.bias": noise(16)}
    control |= {"double_blocks.0.img_attn.norm.key_norm.scale": noise(4), "txt_in.scale": noise(4)}
    reading = read(control, family=model("flux"), shapes={"transformer.x_embedder": (16, 8)})
    embedder = reading.adapter["transformer.x_embedder"]
    norm = reading.adapter["transformer.transformer_blocks.0.attn.norm_k"]
    assert embedder.options == {"reshape": True} and set(embedder.tensors) == {"up", "down", "up_bias"}
    assert norm.algorithm == "set" and torch.equal(norm.tensors["weight"], noise(4))
    assert codes(reading, Level.ERROR) == ["ADAPTER-ROLES"]  # txt_in is no norm: a whole weight there is no adapter
    widened = read(lora("diffusion_model.a.to_q") | {"diffusion_model.a.to_q.reshape_weight": torch.tensor([16, 8])})
    assert widened.adapter[Q].options == {"reshape": True} and widened.matched == 3


# --- numbers that are none --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_numbers_that_are_none_are_counted_by_tensor(read, dtype):  # FIL-07
    tensors = lora("a.to_q")
    down = tensors["a.to_q.lora_down.weight"]
    down[1, 3] = math.nan
    reading = read({key: tensor.to(dtype) for key, tensor in tensors.items()})
    said = finding(reading, "ADAPTER-NONFINITE")
    assert said.level is Level.ERROR and said.subject == "a.to_q.lora_down.weight"
    assert said.evidence == {"nan": 1, "inf": 0, "size": 16, "first": [1, 3], "all": False}
    assert reading.adapter[Q].tensors["down"].dtype == dtype


def test_all_none_and_tiny_numbers(read):  # FIL-07
    tensors = lora("a.to_q") | lora("b.to_q")
    tensors["a.to_q.lora_up.weight"] = torch.full((16, 2), -math.inf)
    tensors["b.to_q.lora_up.weight"] = torch.full((16, 2), 1e-41)
    assert finding(read(tensors), "ADAPTER-NONFINITE").evidence["all"] is True


def test_differences_as_large_as_the_model_are_read_when_asked_for(read):
    reading = read(named("a.to_q", diff=noise(16, 8), diff_b=noise(16)))
    assert isinstance(reading.adapter[Q].tensors, DeferredTensors)
    assert torch.equal(reading.adapter[Q].tensors["diff"], noise(16, 8))
