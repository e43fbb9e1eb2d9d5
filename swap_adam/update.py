"""The arithmetic of one step as an object, what it has updated so far, and what a fault tore."""
from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from swap_adam.slot import UpdateUnit

TensorT = TypeVar("TensorT")


class Update(Protocol[TensorT]):
    """One step of one optimizer: what it read of the hyperparameters, and the calls it makes.

    Everything runs on the compute stream. An optimizer makes one per step, so that nothing the
    step depends on changes under it.
    """

    @property
    def memory_key(self) -> Hashable:
        """Equal for steps whose calls make the same temporaries and can be cut alike."""

    def can_cut(self, unit: UpdateUnit[TensorT]) -> bool:
        """Whether pieces of ``unit``, in storage order, can be updated one by one."""

    def scratch(self, units: Sequence[UpdateUnit[TensorT]]) -> Sequence[Sequence[int]]:
        """The temporaries that ``run(units)`` has at each moment that may be its worst: lists of
        blocks, in bytes."""

    def split_resident(
        self, units: Sequence[UpdateUnit[TensorT]], limit_nbytes: int | None
    ) -> Sequence[Sequence[UpdateUnit[TensorT]]]:
        """Parts of ``units``, of which nothing is swapped, whose temporaries are about those of a
        batch or of the largest unit (``None``: nothing is swapped on their device)."""

    @property
    def advances(self) -> bool:
        """Whether :meth:`begin` changes anything."""

    def begin(self) -> None:
        """What the original advances once per step, now that all device memory is there."""

    def run(self, units: Sequence[UpdateUnit[TensorT]]) -> None:
        """Update ``units`` with the original's own arithmetic."""

    def has_written(self) -> bool:
        """Whether the last :meth:`run`, which raised, may have changed anything."""


@dataclass
class Progress:
    """What a step has done, by ``param_index``: the basis of what its errors say."""

    updated: set[int] = field(default_factory=set)
    begun: set[int] = field(default_factory=set)  # some pieces are updated, not all
    torn: set[int] = field(default_factory=set)  # an update of theirs was interrupted
    count: int = 0  # of the parameters that the step was to update
    advanced: bool = False  # what belongs to no parameter has been advanced
    is_acquiring: bool = False  # device memory


class Updater(Generic[TensorT]):
    """Runs the update of batches and keeps the progress of the step."""

    def __init__(
        self,
        update: Callable[[Sequence[UpdateUnit[TensorT]]], None],
        has_written: Callable[[], bool],
    ) -> None:
        self._update = update
        self._has_written = has_written
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
            # What the update refuses before it writes has changed nothing.
            if self._has_written():
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
