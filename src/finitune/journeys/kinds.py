"""What a path is, by looking into it: at the first bytes of a file, and at the names in a folder. Never by its ending,
but where the content says nothing: a configuration with a fault in its syntax has no content yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any

from finitune.errors import FileError, FinituneError, did_you_mean
from finitune.files.sniff import begins_as_safetensors, explain, is_text, peek, size_of, unreadable
from finitune.files.tensorfile import INDEX_SUFFIX, TensorFile

TENSOR_ENDINGS = (".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin", ".gguf")
CONFIG_ENDINGS = (".toml", ".json", ".yaml", ".yml", ".sh", ".bat", ".ps1")
DATASETS = ("sd-scripts dataset TOML",)
TEXT_LIMIT_BYTES = 16 << 20
"""No configuration is longer; a larger text is not parsed."""
LOOKED_AT = 5000
"""At most so many names in a folder are looked at to tell what it is."""
NAMED = 5


class Kind(Enum):
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


def kind_of(path: Path) -> Kind:
    """What a file or folder is; raises FileError for what is not there, not whole, or of no kind that is checked."""
    from finitune.models import MODELS

    if path.is_dir():
        return kind_of_folder(path)
    if not path.exists() and str(path) in {family.name for family in MODELS}:
        return Kind.FAMILY
    size_of(path)
    if not path.is_file():  # a pipe or a device: reading one may never end
        raise FileError(
            f"{path} is no regular file",
            code="FILE-NOT-REGULAR",
            subject=str(path),
            remedy="Name a file or a folder.",
        )
    return kind_of_file(path, peek(path))


def kind_of_file(path: Path, start: bytes) -> Kind:
    """What a file is, of which the first bytes are given; raises FileError."""
    from finitune.datasets.signatures import EXTENSIONS, UNREAD_EXTENSIONS, format_of

    if begins_as_safetensors(start):
        return kind_of_tensors(TensorFile(path))
    if format_of(start):
        return Kind.PICTURE
    if path.name.endswith(INDEX_SUFFIX):
        return kind_of_tensors(TensorFile(path))
    ending = path.suffix.lower()
    if ending in EXTENSIONS or ending in UNREAD_EXTENSIONS:
        return Kind.PICTURE  # which says what it is instead
    if (is_text(start) or ending in CONFIG_ENDINGS) and ending not in TENSOR_ENDINGS and start.strip():
        return kind_of_text(path, start)
    raise explain(path, start, path.stat().st_size) if start else empty(path)


def kind_of_tensors(file: TensorFile) -> Kind:
    """What a safetensors file is, by its tensors' names."""
    if {"identity", "source", "checksum"} <= file.metadata.keys():
        return Kind.CACHE
    return Kind.ADAPTER if holds_adapter(file) else Kind.MODEL


def holds_adapter(names: Iterable[str]) -> bool:
    """Whether tensor names are an adapter's: some end as only adapters' do."""
    from finitune.namings.oldest import is_oldest
    from finitune.namings.suffixes import split

    plain = {"weight", "bias"}
    return any(is_oldest(name) or ((found := split(name)) and found[1].role not in plain) for name in names)


def kind_of_text(path: Path, start: bytes) -> Kind:
    """What a text file is; raises FileError for text that configures nothing."""
    from finitune.config.importers.foreign_text import read_text
    from finitune.config.importers.recognise import evidence, recognise

    size = path.stat().st_size
    if b"<html" in start.lower() or start.startswith(b"version https://git-lfs") or size > TEXT_LIMIT_BYTES:
        raise explain(path, start, size)
    try:
        text = read_text(path)
    except FinituneError:
        if path.suffix.lower() in CONFIG_ENDINGS:
            return Kind.CONFIG  # which tells the line
        raise not_checked(path, start, size) from None
    if text.language == "command line":
        return Kind.CONFIG
    document = text.document
    if is_workflow(document):
        return Kind.WORKFLOW
    if isinstance(document, Mapping) and {"format", "fingerprint", "headroom_bits"} <= document.keys():
        return Kind.PLAN
    if recognise(document) in DATASETS:
        return Kind.DATASET
    if recognise(document) or (isinstance(document, Mapping) and text.language == "TOML") or evidence(document):
        return Kind.CONFIG
    raise not_checked(path, start, size)


def is_workflow(document: Any) -> bool:
    """Whether a JSON document is a workflow of ComfyUI: as its editor saves it, or as its server takes it."""
    if not isinstance(document, Mapping):
        return False
    if isinstance(document.get("nodes"), list) and isinstance(document.get("links"), list):
        return True
    nodes = document.get("prompt") if isinstance(document.get("prompt"), Mapping) else document
    return bool(nodes) and all(isinstance(node, Mapping) and "class_type" in node for node in nodes.values())


def kind_of_folder(folder: Path) -> Kind:
    """What a folder is, by the names in it; raises FileError where there is nothing in it that is checked."""
    from finitune.namings.core import PEFT_TENSORS
    from finitune.training.folder import LOCK
    from finitune.training.state import FACTS, SUMS, state_folders

    try:
        inside = [path for path in folder.iterdir() if not path.name.startswith(".")]
        names = {path.name for path in inside}
        if PEFT_TENSORS in names:
            return Kind.ADAPTER
        if {FACTS, SUMS} <= names or (folder / LOCK).exists() or any(state_folders(folder)):
            return Kind.RUN
        if any(map(is_cache, (folder, folder / "latents", folder / "texts"))):
            return Kind.CACHE
        tensors = [path for path in inside if path.name.endswith((".safetensors", INDEX_SUFFIX))]
        if "model_index.json" in names or is_component(folder) or any(map(is_component, inside)):
            return Kind.MODEL
        if tensors:
            return Kind.MODEL if any(path.name.endswith(INDEX_SUFFIX) for path in tensors) else Kind.FILES
        if any(islice(pictures_below(folder), 1)):
            return Kind.DATASET
    except OSError as error:
        raise unreadable(folder, error) from error
    raise FileError(
        f"{folder} holds nothing that is checked",
        code="FOLDER-UNKNOWN",
        subject=str(folder),
        evidence={"holds": sorted(names)[:NAMED], "entries": len(names)},
        remedy="Name a folder with pictures, a model, a run, a cache, or a single file.",
    )


def is_component(folder: Path) -> bool:
    """Whether a folder is a component of a diffusers model: weights and their configuration."""
    return (
        folder.is_dir()
        and any((folder / name).is_file() for name in ("config.json", "scheduler_config.json"))
        and any(folder.glob("*.safetensors*"))
    )


def is_cache(folder: Path) -> bool:
    """Whether a folder holds entries of a cache of ours: files by a digest of their source and one of their maker."""
    from finitune.datasets.cache import KEY_DIGITS, SOURCE_DIGITS

    shape = f"{'?' * SOURCE_DIGITS}-{'?' * KEY_DIGITS}.safetensors"
    return folder.is_dir() and any(folder.glob(shape))


def pictures_below(folder: Path) -> Iterator[Path]:
    """Files with a picture's ending in a folder and in those inside, of the first LOOKED_AT names."""
    from finitune.datasets.signatures import EXTENSIONS

    return (path for path in islice(folder.rglob("*"), LOOKED_AT) if path.suffix.lower() in EXTENSIONS)


def files_in(folder: Path) -> list[Path]:
    """The safetensors files directly in a folder."""
    return sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("."))


def empty(path: Path) -> FileError:
    """The error for a file without content."""
    remedy = "Download or write it again."
    evidence = {"size_bytes": 0}
    return FileError(f"{path} is empty", code="FILE-EMPTY", subject=str(path), evidence=evidence, remedy=remedy)


def not_checked(path: Path, start: bytes, size: int) -> FileError:
    """The error for text that is neither a configuration nor a workflow nor a plan."""
    told = explain(path, start, size)
    if told.code != "FILE-TEXT":
        return told
    ending = path.suffix.lower()
    near = did_you_mean(ending, CONFIG_ENDINGS) if ending and ending not in CONFIG_ENDINGS else ""
    what = "JSON" if start.lstrip()[:1] in (b"{", b"[") else "plain"
    return FileError(
        f"{path} is {what} text, and no configuration, workflow or plan that is known here.{near}",
        code="FILE-TEXT",
        subject=str(path),
        evidence=told.evidence,
        remedy="Captions are checked with their pictures: name the folder. `finitune train --init` writes a "
        "configuration.",
    )
