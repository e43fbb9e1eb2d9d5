"""MindSpore devices for the pipelines, and which of them swap.

[Note: views] The host bytes of what travels together are one pinned tensor of their own (see
:func:`swap_adam.slabs.plan_group_slabs`), because ``Tensor.copy_`` is asynchronous only between
contiguous tensors of equal shape and dtype. And a kernel that knows no views, as those of
``nn.Adam`` and ``nn.AdamWeightDecay``, is given a copy of one, so that its writes are lost: per
tensor, a state's device memory is a tensor of the state's own shape and dtype. Packed, states are
views, which the operations of MindFormers' AdamW do know.
"""
from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import mindspore
from mindspore import Parameter, Tensor, mint, ops
from mindspore.graph._utils.check_jit_forbidden_api import jit_forbidden_register
from mindspore.runtime import Event, Stream, StreamCtx, current_stream

from swap_adam.backend import Backend, StreamRole
from swap_adam.host_memory import available_nbytes
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


def check_resized(nbytes: int, wanted_nbytes: int) -> None:
    """A storage that has ``nbytes`` was to have ``wanted_nbytes``; MindSpore does not tell.

    Raises:
        RuntimeError: there is not that much device memory.
    """
    if nbytes != wanted_nbytes:
        raise RuntimeError(
            f"out of device memory: {wanted_nbytes} bytes for optimizer states were asked for and "
            f"{nbytes} given; raise swap_times, or free device memory"
        )


@functools.cache
def _assignment_of_too_many_dimensions() -> tuple[ops.Assign, Tensor]:
    # Once: to make the operation takes as long as to be refused by it.
    return ops.Assign(), Tensor([[[[[[[[[0.0]]]]]]]]])


def is_view(param: Tensor) -> bool:
    """Whether to MindSpore ``param`` is a view, be it one of all its memory, in order.

    Nothing tells, except that an assignment to one is refused before its operands are compared.
    """
    assign, value = _assignment_of_too_many_dimensions()
    try:
        assign(param, value)
    except RuntimeError as error:
        return "view input" in str(error)
    except (TypeError, ValueError):
        pass
    return False


def host_owner(tensor: Tensor) -> object:
    """The object that every NumPy view of a host tensor's memory refers to."""
    return tensor.asnumpy().base


def is_held(owner: object, own_references: int) -> bool:
    """Whether there are NumPy views of the memory: references beyond the caller's own."""
    return sys.getrefcount(owner) > own_references


@dataclass(eq=False)
class AscendEvent:
    """An event that nothing waits for until it is recorded, which MindSpore does not promise."""

    recorded: Event | None = None


@dataclass(eq=False)
class DeviceBuffer:
    """Device memory: bytes, or where it is made for one state, a tensor like that state."""

    tensor: Tensor


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
            memory = slab.asnumpy()
        except (RuntimeError, MemoryError) as error:
            free = available_nbytes()
            raise MemoryError(
                f"cannot pin {nbytes} bytes of host memory for optimizer states: {error}. "
                f"{free} bytes of host memory are free; if that is too little, free some or swap "
                "less (state_keys, min_numel)."
            ) from error
        if memory.ctypes.data != slab.data_ptr():
            raise RuntimeError(
                "this MindSpore gives NumPy a copy of pinned memory instead of a view of it, so "
                "states cannot be kept there; MindSpore 2.10 is what this was written for"
            )
        memory[:] = 0
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

    def is_slab_held(self, slab: Tensor) -> bool:
        return False  # a slab goes with its last tensor: MindSpore keeps no freed blocks

    def wait_idle(self) -> None:
        mindspore.runtime.synchronize()

    def release_host_cache(self) -> None:
        """There is none."""

    # Device memory

    def make_buffer(self, nbytes: int) -> DeviceBuffer:
        return DeviceBuffer(mint.empty(nbytes, dtype=mindspore.uint8, device=self.target))

    def acquire(self, buffer: DeviceBuffer, nbytes: int) -> None:
        storage = buffer.tensor.untyped_storage()
        storage.resize_(nbytes)
        check_resized(storage.nbytes(), nbytes)

    def release(self, buffer: DeviceBuffer, pending: StreamRole | None) -> None:
        # The allocator reuses memory in the order of the compute stream.
        if pending is not None:
            event = Event()
            event.record(self._streams[pending])
            event.wait(current_stream())
        buffer.tensor.untyped_storage().resize_(0)

    def reserve(self, sizes_nbytes: Sequence[int]) -> None:
        blocks = [
            mint.empty(nbytes, dtype=mindspore.uint8, device=self.target)
            for nbytes in sizes_nbytes if nbytes
        ]
        for block in blocks:
            # MindSpore allocates when the operation runs; asking where waits for that.
            block.data_ptr()

    def device_view(
        self, buffer: DeviceBuffer, offset_nbytes: int, slot: SwapSlot[Tensor],
        start_numel: int, numel: int,
    ) -> Tensor:
        assert numel == slot.numel  # no tensor is cut on MindSpore
        if buffer.tensor.nbytes == slot.storage_nbytes:  # see [Note: views]
            buffer.tensor = mint.empty(slot.shape, dtype=slot.dtype, device=self.target)
            return as_parameter(buffer.tensor, slot.name)
        part = buffer.tensor[offset_nbytes:offset_nbytes + slot.storage_nbytes]
        return as_parameter(part.view(slot.dtype).view(slot.shape), slot.name)

    def span(self, name: str) -> AbstractContextManager[object]:
        return nullcontext()

    # Copies and their order

    def byte_view(
        self, buffer: Tensor | DeviceBuffer, offset_nbytes: int, nbytes: int
    ) -> Tensor:
        tensor = buffer.tensor if isinstance(buffer, DeviceBuffer) else buffer
        if offset_nbytes == 0 and nbytes == tensor.nbytes:
            return tensor
        # To MindSpore a view of a host tensor is on the device: a slab travels as a whole.
        assert isinstance(buffer, DeviceBuffer)
        return tensor[offset_nbytes:offset_nbytes + nbytes]

    def copy(self, role: StreamRole, copies: Iterable[tuple[Tensor, Tensor]]) -> None:
        with StreamCtx(self._streams[role]):  # once: a change of streams flushes the dispatch
            for target, source in copies:
                if target.dtype == source.dtype:
                    target.copy_(source, non_blocking=True)
                else:  # bytes on the host, a state's own tensor on the device
                    target.untyped_storage().copy_(source.untyped_storage(), non_blocking=True)

    def make_event(self) -> AscendEvent:
        return AscendEvent()

    def record(self, event: AscendEvent, role: StreamRole) -> None:
        event.recorded = event.recorded or Event()
        event.recorded.record(self._stream(role))

    def wait(self, role: StreamRole, event: AscendEvent) -> None:
        if event.recorded is not None:
            event.recorded.wait(self._stream(role))

    def is_complete(self, event: AscendEvent) -> bool:
        return event.recorded is None or cast(bool, event.recorded.query())

    def synchronize(self, event: AscendEvent) -> None:
        if event.recorded is not None:
            event.recorded.synchronize()

    def _stream(self, role: StreamRole) -> Stream:
        return current_stream() if role is StreamRole.COMPUTE else self._streams[role]


register_device(AscendBackend.target, AscendBackend)
