"""Mixed precision with loss scaling, clipping, and accumulation."""
from __future__ import annotations

import pytest
import torch
from drop_in_parity import (
    DEVICE,
    Training,
    assert_same,
    assert_same_states,
    batch,
    small_model,
    swapped_nbytes,
    training,
)

from swap_adam import SwapOptimizerConfig, swap_optimizer
from swap_adam.torch import SwapAdam, SwapAdamW
from swap_adam.torch.hyper_adamw import HyperAdamW, SwapHyperAdamW


class Scaled:
    """One training with a GradScaler; gradients overflow in the steps told."""

    def __init__(self, run: Training, infinite: set[int], clip: bool) -> None:
        self.run, self.infinite, self.clip = run, infinite, clip
        self.scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=2)

    def train(self, steps: int) -> list[float]:
        run, losses = self.run, []
        for _ in range(steps):
            run.optimizer.zero_grad()
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                loss = run.model(batch(run.done)).float().pow(2).mean()
            self.scaler.scale(loss).backward()
            if run.done in self.infinite:
                next(run.model.parameters()).grad[0, 0] = float("inf")
            if self.clip:
                self.scaler.unscale_(run.optimizer)
                torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
            self.scaler.step(run.optimizer)
            self.scaler.update()
            losses.append(loss.item())
            run.done += 1
        return losses


@pytest.mark.parametrize("native_class, swap_class, options", [
    (torch.optim.Adam, SwapAdam, {}),
    (torch.optim.AdamW, SwapAdamW, {"foreach": False}),
    (torch.optim.AdamW, SwapAdamW, {"fused": True}),
    (torch.optim.AdamW, SwapAdamW, {"fused": True, "amsgrad": True}),
    (HyperAdamW, SwapHyperAdamW, {}),
])
@pytest.mark.parametrize("infinite", [set(), {0}, {1, 2}, {0, 1, 2, 3, 4}])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("packed", [True, False])
def test_a_step_with_an_inf_is_skipped_and_counts_for_nothing(
    native_class, swap_class, options, infinite, clip, packed
) -> None:
    config = SwapOptimizerConfig(packed_swap=packed, swap_times=7)
    native = Scaled(training(native_class, **options), infinite, clip)
    swapped = Scaled(training(swap_class, swap_config=config, **options), infinite, clip)
    assert native.train(5) == swapped.train(5)
    assert native.scaler.state_dict() == swapped.scaler.state_dict()
    assert_same(native.run, swapped.run)
    for param in swapped.run.model.parameters():
        state = swapped.run.optimizer.state.get(param)
        if state and "step" in state:
            assert state["step"].item() == 5 - len(infinite)
    assert native.run.done == 5
    if infinite != {0, 1, 2, 3, 4} or options.get("fused"):
        assert swapped_nbytes(swapped.run.optimizer) > 0


def test_fused_gradients_that_are_shared_with_a_scaler_stay_as_the_originals_leave_them() -> None:
    # The fused update writes the unscaled gradients back, also those of a tensor that is cut.
    grads = []
    for optimizer_class in (torch.optim.AdamW, SwapAdamW):
        scaled = Scaled(training(optimizer_class, fused=True), {1}, clip=False)
        seen = []
        for _ in range(3):
            scaled.train(1)
            seen.extend(param.grad.cpu() for param in scaled.run.model.parameters())
        grads.append(seen)
    assert all(torch.equal(native, swapped) for native, swapped in zip(*grads))


@pytest.mark.parametrize("fused", [False, True])
def test_converted_between_two_scaled_steps(fused: bool) -> None:
    native, swapped = (
        Scaled(training(torch.optim.AdamW, fused=fused), {1, 4}, clip=False) for _ in range(2)
    )
    assert native.train(3) == swapped.train(3)
    swap_optimizer(swapped.run.optimizer)
    assert native.train(3) == swapped.train(3)
    assert_same(native.run, swapped.run)
    assert not hasattr(swapped.run.optimizer, "found_inf")


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("clip", ["norm", "value", "none"])
@pytest.mark.parametrize("packed", [True, False])
def test_accumulation_and_clipping(set_to_none: bool, clip: str, packed: bool) -> None:
    native = training(torch.optim.AdamW)
    swapped = training(SwapAdamW, swap_config=SwapOptimizerConfig(packed_swap=packed))
    for index in range(9):
        for run in (native, swapped):
            run.model(batch(index)).pow(2).mean().backward()
            if index % 3 == 2:
                if clip == "norm":
                    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)
                elif clip == "value":
                    torch.nn.utils.clip_grad_value_(run.model.parameters(), 1e-3)
                run.optimizer.step()
                run.optimizer.zero_grad(set_to_none=set_to_none)
    assert_same(native, swapped)
    assert swapped_nbytes(swapped.optimizer) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters(dtype: torch.dtype) -> None:
    def make_model() -> torch.nn.Module:
        return small_model().to(dtype)

    native = training(torch.optim.AdamW, make_model, eps=1e-3)
    swapped = training(SwapAdamW, make_model, eps=1e-3)
    for index in range(3):
        for run in (native, swapped):
            run.optimizer.zero_grad()
            run.model(batch(index).to(dtype)).float().pow(2).mean().backward()
            run.optimizer.step()
    assert_same(native, swapped)
    assert swapped_nbytes(swapped.optimizer) > 0


def test_a_step_in_the_backward_pass() -> None:
    # One optimizer per parameter, stepping in a hook: torch's optimizer-in-backward recipe.
    models = []
    for optimizer_class in (torch.optim.AdamW, SwapAdamW):
        model = small_model()
        optimizers = {param: optimizer_class([param], lr=1e-2) for param in model.parameters()}

        def step(param: torch.Tensor, optimizers=optimizers) -> None:
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step)
        for index in range(3):
            model(batch(index)).pow(2).mean().backward()
        models.append((model, optimizers))
    (native, native_optimizers), (swapped, optimizers) = models
    for param, other in zip(native.parameters(), swapped.parameters()):
        assert torch.equal(param, other)
        assert_same_states(native_optimizers[param], optimizers[other])
    assert sum(map(swapped_nbytes, optimizers.values())) > 0
