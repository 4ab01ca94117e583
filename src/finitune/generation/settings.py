"""What to draw, checked before anything is loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass

from finitune.errors import UsageError

PICTURE_SIDE_MULTIPLE = 16  # the VAE halves three times, the patches once more


@dataclass(frozen=True, kw_only=True)
class PictureSettings:
    """One picture's settings, as a user gives them: kohya's and diffusers' names and defaults for Anima."""

    prompt: str
    negative: str = ""
    steps: int = 28
    cfg: float = 4.0
    seed: int = 0
    width: int = 64
    height: int = 64

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise _wrong("PROMPT-EMPTY", "--prompt", "the prompt is empty", 'Say what to draw: --prompt "red apple"')
        if self.steps < 1:
            raise _wrong("STEPS-TOO-FEW", "--steps", f"{self.steps} steps cannot draw", "Use 20 to 40 steps.")
        if not 0 <= self.seed < 1 << 63:
            raise _wrong("SEED-OUT-OF-RANGE", "--seed", f"seed {self.seed} is not in 0 .. 2^63 - 1", "Use --seed 0.")
        if not 0 <= self.cfg < 1000:
            raise _wrong("CFG-OUT-OF-RANGE", "--cfg", f"guidance {self.cfg} is not in 0 .. 1000", "Anima uses 4.")
        for name, pixels in (("width", self.width), ("height", self.height)):
            if pixels < PICTURE_SIDE_MULTIPLE or pixels % PICTURE_SIDE_MULTIPLE:
                nearest = max(PICTURE_SIDE_MULTIPLE, round(pixels / PICTURE_SIDE_MULTIPLE) * PICTURE_SIDE_MULTIPLE)
                raise _wrong(
                    "SIDE-NOT-MULTIPLE",
                    "--size",
                    f"{name} {pixels} is not a multiple of {PICTURE_SIDE_MULTIPLE}",
                    f"The nearest that fits is {nearest}.",
                )


def parse_picture_size(text: str) -> tuple[int, int]:
    """(width, height) of '768x1152' or '64'; raises UsageError for anything else."""
    match = re.fullmatch(r"(\d+)(?:[xX](\d+))?", text.strip())
    if not match:
        raise _wrong("SIZE-UNREADABLE", "--size", f"{text!r} is not WIDTHxHEIGHT", "For example --size 768x1152")
    return int(match[1]), int(match[2] or match[1])


def _wrong(code: str, option: str, message: str, remedy: str) -> UsageError:
    return UsageError(f"{option}: {message}", code=code, subject=option, remedy=remedy)
