"""What the examples need around them."""
from __future__ import annotations

import pytest

import swap_adam.simulator as simulator


def pytest_configure(config: pytest.Config) -> None:
    # Examples of several pages share a process, some of them on the simulated device, and
    # autograd takes no new device after its first backward.
    if not any("mindspore" in argument for argument in config.args):
        simulator.enable()


@pytest.fixture
def training_libraries() -> None:
    """Examples with training libraries are skipped where these are not installed."""
    for name in ("accelerate", "lightning", "transformers"):
        pytest.importorskip(name)
