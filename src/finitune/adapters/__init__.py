"""The algebra of adapters: one file and one line for each algorithm. Nothing here knows a file's naming or a model."""

from finitune.adapters.core import AdapterSet, Algorithm, Magnitude, SiteAdapter, Target
from finitune.adapters.lora import LoRA
from finitune.errors import AdapterError, did_you_mean

ALGORITHMS: tuple[Algorithm, ...] = (LoRA(),)


def algorithm_of(name: str) -> Algorithm:
    """The algorithm of a name; raises AdapterError for one that we do not have."""
    for algorithm in ALGORITHMS:
        if algorithm.name == name:
            return algorithm
    names = [algorithm.name for algorithm in ALGORITHMS]
    raise AdapterError(
        f"there is no algorithm {name!r}.{did_you_mean(name, names)}",
        code="ADAPTER-ALGORITHM",
        subject=name,
        remedy=f"It is one of {', '.join(names)}.",
    )


__all__ = ["ALGORITHMS", "AdapterSet", "Algorithm", "Magnitude", "SiteAdapter", "Target", "algorithm_of"]
