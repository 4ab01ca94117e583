"""The tensors of one module as an adapter: which algorithm they are, and what each convention means in its terms.

Conventions that only shapes tell apart are decided by shapes; where these fit both, the error asks. Sources: LyCORIS
modules/*.py for kohya's suffixes; peft tuners/*/layer.py for PEFT's; A1111 network_oft.py for `oft_diag`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from finitune.adapters import find_algorithm
from finitune.adapters.core import Magnitude, Shape, SiteAdapter
from finitune.adapters.oft import count_turned_outputs
from finitune.adapters.tlora import convert_tlora_to_lora
from finitune.errors import AdapterError
from finitune.namings.core import AmbiguityOptions
from finitune.namings.fuse import SCALE_ROLES_BY_ALGORITHM, multiply_exactly
from finitune.namings.scales import PeftConfig
from finitune.namings.tensor_groups import TensorGroup
from finitune.namings.tensor_reader import DeferredTensors, TensorReader, to_meta_adapter

_ROLES_READ_APART = {"alpha", "magnitude"}
"""Roles that are read after the adapter itself."""

_SINGLE_NUMBER_ROLES = {"on_input", "scaled", "reshape", "residual_size"}
"""Roles that may be a single number."""


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
            return "full"
        raise make_adapter_roles_error(group, f"there is {' and '.join(roles)} and nothing that it belongs to")
    common = set.intersection(*named)
    if not common:
        raise make_adapter_roles_error(group, f"{', '.join(roles)} are of different algorithms")
    if common == {"ia3"} and not group.roles & {"on_input", "factor"}:
        raise make_adapter_roles_error(group, "it is a whole weight, as models have, and no change of one")
    blocks = group.shape("blocks")
    if "boft" in common and blocks is not None:
        return "boft" if len(blocks) == 4 else "oft"
    return sorted(common)[0]


def assemble_site_adapter(
    group: TensorGroup, shelf: TensorReader, order: str, shape: Shape | None, config: PeftConfig | None
) -> SiteAdapter:
    """The adapter that a module's tensors are (but for T-LoRA), without alpha as a scale and without magnitude.

    `order` is that of the factors of a GLoRA ("new", "old", or "" for undecided), `shape` the weight's where it is
    known. Raises AdapterError.
    """
    name = identify_group_algorithm(group)
    if name == "full":
        return SiteAdapter(
            name,
            DeferredTensors({r: shelf.pending(m.key) for r, m in group.members.items() if r not in _ROLES_READ_APART}),
        )
    tensors = {role: shelf.read(member.key) for role, member in group.members.items() if role not in _ROLES_READ_APART}
    scalar = tensors.pop("scalar", None)
    for role, tensor in tensors.items():
        if tensor.ndim == 0 and role not in _SINGLE_NUMBER_ROLES:
            raise make_damaged_adapter_error(f"{role} is a single number", role=role)
        if not tensor.numel() and not role.startswith("residual"):
            raise make_damaged_adapter_error(f"{role} is empty", role=role, shape=list(tensor.shape))
    if name == "glora":
        adapter = interpret_glora(tensors, order)
    elif name == "ia3":
        adapter = interpret_ia3(tensors, shape)
    elif name == "oft_v2":
        adapter = interpret_oft_v2(tensors, config)
    else:
        adapter = (
            _INTERPRETER_BY_ALGORITHM[name](tensors)
            if name in _INTERPRETER_BY_ALGORITHM
            else SiteAdapter(name, tensors)
        )
    require_matching_tensors(adapter)
    if scalar is not None:
        factor = read_single_number(scalar, "scalar")
        changed = [role for role in SCALE_ROLES_BY_ALGORITHM.get(name, ()) if role in adapter.tensors]
        adapter = adapter.with_tensors(**{role: multiply_exactly(adapter.tensors[role], factor) for role in changed})
    return adapter


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


def require_matching_tensors(adapter: SiteAdapter) -> SiteAdapter:
    """The adapter itself; raises AdapterError for roles and shapes that do not go together."""
    find_algorithm(adapter.algorithm).check(adapter)
    return adapter


def make_damaged_adapter_error(why: str, **evidence: object) -> AdapterError:
    """The error for tensors that contradict each other."""
    return AdapterError(why, code="ADAPTER-SHAPES", evidence=evidence, remedy="The file is damaged. Export it again.")


def interpret_lora(tensors: dict[str, Tensor]) -> SiteAdapter:
    """LoRA, with the forms of its own that embeddings, extraction and control adapters have."""
    reshape = tensors.pop("reshape", None)
    if {"embedding_down", "embedding_up"} <= tensors.keys():  # PEFT adds (up @ down) to the transposed weight
        for role, source in (("up", "embedding_down"), ("down", "embedding_up")):
            if tensors[source].ndim != 2:
                raise make_damaged_adapter_error(f"{source} is no matrix", shape=list(tensors[source].shape))
            tensors[role] = tensors.pop(source).t().contiguous()
    residual = {part: tensors.pop(f"residual_{part}", None) for part in ("indices", "values", "size")}
    adapter = SiteAdapter("lora", tensors, options={} if reshape is None else {"reshape": True})
    if any(part is not None for part in residual.values()):
        adapter = add_sparse_residual(require_matching_tensors(adapter), residual)
    if reshape is not None:
        implied, stated = (
            find_algorithm("lora").shape(require_matching_tensors(adapter)),
            tuple(int(n) for n in reshape.flatten()),
        )
        if implied is not None and implied != stated:
            why = f"it widens the weight to {list(stated)} and adds {list(implied)}"
            raise make_damaged_adapter_error(why, reshape=list(stated), adapter=list(implied))
    return adapter


def add_sparse_residual(adapter: SiteAdapter, residual: Mapping[str, Tensor | None]) -> SiteAdapter:
    """A LoRA and the sparse rest that its extraction left, which lies in a matrix or in the bias."""
    indices, values, size = (residual[part] for part in ("indices", "values", "size"))
    if indices is None or values is None or size is None:
        present = [part for part, tensor in residual.items() if tensor is not None]
        raise make_damaged_adapter_error("a sparse rest lacks its indices, its values or its size", present=present)
    shape = [int(n) for n in size.flatten()]
    matching = min(shape, default=0) > 0 and indices.shape == (len(shape), values.numel())
    if not matching or bool(((indices < 0) | (indices.long() >= torch.tensor(shape)[:, None])).any()):
        raise make_damaged_adapter_error(
            f"a sparse rest of {shape} has entries beyond that, or not as many values as indices",
            rest=shape,
            indices=list(indices.shape),
            values=list(values.shape),
        )
    dense = torch.zeros(shape).index_put_(tuple(indices.long()), values.float().flatten())
    if len(shape) == 1:
        return adapter.with_tensors(diff_b=dense)
    algorithm = find_algorithm("lora")
    weight = algorithm.shape(adapter)
    if weight is None or math.prod(weight) != dense.numel():
        why = f"a sparse rest of {shape} beside a LoRA of {list(weight or ())}"
        raise make_damaged_adapter_error(why, rest=shape, adapter=list(weight or ()))
    diff = algorithm.delta(adapter, torch.zeros(weight)) + dense.view(weight)
    return SiteAdapter("full", {"diff": diff, **{r: t for r, t in adapter.tensors.items() if r == "diff_b"}})


def interpret_oft(tensors: dict[str, Tensor]) -> SiteAdapter:
    """OFT, also from R itself: Q = (R + I)^-1 (R - I), and Q / 2 is a matrix B with B - B^T = Q."""
    rotation = tensors.pop("rotation", None)
    if rotation is not None:
        require_matching_tensors(SiteAdapter("oft", {"blocks": rotation}))
        r = rotation.double()
        eye = torch.eye(r.shape[-1], dtype=r.dtype)
        q = torch.linalg.solve(r + eye, r - eye)
        tensors["blocks"] = ((q - q.mT) / 4).float()
    return SiteAdapter("oft", tensors)


def interpret_oft_v2(tensors: dict[str, Tensor], config: PeftConfig | None) -> SiteAdapter:
    """OFT v2, by PEFT's series unless its configuration asks for the exact transform."""
    options: dict[str, float | bool | str] = {}
    if tensors.pop("scaled", None) is not None:
        options["scaled"] = True
    if config is not None and config.table.get("use_cayley_neumann") is False:
        options["neumann_terms"] = 0
    elif config is not None and isinstance(config.table.get("num_cayley_neumann_terms"), int):
        options["neumann_terms"] = config.table["num_cayley_neumann_terms"]
    return SiteAdapter("oft_v2", tensors, options=options)


def interpret_ia3(tensors: dict[str, Tensor], shape: Shape | None) -> SiteAdapter:
    """IA3 as LyCORIS has it, 1 + w, and as PEFT, which stores the factor itself, (out, 1) or (1, in)."""
    factor = tensors.get("factor")
    if factor is None:
        on_input = bool(read_single_number(tensors["on_input"], "on_input"))
        return SiteAdapter("ia3", {r: t for r, t in tensors.items() if r != "on_input"}, options={"on_input": on_input})
    sides = {side for side, axis in (("out", 0), ("in", 1)) if shape and factor.numel() == shape[axis]}
    if factor.ndim == 2:
        sides = {"out"} if factor.shape[1] == 1 else {"in"}
    if len(sides) != 1:
        raise make_undecided_shape_error(
            "whether it is on the inputs or the outputs", "IA3 factors", factor.shape, "Name the model."
        )
    weight = (factor.double() - 1).float()
    return SiteAdapter("ia3", {"weight": weight}, options={"on_input": sides == {"in"}})


def interpret_glora(tensors: dict[str, Tensor], order: str) -> SiteAdapter:
    """GLoRA in today's order: a file of 2023 has a1 and a2, and b1 and b2, the other way round."""
    if not order:
        raise make_undecided_shape_error(
            "in which order its factors are, that of 2023 or today's",
            "GLoRA of a square weight",
            tensors["a1"].shape if "a1" in tensors else (),
            "Name the model (--model), or say the order: --glora-order new, or old.",
        )
    if order == "old":
        swap = {"a1": "a2", "a2": "a1", "b1": "b2", "b2": "b1"}
        tensors = {swap.get(role, role): tensor for role, tensor in tensors.items()}
    return SiteAdapter("glora", tensors)


def detect_glora_order(groups: Iterable[tuple[TensorGroup, Shape | None]], answers: AmbiguityOptions) -> str:
    """The order that the factors of all GLoRA modules of a file fit: "new", "old", or "" where both fit.

    A program writes all modules alike, so one weight that is not square decides for them all.
    """
    possible = {"new", "old"}
    for group, known in groups:
        a1, a2, b1, b2 = (group.shape(role) for role in ("a1", "a2", "b1", "b2"))
        if a1 and a2 and b1 and b2 and all(len(s) >= 2 for s in (a1, a2, b1, b2)):
            new = is_consistent_glora(a1, a2, b1, b2, known)
            old = is_consistent_glora(a2, a1, b2, b1, known)
            possible &= {name for name, fits in (("new", new), ("old", old)) if fits} or {"new", "old"}
    return possible.pop() if len(possible) == 1 else answers.glora_order or ""


def is_consistent_glora(a1: Shape, a2: Shape, b1: Shape, b2: Shape, known: Shape | None) -> bool:
    """Whether a1 (in, r), a2 (r, in), b1 (out, r), b2 (r, in) are of one weight, which is of the known shape if any."""
    fits = a1[1] == a2[0] == b1[1] == b2[0] and a1[0] == a2[1] == b2[1]
    return fits and (known is None or (b1[0], a1[0]) == known[:2])


_INTERPRETER_BY_ALGORITHM: Mapping[str, Callable[[dict[str, Tensor]], SiteAdapter]] = {
    "lora": interpret_lora,
    "oft": interpret_oft,
}
"""Algorithms whose tensors some program writes in a form of its own."""


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
            tensor.shape,
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


def constrain_rotation(adapter: SiteAdapter, alpha: float | None, *, kohya: bool) -> SiteAdapter:
    """A rotation with the constraint that its alpha is: alpha * outputs, and none for 0.

    kohya's own OFT (`kohya`) turns the finished output, its bias with it.
    """
    options = dict(adapter.options)
    if alpha:
        options["constraint"] = alpha * count_turned_outputs(adapter)
    if kohya:
        options["rotates_bias"] = True
    return replace(adapter, options=options)


def read_single_number(tensor: Tensor, role: str) -> float:
    """The number in a tensor of one element, in fp64; raises AdapterError for another count."""
    if tensor.numel() != 1:
        raise make_damaged_adapter_error(
            f"{role} has {tensor.numel()} elements; it is one number", shape=list(tensor.shape)
        )
    return float(tensor.double())


def make_adapter_roles_error(group: TensorGroup, why: str) -> AdapterError:
    """The error for tensors that are no adapter."""
    return AdapterError(
        f"this is no adapter: {why}",
        code="ADAPTER-ROLES",
        evidence={"roles": sorted(group.roles)},
        remedy="The file is incomplete, or no adapter. Export it again.",
    )


def make_undecided_shape_error(what: str, tensors: str, shape: Iterable[int], remedy: str) -> AdapterError:
    """The error for a convention that nothing in the file decides."""
    return AdapterError(
        f"the shape of {tensors} does not tell {what}",
        code="ADAPTER-UNDECIDED",
        evidence={"shape": list(shape)},
        remedy=remedy,
    )
