"""finitune: fine-tune, run and merge diffusion adapters in half precision, and stay finite.

The seven things a script needs; everything else is in the command line, `finitune --help`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finitune.api import apply, attach, plan, train
    from finitune.numerics.simulate import half as simulate_half
    from finitune.precision.plan import PrecisionPlan
    from finitune.precision.probe import probe

__version__ = "0.1.0"
__all__ = ["PrecisionPlan", "__version__", "apply", "attach", "plan", "probe", "simulate_half", "train"]

_PLACES = {
    "PrecisionPlan": ("finitune.precision.plan", "PrecisionPlan"),
    "apply": ("finitune.api", "apply"),
    "attach": ("finitune.api", "attach"),
    "plan": ("finitune.api", "plan"),
    "probe": ("finitune.precision.probe", "probe"),
    "simulate_half": ("finitune.numerics.simulate", "half"),
    "train": ("finitune.api", "train"),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `finitune --help` does not wait for torch."""
    if name not in _PLACES:
        raise AttributeError(f"module 'finitune' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _PLACES[name]
    return getattr(import_module(module), attribute)
