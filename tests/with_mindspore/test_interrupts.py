"""Ctrl-C at any moment: what is saved right then is of one moment, and a loaded checkpoint wins."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import nn
from ms_device import IS_FULL
from ms_interrupts import Values, assert_old_or_new, interrupt_at, load
from ms_mindformers import mf_case
from ms_training import SWAP_CLASS, Case, gradients_of, make_optimizer, values_of

from swap_adam import SwapOptimizerConfig, swap_optimizer, unswap_optimizer
from swap_adam.simulator.mindspore import Event, SimulatedBackend, SimulatedDevice
from swap_adam.swap import swap_of

pytestmark = pytest.mark.simulator_only

SHAPES = ((64, 32), (10,), (1100,), (2000,))
CASES = {
    "per tensor": (
        Case("amsgrad", nn.Adam, lambda: {"use_amsgrad": True}, shapes=SHAPES),
        SwapOptimizerConfig(3),
    ),
    "packed": (
        mf_case("non-fused", "bf16", shapes=SHAPES), SwapOptimizerConfig(3),
    ),
}
if IS_FULL:
    CASES["masters"] = (
        mf_case("non-fused", "bf16", shapes=SHAPES),
        SwapOptimizerConfig(3, include_master_params=True, packed_swap=False),
    )
# Every n-th line; a prime, so that what repeats is not always met at the same line.
STRIDE = 1 if IS_FULL else 41
LINES_OF_THE_END = 45
cases = pytest.mark.parametrize("case, config", CASES.values(), ids=CASES)


def native_values(case: Case, steps: int) -> list[Values]:
    """The values after each of ``steps`` steps of the original."""
    optimizer = make_optimizer(case)
    values = []
    for step in range(steps):
        optimizer(gradients_of(optimizer, case, step))
        values.append(values_of(optimizer))
    return values


def said_by(error: BaseException) -> str:
    return " ".join([*map(str, error.args), *getattr(error, "__notes__", [])])


def assert_equal(actual: Values, expected: Values, where: object) -> None:
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=f"{where}: {name}")


class Trial:
    """A swapped optimizer after its first step; the second is interrupted, again and again."""

    def __init__(self, case: Case, config: SwapOptimizerConfig) -> None:
        self.case, self.config = case, config
        self.before, self.after = native_values(case, 2)
        self.optimizer = make_optimizer(case, config)
        self.optimizer(gradients_of(self.optimizer, case, 0))
        self.gradients = gradients_of(self.optimizer, case, 1)
        load(self.optimizer, self.before)

    def count_lines(self) -> int:
        """How many lines a step after a load runs, when nothing is left to be made once."""
        self.step()
        load(self.optimizer, self.before)
        with interrupt_at(0) as lines:
            self.step()
        load(self.optimizer, self.before)
        return lines.count

    def step(self) -> None:
        self.optimizer(self.gradients)

    def check(self, error: BaseException, where: object) -> set[int]:
        """What is there right after the interrupt, and that training goes on once it is loaded."""
        optimizer = self.optimizer
        now = values_of(optimizer)
        new = assert_old_or_new(optimizer, now, self.before, self.after, where)
        for index in swap_of(optimizer).torn:
            assert optimizer.describe_param(index) in said_by(error), where
        load(optimizer, self.before)
        self.step()
        assert_equal(values_of(optimizer), self.after, f"after {where}")
        load(optimizer, self.before)
        return new


@cases
def test_what_is_saved_in_the_handler_of_an_interrupt_at_any_line_is_of_one_moment(
    device: SimulatedDevice, case: Case, config: SwapOptimizerConfig
) -> None:
    trial = Trial(case, config)
    count = trial.count_lines()
    the_end = range(count - LINES_OF_THE_END, count + 1)
    for line in sorted({*range(1, count, STRIDE), *the_end}):
        with interrupt_at(line) as lines, pytest.raises(KeyboardInterrupt) as caught:
            trial.step()
        new = trial.check(caught.value, lines.where)
        if line in the_end:
            assert len(new) == len(SHAPES), lines.where
    assert device.held_nbytes == 0


@cases
def test_what_is_saved_after_a_call_of_the_device_has_failed_is_of_one_moment(
    device: SimulatedDevice, case: Case, config: SwapOptimizerConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trial = Trial(case, config)
    state = {"calls": 0, "at": 0}

    def failing(name: str) -> Callable[..., Any]:
        method = getattr(SimulatedBackend, name)

        def call(self: SimulatedBackend, *args: Any) -> Any:
            state["calls"] += 1
            if state["calls"] == state["at"]:
                raise OSError(f"{name} failed")
            return method(self, *args)

        return call

    for name in ("acquire", "reserve", "copy", "record", "wait", "synchronize", "release"):
        monkeypatch.setattr(SimulatedBackend, name, failing(name))
    trial.step()
    count = state["calls"]
    load(trial.optimizer, trial.before)
    assert count > 20
    for at in range(1, count + 1, 1 if IS_FULL else 3):
        state.update(calls=0, at=at)
        with pytest.raises(OSError, match="failed") as caught:
            trial.step()
        trial.check(caught.value, f"call {at}: {caught.value}")


@pytest.mark.parametrize("case, config", [CASES["per tensor"], CASES["packed"]],
                         ids=["per tensor", "packed"])
def test_copies_that_do_not_land_tear_what_they_are_of_and_never_overwrite_a_loaded_checkpoint(
    device: SimulatedDevice, case: Case, config: SwapOptimizerConfig,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:
    trial = Trial(case, config)
    optimizer, path = trial.optimizer, str(tmp_path / "good.ckpt")
    mindspore.save_checkpoint(optimizer, path)

    synchronize = SimulatedBackend.synchronize

    def interrupted(self: SimulatedBackend, event: Event) -> None:
        if swap_of(optimizer).step.has_updated:
            raise KeyboardInterrupt
        synchronize(self, event)

    with monkeypatch.context() as patched:
        patched.setattr(SimulatedBackend, "synchronize", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            trial.step()
    assert swap_of(optimizer).torn
    for index in swap_of(optimizer).torn:
        assert optimizer.describe_param(index) in said_by(caught.value)
    with pytest.raises(RuntimeError, match=r"step\(\) is refused.*load_param_into_net\(\)"):
        trial.step()
    mindspore.load_param_into_net(optimizer, mindspore.load_checkpoint(path), strict_load=True)
    assert_equal(values_of(optimizer), trial.before, "loaded")
    trial.step()
    assert_equal(values_of(optimizer), trial.after, "trained on")


def test_a_torn_optimizer_heals_when_its_states_are_replaced_one_by_one_with_calls_in_between(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(*CASES["per tensor"])
    optimizer = trial.optimizer

    def interrupted(*_: object) -> object:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(type(optimizer), "update_units", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trial.step()
    params = {param.name: param for param in optimizer.get_parameters()}
    states = {
        state.name for index in swap_of(optimizer).torn
        for state in swap_of(optimizer).units[index].resting.values()
    }
    assert len(states) > 1
    for name in sorted(states):
        with pytest.raises(RuntimeError, match="is refused"):
            trial.step()
        params[name].set_data(mindspore.Tensor(trial.before[name]))
    for name in set(params) - states:
        params[name].set_data(mindspore.Tensor(trial.before[name]))
    trial.step()
    assert_equal(values_of(optimizer), trial.after, "healed")


@pytest.mark.parametrize("name", ["host_tensor", "host_copy"])
def test_an_interrupt_while_viewed_states_move_aside_loses_no_state(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    method, calls = getattr(SimulatedBackend, name), [0]
    trial = Trial(*CASES["per tensor"])
    for at in (1, 2, 3):
        # Taken in by a step that changes nothing: what was loaded lies in the slabs then.
        with pytest.raises(RuntimeError, match="not now"), monkeypatch.context() as patched:
            patched.setattr(type(trial.optimizer), "prepare_step", refuse)
            trial.step()
        views = [state.asnumpy() for state in trial.optimizer.moment1]
        calls[0] = 0

        def interrupted(self: SimulatedBackend, *args: Any, at: int = at) -> Any:
            calls[0] += 1
            if calls[0] == at:
                raise KeyboardInterrupt
            return method(self, *args)

        with monkeypatch.context() as patched:
            patched.setattr(SimulatedBackend, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                trial.step()
        assert_equal(values_of(trial.optimizer), trial.before, f"{name} {at}")
        trial.step()
        assert_equal(values_of(trial.optimizer), trial.after, f"{name} {at}")
        del views
        load(trial.optimizer, trial.before)


def refuse(self: nn.Optimizer) -> None:
    raise RuntimeError("not now")


@pytest.mark.parametrize("direction", ["there", "back"])
@pytest.mark.parametrize("case, config", [CASES["per tensor"], CASES["packed"]],
                         ids=["per tensor", "packed"])
def test_an_interrupted_conversion_leaves_one_class_or_the_other_and_trains_on(
    device: SimulatedDevice, case: Case, config: SwapOptimizerConfig, direction: str
) -> None:
    first, second, third = native_values(case, 3)
    classes = {case.original, SWAP_CLASS[case.original]}

    def convert(optimizer: nn.Optimizer) -> None:
        if type(optimizer) is case.original:
            swap_optimizer(optimizer, config)
        else:
            unswap_optimizer(optimizer)

    for line in range(1, 10_000, 3 * STRIDE if direction == "there" else STRIDE):
        optimizer = make_optimizer(case)
        optimizer(gradients_of(optimizer, case, 0))
        if direction == "back":
            swap_optimizer(optimizer, config)
        try:
            with interrupt_at(line) as lines:
                convert(optimizer)
        except KeyboardInterrupt:
            assert type(optimizer) in classes, lines.where
            assert_equal(values_of(optimizer), first, lines.where)
            if type(optimizer) is case.original:
                native_nbytes = device.state_nbytes(make_optimizer(case))
                assert device.state_nbytes(optimizer) == native_nbytes, lines.where
            optimizer(gradients_of(optimizer, case, 1))
            assert_equal(values_of(optimizer), second, lines.where)
            convert(optimizer)
            optimizer(gradients_of(optimizer, case, 2))
            assert_equal(values_of(optimizer), third, lines.where)
        else:
            break
    else:
        raise AssertionError("the conversion has no end")


def test_with_large_swap_times_too(device: SimulatedDevice) -> None:
    case, config = CASES["per tensor"]
    trial = Trial(case, replace(config, swap_times=1000))
    line = trial.count_lines() - 10
    with interrupt_at(line) as lines, pytest.raises(KeyboardInterrupt) as caught:
        trial.step()
    assert trial.check(caught.value, lines.where) == set(range(len(SHAPES)))
