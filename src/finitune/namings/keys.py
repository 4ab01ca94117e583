"""The keys of an adapter file, by module and role: by name and shape alone, before anything is read.

A key is divided at the longest suffix that ends it, never by position. The algorithms say how their roles are spelled;
beside their own there are roles that a file has and an adapter has not, which reading turns into what they mean:

alpha           the numerator of the scale; for the rotations of LyCORIS and kohya, their constraint
magnitude       DoRA's norms
scalar          a factor that belongs to the change (LyCORIS before 2.0)
reshape         the shape that the base weight is widened to first
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from finitune.adapters import ADAPTER_ALGORITHMS, ADAPTER_FORMS, find_form
from finitune.adapters.core import KeySuffix, Shape
from finitune.adapters.dora import MAGNITUDE_SUFFIXES

_COMMON_SUFFIXES = (
    KeySuffix(".alpha", "alpha", ("kohya",)),
    KeySuffix(".scalar", "scalar", ("kohya",)),
    KeySuffix(".diff_b", "diff_b", ("kohya",)),
    KeySuffix(".reshape_weight", "reshape", ("comfy",)),
    *MAGNITUDE_SUFFIXES,
)


def _join_suffixes() -> Iterator[KeySuffix]:
    """Those of all forms; what several of them spell alike is one, of all these algorithms."""
    owned = [(suffix, form.name) for form in ADAPTER_FORMS for suffix in form.suffixes]
    texts = dict.fromkeys(suffix for suffix, _ in owned)
    yield from (replace(one, algorithms=tuple(name for suffix, name in owned if suffix == one)) for one in texts)


ADAPTER_SUFFIXES = (*_COMMON_SUFFIXES, *_join_suffixes())
_SUFFIXES_BY_LENGTH = tuple(sorted(ADAPTER_SUFFIXES, key=lambda suffix: -len(suffix.text)))
_SUFFIXED_KEY_PATTERN = re.compile(
    "(.+?)(?:" + "|".join(f"({suffix.pattern()})" for suffix in _SUFFIXES_BY_LENGTH) + ")", re.DOTALL
)
_SHARED_SUFFIXES = tuple(
    KeySuffix(role.shared_key, name, ("peft",), named=True, algorithms=(algorithm.name,))
    for algorithm in ADAPTER_ALGORITHMS
    for name, role in algorithm.roles.items()
    if role.shared_key
)
_SHARED_KEY_PATTERN = re.compile("|".join(rf"({re.escape(one.text)})(?:\.[\w-]+)?" for one in _SHARED_SUFFIXES))
"""The whole keys of tensors that all modules have; PEFT's name of the adapter may follow."""

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
        return [*(member.key for member in self.members.values()), *self.doubled]

    @property
    def roles(self) -> set[str]:
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
    """A file's keys: modules, embeddings, those that need no adapter to explain them, and those that nothing knows.

    `shared` are those of the tensors that all modules of an algorithm have: they are members of each of its groups.
    """

    groups: tuple[TensorGroup, ...]
    embeddings: tuple[str, ...]
    explained: Mapping[str, str]
    unknown: tuple[str, ...]
    shared: tuple[str, ...] = ()


def group_keys_by_module(shapes: Mapping[str, Shape], renamed: Mapping[str, str] | None = None) -> GroupedKeys:
    """Every key of a file in one of four places. `renamed` are keys that are to be read as if called otherwise."""
    groups: dict[str, TensorGroup] = {}
    embeddings: list[str] = []
    explained: dict[str, str] = {}
    unknown: list[str] = []
    shared: list[GroupTensor] = []
    for key, shape in shapes.items():
        why = next((why for pattern, why in _EXPLAINED_KEY_PATTERNS if pattern.fullmatch(key)), None)
        found = _SHARED_KEY_PATTERN.fullmatch(key)
        parts = split_adapter_key((renamed or {}).get(key, key))
        if EMBEDDING_KEY_PATTERN.fullmatch(key):
            embeddings.append(key)
        elif found is not None:
            suffix = _SHARED_SUFFIXES[found.lastindex - 1 if found.lastindex else 0]
            shared.append(GroupTensor(key, suffix, shape))
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
    for group in groups.values():
        for member in shared:
            if any(set(one.suffix.algorithms) & set(member.suffix.algorithms) for one in group.members.values()):
                group.members[member.suffix.role] = member
    return GroupedKeys(
        tuple(groups.values()), tuple(embeddings), explained, tuple(unknown), tuple(one.key for one in shared)
    )


def split_adapter_key(key: str) -> tuple[str, KeySuffix] | None:
    """A key's module name and suffix, or None where no suffix of the table ends it.

    >>> module, suffix = split_adapter_key("blocks.0.attn.to_q.lora_A.default_0.weight")
    >>> module, suffix.role
    ('blocks.0.attn.to_q', 'down')
    """
    found = _SUFFIXED_KEY_PATTERN.fullmatch(key)
    if found is None or found.lastindex is None:
        return None
    suffix = _SUFFIXES_BY_LENGTH[found.lastindex - 2]
    return found[1] + suffix.inner, suffix


def find_suffix(role: str, algorithm: str, dialects: Sequence[str]) -> KeySuffix | None:
    """How the first of `dialects` that can spells a role of an algorithm; None where none of them can.

    >>> find_suffix("down", "lora", ("peft", "kohya")).text
    '.lora_A.weight'
    """
    for dialect in dialects:
        for suffix in ADAPTER_SUFFIXES:
            fits = suffix.written and (not suffix.algorithms or algorithm in suffix.algorithms)
            if suffix.role == role and fits and dialect in suffix.dialects and not suffix.inner:
                return suffix
    return None


def infer_linear_inputs(group: TensorGroup) -> int | None:
    """How many inputs the weight of a Linear has, as the shapes of its adapter tell; None where they do not."""
    shapes = {role: member.shape for role, member in group.members.items()}
    names = dict.fromkeys(name for member in group.members.values() for name in member.suffix.algorithms)
    return next((n for name in names if (n := find_form(name).linear_inputs(shapes)) is not None), None)
