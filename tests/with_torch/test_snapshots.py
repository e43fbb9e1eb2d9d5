"""What is handed out stays what it was: states, views, state dicts, and the containers of states.

A tensor that somebody holds when the next step writes becomes a snapshot; a background writer, an
early stopping or an EMA then reads what was there when it was handed out.
"""
from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW
from training import assert_same_training, make_params, noise, params_of

from swap_adam import SwapOptimizerConfig
from swap_adam.swap import swap_of
from swap_adam.torch import SwapAdamW

PIPELINES = [pytest.param(True, id="packed"), pytest.param(False, id="per tensor")]
SHAPES: list[tuple[int, ...]] = [(1100,), (40, 180), (100,), (2049,)]


def step(optimizer: Any, number: int) -> None:
    for index, param in enumerate(params_of(optimizer)):
        param.grad = noise(number, index, param.detach())
    optimizer.step()


def make(packed: bool = True, **config: Any) -> tuple[Any, Any]:
    native = AdamW(make_params(SHAPES))
    swapped = SwapAdamW(
        make_params(SHAPES),
        swap_config=SwapOptimizerConfig(packed_swap=packed, swap_times=4, **config),
    )
    for optimizer in (native, swapped):
        step(optimizer, 0)
        step(optimizer, 1)
    return native, swapped


# What is held, and how its bytes are read later.
HOLDERS: dict[str, Callable[[Any, Tensor], tuple[Any, Callable[[Any], Tensor]]]] = {
    "the tensor": lambda o, p: (o.state[p]["exp_avg"], lambda held: held),
    "a view": lambda o, p: (o.state[p]["exp_avg"].view(-1)[3:-3], lambda held: held),
    "a detached tensor": lambda o, p: (o.state[p]["exp_avg"].detach(), lambda held: held),
    "its numpy array": lambda o, p: (
        o.state[p]["exp_avg"].numpy(), lambda held: torch.from_numpy(held)
    ),
    "its storage": lambda o, p: (
        o.state[p]["exp_avg"].untyped_storage(),
        lambda held: torch.tensor([], dtype=torch.float32).set_(held),
    ),
    "a list": lambda o, p: ([o.state[p]["exp_avg"]], lambda held: held[0]),
    "the state dict": lambda o, p: (
        o.state_dict(), lambda held: held["state"][1]["exp_avg"]
    ),
    "a shallow copy of the state": lambda o, p: (
        dict(o.state[p]), lambda held: held["exp_avg"]
    ),
}


@pytest.mark.parametrize("packed", PIPELINES)
@pytest.mark.parametrize("holder", HOLDERS)
def test_what_is_held_is_a_snapshot_and_the_training_goes_on(packed: bool, holder: str) -> None:
    native, swapped = make(packed)
    held, read = HOLDERS[holder](swapped, params_of(swapped)[1])
    value = read(held).clone()
    for number in range(2, 5):
        step(native, number)
        step(swapped, number)
        assert torch.equal(read(held), value)
    assert_same_training(native, swapped)
    assert not torch.equal(
        read(HOLDERS[holder](swapped, params_of(swapped)[1])[0]), value
    ), "what is handed out now is new"


@pytest.mark.parametrize("packed", PIPELINES)
def test_a_held_inner_dictionary_shows_the_new_states(packed: bool) -> None:
    """It is the original's own container: live for ever, and read without asking anybody."""
    native, swapped = make(packed)
    inner = swapped.state[params_of(swapped)[1]]
    for number in range(2, 5):
        step(native, number)
        step(swapped, number)
        expected = native.state[params_of(native)[1]]
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(inner[name].cpu(), expected[name].cpu()), name
    assert_same_training(native, swapped)


@pytest.mark.parametrize("packed", PIPELINES)
def test_the_held_mapping_of_all_states_shows_the_new_states(packed: bool) -> None:
    native, swapped = make(packed)
    states = swapped.state
    for number in range(2, 5):
        step(native, number)
        step(swapped, number)
        for left, right in zip(params_of(native), params_of(swapped)):
            for name, value in native.state[left].items():
                assert torch.equal(states[right][name].cpu(), value.cpu()), name


@pytest.mark.parametrize("packed", PIPELINES)
def test_a_state_dict_is_immutable_over_later_steps(packed: bool) -> None:
    native, swapped = make(packed)
    expected = copy.deepcopy(native.state_dict())
    saved = swapped.state_dict()
    for number in range(2, 5):
        step(native, number)
        step(swapped, number)
        for key, state in expected["state"].items():
            assert saved["state"][key].keys() == state.keys()
            for name, value in state.items():
                assert torch.equal(saved["state"][key][name].cpu(), value.cpu()), (key, name)
    assert_same_training(native, swapped)


def test_a_background_writer_saves_what_there_was_at_the_call() -> None:
    native, swapped = make()
    expected = copy.deepcopy(native.state_dict())
    saved = swapped.state_dict()
    file, may_write = io.BytesIO(), threading.Event()

    def write() -> None:
        may_write.wait()
        torch.save(saved, file)

    writer = threading.Thread(target=write)
    writer.start()
    step(swapped, 2)
    may_write.set()
    writer.join()
    file.seek(0)
    loaded = torch.load(file, weights_only=True, map_location="cpu")
    for key, state in expected["state"].items():
        for name, value in state.items():
            assert torch.equal(loaded["state"][key][name], value.cpu()), (key, name)


@pytest.mark.parametrize("packed", PIPELINES)
def test_what_is_written_into_a_state_counts_in_the_next_step(packed: bool) -> None:
    native, swapped = make(packed)
    for number in range(2, 5):
        for optimizer in (native, swapped):
            state = optimizer.state[params_of(optimizer)[1]]
            state["exp_avg"].mul_(0.5)
            state["exp_avg_sq"].view(-1)[:7] = 1.0
            del state
            step(optimizer, number)
    assert_same_training(native, swapped)


def test_nothing_is_copied_for_what_nobody_holds(simulator: Any) -> None:
    """Reading states between steps, and letting them go, costs no fresh pinned memory."""
    _, swapped = make()
    (device,) = swap_of(swapped).devices.values()
    version = device.store.version
    for number in range(2, 5):
        total = sum(float(state["exp_avg"].sum()) for state in swapped.state.values())
        assert total == total
        step(swapped, number)
    assert device.store.version == version
