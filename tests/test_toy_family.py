"""A family is one folder and one line: a toy is added to a copy of the package, and everything knows it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "finitune"

SPEC = '''
"""Toy: a few linear layers over the colours of a small picture."""

from finitune.models.sites import AdapterSites, ComponentSites
from finitune.models.spec import FilePart, Fp16Hazard, ModelSpec

SITES = ("into", "blocks.{i}.up", "blocks.{i}.down", "out")
TOY = ModelSpec(
    name="toy",
    components=("net",),
    invariants=(),
    adapters=AdapterSites(
        components=(ComponentSites("net", ("unet",), SITES, single_file=("",)),),
        base_model_versions=("toy",),
        architecture="toy/lora",
        prediction_type="flow",
        trained={"net": r"blocks.*"},
    ),
    title="Toy",
    runtime="finitune.models.toy.model:ToyModel",
    fp16=Fp16Hazard(False, "it is small", "its making"),
    parts=(FilePart("the toy", "net", r"blocks\\.0\\.up\\.weight", "net"),),
)
'''

MODEL = '''
"""The toy in memory."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

from finitune.files.tensorfile import TensorFile
from finitune.models.loaded import LoadedModel, ModelModule
from finitune.models.toy import TOY


class ToyBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(x)))


class ToyNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(3, 16, bias=False), nn.Linear(16, 3, bias=False)
        self.blocks = nn.ModuleList(ToyBlock() for _ in range(2))

    def forward(self, x):
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class ToyEncoders:
    identity: ClassVar = {"latents.vae": "toy", "texts.encoder": "toy"}

    def latents(self, pixels):
        unit = pixels.float().div(127.5).sub(1).permute(0, 3, 1, 2)
        return torch.nn.functional.avg_pool2d(unit, 8).unsqueeze(2)

    def texts(self, captions):
        return [{"length": torch.full((1,), float(len(caption)))} for caption in captions]

    def collate(self, texts):
        return {"length": torch.stack([text["length"] for text in texts])}


@dataclass
class ToyModel(LoadedModel):
    family = TOY
    modules = (ModelModule("net", border="fp32"),)
    denoiser = "net"

    net: nn.Module
    fingerprint: str
    notes: list = field(default_factory=list)

    @classmethod
    def recognises(cls, path):
        return path.is_file() and "blocks.0.up.weight" in TensorFile(path)

    @classmethod
    def open(cls, path, files):
        file, net = TensorFile(path), ToyNet()
        net.load_state_dict(dict(file.tensors()))
        return cls(net, file.fingerprint())

    @classmethod
    def of_pipeline(cls, pipe):
        raise NotImplementedError

    @classmethod
    def build_on_meta(cls, path, files, names):
        with torch.device("meta"):
            return {"net": ToyNet()}

    def draw(self, prompts, negatives, generators, *, steps, guidance, size):
        raise NotImplementedError

    def count_denoiser_calls(self, steps, guidance):
        return steps

    def unscale_latents(self, latents):
        return latents

    def make_encoders(self, trained, limits):
        return ToyEncoders()

    def make_denoiser(self, modules):
        return lambda noisy, sigma, told: modules["net"](noisy.movedim(1, -1)).movedim(-1, 1).float()

    def put_into_pipeline(self, pipe):
        pipe.net = self.net
'''

STORY = """
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import finitune as ft
from finitune.models.loaded import find_loaded_class
from finitune.models.toy.model import ToyNet
from finitune.verbs import check, merge
from finitune.verbs.check.request import Request as CheckRequest
from finitune.verbs.shared.adapters import NamedAdapter, apply_named_adapters
from finitune.verbs.shared.model import ModelChoice, load_model
from finitune.report import Report

out, pictures = Path(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
base = out / "base.safetensors"
save_file(ToyNet().state_dict(), base)
assert find_loaded_class(base).family.name == "toy"

told = check.run(CheckRequest(paths=(base,), gpu="t4"))
assert told.figures["family"] == "toy", told.figures
assert told.figures["precision"]["precisions"]["planned-half"]["verdict"] == "works"

training = ft.train({
    "model": {"pretrained_model_name_or_path": str(base), "device": "cpu", "precision": "fp32"},
    "network": {"network_dim": 4, "network_alpha": 4},
    "training": {"max_train_steps": 3, "gradient_checkpointing": False},
    "saving": {"output_dir": str(out / "run")},
    "general": {"resolution": 64},
    "datasets": [{"subsets": [{"image_dir": pictures}]}],
})
for event in training:
    pass
assert training.report.ok and training.report.figures["sites"] == 4, training.report.findings
adapter = Path(training.report.artifacts["kohya"])
assert any(float(t.abs().max()) for name, t in load_file(adapter).items() if "lora_up" in name)

told = check.run(CheckRequest(paths=(adapter,)))
assert told.ok and told.figures["family"] == "toy", (told.figures, told.findings)
told = merge.run(merge.Request(model=str(base), adapters=(str(adapter),), out=out / "merged.safetensors"))
assert told.ok, told.findings
before, after = load_file(base), load_file(out / "merged.safetensors")
assert not torch.equal(before["blocks.0.up.weight"], after["blocks.0.up.weight"])
assert torch.equal(before["into.weight"], after["into.weight"])

x = torch.randn(4, 3)
merged = load_model(ModelChoice(str(out / "merged.safetensors"), device="cpu"))
worn = load_model(ModelChoice(str(base), device="cpu"))
apply_named_adapters(worn, [NamedAdapter(adapter)], merge_first=False, report=Report("generate"))
assert torch.allclose(worn.net(x), merged.net(x), atol=1e-5)
"""


def test_a_family_is_one_folder_and_one_line(tmp_path: Path):
    compiled = shutil.ignore_patterns("__pycache__")
    package = Path(shutil.copytree(PACKAGE, tmp_path / "src" / "finitune", ignore=compiled))
    (package / "models" / "toy").mkdir()
    (package / "models" / "toy" / "__init__.py").write_text(SPEC)
    (package / "models" / "toy" / "model.py").write_text(MODEL)
    table = package / "models" / "__init__.py"
    text = table.read_text().replace("    SDXL,\n)", "    SDXL,\n    TOY,\n)")
    table.write_text(text.replace("\n\nMODEL_FAMILIES", "\nfrom finitune.models.toy import TOY\n\nMODEL_FAMILIES", 1))
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for picture in sorted((ROOT / "examples" / "emoji_style" / "pictures").glob("*"))[:4]:
        shutil.copy(picture, pictures)
    (tmp_path / "out").mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:finitune", "-c", STORY, str(tmp_path / "out"), str(pictures)],
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
