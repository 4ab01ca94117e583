"""The modules that a plan puts in place of a model's own: each computes the same function in stated precision.

A twin of a product module keeps the class of the original in its bases and shares its parameters, so names, `repr`,
`isinstance` and state keys stay as they were. `arithmetic` says how the product is computed:

    float16   the scaled half product: what the plan is for
    bfloat16  the same flow of dtypes with an unlimited range: what the planner measures with
    float32   the algebra alone: must equal the original bit for bit
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from finitune.numerics.conv import ConvGeometry, half_conv
from finitune.numerics.half import half_linear
from finitune.precision.plan import PlanLine


class HalfProduct:
    """What linear and convolution twins share: the plan's numbers for this site."""

    exponent: int | None
    weight_exponent: int
    carry: int  # the result is handed on divided by 2**carry
    carried: int  # the input was handed on divided by 2**carried
    out: str
    arithmetic: torch.dtype

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype that this site writes: the half of its arithmetic, or fp32."""
        return torch.float32 if self.out == "fp32" else self.arithmetic

    def unscaled(self, x: Tensor) -> Tensor:
        """`x` divided by the site's power of two and rounded to its arithmetic, in fp32 storage."""
        return (x.float() * 2.0 ** -(self.exponent or 0)).to(self.arithmetic).float()

    @property
    def stored_exponent(self) -> int:
        """The power of two by which the stored operands and the stored result differ from the true ones."""
        return self.weight_exponent + self.carried - self.carry

    @property
    def product_exponent(self) -> int:
        """The power of two that the product must be multiplied by in the end."""
        return (self.exponent or 0) + self.stored_exponent

    def stored_bias(self, bias: Tensor | None) -> Tensor | None:
        """The bias as it is added to the stored result."""
        return bias if bias is None or not self.carry else bias * 2.0**-self.carry

    def unscaled_bias(self, bias: Tensor | None) -> Tensor | None:
        """The bias in fp32, divided as the product is, so that it can be added before the scale is undone."""
        return None if bias is None else bias.float() * 2.0 ** -(self.product_exponent + self.carry)

    def scaled(self, product: Tensor) -> Tensor:
        """The product in fp32 with its powers of two undone, rounded once."""
        return (product * 2.0**self.product_exponent).to(self.out_dtype)

    def extra_repr(self) -> str:
        exponent = "current" if self.exponent is None else self.exponent
        return f"{super().extra_repr()}, exponent={exponent}, out={self.out}"  # type: ignore[misc]


class ScaledHalfLinear(HalfProduct, nn.Linear):
    """A Linear as a scaled half product: x (..., in) fp16 or fp32 -> (..., out) in `out`."""

    def forward(self, input: Tensor) -> Tensor:
        if self.arithmetic is not torch.float16:
            bias = self.unscaled_bias(self.bias)
            return self.scaled(F.linear(self.unscaled(input), self.weight.float(), bias))
        return half_linear(
            input,
            self.weight,
            self.stored_bias(self.bias),
            exponent=self.exponent,
            out_dtype=self.out_dtype,
            weight_exponent=self.stored_exponent,
        )


class ScaledHalfConv(HalfProduct):
    """A convolution as a scaled half product; padding modes and causal padding stay with the original class."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        conv: Any = self
        if conv.padding_mode != "zeros":
            input = F.pad(input, conv._reversed_padding_repeated_twice, mode=conv.padding_mode)
        padding = conv.padding if conv.padding_mode == "zeros" else 0
        geometry = ConvGeometry(conv.stride, padding, conv.dilation, conv.groups)
        if self.arithmetic is torch.float16:
            return half_conv(
                input,
                weight,
                self.stored_bias(bias),
                geometry,
                exponent=self.exponent,
                out_dtype=self.out_dtype,
                weight_exponent=self.stored_exponent,
            )
        convolve = getattr(F, f"conv{weight.ndim - 2}d")
        return self.scaled(convolve(self.unscaled(input), weight.float(), self.unscaled_bias(bias), *geometry))


class Fp32Norm(nn.Module):
    """A norm that reads the fp32 stream: arithmetic in fp32, one cast out to the model's half."""

    def __init__(self, norm: nn.Module, half: torch.dtype):
        super().__init__()
        self.norm = copy.deepcopy(norm).float()
        self.out_dtype = half

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.norm(x.float(), *args, **kwargs).to(self.out_dtype)


class Fp32Module(nn.Module):
    """A module kept in fp32: its inputs are widened, its parameters are fp32, its outputs stay fp32."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = copy.deepcopy(module).float()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from torch.utils._pytree import tree_map

        args, kwargs = tree_map(_widen, args), tree_map(_widen, kwargs)
        return self.module(*args, **kwargs)


def _widen(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


@cache
def _twin_class(original: type[nn.Module]) -> type[nn.Module]:
    """The class of a product twin: ours before the original's, so that only the product changes."""
    ours = ScaledHalfLinear if issubclass(original, nn.Linear) else ScaledHalfConv
    twin = type(f"Half{original.__name__}", (ours, original), {"__module__": original.__module__})
    return cast("type[nn.Module]", twin)


def make_half_product(module: nn.Module, line: PlanLine, arithmetic: torch.dtype, carried: int = 0) -> nn.Module:
    """A twin of a Linear or convolution for `line`, sharing the original's parameters.

    `carried` is the power of two by which the product in front of it has divided what it hands on.
    """
    twin = copy.copy(module)
    twin.__class__ = _twin_class(type(module))
    for registry in ("_parameters", "_modules"):
        twin.__dict__[registry] = dict(twin.__dict__[registry])
    numbers = {name: getattr(line, name) for name in ("exponent", "weight_exponent", "carry", "out")}
    twin.__dict__.update(numbers, carried=carried, arithmetic=arithmetic)
    if line.weight_exponent:
        weight = cast(Tensor, module.weight).detach().float() * 2.0**-line.weight_exponent
        twin.weight = nn.Parameter(weight, requires_grad=False)
    return twin
