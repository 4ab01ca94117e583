"""What can be told of a training before its model is read, and of a model that cannot be trained, in a file's terms.

A name of the optimiser, or a folder that cannot be written to, is no reason to encode a thousand pictures first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from finitune.config.schema import TrainConfig
from finitune.errors import FinituneError, UsageError
from finitune.merging.base_model import open_merge_base
from finitune.models import MODEL_FAMILIES
from finitune.models.spec import ModelSpec
from finitune.report import Finding, Level
from finitune.training.optimizers import make_optimizer, make_param_group
from finitune.training.run_folder import RUN_LOCK_NAME, RunFolder
from finitune.verbs.shared.model import choose_device, resolve_model_path
from finitune.verbs.shared.options import ModelChoice

_MODEL_OPTION = "model.pretrained_model_name_or_path"
_MODEL_REMEDY_BY_CODE = {
    "MODEL-NOT-FOUND": (
        "Name pico-anima, a diffusers folder, or the file of the diffusion transformer with qwen3 and vae beside it in "
        "[model]. Nothing is downloaded."
    ),
    "MODEL-FILES-MISSING": "Add qwen3 = 'qwen_3_06b_base.safetensors', vae = 'qwen_image_vae.safetensors' to [model].",
}
"""What to do about a model, where a command line would have flags."""


def check_train_options(config: TrainConfig) -> list[Finding]:
    """An error for each folder that cannot be written to; raises UsageError for an optimiser that cannot be made."""
    rates = config.optimizer
    group = {**make_param_group(rates.learning_rate or 1.0, None), "params": [torch.nn.Parameter(torch.zeros(2, 2))]}
    make_optimizer(rates, [group])
    return [
        finding for option, path in list_written_folders(config) if (finding := check_folder_writable(option, path))
    ]


def list_written_folders(config: TrainConfig) -> Iterator[tuple[str, Path]]:
    """The folders that a run writes to, by option."""
    yield "saving.output_dir", config.saving.output_dir
    if config.training.cache_dir:
        yield "training.cache_dir", config.training.cache_dir
    if config.logging.log_with != "none" and config.logging.logging_dir:
        yield "logging.logging_dir", config.logging.logging_dir


def check_folder_writable(option: str, path: Path) -> Finding | None:
    """The error for a folder that is none, or that nothing can be put into."""
    there = next(place for place in (path.absolute(), *path.absolute().parents) if os.path.lexists(place))
    if not there.is_dir():
        message, remedy = f"{there} is not a folder", f"Name another folder for {option}, or move that file away."
    elif not os.access(there, os.W_OK | os.X_OK):
        message, remedy = f"{there} may not be written to", f"Change its permissions, or name another {option}."
    else:
        return None
    evidence: dict[str, object] = {"option": option, "folder": str(path)}
    return Finding(Level.ERROR, "FILE-NOT-WRITTEN", option, f"{option} = {path}: {message}", evidence, remedy)


def choose_training_device(config: TrainConfig) -> str:
    """The device to train on; raises UsageError (DEVICE-NOT-THERE) where there is no such device."""
    name = config.model.device
    try:
        return choose_device(name)
    except UsageError as error:
        why = error.message.removeprefix(f"--device {name}: ").partition(". ")[0]
        raise UsageError(
            f"device = {name!r}: {why}",
            code=error.code,
            subject="model.device",
            evidence={"device": name},
            remedy="Write device = 'cpu', or 'auto', which takes the first GPU if there is one.",
        ) from error


@contextmanager
def hold_run_folder(folder: RunFolder) -> Iterator[None]:
    """The run's folder, locked; one that was made for it and has nothing in it at the end goes again."""
    fresh = not folder.path.exists()
    with folder:
        try:
            yield
        finally:
            if fresh and {path.name for path in folder.path.iterdir()} <= {RUN_LOCK_NAME}:
                with suppress(OSError):  # Windows keeps a file that is open
                    (folder.path / RUN_LOCK_NAME).unlink()
                    folder.path.rmdir()


@contextmanager
def explain_model_errors(choice: ModelChoice) -> Iterator[None]:
    """Errors of loading a model say what it is instead, and name the options of [model] in place of flags.

    Raises them with the code MODEL-OTHER-FAMILY where it is a model of another family, as it is otherwise.
    """
    try:
        yield
    except FinituneError as error:
        other = None if error.code == "MODEL-IS-ADAPTER" else find_other_family(resolve_model_path(choice.model))
        if other:
            error.code, error.subject = "MODEL-OTHER-FAMILY", _MODEL_OPTION
            trained = " and ".join(family.title for family in MODEL_FAMILIES if family.runtime)
            error.message = f"{choice.model} is of {other.title}; adapters are trained here for {trained} alone"
            error.evidence |= {"file": choice.model, "family": other.name}
            error.remedy = (
                f"Name a model of {trained}, and look through the other options, too: they suit another model."
            )
        elif error.code in _MODEL_REMEDY_BY_CODE:
            error.subject, error.remedy = _MODEL_OPTION, _MODEL_REMEDY_BY_CODE[error.code]
            error.message = error.message.replace("--", "")
        error.remedy = error.remedy.replace("dit=", "pretrained_model_name_or_path=")
        raise


def find_other_family(path: Path) -> ModelSpec | None:
    """The family of a model that cannot be trained, by names and shapes in its headers; None where none is known."""
    with suppress(FinituneError, OSError):
        family = open_merge_base(path).family
        return family if family and not family.runtime else None
    return None
