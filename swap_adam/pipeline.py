"""The two schedules: packed and per tensor, each on two copy streams, for one device.

Batch ``i`` is copied in, updated and copied out on three streams; events order the three, and:

- packed: the copy-in of batch ``i`` waits for the copy-out of what had its bytes before.
  The host never waits within a step.
- per tensor: device memory comes and goes with a batch, so before a batch is copied in the host
  waits for the copy-out of the last batch but one: two batches are held at most.

[Note: running out of memory] Everything the step needs on the device is there before the first
update: out of memory strikes before anything has changed.

[Note: faults] A fault outside the update call rolls forward: parameters whose first piece has
been updated are finished, nothing new begins, and the exception goes on. A fault inside the
update call, or while rolling forward, leaves the parameters of that batch torn.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from swap_adam.backend import Backend, StreamRole
from swap_adam.plan import Batch, StepPlan
from swap_adam.slot import Residency, UpdateUnit

TensorT = TypeVar("TensorT")
EventT = TypeVar("EventT")


class StagingPolicy(Enum):
    """What becomes of a step's device memory when ``run`` returns, its last copies in flight."""

    RELEASE = "release"  # given back to the allocator, which waits for the copies
    KEEP = "keep"  # kept for the next step (packed)
    DRAIN = "drain"  # the compute stream waits for the copies, then it is free at once


@dataclass
class Progress:
    """What a step has done, by ``param_index``: the basis of what its errors say."""

    updated: set[int] = field(default_factory=set)
    begun: set[int] = field(default_factory=set)  # some pieces are updated, not all
    torn: set[int] = field(default_factory=set)  # an update of theirs was interrupted


class Updater(Generic[TensorT]):
    """Calls the optimizer's update on units and keeps the progress of the step."""

    def __init__(self, update: Callable[[Sequence[UpdateUnit[TensorT]]], None]) -> None:
        self._update = update
        self._last: Sequence[UpdateUnit[TensorT]] | None = None
        self.progress = Progress()

    def __call__(self, units: Sequence[UpdateUnit[TensorT]]) -> None:
        progress = self.progress
        try:
            self._update(units)
            for unit in units:
                if unit.pieces_left:
                    progress.begun.add(unit.param_index)
                else:
                    progress.begun.discard(unit.param_index)
                    progress.updated.add(unit.param_index)
            self._last = units
        except BaseException:
            self.tear(units)
            raise

    def has_updated(self, units: Sequence[UpdateUnit[TensorT]]) -> bool:
        """Whether ``units`` were the last ones updated."""
        return self._last is units

    def tear(self, units: Sequence[UpdateUnit[TensorT]]) -> None:
        """The parameters of ``units``, and those with pieces still to come, are half updated."""
        torn = self.progress.torn
        torn.update(unit.param_index for unit in units)
        torn |= self.progress.begun
        self.progress.updated -= torn


class Pipeline(Generic[TensorT, EventT]):
    """What both schedules share: the order of one batch, faults, and the wait for the last copy.

    Work is issued on the stream that is current when ``run`` is called and on the backend's two
    copy streams. When ``run`` returns, the current stream's later work sees the updated
    parameters without further waits; the host bytes of the states are valid after
    :meth:`wait_landed`.
    """

    # Whose memory may be held, from `acquire` until all of it has been given back. On the class:
    # __del__ also runs for an instance whose making was interrupted.
    _open: StepPlan[TensorT, EventT] | None = None

    def __init__(self, backend: Backend[TensorT, EventT], policy: StagingPolicy) -> None:
        self._backend = backend
        self._policy = policy
        self._in_flight: Sequence[Batch[TensorT, EventT]] = ()
        self._copied_in = 0  # batches, before `run`
        self._started = backend.make_event()
        self._landed = backend.make_event()

    def acquire(self, plan: StepPlan[TensorT, EventT]) -> None:
        """Get the device memory that the step needs, or raise with none of it held.

        Where the host is a whole step ahead, the last step's memory is still in use. The host
        then waits for it, which costs the device nothing; else there would be twice as much.
        """
        is_prefetched = self._copied_in > 0 and self._open is plan
        if not is_prefetched and not self._keeps(plan):
            self.wait_released()
        self._open = plan
        try:
            if is_prefetched:  # since when others may have taken what the update needs
                self._reserve(plan)
            else:
                self._acquire(plan)
        except BaseException:
            self._close_after_fault()
            raise

    def prefetch(self, plan: StepPlan[TensorT, EventT]) -> None:
        """Acquire the step's memory now and issue its first copy-ins.

        The next :meth:`run` of the same plan goes on from there; whatever else comes first, a
        reader of states or another plan, gives the memory back.
        """
        if self._open is not None:
            return
        if plan.staging is None:
            raise ValueError(
                "prefetch() needs the packed pipeline (packed_swap=True): the per-tensor one has "
                "no staging memory to fill ahead"
            )
        self.acquire(plan)
        self.begin(plan)

    def begin(self, plan: StepPlan[TensorT, EventT]) -> None:
        """Issue the first copy-ins of ``plan``, whose memory has been acquired.

        Whatever is put on the compute stream before :meth:`run` hides behind them.
        """
        try:
            if not self._copied_in:
                self._in_flight = plan.batches
                self._start()
            self._copied_in = self._fill(plan, 0, self._copied_in)
        except BaseException:
            self._close_after_fault()
            raise

    def wait_released(self) -> None:
        """Block the host until the last step's device memory is free, which it mostly is."""
        if self._open is not None:
            self._close(self._open, after_fault=True)
        if not self._backend.is_complete(self._landed):
            self._backend.synchronize(self._landed)
        self._rest()

    def wait_landed(self) -> None:
        """Block the host until the last step's copies are in host memory."""
        if self._in_flight or self._open is not None:
            self.wait_released()

    def run(self, plan: StepPlan[TensorT, EventT], update: Updater[TensorT]) -> None:
        """Update every batch of ``plan``, which has begun."""
        copied_in, self._copied_in = self._copied_in, 0
        index = 0
        try:
            for index, batch in enumerate(plan.batches):
                copied_in = self._fill(plan, index, copied_in)
                self._update(batch, batch.units, update)
                self._copy_out(batch)
                self._settle(plan, index)
        except BaseException:
            self._roll_forward(plan, index, copied_in, update)
            self._close_after_fault()
            raise
        self._close(plan, after_fault=False)

    def abandon(self) -> None:
        """Give the memory of :meth:`acquire` back without having run."""
        self._close_after_fault()

    def __del__(self) -> None:
        # Memory that is held beyond a step may not go before the copies that use it.
        self._close_after_fault()

    def _close(self, plan: StepPlan[TensorT, EventT], after_fault: bool) -> None:
        """Give the step's memory back, to others once all that was issued has passed it.

        What fails here is done again by whoever needs it next: the next step, or a reader.
        """
        if after_fault:
            # There may be copy-ins that nobody has waited for.
            self._backend.record(self._started, StreamRole.COPY_IN)
            self._backend.wait(StreamRole.COPY_OUT, self._started)
        if self._policy is StagingPolicy.DRAIN:
            self._backend.record(self._landed, StreamRole.COPY_OUT)
            self._backend.wait(StreamRole.COMPUTE, self._landed)
            self._release(plan, None)
        else:
            # In this order: the memory is there again once `landed` has passed.
            self._release(plan, StreamRole.COPY_OUT)
            self._backend.record(self._landed, StreamRole.COPY_OUT)
        self._open = None
        self._copied_in = 0

    def _start(self) -> None:
        """Copy-ins wait for what the compute stream still does with the staging memory, and for
        the last copies of the step before, which use the same memory where it is kept."""
        self._backend.record(self._started, StreamRole.COMPUTE)
        self._backend.wait(StreamRole.COPY_IN, self._started)
        self._backend.wait(StreamRole.COPY_IN, self._landed)

    def _keeps(self, plan: StepPlan[TensorT, EventT]) -> bool:
        """Whether the memory of ``plan`` is still there from the step before."""
        return False

    def let_go(self) -> None:
        """Wait for the last step and give all memory back, what is kept included."""
        self.wait_released()

    def _close_after_fault(self) -> None:
        """Never raises: the first fault is the one to report."""
        try:
            if self._open is not None:
                self._close(self._open, after_fault=True)
        except BaseException:
            pass  # it stays open

    def _rest(self) -> None:
        for batch in self._in_flight:
            batch.transit.move(Residency.HOST)
        self._in_flight = ()

    def _acquire(self, plan: StepPlan[TensorT, EventT]) -> None:
        raise NotImplementedError

    def _reserve(self, plan: StepPlan[TensorT, EventT]) -> None:
        for sizes_nbytes in plan.reserves:
            self._backend.reserve(sizes_nbytes)

    def _fill(self, plan: StepPlan[TensorT, EventT], index: int, copied_in: int) -> int:
        """Issue the copy-ins that may be under way while batch ``index`` is updated.

        Returns how many batches have been copied in.
        """
        raise NotImplementedError

    def _settle(self, plan: StepPlan[TensorT, EventT], index: int) -> None:
        """Called when the copy-out of batch ``index`` has been issued."""

    def _release(self, plan: StepPlan[TensorT, EventT], pending: StreamRole | None) -> None:
        """Give all device memory back, to others once ``pending`` has passed it."""
        raise NotImplementedError

    def _copy_in(self, batch: Batch[TensorT, EventT]) -> None:
        batch.transit.move(Residency.H2D, batch.copied_in)
        self._backend.copy(
            StreamRole.COPY_IN, [(transfer.device, transfer.host) for transfer in batch.transfers]
        )
        self._backend.record(batch.copied_in, StreamRole.COPY_IN)

    def _update(
        self,
        batch: Batch[TensorT, EventT],
        units: Sequence[UpdateUnit[TensorT]],
        update: Updater[TensorT],
    ) -> None:
        self._backend.wait(StreamRole.COMPUTE, batch.copied_in)
        batch.transit.move(Residency.DEVICE)
        update(units)
        self._backend.record(batch.updated, StreamRole.COMPUTE)

    def _copy_out(self, batch: Batch[TensorT, EventT]) -> None:
        self._backend.wait(StreamRole.COPY_OUT, batch.updated)
        batch.transit.move(Residency.D2H, batch.copied_out)
        self._backend.copy(
            StreamRole.COPY_OUT, [(transfer.host, transfer.device) for transfer in batch.transfers]
        )
        self._backend.record(batch.copied_out, StreamRole.COPY_OUT)

    def _roll_forward(
        self,
        plan: StepPlan[TensorT, EventT],
        index: int,
        copied_in: int,
        update: Updater[TensorT],
    ) -> None:
        """See [Note: faults]. Never raises: the first fault is the one to report."""
        if update.progress.torn or not plan.batches:
            return
        units = plan.batches[index].units
        try:
            if update.has_updated(units):
                # It may be partly copied out: doing it again is harmless.
                self._backend.record(plan.batches[index].updated, StreamRole.COMPUTE)
                self._copy_out(plan.batches[index])
                self._settle(plan, index)
                index += 1
            for index in range(index, len(plan.batches)):
                if not update.progress.begun:
                    break
                batch = plan.batches[index]
                units = [unit for unit in batch.units if unit.param_index in update.progress.begun]
                copied_in = self._fill(plan, index, copied_in)
                self._update(batch, units, update)
                self._copy_out(batch)
                self._settle(plan, index)
        except BaseException:
            update.tear(units)


class PackedPipeline(Pipeline[TensorT, EventT]):
    """Batches in one staging area, each where the bytes are free the earliest."""

    _kept: TensorT | None = None

    def _keeps(self, plan: StepPlan[TensorT, EventT]) -> bool:
        return self._open is None and self._kept is not None and self._kept is plan.staging

    def let_go(self) -> None:
        super().let_go()
        if self._kept is not None:
            self._backend.release(self._kept, None)
            self._kept = None

    def __del__(self) -> None:
        super().__del__()
        if self._kept is not None:
            self._backend.release(self._kept, StreamRole.COPY_OUT)

    def _acquire(self, plan: StepPlan[TensorT, EventT]) -> None:
        if plan.staging is None:
            return
        if self._kept is not plan.staging:
            self._backend.acquire(plan.staging, plan.staging_nbytes)
            if self._policy is StagingPolicy.KEEP:
                self._kept = plan.staging
        self._reserve(plan)

    def _fill(self, plan: StepPlan[TensorT, EventT], index: int, copied_in: int) -> int:
        batches = plan.batches
        while copied_in < len(batches) and batches[copied_in].reuses < index:
            batch = batches[copied_in]
            if batch.reuses >= 0:
                self._backend.wait(StreamRole.COPY_IN, batches[batch.reuses].copied_out)
            self._copy_in(batch)
            copied_in += 1
        return copied_in

    def _release(self, plan: StepPlan[TensorT, EventT], pending: StreamRole | None) -> None:
        if plan.staging is not None and self._kept is not plan.staging:
            self._backend.release(plan.staging, pending)


class PerTensorPipeline(Pipeline[TensorT, EventT]):
    """Every state in device memory of its own, which comes and goes with its batch."""

    def __init__(self, backend: Backend[TensorT, EventT], policy: StagingPolicy) -> None:
        super().__init__(backend, policy)
        self._held: dict[int, TensorT] = {}  # by identity: tensors compare elementwise

    def _acquire(self, plan: StepPlan[TensorT, EventT]) -> None:
        self._reserve(plan)

    def _fill(self, plan: StepPlan[TensorT, EventT], index: int, copied_in: int) -> int:
        if copied_in > index or index >= len(plan.batches):
            return copied_in
        batch = plan.batches[index]
        for buffer, nbytes in batch.buffers:
            self._held[id(buffer)] = buffer
            self._backend.acquire(buffer, nbytes)
        # The new memory may still be in use by what is on the compute stream.
        self._backend.record(self._started, StreamRole.COMPUTE)
        self._backend.wait(StreamRole.COPY_IN, self._started)
        self._copy_in(batch)
        return index + 1

    def _settle(self, plan: StepPlan[TensorT, EventT], index: int) -> None:
        if index > 0:
            self._backend.synchronize(plan.batches[index - 1].copied_out)
            for buffer, _ in plan.batches[index - 1].buffers:
                self._backend.release(buffer, None)
                self._held.pop(id(buffer), None)  # a roll-forward may come here again

    def _release(self, plan: StepPlan[TensorT, EventT], pending: StreamRole | None) -> None:
        while self._held:
            key, buffer = next(iter(self._held.items()))
            self._backend.release(buffer, pending)
            del self._held[key]
