"""The pinned host slabs of one device and the slots that lie in them."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Generic, TypeVar

from swap_adam.backend import Backend
from swap_adam.slab_pool import Slab, SlabPool, SlabUser, is_wasteful
from swap_adam.slabs import Placement, SlabPlan, plan_slabs
from swap_adam.slot import SwapSlot

TensorT = TypeVar("TensorT")
EventT = TypeVar("EventT")


def plan_power_of_two_slabs(slots: Sequence[SwapSlot[TensorT]]) -> SlabPlan:
    """Slabs that waste nothing where pinned blocks are rounded up to powers of two."""
    return plan_slabs([slot.storage_nbytes for slot in slots])


class HostStore(SlabUser[TensorT], Generic[TensorT, EventT]):
    """Gives slots their pinned bytes and moves them where that saves memory.

    ``version`` changes whenever a slot's place changes; ``publish(slot)`` is called after
    ``slot.cpu_tensor`` has been bound to new bytes, so that the optimizer can show them. Copies
    here run on the host: the caller has waited for the copies in flight. ``plan_host`` says which
    slots share a slab. Stores with the same ``pool`` may come to share slabs, too.
    """

    def __init__(
        self,
        backend: Backend[TensorT, EventT],
        publish: Callable[[SwapSlot[TensorT]], None],
        plan_host: Callable[[Sequence[SwapSlot[TensorT]]], SlabPlan] = plan_power_of_two_slabs,
        pool: SlabPool[TensorT] | None = None,
    ) -> None:
        self._backend = backend
        self._publish = publish
        self._plan_host = plan_host
        self._pool: SlabPool[TensorT] = SlabPool() if pool is None else pool
        self._pool.join(self)
        self._slabs: dict[int, Slab[TensorT]] = {}
        self._next_index = 0
        self.slots: list[SwapSlot[TensorT]] = []
        self.version = 0

    @property
    def pinned_nbytes(self) -> int:
        """Bytes of the slabs; of one that stores share, in proportion to what they use of it."""
        with self._pool.lock:
            return sum(
                slab.nbytes * slab.users[self] // slab.used_nbytes
                for slab in self._slabs.values() if self in slab.users
            )

    @property
    def swapped_nbytes(self) -> int:
        """Bytes of the slots."""
        return sum(slot.storage_nbytes for slot in self.slots)

    def slab(self, index: int) -> TensorT:
        return self._slabs[index].tensor

    def add(self, slots: Sequence[SwapSlot[TensorT]]) -> None:
        """Give new slots zeroed bytes in slabs of their own. On failure none is added."""
        self._settle(slots)
        self.slots.extend(slots)
        self._account()

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
        if not is_wasteful(self.pinned_nbytes, self.swapped_nbytes) or self._is_sharing():
            return
        plan = self._plan_host(self.slots)
        if sum(plan.slab_nbytes) >= self.pinned_nbytes:
            return  # the tensors' own sizes cannot be packed any tighter
        for position, nbytes in enumerate(plan.slab_nbytes):
            try:
                slab = self._backend.allocate_slab(nbytes)
            except MemoryError:
                return
            self._bind(self.slots, plan.placements, {position: self._own(Slab(slab, nbytes))})
            self._drop_empty_slabs()

    def may_move(self) -> bool:
        """Whether :meth:`move_to_shared` may have something to do. Costs next to nothing."""
        if self._pool.is_changed:
            self._pool.plan_moves()
        return self.move is not None

    def move_to_shared(self) -> None:
        """Move slots to where the pool wants them, if they are still where it saw them.

        Where there is no memory for a slab the rest stays, which is no error.
        """
        with self._pool.lock:
            move, self.move = self.move, None
            if move is None:
                return
            mine = set(map(id, self.slots))
            places = [place for place in move.places if id(place[0]) in mine]
            for position in sorted({placement.slab_index for _, placement in places}):
                try:
                    slab = move.packing.slab(position, self._backend.allocate_slab)
                except MemoryError:
                    return
                self._bind(
                    [slot for slot, _ in places],
                    [placement for _, placement in places],
                    {position: self._own(slab)},
                )
                self._drop_empty_slabs(is_planned=True)

    def slots_in(self, slabs: set[int]) -> list[SwapSlot[TensorT]]:
        return [slot for slot in self.slots if id(self._slabs[slot.slab_index]) in slabs]

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
            position: self._own(Slab(slab, nbytes))
            for position, (slab, nbytes) in enumerate(zip(slabs, plan.slab_nbytes))
        }
        self._bind(slots, plan.placements, indices)

    def _own(self, slab: Slab[TensorT]) -> int:
        index = self._next_index
        self._next_index += 1
        self._slabs[index] = slab
        return index

    def _bind(
        self,
        slots: Sequence[SwapSlot[TensorT]],
        placements: Sequence[Placement],
        indices: dict[int, int],
    ) -> None:
        """Bind the slots that are to be in the slabs ``indices`` (position to index)."""
        self.version += 1
        for slot, placement in zip(slots, placements):
            if placement.slab_index not in indices:
                continue
            # Seen in whole or not at all, should an interrupt strike: the copy comes first.
            moved = copy(slot)
            moved.slab_index = indices[placement.slab_index]
            moved.host_offset_numel = placement.offset_nbytes // slot.itemsize
            moved.cpu_tensor = self._backend.host_tensor(self.slab(moved.slab_index), moved)
            if slot.cpu_tensor is not None:
                self._backend.host_copy(moved.cpu_tensor, slot.cpu_tensor)
            slot.slab_index, slot.host_offset_numel, slot.cpu_tensor = (
                moved.slab_index, moved.host_offset_numel, moved.cpu_tensor
            )
            self._publish(slot)

    def _drop_empty_slabs(self, is_planned: bool = False) -> None:
        used = {slot.slab_index for slot in self.slots}
        for index in [index for index in self._slabs if index not in used]:
            slab = self._slabs.pop(index)
            self._pool.account(self, [slab], {}, is_planned)
            with self._pool.lock:
                if not any(slab.tensor is other for other in self._pool.dropped):
                    self._pool.dropped.append(slab.tensor)
            del slab
        self._account(is_planned)
        self.release_dropped()

    def _account(self, is_planned: bool = False) -> None:
        """Tell the pool what the slots use."""
        used: dict[int, int] = {}
        for slot in self.slots:
            key = id(self._slabs[slot.slab_index])
            used[key] = used.get(key, 0) + slot.storage_nbytes
        self._pool.account(self, self._slabs.values(), used, is_planned)

    def _is_sharing(self) -> bool:
        """Whether other stores have slots in slabs of this one: then the pool packs them."""
        with self._pool.lock:
            return any(len(slab.users) > 1 for slab in self._slabs.values())

    def release_dropped(self) -> None:
        """Unpin the slabs that no slot uses, once nobody holds a tensor in them any more."""
        pool = self._pool
        if not pool.dropped:
            return
        with pool.lock:
            dropped, pool.dropped = pool.dropped, []
            is_idle = False
            while dropped:
                slab = dropped.pop()
                if self._backend.is_slab_held(slab):
                    pool.dropped.append(slab)
                elif not is_idle:
                    # The host allocator does not know of a user's own copies out of a state.
                    self._backend.wait_idle()
                    is_idle = True
                del slab
        if is_idle:
            self._backend.release_host_cache()
