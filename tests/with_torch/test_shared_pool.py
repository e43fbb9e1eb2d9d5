"""One optimizer per parameter: a thousand of them pin no more than one would, and share streams."""
from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from device_under_test import IS_FULL
from torch import Tensor
from torch.optim import AdamW
from training import assert_same_bits, assert_same_training, noise, params_of, train

from swap_adam import SwapOptimizerConfig, swap_optimizer, unswap_optimizer
from swap_adam.swap import swap_of
from swap_adam.torch import SwapAdamW

pytestmark = pytest.mark.simulator_only

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _only_references_free() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def pinned(simulator: ModuleType) -> Callable[[], int]:
    """Pinned bytes more than before the test, as the host allocator accounts them."""

    def pinned() -> int:
        torch.accelerator.synchronize()  # a block goes when its copies are over
        torch.get_device_module("simulated").host_empty_cache()  # what other tests have left there
        return int(simulator.pinned_nbytes())

    base = pinned()
    return lambda: pinned() - base


def make(count: int, numel: int, seed: int = 0) -> list[Tensor]:
    return [
        (torch.arange(numel, dtype=torch.float32) % 97 + index).to("simulated").requires_grad_()
        for index in range(count)
    ]


def step_all(optimizers: list[Any], step: int) -> None:
    for optimizer in optimizers:
        for param in params_of(optimizer):
            param.grad = torch.full_like(param, 0.1 * step + 0.3)
        optimizer.step()


def check_pinned(pinned: int, states_nbytes: int) -> None:
    assert states_nbytes <= pinned <= 1.05 * states_nbytes + MIB


def copy_streams(optimizers: list[Any]) -> set[int]:
    return {
        stream.stream_id
        for optimizer in optimizers
        for device in swap_of(optimizer).devices.values()
        for stream in device.backend._streams.values()
    }


@pytest.mark.parametrize(
    "count, exponent", [(30, 17), (200, 14), *([(1000, 11)] if IS_FULL else [])]
)
@pytest.mark.parametrize("packed", [True, False])
def test_many_optimizers_of_one_tensor_pin_what_they_swap(
    pinned: Callable[[], int], count: int, exponent: int, packed: bool
) -> None:
    numel = int(1.1 * 2**exponent)
    config = SwapOptimizerConfig(packed_swap=packed)
    natives = [AdamW([param], lr=1e-3) for param in make(count, numel)]
    mine = [SwapAdamW([param], lr=1e-3, swap_config=config) for param in make(count, numel)]
    for step in range(3):
        step_all(natives, step)
        step_all(mine, step)
    check_pinned(pinned(), 8 * numel * count)
    assert len(copy_streams(mine)) == 2
    for native, swapped in zip(natives, mine):
        assert_same_training(native, swapped)
    reports = [optimizer.swap_report()["simulated:0"] for optimizer in mine]
    assert pinned() - count <= sum(report.pinned_nbytes for report in reports) <= pinned()


def test_packing_holds_little_more_at_a_time(
    pinned: Callable[[], int], simulator: ModuleType
) -> None:
    """The places are taken one after the other, so the old and the new are never both there."""
    count, numel = 60, int(1.1 * 2**17)
    mine = [SwapAdamW([param]) for param in make(count, numel)]
    step_all(mine, 0)
    before, held = pinned(), simulator.pinned_nbytes()
    simulator.reset_max_pinned_nbytes()
    step_all(mine, 1)
    step_all(mine, 2)
    check_pinned(pinned(), 8 * numel * count)
    assert simulator.max_pinned_nbytes() - held <= 64 * MIB  # a slab
    assert pinned() < 0.6 * before


def test_steps_in_backward(pinned: Callable[[], int]) -> None:
    def run(kind: Any) -> tuple[list[Tensor], dict[Tensor, Any]]:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(190, 190) for _ in range(12)]
        model = torch.nn.Sequential(*layers).to("simulated")
        optimizers = {param: kind([param], lr=1e-3) for param in model.parameters()}

        def step(param: Tensor) -> None:
            optimizers[param].step()
            param.grad = None

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step)
        for index in range(4):
            x = noise(index, 0, torch.empty(4, 190, device="simulated"))
            model(x).square().mean().backward()
        return list(model.parameters()), optimizers

    expected, _ = run(AdamW)
    params, optimizers = run(SwapAdamW)
    for index, (left, right) in enumerate(zip(expected, params)):
        assert_same_bits(left, right, f"parameter {index}")
    check_pinned(pinned(), sum(8 * p.numel() for p in params if p.numel() >= 1024))
    assert len(copy_streams(list(optimizers.values()))) == 2


def test_converted_optimizers_share_and_give_back(pinned: Callable[[], int]) -> None:
    count, numel = 60, int(1.1 * 2**15)
    natives = [AdamW([param]) for param in make(count, numel)]
    mine = [AdamW([param]) for param in make(count, numel)]
    for optimizers in (natives, mine):
        step_all(optimizers, 0)
    for optimizer in mine:
        swap_optimizer(optimizer)
    for step in (1, 2, 3):
        step_all(natives, step)
        step_all(mine, step)
    check_pinned(pinned(), 8 * numel * count)
    for optimizer in mine[::2]:
        unswap_optimizer(optimizer)
    for step in (4, 5, 6):
        step_all(natives, step)
        step_all(mine, step)
    check_pinned(pinned(), 8 * numel * count // 2)
    for native, swapped in zip(natives, mine):
        assert_same_training(native, swapped)


def test_deleting_half_of_them_gives_their_bytes_back(pinned: Callable[[], int]) -> None:
    count, numel = 100, int(1.1 * 2**14)
    natives = [AdamW([param]) for param in make(count, numel)]
    mine = [SwapAdamW([param]) for param in make(count, numel)]
    for step in range(3):
        step_all(natives, step)
        step_all(mine, step)
    del mine[::2], natives[::2]
    for step in range(3, 5):
        step_all(natives, step)
        step_all(mine, step)
    check_pinned(pinned(), 8 * numel * len(mine))
    for native, swapped in zip(natives, mine):
        assert_same_training(native, swapped)
    del native, swapped, natives
    mine.clear()
    assert pinned() == 0


def test_a_state_dict_that_is_held_stays_as_it_was_while_slots_move(
    pinned: Callable[[], int]
) -> None:
    count, numel = 40, int(1.1 * 2**15)
    natives = [AdamW([param]) for param in make(count, numel)]
    mine = [SwapAdamW([param]) for param in make(count, numel)]
    step_all(natives, 0)
    step_all(mine, 0)
    held = mine[7].state_dict()["state"][0]
    before = {name: value.clone() for name, value in held.items()}
    for step in range(1, 5):
        step_all(natives, step)
        step_all(mine, step)
        for name, value in before.items():
            assert torch.equal(value, held[name]), (step, name)
    for native, swapped in zip(natives, mine):
        assert_same_training(native, swapped)
    del held
    check_pinned(pinned(), 8 * numel * count)


def test_an_ordinary_optimizer_beside_them_keeps_its_slabs() -> None:
    large = SwapAdamW(make(16, 2**15))
    train(large, 2, gradient=lambda step, index, param: torch.ones_like(param))
    (device,) = swap_of(large).devices.values()
    version = device.store.version
    mine = [SwapAdamW([param]) for param in make(40, int(1.1 * 2**15))]
    for step in range(3):
        step_all(mine, step)
        step_all([large], step)
    assert device.store.version == version


def test_a_lack_of_pinned_memory_for_the_pool_is_no_error(
    pinned: Callable[[], int], simulator: ModuleType
) -> None:
    count, numel = 40, int(1.1 * 2**15)
    natives = [AdamW([param]) for param in make(count, numel)]
    mine = [SwapAdamW([param]) for param in make(count, numel)]
    step_all(natives, 0)
    step_all(mine, 0)
    simulator.configure(pinned_capacity_nbytes=simulator.pinned_nbytes())
    for step in (1, 2):
        step_all(natives, step)
        step_all(mine, step)
    simulator.configure(pinned_capacity_nbytes=0)
    for native, swapped in zip(natives, mine):
        assert_same_training(native, swapped)


def test_two_threads_use_the_pool_at_once(pinned: Callable[[], int]) -> None:
    count, numel = 40, int(1.1 * 2**13)
    natives = [AdamW([param]) for param in make(2 * count, numel)]
    mine = [SwapAdamW([param]) for param in make(2 * count, numel)]
    errors: list[BaseException] = []

    def work(optimizers: list[Any]) -> None:
        try:
            for step in range(4):
                step_all(optimizers, step)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(part,)) for part in (mine[::2], mine[1::2])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for step in range(4):
        step_all(natives, step)
    for native, swapped in zip(natives, mine):
        assert_same_training(native, swapped)
    step_all(mine, 4)
    step_all(mine, 5)
    check_pinned(pinned(), 8 * numel * 2 * count)
