"""For-loop, foreach or fused: the one that the native optimizer takes, in every batch.

On CPU kernels for-loop and foreach give the same bits, so the operations are looked at.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from training import (
    assert_same_training, dense_gradient, make_pair, make_params, params_of, train,
)

from swap_adam import SwapOptimizerConfig, swap_optimizer
from swap_adam.swap import swap_of


class Recorder(TorchDispatchMode):
    """Counts the operations issued, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operations_of_step(optimizer: Optimizer, gradient: Any = dense_gradient) -> Counter[str]:
    """The operations of the second step, the states being there."""
    train(optimizer, 1, gradient)
    for index, param in enumerate(params_of(optimizer)):
        param.grad = gradient(1, index, param)
    with Recorder() as recorder:
        optimizer.step()
    return recorder.counts


def mode_of(counts: Counter[str]) -> set[str]:
    """``addcdiv`` and ``_foreach_addcdiv`` are the update of a for-loop and of foreach."""
    modes = {
        "for-loop": counts["addcdiv_"],
        "foreach": sum(n for name, n in counts.items() if name.startswith("_foreach_addcdiv")),
        "fused": sum(n for name, n in counts.items() if name.startswith("_fused_")),
    }
    return {mode for mode, count in modes.items() if count}


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per_tensor"])
@pytest.mark.parametrize(
    "original, options, mode",
    [
        (Adam, {"foreach": False}, "for-loop"),
        (Adam, {}, "foreach"),
        (Adam, {"foreach": None, "fused": False}, "for-loop"),
        (Adam, {"foreach": None, "fused": None, "amsgrad": True}, "foreach"),
        (Adam, {"lr": torch.tensor(0.01)}, "for-loop"),
        (AdamW, {"foreach": False}, "for-loop"),
        (AdamW, {}, "foreach"),
        (AdamW, {"foreach": False, "fused": None}, "for-loop"),
        (AdamW, {"fused": False}, "for-loop"),
        (AdamW, {"fused": True}, "fused"),
        (AdamW, {"fused": True, "amsgrad": True}, "fused"),
        (AdamW, {"fused": True, "lr": torch.tensor(0.01)}, "fused"),
    ],
    ids=str,
)
def test_a_step_runs_in_the_native_mode(
    original: type[Optimizer], options: dict[str, Any], mode: str, packed: bool
) -> None:
    native, swapped = make_pair(original, options, {"packed_swap": packed, "swap_times": 7})
    assert mode_of(operations_of_step(native)) == {mode}
    assert mode_of(operations_of_step(swapped)) == {mode}
    assert_same_training(native, swapped)


@pytest.mark.parametrize("original", [Adam, AdamW])
def test_the_default_is_resolved_over_the_whole_list_and_not_per_batch(
    original: type[Optimizer],
) -> None:
    """One parameter on the CPU makes the native optimizer take the for-loop for all of them."""

    def make() -> list[Tensor]:
        return make_params() + make_params([(30, 50)], device="cpu")

    native, swapped = make_pair(original, make=make, config={"swap_times": 7})
    assert mode_of(operations_of_step(native)) == {"for-loop"}
    assert mode_of(operations_of_step(swapped)) == {"for-loop"}


def test_the_default_is_resolved_over_the_parameters_with_a_gradient() -> None:
    """The native optimizer asks only those: here the one on the CPU has none."""

    def make() -> list[Tensor]:
        return make_params() + make_params([(30, 50)], device="cpu")

    def gradient(step: int, index: int, param: Tensor) -> Tensor | None:
        return None if param.device.type == "cpu" else dense_gradient(step, index, param)

    native, swapped = make_pair(AdamW, make=make, config={"swap_times": 7})
    assert mode_of(operations_of_step(native, gradient)) == {"foreach"}
    assert mode_of(operations_of_step(swapped, gradient)) == {"foreach"}


def test_each_group_has_its_own_mode() -> None:
    def make() -> list[dict[str, Any]]:
        return [
            {"params": make_params(), "foreach": False},
            {"params": make_params(seed=1), "lr": torch.tensor(0.01)},
            {"params": make_params(seed=2), "fused": True},
            {"params": make_params(seed=3)},
        ]

    native, swapped = make_pair(AdamW, make=make, config={"swap_times": 5})
    assert mode_of(operations_of_step(native)) == {"for-loop", "foreach", "fused"}
    assert mode_of(operations_of_step(swapped)) == {"for-loop", "foreach", "fused"}
    assert_same_training(native, swapped)


@pytest.mark.parametrize("options, operation", [
    ({}, "_foreach_addcdiv_"), ({"fused": True}, "_fused_adamw_"),
])
def test_a_batch_of_many_tensors_is_one_call_per_group(
    options: dict[str, Any], operation: str
) -> None:
    swapped = make_pair(
        AdamW, options, {"swap_times": 1, "min_numel": 0},
        make=lambda: [{"params": make_params([(64, 8)] * 25, seed=seed)} for seed in (0, 1)],
    )[1]
    calls = operations_of_step(swapped)[operation]
    (device_swap,) = swap_of(swapped).devices.values()
    batches = device_swap.plan.batches
    assert len(batches) < 10
    assert calls == sum(len({unit.group_index for unit in batch.units}) for batch in batches)


def test_a_converted_optimizer_keeps_its_mode() -> None:
    for options, mode in (({"foreach": False}, "for-loop"), ({}, "foreach"),
                          ({"fused": True}, "fused")):
        optimizer = AdamW(make_params(), **options)
        train(optimizer, 1)
        swap_optimizer(optimizer, SwapOptimizerConfig(swap_times=3))
        assert mode_of(operations_of_step(optimizer)) == {mode}


@pytest.mark.simulator_only
def test_the_device_sees_the_same_kernels_as_the_program_issued(simulator: Any) -> None:
    """Nothing between the program and the device breaks a foreach call up."""
    swapped = make_pair(AdamW, config={"swap_times": 7})[1]
    train(swapped, 1)
    with simulator.record_operations() as operations:
        swapped.step()
    kernels = {operation.name for operation in operations if operation.kind == "kernel"}
    assert kernels and all("_foreach_" in name for name in kernels), kernels
