"""Everything that swapping needs on one device: its slots, its plan and its pipeline."""
from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from swap_adam.backend import Backend
from swap_adam.host_store import HostStore, plan_power_of_two_slabs
from swap_adam.schedule.builder import PlanBuilder, PlanOptions
from swap_adam.schedule.pipeline import Pipeline
from swap_adam.schedule.plan import StepPlan
from swap_adam.schedule.schedule import Schedule, StagingPolicy
from swap_adam.slab_pool import SlabPool
from swap_adam.slabs import SlabPlan
from swap_adam.slot import Residency, SwapSlot, UpdateUnit
from swap_adam.temporaries import largest_needs
from swap_adam.update import Update, Updater

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


@dataclass(frozen=True)
class _Resident(Generic[TensorT]):
    """How a step cut the units of which nothing is swapped, kept while it looks the same."""

    units: Sequence[UpdateUnit[TensorT]]
    limit_nbytes: int
    memory_key: Hashable
    parts: Sequence[Sequence[UpdateUnit[TensorT]]]
    scratch_nbytes: int  # of the largest part
    reserves: tuple[tuple[int, ...], ...]


class DeviceSwap(Generic[TensorT, EventT]):
    """The registered units of one device and the machinery that updates them.

    ``units`` are kept in update order, by ``param_index``. A step calls :meth:`settle`,
    :meth:`acquire`, :meth:`fill` and :meth:`run`, in this order.
    """

    def __init__(
        self,
        backend: Backend[TensorT, EventT],
        schedule: type[Schedule[TensorT, EventT]],
        options: PlanOptions,
        publish: Callable[[SwapSlot[TensorT]], None],
        plan_host: Callable[[Sequence[SwapSlot[TensorT]]], SlabPlan] = plan_power_of_two_slabs,
        policy: StagingPolicy = StagingPolicy.RELEASE,
        pool: SlabPool[TensorT] | None = None,
    ) -> None:
        self.backend = backend
        self.store = HostStore(backend, publish, plan_host, pool)
        self.units: list[UpdateUnit[TensorT]] = []
        mine = schedule(backend, policy)
        self._builder = PlanBuilder(mine, self.store, options)
        self._plan: StepPlan[TensorT, EventT] | None = None
        self._pipeline = Pipeline(backend, mine)
        self._resident: _Resident[TensorT] | None = None

    @property
    def plan(self) -> StepPlan[TensorT, EventT] | None:
        """The plan of the last step."""
        return self._plan

    @property
    def scratch_nbytes(self) -> int:
        """What the last step made sure is there for the temporaries of an update."""
        batches = 0 if self._plan is None else self._plan.scratch_nbytes
        return max(batches, 0 if self._resident is None else self._resident.scratch_nbytes)

    def forget_plan(self) -> None:
        """Make a new plan for the next step: the update needs other temporaries from now on."""
        self._plan = self._resident = None

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
        self._resident = None
        self.store.release_dropped()
        if not self.units:
            self._pipeline.dispose()  # there may be no step here any more

    def add_slots(self, slots: Sequence[SwapSlot[TensorT]]) -> None:
        """Give pending slots zeroed pinned bytes, all or none."""
        if slots:
            self.store.add(slots)
            for slot in slots:
                slot.transit.move(Residency.HOST)

    def settle(
        self, active: Sequence[UpdateUnit[TensorT]], update: Update[TensorT], check_held: bool
    ) -> bool:
        """Make the plan for an ``update`` of ``active`` units fit, before anything is updated.

        With ``check_held``, :meth:`detach_held` comes first. Returns whether any was held.
        """
        is_held = check_held and self.detach_held()
        # Not while states come, or are moved for those who hold them: once things are quiet.
        if self._plan is not None and not is_held and self.store.may_move():
            self.wait_landed()
            self.store.move_to_shared()
        if self._plan is None or not self._builder.fits(self._plan, active, update):
            # The views of a new plan are made on memory that the last step may still have.
            self._pipeline.dispose()
            self._plan = None  # its views are bound anew: without the new plan it is no use
            with self.backend.span("swap_adam.plan"):
                self._plan = self._builder.build(self.units, active, update)
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
            with self.backend.span("swap_adam.acquire"):
                self._pipeline.acquire(self._plan)

    def split_resident(
        self, units: Sequence[UpdateUnit[TensorT]], update: Update[TensorT], is_stepped: bool
    ) -> Sequence[Sequence[UpdateUnit[TensorT]]]:
        """Parts of ``units``, of which nothing is swapped, whose temporaries are there from now on.

        ``is_stepped`` says whether :meth:`acquire` has been called for this step.
        """
        limit = self._plan.scratch_nbytes if is_stepped and self._plan is not None else 0
        found = self._resident
        if (
            found is None
            or (found.limit_nbytes, found.memory_key) != (limit, update.memory_key)
            or found.units != units
        ):
            parts = update.split_resident(units, limit)
            needs = largest_needs([moment for part in parts for moment in update.scratch(part)])
            found = _Resident(
                units, limit, update.memory_key, parts, max(map(sum, needs)),
                tuple(dict.fromkeys(needs)),
            )
            self._resident = found
        if found.scratch_nbytes > limit:
            for sizes_nbytes in found.reserves:
                self.backend.reserve(sizes_nbytes)
        return found.parts

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
            self.scratch_nbytes,
            tuple(describe_param(self.units[index].param_index) for index in partition.oversized),
        )

    def prefetch(self) -> None:
        """Issue the first copy-ins of a step that looks like the last one."""
        if self._plan is not None and self._plan.host_version == self.store.version:
            self._pipeline.prefetch(self._plan)

    def fill(self) -> None:
        """Issue the first copy-ins."""
        if self._plan is not None:
            self._pipeline.fill(self._plan)

    def cancel(self) -> None:
        """Give the memory of :meth:`acquire` back without a step."""
        self._pipeline.cancel()

    def run(self, update: Updater[TensorT]) -> None:
        """Update the active units; returns with the last copies still in flight."""
        if self._plan is not None:
            self._pipeline.run(self._plan, update)

    def wait_landed(self) -> None:
        """Block the host until the states of the last step are valid in host memory."""
        self._pipeline.wait()

    def _is_held(self, slot: SwapSlot[TensorT]) -> bool:
        return slot.cpu_tensor is not None and self.backend.is_held_elsewhere(slot)
