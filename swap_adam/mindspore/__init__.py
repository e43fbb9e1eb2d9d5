"""Swap optimizers for MindSpore: nn.Adam, nn.AdamWeightDecay and MindFormers' PyNative AdamW."""
from __future__ import annotations

from typing import TYPE_CHECKING

from swap_adam.config import SwapOptimizerConfig
from swap_adam.mindspore.adam import SwapMSAdam
from swap_adam.mindspore.adam_weight_decay import SwapAdamWeightDecay
from swap_adam.mindspore.convert import swap_optimizer, unswap_optimizer

if TYPE_CHECKING:
    from swap_adam.mindspore.mf_adamw import SwapMFAdamW as SwapMFAdamW

__all__ = [
    "SwapAdamWeightDecay",
    "SwapMFAdamW",
    "SwapMSAdam",
    "SwapOptimizerConfig",
    "swap_optimizer",
    "unswap_optimizer",
]


def __getattr__(name: str) -> object:
    # Only who asks for it imports mindformers.
    if name == "SwapMFAdamW":
        from swap_adam.mindspore.mf_adamw import SwapMFAdamW

        return SwapMFAdamW
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
