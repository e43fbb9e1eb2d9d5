"""MindSpore devices for the pipelines, and which of them swap.

The host bytes of what travels together are one pinned tensor of their own (see
:func:`swap_adam.layout.plan_group_slabs`), because ``Tensor.copy_`` is asynchronous only between
whole, contiguous tensors of equal shape and dtype.
"""
from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, cast

import mindspore
from mindspore import Parameter, Tensor, mint
from mindspore.graph._utils.check_jit_forbidden_api import jit_forbidden_register
from mindspore.runtime import Event, Stream, StreamCtx, current_stream

from swap_adam.backend import Backend, StreamRole
from swap_adam.slot import SwapSlot

# `jit_forbidden_register` is MindSpore's own mark for what a graph must not contain; `_no_grad`
# keeps in-place updates of Parameters off the tape, as MindFormers does.
FunctionT = TypeVar("FunctionT", bound=Callable[..., object])
forbid_in_graphs: Callable[[FunctionT], FunctionT] = jit_forbidden_register
no_grad: Callable[[], AbstractContextManager[None]] = mindspore._no_grad


class MindSporeBackend(Backend[Tensor, Any], Protocol):
    """What the MindSpore half needs of a device beside what the pipelines need."""

    def to_host(self, target: Tensor, source: Tensor) -> None:
        """Copy ``source``, wherever it is, to the host tensor ``target``; done on return."""

    def to_device(self, source: Tensor) -> Tensor:
        """A new device tensor with the values of the host tensor ``source``; done on return."""


BackendFactory = Callable[[], MindSporeBackend]

_factories: dict[str, BackendFactory] = {}


def register_device(target: str, factory: BackendFactory | None) -> None:
    """Swap on devices of the target ``target`` from now on; ``None``: no longer."""
    if factory is None:
        _factories.pop(target, None)
    else:
        _factories[target] = factory


def find_backend(target: str) -> BackendFactory | None:
    """Makes the backend of ``target``; ``None`` where nothing is swapped (a plain CPU)."""
    return _factories.get(target)


@functools.cache
def numpy_dtype(dtype: Hashable) -> Any:
    """NumPy's dtype for one of MindSpore's, bfloat16 included."""
    return Tensor(0, dtype).asnumpy().dtype


def as_parameter(view: Tensor, name: str) -> Parameter:
    """A Parameter that *is* ``view``.

    The update must be given Parameters: where MindSpore wraps a kernel in casts (``nn.Adam`` in
    fp16), it writes the results back to Parameters only, and loses those of other tensors. It
    does so for the rest of the process, since it caches how it ran the operation first.
    """
    parameter = Parameter(Tensor([0], view.dtype), name=name, requires_grad=False)
    parameter.set_data(view)
    return parameter


def host_owner(tensor: Tensor) -> object:
    """The object that every NumPy view of a host tensor's memory refers to."""
    return tensor.asnumpy().base


def is_held(owner: object, own_references: int) -> bool:
    """Whether there are NumPy views of the memory: references beyond the caller's own."""
    return sys.getrefcount(owner) > own_references


class AscendBackend:
    """An Ascend device in PyNative mode: pinned host memory, two copy streams, events.

    The copy streams are made once, here. What is the compute stream is asked whenever it matters.
    """

    target = "Ascend"

    def __init__(self) -> None:
        self._streams = {StreamRole.COPY_IN: Stream(), StreamRole.COPY_OUT: Stream()}

    # Host memory

    def allocate_slab(self, nbytes: int) -> Tensor:
        try:
            slab = mint.empty(nbytes, dtype=mindspore.uint8, device="CPU", pin_memory=True)
            slab.asnumpy()[:] = 0
        except (RuntimeError, MemoryError) as error:
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            raise MemoryError(
                f"cannot pin {nbytes} bytes of host memory for optimizer states "
                f"({free} bytes of host memory are free): {error}. Free host memory, or swap less "
                "(state_keys, min_numel)."
            ) from error
        return slab

    def host_tensor(self, slab: Tensor, slot: SwapSlot[Tensor]) -> Tensor:
        # Over the slab's memory, not a view of the slab: a view would be saved with all of it.
        start = slot.host_offset_nbytes
        part = slab.asnumpy()[start:start + slot.storage_nbytes].view(numpy_dtype(slot.dtype))
        return Tensor.from_numpy(part.reshape(slot.shape))

    def host_copy(self, target: Tensor, source: Tensor) -> None:
        target.asnumpy()[...] = source.asnumpy()

    def is_held_elsewhere(self, slot: SwapSlot[Tensor]) -> bool:
        return False  # the optimizer looks for itself, see MindSporeSwapMixin

    def to_host(self, target: Tensor, source: Tensor) -> None:
        self.host_copy(target, source)

    def to_device(self, source: Tensor) -> Tensor:
        made = mint.empty(source.shape, dtype=source.dtype, device=self.target)
        made.copy_(source)
        mindspore.runtime.synchronize()
        return made

    # Device memory

    def make_buffer(self, nbytes: int) -> Tensor:
        return mint.empty(nbytes, dtype=mindspore.uint8, device=self.target)

    def acquire(self, buffer: Tensor, nbytes: int) -> None:
        buffer.untyped_storage().resize_(nbytes)

    def release(self, buffer: Tensor, pending: StreamRole | None) -> None:
        # The allocator reuses memory in the order of the compute stream.
        if pending is not None:
            event = Event()
            event.record(self._streams[pending])
            event.wait(current_stream())
        buffer.untyped_storage().resize_(0)

    def reserve(self, nbytes: int) -> None:
        if nbytes:
            mint.empty(nbytes, dtype=mindspore.uint8, device=self.target)

    def device_view(
        self, buffer: Tensor, offset_nbytes: int, slot: SwapSlot[Tensor],
        start_numel: int, numel: int,
    ) -> Tensor:
        assert numel == slot.numel  # no tensor is cut on MindSpore
        part = buffer[offset_nbytes:offset_nbytes + slot.storage_nbytes]
        return as_parameter(part.view(slot.dtype).view(slot.shape), slot.name)

    # Copies and their order

    def byte_view(self, buffer: Tensor, offset_nbytes: int, nbytes: int) -> Tensor:
        if offset_nbytes == 0 and nbytes == buffer.nbytes:
            return buffer
        return buffer[offset_nbytes:offset_nbytes + nbytes]

    def copy(self, role: StreamRole, target: Tensor, source: Tensor) -> None:
        with StreamCtx(self._streams[role]):
            target.copy_(source, non_blocking=True)

    def make_event(self) -> Event:
        return Event()

    def record(self, event: Event, role: StreamRole) -> None:
        event.record(self._stream(role))

    def wait(self, role: StreamRole, event: Event) -> None:
        event.wait(self._stream(role))

    def is_complete(self, event: Event) -> bool:
        return cast(bool, event.query())

    def synchronize(self, event: Event) -> None:
        event.synchronize()

    def _stream(self, role: StreamRole) -> Stream:
        return current_stream() if role is StreamRole.COMPUTE else self._streams[role]


register_device(AscendBackend.target, AscendBackend)
