"""The transfers and views of one device's step, made once and kept while the step looks the same.

The batches depend on the registered units only; a unit without a gradient leaves a gap in its
batch, which splits the batch's transfer and moves nothing.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import Generic, Literal, TypeVar

from swap_adam.backend import Backend
from swap_adam.host_store import HostStore
from swap_adam.layout import (
    DEVICE_ALIGNMENT_NBYTES,
    Region,
    Run,
    Segment,
    align,
    largest_needs,
    lay_out_region,
    merge_runs,
    plan_ring,
)
from swap_adam.partition import (
    Partition,
    Piece,
    UnitSize,
    choose_swap_times,
    partition_packed,
    partition_per_tensor,
)
from swap_adam.slot import Residency, SwapSlot, Transit, UpdateUnit

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

    Packed, they lie in the plan's staging area, on bytes that batch ``reuses`` (-1: none) and
    those before it had. Per tensor, every state has one of ``buffers``, given with its bytes.
    """

    units: list[UpdateUnit[TensorT]]
    slots: list[SwapSlot[TensorT]]
    transfers: list[Transfer[TensorT]]
    buffers: list[tuple[TensorT, int]]
    nbytes: int
    reuses: int
    transit: Transit
    copied_in: EventT
    updated: EventT
    copied_out: EventT


@dataclass(eq=False)
class StepPlan(Generic[TensorT, EventT]):
    """The batches that have something to update, in order.

    ``staging`` is the staging area of the packed pipeline (``None`` per tensor), and
    ``staging_nbytes`` what the step holds on the device at most, alignment included, temporaries
    excluded; ``scratch_nbytes`` bounds the temporaries of the largest batch's update. If each of
    ``reserves``, a list of blocks, could be had, then the temporaries can be, and per tensor the
    memory of two batches: nothing that the step takes while it updates is missing. ``large``
    are the active units that are no batch of their own unless they are cut, and whether they are.
    """

    partition: Partition
    batches: list[Batch[TensorT, EventT]]
    staging: TensorT | None
    staging_nbytes: int
    scratch_nbytes: int
    reserves: tuple[tuple[int, ...], ...]
    active: list[UpdateUnit[TensorT]]
    large: list[tuple[UpdateUnit[TensorT], bool]]
    host_version: int


@dataclass(frozen=True)
class PlanOptions:
    """How a plan is made: the fields of the configuration that shape it, and the pipeline."""

    swap_times: int | Literal["auto"]
    packed: bool
    split_tensors: bool
    staging_nbytes: int | None = None


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
    swap_times = options.swap_times
    if swap_times == "auto":
        swapped_nbytes = sum(size.nbytes for size in sizes)
        swap_times = choose_swap_times(swapped_nbytes, options.staging_nbytes)
    return split(sizes, swap_times)


class PlanBuilder(Generic[TensorT, EventT]):
    """Makes the plan of a step from the registered units and those that have a gradient."""

    def __init__(
        self,
        backend: Backend[TensorT, EventT],
        store: HostStore[TensorT, EventT],
        options: PlanOptions,
        scratch_sizes: Callable[[Sequence[UpdateUnit[TensorT]]], Sequence[int]],
        can_cut: Callable[[UpdateUnit[TensorT]], bool],
    ) -> None:
        self._backend = backend
        self._can_cut = can_cut
        self._store = store
        self._options = options
        self._scratch_sizes = scratch_sizes

    def build(
        self,
        registered: Sequence[UpdateUnit[TensorT]],
        active: Sequence[UpdateUnit[TensorT]],
    ) -> StepPlan[TensorT, EventT]:
        for unit in active:
            unit.can_cut = self._can_cut(unit)
        partition = self.partition(registered)
        is_active = set(map(id, active))
        pieces_left = Counter(piece.unit_index for batch in partition.batches for piece in batch)
        unit_batches = [
            [
                self._unit_of(registered[piece.unit_index], piece, pieces_left)
                for piece in batch
                if id(registered[piece.unit_index]) in is_active
            ]
            for batch in partition.batches
        ]
        unit_batches = [units for units in unit_batches if units]
        staging: TensorT | None = None
        held: list[list[int]] = []
        try:
            if self._options.packed and unit_batches:
                in_flight = max(2, 2 * partition.cap_nbytes // partition.limit_nbytes)
                staging, nbytes, batches = self._packed(unit_batches, in_flight)
            else:
                batches = [self._per_tensor(units) for units in unit_batches]
                sizes = [batch.nbytes for batch in batches]
                nbytes = max((a + b for a, b in zip(sizes, [*sizes[1:], 0])), default=0)
                held = [
                    [align(size, DEVICE_ALIGNMENT_NBYTES) for _, size in batch.buffers]
                    for batch in batches
                ]
                held = [a + b for a, b in zip(held, [*held[1:], []])]
        except BaseException:
            for unit in active:
                unit.states.clear()  # views that would keep the buffers, with their bytes
            raise
        scratches = largest_needs([self._scratch_sizes(units) for units in unit_batches])
        reserves = dict.fromkeys(map(add, largest_needs(held), scratches))
        large = [
            (unit, unit.can_cut) for unit in active
            if sum(slot.storage_nbytes for slot in unit.slots) > partition.limit_nbytes
        ]
        return StepPlan(
            partition, batches, staging, nbytes, max(map(sum, scratches)), tuple(reserves),
            list(active), large, self._store.version,
        )

    def partition(self, registered: Sequence[UpdateUnit[TensorT]]) -> Partition:
        """The batches of a step in which every unit has a gradient."""
        return partition_units(registered, self._options)

    def fits(
        self, plan: StepPlan[TensorT, EventT], active: Sequence[UpdateUnit[TensorT]]
    ) -> bool:
        """Whether ``plan`` is what :meth:`build` would make again."""
        return (
            plan.host_version == self._store.version
            and plan.active == active
            and all(self._can_cut(unit) == could for unit, could in plan.large)
        )

    @staticmethod
    def _unit_of(
        unit: UpdateUnit[TensorT], piece: Piece, pieces_left: Counter[int]
    ) -> UpdateUnit[TensorT]:
        if piece.numel == unit.numel:
            return unit
        pieces_left[piece.unit_index] -= 1
        return replace(
            unit, numel=piece.numel, start_numel=piece.start_numel, states={}, whole=unit,
            grad=unit.param,  # each step's gradient is the whole's: a piece must keep none alive
            pieces_left=pieces_left[piece.unit_index],
        )

    def _packed(
        self, unit_batches: Sequence[list[UpdateUnit[TensorT]]], in_flight: int
    ) -> tuple[TensorT, int, list[Batch[TensorT, EventT]]]:
        segments = [self._segments(units) for units in unit_batches]
        regions = [lay_out_region(batch) for batch in segments]
        ring = plan_ring([region.nbytes for region in regions], in_flight)
        staging = self._backend.make_buffer(ring.nbytes)
        batches: list[Batch[TensorT, EventT]] = []
        for index, (units, region) in enumerate(zip(unit_batches, regions)):
            start = ring.offsets_nbytes[index]
            self._bind_views(units, staging, start, region)
            runs = merge_runs(segments[index], region)
            transfers = [self._transfer(staging, start, run) for run in runs]
            batches.append(self._batch(units, transfers, [], region.nbytes, ring.reuses[index]))
        self._backend.release(staging, None)
        return staging, ring.nbytes, batches

    def _per_tensor(self, units: list[UpdateUnit[TensorT]]) -> Batch[TensorT, EventT]:
        buffers = []
        transfers = []
        for unit in units:
            for slot in unit.slots:
                buffer = self._backend.make_buffer(slot.storage_nbytes)
                buffers.append((buffer, slot.storage_nbytes))
                unit.states[slot.name] = self._backend.device_view(buffer, 0, slot, 0, slot.numel)
                run = Run(slot.slab_index, slot.host_offset_nbytes, 0, slot.storage_nbytes)
                transfers.append(self._transfer(buffer, 0, run))
                self._backend.release(buffer, None)
        nbytes = sum(align(nbytes, DEVICE_ALIGNMENT_NBYTES) for _, nbytes in buffers)
        return self._batch(units, transfers, buffers, nbytes, reuses=-1)

    def _batch(
        self, units: list[UpdateUnit[TensorT]], transfers: list[Transfer[TensorT]],
        buffers: list[tuple[TensorT, int]], nbytes: int, reuses: int,
    ) -> Batch[TensorT, EventT]:
        make_event = self._backend.make_event
        slots = [slot for unit in units for slot in unit.slots]
        transit = Transit(Residency.HOST)
        for slot in slots:
            slot.transit = transit
        return Batch(
            units, slots, transfers, buffers, nbytes, reuses, transit,
            make_event(), make_event(), make_event(),
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
        self, units: Sequence[UpdateUnit[TensorT]], staging: TensorT, start: int, region: Region
    ) -> None:
        offsets = iter(region.device_offsets_nbytes)
        for unit in units:
            for slot in unit.slots:
                unit.states[slot.name] = self._backend.device_view(
                    staging, start + next(offsets), slot, unit.start_numel, unit.numel
                )

    def _transfer(self, buffer: TensorT, start: int, run: Run) -> Transfer[TensorT]:
        slab = self._store.slab(run.slab_index)
        return Transfer(
            self._backend.byte_view(buffer, start + run.device_offset_nbytes, run.nbytes),
            self._backend.byte_view(slab, run.host_offset_nbytes, run.nbytes),
        )
