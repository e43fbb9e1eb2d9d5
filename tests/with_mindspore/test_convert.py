"""Class swap in both directions, at any moment of a training."""
from __future__ import annotations

import pytest
from mindspore import nn
from ms_mindformers import mf_case
from ms_training import SWAP_CLASS, Case, Outcome, assert_same, gradients_of, make_optimizer
from ms_training import values_of

from swap_adam import SwapOptimizerConfig, swap_optimizer, unswap_optimizer
from swap_adam.simulator.mindspore import SimulatedDevice

CASES = (
    Case("amsgrad", nn.Adam, lambda: {"use_amsgrad": True}),
    Case("default", nn.AdamWeightDecay),
    mf_case("non-fused", "bf16"),
)
STEPS = 6


def train_and_convert(
    case: Case, conversions: dict[int, SwapOptimizerConfig | None]
) -> Outcome:
    """A configuration converts before that step, ``None`` converts back."""
    optimizer = make_optimizer(case)
    returned = None
    for step in range(STEPS):
        if step in conversions:
            config = conversions[step]
            if config is None:
                assert unswap_optimizer(optimizer) is optimizer
            else:
                assert swap_optimizer(optimizer, config) is optimizer
        returned = optimizer(gradients_of(optimizer, case, step))
    return Outcome(optimizer, returned, values_of(optimizer))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.original.__name__)
@pytest.mark.parametrize("conversions", [
    {2: SwapOptimizerConfig(4), 4: None},
    {0: SwapOptimizerConfig(4), 2: None, 4: SwapOptimizerConfig(1000, state_keys=("exp_avg",))},
], ids=["mid-training and back", "there, back, and there again"])
def test_converting_back_and_forth_changes_no_number(
    device: SimulatedDevice | None,
    case: Case,
    conversions: dict[int, SwapOptimizerConfig | None],
) -> None:
    native = train_and_convert(case, {})
    converted = train_and_convert(case, conversions)
    assert_same(native, converted)
    last = conversions[4]
    expected = case.original if last is None else SWAP_CLASS[case.original]
    assert type(converted.optimizer) is expected
    if device is not None and last is None:
        native_nbytes = device.state_nbytes(native.optimizer)
        assert device.state_nbytes(converted.optimizer) == native_nbytes


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.original.__name__)
def test_unswapping_leaves_no_trace(device: SimulatedDevice | None, case: Case) -> None:
    optimizer = make_optimizer(case)
    before, registered = set(optimizer.__dict__), list(optimizer._params)
    swap_optimizer(optimizer)
    optimizer(gradients_of(optimizer, case, 0))
    assert list(optimizer._params) == registered
    unswap_optimizer(optimizer)
    assert {name for name in optimizer.__dict__ if "swap" in name} == set()
    assert before <= set(optimizer.__dict__)


def test_converting_again_is_nothing_or_an_error(device: SimulatedDevice | None) -> None:
    optimizer = swap_optimizer(make_optimizer(CASES[0]), SwapOptimizerConfig(4))
    assert swap_optimizer(optimizer) is optimizer
    assert swap_optimizer(optimizer, SwapOptimizerConfig(4)) is optimizer
    with pytest.raises(ValueError, match=r"call unswap_optimizer\(\) first"):
        swap_optimizer(optimizer, SwapOptimizerConfig(8))


def test_it_is_an_instance_of_the_original(device: SimulatedDevice | None) -> None:
    for case in CASES:
        assert isinstance(make_optimizer(case, SwapOptimizerConfig()), case.original)


@pytest.mark.simulator_only
def test_no_pinned_memory_leaves_the_optimizer_as_it_was(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    from swap_adam.simulator.mindspore import SimulatedBackend

    def refuse(self: SimulatedBackend, nbytes: int) -> None:
        raise MemoryError(f"cannot pin {nbytes} bytes")

    case = CASES[0]
    native, optimizer = make_optimizer(case), make_optimizer(case)
    monkeypatch.setattr(SimulatedBackend, "allocate_slab", refuse)
    with pytest.raises(MemoryError, match="cannot pin"):
        swap_optimizer(optimizer)
    assert type(optimizer) is nn.Adam
    outcomes = []
    for one in (native, optimizer):
        returned = one(gradients_of(one, case, 0))
        outcomes.append(Outcome(one, returned, values_of(one)))
    assert_same(*outcomes)
