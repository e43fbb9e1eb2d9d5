"""Small trainings whose every bit is compared: parameters, gradients, steps, comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from device_under_test import DEVICE
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from swap_adam import SwapOptimizerConfig
from swap_adam.torch import SwapAdam, SwapAdamW

SWAP_CLASS: dict[type[Optimizer], type[Optimizer]] = {Adam: SwapAdam, AdamW: SwapAdamW}
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

# One tensor that is most of the model and larger than a batch, odd sizes, and some that are
# below min_numel, one of them in the middle.
SHAPES: tuple[tuple[int, ...], ...] = ((33, 40), (7,), (61, 307), (1024,), (1023,), (3, 5, 129))

Gradient = Callable[[int, int, Tensor], Tensor | None]


def make_params(
    shapes: Iterable[Sequence[int]] = SHAPES,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = DEVICE,
    seed: int = 0,
) -> list[Tensor]:
    """Leaf tensors, drawn on the CPU, so that they are the same everywhere."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
        .to(dtype).to(device).requires_grad_()
        for shape in shapes
    ]


def noise(step: int, index: int, like: Tensor) -> Tensor:
    """Numbers that depend on the step and on which parameter it is, on the device of ``like``."""
    generator = torch.Generator().manual_seed(1000 * step + index + 1)
    real = like.real if like.is_complex() else like
    drawn = torch.randn(real.shape, generator=generator, dtype=torch.float64)
    if like.is_complex():
        drawn = torch.complex(drawn, drawn.flip(0) if drawn.dim() else -drawn)
    return drawn.to(like.dtype).to(like.device)


def dense_gradient(step: int, index: int, param: Tensor) -> Tensor:
    """Depends on the parameter too, so that one wrong bit spreads."""
    return noise(step, index, param).add_(param.detach(), alpha=0.1)


def params_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def train(
    optimizer: Optimizer,
    steps: int | range = 10,
    gradient: Gradient = dense_gradient,
    after_step: Callable[[int], object] = lambda step: None,
) -> None:
    """Steps with ``gradient(step, index, param)``, ``index`` counting over all groups."""
    for step in range(steps) if isinstance(steps, int) else steps:
        for index, param in enumerate(params_of(optimizer)):
            param.grad = gradient(step, index, param)
        optimizer.step()
        after_step(step)


def snapshot(optimizer: Optimizer) -> dict[str, Any]:
    """Parameters, all states and the groups' options, copied to the CPU."""
    params = params_of(optimizer)
    state = optimizer.state
    return {
        "params": [param.detach().cpu().clone() for param in params],
        "states": [
            {
                name: value.detach().cpu().clone() if isinstance(value, Tensor) else value
                for name, value in state[param].items()
            } if param in state else None
            for param in params
        ],
        "groups": [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ],
    }


def assert_same_bits(left: Tensor, right: Tensor, what: str) -> None:
    """The same dtype, shape and values; a NaN equals a NaN."""
    assert left.dtype == right.dtype, what
    assert left.shape == right.shape, what
    left, right = left.detach().cpu(), right.detach().cpu()
    if left.is_complex():
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    same = (left == right) | (left.isnan() & right.isnan())
    assert bool(same.all()), f"{what}: {int((~same).sum())} of {same.numel()} elements differ"


def assert_same_training(native: Optimizer, swapped: Optimizer) -> None:
    """Both have the same parameters, the same states in the same order, the same steps."""
    want, have = snapshot(native), snapshot(swapped)
    assert len(want["params"]) == len(have["params"])
    for index, (left, right) in enumerate(zip(want["params"], have["params"])):
        assert_same_bits(left, right, f"parameter {index}")
    for index, (expected, found) in enumerate(zip(want["states"], have["states"])):
        assert (expected is None) == (found is None), f"state of parameter {index}"
        if expected is None or found is None:
            continue
        assert list(expected) == list(found), f"state of parameter {index}"
        for name in expected:
            if isinstance(expected[name], Tensor):
                assert_same_bits(expected[name], found[name], f"{name} of parameter {index}")
            else:
                assert expected[name] == found[name], f"{name} of parameter {index}"


def make_pair(
    original: type[Optimizer],
    options: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    make: Callable[[], Any] = make_params,
) -> tuple[Optimizer, Optimizer]:
    """The native optimizer and ours, each on its own copy of the same parameters or groups."""
    native = original(make(), **(options or {}))
    swapped = SWAP_CLASS[original](
        make(), **(options or {}), swap_config=SwapOptimizerConfig(**(config or {}))
    )
    return native, swapped


def assert_trains_alike(
    original: type[Optimizer],
    options: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    make: Callable[[], Any] = make_params,
    steps: int = 10,
    gradient: Gradient = dense_gradient,
) -> tuple[Optimizer, Optimizer]:
    """Trains :func:`make_pair` and compares every bit; returns both."""
    native, swapped = make_pair(original, options, config, make)
    train(native, steps, gradient)
    train(swapped, steps, gradient)
    assert_same_training(native, swapped)
    return native, swapped


def on_host(optimizer: Optimizer) -> list[set[str]]:
    """Per parameter, the names of the float states that are on the CPU (``step`` aside)."""
    return _where(optimizer, lambda value: value.device.type == "cpu")


def on_device(optimizer: Optimizer) -> list[set[str]]:
    """Per parameter, the names of the float states that are not on the CPU (``step`` aside)."""
    return _where(optimizer, lambda value: value.device.type != "cpu")


def _where(optimizer: Optimizer, predicate: Callable[[Tensor], bool]) -> list[set[str]]:
    state = optimizer.state
    return [
        {name for name in MOMENTS if name in state[param] and predicate(state[param][name])}
        for param in params_of(optimizer)
    ]
