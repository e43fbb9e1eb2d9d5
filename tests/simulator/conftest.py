"""Every test here starts with a simulated accelerator at time 0 and in its first configuration."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

import swap_adam.simulator as simulator  # noqa: E402


@pytest.fixture(autouse=True)
def device() -> Iterator[str]:
    """The device's name."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    simulator.enable()
    simulator.reset()
    yield "simulated"
    simulator.reset()
    torch.set_num_threads(threads)
