"""What an adapter file says about itself: read with distrust, kept through a conversion, corrected where it changed.

The field's texts are strings that hold numbers, JSON, "None" or nothing at all. What is kept is kept as it was; what
a conversion makes untrue is rewritten or left out; our own receipt says what was done to which file.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from finitune import __version__
from finitune.adapters import ADAPTER_ALGORITHMS, find_algorithm
from finitune.adapters.core import AdapterSet, SiteAdapter
from finitune.adapters.lora import LoRA
from finitune.errors import AdapterError
from finitune.files.tensorfile import TensorFile, get_tensor_bytes
from finitune.files.writer import encode_header, order_like_safetensors
from finitune.models.spec import ModelSpec
from finitune.report import Finding, Level

RECEIPT_METADATA_KEY = "finitune"
DIFFUSERS_METADATA_KEY = "lora_adapter_metadata"
KOHYA_DYNAMIC_VALUE = "Dynamic"
"""What kohya's tools write where modules differ."""
MODELSPEC_VERSION = "1.0.1"
MAX_METADATA_TEXT_BYTES = 2**20
MAX_METADATA_TOTAL_BYTES = 64 * 2**20
"""For all texts together; readers refuse headers over 100 MB, and the tensors need their share."""

_LYCORIS_NETWORK_MODULE = "lycoris.kohya"
_STALE_TEXT_PATTERN = re.compile(
    rf"sshs_(model|legacy)_hash|modelspec\.hash_sha256|{DIFFUSERS_METADATA_KEY}|(unet|text_encoder)(:\d+:rank)?"
)
"""Texts about the former bytes or the former naming. The last are those of cloneofsimo/lora."""


_LEGACY_HASH_BEGIN, _LEGACY_HASH_END = 0x100000, 0x110000
_LEGACY_HASH_DIGITS = 8
_HASH_CHUNK_BYTES = 1 << 20


AdaptersByComponent = Mapping[str, Mapping[str, SiteAdapter]]
"""The adapter of each module, by the component and the module's name."""


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
    texts |= {"ss_network_module": module} if module else {}
    return {**texts, "ss_network_args": json.dumps(args, ensure_ascii=False)} if args else texts


def choose_network_module(module: str, args: Mapping[str, Any], names: set[str]) -> tuple[str, dict[str, Any]]:
    """The module that makes such a network and its arguments: the source's where it still says these algorithms.

    "" where no program of kohya's or LyCORIS's makes it.
    """
    found = [find_algorithm(name) for name in sorted(names)]
    trained = [one for one in found if not one.companion] or found or [LoRA()]
    first = trained[0]
    by_others = any(other.kohya_network == module for other in ADAPTER_ALGORITHMS if other.name != first.name)
    if module.startswith("networks.") and not by_others and [one.name for one in trained] == [LoRA.name]:
        return module, dict(args)
    rest = {key: value for key, value in args.items() if key not in ("algo", "factor")}
    if module == _LYCORIS_NETWORK_MODULE or not first.kohya_network or len(trained) > 1:
        algo, former = first.lycoris_algo, str(args.get("algo", "")).lower()
        if not algo:
            return "", rest
        kept = former in (algo, *first.field_names)
        return _LYCORIS_NETWORK_MODULE, dict(args) if kept else {**rest, "algo": algo}
    return first.kohya_network, dict(args) if module == first.kohya_network else rest


def format_one_or_dynamic(numbers: Sequence[float]) -> str:
    """The number that all of them are, as kohya writes it, or DYNAMIC where they differ."""
    return f"{numbers[0]:.17g}" if len(set(numbers)) == 1 else KOHYA_DYNAMIC_VALUE


def build_family_texts(source: Mapping[str, str], family: ModelSpec) -> dict[str, str]:
    """The texts that name the model family; title, date and whatever else is kept as it was."""
    facts = family.adapters
    texts = {"modelspec.sai_model_spec": source.get("modelspec.sai_model_spec", MODELSPEC_VERSION)}
    if facts.architecture:
        texts["modelspec.architecture"] = facts.architecture
    prediction, noise = source.get("modelspec.prediction_type", ""), ("epsilon", "v", "v_prediction")
    # A file may say noise or v where its family does either, but not of a flow model.
    kept = prediction in noise and facts.prediction_type in noise
    texts["modelspec.prediction_type"] = prediction if kept else facts.prediction_type
    stated = source.get("ss_base_model_version")
    if facts.base_model_versions and stated not in facts.base_model_versions:
        texts["ss_base_model_version"] = facts.base_model_versions[0]
    return texts


def add_kohya_hashes(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The metadata with the hashes of these tensors in place of any others."""
    return {**metadata, **compute_kohya_hashes(tensors, metadata)}


def compute_kohya_hashes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """`sshs_model_hash` (64 hex digits) and `sshs_legacy_hash` (8), for tensors and the metadata to go with them.

    The former is the SHA-256 of the tensor bytes as the safetensors library orders them; the latter that of 64 KiB at
    the first MiB of the file with kohya's texts as its only metadata, eight digits of it. Source: sd-scripts
    library/train_util.py, precalculate_safetensors_hashes.
    """
    names = order_like_safetensors({name: tensor.dtype for name, tensor in tensors.items()})
    texts = {key: text for key, text in metadata.items() if key.startswith("ss_")}
    header = encode_header({name: (tensors[name].dtype, tuple(tensors[name].shape)) for name in names}, texts)
    whole, window, position = hashlib.sha256(), hashlib.sha256(), 0
    for chunk in itertools.chain([header], (get_tensor_bytes(tensors[name]) for name in names)):
        if position:  # the header is the first chunk, and no part of the model's hash
            whole.update(chunk)
        window.update(chunk[max(_LEGACY_HASH_BEGIN - position, 0) : max(_LEGACY_HASH_END - position, 0)])
        position += len(chunk)
    return {"sshs_model_hash": whole.hexdigest(), "sshs_legacy_hash": window.hexdigest()[:_LEGACY_HASH_DIGITS]}


def compute_kohya_file_hash(file: TensorFile) -> str:
    """The `sshs_model_hash` that a file of one piece ought to state: the SHA-256 of its bytes behind the header."""
    entries = list(file.entries.values())
    digest = hashlib.sha256()
    with file.path.open("rb") as stream:
        stream.seek(entries[0].begin if entries else 0)
        while piece := stream.read(_HASH_CHUNK_BYTES if entries else 0):
            digest.update(piece)
    return digest.hexdigest()


def build_diffusers_metadata(components: AdaptersByComponent, family: ModelSpec) -> dict[str, Any]:
    """The content of lora_adapter_metadata: each component's configuration, its keys behind the component's name.

    Source: diffusers loaders/lora_base.py, _pack_dict_with_prefix.
    """
    tables = {name: describe_for_peft(adapters, family)[1] for name, adapters in components.items()}
    return {f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()}


def build_peft_config(components: AdaptersByComponent, family: ModelSpec) -> dict[str, Any]:
    """The content of adapter_config.json; raises AdapterError (WRITE-ONE-COMPONENT) for several components."""
    if len(components) > 1:
        raise AdapterError(
            f"a PEFT folder holds the adapter of one model, and this one adapts {' and '.join(components)}",
            code="WRITE-ONE-COMPONENT",
            subject=", ".join(components),
            evidence={"components": list(components)},
            remedy="Write diffusers' spelling, which names the components: --to diffusers.",
        )
    (adapters,) = components.values()
    kind, table = describe_for_peft(adapters, family)
    return {"peft_type": kind, "inference_mode": True, **table}


def describe_for_peft(adapters: Mapping[str, SiteAdapter], family: ModelSpec) -> tuple[str, dict[str, Any]]:
    """PEFT's name of an adapter, and the fields of its configuration; raises AdapterError for several algorithms."""
    algorithms = {adapter.algorithm for adapter in adapters.values()}
    if len(algorithms) > 1:
        raise AdapterError(
            f"a PEFT configuration is of one algorithm, and this adapter has {' and '.join(sorted(algorithms))}",
            code="WRITE-CANNOT-SAY",
            subject=", ".join(sorted(algorithms)),
            evidence={"algorithms": sorted(algorithms)},
            remedy="Convert it: --as lora.",
        )
    algorithm = find_algorithm(algorithms.pop())
    return algorithm.peft_type, {
        **algorithm.peft_config(adapters),
        "target_modules": build_target_modules(adapters, family),
    }


def build_target_modules(adapters: Mapping[str, SiteAdapter], family: ModelSpec) -> list[str] | str:
    """PEFT's target_modules: names, or one expression where a name is also the end of another module's."""
    names = sorted(adapters)
    templates = (site for component in family.adapters.components for site in component.sites)
    sites = {blank_site_numbers(site.replace("{i}", "0")) for site in templates}
    if any(site.endswith(f".{name}") for name in set(map(blank_site_numbers, names)) for site in sites):
        return f"(?:{'|'.join(map(re.escape, names))})"
    return names


def blank_site_numbers(site: str) -> str:
    """A site with its numbers blanked: the same for the like modules of all blocks."""
    return re.sub(r"\d+", "#", site)
