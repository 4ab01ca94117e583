"""What an error of several processes means. NCCL says little: a code, and "run with NCCL_DEBUG=INFO"; what is known of
the words of NCCL, gloo and torch stands in peer_errors.toml.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from finitune.package_data import read_package_toml


@dataclass(frozen=True)
class PeerErrorExplanation:
    """What an error text says, in a sentence, and what usually is behind it and helps."""

    name: str
    sentence: str
    cause: str
    pattern: str = ""  # of the text, where torch's or gloo's words are known
    phrase: str = ""  # what NCCL prints for a result code of this name

    def fits(self, text: str) -> bool:
        """Whether a text says this."""
        if self.pattern:
            return bool(re.search(self.pattern, text, re.DOTALL))
        return bool(re.search(rf"\b{self.name}\b", text)) or ("NCCL" in text and self.phrase.lower() in text.lower())


def read_peer_errors(kind: str) -> list[PeerErrorExplanation]:
    """What is known of "torch", "nccl" or "gloo"."""
    return [PeerErrorExplanation(**entry) for entry in read_package_toml(Path(__file__).with_suffix(".toml"))[kind]]


def explain_peer_error(text: str) -> PeerErrorExplanation | None:
    """What an error text of torch's distributed package means; None where it names nothing that is known.

    >>> explain_peer_error("ncclSystemError: System call (e.g. socket, malloc) ...").name
    'ncclSystemError'
    >>> explain_peer_error("out of cheese")
    """
    known = (error for kind in ("torch", "nccl", "gloo") for error in read_peer_errors(kind))
    return next((error for error in known if error.fits(text)), None)
