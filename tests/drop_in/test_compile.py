"""torch.compile of the model, and of the step."""
from __future__ import annotations

import pytest
import torch
from drop_in_parity import (
    IS_SIMULATED,
    Training,
    assert_same,
    batch,
    small_model,
    swapped_nbytes,
    training,
)

from swap_adam import SwapOptimizerConfig, swap_optimizer
from swap_adam.torch import SwapAdam, SwapAdamW
from swap_adam.torch.hyper_adamw import HyperAdamW, SwapHyperAdamW

# The inductor backend has no code for the simulated device.
BACKENDS = ["eager", "aot_eager"] if IS_SIMULATED else ["eager", "aot_eager", "inductor"]
CLASSES = [(torch.optim.Adam, SwapAdam), (torch.optim.AdamW, SwapAdamW),
           (HyperAdamW, SwapHyperAdamW)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("native_class, swap_class", CLASSES)
def test_a_compiled_model(backend, native_class, swap_class) -> None:
    def make_model() -> torch.nn.Module:
        torch._dynamo.reset()
        return torch.compile(small_model(), backend=backend)

    native, swapped = training(native_class, make_model), training(swap_class, make_model)
    assert native.train(3) == swapped.train(3)
    assert_same(native, swapped)
    assert swapped_nbytes(swapped.optimizer) > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("native_class, swap_class", CLASSES)
def test_a_compiled_step_is_the_uncompiled_one(backend, packed, native_class, swap_class) -> None:
    # Streams, pinned memory and events have no place in a graph: the step runs uncompiled.
    torch._dynamo.reset()
    config = SwapOptimizerConfig(packed_swap=packed)
    native, swapped = training(native_class), training(swap_class, swap_config=config)
    step = torch.compile(swapped.optimizer.step, backend=backend)
    for index in range(3):
        for run, function in ((native, native.optimizer.step), (swapped, step)):
            run.optimizer.zero_grad()
            run.model(batch(index)).pow(2).mean().backward()
            function()
    assert_same(native, swapped)
    assert swapped_nbytes(swapped.optimizer) > 0


def test_a_compiled_training_step() -> None:
    torch._dynamo.reset()
    native, swapped = training(torch.optim.AdamW), training(torch.optim.AdamW)
    native.train(1), swapped.train(1)
    swap_optimizer(swapped.optimizer)

    def train_step(run: Training, values: torch.Tensor) -> torch.Tensor:
        run.optimizer.zero_grad()
        loss = run.model(values).pow(2).mean()
        loss.backward()
        run.optimizer.step()
        return loss

    compiled = torch.compile(train_step, backend="eager")
    for index in range(3):
        losses = train_step(native, batch(index)), compiled(swapped, batch(index))
        assert torch.equal(*losses)
    assert_same(native, swapped)


def test_fullgraph_says_why_not() -> None:
    torch._dynamo.reset()
    run = training(SwapAdamW)
    run.train(1)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="(?i)swap_adam|disable"):
        torch.compile(run.optimizer.step, backend="eager", fullgraph=True)()
