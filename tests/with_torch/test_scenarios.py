"""The acceptance scenarios for Adam and AdamW on one device, under the names they were given.

A small model, trained natively and swapped from the same seed: losses, parameters and states are
the same bits, states are on the host between steps, and the device's peak is lower.
"""

from __future__ import annotations

import gc
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from device_under_test import DEVICE, IS_SIMULATED
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from training import (
    SWAP_CLASS, assert_same_bits, assert_same_training, noise, on_device, on_host, params_of,
)

from swap_adam import SwapOptimizerConfig, swap_optimizer

each_pipeline = pytest.mark.parametrize("packed", [True, False], ids=["packed", "per_tensor"])
STEPS = 6
BATCH = 8


class Model(nn.Module):
    """Linear layers with their biases and norms below min_numel: 0.8 MB of parameters."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(160, 160) for _ in range(8))
        self.norm = nn.LayerNorm(160)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(x))
        return self.norm(x)


Make = Callable[[nn.Module], Optimizer]


@dataclass
class Result:
    optimizer: Optimizer
    model: Model
    losses: list[float]
    peak_nbytes: int
    idle_nbytes: int


def train_step(model: Model, optimizer: Optimizer, step: int) -> float:
    x, target = (noise(0, i, torch.empty(BATCH, 160, device=DEVICE)) for i in range(2))
    x = x + 0.01 * noise(step, 2, x)
    optimizer.zero_grad()
    loss = (model(x) - target).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def run(make: Make, warm_up: int = 0) -> Result:
    """Trains and measures device memory from the first step on."""
    gc.collect()
    torch.ones(8, 8, device=DEVICE) @ torch.ones(8, 8, device=DEVICE)  # libraries' workspaces
    torch.accelerator.synchronize()
    memory = torch.get_device_module(DEVICE)
    start = memory.memory_allocated()
    model = Model().to(DEVICE)
    optimizer = make(model)
    torch.accelerator.synchronize()
    memory.reset_peak_memory_stats()
    losses = [train_step(model, optimizer, step) for step in range(warm_up, STEPS)]
    torch.accelerator.synchronize()
    peak = memory.max_memory_allocated() - start
    optimizer.zero_grad()
    return Result(optimizer, model, losses, peak, memory.memory_allocated() - start)


def states_nbytes(result: Result) -> int:
    return sum(
        value.numel() * value.element_size()
        for state in result.optimizer.state.values() for name, value in state.items()
        if name != "step" and value.numel() >= 1024
    )


def assert_aligned(native: Result, swapped: Result) -> None:
    assert native.losses == swapped.losses
    assert native.losses[-1] < native.losses[0]
    assert_same_training(native.optimizer, swapped.optimizer)


def assert_offloaded_and_smaller(native: Result, swapped: Result) -> None:
    """What is large enough is on the host, and the device saves those bytes: all of them
    between steps, all but the staging areas at the peak."""
    large = [param.numel() >= 1024 for param in params_of(swapped.optimizer)]
    assert [bool(names) for names in on_host(swapped.optimizer)] == large
    assert [not names for names in on_device(swapped.optimizer)] == large
    saved = states_nbytes(swapped)
    assert native.idle_nbytes - swapped.idle_nbytes == saved
    assert native.peak_nbytes - swapped.peak_nbytes >= 0.5 * saved


def config_of(packed: bool | None = None) -> SwapOptimizerConfig:
    return SwapOptimizerConfig(packed_swap=packed)


def compare(original: type[Optimizer], packed: bool, **options: Any) -> tuple[Result, Result]:
    native = run(lambda model: original(model.parameters(), **options))
    swapped = run(lambda model: swap_optimizer(
        original(model.parameters(), **options), config_of(packed)
    ))
    assert_aligned(native, swapped)
    assert_offloaded_and_smaller(native, swapped)
    constructed = run(lambda model: SWAP_CLASS[original](
        model.parameters(), **options, swap_config=config_of(packed)
    ))
    assert_aligned(native, constructed)
    assert_offloaded_and_smaller(native, constructed)
    return native, swapped


def assert_transfers(result: Result, packed: bool) -> None:
    """Each state by itself, or states back to back in common transfers."""
    if not IS_SIMULATED:
        return
    import swap_adam.simulator as simulator

    with simulator.record_operations() as operations:
        train_step(result.model, result.optimizer, STEPS)
    sizes = [op.nbytes for op in operations if op.kind == "copy_out" and op.nbytes > 8]
    assert sum(sizes) == states_nbytes(result)
    by_itself = sizes == [4 * 160 * 160] * 16
    assert by_itself == (not packed)


@each_pipeline
def test_torch_adam_swap_optimizer_parameter_align(packed: bool) -> None:
    compare(Adam, packed, lr=2e-3)


@each_pipeline
def test_torch_adamw_swap_optimizer_parameter_align(packed: bool) -> None:
    compare(AdamW, packed, lr=2e-3)


@each_pipeline
def test_torch_fused_adamw_swap_optimizer_parameter_align(packed: bool) -> None:
    _, swapped = compare(AdamW, packed, lr=2e-3, fused=True)
    assert_transfers(swapped, packed)


@each_pipeline
def test_torch_adamw_eager_state_swap_optimizer_parameter_align(packed: bool) -> None:
    """States exist before the conversion and are moved out by it, before the first step."""
    def eager(swapped: bool) -> Make:
        def make(model: nn.Module) -> Optimizer:
            optimizer = AdamW(model.parameters(), lr=2e-3)
            for param in model.parameters():
                optimizer.state[param] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }
            if swapped:
                memory = torch.get_device_module(DEVICE)
                before = memory.memory_allocated()
                swap_optimizer(optimizer, config_of(packed))
                large = sum(p.numel() for p in model.parameters() if p.numel() >= 1024)
                assert before - memory.memory_allocated() == 2 * 4 * large
                assert sum(map(bool, on_host(optimizer))) == 8
            return optimizer
        return make

    native, swapped = run(eager(swapped=False)), run(eager(swapped=True))
    assert_aligned(native, swapped)
    assert_offloaded_and_smaller(native, swapped)
    assert native.losses == run(lambda model: AdamW(model.parameters(), lr=2e-3)).losses


@each_pipeline
def test_torch_adam_amsgrad_swap_optimizer_parameter_align(packed: bool) -> None:
    native, swapped = compare(Adam, packed, lr=2e-3, amsgrad=True)
    assert on_host(swapped.optimizer)[0] == {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    assert states_nbytes(swapped) == 3 * 4 * 8 * 160 * 160


@each_pipeline
def test_torch_adam_swap_optimizer_multi_param_group_align(packed: bool) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        layers = list(model.layers)
        return [
            {"params": [p for layer in layers[:3] for p in layer.parameters()], "lr": 2e-3},
            {"params": [p for layer in layers[3:6] for p in layer.parameters()],
             "lr": 1e-3, "weight_decay": 0.1},
            {"params": [p for layer in layers[6:] for p in layer.parameters()],
             "lr": 4e-3, "betas": (0.8, 0.95)},
            {"params": list(model.norm.parameters()), "betas": (0.7, 0.9), "weight_decay": 0.01},
        ]

    calls: list[tuple[int, set[int], int]] = []

    def make(model: nn.Module) -> Optimizer:
        optimizer = swap_optimizer(Adam(groups(model)), config_of(packed))
        make_update = optimizer.make_update
        members = [set(map(id, group["params"])) for group in optimizer.param_groups]

        def spied_update() -> Any:
            update = make_update()
            update_group = update.update_group

            def spy(group_index: int, units: Any) -> None:
                owners = {id(unit.owner) for unit in units}
                assert owners <= members[group_index]
                calls.append((group_index, owners, sum(unit.numel for unit in units)))
                update_group(group_index, units)

            update.update_group = spy
            return update

        optimizer.make_update = spied_update
        return optimizer

    native = run(lambda model: Adam(groups(model)))
    swapped = run(make)
    assert_aligned(native, swapped)
    assert_offloaded_and_smaller(native, swapped)
    # Every call is of one group; the batches of all groups together cover every parameter once.
    assert {group_index for group_index, _, _ in calls} == {0, 1, 2, 3}
    assert len(calls) > 4 * STEPS
    swapped_numel = sum(p.numel() for p in params_of(swapped.optimizer) if p.numel() >= 1024)
    assert sum(numel for _, _, numel in calls) == STEPS * swapped_numel


def hyper_adamw(params: Any, **options: Any) -> Optimizer:
    from swap_adam.torch.hyper_adamw import HyperAdamW

    return HyperAdamW(params, **options)


@each_pipeline
@pytest.mark.parametrize("original", [Adam, AdamW, hyper_adamw], ids=lambda f: f.__name__)
def test_torch_adam_swap_optimizer_checkpoint_host_state(
    original: Callable[..., Optimizer], packed: bool
) -> None:
    """Saving brings nothing back to the device; loading leaves the states on the host; the next
    step fetches them and training goes on as if it had not been interrupted."""
    memory = torch.get_device_module(DEVICE)

    def make(model: nn.Module) -> Optimizer:
        return swap_optimizer(original(model.parameters(), lr=2e-3), config_of(packed))

    native = run(lambda model: original(model.parameters(), lr=2e-3))

    model = Model().to(DEVICE)
    optimizer = make(model)
    losses = [train_step(model, optimizer, step) for step in range(3)]
    torch.accelerator.synchronize()
    optimizer.zero_grad()

    # Saving
    held = memory.memory_allocated()
    memory.reset_peak_memory_stats()
    copies_in = count_copies_in()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    assert memory.memory_allocated() == memory.max_memory_allocated() == held
    assert count_copies_in() == copies_in
    del model, optimizer
    gc.collect()

    # Loading
    file.seek(0)
    saved = torch.load(file, map_location="cpu", weights_only=True)
    for entry in saved["optimizer"]["state"].values():
        assert entry["exp_avg"].device.type == "cpu"
        assert entry["exp_avg"].untyped_storage().nbytes() == 4 * entry["exp_avg"].numel()
    model = Model().to(DEVICE)
    model.load_state_dict(saved["model"])
    optimizer = make(model)
    torch.accelerator.synchronize()
    small = sum(  # what is not swapped, as accounted
        2 * -(-4 * param.numel() // 512) * 512
        for param in params_of(optimizer) if param.numel() < 1024
    )
    held = memory.memory_allocated()
    optimizer.load_state_dict(saved["optimizer"])
    torch.accelerator.synchronize()
    if IS_SIMULATED:
        assert memory.memory_allocated() == held + small
    large = [param.numel() >= 1024 for param in params_of(optimizer)]
    assert [bool(names) for names in on_host(optimizer)] == large
    for key, entry in saved["optimizer"]["state"].items():
        state = optimizer.state[params_of(optimizer)[key]]
        for name, value in entry.items():
            if isinstance(value, Tensor):
                assert_same_bits(value, state[name], f"{name} of {key}")

    # The next steps fetch the states
    copies_in = count_copies_in()
    losses += [train_step(model, optimizer, step) for step in range(3, STEPS)]
    if IS_SIMULATED:
        moved = 2 * 4 * sum(p.numel() for p in params_of(optimizer) if p.numel() >= 1024)
        inputs = 3 * 4 * BATCH * 160
        assert count_copies_in() - copies_in >= (STEPS - 3) * moved
        assert count_copies_in() - copies_in <= (STEPS - 3) * (moved + inputs + 4096)
    assert losses == native.losses
    assert_same_training(native.optimizer, optimizer)


def count_copies_in() -> int:
    """Bytes copied to the device so far; 0 where nobody counts them."""
    if not IS_SIMULATED:
        return 0
    import swap_adam.simulator as simulator

    return simulator.counters().copies_in_nbytes
