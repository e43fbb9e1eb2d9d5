"""Using device memory that was given back is an error that names the tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_under_test import DEVICE
from torch import Tensor
from torch.optim import AdamW
from training import assert_same_training, dense_gradient, make_pair, make_params, params_of, train

from swap_adam import SwapOptimizerConfig
from swap_adam.torch import SwapAdamW

pytestmark = pytest.mark.simulator_only
each_pipeline = pytest.mark.parametrize("packed", [True, False], ids=["packed", "per_tensor"])

USES: dict[str, Callable[[Tensor], Any]] = {
    "compute": lambda t: t + 1,
    "write": lambda t: t.add_(1),
    "fill": lambda t: t.zero_(),
    "to_host": lambda t: t.cpu(),
    "from_host": lambda t: t.copy_(torch.ones(t.shape)),
    "number": lambda t: t.view(-1)[0].item(),
    "print": repr,
    "view": lambda t: t.view(-1) * 2,
    "foreach": lambda t: torch._foreach_add_([torch.ones_like(t, device=DEVICE), t], 1.0),
    "fused": lambda t: torch._fused_adamw_(
        [torch.ones(t.shape, device=DEVICE)], [torch.ones(t.shape, device=DEVICE)], [t],
        [torch.ones(t.shape, device=DEVICE)], [], [torch.ones((), device=DEVICE)], lr=0.1,
        beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    ),
}


def released(shape: tuple[int, ...] = (30, 50)) -> Tensor:
    tensor = torch.ones(shape, device=DEVICE)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("use", USES)
def test_a_released_tensor_is_an_error_that_names_it(use: str) -> None:
    with pytest.raises(RuntimeError, match=r"storage was released: float32 \[.*\] on simulated:0"):
        USES[use](released())
        torch.accelerator.synchronize()
    assert (torch.ones(3, device=DEVICE) + 1).tolist() == [2, 2, 2]


@each_pipeline
@pytest.mark.parametrize("use", USES)
def test_a_staged_state_used_after_the_step_is_an_error_that_names_it(
    use: str, packed: bool
) -> None:
    """Never the old numbers and never those of whoever has the memory now."""
    config = SwapOptimizerConfig(swap_times=5, packed_swap=packed)
    optimizer = SwapAdamW(make_params([(40, 50), (60, 50)]), swap_config=config)
    seen: list[Tensor] = []
    step_batch = optimizer.step_batch

    def spy(update: Any, units: Any) -> None:
        seen.extend(view for unit in units for view in unit.states.values())
        step_batch(update, units)

    optimizer.step_batch = spy  # type: ignore[method-assign]
    train(optimizer, 1)
    torch.accelerator.synchronize()
    assert seen
    for view in seen[:3]:
        numel = view.numel()
        with pytest.raises(RuntimeError, match="storage was released: float32") as caught:
            USES[use](view)
            torch.accelerator.synchronize()
        assert str(numel) in str(caught.value) or str(list(view.shape)) in str(caught.value)
    del optimizer.step_batch
    train(optimizer, range(1, 3))


@each_pipeline
@pytest.mark.parametrize("what", ["parameter", "gradient"])
def test_a_released_parameter_or_gradient_is_an_error_of_the_step(what: str, packed: bool) -> None:
    """As when somebody frees a shard too early."""
    config = SwapOptimizerConfig(swap_times=5, packed_swap=packed)
    optimizer = SwapAdamW(make_params(), swap_config=config)
    train(optimizer, 1)
    for index, param in enumerate(params_of(optimizer)):
        param.grad = dense_gradient(1, index, param)
    victim = params_of(optimizer)[2]
    tensor = victim if what == "parameter" else victim.grad
    assert tensor is not None
    tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"storage was released: float32"):
        optimizer.step()
        torch.accelerator.synchronize()


@each_pipeline
def test_memory_that_comes_and_goes_is_never_seen_by_training(packed: bool) -> None:
    """The staging bytes of one step are used by others between steps."""
    native, swapped = make_pair(AdamW, config={"swap_times": 5, "packed_swap": packed})

    def scribble(step: int) -> None:
        for nbytes in (1 << 10, 1 << 14, 1 << 16):
            torch.full((nbytes,), 0x7F, dtype=torch.uint8, device=DEVICE)

    for optimizer in (native, swapped):
        train(optimizer, 5, after_step=scribble)
    assert_same_training(native, swapped)
