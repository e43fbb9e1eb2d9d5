"""The numbers themselves: bitwise equality with the original says nothing if both were wrong.

Adam and AdamW from the papers' formulas, in float64, against ours after ten steps. What may differ
is rounding: for the moments 1e-12 (float64) or 1e-5 (float32) of the largest value, for the
parameters that much of the way they can go in ten steps, and ten roundings of their own.
"""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy_adam import NumpyAdam
from torch.optim import Adam, AdamW
from training import SWAP_CLASS, make_params, noise, params_of

from swap_adam import SwapOptimizerConfig


SHAPES = [(1100,), (40, 80), (100,)]
STEPS = 10
OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"amsgrad": True, "betas": (0.7, 0.9)},
    {"maximize": True, "weight_decay": 0.05},
    {"lr": 0.1, "eps": 1e-3, "amsgrad": True, "maximize": True, "weight_decay": 0.3},
]


@pytest.mark.parametrize("original", [Adam, AdamW])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ", ".join(options) or "defaults")
def test_ten_steps_are_what_the_papers_say(
    original: type[torch.optim.Optimizer], packed: bool, dtype: torch.dtype,
    options: dict[str, Any],
) -> None:
    params = make_params(SHAPES, dtype)
    optimizer: Any = SWAP_CLASS[original](
        params, **options,
        swap_config=SwapOptimizerConfig(packed_swap=packed, swap_times=3),  # type: ignore[call-arg]
    )
    assert params_of(optimizer) == params
    defaults = {"weight_decay": 0.01 if original is AdamW else 0.0, **options}
    references = [NumpyAdam(decoupled=original is AdamW, **defaults) for _ in params]
    expected = [param.detach().cpu().double().numpy() for param in params]
    for step in range(STEPS):
        for index, param in enumerate(params):
            param.grad = noise(step, index, param.detach())
            gradient = param.grad.cpu().double().numpy()
            expected[index] = references[index].update(expected[index], gradient)
        optimizer.step()
    tolerance = 1e-12 if dtype is torch.float64 else 1e-5
    for param, theta, reference in zip(params, expected, references):
        state = optimizer.state[param]
        assert int(state["step"]) == reference.step == STEPS
        difference = np.abs(param.detach().cpu().double().numpy() - theta).max()
        rounding = torch.finfo(dtype).eps * np.abs(theta).max()
        assert difference <= STEPS * (tolerance * reference.lr + rounding)
        for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] * reference.amsgrad)):
            want = getattr(reference, name)
            have = state[name].cpu().double().numpy()
            assert np.abs(have - want).max() <= tolerance * np.abs(want).max(), name


def test_the_reference_can_tell_adam_from_adamw() -> None:
    """The check itself: the tolerance is far below what a wrong formula would give."""
    theta, gradient = np.linspace(-1, 1, 50), np.linspace(2, -1, 50)
    results = [
        NumpyAdam(weight_decay=0.1, betas=(0.7, 0.9), decoupled=decoupled, amsgrad=amsgrad)
        for decoupled in (True, False) for amsgrad in (True, False)
    ]
    values = []
    for reference in results:
        value = theta
        for step in range(STEPS):
            value = reference.update(value, gradient / (step + 1))
        values.append(value)
    for i, left in enumerate(values):
        for right in values[i + 1:]:
            assert np.abs(left - right).max() > 1e-4
