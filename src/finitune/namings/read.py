"""Reading an adapter file, in whatever spelling: what it is, what each of its tensors does, and what is doubtful.

Keys are divided into modules and roles, the modules found in the tables of the families, the family and the spelling
told by evidence. Then each module becomes an adapter by its conventions, gets its scale, and is divided where the
original model keeps several weights as one. A module that cannot be read fails alone; nothing is dropped unsaid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from finitune.adapters import ADAPTER_ALGORITHMS, find_algorithm
from finitune.adapters.core import (
    AdapterSet,
    AmbiguityOptions,
    FileFacts,
    Shape,
    SiteAdapter,
    make_no_adapter_error,
    read_single_number,
)
from finitune.adapters.lokr import LoKr
from finitune.adapters.lora import LoRA
from finitune.adapters.oft import constrain_rotation
from finitune.adapters.tlora import TLoRA
from finitune.errors import AdapterError
from finitune.files.tensorfile import TensorFile
from finitune.models import MODEL_FAMILIES
from finitune.models.spec import ModelSpec
from finitune.namings.assemble import (
    assemble_site_adapter,
    attach_dora_magnitude,
    identify_group_algorithm,
    read_tlora_as_lora,
)
from finitune.namings.cloneofsimo import is_cloneofsimo_key, rename_cloneofsimo_keys
from finitune.namings.core import FindingCollector, ParsedAdapter, SiteTarget, TensorRecord, TensorStatus
from finitune.namings.fused import is_same_tensor, split_fused_adapter
from finitune.namings.identify import (
    FamilyMatch,
    ParsedName,
    detect_spelling,
    get_match_title,
    identify_adapter_family,
    match_model_modules,
    read_producer_software,
)
from finitune.namings.keys import GroupedKeys, TensorGroup, group_keys_by_module
from finitune.namings.metadata import check_network_metadata
from finitune.namings.resolve import ResolvedModule, Resolver
from finitune.namings.scales import (
    UndividedLora,
    compute_candidate_scale,
    interpret_stored_alpha,
    note_scales,
    note_split_training,
    read_peft_configs,
    resolve_adapter_scale,
)
from finitune.namings.spellings import SPELLINGS, AdapterSpelling
from finitune.namings.tensor_reader import TensorReader, to_meta_adapter
from finitune.report import Level


def read_adapter(
    file: TensorFile,
    model: ModelSpec | None = None,
    *,
    shapes: Mapping[str, Shape] | None = None,
    resolver: Resolver | None = None,
    answers: AmbiguityOptions | None = None,
    weight_of: Callable[[str], Tensor | None] | None = None,
) -> ParsedAdapter:
    """An adapter file, read.

    `model` is the family where it is known, `resolver` the modules of a user's own model instead; `shapes` are the
    model's weights by component and site, which adapters are then checked against; `answers` decide what the file
    leaves open; `weight_of` reads the model's weight at a site (any float dtype, None where there is none), which a
    T-LoRA cannot be read without. Tensors keep the dtype of the file, and differences as large as the model are read
    when asked for.

    Raises AdapterError where the file is no adapter or one of another family. What is wrong with single modules is in
    the findings, at level error.
    """
    return AdapterReader(file, shapes or {}, answers or AmbiguityOptions(), weight_of).read(model, resolver)


class AdapterReader:
    """One reading of one file."""

    def __init__(
        self,
        file: TensorFile,
        shapes: Mapping[str, Shape],
        answers: AmbiguityOptions,
        weight_of: Callable[[str], Tensor | None] | None,
    ):
        self.file, self.shapes, self.answers, self.weight_of = file, shapes, answers, weight_of
        self.shelf = TensorReader(file)
        self.notes = FindingCollector()
        self.ledger: dict[str, TensorRecord] = {}
        self.sites: dict[str, SiteAdapter] = {}
        self.wholes: list[UndividedLora] = []
        self.sources: Counter[str] = Counter()
        self.unstated: set[str] = set()
        self.configs, self.config_findings = read_peft_configs(file.path, file.metadata)
        self.conventions: dict[str, str] = {}
        self.spelling: AdapterSpelling | None = None

    def read(self, model: ModelSpec | None, resolver: Resolver | None) -> ParsedAdapter:
        """The whole file; see `read_adapter`."""
        metadata = self.file.metadata
        renamed = rename_cloneofsimo_keys(self.file.shapes, metadata) if any(map(is_cloneofsimo_key, self.file)) else {}
        gathered = group_keys_by_module(self.file.shapes, renamed)
        require_adapter_file(self.file, gathered)
        if resolver is None:
            case, found = identify_adapter_family(gathered.groups, metadata, MODEL_FAMILIES, model)
        else:
            case, found = match_model_modules(resolver, gathered.groups), []
        self.spelling, spelled = detect_spelling(case, gathered.groups, metadata)
        name = self.spelling.name if self.spelling is not None else ""
        modules = [
            (
                {role: member.shape for role, member in g.members.items()},
                self.find_known_shape(case.sights[g.module].found),
            )
            for g in gathered.groups
        ]
        self.conventions = {one.name: one.detect_convention(modules, self.answers) for one in ADAPTER_ALGORITHMS}
        for group in gathered.groups:
            self.take(group, case.sights[group.module])
        self.account_for_other_keys(gathered)
        split_scale = note_split_training(self.wholes, self.notes)
        split_scale = {site: count for site, count in split_scale.items() if site in self.sites}
        self.note_names(case, gathered, name, spelled)
        software = read_producer_software(metadata)
        producers = (spelling for spelling in SPELLINGS if spelling.name == name or software == spelling.software != "")
        producer = next((one.producer for one in producers if one.producer), "")
        found += self.config_findings + check_network_metadata(metadata)
        found += note_scales(self.sources, self.unstated, metadata, producer)
        embeddings = {key: self.shelf.read(key) for key in gathered.embeddings}
        for key in self.file:
            if key not in self.shelf.looked_at:
                self.shelf.read(key)
        return ParsedAdapter(
            AdapterSet(self.sites, embeddings),
            name,
            case.model,
            tuple(self.ledger[key] for key in self.file),
            tuple(found + self.notes.findings() + self.shelf.findings),
            dict(metadata),
            split_scale,
        )

    def find_known_shape(self, found: ResolvedModule | None) -> Shape | None:
        """The shape of the model's weight where a module of the file lands, if it is one weight and known."""
        sites = found.landing.sites if found is not None else ()
        return self.shapes.get(f"{found.landing.component}.{sites[0]}") if found and len(sites) == 1 else None

    def take(self, group: TensorGroup, sight: ParsedName) -> None:
        if group.roles == {"alpha"}:
            why = "alpha without an adapter"
            self.notes.add(Level.WARNING, "ADAPTER-ORPHAN-ALPHA", group.module, f"{why}: nothing is scaled by it", {})
            self.write(group.keys, "explained", why=why)
        elif sight.found is None:
            self.write(
                group.keys, "unmatched", why="a container, not a module" if sight.container else "no such module"
            )
        else:
            try:
                self.adapt_group(group, sight, sight.found)
            except AdapterError as error:
                self.notes.fail(group.module, explain_inpainting_mismatch(error))
                self.write(group.keys, "explained", why=error.message)

    def adapt_group(self, group: TensorGroup, sight: ParsedName, found: ResolvedModule) -> None:
        """Make a module's adapter, with its scale, and put its parts where they land; raises AdapterError."""
        landing, known = found.landing, self.find_known_shape(found)
        config = self.configs.get(landing.component) or self.configs.get("")
        weight = group.members.get("weight")
        if weight is not None and "bfl" in weight.suffix.dialects and found.entry.place.weight != ".scale":
            raise make_no_adapter_error(group.roles, "it is a whole weight, as models have, and no change of one")
        alpha = group.members.get("alpha")
        stated = None if alpha is None else read_single_number(self.shelf.read(alpha.key), "alpha")
        name, unused = identify_group_algorithm(group), ""
        if name == TLoRA.name:
            adapter = self.read_tlora(group, landing, stated)
        else:
            facts = FileFacts(known, config.table if config else {}, self.conventions.get(name, ""))
            adapter = assemble_site_adapter(group, self.shelf, name, facts)
        adapter = attach_dora_magnitude(adapter, group, self.shelf, self.answers)
        if find_algorithm(adapter.algorithm).alpha_means == "constraint":
            adapter = self.constrain_adapter(adapter, group, sight, stated)
        elif name != TLoRA.name:
            scaled = resolve_adapter_scale(adapter, stated, config, [sight.name, *landing.sites], self.answers)
            adapter, unused = scaled.adapter, scaled.unused
            if not unused:
                self.count_scale(scaled.source, group)
            if stated is not None and unused and adapter.algorithm == LoKr.name:
                self.note_full_lokr(group, stated)
            self.note_rank(group, adapter, config and config.rank([sight.name, *landing.sites]))
        widens = self.spelling is not None and self.spelling.widens_inputs
        if widens and adapter.algorithm == LoRA.name and (known is None or adapter.tensors["down"].shape[1] > known[1]):
            adapter = replace(adapter, options={**adapter.options, "reshape": True})
        parts = split_fused_adapter(adapter, landing, self.shapes)
        for site, part in parts.items():
            key = f"{landing.component}.{site}"
            find_algorithm(part.algorithm).check(to_meta_adapter(part), self.shapes.get(key))
        self.put(group, landing.component, parts, unused)
        if name == adapter.algorithm == LoRA.name:
            self.wholes.append(UndividedLora(group.module, landing, adapter))

    def read_tlora(self, group: TensorGroup, landing: SiteTarget, stated: float | None) -> SiteAdapter:
        """A T-LoRA as the LoRA that it is on the model's weight, scale included; raises AdapterError without that."""
        base = self.read_base_weight(landing)
        rank = (group.shape("q_layer") or (1,))[0]
        alpha = None if stated is None or base is None else interpret_stored_alpha(stated, rank, self.answers)
        adapter = read_tlora_as_lora(group, self.shelf, alpha, base)
        self.count_scale("" if stated is None else "alpha tensors", group)
        message = (
            "a T-LoRA was turned into a LoRA of twice its rank, taking it that training began at the largest singular "
            "values of the model's weight: files do not say which (sig_type), and LyCORIS reads all of them so"
        )
        evidence = {"selection": "principal", "weight": None if base is None else str(base.dtype)}
        remedy = "If it draws noise, it began elsewhere: export it as a plain LoRA with the program that trained it."
        self.notes.add(Level.NOTE, "ADAPTER-TLORA-PRINCIPAL", group.module, message, evidence, remedy)
        return adapter

    def read_base_weight(self, landing: SiteTarget) -> Tensor | None:
        """The model's weight as the file's module has it, all of its parts; None where it is not at hand."""
        found = [self.weight_of(f"{landing.component}.{site}") for site in landing.sites] if self.weight_of else []
        weights = [weight for weight in found if weight is not None]
        if len(weights) < len(landing.sites) or len({weight.shape[1:] for weight in weights}) > 1:
            return None
        whole = weights[0] if len(weights) == 1 else torch.cat(weights)
        return torch.cat(whole.chunk(2)[::-1]) if landing.swapped else whole

    def count_scale(self, source: str, group: TensorGroup) -> None:
        """Count a module by the place that stated its scale, "" for none."""
        self.sources[source] += 1
        if not source:
            self.unstated |= group.dialects()

    def constrain_adapter(
        self, adapter: SiteAdapter, group: TensorGroup, sight: ParsedName, alpha: float | None
    ) -> SiteAdapter:
        """A rotation with the constraint that its alpha is; raises AdapterError for one that is no bound."""
        kohya = sight.prefix.startswith("oft_")
        bound = constrain_rotation(adapter, None if "rotation" in group.roles else alpha, kohya)
        if kohya and alpha == 0:
            message = (
                "alpha is 0: in kohya's program such an OFT turns nothing; here it is read as without a constraint"
            )
            self.notes.add(Level.WARNING, "ADAPTER-OFT-ALPHA", group.module, message, {"alpha": 0.0})
        return bound

    def note_full_lokr(self, group: TensorGroup, alpha: float) -> None:
        """Say that alpha is left out where both factors of a LoKr are full, and what it might have meant."""
        evidence = {"alpha": alpha, "scale": 1.0, **compute_candidate_scale(self.file.metadata, alpha)}
        doubtful = evidence.get("candidate scale", 1.0) != 1.0
        message = (
            "both factors of these LoKr are full: there is no rank that alpha could be divided by, so the scale is 1"
        )
        remedy = "If it draws far too strongly, it was trained with the candidate scale: use that as strength."
        level = Level.WARNING if doubtful else Level.NOTE
        self.notes.add(level, "ADAPTER-LOKR-ALPHA", group.module, message, evidence, remedy if doubtful else "")

    def note_rank(self, group: TensorGroup, adapter: SiteAdapter, stated: float | None) -> None:
        """Warn where a configuration states another rank than the tensors have, which are believed."""
        rank = find_algorithm(adapter.algorithm).rank(adapter)
        if stated is not None and rank is not None and stated != rank:
            message = f"the configuration says rank {stated:g}, the tensors have {rank}: the tensors are believed"
            self.notes.add(Level.WARNING, "ADAPTER-RANK", group.module, message, {"stated": stated, "rank": rank})

    def put(self, group: TensorGroup, component: str, parts: Mapping[str, SiteAdapter], unused: str) -> None:
        """Enter a module's adapters by site; raises AdapterError where another module of the file is there already."""
        keyed = {f"{component}.{site}": part for site, part in parts.items()}
        taken = [key for key in keyed if key in self.sites]
        if taken and all(
            key in self.sites and is_same_site_adapter(self.sites[key], part) for key, part in keyed.items()
        ):
            return self.write(group.keys, "explained", why=f"the same as what {taken[0]} has already")
        if taken:
            raise AdapterError(
                f"two modules of the file are {taken[0]}, and differ",
                code="ADAPTER-DUPLICATE",
                subject=taken[0],
                evidence={"sites": taken},
                remedy="The file holds the module twice, fused and in parts: remove one of them.",
            )
        self.sites.update(keyed)
        self.write(group.keys, "applied", site=", ".join(keyed))
        for role, member in group.members.items():
            explained = unused if role == "alpha" else ""
            self.ledger[member.key] = TensorRecord(
                member.key, "explained" if explained else "applied", ", ".join(keyed), role, explained
            )
        return None

    def write(self, keys: list[str], fate: TensorStatus, *, site: str = "", why: str = "") -> None:
        self.ledger.update({key: TensorRecord(key, fate, site, "", why) for key in keys})

    def account_for_other_keys(self, gathered: GroupedKeys) -> None:
        self.write(list(gathered.embeddings), "explained", why="a learned token embedding, kept")
        for key, why in gathered.explained.items():
            self.write([key], "explained", why=why)
        self.write(list(gathered.unknown), "unmatched", why="no suffix of any adapter")
        self.write([key for key in gathered.shared if key not in self.ledger], "unmatched", why="no module has it")
        for key in gathered.unknown:
            message = "tensors whose names end as no adapter's do"
            remedy = "If the file is good otherwise, convert or merge it without them: --allow-unmatched."
            self.notes.add(Level.ERROR, "ADAPTER-UNKNOWN-KEYS", key, message, {}, remedy)

    def note_names(self, case: FamilyMatch, gathered: GroupedKeys, spelling: str, spelled: int) -> None:
        """Say which modules are unknown, component by component, what was stripped, and whether spellings are mixed."""
        behind = Counter(case.sights[group.module].prefix for group in gathered.groups)
        lost = [
            group.module
            for group in gathered.groups
            if {self.ledger[key].why for key in group.keys} & _NOT_FOUND_REASONS
        ]
        missing = Counter(case.sights[module].prefix for module in lost if not case.sights[module].container)
        for module in lost:
            prefix = case.sights[module].prefix
            if case.sights[module].container:
                message = f"a container of modules in {get_match_title(case)}, which has no weight of its own to adapt"
                remedy = "A name was cut short when it was saved: export it again, or leave it out: --allow-unmatched."
                self.notes.add(Level.ERROR, "ADAPTER-CONTAINER", module, message, {}, remedy)
                continue
            where = f"behind {prefix!r}" if prefix else "without a known prefix"
            message = f"{missing[prefix]} of {behind[prefix]} modules {where} are none of {get_match_title(case)}"
            remedy = "Name the model that it was made for, or a checkpoint, for its own modules: --model."
            self.notes.add(Level.ERROR, "ADAPTER-UNMATCHED", module, message, {}, remedy)
        for group in gathered.groups:
            sight = case.sights[group.module]
            if sight.found is not None and sight.stripped:
                message = f"wrappers were taken off: {', '.join(sight.stripped)}"
                self.notes.add(Level.NOTE, "ADAPTER-WRAPPED", group.module, message, {})
            for name in {name for m in group.members.values() if (name := m.suffix.name_in(m.key))}:
                message = f"the file calls its adapter {name!r}: that name was taken off"
                self.notes.add(Level.NOTE, "ADAPTER-NAMED", group.module, message, {"name": name})
        if spelling and spelled < len(gathered.groups) - len(lost):
            message = f"{spelled} of {len(gathered.groups)} modules are spelled as {spelling}, others otherwise"
            self.notes.add(Level.NOTE, "ADAPTER-MIXED-SPELLING", spelling, message, {})


_NOT_FOUND_REASONS = {"a container, not a module", "no such module"}


def is_same_site_adapter(one: SiteAdapter, other: SiteAdapter) -> bool:
    """Whether two adapters are the same to the bit."""
    if replace(one, tensors={}, magnitude=None) != replace(other, tensors={}, magnitude=None):
        return False
    first: dict[str, Tensor] = {**one.tensors, **({"": one.magnitude.tensor} if one.magnitude else {})}
    second: dict[str, Tensor] = {**other.tensors, **({"": other.magnitude.tensor} if other.magnitude else {})}
    return first.keys() == second.keys() and all(is_same_tensor(first[role], second[role]) for role in first)


def explain_inpainting_mismatch(error: AdapterError) -> AdapterError:
    """The same error; where a convolution of 4 inputs meets one of 9, or the reverse, with what that means."""
    shapes = [error.evidence.get(which) for which in ("adapter", "model")]
    if error.code == "ADAPTER-DOES-NOT-FIT" and all(isinstance(s, list) and len(s) == 4 for s in shapes):
        inputs = [s[1] for s in shapes if isinstance(s, list)]
        if sorted(inputs) == [4, 9]:
            kinds = {4: "a plain model", 9: "an inpainting model (latents, mask and masked latents: 9 inputs)"}
            error.remedy = f"The adapter was made for {kinds[inputs[0]]}, this is {kinds[inputs[1]]}: take the other."
    return error


def require_adapter_file(file: TensorFile, gathered: GroupedKeys) -> None:
    """Raise AdapterError for a file that holds no adapter at all, and say where it is a model."""
    if any(group.roles - {"weight", "alpha"} or "on_input" in group.roles for group in gathered.groups):
        return
    if gathered.embeddings and not gathered.groups:
        return
    weights = sum("weight" in group.roles for group in gathered.groups)
    raise AdapterError(
        f"{file.path} is no adapter: " + ("it holds whole weights, as a model does" if weights else "no key is of one"),
        code="ADAPTER-NONE",
        subject=str(file.path),
        evidence={"tensors": len(file), "whole weights": weights, "first": list(file)[:3]},
        remedy="Give an adapter file (LoRA, LyCORIS). For a model, use the model's option instead.",
    )
