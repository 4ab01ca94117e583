"""The algebra of adapters: one file and one line for each algorithm. Nothing here knows a file's naming or a model."""

from finitune.adapters.boft import BOFT
from finitune.adapters.core import AdapterSet, Algorithm, Magnitude, SiteAdapter, Target
from finitune.adapters.full import Full
from finitune.adapters.glora import GLoRA
from finitune.adapters.ia3 import IA3
from finitune.adapters.loha import LoHa
from finitune.adapters.lokr import LoKr
from finitune.adapters.lora import LoRA
from finitune.adapters.norm import Norm
from finitune.adapters.oft import OFT
from finitune.adapters.oft_v2 import OFTv2
from finitune.adapters.set_weight import SetWeight
from finitune.errors import AdapterError, did_you_mean

ALGORITHMS: tuple[Algorithm, ...] = (
    LoRA(),
    LoHa(),
    LoKr(),
    GLoRA(),
    Full(),
    Norm(),
    SetWeight(),
    IA3(),
    OFT(),
    BOFT(),
    OFTv2(),
)


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
