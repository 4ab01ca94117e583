"""Anima as the three files that other programs use, written from a model in memory: the other half of the key maps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from finitune.errors import ModelError
from finitune.files.tensorfile import NonfiniteElements
from finitune.files.writer import save_tensors, write_bytes
from finitune.models.anima.components import note_nonfinite, refuse_nonfinite
from finitune.models.anima.configs import PUBLISHED_ANIMA_SETTINGS, ComponentConfig
from finitune.models.anima.folders import ANIMA_CONFIG_METADATA_KEY, ANIMA_TOKENIZERS
from finitune.models.anima.keys import (
    ANIMA_CONDITIONER_KEYS,
    ANIMA_DENOISER_PREFIXES,
    ANIMA_TRANSFORMER_KEYS,
    build_vae_keymap,
    infer_vae_layout,
)
from finitune.models.anima.load import AnimaParts

_FILE_NAME_BY_ROLE = {"dit": "anima.safetensors", "qwen3": "qwen3.safetensors", "vae": "vae.safetensors"}


def save_three_files(parts: AnimaParts, folder: str | Path, dtype: torch.dtype | None = None) -> dict[str, Path]:
    """Write the denoiser with its adapter, Qwen3 and the VAE under their original names, and both tokenizers.

    Tensors are stored as `dtype`, bfloat16 by default. What no header tells is put in the metadata. Returns the
    arguments of `load_three_files`. Raises NumericsError, before anything is written, where a tensor is not finite.
    """
    dtype = dtype or torch.bfloat16
    folder = Path(folder)
    files = {role: dict(list_original_tensors(parts, role)) for role in _FILE_NAME_BY_ROLE}
    for role, tensors in files.items():
        files[role] = {name: tensor.detach().to(dtype) for name, tensor in tensors.items()}
        require_all_finite(folder / _FILE_NAME_BY_ROLE[role], files[role])
    for role, tensors in files.items():
        stated = {
            ANIMA_CONFIG_METADATA_KEY: json.dumps(collect_hidden_settings(parts, role), sort_keys=True),
            "format": "pt",
        }
        save_tensors(folder / _FILE_NAME_BY_ROLE[role], tensors, stated)
    for name, content in serialise_tokenizers(parts):
        write_bytes(folder / name, content)
    return {role: folder / name for role, name in _FILE_NAME_BY_ROLE.items()} | {"tokenizers": folder}


def list_original_tensors(parts: AnimaParts, role: str) -> Iterator[tuple[str, Tensor]]:
    """(original name, tensor) of what one of the three files holds."""
    if role == "dit":
        for part, keymap in (
            (parts.transformer, ANIMA_TRANSFORMER_KEYS),
            (parts.text_conditioner, ANIMA_CONDITIONER_KEYS),
        ):
            for name, tensor in part.state_dict().items():
                yield ANIMA_DENOISER_PREFIXES[0] + require_original_name(keymap.backward(name), name), tensor
    elif role == "qwen3":
        for name, tensor in parts.text_encoder.state_dict().items():
            yield "model." + name, tensor
    else:
        state = parts.vae.state_dict()
        keymap = build_vae_keymap(*infer_vae_layout(state))
        for name, tensor in state.items():
            yield require_original_name(keymap.backward(name), name), tensor


def require_original_name(original: str | None, name: str) -> str:
    """The original name; raises ModelError where the original has no such tensor."""
    if original is None:
        raise ModelError(
            f"{name} has no name in Anima's original files",
            code="MODEL-KEYS-UNEXPECTED",
            subject=name,
            remedy="Detach adapters and other additions first; only Anima itself can be written in this layout.",
        )
    return original


def collect_hidden_settings(parts: AnimaParts, role: str) -> dict[str, ComponentConfig]:
    """By component, the settings in one of the three files that its header does not tell."""
    components = {"dit": ("transformer", "text_conditioner", "scheduler"), "qwen3": ("text_encoder",), "vae": ("vae",)}
    stated: dict[str, ComponentConfig] = {}
    for name in components[role]:
        config = getattr(parts, name).config
        config = config if isinstance(config, dict) else config.to_dict()
        stated[name] = {key: config[key] for key in PUBLISHED_ANIMA_SETTINGS[name]}
    return stated


def serialise_tokenizers(parts: AnimaParts) -> Iterator[tuple[str, bytes]]:
    """(relative name, content) of every file that both tokenizers are saved in."""
    for name in ANIMA_TOKENIZERS:
        with TemporaryDirectory() as place:
            getattr(parts, name).save_pretrained(place)
            for file in sorted(Path(place).iterdir()):
                yield f"{name}/{file.name}", file.read_bytes()


def require_all_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises NumericsError (WEIGHT-NONFINITE) where a tensor holds NaN or inf."""
    bad: dict[str, NonfiniteElements] = {}
    for name, tensor in tensors.items():
        note_nonfinite(bad, name, tensor)
    refuse_nonfinite(path, bad)
