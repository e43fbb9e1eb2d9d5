"""Driving a schedule through a step, for one device: phases, events, faults, the last copies.

Batch ``i`` is copied in, updated and copied out on three streams; events order the three, and its
copy-in waits for whatever its schedule says had its device memory before.

[Note: running out of memory] Everything the step needs on the device is there before the first
update: out of memory strikes before anything has changed.

[Note: faults] A fault outside the update call rolls forward: parameters whose first piece has
been updated are finished, nothing new begins, and the exception goes on. A fault inside the
update call, or while rolling forward, leaves the parameters of that batch torn.
"""
from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Generic, TypeVar

from swap_adam.backend import Backend, StreamRole
from swap_adam.errors import add_note
from swap_adam.schedule.plan import Batch, StepPlan
from swap_adam.schedule.schedule import Schedule, StagingPolicy
from swap_adam.slot import Residency, UpdateUnit
from swap_adam.update import Updater

TensorT = TypeVar("TensorT")
EventT = TypeVar("EventT")


class Phase(Enum):
    """Where a device is in its step."""

    IDLE = "idle"  # no memory is held but what is kept, no copy is in flight
    ACQUIRED = "acquired"  # the memory of a step is held, nothing has been issued
    FILLING = "filling"  # the first copy-ins are issued
    RUNNING = "running"  # batches are updated
    DRAINING = "draining"  # the memory is given back in stream order, the last copies in flight


# Kept memory goes on from step to step, without a wait of the host between them.
_NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.IDLE: frozenset({Phase.ACQUIRED}),
    Phase.ACQUIRED: frozenset({Phase.FILLING, Phase.DRAINING}),
    Phase.FILLING: frozenset({Phase.RUNNING, Phase.DRAINING}),
    Phase.RUNNING: frozenset({Phase.DRAINING}),
    Phase.DRAINING: frozenset({Phase.IDLE, Phase.ACQUIRED}),
}


class Pipeline(Generic[TensorT, EventT]):
    """One device's steps, one at a time.

    Work is issued on the stream that is current when :meth:`run` is called and on the backend's
    two copy streams. When ``run`` returns, the current stream's later work sees the updated
    parameters without further waits; the host bytes of the states are valid after :meth:`wait`.
    """

    # On the class: __del__ also runs for an instance whose making was interrupted.
    phase = Phase.IDLE
    # Of the step whose memory is held or whose copies are in flight.
    _plan: StepPlan[TensorT, EventT] | None = None

    def __init__(
        self, backend: Backend[TensorT, EventT], schedule: Schedule[TensorT, EventT]
    ) -> None:
        self._backend = backend
        self._schedule = schedule
        self._copied_in = 0  # batches, before `run`
        self._started = backend.make_event()
        self._landed = backend.make_event()

    def acquire(self, plan: StepPlan[TensorT, EventT]) -> None:
        """Get the device memory that the step needs, or raise with none of it held.

        Where the host is a whole step ahead, the last step's memory is still in use. The host
        then waits for it, which costs the device nothing; else there would be twice as much.
        """
        if self.phase is Phase.FILLING and self._plan is plan:  # by `prefetch`
            try:  # others may have taken since then what the update needs
                self._schedule.reserve(plan)
            except BaseException:
                self.cancel()
                raise
            return
        if not (self.phase is Phase.DRAINING and self._schedule.keeps(plan)):
            self.wait()
        self._plan = plan
        self._enter(Phase.ACQUIRED)
        try:
            self._schedule.acquire(plan)
        except BaseException:
            self.cancel()
            raise

    def prefetch(self, plan: StepPlan[TensorT, EventT]) -> None:
        """Acquire the step's memory now and issue its first copy-ins.

        The next :meth:`run` of the same plan goes on from there; whatever else comes first, a
        reader of states or another plan, gives the memory back.
        """
        if self._is_open:
            return
        if not self._schedule.can_prefetch:
            raise ValueError(
                "prefetch() needs the packed pipeline (packed_swap=True): the per-tensor one has "
                "no staging memory to fill ahead"
            )
        self.acquire(plan)
        self.fill(plan)

    def fill(self, plan: StepPlan[TensorT, EventT]) -> None:
        """Issue the first copy-ins of ``plan``, whose memory has been acquired.

        Whatever is put on the compute stream before :meth:`run` hides behind them.
        """
        try:
            if self.phase is Phase.ACQUIRED:
                self._enter(Phase.FILLING)
                # They wait for what the compute stream still does with that memory, and for the
                # last copies of the step before, which use it too where it is kept.
                self._backend.record(self._started, StreamRole.COMPUTE)
                self._backend.wait(StreamRole.COPY_IN, self._started)
                self._backend.wait(StreamRole.COPY_IN, self._landed)
            self._copied_in = self._schedule.fill(plan, 0, self._copied_in)
        except BaseException:
            self.cancel()
            raise

    def run(self, plan: StepPlan[TensorT, EventT], update: Updater[TensorT]) -> None:
        """Update every batch of ``plan``, which is being filled."""
        copied_in, index = self._copied_in, 0
        try:
            self._enter(Phase.RUNNING)
            for index, batch in enumerate(plan.batches):
                copied_in = self._schedule.fill(plan, index, copied_in)
                self._update(batch, batch.units, update)
                self._schedule.copy_out(batch)
                self._schedule.retire(plan, index)
        except BaseException as error:
            self._roll_forward(plan, index, copied_in, update, error)
            self.cancel()
            raise
        self._close(plan, after_fault=False)

    def wait(self) -> None:
        """Block the host until nothing is in flight: states are valid in host memory, and device
        memory is free, but for what is kept. A step that is being filled is given up."""
        if self._is_open:
            assert self._plan is not None
            self._close(self._plan, after_fault=True)
        if self.phase is Phase.DRAINING:
            if not self._backend.is_complete(self._landed):
                self._backend.synchronize(self._landed)
            assert self._plan is not None
            for batch in self._plan.batches:
                batch.transit.move(Residency.HOST)
            self._enter(Phase.IDLE)
            self._plan = None

    def cancel(self) -> None:
        """Give the memory of :meth:`acquire` back without a wait.

        Never raises: where it fails, whoever needs the memory next does it again.
        """
        try:
            if self._is_open:
                assert self._plan is not None
                self._close(self._plan, after_fault=True)
        except BaseException:
            pass

    def dispose(self) -> None:
        """Wait, and give all memory back, what is kept included."""
        self.wait()
        self._schedule.dispose()

    def __del__(self) -> None:
        # Memory that is held beyond a step may not go before the copies that use it.
        self.cancel()

    @property
    def _is_open(self) -> bool:
        """Whether memory of a step may be held."""
        return self.phase not in (Phase.IDLE, Phase.DRAINING)

    def _enter(self, phase: Phase) -> None:
        assert phase in _NEXT[self.phase], f"{self.phase} cannot become {phase}"
        self.phase = phase

    def _close(self, plan: StepPlan[TensorT, EventT], after_fault: bool) -> None:
        """Give the step's memory back, to others once all that was issued has passed it."""
        if after_fault:
            # There may be copy-ins that nobody has waited for.
            self._backend.record(self._started, StreamRole.COPY_IN)
            self._backend.wait(StreamRole.COPY_OUT, self._started)
        if self._schedule.policy is StagingPolicy.DRAIN:
            self._backend.record(self._landed, StreamRole.COPY_OUT)
            self._backend.wait(StreamRole.COMPUTE, self._landed)
            self._schedule.release(plan, None)
        else:
            # Released first: the allocator's own mark is then no later than ours, and who has
            # waited for ours finds the memory free.
            self._schedule.release(plan, StreamRole.COPY_OUT)
            self._backend.record(self._landed, StreamRole.COPY_OUT)
        self._copied_in = 0
        self._enter(Phase.DRAINING)

    def _update(
        self,
        batch: Batch[TensorT, EventT],
        units: Sequence[UpdateUnit[TensorT]],
        update: Updater[TensorT],
    ) -> None:
        self._backend.wait(StreamRole.COMPUTE, batch.copied_in)
        batch.transit.move(Residency.DEVICE)
        with self._backend.span("swap_adam.update"):
            update(units)
        self._backend.record(batch.updated, StreamRole.COMPUTE)

    def _roll_forward(
        self,
        plan: StepPlan[TensorT, EventT],
        index: int,
        copied_in: int,
        update: Updater[TensorT],
        error: BaseException,
    ) -> None:
        """See [Note: faults]. Never raises: the first fault is the one to report, and a second
        one is noted on it."""
        if update.progress.torn or not plan.batches:
            return
        units = plan.batches[index].units
        try:
            if update.has_updated(units):
                # It may be partly copied out: doing it again is harmless.
                self._backend.record(plan.batches[index].updated, StreamRole.COMPUTE)
                self._schedule.copy_out(plan.batches[index])
                self._schedule.retire(plan, index)
                index += 1
            for index in range(index, len(plan.batches)):
                if not update.progress.begun:
                    break
                batch = plan.batches[index]
                units = [unit for unit in batch.units if unit.param_index in update.progress.begun]
                copied_in = self._schedule.fill(plan, index, copied_in)
                self._update(batch, units, update)
                self._schedule.copy_out(batch)
                self._schedule.retire(plan, index)
        except BaseException as second:
            update.tear(units)
            add_note(error, f"swap_adam: finishing what was begun failed too: {second!r}")
