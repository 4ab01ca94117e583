"""The model families we know: one folder and one line each."""

from finitune.models.anima import ANIMA
from finitune.models.flux import FLUX
from finitune.models.qwen_image import QWEN_IMAGE
from finitune.models.sd2 import SD2
from finitune.models.sd15 import SD15
from finitune.models.sdxl import SDXL
from finitune.models.spec import ModelSpec, ShippedModel

MODEL_FAMILIES: tuple[ModelSpec, ...] = (
    ANIMA,
    FLUX,
    QWEN_IMAGE,
    SD15,
    SD2,
    SDXL,
)
SHIPPED_MODELS: dict[str, ShippedModel] = {
    name: model for family in MODEL_FAMILIES for name, model in family.shipped.items()
}

__all__ = ["MODEL_FAMILIES", "SHIPPED_MODELS", "ModelSpec"]
