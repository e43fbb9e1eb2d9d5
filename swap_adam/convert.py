"""Converting an existing optimizer: finds the framework of the object that it is given."""
from __future__ import annotations

import sys
from importlib import import_module
from typing import Protocol, TypeVar, cast

from swap_adam.config import Configuration

OptimizerT = TypeVar("OptimizerT")

SUPPORTED = {
    "torch": "torch.optim.Adam, torch.optim.AdamW, HyperParallel's AdamW",
    "mindspore": "mindspore.nn.Adam, mindspore.nn.AdamWeightDecay, MindFormers' AdamW",
}


class _Half(Protocol):
    """The ``convert`` module of a framework's half."""

    def is_optimizer(self, optimizer: object) -> bool: ...

    def swap_optimizer(
        self, optimizer: OptimizerT, config: Configuration | None
    ) -> OptimizerT: ...

    def unswap_optimizer(self, optimizer: OptimizerT) -> OptimizerT: ...


def swap_optimizer(optimizer: OptimizerT, config: Configuration | None = None) -> OptimizerT:
    """Turn ``optimizer`` into its swap class, in place, and return the same object.

    States that exist move to pinned host memory at once, one after the other. Converting again
    with the same configuration does nothing. ``config`` may be a mapping of the fields.

    Raises:
        TypeError: ``optimizer`` is not exactly of a supported class, or ``config`` is none.
        ValueError: its options, or the configuration, cannot be honoured; nothing has changed.
        MemoryError: not enough pinned memory; nothing has changed.
    """
    return _half_of(optimizer).swap_optimizer(optimizer, config)


def unswap_optimizer(optimizer: OptimizerT) -> OptimizerT:
    """Turn a swap optimizer back into the original's class, its states on the device again.

    Raises:
        TypeError: ``optimizer`` is not a swap optimizer.
    """
    return _half_of(optimizer).unswap_optimizer(optimizer)


def _half_of(optimizer: object) -> _Half:
    # An optimizer's framework has been imported by whoever made it.
    for framework in ("torch", "mindspore"):
        if framework in sys.modules:
            half = cast(_Half, import_module(f"swap_adam.{framework}.convert"))
            if half.is_optimizer(optimizer):
                return half
    if isinstance(optimizer, type):
        raise TypeError(
            f"cannot convert the class {optimizer.__module__}.{optimizer.__qualname__}: "
            f"{remedy_for(optimizer)}"
        )
    roots = {cls.__module__.partition(".")[0] for cls in type(optimizer).__mro__}
    own_first = sorted(SUPPORTED, key=lambda framework: framework not in roots)
    supported = ", ".join(SUPPORTED[framework] for framework in own_first)
    remedy = remedy_for(optimizer)
    raise TypeError(
        f"cannot convert a {type(optimizer).__module__}.{type(optimizer).__qualname__}; "
        f"supported are exactly: {supported}" + (f"; {remedy}" if remedy else "")
    )


def remedy_for(thing: object) -> str:
    """What to convert instead of ``thing``, which is no optimizer; empty where nothing is known."""
    if isinstance(thing, type):
        return "make an optimizer of the class and convert that"
    if getattr(thing, "optimizer", None) is not None:
        return "it wraps an optimizer: convert that one, its attribute `optimizer`"
    if hasattr(thing, "optimizer") or hasattr(thing, "_optimizer"):
        return "convert the optimizer that it is given, not what runs it"
    if hasattr(thing, "parameters") or hasattr(thing, "trainable_params"):
        return "it is a model: convert the optimizer that was made of its parameters"
    if isinstance(thing, (list, tuple, dict)):
        return "convert its optimizers one by one"
    return ""
