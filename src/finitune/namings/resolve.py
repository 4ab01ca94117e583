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
from finitune.files.keymap import FIELD, NUMBER, can_clash, match
from finitune.models.sites import ComponentSites, Place
from finitune.models.spec import ModelSpec
from finitune.namings.core import Landing

T = TypeVar("T")
OPENING = frozenset("0123456789{")
Parameter = Literal["weight", "bias"]


@dataclass(frozen=True)
class Entry:
    """A template of module names: the component and Place that it belongs to; `native` for the original naming.

    `name` is what files call it, which for original naming is the place's own name. `common`: both namings call the
    module so.
    """

    component: ComponentSites
    name: str
    place: Place
    native: bool
    common: bool = False

    def landing(self, numbers: Mapping[str, str]) -> Landing:
        """Where a name with these numbers lands."""
        sites = tuple(filled(site, numbers) for site in self.place.sites)
        return Landing(self.component.name, sites, self.place.division, self.place.swapped)


@dataclass(frozen=True)
class Found:
    """What a module's name was found to be."""

    landing: Landing
    entry: Entry


class Index(Generic[T]):
    """Values by template; a name is looked up by its words and the places of its numbers."""

    def __init__(self, items: Iterable[tuple[str, T]]):
        self.items: dict[tuple[str, ...], list[tuple[str, T]]] = {}
        for template, value in items:
            self.items.setdefault(skeleton(template), []).append((template, value))

    def find(self, name: str) -> Iterator[tuple[dict[str, str], T]]:
        """The numbers and values of all templates that a name fits, in the order in which they were given."""
        for template, value in self.items.get(skeleton(name), ()):
            numbers = match(name, template)
            if numbers is not None:
                yield numbers, value


class Resolver:
    """Finds the modules of some components by name, dotted or flat.

    `collisions` are the pairs of modules that one flat name can mean; looking such a name up raises ModelError.
    """

    def __init__(self, components: Iterable[ComponentSites]):
        self.components = {component.name: component for component in components}
        self.entries = tuple(entry for component in self.components.values() for entry in entries_of(component))
        self.collisions = frozenset(collisions_of(self.entries))

    @cached_property
    def dotted(self) -> Index[Entry]:
        """Entries by their names."""
        return Index((entry.name, entry) for entry in self.entries)

    @cached_property
    def flat(self) -> Index[Entry]:
        """Entries by their flat names."""
        return Index((united(entry.name), entry) for entry in self.entries)

    @cached_property
    def tensors(self) -> Index[tuple[Entry, Parameter]]:
        """Entries and parameters by the names of their tensors in checkpoints."""
        return Index(parameter for entry in self.entries for parameter in parameters_of(entry))

    @cached_property
    def sites(self) -> Index[Entry]:
        """Entries by the sites that they hold."""
        return Index((site, entry) for entry in self.entries for site in entry.place.sites)

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

    def find(self, name: str, components: Collection[str] | None = None, *, flat: bool = False) -> Found | None:
        """What a module's name is, in the named components or in any; None where they have no such module.

        Original names come first: a file that covers several components under one prefix has these. Raises ModelError
        (MODEL-FLAT-NAMES) for a flat name of two modules.
        """
        if flat and "." in name:
            return None
        index, wanted = (self.flat, united(name)) if flat else (self.dotted, name)
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
                raise ambiguous(name, filled(best.name, numbers), filled(other.name, others_numbers))
        return Found(best.landing(numbers), best)

    def resolve(self, name: str, components: Collection[str] | None = None, *, flat: bool = False) -> Landing | None:
        """Where a module's name lands: see `find`."""
        found = self.find(name, components, flat=flat)
        return found and found.landing

    def is_container(self, name: str, components: Collection[str] | None = None, *, flat: bool = False) -> bool:
        """Whether modules with weights lie inside of the named one, while it has none itself."""
        index, wanted = (self.containers[1], united(name)) if flat else (self.containers[0], name)
        return any(components is None or inside in components for _, inside in index.find(wanted))

    @cached_property
    def containers(self) -> tuple[Index[str], Index[str]]:
        """The names that modules lie inside of, dotted and flat, with their components."""
        pairs = dict.fromkeys((name, entry.component.name) for entry in self.entries for name in above(entry.name))
        flat = dict.fromkeys((united(name), component) for name, component in pairs)
        return Index(pairs), Index(flat)

    def parameter(self, key: str, component: str | None = None) -> tuple[Landing, Parameter] | None:
        """The module and parameter that a checkpoint's tensor is, or None.

        `component` where the file holds that one alone, as folders of diffusers do; else the prefixes of whole
        checkpoints are tried, and then diffusers' own names.
        """
        names = [component] if component is not None else list(self.components)
        best: tuple[tuple[bool, int], Landing, Parameter] | None = None
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

    def native(self, component: str, site: str) -> tuple[str, Landing] | None:
        """The original name of the module that holds a site, with all sites that it holds; None for no such site."""
        return self.named(component, site, native=True)

    def named(self, component: str, site: str, *, native: bool) -> tuple[str, Landing] | None:
        """The name of the module that holds a site, original or diffusers', with all sites that it holds."""
        for numbers, entry in self.sites.find(site):
            own = entry.native == native or not entry.component.places
            if entry.component.name == component and own and entry.name == entry.place.name:
                return filled(entry.name, numbers), entry.landing(numbers)
        return None

    def native_name(self, component: str, site: str) -> str | None:
        """The original name of the module that holds a site; None for no such site."""
        found = self.native(component, site)
        return found and found[0]

    def flat_name(self, component: str, site: str, *, native: bool) -> str | None:
        """The flat name of the module that holds a site, original or diffusers'; None for no such site."""
        found = self.named(component, site, native=native)
        return found and found[0].replace(".", "_")


def entries_of(component: ComponentSites) -> Iterator[Entry]:
    """All names of a component's modules: original, diffusers', and these without what some libraries leave out."""
    common = {place.name for place in component.places if place.sites == (place.name,)}
    placed = {site for place in component.places for site in place.sites}
    for place in component.places:
        yield Entry(component, place.name, place, native=True, common=place.name in common)
    for site in dict.fromkeys(component.sites):
        place = Place(site, (site,))
        shared = site in common or site not in placed
        for native in (False,) if site in placed else (True, False) if component.places else (True,):
            yield Entry(component, site, place, native, shared)
            if component.outer and site.startswith(component.outer):
                yield Entry(component, site[len(component.outer) :], place, native)


def parameters_of(entry: Entry) -> Iterator[tuple[str, tuple[Entry, Parameter]]]:
    """The names of a module's tensors in a checkpoint."""
    yield entry.name + entry.place.weight, (entry, "weight")
    yield entry.name + entry.place.bias, (entry, "bias")


def above(name: str) -> Iterator[str]:
    """The names of all modules that a module lies inside of."""
    parts = name.split(".")
    yield from (".".join(parts[:n]) for n in range(1, len(parts)))


def collisions_of(entries: Iterable[Entry]) -> Iterator[tuple[Entry, Entry]]:
    """The pairs of modules of one naming, behind one prefix, that can have the same flat name, in their order."""
    whole: dict[str, list[Entry]] = {}
    with_fields: dict[tuple[str, ...], list[Entry]] = {}
    for entry in entries:
        flat = united(entry.name)
        if "{" in flat:
            with_fields.setdefault(skeleton(flat), []).append(entry)
        else:
            whole.setdefault(flat, []).append(entry)
    for flat, alike in whole.items():
        yield from filter(collide, itertools.combinations(alike, 2))
        yield from filter(collide, itertools.product(alike, with_fields.get(skeleton(flat), ())))
    for alike in with_fields.values():
        yield from filter(collide, itertools.combinations(alike, 2))


def collide(pair: tuple[Entry, Entry]) -> bool:
    """Whether two entries are different modules that a file can call by one flat name."""
    one, other = pair
    return (
        one.native == other.native
        and one.place != other.place
        and bool(set(one.component.roles) & set(other.component.roles))
        and can_clash(united(one.name), united(other.name))
    )


def ambiguous(flat: str, one: str, other: str) -> ModelError:
    """The error for two modules that a flat name cannot tell apart."""
    return ModelError(
        f"{one!r} and {other!r} both flatten to {flat!r}",
        code="MODEL-FLAT-NAMES",
        subject=flat,
        evidence={"modules": [one, other]},
        remedy="Flat names (lora_unet_...) cannot tell these modules apart: use a dotted spelling, or rename one.",
    )


def united(name: str) -> str:
    """A name with one sign for dots and underscores; two names flatten alike just where these are equal."""
    if "{" not in name:
        return name.replace("_", ".")
    return ".".join(part if FIELD.fullmatch(part) else part.replace("_", ".") for part in name.split("."))


def skeleton(name: str) -> tuple[str, ...]:
    """The segments with every number and number field blanked: a name shares it with the templates that it fits."""
    return tuple("#" if is_open(part) else part for part in name.split("."))


def is_open(part: str) -> bool:
    """Whether a segment is a number, or a field for one; the first sign tells for most."""
    return part[:1] in OPENING and bool(NUMBER.fullmatch(part) or FIELD.fullmatch(part))


def filled(template: str, numbers: Mapping[str, str]) -> str:
    """A template with its numbers filled in."""
    return ".".join(numbers.get(part, part) for part in template.split("."))
