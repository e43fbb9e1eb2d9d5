"""Packed: batches in one staging area, each one transfer per run of neighbours on the host.

The copy-in of batch ``i`` waits for the copy-out of what had its bytes before; the host never
waits within a step. Three batches are in the area at a time: with two, the copy-in of a batch
waits for a copy-in, an update and a copy-out of the same bytes, which is longer than the two copies
that hide it; with three the link never waits.
"""
from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

from swap_adam.backend import StreamRole
from swap_adam.host_store import HostStore
from swap_adam.schedule.partition import Partition, UnitSize, batch_cap_nbytes, fill_batches
from swap_adam.schedule.plan import Batch, Layout, StepPlan, make_batch, make_transfer
from swap_adam.schedule.schedule import Schedule, StagingPolicy
from swap_adam.schedule.staging import Region, Segment, lay_out_region, merge_runs, plan_ring
from swap_adam.slot import UpdateUnit

TensorT = TypeVar("TensorT")
EventT = TypeVar("EventT")


class PackedSchedule(Schedule[TensorT, EventT]):
    """Batches in one staging area, each where the bytes are free the earliest."""

    can_prefetch = True
    # On the class: __del__ also runs for an instance whose making was interrupted.
    _kept: TensorT | None = None

    @staticmethod
    def cut(units: Sequence[UnitSize], swap_times: int) -> Partition:
        cap = batch_cap_nbytes(units, swap_times)
        third = 2 * cap // 3
        smallest_limit = max(
            (unit.quantum_nbytes if unit.can_cut else unit.nbytes for unit in units), default=0
        )
        if smallest_limit <= third:
            return fill_batches(units, swap_times, in_flight=3, limit_nbytes=third)
        return fill_batches(units, swap_times, in_flight=2, limit_nbytes=cap)

    @staticmethod
    def shares_slab(batch: int, dtype: Hashable, slot_index: int) -> Hashable:
        return batch, dtype

    def lay_out(
        self,
        batches: Sequence[list[UpdateUnit[TensorT]]],
        store: HostStore[TensorT, EventT],
        in_flight: int,
    ) -> Layout[TensorT, EventT]:
        segments = [_segments(units) for units in batches]
        regions = [lay_out_region(batch) for batch in segments]
        ring = plan_ring([region.nbytes for region in regions], in_flight)
        staging = self.backend.make_buffer(ring.nbytes)
        made: list[Batch[TensorT, EventT]] = []
        for index, (units, region) in enumerate(zip(batches, regions)):
            start = ring.offsets_nbytes[index]
            self._bind_views(units, staging, start, region)
            transfers = [
                make_transfer(self.backend, store, staging, start, run)
                for run in merge_runs(segments[index], region)
            ]
            made.append(make_batch(
                self.backend, units, transfers, region.nbytes, reuses=ring.reuses[index]
            ))
        self.backend.release(staging, None)
        return Layout(made, staging, ring.nbytes)

    def acquire(self, plan: StepPlan[TensorT, EventT]) -> None:
        staging = plan.staging
        if staging is None:
            return
        if self._kept is not staging:
            self.backend.acquire(staging, plan.staging_nbytes)
            if self.policy is StagingPolicy.KEEP:
                self._kept = staging
        self.reserve(plan)

    def keeps(self, plan: StepPlan[TensorT, EventT]) -> bool:
        return self._kept is not None and self._kept is plan.staging

    def fill(self, plan: StepPlan[TensorT, EventT], index: int, copied_in: int) -> int:
        batches = plan.batches
        while copied_in < len(batches) and batches[copied_in].reuses < index:
            batch = batches[copied_in]
            if batch.reuses >= 0:
                self.backend.wait(StreamRole.COPY_IN, batches[batch.reuses].copied_out)
            self.copy_in(batch)
            copied_in += 1
        return copied_in

    def release(self, plan: StepPlan[TensorT, EventT], pending: StreamRole | None) -> None:
        staging = plan.staging
        if staging is not None and self._kept is not staging:
            self.backend.release(staging, pending)

    def dispose(self) -> None:
        if self._kept is not None:
            self.backend.release(self._kept, None)
            self._kept = None

    def __del__(self) -> None:
        # It may not go before the copies that still use it.
        if self._kept is not None:
            self.backend.release(self._kept, StreamRole.COPY_OUT)

    def _bind_views(
        self, units: Sequence[UpdateUnit[TensorT]], staging: TensorT, start: int, region: Region
    ) -> None:
        offsets = iter(region.device_offsets_nbytes)
        for unit in units:
            for slot in unit.slots:
                unit.states[slot.name] = self.backend.device_view(
                    staging, start + next(offsets), slot, unit.start_numel, unit.numel
                )


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
