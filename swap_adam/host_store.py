"""The pinned host slabs of one device and the slots that lie in them."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from swap_adam.backend import Backend
from swap_adam.layout import SlabPlan, plan_slabs
from swap_adam.slot import SwapSlot

TensorT = TypeVar("TensorT")
EventT = TypeVar("EventT")

# Pinned bytes that slots gave up are worth a repack from this share of the pinned bytes on.
REPACK_WASTE = 0.05
REPACK_MIN_NBYTES = 1 << 20


def plan_power_of_two_slabs(slots: Sequence[SwapSlot[TensorT]]) -> SlabPlan:
    """Slabs that waste nothing where pinned blocks are rounded up to powers of two."""
    return plan_slabs([slot.storage_nbytes for slot in slots])


class HostStore(Generic[TensorT, EventT]):
    """Gives slots their pinned bytes and moves them where that saves memory.

    ``version`` changes whenever a slot's place changes; ``publish(slot)`` is called after
    ``slot.cpu_tensor`` has been bound to new bytes, so that the optimizer can show them. Copies
    here run on the host: the caller has waited for the copies in flight. ``plan_host`` says which
    slots share a slab.
    """

    def __init__(
        self,
        backend: Backend[TensorT, EventT],
        publish: Callable[[SwapSlot[TensorT]], None],
        plan_host: Callable[[Sequence[SwapSlot[TensorT]]], SlabPlan] = plan_power_of_two_slabs,
    ) -> None:
        self._backend = backend
        self._publish = publish
        self._plan_host = plan_host
        self._slabs: dict[int, TensorT] = {}
        self._slab_nbytes: dict[int, int] = {}
        self._dropped: list[TensorT] = []  # of which somebody held a part when looked at last
        self._next_index = 0
        self.slots: list[SwapSlot[TensorT]] = []
        self.version = 0

    @property
    def pinned_nbytes(self) -> int:
        """Bytes of the slabs."""
        return sum(self._slab_nbytes.values())

    @property
    def swapped_nbytes(self) -> int:
        """Bytes of the slots."""
        return sum(slot.storage_nbytes for slot in self.slots)

    def slab(self, index: int) -> TensorT:
        return self._slabs[index]

    def add(self, slots: Sequence[SwapSlot[TensorT]]) -> None:
        """Give new slots zeroed bytes in slabs of their own. On failure none is added."""
        self._settle(slots)
        self.slots.extend(slots)

    def replace(self, slots: Sequence[SwapSlot[TensorT]]) -> None:
        """Move ``slots`` to fresh bytes; what holds the old ones keeps them as they are."""
        self._settle(slots)
        self._drop_empty_slabs()

    def remove(self, slots: Sequence[SwapSlot[TensorT]]) -> None:
        """Forget ``slots``; their host tensors stay with whoever holds them."""
        gone = set(map(id, slots))
        self.slots = [slot for slot in self.slots if id(slot) not in gone]
        self.version += 1
        self._drop_empty_slabs()

    def repack_if_wasteful(self) -> None:
        """Close the gaps if they are more than 5 % and 1 MiB, holding one spare slab at a time.

        Where there is no memory for the spare slab the gaps stay, which is no error.
        """
        waste = self.pinned_nbytes - self.swapped_nbytes
        if waste <= max(REPACK_MIN_NBYTES, REPACK_WASTE * self.swapped_nbytes):
            return
        plan = self._plan_host(self.slots)
        if sum(plan.slab_nbytes) >= self.pinned_nbytes:
            return  # the tensors' own sizes cannot be packed any tighter
        for position, nbytes in enumerate(plan.slab_nbytes):
            try:
                slab = self._backend.allocate_slab(nbytes)
            except MemoryError:
                return
            self._bind(self.slots, plan, {position: self._own(slab, nbytes)})
            self._drop_empty_slabs()

    def _settle(self, slots: Sequence[SwapSlot[TensorT]]) -> None:
        plan = self._plan_host(slots)
        slabs: list[TensorT] = []
        try:
            for nbytes in plan.slab_nbytes:
                slabs.append(self._backend.allocate_slab(nbytes))
        except BaseException:
            slabs.clear()
            self._backend.release_host_cache()
            raise
        indices = {
            position: self._own(slab, nbytes)
            for position, (slab, nbytes) in enumerate(zip(slabs, plan.slab_nbytes))
        }
        self._bind(slots, plan, indices)

    def _own(self, slab: TensorT, nbytes: int) -> int:
        index = self._next_index
        self._next_index += 1
        self._slabs[index] = slab
        self._slab_nbytes[index] = nbytes
        return index

    def _bind(
        self, slots: Sequence[SwapSlot[TensorT]], plan: SlabPlan, indices: dict[int, int]
    ) -> None:
        """Bind the slots that ``plan`` puts into the slabs ``indices`` (position to index)."""
        for slot, placement in zip(slots, plan.placements):
            if placement.slab_index not in indices:
                continue
            old = slot.cpu_tensor
            slot.slab_index = indices[placement.slab_index]
            slot.host_offset_numel = placement.offset_nbytes // slot.itemsize
            slot.cpu_tensor = self._backend.host_tensor(self._slabs[slot.slab_index], slot)
            if old is not None:
                self._backend.host_copy(slot.cpu_tensor, old)
            self._publish(slot)
        self.version += 1

    def _drop_empty_slabs(self) -> None:
        used = {slot.slab_index for slot in self.slots}
        for index in [index for index in self._slabs if index not in used]:
            self._dropped.append(self._slabs.pop(index))
            del self._slab_nbytes[index]
        self.release_dropped()

    def release_dropped(self) -> None:
        """Unpin the slabs that no slot uses, once nobody holds a tensor in them any more."""
        if not self._dropped:
            return
        dropped, self._dropped = self._dropped, []
        is_idle = False
        while dropped:
            slab = dropped.pop()
            if self._backend.is_slab_held(slab):
                self._dropped.append(slab)
            elif not is_idle:
                # The host allocator does not know of a user's own copies out of a state.
                self._backend.wait_idle()
                is_idle = True
            del slab
        if is_idle:
            self._backend.release_host_cache()
