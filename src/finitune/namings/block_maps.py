"""An adapter for a variant of its model whose blocks are numbered otherwise, by the maps that the family publishes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from finitune.adapters.core import AdapterSet
from finitune.errors import AdapterError, UsageError, suggest_nearest_name
from finitune.models.spec import ModelSpec
from finitune.namings.metadata import read_applied_block_maps
from finitune.report import Finding, Level


def renumber_family_blocks(
    adapter: AdapterSet, family: ModelSpec, name: str, metadata: Mapping[str, str]
) -> AdapterSet:
    """The adapter with its blocks re-numbered by the family's map of that name, such as "28 to 40".

    Raises UsageError (BLOCKS-UNKNOWN) for a map that the family has not, AdapterError where the file's receipt says
    that it was applied before (BLOCKS-ALREADY-MAPPED), or a block is beyond it (BLOCKS-OUT-OF-RANGE).
    """
    maps = family.adapters.block_maps
    if name not in maps:
        raise UsageError(
            f"--blocks {name}: {family.title} has no such re-numbering.{suggest_nearest_name(name, maps)}",
            code="BLOCKS-UNKNOWN",
            subject="--blocks",
            remedy=f"It is one of: {', '.join(maps) or 'none'}.",
        )
    applied = read_applied_block_maps(metadata)
    if name in applied:
        raise AdapterError(
            f"the blocks of this file were re-numbered {name} before",
            code="BLOCKS-ALREADY-MAPPED",
            subject="--blocks",
            evidence={"applied": list(applied)},
            remedy="Leave out --blocks: a second time would put every block in a wrong place.",
        )
    template, numbers = maps[name]
    sites = {renumber_site_block(site, template, numbers): one for site, one in adapter.sites.items()}
    return AdapterSet(sites, adapter.embeddings)


def find_doubtful_blocks(
    sites: Iterable[str], model: Iterable[str], family: ModelSpec, metadata: Mapping[str, str]
) -> list[Finding]:
    """A warning where an adapter ends with the last block of a smaller variant, and `model` is the larger one.

    Both are given by component and module. Nothing is warned of where the file's receipt says that the map was
    applied.
    """
    sites, model = list(sites), list(model)
    found: list[Finding] = []
    for name, (template, numbers) in family.adapters.block_maps.items():
        last, last_of_model = find_last_block(sites, template), find_last_block(model, template)
        if last != max(numbers) or last_of_model != max(numbers.values()) or name in read_applied_block_maps(metadata):
            continue
        message = (
            f"the adapter ends with block {last} and the model with block {last_of_model}: it may be of the smaller "
            "model, whose blocks are numbered otherwise"
        )
        remedy = f'If it is: finitune convert FILE --to kohya --blocks "{name}".'
        evidence: dict[str, object] = {"last_block": last, "last_block_of_model": last_of_model}
        found.append(Finding(Level.WARNING, "BLOCKS-OF-SMALLER-MODEL", template, message, evidence, remedy))
    return found


def find_last_block(sites: Iterable[str], template: str) -> int:
    head, _, _ = template.partition("{i}")
    inside = (site.partition(".")[2] for site in sites)
    numbers = (name[len(head) :].partition(".")[0] for name in inside if name.startswith(head))
    return max((int(number) for number in numbers if number.isdigit()), default=-1)


def renumber_site_block(site: str, template: str, numbers: Mapping[int, int]) -> str:
    """A site with its block's number mapped, or as it is where it lies in no such block."""
    head, _, _ = template.partition("{i}")
    component, _, name = site.partition(".")
    if not name.startswith(head):
        return site
    number, dot, rest = name[len(head) :].partition(".")
    if int(number) not in numbers:
        raise AdapterError(
            f"{site}: the model to be re-numbered from has blocks 0 to {max(numbers)}",
            code="BLOCKS-OUT-OF-RANGE",
            subject=site,
            evidence={"block": int(number), "last_block": max(numbers)},
            remedy="The adapter is of the larger model already. Leave out --blocks.",
        )
    return f"{component}.{head}{numbers[int(number)]}{dot}{rest}"
