"""From a module's name in a file to the module, and back, through the tables of the model families.

A flat name is never made dotted. It is compared with the flattened names of the modules that there are: dots and
underscores count as one sign on both sides, so that a match is exact. Modules that flatten to one name are found when
the index is made; that name is refused when a file holds it, while all other names keep their meaning.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, Literal, TypeVar

from finitune.errors import ModelError
from finitune.files.keymap import KEY_FIELD_PATTERN, KEY_NUMBER_PATTERN, can_templates_clash, match_template
from finitune.models.sites import ComponentSites, ModulePlace
from finitune.models.spec import ModelSpec
from finitune.namings.core import SiteTarget

_T = TypeVar("_T")
_NUMBER_FIRST_SIGNS = frozenset("0123456789{")
ModuleParameter = Literal["weight", "bias"]


@dataclass(frozen=True)
class ModuleTemplate:
    """A template of module names: the component and Place that it belongs to; `native` for the original naming.

    `name` is what files call it, which for original naming is the place's own name. `common`: both namings call the
    module so.
    """

    component: ComponentSites
    name: str
    place: ModulePlace
    native: bool
    common: bool = False

    def landing(self, numbers: Mapping[str, str]) -> SiteTarget:
        sites = tuple(fill_template_numbers(site, numbers) for site in self.place.sites)
        return SiteTarget(self.component.name, sites, self.place.division, self.place.swapped)


@dataclass(frozen=True)
class ResolvedModule:
    """What a module's name was found to be."""

    landing: SiteTarget
    entry: ModuleTemplate


class TemplateIndex(Generic[_T]):
    """Values by template; a name is looked up by its words and the places of its numbers."""

    def __init__(self, items: Iterable[tuple[str, _T]]):
        self.items: dict[tuple[str, ...], list[tuple[str, _T]]] = {}
        for template, value in items:
            self.items.setdefault(make_template_skeleton(template), []).append((template, value))

    def find(self, name: str) -> Iterator[tuple[dict[str, str], _T]]:
        """The numbers and values of all templates that a name fits, in the order in which they were given."""
        for template, value in self.items.get(make_template_skeleton(name), ()):
            numbers = match_template(name, template)
            if numbers is not None:
                yield numbers, value


class Resolver:
    """Finds the modules of some components by name, dotted or flat.

    `collisions` are the pairs of modules that one flat name can mean; looking such a name up raises ModelError.
    """

    def __init__(self, components: Iterable[ComponentSites]):
        self.components = {component.name: component for component in components}
        self.entries = tuple(
            entry for component in self.components.values() for entry in list_module_templates(component)
        )
        self.collisions = frozenset(find_flat_collisions(self.entries))

    @cached_property
    def dotted(self) -> TemplateIndex[ModuleTemplate]:
        return TemplateIndex((entry.name, entry) for entry in self.entries)

    @cached_property
    def flat(self) -> TemplateIndex[ModuleTemplate]:
        return TemplateIndex((unify_separators(entry.name), entry) for entry in self.entries)

    @cached_property
    def tensors(self) -> TemplateIndex[tuple[ModuleTemplate, ModuleParameter]]:
        """Entries and parameters by the names of their tensors in checkpoints."""
        return TemplateIndex(parameter for entry in self.entries for parameter in list_template_parameters(entry))

    @cached_property
    def sites(self) -> TemplateIndex[ModuleTemplate]:
        return TemplateIndex((site, entry) for entry in self.entries for site in entry.place.sites)

    @classmethod
    def of_model(cls, *models: ModelSpec) -> Resolver:
        """The modules of model families that share no component's name."""
        return cls(component for model in models for component in model.adapters.components)

    @classmethod
    def of_modules(
        cls, names: Iterable[str], component: str = "transformer", roles: tuple[str, ...] = ("unet", "transformer")
    ) -> Resolver:
        """The modules of any one model, by the names that it gives them itself."""
        return cls([ComponentSites(component, roles, tuple(names))])

    def find(
        self, name: str, components: Collection[str] | None = None, *, flat: bool = False
    ) -> ResolvedModule | None:
        """What a module's name is, in the named components or in any; None where they have no such module.

        Original names come first: a file that covers several components under one prefix has these. Raises ModelError
        (MODEL-FLAT-NAMES) for a flat name of two modules.
        """
        if flat and "." in name:
            return None
        index, wanted = (self.flat, unify_separators(name)) if flat else (self.dotted, name)
        fitting = [
            (numbers, entry)
            for numbers, entry in index.find(wanted)
            if components is None or entry.component.name in components
        ]
        if not fitting:
            return None
        numbers, best = min(fitting, key=lambda one: not one[1].native)
        for others_numbers, other in fitting if flat and self.collisions else ():
            if {(best, other), (other, best)} & self.collisions:
                raise make_flat_names_error(
                    name, fill_template_numbers(best.name, numbers), fill_template_numbers(other.name, others_numbers)
                )
        return ResolvedModule(best.landing(numbers), best)

    def resolve(self, name: str, components: Collection[str] | None = None, *, flat: bool = False) -> SiteTarget | None:
        found = self.find(name, components, flat=flat)
        return found and found.landing

    def is_container(self, name: str, components: Collection[str] | None = None, *, flat: bool = False) -> bool:
        """Whether modules with weights lie inside of the named one, while it has none itself."""
        index, wanted = (self.containers[1], unify_separators(name)) if flat else (self.containers[0], name)
        return any(components is None or inside in components for _, inside in index.find(wanted))

    @cached_property
    def containers(self) -> tuple[TemplateIndex[str], TemplateIndex[str]]:
        """The names that modules lie inside of, dotted and flat, with their components."""
        pairs = dict.fromkeys(
            (".".join(parts[:n]), entry.component.name)
            for entry in self.entries
            for parts in [entry.name.split(".")]
            for n in range(1, len(parts))
        )
        flat = dict.fromkeys((unify_separators(name), component) for name, component in pairs)
        return TemplateIndex(pairs), TemplateIndex(flat)

    def parameter(self, key: str, component: str | None = None) -> tuple[SiteTarget, ModuleParameter] | None:
        """The module and parameter that a checkpoint's tensor is, or None.

        `component` where the file holds that one alone, as folders of diffusers do; else the prefixes of whole
        checkpoints are tried, and then diffusers' own names.
        """
        names = [component] if component is not None else list(self.components)
        best: tuple[tuple[bool, int], SiteTarget, ModuleParameter] | None = None
        for name in names:
            for prefix in dict.fromkeys((*self.components[name].single_file, "")):
                if not key.startswith(prefix):
                    continue
                for numbers, (entry, parameter) in self.tensors.find(key[len(prefix) :]):
                    rank = (entry.native, len(prefix))
                    if entry.component.name == name and (best is None or rank > best[0]):
                        transposed = entry.place.transposed and parameter == "weight"
                        best = rank, replace(entry.landing(numbers), transposed=transposed), parameter
        return best and best[1:]

    def native(self, component: str, site: str) -> tuple[str, SiteTarget] | None:
        """The original name of the module that holds a site, with all sites that it holds; None for no such site."""
        return self.named(component, site, native=True)

    def named(self, component: str, site: str, *, native: bool) -> tuple[str, SiteTarget] | None:
        """The name of the module that holds a site, original or diffusers', with all sites that it holds."""
        for numbers, entry in self.sites.find(site):
            own = entry.native == native or not entry.component.places
            if entry.component.name == component and own and entry.name == entry.place.name:
                return fill_template_numbers(entry.name, numbers), entry.landing(numbers)
        return None

    def native_name(self, component: str, site: str) -> str | None:
        """The original name of the module that holds a site; None for no such site."""
        found = self.native(component, site)
        return found and found[0]

    def flat_name(self, component: str, site: str, *, native: bool) -> str | None:
        """The flat name of the module that holds a site, original or diffusers'; None for no such site."""
        found = self.named(component, site, native=native)
        return found and found[0].replace(".", "_")


def list_module_templates(component: ComponentSites) -> Iterator[ModuleTemplate]:
    """All names of a component's modules: original, diffusers', and these without what some libraries leave out."""
    common = {place.name for place in component.places if place.sites == (place.name,)}
    placed = {site for place in component.places for site in place.sites}
    for place in component.places:
        yield ModuleTemplate(component, place.name, place, native=True, common=place.name in common)
    for site in dict.fromkeys(component.sites):
        place = ModulePlace(site, (site,))
        shared = site in common or site not in placed
        for native in (False,) if site in placed else (True, False) if component.places else (True,):
            yield ModuleTemplate(component, site, place, native, shared)
            if component.outer and site.startswith(component.outer):
                yield ModuleTemplate(component, site[len(component.outer) :], place, native)


def list_template_parameters(entry: ModuleTemplate) -> Iterator[tuple[str, tuple[ModuleTemplate, ModuleParameter]]]:
    yield entry.name + entry.place.weight, (entry, "weight")
    yield entry.name + entry.place.bias, (entry, "bias")


def find_flat_collisions(entries: Iterable[ModuleTemplate]) -> Iterator[tuple[ModuleTemplate, ModuleTemplate]]:
    """The pairs of modules of one naming, behind one prefix, that can have the same flat name, in their order."""
    whole: dict[str, list[ModuleTemplate]] = {}
    with_fields: dict[tuple[str, ...], list[ModuleTemplate]] = {}
    for entry in entries:
        flat = unify_separators(entry.name)
        if "{" in flat:
            with_fields.setdefault(make_template_skeleton(flat), []).append(entry)
        else:
            whole.setdefault(flat, []).append(entry)
    for flat, alike in whole.items():
        yield from filter(can_templates_collide, itertools.combinations(alike, 2))
        yield from filter(
            can_templates_collide, itertools.product(alike, with_fields.get(make_template_skeleton(flat), ()))
        )
    for alike in with_fields.values():
        yield from filter(can_templates_collide, itertools.combinations(alike, 2))


def can_templates_collide(pair: tuple[ModuleTemplate, ModuleTemplate]) -> bool:
    """Whether two entries are different modules that a file can call by one flat name."""
    one, other = pair
    return (
        one.native == other.native
        and one.place != other.place
        and bool(set(one.component.roles) & set(other.component.roles))
        and can_templates_clash(unify_separators(one.name), unify_separators(other.name))
    )


def make_flat_names_error(flat: str, one: str, other: str) -> ModelError:
    return ModelError(
        f"{one!r} and {other!r} both flatten to {flat!r}",
        code="MODEL-FLAT-NAMES",
        subject=flat,
        evidence={"modules": [one, other]},
        remedy="Flat names (lora_unet_...) cannot tell these modules apart: use a dotted spelling, or rename one.",
    )


def unify_separators(name: str) -> str:
    """A name with one sign for dots and underscores; two names flatten alike just where these are equal."""
    if "{" not in name:
        return name.replace("_", ".")
    return ".".join(part if KEY_FIELD_PATTERN.fullmatch(part) else part.replace("_", ".") for part in name.split("."))


def make_template_skeleton(name: str) -> tuple[str, ...]:
    """The segments with every number and number field blanked: a name shares it with the templates that it fits."""
    return tuple("#" if is_number_segment(part) else part for part in name.split("."))


def is_number_segment(part: str) -> bool:
    """Whether a segment is a number, or a field for one; the first sign tells for most."""
    return part[:1] in _NUMBER_FIRST_SIGNS and bool(
        KEY_NUMBER_PATTERN.fullmatch(part) or KEY_FIELD_PATTERN.fullmatch(part)
    )


def fill_template_numbers(template: str, numbers: Mapping[str, str]) -> str:
    return ".".join(numbers.get(part, part) for part in template.split("."))
