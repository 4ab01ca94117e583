"""Where in a model: product sites, leaf norms, and the module path of whatever runs right now.

A site is a dotted module name. A product site is a Linear or a convolution, the places where the matrix FLOPs are;
a leaf norm is a childless module that normalises, recognised by its class name (every library writes its own).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_PRODUCT_CLASSES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def iterate_named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module of `root` with its dotted name, '' for the root; a shared module once, under its first name."""
    yield from root.named_modules()


def is_product_module(module: nn.Module) -> bool:
    """True for a module whose forward is one matrix product or convolution."""
    return isinstance(module, _PRODUCT_CLASSES)


def is_leaf_norm(module: nn.Module) -> bool:
    """True for a childless normalisation module, whatever library it comes from."""
    return "norm" in type(module).__name__.lower() and next(module.children(), None) is None


def is_self_scaling(module: nn.Module) -> bool:
    """True for a module that says so: its products keep in range by themselves, its parameters have their own dtype."""
    return getattr(module, "scales_itself", False) is True


def find_product_sites(root: nn.Module) -> dict[str, nn.Module]:
    """Every product site of `root` by name; a shared module appears under its first name."""
    return {name: module for name, module in iterate_named_modules(root) if name and is_product_module(module)}


def find_leaf_norms(root: nn.Module) -> dict[str, nn.Module]:
    """Every leaf norm of `root` by name."""
    return {name: module for name, module in iterate_named_modules(root) if name and is_leaf_norm(module)}


def replace_module(root: nn.Module, site: str, module: nn.Module) -> nn.Module:
    """Put `module` at `site` of `root` and return the module that stood there."""
    parent_name, _, name = site.rpartition(".")
    parent = root.get_submodule(parent_name)
    previous = root.get_submodule(site)
    setattr(parent, name, module)
    return previous


class ModulePath:
    """The dotted path of the module that is running, kept by hooks while the context is open.

    `on_enter(site, module, inputs)` and `on_leave(site, module, inputs, output)` are called at each border. After an
    exception `failed_at` is the innermost module that it left.
    """

    def __init__(
        self,
        root: nn.Module,
        on_enter: Callable[[str, nn.Module, Any], None] | None = None,
        on_leave: Callable[[str, nn.Module, Any, Any], None] | None = None,
    ):
        self._root = root
        self._on_enter = on_enter
        self._on_leave = on_leave
        self._stack: list[str] = []
        self.failed_at = ""
        self._handles: list[RemovableHandle] = []

    @property
    def here(self) -> str:
        """The innermost running module's site; '' is the root, and also outside of it."""
        return self._stack[-1] if self._stack else ""

    @property
    def depth(self) -> int:
        """How many modules are running, one inside the other."""
        return len(self._stack)

    def __enter__(self) -> ModulePath:
        for site, module in iterate_named_modules(self._root):
            self._handles.append(module.register_forward_pre_hook(self._enter(site), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave(site), with_kwargs=True, always_call=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()

    def _enter(self, site: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._stack.append(site)
            if self._on_enter:
                self._on_enter(site, module, (args, kwargs))

        return hook

    def _leave(self, site: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if sys.exc_info()[0] is not None:
                self.failed_at = self.failed_at or site  # the innermost module leaves first
            if self._on_leave:
                self._on_leave(site, module, (args, kwargs), output)
            if self._stack:
                self._stack.pop()

        return hook


def iterate_nested_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors inside nested tuples, lists, dicts and model outputs, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in cast("dict[Any, Any]", value).values():
            yield from iterate_nested_tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in cast("Sequence[Any]", value):
            yield from iterate_nested_tensors(item)
