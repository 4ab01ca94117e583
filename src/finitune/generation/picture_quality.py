"""Is this a picture? The checks that every drawn picture goes through before a command says done."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from finitune.report import Finding, Level

_MIN_PIXEL_STD = 2.0  # of 255
_MAX_SATURATED_SHARE = 0.98


@dataclass(frozen=True)
class PictureQuality:
    """The numbers of one picture, what is wrong with it, and what it looks like in words."""

    latents_nonfinite: int
    latents_std: float
    pixels_std: float
    saturated_share: float
    findings: tuple[Finding, ...]
    look: str

    @property
    def good(self) -> bool:
        return not self.findings

    def figures(self) -> dict[str, object]:
        """The numbers as named figures."""
        names = ("latents_nonfinite", "latents_std", "pixels_std", "saturated_share")
        return {name: getattr(self, name) for name in names}


def judge_picture(latents: Tensor, pixels: Tensor, remedy: str) -> PictureQuality:
    """Judge a picture by its latents (any shape, fp32) and its pixels (..., H, W, 3) uint8."""
    bad = int((~latents.isfinite()).sum())
    latents_std = float(latents.std()) if not bad else float("nan")
    values = pixels.float()
    pixels_std = float(values.std())
    saturated = float(((values == 0) | (values == 255)).float().mean())
    numbers = {"pixels_std": pixels_std, "saturated_share": saturated}
    findings: list[Finding] = []

    def find(code: str, message: str, **evidence: object) -> None:
        findings.append(Finding(Level.ERROR, code, "picture", message, {**numbers, **evidence}, remedy))

    if bad:
        share = f"{bad} of {latents.numel()}"
        look = f"the picture is {'black' if float(values.max()) == 0 else 'ruined'}"
        find("LATENTS-NONFINITE", f"{share} latent values are NaN or infinite: {look}", nonfinite=bad)
    elif pixels_std < _MIN_PIXEL_STD:
        look = f"the picture is one colour (standard deviation {pixels_std:.2f} of 255)"
        find("PICTURE-FLAT", look)
    elif saturated > _MAX_SATURATED_SHARE:
        look = f"{saturated:.1%} of the pixel values are 0 or 255"
        find("PICTURE-SATURATED", look)
    else:
        look = "a picture"
    return PictureQuality(bad, latents_std, pixels_std, saturated, tuple(findings), look)
