"""What ``step()`` costs the host: Python and dispatch, in real time beside the native optimizer."""
from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from swap_adam.bench.accelerators import Accelerator
from swap_adam.bench.contenders import MODES, native, packed
from swap_adam.bench.grids import Grid
from swap_adam.bench.workloads import Workload

# Tensors so small that their arithmetic, which the simulated device does on the host, and their
# bytes hardly count; min_numel lets them be swapped.
TINY = Workload("tiny", "816 tensors of 1024", ((1024,),) * 816)
ROUNDS = 30
WARM_STEPS = 3


@dataclass(frozen=True)
class HostCost:
    """Milliseconds of processor time per ``step()``, medians of interleaved rounds."""

    mode: str
    tensors: int
    native_ms: float
    swapped_ms: float

    @property
    def extra_us_per_tensor(self) -> float:
        return (self.swapped_ms - self.native_ms) / self.tensors * 1e3


def measure_host_costs(accelerator: Accelerator) -> Iterator[HostCost]:
    """One per implementation, ``swap_times=16``."""
    accelerator.use(accelerator.links()[0])
    for mode in MODES:
        pair = [
            contender.make(TINY.make_params(accelerator.device), TINY)
            for contender in (native(mode), packed(16, mode))
        ]
        times: list[list[float]] = [[], []]
        gc.disable()  # a collection would land on one of the two
        for round_index in range(WARM_STEPS + ROUNDS):
            for optimizer, measured in zip(pair, times):
                elapsed = _time_step(optimizer)
                if round_index >= WARM_STEPS:
                    measured.append(elapsed)
                torch.accelerator.synchronize(accelerator.device)
        gc.enable()
        medians = [statistics.median(measured) * 1e3 for measured in times]
        yield HostCost(mode, len(TINY.shapes), *medians)


def _time_step(optimizer: Optimizer) -> float:
    start = time.process_time()
    optimizer.step()
    return time.process_time() - start


def host_cost_grid(costs: list[HostCost]) -> Grid:
    return Grid(
        f"host cost: {TINY.description} elements, real processor time of step(), packed 16",
        ("mode", "native ms", "swapped ms", "extra us per tensor"),
        tuple(
            (
                cost.mode, f"{cost.native_ms:.2f}", f"{cost.swapped_ms:.2f}",
                f"{cost.extra_us_per_tensor:.2f}",
            )
            for cost in costs
        ),
    )
