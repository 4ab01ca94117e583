"""The model families we know: one folder and one line each."""

from finitune.models.anima import ANIMA
from finitune.models.flux import FLUX
from finitune.models.qwen_image import QWEN_IMAGE
from finitune.models.sd2 import SD2
from finitune.models.sd15 import SD15
from finitune.models.sdxl import SDXL
from finitune.models.spec import ModelSpec

MODEL_FAMILIES: tuple[ModelSpec, ...] = (
    ANIMA,
    FLUX,
    QWEN_IMAGE,
    SD15,
    SD2,
    SDXL,
)

__all__ = ["MODEL_FAMILIES", "ModelSpec"]
