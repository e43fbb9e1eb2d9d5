"""Every type of parameter that the native optimizer takes gives the native bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_under_test import DEVICE
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from training import (
    assert_same_training, assert_trains_alike, make_params, noise, on_device, on_host, params_of,
    train,
)

from swap_adam import SwapOptimizerConfig, swap_optimizer

each_pipeline = pytest.mark.parametrize("packed", [True, False], ids=["packed", "per_tensor"])
each_mode = pytest.mark.parametrize("original, options", [
    (Adam, {"foreach": False}), (Adam, {}), (AdamW, {"foreach": False}), (AdamW, {}),
    (AdamW, {"fused": True}),
], ids=["adam-loop", "adam-default", "adamw-loop", "adamw-default", "adamw-fused"])
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@each_pipeline
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@each_mode
def test_float_parameters(
    original: type[Optimizer], options: dict[str, Any], dtype: torch.dtype, amsgrad: bool,
    packed: bool,
) -> None:
    """With float16 and the default eps the native optimizer gives NaN, and so do we."""
    native, swapped = assert_trains_alike(
        original, {**options, "amsgrad": amsgrad}, {"swap_times": 7, "packed_swap": packed},
        lambda: make_params(dtype=dtype), 5,
    )
    assert sum(map(bool, on_host(swapped))) == 4
    (first, *_) = params_of(swapped)
    assert swapped.state[first]["exp_avg"].dtype == dtype


@each_pipeline
@each_mode
def test_mixed_types_in_one_group_and_in_one_batch(
    original: type[Optimizer], options: dict[str, Any], packed: bool
) -> None:
    def make() -> list[Tensor]:
        made = [make_params([(33, 40), (7,), (51, 61)], dtype) for dtype in FLOATS]
        return [param for same in zip(*made) for param in same]

    for swap_times in (1, 2, 9):
        _, swapped = assert_trains_alike(
            original, {**options, "eps": 1e-3}, {"swap_times": swap_times, "packed_swap": packed},
            make, 4,
        )
        assert sum(map(bool, on_host(swapped))) == 8


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("options", [{"foreach": False}, {}, {"amsgrad": True}], ids=str)
@pytest.mark.parametrize("original", [Adam, AdamW])
def test_complex_parameters_keep_their_states_on_the_device(
    original: type[Optimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    def make() -> list[Tensor]:
        whole = [noise(0, i, torch.empty(s, dtype=dtype, device=DEVICE)).requires_grad_()
                 for i, s in enumerate([(40, 50), (3,)])]
        return [*whole, *make_params([(40, 50)])]

    _, swapped = assert_trains_alike(original, options, {"swap_times": 3}, make, 5)
    assert on_host(swapped)[:2] == [set(), set()]
    assert on_host(swapped)[2] >= {"exp_avg", "exp_avg_sq"}


@each_pipeline
@each_mode
@pytest.mark.parametrize("min_numel", [0, 1, 1024])
def test_scalar_and_empty_parameters(
    original: type[Optimizer], options: dict[str, Any], min_numel: int, packed: bool
) -> None:
    config = {"min_numel": min_numel, "swap_times": 4, "packed_swap": packed}
    _, swapped = assert_trains_alike(
        original, options, config,
        lambda: make_params([(), (0,), (1,), (3, 0, 2), (40, 50), ()]), 4,
    )
    scalar = set() if min_numel == 1024 else {"exp_avg", "exp_avg_sq"}
    assert on_host(swapped) == [scalar, set(), scalar, set(), {"exp_avg", "exp_avg_sq"}, scalar]
    assert on_device(swapped)[1] == {"exp_avg", "exp_avg_sq"}


@each_pipeline
def test_nothing_but_empty_parameters(packed: bool) -> None:
    assert_trains_alike(
        AdamW, config={"min_numel": 0, "packed_swap": packed}, steps=2,
        make=lambda: make_params([(0,), (0, 3)]),
    )


@pytest.mark.parametrize("cut", [(127, 128, 129), (255, 256, 257, 383), (8, 9, 1000, 1001)])
@each_mode
def test_sizes_around_the_cuts(
    original: type[Optimizer], options: dict[str, Any], cut: tuple[int, ...]
) -> None:
    """Batches of one quantum: every tensor is cut wherever it can be."""
    for dtype in (torch.float32, torch.bfloat16):
        assert_trains_alike(
            original, options, {"min_numel": 0, "swap_times": 1000},
            lambda: make_params([(n,) for n in cut], dtype), 4,
        )


@each_pipeline
def test_states_of_another_type_than_their_parameter_keep_it(packed: bool) -> None:
    """A float32 moment beside a bfloat16 parameter, as some training scripts make them."""
    pair = [AdamW(make_params(dtype=torch.bfloat16), foreach=False) for _ in range(2)]
    for optimizer in pair:
        train(optimizer, 1)
        for state in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].float()
    native, converted = pair
    swap_optimizer(converted, SwapOptimizerConfig(swap_times=5, packed_swap=packed))
    try:
        train(native, range(1, 4))
    except RuntimeError as expected:
        with pytest.raises(RuntimeError) as caught:
            train(converted, range(1, 4))
        assert str(caught.value).splitlines()[0] == str(expected).splitlines()[0]
        return
    train(converted, range(1, 4))
    assert_same_training(native, converted)


def test_a_parameter_whose_data_is_replaced_by_another_type_goes_on_natively() -> None:
    """``param.data = param.data.double()`` between steps, as ``module.double()`` does."""
    pair = []
    for swapped in (False, True):
        params = make_params([(40, 50)])
        optimizer = AdamW(params)
        if swapped:
            swap_optimizer(optimizer, SwapOptimizerConfig(swap_times=3))
        train(optimizer, 2)
        for param in params:
            param.grad = None
            param.data = param.data.double()
        pair.append(optimizer)
    native, converted = pair
    try:
        train(native, range(2, 4))
    except RuntimeError:
        with pytest.raises(RuntimeError):
            train(converted, range(2, 4))
        return
    train(converted, range(2, 4))
    assert_same_training(native, converted)
