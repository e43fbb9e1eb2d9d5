"""The scenarios of the RFC's section 7.2.2 for MindSpore, under its names.

Its two ``fully_shard`` scenarios are in ``test_fully_shard.py``.
"""
from __future__ import annotations

from pathlib import Path

import mindspore
import numpy as np
import pytest
from mindspore import nn
from ms_mindformers import mf_case
from ms_training import (
    Case,
    Outcome,
    assert_same,
    gradients_of,
    make_optimizer,
    train,
    values_of,
)

from swap_adam import SwapOptimizerConfig
from swap_adam.simulator.mindspore import SimulatedDevice
from swap_adam.swap import swap_of

CONFIG = SwapOptimizerConfig(swap_times=4)
ADAM = Case("default", nn.Adam)
ADAM_WEIGHT_DECAY = Case("weight decay", nn.AdamWeightDecay, lambda: {"weight_decay": 0.1})


def assert_aligned_with_less_memory(
    device: SimulatedDevice | None, case: Case, config: SwapOptimizerConfig
) -> None:
    """Bitwise equal, the states gone from the device, and a peak below what they took."""
    native = train(case)
    swapped = train(case, config)
    assert_same(native, swapped)
    if device is not None:
        native_nbytes = device.state_nbytes(native.optimizer)
        assert device.held_nbytes == 0
        assert device.state_nbytes(swapped.optimizer) + device.peak_nbytes < native_nbytes


def test_native_adam_swap_optimizer_state_align(device: SimulatedDevice | None) -> None:
    assert_aligned_with_less_memory(device, ADAM, CONFIG)


def test_native_adam_nesterov_swap_optimizer_state_align(device: SimulatedDevice | None) -> None:
    case = Case("nesterov", nn.Adam, lambda: {"use_nesterov": True})
    assert_aligned_with_less_memory(device, case, CONFIG)


def test_native_adam_amsgrad_swap_optimizer_state_align(device: SimulatedDevice | None) -> None:
    case = Case("amsgrad", nn.Adam, lambda: {"use_amsgrad": True})
    assert_aligned_with_less_memory(device, case, CONFIG)


def test_native_adam_weight_decay_swap_optimizer_state_align(
    device: SimulatedDevice | None
) -> None:
    assert_aligned_with_less_memory(device, ADAM_WEIGHT_DECAY, CONFIG)


@pytest.mark.parametrize("packed", [False, True], ids=["per tensor", "packed"])
def test_mindformers_adamw_non_fused_swap_optimizer_state_align(
    device: SimulatedDevice | None, packed: bool
) -> None:
    config = SwapOptimizerConfig(4, packed_swap=packed, include_master_params=True)
    assert_aligned_with_less_memory(device, mf_case("non-fused", "bf16"), config)


@pytest.mark.parametrize("packed", [False, True], ids=["per tensor", "packed"])
def test_mindformers_adamw_fused_swap_optimizer_state_align(
    device: SimulatedDevice | None, packed: bool
) -> None:
    config = SwapOptimizerConfig(4, packed_swap=packed, include_master_params=True)
    assert_aligned_with_less_memory(device, mf_case("fused", "bf16"), config)


def go_on(optimizer: nn.Optimizer, case: Case, steps: range) -> Outcome:
    returned = None
    for step in steps:
        returned = optimizer(gradients_of(optimizer, case, step))
    return Outcome(optimizer, returned, values_of(optimizer))


def assert_round_trip(case: Case, config: SwapOptimizerConfig, path: Path) -> None:
    """Three steps, a checkpoint, two more: from the file they are the same two."""
    native = make_optimizer(case)
    swapped = make_optimizer(case, config)
    for optimizer in (native, swapped):
        go_on(optimizer, case, range(3))
    mindspore.save_checkpoint(swapped, str(path / "swapped.ckpt"))
    expected = go_on(native, case, range(3, 5))
    assert_same(expected, go_on(swapped, case, range(3, 5)))
    loaded = mindspore.load_checkpoint(str(path / "swapped.ckpt"))
    assert mindspore.load_param_into_net(swapped, loaded, strict_load=True) == ([], [])
    assert_same(expected, go_on(swapped, case, range(3, 5)))


@pytest.mark.parametrize("case", [ADAM, ADAM_WEIGHT_DECAY], ids=["Adam", "AdamWeightDecay"])
def test_native_adam_swap_optimizer_checkpoint_cpu_mirror_roundtrip(
    device: SimulatedDevice | None, case: Case, tmp_path: Path
) -> None:
    assert_round_trip(case, CONFIG, tmp_path)


def test_native_adam_swap_optimizer_checkpoint_fresh_load_builds_slots(
    device: SimulatedDevice | None, tmp_path: Path
) -> None:
    trained = make_optimizer(ADAM, CONFIG)
    go_on(trained, ADAM, range(3))
    mindspore.save_checkpoint(trained, str(tmp_path / "adam.ckpt"))
    fresh = make_optimizer(ADAM, CONFIG)
    slots = [id(slot) for unit in swap_of(fresh).units for slot in unit.slots]
    loaded = mindspore.load_checkpoint(str(tmp_path / "adam.ckpt"))
    mindspore.load_param_into_net(fresh, loaded, strict_load=False)
    assert_same(go_on(trained, ADAM, range(3, 5)), go_on(fresh, ADAM, range(3, 5)))
    assert slots == [id(slot) for unit in swap_of(fresh).units for slot in unit.slots]
    if device is not None:
        assert device.state_nbytes(fresh) == device.state_nbytes(trained)


@pytest.mark.parametrize("mode", ["non-fused", "fused, amsgrad"])
def test_mindformers_adamw_packed_swap_optimizer_checkpoint_roundtrip(
    device: SimulatedDevice | None, mode: str, tmp_path: Path
) -> None:
    config = SwapOptimizerConfig(4, include_master_params=True)
    case = mf_case(mode, "bf16")
    assert_round_trip(case, config, tmp_path)
    masters = [param for param in make_optimizer(case, config).fp32_params]
    assert all(np.isfinite(master.asnumpy()).all() for master in masters)
