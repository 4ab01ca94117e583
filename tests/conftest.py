"""What every test gets: one seed, and a quiet, repeatable hypothesis."""

from __future__ import annotations

import sys

import pytest
from hypothesis import settings

settings.register_profile("finitune", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("finitune")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same random numbers in every test, in whatever order they run; torch stays out of tests that need none."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
