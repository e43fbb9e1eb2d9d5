"""SwapAdam and SwapAdamW: torch.optim's classes with their moments on the host between steps."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Adam, AdamW
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT

from swap_adam.config import SwapOptimizerConfig
from swap_adam.layout import DEVICE_ALIGNMENT_NBYTES, align, cover_pools
from swap_adam.slot import UpdateUnit
from swap_adam.torch.optimizer import TorchSwapMixin
from swap_adam.torch.registration import ParamGroup
from swap_adam.torch.state import (
    ParamState,
    TorchUnit,
    check_fused_param,
    default_to_foreach,
    scalar_dtype,
)
from swap_adam.torch.update_lists import UpdateLists, steps_of

# The for-loop has the square root and its quotient at a time, beside the last tensor's quotient;
# and the negated or decayed gradient, where there is one.
FOR_LOOP_TEMPORARIES = 2
# The foreach update has one of them at a time, but for the whole list.
FOREACH_TEMPORARIES = 1
STEP_NBYTES = 4


@dataclass(frozen=True)
class GroupStep:
    """What a step read of a group: the implementation to ask for, and the learning rate.

    ``copies_grad`` says whether the for-loop makes a gradient of its own.
    """

    foreach: bool
    fused: bool
    copies_grad: bool
    lr: float | Tensor

    def needs_as_much(self, other: GroupStep) -> bool:
        """Whether both make the same temporaries."""
        return (self.foreach, self.fused, self.copies_grad) == (
            other.foreach, other.fused, other.copies_grad
        )


class AdamSwapMixin(TorchSwapMixin):
    """The step of ``torch.optim.Adam``, batch by batch through its own functional.

    The implementation (for-loop, foreach, fused) is resolved once per group over all its
    parameters with a gradient, as the original does, and then asked for in every batch.
    """

    _refused: tuple[str, ...] = ("foreach", "capturable", "differentiable")
    sparse_error = "Adam does not support sparse gradients, please consider SparseAdam instead"
    _names = (
        frozenset({"step", "exp_avg", "exp_avg_sq"}),
        frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    )
    _swap_group_steps: dict[int, GroupStep]

    def init_swap(self, config: SwapOptimizerConfig) -> None:
        super().init_swap(config)
        self._swap_group_steps = {}

    @classmethod
    def original_class(cls) -> type | None:
        return {SwapAdam: Adam, SwapAdamW: AdamW}.get(cls)

    @classmethod
    def refused_flags(cls, group: ParamGroup) -> list[str]:
        return [flag for flag in cls._refused if group.get(flag)]

    @classmethod
    def refuse_group(cls, group: ParamGroup) -> None:
        for flag in cls.refused_flags(group):
            remedy = {
                "foreach": "foreach=None or foreach=False: one call over all tensors would need "
                           "all states on the device, None uses foreach batch by batch",
                "fused": "fused=None, or AdamW with fused=True",
            }.get(flag, f"{flag}=False")
            raise ValueError(f"{cls.__name__} does not support {flag}=True; use {remedy}")

    def read_group(self, group_index: int, group: ParamGroup, params: list[Tensor]) -> None:
        fused, foreach = bool(group["fused"]), bool(group["foreach"])
        lr = group["lr"]
        if group["fused"] is None and group["foreach"] is None:
            foreach = default_to_foreach(params) and not isinstance(lr, Tensor)
        for index, beta in enumerate(group["betas"], 1):
            if foreach and isinstance(beta, Tensor):  # the original's error, with nothing torn
                raise ValueError(
                    f"beta{index} as a Tensor is not supported for capturable=False and "
                    "foreach=True"
                )
        if not fused and isinstance(lr, Tensor) and lr.device.type != "cpu":
            # The for-loop would read it back once per parameter. On the host the same arithmetic
            # gives the same bits, but for low precision, where the device rounds it first.
            if all(param.dtype in (torch.float32, torch.float64) for param in params):
                lr = lr.cpu()
        decays_grad = bool(group["weight_decay"]) and not group["decoupled_weight_decay"]
        step = GroupStep(foreach, fused, bool(group["maximize"]) or decays_grad, lr)
        last = self._swap_group_steps.get(group_index)
        self._swap_group_steps[group_index] = step
        if last is not None and not step.needs_as_much(last):
            self.forget_plans()

    def init_param_state(self, group: ParamGroup, param: Tensor) -> ParamState:
        if group["fused"]:
            check_fused_param(param)
            return {"step": torch.zeros((), dtype=scalar_dtype(True), device=param.device)}
        return {"step": torch.tensor(0.0, dtype=scalar_dtype(False), device="cpu")}

    def scratch_sizes(self, units: Sequence[UpdateUnit[Tensor]]) -> Sequence[int]:
        choices: list[list[int]] = []
        by_group: dict[int, list[int]] = {}
        for unit in units:
            nbytes = align(unit.numel * unit.param.element_size(), DEVICE_ALIGNMENT_NBYTES)
            by_group.setdefault(unit.group_index, []).extend([nbytes] * unit.repeats)
        for group_index, sizes in by_group.items():
            step = self._swap_group_steps[group_index]
            if step.foreach:
                choices.append(sizes * FOREACH_TEMPORARIES)
            elif not step.fused:
                count = FOR_LOOP_TEMPORARIES + step.copies_grad
                choices.extend(
                    [last] + [size] * count for last, size in zip([0, *sizes], sizes)
                )
        # Fused, `step` is on the device, and so are its copies for the pieces of a cut tensor.
        copies = [
            align(max(unit.pieces_left, 1) * STEP_NBYTES, DEVICE_ALIGNMENT_NBYTES)
            for unit in units
            if unit.whole is not None and self._swap_group_steps[unit.group_index].fused
        ]
        return [*cover_pools(choices), *copies]

    def split_resident(
        self, units: Sequence[UpdateUnit[Tensor]], limit_nbytes: int | None
    ) -> Iterable[Sequence[UpdateUnit[Tensor]]]:
        if limit_nbytes is None:
            return super().split_resident(units, limit_nbytes)
        parts: list[list[UpdateUnit[Tensor]]] = []
        room = 0
        for unit in units:
            nbytes = 0  # of the temporaries of all units of a call, which only foreach has
            if self._swap_group_steps[unit.group_index].foreach:
                param_nbytes = unit.param.numel() * unit.param.element_size() * unit.repeats
                nbytes = FOREACH_TEMPORARIES * align(param_nbytes, DEVICE_ALIGNMENT_NBYTES)
            if not parts or nbytes > room:
                parts.append([])
                room = limit_nbytes
            parts[-1].append(unit)
            room -= nbytes
        return parts

    def update_group(self, group_index: int, units: Sequence[TorchUnit]) -> None:
        group, step = self.param_groups[group_index], self._swap_group_steps[group_index]
        amsgrad = group["amsgrad"]
        beta1, beta2 = group["betas"]
        lists = UpdateLists.of(units, amsgrad)
        adam(
            lists.params, lists.grads, lists.exp_avgs, lists.exp_avg_sqs, lists.max_exp_avg_sqs,
            steps_of(units),
            foreach=step.foreach,
            fused=step.fused,
            capturable=False,
            differentiable=False,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            has_complex=any(torch.is_complex(param) for param in lists.params),
            decoupled_weight_decay=group["decoupled_weight_decay"],
            amsgrad=amsgrad,
            beta1=beta1,
            beta2=beta2,
            lr=step.lr,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )


class SwapAdam(AdamSwapMixin, Adam):
    """``torch.optim.Adam`` with its moments in pinned host memory between steps.

    Takes the original's arguments and ``swap_config``. ``foreach=True``, ``fused=True``,
    ``capturable=True`` and ``differentiable=True`` are refused.

    Raises:
        ValueError: a refused flag or a configuration that does not fit, before anything changed.
    """

    _refused = ("foreach", "capturable", "differentiable", "fused")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        swap_config: SwapOptimizerConfig | None = None,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, foreach=foreach, maximize=maximize,
            capturable=capturable, differentiable=differentiable, fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        config = SwapOptimizerConfig() if swap_config is None else swap_config
        self.refuse_config(config, self.param_groups)
        self.init_swap(config)


class SwapAdamW(AdamSwapMixin, AdamW):
    """``torch.optim.AdamW`` with its moments in pinned host memory between steps.

    Takes the original's arguments and ``swap_config``. ``foreach=True``, ``capturable=True`` and
    ``differentiable=True`` are refused.

    Raises:
        ValueError: a refused flag or a configuration that does not fit, before anything changed.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        swap_config: SwapOptimizerConfig | None = None,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, foreach=foreach,
            capturable=capturable, differentiable=differentiable, fused=fused,
        )
        config = SwapOptimizerConfig() if swap_config is None else swap_config
        self.refuse_config(config, self.param_groups)
        self.init_swap(config)
