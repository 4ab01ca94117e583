"""VeRA: random matrices that all modules share, with PEFT as the judge of files, weights and results."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from finitune.adapters import AdapterSet, SiteAdapter
from finitune.adapters.convert import convert_adapter_to_lora
from finitune.adapters.core import Target
from finitune.adapters.layer import attach_adapters
from finitune.adapters.vera import VeRA, draw_projections
from finitune.adapters.weight import compute_adapted_weight
from finitune.errors import AdapterError
from finitune.files.tensorfile import TensorFile
from finitune.files.writer import save_tensors
from finitune.models import MODEL_FAMILIES
from finitune.namings.loaders import predict_all_loaders
from finitune.namings.read import read_adapter
from finitune.namings.write import require_spellable, write_adapter

ANIMA = next(one for one in MODEL_FAMILIES if one.name == "anima")
SHAPES = {"transformer_blocks.0.attn1.to_q": (12, 8), "transformer_blocks.0.ff.net.2": (8, 20)}


class Block(nn.Module):
    """A model with two Linears of different sizes, called as Anima's are."""

    def __init__(self) -> None:
        super().__init__()
        for name, (out, into) in SHAPES.items():
            parent, (*path, last) = self, name.split(".")
            for part in path:
                if not hasattr(parent, part):
                    parent.add_module(part, nn.Module())
                parent = getattr(parent, part)
            parent.add_module(last, nn.Linear(into, out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(next(iter(SHAPES)))(x)


@pytest.fixture
def trained(tmp_path: Path) -> tuple[nn.Module, Path]:
    """A PEFT model with noise in its vectors, and the folder that PEFT saved of it."""
    from peft import VeraConfig, get_peft_model

    torch.manual_seed(0)
    config = VeraConfig(r=4, target_modules=list(SHAPES), projection_prng_key=7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(Block(), config)
        for name, parameter in model.named_parameters():
            if "vera_lambda" in name:
                parameter.data.normal_()
        model.save_pretrained(tmp_path / "peft")
    return model, tmp_path / "peft"


def read(folder: Path, **known: object):
    return read_adapter(TensorFile(folder / "adapter_model.safetensors"), ANIMA, **known)  # type: ignore[arg-type]


def test_peft_s_file_is_read_as_the_weights_that_peft_makes(trained):
    model, folder = trained
    reading = read(folder)
    assert not reading.errors and all(line.fate == "applied" for line in reading.ledger)
    assert set(reading.adapter.sites) == {f"transformer.{name}" for name in SHAPES}
    first, second = (one.tensors["projection_a"] for one in reading.adapter.sites.values())
    assert first.shape == (4, 20) and torch.equal(first, second)
    for name in SHAPES:
        layer = model.base_model.model.get_submodule(name)
        base = layer.get_base_layer().weight.detach().double()
        ours = compute_adapted_weight(base, reading.adapter[f"transformer.{name}"]) - base
        torch.testing.assert_close(ours.float(), layer.get_delta_weight("default"), rtol=1e-5, atol=1e-6)


def test_attached_it_answers_as_peft_does_and_shares_one_copy(trained):
    model, folder = trained
    adapters, plain = read(folder).adapter.component("transformer"), Block()
    plain.load_state_dict(model.unload().state_dict())
    with attach_adapters(plain, adapters, trainable=True) as ours:
        held = [ours.get_submodule(name).held[0] for name in SHAPES]
        assert held[0].projection_a is held[1].projection_a
        assert {name for name, _ in held[0].named_parameters()} == {"lambda_b", "lambda_d"}
        for name, (_, into) in SHAPES.items():
            x = torch.randn(5, into)
            merged = compute_adapted_weight(plain.get_submodule(name).base.weight.detach(), adapters[name])
            wanted = x @ merged.T + plain.get_submodule(name).base.bias
            torch.testing.assert_close(ours.get_submodule(name)(x), wanted, rtol=1e-4, atol=1e-5)


def test_what_is_written_peft_loads_and_we_read_back(trained, tmp_path):
    from peft import PeftModel

    model, folder = trained
    adapter = read(folder).adapter
    written = write_adapter(adapter, ANIMA, "peft")
    assert sorted(key for key in written.tensors if "vera_A" in key) == ["base_model.vera_A"]
    out = tmp_path / "ours"
    out.mkdir()
    save_tensors(out / "adapter_model.safetensors", written.tensors, written.metadata)
    (out / "adapter_config.json").write_text(json.dumps(written.config), encoding="utf-8")
    assert written.config is not None and written.config["projection_prng_key"] == 7
    for site, one in read(out).adapter.sites.items():
        assert all(torch.equal(tensor, adapter[site].tensors[role]) for role, tensor in one.tensors.items())
    deltas = {name: model.base_model.model.get_submodule(name).get_delta_weight("default") for name in SHAPES}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = PeftModel.from_pretrained(Block(), out)
    for name, delta in deltas.items():
        assert torch.equal(again.base_model.model.get_submodule(name).get_delta_weight("default"), delta)


def test_projections_that_a_file_leaves_out_are_drawn_as_peft_draws_them(trained, tmp_path):
    _, folder = trained
    whole, bare = read(folder).adapter, tmp_path / "bare"
    bare.mkdir()
    file = TensorFile(folder / "adapter_model.safetensors")
    save_tensors(bare / "adapter_model.safetensors", {k: file.read(k) for k in file if "lambda" in k}, {})
    (bare / "adapter_config.json").write_text((folder / "adapter_config.json").read_text(), encoding="utf-8")
    unknown = read(bare)
    assert {error.code for error in unknown.errors} == {"ADAPTER-PROJECTION"}
    known = read(bare, shapes={f"transformer.{name}": shape for name, shape in SHAPES.items()})
    assert not known.errors
    for site, one in known.adapter.sites.items():
        assert torch.equal(one.tensors["projection_b"], whole[site].tensors["projection_b"])


def made(**changed: torch.Tensor) -> AdapterSet:
    target = Target(torch.zeros(12, 8), rank=3)
    shared = VeRA().draw_shared(list(SHAPES.values()), target)
    sites = {}
    for i, (name, shape) in enumerate(SHAPES.items()):
        one = VeRA().init(Target(torch.zeros(shape), rank=3, shared=shared), torch.Generator())
        sites[f"transformer.{name}"] = one.with_tensors(**(changed if i else {}))
    return AdapterSet(sites)


def test_spellings_without_a_place_for_shared_tensors_refuse_it():
    for spelling in ("kohya", "comfy", "diffusers"):
        with pytest.raises(AdapterError) as caught:
            write_adapter(made(), ANIMA, spelling)
        assert caught.value.code == "WRITE-CANNOT-SAY"
        with pytest.raises(AdapterError):
            require_spellable(made().sites, spelling)
    require_spellable(made().sites, "peft")
    with pytest.raises(AdapterError) as caught:
        write_adapter(made(projection_a=torch.ones(3, 20)), ANIMA, "peft")
    assert caught.value.code == "WRITE-SHARED"


def test_programs_that_were_not_tried_are_not_known(trained):
    told = {one.loader: one.verdict.value for one in predict_all_loaders(read(trained[1]))}
    assert told["PEFT"] == "yes" and set(told.values()) == {"yes", "no"}


def test_as_a_lora_it_is_the_same_change():
    one = made()["transformer.transformer_blocks.0.attn1.to_q"].with_tensors(lambda_b=torch.randn(12))
    lora = convert_adapter_to_lora(one, (12, 8)).adapter
    base = torch.randn(12, 8, dtype=torch.float64)
    torch.testing.assert_close(compute_adapted_weight(base, lora), compute_adapted_weight(base, one), atol=1e-6, rtol=0)
    with pytest.raises(AdapterError, match="base weight"):
        convert_adapter_to_lora(one)


def test_it_learns_the_vectors_alone():
    a, b = draw_projections(0, 3, 12, 20)
    torch.manual_seed(1)
    root, target = Block(), torch.randn(64, 12)
    x, before = torch.randn(64, 8), (a.clone(), b.clone())
    with attach_adapters(root, made().component("transformer"), trainable=True) as model:
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
        trainable = [p for p in model.parameters() if p.requires_grad and p.ndim == 1]
        losses = []
        for _ in range(40):
            loss = (model(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[0] and trainable
    assert torch.equal(a, before[0]) and torch.equal(b, before[1])


def test_a_change_in_another_dtype_is_compared_by_its_vectors():
    from finitune.adapters.narrow import narrow_adapter

    one = made()["transformer.transformer_blocks.0.attn1.to_q"].with_tensors(lambda_b=torch.randn(12))
    assert 0 < narrow_adapter(one, torch.bfloat16).error < 2**-7
    assert isinstance(one, SiteAdapter)
