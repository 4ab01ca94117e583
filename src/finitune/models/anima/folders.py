"""Settings, tokenizers and checkpoints where a folder or a file's metadata keeps them; nothing comes from a hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import Qwen2Tokenizer, T5Tokenizer

from finitune.errors import FileError
from finitune.files.tensorfile import TensorFile
from finitune.models.anima.configs import PUBLISHED_ANIMA_SETTINGS, ComponentConfig

ANIMA_MODULES = ("transformer", "text_conditioner", "text_encoder", "vae")
ANIMA_TOKENIZERS = ("tokenizer", "t5_tokenizer")
ANIMA_CONFIG_METADATA_KEY = "finitune.config"
_USUAL_CHECKPOINT_STEMS = ("diffusion_pytorch_model", "model")


def require_subfolder(folder: Path, name: str) -> Path:
    """A subfolder that has to be there; raises FileError saying what is there."""
    place = folder / name
    if not place.is_dir():
        present = sorted(p.name for p in folder.iterdir())[:12] if folder.is_dir() else []
        raise FileError(
            f"{place} does not exist" if present else f"{folder} is not a folder, or is empty",
            code="FILE-MISSING",
            subject=str(place),
            evidence={"present": present},
            remedy="A folder for Anima has the subfolders "
            f"{', '.join((*ANIMA_MODULES, *ANIMA_TOKENIZERS, 'scheduler'))}. "
            "Folders are never fetched: download it first.",
        )
    return place


def find_component_checkpoint(folder: Path) -> Path:
    """The one checkpoint in a component's folder; raises FileError where there is none, or no saying which."""
    found = sorted(folder.glob("*.safetensors.index.json")) or sorted(folder.glob("*.safetensors"))
    usual = [path for path in found if path.name.split(".safetensors")[0] in _USUAL_CHECKPOINT_STEMS]
    choice = usual if len(found) > 1 else found
    if len(choice) == 1:
        return choice[0]
    pickles = sorted(path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt")))
    raise FileError(
        f"{folder} holds {'several checkpoints' if found else 'no checkpoint'}",
        code="FILE-AMBIGUOUS" if found else "FILE-MISSING",
        subject=str(folder),
        evidence={"found": [path.name for path in found] or pickles},
        remedy="Leave one safetensors file, or one index with its shards, in the folder."
        + (f" {pickles[0]} is a pickle: convert it to safetensors first." if pickles else ""),
    )


def read_anima_config_file(path: Path) -> ComponentConfig:
    """A component's config.json; raises FileError."""
    if not path.is_file():
        remedy = "Copy it from the diffusers release of the model."
        raise FileError(f"{path} does not exist", code="FILE-MISSING", subject=str(path), remedy=remedy)
    return parse_component_config(path, path.read_text(encoding="utf-8"))


def read_component_settings(file: TensorFile) -> dict[str, ComponentConfig]:
    """The settings by component that a file carries in its metadata; raises FileError where they make no sense."""
    stated = parse_component_config(file.path, file.metadata.get(ANIMA_CONFIG_METADATA_KEY, "{}"))
    for name, settings in stated.items():
        strange = set(settings) - set(PUBLISHED_ANIMA_SETTINGS.get(name, ())) if isinstance(settings, dict) else {name}
        if strange or name not in PUBLISHED_ANIMA_SETTINGS:
            raise FileError(
                f"the metadata {ANIMA_CONFIG_METADATA_KEY} of {file.path} sets {', '.join(sorted(strange | {name}))}",
                code="FILE-METADATA",
                subject=str(file.path),
                evidence={"component": name, "unknown": sorted(strange)},
                remedy=f"Known are {', '.join(PUBLISHED_ANIMA_SETTINGS)}, and in them what no header tells.",
            )
    return stated  # type: ignore[return-value]


def parse_component_config(path: Path, text: str) -> ComponentConfig:
    """A JSON table; raises FileError."""
    try:
        table = json.loads(text)
    except ValueError as error:
        table = error
    if not isinstance(table, dict):
        why = table if isinstance(table, ValueError) else "it is not a table"
        raise FileError(
            f"the settings in {path} cannot be read: {why}",
            code="FILE-METADATA",
            subject=str(path),
            remedy="Fetch the file again.",
        )
    return table


def load_tokenizers(folder: Path) -> dict[str, Any]:
    """Both tokenizers, from the subfolders tokenizer and t5_tokenizer; raises FileError."""
    tokenizers: dict[str, Any] = {}
    for name, cls in zip(ANIMA_TOKENIZERS, (Qwen2Tokenizer, T5Tokenizer), strict=True):
        place = require_subfolder(folder, name)
        if not (place / "tokenizer.json").is_file():
            raise FileError(
                f"{place} holds no tokenizer.json",
                code="FILE-TOKENIZER",
                subject=str(place),
                evidence={"files": sorted(file.name for file in place.iterdir())[:10]},
                remedy="Copy the tokenizer's folder from the diffusers release of the model, all files of it.",
            )
        try:
            tokenizers[name] = cls.from_pretrained(str(place), local_files_only=True)
        except Exception as error:  # whatever the tokenizers library raises, among it bare Exception
            raise FileError(
                f"the tokenizer in {place} cannot be read: {error}",
                code="FILE-TOKENIZER",
                subject=str(place),
                remedy="Fetch the tokenizer's folder again.",
            ) from error
    return tokenizers
