"""Modules without memory, the accounts of their keys, and the tensors that fill them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from diffusers import AnimaTextConditioner, AutoencoderKLQwenImage, CosmosTransformer3DModel
from diffusers.models.condition_embedders.condition_embedder_anima import AnimaRotaryEmbedding
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from finitune.errors import ModelError, NumericsError, suggest_nearest_name
from finitune.files.tensorfile import NonfiniteElements, TensorFile, count_nonfinite
from finitune.models.anima import ANIMA
from finitune.models.anima.configs import PUBLISHED_ANIMA_SETTINGS, ComponentConfig
from finitune.models.anima.keys import SortedKeys
from finitune.models.spec import find_file_part, has_adapter_names
from finitune.report import Finding, Level

_CLASS_BY_COMPONENT: dict[str, type[nn.Module]] = {
    "transformer": CosmosTransformer3DModel,
    "text_conditioner": AnimaTextConditioner,
    "vae": AutoencoderKLQwenImage,
}
_MAX_NAMES_SHOWN = 3


@dataclass(frozen=True)
class ComponentSource:
    """Where a component's tensors lie: the file, {diffusers name: name in the file}, and the names of no component."""

    file: TensorFile
    key_of: Mapping[str, str]
    unknown: tuple[str, ...] = ()


def build_anima_component(component: str, config: ComponentConfig) -> nn.Module:
    """A component on the meta device: shapes and settings, no memory. Raises ModelError for settings it cannot have."""
    try:
        if component == "text_encoder":
            with torch.device("meta"):
                return Qwen3Model(Qwen3Config.from_dict(dict(config)))
        cls = _CLASS_BY_COMPONENT[component]
        settings = {key: value for key, value in config.items() if not key.startswith("_")}
        known = [name for name in inspect.signature(cls.__init__).parameters if name != "self"]
        for key in settings:
            if key not in known:
                raise ValueError(f"unknown setting {key!r}.{suggest_nearest_name(key, known)}")
        with torch.device("meta"):
            return cls(**settings)
    except (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError) as error:
        raise ModelError(
            f"the {component} cannot be built: {error}",
            code="MODEL-CONFIG",
            subject=component,
            evidence={key: str(value) for key, value in config.items() if not key.startswith("_")},
            remedy="Its config.json, or its file's metadata or shapes, belong to another model or a newer diffusers.",
        ) from error


def require_component_tensors(component: str, module: nn.Module, source: ComponentSource) -> None:
    """Every tensor of the module is in the file with its shape, and nothing else is; raises ModelError."""
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    shapes = {name: source.file.entries[key].shape for name, key in source.key_of.items()}
    missing = [name for name in wanted if name not in shapes]
    unexpected = [source.key_of[name] for name in shapes if name not in wanted] + list(source.unknown)
    differ = [name for name in wanted if name in shapes and shapes[name] != wanted[name]]
    wrong = [f"{source.key_of[name]} {list(shapes[name])}, not {list(wanted[name])}" for name in differ]
    problems = {"MODEL-KEYS-MISSING": missing, "MODEL-KEYS-UNEXPECTED": unexpected, "MODEL-SHAPES": wrong}
    code = next((code for code, names in problems.items() if names), None)
    if code is None:
        return
    told = zip(("missing", "unexpected", "of the wrong shape"), problems.values(), strict=True)
    lines = [
        f"{len(names)} {what}: {', '.join(names[:_MAX_NAMES_SHOWN])}{' ...' * (len(names) > _MAX_NAMES_SHOWN)}"
        for what, names in told
        if names
    ]
    raise ModelError(
        f"{source.file.path} does not make the {component}: " + "; ".join(lines),
        code=code,
        subject=f"{source.file.path}: {component}",
        evidence={
            "wanted": len(wanted),
            "missing": len(missing),
            "unexpected": len(unexpected),
            "wrong_shape": len(wrong),
        },
        remedy="The file is incomplete, altered, or of another model. Fetch the original; nothing was loaded.",
    )


def require_fitting_components(modules: Mapping[str, Any], tokenizers: Mapping[str, Any]) -> None:
    """Parts that meet have the same width, and tokenizers no more tokens than their tables; raises ModelError."""
    transformer, conditioner = modules["transformer"].config, modules["text_conditioner"].config
    encoder, vae = modules["text_encoder"].config, modules["vae"].config
    latents = len(vae.latents_mean), len(vae.latents_std)
    meetings = (
        ("text encoder's width", encoder.hidden_size, "conditioner's source", conditioner.source_dim),
        ("conditioner's width", conditioner.target_dim, "denoiser's text", transformer.text_embed_dim),
        ("VAE's latent channels", vae.z_dim, "denoiser's input channels", transformer.in_channels),
        ("VAE's latent channels", vae.z_dim, "VAE's latents_mean", latents[0]),
        ("VAE's latent channels", vae.z_dim, "VAE's latents_std", latents[1]),
    )
    for left, a, right, b in meetings:
        if a != b:
            raise make_parts_mismatch_error(f"the {left}: {a}; the {right}: {b}", {left: a, right: b})
    for name, table in (("tokenizer", encoder.vocab_size), ("t5_tokenizer", conditioner.target_vocab_size)):
        tokens = len(tokenizers[name])
        if tokens > table:
            raise make_parts_mismatch_error(
                f"the {name} has {tokens} tokens; the embedding has {table}", {"tokens": tokens, "table": table}
            )


def make_parts_mismatch_error(what: str, evidence: dict[str, object]) -> ModelError:
    """The error for parts that are each whole and do not belong together."""
    return ModelError(
        f"these parts do not belong together: {what}",
        code="MODEL-PARTS-MISMATCH",
        subject="anima",
        evidence=evidence,
        remedy="Take all parts from one release. A file of another size needs its settings in its metadata.",
    )


def load_component_tensors(
    component: str, module: nn.Module, source: ComponentSource, dtype_of: Callable[[str], torch.dtype | None]
) -> dict[str, str]:
    """Read, check, cast and assign every tensor; returns {component.name: hash of what is stored}.

    Raises NumericsError where a stored tensor is not finite (WEIGHT-NONFINITE), or would not be in the dtype that
    `dtype_of` asks for (WEIGHT-OUT-OF-RANGE).
    """
    hashes: dict[str, str] = {}
    state: dict[str, Tensor] = {}
    stored_bad: dict[str, NonfiniteElements] = {}
    cast_bad: dict[str, NonfiniteElements] = {}
    for name in module.state_dict():
        site = f"{component}.{name}"
        stored, hashes[site] = source.file.read_hashed(source.key_of[name])
        note_nonfinite(stored_bad, source.key_of[name], stored)
        dtype = dtype_of(site)
        state[name] = stored if dtype is None else stored.to(dtype)
        if state[name].dtype != stored.dtype:
            note_nonfinite(cast_bad, f"{source.key_of[name]} as {dtype}", state[name])
    refuse_nonfinite(source.file.path, stored_bad)
    refuse_nonfinite(source.file.path, cast_bad, "WEIGHT-OUT-OF-RANGE")
    module.load_state_dict(state, strict=True, assign=True)
    return hashes


def note_nonfinite(bad: dict[str, NonfiniteElements], name: str, tensor: Tensor) -> None:
    """Enter a tensor into `bad` if it holds NaN or inf."""
    count = count_nonfinite(tensor)
    if count.nan or count.inf:
        bad[name] = count


def refuse_nonfinite(path: Path, bad: Mapping[str, NonfiniteElements], code: str = "WEIGHT-NONFINITE") -> None:
    """Raises NumericsError naming the tensors in `bad`, if there are any."""
    if not bad:
        return
    remedies = {
        "WEIGHT-NONFINITE": "The checkpoint was damaged while it was made: no setting can cure it. Fetch the original.",
        "WEIGHT-OUT-OF-RANGE": "Hold these tensors in float32: they do not fit the dtype asked for.",
    }
    first = [
        f"{name} ({count.nan} NaN, {count.inf} inf of {count.size})"
        for name, count in list(bad.items())[:_MAX_NAMES_SHOWN]
    ]
    raise NumericsError(
        f"{len(bad)} tensors of {path} are not finite: {', '.join(first)}",
        code=code,
        subject=str(path),
        evidence={
            "tensors": list(bad),
            "nan": sum(c.nan for c in bad.values()),
            "inf": sum(c.inf for c in bad.values()),
        },
        remedy=remedies[code],
    )


def remake_buffers(module: nn.Module) -> None:
    """Compute again, on the CPU and in float32, the rotary frequencies that no file holds and the meta device lost."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, Qwen3RotaryEmbedding):
                setattr(parent, name, Qwen3RotaryEmbedding(child.config))
            elif isinstance(child, AnimaRotaryEmbedding):
                frequencies = cast("Tensor", child.inv_freq)
                setattr(parent, name, AnimaRotaryEmbedding(2 * frequencies.numel()))
    tensors = (*module.named_parameters(), *module.named_buffers())
    lost = [name for name, tensor in tensors if tensor.device == torch.device("meta")]
    assert not lost, f"without values: {lost}"


def refuse_adapter(file: TensorFile) -> None:
    """Raises ModelError where a file given as a model is an adapter."""
    if has_adapter_names(file):
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
    part = find_file_part(file, [ANIMA])
    if part is not None and part.role == role:
        return
    titles = {one.role: one.title for one in ANIMA.parts if one.role}
    if part is None:
        remedy = "It is not a file of Anima, or is of a format not known here."
    elif part.role:
        remedy = f"Give it as {part.role}=, and the file with {titles[role]} as {role}=."
    else:
        remedy = "It belongs to a diffusers folder: give the whole folder instead."
    raise ModelError(
        f"{file.path} holds {part.title if part else 'something unknown'}; {titles[role]} was expected",
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
