"""The schedule of the RFC, to compare with: one copy stream, whole tensors, two staging areas."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from swap_adam.backend import StreamRole
from swap_adam.config import SwapOptimizerConfig
from swap_adam.schedule import PackedSchedule, PerTensorSchedule, Schedule
from swap_adam.schedule.partition import Partition, UnitSize
from swap_adam.schedule.plan import Batch
from swap_adam.slot import Residency
from swap_adam.torch import SwapAdamW

TensorT = TypeVar("TensorT")
EventT = TypeVar("EventT")


class SingleStreamSchedule(PackedSchedule[TensorT, EventT]):
    """Batches of whole tensors, and both directions of the link on one stream, so that they never
    work at once."""

    @staticmethod
    def cut(units: Sequence[UnitSize], swap_times: int) -> Partition:
        return PerTensorSchedule.cut(units, swap_times)

    def copy_out(self, batch: Batch[TensorT, EventT]) -> None:
        self.backend.wait(StreamRole.COPY_IN, batch.updated)
        batch.transit.move(Residency.D2H, batch.copied_out)
        self.backend.copy(StreamRole.COPY_IN, [(one.host, one.device) for one in batch.transfers])
        self.backend.record(batch.copied_out, StreamRole.COPY_IN)
        # Whoever waits for the other stream waits for the copies of this one.
        self.backend.wait(StreamRole.COPY_OUT, batch.copied_out)


class SingleStreamAdamW(SwapAdamW):
    """To be used with ``drain_in_step``, since the RFC's step waits for its last copy."""

    @classmethod
    def schedule_type(cls, config: SwapOptimizerConfig) -> type[Schedule[Any, Any]]:
        return SingleStreamSchedule
