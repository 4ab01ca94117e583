"""The obvious twin of a diagnosis: every operation of a run looked at, the first bad one kept."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from finitune.precision.planner import apply_tensor_core_rounding
from finitune.precision.probe import is_output_finite
from finitune.precision.sites import ModulePath
from finitune.precision.trace import CONSTANT_OPS


class FirstBad(TorchDispatchMode):
    """Keep the first operation whose floating inputs are finite and whose output is not, and its result in fp64."""

    def __init__(self, path):
        super().__init__()
        self.path, self.found, self.value = path, None, None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        finite = is_output_finite((args, kwargs))
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if self.found is None and finite and name not in CONSTANT_OPS and not is_output_finite(result):
            self.found = (self.path.here, name)
            if not func._schema.is_mutable and isinstance(result, torch.Tensor):
                self.value = float(func(*tree_map(wide, args), **tree_map(wide, kwargs)).abs().max())
        return result


def wide(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@torch.no_grad()
def first_bad(root, call):
    path = ModulePath(root)
    with path, apply_tensor_core_rounding(root), FirstBad(path) as twin:
        call.run(root)
    return twin


def brute_force(root, call):
    """(site, operation) of the first bad operation, or None."""
    return first_bad(root, call).found
