"""Parameter groups with options of their own train as with the native optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_under_test import DEVICE
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from training import (
    SWAP_CLASS, assert_same_training, assert_trains_alike, dense_gradient, make_pair, make_params,
    params_of, train,
)

from swap_adam import SwapOptimizerConfig

each_pipeline = pytest.mark.parametrize("packed", [True, False], ids=["packed", "per_tensor"])
SHAPES = [(33, 40), (7,), (1024,)]
# Every option of a group, each group different from its neighbours, so that batches are mixed.
GROUPS: list[dict[str, Any]] = [
    {},
    {"lr": 0.05},
    {"betas": (0.5, 0.7)},
    {"weight_decay": 0.3},
    {"amsgrad": True},
    {"maximize": True},
    {"eps": 1e-3},
    {"lr": torch.tensor(0.02)},
    {"lr": torch.tensor(0.02, device=DEVICE)},
    {"lr": torch.tensor(0.02, dtype=torch.float64)},
    {"lr": 0.02, "amsgrad": True, "maximize": True, "weight_decay": 0.2, "betas": (0.1, 0.9)},
    {"foreach": False, "lr": 0.03},
    {"foreach": False, "lr": torch.tensor(0.03, device=DEVICE), "amsgrad": True},
    {"betas": (torch.tensor(0.8), torch.tensor(0.95)), "foreach": False},
]


def make_groups(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"params": make_params(SHAPES, seed=seed),
         **{k: v.clone() if isinstance(v, Tensor) else v for k, v in entry.items()}}
        for seed, entry in enumerate(entries)
    ]


def name_of(group: dict[str, Any]) -> str:
    return ",".join(
        f"{k}={v.item():.2f}:{v.device.type}" if isinstance(v, Tensor) else k
        for k, v in group.items()
    ) or "plain"


@pytest.mark.parametrize("group", GROUPS, ids=name_of)
@pytest.mark.parametrize("original", [Adam, AdamW])
def test_an_option_of_one_group_acts_on_that_group_alone(
    original: type[Optimizer], group: dict[str, Any]
) -> None:
    assert_trains_alike(
        original, config={"swap_times": 3}, steps=5, make=lambda: make_groups([{}, group, {}])
    )


@each_pipeline
@pytest.mark.parametrize("original", [Adam, AdamW])
def test_all_the_groups_at_once(original: type[Optimizer], packed: bool) -> None:
    for swap_times in (1, 4, 30):
        assert_trains_alike(
            original, config={"swap_times": swap_times, "packed_swap": packed}, steps=5,
            make=lambda: make_groups(GROUPS),
        )


@each_pipeline
@pytest.mark.parametrize("group", [
    {}, {"lr": torch.tensor(0.02)}, {"lr": torch.tensor(0.02, device=DEVICE)}, {"amsgrad": True},
    {"maximize": True, "weight_decay": 0.2},
], ids=name_of)
def test_fused_groups(group: dict[str, Any], packed: bool) -> None:
    assert_trains_alike(
        AdamW, {"fused": True}, {"swap_times": 5, "packed_swap": packed}, steps=5,
        make=lambda: make_groups([{}, group, {"lr": 0.1}]),
    )


def test_decoupled_weight_decay_of_adam_is_kept() -> None:
    assert_trains_alike(
        Adam, {"decoupled_weight_decay": True, "weight_decay": 0.1}, {"swap_times": 3}
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("where", ["cpu", DEVICE])
@pytest.mark.parametrize("options", [{"foreach": False}, {}, {"fused": True}], ids=str)
def test_a_tensor_learning_rate_gives_the_native_bits_in_every_precision(
    options: dict[str, Any], where: str, dtype: torch.dtype
) -> None:
    lr = torch.tensor(0.0137, device=where)
    assert_trains_alike(
        AdamW, {**options, "lr": lr, "eps": 1e-3}, {"swap_times": 5},
        make=lambda: make_params(SHAPES, dtype=dtype), steps=5,
    )


class Reads(TorchDispatchMode):
    """Counts the times that the host reads a number from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        on_device = args and isinstance(args[0], Tensor) and args[0].device.type != "cpu"
        self.count += name in ("_local_scalar_dense", "_to_copy") and on_device and (
            name == "_local_scalar_dense" or torch.device((kwargs or {})["device"]).type == "cpu"
        )
        return func(*args, **(kwargs or {}))


def test_a_learning_rate_on_the_device_is_read_once_per_group_and_step() -> None:
    lrs = [torch.tensor(0.01, device=DEVICE), torch.tensor(0.02, device=DEVICE)]
    native, swapped = make_pair(
        AdamW, {"foreach": False}, {"swap_times": 5},
        make=lambda: [{"params": make_params(SHAPES * 3), "lr": lr} for lr in lrs],
    )
    reads = {}
    for optimizer in (native, swapped):
        train(optimizer, 2)
        with Reads() as counter:
            optimizer.step()
        reads[optimizer] = counter.count
    assert reads[swapped] == 2
    assert reads[native] >= 18  # what the above is worth
    assert_same_training(native, swapped)


def test_a_learning_rate_tensor_that_is_changed_in_place_counts_at_the_next_step() -> None:
    lr = [torch.tensor(0.01, device=DEVICE), torch.tensor(0.01, device=DEVICE)]
    native = AdamW(make_params(), lr=lr[0], foreach=False)
    swapped = SWAP_CLASS[AdamW](make_params(), lr=lr[1], foreach=False)
    for optimizer, mine in zip((native, swapped), lr):
        mine.fill_(0.01)
        train(optimizer, 6, after_step=lambda step: mine.mul_(0.5))
    assert_same_training(native, swapped)


def test_options_edited_between_steps_count_at_the_next_step() -> None:
    def edit(optimizer: Optimizer, step: int) -> None:
        group = optimizer.param_groups[0]
        group["lr"] = 0.01 * (step + 1)
        group["betas"] = (0.9 - 0.1 * step, 0.99)
        group["weight_decay"] = 0.05 * step
        group["maximize"] = step % 2 == 1
        group["foreach"] = False if step == 3 else None

    native, swapped = make_pair(AdamW, config={"swap_times": 3})
    for optimizer in (native, swapped):
        train(optimizer, 6, after_step=lambda step: edit(optimizer, step))
    assert_same_training(native, swapped)


def test_amsgrad_switched_on_later_is_the_native_error_with_nothing_updated() -> None:
    """The native optimizer looks for a state that is not there."""
    native, swapped = make_pair(AdamW, config={"swap_times": 3})
    for optimizer in (native, swapped):
        train(optimizer, 2)
        optimizer.param_groups[0]["amsgrad"] = True
        before = [param.detach().clone() for param in params_of(optimizer)]
        with pytest.raises(KeyError, match="max_exp_avg_sq"):
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(before, params_of(optimizer)))
        optimizer.param_groups[0]["amsgrad"] = False
        train(optimizer, range(2, 4))
    assert_same_training(native, swapped)


@each_pipeline
def test_a_group_added_at_the_fifth_step_trains_from_then_on(packed: bool) -> None:
    native, swapped = make_pair(AdamW, config={"swap_times": 5, "packed_swap": packed})
    for optimizer in (native, swapped):
        train(optimizer, 5)
        optimizer.add_param_group({"params": make_params(seed=1), "lr": 0.1, "amsgrad": True})
        train(optimizer, range(5, 10))
    assert_same_training(native, swapped)


def test_hundreds_of_groups_of_one_tensor_each() -> None:
    """Layer-wise learning rates."""
    def make() -> list[dict[str, Any]]:
        return [{"params": make_params([(40, 30)], seed=i), "lr": 0.001 * (i + 1)}
                for i in range(200)]

    assert_trains_alike(AdamW, {"foreach": False}, {"swap_times": 16}, make, steps=2)


def test_a_parameter_that_stands_twice_in_its_group_is_updated_twice() -> None:
    """As by the native optimizer, which warns about it."""
    def make() -> list[Tensor]:
        params = make_params()
        return [*params, params[0]]

    with pytest.warns(UserWarning, match="duplicate parameters"):
        assert_trains_alike(
            AdamW, {"foreach": False}, {"swap_times": 3}, make, 4,
            lambda step, index, param: dense_gradient(step, index % 6, param),
        )


def test_named_parameters_are_taken_and_named_as_by_the_native_optimizer() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Linear(50, 3)).to(DEVICE)
    native = AdamW(model.named_parameters())
    swapped = SWAP_CLASS[AdamW](
        model.named_parameters(), swap_config=SwapOptimizerConfig(swap_times=2)
    )
    assert swapped.param_groups[0]["param_names"] == native.param_groups[0]["param_names"]
