"""Gradients that are missing, sparse, or laid out differently from their parameter."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from device_under_test import DEVICE
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from training import (
    SHAPES, assert_same_bits, assert_same_training, assert_trains_alike, dense_gradient, make_pair,
    make_params, noise, on_host, params_of, train,
)

each_pipeline = pytest.mark.parametrize("packed", [True, False], ids=["packed", "per_tensor"])
each_mode = pytest.mark.parametrize("original, options", [
    (Adam, {"foreach": False}), (Adam, {}), (AdamW, {"foreach": False}), (AdamW, {}),
    (AdamW, {"fused": True}),
], ids=["adam-loop", "adam-default", "adamw-loop", "adamw-default", "adamw-fused"])


# Missing ones


@each_pipeline
@pytest.mark.parametrize("swap_times", [1, 3, 50])
@each_mode
def test_gradients_missing_at_random(
    original: type[Optimizer], options: dict[str, Any], swap_times: int, packed: bool
) -> None:
    present = random.Random(swap_times)
    choice = [[present.random() < 0.5 for _ in range(2 * len(SHAPES))] for _ in range(12)]

    def gradient(step: int, index: int, param: Tensor) -> Tensor | None:
        return dense_gradient(step, index, param) if choice[step][index] else None

    assert_trains_alike(
        original, options, {"swap_times": swap_times, "packed_swap": packed}, steps=12,
        gradient=gradient, make=lambda: [
            {"params": make_params()}, {"params": make_params(seed=1), "lr": 0.1, "amsgrad": True},
        ],
    )


@each_pipeline
def test_a_step_without_any_gradient_changes_nothing(packed: bool) -> None:
    native, swapped = make_pair(AdamW, config={"packed_swap": packed, "swap_times": 3})
    for optimizer in (native, swapped):
        optimizer.step()
        train(optimizer, 2)
        train(optimizer, range(2, 4), lambda step, index, param: None)
        train(optimizer, range(4, 6))
    assert_same_training(native, swapped)


@each_pipeline
def test_parameters_that_never_have_a_gradient_get_no_state(packed: bool) -> None:
    def gradient(step: int, index: int, param: Tensor) -> Tensor | None:
        return None if index in (2, 5) else dense_gradient(step, index, param)

    _, swapped = assert_trains_alike(
        AdamW, config={"packed_swap": packed, "swap_times": 3}, gradient=gradient
    )
    params = params_of(swapped)
    assert params[2] not in swapped.state and params[5] not in swapped.state


@each_pipeline
def test_layers_frozen_and_unfrozen_while_training(packed: bool) -> None:
    def run(optimizer: Optimizer) -> Optimizer:
        params = params_of(optimizer)
        for step in range(9):
            for index, param in enumerate(params):
                param.requires_grad_(step // 3 != 1 or index % 2 == 0)
            optimizer.zero_grad(set_to_none=True)
            total = sum(
                (param * noise(step, index, param.detach())).square().sum()
                for index, param in enumerate(params)
            )
            total.backward()
            optimizer.step()
        return optimizer

    native, swapped = make_pair(AdamW, config={"packed_swap": packed, "swap_times": 5})
    assert_same_training(run(native), run(swapped))
    steps = [int(swapped.state[param]["step"]) for param in params_of(swapped)]
    assert steps == [9, 6, 9, 6, 9, 6]


@pytest.mark.simulator_only
@each_pipeline
def test_nothing_is_moved_for_what_has_no_gradient(simulator: Any, packed: bool) -> None:
    swapped = make_pair(AdamW, config={"packed_swap": packed, "swap_times": 5})[1]
    train(swapped, 1)
    for index, param in enumerate(params_of(swapped)):
        if index != 3:
            param.grad = None
    simulator.reset_counters()
    swapped.step()
    torch.accelerator.synchronize()
    moved = simulator.counters()
    assert moved.copies_in_nbytes == moved.copies_out_nbytes == 2 * 4 * 1024


@each_pipeline
def test_zeroed_gradients_are_gradients(packed: bool) -> None:
    """``zero_grad(set_to_none=False)``: the moments decay and the step counts."""
    native, swapped = make_pair(AdamW, config={"packed_swap": packed, "swap_times": 3})
    for optimizer in (native, swapped):
        train(optimizer, 2)
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
    assert_same_training(native, swapped)


def test_gradients_are_left_as_they_are() -> None:
    native, swapped = make_pair(AdamW, config={"swap_times": 3})
    train(swapped, 2)
    grads = [param.grad for param in params_of(swapped)]
    before = [grad.clone() for grad in grads]
    swapped.step()
    assert all(param.grad is grad for param, grad in zip(params_of(swapped), grads))
    assert all(torch.equal(a, b) for a, b in zip(before, grads))


# Sparse ones


def with_embedding() -> list[Tensor]:
    """An embedding on the CPU comes last: not every accelerator has sparse tensors."""
    return [*make_params(), *make_params([(50, 40)], device="cpu")]


def sparse_gradient(step: int, index: int, param: Tensor) -> Tensor:
    dense = dense_gradient(step, index, param)
    if param.device.type != "cpu":
        return dense
    with torch.sparse.check_sparse_tensor_invariants():
        return torch.sparse_coo_tensor(torch.tensor([[0, 3]]), dense[[0, 3]], dense.shape)


@each_pipeline
@pytest.mark.parametrize("trained_steps", [0, 2])
@pytest.mark.parametrize("original", [Adam, AdamW])
def test_a_sparse_gradient_is_the_native_error_with_nothing_updated(
    original: type[Optimizer], trained_steps: int, packed: bool
) -> None:
    native, swapped = make_pair(
        original, config={"swap_times": 3, "packed_swap": packed}, make=with_embedding
    )
    messages = []
    for optimizer in (native, swapped):
        train(optimizer, trained_steps)
        before = [param.detach().clone() for param in params_of(optimizer)]
        with pytest.raises(RuntimeError) as caught:
            train(optimizer, 1, sparse_gradient)
        messages.append(str(caught.value))
        assert all(torch.equal(a, b) for a, b in zip(before, params_of(optimizer)))
        steps = [int(s["step"]) for s in optimizer.state.values() if s]
        assert set(steps) <= {trained_steps}
        train(optimizer, range(trained_steps, trained_steps + 2))
    assert messages[0] == messages[1]
    assert "sparse gradients" in messages[0]
    assert_same_training(native, swapped)


# Other layouts


def channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def sliced(tensor: Tensor) -> Tensor:
    wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 3, dtype=tensor.dtype,
                       device=tensor.device)
    wide[..., 1:-2] = tensor
    return wide[..., 1:-2]


def offset(tensor: Tensor) -> Tensor:
    """Dense, but not at the beginning of its storage."""
    flat = torch.zeros(tensor.numel() + 37, dtype=tensor.dtype, device=tensor.device)
    flat[37:] = tensor.reshape(-1)
    return flat[37:].view(tensor.shape)


def expanded(tensor: Tensor) -> Tensor:
    return tensor[:1].expand(tensor.shape)


LAYOUTS = {f.__name__: f for f in (channels_last, transposed, sliced, offset)}
FOUR_DIM = [(8, 6, 5, 7), (20, 30, 2, 2), (3, 1, 1, 1)]


@each_pipeline
@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize("layout", [*LAYOUTS, "expanded"])
@each_mode
def test_gradients_with_a_layout_of_their_own(
    original: type[Optimizer], options: dict[str, Any], layout: str, split: bool, packed: bool
) -> None:
    change = expanded if layout == "expanded" else LAYOUTS[layout]

    def gradient(step: int, index: int, param: Tensor) -> Tensor:
        return change(dense_gradient(step, index, param))

    for swap_times in (2, 100):
        assert_trains_alike(
            original, options,
            {"swap_times": swap_times, "packed_swap": packed, "split_tensors": split},
            lambda: make_params(FOUR_DIM), 3, gradient,
        )


@each_pipeline
@pytest.mark.parametrize("gradient_layout", ["same", *LAYOUTS])
@pytest.mark.parametrize("layout", LAYOUTS)
@each_mode
def test_parameters_with_a_layout_of_their_own(
    original: type[Optimizer], options: dict[str, Any], layout: str, gradient_layout: str,
    packed: bool,
) -> None:
    def make() -> list[Tensor]:
        return [LAYOUTS[layout](param.detach()).requires_grad_() for param in make_params(FOUR_DIM)]

    def gradient(step: int, index: int, param: Tensor) -> Tensor:
        dense = dense_gradient(step, index, param)
        change = LAYOUTS[layout if gradient_layout == "same" else gradient_layout]
        return change(dense)

    native, swapped = assert_trains_alike(
        original, options, {"swap_times": 100, "packed_swap": packed}, make, 3, gradient
    )
    for left, right in zip(params_of(native), params_of(swapped)):
        assert left.stride() == right.stride()
        for name in ("exp_avg", "exp_avg_sq"):
            assert native.state[left][name].stride() == swapped.state[right][name].stride()
    assert sum(map(bool, on_host(swapped))) == 2


@each_pipeline
def test_a_gradient_that_changes_its_layout_between_steps(packed: bool) -> None:
    changes = [*LAYOUTS.values(), expanded]

    def gradient(step: int, index: int, param: Tensor) -> Tensor:
        return changes[(step + index) % len(changes)](dense_gradient(step, index, param))

    assert_trains_alike(
        AdamW, {"fused": True}, {"swap_times": 20, "packed_swap": packed},
        lambda: make_params(FOUR_DIM), 10, gradient,
    )


@each_pipeline
@pytest.mark.parametrize("numel", [4096, 30000])
def test_a_gradient_that_becomes_strided_when_its_plan_exists(numel: int, packed: bool) -> None:
    """The plan of the first steps cuts the tensor; a strided gradient must not be cut."""

    def gradient(step: int, index: int, param: Tensor) -> Tensor:
        dense = dense_gradient(step, index, param)
        return dense if step % 4 < 2 else sliced(dense)

    assert_trains_alike(
        AdamW, {"foreach": False}, {"swap_times": 50, "packed_swap": packed},
        lambda: make_params([(numel // 4, 4), (50, 50)]), 8, gradient,
    )


@each_pipeline
def test_two_parameters_that_share_memory_train_as_natively(packed: bool) -> None:
    """Views of one flat buffer, as some trainers lay their weights out."""
    def make() -> list[Tensor]:
        flat = make_params([(9000,)])[0].detach()
        return [flat[:4000].view(40, 100).requires_grad_(), flat[4000:].requires_grad_()]

    assert_trains_alike(AdamW, {}, {"swap_times": 9, "packed_swap": packed}, make, 4)


@each_pipeline
def test_a_gradient_of_autograd_is_used_in_the_layout_that_autograd_gives(packed: bool) -> None:
    def run(optimizer: Optimizer) -> Optimizer:
        (weight,) = params_of(optimizer)
        for step in range(4):
            optimizer.zero_grad()
            x = noise(step, 0, torch.empty(7, 40, device=DEVICE))
            (x @ weight.t()).square().sum().backward()
            optimizer.step()
        return optimizer

    native, swapped = make_pair(
        AdamW, config={"swap_times": 9, "packed_swap": packed},
        make=lambda: make_params([(50, 40)]),
    )
    assert_same_training(run(native), run(swapped))


@pytest.mark.parametrize("options", [{"foreach": False}, {}, {"fused": True}], ids=str)
def test_gradients_that_hold_infinities_and_nans_pass_as_natively(options: dict[str, Any]) -> None:
    def gradient(step: int, index: int, param: Tensor) -> Tensor:
        grad = dense_gradient(step, index, param)
        if step == 2:
            grad.view(-1)[index] = float("inf") if index % 2 else float("nan")
        return grad

    native, swapped = assert_trains_alike(
        AdamW, options, {"swap_times": 50}, steps=5, gradient=gradient
    )
    assert_same_bits(params_of(native)[0], params_of(swapped)[0], "parameter 0")
    assert params_of(swapped)[0].isnan().any()
