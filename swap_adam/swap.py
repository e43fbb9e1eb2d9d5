"""The machine that a swap optimizer owns: collect, plan, stream, finish; one step at a time."""
from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from swap_adam.config import SwapOptimizerConfig
from swap_adam.device import DeviceReport, DeviceSwap
from swap_adam.errors import add_note
from swap_adam.guard import StepGuard
from swap_adam.schedule import Schedule, StagingPolicy
from swap_adam.schedule.builder import PlanOptions
from swap_adam.slot import UpdateUnit
from swap_adam.update import Progress, Update, Updater

TensorT = TypeVar("TensorT")
EventT = TypeVar("EventT")


class Lifecycle(Protocol[TensorT]):
    """What a step asks of the optimizer, in this order. The machine is given it for each call,
    and keeps no reference: a cycle would hold device and pinned memory until the garbage
    collector runs."""

    def prepare_step(self) -> Update[TensorT]:
        """Refuse what cannot be honoured and read the step's hyperparameters, changing nothing."""

    def iter_update_units(self, update: Update[TensorT]) -> Iterable[UpdateUnit[TensorT]]:
        """One unit per parameter to update, in the original's order, slots registered."""

    def step_batch(self, update: Update[TensorT], units: Sequence[UpdateUnit[TensorT]]) -> None:
        """Update ``units``, once per batch."""

    def finish_step(self) -> None:
        """What the original does after its last parameter."""

    def is_state_held(self) -> bool:
        """Whether somebody holds what states are kept in, and so reads them without asking."""

    def describe_param(self, param_index: int) -> str:
        """How an error names a parameter."""


class Swap(Generic[TensorT, EventT]):
    """The state of swapping, all of it: configuration, devices, what is torn or may be held.

    It is one object, so that whatever shares it (a wrapper that copies attributes of the
    optimizer) shares all of it.
    """

    def __init__(
        self,
        config: SwapOptimizerConfig,
        schedule: type[Schedule[TensorT, EventT]],
        recovery: str,
        check_held: bool,
    ) -> None:
        self.config = config
        self.schedule = schedule
        # How users replace the states of parameters that a fault has left half updated.
        self.recovery = recovery
        self.devices: dict[Hashable, DeviceSwap[TensorT, EventT]] = {}
        self.guard = StepGuard()
        self.torn: set[int] = set()  # by param_index
        # Whether somebody may hold what the optimizer shows.
        self.check_held = check_held

    @property
    def plan_options(self) -> PlanOptions:
        """How the configuration shapes the batches."""
        config = self.config
        return PlanOptions(config.swap_times, config.split_tensors, config.staging_nbytes)

    @property
    def staging_policy(self) -> StagingPolicy:
        """What the configuration wants to become of the staging memory after a step."""
        if self.config.keep_staging:
            return StagingPolicy.KEEP
        return StagingPolicy.DRAIN if self.config.drain_in_step else StagingPolicy.RELEASE

    def run_step(self, optimizer: Lifecycle[TensorT]) -> None:
        """One optimizer step. Returns with the last copy-outs in flight."""
        self.check_not_torn("step()", optimizer.describe_param)
        update = optimizer.prepare_step()
        resident: dict[Hashable, list[UpdateUnit[TensorT]]] = {}
        swapped: dict[Hashable, list[UpdateUnit[TensorT]]] = {}
        for unit in optimizer.iter_update_units(update):
            if unit.slots:
                swapped.setdefault(unit.slots[0].device, []).append(unit)
            else:
                resident.setdefault(unit.device, []).append(unit)
        updater = Updater(partial(optimizer.step_batch, update), update.has_written)
        progress = updater.progress
        progress.count = sum(len(units) for part in (resident, swapped) for units in part.values())
        try:
            self._stream(optimizer, resident, swapped, update, updater)
        except BaseException as error:
            self.torn |= progress.torn
            add_note(error, self.explain(progress, optimizer.describe_param))
            raise
        optimizer.finish_step()

    def wait_landed(self) -> None:
        """Block the host until every swapped state is valid in host memory."""
        for device in self.devices.values():
            device.wait_landed()

    def prefetch(self) -> None:
        """Issue the first copy-ins of a step that looks like the last one."""
        if not self.check_held:
            for device in self.devices.values():
                device.prefetch()

    def report(self, describe_param: Callable[[int], str]) -> dict[str, DeviceReport]:
        """What is swapped, by device."""
        return {str(key): device.report(describe_param) for key, device in self.devices.items()}

    def check_not_torn(self, what: str, describe_param: Callable[[int], str]) -> None:
        """Refuse ``what`` while a fault has left parameters half updated.

        Raises:
            RuntimeError: naming the parameters and the way out.
        """
        if self.torn:
            names = ", ".join(describe_param(index) for index in sorted(self.torn))
            raise RuntimeError(
                f"{what} is refused: a fault during an earlier update left these parameters half "
                f"updated: {names}. Restore the model and call {self.recovery} with a checkpoint "
                "before going on."
            )

    def _stream(
        self,
        optimizer: Lifecycle[TensorT],
        resident: dict[Hashable, list[UpdateUnit[TensorT]]],
        swapped: dict[Hashable, list[UpdateUnit[TensorT]]],
        update: Update[TensorT],
        updater: Updater[TensorT],
    ) -> None:
        devices = [(self.devices[device], units) for device, units in swapped.items()]
        check_held = self.check_held
        # All of them: each must look, whatever the others find.
        held = [device.settle(units, update, check_held) for device, units in devices]
        if check_held:
            idle = [device for key, device in self.devices.items() if key not in swapped]
            held.extend([device.detach_held() for device in idle])
        is_state_held = check_held and optimizer.is_state_held()
        self.check_held = is_state_held or any(held)
        acquired: list[DeviceSwap[TensorT, EventT]] = []
        progress = updater.progress
        try:
            progress.is_acquiring = True
            for device, _ in devices:
                device.acquire()
                acquired.append(device)
            parts: list[Sequence[UpdateUnit[TensorT]]] = []
            for key, device in self.devices.items():
                mine = resident.pop(key, [])
                parts.extend(device.split_resident(mine, update, key in swapped))
            for units in resident.values():  # where nothing is swapped
                parts.extend(update.split_resident(units, None))
            progress.is_acquiring = False
            for device in acquired:
                device.fill()
            progress.advanced = update.advances
            update.begin()
            for part in parts:
                updater(part)  # hides behind the first copy-ins
            while acquired:
                acquired.pop(0).run(updater)
        finally:
            for device in acquired:
                device.cancel()
            if is_state_held:
                self.wait_landed()

    def explain(self, progress: Progress, describe_param: Callable[[int], str]) -> str:
        """What is true after a fault, and what to do."""
        if progress.torn:
            names = ", ".join(describe_param(index) for index in sorted(progress.torn))
            remedy = (
                f"Half updated, so unusable until {self.recovery} has replaced their states: "
                f"{names}. {AGAIN}"
            )
        elif progress.updated:
            remedy = AGAIN
        elif progress.advanced:
            remedy = "Calling step() again is not a retry: it would count this step twice."
        else:
            remedy = f"Nothing has changed{self._memory_remedy(progress)}, then call step() again."
        return (
            f"swap_adam: {len(progress.updated)} of {progress.count} parameters were updated "
            f"before this error. {remedy}"
        )

    def _memory_remedy(self, progress: Progress) -> str:
        plans = [device.plan for device in self.devices.values() if device.plan is not None]
        staging_nbytes = sum(plan.staging_nbytes for plan in plans)
        if not progress.is_acquiring or not staging_nbytes:
            return ": remove the cause"
        scratch_nbytes = max(plan.scratch_nbytes for plan in plans)
        swap_times = 2 * max(plan.partition.swap_times for plan in plans)
        return (
            f". The step needs {staging_nbytes} bytes of staging memory and {scratch_nbytes} for "
            "the temporaries of an update: free device memory, or convert the optimizer anew with "
            f"more and smaller batches (swap_times={swap_times} needs about half of it)"
        )


AGAIN = "Calling step() again is not a retry: it would update those twice."


def swap_of(optimizer: object) -> Swap[Any, Any]:
    """The machine of a swap optimizer: what there is to inspect.

    Raises:
        TypeError: ``optimizer`` is no swap optimizer.
    """
    swap = getattr(optimizer, "_swap", None)
    if not isinstance(swap, Swap):
        raise TypeError(f"not a swap optimizer: {type(optimizer).__qualname__}")
    return swap
