"""Running out of memory changes nothing; a fault inside an update says what is unusable."""
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

from swap_adam import SwapOptimizerConfig, unswap_optimizer
from swap_adam.simulator.mindspore import SimulatedBackend, SimulatedDevice

pytestmark = pytest.mark.simulator_only
CASES = (
    Case("amsgrad", nn.Adam, lambda: {"use_amsgrad": True}),
    Case("default", nn.AdamWeightDecay),
    mf_case("non-fused", "bf16"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.original.__name__)
def test_out_of_device_memory_strikes_before_anything_has_changed(
    device: SimulatedDevice, case: Case
) -> None:
    native = train(case)
    optimizer = make_optimizer(case, SwapOptimizerConfig(4, include_master_params=case is CASES[2]))
    returned = None
    for step in range(case.steps):
        before = values_of(optimizer)
        device.capacity_nbytes = 1000
        with pytest.raises((MemoryError, RuntimeError)) as caught:
            optimizer(gradients_of(optimizer, case, step))
        said = " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
        assert "0 of 6 parameters were updated" in said
        assert "device has 1000 bytes" in said or "out of device memory" in said
        for name, value in values_of(optimizer).items():
            np.testing.assert_array_equal(value, before[name], err_msg=name)
        assert device.held_nbytes == 0
        device.capacity_nbytes = None
        returned = optimizer(gradients_of(optimizer, case, step))
    assert_same(native, Outcome(optimizer, returned, values_of(optimizer)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.original.__name__)
def test_a_fault_inside_an_update_names_what_is_torn_and_loading_heals_it(
    device: SimulatedDevice, case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    optimizer = make_optimizer(case, SwapOptimizerConfig(4))
    optimizer(gradients_of(optimizer, case, 0))
    path = str(tmp_path / "good.ckpt")
    mindspore.save_checkpoint(optimizer, path)
    update = type(optimizer).update_units
    calls = []

    def interrupted(self: nn.Optimizer, units: list[object]) -> object:
        calls.append(units)
        if len(calls) == 3:
            raise KeyboardInterrupt("in the middle")
        return update(self, units)

    with monkeypatch.context() as patched:
        patched.setattr(type(optimizer), "update_units", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            optimizer(gradients_of(optimizer, case, 1))
    said = " ".join([*map(str, caught.value.args), *getattr(caught.value, "__notes__", [])])
    torn = ", ".join(optimizer.describe_param(unit.param_index) for unit in calls[2])
    assert f"until load_param_into_net() has replaced their states: {torn}" in said
    assert device.held_nbytes == 0

    with pytest.raises(RuntimeError, match=r"step\(\) is refused.*load_param_into_net\(\)"):
        optimizer(gradients_of(optimizer, case, 1))
    with pytest.raises(RuntimeError, match=r"unswap_optimizer\(\) is refused"):
        unswap_optimizer(optimizer)

    mindspore.load_param_into_net(optimizer, mindspore.load_checkpoint(path), strict_load=True)
    returned = None
    for step in range(1, case.steps):
        returned = optimizer(gradients_of(optimizer, case, step))
    assert_same(train(case), Outcome(optimizer, returned, values_of(optimizer)))


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=["per tensor", "packed"])
def test_a_fault_between_updates_tears_nothing_and_leaks_nothing(
    device: SimulatedDevice, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = make_optimizer(case, SwapOptimizerConfig(4))
    optimizer(gradients_of(optimizer, case, 0))
    before = values_of(optimizer)
    copy, copies = SimulatedBackend.copy, []

    def faulty(self: SimulatedBackend, *arguments: object) -> None:
        copies.append(arguments)
        if len(copies) == 5:
            raise OSError("the link is down")
        copy(self, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(SimulatedBackend, "copy", faulty)
        with pytest.raises(OSError, match="link is down") as caught:
            optimizer(gradients_of(optimizer, case, 1))
    said = " ".join([*map(str, caught.value.args), *getattr(caught.value, "__notes__", [])])
    assert "parameters were updated before this error. Calling step() again" in said
    assert device.held_nbytes == 0
    after = values_of(optimizer)
    assert all(np.isfinite(value.astype(np.float64)).all() for value in after.values())
    changed = [name for name in before if not np.array_equal(before[name], after[name])]
    assert 0 < len(changed) < len(before)
    optimizer(gradients_of(optimizer, case, 1))
