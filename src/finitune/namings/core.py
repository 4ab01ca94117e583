"""What reading and writing an adapter file speak of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from finitune.models.sites import RowDivision
from finitune.report import Finding, Level

if TYPE_CHECKING:
    from finitune.adapters.core import AdapterSet
    from finitune.models.spec import ModelSpec

PEFT_TENSORS_FILE_NAME, PEFT_CONFIG_FILE_NAME = "adapter_model.safetensors", "adapter_config.json"
"""What the files of a PEFT folder are called."""

TensorStatus = Literal["applied", "explained", "unmatched"]
"""What became of a tensor: it serves a site; it serves none, for a reason that is told; its name matches nothing.

The reason may be harmless (a helper of the program that trained it), or the error that ended its module."""


@dataclass(frozen=True)
class SiteTarget:
    """Where a module name of a file lands: a component, and the concrete sites that its rows are (see Place).

    `transposed` is said of a checkpoint's tensor alone: its inputs come first.
    """

    component: str
    sites: tuple[str, ...]
    division: RowDivision = "equal"
    swapped: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class AmbiguityOptions:
    """What only a person can tell where a file does not: see the findings that ask.

    They are ADAPTER-UNDECIDED, ADAPTER-ALPHA and ADAPTER-SCALE-UNKNOWN. `dora_side` is the side of magnitudes whose
    shape fits both, `glora_order` that of the factors of a square weight (the "old" is of 2023), `zero_alpha` what
    alpha 0 means, `scale` the scale (alpha / rank) of modules for which nothing states one.
    """

    dora_side: Literal["out", "in"] | None = None
    glora_order: Literal["new", "old"] | None = None
    zero_alpha: Literal["rank", "zero"] | None = None
    scale: float | None = None


def find_adapter_tensor_file(path: Path) -> Path:
    """The file with an adapter's tensors: a folder of PEFT's has it inside."""
    return path / PEFT_TENSORS_FILE_NAME if path.is_dir() else path


@dataclass(frozen=True)
class TensorRecord:
    """What became of one tensor of a file: the site and role it serves, or why it serves none."""

    key: str
    fate: TensorStatus
    site: str = ""
    role: str = ""
    why: str = ""


@dataclass(frozen=True)
class ParsedAdapter:
    """An adapter file as read: the adapter, what the file is, every tensor accounted for, and what was found.

    `spelling` is the name of one of SPELLINGS, `family` is None where no table knows the modules. The findings never
    hide a tensor: one that is "unmatched" in the ledger has a finding of level error, and so has a module that is known
    and cannot be read, whose tensors are "explained" by that error. `split_scale` are sites whose LoRA was trained as n
    parts and acts at 1/n of its strength, {site: n} (the finding ADAPTER-SPLIT-SCALE).
    """

    adapter: AdapterSet
    spelling: str
    family: ModelSpec | None
    ledger: tuple[TensorRecord, ...]
    findings: tuple[Finding, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    split_scale: Mapping[str, int] = field(default_factory=dict)

    @property
    def matched(self) -> int:
        """How many tensors serve a site."""
        return sum(line.fate == "applied" for line in self.ledger)

    @property
    def unmatched(self) -> tuple[TensorRecord, ...]:
        """The tensors whose names match nothing."""
        return tuple(line for line in self.ledger if line.fate == "unmatched")

    @property
    def errors(self) -> tuple[Finding, ...]:
        """What is wrong with the file: the findings of level error."""
        return tuple(finding for finding in self.findings if finding.level is Level.ERROR)

    @property
    def left_out(self) -> tuple[TensorRecord, ...]:
        """The tensors that the adapter lacks though they may matter: unmatched, or of a module that an error ended."""
        ended = {error.message for error in self.errors}
        lost = (line for line in self.ledger if line.fate == "unmatched" or line.why in ended)
        return tuple(lost)
