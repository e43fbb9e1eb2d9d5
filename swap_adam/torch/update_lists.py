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
        states, param_state = unit.states, unit.param_state
        if unit.whole is not None:
            self._append_piece(unit, amsgrad)
            return
        self.params.append(unit.param)
        self.grads.append(unit.grad)
        if as_dtensor(unit.owner) is None:
            exp_avg = states.get("exp_avg")
            exp_avg_sq = states.get("exp_avg_sq")
            self.exp_avgs.append(param_state["exp_avg"] if exp_avg is None else exp_avg)
            self.exp_avg_sqs.append(param_state["exp_avg_sq"] if exp_avg_sq is None else exp_avg_sq)
            if amsgrad:
                maximum = states.get("max_exp_avg_sq")
                self.max_exp_avg_sqs.append(
                    param_state["max_exp_avg_sq"] if maximum is None else maximum
                )
        else:
            self.exp_avgs.append(_dtensor_state(unit, "exp_avg"))
            self.exp_avg_sqs.append(_dtensor_state(unit, "exp_avg_sq"))
            if amsgrad:
                self.max_exp_avg_sqs.append(_dtensor_state(unit, "max_exp_avg_sq"))

    def _append_piece(self, unit: TorchUnit, amsgrad: bool) -> None:
        whole = unit.whole
        assert isinstance(whole, TorchUnit)

        def state(name: str) -> Tensor:
            view = unit.states.get(name)
            return piece_of(local(whole.param_state[name]), unit) if view is None else view

        self.params.append(piece_of(whole.param, unit))
        self.grads.append(piece_of(whole.grad, unit))
        self.exp_avgs.append(state("exp_avg"))
        self.exp_avg_sqs.append(state("exp_avg_sq"))
        if amsgrad:
            self.max_exp_avg_sqs.append(state("max_exp_avg_sq"))


def _dtensor_state(unit: TorchUnit, name: str) -> Tensor:
    """A state in the same form, local or distributed, as the parameter in ``unit.param``."""
    view = unit.states.get(name)
    is_local = as_dtensor(unit.param) is None
    if view is None:
        value: Tensor = unit.param_state[name]
        return local(value) if is_local else value
    return view if is_local else shown_as(unit.owner, view)


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
