"""Anima in memory: from files to modules, and all that a LoadedModel is asked for.

A model comes from a diffusers folder, or from the three files that other programs use. The order of work: headers
first, then the modules on the meta device (shapes without memory), then the accounts of keys in both directions, and
only then the tensors, one by one, each hashed, checked for NaN and inf, cast and put in its place. Nothing is fetched
from a hub.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import (
    AnimaAutoBlocks,
    AnimaModularPipeline,
    AnimaTextConditioner,
    AutoencoderKLQwenImage,
    ClassifierFreeGuidance,
    CosmosTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
)
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, Qwen3Model

from finitune.errors import ModelError, UsageError
from finitune.files.tensorfile import TensorFile, compute_tensor_digest, hash_tensor
from finitune.models.anima import ANIMA
from finitune.models.anima.attention import apply_attention_function
from finitune.models.anima.components import (
    ComponentSource,
    build_anima_component,
    load_component_tensors,
    make_ignored_tensor_notes,
    make_published_settings_note,
    refuse_adapter,
    remake_buffers,
    require_component_tensors,
    require_fitting_components,
    require_role,
)
from finitune.models.anima.configs import CONFIG_READER_BY_COMPONENT, PUBLISHED_ANIMA_SETTINGS, ComponentConfig
from finitune.models.anima.encode import AnimaDenoiser, AnimaEncoders, TextLevel
from finitune.models.anima.folders import (
    ANIMA_MODULES,
    ANIMA_TOKENIZERS,
    find_component_checkpoint,
    load_tokenizers,
    read_anima_config_file,
    read_component_settings,
    require_subfolder,
)
from finitune.models.anima.keys import SortedKeys, sort_dit, sort_plain, sort_text_encoder, sort_vae
from finitune.models.loaded import AttentionFunction, LoadedModel, ModelModule
from finitune.models.spec import find_file_part
from finitune.report import Finding, Level

DtypeSelector = Callable[[str], "torch.dtype | None"]
"""From "component.parameter", as in "transformer.proj_out.weight", to the dtype to hold it in; None: as stored."""

KEY_SORTER_BY_ROLE: dict[str, Callable[..., SortedKeys]] = {
    "dit": sort_dit,
    "qwen3": sort_text_encoder,
    "vae": sort_vae,
}
_SHIPPED_FILE_NAMES = {"qwen3": "qwen_3_06b_base.safetensors", "vae": "qwen_image_vae.safetensors"}
"""As the model's release calls the files beside the denoiser's."""


@dataclass
class AnimaParts(LoadedModel):
    """All of Anima in memory."""

    family = ANIMA
    modules = (
        ModelModule("text_encoder"),
        ModelModule("text_conditioner", attends=True),
        ModelModule("transformer", border="fp32", attends=True),
        ModelModule("vae", border="fp32", decoder="decoder"),
    )
    denoiser = "transformer"
    pipelines = ("AnimaModularPipeline",)
    tokenizers: ClassVar = {
        "qwen3": ("tokenizer", "qwen3_max_token_length"),
        "t5": ("t5_tokenizer", "t5_max_token_length"),
    }

    transformer: CosmosTransformer3DModel
    text_conditioner: AnimaTextConditioner
    text_encoder: Qwen3Model
    vae: AutoencoderKLQwenImage
    tokenizer: PreTrainedTokenizerBase
    t5_tokenizer: PreTrainedTokenizerBase
    scheduler: FlowMatchEulerDiscreteScheduler
    fingerprint: str
    notes: list[Finding] = field(default_factory=list)

    @classmethod
    def recognises(cls, path: Path) -> bool:
        if path.is_dir():
            return (path / "text_conditioner").is_dir()
        part = find_file_part(TensorFile(path), [ANIMA])
        return part is not None and bool(part.role)

    @classmethod
    def open(cls, path: Path, files: Mapping[str, Path]) -> AnimaParts:
        if path.is_dir():
            return load_folder(path)
        refuse_missing_files(path, files)
        return load_three_files(
            dit=path, qwen3=files["qwen3"], vae=files["vae"], tokenizers=files.get("tokenizers", path.parent)
        )

    @classmethod
    def of_pipeline(cls, pipe: Any) -> AnimaParts:
        return extract_pipeline_parts(pipe)

    @classmethod
    def build_on_meta(cls, path: Path, files: Mapping[str, Path], names: Sequence[str]) -> dict[str, nn.Module]:
        if path.is_dir():
            settings = {name: read_anima_config_file(path / name / "config.json") for name in names}
        else:
            refuse_missing_files(path, files)
            settings = infer_component_settings({"dit": path, "qwen3": files["qwen3"], "vae": files["vae"]})
        return {name: build_anima_component(name, settings[name]) for name in names if name in settings}

    @classmethod
    def load_tokenizers(cls, folder: Path) -> dict[str, Any]:
        return load_tokenizers(folder) if (folder / ANIMA_TOKENIZERS[0]).is_dir() else {}

    @torch.no_grad()
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
        pipe: Any = build_anima_pipeline(self)
        silence_progress_bars(pipe._blocks)
        pipe.update_components(guider=ClassifierFreeGuidance(guidance_scale=guidance))
        state = pipe(
            prompt=prompts,
            negative_prompt=negatives,
            num_inference_steps=steps,
            width=size[0],
            height=size[1],
            generator=generators,
            output_type="pt",
        )
        return state.get("latents").float(), state.get("images").float()

    def count_denoiser_calls(self, steps: int, guidance: float) -> int:
        guider: Any = ClassifierFreeGuidance(guidance_scale=guidance)
        return steps * guider.num_conditions

    def unscale_latents(self, latents: Tensor) -> Tensor:
        config: Any = self.vae.config
        mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (config.latents_mean, config.latents_std))
        return latents * std.to(latents) + mean.to(latents)

    def make_encoders(self, trained: Collection[str], limits: Mapping[str, int]) -> AnimaEncoders:
        level: TextLevel = "context"
        if "text_encoder" in trained:
            level = "tokens"
        elif "text_conditioner" in trained:
            level = "states"
        return AnimaEncoders.of(self, level, limits["qwen3"], limits["t5"])

    def make_denoiser(self, modules: Mapping[str, nn.Module]) -> AnimaDenoiser:
        return AnimaDenoiser(modules["transformer"], modules["text_conditioner"], modules["text_encoder"])

    def put_into_pipeline(self, pipe: Any) -> None:
        pipe.update_components(**self.named_modules())

    def apply_attention(self, root: nn.Module, attention: AttentionFunction) -> AbstractContextManager[Any]:
        return apply_attention_function(root, attention)

    def check_conditioning(self) -> Iterator[Finding]:
        scheduler, vae = map(dict[str, Any], (self.scheduler.config, self.vae.config))
        shift = scheduler.get("shift")
        if shift != PUBLISHED_ANIMA_SETTINGS["scheduler"]["shift"]:
            message = f"the scheduler's shift is {shift}; Anima's is 3"
            yield Finding(Level.WARNING, "SCHEDULER-SHIFT", "scheduler", message, remedy="Set shift = 3.0.")
        channels, deviations = vae["z_dim"], vae["latents_std"]
        if len(deviations) != channels or min(deviations) <= 0:
            message = f"latents_std does not give {channels} positive numbers"
            remedy = "Use the VAE that belongs to this model."
            yield Finding(Level.ERROR, "LATENTS-SCALING", "vae", message, remedy=remedy)


def load_folder(path: str | Path, dtype_of: DtypeSelector | None = None) -> AnimaParts:
    """Anima from a diffusers folder (transformer, text_conditioner, text_encoder, vae, tokenizers, scheduler).

    Raises FileError for what is missing or damaged, ModelError for tensors that do not make the model, and
    NumericsError for NaN or inf in them.
    """
    path = Path(path)
    folders = {name: require_subfolder(path, name) for name in (*ANIMA_MODULES, *ANIMA_TOKENIZERS, "scheduler")}
    notes: list[Finding] = []
    configs: dict[str, ComponentConfig] = {}
    sources: dict[str, ComponentSource] = {}
    for name in ANIMA_MODULES:
        file = TensorFile(find_component_checkpoint(folders[name]))
        refuse_adapter(file)
        names = sort_text_encoder(file) if name == "text_encoder" else sort_plain(name, file)
        notes += make_ignored_tensor_notes(file, names)
        configs[name] = read_anima_config_file(folders[name] / "config.json")
        sources[name] = ComponentSource(file, names.names[name], names.unknown)
    scheduler = read_anima_config_file(folders["scheduler"] / "scheduler_config.json")
    return assemble_anima_parts(configs, sources, load_tokenizers(path), scheduler, dtype_of, notes)


def load_three_files(
    *,
    dit: str | Path,
    qwen3: str | Path,
    vae: str | Path,
    tokenizers: str | Path,
    dtype_of: DtypeSelector | None = None,
) -> AnimaParts:
    """Anima from a denoiser with its adapter, a Qwen3 and a VAE file, and a folder with both tokenizers.

    Sizes come from the headers: any number of blocks, any width. Raises as `load_folder` does.
    """
    notes: list[Finding] = []
    configs: dict[str, ComponentConfig] = {}
    sources: dict[str, ComponentSource] = {}
    scheduler = PUBLISHED_ANIMA_SETTINGS["scheduler"]
    for role, path in {"dit": dit, "qwen3": qwen3, "vae": vae}.items():
        file = TensorFile(path)
        require_role(file, role)
        names = KEY_SORTER_BY_ROLE[role](file)
        notes += make_ignored_tensor_notes(file, names)
        stated = read_component_settings(file)
        scheduler = {**scheduler, **stated.get("scheduler", {})}
        for name, key_of in names.names.items():
            shapes = {new: file.entries[old].shape for new, old in key_of.items()}
            configs[name] = CONFIG_READER_BY_COMPONENT[name](
                shapes, {**PUBLISHED_ANIMA_SETTINGS[name], **stated.get(name, {})}
            )
            sources[name] = ComponentSource(file, key_of, names.unknown)
            if name not in stated:
                notes.append(make_published_settings_note(file, name))
    return assemble_anima_parts(configs, sources, load_tokenizers(Path(tokenizers)), scheduler, dtype_of, notes)


def assemble_anima_parts(
    configs: Mapping[str, ComponentConfig],
    sources: Mapping[str, ComponentSource],
    tokenizers: Mapping[str, Any],
    scheduler: ComponentConfig,
    dtype_of: DtypeSelector | None,
    notes: list[Finding],
) -> AnimaParts:
    """Build, account for, fill and join all parts."""
    modules: dict[str, Any] = {name: build_anima_component(name, configs[name]) for name in ANIMA_MODULES}
    for name in ANIMA_MODULES:
        require_component_tensors(name, modules[name], sources[name])
    require_fitting_components(modules, tokenizers)
    settings: dict[str, Any] = {key: value for key, value in scheduler.items() if not key.startswith("_")}
    hashes: dict[str, str] = {}
    for name in ANIMA_MODULES:
        hashes |= load_component_tensors(name, modules[name], sources[name], dtype_of or (lambda _: None))
        remake_buffers(modules[name])
        modules[name].eval()
    return AnimaParts(
        **modules,
        **tokenizers,
        scheduler=FlowMatchEulerDiscreteScheduler(**settings),
        fingerprint=compute_tensor_digest(hashes),
        notes=notes,
    )


def refuse_missing_files(path: Path, files: Mapping[str, Path]) -> None:
    """Raise UsageError (MODEL-FILES-MISSING) where the denoiser's file is given without the others."""
    missing = [role for role in ("qwen3", "vae") if role not in files]
    if missing:
        require_role(TensorFile(path), "dit")
        raise UsageError(
            f"{path.name} is one file of three: {' and '.join(f'--{role}' for role in missing)} missing",
            code="MODEL-FILES-MISSING",
            subject=str(path),
            evidence={"missing": missing},
            remedy=f"finitune ... {path.name} "
            + " ".join(f"--{role} {name}" for role, name in _SHIPPED_FILE_NAMES.items()),
        )


def infer_component_settings(files: Mapping[str, Path]) -> dict[str, ComponentConfig]:
    """The settings of all components, by the headers of the three files, of which each is looked at."""
    settings: dict[str, ComponentConfig] = {}
    for role, path in files.items():
        file = TensorFile(path)
        require_role(file, role)
        for name, key_of in KEY_SORTER_BY_ROLE[role](file).names.items():
            shapes = {new: file.entries[old].shape for new, old in key_of.items()}
            settings[name] = CONFIG_READER_BY_COMPONENT[name](shapes, PUBLISHED_ANIMA_SETTINGS[name])
    return settings


def build_anima_pipeline(parts: AnimaParts) -> AnimaModularPipeline:
    """A diffusers AnimaModularPipeline of these parts with classifier-free guidance at 4, ready to be called."""
    joined: Any = AnimaAutoBlocks().init_pipeline()
    names = (*ANIMA_MODULES, *ANIMA_TOKENIZERS, "scheduler")
    joined.update_components(
        **{name: getattr(parts, name) for name in names}, guider=ClassifierFreeGuidance(guidance_scale=4.0)
    )
    return joined


def extract_pipeline_parts(pipe: AnimaModularPipeline) -> AnimaParts:
    """The parts of a pipeline that somebody else has loaded; raises ModelError where it lacks one.

    The fingerprint is of its tensors in memory: that of the files only while they are held as they were stored.
    """
    components: dict[str, Any] = {
        name: getattr(pipe, name, None) for name in (*ANIMA_MODULES, *ANIMA_TOKENIZERS, "scheduler")
    }
    lacking = [name for name, component in components.items() if component is None]
    if lacking:
        raise ModelError(
            f"the pipeline has no {', '.join(lacking)}",
            code="PIPELINE-PARTS-MISSING",
            subject=type(pipe).__name__,
            evidence={"missing": lacking},
            remedy="Call its load_components() or update_components() first.",
        )
    named = ((m, name, tensor) for m in ANIMA_MODULES for name, tensor in components[m].state_dict().items())
    hashes = {f"{module}.{name}": hash_tensor(tensor) for module, name, tensor in named}
    return AnimaParts(**components, fingerprint=compute_tensor_digest(hashes))


def silence_progress_bars(block: Any) -> None:
    """Turn off a pipeline's own progress bars, in whichever of its blocks they lie."""
    if hasattr(block, "set_progress_bar_config"):
        block.set_progress_bar_config(disable=True)
    for inner in getattr(block, "sub_blocks", {}).values():
        silence_progress_bars(inner)
