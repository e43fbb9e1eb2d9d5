"""SwapHyperAdamW: HyperParallel's AdamW, whose step counter belongs to the group.

Where ``hyper_parallel`` is not installed, :class:`HyperAdamW` here stands in with the same
contract; it can be used by itself.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from swap_adam.config import Configuration, explains_keywords
from swap_adam.alignment import DEVICE_ALIGNMENT_NBYTES
from swap_adam.slot import UpdateUnit
from swap_adam.torch.optimizer import TorchSwapMixin
from swap_adam.torch.state import ParamState
from swap_adam.torch.update import ParamGroup, TorchUpdate


def adamw(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    step: int,
    *,
    amsgrad: bool,
    beta1: float,
    beta2: float,
    lr: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
) -> None:
    """One AdamW update of a list of tensors, in place, on the current stream.

    ``p <- p (1 - lr wd) - lr m_hat / (sqrt(v_hat) + eps)`` with ``m_hat = m / (1 - beta1^step)``
    and ``v_hat = v / (1 - beta2^step)``, or the running maximum of ``v`` with ``amsgrad``
    (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", algorithm 2). All tensors of
    the call share one step, so it is the step number of *this* update: 1 for the first.
    """
    if not params:
        return
    # Filled on the device: a copy from the host would wait. CUDA's kernel reads float32 steps.
    shared = torch.full((), step, dtype=torch.float32, device=params[0].device)
    torch._fused_adamw_(
        params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, [shared] * len(params),
        amsgrad=amsgrad, lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps,
        maximize=maximize, grad_scale=None, found_inf=None,
    )


class HyperAdamW(Optimizer):
    """AdamW with one integer step per group, in ``group["step"]``.

    The counter is made by the first ``step()`` and advanced once per call for every group, also
    for one in which no parameter has a gradient. The state of a parameter, made when it first has
    a gradient, is ``exp_avg``, ``exp_avg_sq`` and, with ``amsgrad``, ``max_exp_avg_sq``.

    Raises:
        ValueError: a hyperparameter out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        maximize: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0.0:
                raise ValueError(f"{name} must be >= 0, got {value!r}")
        for index, beta in enumerate(betas):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"betas[{index}] must be in [0, 1), got {beta!r}")
        super().__init__(params, {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "amsgrad": amsgrad, "maximize": maximize,
        })

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """One update of every parameter that has a gradient.

        Raises:
            RuntimeError: a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if any(param.grad.is_sparse for param in params):
                raise RuntimeError(SPARSE_ERROR)
            group["step"] = group.get("step", 0) + 1
            states = [self._state_of(param, group["amsgrad"]) for param in params]
            adamw(
                params,
                [param.grad for param in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
                **functional_options(group),
            )
        return loss

    def _state_of(self, param: Tensor, amsgrad: bool) -> ParamState:
        state: ParamState = self.state[param]
        if not state:
            names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * amsgrad
            for name in names:
                state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state


SPARSE_ERROR = "AdamW does not support sparse gradients"


def functional_options(group: ParamGroup) -> dict[str, Any]:
    """The keyword arguments of :func:`adamw`, and ``step``, for a group."""
    beta1, beta2 = group["betas"]
    return {
        "step": group["step"], "amsgrad": group["amsgrad"], "beta1": beta1, "beta2": beta2,
        "lr": group["lr"], "weight_decay": group["weight_decay"], "eps": group["eps"],
        "maximize": group["maximize"],
    }


def _base() -> tuple[type[Optimizer], Callable[..., None]]:
    """The class to inherit from and its functional: HyperParallel's where it is installed."""
    try:
        from hyper_parallel.core.optimizer import adamw as module
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("hyper_parallel"):
            raise  # it is there and lacks something of its own
        return HyperAdamW, adamw
    return module.AdamW, module.adamw


if TYPE_CHECKING:
    _Base = HyperAdamW
    _functional = adamw
else:
    _Base, _functional = _base()


class HyperAdamWUpdate(TorchUpdate):
    """A step of HyperParallel's AdamW, batch by batch through its own functional."""

    scalars = ()
    moments = ("exp_avg", "exp_avg_sq")
    amsgrad_moments = ("max_exp_avg_sq",)
    numbers = ("lr", "eps", "weight_decay")
    sparse_error = SPARSE_ERROR
    functional = staticmethod(adamw)

    @classmethod
    def init_scalars(cls, group: ParamGroup, param: Tensor) -> ParamState:
        return {}

    def scratch(self, units: Sequence[UpdateUnit[Tensor]]) -> Sequence[Sequence[int]]:
        # The functional makes one `step` per call, and calls follow each other.
        return [[DEVICE_ALIGNMENT_NBYTES]]

    advances = True

    def begin(self) -> None:
        for group in self._groups:
            group["step"] = group.get("step", 0) + 1

    def call(
        self,
        group_index: int,
        params: list[Tensor],
        grads: list[Tensor],
        moments: Sequence[list[Tensor]],
        scalars: Sequence[list[Any]],
        scaled: bool,
    ) -> None:
        exp_avgs, exp_avg_sqs, *max_exp_avg_sqs = moments
        options = {"step": 1, **self._groups[group_index]}  # no step yet before the first one
        self.functional(
            params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs[0] if max_exp_avg_sqs else [],
            **functional_options(options),
        )


class BaseUpdate(HyperAdamWUpdate):
    """The same through the functional of the installed class."""

    functional = staticmethod(_functional)


class HyperAdamWSwapMixin(TorchSwapMixin):
    """The constructor of both."""

    refused: ClassVar[Mapping[str, str]] = {}  # its groups have no flags

    @explains_keywords
    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        maximize: bool = False,
        *,
        swap_config: Configuration | None = None,
    ) -> None:
        options: dict[str, Any] = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "amsgrad": amsgrad, "maximize": maximize,
        }
        super().__init__(params, **options)
        self.init_swap(swap_config)


class SwapHyperAdamW(HyperAdamWSwapMixin, _Base):
    """HyperParallel's AdamW with its moments in pinned host memory between steps.

    Takes the original's arguments and ``swap_config``. ``group["step"]`` advances once per call,
    however many batches the group is cut into. Where ``hyper_parallel`` is not installed, the
    original is :class:`HyperAdamW`.

    Raises:
        ValueError: a configuration that does not fit, before anything changed.
    """

    original = _Base
    update_type = BaseUpdate


class SwapOwnHyperAdamW(HyperAdamWSwapMixin, HyperAdamW):
    """What a :class:`HyperAdamW` converts to where ``hyper_parallel`` is installed."""

    original = HyperAdamW
    update_type = HyperAdamWUpdate


# By the class of the original; the last entry wins where the two are the same.
SWAP_CLASSES: dict[type[Optimizer], type[HyperAdamWSwapMixin]] = {
    HyperAdamW: SwapOwnHyperAdamW, _Base: SwapHyperAdamW,
}
