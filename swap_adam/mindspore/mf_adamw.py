"""SwapMFAdamW: MindFormers' PyNative AdamW with its states on the host between updates."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mindformers.pynative.optimizer.adamw import AdamW
from mindspore import Tensor

from swap_adam.config import Configuration, explains_keywords
from swap_adam.mindspore.optimizer import MindSporeSwapMixin
from swap_adam.mindspore.state import MindSporeUnit, shadowed
from swap_adam.slot import UpdateUnit

# Temporaries of the unfused update at a time, in fp32 tensors of the parameter's size: the
# gradient, the new parameter, the denominator, and up to three operands of the operation at hand.
UNFUSED_TEMPORARIES = 6
# The fused kernel updates in place; the gradient may need a cast.
FUSED_TEMPORARIES = 1


class SwapMFAdamW(MindSporeSwapMixin, AdamW):
    """``mindformers.pynative.optimizer.adamw.AdamW``, its arguments, and one keyword.

    The original's own methods do the update, on its attributes cut to one batch. They copy
    the fp32 masters of that batch to the model's parameters where the masters are swapped; the
    others are copied once, at the end.

    Args:
        swap_config: what to swap and how; ``None`` for the defaults.

    Raises:
        ValueError: ``enable_cpu_offload``, ``enable_parallel_optimizer``, GRAPH_MODE, or a state
            key that this optimizer does not have.
    """

    state_attributes = {
        "exp_avg": "exp_avg",
        "exp_avg_sq": "exp_avg_sq",
        "max_exp_avg_sq": "max_exp_avg_sq",
        "master_param": "fp32_params",
    }
    default_packed = True
    takes_views = True
    original = AdamW

    @explains_keywords
    def __init__(
        self,
        params: Any,
        learning_rate: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: Any = 0.0,
        enable_cpu_offload: bool = False,
        enable_fused_opt: bool = False,
        use_fused: bool = False,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        swap_config: Configuration | None = None,
    ) -> None:
        # The original takes any keyword and reads these two.
        super().__init__(
            params, learning_rate, betas, eps, weight_decay, enable_cpu_offload,
            enable_fused_opt, use_fused, amsgrad=amsgrad, maximize=maximize,
        )
        self.attach(swap_config)

    def construct(self, gradients: Sequence[Tensor]) -> object:
        """One update of every parameter, as the original's."""
        return self.swap_optimizers_run_in_pynative_mode_only(gradients)

    @classmethod
    def refuse_options(cls, optimizer: Any) -> None:
        super().refuse_options(optimizer)
        if optimizer.enable_cpu_offload:
            raise ValueError(
                "enable_cpu_offload=True is not supported: it keeps the states on the host for "
                "good and updates them there; leave it at False"
            )

    @classmethod
    def has_amsgrad(cls, optimizer: Any) -> bool:
        return bool(optimizer.enable_fused_opt and optimizer.amsgrad)

    def owns_state(self, name: str, index: int) -> bool:
        if name == "master_param":
            # For an fp32 parameter it is the model's own.
            return bool(self._is_low_precision_param[index])
        # Without AMSGrad the fused update is given `exp_avg_sq` in its place.
        return name != "max_exp_avg_sq" or self.has_amsgrad(self)

    # The original's construct reads lr and weight decay, then calls these. The counter moves when
    # the device memory of the step is there.

    def run_original(self) -> object:
        return super().construct(self._swap.step.gradients)

    def _increase_global_step(self) -> None:
        """Left to :meth:`begin_update`."""

    def forward_opt(self, gradients: Sequence[Tensor], lr: Any, weight_decay: Any) -> object:
        """The original's unfused update, in batches."""
        return self._forward(lr, weight_decay)

    def forward_fused_opt(self, gradients: Sequence[Tensor], lr: Any, weight_decay: Any) -> object:
        """The original's fused update, in batches."""
        return self._forward(lr, weight_decay)

    def _forward(self, lr: Any, weight_decay: Any) -> object:
        self._swap.step.lr, self._swap.step.weight_decay = lr, weight_decay
        self._swap.run_step(self)
        return self.results()

    def read_step(self) -> None:
        """Nothing is left to read: the original has."""

    def begin_update(self) -> None:
        super().begin_update()
        super()._increase_global_step()

    def update_units(self, units: Sequence[MindSporeUnit]) -> Iterable[object]:
        lr, weight_decay = (
            [value[unit.param_index] for unit in units] if isinstance(value, list) else value
            for value in (self._swap.step.lr, self._swap.step.weight_decay)
        )
        exp_avg_sq = tuple(unit.state("exp_avg_sq") for unit in units)
        max_exp_avg_sq = exp_avg_sq
        if self.has_amsgrad(self):
            max_exp_avg_sq = tuple(unit.state("max_exp_avg_sq") for unit in units)
        with shadowed(
            self,
            self._swap.shadowed,
            _parameters=tuple(unit.param for unit in units),
            fp32_params=tuple(
                unit.state("master_param") if "master_param" in unit.resting else unit.param
                for unit in units
            ),
            exp_avg=tuple(unit.state("exp_avg") for unit in units),
            exp_avg_sq=exp_avg_sq,
            max_exp_avg_sq=max_exp_avg_sq,
            optim_filter=tuple(self.optim_filter[unit.param_index] for unit in units),
            # What the original copies from master to model at the end of its update.
            _is_low_precision_param=tuple("master_param" in unit.states for unit in units),
        ):
            forward = super().forward_fused_opt if self.enable_fused_opt else super().forward_opt
            results: Iterable[object] = forward(
                tuple(unit.grad for unit in units), lr, weight_decay
            )
        return results

    def finish_step(self) -> None:
        # The masters that stay on the device, to the model's parameters.
        is_resident = tuple(
            "master_param" in unit.resting and "master_param" not in unit.states
            for unit in self._swap.units
        )
        with shadowed(self, self._swap.shadowed, _is_low_precision_param=is_resident):
            self._copy_main_params_to_model_params()

    def scratch_sizes(self, units: Sequence[UpdateUnit[Tensor]]) -> Sequence[int]:
        # One parameter at a time, in fp32.
        temporaries = FUSED_TEMPORARIES if self.enable_fused_opt else UNFUSED_TEMPORARIES
        return [4 * max(unit.numel for unit in units)] * temporaries
