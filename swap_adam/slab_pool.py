"""The pinned slabs of one process and device, shared by the stores of its optimizers.

A store places its slots in slabs of its own. Many small ones waste what fills up each slab, and
leave gaps where optimizers are deleted: then the pool plans slabs for all of those slots together,
and each store moves its own there when it steps next. No store touches the slots of another one,
which may be in flight. A place in a slab is given to one slot once, so whoever still holds what
was there keeps it as it is; a slab goes when its last slot has gone.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Generic, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

from swap_adam.slabs import Placement, plan_slabs
from swap_adam.slot import SwapSlot

TensorT = TypeVar("TensorT")

# Pinned bytes that no slot uses are worth a repack from this share of the used bytes on.
REPACK_WASTE = 0.05
REPACK_MIN_NBYTES = 1 << 20


def is_wasteful(pinned_nbytes: int, used_nbytes: int) -> bool:
    """Whether a repack is worth its copies."""
    return pinned_nbytes - used_nbytes > max(REPACK_MIN_NBYTES, REPACK_WASTE * used_nbytes)


# Of the bytes that a packing moves, on the host and within a step, what it must save.
WORTH_MOVING = 0.25


@dataclass(eq=False)
class Slab(Generic[TensorT]):
    """One pinned allocation. ``users`` are the stores with slots in it, and the slots' bytes."""

    tensor: TensorT
    nbytes: int
    users: WeakKeyDictionary[SlabUser[TensorT], int] = field(default_factory=WeakKeyDictionary)

    @property
    def used_nbytes(self) -> int:
        return sum(self.users.values())


class Packing(Generic[TensorT]):
    """Slabs for slots of several stores, allocated when the first of them moves in."""

    def __init__(self, slab_nbytes: Sequence[int]) -> None:
        self._slab_nbytes = slab_nbytes
        # Stores own slabs: one whose slots are all gone before others have come is made anew.
        self._slabs: dict[int, ReferenceType[Slab[TensorT]]] = {}

    def slab(self, position: int, allocate: Callable[[int], TensorT]) -> Slab[TensorT]:
        """The slab at ``position``; the caller holds the pool's lock.

        Raises:
            MemoryError: from ``allocate``.
        """
        known = self._slabs.get(position)
        slab = None if known is None else known()
        if slab is None:
            nbytes = self._slab_nbytes[position]
            slab = Slab(allocate(nbytes), nbytes)
            self._slabs[position] = ref(slab)
        return slab


@dataclass(frozen=True)
class Move(Generic[TensorT]):
    """Where one store is to take these of its slots."""

    packing: Packing[TensorT]
    places: Sequence[tuple[SwapSlot[TensorT], Placement]]


class SlabUser(Generic[TensorT]):
    """A store as the pool knows it."""

    # Set by the pool, under its lock; the store takes it away.
    move: Move[TensorT] | None = None

    def slots_in(self, slabs: set[int]) -> list[SwapSlot[TensorT]]:
        """Its slots in the slabs of these ids."""
        raise NotImplementedError


class SlabPool(Generic[TensorT]):
    """What the stores of one process and device have pinned. ``lock`` guards all of it."""

    def __init__(self) -> None:
        self.lock = RLock()
        self.is_changed = False  # since the pool has last looked
        # Of which somebody held a part when looked at last. One list for all: two stores that
        # each kept a slab they have shared would hold it for each other.
        self.dropped: list[TensorT] = []
        self._slabs: WeakSet[Slab[TensorT]] = WeakSet()
        self._users: dict[int, ReferenceType[SlabUser[TensorT]]] = {}

    def join(self, user: SlabUser[TensorT]) -> None:
        """A store begins to use the pool; it leaves when it is deleted."""
        key = id(user)

        def leave(gone: ReferenceType[SlabUser[TensorT]]) -> None:
            # No lock: this may run at any moment, on any thread.
            if self._users.get(key) is gone:
                del self._users[key]
            self.is_changed = True
            self.dropped.clear()  # perhaps nobody looks again: they go with whoever holds them

        with self.lock:
            self._users[key] = ref(user, leave)

    def account(
        self,
        user: SlabUser[TensorT],
        slabs: Iterable[Slab[TensorT]],
        used: dict[int, int],
        is_planned: bool = False,
    ) -> None:
        """The slots of ``user`` have ``used`` bytes of its ``slabs``, by their id.

        ``is_planned`` says that this is what a :class:`Move` was to bring about.
        """
        with self.lock:
            for slab in slabs:
                self._slabs.add(slab)
                if id(slab) in used:
                    slab.users[user] = used[id(slab)]
                else:
                    slab.users.pop(user, None)
            self.is_changed = self.is_changed or not is_planned

    def plan_moves(self) -> None:
        """After a change, see whether packing slots of several stores together saves memory."""
        with self.lock:
            if not self.is_changed:
                return
            self.is_changed = False
            slabs = [(slab, slab.used_nbytes) for slab in list(self._slabs)]
            if not is_wasteful(
                sum(slab.nbytes for slab, _ in slabs), sum(used for _, used in slabs)
            ):
                return
            loose = [
                slab for slab, used in slabs if slab.nbytes - used > REPACK_WASTE * used
            ]
            ids = set(map(id, loose))
            members: list[tuple[SlabUser[TensorT], SwapSlot[TensorT]]] = []
            for known in list(self._users.values()):
                user = known()
                if user is not None:
                    user.move = None
                    members.extend((user, slot) for slot in user.slots_in(ids))
            plan = plan_slabs([slot.storage_nbytes for _, slot in members])
            is_shared = len({id(user) for user, _ in members}) > 1 or any(
                len(slab.users) > 1 for slab in loose
            )
            moved_nbytes = sum(slot.storage_nbytes for _, slot in members)
            saved_nbytes = sum(slab.nbytes for slab in loose) - sum(plan.slab_nbytes)
            if not is_shared or saved_nbytes < WORTH_MOVING * moved_nbytes:
                return  # one store packs by itself; some sizes cannot be packed any tighter
            packing: Packing[TensorT] = Packing(plan.slab_nbytes)
            places: dict[int, list[tuple[SwapSlot[TensorT], Placement]]] = {}
            users: dict[int, SlabUser[TensorT]] = {}
            for (user, slot), placement in zip(members, plan.placements):
                users[id(user)] = user
                places.setdefault(id(user), []).append((slot, placement))
            for key, user in users.items():
                user.move = Move(packing, places[key])
