"""Class swap of existing torch optimizers, in both directions."""
from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import TypeVar, cast

from torch.optim import Optimizer

from swap_adam.config import Configuration, SwapOptimizerConfig, as_config, describe_difference
from swap_adam.convert import remedy_for
from swap_adam.torch.adam import SwapAdam, SwapAdamW
from swap_adam.torch.optimizer import TorchSwapMixin
from swap_adam.torch.swap import TorchSwap

OptimizerT = TypeVar("OptimizerT")

# One row per optimizer: everything else is said by the class.
CLASSES: tuple[type[TorchSwapMixin], ...] = (SwapAdam, SwapAdamW)


def is_optimizer(optimizer: object) -> bool:
    """Whether ``optimizer`` is an optimizer of torch, supported or not."""
    return isinstance(optimizer, Optimizer)


def matches(optimizer: Optimizer) -> type[TorchSwapMixin] | None:
    """The swap class for exactly this class of optimizer, ``None`` if there is none."""
    return _swap_classes().get(type(optimizer))


def _swap_classes() -> dict[type, type[TorchSwapMixin]]:
    classes: dict[type, type[TorchSwapMixin]] = {cls.original: cls for cls in CLASSES}
    # An instance of HyperParallel's class, or of ours, exists only if its module is loaded.
    if {"hyper_parallel", "swap_adam.torch.hyper_adamw"} & set(sys.modules):
        from swap_adam.torch.hyper_adamw import SWAP_CLASSES

        classes.update(SWAP_CLASSES)
    return classes


def validate(
    optimizer: Optimizer, target: type[TorchSwapMixin], config: SwapOptimizerConfig
) -> None:
    """Refuse what ``target`` cannot honour, with ``optimizer`` left as it is.

    Raises:
        ValueError: a flag of a group, or the configuration.
        TypeError: ``step`` is patched on the instance by somebody whom we cannot carry over.
    """
    target.refuse(config, optimizer.param_groups)
    patched = optimizer.__dict__.get("step")
    if patched is not None and not _is_scheduler_wrapper(patched, type(optimizer)):
        raise TypeError(
            f"cannot convert: optimizer.step is patched on the instance with {patched!r}, which "
            "would go on running the original's step; convert first and patch afterwards, or "
            "remove the patch (del optimizer.step)"
        )


def swap_optimizer(optimizer: OptimizerT, config: Configuration | None = None) -> OptimizerT:
    """See :func:`swap_adam.swap_optimizer`.

    States on a device are copied out by blocking copies; their device memory is free on return.
    """
    if isinstance(optimizer, TorchSwapMixin):
        if isinstance(getattr(optimizer, "optimizer", None), Optimizer):
            raise _unsupported(optimizer)  # it only looks like the optimizer that it wraps
        wanted = optimizer.swap_config if config is None else as_config(config)
        if wanted != optimizer.swap_config:
            has, asked = describe_difference(optimizer.swap_config, wanted)
            raise ValueError(
                f"this optimizer is already a {type(optimizer).__name__} with {has}, asked for "
                f"{asked}; call unswap_optimizer() first to change the configuration"
            )
        return optimizer
    if not isinstance(optimizer, Optimizer):
        raise _unsupported(optimizer)
    target = matches(optimizer)
    if target is None:
        raise _unsupported(optimizer)
    config = as_config(config)
    validate(optimizer, target, config)
    original = type(optimizer)
    swapped = cast(TorchSwapMixin, optimizer)
    try:
        optimizer.__class__ = target  # type: ignore[assignment]
        swapped.init_swap(config)
        optimizer._patch_step_function()
        swapped._swap.adopt_all(optimizer.param_groups, swapped.__dict__["state"])
    except BaseException:
        _forget(swapped, original)
        raise
    _rebind_scheduler_wrapper(swapped)
    return cast(OptimizerT, swapped)


def unswap_optimizer(optimizer: OptimizerT) -> OptimizerT:
    """See :func:`swap_adam.unswap_optimizer`. Returns with the copies to the device done.

    Raises:
        torch.OutOfMemoryError: the states do not fit on the device; nothing has changed.
        RuntimeError: parameters are half updated by an earlier fault.
    """
    if not isinstance(optimizer, TorchSwapMixin):
        raise TypeError(f"not a swap optimizer: {type(optimizer).__qualname__}; nothing to undo")
    if type(optimizer) not in _swap_classes().values():
        if isinstance(getattr(optimizer, "optimizer", None), Optimizer):
            raise _unsupported(optimizer)
        raise TypeError(
            f"{type(optimizer).__qualname__} derives from a swap class, so there is no original "
            "to turn it into; construct one and load this optimizer's state_dict()"
        )
    swap = optimizer._swap
    with swap.guard.lock:
        swap.guard.check("unswap_optimizer()")
        swap.forget_mended(optimizer.__dict__["state"])
        swap.check_not_torn("unswap_optimizer()", optimizer.describe_param)
        swap.bring_back(optimizer.__dict__["state"])
        _forget(optimizer, optimizer.original)
        _rebind_scheduler_wrapper(optimizer)
    return cast(OptimizerT, optimizer)


def _forget(optimizer: TorchSwapMixin, original: type[Optimizer]) -> None:
    swap: TorchSwap | None = optimizer.__dict__.pop("_swap", None)
    if swap is not None and swap.prefetch_hook is not None:
        swap.prefetch_hook.remove()
    optimizer.__class__ = original  # type: ignore[assignment]
    optimizer._patch_step_function()


def _unsupported(optimizer: object) -> TypeError:
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    supported = ", ".join(f"{cls.__module__}.{cls.__qualname__}" for cls in _swap_classes())
    # A wrapper may be a subclass too (Lightning's), made when it wraps.
    is_wrapper = isinstance(getattr(optimizer, "optimizer", None), Optimizer)
    if not is_wrapper and any(isinstance(optimizer, cls) for cls in _swap_classes()):
        remedy = "derive your class from SwapAdam, SwapAdamW or SwapHyperAdamW instead"
    else:
        remedy = remedy_for(optimizer) or "other optimizers are not swapped"
    return TypeError(f"cannot convert a {name}; supported are exactly: {supported}; {remedy}")


def _is_scheduler_wrapper(step: Callable[..., object], original: type) -> bool:
    """Whether a scheduler has wrapped ``step`` on the instance, around the class's own."""
    return (
        hasattr(step, "_wrapped_by_lr_sched")
        and getattr(step, "__wrapped__", None) is getattr(original, "step")
    )


def _rebind_scheduler_wrapper(optimizer: TorchSwapMixin) -> None:
    """A scheduler's wrapper is bound to the step of the class that the optimizer had then.

    The new one does what the scheduler's does: it notes that ``step`` was called.
    """
    if "step" not in optimizer.__dict__:
        return
    reference = weakref.ref(optimizer)
    step = type(optimizer).step

    @functools.wraps(step)
    def wrapper(*args: object, **kwargs: object) -> object:
        target = reference()
        target._opt_called = True  # type: ignore[union-attr]
        return step.__get__(target, type(target))(*args, **kwargs)

    wrapper._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.__dict__["step"] = wrapper
