"""Everything that swapping needs on one device: its slots, its plan and its pipeline."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from swap_adam.backend import Backend
from swap_adam.host_store import HostStore, plan_power_of_two_slabs
from swap_adam.layout import SlabPlan
from swap_adam.pipeline import PackedPipeline, PerTensorPipeline, Pipeline, StagingPolicy, Updater
from swap_adam.plan import PlanBuilder, PlanOptions, StepPlan
from swap_adam.slot import Residency, SwapSlot, UpdateUnit

TensorT = TypeVar("TensorT")
EventT = TypeVar("EventT")


@dataclass(frozen=True)
class DeviceReport:
    """What is swapped on one device, in bytes, and in how many batches.

    ``swap_times`` is the number in force, also where it was chosen automatically. ``batch_nbytes``
    bounds a batch, but for the parameters in ``whole``: they are larger and cannot be cut.
    ``staging_nbytes`` is the most that a step holds for the states, and ``scratch_nbytes`` what it
    makes sure is there for the temporaries of an update; both are 0 before the first step.
    ``resident_nbytes`` are those of eligible states that stay on the device by choice, which
    ``resident`` names.
    """

    swapped_nbytes: int = 0
    pinned_nbytes: int = 0
    swap_times: int = 0
    batch_count: int = 0
    batch_nbytes: int = 0
    staging_nbytes: int = 0
    scratch_nbytes: int = 0
    whole: tuple[str, ...] = ()
    resident_nbytes: int = 0
    resident: tuple[str, ...] = ()


class DeviceSwap(Generic[TensorT, EventT]):
    """The registered units of one device and the machinery that updates them.

    ``units`` are kept in update order, by ``param_index``. A step calls :meth:`settle`,
    :meth:`acquire`, :meth:`begin` and :meth:`run`, in this order.
    """

    def __init__(
        self,
        backend: Backend[TensorT, EventT],
        options: PlanOptions,
        publish: Callable[[SwapSlot[TensorT]], None],
        scratch_sizes: Callable[[Sequence[UpdateUnit[TensorT]]], Sequence[int]],
        can_cut: Callable[[UpdateUnit[TensorT]], bool],
        plan_host: Callable[[Sequence[SwapSlot[TensorT]]], SlabPlan] = plan_power_of_two_slabs,
        policy: StagingPolicy = StagingPolicy.RELEASE,
    ) -> None:
        self.backend = backend
        self.store = HostStore(backend, publish, plan_host)
        self.units: list[UpdateUnit[TensorT]] = []
        self._builder = PlanBuilder(backend, self.store, options, scratch_sizes, can_cut)
        self._plan: StepPlan[TensorT, EventT] | None = None
        pipeline = PackedPipeline if options.packed else PerTensorPipeline
        self._pipeline: Pipeline[TensorT, EventT] = pipeline(backend, policy)

    @property
    def plan(self) -> StepPlan[TensorT, EventT] | None:
        """The plan of the last step."""
        return self._plan

    def forget_plan(self) -> None:
        """Make a new plan for the next step: the update needs other temporaries from now on."""
        self._plan = None

    def register(
        self, units: Sequence[UpdateUnit[TensorT]], gone: Sequence[UpdateUnit[TensorT]] = ()
    ) -> None:
        """Swap ``units`` from now on, and no longer ``gone`` but for slots that both have.

        Slots that are :attr:`Residency.PENDING` get zeroed pinned bytes, all or none.

        Raises:
            MemoryError: there is not that much pinned memory; nothing has changed.
        """
        self.wait_landed()
        self.add_slots([
            slot for unit in units for slot in unit.slots if slot.residency is Residency.PENDING
        ])
        kept = {id(slot) for unit in units for slot in unit.slots}
        dropped_slots = [s for unit in gone for s in unit.slots if id(s) not in kept]
        if dropped_slots:
            self.store.remove(dropped_slots)
        dropped = set(map(id, gone))
        self.units = [unit for unit in self.units if id(unit) not in dropped]
        self.units.extend(units)
        self.units.sort(key=lambda unit: unit.param_index)
        self._plan = None  # it holds slabs
        self.store.repack_if_wasteful()
        self.store.release_dropped()
        if not self.units:
            self._pipeline.let_go()  # there may be no step here any more

    def add_slots(self, slots: Sequence[SwapSlot[TensorT]]) -> None:
        """Give pending slots zeroed pinned bytes, all or none."""
        if slots:
            self.store.add(slots)
            for slot in slots:
                slot.transit.move(Residency.HOST)

    def settle(self, active: Sequence[UpdateUnit[TensorT]], check_held: bool) -> bool:
        """Make the plan for a step over ``active`` units fit, before anything is updated.

        With ``check_held``, :meth:`detach_held` comes first. Returns whether any was held.
        """
        is_held = check_held and self.detach_held()
        if self._plan is None or not self._builder.fits(self._plan, active):
            # The views of a new plan are made on memory that the last step may still have.
            self._pipeline.let_go()
            self._plan = None  # its views are bound anew: without the new plan it is no use
            self._plan = self._builder.build(self.units, active)
        self.store.release_dropped()
        return is_held

    def detach_held(self) -> bool:
        """Move states that somebody holds to fresh pinned bytes: what is held stays as it is.

        All of them, also those of units that are not updated now: a later step may not look.
        Returns whether any was held.
        """
        self.wait_landed()
        held = [slot for unit in self.units for slot in unit.slots if self._is_held(slot)]
        if held:
            self.store.replace(held)
        return bool(held)

    def acquire(self) -> None:
        """Get the device memory of the step, or raise with nothing changed."""
        if self._plan is not None:
            self._pipeline.acquire(self._plan)

    def report(self, describe_param: Callable[[int], str]) -> DeviceReport:
        """What is swapped here now; the batches are those of all registered units."""
        partition = self._builder.partition(self.units)
        plan = self._plan
        return DeviceReport(
            self.store.swapped_nbytes,
            self.store.pinned_nbytes,
            partition.swap_times,
            len(partition.batches),
            partition.limit_nbytes,
            plan.staging_nbytes if plan is not None else 0,
            plan.scratch_nbytes if plan is not None else 0,
            tuple(describe_param(self.units[index].param_index) for index in partition.oversized),
        )

    def prefetch(self) -> None:
        """Issue the first copy-ins of a step that looks like the last one."""
        if self._plan is not None and self._plan.host_version == self.store.version:
            self._pipeline.prefetch(self._plan)

    def begin(self) -> None:
        """Issue the first copy-ins."""
        if self._plan is not None:
            self._pipeline.begin(self._plan)

    def abandon(self) -> None:
        """Give the memory of :meth:`acquire` back without a step."""
        self._pipeline.abandon()

    def run(self, update: Updater[TensorT]) -> None:
        """Update the active units; returns with the last copies still in flight."""
        if self._plan is not None:
            self._pipeline.run(self._plan, update)

    def wait_landed(self) -> None:
        """Block the host until the states of the last step are valid in host memory."""
        self._pipeline.wait_landed()

    def _is_held(self, slot: SwapSlot[TensorT]) -> bool:
        return slot.cpu_tensor is not None and self.backend.is_held_elsewhere(slot)
