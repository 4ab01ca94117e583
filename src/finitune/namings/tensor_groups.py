"""The tensors of an adapter file, gathered by module: by name and shape alone, before anything is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from finitune.adapters.core import Shape
from finitune.adapters.rotation import infer_packed_block_size
from finitune.namings.suffixes import KeySuffix, split_adapter_key

EMBEDDING_KEY_PATTERN = re.compile(r"bundle_emb\..+|emb_params|string_to_param\..+|<[^<>]+>|clip_[lg]|t5xxl")
"""Learned token vectors: OneTrainer and LyCORIS bundle them, an embedding's own file has nothing else, and
cloneofsimo names them by their token."""

_EXPLAINED_KEY_PATTERNS = (
    (re.compile(r"_aux\..+"), "a helper of the program that trained it"),
    (re.compile(r"(.+[._])?(inv_freq|position_ids)"), "a buffer that every program computes"),
)
"""What adapter files hold beside adapters, and why it is nothing to apply."""


@dataclass(frozen=True)
class GroupTensor:
    """One tensor of a module, by its key in the file."""

    key: str
    suffix: KeySuffix
    shape: Shape


@dataclass
class TensorGroup:
    """The tensors of one module, by role; `doubled` are the keys whose role was taken already."""

    module: str
    members: dict[str, GroupTensor] = field(default_factory=dict)
    doubled: list[str] = field(default_factory=list)

    @property
    def keys(self) -> list[str]:
        """All keys of the module, in the order of the file."""
        return [*(member.key for member in self.members.values()), *self.doubled]

    @property
    def roles(self) -> set[str]:
        """The roles that are there."""
        return set(self.members)

    def shape(self, role: str) -> Shape | None:
        """The shape of a role's tensor, or None where the role is not there."""
        member = self.members.get(role)
        return member and member.shape

    def dialects(self) -> set[str]:
        """The dialects that some suffix of the module belongs to and no other one shares."""
        return {member.suffix.dialects[0] for member in self.members.values() if len(member.suffix.dialects) == 1}


@dataclass(frozen=True)
class GroupedKeys:
    """A file's keys: modules, embeddings, those that need no adapter to explain them, and those that nothing knows."""

    groups: tuple[TensorGroup, ...]
    embeddings: tuple[str, ...]
    explained: Mapping[str, str]
    unknown: tuple[str, ...]


def group_keys_by_module(shapes: Mapping[str, Shape], renamed: Mapping[str, str] | None = None) -> GroupedKeys:
    """Every key of a file in one of four places. `renamed` are keys that are to be read as if called otherwise."""
    groups: dict[str, TensorGroup] = {}
    embeddings: list[str] = []
    explained: dict[str, str] = {}
    unknown: list[str] = []
    for key, shape in shapes.items():
        why = next((why for pattern, why in _EXPLAINED_KEY_PATTERNS if pattern.fullmatch(key)), None)
        parts = split_adapter_key((renamed or {}).get(key, key))
        if EMBEDDING_KEY_PATTERN.fullmatch(key):
            embeddings.append(key)
        elif why is not None:
            explained[key] = why
        elif parts is None:
            unknown.append(key)
        else:
            module, suffix = parts
            group = groups.setdefault(module, TensorGroup(module))
            if suffix.role in group.members:
                group.doubled.append(key)
            else:
                group.members[suffix.role] = GroupTensor(key, suffix, shape)
    return GroupedKeys(tuple(groups.values()), tuple(embeddings), explained, tuple(unknown))


def infer_linear_inputs(group: TensorGroup) -> int | None:
    """How many inputs the weight of a Linear has, as the shapes of its adapter tell; None where they do not."""
    for role in ("down", "diff", "q_layer", "embedding_up"):
        shape = group.shape(role)
        if shape is not None and len(shape) >= 2:
            return shape[0] if role == "embedding_up" else shape[1]
    first = group.shape("w1") or group.shape("w1_b")
    second = group.shape("w2") or group.shape("w2_b")
    packed = group.shape("packed")
    if packed is not None and packed[0] > 1:
        return packed[0] * infer_packed_block_size(packed[-1])
    if group.members.keys() & {"t1", "t2"} or not (first and second and len(first) >= 2 and len(second) >= 2):
        return None
    is_hadamard = any("loha" in member.suffix.algorithms for member in group.members.values())
    return first[1] if is_hadamard else first[1] * second[1]
