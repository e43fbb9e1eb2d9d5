"""MindSpore's CPU as if it were a device: late copies, poisoned memory, an account of bytes.

>>> import swap_adam.simulator as simulator
>>> with simulator.mindspore_device() as device:
...     optimizer = SwapMSAdam(net.trainable_params())
...     optimizer(gradients)
>>> device.peak_nbytes

The kernels run where they always do; what is simulated is the order of the copies. A copy is done
when somebody waits for it and no earlier, so that a wait that is missing shows as wrong numbers:

- whoever does not wait for a copy finds what was there before;
- memory that is given back, or not yet written, reads as NaN (every byte 0xFF);
- a copy out that does not wait for the update takes what was there before it;
- a copy in that does not wait for those who used the memory before is overwritten by them.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakSet

import mindspore
import numpy as np
from mindspore import Tensor, nn
from mindspore.graph.api import _pynative_executor
from numpy.typing import NDArray

from swap_adam.backend import StreamRole
from swap_adam.mindspore.backend import (
    as_parameter,
    check_resized,
    find_backend,
    numpy_dtype,
    register_device,
)
from swap_adam.slot import SwapSlot

TARGET = "CPU"
POISON = 0xFF

Bytes = NDArray[np.uint8]


@dataclass(eq=False)
class Mark:
    """What an event stands for since it was recorded: a point in a stream.

    ``compute_time`` is the last point of the compute stream that is known to have passed there.
    """

    stream: Stream | None  # none for the compute stream, whose work is done when it is issued
    compute_time: int
    is_done: bool = False


@dataclass(eq=False)
class Event:
    mark: Mark | None = None


@dataclass(eq=False)
class Stream:
    """A copy stream: what is issued and not yet done, in order."""

    compute_time: int = 0
    pending: deque[Callable[[], None]] = field(default_factory=deque)
    # Giving memory back needs nobody who waits: it is done as soon as it is the first.
    pending_release: deque[bool] = field(default_factory=deque)

    def issue(self, work: Callable[[], None], is_release: bool = False) -> None:
        self.pending.append(work)
        self.pending_release.append(is_release)

    def run_until(self, mark: Mark) -> None:
        """Do what was issued up to ``mark``, and the releases right behind it."""
        while self.pending and (not mark.is_done or self.pending_release[0]):
            self.pending_release.popleft()
            self.pending.popleft()()


@dataclass(eq=False)
class Buffer:
    """A block of host or device memory; ``is_held`` and ``acquired_at`` are of device memory."""

    memory: Bytes
    is_held: bool = True
    acquired_at: int = 0


@dataclass(eq=False)
class Span:
    """A part of a buffer. ``before_update`` is what a copy in left there, at ``compute_time``."""

    buffer: Buffer
    memory: Bytes
    before_update: Bytes | None = None
    compute_time: int = 0


class SimulatedDevice:
    """The account, and what the backends of all optimizers on the device share.

    ``capacity_nbytes`` bounds the staging memory and the temporaries, to run out of it at will.
    """

    def __init__(self, capacity_nbytes: int | None = None) -> None:
        self.capacity_nbytes = capacity_nbytes
        self.held_nbytes = 0
        self.peak_nbytes = 0
        self.copied_in_nbytes = 0
        self.copied_out_nbytes = 0
        self.copies = 0
        self.slabs: WeakSet[Buffer] = WeakSet()

    @property
    def pinned_nbytes(self) -> int:
        """Bytes of the host slabs that optimizers have."""
        return sum(slab.memory.nbytes for slab in self.slabs)

    def reset(self) -> None:
        """Start counting copies and the peak anew."""
        self.peak_nbytes = self.held_nbytes
        self.copied_in_nbytes = self.copied_out_nbytes = self.copies = 0

    def state_nbytes(self, optimizer: nn.Optimizer) -> int:
        """Bytes of the optimizer's own Parameters that are on the device, and not in a slab."""
        models = set(map(id, optimizer.parameters))
        return sum(
            param.nbytes
            for param in optimizer.get_parameters()
            if id(param) not in models and not self._is_in_slab(param)
        )

    def _is_in_slab(self, param: Tensor) -> bool:
        pointer = param.data_ptr()
        return any(
            slab.memory.ctypes.data <= pointer < slab.memory.ctypes.data + slab.memory.nbytes
            for slab in self.slabs
        )

    def take(self, nbytes: int) -> None:
        """Account for device memory.

        Raises:
            MemoryError: there is not that much.
        """
        self.check_room(nbytes)
        self.held_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.held_nbytes)

    def resize(self, nbytes: int) -> int:
        """Account for a storage that is resized, as MindSpore does: what it has then, which where
        there is no memory is nothing, without an error."""
        try:
            self.take(nbytes)
        except MemoryError:
            return 0
        return nbytes

    def check_room(self, nbytes: int) -> None:
        if self.capacity_nbytes is not None and self.held_nbytes + nbytes > self.capacity_nbytes:
            raise MemoryError(
                f"the simulated device has {self.capacity_nbytes} bytes, {self.held_nbytes} are "
                f"held and {nbytes} were asked for"
            )


class SimulatedBackend:
    """The CPU as a device, see the module."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._streams = {StreamRole.COPY_IN: Stream(), StreamRole.COPY_OUT: Stream()}
        self._compute_time = 0

    # Host memory

    def allocate_slab(self, nbytes: int) -> Buffer:
        slab = Buffer(np.zeros(nbytes, np.uint8))
        self._device.slabs.add(slab)
        return slab

    def host_tensor(self, slab: Buffer, slot: SwapSlot[Tensor]) -> Tensor:
        return _tensor_at(slab, slot.host_offset_nbytes, slot)

    def host_copy(self, target: Tensor, source: Tensor) -> None:
        target.asnumpy()[...] = source.asnumpy()

    def is_held_elsewhere(self, slot: SwapSlot[Tensor]) -> bool:
        return False

    def to_host(self, target: Tensor, source: Tensor) -> None:
        self.host_copy(target, source)

    def to_device(self, source: Tensor) -> Tensor:
        return Tensor(source.asnumpy().copy())

    def is_slab_held(self, slab: Buffer) -> bool:
        return False

    def wait_idle(self) -> None:
        _finish_kernels()

    def release_host_cache(self) -> None:
        """There is none."""

    # Device memory

    def make_buffer(self, nbytes: int) -> Buffer:
        self._device.take(nbytes)
        return Buffer(np.full(nbytes, POISON, np.uint8), acquired_at=self._compute_time)

    def acquire(self, buffer: Buffer, nbytes: int) -> None:
        assert not buffer.is_held
        given_nbytes = self._device.resize(nbytes)
        buffer.memory[:] = POISON
        buffer.is_held = given_nbytes == nbytes
        buffer.acquired_at = self._compute_time
        check_resized(given_nbytes, nbytes)

    def release(self, buffer: Buffer, pending: StreamRole | None) -> None:
        def give_back() -> None:
            if not buffer.is_held:
                return  # after a fault, what was not acquired is released all the same
            _finish_kernels()
            buffer.memory[:] = POISON
            buffer.is_held = False
            self._device.held_nbytes -= buffer.memory.nbytes

        if pending is None:
            give_back()
        else:
            self._streams[pending].issue(give_back, is_release=True)

    def reserve(self, sizes_nbytes: Sequence[int]) -> None:
        self._device.check_room(sum(sizes_nbytes))

    def device_view(
        self, buffer: Buffer, offset_nbytes: int, slot: SwapSlot[Tensor],
        start_numel: int, numel: int,
    ) -> Tensor:
        assert numel == slot.numel  # no tensor is cut on MindSpore
        return as_parameter(_tensor_at(buffer, offset_nbytes, slot), slot.name)

    def span(self, name: str) -> AbstractContextManager[object]:
        return nullcontext()

    # Copies and their order

    def byte_view(self, buffer: Buffer, offset_nbytes: int, nbytes: int) -> Span:
        return Span(buffer, buffer.memory[offset_nbytes:offset_nbytes + nbytes])

    def copy(self, role: StreamRole, copies: Iterable[tuple[Span, Span]]) -> None:
        stream = self._streams[role]
        move = self._copy_in if role is StreamRole.COPY_IN else self._copy_out
        for target, source in copies:
            stream.issue(partial(move, stream, target, source))

    def _copy_in(self, stream: Stream, target: Span, source: Span) -> None:
        _finish_kernels()
        target.memory[:] = source.memory
        if stream.compute_time <= target.buffer.acquired_at:
            target.memory[:] = POISON  # whoever had the memory before may still write to it
        target.before_update = target.memory.copy()
        target.compute_time = self._compute_time
        self._device.copied_in_nbytes += target.memory.nbytes
        self._device.copies += 1

    def _copy_out(self, stream: Stream, target: Span, source: Span) -> None:
        _finish_kernels()
        if source.before_update is not None and stream.compute_time <= source.compute_time:
            target.memory[:] = source.before_update  # the update may not have run yet
        else:
            target.memory[:] = source.memory
        source.before_update = None
        self._device.copied_out_nbytes += source.memory.nbytes
        self._device.copies += 1

    def make_event(self) -> Event:
        return Event()

    def record(self, event: Event, role: StreamRole) -> None:
        if role is StreamRole.COMPUTE:
            self._compute_time += 1
            event.mark = Mark(None, self._compute_time, is_done=True)
            return
        stream = self._streams[role]
        mark = event.mark = Mark(stream, 0)

        def pass_by() -> None:
            mark.compute_time = stream.compute_time
            mark.is_done = True

        stream.issue(pass_by)

    def wait(self, role: StreamRole, event: Event) -> None:
        mark = event.mark
        if mark is None:
            return
        if role is StreamRole.COMPUTE:
            self._pass(mark)
            return
        stream = self._streams[role]

        def wait_for() -> None:
            self._pass(mark)
            stream.compute_time = max(stream.compute_time, mark.compute_time)

        stream.issue(wait_for)

    def is_complete(self, event: Event) -> bool:
        return event.mark is None or event.mark.is_done

    def synchronize(self, event: Event) -> None:
        if event.mark is not None:
            self._pass(event.mark)

    @staticmethod
    def _pass(mark: Mark) -> None:
        if mark.stream is not None:
            mark.stream.run_until(mark)


@contextmanager
def mindspore_device(capacity_nbytes: int | None = None) -> Iterator[SimulatedDevice]:
    """Swap on MindSpore's CPU inside this context, with optimizers that are made within.

    Raises:
        ValueError: MindSpore's device target is not the CPU.
    """
    target = mindspore.get_context("device_target")
    if target != TARGET:
        raise ValueError(
            f"the simulated MindSpore device runs on the CPU, and device_target is {target!r}; "
            "call mindspore.set_device('CPU') first"
        )
    device = SimulatedDevice(capacity_nbytes)
    outer = find_backend(TARGET)
    register_device(TARGET, lambda: SimulatedBackend(device))
    try:
        yield device
    finally:
        register_device(TARGET, outer)


def _finish_kernels() -> None:
    """Wait for MindSpore's own queue, which knows nothing of our copies."""
    _pynative_executor.sync()


def _tensor_at(buffer: Buffer, offset_nbytes: int, slot: SwapSlot[Tensor]) -> Tensor:
    """A tensor over a part of the memory, with a storage of its own as MindSpore sees it.

    MindSpore's own views at an offset lose in-place updates on the CPU.
    """
    part = buffer.memory[offset_nbytes:offset_nbytes + slot.storage_nbytes]
    return Tensor.from_numpy(part.view(numpy_dtype(slot.dtype)).reshape(slot.shape))
