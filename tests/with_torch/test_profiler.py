"""What a user would lose: telling our copies from those of the training in a profile."""
from __future__ import annotations

import pytest
import torch
from torch.profiler import profile

from swap_adam import SwapOptimizerConfig
from swap_adam.torch import SwapAdamW

PHASES = {f"swap_adam.{name}" for name in ("plan", "acquire", "copy_in", "update", "copy_out")}


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per_tensor"])
def test_a_profile_shows_every_phase_of_a_step_by_name(device: str, packed: bool) -> None:
    params = [torch.nn.Parameter(torch.zeros(64, 64, device=device)) for _ in range(4)]
    for param in params:
        param.grad = torch.ones_like(param)
    config = SwapOptimizerConfig(packed_swap=packed, swap_times=2)
    optimizer = SwapAdamW(params, swap_config=config)
    with profile() as profiled:
        optimizer.step()
        torch.accelerator.synchronize()
    counts = {event.key: event.count for event in profiled.key_averages()}
    assert PHASES <= counts.keys()
    assert counts["swap_adam.copy_in"] == counts["swap_adam.update"] == counts["swap_adam.copy_out"]
    (report,) = optimizer.swap_report().values()
    assert counts["swap_adam.update"] == report.batch_count
