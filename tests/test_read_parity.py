"""What PEFT and LyCORIS save, read: the changed model computes what theirs does."""

from __future__ import annotations

import copy
import warnings

import peft
import pytest
import torch
from torch import Tensor, nn

from finitune.adapters.weight import compute_adapted_bias, compute_adapted_weight
from finitune.files.tensorfile import TensorFile
from finitune.namings.core import ParsedAdapter
from finitune.namings.read import read_adapter
from finitune.namings.resolve import Resolver
from finitune.report import Level


class Toy(nn.Module):
    """One of each kind of layer that adapters are for."""

    def __init__(self):
        super().__init__()
        self.to_in = nn.Embedding(10, 12)
        self.block = nn.ModuleDict({"to_q": nn.Linear(12, 12), "ff": nn.Linear(12, 18)})
        self.conv = nn.Conv2d(18, 8, 3, padding=1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.block["ff"](torch.tanh(self.block["to_q"](self.to_in(tokens))))
        return self.conv(x.view(-1, 3, 3, 18).permute(0, 3, 1, 2))


TOKENS = torch.arange(18).view(2, 9) % 10
NAMES = [name for name, module in Toy().named_modules() if hasattr(module, "weight")]


@pytest.fixture
def toy() -> Toy:
    torch.manual_seed(0)
    return Toy()


def shaken(module: nn.Module) -> None:
    """Give every trainable number a value that matters."""
    torch.manual_seed(1)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn_like(parameter)


def changed(toy: Toy, reading: ParsedAdapter) -> Toy:
    """The model with the adapter merged by us, in fp64."""
    assert not [finding for finding in reading.findings if finding.level is Level.ERROR] and not reading.unmatched
    model = copy.deepcopy(toy).double()
    for site, adapter in reading.adapter.component("transformer").items():
        module = model.get_submodule(site)
        bias = compute_adapted_bias(getattr(module, "bias", None), adapter)
        module.weight = nn.Parameter(compute_adapted_weight(module.weight.data, adapter))
        if bias is not None:
            module.bias = nn.Parameter(bias.double())
    return model


def shapes(toy: Toy) -> dict[str, tuple[int, ...]]:
    return {f"transformer.{name}": tuple(toy.get_submodule(name).weight.shape) for name in NAMES}


LINEARS = ["block.to_q", "block.ff"]
ALL = [*LINEARS, "conv", "to_in"]
PEFT = {
    "lora": peft.LoraConfig(r=3, lora_alpha=6, target_modules=ALL),
    "lora, rank-stabilised": peft.LoraConfig(r=3, lora_alpha=6, use_rslora=True, target_modules=ALL),
    "lora, patterns": peft.LoraConfig(r=3, lora_alpha=6, target_modules=ALL, rank_pattern={"ff": 2},
                                      alpha_pattern={"block.to_q": 1, "^conv": 9}),
    "lora, bias": peft.LoraConfig(r=3, lora_alpha=6, lora_bias=True, target_modules=LINEARS),
    "dora": peft.LoraConfig(r=3, lora_alpha=6, use_dora=True, target_modules=ALL),
    "loha": peft.LoHaConfig(r=2, alpha=6, target_modules=[*LINEARS, "conv"]),
    "loha, tucker": peft.LoHaConfig(r=2, alpha=6, target_modules=["conv"], use_effective_conv2d=True),
    "lokr": peft.LoKrConfig(r=2, alpha=6, target_modules=[*LINEARS, "conv"]),
    "lokr, full": peft.LoKrConfig(r=20, alpha=6, target_modules=LINEARS),
    "ia3": peft.IA3Config(target_modules=["block.to_q", "block.ff", "conv"], feedforward_modules=["block.ff"]),
    "oft": peft.OFTConfig(r=0, oft_block_size=4, target_modules=["block.to_q"]),
    "oft, exact": peft.OFTConfig(r=0, oft_block_size=4, use_cayley_neumann=False, target_modules=["block.to_q"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PEFT)
def test_a_peft_folder_computes_what_peft_does(toy, tmp_path, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.get_peft_model(copy.deepcopy(toy), copy.deepcopy(PEFT[name])).eval()
        shaken(theirs)
        theirs.save_pretrained(tmp_path)
    resolver = Resolver.of_modules(NAMES)
    path = tmp_path / "adapter_model.safetensors"
    reading = read_adapter(TensorFile(path), resolver=resolver, shapes=shapes(toy))
    assert reading.spelling == "peft"
    with torch.no_grad():
        expected = theirs(TOKENS).double()
        assert (toy(TOKENS).double() - expected).norm() > 1e-2 * expected.norm()
        torch.testing.assert_close(changed(toy, reading)(TOKENS), expected, rtol=1e-4, atol=1e-5)


LYCORIS = {
    "locon": {},
    "locon, tucker": {"algo": "locon", "use_tucker": True},
    "dora": {"algo": "locon", "dora_wd": True, "wd_on_out": True},
    "loha": {},
    "lokr": {"factor": 2},
    "lokr, full": {"algo": "lokr", "factor": 2, "linear_dim": 10000, "conv_dim": 10000},
    "glora": {},
    "full": {},
    "diag-oft": {"constraint": 0.01},
    "boft": {"conv_dim": 2},
}


@pytest.mark.parametrize("name", LYCORIS)
def test_a_lycoris_file_computes_what_lycoris_does(toy, tmp_path, name):
    import lycoris

    theirs = copy.deepcopy(toy)
    options = {"algo": name, "linear_dim": 4, "linear_alpha": 2.0, "conv_dim": 4, "conv_alpha": 1.0, **LYCORIS[name]}
    targets = ["conv"] if name == "boft" else [*LINEARS, "conv"]  # 12 and 18 outputs have no butterfly
    lycoris.LycorisNetwork.apply_preset({"target_name": targets, "target_module": [], "use_fnmatch": True})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = lycoris.create_lycoris(theirs, 1.0, **options)
        network.apply_to()
    shaken(network)
    network.eval()
    network.save_weights(tmp_path / "x.safetensors", torch.float32, {})
    reading = read_adapter(TensorFile(tmp_path / "x.safetensors"), resolver=Resolver.of_modules(NAMES))
    assert reading.spelling == "lycoris" and len(reading.adapter) == len(targets)
    with torch.no_grad():
        expected = theirs(TOKENS).double()
        assert (toy(TOKENS).double() - expected).norm() > 1e-2 * expected.norm()
        torch.testing.assert_close(changed(toy, reading)(TOKENS), expected, rtol=1e-4, atol=1e-5)
