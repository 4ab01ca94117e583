"""The state of a run on disk, without pickles: a folder of three files that is whole or not there.

    tensors.safetensors   the adapter (fp32), the optimiser's tensors, the average, random states
    state.json            step, epoch, manifest, versions, and everything that is no tensor
    SHA256SUMS            of the two, as `sha256sum -c SHA256SUMS` reads it

The adapter is as it is in training; schedule-free optimisers show other parameters when they evaluate.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator, Mapping
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
from finitune.training.manifest import Manifest, demand_same, what_changed
from finitune.training.staged import staged_folder
from finitune.training.tree import flatten, restore

FORMAT = 1
TENSORS, FACTS, SUMS = "tensors.safetensors", "state.json", "SHA256SUMS"
SUFFIX = "-state"
PIECE_BYTES = 1 << 20
PARTS = ("adapter", "optimizer", "average", "facts", "rng")


def random_states() -> dict[str, Any]:
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
    guard, meters, quarantine, seeds. `rng`: as `random_states` gives it; some optimisers draw from those generators.
    """

    step: int
    epoch: int
    adapter: dict[str, Tensor]
    optimizer: dict[str, Any]
    average: dict[str, Any] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    rng: dict[str, Any] = field(default_factory=random_states)


def save_state(folder: Path, state: RunState, manifest: Manifest) -> None:
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
    parts = {part: flatten(getattr(state, part), part, tensors) for part in PARTS}
    facts = {
        "format": FORMAT,
        "step": state.step,
        "epoch": state.epoch,
        "versions": {"finitune": __version__, "torch": str(torch.__version__)},
        "manifest": manifest.as_json(),
        **parts,
    }
    with staged_folder(folder) as place:
        save_tensors(place / TENSORS, tensors)
        write_text(place / FACTS, json.dumps(facts, ensure_ascii=False, allow_nan=False))
        write_text(place / SUMS, "".join(f"{sha256_of(place / name)}  {name}\n" for name in (TENSORS, FACTS)))


def load_state(folder: Path, expected: Manifest | None = None) -> tuple[RunState, list[Finding]]:
    """A state that was verified, and what has changed since; the adapter's tensors are fp32 on the CPU.

    Raises FileError (STATE-DAMAGED, STATE-MISSING, STATE-VERSION), and AdapterError or UsageError (STATE-DIFFERS) for
    the state of another adapter or optimiser; with `expected` left out nothing is compared.
    """
    facts = verified(folder)
    findings: list[Finding] = []
    if expected is not None:
        saved = Manifest.from_json(facts["manifest"])
        demand_same(saved, expected, str(folder))
        findings = what_changed(saved, expected, str(folder))
    tensors = dict(TensorFile(folder / TENSORS).tensors())
    parts = {part: restore(facts[part], tensors) for part in PARTS}
    parts["adapter"] = {name: tensor.float() for name, tensor in parts["adapter"].items()}
    return RunState(facts["step"], facts["epoch"], **parts), findings


def verified(folder: Path) -> dict[str, Any]:
    """The facts of a state whose files are all there and have the sums that they were written with."""
    if not folder.is_dir():
        raise damaged(folder, "is no folder", "STATE-MISSING")
    try:
        sums = (folder / SUMS).read_text(encoding="utf-8")
        for name in (TENSORS, FACTS):
            if f"{sha256_of(folder / name)}  {name}" not in sums.splitlines():
                raise damaged(folder, f"{name} is not as it was written", file=name)
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged(folder, f"cannot be read: {error}") from error
    if facts["format"] != FORMAT:
        raise damaged(folder, f"is of format {facts['format']}, this program reads {FORMAT}", "STATE-VERSION")
    return facts


def damaged(folder: Path, why: str, code: str = "STATE-DAMAGED", **evidence: object) -> FileError:
    """What is said of a state that cannot be gone on from."""
    remedy = "Resume from another state, or begin from the adapter file beside it: network_weights."
    return FileError(f"{folder}: {why}.", code=code, subject=str(folder), evidence=evidence, remedy=remedy)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def state_folders(folder: Path, name: str | None = None) -> Iterator[Path]:
    """The states in a folder, of the adapter `name` if one is given; whole or not."""
    own = re.compile((re.escape(name) + r"(-step\d+|-\d+)?" if name else r"[^.].*") + SUFFIX)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir() and own.fullmatch(path.name):
            yield path


def last_state(folder: Path, name: str | None = None) -> tuple[Path | None, list[Finding]]:
    """The state of the highest step that is complete and verified; damaged ones are named in findings and passed over.

    Of equal steps, the one written last.
    """
    findings: list[Finding] = []
    ranked: list[tuple[int, int, Path]] = []
    for path in state_folders(folder, name):
        try:
            step = int(json.loads((path / FACTS).read_text(encoding="utf-8"))["step"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            findings.append(passed_over(damaged(path, f"cannot be read: {error}")))
        else:
            ranked.append((step, path.stat().st_mtime_ns, path))
    for _, _, path in sorted(ranked, reverse=True):
        try:
            verified(path)
        except FinituneError as error:
            findings.append(passed_over(error))
        else:
            return path, findings
    return None, findings


def passed_over(error: FinituneError) -> Finding:
    """The warning that a damaged state amounts to while another one can take its place."""
    remedy = "It is passed over. Delete it."
    return Finding(Level.WARNING, error.code, error.subject, error.message, error.evidence, remedy)
