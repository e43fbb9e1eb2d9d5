"""Public reports about steps of such optimizers, each as what the user would lose.

The numbers are the rows of the project's list of reports; the names say where they come from.
Row 36 (memory of a deleted optimizer) is test_lifetime.py.
"""
from __future__ import annotations

import random

import pytest
import torch
from drop_in_parity import (
    DEVICE,
    Training,
    assert_same,
    batch,
    loss_of,
    parameters_of,
    small_model,
    swapped_nbytes,
    training,
)
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from swap_adam import SwapOptimizerConfig, swap_optimizer
from swap_adam.torch import SwapAdam, SwapAdamW
from swap_adam.torch.hyper_adamw import HyperAdamW, SwapHyperAdamW

CLASSES = [(torch.optim.Adam, SwapAdam), (torch.optim.AdamW, SwapAdamW),
           (HyperAdamW, SwapHyperAdamW)]
CONFIGS = [SwapOptimizerConfig(packed_swap=packed, swap_times=20) for packed in (True, False)]


@pytest.mark.parametrize("native_class, swap_class", CLASSES)
@pytest.mark.parametrize("converted", [True, False])
def test_4_hooks_fire_once_per_step_and_see_the_update(
    native_class, swap_class, converted
) -> None:
    # pytorch#88446, #89176, torchtitan#851.
    native = training(native_class)
    swapped = training(native_class if converted else swap_class)
    if converted:
        swap_optimizer(swapped.optimizer, CONFIGS[0])
    calls: dict[int, list[str]] = {id(run.optimizer): [] for run in (native, swapped)}
    seen: dict[int, list[torch.Tensor]] = {key: [] for key in calls}

    def hook(name: str):
        def call(optimizer, args, kwargs):
            calls[id(optimizer)].append(name)
            seen[id(optimizer)] += [param.detach().clone() for param in parameters_of(optimizer)]
        return call

    handles = [register_optimizer_step_pre_hook(hook("global pre")),
               register_optimizer_step_post_hook(hook("global post"))]
    try:
        for run in (native, swapped):
            run.optimizer.register_step_pre_hook(hook("pre"))
            run.optimizer.register_step_post_hook(hook("post"))
            run.train(2)
    finally:
        for handle in handles:
            handle.remove()
    mine, theirs = calls.values()
    assert mine == theirs and len(mine) == 8
    assert all(map(torch.equal, *seen.values()))


@pytest.mark.parametrize("packed", [True, False])
def test_5_the_closure_is_run_once_first_and_with_gradients(packed: bool) -> None:
    # sam#91, Lightning#2785, #18268: skipped, late, under no_grad, or once per batch.
    config = SwapOptimizerConfig(allow_closure=True, swap_times=20, packed_swap=packed)
    native, swapped = training(torch.optim.AdamW), training(SwapAdamW, swap_config=config)
    calls = []
    for index in range(3):
        returned = []
        for run in (native, swapped):
            def closure(run=run) -> torch.Tensor:
                calls.append((run is swapped, torch.is_grad_enabled()))
                run.optimizer.zero_grad()
                loss = loss_of(run.model, index)
                loss.backward()
                return loss
            with torch.no_grad():
                returned.append(run.optimizer.step(closure))
        assert torch.equal(*returned)
    assert calls == [(False, True), (True, True)] * 3
    assert_same(native, swapped)


def test_5_a_closure_that_is_not_allowed_changes_nothing() -> None:
    native, swapped = training(torch.optim.AdamW), training(SwapAdamW)
    native.train(1), swapped.train(1)
    calls = []
    with pytest.raises(ValueError, match="allow_closure=True"):
        swapped.optimizer.step(lambda: calls.append("called"))
    assert calls == []
    assert_same(native, swapped)


@pytest.mark.parametrize("native_class, swap_class", CLASSES[:2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("config", CONFIGS)
def test_13_moments_of_the_users_own_dtype_are_kept(
    native_class, swap_class, dtype, config
) -> None:
    # torchtitan#2732, #4615: a pre-hook makes bf16 moments, so that lazy init is skipped.
    # The for-loop takes mixed dtypes; where the original fails, so do we.
    def make_states(optimizer, args, kwargs) -> None:
        for param in parameters_of(optimizer):
            if not optimizer.state[param]:
                optimizer.state[param].update(
                    step=torch.tensor(0.0),
                    exp_avg=torch.zeros_like(param, dtype=dtype),
                    exp_avg_sq=torch.zeros_like(param, dtype=dtype),
                )

    errors = []
    native = training(native_class, foreach=False)
    swapped = training(swap_class, foreach=False, swap_config=config)
    for run in (native, swapped):
        run.optimizer.register_step_pre_hook(make_states)
        try:
            run.train(3)
        except RuntimeError as error:
            errors.append(str(error).splitlines()[0])
    assert len(errors) in (0, 2)
    if errors:
        assert errors[0] == errors[1]
        return
    assert_same(native, swapped)
    assert swapped.optimizer.state[swapped.model[0].weight]["exp_avg"].dtype == dtype
    assert swapped_nbytes(swapped.optimizer) > 0


@pytest.mark.parametrize("native_class, swap_class", CLASSES)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("seed", range(3))
def test_15_gradients_that_come_and_go_and_groups_added(
    native_class, swap_class, config, seed
) -> None:
    # pytorch_optimizer#462, pytorch#53712.
    native, swapped = training(native_class), training(swap_class, swap_config=config)
    for index in range(10):
        for run in (native, swapped):
            choose = random.Random(100 * seed + index)
            if index == 5:
                extra = nn.Parameter(torch.linspace(0, 1, 4000, device=DEVICE).view(50, 80))
                run.optimizer.add_param_group({"params": [extra], "lr": 0.1})
            for position, param in enumerate(parameters_of(run.optimizer)):
                param.requires_grad_(position != 3 or index > 6)  # frozen, then not
                present = choose.random() < 0.5 and index != 7  # a step with no gradient at all
                param.grad = None
                if present and param.requires_grad:
                    param.grad = torch.full_like(param, 0.1 * (index + position + 1))
            run.optimizer.step()
        assert_same(native, swapped)
    assert swapped_nbytes(swapped.optimizer) > 0


@pytest.mark.parametrize("native_class, swap_class", CLASSES)
@pytest.mark.parametrize("packed", [True, False])
def test_20_the_stream_that_step_is_called_under_is_the_one_that_counts(
    native_class, swap_class, packed
) -> None:
    # torchtune#1867, trl#7195, pytorch#180665: a stream cached at construction; a buffer freed
    # while a copy still read it. 200 rounds, memory overwritten right after each.
    config = SwapOptimizerConfig(packed_swap=packed)
    native, swapped = training(native_class), training(swap_class, swap_config=config)
    module = torch.get_device_module(DEVICE)
    streams = [torch.Stream(device=torch.device(DEVICE, 0)) for _ in range(2)]
    for index in range(100):
        for run in (native, swapped):
            stream = streams[index % 2]
            stream.wait_stream(module.current_stream())
            with stream:
                loss_of(run.model, index % 4).backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
                # Whoever gets the staging memory next overwrites it.
                torch.full((4096,), float("nan"), device=DEVICE)
            module.current_stream().wait_stream(stream)
            torch.full((4096,), float("nan"), device=DEVICE)
            loss_of(run.model, index % 4).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
    assert_same(native, swapped)


@pytest.mark.parametrize("native_class, swap_class", CLASSES)
@pytest.mark.parametrize("how", ["load_state_dict", "data", "copy_"])
def test_25_weights_loaded_after_the_optimizer_was_built_are_the_ones_that_train(
    native_class, swap_class, how
) -> None:
    # Megatron-Bridge#4082, Megatron-LM#5071: overwritten from cached copies.
    weights = small_model()
    for param in weights.parameters():
        param.data.mul_(3)
    runs = [training(native_class), training(swap_class)]
    for moment in range(2):
        for run in runs:
            for param, new in zip(run.model.parameters(), weights.parameters()):
                if how == "data":
                    param.data = new.detach().clone()
                elif how == "copy_":
                    with torch.no_grad():
                        param.copy_(new)
            if how == "load_state_dict":
                run.model.load_state_dict(weights.state_dict())
            run.train(2)
        assert_same(*runs)


def test_27_waits_do_not_grow_with_the_number_of_parameters(simulator) -> None:
    # Lightning#19955, prime-rl#3258, pytorch#128208: a sync per parameter.
    waits = {}
    for count in (4, 40):
        params = [nn.Parameter(torch.ones(40, 50, device=DEVICE)) for _ in range(count)]
        optimizer = SwapAdamW(params, lr=torch.tensor(1e-2), swap_config=CONFIGS[0])
        for index in range(3):
            for param in params:
                param.grad = torch.ones_like(param)
            torch.simulated.synchronize()
            simulator.reset_counters()
            with simulator.record_operations() as operations:
                optimizer.step()
            copies = [op for op in operations if op.name == "aten::_local_scalar_dense"]
            waits[count] = (len(copies), simulator.counters().host_waits)
    assert waits[4] == waits[40]


@pytest.mark.parametrize("config", CONFIGS)
def test_27_real_scalar_parameters_are_right(config) -> None:
    def make() -> list[nn.Parameter]:
        return [nn.Parameter(torch.tensor(0.5, device=DEVICE)),
                nn.Parameter(torch.ones(40, 50, device=DEVICE))]

    native = torch.optim.AdamW(make(), lr=0.1)
    swapped = SwapAdamW(make(), lr=0.1, swap_config=config)
    for index in range(3):
        for optimizer in (native, swapped):
            for param in parameters_of(optimizer):
                param.grad = torch.full_like(param, 0.5 + index)
            optimizer.step()
    assert all(map(torch.equal, parameters_of(native), parameters_of(swapped)))


@pytest.mark.parametrize("options", [{"foreach": None}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("shape", [(64, 128, 64), (1, 1024, 512)])
def test_28_temporaries_are_not_as_large_as_the_parameters(options, shape, simulator) -> None:
    # pytorch#97712, verl#2556; also with one parameter that is larger than a batch.
    count, rows, columns = shape
    params = [nn.Parameter(torch.ones(rows, columns, device=DEVICE)) for _ in range(count)]
    config = SwapOptimizerConfig(swap_times=16)
    optimizer = SwapAdamW(params, lr=1e-2, swap_config=config, **options)
    for param in params:
        param.grad = torch.ones_like(param)
    for _ in range(2):
        optimizer.step()
        torch.simulated.synchronize()
        torch.simulated.reset_peak_memory_stats()
    held = simulator.memory_held()
    optimizer.step()
    peak = simulator.max_memory_held() - held
    states = swapped_nbytes(optimizer)
    assert states == 8 * count * rows * columns
    # Two batches of two states, and temporaries of the batch: two parameters' worth.
    assert peak <= 2 * states / 16 + 2 * states / 16 + 64 * 1024


def test_29_host_memory_is_not_rounded_up_to_twice(simulator) -> None:
    # pytorch#95823, #171662, vllm#56410: pinned blocks are powers of two.
    for numel, count in ((int(1.1 * 2**16), 40), (int(1.1 * 2**18), 12), (3 * 2**14 + 7, 50)):
        before = simulator.pinned_nbytes()
        params = [nn.Parameter(torch.ones(numel, device=DEVICE)) for _ in range(count)]
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer = SwapAdamW(params)
        optimizer.step()
        assert simulator.pinned_nbytes() - before <= 1.05 * swapped_nbytes(optimizer)


@pytest.mark.parametrize("native_class, swap_class", CLASSES)
@pytest.mark.parametrize("config", CONFIGS)
def test_35_a_model_that_moves_after_the_optimizer_was_built_is_never_stale(
    native_class, swap_class, config
) -> None:
    # pytorch#2830, #41839, Lightning#19225. The original goes on once it has loaded its states
    # again, and fails on states that were left behind, and so do we.
    def step(run: Training, index: int) -> None:
        for param in run.model.parameters():
            param.grad = torch.full_like(param, 0.1 * (index + 1))
        run.optimizer.step()

    native, swapped = training(native_class), training(swap_class, swap_config=config)
    for index, device in enumerate(["cpu", DEVICE, "cpu", DEVICE, DEVICE]):
        for run in (native, swapped):
            run.model.to(device)
            run.optimizer.load_state_dict(run.optimizer.state_dict())
            step(run, index)
        assert_same(native, swapped)
    assert swapped_nbytes(swapped.optimizer) > 0
    for run in (native, swapped):
        run.model.to("cpu")
        with pytest.raises(RuntimeError, match="same device"):
            step(run, 5)


@pytest.mark.parametrize("native_class, swap_class", CLASSES)
@pytest.mark.parametrize("config", CONFIGS)
def test_38_elements_stay_in_their_place_whatever_the_strides(
    native_class, swap_class, config
) -> None:
    # physicsnemo#1614, trl#7195: channels_last or transposed tensors copied in storage order.
    def make_model() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 32, 3), nn.Conv2d(32, 16, 3), nn.Flatten(),
                              nn.Linear(16, 64))
        model[3].weight = nn.Parameter(model[3].weight.detach().t().contiguous().t())
        return model.to(DEVICE).to(memory_format=torch.channels_last)

    native = training(native_class, make_model)
    swapped = training(swap_class, make_model, swap_config=config)
    for index in range(3):
        for run in (native, swapped):
            run.optimizer.zero_grad()
            images = batch(index, 50)[:4].view(4, 2, 5, 5)
            run.model(images.contiguous(memory_format=torch.channels_last)).pow(2).mean().backward()
            run.optimizer.step()
    assert_same(native, swapped)
    conv = swapped.model[1].weight
    assert swapped.optimizer.state[conv]["exp_avg"].stride() == conv.stride()
    assert conv.is_contiguous(memory_format=torch.channels_last)
    assert swapped_nbytes(swapped.optimizer) > 0
