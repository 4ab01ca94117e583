"""Small adapter files for tests, written and read back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from finitune.adapters.weight import compute_weight_delta
from finitune.files.tensorfile import TensorFile
from finitune.models import MODEL_FAMILIES
from finitune.models.spec import ModelSpec
from finitune.namings.core import ParsedAdapter
from finitune.namings.read import read_adapter
from finitune.namings.resolve import Resolver
from finitune.report import Finding, Level

TOY = Resolver.of_modules(["a.to_q", "a.to_k", "b.to_q", "conv_in", "emb"])


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def lora(module: str, out: int = 16, into: int = 8, rank: int = 2, words: str = "lora_down.weight lora_up.weight"):
    down, up = words.split()
    return {f"{module}.{down}": noise(rank, into), f"{module}.{up}": noise(out, rank, seed=1)}


def model(name: str) -> ModelSpec:
    return next(model for model in MODEL_FAMILIES if model.name == name)


def read_back(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    family: ModelSpec | None = None,
    resolver: Resolver | None = TOY,
    config: Mapping[str, object] | None = None,
    **options: object,
) -> ParsedAdapter:
    """Write tensors and texts to a file and read it: as of a family, or as of a user's own modules.

    Holds every reading to its promise: one line for each key, and an error for what is left out.
    """
    path = folder / "adapter_model.safetensors"
    save_file(
        {key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()},
        path,
        dict(metadata or {}),
    )
    if config is not None:
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    resolver = None if family is not None else resolver
    reading = read_adapter(TensorFile(path), family, resolver=resolver, **options)  # type: ignore[arg-type]
    assert [line.key for line in reading.ledger] == list(TensorFile(path))
    assert codes(reading, Level.ERROR) or not reading.left_out
    assert {line.fate for line in reading.left_out} <= {"explained", "unmatched"}
    return reading


def codes(reading: ParsedAdapter, level: Level | None = None) -> list[str]:
    return [finding.code for finding in reading.findings if level is None or finding.level is level]


def finding(reading: ParsedAdapter, code: str) -> Finding:
    (found,) = [finding for finding in reading.findings if finding.code == code]
    return found


def delta(reading: ParsedAdapter, site: str, *shape: int) -> torch.Tensor:
    """The change of a weight of zeros, fp64."""
    return compute_weight_delta(torch.zeros(shape, dtype=torch.float64), reading.adapter[site])
