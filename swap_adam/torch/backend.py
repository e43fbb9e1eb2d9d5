"""One torch device for the pipelines: pinned slabs, releasable buffers, copy streams, events.

Everything goes through ``torch.accelerator`` and the device of the parameters; no device is named.
"""
from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Lock

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from swap_adam.backend import StreamRole
from swap_adam.host_memory import available_nbytes
from swap_adam.slab_pool import SlabPool
from swap_adam.slot import SwapSlot


# A decorator for what has no place in a graph (streams, events, pinned memory): torch.compile
# passes by. Unlike torch.compiler.disable it imports the compiler only when it is called.
outside_graphs = _disable_dynamo

# A decorator for what makes tensors that last: made within inference mode, they could not be
# written after it.
as_normal_tensors = torch.inference_mode(False)


def storage_use_count(tensor: Tensor) -> int:
    """How many owners the storage of ``tensor`` has, this call's own handles included."""
    storage = tensor.untyped_storage()
    # All who hold the storage itself hold the same object, which counts as one owner.
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count + sys.getrefcount(storage)


def check_graph_capture(optimizer: Optimizer) -> None:
    """The original's own check, and error, for a step within the capture of a graph."""
    check = getattr(optimizer, "_accelerator_graph_capture_health_check", None)
    if check is None:
        check = optimizer._cuda_graph_capture_health_check
    check()


# A tensor that nobody shares: its own implementation and the handle made to look.
SOLE_OWNER = storage_use_count(torch.empty(1, device="cpu"))


_NO_SPAN: AbstractContextManager[object] = nullcontext()


_lock = Lock()
_streams: dict[torch.device, dict[StreamRole, torch.Stream]] = {}
_pools: dict[torch.device, SlabPool[Tensor]] = {}


def _copy_streams(device: torch.device) -> dict[StreamRole, torch.Stream]:
    """The copy streams of ``device`` in this process."""
    with _lock:
        if device not in _streams:
            roles = (StreamRole.COPY_IN, StreamRole.COPY_OUT)
            _streams[device] = {role: torch.Stream(device=device) for role in roles}
        return _streams[device]


def slab_pool(device: torch.device) -> SlabPool[Tensor]:
    """What the optimizers of this process have pinned for ``device``."""
    with _lock:
        return _pools.setdefault(device, SlabPool())


class TorchBackend:
    """A device of any accelerator that ``torch.accelerator`` covers.

    The two copy streams are those of all optimizers on the device; which stream is the compute
    stream is asked anew whenever it matters, since ``step()`` may be called under another one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = _copy_streams(device)
        self._acquired_on: torch.Stream | None = None  # the compute stream of that time

    # Host memory

    @as_normal_tensors
    def allocate_slab(self, nbytes: int) -> Tensor:
        try:
            return torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except (RuntimeError, MemoryError):
            self.release_host_cache()  # the allocator keeps blocks of other sizes
        try:
            return torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except (RuntimeError, MemoryError) as error:
            free = available_nbytes()
            raise MemoryError(
                f"cannot pin {nbytes} bytes of host memory for optimizer states: {error}. "
                f"{free} bytes of host memory are free; if that is too little, or the limit of "
                "locked memory, free some, raise it, or swap less (state_keys, min_numel)."
            ) from error

    @as_normal_tensors
    def host_tensor(self, slab: Tensor, slot: SwapSlot[Tensor]) -> Tensor:
        # A view of the slab would be saved with the whole slab. A tensor over a part of its
        # memory has a storage of exactly its own size, and `memory` keeps the slab alive.
        memory = (ctypes.c_char * slot.storage_nbytes).from_address(
            slab.data_ptr() + slot.host_offset_nbytes
        )
        memory.slab = slab  # type: ignore[attr-defined]
        assert isinstance(slot.dtype, torch.dtype)
        tensor = torch.frombuffer(memory, dtype=slot.dtype, count=slot.numel)
        return tensor.as_strided_(slot.shape, slot.strides)

    def host_copy(self, target: Tensor, source: Tensor) -> None:
        with torch.no_grad():
            target.copy_(source)

    def is_held_elsewhere(self, slot: SwapSlot[Tensor]) -> bool:
        tensor, logical = slot.cpu_tensor, slot.logical_tensor
        assert tensor is not None
        if storage_use_count(tensor) > SOLE_OWNER:
            return True
        # References to the shown tensor: the slot, the optimizer's state, this frame and the
        # argument of getrefcount; to a plain one, which is `cpu_tensor` too, two more.
        own = 6 if tensor is logical else 4
        if sys.getrefcount(logical) > own:
            return True
        # A distributed tensor's local part: the slot, the distributed tensor, and as above.
        return tensor is not logical and sys.getrefcount(tensor) > 4

    def is_slab_held(self, slab: Tensor) -> bool:
        # The caller's variable, this frame's and the argument of getrefcount. Views hold the
        # storage, host tensors the object.
        return sys.getrefcount(slab) > 3 or storage_use_count(slab) > SOLE_OWNER

    def wait_idle(self) -> None:
        torch.accelerator.synchronize(self.device)

    def release_host_cache(self) -> None:
        # The allocator has recorded events behind our copies out of what was freed just now.
        self.wait_idle()
        empty = getattr(torch.accelerator, "empty_host_cache", None)
        if empty is None and self.device.type == "cuda":
            empty = getattr(torch._C, "_host_emptyCache", None)
        if empty is None:
            empty = getattr(torch.get_device_module(self.device), "host_empty_cache", None)
        if empty is not None:
            empty()

    # Device memory

    @as_normal_tensors
    def make_buffer(self, nbytes: int) -> Tensor:
        self._acquired_on = self._stream(StreamRole.COMPUTE)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def acquire(self, buffer: Tensor, nbytes: int) -> None:
        self._acquired_on = self._stream(StreamRole.COMPUTE)
        self._resize(buffer, nbytes)

    def release(self, buffer: Tensor, pending: StreamRole | None) -> None:
        if pending is None and self._acquired_on != self._stream(StreamRole.COMPUTE):
            pending = StreamRole.COMPUTE  # or the stream it came from could have it too early
        if pending is not None:
            buffer.record_stream(self._stream(pending))
        self._resize(buffer, 0)

    def reserve(self, sizes_nbytes: Sequence[int]) -> None:
        blocks = []
        for nbytes in sizes_nbytes:
            # Unlike torch.empty, a resize fills nothing in the deterministic mode.
            blocks.append(torch.empty(0, dtype=torch.uint8, device=self.device))
            self._resize(blocks[-1], nbytes)

    @as_normal_tensors
    def device_view(
        self, buffer: Tensor, offset_nbytes: int, slot: SwapSlot[Tensor],
        start_numel: int, numel: int,
    ) -> Tensor:
        assert isinstance(slot.dtype, torch.dtype)
        with torch.no_grad():
            part = buffer[offset_nbytes:offset_nbytes + numel * slot.itemsize].view(slot.dtype)
            if numel < slot.numel:
                return part
            return part.as_strided(slot.shape, slot.strides)

    def span(self, name: str) -> AbstractContextManager[object]:
        if _profiler_enabled():
            return torch.profiler.record_function(name)
        return _NO_SPAN

    # Copies and their order

    def byte_view(self, buffer: Tensor, offset_nbytes: int, nbytes: int) -> Tensor:
        return buffer[offset_nbytes:offset_nbytes + nbytes]

    def copy(self, role: StreamRole, copies: Iterable[tuple[Tensor, Tensor]]) -> None:
        with self._streams[role]:
            for target, source in copies:
                target.copy_(source, non_blocking=True)

    def make_event(self) -> torch.Event:
        return torch.Event(device=self.device, enable_timing=False)  # torch 2.7's default is True

    def record(self, event: torch.Event, role: StreamRole) -> None:
        event.record(self._stream(role))

    def wait(self, role: StreamRole, event: torch.Event) -> None:
        event.wait(self._stream(role))

    def is_complete(self, event: torch.Event) -> bool:
        return event.query()

    def synchronize(self, event: torch.Event) -> None:
        event.synchronize()

    def _resize(self, buffer: Tensor, nbytes: int) -> None:
        storage = buffer.untyped_storage()
        if torch.accelerator.current_device_index() == self.device.index:
            storage.resize_(nbytes)
        else:  # torch_npu takes the memory from the current device, whatever the storage's
            with torch.get_device_module(self.device).device(self.device):
                storage.resize_(nbytes)

    def _stream(self, role: StreamRole) -> torch.Stream:
        if role is StreamRole.COMPUTE:
            return torch.accelerator.current_stream(self.device)
        return self._streams[role]
