"""``optimizer.state`` is readable, right and live between steps, whatever is still in flight."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from training import (
    assert_same_bits, assert_same_training, dense_gradient, make_pair, params_of, snapshot, train,
)

from swap_adam.torch import SwapAdamW

pytestmark = pytest.mark.parametrize("packed", [True, False], ids=["packed", "per_tensor"])
BOTH = ("exp_avg", "exp_avg_sq")


def pair(packed: bool, original: type[Optimizer] = AdamW, **options: Any) -> tuple[Any, Any]:
    return make_pair(original, options, {"swap_times": 5, "packed_swap": packed})


def by_item(optimizer: Optimizer, param: Tensor, name: str) -> Tensor:
    return optimizer.state[param][name]


def by_get(optimizer: Optimizer, param: Tensor, name: str) -> Tensor:
    return optimizer.state.get(param, {})[name]


def by_items(optimizer: Optimizer, param: Tensor, name: str) -> Tensor:
    return {id(p): state for p, state in optimizer.state.items()}[id(param)][name]


def by_state_dict(optimizer: Optimizer, param: Tensor, name: str) -> Tensor:
    index = [id(p) for p in params_of(optimizer)].index(id(param))
    return optimizer.state_dict()["state"][index][name]


def by_deepcopy(optimizer: Optimizer, param: Tensor, name: str) -> Tensor:
    index = [id(p) for p in params_of(optimizer)].index(id(param))
    return list(copy.deepcopy(optimizer).state.values())[index][name]


def by_pickle(optimizer: Optimizer, param: Tensor, name: str) -> Tensor:
    index = [id(p) for p in params_of(optimizer)].index(id(param))
    return list(pickle.loads(pickle.dumps(optimizer)).state.values())[index][name]


@pytest.mark.parametrize(
    "read", [by_item, by_get, by_items, by_state_dict, by_deepcopy, by_pickle]
)
@pytest.mark.parametrize("original", [Adam, AdamW])
def test_right_after_each_step_every_state_is_the_native_one(
    original: type[Optimizer], read: Callable[..., Tensor], packed: bool
) -> None:
    native, swapped = pair(packed, original, amsgrad=True)
    for step in range(4):
        for optimizer in (native, swapped):
            train(optimizer, range(step, step + 1))
        for left, right in zip(params_of(native), params_of(swapped)):
            for name in (*BOTH, "max_exp_avg_sq", "step"):
                found = read(swapped, right, name)
                assert_same_bits(native.state[left][name], found, f"{name} after step {step}")


def test_the_shape_of_the_state_is_the_native_one(packed: bool) -> None:
    native, swapped = pair(packed)
    for optimizer in (native, swapped):
        train(optimizer, 2)
    assert len(native.state) == len(swapped.state)
    for left, right in zip(native.state.values(), swapped.state.values()):
        assert list(left) == list(right)
        for name in BOTH:
            assert type(right[name]) is type(left[name]) is Tensor
            assert (left[name].shape, left[name].stride(), left[name].dtype) == (
                right[name].shape, right[name].stride(), right[name].dtype
            )
            assert not right[name].requires_grad and right[name].grad_fn is None


def test_the_mapping_and_an_entry_held_across_steps_go_on_being_right(packed: bool) -> None:
    """Read without asking the optimizer again, with copies that nobody else waits for."""
    native, swapped = pair(packed)
    for optimizer in (native, swapped):
        train(optimizer, 1)
    states = swapped.state
    entry = swapped.state[params_of(swapped)[2]]
    for step in range(1, 5):
        for optimizer in (native, swapped):
            train(optimizer, range(step, step + 1))
        for index, (left, right) in enumerate(zip(params_of(native), params_of(swapped))):
            for name in BOTH:
                assert_same_bits(native.state[left][name], states[right][name], f"{index} {name}")
        left = params_of(native)[2]
        assert_same_bits(native.state[left]["exp_avg"], entry["exp_avg"], "held entry")


def test_what_is_written_into_a_state_counts_at_the_next_step(packed: bool) -> None:
    def edit(optimizer: Optimizer) -> None:
        for index, param in enumerate(params_of(optimizer)):
            state = optimizer.state[param]
            state["exp_avg"].mul_(0.5)
            state["exp_avg_sq"].view(-1)[index] = 3.0
            state["step"].add_(2)

    native, swapped = pair(packed)
    for optimizer in (native, swapped):
        train(optimizer, 4, after_step=lambda step: edit(optimizer))
    assert_same_training(native, swapped)


def test_a_state_replaced_by_assignment_counts_at_the_next_step(packed: bool) -> None:
    def edit(optimizer: Optimizer) -> None:
        for param in params_of(optimizer)[::2]:
            state = optimizer.state[param]
            state["exp_avg"] = state["exp_avg"].clone().add_(0.25)
            state["exp_avg_sq"] = torch.ones_like(param)

    native, swapped = pair(packed)
    for optimizer in (native, swapped):
        train(optimizer, 4, after_step=lambda step: edit(optimizer))
    assert_same_training(native, swapped)


def test_states_that_are_dropped_start_again(packed: bool) -> None:
    """``optimizer.state[p] = {}``, ``del optimizer.state[p]``, ``optimizer.state.clear()``."""
    def drop(optimizer: Optimizer, step: int) -> None:
        params = params_of(optimizer)
        if step == 1:
            optimizer.state[params[2]] = {}
        elif step == 2:
            del optimizer.state[params[3]]
        elif step == 4:
            optimizer.state.clear()

    native, swapped = pair(packed)
    for optimizer in (native, swapped):
        train(optimizer, 7, after_step=lambda step: drop(optimizer, step))
    assert_same_training(native, swapped)
    assert all(int(state["step"]) == 2 for state in swapped.state.values())


HOLDS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda state: state,
    "view": lambda state: state.view(-1),
    "slice": lambda state: state.view(-1)[3:7],
    "detached": lambda state: state.detach(),
    "numpy": lambda state: state.numpy(),
    "storage": lambda state: state.untyped_storage(),
}


def bits(held: Any) -> list[float]:
    if isinstance(held, torch.UntypedStorage):
        held = torch.tensor([], dtype=torch.float32).set_(held)
    return torch.as_tensor(held).clone().view(-1).tolist()


@pytest.mark.parametrize("hold", HOLDS)
def test_a_state_held_across_a_step_is_a_snapshot_and_training_goes_on(
    hold: str, packed: bool
) -> None:
    native, swapped = pair(packed)
    for optimizer in (native, swapped):
        train(optimizer, 2)
    held = [
        HOLDS[hold](swapped.state[param][name])
        for param in params_of(swapped) if param.numel() >= 1024 for name in BOTH
    ]
    before = [bits(item) for item in held]
    for optimizer in (native, swapped):
        train(optimizer, range(2, 5))
    assert [bits(item) for item in held] == before
    assert_same_training(native, swapped)
    for param in params_of(swapped):
        if param.numel() >= 1024:
            assert swapped.state[param]["exp_avg"].is_pinned()


def test_a_state_dict_held_across_steps_stays_as_it_was(packed: bool) -> None:
    native, swapped = pair(packed)
    for optimizer in (native, swapped):
        train(optimizer, 2)
    saved = swapped.state_dict()
    expected = copy.deepcopy(saved)
    for optimizer in (native, swapped):
        train(optimizer, range(2, 5))
    for key, entry in expected["state"].items():
        for name in BOTH:
            if entry[name].numel() >= 1024:
                assert_same_bits(entry[name], saved["state"][key][name], f"{name} of {key}")
    assert_same_training(native, swapped)


def test_a_copy_trains_on_by_itself(packed: bool) -> None:
    _, swapped = pair(packed)
    train(swapped, 2)
    twin = copy.deepcopy(swapped)
    before = snapshot(swapped)
    train(twin, range(2, 4))
    after = snapshot(swapped)
    for left, right in zip(before["states"], after["states"]):
        for name in left:
            assert_same_bits(left[name], right[name], name)
    train(swapped, range(2, 4))
    assert type(twin) is SwapAdamW
    assert_same_training(swapped, twin)


def test_nothing_can_be_printed_or_asked_that_breaks_the_next_step(packed: bool) -> None:
    native, swapped = pair(packed)
    for optimizer in (native, swapped):
        train(optimizer, 1)
        assert "lr" in repr(optimizer)
        str(optimizer.state)
        dir(optimizer), vars(optimizer), optimizer.defaults
        train(optimizer, range(1, 3))
    assert_same_training(native, swapped)


def test_states_between_backward_and_step_are_those_of_the_last_step(packed: bool) -> None:
    native, swapped = pair(packed)
    for optimizer in (native, swapped):
        train(optimizer, 2)
        for index, param in enumerate(params_of(optimizer)):
            param.grad = dense_gradient(9, index, param)
    assert_same_training(native, swapped)


@pytest.mark.simulator_only
@pytest.mark.parametrize(
    "read", [by_item, by_get, by_items, by_state_dict, by_deepcopy, by_pickle]
)
def test_a_step_does_not_go_on_waiting_because_states_were_read_once(
    read: Callable[..., Tensor], packed: bool, simulator: Any
) -> None:
    """After a checkpoint or a look at the moments the host runs ahead of the device again."""
    _, swapped = pair(packed)
    waits = []
    for looks in (False, True):
        train(swapped, 2)
        if looks:
            for param in params_of(swapped):
                read(swapped, param, "exp_avg")
            train(swapped, 1)
        gc.collect()  # copies by deepcopy and pickle
        torch.accelerator.synchronize()
        simulator.reset_counters()
        swapped.step()
        waits.append(simulator.counters().host_waits)
    assert waits[0] == waits[1]
    assert waits[0] == 0 or not packed
