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
from finitune.files.tensorfile import TensorFile, fingerprint_of, hash_tensor
from finitune.models.anima.assemble import Source, account, build, components_fit, fill, remake_buffers
from finitune.models.anima.folders import (
    METADATA_KEY,
    MODULES,
    TOKENIZERS,
    load_tokenizers,
    read_config,
    read_metadata,
    subfolder,
    weights_in,
)
from finitune.models.anima.headers import CONFIGS, PUBLISHED, Config
from finitune.models.anima.keys import (
    CONDITIONER,
    PREFIXES,
    TRANSFORMER,
    Sorted,
    recognise,
    sort_dit,
    sort_plain,
    sort_text_encoder,
    sort_vae,
    vae_keys,
    vae_layout,
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

DtypeOf = Callable[[str], "torch.dtype | None"]
"""From "component.parameter", as in "transformer.proj_out.weight", to the dtype to hold it in; None: as stored."""

FILE_NAMES = {"dit": "anima.safetensors", "qwen3": "qwen3.safetensors", "vae": "vae.safetensors"}
EXPECTED = {"dit": "the denoiser of Anima", "qwen3": "the text encoder", "vae": "the VAE"}
SORTERS: dict[str, Callable[..., Sorted]] = {"dit": sort_dit, "qwen3": sort_text_encoder, "vae": sort_vae}


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


def load_folder(path: str | Path, dtype_of: DtypeOf | None = None) -> AnimaParts:
    """Anima from a diffusers folder (transformer, text_conditioner, text_encoder, vae, tokenizers, scheduler).

    Raises FileError for what is missing or damaged, ModelError for tensors that do not make the model, and
    NumericsError for NaN or inf in them.
    """
    path = Path(path)
    folders = {name: subfolder(path, name) for name in (*MODULES, *TOKENIZERS, "scheduler")}
    notes: list[Finding] = []
    configs: dict[str, Config] = {}
    sources: dict[str, Source] = {}
    for name in MODULES:
        file = TensorFile(weights_in(folders[name]))
        refuse_adapter(file)
        names = sort_text_encoder(file) if name == "text_encoder" else sort_plain(name, file)
        notes += ignored(file, names)
        configs[name] = read_config(folders[name] / "config.json")
        sources[name] = Source(file, names.names[name], names.unknown)
    scheduler = read_config(folders["scheduler"] / "scheduler_config.json")
    return assemble(configs, sources, load_tokenizers(path), scheduler, dtype_of, notes)


def load_three_files(
    *,
    dit: str | Path,
    qwen3: str | Path,
    vae: str | Path,
    tokenizers: str | Path,
    dtype_of: DtypeOf | None = None,
) -> AnimaParts:
    """Anima from a denoiser with its adapter, a Qwen3 and a VAE file, and a folder with both tokenizers.

    Sizes come from the headers: any number of blocks, any width. Raises as `load_folder` does.
    """
    notes: list[Finding] = []
    configs: dict[str, Config] = {}
    sources: dict[str, Source] = {}
    scheduler = PUBLISHED["scheduler"]
    for role, path in {"dit": dit, "qwen3": qwen3, "vae": vae}.items():
        file = TensorFile(path)
        require_role(file, role)
        names = SORTERS[role](file)
        notes += ignored(file, names)
        stated = read_metadata(file)
        scheduler = {**scheduler, **stated.get("scheduler", {})}
        for name, key_of in names.names.items():
            shapes = {new: file.entries[old].shape for new, old in key_of.items()}
            configs[name] = CONFIGS[name](shapes, {**PUBLISHED[name], **stated.get(name, {})})
            sources[name] = Source(file, key_of, names.unknown)
            if name not in stated:
                notes.append(published(file, name))
    return assemble(configs, sources, load_tokenizers(Path(tokenizers)), scheduler, dtype_of, notes)


def assemble(
    configs: Mapping[str, Config],
    sources: Mapping[str, Source],
    tokenizers: Mapping[str, Any],
    scheduler: Config,
    dtype_of: DtypeOf | None,
    notes: list[Finding],
) -> AnimaParts:
    """Build, account for, fill and join all parts."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    modules: dict[str, Any] = {name: build(name, configs[name]) for name in MODULES}
    for name in MODULES:
        account(name, modules[name], sources[name])
    components_fit(modules, tokenizers)
    settings: dict[str, Any] = {key: value for key, value in scheduler.items() if not key.startswith("_")}
    hashes: dict[str, str] = {}
    for name in MODULES:
        hashes |= fill(name, modules[name], sources[name], dtype_of or (lambda _: None))
        remake_buffers(modules[name])
        modules[name].eval()
    return AnimaParts(
        **modules,
        **tokenizers,
        scheduler=FlowMatchEulerDiscreteScheduler(**settings),
        fingerprint=fingerprint_of(hashes),
        notes=notes,
    )


def pipeline(parts: AnimaParts) -> AnimaModularPipeline:
    """A diffusers AnimaModularPipeline of these parts with classifier-free guidance at 4, ready to be called."""
    from diffusers import AnimaAutoBlocks, ClassifierFreeGuidance

    joined: Any = AnimaAutoBlocks().init_pipeline()
    names = (*MODULES, *TOKENIZERS, "scheduler")
    joined.update_components(
        **{name: getattr(parts, name) for name in names}, guider=ClassifierFreeGuidance(guidance_scale=4.0)
    )
    return joined


def parts_of(pipe: AnimaModularPipeline) -> AnimaParts:
    """The parts of a pipeline that somebody else has loaded; raises ModelError where it lacks one.

    The fingerprint is of its tensors in memory: that of the files only while they are held as they were stored.
    """
    components: dict[str, Any] = {name: getattr(pipe, name, None) for name in (*MODULES, *TOKENIZERS, "scheduler")}
    lacking = [name for name, component in components.items() if component is None]
    if lacking:
        raise ModelError(
            f"the pipeline has no {', '.join(lacking)}",
            code="PIPELINE-PARTS-MISSING",
            subject=type(pipe).__name__,
            evidence={"missing": lacking},
            remedy="Call its load_components() or update_components() first.",
        )
    named = ((m, name, tensor) for m in MODULES for name, tensor in components[m].state_dict().items())
    hashes = {f"{module}.{name}": hash_tensor(tensor) for module, name, tensor in named}
    return AnimaParts(**components, fingerprint=fingerprint_of(hashes))


def save_three_files(parts: AnimaParts, folder: str | Path, dtype: torch.dtype | None = None) -> dict[str, Path]:
    """Write the denoiser with its adapter, Qwen3 and the VAE under their original names, and both tokenizers.

    Tensors are stored as `dtype`, bfloat16 by default. What no header tells is put in the metadata. Returns the
    arguments of `load_three_files`. Raises NumericsError, before anything is written, where a tensor is not finite.
    """
    import torch

    from finitune.files.writer import save_tensors, write_bytes
    from finitune.models.anima.assemble import require_finite

    dtype = dtype or torch.bfloat16
    folder = Path(folder)
    files = {role: dict(named_tensors(parts, role)) for role in FILE_NAMES}
    for role, tensors in files.items():
        files[role] = {name: tensor.detach().to(dtype) for name, tensor in tensors.items()}
        require_finite(folder / FILE_NAMES[role], files[role])
    for role, tensors in files.items():
        stated = {METADATA_KEY: json.dumps(untold(parts, role), sort_keys=True), "format": "pt"}
        save_tensors(folder / FILE_NAMES[role], tensors, stated)
    for name, content in tokenizer_files(parts):
        write_bytes(folder / name, content)
    return {role: folder / name for role, name in FILE_NAMES.items()} | {"tokenizers": folder}


def named_tensors(parts: AnimaParts, role: str) -> Iterator[tuple[str, Tensor]]:
    """(original name, tensor) of what one of the three files holds."""
    if role == "dit":
        for part, keymap in ((parts.transformer, TRANSFORMER), (parts.text_conditioner, CONDITIONER)):
            for name, tensor in part.state_dict().items():
                yield PREFIXES[0] + known(keymap.backward(name), name), tensor
    elif role == "qwen3":
        for name, tensor in parts.text_encoder.state_dict().items():
            yield "model." + name, tensor
    else:
        state = parts.vae.state_dict()
        keymap = vae_keys(*vae_layout(state))
        for name, tensor in state.items():
            yield known(keymap.backward(name), name), tensor


def known(original: str | None, name: str) -> str:
    """The original name; raises ModelError where the original has no such tensor."""
    if original is None:
        raise ModelError(
            f"{name} has no name in Anima's original files",
            code="MODEL-KEYS-UNEXPECTED",
            subject=name,
            remedy="Detach adapters and other additions first; only Anima itself can be written in this layout.",
        )
    return original


def untold(parts: AnimaParts, role: str) -> dict[str, Config]:
    """By component, the settings in one of the three files that its header does not tell."""
    components = {"dit": ("transformer", "text_conditioner", "scheduler"), "qwen3": ("text_encoder",), "vae": ("vae",)}
    stated: dict[str, Config] = {}
    for name in components[role]:
        config = getattr(parts, name).config
        config = config if isinstance(config, dict) else config.to_dict()
        stated[name] = {key: config[key] for key in PUBLISHED[name]}
    return stated


def tokenizer_files(parts: AnimaParts) -> Iterator[tuple[str, bytes]]:
    """(relative name, content) of every file that both tokenizers are saved in."""
    from tempfile import TemporaryDirectory

    for name in TOKENIZERS:
        with TemporaryDirectory() as place:
            getattr(parts, name).save_pretrained(place)
            for file in sorted(Path(place).iterdir()):
                yield f"{name}/{file.name}", file.read_bytes()


def refuse_adapter(file: TensorFile) -> None:
    """Raises ModelError where a file given as a model is an adapter."""
    if recognise(file) == "an adapter":
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
    what = recognise(file)
    if what == EXPECTED[role]:
        return
    right = next((other for other, expected in EXPECTED.items() if expected == what), None)
    if right:
        remedy = f"Give it as {right}=, and the file with {EXPECTED[role]} as {role}=."
    elif "diffusers" in what or "alone" in what:
        remedy = "It belongs to a diffusers folder: give the whole folder instead."
    else:
        remedy = "It is not a file of Anima, or is of a format not known here."
    raise ModelError(
        f"{file.path} holds {what}; {EXPECTED[role]} was expected",
        code="MODEL-WRONG-PART",
        subject=str(file.path),
        evidence={"tensors": len(file), "first": list(file)[:3]},
        remedy=remedy,
    )


def ignored(file: TensorFile, names: Sorted) -> list[Finding]:
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


def published(file: TensorFile, component: str) -> Finding:
    """The note that a component's untold settings are Anima's published ones."""
    return Finding(
        Level.NOTE,
        "MODEL-PUBLISHED-SETTINGS",
        str(file.path),
        f"it does not state the {component}'s {', '.join(PUBLISHED[component])}: Anima's published values are used",
        dict(PUBLISHED[component]),
    )
