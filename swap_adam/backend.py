"""What a framework implements so that the pipelines can run on one of its devices."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Protocol, TypeVar

from swap_adam.slot import SwapSlot

TensorT = TypeVar("TensorT")
EventT = TypeVar("EventT")


class StreamRole(Enum):
    """The three queues of a device that a step uses."""

    COMPUTE = "compute"  # whichever stream is current when `step()` is called
    COPY_IN = "copy-in"  # host to device, made once per backend
    COPY_OUT = "copy-out"  # device to host, made once per backend


class Backend(Protocol[TensorT, EventT]):
    """One device. Nothing here waits on the host unless its docstring says so.

    Byte buffers, on the host and on the device, are 1-D tensors of one-byte elements.
    """

    # Host memory

    def allocate_slab(self, nbytes: int) -> TensorT:
        """A pinned byte buffer, zeroed on the host.

        Raises:
            MemoryError: with the bytes asked for and the reason the framework gave.
        """

    def host_tensor(self, slab: TensorT, slot: SwapSlot[TensorT]) -> TensorT:
        """The slot's tensor inside ``slab`` at ``slot.host_offset_nbytes``: the slot's shape,
        strides and dtype, and a storage of exactly its own bytes that keeps the slab alive."""

    def host_copy(self, target: TensorT, source: TensorT) -> None:
        """Copy between two host tensors, on the host, done when it returns."""

    def is_held_elsewhere(self, slot: SwapSlot[TensorT]) -> bool:
        """Whether anybody but the slot and the optimizer's state holds ``slot.cpu_tensor`` or
        its bytes."""

    def is_slab_held(self, slab: TensorT) -> bool:
        """Whether anybody but the caller's one variable holds ``slab`` or bytes of it."""

    def wait_idle(self) -> None:
        """Block the host until the device has done all that was issued, by anybody."""

    def release_host_cache(self) -> None:
        """Unpin the host memory that nobody uses, where the host allocator would keep it.

        Blocks the host until the device is idle.
        """

    # Device memory. A buffer and its views are made once; its bytes come and go.

    def make_buffer(self, nbytes: int) -> TensorT:
        """A device byte buffer, acquired: views are made while it has its bytes."""

    def acquire(self, buffer: TensorT, nbytes: int) -> None:
        """Give a released ``buffer`` its bytes again, for use on the compute stream.

        Another stream must wait for the compute stream before it touches them. Raises the
        framework's own out-of-memory error, with the buffer left without bytes.
        """

    def release(self, buffer: TensorT, pending: StreamRole | None) -> None:
        """Give the bytes back; to others only after ``pending`` has passed what it has now."""

    def reserve(self, sizes_nbytes: Sequence[int]) -> None:
        """Allocate all of ``sizes_nbytes``, then free them: fails now if blocks of these sizes
        would not be there later."""

    def device_view(
        self, buffer: TensorT, offset_nbytes: int, slot: SwapSlot[TensorT],
        start_numel: int, numel: int,
    ) -> TensorT:
        """Elements ``[start_numel, start_numel + numel)`` of ``slot``, in storage order, at
        ``offset_nbytes`` of ``buffer``: the slot's shape and strides if that is all of them,
        else 1-D."""

    # What a profiler of the framework shows

    def span(self, name: str) -> AbstractContextManager[object]:
        """A named range around what is issued in it; costs next to nothing where nobody looks."""

    # Copies and their order

    def byte_view(self, buffer: TensorT, offset_nbytes: int, nbytes: int) -> TensorT:
        """A byte buffer that is a part of ``buffer``, of the host or of the device."""

    def copy(self, role: StreamRole, copies: Iterable[tuple[TensorT, TensorT]]) -> None:
        """Issue asynchronous copies, each to the first from the second of a pair, on the copy
        stream ``role``."""

    def make_event(self) -> EventT:
        """An event that nothing waits for until it is recorded."""

    def record(self, event: EventT, role: StreamRole) -> None:
        """``event`` now stands for all that is issued on ``role`` up to here."""

    def wait(self, role: StreamRole, event: EventT) -> None:
        """What is issued on ``role`` from here on runs after ``event``."""

    def is_complete(self, event: EventT) -> bool:
        """Whether ``event`` has passed (or was never recorded)."""

    def synchronize(self, event: EventT) -> None:
        """Block the host until ``event`` has passed."""
