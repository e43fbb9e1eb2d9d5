"""Swap optimizers for MindSpore: nn.Adam, nn.AdamWeightDecay and MindFormers' PyNative AdamW."""
from __future__ import annotations

from typing import TYPE_CHECKING

from swap_adam.config import SwapOptimizerConfig
from swap_adam.errors import require

require("mindspore", extra="mindspore")

from swap_adam.mindspore.adam import SwapMSAdam  # noqa: E402
from swap_adam.mindspore.adam_weight_decay import SwapAdamWeightDecay  # noqa: E402
from swap_adam.mindspore.convert import swap_optimizer, unswap_optimizer  # noqa: E402

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
        require("mindformers", extra="mindformers")
        from swap_adam.mindspore.mf_adamw import SwapMFAdamW

        return SwapMFAdamW
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
