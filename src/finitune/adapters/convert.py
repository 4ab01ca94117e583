"""One algorithm as another, with what that costs said beforehand.

Every additive change is a product of two thin matrices: of LoHa, the row-wise products of the two halves' factors
(rank r * r); of LoKr, the Kronecker product of the two factors' own. Where the asked rank holds that product the
conversion is exact; where it does not, the largest singular values are kept and the error is stated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from torch import Tensor

from finitune.adapters import find_algorithm
from finitune.adapters.core import Shape, SiteAdapter
from finitune.adapters.lora import LoRA, is_plain_lora
from finitune.adapters.lowrank import decompose_delta
from finitune.adapters.weight import compute_weight_delta
from finitune.errors import AdapterError

EXACT_CONVERSION_TOLERANCE = 2.0**-22
"""The relative error that fp32 factors make anyway: below it a conversion counts as exact."""


class Exactness(str, Enum):
    """What a conversion costs, from nothing to too much."""

    LOSSLESS = "lossless"
    """Names alone change: tensors stay bit for bit."""
    EXACT = "exact"
    """The same change up to the rounding of the dtype: a scale was folded in, a product written out."""
    GROWING = "growing"
    """The same change up to rounding, at a higher rank."""
    LOSSY = "lossy"
    """A change of lower rank than the true one."""
    IMPOSSIBLE = "impossible"
    """The target cannot say it, or not without the base weight."""

    @property
    def cost(self) -> int:
        """0 for LOSSLESS, growing with what is lost."""
        return list(Exactness).index(self)


@dataclass(frozen=True)
class ConvertedAdapter:
    """A converted adapter, what kind of conversion it was, and the relative Frobenius error of its change."""

    adapter: SiteAdapter
    klass: Exactness
    error: float = 0.0


def convert_adapter_to_lora(
    adapter: SiteAdapter,
    base_shape: Shape | None = None,
    rank: int | None = None,
    base: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    without_magnitude: bool = False,
) -> ConvertedAdapter:
    """The adapter as a LoRA of at most `rank`, or of the least rank that is exact; a magnitude (DoRA) goes with it.

    `base_shape` is (out, in, *kernel), needed where the tensors do not tell a kernel. New factors are fp32, balanced,
    with scale 1. Algorithms that are not additive need `base` (fp32 or fp64), and its `bias` where it has one; and so
    does a DoRA `without_magnitude`, a LoRA of all that it changes. Raises AdapterError (CONVERT-IMPOSSIBLE) without it,
    and for what is no change of a matrix.
    """
    algorithm = find_algorithm(adapter.algorithm)
    folded = without_magnitude and adapter.magnitude is not None
    own = algorithm.rank(adapter)
    if not folded and is_plain_lora(adapter) and (rank is None or own is None or rank >= own):
        return ConvertedAdapter(adapter, Exactness.LOSSLESS)
    shape = tuple(base.shape) if base is not None else base_shape or algorithm.shape(adapter)
    if not adapter.tensors.keys() - {"diff_b"}:
        return ConvertedAdapter(adapter, Exactness.LOSSLESS)  # a bias alone: spelled the same beside every algorithm
    on_base = folded or not algorithm.additive
    if base is None and (shape is None if algorithm.additive and not folded else shape is None or len(shape) > 1):
        raise make_base_needed_error(adapter)
    if shape is None or len(shape) < 2:
        raise make_no_lora_error(adapter, "it does not change a matrix", "Keep its algorithm: leave out --as.")
    if on_base and base is not None:
        up, down, cut = decompose_delta(compute_weight_delta(base, adapter).flatten(1), rank=rank)
    else:
        up, down, cut = algorithm.factorize(replace(adapter, magnitude=None), shape, rank)
    tensors = {"up": up.reshape(*up.shape, *[1] * len(shape[2:])), "down": down.reshape(-1, *shape[1:])}
    change = None if bias is None or algorithm.additive else algorithm.bias_delta(adapter, bias)
    if change is not None:
        tensors["diff_b"] = change.float()
    elif "diff_b" in adapter.tensors:
        tensors["diff_b"] = adapter.tensors["diff_b"]
    if "up_bias" in adapter.tensors:
        tensors["up_bias"] = adapter.tensors["up_bias"].float() * algorithm.scale(adapter)
    lora = SiteAdapter(LoRA.name, tensors, float(cut.rank), magnitude=None if folded else adapter.magnitude)
    exact = Exactness.EXACT if adapter.algorithm == LoRA.name and not folded else Exactness.GROWING
    return ConvertedAdapter(lora, exact if cut.error <= EXACT_CONVERSION_TOLERANCE else Exactness.LOSSY, cut.error)


def make_base_needed_error(adapter: SiteAdapter) -> AdapterError:
    return make_no_lora_error(
        adapter,
        "its change depends on the base weight, which is not at hand",
        "Give the model: --model FILE. Or keep its algorithm: leave out --as. Or merge it into the model and extract a "
        "LoRA from the result.",
    )


def make_no_lora_error(adapter: SiteAdapter, why: str, remedy: str) -> AdapterError:
    return AdapterError(
        f"a {find_algorithm(adapter.algorithm).title} cannot become a LoRA: {why}",
        code="CONVERT-IMPOSSIBLE",
        evidence={"algorithm": adapter.algorithm, "class": Exactness.IMPOSSIBLE.value},
        remedy=remedy,
    )
