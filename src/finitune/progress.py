"""How far a long verb is: the protocol that verbs speak, and its silent form."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told by a journey, shown by whoever listens; stages are known by name."""

    def start(self, name: str, total: int | None) -> None:
        """Stage `name` begins; `total` counts its steps, None where it is not known."""
        ...

    def advance(self, name: str, count: int = 1) -> None:
        """`count` more steps of stage `name` are done; a negative one takes steps back."""
        ...

    def say(self, name: str, text: str) -> None:
        """How stage `name` stands, in a line that the next one replaces."""
        ...

    def tell(self, text: str) -> None:
        """Something that stays to be read."""
        ...

    def finish(self, name: str) -> None:
        """Stage `name` is over, however many steps it took."""
        ...


class SilentProgress:
    """The progress that nobody watches."""

    def start(self, name: str, total: int | None) -> None:
        """Say nothing."""

    def advance(self, name: str, count: int = 1) -> None:
        """Say nothing."""

    def say(self, name: str, text: str) -> None:
        """Say nothing."""

    def tell(self, text: str) -> None:
        """Say nothing."""

    def finish(self, name: str) -> None:
        """Say nothing."""
