"""From update units to the argument lists of a functional."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from swap_adam.torch.state import TorchUnit, as_dtensor, local, piece_of, shown_as


@dataclass(frozen=True)
class UpdateLists:
    """The arguments of torch's functional, one entry per unit."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    max_exp_avg_sqs: list[Tensor]

    @classmethod
    def of(cls, units: Sequence[TorchUnit], amsgrad: bool) -> UpdateLists:
        lists = cls([], [], [], [], [])
        for unit in units:
            for _ in range(unit.repeats):
                lists._append(unit, amsgrad)
        return lists

    def _append(self, unit: TorchUnit, amsgrad: bool) -> None:
        if unit.whole is None:
            self.params.append(unit.param)
            self.grads.append(unit.grad)
        else:
            self.params.append(piece_of(unit.whole.param, unit))
            self.grads.append(piece_of(unit.whole.grad, unit))
        self.exp_avgs.append(_state(unit, "exp_avg"))
        self.exp_avg_sqs.append(_state(unit, "exp_avg_sq"))
        if amsgrad:
            self.max_exp_avg_sqs.append(_state(unit, "max_exp_avg_sq"))


def _state(unit: TorchUnit, name: str) -> Tensor:
    """A state on the device: staged or resident, in the form that the parameter is passed in."""
    staged = unit.states.get(name)
    if as_dtensor(unit.owner) is not None and as_dtensor(unit.param) is not None:
        value: Tensor = unit.param_state[name]
        return value if staged is None else shown_as(unit.owner, staged)
    if staged is not None:
        return staged
    value = local(unit.param_state[name])
    return value if unit.whole is None else piece_of(value, unit)


def steps_of(units: Sequence[TorchUnit]) -> list[Tensor]:
    """The ``step`` tensors of ``units``, which the functional advances.

    All pieces of a tensor start from the old step, so all but the last get a copy of it; what
    the last one makes of it is the new one.
    """
    steps: list[Tensor] = []
    for unit in units:
        step = unit.param_state["step"]
        if unit.whole is None:
            steps.extend([step] * unit.repeats)
            continue
        assert isinstance(unit.whole, TorchUnit)
        if unit.start_numel == 0:  # one kernel copies it for all pieces
            unit.whole.step_copies = list(step.repeat(unit.pieces_left).unbind())
        steps.append(unit.whole.step_copies.pop() if unit.pieces_left else step)
    return steps
