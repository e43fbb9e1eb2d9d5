"""Per tensor: every state is a transfer, in device memory of its own that comes and goes.

Before a batch is copied in, the host waits for the copy-out of the last batch but one: two batches
are held at most.
"""
from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

from swap_adam.alignment import DEVICE_ALIGNMENT_NBYTES, align
from swap_adam.backend import Backend, StreamRole
from swap_adam.host_store import HostStore
from swap_adam.schedule.partition import Partition, UnitSize, batch_cap_nbytes, fill_batches
from swap_adam.schedule.plan import Batch, Layout, StepPlan, make_batch, make_transfer
from swap_adam.schedule.schedule import Schedule, StagingPolicy
from swap_adam.schedule.staging import Run
from swap_adam.slot import UpdateUnit

TensorT = TypeVar("TensorT")
EventT = TypeVar("EventT")


class PerTensorSchedule(Schedule[TensorT, EventT]):
    """Batches of whole tensors, two of them held at most."""

    can_prefetch = False

    def __init__(self, backend: Backend[TensorT, EventT], policy: StagingPolicy) -> None:
        super().__init__(backend, policy)
        self._held: dict[int, TensorT] = {}  # by identity: tensors compare elementwise
        self._acquired = backend.make_event()

    @staticmethod
    def cut(units: Sequence[UnitSize], swap_times: int) -> Partition:
        cap = batch_cap_nbytes(units, swap_times)
        whole = [UnitSize(unit.numel, unit.nbytes_per_element, can_cut=False) for unit in units]
        return fill_batches(whole, swap_times, in_flight=2, limit_nbytes=cap)

    @staticmethod
    def shares_slab(batch: int, dtype: Hashable, slot_index: int) -> Hashable:
        return slot_index

    def lay_out(
        self,
        batches: Sequence[list[UpdateUnit[TensorT]]],
        store: HostStore[TensorT, EventT],
        in_flight: int,
    ) -> Layout[TensorT, EventT]:
        made = [self._lay_out_batch(units, store) for units in batches]
        nbytes = max(
            (sum(batch.nbytes for batch in made[i:i + in_flight]) for i in range(len(made))),
            default=0,
        )
        return Layout(made, None, nbytes)

    def acquire(self, plan: StepPlan[TensorT, EventT]) -> None:
        self.reserve(plan)

    def taken_while_updating(self, layout: Layout[TensorT, EventT]) -> list[list[int]]:
        blocks = [
            [align(nbytes, DEVICE_ALIGNMENT_NBYTES) for _, nbytes in batch.buffers]
            for batch in layout.batches
        ]
        return [one + other for one, other in zip(blocks, [*blocks[1:], []])]

    def fill(self, plan: StepPlan[TensorT, EventT], index: int, copied_in: int) -> int:
        batches = plan.batches
        if copied_in > index or index >= len(batches):
            return copied_in
        batch = batches[index]
        for buffer, nbytes in batch.buffers:
            self._held[id(buffer)] = buffer
            self.backend.acquire(buffer, nbytes)
        # The new memory may still be in use by what is on the compute stream.
        self.backend.record(self._acquired, StreamRole.COMPUTE)
        self.backend.wait(StreamRole.COPY_IN, self._acquired)
        self.copy_in(batch)
        return index + 1

    def retire(self, plan: StepPlan[TensorT, EventT], index: int) -> None:
        if index > 0:
            batch = plan.batches[index - 1]
            self.backend.synchronize(batch.copied_out)
            for buffer, _ in batch.buffers:
                self.backend.release(buffer, None)
                self._held.pop(id(buffer), None)

    def release(self, plan: StepPlan[TensorT, EventT], pending: StreamRole | None) -> None:
        while self._held:
            key, buffer = next(iter(self._held.items()))
            self.backend.release(buffer, pending)
            del self._held[key]

    def _lay_out_batch(
        self, units: list[UpdateUnit[TensorT]], store: HostStore[TensorT, EventT]
    ) -> Batch[TensorT, EventT]:
        buffers = []
        transfers = []
        for unit in units:
            for slot in unit.slots:
                buffer = self.backend.make_buffer(slot.storage_nbytes)
                buffers.append((buffer, slot.storage_nbytes))
                unit.states[slot.name] = self.backend.device_view(buffer, 0, slot, 0, slot.numel)
                run = Run(slot.slab_index, slot.host_offset_nbytes, 0, slot.storage_nbytes)
                transfers.append(make_transfer(self.backend, store, buffer, 0, run))
                self.backend.release(buffer, None)
        nbytes = sum(align(nbytes, DEVICE_ALIGNMENT_NBYTES) for _, nbytes in buffers)
        return make_batch(self.backend, units, transfers, nbytes, buffers=buffers)
