"""What a path is, by looking into it: at the first bytes of a file, and at the names in a folder. Never by its ending,
but where the content says nothing: a configuration with a fault in its syntax has no content yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any

from finitune.datasets.cache import CACHE_KEY_DIGITS, CACHE_SOURCE_DIGITS
from finitune.datasets.picture_formats import (
    PICTURE_FORMAT_BY_EXTENSION,
    UNSUPPORTED_PICTURE_EXTENSIONS,
    detect_picture_format,
)
from finitune.errors import FileError, FinituneError, suggest_nearest_name
from finitune.files.sniff import (
    get_file_size,
    is_safetensors_start,
    is_utf8_bytes,
    make_not_safetensors_error,
    make_unreadable_file_error,
    peek_bytes,
)
from finitune.files.tensorfile import INDEX_SUFFIX, TensorFile
from finitune.importers.foreign_text import read_foreign_text
from finitune.importers.recognise import rank_config_kinds, recognise_config_kind
from finitune.models import MODEL_FAMILIES
from finitune.namings.cloneofsimo import is_cloneofsimo_key
from finitune.namings.core import PEFT_TENSORS_FILE_NAME
from finitune.namings.keys import split_adapter_key
from finitune.training.checkpoint import STATE_CHECKSUMS_NAME, STATE_JSON_NAME, iterate_state_folders
from finitune.training.run_folder import RUN_LOCK_NAME

_TENSOR_SUFFIXES = (".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin", ".gguf")
_CONFIG_SUFFIXES = (".toml", ".json", ".yaml", ".yml", ".sh", ".bat", ".ps1")
_DATASET_PROGRAMS = ("sd-scripts dataset TOML",)
_MAX_CONFIG_BYTES = 16 << 20
"""No configuration is longer; a larger text is not parsed."""
_MAX_SCANNED_NAMES = 5000
"""At most so many names in a folder are looked at to tell what it is."""
_MAX_LISTED_NAMES = 5


class PathKind(Enum):
    """What can be checked."""

    CONFIG = "training configuration"
    DATASET = "dataset"
    MODEL = "model"
    ADAPTER = "adapter"
    CACHE = "cache"
    RUN = "run"
    WORKFLOW = "ComfyUI workflow"
    PICTURE = "picture"
    PLAN = "precision plan"
    FAMILY = "model family"
    FILES = "folder of files"


def detect_path_kind(path: Path) -> PathKind:
    """What a file or folder is; raises FileError for what is not there, not whole, or of no kind that is checked."""
    if path.is_dir():
        return detect_folder_kind(path)
    if not path.exists() and str(path) in {family.name for family in MODEL_FAMILIES}:
        return PathKind.FAMILY
    get_file_size(path)
    if not path.is_file():  # a pipe or a device: reading one may never end
        raise FileError(
            f"{path} is no regular file",
            code="FILE-NOT-REGULAR",
            subject=str(path),
            remedy="Name a file or a folder.",
        )
    return detect_file_kind(path, peek_bytes(path))


def detect_file_kind(path: Path, start: bytes) -> PathKind:
    """What a file is, of which the first bytes are given; raises FileError."""
    if is_safetensors_start(start):
        return detect_tensors_kind(TensorFile(path))
    if detect_picture_format(start):
        return PathKind.PICTURE
    if path.name.endswith(INDEX_SUFFIX):
        return detect_tensors_kind(TensorFile(path))
    ending = path.suffix.lower()
    if ending in PICTURE_FORMAT_BY_EXTENSION or ending in UNSUPPORTED_PICTURE_EXTENSIONS:
        return PathKind.PICTURE  # which says what it is instead
    if (is_utf8_bytes(start) or ending in _CONFIG_SUFFIXES) and ending not in _TENSOR_SUFFIXES and start.strip():
        return detect_text_kind(path, start)
    if not start:
        remedy = "Download or write it again."
        raise FileError(
            f"{path} is empty", code="FILE-EMPTY", subject=str(path), evidence={"size_bytes": 0}, remedy=remedy
        )
    raise make_not_safetensors_error(path, start, path.stat().st_size)


def detect_tensors_kind(file: TensorFile) -> PathKind:
    """What a safetensors file is, by its tensors' names."""
    if {"identity", "source", "checksum"} <= file.metadata.keys():
        return PathKind.CACHE
    for name in file:  # some names end as only an adapter's do
        found = split_adapter_key(name)
        if is_cloneofsimo_key(name) or (found and found[1].role not in ("weight", "bias")):
            return PathKind.ADAPTER
    return PathKind.MODEL


def detect_text_kind(path: Path, start: bytes) -> PathKind:
    """What a text file is; raises FileError for text that configures nothing."""
    size = path.stat().st_size
    if b"<html" in start.lower() or start.startswith(b"version https://git-lfs") or size > _MAX_CONFIG_BYTES:
        raise make_not_safetensors_error(path, start, size)
    try:
        text = read_foreign_text(path)
    except FinituneError:
        if path.suffix.lower() in _CONFIG_SUFFIXES:
            return PathKind.CONFIG  # which tells the line
        raise make_unchecked_text_error(path, start, size) from None
    if text.language == "command line":
        return PathKind.CONFIG
    document = text.document
    if is_comfyui_workflow(document):
        return PathKind.WORKFLOW
    if isinstance(document, Mapping) and {"format", "fingerprint", "headroom_bits"} <= document.keys():
        return PathKind.PLAN
    if recognise_config_kind(document) in _DATASET_PROGRAMS:
        return PathKind.DATASET
    ours = isinstance(document, Mapping) and text.language == "TOML"
    if recognise_config_kind(document) or ours or rank_config_kinds(document):
        return PathKind.CONFIG
    raise make_unchecked_text_error(path, start, size)


def is_comfyui_workflow(document: Any) -> bool:
    """Whether a JSON document is a workflow of ComfyUI: as its editor saves it, or as its server takes it."""
    if not isinstance(document, Mapping):
        return False
    if isinstance(document.get("nodes"), list) and isinstance(document.get("links"), list):
        return True
    nodes = document.get("prompt") if isinstance(document.get("prompt"), Mapping) else document
    return bool(nodes) and all(isinstance(node, Mapping) and "class_type" in node for node in nodes.values())


def detect_folder_kind(folder: Path) -> PathKind:
    """What a folder is, by the names in it; raises FileError where there is nothing in it that is checked."""
    try:
        inside = [path for path in folder.iterdir() if not path.name.startswith(".")]
        names = {path.name for path in inside}
        if PEFT_TENSORS_FILE_NAME in names:
            return PathKind.ADAPTER
        if (
            {STATE_JSON_NAME, STATE_CHECKSUMS_NAME} <= names
            or (folder / RUN_LOCK_NAME).exists()
            or any(iterate_state_folders(folder))
        ):
            return PathKind.RUN
        # entries of a cache of ours are called by a digest of their source and one of their maker
        entry = f"{'?' * CACHE_SOURCE_DIGITS}-{'?' * CACHE_KEY_DIGITS}.safetensors"
        if any(any(place.glob(entry)) for place in (folder, folder / "latents", folder / "texts") if place.is_dir()):
            return PathKind.CACHE
        tensors = [path for path in inside if path.name.endswith((".safetensors", INDEX_SUFFIX))]
        if "model_index.json" in names or is_component_folder(folder) or any(map(is_component_folder, inside)):
            return PathKind.MODEL
        if tensors:
            return PathKind.MODEL if any(path.name.endswith(INDEX_SUFFIX) for path in tensors) else PathKind.FILES
        below = islice(folder.rglob("*"), _MAX_SCANNED_NAMES)
        if any(path.suffix.lower() in PICTURE_FORMAT_BY_EXTENSION for path in below):
            return PathKind.DATASET
    except OSError as error:
        raise make_unreadable_file_error(folder, error) from error
    raise FileError(
        f"{folder} holds nothing that is checked",
        code="FOLDER-UNKNOWN",
        subject=str(folder),
        evidence={"holds": sorted(names)[:_MAX_LISTED_NAMES], "entries": len(names)},
        remedy="Name a folder with pictures, a model, a run, a cache, or a single file.",
    )


def is_component_folder(folder: Path) -> bool:
    return (
        folder.is_dir()
        and any((folder / name).is_file() for name in ("config.json", "scheduler_config.json"))
        and any(folder.glob("*.safetensors*"))
    )


def make_unchecked_text_error(path: Path, start: bytes, size: int) -> FileError:
    told = make_not_safetensors_error(path, start, size)
    if told.code != "FILE-TEXT":
        return told
    ending = path.suffix.lower()
    near = suggest_nearest_name(ending, _CONFIG_SUFFIXES) if ending and ending not in _CONFIG_SUFFIXES else ""
    what = "JSON" if start.lstrip()[:1] in (b"{", b"[") else "plain"
    return FileError(
        f"{path} is {what} text, and no configuration, workflow or plan that is known here.{near}",
        code="FILE-TEXT",
        subject=str(path),
        evidence=told.evidence,
        remedy="Captions are checked with their pictures: name the folder. `finitune train --init` writes a "
        "configuration.",
    )
