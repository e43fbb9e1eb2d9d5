"""Making the plan of a step from the registered units and those that have a gradient.

The batches depend on the registered units only; a unit without a gradient leaves a gap in its
batch, which splits the batch's transfer and moves nothing.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import Generic, Literal, TypeVar

from swap_adam.host_store import HostStore
from swap_adam.schedule.partition import Partition, Piece, UnitSize, choose_swap_times
from swap_adam.schedule.plan import Layout, StepPlan
from swap_adam.schedule.schedule import Schedule
from swap_adam.slot import UpdateUnit
from swap_adam.temporaries import largest_needs
from swap_adam.update import Update

TensorT = TypeVar("TensorT")
EventT = TypeVar("EventT")


@dataclass(frozen=True)
class PlanOptions:
    """The fields of the configuration that shape the batches."""

    swap_times: int | Literal["auto"]
    split_tensors: bool
    staging_nbytes: int | None = None


def partition_units(
    units: Sequence[UpdateUnit[TensorT]],
    schedule: type[Schedule[TensorT, EventT]],
    options: PlanOptions,
) -> Partition:
    """Batches of the registered ``units``, with a gradient or without."""
    sizes = [
        UnitSize(
            unit.numel,
            sum(slot.itemsize for slot in unit.slots),
            can_cut=options.split_tensors and unit.can_cut,
        )
        for unit in units
    ]
    swap_times = options.swap_times
    if swap_times == "auto":
        swapped_nbytes = sum(size.nbytes for size in sizes)
        swap_times = choose_swap_times(swapped_nbytes, options.staging_nbytes)
    return schedule.cut(sizes, swap_times)


class PlanBuilder(Generic[TensorT, EventT]):
    """Makes plans for one device, laid out by its schedule."""

    def __init__(
        self,
        schedule: Schedule[TensorT, EventT],
        store: HostStore[TensorT, EventT],
        options: PlanOptions,
    ) -> None:
        self._schedule = schedule
        self._store = store
        self._options = options

    def build(
        self,
        registered: Sequence[UpdateUnit[TensorT]],
        active: Sequence[UpdateUnit[TensorT]],
        update: Update[TensorT],
    ) -> StepPlan[TensorT, EventT]:
        """The plan for updating ``active``, views and events made."""
        for unit in active:
            unit.can_cut = update.can_cut(unit)
        partition = self.partition(registered)
        unit_batches = self._active_batches(partition, registered, active)
        try:
            if unit_batches:
                layout = self._schedule.lay_out(unit_batches, self._store, partition.in_flight)
            else:
                layout = Layout([], None, 0)
        except BaseException:
            for unit in active:
                unit.states.clear()  # views that would keep the buffers, with their bytes
            raise
        scratches = largest_needs([
            moment for units in unit_batches for moment in update.scratch(units)
        ])
        held = largest_needs(self._schedule.taken_while_updating(layout))
        reserves = dict.fromkeys(map(add, held, scratches))
        large = [
            (unit, unit.can_cut) for unit in active
            if sum(slot.storage_nbytes for slot in unit.slots) > partition.limit_nbytes
        ]
        return StepPlan(
            partition, layout, max(map(sum, scratches)), tuple(reserves),
            list(active), large, self._store.version, update.memory_key,
        )

    def partition(self, registered: Sequence[UpdateUnit[TensorT]]) -> Partition:
        """The batches of a step in which every unit has a gradient."""
        return partition_units(registered, type(self._schedule), self._options)

    def fits(
        self,
        plan: StepPlan[TensorT, EventT],
        active: Sequence[UpdateUnit[TensorT]],
        update: Update[TensorT],
    ) -> bool:
        """Whether ``plan`` is what :meth:`build` would make again."""
        return (
            plan.host_version == self._store.version
            and plan.memory_key == update.memory_key
            and plan.active == active
            and all(update.can_cut(unit) == could for unit, could in plan.large)
        )

    @staticmethod
    def _active_batches(
        partition: Partition,
        registered: Sequence[UpdateUnit[TensorT]],
        active: Sequence[UpdateUnit[TensorT]],
    ) -> list[list[UpdateUnit[TensorT]]]:
        """What of each batch is updated, where anything is."""
        is_active = set(map(id, active))
        piece_counts = Counter(piece.unit_index for batch in partition.batches for piece in batch)
        pieces_left = piece_counts.copy()
        batches = []
        for pieces in partition.batches:
            units = []
            for piece in pieces:
                unit = registered[piece.unit_index]
                if id(unit) in is_active:
                    pieces_left[piece.unit_index] -= 1
                    left, count = pieces_left[piece.unit_index], piece_counts[piece.unit_index]
                    units.append(_piece_of(unit, piece, left, count))
            if units:
                batches.append(units)
        return batches


def _piece_of(
    unit: UpdateUnit[TensorT], piece: Piece, pieces_left: int, piece_count: int
) -> UpdateUnit[TensorT]:
    if piece.numel == unit.numel:
        return unit
    return replace(
        unit, numel=piece.numel, start_numel=piece.start_numel, states={}, whole=unit,
        grad=unit.param,  # each step's gradient is the whole's: a piece must keep none alive
        pieces_left=pieces_left, piece_count=piece_count,
    )
