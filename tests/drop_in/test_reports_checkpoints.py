"""Public reports about checkpoints of such optimizers, each as what the user would lose.

The numbers are the rows of the project's list of reports; the names say where they come from.
"""
from __future__ import annotations

import gc
import io
import itertools
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from drop_in_parity import (
    DEVICE,
    Training,
    assert_same,
    assert_same_states,
    assert_same_tree,
    cpu_copy,
    loss_of,
    parameters_of,
    small_model,
    swapped_nbytes,
    training,
)
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from swap_adam import SwapOptimizerConfig, swap_optimizer, unswap_optimizer
from swap_adam.torch import SwapAdam, SwapAdamW
from swap_adam.torch.hyper_adamw import HyperAdamW, SwapHyperAdamW

CLASSES = [(torch.optim.Adam, SwapAdam), (torch.optim.AdamW, SwapAdamW),
           (HyperAdamW, SwapHyperAdamW)]


def saved(optimizer: torch.optim.Optimizer, **load_options: Any) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True, **load_options)


def take_over_weights(run: Training, other: Training) -> None:
    run.model.load_state_dict(cpu_copy(other.model.state_dict()))
    run.done = other.done


@pytest.mark.parametrize("packed", [True, False])
def test_3_the_last_update_is_in_a_checkpoint_that_is_written_at_once(packed, simulator) -> None:
    # prime-rl#3109, Megatron-LM#833: copies out were in flight when state_dict returned.
    def wide() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(32, 4096), torch.nn.Linear(4096, 4)).to(DEVICE)

    costs = simulator.LINKS["pcie4"]
    slow = {"copy_out_gb_per_s": 0.01, "copy_in_gb_per_s": 0.01}
    simulator.configure(costs=simulator.Costs(**{**vars(costs), **slow}))
    config = SwapOptimizerConfig(packed_swap=packed)
    native = training(torch.optim.AdamW, wide)
    swapped = training(SwapAdamW, wide, swap_config=config)
    native.train(2), swapped.train(2)
    for run in (native, swapped):
        run.optimizer.zero_grad()
        loss_of(run.model, 9).backward()
        run.optimizer.step()
    assert_same_tree(cpu_copy(saved(native.optimizer)), cpu_copy(saved(swapped.optimizer)))
    for run in (native, swapped):
        run.optimizer.step()
        run.optimizer.load_state_dict(saved(run.optimizer))
    assert_same(native, swapped)
    assert native.train(2) == swapped.train(2)


@pytest.mark.parametrize("native_class, swap_class", CLASSES)
@pytest.mark.parametrize("location", ["cpu", DEVICE])
def test_6_the_job_that_ran_does_not_run_out_of_memory_when_it_resumes(
    native_class, swap_class, location, simulator, record_property
) -> None:
    # bitsandbytes#1344, transformers#22123: load_state_dict moved all moments to the device.
    def wide() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(32, 8192), torch.nn.Linear(8192, 32)).to(DEVICE)

    config = SwapOptimizerConfig(swap_times=64)
    first = training(swap_class, wide, swap_config=config)
    first.train(1)
    checkpoint = saved(first.optimizer, map_location=location)
    resumed = training(swap_class, wide, swap_config=config)
    take_over_weights(resumed, first)
    torch.simulated.synchronize()
    torch.simulated.reset_peak_memory_stats()
    held = simulator.memory_held()
    resumed.optimizer.load_state_dict(checkpoint)
    peak = simulator.max_memory_held() - held
    batch = swapped_nbytes(resumed.optimizer) / 64
    print(f"device peak of load_state_dict: {peak} bytes, a batch: {batch:.0f}")
    record_property("device peak", peak)
    assert peak <= batch
    assert all(
        value.device.type == "cpu" for param in parameters_of(resumed.optimizer)
        if param.numel() >= 1024
        for name, value in resumed.optimizer.state[param].items() if name != "step"
    )
    assert first.train(2) == resumed.train(2)
    assert all(map(torch.equal, first.model.parameters(), resumed.model.parameters()))


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": False}])
@pytest.mark.parametrize("location", [None, "cpu", DEVICE])
@pytest.mark.parametrize("source", ["native", "swap"])
def test_7_the_step_counter_is_where_the_original_wants_it(options, location, source) -> None:
    # pytorch#103256, #111123, #118326: `step` on the wrong device after a map_location load.
    runs = {"native": training(torch.optim.AdamW, **options),
            "swap": training(SwapAdamW, **options)}
    for run in runs.values():
        run.train(2)
    resumed = [training(torch.optim.AdamW, **options), training(SwapAdamW, **options)]
    for run in resumed:
        # One dict each: the original shares what is in the right place already.
        run.optimizer.load_state_dict(saved(runs[source].optimizer, map_location=location))
        take_over_weights(run, runs[source])
    assert_same_states(resumed[0].optimizer, resumed[1].optimizer)
    assert resumed[0].train(2) == resumed[1].train(2)
    assert_same(*resumed)


def test_8_learning_rate_and_counters_come_with_an_in_place_load(tmp_path) -> None:
    # prime-rl#3561, SkyRL#1403: DCP filled the moments; step, lr and betas stayed stale.
    native, swapped = training(torch.optim.AdamW), training(SwapAdamW)
    native.train(3), swapped.train(3)
    dcp.save(get_optimizer_state_dict(swapped.model, swapped.optimizer), checkpoint_id=tmp_path)
    target = training(SwapAdamW, lr=0.9, betas=(0.1, 0.2), weight_decay=0.5)
    target.train(7)
    template = get_optimizer_state_dict(target.model, target.optimizer)
    dcp.load(template, checkpoint_id=tmp_path)
    set_optimizer_state_dict(target.model, target.optimizer, template)
    take_over_weights(target, swapped)
    assert native.train(2) == target.train(2)
    assert_same(native, target)


@pytest.mark.parametrize("native_class, swap_class", CLASSES[:2])
def test_10_a_look_at_the_states_before_the_first_step_is_not_a_step(
    native_class, swap_class
) -> None:
    # pytorch#164929, #125708: DCP's dummy first step advanced counters.
    native, swapped = training(native_class), training(swap_class)
    for run in (native, swapped):
        get_optimizer_state_dict(run.model, run.optimizer)
    assert_same(native, swapped)
    assert native.train(3) == swapped.train(3)
    assert_same(native, swapped)


@pytest.mark.parametrize("packed", [True, False])
def test_10_states_zeroed_in_place_are_zero(packed: bool) -> None:
    # torchtitan#4382: after the dummy step the states are zeroed in place.
    config = SwapOptimizerConfig(packed_swap=packed)
    native, swapped = training(torch.optim.AdamW), training(SwapAdamW, swap_config=config)
    native.train(2), swapped.train(2)
    for run in (native, swapped):
        for state in run.optimizer.state.values():
            for value in state.values():
                value.zero_()
    assert_same(native, swapped)
    assert native.train(2) == swapped.train(2)
    assert_same(native, swapped)


@pytest.mark.parametrize("native_class, swap_class", CLASSES)
def test_16_parameters_that_were_never_used_or_are_frozen_now_are_not_forgotten(
    native_class, swap_class
) -> None:
    # pytorch#192202, verl#7283, Automodel#2071.
    native, swapped = training(native_class), training(swap_class)
    for run in (native, swapped):
        run.model[0].requires_grad_(False)
        run.train(2)
        run.model[3].requires_grad_(False)
        run.model[0].requires_grad_(True)
        run.optimizer.zero_grad()
        run.train(1)
    assert_same_tree(native.optimizer.state_dict(), swapped.optimizer.state_dict())
    resumed = [training(native_class), training(swap_class)]
    for run, source in zip(resumed, (swapped, native)):
        take_over_weights(run, source)
        run.optimizer.load_state_dict(saved(source.optimizer))
    assert_same(*resumed)
    assert resumed[0].train(2) == resumed[1].train(2)
    assert_same(*resumed)


def test_23_the_memory_that_was_freed_stays_free_after_a_checkpoint(simulator) -> None:
    # SkyRL#556, pytorch#144397: states stayed on the device after a checkpoint.
    run = training(SwapAdamW)
    run.train(2)
    run.optimizer.zero_grad()
    torch.simulated.synchronize()
    gc.collect()
    held = simulator.memory_held()
    checkpoint = cpu_copy(run.optimizer.state_dict())
    assert simulator.memory_held() == held
    saved(run.optimizer)
    assert simulator.memory_held() == held
    first = next(parameters_of(run.optimizer))
    assert run.optimizer.state[first]["exp_avg"].sum().item() != 0
    assert simulator.memory_held() == held
    run.optimizer.load_state_dict(checkpoint)
    gc.collect()  # a recursive closure of the original's load_state_dict keeps what it had
    assert simulator.memory_held() == held


NEWER_KEYS = ["amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused",
              "decoupled_weight_decay"]


@pytest.mark.parametrize("native_class, swap_class", CLASSES[:2])
@pytest.mark.parametrize("dropped", [NEWER_KEYS, NEWER_KEYS[1:], []])
@pytest.mark.parametrize("int_steps", [True, False])
def test_31_the_old_checkpoint_still_loads(native_class, swap_class, dropped, int_steps) -> None:
    # apex#577, pytorch#146157: checkpoints of older Adams lack group keys, and count in ints.
    native, swapped = training(native_class), training(swap_class)
    native.train(2)
    checkpoint = cpu_copy(saved(native.optimizer))
    for group in checkpoint["param_groups"]:
        for key in dropped:
            del group[key]
    if int_steps:
        for state in checkpoint["state"].values():
            state["step"] = int(state["step"].item())
    keys = [list(group) for group in native.optimizer.param_groups]
    resumed = [training(native_class), training(swap_class)]
    for run in resumed:
        take_over_weights(run, native)
        run.optimizer.load_state_dict(cpu_copy(checkpoint))
    assert sorted(keys[0]) == sorted(resumed[1].optimizer.param_groups[0])
    assert_same(*resumed)
    assert resumed[0].train(2) == resumed[1].train(2)
    assert_same(*resumed)
    assert swapped_nbytes(resumed[1].optimizer) > 0
    del swapped


def test_31_our_checkpoints_have_no_keys_of_their_own() -> None:
    # madgrad#15.
    for native_class, swap_class in CLASSES:
        native, swapped = training(native_class), training(swap_class)
        native.train(1), swapped.train(1)
        native_dict, swap_dict = native.optimizer.state_dict(), swapped.optimizer.state_dict()
        assert native_dict.keys() == swap_dict.keys()
        assert native_dict["param_groups"] == swap_dict["param_groups"]


@pytest.mark.parametrize("source", ["native", "swap"])
def test_33_moments_keep_the_precision_that_the_original_keeps(source: str) -> None:
    # fairscale#50, OpenTau#184: fp32 moments went through low precision.
    def low() -> torch.nn.Module:
        return small_model().to(torch.bfloat16)

    native, swapped = training(torch.optim.AdamW, low), training(SwapAdamW, low)
    generator = torch.Generator().manual_seed(0)
    for run in (native, swapped):
        for param in run.model.parameters():
            param.grad = torch.ones_like(param)
        run.optimizer.step()
    run = {"native": native, "swap": swapped}[source]
    checkpoint = cpu_copy(run.optimizer.state_dict())
    for state in checkpoint["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.rand(state[name].shape, generator=generator)  # fp32
    for run in (native, swapped):
        run.optimizer.load_state_dict(cpu_copy(checkpoint))
    assert_same(native, swapped)
    first = cpu_copy(swapped.optimizer.state_dict())
    swapped.optimizer.load_state_dict(cpu_copy(first))
    assert_same_tree(first, cpu_copy(swapped.optimizer.state_dict()))
    for run in (native, swapped):
        for param in run.model.parameters():
            param.grad = torch.ones_like(param)
        run.optimizer.step()
    assert_same(native, swapped)


SETTINGS = [None, *(
    SwapOptimizerConfig(packed_swap=packed, swap_times=times)
    for packed, times in itertools.product((True, False), (3, 50))
)]


@pytest.mark.parametrize("native_class, swap_class", CLASSES)
def test_37_the_loss_does_not_jump_on_resume_whatever_is_switched(
    native_class, swap_class
) -> None:
    # Megatron-LM#1842, DeepSpeed#2898: swap on and off, packing and batches changed on the way.
    reference = training(native_class)
    run = training(native_class)
    for index, config in enumerate([None, *SETTINGS, *reversed(SETTINGS), None]):
        checkpoint = saved(run.optimizer)
        options = {} if config is None else {"swap_config": config}
        resumed = training(native_class if config is None else swap_class, **options)
        take_over_weights(resumed, run)
        resumed.optimizer.load_state_dict(checkpoint)
        run = resumed
        if index % 3 == 1 and config is None:
            swap_optimizer(run.optimizer)
        assert reference.train(2) == run.train(2)
        assert_same(reference, run)
        if index % 3 == 2 and config is not None:
            unswap_optimizer(run.optimizer)
