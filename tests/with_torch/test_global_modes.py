"""What torch sets for a whole process or block: ours trains as the original does, or fails as it.

Each mode is on while the optimizer is made, converted, loaded, stepped, or converted back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from device_under_test import DEVICE
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import AdamW, Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from training import assert_same_training, make_params, on_host, train

from swap_adam import swap_optimizer, unswap_optimizer
from swap_adam.torch import SwapAdamW

Mode = Callable[[], AbstractContextManager[Any]]


class PassingFunctions(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class PassingOperations(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def future_flags() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
        torch.__future__.set_overwrite_module_params_on_conversion(False)


MODES: dict[str, Mode] = {
    "default_device_accelerator": lambda: default_device(DEVICE),
    "default_device_cpu": lambda: default_device("cpu"),
    "default_device_meta": lambda: default_device("meta"),
    "device_context_accelerator": lambda: torch.device(DEVICE),
    "device_context_cpu": lambda: torch.device("cpu"),
    "device_context_meta": lambda: torch.device("meta"),
    "default_dtype_float64": lambda: default_dtype(torch.float64),
    "default_dtype_bfloat16": lambda: default_dtype(torch.bfloat16),
    "inference_mode": torch.inference_mode,
    "no_grad": lambda: torch.set_grad_enabled(False),
    "enable_grad": lambda: torch.set_grad_enabled(True),
    "deterministic": deterministic,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "autocast_accelerator": lambda: torch.autocast(DEVICE, torch.bfloat16),
    "autocast_cpu": lambda: torch.autocast("cpu", torch.bfloat16),
    "function_mode": PassingFunctions,
    "dispatch_mode": PassingOperations,
    "flop_counter": lambda: FlopCounterMode(display=False),
    "future_flags": future_flags,
}
PHASES = ("make", "convert", "load", "step", "unswap", "all")


def life(swaps: bool, mode: Mode, phase: str, fused: bool) -> Optimizer | tuple[type, str]:
    """Made, converted, stepped, loaded, stepped and converted back; ``mode`` is on in ``phase``."""

    def on(name: str) -> AbstractContextManager[Any]:
        return mode() if phase in (name, "all") else nullcontext()

    params = make_params()
    converts = swaps and phase in ("convert", "all")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about anomaly mode and autocast
            with on("make"):
                made = SwapAdamW if swaps and not converts else AdamW
                optimizer = made(params, lr=0.01, fused=fused)
            if phase == "convert":
                train(optimizer, 1)
            if converts:
                with on("convert"):
                    swap_optimizer(optimizer)
            saved = AdamW(make_params(seed=1), lr=0.02, fused=fused)
            train(saved, 3)
            checkpoint = saved.state_dict()
            for step in range(2):
                _step(optimizer, params, step, on)
            with on("load"):
                optimizer.load_state_dict(checkpoint)
            for step in range(2, 4):
                _step(optimizer, params, step, on)
            train(optimizer, range(4, 6))
            if swaps:
                assert any(on_host(optimizer))
                with on("unswap"):
                    unswap_optimizer(optimizer)
            train(optimizer, range(6, 8))
    except RuntimeError as error:
        return type(error), str(error)
    return optimizer


def _step(
    optimizer: Optimizer, params: list[Tensor], step: int,
    on: Callable[[str], AbstractContextManager[Any]],
) -> None:
    for index, param in enumerate(params):
        param.grad = torch.full_like(param, 0.1 * (step + 1) + index)
    with on("step"):
        optimizer.step()


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", MODES)
def test_a_training_under_a_global_mode_is_the_originals(
    name: str, phase: str, fused: bool
) -> None:
    native = life(False, MODES[name], phase, fused)
    swapped = life(True, MODES[name], phase, fused)
    if isinstance(native, tuple) or isinstance(swapped, tuple):
        assert native == swapped
        return
    assert_same_training(native, swapped)


def test_states_made_within_inference_mode_train_on_after_it() -> None:
    """Those of the original are inference tensors, which nothing may write outside."""
    native, swapped = AdamW(make_params(), lr=0.01), SwapAdamW(make_params(), lr=0.01)
    train(native, 1)
    with torch.inference_mode():
        train(swapped, 1)
    train(native, range(1, 3))
    train(swapped, range(1, 3))
    assert_same_training(native, swapped)


def test_a_plan_made_within_inference_mode_serves_the_steps_after_it() -> None:
    def gradient(step: int, index: int, param: Tensor) -> Tensor | None:
        return None if step == 1 and index == 2 else torch.full_like(param, index + step + 1.0)

    native, swapped = AdamW(make_params(), lr=0.01), SwapAdamW(make_params(), lr=0.01)
    for optimizer in (native, swapped):
        train(optimizer, 1, gradient)
        with torch.inference_mode():
            held = optimizer.state_dict()
            train(optimizer, range(1, 3), gradient)  # other gradients, and what is held moves
        del held
        train(optimizer, range(3, 5), gradient)
    assert_same_training(native, swapped)


@pytest.mark.parametrize("converts", [False, True], ids=["made", "converted"])
def test_fake_tensors_train_as_natively_and_have_nothing_to_swap(converts: bool) -> None:
    found = []
    for swaps in (False, True):
        with FakeTensorMode():
            params = [torch.zeros(64, 64, device=DEVICE, requires_grad=True)]
            optimizer = (SwapAdamW if swaps and not converts else AdamW)(params)
            for step in range(2):
                params[0].grad = torch.ones_like(params[0])
                optimizer.step()
                if swaps and converts and step == 0:
                    swap_optimizer(optimizer)
            (states,) = optimizer.state.values()
            found.append({name: (value.shape, value.device) for name, value in states.items()})
    assert found[0] == found[1]
