"""Other algorithms from the field (LYC-01 to LYC-07): each report's own input, and the change that is right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from finitune.adapters import SiteAdapter
from finitune.adapters.layer import attach_adapters
from finitune.adapters.weight import compute_adapted_weight, compute_weight_delta
from finitune.files.tensorfile import TensorFile
from finitune.namings.read import read_adapter
from tests.adapter_files import noise
from tests.case_files import by_code, named, own_model, read_for, saved, scaled, told

MODULE = "lora_unet_blocks_0_self_attn_q_proj"
SITE = "transformer.transformer_blocks.0.attn1.to_q"


def change_in(path: Path, *shape: int) -> Tensor:
    """The change of a weight of zeros that a file makes, fp64."""
    return compute_weight_delta(torch.zeros(shape, dtype=torch.float64), read_adapter(TensorFile(path)).adapter[SITE])


# --- LYC-01: LoKr of two full factors --------------------------------------------------------------------------------

W1, W2, A, B = noise(4, 4), noise(8, 8), noise(8, 2), noise(2, 8, seed=5)


@pytest.mark.parametrize("to", ["kohya", "comfy"])
def test_lyc_01_two_full_factors_have_scale_1_and_a_candidate(tmp_path: Path, to: str):
    tensors = named(MODULE, lokr_w1=W1, lokr_w2=W2, alpha=torch.tensor(1.0))
    source, out = saved(tmp_path / "a.safetensors", tensors, {"ss_network_dim": "32"}), tmp_path / "b.safetensors"
    said = by_code(told("check", source)[1])["ADAPTER-LOKR-ALPHA"]
    assert said["level"] == "warning" and (said["evidence"]["scale"], said["evidence"]["candidate scale"]) == (
        1,
        1 / 32,
    )
    assert told("convert", source, "--to", to, "-o", out)[0] == 0
    for file in (source, out):
        assert torch.equal(change_in(file, 32, 32), torch.kron(W1.double(), W2.double()))


@pytest.mark.parametrize("first", [{"lokr_w1": W1}, {"lokr_w1_a": noise(4, 3), "lokr_w1_b": noise(3, 4)}])
def test_lyc_01_a_low_second_factor_has_a_rank(tmp_path: Path, first: dict[str, Tensor]):
    tensors = named(MODULE, **first, lokr_w2_a=A, lokr_w2_b=B, alpha=torch.tensor(1.0))
    code, report = told("check", source := saved(tmp_path / "a.safetensors", tensors))
    assert code == 0 and "ADAPTER-LOKR-ALPHA" not in by_code(report)
    left = first["lokr_w1"].double() if "lokr_w1" in first else noise(4, 3).double() @ noise(3, 4).double()
    torch.testing.assert_close(change_in(source, 32, 32), 0.5 * torch.kron(left, A.double() @ B.double()))


# --- LYC-03: LoKr as LoRA --------------------------------------------------------------------------------------------


def test_lyc_03_a_lokr_becomes_the_lora_of_its_kronecker_product(tmp_path: Path):
    source = saved(tmp_path / "a.safetensors", named(MODULE, lokr_w1=W1, lokr_w2=W2))
    out, whole = tmp_path / "b.safetensors", torch.kron(W1.double(), W2.double())
    code, report = told("convert", source, "--to", "diffusers", "--as", "lora", "-o", out)
    assert code == 0 and report["figures"]["class"] == "growing"
    assert float((change_in(out, 32, 32) - whole).norm() / whole.norm()) < 1e-6
    values = torch.linalg.svdvals(whole)
    cut = ("convert", source, "--to", "diffusers", "--as", "lora", "--rank", 4)
    code, report = told(*cut, "-o", tmp_path / "c.safetensors")
    error = by_code(report)["CONVERT-LOSSY"]["evidence"]["relative_delta_error"]
    assert code == 1 and error == pytest.approx(float(values[4:].norm() / values.norm()), rel=1e-6)
    code, report = told(*cut, "--allow-lossy", "-o", out)
    assert code == 0 and report["figures"]["max_delta_error"] == pytest.approx(error, rel=1e-6)


def test_lyc_03_low_factors_are_lossless_from_the_product_of_their_ranks_on(tmp_path: Path):
    tensors = named(
        MODULE, lokr_w1_a=noise(4, 2), lokr_w1_b=noise(2, 4), lokr_w2_a=A, lokr_w2_b=B, alpha=torch.tensor(1.0)
    )
    source, out = saved(tmp_path / "a.safetensors", tensors), tmp_path / "b.safetensors"
    words = ("convert", source, "--to", "kohya", "--as", "lora", "-o", out, "--rank")
    assert told(*words, 3)[0] == 1
    code, report = told(*words, 4)
    assert code == 0 and report["figures"]["max_delta_error"] < 1e-6


@pytest.mark.parametrize(("size", "wanted"), [(16, 0), (4, 1)])
def test_lyc_03_the_model_decides_that_it_is_no_matrix_product(tmp_path: Path, size: int, wanted: int):
    source = saved(tmp_path / "a.safetensors", named(MODULE, lokr_w1=W1, lokr_w2=noise(4, 4, seed=3)))
    base = own_model(tmp_path / "m.safetensors", "blocks.0.self_attn.q_proj", shape=(size, size))
    code, report = told("check", source, "--model", base)
    assert code == wanted
    if wanted:
        said = by_code(report)["ADAPTER-DOES-NOT-FIT"]["evidence"]
        assert (said["adapter"], said["model"]) == ([16, 16], [4, 4])


# --- LYC-04: the cores of a LoHa -------------------------------------------------------------------------------------

CORES = {
    "hada_w1_a": noise(4, 8), "hada_w1_b": noise(4, 6), "hada_t1": noise(4, 4, 3, 3),
    "hada_w2_a": noise(4, 8, seed=5), "hada_w2_b": noise(4, 6, seed=6), "hada_t2": noise(4, 4, 3, 3, seed=7),
}  # fmt: skip


def half_of(number: int, core: int) -> Tensor:
    roles = (f"hada_t{core}", f"hada_w{number}_a", f"hada_w{number}_b")
    return torch.einsum("pqhw,po,qi->oihw", *(CORES[role].double() for role in roles))


@pytest.mark.parametrize("to", ["kohya", "comfy"])
def test_lyc_04_each_half_has_its_own_core(tmp_path: Path, to: str):
    source = saved(tmp_path / "a.safetensors", named(MODULE, **CORES, alpha=torch.tensor(2.0)))
    out, wanted = tmp_path / "b.safetensors", 0.5 * half_of(1, 1) * half_of(2, 2)
    assert told("convert", source, "--to", to, "-o", out)[0] == 0
    for file in (source, out):
        torch.testing.assert_close(change_in(file, 8, 6, 3, 3), wanted)
    assert float((0.5 * half_of(1, 1) * half_of(2, 1) - wanted).norm() / wanted.norm()) > 0.5


@pytest.mark.parametrize("core", ["t1", "t2"])
def test_lyc_04_a_missing_core_is_named(tmp_path: Path, core: str):
    tensors = {role: tensor for role, tensor in CORES.items() if role != f"hada_{core}"}
    code, report = told("check", saved(tmp_path / "a.safetensors", named(MODULE, **tensors)))
    assert code == 1 and by_code(report)["ADAPTER-ROLES"]["evidence"]["missing"] == [core]
    assert report["figures"]["matched"] == 0


# --- LYC-05: what a convolution is told ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "attributes",
    [{"padding": 1}, {"stride": 2}, {"dilation": 2}, {"groups": 2}, {"padding": 1, "padding_mode": "reflect"}],
    ids=str,
)
@pytest.mark.parametrize("kind", ["lora", "loha"])
def test_lyc_05_attached_and_merged_draw_the_same(attributes: dict[str, object], kind: str):
    layer = nn.Sequential(nn.Conv2d(4, 4, 3, **attributes))  # type: ignore[arg-type]
    into = layer[0].weight.shape[1]
    if kind == "lora":
        tensors = {"down": noise(2, into, 3, 3), "up": noise(4, 2, 1, 1)}
    else:
        tensors = {f"w{n}_a": noise(4, 2, seed=n) for n in (1, 2)}
        tensors |= {f"w{n}_b": noise(2, into * 9, seed=n) for n in (1, 2)}
    adapter, x = SiteAdapter(kind, tensors, 3.0), noise(1, 4, 8, 8)
    with torch.no_grad():
        weight = compute_adapted_weight(layer[0].weight.detach(), adapter)
        attached = attach_adapters(layer, {"0": [(adapter, 1.0)]})
        bypass = layer(x)
        attached.detach()
        layer[0].weight.copy_(weight)
        torch.testing.assert_close(bypass, layer(x), rtol=1e-5, atol=1e-5)


# --- LYC-07: IA3, and the wrong family -------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [(8, 4), (4, 8)])
@pytest.mark.parametrize("on_input", [True, False])
def test_lyc_07_ia3_has_the_axis_that_it_says(tmp_path: Path, base: tuple[int, int], on_input: bool):
    weight = noise(1, 8) if on_input else noise(8, 1)
    source = saved(
        tmp_path / "a.safetensors", named("lycoris_my_layer", weight=weight, on_input=torch.tensor(on_input))
    )
    model = own_model(tmp_path / "m.safetensors", "my.layer", shape=base)
    code, report = told("check", source, "--model", model)
    if base[1 if on_input else 0] == 8:
        w = noise(*base, seed=3).double()
        adapter = read_for(source, model).adapter["transformer.my.layer"]
        assert code == 0
        torch.testing.assert_close(compute_weight_delta(w, adapter), w * weight.double())
    else:
        said = by_code(report)["ADAPTER-DOES-NOT-FIT"]
        assert code == 1 and (said["evidence"]["adapter"], said["evidence"]["model"]) == ([8], [4])
        assert ("input" if on_input else "output") in said["message"]


CROSS = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k"


@pytest.mark.parametrize("model", ["sdxl", "a file"])
def test_lyc_07_an_sd15_adapter_on_sdxl_is_told_in_one_sentence(tmp_path: Path, model: str):
    source = saved(tmp_path / "a.safetensors", scaled(CROSS, 640, 768, 4, alpha=2.0))
    name = "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k"
    base = own_model(tmp_path / "m.safetensors", name, shape=(640, 2048))
    code, report = told("check", source, "--model", model if model == "sdxl" else base)
    said = by_code(report)["ADAPTER-OTHER-FAMILY"]
    assert code == 1
    assert said["message"] == "this is an adapter of Stable Diffusion 1.5; the model is Stable Diffusion XL"


def test_lyc_07_other_widths_are_told_by_the_shapes(tmp_path: Path):
    source = saved(tmp_path / "a.safetensors", scaled(CROSS, 32, 7, 4, alpha=2.0))
    name = "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k"
    code, report = told("check", source, "--model", own_model(tmp_path / "m.safetensors", name, shape=(32, 20)))
    said = by_code(report)["ADAPTER-DOES-NOT-FIT"]
    assert code == 1 and said["subject"] == CROSS
    assert (said["evidence"]["adapter"], said["evidence"]["model"]) == ([32, 7], [32, 20])
