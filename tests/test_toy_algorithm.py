"""An algorithm is one file and one line: a toy is added to a copy of the package, and everything knows it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "finitune"

TOY = '''
"""Toy: dW = s * outer(left, right)."""

import torch

from finitune.adapters.algorithm import AdapterAlgorithm
from finitune.adapters.core import FactorRole, KeySuffix, SiteAdapter


class Toy(AdapterAlgorithm):
    name, title = "toy", "Toy"
    additive = trainable = True
    rowwise = factored = False
    roles = {"left": FactorRole(row_axis=0, scaled=True, up=True), "right": FactorRole()}
    terms = (frozenset(roles),)
    rank_means, alpha_means, options = "nothing", "scale", ()
    suffixes = tuple(KeySuffix(f".toy_{role}", role, ("kohya", "peft")) for role in roles)
    programs = {}

    def rank(self, adapter):
        return 1

    def shape(self, adapter):
        return tuple(adapter.tensors[role].numel() for role in ("left", "right"))

    def init(self, target, generator):
        left, right = torch.zeros(target.shape[0]), torch.randn(target.shape[1], generator=generator)
        return SiteAdapter(self.name, {"left": left, "right": right}, target.alpha)

    def delta(self, adapter, base):
        left, right = (adapter.tensors[role].to(base.dtype) for role in ("left", "right"))
        return self.scale(adapter) * torch.outer(left, right).view(base.shape)
'''

USE = """
import json
from pathlib import Path

import torch
from torch import nn

from finitune.adapters import AdapterSet, SiteAdapter, list_algorithms
from finitune.adapters.convert import convert_adapter_to_lora
from finitune.adapters.layer import attach_adapters, merge_into_weights
from finitune.adapters.weight import compute_adapted_weight
from finitune.files.tensorfile import TensorFile
from finitune.files.writer import save_tensors
from finitune.merging.combine import combine_adapters
from finitune.models import MODEL_FAMILIES
from finitune.namings.loaders import predict_all_loaders
from finitune.namings.read import read_adapter
from finitune.namings.write import write_adapter
from finitune.verbs.check import Request, run
from tests.training_made import Playground, put_pictures

family = next(one for one in MODEL_FAMILIES if one.name == "sd15")
name = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
generator = torch.Generator().manual_seed(0)
left, right = (torch.randn(320, generator=generator) for _ in range(2))
toy = SiteAdapter("toy", {"left": left, "right": right}, alpha=0.5)


def write(adapter, path):
    written = write_adapter(AdapterSet({f"unet.{name}": adapter}), family, "kohya")
    save_tensors(Path(path), written.tensors, written.metadata)
    return written


written = write(toy, "toy.safetensors")
assert "ss_network_module" not in written.metadata  # no program that is known makes it
reading = read_adapter(TensorFile(Path("toy.safetensors")), family)
assert not reading.errors, reading.errors
back = reading.adapter[f"unet.{name}"]
assert back.algorithm == "toy" and back.alpha == 0.5 and torch.equal(back.tensors["left"], left)
told = {one.loader: one.verdict.value for one in predict_all_loaders(reading)}
assert set(told.values()) == {"not known", "no"} and told["PEFT"] == "no", told

base = torch.randn(320, 320, generator=generator)
wanted = base + 0.5 * torch.outer(left, right)
assert torch.allclose(compute_adapted_weight(base, toy), wanted, atol=1e-5)
for strength in (1.0, 0.25):
    root = nn.Module()
    root.layer = nn.Linear(320, 320, bias=False)
    root.layer.weight.data.copy_(base)
    x, own = torch.randn(3, 320, generator=generator), base + strength * (wanted - base)
    with attach_adapters(root, {"layer": toy}, strength):
        assert torch.allclose(root.layer(x), x @ own.T, atol=1e-3)
    merge_into_weights(root, {"layer": [(toy, strength)]})
    assert torch.allclose(root.layer.weight, own, atol=1e-5)
summed = combine_adapters([(AdapterSet({"unet.a": toy}), 1.0), (AdapterSet({"unet.a": toy}), 0.5)]).adapter["unet.a"]
assert torch.allclose(compute_adapted_weight(base, summed) - base, 1.5 * (wanted - base), atol=1e-4)
lora = convert_adapter_to_lora(toy, rank=1).adapter
assert torch.allclose(compute_adapted_weight(base, lora), wanted, atol=1e-4)

for value, code in ((0.0, "ADAPTER-ZERO-DELTA"), (float("nan"), "ADAPTER-NONFINITE")):
    write_it = {"left": left * 0 + value, "right": right}
    prefix = "lora_unet_" + name.replace(".", "_")
    save_tensors(Path("odd.safetensors"), {f"{prefix}.toy_{role}": t for role, t in write_it.items()}, {})
    report = run(Request((Path("odd.safetensors"),)))
    assert code in {finding.code for finding in report.findings}, (code, report.findings)
report = run(Request((Path("toy.safetensors"),)))
assert report.ok and report.figures["algorithms"] == {"toy": 1}, report.figures

assert "toy" in list_algorithms(trainable=True)
playground = Playground(Path.cwd(), Path("cache"))
put_pictures(playground.pictures)
few = {"algorithm": "toy", "only_patterns": ["transformer_blocks.0.attn1.*"]}
outcome = playground.train(network=few, optimizer={"learning_rate": 2e-2, "loraplus_lr_ratio": 2.0})
assert outcome.report.ok and outcome.reason == "done", outcome.codes
first, last = outcome.validation
assert last < first, (first, last)
trained = run(Request((outcome.paths["kohya"],), model="pico-anima"))
assert trained.ok and trained.figures["algorithms"] == {"toy": 4}, trained.figures
print("known everywhere")
"""


def test_an_algorithm_is_one_file_and_one_line(tmp_path: Path):
    copy = tmp_path / "copy" / "finitune"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "adapters" / "toy.py").write_text(TOY, encoding="utf-8")
    entry = copy / "adapters" / "__init__.py"
    text = entry.read_text(encoding="utf-8")
    text = text.replace("    VeRA(),\n)", "    VeRA(),\n    Toy(),\n)").replace(
        "from finitune.adapters.vera", "from finitune.adapters.toy import Toy\nfrom finitune.adapters.vera"
    )
    entry.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", USE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(copy.parent), str(ROOT)))},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "known everywhere\n", done.stderr[-4000:]
