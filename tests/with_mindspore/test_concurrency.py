"""One call at a time: a reader or a second call during a step never disturbs it."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import mindspore
import pytest
from mindspore import nn
from ms_interrupts import load
from ms_mindformers import mf_case
from ms_training import Case, Outcome, assert_same, gradients_of, make_optimizer, train, values_of

from swap_adam import SwapOptimizerConfig, swap_optimizer, unswap_optimizer
from swap_adam.simulator.mindspore import SimulatedDevice

SUPPORT = Path(__file__).parent / "support"
CASES = (
    Case("amsgrad", nn.Adam, lambda: {"use_amsgrad": True}),
    Case("default", nn.AdamWeightDecay),
    mf_case("non-fused", "bf16"),
)
RUNNING = "step is running"


def _save(optimizer: nn.Optimizer) -> None:
    mindspore.save_checkpoint(optimizer, "now.ckpt")


def _save_the_cell_around_it(optimizer: nn.Optimizer) -> None:
    network = nn.Dense(2, 2)
    cell = nn.TrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), nn.SGD([network.weight]))
    cell.optimizer = optimizer
    mindspore.save_checkpoint(cell, "now.ckpt")


def _load(optimizer: nn.Optimizer) -> None:
    load(optimizer, {})


def _step(optimizer: nn.Optimizer) -> None:
    optimizer(tuple(param.copy() for param in optimizer.parameters))


INTRUSIONS: dict[str, tuple[Callable[[nn.Optimizer], object], str]] = {
    "save": (_save, RUNNING),
    "save the cell around it": (_save_the_cell_around_it, RUNNING),
    "load": (_load, RUNNING),
    "parameters_dict": (lambda optimizer: optimizer.parameters_dict(), RUNNING),
    "a second step": (_step, "a step cannot begin while a step is running"),
    "unswap_optimizer": (unswap_optimizer, "cannot begin while a step is running"),
    "convert again": (lambda o: swap_optimizer(o, SwapOptimizerConfig(8)), "already a Swap"),
    "prefetch": (lambda optimizer: optimizer.prefetch(), "not supported"),
}


def _from_inside(call: Callable[[], object]) -> None:
    call()


def _from_a_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def _from_a_signal_handler(call: Callable[[], object]) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: call())
    try:
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("case, route", [
    (CASES[0], _from_inside), (CASES[0], _from_a_thread), (CASES[0], _from_a_signal_handler),
    (CASES[1], _from_inside), (CASES[2], _from_inside), (CASES[2], _from_a_thread),
], ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.parametrize("intrusion", INTRUSIONS)
def test_who_reads_or_calls_during_a_step_gets_an_error_and_the_training_is_unharmed(
    device: SimulatedDevice | None,
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
    route: Callable[[Callable[[], object]], None],
    intrusion: str,
) -> None:
    intrude, told = INTRUSIONS[intrusion]
    native = train(case)
    optimizer = make_optimizer(case, SwapOptimizerConfig(4))
    update = type(optimizer).update_units
    seen: list[Exception] = []
    calls = []

    def intruded(self: nn.Optimizer, units: list[object]) -> object:
        calls.append(units)
        if len(calls) in (1, 8, 12):
            route(lambda: attempt(self))
        return update(self, units)

    def attempt(self: nn.Optimizer) -> None:
        try:
            intrude(self)
        except Exception as error:
            seen.append(error)

    monkeypatch.setattr(type(optimizer), "update_units", intruded)
    returned = None
    for step in range(case.steps):
        returned = optimizer(gradients_of(optimizer, case, step))
    assert_same(native, Outcome(optimizer, returned, values_of(optimizer)))
    assert len(seen) == 3
    assert all(told in str(error) for error in seen), seen


def test_between_two_steps_everything_is_open_again(device: SimulatedDevice | None) -> None:
    case = CASES[0]
    optimizer = make_optimizer(case, SwapOptimizerConfig(4))
    registered = type(optimizer._params)
    optimizer(gradients_of(optimizer, case, 0))
    assert type(optimizer._params) is registered
    _save(optimizer)
    _save_the_cell_around_it(optimizer)
    with pytest.raises(ValueError, match="gradients"):
        optimizer(())
    optimizer(gradients_of(optimizer, case, 1))


@pytest.mark.parametrize("which", ["Adam", "AdamWeightDecay"])
def test_two_threads_with_two_optimizers_train_like_one(which: str) -> None:
    path = os.pathsep.join([str(SUPPORT), str(SUPPORT.parents[2])])
    result = subprocess.run(
        [sys.executable, str(SUPPORT / "ms_two_threads.py"), which],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=240,
    )
    assert result.returncode == 0 and "DONE" in result.stdout, result.stderr[-3000:]
