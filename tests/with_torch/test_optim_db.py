"""PyTorch's own list of optimizer configurations, with its schedulers and expected errors.

The list holds the configurations with ``capturable`` and ``fused`` for a few devices that it
names. The device under test is added to those, so that all of them are asked for.
"""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import pytest
import torch
from device_under_test import DEVICE
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from training import SWAP_CLASS, assert_same_training, dense_gradient, make_pair, make_params, train

from swap_adam import SwapOptimizerConfig, swap_optimizer

pytest.importorskip("expecttest")
from torch.testing._internal import common_optimizers  # noqa: E402

INFOS = {
    info.optim_cls: info
    for info in common_optimizers.optim_db if info.optim_cls in SWAP_CLASS
}
# AdamW comes with one combination only; it gets Adam's as well.
SCHEDULERS = [combination for info in INFOS.values() for combination in info.scheduler_inputs]
REFUSED = {
    Adam: ("foreach", "capturable", "differentiable", "fused"),
    AdamW: ("foreach", "capturable", "differentiable"),
}


def listed(original: type[Optimizer]) -> list[tuple[str, dict[str, Any]]]:
    info = INFOS[original]
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(common_optimizers, "CUDA_CONFIG_GPUS"):
            gpus = [*common_optimizers.CUDA_CONFIG_GPUS, DEVICE]
            patch.setattr(common_optimizers, "CUDA_CONFIG_GPUS", gpus)
            device = DEVICE
        else:
            device = "cuda"  # nothing is made on it
        fused_on = (*info.supports_fused_on, DEVICE)
        patch.setattr(info, "supports_fused_on", fused_on)
        inputs = common_optimizers._get_optim_inputs_including_global_cliquey_kwargs(
            device, torch.float32, info
        )
    return [(entry.desc, entry.kwargs) for entry in inputs]


ENTRIES = [(original, *entry) for original in SWAP_CLASS for entry in listed(original)]
ADMITTED = [e for e in ENTRIES if not any(e[2].get(flag) for flag in REFUSED[e[0]])]
DENIED = [e for e in ENTRIES if any(e[2].get(flag) for flag in REFUSED[e[0]])]


def name_of(value: object) -> str | None:
    if isinstance(value, type):
        return value.__name__
    return value.replace(" ", "_") if isinstance(value, str) else ""


def test_the_list_has_not_shrunk() -> None:
    assert len(ADMITTED) >= 15
    assert len(DENIED) >= 60
    assert len(SCHEDULERS) >= 8


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per_tensor"])
@pytest.mark.parametrize("original, desc, options", ADMITTED, ids=name_of)
def test_listed_configuration_with_its_schedulers_is_bitwise_native(
    original: type[Optimizer], desc: str, options: dict[str, Any], packed: bool
) -> None:
    for constructors in [[], *SCHEDULERS]:
        native, swapped = make_pair(
            original, deepcopy(options), {"packed_swap": packed, "swap_times": 5}
        )
        for optimizer in (native, swapped):
            schedulers = [construct(optimizer) for construct in constructors]

            def schedule(step: int) -> None:
                for scheduler in schedulers:
                    if isinstance(scheduler, ReduceLROnPlateau):
                        scheduler.step(float(step))
                    else:
                        scheduler.step()

            train(optimizer, 10, after_step=schedule)
        assert_same_training(native, swapped)
        assert native.param_groups[0]["lr"] == swapped.param_groups[0]["lr"]


@pytest.mark.parametrize("original, desc, options", DENIED, ids=name_of)
def test_listed_configuration_that_is_refused_names_its_flag(
    original: type[Optimizer], desc: str, options: dict[str, Any]
) -> None:
    flag = next(flag for flag in REFUSED[original] if options.get(flag))
    with pytest.raises(ValueError, match=f"does not support {flag}=True"):
        SWAP_CLASS[original](make_params(), **deepcopy(options))
    native = original(make_params(), **deepcopy(options))
    with pytest.raises(ValueError, match=f"does not support {flag}=True"):
        swap_optimizer(native)
    assert type(native) is original


@pytest.mark.parametrize("original, desc, options", DENIED, ids=name_of)
def test_refused_configuration_without_the_refused_flags_is_bitwise_native(
    original: type[Optimizer], desc: str, options: dict[str, Any]
) -> None:
    """What is left where the native optimizer takes it: tensor lr, tensor betas, AMSGrad."""
    options = {k: v for k, v in options.items() if k not in REFUSED[original]}

    def gradient(step: int, index: int, param: Tensor) -> Tensor:
        return dense_gradient(step, index, param)

    try:
        native = original(make_params(), **deepcopy(options))
        train(native, 4, gradient)
    except Exception as expected:
        with pytest.raises(type(expected)):
            train(SWAP_CLASS[original](make_params(), **deepcopy(options)), 4, gradient)
        return
    swapped = SWAP_CLASS[original](
        make_params(), **deepcopy(options), swap_config=SwapOptimizerConfig(swap_times=5)
    )
    train(swapped, 4, gradient)
    assert_same_training(native, swapped)


def errors(original: type[Optimizer]) -> list[Any]:
    return list(INFOS[original].optim_error_inputs_func("cpu", torch.float32))


ERRORS = [(original, entry) for original in SWAP_CLASS for entry in errors(original)]


@pytest.mark.parametrize(
    "original, entry", ERRORS,
    ids=lambda value: value.__name__ if isinstance(value, type)
    else value.optimizer_error_input.desc.replace(" ", "_"),
)
def test_listed_error_is_the_native_one(original: type[Optimizer], entry: Any) -> None:
    """Also where our own refusal would come: the native check is first, its message kept."""
    listed_input = entry.optimizer_error_input

    def build(cls: type[Optimizer]) -> None:
        params = listed_input.params
        optimizer = cls(make_params() if params is None else params, **listed_input.kwargs)
        if entry.error_on is common_optimizers.OptimizerErrorEnum.STEP_ERROR:
            optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # one of the listed errors is a warning
        for cls in (original, SWAP_CLASS[original]):
            with pytest.raises(entry.error_type, match=entry.error_regex):
                build(cls)
