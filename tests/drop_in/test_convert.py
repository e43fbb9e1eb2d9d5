"""Conversion at any moment of a training, in both directions."""
from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from drop_in_parity import DEVICE, Training, assert_same, swapped_nbytes, training
from torch.optim.lr_scheduler import CosineAnnealingLR

from swap_adam import SwapOptimizerConfig, swap_optimizer, unswap_optimizer
from swap_adam.torch import SwapAdam, SwapAdamW
from swap_adam.torch.hyper_adamw import HyperAdamW, SwapHyperAdamW

CLASSES = [(torch.optim.Adam, SwapAdam), (torch.optim.AdamW, SwapAdamW),
           (HyperAdamW, SwapHyperAdamW)]


@pytest.mark.parametrize("native_class, swap_class", CLASSES)
@pytest.mark.parametrize("steps_before", [0, 1, 3])
@pytest.mark.parametrize("packed", [True, False])
def test_training_goes_on_unchanged(native_class, swap_class, steps_before, packed) -> None:
    native, swapped = training(native_class), training(native_class)
    assert native.train(steps_before) == swapped.train(steps_before)
    optimizer = swapped.optimizer
    groups, defaults = optimizer.param_groups, optimizer.defaults
    keys = [list(group) for group in groups]
    assert swap_optimizer(optimizer, SwapOptimizerConfig(packed_swap=packed)) is optimizer
    assert type(optimizer) is swap_class and isinstance(optimizer, native_class)
    assert optimizer.param_groups is groups and optimizer.defaults is defaults
    assert [list(group) for group in groups] == keys
    assert (swapped_nbytes(optimizer) > 0) == (steps_before > 0)
    assert native.train(3) == swapped.train(3)
    assert_same(native, swapped)
    assert swapped_nbytes(optimizer) > 0

    assert unswap_optimizer(optimizer) is optimizer
    assert type(optimizer) is native_class and optimizer.param_groups is groups
    assert not [name for name in optimizer.__dict__ if name.startswith("_swap")]
    assert swapped_nbytes(optimizer) == 0
    assert_same(native, swapped)
    assert native.train(2) == swapped.train(2)
    swap_optimizer(optimizer)
    assert native.train(2) == swapped.train(2)
    assert_same(native, swapped)


def test_states_leave_the_device_without_room_for_a_second_copy(simulator) -> None:
    run = training(torch.optim.AdamW, lambda: torch.nn.Linear(32, 65536).to(DEVICE))
    run.train(1)
    run.optimizer.zero_grad()
    before = simulator.memory_held()
    simulator.configure(capacity_nbytes=before)  # full to the last byte
    torch.simulated.reset_peak_memory_stats()
    swap_optimizer(run.optimizer)
    states = 2 * 33 * 65536 * 4
    assert simulator.memory_held() == before - states
    assert simulator.max_memory_held() == before


def attach_scheduler(run: Training) -> Callable[[], None]:
    return CosineAnnealingLR(run.optimizer, 10).step


def attach_scaler(run: Training) -> Callable[[], None]:
    scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0)

    def step() -> None:
        scaler.step(run.optimizer)
        scaler.update()

    scaler.scale(torch.ones((), device=DEVICE))
    return step


@pytest.mark.parametrize("native_class, _", CLASSES)
@pytest.mark.parametrize("stepped", [False, True])
def test_after_a_scheduler_was_attached(native_class, _, stepped: bool) -> None:
    native, swapped = training(native_class), training(native_class)
    schedules = [attach_scheduler(run) for run in (native, swapped)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()"
        for index in range(4):
            if index == (2 if stepped else 0):
                swap_optimizer(swapped.optimizer)
            assert native.train(1) == swapped.train(1)
            for schedule in schedules:
                schedule()
        assert_same(native, swapped)
        assert swapped_nbytes(swapped.optimizer) > 0
        unswap_optimizer(swapped.optimizer)
        assert native.train(1) == swapped.train(1)
        for schedule in schedules:
            schedule()
    assert_same(native, swapped)


def test_a_schedulers_wrapper_runs_the_swap_classs_own_step() -> None:
    run = training(torch.optim.AdamW)
    attach_scheduler(run)
    swap_optimizer(run.optimizer)
    with pytest.raises(ValueError, match="allow_closure"):
        run.optimizer.step(lambda: 0.0)
    unswap_optimizer(run.optimizer)
    assert run.optimizer.step(lambda: 0.5) == 0.5


@pytest.mark.parametrize("fused", [False, True])
def test_after_a_grad_scaler_was_attached(fused: bool) -> None:
    native = training(torch.optim.AdamW, fused=fused)
    swapped = training(torch.optim.AdamW, fused=fused)
    steps = [attach_scaler(run) for run in (native, swapped)]
    for index in range(4):
        if index == 2:
            swap_optimizer(swapped.optimizer)
        for run, step in zip((native, swapped), steps):
            run.optimizer.zero_grad()
            (run.model(torch.ones(4, 32, device=DEVICE) * index).pow(2).mean() * 8.0).backward()
            step()
    assert_same(native, swapped)
    assert swapped_nbytes(swapped.optimizer) > 0


def test_step_hooks_survive_and_fire_once() -> None:
    run = training(torch.optim.AdamW)
    calls: list[str] = []
    run.optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    run.optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    for convert in (lambda _: None, swap_optimizer, unswap_optimizer, swap_optimizer):
        convert(run.optimizer)
        calls.clear()
        run.train(1)
        assert calls == ["pre", "post"]


def test_checkpoint_hooks_survive_and_fire_once() -> None:
    run = training(torch.optim.AdamW)
    calls: list[str] = []
    optimizer = run.optimizer
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("state_dict pre"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("state_dict post"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("load pre"))
    optimizer.register_load_state_dict_post_hook(
        lambda o: calls.append("load post" if o.state else "too early")
    )
    run.train(1)
    for convert in (lambda _: None, swap_optimizer, unswap_optimizer, swap_optimizer):
        convert(optimizer)
        calls.clear()
        optimizer.load_state_dict(optimizer.state_dict())
        assert calls == ["state_dict pre", "state_dict post", "load pre", "load post"]


@pytest.mark.parametrize("native_class, _", CLASSES[:2])
def test_a_step_bound_before_the_conversion_is_the_swapped_one(native_class, _) -> None:
    # As accelerate does where it has a GradScaler: it keeps `optimizer.step` from before.
    native, swapped = training(native_class), training(native_class)
    swapped.optimizer.add_param_group({"params": [torch.ones(2000, device=DEVICE)]})
    native.optimizer.add_param_group({"params": [torch.ones(2000, device=DEVICE)]})
    bound = swapped.optimizer.step
    swap_optimizer(swapped.optimizer)
    calls: list[str] = []
    swapped.optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    for index in range(3):
        assert native.train(1)[0] == swapped.train(1)[0] if index % 2 else True
        if index % 2 == 0:
            for run in (native, swapped):
                run.optimizer.zero_grad()
                run.model(torch.ones(4, 32, device=DEVICE)).pow(2).mean().backward()
            native.optimizer.step()
            bound()
    assert_same(native, swapped)
    assert swapped_nbytes(swapped.optimizer) > 0
    assert calls == ["pre"] * 3


def test_converting_twice() -> None:
    config = SwapOptimizerConfig(swap_times=3)
    run = training(torch.optim.AdamW)
    optimizer = swap_optimizer(run.optimizer, config)
    run.train(1)
    shown = [state["exp_avg"] for state in optimizer.state.values()]
    assert swap_optimizer(optimizer, SwapOptimizerConfig(swap_times=3)) is optimizer
    assert swap_optimizer(optimizer) is optimizer
    for state, value in zip(optimizer.state.values(), shown):
        assert state["exp_avg"] is value
    with pytest.raises(ValueError, match="already a SwapAdamW.*unswap_optimizer"):
        swap_optimizer(optimizer, SwapOptimizerConfig(swap_times=4))
    assert optimizer.swap_config == config


def test_only_exact_types() -> None:
    class MyAdamW(torch.optim.AdamW):
        pass

    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    class WrappingOptimizer(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(optimizer.param_groups, {})
            self.optimizer = optimizer

    run = training(torch.optim.AdamW)
    with pytest.raises(TypeError, match="derive your class from SwapAdam"):
        swap_optimizer(training(MyAdamW).optimizer)
    with pytest.raises(TypeError, match="torch.optim.adamw.AdamW"):
        swap_optimizer(training(torch.optim.SGD).optimizer)
    with pytest.raises(TypeError, match="convert that one, its attribute"):
        swap_optimizer(WrappingOptimizer(run.optimizer))
    with pytest.raises(TypeError, match="cannot convert a .*Wrapper.*its attribute `optimizer`"):
        swap_optimizer(Wrapper(run.optimizer))
    with pytest.raises(TypeError, match="cannot convert the class torch.optim.adamw.AdamW"):
        swap_optimizer(torch.optim.AdamW)
    with pytest.raises(TypeError, match="not a swap optimizer"):
        unswap_optimizer(run.optimizer)


def test_a_subclass_of_a_swap_class_trains_and_has_no_original() -> None:
    class MyAdamW(SwapAdamW):
        pass

    native, swapped = training(torch.optim.AdamW), training(MyAdamW)
    assert native.train(3) == swapped.train(3)
    assert_same(native, swapped)
    assert swap_optimizer(swapped.optimizer) is swapped.optimizer
    with pytest.raises(TypeError, match="load this optimizer's state_dict"):
        unswap_optimizer(swapped.optimizer)


@pytest.mark.parametrize("flag", ["foreach", "capturable", "differentiable"])
def test_a_refused_flag_leaves_the_optimizer_as_it_was(flag: str) -> None:
    run = training(torch.optim.AdamW, **{flag: True})
    before = dict(run.optimizer.__dict__)
    with pytest.raises(ValueError, match=f"does not support {flag}=True"):
        swap_optimizer(run.optimizer)
    assert type(run.optimizer) is torch.optim.AdamW
    assert run.optimizer.__dict__ == before


def test_a_step_that_somebody_patched_is_refused_with_a_remedy() -> None:
    run = training(torch.optim.AdamW)
    original = run.optimizer.step

    def patched(*args, **kwargs):
        return original(*args, **kwargs)

    run.optimizer.step = patched
    with pytest.raises(TypeError, match="convert first and patch afterwards"):
        swap_optimizer(run.optimizer)
    assert type(run.optimizer) is torch.optim.AdamW
    del run.optimizer.step
    swap_optimizer(run.optimizer)


def test_no_pinned_memory_leaves_the_optimizer_as_it_was(simulator) -> None:
    native, swapped = training(torch.optim.AdamW), training(torch.optim.AdamW)
    native.train(1), swapped.train(1)
    simulator.configure(pinned_capacity_nbytes=1000)
    with pytest.raises(MemoryError, match="cannot pin [0-9]+ bytes"):
        swap_optimizer(swapped.optimizer)
    simulator.configure(pinned_capacity_nbytes=0)
    assert type(swapped.optimizer) is torch.optim.AdamW
    assert_same(native, swapped)
    assert native.train(2) == swapped.train(2)
    assert_same(native, swapped)
