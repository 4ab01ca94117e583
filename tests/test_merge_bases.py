"""Whose checkpoint it is: a family's, whole or with modules of its own, or nobody's; and the modules it then has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from finitune.files.tensorfile import TensorFile
from finitune.merging.base_model import MIN_FAMILY_WEIGHT_SHARE, MergeBase, open_merge_base
from finitune.models import MODEL_FAMILIES
from finitune.models.pico import get_pico_folder as pico_folder
from finitune.models.spec import ModelSpec
from finitune.namings.core import SiteTarget
from finitune.namings.resolve import fill_template_numbers
from finitune.verbs import merge
from tests.adapter_files import lora, noise
from tests.case_files import saved, scaled
from tests.merge_made import merged, refused, write_base

BLOCKS = 3


def family(name: str) -> ModelSpec:
    return next(model for model in MODEL_FAMILIES if model.name == name)


def names_of(model: ModelSpec, component: str, native: bool) -> list[str]:
    """The weights of a component in either naming, with BLOCKS numbers for each field."""
    one = next(one for one in model.adapters.components if one.name == component)
    places = native and one.places
    templates = [p.name + p.weight for p in one.places] if places else [f"{site}.weight" for site in one.sites]
    numbers = ({"{i}": str(n), "{j}": "0", "{k}": "0"} for n in range(BLOCKS))
    return list(dict.fromkeys(fill_template_numbers(template, fields) for fields in numbers for template in templates))


def denoiser_of(model: ModelSpec) -> str:
    return next(one.name for one in model.adapters.components if "unet" in one.roles)


def weights(names: list[str], model: ModelSpec, prefix: str = "") -> dict[str, torch.Tensor]:
    """Tensors of these names, as wide as the family's text where a module reads that."""
    width = model.adapters.hallmarks[0].inputs if model.adapters.hallmarks else 8
    return {f"{prefix}{name}": torch.zeros(48, width if "attn2.to_k" in name else 8) for name in names}


VAE = {f"first_stage_model.{side}.{n}.conv.weight": torch.zeros(4, 4, 3, 3) for side in ("encoder", "decoder") for n in
       range(400)}  # fmt: skip
"""More than any model has of its own."""


@pytest.mark.parametrize("name", ["sd15", "sdxl", "sd2"])
def test_a_whole_checkpoint_is_of_its_family_whatever_lies_beside_the_denoiser(tmp_path: Path, name: str):
    model = family(name)
    tensors = weights(names_of(model, "unet", native=True), model, "model.diffusion_model.") | VAE
    for component in model.adapters.components[1:]:
        tensors |= weights(names_of(model, component.name, native=True), model, component.single_file[0])
    base = open_merge_base(saved(tmp_path / "m.safetensors", tensors))
    assert base.family == model


@pytest.mark.parametrize("name", [model.name for model in MODEL_FAMILIES])
@pytest.mark.parametrize("native", [False, True])
def test_a_denoiser_alone_is_of_its_family_in_both_namings(tmp_path: Path, name: str, native: bool):
    model = family(name)
    tensors = weights(names_of(model, denoiser_of(model), native), model)
    base = open_merge_base(saved(tmp_path / "m.safetensors", tensors))
    assert base.family is not None and base.family.name == name


def derived(tmp_path: Path, share: float) -> tuple[MergeBase, int]:
    """A Flux of which a share of the weights are of its own, and their number."""
    model = family("flux")
    known = names_of(model, "transformer", native=True)
    count = round(len(known) * share / (1 - share))
    own = [f"guidance.layers.{n}.fc.weight" for n in range(count)]
    return open_merge_base(
        saved(tmp_path / "m.safetensors", weights([*known, *own], model, "model.diffusion_model."))
    ), count


def test_a_model_with_a_few_modules_of_its_own_is_of_the_family_and_has_them_too(tmp_path: Path):
    base, count = derived(tmp_path, 0.06)
    assert count > 1 and base.family is not None and base.family.name == "flux" and base.resolver is not None
    assert base.resolver.resolve("guidance_layers_1_fc", flat=True) == SiteTarget(
        "transformer", ("guidance.layers.1.fc",)
    )
    assert base.resolver.resolve("double_blocks_1_img_attn_qkv", flat=True) is not None
    tensors = lora("lora_unet_guidance_layers_1_fc", 48, 8) | lora("lora_unet_double_blocks_1_img_mlp_0", 48, 8)
    file = saved(tmp_path / "a.safetensors", tensors)
    out = tmp_path / "out.safetensors"
    report = merge.run(merge.Request(model=str(base.path), adapters=(str(file),), out=out))
    assert report.ok and report.figures["tensors_adapted"] == 2 and report.figures["matched"] == 2
    changed = TensorFile(out).read("model.diffusion_model.guidance.layers.1.fc.weight")
    up, down = (tensors[f"lora_unet_guidance_layers_1_fc.lora_{side}.weight"].double() for side in ("up", "down"))
    assert torch.equal(changed, (up @ down).float())


def test_a_model_with_many_modules_of_its_own_is_nobodys(tmp_path: Path):
    base, _ = derived(tmp_path, 1.1 * (1 - MIN_FAMILY_WEIGHT_SHARE))
    assert base.family is None and base.resolver is not None
    landing = SiteTarget("transformer", ("double_blocks.1.img_attn.qkv",))
    assert base.resolver.resolve("double_blocks_1_img_attn_qkv", flat=True) == landing, "in one piece, as it has it"


def test_a_text_encoder_that_others_have_too_makes_no_family(tmp_path: Path):
    encoder = weights(names_of(family("sd15"), "text_encoder", native=False), family("sd15"))
    for name, tensors in (("text_encoder", encoder), ("transformer", {"layers.0.fc.weight": noise(4, 4)})):
        (tmp_path / name).mkdir()
        saved(tmp_path / name / "model.safetensors", tensors)
    base = open_merge_base(tmp_path)
    assert base.family is None and base.resolver is not None
    assert base.resolver.resolve("layers_0_fc", ["transformer"], flat=True) == SiteTarget(
        "transformer", ("layers.0.fc",)
    )
    inside = "text_model.encoder.layers.0.mlp.fc1"
    assert base.resolver.resolve(inside, ["text_encoder"]) == SiteTarget("text_encoder", (inside,))


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model.", "net."])
@pytest.mark.parametrize("module", ["lora_unet_my_own_fc1", "transformer.my.own.fc1", "diffusion_model.my.own.fc1"])
def test_a_model_of_no_family_takes_adapters_of_its_own_modules(tmp_path: Path, prefix: str, module: str):
    weight, other = noise(16, 8), noise(16, 8, seed=1)
    base = saved(tmp_path / "m.safetensors", {f"{prefix}my.own.fc1.weight": weight, f"{prefix}other.weight": other})
    tensors = scaled(module, 16, 8, 2, alpha=2.0)
    out = tmp_path / "out.safetensors"
    adapters = (str(saved(tmp_path / "a.safetensors", tensors)),)
    report = merge.run(merge.Request(model=str(base), adapters=adapters, out=out))
    assert report.ok, report.findings
    up, down = (tensors[f"{module}.lora_{side}.weight"].double() for side in ("up", "down"))
    assert torch.equal(TensorFile(out).read(f"{prefix}my.own.fc1.weight"), (weight.double() + up @ down).float())
    assert torch.equal(TensorFile(out).read(f"{prefix}other.weight"), other)


def test_a_shipped_model_is_of_its_family():
    base = open_merge_base(pico_folder())
    assert base.family == family("anima") and len(base.find_all_targets()) > 100


def test_an_adapter_of_another_family_is_told_of_a_model_of_none(tmp_path: Path):
    """No width of a family speaks against a model that is of none; that its modules are others does."""
    base = saved(tmp_path / "m.safetensors", {"my.own.fc1.weight": noise(16, 8)})
    file = saved(tmp_path / "a.safetensors", lora("lora_unet_double_blocks_0_img_mlp_0"))
    out = tmp_path / "out.safetensors"
    report = merge.run(merge.Request(model=str(base), adapters=(str(file),), out=out))
    assert report.exit_code == 1 and not out.exists()
    said = next(finding for finding in report.findings if finding.code == "ADAPTER-UNMATCHED")
    assert said.subject == "lora_unet_double_blocks_0_img_mlp_0"


# --- modules that the original keeps as one ---------------------------------------------------------------------------

QKV, MLP = "double_blocks.0.img_attn.qkv", "single_blocks.0.linear1"


def flux_tensors(width: int = 16) -> dict[str, torch.Tensor]:
    """Two fused modules of the original Flux with their biases."""
    generator = torch.Generator().manual_seed(3)
    sizes = {QKV: 3 * width, MLP: 7 * width}
    shapes = {f"{name}.weight": (rows, width) for name, rows in sizes.items()}
    shapes |= {f"{name}.bias": (rows,) for name, rows in sizes.items()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("module", [QKV, MLP])
@pytest.mark.parametrize("bias", [False, True])
def test_fused_modules_with_biases_are_changed_in_one_piece(tmp_path, module, bias):
    source = flux_tensors()
    rows, width = source[f"{module}.weight"].shape
    stem = f"lora_unet_{module.replace('.', '_')}"
    change = {f"{stem}.lora_up.weight": torch.randn(rows, 4), f"{stem}.lora_down.weight": torch.randn(4, width)}
    change |= {f"{stem}.diff_b": torch.randn(rows)} if bias else {}
    saved(tmp_path / "lora.safetensors", change)
    report, tensors = merged(write_base(tmp_path / "base.safetensors", source), tmp_path / "lora.safetensors")
    assert report.figures["tensors_adapted"] == 1 + bias
    delta = change[f"{stem}.lora_up.weight"].double() @ change[f"{stem}.lora_down.weight"].double()
    wanted = {f"{module}.weight": (source[f"{module}.weight"].double() + delta).float()}
    if bias:
        wanted[f"{module}.bias"] = source[f"{module}.bias"] + change[f"{stem}.diff_b"]
    for name, tensor in (source | wanted).items():
        torch.testing.assert_close(tensors[name], tensor, rtol=1e-6, atol=1e-6)


def test_a_fused_weight_that_cannot_be_divided_is_refused(tmp_path):
    source = flux_tensors()
    source[f"{MLP}.weight"] = torch.ones(40, 16)
    base = write_base(tmp_path / "base.safetensors", source)
    stem = f"lora_unet_{QKV.replace('.', '_')}"
    saved(tmp_path / "lora.safetensors", lora(stem, 48, 16))
    report = refused("MODEL-SHAPES", base, tmp_path / "lora.safetensors")
    assert report.findings[-1].evidence["rows"] == 40 and report.findings[-1].evidence["inputs"] == 16
