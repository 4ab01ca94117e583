"""The model families we know: one folder and one line each."""

from finitune.models.anima import ANIMA
from finitune.models.spec import ModelSpec

MODELS: tuple[ModelSpec, ...] = (ANIMA,)

__all__ = ["MODELS", "ModelSpec"]
