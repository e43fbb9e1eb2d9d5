"""Every test here runs on the simulated device, or on the one in SWAP_ADAM_TEST_DEVICE."""
from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))

from drop_in_parity import DEVICE, IS_SIMULATED  # noqa: E402


@pytest.fixture(autouse=True)
def watched_device() -> Iterator[None]:
    """A fresh simulated device, on which no race may have been found at the end."""
    if not IS_SIMULATED:
        yield
        return
    from swap_adam import simulator

    simulator.enable()
    simulator.reset()
    simulator.configure(strict=True)
    simulator.reset_counters()
    yield
    assert simulator.violations() == []


@pytest.fixture
def simulator() -> ModuleType:
    """For what only the simulated device can tell: bytes held, transfers issued."""
    if not IS_SIMULATED:
        pytest.skip(f"asks the simulated device, and SWAP_ADAM_TEST_DEVICE={DEVICE}")
    from swap_adam import simulator

    return simulator
