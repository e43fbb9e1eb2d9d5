"""What MindFormers' own trainer builds from a yaml is swapped by converting it before train()."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn
from ms_mindformers import AdamW, builder_of_the_trainer
from ms_training import Outcome, assert_same, values_of

from swap_adam import swap_optimizer
from swap_adam.mindspore import SwapMFAdamW
from swap_adam.simulator.mindspore import SimulatedDevice

STEPS = 3


class OptimizerConfig:
    """The section ``optimizer`` of a yaml, as the trainer hands it on: unknown fields included."""

    def __init__(self, **more: Any) -> None:
        self.fields = {"type": "AdamW", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
        self.fields |= more

    def to_dict(self) -> dict[str, Any]:
        return dict(self.fields)


def make_network() -> nn.Cell:
    rng = np.random.default_rng(0)
    network = nn.SequentialCell(nn.Dense(64, 64), nn.ReLU(), nn.Dense(64, 32)).to_float(
        mindspore.float32
    )
    for param in network.trainable_params():
        param.set_data(Tensor(rng.standard_normal(param.shape, np.float32) * 0.1))
    return network


def make_trainer(config: OptimizerConfig) -> SimpleNamespace:
    """What of the trainer is about its optimizer: how it is built, and where it is kept."""
    schedule = nn.ExponentialDecayLR(0.01, 0.9, 4)
    build = builder_of_the_trainer()
    return SimpleNamespace(optimizer=build(config, [make_network()], schedule))


def train(trainer: SimpleNamespace) -> Outcome:
    returned = None
    for step in range(STEPS):
        rng = np.random.default_rng(step)
        gradients = tuple(
            Tensor(rng.standard_normal(param.shape, np.float32))
            for param in trainer.optimizer.parameters
        )
        returned = trainer.optimizer(gradients)
    return Outcome(trainer.optimizer, returned, values_of(trainer.optimizer))


def test_the_trainers_optimizer_converted_before_train_trains_as_it_would_have(
    device: SimulatedDevice | None
) -> None:
    native = train(make_trainer(OptimizerConfig()))
    trainer = make_trainer(OptimizerConfig())
    assert type(trainer.optimizer) is AdamW
    swap_optimizer(trainer.optimizer)
    assert type(trainer.optimizer) is SwapMFAdamW
    assert_same(native, train(trainer))
    if device is not None:
        assert device.copies > 0 and device.held_nbytes == 0


def test_swap_config_in_the_yaml_is_swallowed_by_mindformers_which_the_docs_warn_of(
    device: SimulatedDevice | None
) -> None:
    trainer = make_trainer(OptimizerConfig(swap_config={"swap_times": 4}))
    assert type(trainer.optimizer) is AdamW
    swap_optimizer(trainer.optimizer, None)
    assert type(trainer.optimizer) is SwapMFAdamW
