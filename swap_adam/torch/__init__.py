"""Swap optimizers for PyTorch: Adam and AdamW of ``torch.optim``, and HyperParallel's AdamW."""
from __future__ import annotations

from typing import TYPE_CHECKING

from swap_adam.config import SwapOptimizerConfig
from swap_adam.errors import require

require("torch", extra="torch")

from swap_adam.torch.adam import SwapAdam, SwapAdamW  # noqa: E402
from swap_adam.torch.convert import swap_optimizer, unswap_optimizer  # noqa: E402

if TYPE_CHECKING:
    from swap_adam.torch.hyper_adamw import SwapHyperAdamW as SwapHyperAdamW

__all__ = [
    "SwapAdam",
    "SwapAdamW",
    "SwapHyperAdamW",
    "SwapOptimizerConfig",
    "swap_optimizer",
    "unswap_optimizer",
]


def __getattr__(name: str) -> object:
    # Only who asks for it imports hyper_parallel.
    if name == "SwapHyperAdamW":
        from swap_adam.torch.hyper_adamw import SwapHyperAdamW

        return SwapHyperAdamW
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
