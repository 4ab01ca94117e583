"""What would this half-precision model do on a tensor core? Asked on any device, at about the cost of fp32.

An unmodified model in fp16 (or bf16) runs under `half()`. Products (matrix, convolution, attention) take their
half operands into fp32, accumulate there and round once, as tensor cores do; every other operation runs in its own
dtype, which rounds each result to half. Slow half arithmetic of a CPU never happens.

Two profiles, because real programs do both:

* eager: each operation's result is rounded to half before the next one reads it.
* fused: a chain of pointwise operations (casts among them) keeps fp32 inside, as a compiled kernel does; the value is
  rounded where a product, a reduction or anything else reads it. What overflows inside a chain may survive there.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

Profile = Literal["eager", "fused"]

HALF_DTYPES = (torch.float16, torch.bfloat16)

_aten = torch.ops.aten
#: Operations that a tensor core (or a kernel built on one) computes with fp32 accumulation.
TENSOR_CORE_OPERATIONS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.addbmm.default,
        _aten.mv.default,
        _aten.addmv.default,
        _aten.dot.default,
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
        super().__init__()  # pyright: ignore[reportUnknownMemberType]  # torch leaves its argument untyped
        self.profile = profile
        #: Half tensor -> the fp32 value that a fused kernel would still hold for it.
        self._wide: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # there, composite operations arrive whole
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if func in TENSOR_CORE_OPERATIONS:
            return _product(func, args, kwargs)
        if self.profile == "fused" and any(isinstance(a, Tensor) for a in args):
            return self._fused(func, args, kwargs)
        return func(*args, **kwargs)

    def _fused(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        tensors = [a for a in args if isinstance(a, Tensor)]
        pointwise = torch.Tag.pointwise in func.tags
        if func._schema.is_mutable:
            if pointwise and "out" not in kwargs and tensors[0].dtype in HALF_DTYPES:
                return self._in_place(func, args, kwargs)
            self._forget([leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)])
            return func(*args, **kwargs)
        if func is _aten._to_copy.default:
            return self._cast(func, args[0], kwargs)
        if pointwise and any(t.dtype in HALF_DTYPES for t in tensors):
            wide = func(*tree_map(self._read, args), **kwargs)
            dtype = _result_dtype(tensors)
            fits = isinstance(wide, Tensor) and wide.dtype is torch.float32 and dtype is not None
            return self._hold(wide.to(dtype), wide) if fits else wide
        if func.is_view and tensors[0] in self._wide:
            return self._view(func, args, kwargs)
        return func(*args, **kwargs)

    def _in_place(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        target: Tensor = args[0]
        wide = self._read(target).clone()
        func(wide, *tree_map(self._read, args[1:]), **kwargs)
        self._forget([target])
        return self._hold(target.copy_(wide), wide)

    def _cast(self, func: Any, source: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        wide: Tensor = self._read(source)
        result: Tensor = func(wide, **{"dtype": source.dtype, **kwargs})
        if result.dtype in HALF_DTYPES and result.device == wide.device:
            self._hold(result, wide.to(torch.float32, copy=True))
        return result

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        narrow, wide = func(*args, **kwargs), func(*tree_map(self._read, args), **kwargs)
        for n, w in zip(tree_leaves(narrow), tree_leaves(wide), strict=True):
            if n.dtype == args[0].dtype:  # else the bits are read as another type
                self._hold(n, w)
        return narrow

    def _hold(self, narrow: Tensor, wide: Tensor) -> Tensor:
        self._wide[narrow] = wide
        return narrow

    def _forget(self, written: Sequence[Tensor]) -> None:
        """Drop what is held for these tensors and for all that share memory with them: it was written to."""
        places = {t.untyped_storage().data_ptr() for t in written}
        for held in list(self._wide):
            if held.untyped_storage().data_ptr() in places:
                del self._wide[held]

    def _read(self, value: Any) -> Any:
        """The fp32 value behind a half tensor, where a fused kernel would have it."""
        if isinstance(value, Tensor) and value.dtype in HALF_DTYPES:
            return self._wide[value] if value in self._wide else value.float()
        return value


def _product(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    attention = "attention" in func.name()  # its log-sum-exp is fp32 beside half operands
    dtypes = [a.dtype for a in args if isinstance(a, Tensor)]
    mixed = len(set(dtypes)) > 1 and not attention
    if dtypes[0] not in HALF_DTYPES or mixed:  # what torch refuses, it shall refuse here too
        return func(*args, **kwargs)
    result = func(*tree_map(_widen, args), **tree_map(_widen, dict(kwargs)))
    if isinstance(result, Tensor):
        return result.to(dtypes[0])
    if attention and "backward" not in func.name():
        return (result[0].to(dtypes[0]), *result[1:])
    return tuple(r.to(dtypes[0]) if isinstance(r, Tensor) else r for r in result)


def _widen(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF_DTYPES else value


def _result_dtype(tensors: Sequence[Tensor]) -> torch.dtype | None:
    """The half dtype that eager promotion gives these operands, or None where it gives fp32 or more."""
    floating = [t for t in tensors if t.is_floating_point()]
    dtypes = {t.dtype for t in floating if t.dim() > 0} or {t.dtype for t in floating}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= set(HALF_DTYPES) else None
