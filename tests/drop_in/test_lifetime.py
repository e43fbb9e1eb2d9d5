"""What an optimizer takes it gives back when it goes, with the garbage collector off."""
from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from drop_in_parity import cpu_copy, training

from swap_adam import SwapOptimizerConfig, swap_optimizer, unswap_optimizer
from swap_adam.torch import SwapAdam, SwapAdamW
from swap_adam.torch.hyper_adamw import SwapHyperAdamW

ROUNDS = 20


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def constructed(optimizer_class, packed: bool):
    config = SwapOptimizerConfig(packed_swap=packed)
    return training(optimizer_class, swap_config=config).train(3)


def with_a_fault(packed: bool):
    run = training(SwapAdamW, swap_config=SwapOptimizerConfig(packed_swap=packed))
    run.train(1)
    del run.optimizer.state[run.model[3].weight]["exp_avg"]
    with pytest.raises(KeyError, match="exp_avg"):
        run.train(1)


def converted(packed: bool):
    run = training(torch.optim.AdamW)
    run.train(1)
    swap_optimizer(run.optimizer, SwapOptimizerConfig(packed_swap=packed))
    run.train(2)


def converted_and_back(packed: bool):
    run = training(torch.optim.AdamW)
    for _ in range(2):
        swap_optimizer(run.optimizer, SwapOptimizerConfig(packed_swap=packed))
        run.train(2)
        unswap_optimizer(run.optimizer)
        run.train(1)


def with_a_scheduler(packed: bool):
    run = training(torch.optim.AdamW)
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1)
    swap_optimizer(run.optimizer, SwapOptimizerConfig(packed_swap=packed))
    run.train(2)
    scheduler.step()


def saved_and_loaded(packed: bool):
    run = training(SwapAdamW, swap_config=SwapOptimizerConfig(packed_swap=packed))
    run.train(2)
    checkpoint = cpu_copy(run.optimizer.state_dict())
    run.train(1)
    run.optimizer.load_state_dict(checkpoint)
    held = run.optimizer.state_dict()
    run.train(2)
    del held


def copied(packed: bool):
    run = training(SwapAdamW, swap_config=SwapOptimizerConfig(packed_swap=packed))
    run.train(1)
    other = copy.deepcopy(run)
    other.train(1)


LIVES: dict[str, Callable[[bool], object]] = {
    "Adam": lambda packed: constructed(SwapAdam, packed),
    "AdamW": lambda packed: constructed(SwapAdamW, packed),
    "HyperAdamW": lambda packed: constructed(SwapHyperAdamW, packed),
    "fault": with_a_fault,
    "converted": converted,
    "converted and back": converted_and_back,
    "scheduler": with_a_scheduler,
    "saved and loaded": saved_and_loaded,
    "copied": copied,
}


@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("packed", [True, False])
def test_device_and_pinned_bytes_return_to_the_baseline(
    life: str, packed: bool, simulator, no_collector, record_property
) -> None:
    LIVES[life](packed)  # what torch itself makes once
    gc.collect()
    torch.simulated.synchronize()
    torch.simulated.host_empty_cache()  # the allocator's, not the optimizer's
    baseline = simulator.memory_held(), simulator.pinned_nbytes()
    for _ in range(ROUNDS):
        LIVES[life](packed)
        torch.simulated.synchronize()
        torch.simulated.host_empty_cache()  # the allocator's, not the optimizer's
        assert (simulator.memory_held(), simulator.pinned_nbytes()) == baseline
    assert simulator.max_pinned_nbytes() > baseline[1]
    record_property("baseline device bytes", baseline[0])
