"""Anima from files to modules: a diffusers folder, or the three files that other programs use.

The order of work: headers first, then the modules on the meta device (shapes without memory), then the accounts of
keys in both directions, and only then the tensors, one by one, each hashed, checked for NaN and inf, cast and put in
its place. Nothing is fetched from a hub.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finitune.errors import ModelError
from finitune.files.tensorfile import TensorFile, compute_tensor_fingerprint, hash_tensor
from finitune.models.anima.components import (
    ComponentSource,
    build_anima_component,
    load_component_tensors,
    remake_buffers,
    require_component_tensors,
    require_fitting_components,
)
from finitune.models.anima.configs import CONFIG_READER_BY_COMPONENT, PUBLISHED_ANIMA_SETTINGS, ComponentConfig
from finitune.models.anima.folders import (
    ANIMA_CONFIG_METADATA_KEY,
    ANIMA_MODULES,
    ANIMA_TOKENIZERS,
    find_component_checkpoint,
    load_tokenizers,
    read_anima_config_file,
    read_component_settings,
    require_subfolder,
)
from finitune.models.anima.keys import (
    ANIMA_CONDITIONER_KEYS,
    ANIMA_DENOISER_PREFIXES,
    ANIMA_TRANSFORMER_KEYS,
    SortedKeys,
    build_vae_keymap,
    infer_vae_layout,
    recognise_anima_file,
    sort_dit,
    sort_plain,
    sort_text_encoder,
    sort_vae,
)
from finitune.report import Finding, Level

if TYPE_CHECKING:
    import torch
    from diffusers import (
        AnimaModularPipeline,
        AnimaTextConditioner,
        AutoencoderKLQwenImage,
        CosmosTransformer3DModel,
        FlowMatchEulerDiscreteScheduler,
    )
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase, Qwen3Model

DtypeSelector = Callable[[str], "torch.dtype | None"]
"""From "component.parameter", as in "transformer.proj_out.weight", to the dtype to hold it in; None: as stored."""

_FILE_NAME_BY_ROLE = {"dit": "anima.safetensors", "qwen3": "qwen3.safetensors", "vae": "vae.safetensors"}
_EXPECTED_CONTENT_BY_ROLE = {"dit": "the denoiser of Anima", "qwen3": "the text encoder", "vae": "the VAE"}
KEY_SORTER_BY_ROLE: dict[str, Callable[..., SortedKeys]] = {
    "dit": sort_dit,
    "qwen3": sort_text_encoder,
    "vae": sort_vae,
}


@dataclass
class AnimaParts:
    """All of Anima in memory; `fingerprint` is of the stored tensors, the same in whichever layout they lie."""

    transformer: CosmosTransformer3DModel
    text_conditioner: AnimaTextConditioner
    text_encoder: Qwen3Model
    vae: AutoencoderKLQwenImage
    tokenizer: PreTrainedTokenizerBase
    t5_tokenizer: PreTrainedTokenizerBase
    scheduler: FlowMatchEulerDiscreteScheduler
    fingerprint: str
    notes: list[Finding] = field(default_factory=list)


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
    from diffusers import FlowMatchEulerDiscreteScheduler

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
        fingerprint=compute_tensor_fingerprint(hashes),
        notes=notes,
    )


def build_anima_pipeline(parts: AnimaParts) -> AnimaModularPipeline:
    """A diffusers AnimaModularPipeline of these parts with classifier-free guidance at 4, ready to be called."""
    from diffusers import AnimaAutoBlocks, ClassifierFreeGuidance

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
    return AnimaParts(**components, fingerprint=compute_tensor_fingerprint(hashes))


def save_three_files(parts: AnimaParts, folder: str | Path, dtype: torch.dtype | None = None) -> dict[str, Path]:
    """Write the denoiser with its adapter, Qwen3 and the VAE under their original names, and both tokenizers.

    Tensors are stored as `dtype`, bfloat16 by default. What no header tells is put in the metadata. Returns the
    arguments of `load_three_files`. Raises NumericsError, before anything is written, where a tensor is not finite.
    """
    import torch

    from finitune.files.writer import save_tensors, write_bytes
    from finitune.models.anima.components import require_finite

    dtype = dtype or torch.bfloat16
    folder = Path(folder)
    files = {role: dict(list_original_tensors(parts, role)) for role in _FILE_NAME_BY_ROLE}
    for role, tensors in files.items():
        files[role] = {name: tensor.detach().to(dtype) for name, tensor in tensors.items()}
        require_finite(folder / _FILE_NAME_BY_ROLE[role], files[role])
    for role, tensors in files.items():
        stated = {
            ANIMA_CONFIG_METADATA_KEY: json.dumps(collect_hidden_settings(parts, role), sort_keys=True),
            "format": "pt",
        }
        save_tensors(folder / _FILE_NAME_BY_ROLE[role], tensors, stated)
    for name, content in serialise_tokenizers(parts):
        write_bytes(folder / name, content)
    return {role: folder / name for role, name in _FILE_NAME_BY_ROLE.items()} | {"tokenizers": folder}


def list_original_tensors(parts: AnimaParts, role: str) -> Iterator[tuple[str, Tensor]]:
    """(original name, tensor) of what one of the three files holds."""
    if role == "dit":
        for part, keymap in (
            (parts.transformer, ANIMA_TRANSFORMER_KEYS),
            (parts.text_conditioner, ANIMA_CONDITIONER_KEYS),
        ):
            for name, tensor in part.state_dict().items():
                yield ANIMA_DENOISER_PREFIXES[0] + require_original_name(keymap.backward(name), name), tensor
    elif role == "qwen3":
        for name, tensor in parts.text_encoder.state_dict().items():
            yield "model." + name, tensor
    else:
        state = parts.vae.state_dict()
        keymap = build_vae_keymap(*infer_vae_layout(state))
        for name, tensor in state.items():
            yield require_original_name(keymap.backward(name), name), tensor


def require_original_name(original: str | None, name: str) -> str:
    """The original name; raises ModelError where the original has no such tensor."""
    if original is None:
        raise ModelError(
            f"{name} has no name in Anima's original files",
            code="MODEL-KEYS-UNEXPECTED",
            subject=name,
            remedy="Detach adapters and other additions first; only Anima itself can be written in this layout.",
        )
    return original


def collect_hidden_settings(parts: AnimaParts, role: str) -> dict[str, ComponentConfig]:
    """By component, the settings in one of the three files that its header does not tell."""
    components = {"dit": ("transformer", "text_conditioner", "scheduler"), "qwen3": ("text_encoder",), "vae": ("vae",)}
    stated: dict[str, ComponentConfig] = {}
    for name in components[role]:
        config = getattr(parts, name).config
        config = config if isinstance(config, dict) else config.to_dict()
        stated[name] = {key: config[key] for key in PUBLISHED_ANIMA_SETTINGS[name]}
    return stated


def serialise_tokenizers(parts: AnimaParts) -> Iterator[tuple[str, bytes]]:
    """(relative name, content) of every file that both tokenizers are saved in."""
    from tempfile import TemporaryDirectory

    for name in ANIMA_TOKENIZERS:
        with TemporaryDirectory() as place:
            getattr(parts, name).save_pretrained(place)
            for file in sorted(Path(place).iterdir()):
                yield f"{name}/{file.name}", file.read_bytes()


def refuse_adapter(file: TensorFile) -> None:
    """Raises ModelError where a file given as a model is an adapter."""
    if recognise_anima_file(file) == "an adapter":
        raise ModelError(
            f"{file.path} is an adapter (LoRA or alike), not a model",
            code="MODEL-IS-ADAPTER",
            subject=str(file.path),
            evidence={"tensors": len(file), "first": next(iter(file))},
            remedy="Give the base model here, and this file where adapters are asked for.",
        )


def require_role(file: TensorFile, role: str) -> None:
    """Raises ModelError where a file is not the part that it was given as."""
    refuse_adapter(file)
    what = recognise_anima_file(file)
    if what == _EXPECTED_CONTENT_BY_ROLE[role]:
        return
    right = next((other for other, expected in _EXPECTED_CONTENT_BY_ROLE.items() if expected == what), None)
    if right:
        remedy = f"Give it as {right}=, and the file with {_EXPECTED_CONTENT_BY_ROLE[role]} as {role}=."
    elif "diffusers" in what or "alone" in what:
        remedy = "It belongs to a diffusers folder: give the whole folder instead."
    else:
        remedy = "It is not a file of Anima, or is of a format not known here."
    raise ModelError(
        f"{file.path} holds {what}; {_EXPECTED_CONTENT_BY_ROLE[role]} was expected",
        code="MODEL-WRONG-PART",
        subject=str(file.path),
        evidence={"tensors": len(file), "first": list(file)[:3]},
        remedy=remedy,
    )


def make_ignored_tensor_notes(file: TensorFile, names: SortedKeys) -> list[Finding]:
    """Notes on tensors that a file has and no component needs."""
    found = (
        (names.tolerated, "MODEL-BUFFERS-IGNORED", "buffers are stored; they are computed instead"),
        (names.unused, "MODEL-HEAD-IGNORED", "is of the language model; a text encoder has no use for it"),
    )
    return [
        Finding(Level.NOTE, code, str(file.path), f"{len(keys)} {what}", {"first": list(keys[:3])})
        for keys, code, what in found
        if keys
    ]


def make_published_settings_note(file: TensorFile, component: str) -> Finding:
    """The note that a component's untold settings are Anima's published ones."""
    return Finding(
        Level.NOTE,
        "MODEL-PUBLISHED-SETTINGS",
        str(file.path),
        f"it does not state the {component}'s {', '.join(PUBLISHED_ANIMA_SETTINGS[component])}: Anima's published "
        "values are used",
        dict(PUBLISHED_ANIMA_SETTINGS[component]),
    )
