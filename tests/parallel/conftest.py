"""Ranks are processes with simulated devices: where there are real ones, this is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from device_under_test import DEVICE, IS_SIMULATED  # tests/with_torch/support
from ranks import OnRanks, run_on_ranks  # tests/parallel/support


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = str(Path(__file__).parent)
    ours = [item for item in items if str(item.path).startswith(here)]
    if not torch.distributed.is_available():
        reason = "torch without distributed"
    elif not IS_SIMULATED:
        reason = f"ranks have simulated devices, not {DEVICE}"
    else:
        return
    for item in ours:
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def on_ranks(tmp_path: Path) -> OnRanks:
    """``on_ranks(worker, world_size, *arguments)``: the results of ``worker``, by rank."""
    calls = 0

    def run(*arguments: object, **options: object) -> list[object]:
        nonlocal calls
        calls += 1
        folder = tmp_path / str(calls)
        folder.mkdir()
        return run_on_ranks(folder, *arguments, **options)

    return run
