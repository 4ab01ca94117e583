"""The algebra of adapters: one file and one line for each algorithm. Nothing here knows a file's naming or a model."""

from finitune.adapters.boft import BOFT
from finitune.adapters.core import AdapterAlgorithm, AdapterSet, Magnitude, SiteAdapter, Target
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
from finitune.errors import AdapterError, suggest_nearest_name

ADAPTER_ALGORITHMS: tuple[AdapterAlgorithm, ...] = (
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


def find_algorithm(name: str) -> AdapterAlgorithm:
    """The algorithm of a name; raises AdapterError for one that we do not have."""
    for algorithm in ADAPTER_ALGORITHMS:
        if algorithm.name == name:
            return algorithm
    names = [algorithm.name for algorithm in ADAPTER_ALGORITHMS]
    raise AdapterError(
        f"there is no algorithm {name!r}.{suggest_nearest_name(name, names)}",
        code="ADAPTER-ALGORITHM",
        subject=name,
        remedy=f"It is one of {', '.join(names)}.",
    )


__all__ = [
    "ADAPTER_ALGORITHMS",
    "AdapterAlgorithm",
    "AdapterSet",
    "Magnitude",
    "SiteAdapter",
    "Target",
    "find_algorithm",
]
