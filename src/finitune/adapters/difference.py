"""How far one adapter's change is from another's, in fp64, without a base weight."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from finitune.adapters import find_algorithm
from finitune.adapters.core import Magnitude, SiteAdapter
from finitune.adapters.health import is_zero_adapter
from finitune.adapters.lora import LoRA, is_plain_lora, to_lora_matrices


def compute_change_error(adapter: SiteAdapter | None, reference: SiteAdapter | None) -> float:
    """The relative Frobenius error of an adapter's change against another's, in fp64; None changes nothing.

    The larger of the errors of the additive change (or, for algorithms that depend on the base, of the tensors), the
    bias and the magnitudes. Infinite where the two cannot be compared, or only one of them changes anything.
    """
    if adapter is None or reference is None:
        silent = [one for one in (adapter, reference) if one is not None and not is_zero_change(one)]
        return math.inf if silent else 0.0
    a, b = find_algorithm(adapter.algorithm), find_algorithm(reference.algorithm)
    errors = [compute_bias_error(adapter, reference), compute_magnitude_error(adapter.magnitude, reference.magnitude)]
    if is_plain_lora(adapter) and is_plain_lora(reference):
        errors.append(compute_product_error(adapter, reference))
    elif a.additive and b.additive and has_known_change(adapter) and has_known_change(reference):
        errors.append(
            0.0
            if is_identical_adapter(adapter, reference)
            else compute_relative_error(compute_dense_change(adapter), compute_dense_change(reference))
        )
    elif adapter.algorithm != reference.algorithm or adapter.tensors.keys() != reference.tensors.keys():
        return math.inf
    else:
        errors += [compute_relative_error(adapter.tensors[role], tensor) for role, tensor in reference.tensors.items()]
        errors.append(compute_relative_error(torch.tensor(a.scale(adapter)), torch.tensor(b.scale(reference))))
    return max(errors)


def is_identical_adapter(adapter: SiteAdapter, reference: SiteAdapter) -> bool:
    one, other = adapter.tensors, reference.tensors
    if (adapter.algorithm, adapter.options, set(one)) != (reference.algorithm, reference.options, set(other)):
        return False
    algorithm = find_algorithm(adapter.algorithm)
    alike = all(one[role].dtype == other[role].dtype and torch.equal(one[role], other[role]) for role in one)
    return alike and algorithm.scale(adapter) == algorithm.scale(reference)


def compute_product_error(adapter: SiteAdapter, reference: SiteAdapter) -> float:
    """The relative error of one product of thin matrices against another, without forming either.

    |U D - V E| = |[U, -V] [D; E]| = |R_left R_right^T|, by the QR of the tall matrices.
    """
    (u, d), (v, e) = to_lora_matrices(adapter), to_lora_matrices(reference)
    if (u.shape[0], d.shape[1]) != (v.shape[0], e.shape[1]):
        return math.inf
    s, t = (LoRA().scale(one) for one in (adapter, reference))
    if u.shape == v.shape and torch.equal(d, e) and torch.equal(s * u, t * v):
        return 0.0
    norm = compute_product_norm(t * v, e)
    difference = compute_product_norm(torch.cat([s * u, -t * v], dim=1), torch.cat([d, e]))
    return difference / norm if norm else math.inf if difference else 0.0


def compute_product_norm(up: Tensor, down: Tensor) -> float:
    """The Frobenius norm of up (out, r) @ down (r, in)."""
    return float((torch.linalg.qr(up, mode="r")[1] @ torch.linalg.qr(down.mT, mode="r")[1].mT).norm())


def compute_dense_change(adapter: SiteAdapter) -> Tensor:
    """The additive change as a matrix in fp64, magnitude left out; a single zero for a bias alone."""
    algorithm = find_algorithm(adapter.algorithm)
    shape = algorithm.shape(adapter)
    if shape is None:
        return torch.zeros(1, dtype=torch.float64)
    return algorithm.delta(adapter, torch.zeros(shape, dtype=torch.float64)).reshape(shape[0], -1)


def compute_relative_error(value: Tensor, reference: Tensor) -> float:
    """|value - reference| / |reference| in fp64: 0 where both are zero, infinite where only the reference is."""
    if value.numel() != reference.numel():
        return math.inf
    norm = float(reference.double().norm())
    difference = float((value.double().flatten() - reference.double().flatten()).norm())
    return difference / norm if norm else math.inf if difference else 0.0


def compute_bias_error(adapter: SiteAdapter, reference: SiteAdapter) -> float:
    values = [find_algorithm(one.algorithm).bias_delta(one, None) for one in (adapter, reference)]
    size = next((value.numel() for value in values if value is not None), 0)
    ours, theirs = (torch.zeros(size) if value is None else value for value in values)
    return compute_relative_error(ours, theirs)


def compute_magnitude_error(magnitude: Magnitude | None, reference: Magnitude | None) -> float:
    """The relative error of DoRA's magnitudes; infinite where their sides or norms are not the same."""
    if magnitude is None or reference is None:
        return 0.0 if magnitude is reference else math.inf
    alike = (magnitude.side, magnitude.norm_of, magnitude.eps) == (reference.side, reference.norm_of, reference.eps)
    return compute_relative_error(magnitude.tensor, reference.tensor) if alike else math.inf


def is_zero_change(adapter: SiteAdapter) -> bool:
    """Whether an additive adapter without magnitudes is all zeros."""
    if adapter.magnitude is not None or not find_algorithm(adapter.algorithm).additive:
        return False
    if not has_known_change(adapter):
        return is_zero_adapter(adapter)
    bias = find_algorithm(adapter.algorithm).bias_delta(adapter, None)
    return not bool(compute_dense_change(adapter).any()) and (bias is None or not bool(bias.any()))


def has_known_change(adapter: SiteAdapter) -> bool:
    """Whether the tensors alone make the change of the weight: not where they are for weights of several sizes."""
    only_bias = not adapter.tensors.keys() - {"diff_b"}
    return only_bias or find_algorithm(adapter.algorithm).shape(adapter) is not None
