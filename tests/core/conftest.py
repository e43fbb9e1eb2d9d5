"""A device without a framework, for the core: its streams run as late, and as mixed, as they may.

Every copy and update waits in its stream until somebody waits for it; then streams take turns in
an order that a random number decides, as far as events allow. Memory that nobody owns is
overwritten. A schedule that lacks a wait gives wrong bytes for some order, and each is seeded.
"""
from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from swap_adam.backend import StreamRole
from swap_adam.slot import SwapSlot, UpdateUnit


class Memory:
    """Bytes of the host or the device; ``data`` is ``None`` while a device buffer has none."""

    def __init__(self, nbytes: int, where: str) -> None:
        self.where = where
        self.data: np.ndarray[Any, Any] | None = np.zeros(nbytes, np.uint8)


@dataclass(eq=False)
class Bytes:
    """A part of a memory: what the core sees as a tensor."""

    memory: Memory
    offset: int
    nbytes: int
    slab: Any = None

    def view(self) -> np.ndarray[Any, Any]:
        assert self.memory.data is not None, "use of a device buffer without bytes"
        part = self.memory.data[self.offset:self.offset + self.nbytes]
        assert len(part) == self.nbytes, "outside the buffer"
        return part

    def numbers(self) -> np.ndarray[Any, Any]:
        return self.view().view(np.uint32)


class Event:
    def __init__(self) -> None:
        self.mark: list[bool] = [True]


@dataclass(eq=False)
class Operation:
    """``uses`` are the arrays whose memory it needs, held from the issue on, as a pointer is."""

    run: Callable[[], None]
    is_ready: Callable[[], bool] = lambda: True
    uses: tuple[Any, ...] = ()
    done: bool = False


@dataclass
class RecordingBackend:
    """See the module's docstring. ``fail`` is called with the name of every method."""

    seed: int = 0
    fail: Callable[[str], None] = lambda name: None
    pinned_limit: int | None = None
    device_limit: int | None = None
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.queues: dict[StreamRole, deque[Operation]] = {role: deque() for role in StreamRole}
        self._held = self.peak = self.pinned = self.pinned_peak = 0
        # Released bytes, each with the operation after which others may have them.
        self.leaving: list[tuple[Operation, Any]] = []
        self.collected: Any = weakref.WeakKeyDictionary()
        self.held_elsewhere: set[int] = set()

    # Host memory

    def allocate_slab(self, nbytes: int) -> Bytes:
        self._call("allocate_slab", nbytes)
        if self.pinned_limit is not None and self.pinned + nbytes > self.pinned_limit:
            raise MemoryError(f"{nbytes} bytes")
        slab = Bytes(Memory(nbytes, "host"), 0, nbytes)
        self.pinned += nbytes
        self.pinned_peak = max(self.pinned_peak, self.pinned)
        weakref.finalize(slab, self._unpin, nbytes)
        return slab

    def _unpin(self, nbytes: int) -> None:
        self.pinned -= nbytes

    def host_tensor(self, slab: Bytes, slot: SwapSlot[Bytes]) -> Bytes:
        self._call("host_tensor")
        return Bytes(slab.memory, slot.host_offset_nbytes, slot.storage_nbytes, slab)

    def host_copy(self, target: Bytes, source: Bytes) -> None:
        self._call("host_copy")
        target.view()[:] = source.view()

    def is_held_elsewhere(self, slot: SwapSlot[Bytes]) -> bool:
        return id(slot.cpu_tensor) in self.held_elsewhere

    def is_slab_held(self, slab: Bytes) -> bool:
        return False

    def wait_idle(self) -> None:
        self._call("wait_idle")

    def release_host_cache(self) -> None:
        self._call("release_host_cache")

    # Device memory

    def make_buffer(self, nbytes: int) -> Bytes:
        self._call("make_buffer", nbytes)
        buffer = Bytes(Memory(0, "device"), 0, nbytes)
        buffer.memory.data = None
        self._acquire(buffer, nbytes)
        return buffer

    def acquire(self, buffer: Bytes, nbytes: int) -> None:
        self._call("acquire", nbytes)
        self._acquire(buffer, nbytes)

    def _acquire(self, buffer: Bytes, nbytes: int) -> None:
        if buffer.memory.data is not None:
            return
        if self.device_limit is not None and self.held + nbytes > self.device_limit:
            raise MemoryError(f"{nbytes} device bytes")
        self._held = self.held + nbytes
        self.peak = max(self.peak, self._held)
        buffer.memory.data = np.frombuffer(self.random.randbytes(nbytes), np.uint8).copy()
        if buffer.memory not in self.collected:
            self.collected[buffer.memory] = weakref.finalize(buffer.memory, self._lost, nbytes)

    def _lost(self, nbytes: int) -> None:
        """A buffer was dropped with its bytes: they go with it."""
        self._held -= nbytes

    def release(self, buffer: Bytes, pending: StreamRole | None) -> None:
        self._call("release", pending)
        data = buffer.memory.data
        if data is None:
            return
        buffer.memory.data = None
        self.collected.pop(buffer.memory).detach()
        queue = self.queues[StreamRole.COMPUTE if pending is None else pending]
        # Compute's own later work comes after what it has now: nothing to wait for.
        last = queue[-1] if queue and pending is not None else Operation(lambda: None, done=True)
        self.leaving.append((last, data))
        self.collect()

    @property
    def held(self) -> int:
        """Device bytes that nobody else can have now."""
        self.collect()
        return self._held

    def collect(self) -> None:
        staying = []
        for last, data in self.leaving:
            if not last.done:
                staying.append((last, data))
                continue
            for role in (StreamRole.COPY_IN, StreamRole.COPY_OUT):
                assert not any(use is data for op in self.queues[role] for use in op.uses), (
                    f"given back while {role} still uses it"
                )
            data[:] = np.frombuffer(self.random.randbytes(len(data)), np.uint8)
            self._held -= len(data)
        self.leaving = staying

    def reserve(self, sizes_nbytes: Sequence[int]) -> None:
        nbytes = sum(sizes_nbytes)
        self._call("reserve", nbytes)
        if self.device_limit is not None and self.held + nbytes > self.device_limit:
            raise MemoryError(f"{nbytes} device bytes")
        self.peak = max(self.peak, self.held + nbytes)

    def device_view(
        self, buffer: Bytes, offset_nbytes: int, slot: SwapSlot[Bytes], start_numel: int, numel: int
    ) -> Bytes:
        self._call("device_view")
        return Bytes(buffer.memory, offset_nbytes, numel * slot.itemsize)

    def span(self, name: str) -> AbstractContextManager[object]:
        return nullcontext()

    # Copies and their order

    def byte_view(self, buffer: Bytes, offset_nbytes: int, nbytes: int) -> Bytes:
        return Bytes(buffer.memory, buffer.offset + offset_nbytes, nbytes)

    def copy(self, role: StreamRole, copies: Sequence[tuple[Bytes, Bytes]]) -> None:
        for target, source in copies:
            self._copy(role, target, source)

    def _copy(self, role: StreamRole, target: Bytes, source: Bytes) -> None:
        self._call("copy", role, target.nbytes)
        assert target.nbytes == source.nbytes
        assert target.memory.data is not None and source.memory.data is not None

        to, out_of = target.view(), source.view()

        def run() -> None:
            to[:] = out_of

        self._push(role, Operation(run, uses=(target.memory.data, source.memory.data)))

    def make_event(self) -> Event:
        self._call("make_event")
        return Event()

    def record(self, event: Event, role: StreamRole) -> None:
        self._call("record", role)
        mark = [False]
        event.mark = mark

        def run() -> None:
            mark[0] = True

        self._push(role, Operation(run))

    def wait(self, role: StreamRole, event: Event) -> None:
        self._call("wait", role)
        mark = event.mark
        self._push(role, Operation(lambda: None, is_ready=lambda: mark[0]))

    def is_complete(self, event: Event) -> bool:
        return event.mark[0]

    def synchronize(self, event: Event) -> None:
        self._call("synchronize")
        while not event.mark[0]:
            assert self._advance(), "waits for ever"

    # The machine

    def compute(self, run: Callable[[], None]) -> None:
        """Issue ``run`` on the compute stream."""
        self._push(StreamRole.COMPUTE, Operation(run))

    def drain(self) -> None:
        while self._advance():
            pass
        assert not any(self.queues.values()), "some stream waits for ever"

    def names(self, name: str) -> list[tuple[Any, ...]]:
        """The calls of one method."""
        return [call for call in self.calls if call[0] == name]

    def _advance(self) -> bool:
        ready = [q for q in self.queues.values() if q and q[0].is_ready()]
        if not ready:
            return False
        operation = self.random.choice(ready).popleft()
        operation.run()
        operation.done = True
        self.collect()
        return True

    def _push(self, role: StreamRole, operation: Operation) -> None:
        self.queues[role].append(operation)

    def _call(self, name: str, *details: Any) -> None:
        self.calls.append((name, *details))
        self.fail(name)


def make_slot(name: str, numel: int, device: str = "device") -> SwapSlot[Bytes]:
    return SwapSlot(name, (numel,), (1,), "uint32", device, numel, 4 * numel)


def make_unit(
    index: int, numel: int, names: Sequence[str] = ("exp_avg", "exp_avg_sq"), can_cut: bool = True
) -> UpdateUnit[Bytes]:
    """A unit whose parameter is device memory of its own, holding the parameter's index."""
    param = Bytes(Memory(4 * numel, "device"), 0, 4 * numel)
    param.numbers()[:] = index
    slots = [make_slot(name, numel) for name in names]
    return UpdateUnit(0, index, param, param, slots, numel, can_cut=can_cut)


@pytest.fixture
def core() -> Any:
    """The names above, for tests that make their own backends."""
    class Core:
        Backend = RecordingBackend
        slot = staticmethod(make_slot)
        unit = staticmethod(make_unit)

    return Core
