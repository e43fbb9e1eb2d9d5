"""Hooks and the profiler see one step per step, as with the native optimizer."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook, register_optimizer_step_pre_hook,
)
from training import (
    SWAP_CLASS, assert_same_training, dense_gradient, make_pair, make_params, params_of, train,
)

from swap_adam import SwapOptimizerConfig, swap_optimizer, unswap_optimizer
from swap_adam.swap import swap_of
from swap_adam.torch import SwapAdamW

CONFIG = {"swap_times": 20}


@pytest.fixture(autouse=True)
def _as_in_a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch puts the hooks around ``step`` on the class, when an instance is first made: undo
    what other tests have had done, so that each way to make an optimizer stands by itself."""
    for cls in SWAP_CLASS.values():
        if "step" in vars(cls):
            monkeypatch.delattr(cls, "step")


each_class = pytest.mark.parametrize("original", [Adam, AdamW])
MADE = ["constructed", "converted", "converted_after_training", "unswapped"]


def make(original: type[Optimizer], how: str) -> Optimizer:
    config = SwapOptimizerConfig(**CONFIG)
    if how == "constructed":
        return SWAP_CLASS[original](make_params(), swap_config=config)
    optimizer = original(make_params())
    if how == "converted_after_training":
        train(optimizer, 1)
    swap_optimizer(optimizer, config)
    if how == "unswapped":
        train(optimizer, 1)
        unswap_optimizer(optimizer)
    return optimizer


@pytest.mark.parametrize("how", MADE)
@each_class
def test_step_hooks_run_once_per_step(original: type[Optimizer], how: str) -> None:
    optimizer = make(original, how)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append("pre"))
    optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append("post"))
    train(optimizer, 3)
    assert calls == ["pre", "post"] * 3


@pytest.mark.parametrize("how", MADE)
@each_class
def test_global_step_hooks_run_once_per_step(original: type[Optimizer], how: str) -> None:
    optimizer = make(original, how)
    calls: list[tuple[str, bool]] = []
    handles = [
        register_optimizer_step_pre_hook(lambda o, a, k: calls.append(("pre", o is optimizer))),
        register_optimizer_step_post_hook(lambda o, a, k: calls.append(("post", o is optimizer))),
    ]
    try:
        train(optimizer, 3)
    finally:
        for handle in handles:
            handle.remove()
    assert calls == [("pre", True), ("post", True)] * 3


def test_a_subclass_with_its_own_step_runs_hooks_as_a_native_subclass_does() -> None:
    class Mine:
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    counts = []
    for parent in (AdamW, SwapAdamW):
        parent(make_params())  # puts the hooks around the parent's step
        optimizer = type("MyAdamW", (Mine, parent), {})(make_params())
        calls: list[int] = []
        optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append(1))
        train(optimizer, 3)
        counts.append(len(calls))
    assert counts[0] == counts[1]


@each_class
def test_hooks_registered_before_the_conversion_go_on(original: type[Optimizer]) -> None:
    optimizer = original(make_params())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append("pre"))
    optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append("post"))
    optimizer.register_state_dict_post_hook(lambda o, d: calls.append("state_dict"))
    train(optimizer, 1)
    swap_optimizer(optimizer, SwapOptimizerConfig(**CONFIG))
    train(optimizer, range(1, 2))
    optimizer.state_dict()
    unswap_optimizer(optimizer)
    train(optimizer, range(2, 3))
    assert calls == ["pre", "post"] * 2 + ["state_dict"] + ["pre", "post"]


@each_class
def test_a_pre_hook_may_change_gradients_and_options_and_a_post_hook_parameters(
    original: type[Optimizer],
) -> None:
    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.7
        for param in params_of(optimizer):
            assert param.grad is not None
            param.grad.clamp_(-0.5, 0.5)

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for param in params_of(optimizer):
                param.mul_(0.99)

    native, swapped = make_pair(original, config=CONFIG)
    for optimizer in (native, swapped):
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        train(optimizer, 4)
    assert_same_training(native, swapped)


@each_class
def test_a_post_hook_may_read_and_change_states(original: type[Optimizer]) -> None:
    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for param in params_of(optimizer):
            optimizer.state[param]["exp_avg"].mul_(0.5)

    native, swapped = make_pair(original, config=CONFIG)
    for optimizer in (native, swapped):
        optimizer.register_step_post_hook(after)
        train(optimizer, 4)
    assert_same_training(native, swapped)


@pytest.mark.parametrize("how", MADE[:3])
@each_class
def test_the_profiler_shows_one_range_per_step(original: type[Optimizer], how: str) -> None:
    optimizer = make(original, how)
    train(optimizer, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    names = [event.name for event in profile.events() if event.name.startswith("Optimizer.step#")]
    assert names == [f"Optimizer.step#{SWAP_CLASS[original].__name__}.step"]


def test_state_dict_hooks_run_once_and_may_change_what_is_saved() -> None:
    calls: list[str] = []

    def change(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        calls.append("post")
        return {**saved, "note": "mine"}

    optimizer = SwapAdamW(make_params(), swap_config=SwapOptimizerConfig(**CONFIG))
    train(optimizer, 2)
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("pre"))
    optimizer.register_state_dict_post_hook(change)
    assert optimizer.state_dict()["note"] == "mine"
    assert calls == ["pre", "post"]


def test_load_state_dict_hooks_run_once_and_may_change_what_is_loaded() -> None:
    calls: list[str] = []
    native, swapped = make_pair(AdamW, config=CONFIG)
    for optimizer in (native, swapped):
        train(optimizer, 2)
    saved = native.state_dict()

    def change(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        calls.append("pre")
        state = {
            key: {**entry, "exp_avg": entry["exp_avg"] * 2} for key, entry in saved["state"].items()
        }
        return {**saved, "state": state}

    def seen(optimizer: Optimizer) -> None:
        calls.append("post")
        with torch.no_grad():
            for param in params_of(optimizer):
                optimizer.state[param]["exp_avg_sq"].add_(1.0)

    for optimizer in (native, swapped):
        optimizer.register_load_state_dict_pre_hook(change)
        optimizer.register_load_state_dict_post_hook(seen)
        optimizer.load_state_dict(deepcopy(saved))
        train(optimizer, range(2, 4))
    assert calls == ["pre", "post"] * 2
    assert_same_training(native, swapped)


@each_class
@pytest.mark.parametrize("scheduler_first", [True, False])
def test_a_scheduler_made_before_or_after_the_conversion_goes_on(
    original: type[Optimizer], scheduler_first: bool, recwarn: pytest.WarningsRecorder
) -> None:
    def run(swapped: bool) -> Optimizer:
        optimizer = original(make_params(), lr=0.1)
        scheduler = StepLR(optimizer, 2, 0.5) if scheduler_first else None
        if swapped:
            swap_optimizer(optimizer, SwapOptimizerConfig(**CONFIG))
        scheduler = scheduler or StepLR(optimizer, 2, 0.5)
        train(optimizer, 6, after_step=lambda step: scheduler.step())
        return optimizer

    native, swapped = run(False), run(True)
    assert_same_training(native, swapped)
    assert native.param_groups[0]["lr"] == swapped.param_groups[0]["lr"]
    assert type(swapped) is SWAP_CLASS[original]
    assert swap_of(swapped).devices  # our step ran, not the one that the scheduler had wrapped
    with pytest.raises(ValueError, match="allow_closure"):
        swapped.step(lambda: pytest.fail("the closure was run"))
    assert not [w for w in recwarn if "lr_scheduler.step()" in str(w.message)]


@each_class
def test_a_scheduler_goes_on_after_the_conversion_is_undone(original: type[Optimizer]) -> None:
    def run(swapped: bool) -> Optimizer:
        optimizer = original(make_params(), lr=0.1)
        scheduler = StepLR(optimizer, 2, 0.5)
        for turn in range(3):
            if swapped and turn != 1:
                swap_optimizer(optimizer, SwapOptimizerConfig(**CONFIG))
            elif swapped:
                unswap_optimizer(optimizer)
            train(optimizer, range(2 * turn, 2 * turn + 2),
                  after_step=lambda step: scheduler.step())
        return optimizer

    native, swapped = run(False), run(True)
    assert_same_training(native, swapped)
    assert native.param_groups[0]["lr"] == swapped.param_groups[0]["lr"]


@each_class
def test_a_bound_step_taken_before_the_conversion_runs_the_converted_optimizer(
    original: type[Optimizer],
) -> None:
    """As accelerate and others keep it."""
    native, converted = original(make_params()), original(make_params())
    steps = [optimizer.step for optimizer in (native, converted)]
    swap_optimizer(converted, SwapOptimizerConfig(**CONFIG))
    for optimizer, step in zip((native, converted), steps):
        for turn in range(3):
            for index, param in enumerate(params_of(optimizer)):
                param.grad = dense_gradient(turn, index, param)
            step()
    assert_same_training(native, converted)
    assert converted.state[params_of(converted)[0]]["exp_avg"].device.type == "cpu"


def test_gradient_hooks_that_step_during_backward() -> None:
    """One optimizer per parameter, stepped as soon as its gradient is there."""
    def run(swapped: bool) -> list[Optimizer]:
        params = make_params()
        cls = SWAP_CLASS[AdamW] if swapped else AdamW
        optimizers = {param: cls([param]) for param in params}

        def step(param: Tensor) -> None:
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in params:
            param.register_post_accumulate_grad_hook(step)
        for turn in range(3):
            sum(
                (param * dense_gradient(turn, index, param)).sum()
                for index, param in enumerate(params)
            ).backward()
        return list(optimizers.values())

    for native, mine in zip(run(False), run(True)):
        assert_same_training(native, mine)
