"""Adam with its moments in pinned host memory between steps, as drop-in optimizer subclasses.

Importing this package imports no framework: every name below is resolved when it is first asked
for, and the framework halves live in :mod:`swap_adam.torch` and :mod:`swap_adam.mindspore`.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swap_adam.config import SwapOptimizerConfig as SwapOptimizerConfig
    from swap_adam.convert import swap_optimizer as swap_optimizer
    from swap_adam.convert import unswap_optimizer as unswap_optimizer

__version__ = "0.1.0.dev0"
__all__ = ["SwapOptimizerConfig", "swap_optimizer", "unswap_optimizer"]

_MODULE_OF_NAME = {
    "SwapOptimizerConfig": "swap_adam.config",
    "swap_optimizer": "swap_adam.convert",
    "unswap_optimizer": "swap_adam.convert",
}

_HALF_OF_CLASS = {
    "SwapAdam": "torch",
    "SwapAdamW": "torch",
    "SwapHyperAdamW": "torch",
    "SwapAdamWeightDecay": "mindspore",
    "SwapMFAdamW": "mindspore",
    "SwapMSAdam": "mindspore",
}


def __getattr__(name: str) -> object:
    if name in _HALF_OF_CLASS:
        # Of an AttributeError `from swap_adam import` would not print the text.
        half = f"{__name__}.{_HALF_OF_CLASS[name]}"
        raise ImportError(f"{name} is in {half}: from {half} import {name}")
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_MODULE_OF_NAME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF_NAME])
