"""The oldest spelling of all, cloneofsimo/lora: "unet:17:up" is the 17th Linear of a walk through the model.

N counts the Linears inside of the modules of certain classes, which the metadata lists, in the order in which those
modules were registered; so a name means a module only together with the code of its day.

Evidence, from the shapes of real files: an attention's first input is as wide as the block, GEGLU follows the first
attention and precedes the second (320 -> 2560 is Linear 4 of 9), the widths go down 320, 640, 1280, up 1280, 640, 320,
and the middle block comes last. Knowledge of the classes, where all shapes are alike: CrossAttention registers to_q,
to_k, to_v, to_out; CLIPAttention registers k_proj, v_proj, q_proj, out_proj. Both orders of a transformer block, and
both places of the middle block, are candidates; the one that every shape of the file fits is taken.
Sources: cloneofsimo/lora `lora_diffusion/lora.py`; diffusers 0.9 to 0.14 `unet_2d_condition.py`, `attention.py`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from finitune.adapters.core import Shape
from finitune.errors import AdapterError

_CLONEOFSIMO_KEY_PATTERN = re.compile(r"(unet|text_encoder):(\d+):(up|down)")
_ATTENTION_CLASSES = frozenset({"CrossAttention", "Attention"})
"""The attention's class, by its first and its later name."""
_KNOWN_CLASSES_BY_COMPONENT = {"unet": _ATTENTION_CLASSES | {"GEGLU"}, "text_encoder": frozenset({"CLIPAttention"})}
_DEFAULT_CLASSES_BY_COMPONENT = {"unet": ["CrossAttention", "Attention", "GEGLU"], "text_encoder": ["CLIPAttention"]}
"""What the program walked unless told otherwise."""

_CLIP_L_WIDTH = 768
_CLIP_L_LAYERS = 12
_DOWN_ATTENTIONS = tuple(
    (f"down_blocks.{n}.attentions.{k}", width) for n, width in enumerate((320, 640, 1280)) for k in range(2)
)
_UP_ATTENTIONS = tuple(
    (f"up_blocks.{n + 1}.attentions.{k}", width) for n, width in enumerate((1280, 640, 320)) for k in range(3)
)
_MIDDLE_ATTENTIONS = (("mid_block.attentions.0", 1280),)


@dataclass(frozen=True)
class WalkedLinear:
    """One Linear of the walk: its name, its inputs and its outputs."""

    name: str
    inputs: int
    outputs: int


def is_cloneofsimo_key(key: str) -> bool:
    return _CLONEOFSIMO_KEY_PATTERN.fullmatch(key) is not None


def rename_cloneofsimo_keys(shapes: Mapping[str, Shape], metadata: Mapping[str, str]) -> dict[str, str]:
    """Each key of this spelling as if the file had module names: "unet.down_blocks...to_q:up".

    Raises AdapterError where no order of the walk fits every shape, or several do.
    """
    renamed: dict[str, str] = {}
    for component in ("unet", "text_encoder"):
        found = {
            key: match for key in shapes if (match := _CLONEOFSIMO_KEY_PATTERN.fullmatch(key)) and match[1] == component
        }
        if not found:
            continue
        walked = read_walked_classes(component, metadata)
        walks = enumerate_text_walks() if component == "text_encoder" else enumerate_unet_walks(walked)
        fitting = [walk for walk in walks if all(has_walked_shape(walk, m, shapes[key]) for key, m in found.items())]
        if len({tuple(linear.name for linear in walk) for walk in fitting}) != 1:
            raise make_unknown_order_error(component, walked, len(found), len(fitting))
        for key, match in found.items():
            renamed[key] = f"{component}.{fitting[0][int(match[2])].name}:{match[3]}"
    return renamed


def read_walked_classes(component: str, metadata: Mapping[str, str]) -> frozenset[str]:
    """The classes whose Linears were counted; raises AdapterError for one that we do not know the inside of."""
    try:
        listed = json.loads(metadata.get(component, "null")) or _DEFAULT_CLASSES_BY_COMPONENT[component]
    except ValueError:
        listed = _DEFAULT_CLASSES_BY_COMPONENT[component]
    walked = (
        frozenset(map(str, listed)) if isinstance(listed, list) else frozenset(_DEFAULT_CLASSES_BY_COMPONENT[component])
    )
    if walked - _KNOWN_CLASSES_BY_COMPONENT[component]:
        raise make_unknown_order_error(component, walked, 0, 0)
    return walked


def enumerate_unet_walks(walked: frozenset[str]) -> Iterator[list[WalkedLinear]]:
    """The candidate walks through Stable Diffusion 1.x's UNet."""
    for inner, blocks in itertools.product(
        (("attn1", "ff", "attn2"), ("attn1", "attn2", "ff")),
        (
            (*_DOWN_ATTENTIONS, *_UP_ATTENTIONS, *_MIDDLE_ATTENTIONS),
            (*_DOWN_ATTENTIONS, *_MIDDLE_ATTENTIONS, *_UP_ATTENTIONS),
        ),
    ):
        yield [
            linear
            for name, width in blocks
            for part in inner
            for linear in list_walked_linears(name, part, width, walked)
        ]


def list_walked_linears(name: str, part: str, width: int, walked: frozenset[str]) -> Iterator[WalkedLinear]:
    """The Linears of an attention or a GEGLU of a block, where its class is walked."""
    block = f"{name}.transformer_blocks.0.{part}"
    if part == "ff":
        if "GEGLU" in walked:
            yield WalkedLinear(f"{block}.net.0.proj", width, 8 * width)
    elif walked & _ATTENTION_CLASSES:
        context = width if part == "attn1" else _CLIP_L_WIDTH
        yield WalkedLinear(f"{block}.to_q", width, width)
        yield WalkedLinear(f"{block}.to_k", context, width)
        yield WalkedLinear(f"{block}.to_v", context, width)
        yield WalkedLinear(f"{block}.to_out.0", width, width)


def enumerate_text_walks() -> Iterator[list[WalkedLinear]]:
    names = (
        f"text_model.encoder.layers.{layer}.self_attn.{part}"
        for layer in range(_CLIP_L_LAYERS)
        for part in ("k_proj", "v_proj", "q_proj", "out_proj")
    )
    yield [WalkedLinear(name, _CLIP_L_WIDTH, _CLIP_L_WIDTH) for name in names]


def has_walked_shape(walk: list[WalkedLinear], match: re.Match[str], shape: Shape) -> bool:
    """Whether a tensor has the extent that the Linear of its number has."""
    number = int(match[2])
    if number >= len(walk) or len(shape) != 2:
        return False
    return shape[0] == walk[number].outputs if match[3] == "up" else shape[1] == walk[number].inputs


def make_unknown_order_error(component: str, walked: frozenset[str], count: int, fitting: int) -> AdapterError:
    return AdapterError(
        f"the numbered modules of {component} cannot be told: {fitting} known orders of {', '.join(sorted(walked))} "
        f"fit the shapes of {count} tensors",
        code="ADAPTER-UNDECIDED",
        subject=component,
        evidence={"classes": sorted(walked), "tensors": count, "fitting": fitting},
        remedy="Convert it with the program that made it: numbers mean modules only for Stable Diffusion 1.x.",
    )
