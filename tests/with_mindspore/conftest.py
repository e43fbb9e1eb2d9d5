"""The device that the tests run on, see ``support/ms_device.py``."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mindspore
import pytest
from ms_device import IS_SIMULATED, swapping  # tests/with_mindspore/support

from swap_adam.simulator.mindspore import SimulatedDevice


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "simulator_only: asserts what only the simulated device can tell"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not IS_SIMULATED:
        skip = pytest.mark.skip(reason="only the simulated device tells this, not Ascend")
        for item in items:
            if item.get_closest_marker("simulator_only"):
                item.add_marker(skip)


@pytest.fixture
def device() -> Iterator[SimulatedDevice | None]:
    """The simulated device with its account; ``None`` on Ascend."""
    with swapping() as simulated:
        yield simulated


@pytest.fixture(autouse=True)
def _pynative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test starts in PyNative mode, whatever the one before it has set, and in a folder of
    its own: MindSpore writes files about graphs that it cannot compile into the current one."""
    monkeypatch.chdir(tmp_path)
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    yield
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
