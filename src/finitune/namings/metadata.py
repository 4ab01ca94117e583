"""What an adapter file says about itself: read with distrust, kept through a conversion, corrected where it changed.

The field's texts are strings that hold numbers, JSON, "None" or nothing at all. What is kept is kept as it was; what
a conversion makes untrue is rewritten or left out; our own receipt says what was done to which file.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from finitune import __version__
from finitune.adapters import find_algorithm
from finitune.namings.hashes import compute_kohya_hashes
from finitune.report import Finding, Level

if TYPE_CHECKING:
    from torch import Tensor

    from finitune.adapters.core import AdapterSet
    from finitune.models.spec import ModelSpec

RECEIPT_METADATA_KEY = "finitune"
DIFFUSERS_METADATA_KEY = "lora_adapter_metadata"
KOHYA_DYNAMIC_VALUE = "Dynamic"
"""What kohya's tools write where modules differ."""
MODELSPEC_VERSION = "1.0.1"
MAX_METADATA_TEXT_BYTES = 2**20
MAX_METADATA_TOTAL_BYTES = 64 * 2**20
"""For all texts together; readers refuse headers over 100 MB, and the tensors need their share."""

_KOHYA_NATIVE_NETWORKS = ("lora", "loha", "lokr")
_LYCORIS_NETWORK_MODULE = "lycoris.kohya"
_LYCORIS_NAME_BY_ALGORITHM = {"lora": "locon", "oft": "diag-oft"}
_STALE_TEXT_PATTERN = re.compile(
    rf"sshs_(model|legacy)_hash|modelspec\.hash_sha256|{DIFFUSERS_METADATA_KEY}|(unet|text_encoder)(:\d+:rank)?"
)
"""Texts about the former bytes or the former naming. The last are those of cloneofsimo/lora."""


@dataclass(frozen=True)
class Receipt:
    """What was done to make a file: the verb, its sources as (name, fingerprint), and what it cost.

    `block_maps` are the re-numberings of blocks, `alpha_times` by what alpha was multiplied to mend it, {site: n}, the
    sites being those of the source.
    """

    verb: str
    sources: tuple[tuple[str, str], ...] = ()
    klass: str = ""
    errors: Mapping[str, float] = field(default_factory=dict)
    block_maps: tuple[str, ...] = ()
    alpha_times: Mapping[str, int] = field(default_factory=dict)

    def text(self) -> str:
        """The receipt as JSON."""
        sources = [{"name": name, "fingerprint": fingerprint} for name, fingerprint in self.sources]
        parts = {"version": __version__, "verb": self.verb, "sources": sources, "class": self.klass}
        parts |= {"errors": dict(self.errors), "block_maps": list(self.block_maps)}
        if self.alpha_times:
            parts["alpha_times"] = dict(self.alpha_times)
        return json.dumps(parts, ensure_ascii=False)


def read_applied_block_maps(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """The re-numberings of blocks that our receipts say were applied to a file already."""
    receipt, _ = parse_metadata_table(metadata, RECEIPT_METADATA_KEY)
    maps = receipt.get("block_maps") if receipt else None
    return tuple(str(name) for name in maps) if isinstance(maps, list) else ()


def read_applied_alpha_factors(metadata: Mapping[str, str]) -> dict[str, int]:
    """By what our receipts say that alpha was multiplied already, {site: n}."""
    receipt, _ = parse_metadata_table(metadata, RECEIPT_METADATA_KEY)
    times = receipt.get("alpha_times") if receipt else None
    return {site: n for site, n in times.items() if isinstance(n, int)} if isinstance(times, dict) else {}


def check_network_metadata(metadata: Mapping[str, str]) -> list[Finding]:
    """Warnings for what a trainer says about its network and nothing can be made of; DYNAMIC says that they differ."""
    keys = (key for key in ("ss_network_dim", "ss_network_alpha") if metadata.get(key) != KOHYA_DYNAMIC_VALUE)
    numbers = (parse_metadata_number(metadata, key)[1] for key in keys)
    return [*itertools.chain(*numbers), *parse_metadata_table(metadata, "ss_network_args")[1]]


def parse_metadata_number(metadata: Mapping[str, str], key: str) -> tuple[float | None, tuple[Finding, ...]]:
    """The number that a text states: None, without a word, where it is absent or "None"; a warning for others."""
    text = metadata.get(key, "").strip()
    if text.lower() in ("", "none", "null"):
        return None, ()
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    return (number, ()) if math.isfinite(number) else (None, (make_metadata_warning(key, text, "a number"),))


def parse_metadata_table(metadata: Mapping[str, str], key: str) -> tuple[dict[str, Any] | None, tuple[Finding, ...]]:
    """The JSON object that a text states: None, without a word, where it is absent or "None"; a warning for others."""
    text = metadata.get(key, "").strip()
    if text.lower() in ("", "none", "null"):
        return None, ()
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        table = None
    return (table, ()) if isinstance(table, dict) else (None, (make_metadata_warning(key, text, "a JSON table"),))


def make_metadata_warning(key: str, text: str, what: str) -> Finding:
    """The warning for a text that is not what its key promises."""
    return Finding(
        Level.WARNING,
        "METADATA-UNREADABLE",
        key,
        f"the metadata's {key} is not {what}: {text[:40]!r}",
        {"length": len(text)},
        "It is kept as it is, and not relied on.",
    )


def build_adapter_metadata(
    source: Mapping[str, str], adapter: AdapterSet, family: ModelSpec | None, receipt: Receipt, own: Mapping[str, str]
) -> tuple[dict[str, str], list[Finding]]:
    """The texts of a new file: the source's as far as they still hold, corrected, with our receipt; and the notes.

    `own` are texts that the spelling itself needs. Texts over 1 MiB, and the largest of all where they exceed 64 MiB
    together, are left out with a note.
    """
    kept, findings = drop_oversized_texts(
        {key: text for key, text in source.items() if not _STALE_TEXT_PATTERN.fullmatch(key)}
    )
    kept |= build_network_texts(kept, adapter)
    if family is not None:
        kept |= build_family_texts(kept, family)
    maps = dict.fromkeys((*read_applied_block_maps(source), *receipt.block_maps))
    before, now = read_applied_alpha_factors(source), receipt.alpha_times
    times = {site: before.get(site, 1) * now.get(site, 1) for site in (*before, *now)}
    kept[RECEIPT_METADATA_KEY] = replace(receipt, block_maps=tuple(maps), alpha_times=times).text()
    return {"format": "pt", **kept, **own}, findings


def drop_oversized_texts(texts: Mapping[str, str]) -> tuple[dict[str, str], list[Finding]]:
    """The texts without those that would make a header too large, and a note for each that is left out."""
    sizes = {key: len(text.encode(errors="replace")) for key, text in texts.items()}
    total = sum(sizes.values())
    dropped: list[str] = []
    for key in sorted(sizes, key=lambda key: -sizes[key]):
        if sizes[key] > MAX_METADATA_TEXT_BYTES or total > MAX_METADATA_TOTAL_BYTES:
            dropped.append(key)
            total -= sizes[key]
    findings = [
        Finding(
            Level.NOTE,
            "METADATA-TOO-LARGE",
            key,
            f"the metadata's {key} of {sizes[key]} bytes is left out",
            {"bytes": sizes[key], "limit_bytes": MAX_METADATA_TEXT_BYTES},
            "Programs read the whole header before the first tensor. The source file still has the text.",
        )
        for key in dropped
    ]
    return {key: text for key, text in texts.items() if key not in dropped}, findings


def build_network_texts(source: Mapping[str, str], adapter: AdapterSet) -> dict[str, str]:
    """kohya's texts about the network, as the tensors now are: module, dim, alpha and args."""
    names = {site.algorithm for site in adapter.sites.values()}
    ranks = (find_algorithm(site.algorithm).rank(site) for site in adapter.sites.values())
    ranked = [rank for rank in ranks if rank is not None]
    alphas = [site.alpha for site in adapter.sites.values() if site.alpha is not None]
    texts: dict[str, str] = {}
    if ranked:
        texts |= {
            "ss_network_dim": format_one_or_dynamic(ranked),
            "ss_network_alpha": format_one_or_dynamic(alphas or ranked),
        }
    args, _ = parse_metadata_table(source, "ss_network_args")
    module, args = choose_network_module(source.get("ss_network_module", ""), args or {}, names)
    texts["ss_network_module"] = module
    return {**texts, "ss_network_args": json.dumps(args, ensure_ascii=False)} if args else texts


def choose_network_module(module: str, args: Mapping[str, Any], names: set[str]) -> tuple[str, dict[str, Any]]:
    """The module that makes such a network and its arguments: the source's where it still says these algorithms."""
    trained = names - {"full", "norm"} or names
    name = next(iter(sorted(trained)), "lora")
    native = module.startswith("networks.") and not module.endswith(("loha", "lokr"))
    if native and trained == {"lora"}:
        return module, dict(args)
    rest = {key: value for key, value in args.items() if key not in ("algo", "factor")}
    if module == _LYCORIS_NETWORK_MODULE or name not in _KOHYA_NATIVE_NETWORKS or len(trained) > 1:
        algo = _LYCORIS_NAME_BY_ALGORITHM.get(name, name)
        former = str(args.get("algo", "")).lower()
        return _LYCORIS_NETWORK_MODULE, dict(args) if former in (algo, name) else {**rest, "algo": algo}
    return f"networks.{name}", dict(args) if module == f"networks.{name}" else rest


def format_one_or_dynamic(numbers: Sequence[float]) -> str:
    """The number that all of them are, as kohya writes it, or DYNAMIC where they differ."""
    return f"{numbers[0]:.17g}" if len(set(numbers)) == 1 else KOHYA_DYNAMIC_VALUE


def build_family_texts(source: Mapping[str, str], family: ModelSpec) -> dict[str, str]:
    """The texts that name the model family; title, date and whatever else is kept as it was."""
    facts = family.adapters
    texts = {"modelspec.sai_model_spec": source.get("modelspec.sai_model_spec", MODELSPEC_VERSION)}
    if facts.architecture:
        texts["modelspec.architecture"] = facts.architecture
    prediction = source.get("modelspec.prediction_type")
    texts["modelspec.prediction_type"] = correct_prediction_type(prediction, facts.prediction_type)
    stated = source.get("ss_base_model_version")
    if facts.base_model_versions and stated not in facts.base_model_versions:
        texts["ss_base_model_version"] = facts.base_model_versions[0]
    return texts


def correct_prediction_type(stated: str | None, family: str) -> str:
    """What the model predicts: a file may say noise or v where its family does either, but not of a flow model."""
    noise = ("epsilon", "v", "v_prediction")
    return stated if stated in noise and family in noise else family


def add_kohya_hashes(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The metadata with the hashes of these tensors in place of any others."""
    return {**metadata, **compute_kohya_hashes(tensors, metadata)}
