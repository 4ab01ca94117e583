"""A picture file that says how it was made."""

from __future__ import annotations

import io
import json
from pathlib import Path

from torch import Tensor

from finitune.files.writer import write_bytes


def encode_png(pixels: Tensor, metadata: dict[str, object] | None = None) -> bytes:
    """PNG of (H, W, 3) uint8 pixels, with `metadata` as JSON in its text chunk `finitune`."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    information = PngInfo()
    if metadata:
        information.add_itxt("finitune", json.dumps(metadata, ensure_ascii=False))
        information.add_itxt("parameters", format_parameters_text(metadata))
    buffer = io.BytesIO()
    Image.fromarray(pixels.cpu().numpy()).save(buffer, "PNG", pnginfo=information)
    return buffer.getvalue()


def format_parameters_text(metadata: dict[str, object]) -> str:
    """The line that other programs of the field read: prompt, negative prompt, then settings by name."""
    settings = {
        "Steps": metadata.get("steps"),
        "Sampler": "Euler",
        "CFG scale": metadata.get("cfg"),
        "Seed": metadata.get("seed"),
        "Size": metadata.get("size"),
        "Model": metadata.get("model"),
        "Precision": metadata.get("precision"),
    }
    listed = ", ".join(f"{name}: {value}" for name, value in settings.items() if value is not None)
    return f"{metadata.get('prompt', '')}\nNegative prompt: {metadata.get('negative', '')}\n{listed}"


def save_picture(path: Path, pixels: Tensor, metadata: dict[str, object], *, good: bool) -> Path:
    """Write the PNG, as `NAME.suspect.png` where the verdict was bad; returns the path written."""
    target = path if good else path.with_name(f"{path.stem}.suspect.png")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(target, encode_png(pixels, metadata))
    return target


def read_picture_metadata(path: Path) -> dict[str, object]:
    """What `save_picture` stored in a PNG; empty where there is nothing of ours."""
    from PIL import Image

    with Image.open(path) as image:
        text = image.info.get("finitune")
    return json.loads(text) if text else {}
