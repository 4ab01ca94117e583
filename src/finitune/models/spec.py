"""What we know of a model family, as data."""

from __future__ import annotations

from dataclasses import dataclass

from finitune.models.sites import AdapterSites


@dataclass(frozen=True)
class ModelSpec:
    """A model family: its name, its components in the order they run, and what every correct host keeps to.

    `invariants` are (name, sentence) pairs: facts about conditioning and sampling that no tensor records, and that
    a black or muddled picture should be checked against when precision is acquitted. `adapters` is where its
    adapters lie.
    """

    name: str
    components: tuple[str, ...]
    invariants: tuple[tuple[str, str], ...]
    adapters: AdapterSites
    title: str
