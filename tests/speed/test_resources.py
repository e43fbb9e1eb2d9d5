"""What a step makes, holds and gives back."""

from __future__ import annotations

import pytest
import swap_adam.simulator as simulator
import torch
from swap_adam import SwapOptimizerConfig
from swap_adam.bench.workloads import Workload
from swap_adam.swap import swap_of
from swap_adam.torch import SwapAdamW

DEVICE = torch.device("simulated", 0)
SMALL = Workload("small", "some of everything", ((64, 1024), (3,), (1024,), (5, 700)) * 8)
# None is larger than a batch: a tensor that is cut has its step copied for the pieces.
UNCUT = Workload("uncut", "64 equal tensors", ((4096,),) * 64)


def make_optimizer(workload: Workload = SMALL, **config: bool) -> SwapAdamW:
    params = workload.make_params(DEVICE)
    return SwapAdamW(params, fused=True, swap_config=SwapOptimizerConfig(**config))


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per_tensor"])
def test_streams_events_and_plan_are_made_once(
    monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    optimizer = make_optimizer(packed_swap=packed)
    optimizer.step()
    swap = swap_of(optimizer).devices[DEVICE]
    plan = swap.plan
    assert plan is not None
    made: list[str] = []
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch, name, lambda *args, name=name, **kwargs: made.append(name))
    for _ in range(5):
        optimizer.step()
    assert made == []
    assert swap.plan is plan


def test_one_block_of_staging_per_step() -> None:
    optimizer = make_optimizer(UNCUT)
    optimizer.step()
    torch.accelerator.synchronize(DEVICE)
    simulator.reset_counters()
    optimizer.step()
    torch.accelerator.synchronize(DEVICE)
    counters = simulator.counters()
    assert (counters.allocations, counters.frees) == (1, 1)


def test_kept_staging_allocates_nothing() -> None:
    optimizer = make_optimizer(UNCUT, keep_staging=True)
    for _ in range(2):
        optimizer.step()
    torch.accelerator.synchronize(DEVICE)
    simulator.reset_counters()
    for _ in range(3):
        optimizer.step()
    torch.accelerator.synchronize(DEVICE)
    counters = simulator.counters()
    assert (counters.allocations, counters.frees) == (0, 0)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per_tensor"])
def test_memory_is_flat_over_a_thousand_steps(packed: bool) -> None:
    module = torch.get_device_module(DEVICE)
    optimizer = make_optimizer(packed_swap=packed)
    for _ in range(2):
        optimizer.step()
    torch.accelerator.synchronize(DEVICE)
    held, pinned = simulator.memory_held(), simulator.pinned_nbytes()
    reserved = module.memory_reserved()
    for _ in range(1000):
        optimizer.step()
    torch.accelerator.synchronize(DEVICE)
    assert simulator.memory_held() == held
    assert simulator.pinned_nbytes() == pinned
    assert module.memory_reserved() == reserved


def test_staging_is_given_back_when_the_last_copy_has_landed() -> None:
    """By itself: the host neither waits nor is it asked to."""
    optimizer = make_optimizer()
    optimizer.step()
    torch.accelerator.synchronize(DEVICE)
    held = simulator.memory_held()
    simulator.reset_counters()
    optimizer.step()
    assert simulator.memory_held() > held  # the copies are under way
    simulator.spend(1.0)
    assert simulator.memory_held() == held
    counters = simulator.counters()
    assert (counters.host_waits, counters.device_synchronizations) == (0, 0)


def test_drained_staging_is_free_for_the_forward() -> None:
    """Memory that the following forward allocates does not come on top of the staging's."""
    peaks = {}
    for drained in (False, True):
        optimizer = make_optimizer(UNCUT, drain_in_step=drained)
        for _ in range(2):
            optimizer.step()
        torch.accelerator.synchronize(DEVICE)
        torch.get_device_module(DEVICE).reset_peak_memory_stats(DEVICE)
        held = simulator.memory_held()
        optimizer.step()
        staging = simulator.max_memory_held() - held
        activation = torch.empty(staging, dtype=torch.uint8, device=DEVICE)
        peaks[drained] = (simulator.max_memory_held() - held) / staging
        torch.accelerator.synchronize(DEVICE)
        del activation, optimizer
    assert peaks == {False: 2.0, True: 1.0}
