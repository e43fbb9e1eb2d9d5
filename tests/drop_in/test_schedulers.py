"""Every learning-rate scheduler of torch, attached before and after the conversion."""
from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable

import pytest
import torch
from drop_in_parity import assert_same, swapped_nbytes, training
from torch.optim import Optimizer, lr_scheduler

from swap_adam import swap_optimizer
from swap_adam.torch import SwapAdamW

MAKE: dict[str, Callable[[Optimizer], lr_scheduler.LRScheduler]] = {
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=3),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=2),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "LRScheduler": lambda o: HalvingLR(o),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=10),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 8, power=2.0),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.1, anneal_epochs=3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1),
}


class HalvingLR(lr_scheduler.LRScheduler):
    """A user's own subclass."""

    def get_lr(self) -> list[float]:
        return [base / 2 ** self.last_epoch for base in self.base_lrs]


def test_every_class_of_torch_is_here() -> None:
    classes = {
        name for name, value in vars(lr_scheduler).items()
        if inspect.isclass(value) and issubclass(value, lr_scheduler.LRScheduler)
        and not name.startswith("_")
    }
    assert classes <= MAKE.keys()


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("how", ["constructed", "converted later"])
def test_the_learning_rates_and_results_are_the_originals(name: str, how: str) -> None:
    native = training(torch.optim.AdamW, lr=3e-3)
    swapped = training(SwapAdamW if how == "constructed" else torch.optim.AdamW, lr=3e-3)
    with warnings.catch_warnings():
        # "Detected call of `lr_scheduler.step()` before `optimizer.step()`"
        warnings.filterwarnings("error", message="Detected call")
        schedulers = [MAKE[name](run.optimizer) for run in (native, swapped)]
        rates = set()
        for index in range(6):
            if how == "converted later" and index == 2:
                swap_optimizer(swapped.optimizer)
            losses = [run.train(1)[0] for run in (native, swapped)]
            assert losses[0] == losses[1]
            for scheduler, loss in zip(schedulers, losses):
                if name == "ReduceLROnPlateau":
                    scheduler.step(loss)
                else:
                    scheduler.step()
            assert_same(native, swapped)
            rates.add(float(native.optimizer.param_groups[0]["lr"]))
            assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
    assert len(rates) > 1
    assert swapped_nbytes(swapped.optimizer) > 0


@pytest.mark.parametrize("name", ["LambdaLR", "OneCycleLR", "CosineAnnealingLR"])
def test_resuming_optimizer_and_scheduler(name: str) -> None:
    runs = [training(torch.optim.AdamW), training(SwapAdamW)]
    schedulers = [MAKE[name](run.optimizer) for run in runs]
    for run, scheduler in zip(runs, schedulers):
        for _ in range(3):
            run.train(1)
            scheduler.step()
    resumed = training(SwapAdamW)
    resumed.model.load_state_dict(runs[0].model.state_dict())
    scheduler = MAKE[name](resumed.optimizer)
    resumed.optimizer.load_state_dict(runs[1].optimizer.state_dict())
    scheduler.load_state_dict(schedulers[1].state_dict())
    resumed.done = 3
    for _ in range(2):
        assert runs[0].train(1) == resumed.train(1)
        schedulers[0].step()
        scheduler.step()
    assert_same(runs[0], resumed)


@pytest.mark.parametrize("fused", [False, True])
def test_a_tensor_learning_rate_that_a_scheduler_fills_in_place(fused: bool) -> None:
    runs = [
        training(optimizer_class, lr=torch.tensor(1e-2), fused=fused)
        for optimizer_class in (torch.optim.AdamW, SwapAdamW)
    ]
    rates = [run.optimizer.param_groups[0]["lr"] for run in runs]
    schedulers = [lr_scheduler.ExponentialLR(run.optimizer, 0.5) for run in runs]
    for _ in range(4):
        assert runs[0].train(1) == runs[1].train(1)
        for scheduler in schedulers:
            scheduler.step()
    for run, rate in zip(runs, rates):
        assert run.optimizer.param_groups[0]["lr"] is rate
        assert rate.item() == pytest.approx(1e-2 / 16)
    assert_same(*runs)
