"""Trains two optimizers in two threads, in a process of its own: MindSpore may abort it.

The gradients are there before: MindSpore's own operations from two threads at a time are beyond us.
"""
from __future__ import annotations

import sys
import threading

import mindspore
import numpy as np
from mindspore import nn
from ms_device import swapping
from ms_training import Case, gradients_of, make_optimizer, values_of

from swap_adam import SwapOptimizerConfig

STEPS = 20


def main(which: str) -> None:
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    case = Case(which, getattr(nn, which))
    errors: list[BaseException] = []

    def train(optimizer: nn.Optimizer) -> None:
        try:
            for step_gradients in gradients:
                optimizer(step_gradients)
        except BaseException as error:
            errors.append(error)

    with swapping():
        optimizers = [make_optimizer(case, SwapOptimizerConfig(4)) for _ in range(3)]
        gradients = [gradients_of(optimizers[0], case, step) for step in range(STEPS)]
        train(optimizers[0])
        threads = [threading.Thread(target=train, args=(one,)) for one in optimizers[1:]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors
    expected = values_of(optimizers[0])
    for optimizer in optimizers[1:]:
        for name, value in values_of(optimizer).items():
            np.testing.assert_array_equal(value, expected[name], err_msg=name)
    print("DONE")


if __name__ == "__main__":
    main(sys.argv[1])
