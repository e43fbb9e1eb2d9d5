"""One of the four processes of ``test_fully_shard.py``. Not run so far: see docs/mindspore.md."""
from __future__ import annotations

import sys

import mindspore
import numpy as np
from hyper_parallel import fully_shard, init_device_mesh
from mindspore import Tensor, nn
from mindspore.communication import get_rank, init
from ms_device import swapping

from swap_adam import SwapOptimizerConfig
from swap_adam.mindspore import SwapMSAdam
from swap_adam.mindspore.state import local

STEPS = 3


def make_network() -> nn.Cell:
    rng = np.random.default_rng(0)
    network = nn.SequentialCell(nn.Dense(128, 128), nn.ReLU(), nn.Dense(128, 128))
    for param in network.trainable_params():
        param.set_data(Tensor(rng.standard_normal(param.shape, np.float32) * 0.1))
    mesh = init_device_mesh("npu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(network, mesh=mesh)
    return network


def train(make: type, **more: object) -> list[np.ndarray]:
    """Losses, and the local shards of parameters and states."""
    network = make_network()
    optimizer = make(network.trainable_params(), learning_rate=1e-2, **more)
    loss_cell = nn.WithLossCell(network, nn.MSELoss())
    compute = mindspore.value_and_grad(loss_cell, None, optimizer.parameters)
    rng = np.random.default_rng(get_rank())
    losses = []
    for _ in range(STEPS):
        inputs = Tensor(rng.standard_normal((8, 128), np.float32))
        loss, gradients = compute(inputs, inputs)
        optimizer(gradients)
        losses.append(loss.asnumpy().copy())
    states = (local(param).asnumpy().copy() for param in optimizer.get_parameters())
    return [*losses, *states]


def main(which: str) -> None:
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    init()
    if which == "adam":
        native, swap, config = nn.Adam, SwapMSAdam, SwapOptimizerConfig(4)
    else:
        from mindformers.pynative.optimizer.adamw import AdamW

        from swap_adam.mindspore import SwapMFAdamW

        native, swap = AdamW, SwapMFAdamW
        config = SwapOptimizerConfig(4, packed_swap=which.endswith("-packed"))
    expected = train(native)
    with swapping():
        actual = train(swap, swap_config=config)
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    print("DONE")


if __name__ == "__main__":
    main(sys.argv[1])
