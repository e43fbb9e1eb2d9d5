"""What real devices do, and a kinder one would not: the simulated one does it here, too.

Each test fails on a library that takes the kinder behaviour for granted.
"""

from __future__ import annotations

import gc
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.optim import Adam, AdamW, Optimizer
from training import (  # tests/with_torch/support
    assert_same_training,
    assert_trains_alike,
    dense_gradient,
    make_pair,
    make_params,
    params_of,
    train,
)

from swap_adam import SwapOptimizerConfig
from swap_adam.swap import swap_of
from swap_adam.torch import SwapAdamW

MODES: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False}, "foreach": {}, "fused": {"fused": True},
}
MIB = 1 << 20
HALF_MIB = MIB // 2


def swapped(shapes: list[tuple[int, ...]], **config: Any) -> SwapAdamW:
    return SwapAdamW(make_params(shapes), swap_config=SwapOptimizerConfig(**config))


def settled(optimizer: Optimizer, steps: int = 2) -> None:
    train(optimizer, steps)
    torch.accelerator.synchronize()
    gc.collect()


def empty_host_cache() -> None:
    torch.get_device_module("simulated").host_empty_cache()


@pytest.fixture(autouse=True)
def _nothing_cached(simulator: ModuleType) -> None:
    """What the host allocator keeps of earlier tests would serve this one."""
    gc.collect()
    torch.accelerator.synchronize()
    empty_host_cache()


# Freed pinned memory stays pinned


def test_a_state_dict_that_was_held_across_a_step_costs_no_pinned_memory_afterwards(
    simulator: ModuleType,
) -> None:
    optimizer = swapped([(300, 300)] * 4)
    settled(optimizer)
    pinned = simulator.pinned_nbytes()
    saved = optimizer.state_dict()
    train(optimizer, 1)
    assert simulator.pinned_nbytes() == 2 * pinned
    kept = saved["state"][0]["exp_avg"].clone()
    assert torch.equal(saved["state"][0]["exp_avg"], kept)
    del saved
    train(optimizer, 2)
    assert simulator.pinned_nbytes() == pinned


def test_one_tensor_held_for_long_keeps_its_slab_pinned_and_no_longer_than_that(
    simulator: ModuleType,
) -> None:
    native, optimizer = make_pair(AdamW)
    train(native, 8)
    settled(optimizer, 2)
    pinned = simulator.pinned_nbytes()
    held = optimizer.state[params_of(optimizer)[0]]["exp_avg"]
    was = held.clone()
    train(optimizer, range(2, 7))
    assert torch.equal(held, was)
    assert simulator.pinned_nbytes() > pinned
    del held
    train(optimizer, range(7, 8))
    assert simulator.pinned_nbytes() == pinned
    assert_same_training(native, optimizer)


def test_parameters_that_go_take_their_pinned_memory_with_them(simulator: ModuleType) -> None:
    base = simulator.pinned_nbytes()
    optimizer = SwapAdamW([
        {"params": make_params([(300, 300)])}, {"params": make_params([(700, 700)], seed=1)},
    ])
    settled(optimizer)
    before = simulator.pinned_nbytes() - base
    for param in optimizer.param_groups[1]["params"]:
        optimizer.state.pop(param)
    del optimizer.param_groups[1], param
    settled(optimizer)
    after = simulator.pinned_nbytes() - base
    assert after < before / 4


def test_blocks_of_other_sizes_that_the_allocator_keeps_do_not_fail_the_first_step(
    simulator: ModuleType,
) -> None:
    optimizer = swapped([(512, 512)])  # two states of 1 MiB
    block = torch.empty(3 << 20, dtype=torch.uint8, pin_memory=True)
    del block
    simulator.configure(pinned_capacity_nbytes=simulator.pinned_nbytes())
    train(optimizer, 1)
    simulator.configure(pinned_capacity_nbytes=0)


def test_pinned_memory_that_could_not_be_had_in_full_is_given_back(simulator: ModuleType) -> None:
    optimizer = swapped([(512, 512)] * 40)
    empty_host_cache()
    before = simulator.pinned_nbytes()
    simulator.configure(pinned_capacity_nbytes=before + (65 << 20))
    with pytest.raises(MemoryError):
        train(optimizer, 1)
    simulator.configure(pinned_capacity_nbytes=0)
    assert simulator.pinned_nbytes() == before


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_a_users_own_copy_out_of_a_state_gets_its_bytes_though_the_slab_goes(
    simulator: ModuleType, key: str
) -> None:
    """The host allocator does not know of it: what it copies from must stay until it has run."""
    optimizer = SwapAdamW([
        {"params": make_params([(300, 300)])}, {"params": make_params([(300, 300)], seed=1)},
    ])
    settled(optimizer)
    gone = optimizer.param_groups[1]["params"][0]
    want = optimizer.state[gone][key].clone()
    slow = torch.ones(1 << 24, device="simulated")
    for _ in range(20):
        slow.mul_(1.0)  # the host is ahead of the device
    copied = optimizer.state.pop(gone)[key].to("simulated", non_blocking=True)
    del optimizer.param_groups[1], gone
    optimizer.step()
    torch.zeros(1 << 20, dtype=torch.uint8, pin_memory=True)  # whoever gets the memory next
    assert torch.equal(copied.cpu(), want)


def test_a_users_own_copy_out_of_a_held_snapshot_gets_its_bytes(simulator: ModuleType) -> None:
    optimizer = swapped([(300, 300)] * 4)
    settled(optimizer)
    held = [dict(optimizer.state[param]) for param in params_of(optimizer)]
    train(optimizer, 1)
    want = [state["exp_avg"].clone() for state in held]
    slow = torch.ones(1 << 24, device="simulated")
    for _ in range(20):
        slow.mul_(1.0)
    copied = [state["exp_avg"].to("simulated", non_blocking=True) for state in held]
    held.clear()
    optimizer.step()
    optimizer.step()
    torch.zeros(1 << 20, dtype=torch.uint8, pin_memory=True)
    for index, tensor in enumerate(copied):
        assert torch.equal(tensor.cpu(), want[index])


# Several devices


@pytest.mark.parametrize("packed", [True, False])
def test_staging_is_on_the_parameters_device_whatever_the_current_one(
    simulator: ModuleType, packed: bool
) -> None:
    native, optimizer = make_pair(AdamW, config={"packed_swap": packed})
    train(native, 5)
    settled(optimizer, 2)
    torch.simulated.reset_peak_memory_stats(1)
    held = simulator.memory_held(1)
    torch.accelerator.set_device_index(1)
    try:
        train(optimizer, range(2, 5))
    finally:
        torch.accelerator.set_device_index(0)
    assert simulator.max_memory_held(1) == held
    assert_same_training(native, optimizer)


# Device memory


@pytest.mark.parametrize("packed", [True, False])
def test_a_step_right_behind_another_holds_the_staging_memory_once(
    simulator: ModuleType, packed: bool
) -> None:
    """The allocator's own event comes after what we recorded before the memory was released."""
    optimizer = swapped([(300, 300)] * 16, packed_swap=packed)
    settled(optimizer)
    (swap,) = swap_of(optimizer).devices.values()
    for param in params_of(optimizer):
        param.grad = torch.ones_like(param)
    torch.accelerator.synchronize()
    base = simulator.memory_held()
    torch.simulated.reset_peak_memory_stats()
    for _ in range(4):
        optimizer.step()
    assert swap.plan is not None
    most = swap.plan.staging_nbytes + swap.plan.scratch_nbytes
    assert simulator.max_memory_held() - base <= most


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("packed", [True, False])
def test_what_is_reserved_is_in_the_pools_that_the_update_takes_it_from(
    simulator: ModuleType, mode: str, packed: bool
) -> None:
    """Small temporaries do not come out of a large block, nor large ones out of small ones."""
    shapes = [(HALF_MIB // 4,)] * 8 + [(3 * HALF_MIB // 4,)] * 3
    options = {"lr": 0.1, **MODES[mode]}
    native = AdamW(make_params(shapes), **options)
    config = SwapOptimizerConfig(swap_times=2, packed_swap=packed)
    optimizer = SwapAdamW(make_params(shapes), **options, swap_config=config)
    train(native, 3)
    settled(optimizer, 2)
    (swap,) = swap_of(optimizer).devices.values()
    assert swap.plan is not None
    for index, param in enumerate(params_of(optimizer)):
        param.grad = dense_gradient(2, index, param)
    gc.collect()
    torch.accelerator.synchronize()
    needed = simulator.memory_held() + (swap.plan.staging_nbytes if packed else 0)
    needed += sum(
        max(sum(size for size in sizes if (size <= MIB) == is_small)
            for sizes in swap.plan.reserves)
        for is_small in (True, False)
    )
    for missing in (4096, 0):
        simulator.configure(capacity_nbytes=needed - missing)
        if missing and any(map(sum, swap.plan.reserves)):
            with pytest.raises(torch.OutOfMemoryError):
                optimizer.step()
            assert not swap_of(optimizer).torn, "nothing has changed"
        elif not missing:
            optimizer.step()
    simulator.configure(capacity_nbytes=0)
    assert_same_training(native, optimizer)


# Events and streams


def test_events_of_a_step_do_not_tell_the_time(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are dearer, and in torch 2.7 the default."""

    class TimingByDefault(torch.Event):
        def __new__(cls, device: Any = None, *, enable_timing: bool = True) -> Any:
            return super().__new__(cls, device, enable_timing=enable_timing)

    monkeypatch.setattr(torch, "Event", TimingByDefault)
    optimizer = swapped([(300, 300)] * 4)
    simulator.reset_counters()
    train(optimizer, 3)
    assert simulator.counters().timing_events == 0
    TimingByDefault("simulated").record()
    assert simulator.counters().timing_events == 1, "the simulator would have told"


def test_more_optimizers_than_the_device_has_streams(simulator: ModuleType) -> None:
    """Streams are handed out in turn: what was two becomes one, and nothing but time is lost."""
    others = [swapped([(300, 300)]) for _ in range(20)]
    for other in others:
        train(other, 1)
    current = torch.Stream(device="simulated")
    with current:
        for _ in range(20):
            assert_trains_alike(Adam, steps=2)
    assert len({torch.Stream(device="simulated").stream_id for _ in range(70)}) == 32


# What a step must not do


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("packed", [True, False])
def test_a_step_has_no_operation_that_blocks_the_host(
    simulator: ModuleType, mode: str, packed: bool
) -> None:
    module = torch.get_device_module("simulated")
    native, optimizer = make_pair(AdamW, MODES[mode], {"packed_swap": packed})
    for trained in (native, optimizer):
        train(trained, 2)
        for index, param in enumerate(params_of(trained)):
            param.grad = dense_gradient(2, index, param)
        module.set_sync_debug_mode("error")
        try:
            trained.step()
            with pytest.raises(RuntimeError, match="synchronizing simulated operation"):
                params_of(trained)[0].sum().item()
        finally:
            module.set_sync_debug_mode("default")
    assert_same_training(native, optimizer)


@pytest.mark.parametrize("packed", [True, False])
def test_no_memory_is_filled_in_the_deterministic_mode(
    simulator: ModuleType, packed: bool
) -> None:
    """Filling what is only reserved would be a kernel over all temporaries in every step."""
    native, optimizer = make_pair(AdamW, config={"packed_swap": packed})
    train(native, 3)
    train(optimizer, 2)
    for index, param in enumerate(params_of(optimizer)):
        param.grad = dense_gradient(2, index, param)
    torch.use_deterministic_algorithms(True)
    try:
        with simulator.record_operations() as operations:
            optimizer.step()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not [one.name for one in operations if "fill" in one.name]
    assert_same_training(native, optimizer)


def test_a_step_within_a_graph_capture_has_the_originals_error(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    native, optimizer = make_pair(AdamW)
    train(native, 2)
    train(optimizer, 2)
    errors = []
    for trained in (native, optimizer):
        before = [param.detach().clone() for param in params_of(trained)]
        for param in params_of(trained):
            param.grad = torch.ones_like(param)
        if hasattr(trained, "_accelerator_graph_capture_health_check"):
            # It asks only CUDA and XPU, which the simulated device is taken for here.
            monkeypatch.setattr(
                torch.accelerator, "current_accelerator",
                lambda check_available=False: torch.device("cuda"),
            )
        else:
            def refuse(self: Optimizer) -> None:
                raise RuntimeError("Attempting CUDA graph capture of step()")

            monkeypatch.setattr(Optimizer, "_cuda_graph_capture_health_check", refuse)
        with simulator.capturing():
            with pytest.raises(RuntimeError) as raised:
                trained.step()
        monkeypatch.undo()
        errors.append(str(raised.value).replace("Swap", ""))
        for was, param in zip(before, params_of(trained)):
            assert torch.equal(was, param)
    assert errors[0] == errors[1] and "capture of step()" in errors[0]
