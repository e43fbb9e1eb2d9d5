"""The transfers and views of one device's step, made once and kept while the step looks the same.

The batches depend on the registered units only; a unit without a gradient leaves a gap in its
batch, which splits the batch's transfer and moves nothing.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from swap_adam.backend import Backend
from swap_adam.host_store import HostStore
from swap_adam.layout import Region, Run, Segment, lay_out_region, merge_runs
from swap_adam.partition import (
    Partition,
    Piece,
    UnitSize,
    partition_packed,
    partition_per_tensor,
)
from swap_adam.slot import SwapSlot, UpdateUnit

TensorT = TypeVar("TensorT")
EventT = TypeVar("EventT")


@dataclass(eq=False)
class Transfer(Generic[TensorT]):
    """Byte views of the same run of bytes, on the device and on the host."""

    device: TensorT
    host: TensorT


@dataclass(eq=False)
class Batch(Generic[TensorT, EventT]):
    """What is on the device at the same time: units, where they lie, and their transfers.

    ``buffers`` are the device buffers with their bytes: one staging area shared with other
    batches (packed), or one buffer per state (per tensor).
    """

    units: list[UpdateUnit[TensorT]]
    slots: list[SwapSlot[TensorT]]
    transfers: list[Transfer[TensorT]]
    buffers: list[tuple[TensorT, int]]
    area_index: int
    nbytes: int
    copied_in: EventT
    updated: EventT
    copied_out: EventT


@dataclass(eq=False)
class StepPlan(Generic[TensorT, EventT]):
    """The batches that have something to update, in order.

    ``areas`` are the staging areas of the packed pipeline (empty per tensor); ``scratch_nbytes``
    bounds the temporaries of the largest batch's update.
    """

    partition: Partition
    batches: list[Batch[TensorT, EventT]]
    areas: list[tuple[TensorT, int]]
    scratch_nbytes: int
    registered: list[UpdateUnit[TensorT]] = field(default_factory=list)
    active: list[UpdateUnit[TensorT]] = field(default_factory=list)
    can_cut: list[bool] = field(default_factory=list)
    host_version: int = -1

    @property
    def staging_nbytes(self) -> int:
        """Device bytes that the step holds at most, alignment included, temporaries excluded."""
        if self.areas:
            return sum(nbytes for _, nbytes in self.areas)
        sizes = [batch.nbytes for batch in self.batches]
        return max((a + b for a, b in zip(sizes, [*sizes[1:], 0])), default=0)


@dataclass(frozen=True)
class PlanOptions:
    """How a plan is made: the two fields of the configuration that shape it, and the pipeline."""

    swap_times: int
    packed: bool
    split_tensors: bool


def partition_units(
    units: Sequence[UpdateUnit[TensorT]], options: PlanOptions
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
    split = partition_packed if options.packed else partition_per_tensor
    return split(sizes, options.swap_times)


class PlanBuilder(Generic[TensorT, EventT]):
    """Makes the plan of a step from the registered units and those that have a gradient."""

    def __init__(
        self,
        backend: Backend[TensorT, EventT],
        store: HostStore[TensorT, EventT],
        options: PlanOptions,
        scratch_nbytes: Callable[[Sequence[UpdateUnit[TensorT]]], int],
    ) -> None:
        self._backend = backend
        self._store = store
        self._options = options
        self._scratch_nbytes = scratch_nbytes

    def build(
        self,
        registered: Sequence[UpdateUnit[TensorT]],
        active: Sequence[UpdateUnit[TensorT]],
    ) -> StepPlan[TensorT, EventT]:
        partition = partition_units(registered, self._options)
        is_active = set(map(id, active))
        unit_batches = [
            [
                self._unit_of(registered[piece.unit_index], piece)
                for piece in batch
                if id(registered[piece.unit_index]) in is_active
            ]
            for batch in partition.batches
        ]
        unit_batches = [units for units in unit_batches if units]
        if self._options.packed:
            batches, areas = self._packed(unit_batches, partition.area_count)
        else:
            batches, areas = [self._per_tensor(units) for units in unit_batches], []
        scratch = max((self._scratch_nbytes(units) for units in unit_batches), default=0)
        return StepPlan(
            partition, batches, areas, scratch, list(registered), list(active),
            [unit.can_cut for unit in registered], self._store.version,
        )

    @staticmethod
    def _unit_of(unit: UpdateUnit[TensorT], piece: Piece) -> UpdateUnit[TensorT]:
        if piece.numel == unit.numel:
            return unit
        return replace(
            unit, numel=piece.numel, start_numel=piece.start_numel, is_cut=True,
            is_last_piece=piece.start_numel + piece.numel == unit.numel, states={}, whole=unit,
        )

    def _packed(
        self, unit_batches: Sequence[list[UpdateUnit[TensorT]]], area_count: int
    ) -> tuple[list[Batch[TensorT, EventT]], list[tuple[TensorT, int]]]:
        segments = [self._segments(units) for units in unit_batches]
        regions = [lay_out_region(batch) for batch in segments]
        areas = []
        for index in range(min(area_count, len(unit_batches))):
            nbytes = max(region.nbytes for region in regions[index::area_count])
            areas.append((self._backend.make_buffer(nbytes), nbytes))
        batches: list[Batch[TensorT, EventT]] = []
        for index, (units, region) in enumerate(zip(unit_batches, regions)):
            area, _ = areas[index % area_count]
            self._bind_views(units, area, region)
            transfers = [self._transfer(area, run) for run in merge_runs(segments[index], region)]
            batches.append(self._batch(units, transfers, [], index % area_count, region.nbytes))
        for area, _ in areas:
            self._backend.release(area, None)
        return batches, areas

    def _per_tensor(self, units: list[UpdateUnit[TensorT]]) -> Batch[TensorT, EventT]:
        buffers = []
        transfers = []
        for unit in units:
            for slot in unit.slots:
                buffer = self._backend.make_buffer(slot.storage_nbytes)
                buffers.append((buffer, slot.storage_nbytes))
                unit.states[slot.name] = self._backend.device_view(buffer, 0, slot, 0, slot.numel)
                run = Run(slot.slab_index, slot.host_offset_nbytes, 0, slot.storage_nbytes)
                transfers.append(self._transfer(buffer, run))
                self._backend.release(buffer, None)
        nbytes = sum(nbytes for _, nbytes in buffers)
        return self._batch(units, transfers, buffers, 0, nbytes)

    def _batch(
        self, units: list[UpdateUnit[TensorT]], transfers: list[Transfer[TensorT]],
        buffers: list[tuple[TensorT, int]], area_index: int, nbytes: int,
    ) -> Batch[TensorT, EventT]:
        make_event = self._backend.make_event
        return Batch(
            units, [slot for unit in units for slot in unit.slots], transfers, buffers,
            area_index, nbytes, make_event(), make_event(), make_event(),
        )

    @staticmethod
    def _segments(units: Sequence[UpdateUnit[TensorT]]) -> list[Segment]:
        return [
            Segment(
                slot.slab_index,
                slot.host_offset_nbytes + unit.start_numel * slot.itemsize,
                unit.numel * slot.itemsize,
            )
            for unit in units
            for slot in unit.slots
        ]

    def _bind_views(
        self, units: Sequence[UpdateUnit[TensorT]], area: TensorT, region: Region
    ) -> None:
        offsets = iter(region.device_offsets_nbytes)
        for unit in units:
            for slot in unit.slots:
                unit.states[slot.name] = self._backend.device_view(
                    area, next(offsets), slot, unit.start_numel, unit.numel
                )

    def _transfer(self, buffer: TensorT, run: Run) -> Transfer[TensorT]:
        slab = self._store.slab(run.slab_index)
        return Transfer(
            self._backend.byte_view(buffer, run.device_offset_nbytes, run.nbytes),
            self._backend.byte_view(slab, run.host_offset_nbytes, run.nbytes),
        )
