"""The algebra of adapters: one file and one line for each algorithm, which owns all that is known of it.

Nothing here knows a model, or how a file names its modules.
"""

from finitune.adapters.algorithm import AdapterAlgorithm, AdapterForm
from finitune.adapters.boft import BOFT
from finitune.adapters.core import AdapterSet, Magnitude, SiteAdapter, Target
from finitune.adapters.full import Full, Norm, SetWeight
from finitune.adapters.glora import GLoRA
from finitune.adapters.ia3 import IA3
from finitune.adapters.loha import LoHa
from finitune.adapters.lokr import LoKr
from finitune.adapters.lora import LoRA
from finitune.adapters.oft import OFT
from finitune.adapters.oft_v2 import OFTv2
from finitune.adapters.tlora import TLoRA
from finitune.adapters.vera import VeRA
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
    VeRA(),
)
ADAPTER_FORMS: tuple[AdapterForm, ...] = (*ADAPTER_ALGORITHMS, TLoRA())
"""What files may have: the algorithms, and what is read as one of them."""


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


def find_form(name: str) -> AdapterForm:
    """The form of a name; raises KeyError for one that there is not."""
    return {form.name: form for form in ADAPTER_FORMS}[name]


def find_form_by_field_name(name: str) -> AdapterForm | None:
    """What trainers and their configurations call so, in any case; None for what we do not know."""
    return next((form for form in ADAPTER_FORMS if name.lower() in form.field_names), None)


def list_algorithms(**traits: object) -> tuple[str, ...]:
    return tuple(
        one.name for one in ADAPTER_ALGORITHMS if all(getattr(one, trait) == value for trait, value in traits.items())
    )


__all__ = [
    "ADAPTER_ALGORITHMS",
    "ADAPTER_FORMS",
    "AdapterAlgorithm",
    "AdapterForm",
    "AdapterSet",
    "Magnitude",
    "SiteAdapter",
    "Target",
    "find_algorithm",
    "find_form",
    "find_form_by_field_name",
    "list_algorithms",
]
