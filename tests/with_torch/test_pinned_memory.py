"""Pinned host bytes: within 5 % of what is swapped, and what happens when there are not enough."""
from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW
from training import (
    assert_same_training,
    dense_gradient,
    make_params,
    noise,
    params_of,
    snapshot,
    train,
)

from swap_adam import SwapOptimizerConfig, swap_optimizer
from swap_adam.swap import swap_of
from swap_adam.torch import SwapAdamW

pytestmark = pytest.mark.simulator_only


def empty_host_cache() -> None:
    """What the allocator keeps of what is freed is not the optimizer's."""
    torch.accelerator.synchronize()
    torch.get_device_module("simulated").host_empty_cache()


@pytest.fixture(autouse=True)
def pinned(simulator: ModuleType) -> Callable[[], int]:
    """Pinned bytes more than before the test, as the host allocator accounts them."""
    gc.collect()
    empty_host_cache()
    base = simulator.pinned_nbytes()
    return lambda: simulator.pinned_nbytes() - base


def with_gradients(numels: list[int]) -> list[Tensor]:
    params = [torch.zeros(numel, device="simulated").requires_grad_() for numel in numels]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


@pytest.mark.parametrize("exponent", [20, 22, 24, 26])
def test_totals_of_1_1_times_a_power_of_two_cost_at_most_5_percent_more(
    pinned: Callable[[], int], exponent: int
) -> None:
    """One block of that size would be rounded up to 1.8 times the bytes."""
    count = 120
    numel = int(1.1 * 2**exponent) // count // 8
    optimizer = SwapAdamW(with_gradients([numel] * count), fused=True)
    optimizer.step()
    swapped = count * numel * 8
    assert swapped <= pinned() <= 1.05 * swapped


def test_tensors_of_many_sizes_cost_at_most_5_percent_more(pinned: Callable[[], int]) -> None:
    width = 64
    layer = [3 * width * width, 3 * width, width * width, 4 * width * width, 4 * width * width]
    numels = [1000 * width, *layer * 12]
    optimizer = SwapAdamW(with_gradients(numels), fused=True)
    optimizer.step()
    swapped = 8 * sum(numel for numel in numels if numel >= 1024)
    assert swapped <= pinned() <= 1.05 * swapped


def test_a_single_giant_tensor_costs_its_power_of_two(
    pinned: Callable[[], int], record_property: Callable[[str, object], None]
) -> None:
    """What cannot be had: a tensor is one piece of memory, and a pinned block a power of two.

    1.1 * 2^20 elements: two moments of 4.6 MB in one block of 16 MiB, or in two of 8 MiB.
    """
    numel = int(1.1 * 2**20)
    optimizer = SwapAdamW(with_gradients([numel]), fused=True)
    optimizer.step()
    record_property("pinned_over_swapped", pinned() / (8 * numel))
    print(f"one giant tensor: pinned / swapped = {pinned() / (8 * numel):.3f}")
    assert pinned() == 2 * 2**23


def test_giants_at_both_ends_leave_no_hole(pinned: Callable[[], int]) -> None:
    """Untied embeddings: what the last one leaves of its block is filled by the layers between."""
    numels = [280_000, *[16_384] * 40, 280_000]
    optimizer = SwapAdamW(with_gradients(numels), fused=True)
    optimizer.step()
    assert pinned() <= 1.05 * 8 * sum(numels)


def test_states_that_come_one_by_one_cost_at_most_5_percent_more(
    pinned: Callable[[], int]
) -> None:
    """Experts get their first gradient in different steps; the slabs are put together again."""
    params = with_gradients([70_000] * 24)
    optimizer = SwapAdamW(params, fused=True)
    grads = [param.grad for param in params]
    for param in params:
        param.grad = None
    for index, param in enumerate(params):
        param.grad = grads[index]
        optimizer.step()
        swapped = 8 * 70_000 * (index + 1)
        torch.accelerator.synchronize()
        assert pinned() <= 1.05 * swapped + 2**20
    for index, param in enumerate(params):
        expected = 24 - index
        assert optimizer.state[param]["step"] == expected


def test_everything_is_given_back_with_the_optimizer(pinned: Callable[[], int]) -> None:
    optimizer: Any = SwapAdamW(with_gradients([100_000] * 3), fused=True)
    optimizer.step()
    assert pinned() > 0
    kept = optimizer.state[params_of(optimizer)[0]]["exp_avg"].clone()
    del optimizer
    gc.collect()
    empty_host_cache()
    assert pinned() == 0
    assert kept.numel() == 100_000


def test_a_held_snapshot_keeps_only_its_slab(pinned: Callable[[], int]) -> None:
    optimizer: Any = SwapAdamW(with_gradients([100_000] * 4), fused=True)
    optimizer.step()
    before = pinned()
    for _ in range(4):
        saved = optimizer.state_dict()
        optimizer.step()
    torch.accelerator.synchronize()
    assert pinned() <= 2 * before + 2**20, "one generation of snapshots, not four"
    del saved
    optimizer.step()
    torch.accelerator.synchronize()
    assert pinned() <= before + 2**20


# Not enough of it


def native_after(steps: int) -> AdamW:
    optimizer = AdamW(make_params())
    train(optimizer, steps)
    return optimizer


def test_conversion_without_enough_pinned_memory_changes_nothing(simulator: ModuleType) -> None:
    native, optimizer = native_after(2), native_after(2)
    states = {param: dict(optimizer.state[param]) for param in params_of(optimizer)}
    held = simulator.memory_held()
    limit = simulator.pinned_nbytes()
    sizes = []
    for extra in (0, 2**12, 2**15, 2**17):
        simulator.configure(pinned_capacity_nbytes=limit + extra or 1)
        with pytest.raises(MemoryError) as caught:
            swap_optimizer(optimizer)
        sizes.append(str(caught.value))
        assert type(optimizer) is AdamW
        assert not [name for name in vars(optimizer) if "swap" in name]
        for param, state in states.items():
            for name, value in state.items():
                assert optimizer.state[param][name] is value, "the very same tensors"
        assert simulator.memory_held() == held
        assert simulator.pinned_nbytes() == limit, "nothing is kept"
    assert all("bytes" in text for text in sizes)
    assert_same_training(native, optimizer)
    simulator.configure(pinned_capacity_nbytes=0)
    swap_optimizer(optimizer)
    train(native, range(2, 5))
    train(optimizer, range(2, 5))
    assert_same_training(native, optimizer)


def test_the_error_names_the_bytes_asked_for_and_those_there(simulator: ModuleType) -> None:
    optimizer = native_after(1)
    empty_host_cache()
    simulator.configure(pinned_capacity_nbytes=simulator.pinned_nbytes() + 4096)
    with pytest.raises(MemoryError, match=r"cannot pin \d+ bytes .*\d+ bytes of host memory"):
        swap_optimizer(optimizer)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per tensor"])
def test_a_first_step_without_enough_pinned_memory_changes_nothing(
    simulator: ModuleType, packed: bool
) -> None:
    native = AdamW(make_params())
    optimizer: Any = SwapAdamW(make_params(), swap_config=SwapOptimizerConfig(packed_swap=packed))
    before = snapshot(optimizer)
    empty_host_cache()
    limit = simulator.pinned_nbytes()
    for extra in (0, 2**12, 2**15, 2**17):
        simulator.configure(pinned_capacity_nbytes=limit + extra or 1)
        with pytest.raises(MemoryError, match="bytes"):
            train(optimizer, 1)
        for left, right in zip(before["params"], snapshot(optimizer)["params"]):
            assert torch.equal(left, right)
        assert all(not optimizer.state[param] for param in params_of(optimizer))
        assert simulator.pinned_nbytes() == limit
    simulator.configure(pinned_capacity_nbytes=0)
    train(native, 3)
    train(optimizer, 3)
    assert_same_training(native, optimizer)


def test_a_later_group_without_enough_pinned_memory_leaves_the_others_whole(
    simulator: ModuleType,
) -> None:
    native, optimizer = AdamW(make_params()), SwapAdamW(make_params())
    train(native, 2)
    train(optimizer, 2)
    native.add_param_group({"params": make_params([(50, 60)], seed=5)})
    optimizer.add_param_group({"params": make_params([(50, 60)], seed=5)})
    simulator.configure(pinned_capacity_nbytes=simulator.pinned_nbytes())
    with pytest.raises(MemoryError):
        train(optimizer, range(2, 3))
    assert_same_training_but_for_new(native, optimizer)
    simulator.configure(pinned_capacity_nbytes=0)
    train(native, range(2, 5))
    train(optimizer, range(2, 5))
    assert_same_training(native, optimizer)


def assert_same_training_but_for_new(native: Any, optimizer: Any) -> None:
    for left, right in zip(params_of(native)[:-1], params_of(optimizer)[:-1]):
        assert torch.equal(left.cpu(), right.cpu())
        for name, value in native.state[left].items():
            assert torch.equal(value.cpu(), optimizer.state[right][name].cpu()), name
    assert not optimizer.state[params_of(optimizer)[-1]]


def two_devices() -> list[Tensor]:
    return [
        *make_params([(40, 50), (3000,)], device="simulated:0"),
        *make_params([(60, 50), (2000,)], device="simulated:1", seed=1),
    ]


@pytest.mark.parametrize("convert", [True, False], ids=["conversion", "first step"])
def test_two_devices_are_registered_both_or_none(
    simulator: ModuleType, pinned: Callable[[], int], convert: bool
) -> None:
    """The second device's slabs fail when the first one has its own."""
    native: Any = AdamW(two_devices())
    optimizer: Any = AdamW(two_devices()) if convert else SwapAdamW(two_devices())
    steps = 1 if convert else 0
    train(native, steps)
    train(optimizer, steps)
    limit = simulator.pinned_nbytes()
    first = 2**16  # the first device's 40 KB, but not the second one's 64 KB more
    simulator.configure(pinned_capacity_nbytes=limit + first)
    with pytest.raises(MemoryError):
        if convert:
            swap_optimizer(optimizer)
        else:
            train(optimizer, 1)
    assert pinned() == 0
    simulator.configure(pinned_capacity_nbytes=0)
    if convert:
        swap_optimizer(optimizer)
    train(native, range(steps, 4))
    train(optimizer, range(steps, 4))
    assert_same_training(native, optimizer)
    swapped = sum(
        2 * 4 * param.numel() for param in params_of(optimizer) if param.numel() >= 1024
    )
    stores = [device.store for device in swap_of(optimizer).devices.values()]
    assert sum(store.swapped_nbytes for store in stores) == swapped, "none registered twice"


def test_loading_without_enough_pinned_memory_changes_nothing(simulator: ModuleType) -> None:
    native = native_after(3)
    optimizer = SwapAdamW(make_params())
    before = snapshot(optimizer)
    empty_host_cache()
    simulator.configure(pinned_capacity_nbytes=simulator.pinned_nbytes() + 4096)
    with pytest.raises(MemoryError):
        optimizer.load_state_dict(native.state_dict())
    assert all(not optimizer.state[param] for param in params_of(optimizer))
    for left, right in zip(before["params"], snapshot(optimizer)["params"]):
        assert torch.equal(left, right)
    simulator.configure(pinned_capacity_nbytes=0)
    # A copy: the original, too, takes over tensors that need no cast.
    optimizer.load_state_dict(copy.deepcopy(native.state_dict()))
    with torch.no_grad():
        for left, right in zip(params_of(native), params_of(optimizer)):
            right.copy_(left)
    train(native, range(3, 5))
    train(optimizer, range(3, 5))
    assert_same_training(native, optimizer)


def test_a_snapshot_that_finds_no_pinned_memory_fails_before_the_step(
    simulator: ModuleType,
) -> None:
    """state_dict() is held, so the step needs fresh bytes; without them nothing is updated."""
    native, optimizer = AdamW(make_params()), SwapAdamW(make_params())
    train(native, 2)
    train(optimizer, 2)
    saved = optimizer.state_dict()
    before = {
        key: {name: value.clone() for name, value in state.items()}
        for key, state in saved["state"].items()
    }
    simulator.configure(pinned_capacity_nbytes=simulator.pinned_nbytes())
    with pytest.raises(MemoryError):
        train(optimizer, range(2, 3))
    assert_same_training(native, optimizer)
    simulator.configure(pinned_capacity_nbytes=0)
    train(native, range(2, 4))
    train(optimizer, range(2, 4))
    assert_same_training(native, optimizer)
    for key, state in before.items():
        for name, value in state.items():
            assert torch.equal(value, saved["state"][key][name]), "the held one is as it was"


def test_gradients_are_as_before_after_a_failed_step(simulator: ModuleType) -> None:
    optimizer = SwapAdamW(make_params())
    params = params_of(optimizer)
    grads = [dense_gradient(0, index, param) for index, param in enumerate(params)]
    for param, grad in zip(params, grads):
        param.grad = grad
    copies = [grad.cpu().clone() for grad in grads]
    empty_host_cache()
    simulator.configure(pinned_capacity_nbytes=simulator.pinned_nbytes() + 4096)
    with pytest.raises(MemoryError):
        optimizer.step()
    for param, grad, value in zip(params, grads, copies):
        assert param.grad is grad and torch.equal(grad.cpu(), value)
    assert noise(0, 0, copies[0]).shape == copies[0].shape
