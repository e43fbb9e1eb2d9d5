"""Class swap of existing MindSpore optimizers, in both directions."""
from __future__ import annotations

import sys
from typing import TypeVar, cast

from mindspore import nn
from mindspore.graph.api import _cell_graph_executor

from swap_adam.config import Configuration, SwapOptimizerConfig, as_config, describe_difference
from swap_adam.convert import remedy_for
from swap_adam.mindspore.adam import SwapMSAdam
from swap_adam.mindspore.adam_weight_decay import SwapAdamWeightDecay
from swap_adam.mindspore.optimizer import MindSporeSwapMixin

OptimizerT = TypeVar("OptimizerT")

MF_ADAMW_MODULE = "mindformers.pynative.optimizer.adamw"


def is_optimizer(optimizer: object) -> bool:
    """Whether ``optimizer`` is an optimizer of MindSpore, supported or not."""
    return isinstance(optimizer, nn.Optimizer)


def matches(optimizer: object) -> type[MindSporeSwapMixin] | None:
    """The swap class for exactly this class of optimizer, ``None`` if there is none."""
    return _swap_classes().get(type(optimizer))


def _swap_classes() -> dict[type, type[MindSporeSwapMixin]]:
    classes: list[type[MindSporeSwapMixin]] = [SwapMSAdam, SwapAdamWeightDecay]
    # An instance of MindFormers' class exists only if its module is loaded.
    if MF_ADAMW_MODULE in sys.modules:
        from swap_adam.mindspore.mf_adamw import SwapMFAdamW

        classes.append(SwapMFAdamW)
    return {cls.original: cls for cls in classes}


def validate(
    optimizer: nn.Optimizer, target: type[MindSporeSwapMixin], config: SwapOptimizerConfig
) -> None:
    """Refuse what ``target`` cannot honour, with ``optimizer`` left as it is.

    Raises:
        ValueError: an option of the optimizer, or the configuration.
    """
    target.refuse(optimizer, config)


def swap_optimizer(optimizer: OptimizerT, config: Configuration | None = None) -> OptimizerT:
    """See :func:`swap_adam.swap_optimizer`. Returns with the states on the host."""
    if isinstance(optimizer, MindSporeSwapMixin):
        wanted = optimizer.swap_config if config is None else as_config(config)
        if wanted != optimizer.swap_config:
            has, asked = describe_difference(optimizer.swap_config, wanted)
            raise ValueError(
                f"this optimizer is already a {type(optimizer).__name__} with {has}, asked for "
                f"{asked}; call unswap_optimizer() first to change the configuration"
            )
        return optimizer
    target = matches(optimizer)
    if target is None:
        raise _unsupported(optimizer)
    config = as_config(config)
    validate(optimizer, target, config)
    original = type(optimizer)
    swapped = cast(MindSporeSwapMixin, optimizer)
    try:
        object.__setattr__(swapped, "__class__", target)
        _forget_graphs(swapped)  # first: should the rest fail, the original goes on without
        swapped.attach(config)
    except BaseException:
        if type(swapped) is target:
            swapped.undo_attach()
            _forget(swapped, original)
        raise
    return cast(OptimizerT, swapped)


def unswap_optimizer(optimizer: OptimizerT) -> OptimizerT:
    """See :func:`swap_adam.unswap_optimizer`. Returns with the copies to the device done.

    Raises:
        RuntimeError: a step is running, parameters are half updated by an earlier fault, or the
            states do not fit on the device; nothing has changed.
    """
    if not isinstance(optimizer, MindSporeSwapMixin):
        raise TypeError(f"not a swap optimizer: {type(optimizer).__qualname__}; nothing to undo")
    if type(optimizer) not in _swap_classes().values():
        raise TypeError(
            f"{type(optimizer).__qualname__} derives from a swap class, so there is no original "
            "to turn it into; construct one and load this optimizer's checkpoint"
        )
    optimizer.bring_back()
    _forget_graphs(optimizer)
    _forget(optimizer, type(optimizer).original)
    return cast(OptimizerT, optimizer)


def _forget(optimizer: MindSporeSwapMixin, original: type) -> None:
    # The class first: without the attribute, an optimizer of the other one would not run.
    object.__setattr__(optimizer, "__class__", original)
    optimizer.__dict__.pop("_swap", None)


def _forget_graphs(optimizer: MindSporeSwapMixin) -> None:
    """Drop what the original's ``construct``, which is jitted, was compiled to.

    A graph keeps the memory that the Parameters had when it was compiled: it would hold the states
    on the device, and go on with them after the way back. What it was made for has the cell's
    creation time in its key.
    """
    _cell_graph_executor.del_net_res(optimizer, set(optimizer.phase_cache.values()))
    optimizer.phase_cache.clear()
    object.__setattr__(optimizer, "_create_time", optimizer._create_time + 1)


def _unsupported(optimizer: object) -> TypeError:
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    originals = _swap_classes()
    supported = ", ".join(f"{cls.__module__}.{cls.__qualname__}" for cls in originals)
    if any(isinstance(optimizer, cls) for cls in originals):
        remedy = "derive your class from SwapMSAdam, SwapAdamWeightDecay or SwapMFAdamW instead"
    else:
        remedy = "" if is_optimizer(optimizer) else remedy_for(optimizer)
        remedy = remedy or "other optimizers are not swapped"
    return TypeError(f"cannot convert a {name}; supported are exactly: {supported}; {remedy}")
