"""pickle and copy.deepcopy of an optimizer with states: independent, and free of the device."""
from __future__ import annotations

import copy
import pickle
import pickletools

import pytest
import torch
from drop_in_parity import Training, assert_same, parameters_of, swapped_nbytes, training

from swap_adam import SwapOptimizerConfig, swap_optimizer, unswap_optimizer
from swap_adam.torch import SwapAdam, SwapAdamW
from swap_adam.torch.hyper_adamw import HyperAdamW, SwapHyperAdamW

CLASSES = [(torch.optim.Adam, SwapAdam), (torch.optim.AdamW, SwapAdamW),
           (HyperAdamW, SwapHyperAdamW)]


def deep(run: Training) -> Training:
    return copy.deepcopy(run)


def pickled(run: Training) -> Training:
    return pickle.loads(pickle.dumps(run))


@pytest.mark.parametrize("native_class, swap_class", CLASSES)
@pytest.mark.parametrize("duplicate", [deep, pickled])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_copy_trains_on_and_the_first_does_not_notice(
    native_class, swap_class, duplicate, steps_before
) -> None:
    config = SwapOptimizerConfig(swap_times=5)
    native, swapped = training(native_class), training(swap_class, swap_config=config)
    assert native.train(steps_before) == swapped.train(steps_before)
    native_copy, swapped_copy = duplicate(native), duplicate(swapped)
    assert type(swapped_copy.optimizer) is swap_class
    assert swapped_copy.optimizer.swap_config == config
    assert_same(native, swapped_copy)
    assert native_copy.train(3) == swapped_copy.train(3)
    assert_same(native_copy, swapped_copy)
    assert_same(native, swapped)
    assert native.train(2) == swapped.train(2)
    assert_same(native, swapped)
    assert_same(native_copy, swapped_copy)
    for optimizer in (swapped.optimizer, swapped_copy.optimizer):
        assert swapped_nbytes(optimizer) > 0
    unswap_optimizer(swapped_copy.optimizer)
    assert_same(native_copy, swapped_copy)


def test_a_converted_optimizer_with_a_scheduler() -> None:
    native, swapped = training(torch.optim.AdamW), training(torch.optim.AdamW)
    schedulers = [torch.optim.lr_scheduler.StepLR(run.optimizer, 1) for run in (native, swapped)]
    swap_optimizer(swapped.optimizer)
    assert native.train(2) == swapped.train(2)
    native_pair, swapped_pair = (
        copy.deepcopy(pair) for pair in zip((native, swapped), schedulers)
    )
    for run, scheduler in (native_pair, swapped_pair):
        assert scheduler.optimizer is run.optimizer
        scheduler.step()
    assert native_pair[0].train(2) == swapped_pair[0].train(2)
    assert_same(native_pair[0], swapped_pair[0])


@pytest.mark.parametrize("swap_class", [SwapAdam, SwapAdamW, SwapHyperAdamW])
def test_neither_streams_nor_slabs_are_in_the_pickle(swap_class) -> None:
    run = training(swap_class)
    run.train(2)
    data = pickle.dumps(run.optimizer)
    names = {str(argument) for _, argument, _ in pickletools.genops(data)}
    assert not [name for name in names if "Stream" in name or "Event" in name]
    assert not [name for name in names if name.startswith("_swap")]
    assert len(data) < 1.2 * len(pickle.dumps(unswap_optimizer(run.optimizer)))


def test_states_of_a_copy_are_its_own_memory() -> None:
    run = training(SwapAdamW)
    run.train(1)
    other = copy.deepcopy(run)
    for param, twin in zip(parameters_of(run.optimizer), parameters_of(other.optimizer)):
        for name in ("exp_avg", "exp_avg_sq"):
            mine, theirs = run.optimizer.state[param][name], other.optimizer.state[twin][name]
            assert mine.data_ptr() != theirs.data_ptr()
            assert theirs.untyped_storage().nbytes() == theirs.numel() * theirs.element_size()
