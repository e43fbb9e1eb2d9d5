"""The step of a swap optimizer, whatever the framework: collect, plan, stream, finish."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from swap_adam.config import SwapOptimizerConfig
from swap_adam.device import DeviceReport, DeviceSwap
from swap_adam.pipeline import Progress, StagingPolicy, Updater
from swap_adam.plan import PlanOptions
from swap_adam.slot import UpdateUnit

TensorT = TypeVar("TensorT")
EventT = TypeVar("EventT")
ArgumentT = TypeVar("ArgumentT")
ResultT = TypeVar("ResultT")


class _PlainBase:
    """First among the mixin's bases: behind ``Generic`` the object layout of a swap class would
    differ from the original's, and assigning ``__class__`` would fail."""


class SwapPipelineMixin(_PlainBase, Generic[TensorT, EventT]):
    """What every swap optimizer composes with the optimizer it inherits from.

    A framework's half implements the lifecycle below; :meth:`run_swap_step` calls it in order:
    ``prepare_step``, ``iter_update_units``, ``begin_update``, then per batch ``step_batch``, then
    ``finish_step``.
    All its attributes start with ``_swap_`` and live on the instance, so that converting an
    optimizer by class swap is to set them, and converting it back to delete them.
    """

    # How users replace the states of parameters that a fault has left half updated.
    recovery = "load_state_dict()"

    swap_config: SwapOptimizerConfig
    _swap_devices: dict[Hashable, DeviceSwap[TensorT, EventT]]
    _swap_torn: set[int]
    _swap_check_held: bool

    def init_swap(self, config: SwapOptimizerConfig) -> None:
        """Set the attributes; called once, by the constructor or by the conversion."""
        self.swap_config = config
        self._swap_devices = {}
        self._swap_torn = set()
        self._swap_check_held = False

    def prepare_step(self) -> None:
        """Refuse what cannot be honoured and read the step's hyperparameters, changing nothing."""
        raise NotImplementedError

    def iter_update_units(self) -> Iterable[UpdateUnit[TensorT]]:
        """One unit per parameter to update, in the original's order, slots registered."""
        raise NotImplementedError

    def begin_update(self) -> None:
        """What the original advances once per step, now that all device memory is there."""

    def step_batch(self, units: Sequence[UpdateUnit[TensorT]]) -> None:
        """Update ``units`` with the original's own arithmetic, on the compute stream."""
        raise NotImplementedError

    def finish_step(self) -> None:
        """What the original does after its last parameter."""

    def scratch_sizes(self, units: Sequence[UpdateUnit[TensorT]]) -> Sequence[int]:
        """The temporaries that ``step_batch(units)`` has at a time, in bytes each: a block of the
        device's memory per entry, or a bound for all of them."""
        raise NotImplementedError

    def split_resident(
        self, units: Sequence[UpdateUnit[TensorT]], limit_nbytes: int | None
    ) -> Iterable[Sequence[UpdateUnit[TensorT]]]:
        """Parts of ``units``, of which nothing is swapped, whose temporaries are within a batch's
        (``None``: there is no batch), so that they are there."""
        return [units] if units else []

    def can_cut(self, unit: UpdateUnit[TensorT]) -> bool:
        """Whether pieces of ``unit``, in storage order, can be updated one by one."""
        return False

    def is_state_held(self) -> bool:
        """Whether somebody holds what states are kept in, and so reads them without asking."""
        return False

    def describe_param(self, param_index: int) -> str:
        """How an error names a parameter."""
        raise NotImplementedError

    def plan_options(self, default_packed: bool) -> PlanOptions:
        """How the configuration, and the class's default, shape the plan."""
        config = self.swap_config
        packed = default_packed if config.packed_swap is None else config.packed_swap
        return PlanOptions(
            config.swap_times, packed, config.split_tensors, config.staging_nbytes
        )

    def staging_policy(self) -> StagingPolicy:
        """What the configuration wants to become of the staging memory after a step."""
        if self.swap_config.keep_staging:
            return StagingPolicy.KEEP
        return StagingPolicy.DRAIN if self.swap_config.drain_in_step else StagingPolicy.RELEASE

    def swap_report(self) -> dict[str, DeviceReport]:
        """What is swapped, by device: bytes, batches, and the units that had to stay whole."""
        return {
            str(device): swap.report(self.describe_param)
            for device, swap in self._swap_devices.items()
        }

    def prefetch(self) -> None:
        """Start the first copy-ins of the next step now, for example while backward computes.

        Optional, and safe whatever follows: no step, another set of gradients, a checkpoint. The
        staging memory then exists from here on. Does nothing before the first step, and while
        somebody may write into states that were read since the last one.

        Raises:
            ValueError: the per-tensor pipeline, which has no staging area to fill.
            the framework's out-of-memory error: the staging memory is not there; nothing changed.
        """
        self.check_not_torn("prefetch()")
        if not self._swap_check_held:
            for device in self._swap_devices.values():
                device.prefetch()

    def run_swap_step(self) -> None:
        """One optimizer step. Returns with the last copy-outs in flight."""
        self.check_not_torn("step()")
        self.prepare_step()
        resident: list[UpdateUnit[TensorT]] = []
        swapped: dict[Hashable, list[UpdateUnit[TensorT]]] = {}
        for unit in self.iter_update_units():
            if unit.slots:
                swapped.setdefault(unit.slots[0].device, []).append(unit)
            else:
                resident.append(unit)
        update = Updater(self.step_batch)
        try:
            self._stream(resident, swapped, update)
        except BaseException as error:
            self._swap_torn |= update.progress.torn
            count = len(resident) + sum(len(units) for units in swapped.values())
            self._explain(error, update.progress, count)
            raise
        self.finish_step()

    def wait_landed(self) -> None:
        """Block the host until every swapped state is valid in host memory."""
        for device in self._swap_devices.values():
            device.wait_landed()

    def check_not_torn(self, what: str) -> None:
        """Refuse ``what`` while a fault has left parameters half updated.

        Raises:
            RuntimeError: naming the parameters and the way out.
        """
        if self._swap_torn:
            names = ", ".join(self.describe_param(index) for index in sorted(self._swap_torn))
            raise RuntimeError(
                f"{what} is refused: a fault during an earlier update left these parameters half "
                f"updated: {names}. Restore the model and call {self.recovery} with a checkpoint "
                "before going on."
            )

    def _stream(
        self,
        resident: Sequence[UpdateUnit[TensorT]],
        swapped: dict[Hashable, list[UpdateUnit[TensorT]]],
        update: Updater[TensorT],
    ) -> None:
        devices = [(self._swap_devices[device], units) for device, units in swapped.items()]
        check_held = self._swap_check_held
        # All of them: each must look, whatever the others find.
        held = [device.settle(units, check_held) for device, units in devices]
        if check_held:
            idle = [swap for key, swap in self._swap_devices.items() if key not in swapped]
            held.extend([swap.detach_held() for swap in idle])
        is_state_held = check_held and self.is_state_held()
        self._swap_check_held = is_state_held or any(held)
        acquired: list[DeviceSwap[TensorT, EventT]] = []
        try:
            for device, _ in devices:
                device.acquire()
                acquired.append(device)
            for device in acquired:
                device.begin()
            self.begin_update()
            plans = [device.plan for device, _ in devices if device.plan is not None]
            limit = max((plan.scratch_nbytes for plan in plans), default=None)
            for part in self.split_resident(resident, limit):
                update(part)  # hides behind the first copy-ins
            while acquired:
                acquired.pop(0).run(update)
        finally:
            for device in acquired:
                device.abandon()
            if is_state_held:
                self.wait_landed()

    def _explain(self, error: BaseException, progress: Progress, count: int) -> None:
        torn = ""
        if progress.torn:
            names = ", ".join(self.describe_param(index) for index in sorted(progress.torn))
            torn = (
                f" Half updated, so unusable until {self.recovery} has replaced their states: "
                f"{names}."
            )
        note = (
            f"swap_adam: {len(progress.updated)} of {count} parameters were updated before this "
            f"error.{torn} Calling step() again is not a retry: it would update those twice."
        )
        add_note(error, note)


def weakly(method: Callable[[ArgumentT], ResultT]) -> Callable[[ArgumentT], ResultT]:
    """A bound method for what its object owns: without a cycle of references, which would keep
    all device and pinned memory until the garbage collector runs."""
    reference = weakref.WeakMethod(method)

    def call(argument: ArgumentT) -> ResultT:
        bound = reference()
        assert bound is not None
        return bound(argument)

    return call


def add_note(error: BaseException, note: str) -> None:
    """Attach ``note`` to ``error``: as a note where Python has them, else to its message."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.args = (*error.args[:-1], f"{error.args[-1]}\n{note}") if error.args else (note,)
