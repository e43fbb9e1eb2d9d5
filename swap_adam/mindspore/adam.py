"""SwapMSAdam: ``mindspore.nn.Adam`` with its moments on the host between updates."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mindspore
from mindspore import Parameter, Tensor, nn
from mindspore.common.sparse_tensor import RowTensorInner

from swap_adam.config import Configuration, explains_keywords
from swap_adam.mindspore.optimizer import MindSporeSwapMixin
from swap_adam.mindspore.state import MindSporeUnit, shadowed
from swap_adam.slot import UpdateUnit


class SwapMSAdam(MindSporeSwapMixin, nn.Adam):
    """:class:`mindspore.nn.Adam`, its arguments, and one keyword.

    Args:
        swap_config: what to swap and how; ``None`` for the defaults.

    Raises:
        ValueError: ``use_lazy``, ``use_offload``, ``enable_parallel_optimizer``, GRAPH_MODE,
            ``packed_swap=True``, or a state key that this optimizer does not have.
    """

    state_attributes = {"exp_avg": "moment1", "exp_avg_sq": "moment2", "max_exp_avg_sq": "vhat"}
    original = nn.Adam

    @explains_keywords
    def __init__(
        self,
        params: Any,
        learning_rate: Any = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        use_locking: bool = False,
        use_nesterov: bool = False,
        weight_decay: Any = 0.0,
        loss_scale: float = 1.0,
        use_amsgrad: bool = False,
        *,
        swap_config: Configuration | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            params, learning_rate, beta1, beta2, eps, use_locking, use_nesterov, weight_decay,
            loss_scale, use_amsgrad, **kwargs,
        )
        self.attach(swap_config)

    def construct(self, gradients: Sequence[Tensor]) -> object:
        """One update of every parameter, as the original's."""
        return self.swap_optimizers_run_in_pynative_mode_only(gradients)

    @classmethod
    def refuse_options(cls, optimizer: Any) -> None:
        super().refuse_options(optimizer)
        for option in ("use_lazy", "use_offload"):
            if getattr(optimizer, option):
                raise ValueError(
                    f"{option}=True is not supported: it has the update done on the host; leave "
                    "it at False"
                )
        target = mindspore.get_context("device_target")
        if optimizer.target != target:
            raise ValueError(
                f"optimizer.target={optimizer.target!r} is not supported: it has the update done "
                f"there; leave it at {target!r}"
            )

    @classmethod
    def has_amsgrad(cls, optimizer: Any) -> bool:
        return bool(optimizer.use_amsgrad)

    def sparse_error(self, grad: object) -> type[Exception]:
        return NotImplementedError if isinstance(grad, RowTensorInner) else ValueError

    def counters(self) -> tuple[Parameter, ...]:
        return self.global_step, self.beta1_power, self.beta2_power

    def read_step(self) -> None:
        # The original's construct up to its first assignment: it is compiled as one graph.
        gradients = self.decay_weight(self._swap.step.gradients)
        gradients = self.gradients_centralization(gradients)
        gradients = self.scale_grad(gradients)
        self._swap.step.gradients = self._grad_sparse_indices_deduplicate(gradients)
        self._check_dtypes(self._swap.step.gradients)
        self._swap.step.lr = self.get_lr()

    def _check_dtypes(self, gradients: Sequence[Tensor]) -> None:
        """Raise what the kernel would, which casts gradients to the parameter's dtype and never
        the other way, before anything has changed."""
        for index, (param, grad) in enumerate(zip(self.parameters, gradients)):
            is_fraction = grad.is_floating_point() or grad.is_complex()
            if not is_fraction or grad.dtype == param.dtype or (
                grad.is_floating_point() and grad.itemsize < param.itemsize
            ):
                continue
            raise TypeError(
                f"the gradient of {self.describe_param(index)} is {grad.dtype}, which cannot "
                f"update a {param.dtype} parameter; cast it to {param.dtype}"
            )

    def begin_update(self) -> None:
        super().begin_update()
        self.assignadd(self.global_step, self.global_step_increase_tensor)
        powers = self.beta1_power * self.beta1, self.beta2_power * self.beta2
        self._swap.step.beta_powers = powers
        # To a Cell, assigning a tensor to a Parameter is to set its data.
        for name, power in zip(("beta1_power", "beta2_power"), powers):
            setattr(self, name, power)

    def update_units(self, units: Sequence[MindSporeUnit]) -> Iterable[object]:
        lr = self._swap.step.lr
        if self.is_group_lr:
            lr = tuple(lr[unit.param_index] for unit in units)
        shadows = {}
        if self.use_amsgrad:
            shadows["vhat"] = tuple(unit.state("max_exp_avg_sq") for unit in units)
        with shadowed(self, self._swap.shadowed, **shadows):
            results: Iterable[object] = self._apply_adam(
                tuple(unit.param for unit in units),
                *self._swap.step.beta_powers,
                tuple(unit.state("exp_avg") for unit in units),
                tuple(unit.state("exp_avg_sq") for unit in units),
                lr,
                tuple(unit.grad for unit in units),
            )
        return results

    def scratch_sizes(self, units: Sequence[UpdateUnit[Tensor]]) -> Sequence[int]:
        return ()  # one kernel that updates in place
