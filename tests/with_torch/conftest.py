"""The device that the tests run on, and the simulator's verdict after each of them.

``SWAP_ADAM_TEST_DEVICE`` unset: the simulated accelerator, which raises at every race. Set to
``cuda`` or ``npu``: the real device, and what only the simulator can tell is skipped.
``SWAP_ADAM_TEST_FULL=1`` runs every combination of a matrix instead of a covering few.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from device_under_test import DEVICE, IS_SIMULATED  # tests/with_torch/support


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "simulator_only: asserts what only the simulated accelerator can tell"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if IS_SIMULATED:
        return
    skip = pytest.mark.skip(reason=f"only the simulated accelerator tells this, not {DEVICE}")
    for item in items:
        if item.get_closest_marker("simulator_only"):
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_race(_one_thread: None) -> Iterator[None]:
    """A test starts with the simulator as after ``enable()`` and must leave no race behind."""
    if not IS_SIMULATED:
        yield
        return
    import swap_adam.simulator as simulator

    simulator.reset()
    simulator.configure(races="raise", strict=True)
    yield
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)
    assert simulator.violations() == []


@pytest.fixture
def device() -> str:
    """The type of the device under test: ``simulated``, ``cuda``, ``npu``."""
    return DEVICE


@pytest.fixture
def simulator() -> ModuleType:
    """``swap_adam.simulator``; a test that asks for it is skipped on a real device."""
    if not IS_SIMULATED:
        pytest.skip(f"only the simulated accelerator tells this, not {DEVICE}")
    import swap_adam.simulator as simulator

    return simulator
