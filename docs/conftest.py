"""Fixtures that the examples name."""
from __future__ import annotations

import pytest


@pytest.fixture
def training_libraries() -> None:
    """Examples with training libraries are skipped where these are not installed."""
    for name in ("accelerate", "lightning", "transformers"):
        pytest.importorskip(name)
