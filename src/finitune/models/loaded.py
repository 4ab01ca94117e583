"""The seam between the families and whoever loads, draws with and trains them: a family that is run implements this.

Everything outside of a family's folder asks a LoadedModel; nothing there names a family.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from finitune.errors import FinituneError
from finitune.models import MODEL_FAMILIES
from finitune.models.spec import ModelSpec
from finitune.report import Finding

AttentionFunction = Callable[..., Tensor]
"""(query, key, value, mask), each (B, H, L, D) -> (B, H, L, D)."""

DenoiserCallable = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]
"""(noisy fp32 (B, C, ...), sigma fp32 (B,), conditioning) -> what the objective compares, fp32."""


class FamilyEncoders(Protocol):
    """What a model family makes of pictures and texts; everything is fp32 on the CPU."""

    @property
    def identity(self) -> Mapping[str, str]:
        """Digests of what makes latents and texts: an entry of a cache made by another one is stale.

        A name that begins with "latents." or "texts." is about entries of that kind alone.
        """
        ...

    def latents(self, pixels: Tensor) -> Tensor:
        """uint8 (B, H, W, 3) to normalised latents fp32 (B, C, 1, h, w)."""
        ...

    def texts(self, captions: list[str]) -> list[dict[str, Tensor]]:
        """What the denoiser is told of each caption, by name; each tensor without padding, (L, ...)."""
        ...

    def collate(self, texts: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The texts of one batch, padded as the model wants it, (B, L, ...)."""
        ...


@dataclass(frozen=True)
class ModelModule:
    """A module of a loaded model, and how it computes.

    `border` is the dtype in which a planned run hands in and takes out activations: fp32 where latents and timesteps
    have to stay exact. `attends`: `apply_attention` reaches its attentions. `decoder` is the submodule that makes
    pictures of latents, of a VAE.
    """

    name: str
    border: Literal["fp16", "fp32"] = "fp16"
    attends: bool = False
    decoder: str = ""


class LoadedModel(ABC):
    """A model in memory: a dataclass of a family with each component as an attribute.

    `modules` are those with weights in the order in which a drawing runs them, `denoiser` the name of the one that is
    called in each step, `pipelines` diffusers' classes for the family. `tokenizers` are (attribute, option of
    [training] that limits its tokens) by a short name. `objective` is what the family learns, by its name in training;
    `patch` the side of a token in latents.
    """

    family: ClassVar[ModelSpec]
    modules: ClassVar[tuple[ModelModule, ...]]
    denoiser: ClassVar[str]
    pipelines: ClassVar[tuple[str, ...]] = ()
    tokenizers: ClassVar[Mapping[str, tuple[str, str]]] = {}
    objective: ClassVar[str] = "flow"
    patch: ClassVar[int] = 2

    fingerprint: str
    """Of the stored tensors: the same in whichever layout they lie."""
    notes: list[Finding]

    @classmethod
    @abstractmethod
    def recognises(cls, path: Path) -> bool:
        """Whether a folder or a file is of the family, by its headers; may raise FileError."""

    @classmethod
    @abstractmethod
    def open(cls, path: Path, files: Mapping[str, Path]) -> LoadedModel:
        """The model of a folder, or of a file and the other `files` that the user names; as stored, on the CPU.

        Raises FileError for what is missing or damaged, UsageError (MODEL-FILES-MISSING) where files are not named,
        ModelError for tensors that do not make the model, and NumericsError for NaN or inf in them.
        """

    @classmethod
    @abstractmethod
    def of_pipeline(cls, pipe: Any) -> LoadedModel:
        """The parts of a diffusers pipeline that somebody else has loaded; raises ModelError where it lacks one."""

    @classmethod
    @abstractmethod
    def build_on_meta(cls, path: Path, files: Mapping[str, Path], names: Sequence[str]) -> dict[str, nn.Module]:
        """Some components without their tensors, by headers and settings alone; raises as `open` does."""

    @classmethod
    def load_tokenizers(cls, folder: Path) -> dict[str, Any]:
        """The tokenizers in a folder by attribute, nothing where it has none; raises FileError."""
        return {}

    @abstractmethod
    def draw(
        self,
        prompts: list[str],
        negatives: list[str],
        generators: list[torch.Generator],
        *,
        steps: int,
        guidance: float,
        size: tuple[int, int],
    ) -> tuple[Tensor, Tensor]:
        """The final latents (N, C, ...), and the pictures in 0 .. 1 (N, 3, H, W), by the modules as they are."""

    @abstractmethod
    def count_denoiser_calls(self, steps: int, guidance: float) -> int:
        """How often a drawing calls the denoiser."""

    @abstractmethod
    def unscale_latents(self, latents: Tensor) -> Tensor:
        """Final latents as the VAE's `decode` is given them."""

    @abstractmethod
    def make_encoders(self, trained: Collection[str], limits: Mapping[str, int]) -> FamilyEncoders:
        """What encodes pictures and captions for a training of these components; `limits` are tokens by tokenizer."""

    @abstractmethod
    def make_denoiser(self, modules: Mapping[str, nn.Module]) -> DenoiserCallable:
        """The denoiser as a training calls it, by these modules (all but the VAE)."""

    @abstractmethod
    def put_into_pipeline(self, pipe: Any) -> None:
        """Let a diffusers pipeline of the family run the modules of this model."""

    def apply_attention(self, root: nn.Module, attention: AttentionFunction) -> AbstractContextManager[Any]:
        """Let `attention` compute every attention of a module that `attends` while the context is open."""
        return nullcontext(root)

    def check_conditioning(self) -> Iterator[Finding]:
        """What is wrong with settings that make black pictures: the scheduler's, the latents' scaling."""
        return iter(())

    def module(self, name: str) -> nn.Module:
        """The module of this name."""
        return getattr(self, name)

    def named_modules(self) -> dict[str, nn.Module]:
        """The modules by name, in their order."""
        return {one.name: self.module(one.name) for one in self.modules}

    def with_modules(self, modules: Mapping[str, nn.Module]) -> LoadedModel:
        """The same model with other modules in the places of its own."""
        return cast("LoadedModel", replace(cast("Any", self), **modules))

    def prepare_for_encoding(self) -> None:
        """Hold what encodes pictures and captions in fp32, frozen: each of them goes through it once."""
        for name, module in self.named_modules().items():
            if name != self.denoiser:
                module.float().requires_grad_(False)


def list_loaded_classes() -> list[type[LoadedModel]]:
    """The class of every family that can be run, the first of MODEL_FAMILIES first."""
    places = (family.runtime.partition(":") for family in MODEL_FAMILIES if family.runtime)
    return [getattr(import_module(module), name) for module, _, name in places]


def find_loaded_class(path: Path) -> type[LoadedModel]:
    """The class of the family that recognises a folder or a file; else the first, which says what it is instead."""
    classes = list_loaded_classes()
    for one in classes:
        with suppress(FinituneError, OSError):
            if one.recognises(path):
                return one
    return classes[0]


def find_pipeline_class(pipe: Any) -> type[LoadedModel]:
    """The class of the family that a diffusers pipeline is of; else the first, which says what the pipeline lacks."""
    classes, names = list_loaded_classes(), {base.__name__ for base in type(pipe).__mro__}
    return next((one for one in classes if names & {*one.pipelines}), classes[0])
