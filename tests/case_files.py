"""What the tests of cases from the field share: small files, and a command line with the report that it prints."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from finitune.cli import main
from finitune.files.tensorfile import TensorFile
from finitune.namings.core import ParsedAdapter
from finitune.namings.read import read_adapter
from finitune.namings.resolve import Resolver
from tests.adapter_files import lora, noise

Told = dict[str, Any]


def told(*words: object) -> tuple[int, Told]:
    """The exit code of a command line and the report that it prints."""
    out = io.StringIO()
    with redirect_stdout(out):
        code = main([*map(str, words), "--json"])
    return code, json.loads(out.getvalue())


def saved(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> Path:
    save_file(dict(tensors), path, None if metadata is None else dict(metadata))
    return path


def scaled(module: str, *sizes: int, alpha: float, words: str = "lora_down.weight lora_up.weight"):
    """A LoRA whose alpha is stated, so that alpha is not the rank."""
    return lora(module, *sizes, words=words) | {f"{module}.alpha": torch.tensor(alpha)}


def own_model(path: Path, *names: str, shape: tuple[int, int] = (16, 8)) -> Path:
    """The checkpoint of a model that no table knows."""
    return saved(path, {f"{name}.weight": noise(*shape, seed=i) for i, name in enumerate(names)})


def read_for(file: Path, model: Path) -> ParsedAdapter:
    """An adapter file as of a model that no table knows, whose checkpoint names its modules."""
    shapes = {key.removesuffix(".weight"): shape for key, shape in TensorFile(model).shapes.items()}
    known = {f"transformer.{name}": shape for name, shape in shapes.items()}
    return read_adapter(TensorFile(file), resolver=Resolver.of_modules(shapes), shapes=known)


def by_code(report: Told) -> dict[str, Told]:
    return {finding["code"]: finding for finding in report["findings"]}


def named(module: str, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors of one module, by role."""
    return {f"{module}.{role}": tensor for role, tensor in tensors.items()}


def only(path: Path, *words: object) -> Told:
    """The one finding with which a file is refused; it names the file and the way out."""
    code, report = told("check", path, *words)
    (finding,) = report["findings"]
    assert code == 1 and finding["level"] == "error" and finding["remedy"]
    assert finding["subject"] == str(path) and str(path) in finding["message"]
    return finding
