"""The state of a run on disk, without pickles: a folder of three files that is whole or not there.

    tensors.safetensors   the adapter (fp32), the optimiser's tensors, the average, random states
    state.json            step, epoch, manifest, versions, and everything that is no tensor
    SHA256SUMS            of the two, as `sha256sum -c SHA256SUMS` reads it

The adapter is as it is in training; schedule-free optimisers show other parameters when they evaluate.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finitune import __version__
from finitune.errors import FileError, FinituneError, NumericsError
from finitune.files.tensorfile import TensorFile
from finitune.files.writer import save_tensors, write_text
from finitune.report import Finding, Level
from finitune.training.manifest import TrainingManifest, find_manifest_changes, require_same_manifest
from finitune.training.run_folder import STATE_FOLDER_SUFFIX, open_staged_folder

_Json = Any


def encode_state_tree(tree: object, path: str, tensors: dict[str, Tensor]) -> _Json:
    """`tree` as JSON; its tensors go into `tensors`, under names that begin with `path`.

    Takes None, booleans, integers, floats, text, dtypes, tensors of any dtype, and lists, tuples, deques and
    dictionaries of them. Raises TypeError for anything else: better than a state that is not whole.
    """
    if tree is None or isinstance(tree, (bool, int, str)):
        return tree
    if isinstance(tree, float):
        return float(tree) if math.isfinite(tree) else {"$float": repr(float(tree))}
    if isinstance(tree, Tensor):
        name = path
        while name in tensors:
            name += "'"
        tensors[name] = tree.detach()
        return {"$tensor": name}
    if isinstance(tree, torch.dtype):
        return {"$dtype": str(tree).removeprefix("torch.")}
    if isinstance(tree, Mapping):
        return encode_state_mapping(tree, path, tensors)
    if isinstance(tree, (list, tuple, deque)):
        items = [encode_state_tree(item, f"{path}/{index}", tensors) for index, item in enumerate(tree)]
        if isinstance(tree, deque):
            return {"$deque": items, "maxlen": tree.maxlen}
        return {"$tuple": items} if isinstance(tree, tuple) else items
    raise TypeError(f"{path}: {type(tree).__name__} has no form in a state")


def encode_state_mapping(tree: Mapping[Any, Any], path: str, tensors: dict[str, Tensor]) -> _Json:
    """A dictionary as a JSON object where its keys are plain text, else as a list of pairs."""
    if all(isinstance(key, str) and not key.startswith("$") for key in tree):
        return {key: encode_state_tree(value, f"{path}/{key}", tensors) for key, value in tree.items()}
    pairs = [
        [encode_state_tree(key, f"{path}/key", tensors), encode_state_tree(value, f"{path}/{key}", tensors)]
        for key, value in tree.items()
    ]
    return {"$dict": pairs}


def decode_state_tree(form: _Json, tensors: Mapping[str, Tensor]) -> Any:
    """The tree that `flatten` took apart. Raises KeyError where a tensor or a form is not known."""
    if isinstance(form, list):
        return [decode_state_tree(item, tensors) for item in form]
    if not isinstance(form, dict):
        return form
    mark = next(iter(form), "")
    if mark.startswith("$"):
        return _DECODER_BY_MARK[mark](form, tensors)
    return {key: decode_state_tree(value, tensors) for key, value in form.items()}


_DECODER_BY_MARK: dict[str, Callable[[dict[str, Any], Mapping[str, Tensor]], Any]] = {
    "$float": lambda form, tensors: float(form["$float"]),
    "$tensor": lambda form, tensors: tensors[form["$tensor"]],
    "$dtype": lambda form, tensors: getattr(torch, form["$dtype"]),
    "$tuple": lambda form, tensors: tuple(decode_state_tree(form["$tuple"], tensors)),
    "$deque": lambda form, tensors: deque(decode_state_tree(form["$deque"], tensors), maxlen=form["maxlen"]),
    "$dict": lambda form, tensors: {
        decode_state_tree(key, tensors): decode_state_tree(value, tensors) for key, value in form["$dict"]
    },
}


_STATE_FORMAT_VERSION = 1
STATE_TENSORS_NAME, STATE_JSON_NAME, STATE_CHECKSUMS_NAME = "tensors.safetensors", "state.json", "SHA256SUMS"
_HASH_CHUNK_BYTES = 1 << 20
_STATE_PARTS = ("adapter", "optimizer", "average", "facts", "rng")


def get_random_states() -> dict[str, Any]:
    """The states of the generators that programs share: Python's, numpy's, torch's, and one for each CUDA device."""
    algorithm, key, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [algorithm, torch.from_numpy(np.array(key, dtype=np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Put generators back; those of CUDA devices only where there are as many as there were."""
    random.setstate(states["python"])
    algorithm, key, *rest = states["numpy"]
    np.random.set_state((algorithm, key.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


@dataclass
class RunState:
    """All that a run needs to go on to the same bits.

    `adapter`: fp32 tensors by name. `optimizer`, `average`: what their `state_dict` gives. `facts`: what is plain:
    guard, meters, quarantine, seeds. `rng`: as `get_random_states` gives it; some optimisers draw from those
    generators.
    """

    step: int
    epoch: int
    adapter: dict[str, Tensor]
    optimizer: dict[str, Any]
    average: dict[str, Any] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    rng: dict[str, Any] = field(default_factory=get_random_states)


def save_run_state(folder: Path, state: RunState, manifest: TrainingManifest) -> None:
    """Write a state to `folder`, whole or not at all; one that is there is replaced.

    Raises NumericsError (STATE-NONFINITE) before anything is written where the adapter is not finite, and FileError
    (FILE-NOT-WRITTEN) where the system refuses.
    """
    for name, tensor in state.adapter.items():
        if not bool(torch.isfinite(tensor).all()):
            raise NumericsError(
                f"{name} is not finite; this is no state to go on from.",
                code="STATE-NONFINITE",
                subject=f"step {state.step}",
                evidence={"tensor": name},
            )
    tensors: dict[str, Tensor] = {}
    parts = {part: encode_state_tree(getattr(state, part), part, tensors) for part in _STATE_PARTS}
    facts = {
        "format": _STATE_FORMAT_VERSION,
        "step": state.step,
        "epoch": state.epoch,
        "versions": {"finitune": __version__, "torch": str(torch.__version__)},
        "manifest": manifest.as_json(),
        **parts,
    }
    with open_staged_folder(folder) as place:
        save_tensors(place / STATE_TENSORS_NAME, tensors)
        write_text(place / STATE_JSON_NAME, json.dumps(facts, ensure_ascii=False, allow_nan=False))
        write_text(
            place / STATE_CHECKSUMS_NAME,
            "".join(
                f"{compute_state_sha256(place / name)}  {name}\n" for name in (STATE_TENSORS_NAME, STATE_JSON_NAME)
            ),
        )


def load_run_state(folder: Path, expected: TrainingManifest | None = None) -> tuple[RunState, list[Finding]]:
    """A state that was verified, and what has changed since; the adapter's tensors are fp32 on the CPU.

    Raises FileError (STATE-DAMAGED, STATE-MISSING, STATE-VERSION), and AdapterError or UsageError (STATE-DIFFERS) for
    the state of another adapter or optimiser; with `expected` left out nothing is compared.
    """
    facts = read_verified_state_facts(folder)
    findings: list[Finding] = []
    if expected is not None:
        saved = TrainingManifest.from_json(facts["manifest"])
        require_same_manifest(saved, expected, str(folder))
        findings = find_manifest_changes(saved, expected, str(folder))
    tensors = dict(TensorFile(folder / STATE_TENSORS_NAME).tensors())
    parts = {part: decode_state_tree(facts[part], tensors) for part in _STATE_PARTS}
    parts["adapter"] = {name: tensor.float() for name, tensor in parts["adapter"].items()}
    return RunState(facts["step"], facts["epoch"], **parts), findings


def read_verified_state_facts(folder: Path) -> dict[str, Any]:
    """The facts of a state whose files are all there and have the sums that they were written with."""
    if not folder.is_dir():
        raise make_damaged_state_error(folder, "is no folder", "STATE-MISSING")
    try:
        sums = (folder / STATE_CHECKSUMS_NAME).read_text(encoding="utf-8")
        for name in (STATE_TENSORS_NAME, STATE_JSON_NAME):
            if f"{compute_state_sha256(folder / name)}  {name}" not in sums.splitlines():
                raise make_damaged_state_error(folder, f"{name} is not as it was written", file=name)
        facts = json.loads((folder / STATE_JSON_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise make_damaged_state_error(folder, f"cannot be read: {error}") from error
    if facts["format"] != _STATE_FORMAT_VERSION:
        raise make_damaged_state_error(
            folder, f"is of format {facts['format']}, this program reads {_STATE_FORMAT_VERSION}", "STATE-VERSION"
        )
    return facts


def make_damaged_state_error(folder: Path, why: str, code: str = "STATE-DAMAGED", **evidence: object) -> FileError:
    remedy = "Resume from another state, or begin from the adapter file beside it: network_weights."
    return FileError(f"{folder}: {why}.", code=code, subject=str(folder), evidence=evidence, remedy=remedy)


def compute_state_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(_HASH_CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def iterate_state_folders(folder: Path, name: str | None = None) -> Iterator[Path]:
    """The states in a folder, of the adapter `name` if one is given; whole or not."""
    own = re.compile((re.escape(name) + r"(-step\d+|-\d+)?" if name else r"[^.].*") + STATE_FOLDER_SUFFIX)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir() and own.fullmatch(path.name):
            yield path


def find_last_state(folder: Path, name: str | None = None) -> tuple[Path | None, list[Finding]]:
    """The state of the highest step that is complete and verified; damaged ones are named in findings and passed over.

    Of equal steps, the one written last.
    """
    findings: list[Finding] = []
    ranked: list[tuple[int, int, Path]] = []
    for path in iterate_state_folders(folder, name):
        try:
            step = int(json.loads((path / STATE_JSON_NAME).read_text(encoding="utf-8"))["step"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            findings.append(make_skipped_state_finding(make_damaged_state_error(path, f"cannot be read: {error}")))
        else:
            ranked.append((step, path.stat().st_mtime_ns, path))
    for _, _, path in sorted(ranked, reverse=True):
        try:
            read_verified_state_facts(path)
        except FinituneError as error:
            findings.append(make_skipped_state_finding(error))
        else:
            return path, findings
    return None, findings


def make_skipped_state_finding(error: FinituneError) -> Finding:
    """The warning that a damaged state amounts to while another one can take its place."""
    remedy = "It is passed over. Delete it."
    return Finding(Level.WARNING, error.code, error.subject, error.message, error.evidence, remedy)
