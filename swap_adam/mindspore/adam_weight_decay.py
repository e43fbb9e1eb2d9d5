"""SwapAdamWeightDecay: ``mindspore.nn.AdamWeightDecay`` with its moments on the host."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mindspore import Tensor, nn, ops

# The original's construct calls these two; there is no method of it that updates a subset.
from mindspore.nn.optim.adam import _adam_opt, _fused_adam_weight_decay

from swap_adam.config import Configuration, explains_keywords
from swap_adam.mindspore.optimizer import MindSporeSwapMixin
from swap_adam.mindspore.state import MindSporeUnit
from swap_adam.slot import UpdateUnit

# Temporaries of the unfused update at a time, in fp32 tensors of the parameter's size: the
# gradient, the new moments, the update, and two operands of the operation at hand.
UNFUSED_TEMPORARIES = 6


class SwapAdamWeightDecay(MindSporeSwapMixin, nn.AdamWeightDecay):
    """:class:`mindspore.nn.AdamWeightDecay`, its arguments, and one keyword.

    Args:
        swap_config: what to swap and how; ``None`` for the defaults.

    Raises:
        ValueError: ``enable_parallel_optimizer``, GRAPH_MODE, ``packed_swap=True``, or a state
            key that this optimizer does not have.
    """

    state_attributes = {"exp_avg": "moments1", "exp_avg_sq": "moments2"}
    original = nn.AdamWeightDecay

    @explains_keywords
    def __init__(
        self,
        params: Any,
        learning_rate: Any = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-6,
        weight_decay: Any = 0.0,
        *,
        swap_config: Configuration | None = None,
    ) -> None:
        super().__init__(params, learning_rate, beta1, beta2, eps, weight_decay)
        self.attach(swap_config)

    def construct(self, gradients: Sequence[Tensor]) -> object:
        """One update of every parameter, as the original's."""
        return self.swap_optimizers_run_in_pynative_mode_only(gradients)

    @classmethod
    def has_amsgrad(cls, optimizer: Any) -> bool:
        return False

    def read_step(self) -> None:
        self._swap.step.weight_decay = self.get_weight_decay()
        self._swap.step.lr = self.get_lr()

    def begin_update(self) -> None:
        super().begin_update()
        self.assignadd(self.global_step, self.global_step_increase_tensor)

    def update_units(self, units: Sequence[MindSporeUnit]) -> Iterable[object]:
        indices = [unit.param_index for unit in units]
        update = [_fused_adam_weight_decay, self.fused_opt] if self.use_fused_opt else [_adam_opt]
        fixed: list[object] = [self.beta1, self.beta2, self.eps]
        mapped: list[tuple[object, ...]] = []
        for value, is_per_parameter in (
            (self._swap.step.lr, self.is_group and self.is_group_lr),
            (self._swap.step.weight_decay, self.is_group),
        ):
            if is_per_parameter:
                mapped.append(tuple(value[index] for index in indices))
            else:
                fixed.append(value)
        results: Iterable[object] = self.hyper_map(
            ops.partial(*update, *fixed),
            *mapped,
            tuple(unit.param for unit in units),
            tuple(unit.state("exp_avg") for unit in units),
            tuple(unit.state("exp_avg_sq") for unit in units),
            tuple(unit.grad for unit in units),
            tuple(self.decay_flags[index] for index in indices),
            tuple(self.optim_filter[index] for index in indices),
        )
        return results

    def scratch_sizes(self, units: Sequence[UpdateUnit[Tensor]]) -> Sequence[int]:
        # One parameter at a time; fused, only the gradient cast to the parameter's dtype.
        temporaries = 1 if self.use_fused_opt else UNFUSED_TEMPORARIES
        return [4 * max(unit.numel for unit in units)] * temporaries
