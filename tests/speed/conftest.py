"""Every test here is timed by the virtual clock of the simulated accelerator, so none is flaky.

With SWAP_ADAM_TEST_DEVICE set to a real device there is no such clock, and nothing to collect.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from device_under_test import IS_SIMULATED  # tests/with_torch/support; makes the device usable

if TYPE_CHECKING:
    from swap_adam.bench.accelerators import SimulatedAccelerator

collect_ignore_glob = [] if IS_SIMULATED else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_race(_one_thread: None) -> Iterator[None]:
    """A test starts with the simulator as after ``enable()`` and leaves no race behind."""
    import swap_adam.simulator as simulator

    simulator.reset()
    simulator.configure(strict=True)
    yield
    torch.accelerator.synchronize(0)
    assert simulator.violations() == []


@pytest.fixture
def accelerator() -> SimulatedAccelerator:
    from swap_adam.bench.accelerators import SimulatedAccelerator

    return SimulatedAccelerator()
