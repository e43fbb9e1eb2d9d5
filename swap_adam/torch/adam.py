"""SwapAdam and SwapAdamW: torch.optim's classes with their moments on the host between steps."""
from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Adam, AdamW
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT

from swap_adam.alignment import DEVICE_ALIGNMENT_NBYTES, align
from swap_adam.config import Configuration, explains_keywords
from swap_adam.slot import UpdateUnit
from swap_adam.torch.optimizer import REFUSED, TorchSwapMixin
from swap_adam.torch.state import (
    ParamState,
    TorchUnit,
    check_fused_param,
    default_to_foreach,
    scalar_dtype,
)
from swap_adam.torch.update import ParamGroup, TorchUpdate, argument_lists, scalars_of

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


class AdamUpdate(TorchUpdate):
    """A step of ``torch.optim.Adam`` or ``AdamW``, batch by batch through their own functional.

    The implementation (for-loop, foreach, fused) is resolved once per group over all its
    parameters with a gradient, as the original does, and then asked for in every batch.
    """

    scalars = ("step",)
    moments = ("exp_avg", "exp_avg_sq")
    amsgrad_moments = ("max_exp_avg_sq",)
    sparse_error = "Adam does not support sparse gradients, please consider SparseAdam instead"

    def __init__(
        self, groups: Sequence[ParamGroup], grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        super().__init__(groups)
        self._scaling = {"grad_scale": grad_scale, "found_inf": found_inf}
        self._steps: dict[int, GroupStep] = {}

    @classmethod
    def init_scalars(cls, group: ParamGroup, param: Tensor) -> ParamState:
        if group["fused"]:
            check_fused_param(param)
            return {"step": torch.zeros((), dtype=scalar_dtype(True), device=param.device)}
        return {"step": torch.tensor(0.0, dtype=scalar_dtype(False), device="cpu")}

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
        copies_grad = bool(group["maximize"]) or decays_grad
        self._steps[group_index] = GroupStep(foreach, fused, copies_grad, lr)

    @property
    def memory_key(self) -> Hashable:
        return tuple(
            (step.foreach, step.fused, step.copies_grad) for step in self._steps.values()
        )

    def scratch_nbytes(self, units: Sequence[UpdateUnit[Tensor]]) -> int:
        most = 0
        by_group: dict[int, list[int]] = {}
        for unit in units:
            nbytes = align(unit.numel * unit.param.element_size(), DEVICE_ALIGNMENT_NBYTES)
            by_group.setdefault(unit.group_index, []).extend([nbytes] * unit.repeats)
        for group_index, sizes in by_group.items():
            step = self._steps[group_index]
            if step.foreach:
                most = max(most, FOREACH_TEMPORARIES * sum(sizes))
            elif not step.fused:
                count = FOR_LOOP_TEMPORARIES + step.copies_grad
                most = max(most, *(last + count * size for last, size in zip([0, *sizes], sizes)))
        # Fused, `step` is on the device, and so are its copies for the pieces of a cut tensor.
        return most + sum(
            align(max(unit.pieces_left, 1) * STEP_NBYTES, DEVICE_ALIGNMENT_NBYTES)
            for unit in units
            if unit.whole is not None and self._steps[unit.group_index].fused
        )

    def split_resident(
        self, units: Sequence[UpdateUnit[Tensor]], limit_nbytes: int | None
    ) -> Iterable[Sequence[UpdateUnit[Tensor]]]:
        if limit_nbytes is None:
            return super().split_resident(units, limit_nbytes)
        parts: list[list[UpdateUnit[Tensor]]] = []
        room = 0
        for unit in units:
            nbytes = 0  # of the temporaries of all units of a call, which only foreach has
            if self._steps[unit.group_index].foreach:
                param_nbytes = unit.param.numel() * unit.param.element_size() * unit.repeats
                nbytes = FOREACH_TEMPORARIES * align(param_nbytes, DEVICE_ALIGNMENT_NBYTES)
            if not parts or nbytes > room:
                parts.append([])
                room = limit_nbytes
            parts[-1].append(unit)
            room -= nbytes
        return parts

    def update_group(self, group_index: int, units: Sequence[TorchUnit]) -> None:
        group, step = self._groups[group_index], self._steps[group_index]
        beta1, beta2 = group["betas"]
        params, grads, moments = argument_lists(units, self.moments_of(group))
        exp_avgs, exp_avg_sqs, *max_exp_avg_sqs = moments
        adam(
            params, grads, exp_avgs, exp_avg_sqs,
            max_exp_avg_sqs[0] if max_exp_avg_sqs else [],
            scalars_of(units, "step"),
            foreach=step.foreach,
            fused=step.fused,
            capturable=False,
            differentiable=False,
            **self._scaling,
            has_complex=any(torch.is_complex(param) for param in params),
            decoupled_weight_decay=group["decoupled_weight_decay"],
            amsgrad=group["amsgrad"],
            beta1=beta1,
            beta2=beta2,
            lr=step.lr,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )


class AdamSwapMixin(TorchSwapMixin):
    """What GradScaler has left on the optimizer goes into its steps."""

    update_type = AdamUpdate

    def make_update(self) -> TorchUpdate:
        return AdamUpdate(
            self.param_groups,
            getattr(self, "grad_scale", None),
            getattr(self, "found_inf", None),
        )


class SwapAdam(AdamSwapMixin, Adam):
    """``torch.optim.Adam`` with its moments in pinned host memory between steps.

    Takes the original's arguments and ``swap_config``. ``foreach=True``, ``fused=True``,
    ``capturable=True`` and ``differentiable=True`` are refused.

    Raises:
        ValueError: a refused flag or a configuration that does not fit, before anything changed.
    """

    original = Adam
    refused = {**REFUSED, "fused": "fused=None, or AdamW with fused=True"}

    @explains_keywords
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
        swap_config: Configuration | None = None,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, foreach=foreach, maximize=maximize,
            capturable=capturable, differentiable=differentiable, fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        self.init_swap(swap_config)


class SwapAdamW(AdamSwapMixin, AdamW):
    """``torch.optim.AdamW`` with its moments in pinned host memory between steps.

    Takes the original's arguments and ``swap_config``. ``foreach=True``, ``capturable=True`` and
    ``differentiable=True`` are refused.

    Raises:
        ValueError: a refused flag or a configuration that does not fit, before anything changed.
    """

    original = AdamW
    refused = REFUSED

    @explains_keywords
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
        swap_config: Configuration | None = None,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, foreach=foreach,
            capturable=capturable, differentiable=differentiable, fused=fused,
        )
        self.init_swap(swap_config)
