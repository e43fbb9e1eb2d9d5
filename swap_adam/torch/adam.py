"""SwapAdam and SwapAdamW: torch.optim's classes with their moments on the host between steps."""
from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Adam, AdamW
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT

from swap_adam.alignment import DEVICE_ALIGNMENT_NBYTES, align
from swap_adam.config import Configuration, explains_keywords
from swap_adam.slot import UpdateUnit
from swap_adam.temporaries import (
    Temporaries,
    for_loop_moments,
    foreach_moments,
    split_at,
    temporaries,
)
from swap_adam.torch.optimizer import REFUSED, TorchSwapMixin
from swap_adam.torch.state import (
    ParamState,
    TorchUnit,
    check_fused_param,
    default_to_foreach,
    local,
    scalar_dtype,
)
from swap_adam.torch.update import ParamGroup, TorchUpdate


@dataclass(frozen=True)
class GroupMemory:
    """What the temporaries of a group's update depend on, the states' dtypes aside.

    ``root_of`` is the moment whose square root is taken. ``dtypes`` are those of each parameter
    and gradient, where the update makes gradients of its own. ``device_scalars`` counts the 0-dim
    tensors that it makes on the device.
    """

    foreach: bool
    fused: bool
    root_of: str
    negates: bool
    decays_grad: bool
    dtypes: tuple[tuple[torch.dtype, torch.dtype], ...]
    device_scalars: int


@dataclass(frozen=True)
class GroupStep:
    """What a step read of a group: the implementation to ask for, and the learning rate."""

    memory: GroupMemory
    lr: float | Tensor


class AdamUpdate(TorchUpdate):
    """A step of ``torch.optim.Adam`` or ``AdamW``, batch by batch through their own functional.

    The implementation (for-loop, foreach, fused) is resolved once per group over all its
    parameters with a gradient, as the original does, and then asked for in every batch.
    """

    scalars = ("step",)
    moments = ("exp_avg", "exp_avg_sq")
    amsgrad_moments = ("max_exp_avg_sq",)
    numbers = ("lr", "eps", "weight_decay")
    sparse_error = "Adam does not support sparse gradients, please consider SparseAdam instead"

    def __init__(
        self, groups: Sequence[ParamGroup], grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        super().__init__(groups)
        self._grad_scale, self._found_inf = grad_scale, found_inf
        self._steps: dict[int, GroupStep] = {}

    @classmethod
    def init_scalars(cls, group: ParamGroup, param: Tensor) -> ParamState:
        if group["fused"]:
            check_fused_param(param)
            return {"step": torch.zeros((), dtype=scalar_dtype(True), device=param.device)}
        return {"step": torch.tensor(0.0, dtype=scalar_dtype(False), device="cpu")}

    def read_group(self, group_index: int, group: ParamGroup, params: list[Tensor]) -> None:
        super().read_group(group_index, group, params)
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
        negates = bool(group["maximize"]) and not fused
        decays_grad = (
            bool(group["weight_decay"]) and not group["decoupled_weight_decay"] and not fused
        )
        dtypes: tuple[tuple[torch.dtype, torch.dtype], ...] = ()
        if negates or decays_grad:
            dtypes = tuple((param.dtype, _grad_of(param).dtype) for param in params)
        memory = GroupMemory(
            foreach, fused, "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq",
            negates, decays_grad, dtypes, self._device_scalars(fused, lr, group["betas"], params),
        )
        self._steps[group_index] = GroupStep(memory, lr)

    def _device_scalars(
        self, fused: bool, lr: object, betas: Iterable[object], params: list[Tensor]
    ) -> int:
        """How many 0-dim tensors one call makes on the device, but for `step`."""
        if fused:
            device = params[0].device if params else None
            moved = [lr] if _is_on_device(lr) else []
            return sum(
                isinstance(value, Tensor) and value.device != device
                for value in (*moved, self._grad_scale, self._found_inf)
            )
        beta1, beta2 = betas
        beta1_on_device, beta2_on_device = _is_on_device(beta1), _is_on_device(beta2)
        casts = len({param.dtype for param in params}) if isinstance(beta1, Tensor) else 0
        # The step size; each bias correction; the root of the second.
        step_size = _is_on_device(lr) or beta1_on_device
        return casts + step_size + beta1_on_device + 2 * beta2_on_device

    @property
    def memory_key(self) -> Hashable:
        return tuple(step.memory for step in self._steps.values())

    def scratch(self, units: Sequence[UpdateUnit[Tensor]]) -> Sequence[Sequence[int]]:
        by_group: dict[int, dict[torch.dtype | None, list[Temporaries]]] = {}
        copies: dict[int, int] = {}
        for unit in cast(Sequence[TorchUnit], units):
            by_dtype = by_group.setdefault(unit.group_index, {})
            mine = by_dtype.setdefault(self._dtype_of_list(unit), [])
            mine.extend([self._temporaries_of(unit)] * unit.repeats)
            if unit.pieces_left:  # of a `step` on the device there is a copy for every other piece
                assert isinstance(unit.whole, TorchUnit)
                step = unit.whole.param_state["step"]
                if _is_on_device(step):
                    nbytes = (unit.piece_count - 1) * step.element_size()
                    copies[id(unit.whole)] = align(nbytes, DEVICE_ALIGNMENT_NBYTES)
        choices: list[list[int]] = [[]]
        for group_index, by_dtype in by_group.items():
            memory = self._steps[group_index].memory
            moments: list[list[int]] = [[]]
            if memory.foreach:
                moments = foreach_moments(list(by_dtype.values()))
            elif not memory.fused:
                moments = for_loop_moments([one for mine in by_dtype.values() for one in mine])
            scalars = [DEVICE_ALIGNMENT_NBYTES] * memory.device_scalars
            choices.extend([*moment, *scalars] for moment in moments)
        return [[*choice, *copies.values()] for choice in choices]

    def _dtype_of_list(self, unit: TorchUnit) -> torch.dtype | None:
        """Units for which it is equal are in one list of a call: foreach's are of one dtype."""
        return unit.param.dtype if self._steps[unit.group_index].memory.foreach else None

    def _temporaries_of(self, unit: TorchUnit) -> Temporaries:
        memory = self._steps[unit.group_index].memory
        if memory.fused:
            return temporaries(0, 0)
        whole = unit if unit.whole is None else unit.whole
        assert isinstance(whole, TorchUnit)
        param, grad = whole.param.dtype, whole.grad.dtype
        return temporaries(
            unit.numel if unit.slots else local(whole.param).numel(),
            whole.param_state[memory.root_of].dtype.itemsize,
            grad.itemsize if memory.negates else 0,
            torch.promote_types(param, grad).itemsize if memory.decays_grad else 0,
        )

    def split_resident(
        self, units: Sequence[UpdateUnit[Tensor]], limit_nbytes: int | None
    ) -> Sequence[Sequence[UpdateUnit[Tensor]]]:
        if limit_nbytes is None:
            return super().split_resident(units, limit_nbytes)
        # Only foreach has temporaries of all units of a call.
        sizes = [
            self._temporaries_of(unit).foreach_nbytes * unit.repeats
            if self._steps[unit.group_index].memory.foreach else 0
            for unit in cast(Sequence[TorchUnit], units)
        ]
        ends = list(accumulate(split_at(sizes, max(limit_nbytes, *sizes, 0))))
        return [units[start:end] for start, end in zip([0, *ends], ends)]

    def call(
        self,
        group_index: int,
        params: list[Tensor],
        grads: list[Tensor],
        moments: Sequence[list[Tensor]],
        scalars: Sequence[list[Any]],
        scaled: bool,
    ) -> None:
        group, step = self._groups[group_index], self._steps[group_index]
        beta1, beta2 = group["betas"]
        exp_avgs, exp_avg_sqs, *max_exp_avg_sqs = moments
        (steps,) = scalars
        adam(
            params, grads, exp_avgs, exp_avg_sqs,
            max_exp_avg_sqs[0] if max_exp_avg_sqs else [],
            steps,
            foreach=step.memory.foreach,
            fused=step.memory.fused,
            capturable=False,
            differentiable=False,
            grad_scale=self._grad_scale if scaled else None,
            found_inf=self._found_inf if scaled else None,
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


def _grad_of(param: Tensor) -> Tensor:
    grad = param.grad
    assert grad is not None
    return grad


def _is_on_device(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


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
