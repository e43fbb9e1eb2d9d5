"""One of the processes of ``test_data_parallel.py``: native against swapped, data parallel."""
from __future__ import annotations

import mindspore
import numpy as np
from mindspore import Tensor, nn
from mindspore.communication import get_group_size, get_rank, init
from ms_device import swapping

from swap_adam import SwapOptimizerConfig
from swap_adam.mindspore import SwapAdamWeightDecay, SwapMSAdam

STEPS = 3


def make_network() -> nn.Cell:
    rng = np.random.default_rng(0)
    network = nn.SequentialCell(nn.Dense(64, 64), nn.ReLU(), nn.Dense(64, 32))
    for param in network.trainable_params():
        param.set_data(Tensor(rng.standard_normal(param.shape, np.float32) * 0.1))
    return network


def train(make: type, **more: object) -> list[np.ndarray]:
    """Losses and parameters after a few steps on this process's own data."""
    network = make_network()
    optimizer = make(network.trainable_params(), 1e-2, **more)
    step = nn.TrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), optimizer)
    step.set_train()
    rng = np.random.default_rng(get_rank())
    losses = []
    for _ in range(STEPS):
        inputs = Tensor(rng.standard_normal((8, 64), np.float32))
        labels = Tensor(rng.standard_normal((8, 32), np.float32))
        losses.append(step(inputs, labels).asnumpy().copy())
    return [*losses, *(param.asnumpy().copy() for param in optimizer.get_parameters())]


def main() -> None:
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    init()
    mindspore.set_auto_parallel_context(
        parallel_mode=mindspore.ParallelMode.DATA_PARALLEL,
        gradients_mean=True,
        device_num=get_group_size(),
    )
    for native, swap in ((nn.Adam, SwapMSAdam), (nn.AdamWeightDecay, SwapAdamWeightDecay)):
        expected = train(native)
        with swapping() as device:
            actual = train(swap, swap_config=SwapOptimizerConfig(4))
            assert device is None or device.copies > 0
        for ours, theirs in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    total = mindspore.ops.AllReduce()(Tensor([float(get_rank())]))
    assert total.asnumpy()[0] == sum(range(get_group_size()))
    print("DONE")


if __name__ == "__main__":
    main()
