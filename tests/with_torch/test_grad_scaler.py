"""Mixed precision: scaled gradients are unscaled, and a step with an infinity counts as none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_under_test import DEVICE
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from training import (
    SWAP_CLASS, assert_same_bits, assert_same_training, dense_gradient, make_pair, make_params,
    noise, params_of, train,
)

from swap_adam import SwapOptimizerConfig, swap_optimizer

each_pipeline = pytest.mark.parametrize("packed", [True, False], ids=["packed", "per_tensor"])
each_mode = pytest.mark.parametrize("original, options", [
    (Adam, {"foreach": False}), (Adam, {}), (AdamW, {"foreach": False}), (AdamW, {}),
    (AdamW, {"fused": True}), (AdamW, {"fused": True, "amsgrad": True}),
], ids=["adam-loop", "adam-default", "adamw-loop", "adamw-default", "adamw-fused",
        "adamw-fused-amsgrad"])
INFINITE_AT = (1, 2, 5)


def scaled_training(
    optimizer: Optimizer, steps: int = 8, unscale: bool = False
) -> list[tuple[float, list[int]]]:
    """Backward of a scaled loss, with infinities at some steps. Returns scales and counters."""
    scaler = torch.amp.GradScaler(DEVICE, init_scale=256.0, growth_interval=2)
    seen = []
    params = params_of(optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        loss = sum(
            (param * noise(step, index, param.detach())).square().sum() * 0.01
            for index, param in enumerate(params)
        )
        scaler.scale(loss).backward()
        if step in INFINITE_AT:
            params[2].grad.view(-1)[12345] = float("inf")  # in the middle of a cut tensor
        if unscale:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()
        steps_now = [int(optimizer.state[p]["step"]) if p in optimizer.state else 0 for p in params]
        seen.append((scaler.get_scale(), steps_now))
    return seen


@each_pipeline
@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled_and_clipped"])
@pytest.mark.parametrize("swap_times", [1, 100])
@each_mode
def test_training_with_a_grad_scaler(
    original: type[Optimizer], options: dict[str, Any], swap_times: int, unscale: bool,
    packed: bool,
) -> None:
    native, swapped = make_pair(
        original, {**options, "lr": 0.01}, {"swap_times": swap_times, "packed_swap": packed}
    )
    assert scaled_training(native, unscale=unscale) == scaled_training(swapped, unscale=unscale)
    assert_same_training(native, swapped)
    for left, right in zip(params_of(native), params_of(swapped)):
        assert_same_bits(left.grad, right.grad, "gradient")


@each_pipeline
def test_a_skipped_step_counts_as_none_also_for_cut_tensors(packed: bool) -> None:
    swapped = make_pair(AdamW, {"fused": True}, {"swap_times": 100, "packed_swap": packed})[1]
    counted = [steps for _, steps in scaled_training(swapped)]
    done = [sum(i not in INFINITE_AT for i in range(upto + 1)) for upto in range(8)]
    assert counted == [[count] * 6 for count in done]


@each_pipeline
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_the_attributes_that_a_scaler_sets_reach_every_batch(found: float, packed: bool) -> None:
    """``grad_scale`` and ``found_inf``: one infinity anywhere skips all parameters."""
    native, swapped = make_pair(AdamW, {"fused": True}, {"swap_times": 50, "packed_swap": packed})
    for optimizer in (native, swapped):
        train(optimizer, 2)
        before = [param.detach().clone() for param in params_of(optimizer)]
        for index, param in enumerate(params_of(optimizer)):
            param.grad = dense_gradient(2, index, param) * 64
        optimizer.grad_scale = torch.tensor(64.0, device=DEVICE)
        optimizer.found_inf = torch.tensor(found, device=DEVICE)
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
        same = all(torch.equal(a, b) for a, b in zip(before, params_of(optimizer)))
        assert same == bool(found)
    assert_same_training(native, swapped)
    for left, right in zip(params_of(native), params_of(swapped)):
        assert_same_bits(left.grad, right.grad, "the gradient is left as natively, unscaled")


@each_pipeline
def test_the_first_step_is_skipped(packed: bool) -> None:
    native, swapped = make_pair(AdamW, {"fused": True}, {"swap_times": 50, "packed_swap": packed})
    for optimizer in (native, swapped):
        for index, param in enumerate(params_of(optimizer)):
            param.grad = dense_gradient(0, index, param)
        optimizer.grad_scale = torch.tensor(2.0, device=DEVICE)
        optimizer.found_inf = torch.tensor(1.0, device=DEVICE)
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
        assert [int(state["step"]) for state in optimizer.state.values()] == [0] * 6
        train(optimizer, 2)
    assert_same_training(native, swapped)


def test_only_a_fused_optimizer_tells_the_scaler_that_it_unscales_itself() -> None:
    for options in ({}, {"foreach": False}, {"fused": True}):
        native, swapped = make_pair(AdamW, options)
        assert getattr(native, "_step_supports_amp_scaling", False) == getattr(
            swapped, "_step_supports_amp_scaling", False
        ) == ("fused" in options)


@each_pipeline
def test_a_converted_fused_optimizer_goes_on_with_its_scaler(packed: bool) -> None:
    native, converted = AdamW(make_params(), fused=True), AdamW(make_params(), fused=True)
    config = SwapOptimizerConfig(swap_times=50, packed_swap=packed)
    swap_optimizer(converted, config)
    assert scaled_training(native) == scaled_training(converted)
    assert_same_training(native, converted)


@each_mode
def test_autocast_and_scaler_around_a_model(
    original: type[Optimizer], options: dict[str, Any]
) -> None:
    def run(swapped: bool) -> Optimizer:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(40, 60), torch.nn.GELU(), torch.nn.Linear(60, 30)
        ).to(DEVICE)
        config = {"swap_config": SwapOptimizerConfig(swap_times=9)} if swapped else {}
        cls = SWAP_CLASS[original] if swapped else original
        optimizer = cls(model.parameters(), **options, **config)
        scaler = torch.amp.GradScaler(DEVICE)
        for step in range(5):
            x: Tensor = noise(step, 0, torch.empty(16, 40, device=DEVICE))
            with torch.autocast(DEVICE, dtype=torch.float16):
                loss = model(x).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return optimizer

    assert_same_training(run(swapped=False), run(swapped=True))
