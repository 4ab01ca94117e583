"""The tensors of one module as an adapter: which algorithm they are, and what each convention means in its terms.

Conventions that only shapes tell apart are decided by shapes; where these fit both, the error asks. Sources: LyCORIS
modules/*.py for kohya's suffixes; peft tuners/*/layer.py for PEFT's; A1111 network_oft.py for `oft_diag`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from finitune.adapters import find_algorithm, find_form
from finitune.adapters.core import (
    AmbiguityOptions,
    FileFacts,
    Magnitude,
    Shape,
    SiteAdapter,
    make_damaged_adapter_error,
    make_no_adapter_error,
    make_undecided_shape_error,
    read_single_number,
)
from finitune.adapters.full import Full
from finitune.adapters.tlora import convert_tlora_to_lora
from finitune.errors import AdapterError
from finitune.namings.fused import multiply_change
from finitune.namings.keys import TensorGroup
from finitune.namings.tensor_reader import DeferredTensors, TensorReader, to_meta_adapter

_ROLES_READ_APART = {"alpha", "magnitude"}
"""Roles that are read after the adapter itself."""


def identify_group_algorithm(group: TensorGroup) -> str:
    """The algorithm that the roles of a module are of; raises AdapterError for none, for two, and for a role twice."""
    if group.doubled:
        raise AdapterError(
            f"{group.doubled[0]} is a second tensor for one role",
            code="ADAPTER-DUPLICATE",
            evidence={"keys": group.keys},
            remedy="The file holds several adapters under different names: split it.",
        )
    named = [set(m.suffix.algorithms) for m in group.members.values() if m.suffix.algorithms]
    roles = sorted(group.roles)
    if not named:
        if "diff_b" in group.roles:
            return Full.name
        raise make_no_adapter_error(group.roles, f"there is {' and '.join(roles)} and nothing that it belongs to")
    common = set.intersection(*named)
    if not common:
        raise make_no_adapter_error(group.roles, f"{', '.join(roles)} are of different algorithms")
    shapes = {role: member.shape for role, member in group.members.items()}
    return next((name for name in sorted(common) if find_form(name).has_shapes(shapes)), sorted(common)[0])


def assemble_site_adapter(group: TensorGroup, shelf: TensorReader, name: str, facts: FileFacts) -> SiteAdapter:
    """The adapter of an algorithm that a module's tensors are, without alpha as a scale and without magnitude.

    Raises AdapterError.
    """
    algorithm = find_algorithm(name)
    keys = {role: member.key for role, member in group.members.items() if role not in _ROLES_READ_APART}
    if algorithm.weight_sized:
        return SiteAdapter(name, DeferredTensors({role: shelf.pending(key) for role, key in keys.items()}))
    shared = {role for role, known in algorithm.roles.items() if known.shared_key}
    tensors = {role: shelf.read_shared(key) if role in shared else shelf.read(key) for role, key in keys.items()}
    scalar = tensors.pop("scalar", None)
    for role, tensor in tensors.items():
        if tensor.ndim == 0 and role in algorithm.roles:
            raise make_damaged_adapter_error(f"{role} is a single number", role=role)
        if not tensor.numel() and not role.startswith("residual"):
            raise make_damaged_adapter_error(f"{role} is empty", role=role, shape=list(tensor.shape))
    adapter = algorithm.from_file(tensors, facts)
    find_algorithm(adapter.algorithm).check(adapter)
    return adapter if scalar is None else multiply_change(adapter, read_single_number(scalar, "scalar"))


def read_tlora_as_lora(
    group: TensorGroup, shelf: TensorReader, alpha: float | None, base: Tensor | None
) -> SiteAdapter:
    """A T-LoRA as the LoRA that it is on `base`, the model's weight as the file's module has it.

    Raises AdapterError (ADAPTER-TLORA) where that is not at hand (None) or the tensors do not fit it.
    """
    if base is None:
        raise AdapterError(
            "a T-LoRA is a change from a part of the model's own weight, which the file does not hold",
            code="ADAPTER-TLORA",
            evidence={"roles": sorted(group.roles)},
            remedy="Give the model that it was trained on, or export it as a plain LoRA where it was trained.",
        )
    return convert_tlora_to_lora(
        {r: shelf.read(m.key) for r, m in group.members.items() if r not in _ROLES_READ_APART}, alpha, base
    )


def attach_dora_magnitude(
    adapter: SiteAdapter, group: TensorGroup, shelf: TensorReader, answers: AmbiguityOptions
) -> SiteAdapter:
    """The adapter with DoRA's magnitudes on the side that their shape, or else their convention, says.

    Raises AdapterError (ADAPTER-UNDECIDED) for magnitudes that fit both sides.
    """
    member = group.members.get("magnitude")
    if member is None:
        return adapter
    tensor = shelf.read(member.key)
    implied = find_algorithm(adapter.algorithm).shape(to_meta_adapter(adapter))
    if implied is None or len(implied) < 2:
        raise AdapterError(
            f"magnitudes (DoRA) over {find_algorithm(adapter.algorithm).title} have no meaning",
            code="ADAPTER-DORA",
            evidence={"algorithm": adapter.algorithm},
            remedy="Drop the magnitudes if they were written by mistake, or export the adapter again.",
        )
    sides = find_magnitude_sides(tuple(tensor.shape), implied, by_output="kohya" not in member.suffix.dialects)
    if "embedding_down" in group.roles:  # PEFT takes an embedding's weight transposed, so the other side is its outputs
        sides = {"in"} if tensor.numel() == implied[1] else set()
    if len(sides) == 2 and answers.dora_side:
        sides = {answers.dora_side}
    if len(sides) == 2:
        raise make_undecided_shape_error(
            "whether they are of the outputs or of the inputs",
            f"DoRA magnitudes of a weight of {list(implied)}",
            tuple(tensor.shape),
            "Say the side: --dora-side out (LyCORIS since 3.2 and PEFT have one per output), or in (LyCORIS before).",
        )
    if not sides:
        raise AdapterError(
            f"magnitudes of {list(tensor.shape)} for a weight of {list(implied)}",
            code="ADAPTER-DORA",
            evidence={"magnitudes": list(tensor.shape), "weight": list(implied)},
            remedy="The file is damaged, or the magnitudes belong to another module.",
        )
    return replace(adapter, magnitude=Magnitude(tensor, "out" if sides == {"out"} else "in"))


def find_magnitude_sides(magnitudes: Shape, weight: Shape, *, by_output: bool) -> set[str]:
    """The sides of `weight` that magnitudes of this shape can be of; `by_output` where the convention says outputs.

    (out, 1[, 1, 1]) is of the outputs and (1, in[, 1, 1]) of the inputs, even of a square weight. One axis alone tells
    the side only by its length; PEFT, whose magnitudes are always of the outputs, has (1, out, 1, 1) for kernels.
    """
    count = math.prod(magnitudes)
    long = [axis for axis, size in enumerate(magnitudes) if size > 1]
    if by_output:
        return {"out"} if count == weight[0] else set()
    if len(magnitudes) >= 2 and len(long) == 1:
        return {side for side, axis in (("out", 0), ("in", 1)) if long == [axis] and count == weight[axis]}
    return {side for side, axis in (("out", 0), ("in", 1)) if count == weight[axis] and len(long) <= 1}
