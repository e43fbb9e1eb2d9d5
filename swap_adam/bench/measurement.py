"""One contender on one workload and one link: times, bytes and counts of a step."""
from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

import torch
from torch.optim import Optimizer

from swap_adam.bench.accelerators import Accelerator, Link
from swap_adam.bench.contenders import Contender
from swap_adam.bench.workloads import Workload
from swap_adam.config import SwapOptimizerConfig
from swap_adam.simulator import Counters
from swap_adam.torch import SwapAdamW

# Steps before anything is measured: the first makes states, plan and streams.
WARM_STEPS = 1
# Forward, and backward before a prefetched step, as a share of the limit of the step's copies:
# longer than the tail, and than the copy-ins that a prefetch issues.
PASS_SHARE = 0.25
PASS_MIN_MS = 0.2


@dataclass(frozen=True)
class Line:
    """What was measured. Times are of the compute stream, in ms; bytes are device bytes in use.

    ``step_ms`` is a step from an idle device; ``repeated_ms`` a step right behind another, with
    nothing between them; ``tail_ms`` what a following forward takes longer than without a step
    before it; ``host_ms`` the host's time in ``step()``.
    ``idle_nbytes`` and ``peak_nbytes`` (between steps, and during a step) are above parameters
    and gradients, and ``before_nbytes`` is held at the end of backward. ``pinned_share`` is pinned
    bytes over swapped bytes. ``counters`` are those of one step.
    """

    workload: Workload
    contender: Contender
    link: Link
    moved_nbytes: int
    step_ms: float
    repeated_ms: float
    tail_ms: float
    host_ms: float
    idle_nbytes: int
    before_nbytes: int
    peak_nbytes: int
    swap_times: int | None
    pinned_share: float | None
    counters: Counters | None
    races: tuple[str, ...]

    @property
    def limit_ms(self) -> float:
        """What the link needs at least for the moments of all parameters with a gradient."""
        return self.link.limit_ms(self.moved_nbytes)

    @property
    def over_limit(self) -> float:
        return self.step_ms / self.limit_ms

    @property
    def repeated_over_limit(self) -> float:
        return self.repeated_ms / self.limit_ms


@dataclass(frozen=True)
class _Times:
    step_ms: float
    repeated_ms: float
    forward_ms: float
    host_ms: float
    before_nbytes: int
    counters: Counters | None


def measure(
    accelerator: Accelerator, workload: Workload, contender: Contender, links: Sequence[Link]
) -> Iterator[Line]:
    """A line per link; parameters and optimizer are the same for all."""
    bench = _Bench(accelerator, workload, contender)
    for link in links:
        yield bench.line(link)


class _Bench:
    def __init__(
        self, accelerator: Accelerator, workload: Workload, contender: Contender
    ) -> None:
        self._accelerator = accelerator
        self._workload = workload
        self._contender = contender
        self._memory = torch.get_device_module(accelerator.device)
        self._start_pinned_nbytes = accelerator.pinned_nbytes()
        self._params = workload.make_params(accelerator.device)
        # For optimizers that start from the arrival of gradients.
        self._arriving = [
            (param, torch.zeros_like(param)) for param in self._params
            if contender.needs_backward and param.grad is not None
        ]
        torch.accelerator.synchronize(accelerator.device)
        self._base_nbytes = self._held("current")
        self._optimizer: Optimizer = contender.make(self._params, workload)
        for _ in range(WARM_STEPS):
            self._backward()
            self._optimizer.step()
        torch.accelerator.synchronize(accelerator.device)

    def line(self, link: Link) -> Line:
        accelerator, workload = self._accelerator, self._workload
        accelerator.use(link)
        min_numel = SwapOptimizerConfig().min_numel
        moved_nbytes = workload.states_nbytes(min_numel, stepped_only=True)
        pass_ms = max(PASS_MIN_MS, PASS_SHARE * link.limit_ms(moved_nbytes))
        forward_ms = self._time_forward_alone(pass_ms)
        idle_nbytes = self._held("current") - self._base_nbytes
        self._memory.reset_peak_memory_stats(accelerator.device)
        times = [self._time_steps(pass_ms) for _ in range(accelerator.repeats)]
        return Line(
            workload, self._contender, link, moved_nbytes,
            step_ms=statistics.median(one.step_ms for one in times),
            repeated_ms=statistics.median(one.repeated_ms for one in times),
            tail_ms=statistics.median(one.forward_ms for one in times) - forward_ms,
            host_ms=statistics.median(one.host_ms for one in times),
            idle_nbytes=idle_nbytes,
            before_nbytes=times[-1].before_nbytes - self._base_nbytes,
            peak_nbytes=self._held("peak") - self._base_nbytes,
            swap_times=self._swap_times(),
            pinned_share=self._pinned_share(),
            counters=times[-1].counters,
            races=tuple(accelerator.races()),
        )

    def _time_forward_alone(self, pass_ms: float) -> float:
        accelerator = self._accelerator
        accelerator.issue_pass(pass_ms)  # so that the host is ahead
        started = accelerator.mark()
        accelerator.issue_pass(pass_ms)
        ended = accelerator.mark()
        torch.accelerator.synchronize(accelerator.device)
        return started.elapsed_time(ended)

    def _time_steps(self, pass_ms: float) -> _Times:
        """Two steps in a row and a forward, from an idle device to an idle device."""
        accelerator, optimizer = self._accelerator, self._optimizer
        accelerator.counters()
        ahead = None
        if self._contender.prefetches:
            assert isinstance(optimizer, SwapAdamW)
            optimizer.prefetch()
            ahead = accelerator.counters()
            accelerator.issue_pass(pass_ms)
        self._backward()
        accelerator.counters()
        before_nbytes = self._held("current")
        started = accelerator.mark()
        host_ms = accelerator.host_ms()
        optimizer.step()
        host_ms = accelerator.host_ms() - host_ms
        stepped = accelerator.mark()
        counters = _sum(ahead, accelerator.counters())
        self._backward()
        optimizer.step()
        repeated = accelerator.mark()
        accelerator.issue_pass(pass_ms)
        ended = accelerator.mark()
        torch.accelerator.synchronize(accelerator.device)
        return _Times(
            started.elapsed_time(stepped), stepped.elapsed_time(repeated),
            repeated.elapsed_time(ended), host_ms, before_nbytes, counters,
        )

    def _backward(self) -> None:
        """The gradients are there already; for those that need it, they arrive again."""
        if self._arriving:
            params, grads = zip(*self._arriving)
            torch.autograd.backward(params, grads)

    def _held(self, which: str) -> int:
        """Device bytes that nobody else can have: ``current``, or the ``peak`` of them."""
        if which == "current":
            # Only an allocation makes the allocator look which streams have passed.
            torch.empty(1, device=self._accelerator.device)
        stats = self._memory.memory_stats(self._accelerator.device)
        return int(stats[f"active_bytes.all.{which}"])

    def _swap_times(self) -> int | None:
        """How many caps of a batch the swapped bytes are."""
        if not isinstance(self._optimizer, SwapAdamW):
            return None
        for swap in self._optimizer._swap_devices.values():
            if swap.plan is not None:
                return -(-swap.store.swapped_nbytes // swap.plan.partition.cap_nbytes)
        return None

    def _pinned_share(self) -> float | None:
        if not isinstance(self._optimizer, SwapAdamW):
            return None
        stores = [swap.store for swap in self._optimizer._swap_devices.values()]
        pinned_nbytes = self._accelerator.pinned_nbytes()
        if pinned_nbytes is None or self._start_pinned_nbytes is None:
            pinned_nbytes = sum(store.pinned_nbytes for store in stores)
        else:
            pinned_nbytes -= self._start_pinned_nbytes
        return pinned_nbytes / sum(store.swapped_nbytes for store in stores)


def _sum(ahead: Counters | None, step: Counters | None) -> Counters | None:
    if ahead is None or step is None:
        return step
    return Counters(*(a + b for a, b in zip(astuple(ahead), astuple(step))))
