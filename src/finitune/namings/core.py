"""What reading and writing an adapter file speak of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from finitune.adapters.core import AdapterSet
from finitune.errors import FinituneError
from finitune.models.sites import RowDivision
from finitune.models.spec import ModelSpec
from finitune.report import Finding, Level

SCALE_UNKNOWN_CODE = "ADAPTER-SCALE-UNKNOWN"
_MAX_MODULES_NAMED = 3
"""How many modules a finding names."""
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
        return sum(line.fate == "applied" for line in self.ledger)

    @property
    def unmatched(self) -> tuple[TensorRecord, ...]:
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


@dataclass
class FindingCollector:
    """Findings with the modules that each holds for."""

    alike: dict[tuple[Level, str, str], tuple[Finding, list[str]]] = field(default_factory=dict)

    def add(
        self, level: Level, code: str, module: str, message: str, evidence: Mapping[str, object], remedy: str = ""
    ) -> None:
        """Note a finding about a module; the evidence is that of the first of its kind."""
        finding = Finding(level, code, module, message, dict(evidence), remedy)
        self.alike.setdefault((level, code, message), (finding, []))[1].append(module)

    def fail(self, module: str, error: FinituneError) -> None:
        self.add(Level.ERROR, error.code, module, error.message, error.evidence, error.remedy)

    def findings(self) -> list[Finding]:
        """All findings, each with how many modules it holds for and the first of them."""
        found: list[Finding] = []
        for finding, modules in self.alike.values():
            evidence = {**finding.evidence, "modules": len(modules), "first": modules[:_MAX_MODULES_NAMED]}
            found.append(
                Finding(finding.level, finding.code, finding.subject, finding.message, evidence, finding.remedy)
            )
        return found
