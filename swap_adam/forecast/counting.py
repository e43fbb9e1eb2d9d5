"""A backend that moves nothing: it adds up bytes and virtual time."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from swap_adam.backend import StreamRole
from swap_adam.forecast.clock import Clock, Point
from swap_adam.simulator.costs import Costs
from swap_adam.slot import SwapSlot


@dataclass(eq=False)
class Bytes:
    """Stands for a tensor."""

    nbytes: int


@dataclass(eq=False)
class Mark:
    """Stands for an event; ``point`` is ``None`` until it is recorded."""

    point: Point | None = None


class CountingBackend:
    """See :class:`swap_adam.backend.Backend`. Times are those of ``costs``."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.clock = Clock()
        self.transfer_count = 0
        self.transfer_nbytes = 0

    # Host memory

    def allocate_slab(self, nbytes: int) -> Bytes:
        return Bytes(nbytes)

    def host_tensor(self, slab: Bytes, slot: SwapSlot[Bytes]) -> Bytes:
        return Bytes(slot.storage_nbytes)

    def host_copy(self, target: Bytes, source: Bytes) -> None:
        self.clock.host_s += target.nbytes / (self.costs.host_gb_per_s * 1e9)

    def is_held_elsewhere(self, slot: SwapSlot[Bytes]) -> bool:
        return False

    def is_slab_held(self, slab: Bytes) -> bool:
        return False

    def wait_idle(self) -> None:
        """Nothing is issued by anybody else."""

    def release_host_cache(self) -> None:
        """There is none."""

    # Device memory

    def make_buffer(self, nbytes: int) -> Bytes:
        return Bytes(nbytes)

    def acquire(self, buffer: Bytes, nbytes: int) -> None:
        """An allocator's cache costs nothing here."""

    def release(self, buffer: Bytes, pending: StreamRole | None) -> None:
        """As above."""

    def reserve(self, sizes_nbytes: Sequence[int]) -> None:
        """As above."""

    def device_view(
        self, buffer: Bytes, offset_nbytes: int, slot: SwapSlot[Bytes],
        start_numel: int, numel: int,
    ) -> Bytes:
        return Bytes(numel * slot.itemsize)

    def span(self, name: str) -> AbstractContextManager[object]:
        return nullcontext()

    # Copies, kernels and their order

    def byte_view(self, buffer: Bytes, offset_nbytes: int, nbytes: int) -> Bytes:
        return Bytes(nbytes)

    def copy(self, role: StreamRole, copies: Iterable[tuple[Bytes, Bytes]]) -> None:
        for target, _ in copies:
            self._copy(role, target)

    def _copy(self, role: StreamRole, target: Bytes) -> None:
        costs = self.costs
        is_in = role is StreamRole.COPY_IN
        gb_per_s = costs.copy_in_gb_per_s if is_in else costs.copy_out_gb_per_s
        self.transfer_count += 1
        self.transfer_nbytes += target.nbytes
        self.clock.host_s += costs.launch_us * 1e-6
        engine = role if costs.duplex else "link"
        duration_s = costs.transfer_us * 1e-6 + target.nbytes / (gb_per_s * 1e9)
        self.clock.issue(role, engine, duration_s)

    def kernel(self, nbytes: int) -> None:
        """One kernel on the compute stream that reads and writes ``nbytes``."""
        self.clock.host_s += self.costs.launch_us * 1e-6
        duration_s = self.costs.kernel_us * 1e-6 + nbytes / (self.costs.device_gb_per_s * 1e9)
        self.clock.issue(StreamRole.COMPUTE, StreamRole.COMPUTE, duration_s)

    def make_event(self) -> Mark:
        return Mark()

    def record(self, event: Mark, role: StreamRole) -> None:
        self.clock.host_s += self.costs.event_us * 1e-6
        event.point = self.clock.mark(role)

    def wait(self, role: StreamRole, event: Mark) -> None:
        self.clock.host_s += self.costs.event_us * 1e-6
        if event.point is not None:
            self.clock.wait(role, event.point)

    def is_complete(self, event: Mark) -> bool:
        self.clock.host_s += self.costs.event_us * 1e-6
        return event.point is None or self.clock.time_of(event.point) <= self.clock.host_s

    def synchronize(self, event: Mark) -> None:
        self.clock.host_s += self.costs.wait_us * 1e-6
        if event.point is not None:
            self.clock.host_s = max(self.clock.host_s, self.clock.time_of(event.point))
