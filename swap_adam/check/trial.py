"""Short trainings on the device at hand, native against swapped, compared bit by bit."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from swap_adam.config import SwapOptimizerConfig
from swap_adam.demo.compare import Snapshot, differences, take_snapshot
from swap_adam.torch import SwapAdam, SwapAdamW

STEPS = 4
WIDTH = 256
BATCH_SIZE = 8
# Small enough for several batches, and for tensors that are cut.
SWAP_TIMES = 8

DTYPES = (torch.float32, torch.bfloat16)

MakeSwapped = Callable[[Iterator[nn.Parameter], SwapOptimizerConfig], Optimizer]
MakeNative = Callable[[Iterator[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Case:
    """A native optimizer and its swapped counterpart, in the same implementation."""

    name: str
    native: MakeNative
    swapped: MakeSwapped


CASES = (
    Case(
        "AdamW, default",
        lambda params: AdamW(params),
        lambda params, config: SwapAdamW(params, swap_config=config),
    ),
    Case(
        "AdamW, for-loop",
        lambda params: AdamW(params, foreach=False),
        lambda params, config: SwapAdamW(params, foreach=False, swap_config=config),
    ),
    Case(
        "AdamW, fused",
        lambda params: AdamW(params, fused=True),
        lambda params, config: SwapAdamW(params, fused=True, swap_config=config),
    ),
    Case(
        "Adam, default, amsgrad",
        lambda params: Adam(params, amsgrad=True),
        lambda params, config: SwapAdam(params, amsgrad=True, swap_config=config),
    ),
)


def pin(nbytes: int, device: torch.device) -> list[str]:
    """What is wrong with pinned memory: nothing if it can be had and copied through unharmed.

    Raises:
        RuntimeError: the device's runtime cannot pin this much.
    """
    host = torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    found = [] if host.is_pinned() else ["pin_memory=True gave memory that is not pinned"]
    host[::4096] = 7
    on_device = host.to(device, non_blocking=True)
    back = torch.empty_like(host, pin_memory=True)
    back.copy_(on_device, non_blocking=True)
    torch.accelerator.synchronize(device)
    return found if torch.equal(host, back) else [*found, "a round trip changed the bytes"]


def run_case(case: Case, packed: bool, dtype: torch.dtype, device: torch.device) -> list[str]:
    """The differences, one line each; none where the two are bitwise equal.

    Raises:
        RuntimeError: the states did not go to the host, or the device refused something.
    """
    config = SwapOptimizerConfig(swap_times=SWAP_TIMES, packed_swap=packed)
    expected = _train(case.native, dtype, device)
    actual = _train(lambda params: case.swapped(params, config), dtype, device)
    return differences(expected, actual)


def _train(make: MakeNative, dtype: torch.dtype, device: torch.device) -> Snapshot:
    """A few steps on gradients that are given, so that only the optimizer's bits count."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.LayerNorm(4 * WIDTH),
                          nn.Linear(4 * WIDTH, WIDTH))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    model.to(device, dtype)
    optimizer = make(model.parameters())
    for _ in range(STEPS):
        for param in model.parameters():
            grad = torch.randn(param.shape, generator=generator)
            param.grad = grad.to(device, dtype)
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, (SwapAdam, SwapAdamW)):
        _require_swapped(model, optimizer)
    return take_snapshot(model, optimizer, [])


def _require_swapped(model: nn.Module, optimizer: Optimizer) -> None:
    """Equality would prove nothing if the states had stayed where they were."""
    for name, param in model.named_parameters():
        exp_avg = optimizer.state[param]["exp_avg"]
        if param.numel() >= SwapOptimizerConfig.min_numel and exp_avg.device.type != "cpu":
            raise RuntimeError(f"exp_avg of {name} is on {exp_avg.device}, not on the host")
