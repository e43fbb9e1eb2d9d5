"""What a step has updated so far, and what is torn after a fault."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from swap_adam.slot import UpdateUnit

TensorT = TypeVar("TensorT")


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
