"""Which modules a model has, and how its original authors and the field's programs call them: templates, not key dumps.

A template is a dotted module name in which a segment may be a number field, "{i}". The site of a module is its name
as diffusers (or transformers) spells it; a Place says what the original naming calls one site, or several that the
original keeps fused in one weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

RowDivision = Literal["equal", "by-input"]


@dataclass(frozen=True)
class ModulePlace:
    """One module of the original naming, and the site or sites that its rows are, from top to bottom.

    Rows are divided into `equal` parts, or `by-input`: each part has as many rows as the weight has inputs, and the
    last has the rest. `swapped`: the two halves of the rows stand in the other order (scale, shift).

    In a checkpoint the module's tensors are called name + `weight` and name + `bias`; `transposed`: the weight lies
    there with its inputs first.
    """

    name: str
    sites: tuple[str, ...]
    division: RowDivision = "equal"
    swapped: bool = False
    weight: str = ".weight"
    bias: str = ".bias"
    transposed: bool = False


@dataclass(frozen=True)
class ComponentSites:
    """The modules with weights of one component, and what files call the component.

    `roles` are kohya's names for it ("unet", "te", "te1" ...), the one that we write first. `comfy` is ComfyUI's name
    of a text encoder. `single_file` are the prefixes of its original names in whole checkpoints. `places` is empty
    where the original naming is diffusers' own. `outer` is what every site starts with in files, and what the class
    of some library versions leaves out: transformers 5 has the text model of CLIP without "text_model.".
    """

    name: str
    roles: tuple[str, ...]
    sites: tuple[str, ...]
    places: tuple[ModulePlace, ...] = ()
    comfy: str = ""
    single_file: tuple[str, ...] = ()
    kohya_native: bool = False
    """Whether kohya's flat names are made from the original names rather than from diffusers'."""
    outer: str = ""


@dataclass(frozen=True)
class Hallmark:
    """A weight whose extent tells this family from its relatives: `site` has `inputs` inputs."""

    component: str
    site: str
    inputs: int


@dataclass(frozen=True)
class AdapterSites:
    """All that is needed to read and write a family's adapters.

    `base_model_versions` are the values of kohya's ss_base_model_version that name the family, the one that we write
    first; `architecture` and `prediction_type` are written to modelspec.*. `block_maps` are published re-numberings
    of blocks between variants of the family: {"28 to 40": (template of the block, {from: to})}. `depths` are the
    published numbers of blocks, {template of the block: number}: evidence where two families' names and widths agree.
    `trained` is where the field's trainers put adapters, {component: regular expression of sites}; `untrained`, an
    expression of original names, is what they leave out of that unless they are told to.
    """

    components: tuple[ComponentSites, ...]
    hallmarks: tuple[Hallmark, ...] = ()
    base_model_versions: tuple[str, ...] = ()
    architecture: str = ""
    prediction_type: str = "epsilon"
    block_maps: Mapping[str, tuple[str, Mapping[int, int]]] = field(default_factory=dict)
    depths: Mapping[str, int] = field(default_factory=dict)
    trained: Mapping[str, str] = field(default_factory=dict)
    untrained: str = ""
    switches: Mapping[str, str] = field(default_factory=dict)
    """The option of [network] that puts adapters on a component of `trained`; one without an option always has them."""
    rates: Mapping[str, str] = field(default_factory=dict)
    """The option of [optimizer] that is a component's own learning rate."""


def make_single_site_places(*pairs: tuple[str, str]) -> tuple[ModulePlace, ...]:
    """Places of one site each, from (original name, site) pairs."""
    return tuple(ModulePlace(name, (site,)) for name, site in pairs)


def list_place_sites(places: Iterable[ModulePlace]) -> tuple[str, ...]:
    """The sites of all places, in order."""
    return tuple(site for place in places for site in place.sites)
