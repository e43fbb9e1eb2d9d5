"""What a step costs the host, in calls per tensor: they do not depend on the machine's load.

`make bench` reports the time itself.
"""

from __future__ import annotations

import sys
from types import FrameType

import pytest
import swap_adam.simulator as simulator
import torch
from swap_adam.bench.contenders import MODES, native, packed
from swap_adam.bench.host_cost import TINY
from torch.optim import Optimizer

DEVICE = torch.device("simulated", 0)
# Calls of Python and C functions per tensor above the native optimizer of the same mode, of
# which there are about 11 (fused) to 27 (for-loop); each costs less than a tenth of a microsecond.
MOST_CALLS = 30


def count_calls(optimizer: Optimizer) -> int:
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("mode", MODES)
def test_calls_per_tensor(mode: str) -> None:
    counted = []
    for contender in (native(mode), packed(16, mode)):
        optimizer = contender.make(TINY.make_params(DEVICE), TINY)
        for _ in range(2):
            optimizer.step()
        counted.append(count_calls(optimizer) / len(TINY.shapes))
    assert counted[1] - counted[0] <= MOST_CALLS, counted


def test_a_step_launches_one_update_per_batch() -> None:
    """Fifty tensors of a batch are one fused call and not fifty."""
    optimizer = packed(16).make(TINY.make_params(DEVICE), TINY)
    optimizer.step()
    with simulator.record_operations() as operations:
        optimizer.step()
    updates = [one for one in operations if "fused_adamw" in one.name]
    assert 16 <= len(updates) <= 25, len(updates)
