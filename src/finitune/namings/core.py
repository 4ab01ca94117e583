"""What reading and writing an adapter file speak of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from finitune.models.sites import Division
from finitune.report import Finding

if TYPE_CHECKING:
    from finitune.adapters.core import AdapterSet
    from finitune.models.spec import ModelSpec

Fate = Literal["applied", "explained", "unmatched"]


@dataclass(frozen=True)
class Landing:
    """Where a module name of a file lands: a component, and the concrete sites that its rows are (see Place)."""

    component: str
    sites: tuple[str, ...]
    division: Division = "equal"
    swapped: bool = False


@dataclass(frozen=True)
class LedgerLine:
    """What became of one tensor of a file: the site and role it serves, or the reason that it serves none."""

    key: str
    fate: Fate
    site: str = ""
    role: str = ""
    why: str = ""


@dataclass(frozen=True)
class Reading:
    """An adapter file as read: the adapter, what the file is, every tensor accounted for, and what was found.

    `spelling` is the name of one of SPELLINGS, `family` is None where no table knows the modules. The findings never
    hide a tensor: one that is "unmatched" in the ledger has a finding of level error.
    """

    adapter: AdapterSet
    spelling: str
    family: ModelSpec | None
    ledger: tuple[LedgerLine, ...]
    findings: tuple[Finding, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def matched(self) -> int:
        """How many tensors serve a site."""
        return sum(line.fate == "applied" for line in self.ledger)

    @property
    def unmatched(self) -> tuple[LedgerLine, ...]:
        """The tensors that nothing accounts for."""
        return tuple(line for line in self.ledger if line.fate == "unmatched")
