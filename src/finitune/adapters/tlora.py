"""T-LoRA read as a LoRA of twice the rank: dW = s * (P diag(l) Q - P0 diag(l0) Q0), all ranks on.

P0, l0 and Q0 are the part of the base weight's singular value decomposition that training started from. A file does
not hold them: they are computed again from the base, so it has to be the very weight that was trained on, and a base
rounded to bf16 already adds a change of its own. While training, a mask turns ranks off at noisy timesteps; nothing
that draws pictures knows that mask, and neither does this.

Source: LyCORIS modules/tlora.py, 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from finitune.adapters.algorithm import AdapterForm
from finitune.adapters.core import (
    LORA_CONVERTER_ONLY,
    PROGRAM_LACKS_ALGORITHM,
    SD_SCRIPTS_LACKS_ALGORITHM,
    KeySuffix,
    LoadVerdict,
    ProgramSupport,
    Shape,
    SiteAdapter,
    SupportByProgram,
    TensorsByRole,
    is_same_weight_shape,
)
from finitune.errors import AdapterError

SingularSelection = Literal["principal", "middle", "last"]
TLORA_ROLES = frozenset({"q_layer", "p_layer", "lambda_layer"})


class TLoRA(AdapterForm):
    """What files have of a T-LoRA."""

    name = "tlora"
    title = "T-LoRA"
    field_names = ("tlora",)
    suffixes = (
        KeySuffix(".q_layer.weight", "q_layer", ("kohya",)),
        KeySuffix(".p_layer.weight", "p_layer", ("kohya",)),
        KeySuffix(".lambda_layer", "lambda_layer", ("kohya",)),
    )
    programs: ClassVar[SupportByProgram] = {
        "diffusers": LORA_CONVERTER_ONLY,
        **dict.fromkeys(("PEFT", "A1111", "Forge"), PROGRAM_LACKS_ALGORITHM),
        "ComfyUI": ProgramSupport(LoadVerdict.NO, "it has no such adapter; only its log says so (#6381)"),
        "sd-scripts": SD_SCRIPTS_LACKS_ALGORITHM,
    }

    def linear_inputs(self, shapes: Mapping[str, Shape]) -> int | None:
        return shapes["q_layer"][1] if len(shapes.get("q_layer", ())) >= 2 else None


def convert_tlora_to_lora(
    tensors: TensorsByRole, alpha: float | None, base: Tensor, selection: SingularSelection = "principal"
) -> SiteAdapter:
    """A LoRA of rank 2r in fp32 for `q_layer` (r, in), `p_layer` (out, r) and `lambda_layer` (1, r) on `base`.

    `selection` tells which singular values training started from: files do not say, and LyCORIS reads all of them as
    "principal". Raises AdapterError for roles that are missing, shapes that do not fit `base` (out, in, or a kernel
    of 1 more), kernels, for which LyCORIS has no consistent meaning, and a base that is not finite.
    """
    q, lambdas, p = check_tlora_tensors(tensors, base)
    rank = q.shape[0]
    first_q, first_lambdas, first_p = select_singular_triples(base.flatten(1).double(), rank, selection)
    ones = [1] * (base.ndim - 2)
    down = torch.cat([lambdas[:, None] * q, first_lambdas[:, None] * first_q])
    up = torch.cat([p, -first_p], dim=1)
    factors = {"down": down.float().reshape(*down.shape, *ones), "up": up.float().reshape(*up.shape, *ones)}
    scale = 1.0 if alpha is None else alpha / rank
    return SiteAdapter("lora", factors, alpha=scale * down.shape[0])


def select_singular_triples(weight: Tensor, rank: int, selection: SingularSelection) -> tuple[Tensor, Tensor, Tensor]:
    """The chosen `rank` singular triples of a matrix (out, in), or all where it has fewer: (r, in), (r), (out, r)."""
    if selection == "principal":
        return compute_principal_triples(weight, rank)
    u, values, vt = torch.linalg.svd(weight, full_matrices=False)
    spare = max(len(values) - rank, 0)
    start = {"principal": 0, "middle": spare // 2, "last": spare}[selection]
    chosen = slice(start, start + rank)
    return vt[chosen], values[chosen], u[:, chosen]


def compute_principal_triples(weight: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `rank` largest singular triples by the eigenvectors of the smaller Gram matrix, in half the time of an SVD.

    The Gram matrix squares the values, which costs the smallest their digits and the largest, in fp64, nothing.
    """
    if weight.shape[0] > weight.shape[1]:
        u, values, vt = compute_principal_triples(weight.mT, rank)[::-1]
        return u.mT, values, vt.mT
    u = torch.linalg.eigh(weight @ weight.mT)[1].flip(1)[:, :rank]
    scaled = u.mT @ weight
    values = torch.linalg.vector_norm(scaled, dim=1)
    return scaled / torch.where(values > 0, values, 1)[:, None], values, u


def check_tlora_tensors(tensors: TensorsByRole, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q (r, in), lambda (r) and P (out, r) in fp64, seen to fit each other and `base`."""
    if set(tensors) != TLORA_ROLES:
        raise make_tlora_error("its tensors are not q_layer, p_layer and lambda_layer", tensors, base)
    if base.ndim < 2 or math.prod(base.shape[2:]) != 1:
        raise make_tlora_error("it is for a kernel, which LyCORIS trains and reads differently", tensors, base)
    lambdas = tensors["lambda_layer"].double().flatten()
    q, p = (tensors[role].double() for role in ("q_layer", "p_layer"))
    rank = len(lambdas)
    if not rank or not is_same_weight_shape(tuple(q.shape), (rank, base.shape[1])):
        raise make_tlora_error("its q_layer and lambda_layer do not chain to the weight's inputs", tensors, base)
    if not is_same_weight_shape(tuple(p.shape), (base.shape[0], rank)):
        raise make_tlora_error("its lambda_layer and p_layer do not chain to the weight's outputs", tensors, base)
    if not bool(torch.isfinite(base.double()).all()):
        raise make_tlora_error("the weight that it is a change of holds NaN or infinite numbers", tensors, base)
    return q.flatten(1), lambdas, p.flatten(1)


def make_tlora_error(why: str, tensors: TensorsByRole, base: Tensor) -> AdapterError:
    return AdapterError(
        f"this T-LoRA cannot be read: {why}",
        code="ADAPTER-TLORA",
        evidence={"adapter": {role: list(t.shape) for role, t in tensors.items()}, "model": list(base.shape)},
        remedy="Export it as a plain LoRA with the program that trained it.",
    )
