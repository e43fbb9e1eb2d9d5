"""One training run: its losses, what it needed, and what ran when."""
from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from swap_adam.demo.accelerator import Accelerator, Recording
from swap_adam.demo.compare import Snapshot, take_snapshot
from swap_adam.demo.model import GPT, ModelSize
from swap_adam.demo.text import batches
from swap_adam.mixin import SwapPipelineMixin

# States are made in the first step; from the third on every step is like the others.
SETTLED_STEPS = 2
RECORDED_STEPS = 3

MakeOptimizer = Callable[[Iterator[Parameter]], Optimizer]
OnStep = Callable[[int, float], None]


@dataclass(frozen=True)
class TrainingPlan:
    """What all runs have in common. ``steps`` includes the settling and the recorded ones."""

    size: ModelSize = ModelSize()
    batch_size: int = 4
    steps: int = 36
    seed: int = 1

    def __post_init__(self) -> None:
        least = SETTLED_STEPS + 2 + RECORDED_STEPS  # two to tell the time of one
        if self.steps < least:
            raise ValueError(f"steps must be >= {least}, got {self.steps}")


@dataclass(frozen=True)
class Needs:
    """Bytes and times of a settled step; device bytes are the model's and the optimizer's.

    ``idle`` is between steps, gradients freed; ``peak`` the most at any time, ``update_peak``
    the most within ``optimizer.step()``. ``host_nbytes`` are pinned: counted by the device if it
    does, else by the optimizer. ``update_ms`` is what ``step()`` costs the compute stream,
    ``step_ms`` forward, backward and ``step()`` together; medians.
    """

    param_nbytes: int
    idle_nbytes: int
    peak_nbytes: int
    update_peak_nbytes: int
    host_nbytes: int
    update_ms: float
    step_ms: float

    @property
    def idle_extra_nbytes(self) -> int:
        """Above the parameters, between steps."""
        return self.idle_nbytes - self.param_nbytes

    @property
    def update_extra_nbytes(self) -> int:
        """Above parameters and gradients, within ``step()``."""
        return self.update_peak_nbytes - 2 * self.param_nbytes


@dataclass(frozen=True)
class Moments:
    """One step in a recording, in its milliseconds.

    The host calls, and the compute stream begins and ends: memory comes and goes with the
    calls, which run ahead of the device.
    """

    step_called_ms: float
    update_called_ms: float
    next_called_ms: float
    update_began_ms: float
    update_ended_ms: float


@dataclass(frozen=True)
class Run:
    """What one optimizer did; ``moments`` place a step, not the first one, in ``recording``."""

    name: str
    snapshot: Snapshot
    needs: Needs
    recording: Recording
    moments: Moments

    @property
    def last_loss(self) -> float:
        return self.snapshot.losses[-1]


class _Stopwatch:
    """Three marks per step: before forward, before and after ``optimizer.step()``."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._events: list[torch.Event] = []
        self._called_ms: list[float] = []

    def mark(self) -> None:
        self._events.append(self._accelerator.mark())
        self._called_ms.append(self._accelerator.host_ms())

    def on_device_ms(self, step: int, start: int, end: int) -> float:
        """Between two marks of ``step`` (the marks of the next one go on from 3)."""
        first, last = self._events[3 * step + start], self._events[3 * step + end]
        return float(first.elapsed_time(last))

    def moments(self, step: int) -> Moments:
        """Of a step with a next one, in milliseconds since the first mark."""
        called = [at - self._called_ms[0] for at in self._called_ms[3 * step:]]
        origin = self._events[0]
        began, ended = self._events[3 * step + 1], self._events[3 * step + 2]
        return Moments(
            called[0], called[1], called[3],
            float(origin.elapsed_time(began)), float(origin.elapsed_time(ended)),
        )


def train(
    name: str,
    make_optimizer: MakeOptimizer,
    plan: TrainingPlan,
    text: Tensor,
    accelerator: Accelerator,
    trace: Path,
    on_step: OnStep,
) -> Run:
    """Train from ``plan.seed``; the device is as it was before when this returns.

    The Chrome trace of the last steps goes to ``trace``. ``on_step`` is called after every step
    with the number of steps done and the loss.
    """
    gc.collect()
    accelerator.settle()
    held_before = accelerator.held_nbytes()
    pinned_before = accelerator.pinned_nbytes()

    torch.manual_seed(plan.seed)
    model = GPT(plan.size).to(accelerator.device)
    optimizer = make_optimizer(model.parameters())
    losses: list[float] = []
    peaks: list[int] = []
    update_peaks: list[int] = []

    def step(inputs: Tensor, targets: Tensor, watch: _Stopwatch) -> None:
        watch.mark()
        loss = model(inputs.to(accelerator.device), targets.to(accelerator.device))
        loss.backward()
        peaks.append(accelerator.peak_nbytes())
        accelerator.reset_peak()
        watch.mark()
        optimizer.step()
        watch.mark()
        update_peaks.append(accelerator.peak_nbytes())
        accelerator.reset_peak()
        optimizer.zero_grad()
        losses.append(loss.item())
        on_step(len(losses), losses[-1])

    data = batches(text, plan.batch_size, plan.size.length, plan.steps, plan.seed)
    watch = _Stopwatch(accelerator)
    for _ in range(plan.steps - RECORDED_STEPS):
        step(*next(data), watch)
    torch.accelerator.synchronize(accelerator.device)
    settled = range(SETTLED_STEPS, plan.steps - RECORDED_STEPS)
    update_ms = statistics.median(watch.on_device_ms(index, 1, 2) for index in settled)
    step_ms = statistics.median(watch.on_device_ms(index, 0, 3) for index in settled[:-1])

    recorded = _Stopwatch(accelerator)
    with accelerator.recorded(trace) as recording:
        for inputs, targets in data:
            step(inputs, targets, recorded)
        accelerator.settle()

    pinned = accelerator.pinned_nbytes()
    needs = Needs(
        param_nbytes=sum(param.nbytes for param in model.parameters()),
        idle_nbytes=accelerator.held_nbytes() - held_before,
        peak_nbytes=max(peaks[SETTLED_STEPS:] + update_peaks[SETTLED_STEPS:]) - held_before,
        update_peak_nbytes=max(update_peaks[SETTLED_STEPS:]) - held_before,
        host_nbytes=_host_nbytes(optimizer) if pinned is None else pinned - (pinned_before or 0),
        update_ms=update_ms,
        step_ms=step_ms,
    )
    # The second one: the first has no copies of an earlier step before it.
    moments = recorded.moments(1)
    return Run(name, take_snapshot(model, optimizer, losses), needs, recording, moments)


def _host_nbytes(optimizer: Optimizer) -> int:
    if not isinstance(optimizer, SwapPipelineMixin):
        return 0
    return sum(report.pinned_nbytes for report in optimizer.swap_report().values())
