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
        params, grads = lists.params, lists.grads
        columns = [("exp_avg", lists.exp_avgs), ("exp_avg_sq", lists.exp_avg_sqs)]
        if amsgrad:
            columns.append(("max_exp_avg_sq", lists.max_exp_avg_sqs))
        for unit in units:
            whole = unit.whole
            is_distributed = as_dtensor(unit.param) is not None
            for _ in range(unit.repeats):
                params.append(unit.param if whole is None else piece_of(whole.param, unit))
                grads.append(unit.grad if whole is None else piece_of(whole.grad, unit))
                for name, column in columns:
                    staged = unit.states.get(name)
                    if staged is None or is_distributed:
                        staged = _shown(unit, name, staged, is_distributed)
                    column.append(staged)
        return lists


def _shown(unit: TorchUnit, name: str, staged: Tensor | None, is_distributed: bool) -> Tensor:
    """A state in the form that the parameter is passed in, resident where it is not ``staged``."""
    if is_distributed:
        value: Tensor = unit.param_state[name]
        return value if staged is None else shown_as(unit.owner, staged)
    if unit.whole is None:
        return local(unit.param_state[name])
    assert isinstance(unit.whole, TorchUnit)
    return piece_of(local(unit.whole.param_state[name]), unit)


def steps_of(units: Sequence[TorchUnit]) -> list[Tensor]:
    """The ``step`` tensors of ``units``, which the functional advances.

    All pieces of a tensor start from the old step, so all but the last get a copy of it; what
    the last one makes of it is the new one.
    """
    steps: list[Tensor] = []
    for unit in units:
        if unit.whole is None:
            steps.extend([unit.param_state["step"]] * unit.repeats)
            continue
        assert isinstance(unit.whole, TorchUnit)
        step = unit.whole.param_state["step"]
        if unit.start_numel == 0:  # one kernel copies it for all pieces
            unit.whole.step_copies = list(step.repeat(unit.pieces_left).unbind())
        steps.append(unit.whole.step_copies.pop() if unit.pieces_left else step)
    return steps
