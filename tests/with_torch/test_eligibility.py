"""What is swapped and what stays: on the host and on the device after a step, rule by rule."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from training import (
    SWAP_CLASS, assert_same_training, assert_trains_alike, make_pair, make_params, noise,
    on_device, on_host, params_of, train,
)

from swap_adam import SwapOptimizerConfig, swap_optimizer
from swap_adam.swap import swap_of
from swap_adam.torch import SwapAdamW

BOTH = {"exp_avg", "exp_avg_sq"}
ALL = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
NONE: set[str] = set()


def trained(
    make: Callable[[], Any], config: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None, original: type[Optimizer] = AdamW,
) -> Optimizer:
    """Ours after three steps that were the native ones."""
    return assert_trains_alike(original, options, {"swap_times": 3, **(config or {})}, make, 3)[1]


@pytest.mark.parametrize("min_numel, swapped", [
    (0, [True] * 4), (1, [True] * 4), (2, [False, True, True, True]),
    (1023, [False, True, True, True]), (1024, [False, False, True, True]),
    (None, [False, False, True, True]), (1025, [False, False, False, True]),
    (1026, [False] * 4), (10**12, [False] * 4),
])
def test_states_below_min_numel_stay_and_those_at_it_go(
    min_numel: int | None, swapped: list[bool]
) -> None:
    config = {} if min_numel is None else {"min_numel": min_numel}
    shapes = [(1,), (1023,), (32, 32), (5, 205)]
    optimizer = trained(lambda: make_params(shapes), config)
    assert on_host(optimizer) == [BOTH if yes else NONE for yes in swapped]
    assert on_device(optimizer) == [NONE if yes else BOTH for yes in swapped]


def subsets(names: set[str]) -> list[tuple[str, ...]]:
    ordered = sorted(names)
    return list(chain.from_iterable(
        combinations(ordered, count) for count in range(1, len(ordered) + 1)
    ))


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per_tensor"])
@pytest.mark.parametrize("keys", [None, *subsets(ALL)], ids=str)
def test_exactly_the_chosen_states_are_swapped(keys: tuple[str, ...] | None, packed: bool) -> None:
    optimizer = trained(
        lambda: make_params([(40, 50), (5, 5)]), {"state_keys": keys, "packed_swap": packed},
        {"amsgrad": True},
    )
    chosen = ALL if keys is None else set(keys)
    assert on_host(optimizer) == [chosen, NONE]
    assert on_device(optimizer) == [ALL - chosen, ALL]


@pytest.mark.parametrize("keys", [None, *subsets(BOTH)], ids=str)
@pytest.mark.parametrize("original", [Adam, AdamW])
def test_conversion_moves_exactly_the_chosen_states(
    original: type[Optimizer], keys: tuple[str, ...] | None
) -> None:
    native, converted = original(make_params()), original(make_params())
    for optimizer in (native, converted):
        train(optimizer, 2)
    swap_optimizer(converted, SwapOptimizerConfig(state_keys=keys, swap_times=3))
    chosen = BOTH if keys is None else set(keys)
    large = [param.numel() >= 1024 for param in params_of(converted)]
    assert on_host(converted) == [chosen if yes else NONE for yes in large]
    assert on_device(converted) == [BOTH - chosen if yes else BOTH for yes in large]
    for optimizer in (native, converted):
        train(optimizer, range(2, 4))
    assert_same_training(native, converted)


def test_without_amsgrad_its_key_costs_nothing_in_the_groups_that_lack_it() -> None:
    optimizer = trained(
        lambda: [{"params": make_params([(2000,)]), "amsgrad": True},
                 {"params": make_params([(2000,)], seed=1)}],
    )
    assert on_host(optimizer) == [ALL, BOTH]


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
def test_step_is_never_swapped(options: dict[str, Any], device: str) -> None:
    native, swapped = assert_trains_alike(AdamW, options, {"min_numel": 0, "swap_times": 3})
    for left, right in zip(params_of(native), params_of(swapped)):
        ours = swapped.state[right]["step"]
        assert ours.device.type == native.state[left]["step"].device.type
        assert ours.device.type == (device if options else "cpu")
        assert not ours.is_pinned()


def test_nothing_is_swapped_for_parameters_on_the_cpu() -> None:
    for original in (Adam, AdamW):
        native, swapped = assert_trains_alike(
            original, config={"min_numel": 0}, make=lambda: make_params(device="cpu")
        )
        assert not any(value.is_pinned() for state in swapped.state.values()
                       for value in state.values())
        assert not swap_of(swapped).devices


def test_swapped_states_are_pinned_and_own_exactly_their_own_bytes() -> None:
    optimizer = trained(make_params)
    for param in params_of(optimizer):
        for name in BOTH:
            state = optimizer.state[param][name]
            if param.numel() >= 1024:
                assert state.is_pinned()
                assert state.untyped_storage().nbytes() == state.numel() * state.element_size()
                assert state.storage_offset() == 0


def test_an_empty_parameter_has_its_states_where_the_native_optimizer_has_them(
    device: str,
) -> None:
    optimizer = trained(lambda: make_params([(0,), (0, 5), (2000,)]), {"min_numel": 0})
    assert on_host(optimizer) == [NONE, NONE, BOTH]


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_channels_last_states_are_swapped_with_their_strides(
    memory_format: torch.memory_format,
) -> None:
    def make() -> list[Tensor]:
        return [param.detach().contiguous(memory_format=memory_format).requires_grad_()
                for param in make_params([(8, 6, 5, 7)])]

    native, swapped = assert_trains_alike(AdamW, {}, {"swap_times": 3}, make)
    assert on_host(swapped) == [BOTH]
    (left,), (right,) = params_of(native), params_of(swapped)
    for name in BOTH:
        assert swapped.state[right][name].stride() == native.state[left][name].stride()


def test_transposed_states_are_swapped_with_their_strides() -> None:
    def make() -> list[Tensor]:
        return [param.detach().t().requires_grad_() for param in make_params([(40, 50)])]

    native, swapped = assert_trains_alike(AdamW, {}, {"swap_times": 3}, make)
    assert on_host(swapped) == [BOTH]
    (param,) = params_of(swapped)
    assert swapped.state[param]["exp_avg"].stride() == param.stride() == (1, 50)


# States that exist before the conversion


def with_states(change: Callable[[dict[str, Any]], object]) -> tuple[Optimizer, Optimizer]:
    """Two native optimizers, trained alike, with their states changed alike."""
    pair = AdamW(make_params([(40, 50)])), AdamW(make_params([(40, 50)]))
    for optimizer in pair:
        train(optimizer, 2)
        change(optimizer.state[params_of(optimizer)[0]])
    return pair


def assert_goes_on(native: Optimizer, converted: Optimizer) -> None:
    for optimizer in (native, converted):
        train(optimizer, range(2, 5))
    assert_same_training(native, converted)


KEPT: list[Tensor] = []


def _one_storage(state: dict[str, Any]) -> None:
    both = torch.stack([state["exp_avg"], state["exp_avg_sq"]])
    state["exp_avg"], state["exp_avg_sq"] = both.unbind()


def _part_of_more(state: dict[str, Any]) -> None:
    more = torch.zeros(3, 40, 50, device=state["exp_avg"].device)
    state["exp_avg"] = more[1].copy_(state["exp_avg"])


def _viewed_by_somebody(state: dict[str, Any]) -> None:
    KEPT.append(state["exp_avg"].view(-1))


def _transposed(state: dict[str, Any]) -> None:
    state["exp_avg"] = state["exp_avg"].t().contiguous().t()


def _strided(state: dict[str, Any]) -> None:
    wide = torch.zeros(40, 100, device=state["exp_avg"].device)
    state["exp_avg"] = wide[:, ::2].copy_(state["exp_avg"])


@pytest.mark.parametrize("change, stays", [
    (_one_storage, BOTH), (_part_of_more, {"exp_avg"}), (_viewed_by_somebody, {"exp_avg"}),
    (_transposed, {"exp_avg"}), (_strided, {"exp_avg"}),
])
def test_conversion_leaves_a_state_whose_memory_it_could_not_free_or_reorder(
    change: Callable[[dict[str, Any]], None], stays: set[str]
) -> None:
    KEPT.clear()
    native, converted = with_states(change)
    before = {name: id(t) for name, t in converted.state[params_of(converted)[0]].items()}
    swap_optimizer(converted, SwapOptimizerConfig(swap_times=3))
    assert on_device(converted) == [stays]
    after = {name: id(t) for name, t in converted.state[params_of(converted)[0]].items()}
    assert all(before[name] == after[name] for name in {*stays, "step"})
    assert_goes_on(native, converted)
    assert on_device(converted) == [stays]
    KEPT.clear()


def test_conversion_takes_a_state_of_another_float_type() -> None:
    """As after a load into a half-precision model, whose moments somebody kept in float32."""

    def widen(state: dict[str, Any]) -> None:
        for name in BOTH:
            state[name] = state[name].double()

    native, converted = with_states(widen)
    swap_optimizer(converted, SwapOptimizerConfig(swap_times=3))
    assert on_host(converted) == [BOTH]
    (param,) = params_of(converted)
    assert converted.state[param]["exp_avg"].dtype == torch.float64


def test_conversion_pins_a_state_that_was_on_the_host_already() -> None:
    native, converted = with_states(lambda state: None)
    state = converted.state[params_of(converted)[0]]
    state["exp_avg"] = state["exp_avg"].cpu()
    swap_optimizer(converted, SwapOptimizerConfig(swap_times=3))
    state = converted.state[params_of(converted)[0]]
    assert state["exp_avg"].is_pinned() and state["exp_avg_sq"].is_pinned()
    assert_goes_on(native, converted)


def test_a_state_that_is_no_tensor_or_that_the_user_adds_is_left_alone(device: str) -> None:
    extra = torch.ones(5000, device=device)

    def add(state: dict[str, Any]) -> None:
        state["note"], state["mine"] = "a user's", extra

    _, converted = with_states(add)
    swap_optimizer(converted, SwapOptimizerConfig(swap_times=3))
    train(converted, range(2, 4))
    state = converted.state[params_of(converted)[0]]
    assert state["note"] == "a user's"
    assert state["mine"] is extra


def test_a_state_put_in_by_hand_between_steps_is_used_and_swapped_from_then_on() -> None:
    native, swapped = make_pair(AdamW, config={"swap_times": 3})
    for optimizer in (native, swapped):
        train(optimizer, 2)
        param = params_of(optimizer)[2]
        value = noise(99, 0, param.detach())
        optimizer.state[param]["exp_avg"] = value
        del value
        train(optimizer, range(2, 5))
    assert_same_training(native, swapped)
    assert on_host(swapped)[2] == BOTH


@pytest.mark.simulator_only
@pytest.mark.parametrize("original", [Adam, AdamW])
def test_device_memory_after_a_step_is_that_of_what_stays(
    original: type[Optimizer], simulator: Any
) -> None:
    def held(params: list[Tensor], optimizer: Optimizer) -> int:
        train(optimizer, 3)
        for param in params:
            param.grad = None
        torch.accelerator.synchronize()
        return simulator.memory_held()

    shapes = [(64, 64), (128,), (512, 16)]  # every size a multiple of the allocation unit
    start = simulator.memory_held()
    params = make_params(shapes)
    bare = simulator.memory_held() - start
    native = original(params)
    with_native = held(params, native) - start
    del native
    swapped = SWAP_CLASS[original](params, swap_config=SwapOptimizerConfig(swap_times=3))
    with_swapped = held(params, swapped) - start
    assert with_native == bare + 2 * 4 * (64 * 64 + 128 + 512 * 16)
    assert with_swapped == bare + 2 * 4 * 128


def test_lazy_states_are_made_only_for_what_has_had_a_gradient() -> None:
    optimizer = SwapAdamW(make_params())
    train(optimizer, 2, lambda step, index, param: noise(step, index, param) if index < 2 else None)
    made = [bool(optimizer.state.get(param)) for param in params_of(optimizer)]
    assert made == [True, True, False, False, False, False]
