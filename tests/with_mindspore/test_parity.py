"""Bitwise what the original does, through a device whose copies are late and poisoned."""
from __future__ import annotations

import itertools

import pytest
from ms_device import IS_FULL
from ms_mindformers import MF_CASES, AdamW, mf_case
from ms_training import (
    ADAM_CASES,
    ADAM_WEIGHT_DECAY_CASES,
    LARGE_SHAPES,
    SWAP_TIMES,
    Case,
    assert_same,
    train,
)

from swap_adam import SwapOptimizerConfig
from swap_adam.simulator.mindspore import SimulatedDevice

NN_CASES = (*ADAM_CASES, *ADAM_WEIGHT_DECAY_CASES)


@pytest.mark.parametrize("case", NN_CASES, ids=str)
def test_training_and_checkpoint_stay_what_they_were(
    device: SimulatedDevice | None, case: Case
) -> None:
    native = train(case)
    for swap_times in SWAP_TIMES:
        config = SwapOptimizerConfig(swap_times)
        assert_same(native, train(case, config))
        if swap_times == 4 or IS_FULL:
            assert_same(native, train(case, config, convert_at=2))


@pytest.mark.parametrize("case", MF_CASES, ids=str)
def test_mindformers_training_stays_what_it_was(
    device: SimulatedDevice | None, case: Case
) -> None:
    native = train(case)
    with_masters = itertools.cycle([False, True])
    for packed, swap_times in itertools.product((True, False), SWAP_TIMES):
        for include_master_params in (False, True) if IS_FULL else (next(with_masters),):
            config = SwapOptimizerConfig(
                swap_times, packed_swap=packed, include_master_params=include_master_params
            )
            assert_same(native, train(case, config))


@pytest.mark.parametrize("case, packed", [
    *((Case(case.name, case.original, case.arguments, shapes=LARGE_SHAPES, steps=2), False)
      for case in (ADAM_CASES[3], ADAM_WEIGHT_DECAY_CASES[0])),
    (mf_case("non-fused", "bf16", shapes=LARGE_SHAPES, steps=2), True),
    (mf_case("non-fused", "bf16", shapes=LARGE_SHAPES, steps=2), False),
], ids=["Adam", "AdamWeightDecay", "AdamW packed", "AdamW per tensor"])
def test_tensors_of_32_megabytes_survive(
    device: SimulatedDevice | None, case: Case, packed: bool
) -> None:
    native = train(case)
    config = SwapOptimizerConfig(
        4, packed_swap=packed, include_master_params=case.original is AdamW
    )
    assert_same(native, train(case, config))


@pytest.mark.parametrize("case", [NN_CASES[3], MF_CASES[2]], ids=str)
@pytest.mark.parametrize("staging_nbytes", [None, 100_000])
def test_an_automatic_number_of_batches_changes_no_number(
    device: SimulatedDevice | None, case: Case, staging_nbytes: int | None
) -> None:
    config = SwapOptimizerConfig("auto", staging_nbytes=staging_nbytes)
    assert_same(train(case), train(case, config))
    if device is not None and staging_nbytes is not None:
        assert device.peak_nbytes <= staging_nbytes


@pytest.mark.simulator_only
@pytest.mark.parametrize("case", [*NN_CASES[:1], ADAM_WEIGHT_DECAY_CASES[0], MF_CASES[0]], ids=str)
def test_on_a_plain_cpu_nothing_is_swapped_and_nothing_differs(case: Case) -> None:
    native = train(case)
    swapped = train(case, SwapOptimizerConfig())
    assert_same(native, swapped)
    assert swapped.optimizer.swap_report() == {}
