"""The spellings of adapter files, by the names that the field has for them.

A key is a prefix that names the component, the module's name, and a suffix (see `keys`). The module's name is
diffusers' own or that of the model's original code; flat spellings have underscores for its dots. Module names stand
in the tables of the model families, so that a spelling says nothing about any family.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from finitune.adapters.core import AdapterProgram, SuffixDialect
from finitune.models.sites import ComponentSites

NamingStyle = Literal["diffusers", "original", "kohya"]
PrefixSide = Literal["denoiser", "text", "any"]

_KOHYA_DENOISER_ROLE = "unet"
"""kohya's role of whatever removes the noise."""


@dataclass(frozen=True)
class KeyPrefix:
    """What stands before the modules of a component.

    It may hold "{role}" (kohya's names of the component), "{component}" (diffusers') or "{comfy}" (ComfyUI's); and
    stands before the denoiser alone, text encoders alone, or any component.
    """

    template: str
    side: PrefixSide = "any"

    def texts(self, component: ComponentSites) -> tuple[str, ...]:
        """All that it may be for a component, the one that we write first; nothing where it cannot name it."""
        is_denoiser = _KOHYA_DENOISER_ROLE in component.roles
        if self.side != "any" and (self.side == "denoiser") != is_denoiser:
            return ()
        if "{comfy}" in self.template and not component.comfy:
            return ()
        roles = component.roles if "{role}" in self.template else ("",)
        texts = (self.template.format(role=role, component=component.name, comfy=component.comfy) for role in roles)
        return tuple(dict.fromkeys(texts))


@dataclass(frozen=True)
class AdapterSpelling:
    """One way to spell adapter files.

    `prefixes`: a component has the first one that can name it. `dialects`: how roles are spelled, in order of
    preference. `names`: whose module names follow the prefix ("kohya": as the component's `kohya_native` says).
    `alpha`: whether the file keeps it in tensors, in metadata, or nowhere, so that the scale is 1. `software` is what
    the metadata of the producer says, where only that tells it apart; `producer` is known to train with alpha = rank,
    where the suffixes leave the scale open. `programs` are known to read it, if the model is one that they map;
    `written_for` are those for which it is the spelling to convert to. `holds`: which algorithms it can say ("peft":
    those that PEFT's configuration describes). `widens_inputs`: its adapters may have more inputs than the model.
    """

    name: str
    title: str
    prefixes: tuple[KeyPrefix, ...]
    dialects: tuple[SuffixDialect, ...]
    names: NamingStyle
    flat: bool = False
    alpha: Literal["tensor", "metadata", "nowhere"] = "tensor"
    software: str = ""
    producer: str = ""
    programs: tuple[AdapterProgram, ...] = ()
    written_for: tuple[AdapterProgram, ...] = ()
    holds: Literal["any", "lora", "peft"] = "any"
    widens_inputs: bool = False

    def texts(self, component: ComponentSites) -> tuple[str, ...]:
        """Every prefix that this spelling may put before a component's modules, the one that we write first."""
        return tuple(dict.fromkeys(text for prefix in self.prefixes for text in prefix.texts(component)))

    def prefix(self, component: ComponentSites) -> str | None:
        """The prefix to write, or None where this spelling cannot name the component."""
        return next(iter(self.texts(component)), None)

    def native(self, component: ComponentSites) -> bool:
        """Whether the original names are written for this component, rather than diffusers'."""
        return component.kohya_native if self.names == "kohya" else self.names == "original"


_BARE_PREFIX = KeyPrefix("")
_PEFT_PREFIX = KeyPrefix("base_model.model.")
_COMPONENT_PREFIX = KeyPrefix("{component}.")
_COMFY_TEXT_PREFIX = KeyPrefix("text_encoders.{comfy}.transformer.", "text")

SPELLINGS: tuple[AdapterSpelling, ...] = (
    AdapterSpelling(
        "kohya",
        "kohya / LyCORIS",
        (KeyPrefix("lora_{role}_"),),
        ("kohya",),
        "kohya",
        flat=True,
        programs=("diffusers", "ComfyUI", "A1111", "Forge", "sd-scripts"),
        written_for=("A1111", "Forge", "sd-scripts"),
    ),
    AdapterSpelling(
        "onetrainer",
        "OneTrainer",
        (KeyPrefix("lora_transformer_", "denoiser"), KeyPrefix("lora_{role}_", "text")),
        ("kohya", "peft"),
        "diffusers",
        flat=True,
        programs=("ComfyUI", "Forge"),
    ),
    AdapterSpelling(
        "lycoris",
        "LyCORIS, generic",
        (KeyPrefix("lycoris_"),),
        ("kohya",),
        "kohya",
        flat=True,
        programs=("ComfyUI", "A1111", "Forge"),
    ),
    AdapterSpelling(
        "videox-fun", "VideoX-Fun", (KeyPrefix("lora_{role}__"),), ("kohya",), "kohya", flat=True, programs=("ComfyUI",)
    ),
    AdapterSpelling(
        "kohya-oft",
        "kohya OFT",
        (KeyPrefix("oft_{role}_"),),
        ("kohya",),
        "kohya",
        flat=True,
        programs=("A1111", "sd-scripts"),
    ),
    AdapterSpelling(
        "cascade",
        "OneTrainer, Stable Cascade",
        (KeyPrefix("lora_prior_{role}_"),),
        ("kohya",),
        "kohya",
        flat=True,
        programs=("ComfyUI",),
    ),
    AdapterSpelling(
        "diffusers",
        "diffusers (PEFT)",
        (_COMPONENT_PREFIX,),
        ("peft", "genmo"),
        "diffusers",
        alpha="metadata",
        programs=("diffusers", "ComfyUI", "Forge"),
        written_for=("diffusers",),
        holds="lora",
    ),
    AdapterSpelling(
        "ai-toolkit",
        "ai-toolkit",
        (KeyPrefix("diffusion_model.", "denoiser"), _COMPONENT_PREFIX),
        ("peft", "ai-toolkit", "kohya"),
        "original",
        alpha="nowhere",
        software="ai-toolkit",
        programs=("diffusers", "ComfyUI", "Forge"),
        producer="ai-toolkit",
    ),
    AdapterSpelling(
        "comfy",
        "ComfyUI (dotted)",
        (KeyPrefix("diffusion_model.", "denoiser"), _COMFY_TEXT_PREFIX),
        ("peft", "kohya", "comfy", "genmo"),
        "original",
        programs=("diffusers", "ComfyUI", "Forge"),
        written_for=("ComfyUI",),
    ),
    AdapterSpelling(
        "omi",
        "OMI",
        (KeyPrefix("{component}.", "denoiser"), KeyPrefix("{comfy}.", "text"), KeyPrefix("t5.", "text")),
        ("kohya",),
        "original",
        programs=(),
    ),
    AdapterSpelling(
        "diffusers-old",
        "diffusers, before PEFT",
        (_COMPONENT_PREFIX, _BARE_PREFIX),
        ("diffusers-old",),
        "diffusers",
        alpha="nowhere",
        programs=("diffusers", "ComfyUI", "Forge"),
    ),
    AdapterSpelling(
        "peft",
        "PEFT",
        (_PEFT_PREFIX,),
        ("peft",),
        "diffusers",
        alpha="metadata",
        programs=("PEFT",),
        written_for=("PEFT",),
        holds="peft",
    ),
    AdapterSpelling(
        "fal",
        "fal (PEFT over original names)",
        (_PEFT_PREFIX,),
        ("peft",),
        "original",
        alpha="metadata",
        programs=("diffusers",),
        holds="peft",
    ),
    AdapterSpelling(
        "xlabs", "XLabs", (_BARE_PREFIX,), ("xlabs",), "original", alpha="nowhere", programs=("diffusers",)
    ),
    AdapterSpelling(
        "diffusers-bare",
        "diffusers names, no prefix",
        (_BARE_PREFIX,),
        ("kohya", "peft", "genmo"),
        "diffusers",
        programs=("diffusers",),
    ),
    AdapterSpelling(
        "original-bare",
        "original names, no prefix",
        (_BARE_PREFIX,),
        ("kohya", "peft", "genmo"),
        "original",
        programs=("ComfyUI",),
    ),
    AdapterSpelling(
        "bfl-control",
        "Black Forest Labs control",
        (_BARE_PREFIX,),
        ("peft", "bfl"),
        "original",
        alpha="nowhere",
        programs=("diffusers", "ComfyUI"),
        producer="Black Forest Labs",
        widens_inputs=True,
    ),
    AdapterSpelling(
        "diffusers-dotted",
        "diffusers names, kohya suffixes",
        (_COMPONENT_PREFIX,),
        ("kohya", "peft"),
        "diffusers",
        programs=("ComfyUI",),
    ),
    AdapterSpelling(
        "cloneofsimo",
        "cloneofsimo, the oldest of all",
        (_COMPONENT_PREFIX,),
        ("cloneofsimo",),
        "diffusers",
        alpha="nowhere",
        programs=(),
    ),
)
"""In the order in which they are preferred where a file fits several."""

SingleFileSpelling = Literal["kohya", "comfy", "diffusers"]
WritableSpelling = Literal[SingleFileSpelling, "peft"]
WRITABLE_SPELLINGS: tuple[WritableSpelling, ...] = get_args(WritableSpelling)

WRAPPER_PREFIXES = ("base_model.model.", "module.", "_orig_mod.", "model.diffusion_model.", "model.")
"""What wrapping a model puts before the names of its modules: PEFT, data parallel, torch.compile, whole checkpoints."""


def get_spelling(name: str) -> AdapterSpelling:
    """The spelling of a name; raises KeyError for one that is not of SPELLINGS."""
    return {spelling.name: spelling for spelling in SPELLINGS}[name]
