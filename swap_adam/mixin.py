"""What every swap optimizer composes with the optimizer it inherits from."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from swap_adam.config import SwapOptimizerConfig
from swap_adam.device import DeviceReport
from swap_adam.schedule import Schedule, schedule_type
from swap_adam.slot import UpdateUnit
from swap_adam.swap import Swap
from swap_adam.update import Update

TensorT = TypeVar("TensorT")
EventT = TypeVar("EventT")


class _PlainBase:
    """First among the mixin's bases: behind ``Generic`` the object layout of a swap class would
    differ from the original's, and assigning ``__class__`` would fail."""


class SwapPipelineMixin(_PlainBase, Generic[TensorT, EventT]):
    """Holds the machine, and forwards to it.

    What it adds to an instance is one attribute, ``_swap``: converting an optimizer by class swap
    is to set it, and converting it back to delete it.
    """

    # What packed_swap=None means.
    default_packed = True
    # How users replace the states of parameters that a fault has left half updated.
    recovery = "load_state_dict()"

    _swap: Swap[TensorT, EventT]

    @property
    def swap_config(self) -> SwapOptimizerConfig:
        """The configuration in force.

        Raises:
            AttributeError: when it is set; see the message.
        """
        return self._swap.config

    @swap_config.setter
    def swap_config(self, config: object) -> None:
        raise AttributeError(
            "swap_config cannot be set: the states are where it says. To change it between two "
            "steps: unswap_optimizer(optimizer), then swap_optimizer(optimizer, config)"
        )

    @classmethod
    def schedule_type(cls, config: SwapOptimizerConfig) -> type[Schedule[TensorT, EventT]]:
        """The schedule that the configuration, or the class's default, asks for."""
        packed = config.packed_swap
        return schedule_type(cls.default_packed if packed is None else packed)

    # A step, see :class:`swap_adam.swap.Lifecycle`.

    def prepare_step(self) -> Update[TensorT]:
        """Refuse what cannot be honoured and read the step's hyperparameters, changing nothing."""
        raise NotImplementedError

    def iter_update_units(self, update: Update[TensorT]) -> Iterable[UpdateUnit[TensorT]]:
        """One unit per parameter to update, in the original's order, slots registered."""
        raise NotImplementedError

    def step_batch(self, update: Update[TensorT], units: Sequence[UpdateUnit[TensorT]]) -> None:
        """Update ``units`` with the original's own arithmetic, on the compute stream."""
        update.run(units)

    def finish_step(self) -> None:
        """What the original does after its last parameter."""

    def is_state_held(self) -> bool:
        """Whether somebody holds what states are kept in, and so reads them without asking."""
        return False

    def describe_param(self, param_index: int) -> str:
        """How an error names a parameter."""
        raise NotImplementedError

    # What users may ask for

    def swap_report(self) -> dict[str, DeviceReport]:
        """What is swapped, by device: bytes, batches, and the units that had to stay whole."""
        with self._swap.guard.lock:
            self._swap.guard.check("swap_report()")
            return self._swap.report(self.describe_param)

    def prefetch(self) -> None:
        """Start the first copy-ins of the next step now, for example while backward computes.

        Optional, and safe whatever follows: no step, another set of gradients, a checkpoint. The
        staging memory then exists from here on. Does nothing before the first step, and while
        somebody may write into states that were read since the last one.

        Raises:
            ValueError: the per-tensor pipeline, which has no staging area to fill.
            the framework's out-of-memory error: the staging memory is not there; nothing changed.
        """
        with self._swap.guard.lock:
            self._swap.guard.check("prefetch()")
            self._swap.check_not_torn("prefetch()", self.describe_param)
            self._swap.prefetch()
