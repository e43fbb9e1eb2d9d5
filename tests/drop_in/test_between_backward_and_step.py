"""What scripts do between backward and step, with every way to shape the step.

With prefetch_in_backward the first copies are under way then.
"""
from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable

import pytest
import torch
from drop_in_parity import (
    DEVICE,
    Training,
    assert_same,
    cpu_copy,
    loss_of,
    parameters_of,
    training,
)

from swap_adam import SwapOptimizerConfig, swap_optimizer, unswap_optimizer
from swap_adam.torch import SwapAdam, SwapAdamW
from swap_adam.torch.hyper_adamw import HyperAdamW, SwapHyperAdamW

CLASSES = [(torch.optim.Adam, SwapAdam), (torch.optim.AdamW, SwapAdamW),
           (HyperAdamW, SwapHyperAdamW)]
CONFIGS = {
    "prefetch": SwapOptimizerConfig(prefetch_in_backward=True),
    "prefetch, kept": SwapOptimizerConfig(prefetch_in_backward=True, keep_staging=True),
    "prefetch, drained": SwapOptimizerConfig(prefetch_in_backward=True, drain_in_step=True),
    "prefetch, resident": SwapOptimizerConfig(prefetch_in_backward=True, resident_nbytes=20_000),
    "kept": SwapOptimizerConfig(keep_staging=True),
    "drained": SwapOptimizerConfig(drain_in_step=True),
    "resident": SwapOptimizerConfig(resident_nbytes=20_000),
    "auto": SwapOptimizerConfig(swap_times="auto", staging_nbytes=50_000),
    "per tensor": SwapOptimizerConfig(packed_swap=False),
}


def backward(run: Training) -> None:
    run.optimizer.zero_grad()
    loss_of(run.model, run.done).backward()
    run.done += 1


def load(run: Training) -> None:
    run.optimizer.load_state_dict(cpu_copy(run.optimizer.state_dict()))


def read(run: Training) -> None:
    assert all(
        torch.isfinite(value).all() for state in run.optimizer.state.values()
        for value in state.values()
    )


def write(run: Training) -> None:
    for state in run.optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def hold(run: Training) -> None:
    run.held = run.optimizer.state_dict()


def replace(run: Training) -> None:
    state = next(iter(run.optimizer.state.values()))
    state["exp_avg"] = torch.full_like(state["exp_avg"], 0.25)


def forget(run: Training) -> None:
    del run.optimizer.state[next(parameters_of(run.optimizer))]


def skip(run: Training) -> None:
    backward(run)
    loss_of(run.model, run.done).backward()  # accumulated


def drop_gradients(run: Training) -> None:
    for param in list(parameters_of(run.optimizer))[::2]:
        param.grad = None


def add_group(run: Training) -> None:
    extra = torch.nn.Parameter(torch.ones(50, 60, device=DEVICE))
    run.optimizer.add_param_group({"params": [extra]})
    extra.grad = torch.ones_like(extra)


def convert_back(run: Training) -> None:
    if hasattr(run.optimizer, "swap_config"):
        config = run.optimizer.swap_config
        unswap_optimizer(run.optimizer)
        swap_optimizer(run.optimizer, config)


def rekey(run: Training) -> None:
    group = run.optimizer.param_groups[0]
    old = group["params"][0]
    new = torch.nn.Parameter(old.detach().clone())
    new.grad = old.grad
    group["params"][0] = run.model[0].weight = new
    run.optimizer.state[new] = run.optimizer.state.pop(old)


def another_stream(run: Training) -> None:
    stream = torch.Stream(device=torch.device(DEVICE, 0))
    current = torch.get_device_module(DEVICE).current_stream()
    stream.wait_stream(current)
    with stream:
        run.optimizer.step()
    current.wait_stream(stream)


ACTIONS: dict[str, Callable[[Training], None]] = {
    function.__name__: function
    for function in (load, read, write, hold, replace, forget, skip, drop_gradients, add_group,
                     convert_back, rekey, another_stream)
}


@pytest.mark.parametrize("native_class, swap_class", CLASSES)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("action", ACTIONS)
def test_parity(native_class, swap_class, config, action) -> None:
    native, swapped = training(native_class), training(swap_class, swap_config=CONFIGS[config])
    for run in (native, swapped):
        run.train(2)
        for _ in range(2):
            backward(run)
            ACTIONS[action](run)
            run.optimizer.step()
        run.train(1)
    assert_same(native, swapped)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("duplicate", [
    copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run)),
])
def test_copies_go_on_by_themselves(config, duplicate) -> None:
    native = training(torch.optim.AdamW)
    swapped = training(SwapAdamW, swap_config=CONFIGS[config])
    for run in (native, swapped):
        run.train(2)
        backward(run)
    native_copy, swapped_copy = duplicate(native), duplicate(swapped)
    for run in (native, swapped, native_copy, swapped_copy):
        run.optimizer.step()
        run.train(2)
    assert_same(native, swapped)
    assert_same(native_copy, swapped_copy)


@pytest.mark.parametrize("config", CONFIGS)
def test_an_optimizer_that_goes_before_it_steps_gives_its_memory_back(config, simulator) -> None:
    gc.collect()
    gc.disable()
    try:
        for stage in ("backward", "step", "converted"):
            torch.simulated.synchronize()
            torch.simulated.host_empty_cache()  # the allocator's, not the optimizer's
            baseline = simulator.memory_held(), simulator.pinned_nbytes()
            run = training(SwapAdamW, swap_config=CONFIGS[config])
            run.train(2)
            backward(run)
            if stage == "step":
                run.optimizer.step()
            if stage == "converted":
                unswap_optimizer(run.optimizer)
            model = run.model
            del run
            model.zero_grad()
            loss_of(model, 0).backward()  # whatever listens to its gradients has gone
            del model
            torch.simulated.synchronize()
            torch.simulated.host_empty_cache()  # the allocator's, not the optimizer's
            assert (simulator.memory_held(), simulator.pinned_nbytes()) == baseline, stage
    finally:
        gc.enable()
