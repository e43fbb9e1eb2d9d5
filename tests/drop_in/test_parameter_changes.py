"""Parameters that change behind the optimizer's back, and parameters of every kind."""
from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from drop_in_parity import (
    DEVICE,
    IS_SIMULATED,
    Training,
    assert_same,
    assert_same_states,
    parameters_of,
    swapped_nbytes,
    training,
)
from torch import Tensor, nn
from torch.optim import Optimizer

from swap_adam import SwapOptimizerConfig
from swap_adam.swap import swap_of
from swap_adam.torch import SwapAdam, SwapAdamW
from swap_adam.torch.hyper_adamw import HyperAdamW, SwapHyperAdamW

CLASSES = [(torch.optim.Adam, SwapAdam), (torch.optim.AdamW, SwapAdamW),
           (HyperAdamW, SwapHyperAdamW)]
CONFIGS = [SwapOptimizerConfig(packed_swap=packed, swap_times=6) for packed in (True, False)]


def step_with(optimizer: Optimizer, index: int) -> None:
    """A step with gradients that depend on the parameters' order and shapes only."""
    generator = torch.Generator().manual_seed(index)
    for param in parameters_of(optimizer):
        if not param.requires_grad:
            continue
        values = torch.randn(param.shape, generator=generator, dtype=torch.float32)
        grad = torch.empty_like(param, memory_format=torch.preserve_format)
        with torch.no_grad():
            param.grad = grad.copy_(values.to(param.dtype))
    optimizer.step()


def lists(native_class, swap_class, config, make: Callable[[], list[Tensor]], **options):
    """The two optimizers, each over its own parameters."""
    return (
        native_class(make(), **{"lr": 1e-2, **options}),
        swap_class(make(), swap_config=config, **{"lr": 1e-2, **options}),
    )


def assert_same_lists(native: Optimizer, swapped: Optimizer) -> None:
    for param, other in zip(parameters_of(native), parameters_of(swapped), strict=True):
        assert param.stride() == other.stride()
        assert torch.equal(param, other)
    assert_same_states(native, swapped)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return nn.Parameter(torch.linspace(-1, 1, max(1, torch.Size(shape).numel()))[
        :torch.Size(shape).numel()].reshape(shape).to(DEVICE, dtype))


def replace_rows(optimizer: Optimizer, change: Callable[[Tensor], Tensor]) -> None:
    """What gaussian splatting does: a new parameter, its state sliced and re-keyed."""
    group = optimizer.param_groups[0]
    for position, param in enumerate(group["params"]):
        if param.dim() < 2:
            continue
        stored = optimizer.state.pop(param)
        for name in stored:
            if name != "step":
                stored[name] = change(stored[name])
        new = nn.Parameter(change(param.detach()))
        group["params"][position] = new
        optimizer.state[new] = stored


def prune(tensor: Tensor) -> Tensor:
    return tensor[::2].contiguous()


def grow(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, torch.zeros_like(tensor[:100])])


@pytest.mark.parametrize("native_class, swap_class", CLASSES)
@pytest.mark.parametrize("config", CONFIGS)
def test_prune_and_grow_with_rekeyed_states(native_class, swap_class, config) -> None:
    native, swapped = lists(
        native_class, swap_class, config, lambda: [leaf(200, 40), leaf(30), leaf(300, 20)]
    )
    for index, change in enumerate([grow, prune, prune, grow, prune, grow]):
        for optimizer in (native, swapped):
            step_with(optimizer, index)
            replace_rows(optimizer, change)
        assert_same_lists(native, swapped)
    for optimizer in (native, swapped):
        step_with(optimizer, 7)
    assert_same_lists(native, swapped)
    big = [p for p in parameters_of(swapped) if p.dim() == 2]
    assert swapped_nbytes(swapped) == sum(2 * 4 * p.numel() for p in big)


def test_pruning_frees_the_memory_of_what_went(simulator, request) -> None:
    if "SWAP_ADAM_TEST_ALONE" not in os.environ:
        # In a process of its own: the optimizers of other tests share its pool and host cache.
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, f"{__file__}::{request.node.name}"], cwd=request.config.rootpath,
            env={**os.environ, "SWAP_ADAM_TEST_ALONE": "1"}, capture_output=True, text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "1 passed" in done.stdout
        return
    # Slabs of 64 to 1 MiB; waste below 1 MiB is not worth a repack.
    gc.collect()
    torch.get_device_module("simulated").host_empty_cache()  # of what other tests have left there
    baseline = simulator.pinned_nbytes()
    optimizer = SwapAdamW([leaf(1 << 12, 1 << 10), leaf(1 << 10, 1 << 10)], lr=1e-2)
    step_with(optimizer, 0)
    before = simulator.pinned_nbytes() - baseline
    for index in range(4):
        replace_rows(optimizer, prune)
        for param in parameters_of(optimizer):
            param.grad = None
        step_with(optimizer, index + 1)
    swapped = swapped_nbytes(optimizer)
    assert swapped == 2 * 4 * (5 << 20) // 16
    pinned = simulator.pinned_nbytes() - baseline
    assert pinned <= swapped + (1 << 20) and pinned < before / 4
    assert len(swap_of(optimizer).units) == 2  # nothing remembers the parameters that went


@pytest.mark.parametrize("native_class, swap_class", CLASSES[:2])
@pytest.mark.parametrize("config", CONFIGS)
def test_states_the_user_deletes_replaces_or_fills(native_class, swap_class, config) -> None:
    native, swapped = lists(native_class, swap_class, config, lambda: [leaf(64, 64), leaf(2000)])
    for index in range(6):
        for optimizer in (native, swapped):
            step_with(optimizer, index)
            first, second = parameters_of(optimizer)
            if index == 0:
                del optimizer.state[first]
            elif index == 1:
                optimizer.state[first]["exp_avg"].zero_()
            elif index == 2:
                old = optimizer.state[second]["exp_avg_sq"]
                optimizer.state[second]["exp_avg_sq"] = torch.full_like(old, 0.25)
            elif index == 3:
                optimizer.state.clear()
            elif index == 4:
                optimizer.state[second]["mine"] = "kept"
        assert_same_lists(native, swapped)


@pytest.mark.parametrize("native_class, swap_class", CLASSES)
@pytest.mark.parametrize("config", CONFIGS)
def test_data_replaced(native_class, swap_class, config) -> None:
    native, swapped = lists(native_class, swap_class, config, lambda: [leaf(64, 64), leaf(2000)])
    for index in range(4):
        for optimizer in (native, swapped):
            step_with(optimizer, index)
            first, second = parameters_of(optimizer)
            if index == 0:
                first.data = torch.ones_like(first)
            elif index == 1:
                second.data = second.data * 2
            elif index == 2:
                first.data = torch.ones(64, 64, device=DEVICE).t()
    assert_same_lists(native, swapped)
    assert swapped_nbytes(swapped) > 0


@pytest.mark.parametrize("native_class, swap_class", CLASSES[:2])
@pytest.mark.parametrize("config", CONFIGS)
def test_frozen_and_unfrozen_and_groups_added(native_class, swap_class, config) -> None:
    native, swapped = training(native_class), training(swap_class, swap_config=config)
    for index in range(10):
        losses = []
        for run in (native, swapped):
            layers = [layer for layer in run.model if isinstance(layer, nn.Linear)]
            layers[0].requires_grad_(index not in (0, 1, 5, 6))
            layers[1].requires_grad_(index != 3)
            if index == 5:
                extra = leaf(64, 64)
                run.optimizer.add_param_group({"params": [extra], "lr": 1e-3})
                extra.grad = torch.ones_like(extra)
            losses.append(run.train(1))
        assert losses[0] == losses[1]
        assert_same(native, swapped)
    assert swapped_nbytes(swapped.optimizer) > 0


def test_no_gradient_at_all_and_then_some() -> None:
    native, swapped = training(torch.optim.AdamW), training(SwapAdamW)
    for run in (native, swapped):
        run.optimizer.step()
        assert not run.optimizer.state
        run.train(1)
        run.optimizer.zero_grad()
        run.optimizer.step()
        run.train(1)
    assert_same(native, swapped)


@pytest.mark.parametrize("native_class, swap_class", CLASSES)
@pytest.mark.parametrize("config", CONFIGS)
def test_moved_from_the_cpu_to_the_device_and_back(native_class, swap_class, config) -> None:
    # Module.to() moves the parameters and leaves the states. The original then fails, or, where
    # the user moves the states too, goes on; so do we.
    native, swapped = training(native_class), training(swap_class, swap_config=config)
    for run in (native, swapped):
        run.train(2)
        run.model.to("cpu")
        run.optimizer.load_state_dict(run.optimizer.state_dict())
    assert_same(native, swapped)
    for optimizer in (native.optimizer, swapped.optimizer):
        for param in parameters_of(optimizer):
            for name, value in optimizer.state[param].items():
                assert value.device.type == "cpu"
    for optimizer in (native.optimizer, swapped.optimizer):
        step_with(optimizer, 0)
    assert_same(native, swapped)
    for run in (native, swapped):
        run.model.to(DEVICE)
        run.optimizer.load_state_dict(run.optimizer.state_dict())
        step_with(run.optimizer, 1)
    assert_same(native, swapped)
    assert native.train(2) == swapped.train(2)
    assert_same(native, swapped)
    assert swapped_nbytes(swapped.optimizer) > 0


def test_moved_before_the_first_step() -> None:
    runs = []
    for optimizer_class in (torch.optim.AdamW, SwapAdamW):
        run = training(optimizer_class)
        run.model.to("cpu").to(DEVICE)
        run.train(2)
        runs.append(run)
    assert_same(*runs)
    assert swapped_nbytes(runs[1].optimizer) > 0


@pytest.mark.skipif(not IS_SIMULATED, reason="needs two devices; the simulated device has two")
def test_moved_to_another_device(simulator) -> None:
    def move(run: Training) -> None:
        run.model.to("simulated:1")
        run.optimizer.load_state_dict(run.optimizer.state_dict())

    native, swapped = training(torch.optim.AdamW), training(SwapAdamW)
    native.train(2), swapped.train(2)
    move(native), move(swapped)
    for index in range(2):
        step_with(native.optimizer, index)
        step_with(swapped.optimizer, index)
    assert_same(native, swapped)
    for param in parameters_of(swapped.optimizer):
        assert param.device == torch.device("simulated:1")
    assert swapped_nbytes(swapped.optimizer) > 0


@pytest.mark.skipif(not IS_SIMULATED, reason="needs two devices; the simulated device has two")
@pytest.mark.parametrize("config", CONFIGS)
def test_parameters_on_two_devices_and_the_cpu(config) -> None:
    def make() -> list[Tensor]:
        return [nn.Parameter(torch.ones(50, 60, device=device))
                for device in ("simulated:0", "simulated:1", "cpu", "simulated:1", "simulated:0")]

    native, swapped = lists(torch.optim.AdamW, SwapAdamW, config, make)
    for index in range(3):
        step_with(native, index), step_with(swapped, index)
    assert_same_lists(native, swapped)
    assert swapped_nbytes(swapped) == 4 * 2 * 3000 * 4


@pytest.mark.parametrize("native_class, swap_class", CLASSES[:2])
@pytest.mark.parametrize("config", CONFIGS)
def test_tied_and_duplicate_parameters(native_class, swap_class, config) -> None:
    def tied() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 64))
        model[2].weight = model[1].weight
        return model.to(DEVICE)

    native, swapped = training(native_class, tied), training(swap_class, tied, swap_config=config)
    assert native.train(3) == swapped.train(3)
    assert_same(native, swapped)

    with pytest.warns(UserWarning, match="duplicate parameters"):
        native, swapped = lists(
            native_class, swap_class, config, lambda: [shared := leaf(50, 60), leaf(2000), shared]
        )
    for index in range(3):
        step_with(native, index), step_with(swapped, index)
    assert_same_lists(native, swapped)
    with pytest.raises(ValueError, match="more than one parameter group"):
        swapped.add_param_group({"params": [swapped.param_groups[0]["params"][0]]})


KINDS: dict[str, Callable[[], list[Tensor]]] = {
    "0-dim": lambda: [leaf(), leaf(64, 64), leaf()],
    "empty": lambda: [leaf(0), leaf(64, 64), leaf(0, 5)],
    "complex": lambda: [
        nn.Parameter(torch.randn(
            40, 50, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)
        ).to(DEVICE)), leaf(64, 64),
    ],
    "channels_last": lambda: [
        nn.Parameter(torch.linspace(-1, 1, 8 * 16 * 5 * 5, device=DEVICE).reshape(8, 16, 5, 5)
                     .contiguous(memory_format=torch.channels_last)), leaf(64, 64),
    ],
    "transposed": lambda: [nn.Parameter(leaf(80, 60).detach().t()), leaf(64, 64)],
    "float64": lambda: [leaf(40, 50, dtype=torch.float64), leaf(64, 64)],
    "bfloat16": lambda: [leaf(40, 50, dtype=torch.bfloat16), leaf(64, 64)],
    "a view of a larger tensor": lambda: [
        nn.Parameter(torch.linspace(0, 1, 9000, device=DEVICE)[100:4100].view(40, 100)),
    ],
    "strided with gaps": lambda: [
        nn.Parameter(torch.linspace(0, 1, 8000, device=DEVICE).view(80, 100)[:, ::2]),
    ],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("native_class, swap_class, options", [
    (torch.optim.Adam, SwapAdam, {}),
    (torch.optim.AdamW, SwapAdamW, {"foreach": False, "amsgrad": True}),
    (torch.optim.AdamW, SwapAdamW, {"fused": True}),
    (HyperAdamW, SwapHyperAdamW, {}),
])
@pytest.mark.parametrize("config", CONFIGS)
def test_parameters_of_every_kind(kind, native_class, swap_class, options, config) -> None:
    errors = []
    optimizers = lists(native_class, swap_class, config, KINDS[kind], **options)
    for index in range(3):
        for optimizer in optimizers:
            try:
                step_with(optimizer, index)
            except (RuntimeError, NotImplementedError) as error:
                errors.append((type(error), str(error).splitlines()[0]))
    # Where the original cannot, neither can we, with its words.
    if errors:
        assert len(errors) % 2 == 0 and errors[0] == errors[1]
        return
    assert_same_lists(*optimizers)
    if kind != "complex":
        assert swapped_nbytes(optimizers[1]) > 0


@pytest.mark.parametrize("native_class, swap_class", CLASSES)
def test_gradients_in_another_layout_than_the_parameter(native_class, swap_class) -> None:
    native, swapped = lists(native_class, swap_class, CONFIGS[0], lambda: [leaf(64, 96)])
    for index in range(3):
        for optimizer in (native, swapped):
            grads = torch.linspace(-1, 1, 3 * 64 * 96, device=DEVICE)
            param, = parameters_of(optimizer)
            param.grad = [
                grads[:64 * 96].view(96, 64).t(), grads[:96].expand(64, 96),
                grads.view(64, 288)[:, ::3],
            ][index]
            optimizer.step()
        assert_same_lists(native, swapped)


@pytest.mark.parametrize("native_class, swap_class", CLASSES)
def test_a_sparse_gradient_is_the_originals_error_and_changes_nothing(
    native_class, swap_class
) -> None:
    # On the CPU: the simulated device has no sparse tensors.
    def make() -> list[Tensor]:
        return [nn.Parameter(torch.ones(40, 50)), nn.Parameter(torch.ones(3000))]

    native, swapped = lists(native_class, swap_class, None, make)
    messages = []
    for optimizer in (native, swapped):
        step_with(optimizer, 0)
        before = [param.clone() for param in parameters_of(optimizer)]
        param = next(parameters_of(optimizer))
        param.grad = torch.ones(40, 50).to_sparse()
        with pytest.raises(RuntimeError) as error:
            optimizer.step()
        messages.append(str(error.value))
        assert all(map(torch.equal, before, parameters_of(optimizer)))
        param.grad = None
        step_with(optimizer, 1)
    assert messages[0] == messages[1].splitlines()[0]
    assert_same_lists(native, swapped)
