"""Every test here starts with a simulated accelerator at time 0 and in its first configuration."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

import swap_adam.simulator as simulator  # noqa: E402


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    simulator.enable()
    simulator.reset()
    simulator.configure(strict=True)
    yield
    assert simulator.violations() == []
    simulator.reset()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
