"""What a schedule is: how one device's batches are cut, laid out, moved and given back."""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from enum import Enum
from typing import ClassVar, Generic, TypeVar

from swap_adam.backend import Backend, StreamRole
from swap_adam.host_store import HostStore
from swap_adam.schedule.partition import Partition, UnitSize
from swap_adam.schedule.plan import Batch, Layout, StepPlan
from swap_adam.slot import Residency, UpdateUnit

TensorT = TypeVar("TensorT")
EventT = TypeVar("EventT")


class StagingPolicy(Enum):
    """What becomes of a step's device memory when it returns, its last copies in flight."""

    RELEASE = "release"  # given back to the allocator, which waits for the copies
    KEEP = "keep"  # kept for the next step, by a schedule with a staging area
    DRAIN = "drain"  # the compute stream waits for the copies, then it is free at once


class Schedule(ABC, Generic[TensorT, EventT]):
    """One device's way through a step; :class:`~swap_adam.schedule.pipeline.Pipeline` drives it.

    ``cut`` and ``shares_slab`` are pure and know no device, so that a forecast can ask them.
    ``lay_out`` makes views and events once per plan. The rest is called in every step.
    """

    # Whether there is memory to fill before the first update is near.
    can_prefetch: ClassVar[bool]

    def __init__(self, backend: Backend[TensorT, EventT], policy: StagingPolicy) -> None:
        self.backend = backend
        self.policy = policy

    @staticmethod
    @abstractmethod
    def cut(units: Sequence[UnitSize], swap_times: int) -> Partition:
        """The batches of a step in which every unit has a gradient."""

    @staticmethod
    @abstractmethod
    def shares_slab(batch: int, dtype: Hashable, slot_index: int) -> Hashable:
        """A key that is equal for what one transfer can move, where a transfer moves a slab."""

    @abstractmethod
    def lay_out(
        self,
        batches: Sequence[list[UpdateUnit[TensorT]]],
        store: HostStore[TensorT, EventT],
        in_flight: int,
    ) -> Layout[TensorT, EventT]:
        """Where the units of each batch lie on the device, their views bound to the units.

        Memory that is taken to make views on is given back before it returns.
        """

    @abstractmethod
    def acquire(self, plan: StepPlan[TensorT, EventT]) -> None:
        """Take the device memory that is held during the step, and see that the rest is there."""

    def taken_while_updating(self, layout: Layout[TensorT, EventT]) -> list[list[int]]:
        """What :meth:`acquire` does not hold, as lists of the blocks that are there at a time."""
        return []

    def reserve(self, plan: StepPlan[TensorT, EventT]) -> None:
        """See that what the step takes while it updates is there, or raise."""
        for sizes_nbytes in plan.reserves:
            self.backend.reserve(sizes_nbytes)

    def keeps(self, plan: StepPlan[TensorT, EventT]) -> bool:
        """Whether the memory of ``plan`` is still there from the step before."""
        return False

    @abstractmethod
    def fill(self, plan: StepPlan[TensorT, EventT], index: int, copied_in: int) -> int:
        """Issue the copy-ins that may be under way while batch ``index`` is updated.

        Returns how many batches have been copied in, which were ``copied_in``.
        """

    def retire(self, plan: StepPlan[TensorT, EventT], index: int) -> None:
        """The copy-out of batch ``index`` has been issued. A roll-forward may say so twice."""

    @abstractmethod
    def release(self, plan: StepPlan[TensorT, EventT], pending: StreamRole | None) -> None:
        """Give all device memory of the step back, to others once ``pending`` has passed it."""

    def dispose(self) -> None:
        """Give back also what is kept between steps, which nothing uses any more."""

    def copy_in(self, batch: Batch[TensorT, EventT]) -> None:
        """Issue the copy-ins of ``batch``, whose device memory nobody uses any more."""
        batch.transit.move(Residency.H2D, batch.copied_in)
        with self.backend.span("swap_adam.copy_in"):
            self.backend.copy(
                StreamRole.COPY_IN, [(one.device, one.host) for one in batch.transfers]
            )
        self.backend.record(batch.copied_in, StreamRole.COPY_IN)

    def copy_out(self, batch: Batch[TensorT, EventT]) -> None:
        """Issue the copy-outs of ``batch``, behind its update."""
        self.backend.wait(StreamRole.COPY_OUT, batch.updated)
        batch.transit.move(Residency.D2H, batch.copied_out)
        with self.backend.span("swap_adam.copy_out"):
            self.backend.copy(
                StreamRole.COPY_OUT, [(one.host, one.device) for one in batch.transfers]
            )
        self.backend.record(batch.copied_out, StreamRole.COPY_OUT)
