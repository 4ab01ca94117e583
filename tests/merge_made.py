"""Small bases with Anima's original names, and adapters for them, on disk: for every test of merging."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from finitune.report import Finding, Report
from finitune.verbs.merge import Request, run

WIDTH = 32
SITES = ("self_attn.q_proj", "self_attn.output_proj", "cross_attn.k_proj", "mlp.layer1")
SCALE = 0.5
"""alpha 2 over rank 4."""


def base_tensors(dtype: torch.dtype = torch.bfloat16, blocks: int = 2, prefix: str = "net.") -> dict[str, Tensor]:
    """A denoiser's tensors of a width that no real one has, but for the text's 1024 inputs."""
    shapes = {"x_embedder.proj.1": (WIDTH, 68), "final_layer.linear": (64, WIDTH), "t_embedding_norm": (WIDTH,)}
    for i in range(blocks):
        for name, into in (("self_attn", WIDTH), ("cross_attn", 1024)):
            shapes |= {f"blocks.{i}.{name}.{part}_proj": (WIDTH, WIDTH) for part in ("q", "output")}
            shapes |= {f"blocks.{i}.{name}.{part}_proj": (WIDTH, into) for part in ("k", "v")}
        shapes |= {f"blocks.{i}.mlp.layer1": (4 * WIDTH, WIDTH), f"blocks.{i}.mlp.layer2": (WIDTH, 4 * WIDTH)}
    generator = torch.Generator().manual_seed(1)
    return {
        f"{prefix}{name}.weight": (0.02 * torch.randn(shape, generator=generator)).to(dtype)
        for name, shape in shapes.items()
    }


def write_base(path: Path, tensors: Mapping[str, Tensor] | None = None) -> Path:
    """A base file."""
    save_file(dict(tensors or base_tensors()), path, {"note": "kept"})
    return path


def lora_tensors(
    sites: tuple[str, ...] = SITES, blocks: int = 2, size: float = 0.05, seed: int = 2, rank: int = 4
) -> dict[str, Tensor]:
    """A LoRA in kohya's spelling, alpha 2."""
    generator = torch.Generator().manual_seed(seed)
    base = base_tensors(blocks=blocks)
    tensors: dict[str, Tensor] = {}
    for i in range(blocks):
        for site in sites:
            out, into = base[f"net.blocks.{i}.{site}.weight"].shape
            module = f"lora_unet_blocks_{i}_{site.replace('.', '_')}"
            tensors[f"{module}.lora_down.weight"] = size * torch.randn(rank, into, generator=generator)
            tensors[f"{module}.lora_up.weight"] = size * torch.randn(out, rank, generator=generator)
            tensors[f"{module}.alpha"] = torch.tensor(2.0)
    return tensors


def write_lora(path: Path, **options) -> Path:
    """An adapter file."""
    save_file(lora_tensors(**options), path, {"ss_base_model_version": "anima"})
    return path


def expected(base: Mapping[str, Tensor], *loras: tuple[Mapping[str, Tensor], float]) -> dict[str, Tensor]:
    """The merged weights in fp64, by the formula as a book has it: W + sum of m * (alpha / r) * up @ down."""
    merged = {name: tensor.double() for name, tensor in base.items()}
    for tensors, strength in loras:
        for name in base:
            module = "lora_unet_" + name.removeprefix("net.").removesuffix(".weight").replace(".", "_")
            if f"{module}.lora_up.weight" in tensors:
                up, down = (tensors[f"{module}.lora_{part}.weight"].double() for part in ("up", "down"))
                scale = float(tensors[f"{module}.alpha"]) / len(down)
                merged[name] = merged[name] + strength * scale * (up @ down)
    return merged


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one to the bit."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.fixture(name="base")
def a_base(tmp_path) -> Path:
    return write_base(tmp_path / "base.safetensors")


@pytest.fixture(name="lora")
def a_lora(tmp_path) -> Path:
    return write_lora(tmp_path / "lora.safetensors")


def merged(base: Path, *adapters: object, **options) -> tuple[Report, dict[str, Tensor]]:
    """The report and the tensors of a merge that goes well."""
    out = base.with_name("out.safetensors")
    report = run(Request(model=str(base), adapters=tuple(map(str, adapters)), out=out, **options))
    assert report.ok, report.findings
    return report, load_file(out)


def refused(code: str, base: Path, *adapters: object, out: Path | None = None, **options) -> Report:
    """The report of a merge that ends with an error, and leaves every file as it was."""
    out = out or base.with_name("out.safetensors")
    before = sorted(base.parent.rglob("*"))
    report = run(Request(model=str(base), adapters=tuple(map(str, adapters)), out=out, **options))
    assert [f.code for f in report.findings if f.level.value == "error"][-1:] == [code], report.findings
    assert report.findings[-1].remedy and not report.ok
    assert sorted(base.parent.rglob("*")) == before, "something was left behind"
    return report


def finding(report: Report, code: str) -> Finding:
    """The first finding of a code."""
    return next(f for f in report.findings if f.code == code)
