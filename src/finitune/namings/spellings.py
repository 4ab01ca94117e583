"""The spellings of adapter files, by the names that the field has for them.

A key is a prefix that names the component, the module's name, and a suffix (see `suffixes`). The module's name is
diffusers' own or that of the model's original code; flat spellings have underscores for its dots. Module names stand
in the tables of the model families, so that a spelling says nothing about any family.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from finitune.models.sites import ComponentSites
from finitune.namings.suffixes import Dialect

Names = Literal["diffusers", "original", "kohya"]
Side = Literal["denoiser", "text", "any"]

DENOISER = "unet"
"""kohya's role of whatever removes the noise."""


@dataclass(frozen=True)
class Prefix:
    """What stands before the modules of a component.

    It may hold "{role}" (kohya's names of the component), "{component}" (diffusers') or "{comfy}" (ComfyUI's); and
    stands before the denoiser alone, text encoders alone, or any component.
    """

    template: str
    side: Side = "any"

    def texts(self, component: ComponentSites) -> tuple[str, ...]:
        """All that it may be for a component, the one that we write first; nothing where it cannot name it."""
        is_denoiser = DENOISER in component.roles
        if self.side != "any" and (self.side == "denoiser") != is_denoiser:
            return ()
        if "{comfy}" in self.template and not component.comfy:
            return ()
        roles = component.roles if "{role}" in self.template else ("",)
        texts = (self.template.format(role=role, component=component.name, comfy=component.comfy) for role in roles)
        return tuple(dict.fromkeys(texts))


@dataclass(frozen=True)
class Spelling:
    """One way to spell adapter files.

    `prefixes`: a component has the first one that can name it. `dialects`: how roles are spelled, in order of
    preference. `names`: whose module names follow the prefix ("kohya": as the component's `kohya_native` says).
    `alpha`: whether the file keeps it in tensors, in metadata, or nowhere, so that the scale is 1. `software` is what
    the metadata of the producer says, where only that tells it apart.
    """

    name: str
    title: str
    prefixes: tuple[Prefix, ...]
    dialects: tuple[Dialect, ...]
    names: Names
    flat: bool = False
    alpha: Literal["tensor", "metadata", "nowhere"] = "tensor"
    software: str = ""

    def texts(self, component: ComponentSites) -> tuple[str, ...]:
        """Every prefix that this spelling may put before a component's modules, the one that we write first."""
        return tuple(dict.fromkeys(text for prefix in self.prefixes for text in prefix.texts(component)))

    def prefix(self, component: ComponentSites) -> str | None:
        """The prefix to write, or None where this spelling cannot name the component."""
        return next(iter(self.texts(component)), None)

    def native(self, component: ComponentSites) -> bool:
        """Whether the original names are written for this component, rather than diffusers'."""
        return component.kohya_native if self.names == "kohya" else self.names == "original"


BARE = Prefix("")
PEFT_WRAPPER = Prefix("base_model.model.")
COMPONENT = Prefix("{component}.")
COMFY_TEXT = Prefix("text_encoders.{comfy}.transformer.", "text")

SPELLINGS: tuple[Spelling, ...] = (
    Spelling("kohya", "kohya / LyCORIS", (Prefix("lora_{role}_"),), ("kohya",), "kohya", flat=True),
    Spelling("onetrainer", "OneTrainer", (Prefix("lora_transformer_", "denoiser"), Prefix("lora_{role}_", "text")),
             ("kohya", "peft"), "diffusers", flat=True),
    Spelling("lycoris", "LyCORIS, generic", (Prefix("lycoris_"),), ("kohya",), "kohya", flat=True),
    Spelling("videox-fun", "VideoX-Fun", (Prefix("lora_{role}__"),), ("kohya",), "kohya", flat=True),
    Spelling("kohya-oft", "kohya OFT", (Prefix("oft_{role}_"),), ("kohya",), "kohya", flat=True),
    Spelling("cascade", "OneTrainer, Stable Cascade", (Prefix("lora_prior_{role}_"),), ("kohya",), "kohya", flat=True),
    Spelling("diffusers", "diffusers (PEFT)", (COMPONENT,), ("peft", "genmo"), "diffusers", alpha="metadata"),
    Spelling("ai-toolkit", "ai-toolkit", (Prefix("diffusion_model.", "denoiser"), COMPONENT),
             ("peft", "ai-toolkit", "kohya"), "original", alpha="nowhere", software="ai-toolkit"),
    Spelling("comfy", "ComfyUI (dotted)", (Prefix("diffusion_model.", "denoiser"), COMFY_TEXT),
             ("peft", "kohya", "comfy", "genmo"), "original"),
    Spelling("omi", "OMI", (Prefix("{component}.", "denoiser"), Prefix("{comfy}.", "text"), Prefix("t5.", "text")),
             ("kohya",), "original"),
    Spelling("diffusers-old", "diffusers, before PEFT", (COMPONENT, BARE), ("diffusers-old",), "diffusers",
             alpha="nowhere"),
    Spelling("peft", "PEFT", (PEFT_WRAPPER,), ("peft",), "diffusers", alpha="metadata"),
    Spelling("fal", "fal (PEFT over original names)", (PEFT_WRAPPER,), ("peft",), "original", alpha="metadata"),
    Spelling("xlabs", "XLabs", (BARE,), ("xlabs",), "original", alpha="nowhere"),
    Spelling("diffusers-bare", "diffusers names, no prefix", (BARE,), ("kohya", "peft", "genmo"), "diffusers"),
    Spelling("original-bare", "original names, no prefix", (BARE,), ("kohya", "peft", "genmo"), "original"),
    Spelling("bfl-control", "Black Forest Labs control", (BARE,), ("peft", "bfl"), "original", alpha="nowhere"),
    Spelling("diffusers-dotted", "diffusers names, kohya suffixes", (COMPONENT,), ("kohya", "peft"), "diffusers"),
    Spelling("cloneofsimo", "cloneofsimo, the oldest of all", (COMPONENT,), ("cloneofsimo",), "diffusers",
             alpha="nowhere"),
)  # fmt: skip
"""In the order in which they are preferred where a file fits several."""

WRAPPERS = ("base_model.model.", "module.", "_orig_mod.", "model.diffusion_model.", "model.")
"""What wrapping a model puts before the names of its modules: PEFT, data parallel, torch.compile, whole checkpoints."""


def spelling_of(name: str) -> Spelling:
    """The spelling of a name; raises KeyError for one that is not of SPELLINGS."""
    return {spelling.name: spelling for spelling in SPELLINGS}[name]
