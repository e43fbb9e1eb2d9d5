"""What a user would lose to a reader of states that comes while a step runs: the training."""
from __future__ import annotations

import copy
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_under_test import DEVICE
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from swap_adam import SwapOptimizerConfig, swap_optimizer, unswap_optimizer
from swap_adam.torch import SwapAdamW

each_pipeline = pytest.mark.parametrize("packed", [True, False], ids=["packed", "per_tensor"])


class Training:
    """The same parameters and gradients, natively and swapped."""

    def __init__(self, packed: bool = True) -> None:
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(96, 100, generator=generator) for _ in range(6)]
        values.append(torch.randn(20, generator=generator))
        self.native = AdamW([torch.nn.Parameter(value.to(DEVICE)) for value in values], lr=1e-2)
        config = SwapOptimizerConfig(packed_swap=packed, swap_times=4)
        self.swapped = SwapAdamW(
            [torch.nn.Parameter(value.to(DEVICE)) for value in values], lr=1e-2, swap_config=config
        )
        self.number = 0

    def give_gradients(self) -> None:
        self.number += 1
        for optimizer in (self.native, self.swapped):
            for index, param in enumerate(optimizer.param_groups[0]["params"]):
                param.grad = torch.full_like(param, 0.1 * self.number + index)

    def step(self) -> None:
        self.give_gradients()
        self.native.step()
        self.swapped.step()

    def assert_equal(self) -> None:
        pairs = zip(self.native.param_groups[0]["params"], self.swapped.param_groups[0]["params"])
        for native, swapped in pairs:
            assert torch.equal(native.cpu(), swapped.cpu())
            for name, value in self.native.state[native].items():
                assert torch.equal(value.cpu(), self.swapped.state[swapped][name].cpu()), name


class During(TorchDispatchMode):
    """Calls ``action`` once, at the ``at``-th operation of the updates."""

    def __init__(self, at: int, action: Callable[[], None]) -> None:
        super().__init__()
        self.at, self.action, self.count = at, action, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_foreach" in str(func):
            self.count += 1
            if self.count == self.at:
                self.action()
        return func(*args, **(kwargs or {}))


def reads(optimizer: SwapAdamW) -> dict[str, Callable[[], object]]:
    return {
        "state": lambda: len(optimizer.state),
        "state_dict": optimizer.state_dict,
        "load_state_dict": lambda: optimizer.load_state_dict({}),
        "prefetch": optimizer.prefetch,
        "swap_report": optimizer.swap_report,
        "pickle": lambda: pickle.dumps(optimizer),
        "deepcopy": lambda: copy.deepcopy(optimizer),
        "unswap": lambda: unswap_optimizer(optimizer),
        "add_param_group": lambda: optimizer.add_param_group({"params": []}),
        "step": optimizer.step,
    }


@each_pipeline
@pytest.mark.parametrize("at", [1, 4, 11])
@pytest.mark.parametrize("what", reads(Training().swapped))
def test_whoever_comes_from_inside_a_step_gets_an_error_and_the_step_goes_on(
    what: str, at: int, packed: bool
) -> None:
    training = Training(packed)
    training.step()
    training.give_gradients()
    training.native.step()
    seen: list[BaseException] = []

    def action() -> None:
        try:
            reads(training.swapped)[what]()
        except RuntimeError as error:
            seen.append(error)

    with During(at, action):
        training.swapped.step()
    assert len(seen) == 1 and "step() is running" in str(seen[0])
    training.assert_equal()
    training.step()
    training.assert_equal()


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per_tensor"])
def test_a_signal_handler_that_saves_in_the_middle_of_a_step_does_not_tear_it(packed: bool) -> None:
    training = Training(packed)
    training.step()
    seen: list[object] = []

    def save(*_: object) -> None:
        try:
            seen.append(training.swapped.state_dict())
        except RuntimeError as error:
            seen.append(error)

    before = signal.signal(signal.SIGUSR1, save)
    try:
        training.give_gradients()
        training.native.step()
        with During(6, lambda: signal.raise_signal(signal.SIGUSR1)):
            training.swapped.step()
        assert isinstance(seen[0], RuntimeError) and "set a flag" in str(seen[0])
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert isinstance(seen[1], dict)
    training.assert_equal()


@each_pipeline
def test_a_thread_that_serves_checkpoints_gets_whole_ones_and_disturbs_nothing(
    packed: bool, simulator: Any
) -> None:
    simulator.configure(races="collect")  # its clock of the host knows one thread
    training = Training(packed)
    training.step()
    stop, dicts, failures = threading.Event(), [], []

    def serve() -> None:
        while not stop.is_set():
            try:
                dicts.append(training.swapped.state_dict())
                len(training.swapped.state)
                training.swapped.swap_report()
            except BaseException as error:
                failures.append(error)
                return
            del dicts[:-3]

    thread = threading.Thread(target=serve)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        for _ in range(40):
            training.step()
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not failures, failures
    training.assert_equal()
    # Every dict is of one moment: all its counters agree.
    for states in dicts:
        assert len({float(entry["step"]) for entry in states["state"].values()}) == 1
    simulator.configure(races="off")
    simulator.reset()


def test_a_step_from_another_thread_waits_and_is_a_step_like_any_other(simulator: Any) -> None:
    simulator.configure(races="collect")
    training = Training()
    training.step()
    training.give_gradients()
    training.native.step()
    thread = threading.Thread(target=training.swapped.step)
    with During(5, thread.start):
        training.swapped.step()
    thread.join()
    training.native.step()  # the gradients are the same
    training.assert_equal()
    simulator.reset()


def test_a_dict_taken_by_another_thread_is_a_snapshot() -> None:
    training = Training()
    training.step()
    taken: list[Any] = []
    thread = threading.Thread(target=lambda: taken.append(training.swapped.state_dict()))
    thread.start()
    thread.join()
    before = copy.deepcopy(taken[0])
    training.step()
    training.step()
    for index, entry in before["state"].items():
        for name, value in entry.items():
            assert torch.equal(value, taken[0]["state"][index][name]), name
    training.assert_equal()


def test_hooks_around_a_step_may_read_states() -> None:
    training = Training()
    seen: list[int] = []
    training.swapped.register_step_pre_hook(lambda o, *_: seen.append(len(o.state_dict()["state"])))
    training.swapped.register_step_post_hook(lambda o, *_: seen.append(len(o.state)))
    training.step()
    assert seen == [0, 7]
    training.assert_equal()


def test_an_optimizer_converted_while_it_steps_is_refused_and_goes_on() -> None:
    training = Training()
    training.step()
    training.give_gradients()
    training.native.step()
    errors: list[BaseException] = []

    def convert() -> None:
        try:
            swap_optimizer(training.swapped, SwapOptimizerConfig(swap_times=2))
        except ValueError as error:
            errors.append(error)

    with During(3, convert):
        training.swapped.step()
    assert errors
    training.assert_equal()
