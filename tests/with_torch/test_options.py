"""The options that trade memory for speed change no bit of the training."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from training import (
    SHAPES, SWAP_CLASS, assert_same_training, assert_trains_alike, dense_gradient, make_pair,
    make_params, noise, on_device, on_host, params_of, train,
)

from swap_adam import SwapOptimizerConfig, swap_optimizer

BOTH = {"exp_avg", "exp_avg_sq"}
OPTIONS: dict[str, dict[str, Any]] = {
    "auto": {"swap_times": "auto"},
    "auto_small": {"swap_times": "auto", "staging_nbytes": 20_000},
    "resident": {"swap_times": 7, "resident_nbytes": 20_000},
    "resident_all": {"swap_times": 7, "resident_nbytes": 10**9},
    "keep": {"swap_times": 7, "keep_staging": True},
    "drain": {"swap_times": 7, "drain_in_step": True},
    "prefetch": {"swap_times": 7, "prefetch_in_backward": True},
    "prefetch_and_keep": {"swap_times": 7, "prefetch_in_backward": True, "keep_staging": True},
    "prefetch_and_drain": {"swap_times": 7, "prefetch_in_backward": True, "drain_in_step": True},
    "per_tensor_resident": {"swap_times": 7, "packed_swap": False, "resident_nbytes": 20_000},
    "per_tensor_drain": {"swap_times": 7, "packed_swap": False, "drain_in_step": True},
    "per_tensor_auto": {"swap_times": "auto", "packed_swap": False},
}
each_option = pytest.mark.parametrize("option", OPTIONS)
each_mode = pytest.mark.parametrize("original, options", [
    (Adam, {"foreach": False}), (Adam, {"amsgrad": True}), (AdamW, {"foreach": False}),
    (AdamW, {}), (AdamW, {"fused": True}),
], ids=["adam-loop", "adam-default-amsgrad", "adamw-loop", "adamw-default", "adamw-fused"])


@each_option
@each_mode
def test_ten_steps_are_the_native_ones(
    original: type[Optimizer], options: dict[str, Any], option: str
) -> None:
    assert_trains_alike(original, options, OPTIONS[option])


@each_option
def test_gradients_missing_at_random(option: str) -> None:
    present = random.Random(3)
    choice = [[present.random() < 0.6 for _ in SHAPES] for _ in range(10)]

    def gradient(step: int, index: int, param: Tensor) -> Tensor | None:
        return dense_gradient(step, index, param) if choice[step][index] else None

    assert_trains_alike(AdamW, {}, OPTIONS[option], gradient=gradient)


# With a real backward, so that prefetching begins in it


def backward(optimizer: Optimizer, step: int) -> None:
    total = sum(
        (param * noise(step, index, param.detach())).square().sum()
        for index, param in enumerate(params_of(optimizer)) if param.requires_grad
    )
    total.backward()


def step(optimizer: Optimizer, turn: int) -> None:
    optimizer.zero_grad()
    backward(optimizer, turn)
    optimizer.step()


def accumulate(optimizer: Optimizer, turn: int) -> None:
    optimizer.zero_grad()
    backward(optimizer, turn)
    backward(optimizer, turn + 100)
    optimizer.step()


def clip(optimizer: Optimizer, turn: int) -> None:
    optimizer.zero_grad()
    backward(optimizer, turn)
    torch.nn.utils.clip_grad_norm_(params_of(optimizer), 0.5)
    optimizer.step()


def skip_the_step(optimizer: Optimizer, turn: int) -> None:
    optimizer.zero_grad()
    backward(optimizer, turn)
    if turn % 2:
        optimizer.step()


def lose_a_gradient(optimizer: Optimizer, turn: int) -> None:
    optimizer.zero_grad()
    backward(optimizer, turn)
    params_of(optimizer)[turn % 6].grad = None
    optimizer.step()


def freeze(optimizer: Optimizer, turn: int) -> None:
    for index, param in enumerate(params_of(optimizer)):
        param.requires_grad_((turn + index) % 3 != 0)
    optimizer.zero_grad()
    backward(optimizer, turn)
    optimizer.step()


def read_after_backward(optimizer: Optimizer, turn: int) -> None:
    optimizer.zero_grad()
    backward(optimizer, turn)
    for param in params_of(optimizer):
        if param in optimizer.state:
            assert optimizer.state[param]["exp_avg"].isfinite().all()
    optimizer.step()


def write_after_backward(optimizer: Optimizer, turn: int) -> None:
    optimizer.zero_grad()
    backward(optimizer, turn)
    for param in params_of(optimizer):
        if param in optimizer.state:
            optimizer.state[param]["exp_avg"].mul_(0.5)
    optimizer.step()


def write_through_what_was_held_before_backward(optimizer: Optimizer, turn: int) -> None:
    held = [state["exp_avg"] for state in optimizer.state.values()]
    optimizer.zero_grad()
    backward(optimizer, turn)
    for value in held:
        value.mul_(0.5)
    optimizer.step()


def save_and_load_after_backward(optimizer: Optimizer, turn: int) -> None:
    optimizer.zero_grad()
    backward(optimizer, turn)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()


def add_a_group_after_backward(optimizer: Optimizer, turn: int) -> None:
    optimizer.zero_grad()
    backward(optimizer, turn)
    if turn == 2:
        optimizer.add_param_group({"params": make_params(seed=7), "lr": 0.1})
    optimizer.step()


def change_options_after_backward(optimizer: Optimizer, turn: int) -> None:
    optimizer.zero_grad()
    backward(optimizer, turn)
    optimizer.param_groups[0]["lr"] = 0.01 * (turn + 1)
    optimizer.param_groups[0]["weight_decay"] = 0.1 * turn
    optimizer.step()


def step_twice(optimizer: Optimizer, turn: int) -> None:
    step(optimizer, turn)
    optimizer.step()


TURNS: dict[str, Callable[[Optimizer, int], None]] = {
    turn.__name__: turn for turn in (
        step, accumulate, clip, skip_the_step, lose_a_gradient, freeze, read_after_backward,
        write_after_backward, write_through_what_was_held_before_backward,
        save_and_load_after_backward, add_a_group_after_backward, change_options_after_backward,
        step_twice,
    )
}


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize(
    "option", ["keep", "drain", "resident", "prefetch", "prefetch_and_keep", "prefetch_and_drain"]
)
def test_whatever_comes_between_backward_and_step(option: str, turn: str) -> None:
    native, swapped = make_pair(AdamW, {}, OPTIONS[option])
    for optimizer in (native, swapped):
        for number in range(6):
            TURNS[turn](optimizer, number)
    assert_same_training(native, swapped)


# What stays on the device


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("budget, kept", [
    (0, []), (2047, []), (8000, [{"exp_avg"}]), (8001, [{"exp_avg"}]), (16_000, [BOTH]),
])
def test_states_stay_on_the_device_up_to_the_budget_and_never_above(
    budget: int, kept: list[set[str]], converted: bool
) -> None:
    config = {"resident_nbytes": budget, "swap_times": 3}
    shapes = [(40, 50), (1999,)]

    def make() -> list[Tensor]:
        return make_params(shapes)

    if converted:
        optimizer = AdamW(make())
        train(optimizer, 2)
        swap_optimizer(optimizer, SwapOptimizerConfig(**config))
        train(optimizer, range(2, 4))
        native = AdamW(make())
        train(native, 4)
        assert_same_training(native, optimizer)
    else:
        _, optimizer = assert_trains_alike(AdamW, {}, config, make, 4)
    stays = sum(
        4 * param.numel() * len(names)
        for param, names in zip(params_of(optimizer), on_device(optimizer))
    )
    assert stays <= budget
    expected = kept[0] if kept else set()
    assert on_device(optimizer) == [expected, set()]
    assert on_host(optimizer) == [BOTH - expected, BOTH]


def test_what_stays_on_the_device_is_reported_and_stays_the_same() -> None:
    shapes = [(40, 50), (30, 50), (60, 50)]
    config = SwapOptimizerConfig(resident_nbytes=30_000, swap_times=3)
    optimizer = SWAP_CLASS[AdamW](make_params(shapes), swap_config=config)  # type: ignore[call-arg]
    reports = []
    for step_index in range(4):
        train(optimizer, range(step_index, step_index + 1))
        (report,) = optimizer.swap_report().values()
        reports.append(report)
        optimizer.load_state_dict(optimizer.state_dict())
    assert len(set(reports)) == 1
    # The largest first: both of the third tensor, and what still fits of the others.
    assert report.resident_nbytes == 2 * 12_000 + 6_000
    assert report.resident == (
        "exp_avg of parameter 2 of its group (shape (60, 50))",
        "exp_avg_sq of parameter 2 of its group (shape (60, 50))",
        "exp_avg of parameter 1 of its group (shape (30, 50))",
    )
    assert report.swapped_nbytes == 2 * 8_000 + 6_000


def test_a_device_on_which_everything_stays_is_reported_too() -> None:
    config = SwapOptimizerConfig(resident_nbytes=10**9)
    optimizer = SWAP_CLASS[AdamW](make_params([(40, 50)]), swap_config=config)  # type: ignore
    train(optimizer, 1)
    (report,) = optimizer.swap_report().values()
    assert (report.resident_nbytes, report.swapped_nbytes) == (16_000, 0)


@pytest.mark.simulator_only
def test_prefetching_begins_in_backward_and_only_then(simulator: Any) -> None:
    swapped = make_pair(AdamW, {}, OPTIONS["prefetch"])[1]
    step(swapped, 0)
    swapped.zero_grad()
    torch.accelerator.synchronize()
    inputs = sum(4 * param.numel() for param in params_of(swapped))
    simulator.reset_counters()
    backward(swapped, 1)
    before = simulator.counters().copies_in_nbytes - inputs
    swapped.step()
    after = simulator.counters().copies_in_nbytes - inputs
    states = sum(2 * 4 * p.numel() for p in params_of(swapped) if p.numel() >= 1024)
    assert 64 < before < after
    assert states <= after < states + 64  # and the loss's own gradient


@pytest.mark.simulator_only
def test_staging_is_kept_only_where_asked_for(simulator: Any) -> None:
    held = {}
    for option in ("keep", "drain", "prefetch"):
        swapped = make_pair(AdamW, {}, OPTIONS[option])[1]
        torch.accelerator.synchronize()  # what the last one held is back
        start = simulator.memory_held()
        step(swapped, 0)
        swapped.zero_grad()
        torch.accelerator.synchronize()
        held[option] = simulator.memory_held() - start
    assert held["drain"] == held["prefetch"] < held["keep"]
