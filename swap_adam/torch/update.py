"""What the updates of torch's optimizers share: groups, argument lists, the scalars of a state."""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, cast

from torch import Tensor

from swap_adam.slot import UpdateUnit
from swap_adam.torch.state import (
    ParamState,
    TorchUnit,
    as_dtensor,
    can_cut,
    local,
    piece_of,
    shown_as,
)

ParamGroup = dict[str, Any]


class TorchUpdate(ABC):
    """One step of an optimizer of torch; implements :class:`swap_adam.update.Update`.

    ``scalars`` are the 0-dim states that the functional advances, and ``moments`` those that are
    like the parameter; where a group has ``amsgrad`` set, ``amsgrad_moments`` too.
    """

    scalars: ClassVar[tuple[str, ...]]
    moments: ClassVar[tuple[str, ...]]
    amsgrad_moments: ClassVar[tuple[str, ...]] = ()
    sparse_error: ClassVar[str]

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self._groups = groups

    @classmethod
    def moments_of(cls, group: ParamGroup) -> tuple[str, ...]:
        """The states of the group's parameters that may be swapped, in the original's order."""
        return cls.moments + (cls.amsgrad_moments if group.get("amsgrad") else ())

    @classmethod
    def states_of(cls, group: ParamGroup) -> tuple[str, ...]:
        """All states of the group's parameters."""
        return cls.scalars + cls.moments_of(group)

    @classmethod
    @abstractmethod
    def init_scalars(cls, group: ParamGroup, param: Tensor) -> ParamState:
        """What the original puts into a new state before the moments."""

    def read_group(self, group_index: int, group: ParamGroup, params: list[Tensor]) -> None:
        """Read what the step needs of a group, ``params`` being those with a gradient."""

    @property
    def memory_key(self) -> Hashable:
        return None

    def can_cut(self, unit: UpdateUnit[Tensor]) -> bool:
        assert isinstance(unit, TorchUnit)
        return can_cut(unit)

    @abstractmethod
    def scratch_nbytes(self, units: Sequence[UpdateUnit[Tensor]]) -> int:
        """See :class:`swap_adam.update.Update`."""

    def split_resident(
        self, units: Sequence[UpdateUnit[Tensor]], limit_nbytes: int | None
    ) -> Sequence[Sequence[UpdateUnit[Tensor]]]:
        return [units] if units else []

    def begin(self) -> None:
        """Nothing is advanced once per step: ``step`` belongs to the parameter."""

    def run(self, units: Sequence[UpdateUnit[Tensor]]) -> None:
        by_group: dict[int, list[TorchUnit]] = {}
        for unit in cast(Sequence[TorchUnit], units):
            by_group.setdefault(unit.group_index, []).append(unit)
        for group_index, members in by_group.items():
            self.update_group(group_index, members)

    @abstractmethod
    def update_group(self, group_index: int, units: Sequence[TorchUnit]) -> None:
        """One call of the original's functional over ``units`` of one group."""


def argument_lists(
    units: Sequence[TorchUnit], moments: Sequence[str]
) -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
    """Parameters, gradients and each of ``moments``: a functional's lists, one entry per unit."""
    params: list[Tensor] = []
    grads: list[Tensor] = []
    columns: list[tuple[str, list[Tensor]]] = [(name, []) for name in moments]
    for unit in units:
        whole = unit.whole
        is_distributed = as_dtensor(unit.param) is not None
        for _ in range(unit.repeats):
            params.append(unit.param if whole is None else piece_of(whole.param, unit))
            grads.append(unit.grad if whole is None else piece_of(whole.grad, unit))
            for name, column in columns:
                staged = unit.states.get(name)
                if staged is None or is_distributed:
                    staged = _in_form(unit, name, staged, is_distributed)
                column.append(staged)
    return params, grads, [column for _, column in columns]


def _in_form(unit: TorchUnit, name: str, staged: Tensor | None, is_distributed: bool) -> Tensor:
    """A state in the form that the parameter is passed in, resident where it is not ``staged``."""
    if is_distributed:
        value: Tensor = unit.param_state[name]
        return value if staged is None else shown_as(unit.owner, staged)
    if unit.whole is None:
        return local(unit.param_state[name])
    assert isinstance(unit.whole, TorchUnit)
    return piece_of(local(unit.whole.param_state[name]), unit)


def scalars_of(units: Sequence[TorchUnit], name: str) -> list[Tensor]:
    """The 0-dim states ``name`` of ``units``, which the functional advances.

    All pieces of a tensor start from the old value, so all but the last get a copy of it; what
    the last one makes of it is the new one.
    """
    scalars: list[Tensor] = []
    for unit in units:
        if unit.whole is None:
            scalars.extend([unit.param_state[name]] * unit.repeats)
            continue
        assert isinstance(unit.whole, TorchUnit)
        scalar = unit.whole.param_state[name]
        if unit.start_numel == 0:  # one kernel copies it for all pieces
            unit.whole.scalar_copies[name] = list(scalar.repeat(unit.pieces_left).unbind())
        copies = unit.whole.scalar_copies
        scalars.append(copies[name].pop() if unit.pieces_left else scalar)
    return scalars
