"""What the updates of torch's optimizers share: groups, argument lists, the scalars of a state."""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, ClassVar, cast

import torch
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

    # Hyperparameters of a group that enter the arithmetic.
    numbers: ClassVar[tuple[str, ...]]

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self._groups = groups
        self._versions: list[tuple[list[Tensor], list[int] | None]] = []
        self._odd_groups: set[int] = set()

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
        """Read what the step needs of a group, ``params`` being those with a gradient.

        Raises:
            KeyError, ValueError, TypeError: the original's, for what it could not compute with.
        """
        beta1, beta2 = group["betas"]
        values = [beta1, beta2, *(group[name] for name in self.numbers)]
        if params and not all(isinstance(value, (int, float, Tensor)) for value in values):
            self._odd_groups.add(group_index)

    def check(self, units: Sequence[TorchUnit], suspects: Iterable[TorchUnit]) -> None:
        """Have the original refuse now what it would refuse in the middle of the step.

        It is asked only where something looks odd: an option of a group, or a scalar of one of
        ``suspects``, whose states may have been changed. It is given parameters of one element and
        copies of the scalars; if it refuses, the scalars themselves, which it may advance first.
        """
        odd_groups = set(self._odd_groups)
        for unit in suspects:
            if unit.param_state and any(
                not isinstance(value, Tensor) or not value.is_floating_point()
                for value in map(unit.param_state.__getitem__, self.scalars)
            ):
                odd_groups.add(unit.group_index)
        for group_index in sorted(odd_groups):
            members = [
                unit for unit in units if unit.group_index == group_index and unit.param_state
            ]
            columns = [[unit.param_state[name] for unit in members] for name in self.scalars]
            try:
                self._try(group_index, members, [list(map(_copy_of, c)) for c in columns])
            except Exception:
                self._try(group_index, members, columns)
                raise

    def _try(
        self, group_index: int, members: Sequence[TorchUnit], scalars: Sequence[list[Any]]
    ) -> None:
        """The call for ``members``, on one element of each."""

        def ones() -> list[Tensor]:
            return [torch.zeros(1, dtype=u.param.dtype, device=u.device) for u in members]

        moments = [ones() for _ in self.moments_of(self._groups[group_index])]
        self.call(group_index, ones(), ones(), moments, scalars, scaled=False)

    @property
    def memory_key(self) -> Hashable:
        return None

    def can_cut(self, unit: UpdateUnit[Tensor]) -> bool:
        assert isinstance(unit, TorchUnit)
        return can_cut(unit)

    @abstractmethod
    def scratch(self, units: Sequence[UpdateUnit[Tensor]]) -> Sequence[Sequence[int]]:
        """See :class:`swap_adam.update.Update`."""

    def split_resident(
        self, units: Sequence[UpdateUnit[Tensor]], limit_nbytes: int | None
    ) -> Sequence[Sequence[UpdateUnit[Tensor]]]:
        return [units] if units else []

    # Whether something is advanced once per step.
    advances = False

    def begin(self) -> None:
        """Nothing is advanced once per step: ``step`` belongs to the parameter."""

    def has_written(self) -> bool:
        return any(
            before is None or _versions(tensors) != before for tensors, before in self._versions
        )

    def run(self, units: Sequence[UpdateUnit[Tensor]]) -> None:
        self._versions.clear()
        by_group: dict[int, list[TorchUnit]] = {}
        for unit in cast(Sequence[TorchUnit], units):
            by_group.setdefault(unit.group_index, []).append(unit)
        for group_index, members in by_group.items():
            self.update_group(group_index, members)

    def update_group(self, group_index: int, units: Sequence[TorchUnit]) -> None:
        """One call of the original's functional over ``units`` of one group."""
        params, grads, moments = argument_lists(units, self.moments_of(self._groups[group_index]))
        scalars = [scalars_of(units, name) for name in self.scalars]
        # Written first: while they have not been, nothing has.
        first = scalars[0] if scalars else []
        self._versions.append((first, _versions(first)))
        self.call(group_index, params, grads, moments, scalars, scaled=True)

    @abstractmethod
    def call(
        self,
        group_index: int,
        params: list[Tensor],
        grads: list[Tensor],
        moments: Sequence[list[Tensor]],
        scalars: Sequence[list[Any]],
        scaled: bool,
    ) -> None:
        """The original's functional with the group's options; ``moments`` and ``scalars`` in the
        order of their names, ``scaled`` with what GradScaler has left."""


def _copy_of(value: object) -> object:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _versions(tensors: list[Tensor]) -> list[int] | None:
    """How often each was written to; ``None`` where that cannot be told: fused kernels, and
    foreach on some devices, do not count."""
    try:
        versions = [tensor._version for tensor in tensors if tensor.is_cpu]
    except RuntimeError:  # an inference tensor
        return None
    return versions if versions and len(versions) == len(tensors) else None


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
        if unit.pieces_left:
            scalar = unit.whole.scalar_copies[name][unit.pieces_left - 1]
        else:
            unit.whole.scalar_copies.pop(name, None)  # device memory, where the scalar is there
        scalars.append(scalar)
    return scalars
