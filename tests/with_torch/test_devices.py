"""Parameters on the CPU, on two devices, on another device later, and steps under other streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_under_test import DEVICE
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from training import (
    MOMENTS, assert_same_training, assert_trains_alike, dense_gradient, make_pair, make_params,
    on_device, on_host, params_of, train,
)

from swap_adam import SwapOptimizerConfig, swap_optimizer
from swap_adam.torch import SwapAdamW

each_pipeline = pytest.mark.parametrize("packed", [True, False], ids=["packed", "per_tensor"])
each_mode = pytest.mark.parametrize("original, options", [
    (Adam, {"foreach": False}), (Adam, {}), (AdamW, {"foreach": False}), (AdamW, {}),
    (AdamW, {"fused": True}),
], ids=["adam-loop", "adam-default", "adamw-loop", "adamw-default", "adamw-fused"])
needs_two = pytest.mark.skipif(
    torch.accelerator.device_count() < 2, reason="needs two devices of the same type"
)
BOTH = {"exp_avg", "exp_avg_sq"}


@each_mode
def test_cpu_parameters_train_natively_without_any_swapping(
    original: type[Optimizer], options: dict[str, Any]
) -> None:
    _, swapped = assert_trains_alike(
        original, options, {"min_numel": 0}, lambda: make_params(device="cpu")
    )
    assert not any(
        value.is_pinned() for state in swapped.state.values() for value in state.values()
    )


@each_pipeline
@each_mode
def test_cpu_parameters_beside_device_parameters_in_one_group(
    original: type[Optimizer], options: dict[str, Any], packed: bool
) -> None:
    def make() -> list[Tensor]:
        pairs = zip(make_params(), make_params(seed=1, device="cpu"))
        return [param for pair in pairs for param in pair]

    _, swapped = assert_trains_alike(
        original, options, {"swap_times": 5, "packed_swap": packed}, make, 4
    )
    cpu = params_of(swapped)[1::2]
    assert not any(swapped.state[p][n].is_pinned() for p in cpu for n in BOTH)


def test_a_converted_optimizer_over_cpu_parameters_is_left_on_the_cpu() -> None:
    native, swapped = AdamW(make_params(device="cpu")), AdamW(make_params(device="cpu"))
    for optimizer in (native, swapped):
        train(optimizer, 2)
    before = {id(t) for state in swapped.state.values() for t in state.values()}
    swap_optimizer(swapped)
    assert {id(t) for state in swapped.state.values() for t in state.values()} == before
    for optimizer in (native, swapped):
        train(optimizer, range(2, 5))
    assert_same_training(native, swapped)


@needs_two
@each_pipeline
@pytest.mark.parametrize("swap_times", [1, 5, 100])
@each_mode
def test_one_optimizer_over_two_devices(
    original: type[Optimizer], options: dict[str, Any], swap_times: int, packed: bool
) -> None:
    def make() -> list[Tensor]:
        pairs = zip(make_params(device=f"{DEVICE}:0"), make_params(seed=1, device=f"{DEVICE}:1"))
        return [param for pair in pairs for param in pair]

    _, swapped = assert_trains_alike(
        original, options, {"swap_times": swap_times, "packed_swap": packed}, make, 4
    )
    assert sum(map(bool, on_host(swapped))) == 8


@needs_two
@each_pipeline
def test_the_second_device_is_used_while_the_first_is_current(packed: bool) -> None:
    """And the current device is the same after the step."""
    assert torch.accelerator.current_device_index() == 0
    assert_trains_alike(
        AdamW, {}, {"swap_times": 5, "packed_swap": packed},
        lambda: make_params(device=f"{DEVICE}:1"), 3,
    )
    assert torch.accelerator.current_device_index() == 0


@needs_two
@pytest.mark.simulator_only
def test_nothing_is_left_or_moved_on_a_device_without_parameters(simulator: Any) -> None:
    before = simulator.memory_held(0)
    torch.get_device_module(DEVICE).reset_peak_memory_stats(0)
    optimizer = SwapAdamW(make_params(device=f"{DEVICE}:1"))
    with simulator.record_operations() as operations:
        train(optimizer, 2)
    assert {operation.device for operation in operations} == {1}
    assert simulator.max_memory_held(0) == before


@needs_two
def test_parameters_moved_to_another_device_between_steps_take_their_states_along() -> None:
    """Natively the states stay behind and the step fails until somebody moves them; we follow."""
    native = AdamW(make_params(device=f"{DEVICE}:1"))
    params = make_params(device=f"{DEVICE}:0")
    swapped = SwapAdamW(params, swap_config=SwapOptimizerConfig(swap_times=5))
    train(native, 4)
    train(swapped, 2)
    small = [param for param in params if param.numel() < 1024]
    for param in params:
        param.grad = None
        param.data = param.data.to(f"{DEVICE}:1")
    for param in small:  # what is not swapped is moved by whoever moves the parameter
        for name in BOTH:
            swapped.state[param][name] = swapped.state[param][name].to(f"{DEVICE}:1")
    train(swapped, range(2, 4))
    assert_same_training(native, swapped)


def test_parameters_moved_from_the_cpu_before_the_first_step_are_swapped() -> None:
    """``Module.to(device)`` after the optimizer was made, as many scripts do."""
    native, swapped = make_pair(AdamW, make=lambda: make_params(device="cpu"))
    for optimizer in (native, swapped):
        for param in params_of(optimizer):
            param.data = param.data.to(DEVICE)
        train(optimizer, 3)
    assert_same_training(native, swapped)
    assert sum(map(bool, on_host(swapped))) == 4


@each_pipeline
@each_mode
def test_a_step_under_another_stream(
    original: type[Optimizer], options: dict[str, Any], packed: bool
) -> None:
    """With the ordering that the caller owes: that stream waits for the gradients, the default
    stream then for the parameters. The simulator raises if we owe any."""
    native, swapped = make_pair(original, options, {"swap_times": 7, "packed_swap": packed})
    train(native, 4)
    main = torch.accelerator.current_stream()
    others = [torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)]
    for step in range(4):
        for index, param in enumerate(params_of(swapped)):
            param.grad = dense_gradient(step, index, param)
        if step == 3:
            swapped.step()
            continue
        other = others[step % 2]
        other.wait_stream(main)
        with other:
            swapped.step()
        main.wait_stream(other)
    assert_same_training(native, swapped)


@each_pipeline
def test_gradients_made_right_before_a_step_need_no_wait_of_the_user(packed: bool) -> None:
    """Steps back to back, and parameters used right after: no synchronisation anywhere."""
    native, swapped = make_pair(AdamW, config={"swap_times": 7, "packed_swap": packed})
    for optimizer in (native, swapped):
        for step in range(6):
            for index, param in enumerate(params_of(optimizer)):
                param.grad = dense_gradient(step, index, param)
            optimizer.step()
            optimizer.step()
            total = sum(param.detach().sum() for param in params_of(optimizer))
            assert total.isfinite()
    assert_same_training(native, swapped)


def test_inference_and_no_grad_contexts_around_the_step() -> None:
    native, swapped = make_pair(AdamW, config={"swap_times": 7})
    for optimizer in (native, swapped):
        for step in range(3):
            for index, param in enumerate(params_of(optimizer)):
                param.grad = dense_gradient(step, index, param)
            with torch.no_grad():
                optimizer.step()
            assert torch.is_grad_enabled()
    assert_same_training(native, swapped)
    assert all(
        not swapped.state[param][name].requires_grad
        for param in params_of(swapped) for name in MOMENTS[:2]
    )
    assert on_device(swapped)[0] == set()
