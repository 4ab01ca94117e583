"""What would this half-precision model do on a tensor core? Asked on any device, at about the cost of fp32.

An unmodified model in fp16 (or bf16) runs under `half()`. Products (matrix, convolution, attention) take their
half operands into fp32, accumulate there and round once, as tensor cores do; every other operation runs in its own
dtype, which rounds each result to half. Slow half arithmetic of a CPU never happens.

Two profiles, because real programs do both:

* eager: each operation's result is rounded to half before the next one reads it.
* fused: a chain of pointwise operations keeps fp32 inside, as a compiled kernel does; the value is rounded where a
  product, a reduction or anything else reads it. What overflows in the middle of a chain may survive there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

Profile = Literal["eager", "fused"]

HALVES = (torch.float16, torch.bfloat16)

_aten = torch.ops.aten
#: Operations that a tensor core (or a kernel built on one) computes with fp32 accumulation.
PRODUCTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.mv.default,
        _aten.addmv.default,
        _aten.dot.default,
        _aten.linear.default,
        _aten.matmul.default,
        _aten.convolution.default,
        _aten.convolution_backward.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    }
)


class half(TorchDispatchMode):
    """Run half-precision operations with the tensor core's meaning; dtypes in and out are those of the model.

    >>> import torch
    >>> from finitune.numerics import simulate
    >>> a = torch.full((1, 4), 200.0, dtype=torch.float16)
    >>> with simulate.half():
    ...     print((a @ a.T).item(), (a @ (0.1 * a).T).item())
    inf 16000.0
    """

    def __init__(self, profile: Profile = "eager"):
        super().__init__()
        self.profile = profile
        self._wide = WeakIdKeyDictionary()  # half tensor -> the fp32 value a fused kernel would still hold

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in PRODUCTS:
            return self._product(func, args, kwargs)
        if self.profile == "fused":
            return self._fused(func, args, kwargs)
        return func(*args, **kwargs)

    def _product(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        dtype = next((a.dtype for a in args if isinstance(a, Tensor) and a.dtype in HALVES), None)
        if dtype is None:
            return func(*args, **kwargs)
        result = func(*tree_map(_widen, args), **tree_map(_widen, dict(kwargs)))
        if isinstance(result, Tensor):
            return result.to(dtype)
        if "backward" in str(func):
            return tuple(r.to(dtype) if isinstance(r, Tensor) else r for r in result)
        return (result[0].to(dtype), *result[1:])  # attention: the output; its log-sum-exp stays fp32

    def _fused(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        tensors = [a for a in args if isinstance(a, Tensor)]
        held = [t for t in tensors if t in self._wide]
        if func._schema.is_mutable or not tensors:
            return func(*args, **kwargs)
        if torch.Tag.pointwise in func.tags and any(t.dtype in HALVES for t in tensors):
            dtype = _result_dtype(tensors)
            wide = func(*tree_map(self._read, args), **kwargs)
            if not isinstance(wide, Tensor) or wide.dtype is not torch.float32 or dtype is None:
                return wide
            narrow = wide.to(dtype)
            self._wide[narrow] = wide
            return narrow
        if held and func.is_view:
            narrow, wide = func(*args, **kwargs), func(*tree_map(self._read, args), **kwargs)
            if isinstance(narrow, Tensor):
                self._wide[narrow] = wide
            return narrow
        return func(*args, **kwargs)

    def _read(self, value: Any) -> Any:
        """The fp32 value behind a half tensor, where a fused kernel would have it."""
        if isinstance(value, Tensor) and value.dtype in HALVES:
            return self._wide[value] if value in self._wide else value.float()
        return value


def _widen(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALVES else value


def _result_dtype(tensors: Sequence[Tensor]) -> torch.dtype | None:
    """The half dtype that eager promotion gives these operands, or None where it gives fp32 or more."""
    ranked = [t for t in tensors if t.dim() > 0 and t.is_floating_point()] or [
        t for t in tensors if t.is_floating_point()
    ]
    dtypes = {t.dtype for t in ranked}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= set(HALVES) else None
