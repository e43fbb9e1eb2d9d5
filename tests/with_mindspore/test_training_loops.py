"""Everything that takes the original takes ours: loops, cells, Model.train, recomputation."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn
from ms_mindformers import AdamW
from ms_training import SWAP_CLASS

from swap_adam import SwapOptimizerConfig
from swap_adam.simulator.mindspore import SimulatedDevice

ORIGINALS = (nn.Adam, nn.AdamWeightDecay, AdamW)
STEPS = 4
RNG = np.random.default_rng(0)
INPUTS = RNG.standard_normal((8, 64), np.float32)
LABELS = RNG.standard_normal((8, 32), np.float32)


def make_network(recompute: bool = False) -> nn.Cell:
    rng = np.random.default_rng(0)
    hidden = nn.SequentialCell(nn.Dense(64, 64), nn.ReLU())
    if recompute:
        hidden.recompute()
    network = nn.SequentialCell(hidden, nn.Dense(64, 32))
    for param in network.trainable_params():
        param.set_data(Tensor(rng.standard_normal(param.shape, np.float32) * 0.1))
    return network


def own_loop(make: Callable[..., nn.Optimizer], recompute: bool = False) -> list[float]:
    network, loss = make_network(recompute), nn.MSELoss()
    optimizer = make(network.trainable_params(), learning_rate=1e-2)

    def forward(inputs: Tensor, labels: Tensor) -> Tensor:
        return loss(network(inputs), labels)

    compute = mindspore.value_and_grad(forward, None, optimizer.parameters)
    losses = []
    for _ in range(STEPS):
        value, gradients = compute(Tensor(INPUTS), Tensor(LABELS))
        optimizer(gradients)
        losses.append(float(value.asnumpy()))
    return losses


def recomputed(make: Callable[..., nn.Optimizer]) -> list[float]:
    return own_loop(make, recompute=True)


def train_one_step_cell(make: Callable[..., nn.Optimizer]) -> list[float]:
    network = make_network()
    optimizer = make(network.trainable_params(), learning_rate=1e-2)
    cell = nn.TrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), optimizer)
    cell.set_train()
    return [float(cell(Tensor(INPUTS), Tensor(LABELS)).asnumpy()) for _ in range(STEPS)]


class Losses(mindspore.train.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_step_end(self, run_context: Any) -> None:
        self.seen.append(float(run_context.original_args().net_outputs.asnumpy()))


def model_train(make: Callable[..., nn.Optimizer]) -> list[float]:
    network, losses = make_network(), Losses()
    optimizer = make(network.trainable_params(), learning_rate=1e-2)
    data = mindspore.dataset.NumpySlicesDataset((INPUTS, LABELS), shuffle=False).batch(4)
    model = mindspore.train.Model(network, nn.MSELoss(), optimizer)
    model.train(2, data, callbacks=[losses], dataset_sink_mode=False)
    return losses.seen


@pytest.mark.parametrize("original", ORIGINALS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("loop", [own_loop, recomputed, train_one_step_cell, model_train])
def test_losses_are_the_originals(
    device: SimulatedDevice | None,
    loop: Callable[[Callable[..., nn.Optimizer]], list[float]],
    original: type,
) -> None:
    def make_swapped(*args: Any, **kwargs: Any) -> nn.Optimizer:
        return SWAP_CLASS[original](*args, **kwargs, swap_config=SwapOptimizerConfig(4))

    native, swapped = loop(original), loop(make_swapped)
    assert len(native) == STEPS and native[-1] < native[0]
    assert swapped == native
    if device is not None:
        assert device.copies > 0 and device.held_nbytes == 0
