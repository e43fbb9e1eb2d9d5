"""The step costs what the slower direction of the link costs, on the virtual clock.

Times are exact: they follow from the table of costs and not from the machine that runs the test.
"""
from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from swap_adam import SwapOptimizerConfig
from swap_adam.swap import swap_of
from swap_adam.torch import SwapAdamW

pytestmark = pytest.mark.simulator_only

TENSORS = 816
PARAMETERS = 25_239_552
# Matrices, and as many vectors, as in a transformer; the last one makes the sum.
SIZES = [57_600, 4_224, 28_800, 2_112, 86_400, 6_336] * (TENSORS // 6)


def sizes() -> list[int]:
    result = list(SIZES)
    result[-2] += PARAMETERS - sum(result)
    assert len(result) == TENSORS and sum(result) == PARAMETERS and min(result) >= 1024
    return result


def make_optimizer(numels: list[int], packed: bool = True, **config: Any) -> Any:
    params: list[Tensor] = []
    for numel in numels:
        param = torch.zeros(numel, device="simulated").requires_grad_()
        param.grad = torch.zeros_like(param)
        params.append(param)
    return SwapAdamW(
        params, fused=True, swap_config=SwapOptimizerConfig(packed_swap=packed, **config)
    )


def times(simulator: ModuleType, optimizer: Any, steps: int = 1) -> tuple[float, float]:
    """Virtual seconds per step: on the compute stream, and until the last state is on the host."""
    torch.accelerator.synchronize()
    begin = torch.get_device_module("simulated").Event(enable_timing=True)
    end = torch.get_device_module("simulated").Event(enable_timing=True)
    host = simulator.now()
    begin.record()
    for _ in range(steps):
        optimizer.step()
    end.record()
    torch.accelerator.synchronize()
    landed = simulator.now() - host
    return begin.elapsed_time(end) / 1000 / steps, landed / steps


@pytest.fixture(scope="module")
def large() -> Any:
    import swap_adam.simulator as simulator

    simulator.reset()  # what the last test configured: this comes before the fixtures of a test
    optimizer = make_optimizer(sizes())
    optimizer.step()
    torch.accelerator.synchronize()
    yield optimizer


@pytest.mark.parametrize("link", ["pcie4", "pcie5", "hccs"])
def test_a_packed_step_costs_what_the_slower_direction_costs(
    simulator: ModuleType, large: Any, link: str, record_property: Any
) -> None:
    """At most 1.15 times the time of the copies alone: 816 tensors, 25 million parameters."""
    simulator.configure(link=link)
    costs = simulator.LINKS[link]
    slower = PARAMETERS * 8 / (min(costs.copy_in_gb_per_s, costs.copy_out_gb_per_s) * 1e9)
    compute, landed = times(simulator, large)
    record_property("compute_over_copies", compute / slower)
    record_property("landed_over_copies", landed / slower)
    print(
        f"{link}: copies {1e3 * slower:.3f} ms, step on the compute stream {1e3 * compute:.3f} ms "
        f"({compute / slower:.3f}), until all states have landed {1e3 * landed:.3f} ms "
        f"({landed / slower:.3f})"
    )
    assert compute <= 1.15 * slower
    # The last copies drain under the next forward, but there are few of them.
    assert landed <= 1.25 * slower


def test_steps_back_to_back_cost_no_more(simulator: ModuleType, large: Any) -> None:
    slower = PARAMETERS * 8 / 25e9
    _, landed = times(simulator, large, steps=2)
    print(f"two steps back to back: {landed / slower:.3f} of the copies each")
    assert landed <= 1.2 * slower


def test_both_directions_of_the_link_work_at_once(simulator: ModuleType, large: Any) -> None:
    """On a half-duplex link the same step takes nearly twice as long: the overlap is real."""
    full, _ = times(simulator, large)
    simulator.configure(duplex=False)
    half, _ = times(simulator, large)
    simulator.configure(duplex=True)
    assert half >= 1.7 * full


def test_a_batch_is_one_transfer_and_one_fused_call(simulator: ModuleType, large: Any) -> None:
    (device,) = swap_of(large).devices.values()
    batches = len(device.plan.batches)
    with simulator.record_operations() as operations:
        large.step()
    torch.accelerator.synchronize()
    fused = [op for op in operations if "_fused_adamw" in op.name]
    copies_in = [op for op in operations if op.kind == "copy_in"]
    copies_out = [op for op in operations if op.kind == "copy_out"]
    assert len(fused) == batches
    # A border of a slab splits a transfer; no tensor is large enough to be cut.
    slabs = len(device.store._slabs)
    assert batches <= len(copies_in) == len(copies_out) <= batches + slabs
    assert sum(op.nbytes for op in copies_in) <= PARAMETERS * 8 + 16 * 2 * TENSORS


def test_the_host_never_waits_within_a_packed_step(simulator: ModuleType, large: Any) -> None:
    torch.accelerator.synchronize()
    simulator.reset_counters()
    large.step()
    counters = simulator.counters()
    assert counters.host_waits == 0 and counters.device_synchronizations == 0
    torch.accelerator.synchronize()


def test_the_host_is_done_long_before_the_device(simulator: ModuleType, large: Any) -> None:
    """So that forward and backward of the next iteration are issued meanwhile."""
    torch.accelerator.synchronize()
    begin = simulator.now()
    large.step()
    issued = simulator.now() - begin
    torch.accelerator.synchronize()
    assert issued < 0.2 * (simulator.now() - begin)


def test_the_last_copies_drain_under_the_next_forward(simulator: ModuleType) -> None:
    """Work that follows the step on the compute stream does not wait for the last copy-out."""
    optimizer = make_optimizer([200_000] * 20, swap_times=4)
    optimizer.step()
    torch.accelerator.synchronize()
    step_done = torch.get_device_module("simulated").Event(enable_timing=True)
    begin = simulator.now()
    optimizer.step()
    step_done.record()
    step_done.synchronize()
    update_done = simulator.now() - begin
    torch.accelerator.synchronize()
    landed = simulator.now() - begin
    batch = max(b.nbytes for b in next(iter(swap_of(optimizer).devices.values())).plan.batches)
    assert landed - update_done >= 0.5 * batch / 25e9


def test_per_tensor_overlaps_too(simulator: ModuleType) -> None:
    """It moves every state by itself, but copies in while it copies out."""
    numels = [50_000] * 120
    optimizer = make_optimizer(numels, packed=False)
    optimizer.step()
    one_way = sum(numels) * 8 / 25e9
    _, landed = times(simulator, optimizer)
    print(f"per tensor: {landed / one_way:.3f} of one direction's copies")
    # A transfer's fixed cost counts for each of the 240 states.
    assert landed <= 1.7 * (one_way + 240 * 7e-6)


def test_packed_beats_per_tensor_for_many_small_tensors(simulator: ModuleType) -> None:
    numels = [2_000] * 600
    packed, per_tensor = (make_optimizer(numels, packed=value) for value in (True, False))
    packed.step()
    per_tensor.step()
    assert times(simulator, packed)[1] < 0.5 * times(simulator, per_tensor)[1]


def test_streams_events_and_plans_are_made_once(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New streams per step strand reserved memory: gigabytes after some hundred steps."""
    optimizer = make_optimizer([5000] * 40, swap_times=7)
    optimizer.step()
    optimizer.step()
    (device,) = swap_of(optimizer).devices.values()
    plan, streams = device.plan, dict(device.backend._streams)
    simulator.reset_counters()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("made anew in a step")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "Stream", refuse)
        patch.setattr(torch, "Event", refuse)
        for _ in range(3):
            optimizer.step()
    assert device.plan is plan
    assert device.backend._streams == streams
    # One staging area per step, and nothing else.
    assert simulator.counters().allocations <= 3
    torch.accelerator.synchronize()


def test_other_gradients_make_a_new_plan_and_the_same_ones_do_not(simulator: ModuleType) -> None:
    optimizer = make_optimizer([5000] * 10)
    optimizer.step()
    (device,) = swap_of(optimizer).devices.values()
    plan = device.plan
    first = optimizer.param_groups[0]["params"][0]
    grad, first.grad = first.grad, None
    optimizer.step()
    assert device.plan is not plan
    plan = device.plan
    optimizer.step()
    assert device.plan is plan, "the set stayed"
    first.grad = grad.clone()
    optimizer.step()
    assert device.plan is not plan
    plan = device.plan
    first.grad = grad.clone()
    optimizer.step()
    assert device.plan is plan, "another tensor of the same shape is no other set"


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per tensor"])
def test_nothing_is_moved_for_what_has_no_gradient(simulator: ModuleType, packed: bool) -> None:
    """A mixture of experts pays for the experts that were used."""
    numels = [4_000] * 60
    optimizer = make_optimizer(numels, packed=packed)
    optimizer.step()
    params = optimizer.param_groups[0]["params"]
    grads = [param.grad for param in params]
    for active in (range(0, 60, 2), range(10, 20), range(1), range(60)):
        for index, param in enumerate(params):
            param.grad = grads[index] if index in active else None
        torch.accelerator.synchronize()
        simulator.reset_counters()
        optimizer.step()
        torch.accelerator.synchronize()
        counters = simulator.counters()
        wanted = len(active) * 4_000 * 8
        assert counters.copies_in_nbytes == counters.copies_out_nbytes == wanted
    for param in params:
        param.grad = None
    simulator.reset_counters()
    optimizer.step()
    counters = simulator.counters()
    assert (counters.copies_in, counters.copies_out, counters.kernels) == (0, 0, 0)


def test_a_maximal_run_of_gradients_is_one_transfer(simulator: ModuleType) -> None:
    optimizer = make_optimizer([4_000] * 8, swap_times=1)
    optimizer.step()
    params = optimizer.param_groups[0]["params"]
    grads = [param.grad for param in params]
    (device,) = swap_of(optimizer).devices.values()
    slabs = len(device.store._slabs)
    for missing, runs in (([], 1), ([3], 2), ([2, 3], 2), ([1, 4], 3), ([0, 7], 1)):
        for index, param in enumerate(params):
            param.grad = None if index in missing else grads[index]
        optimizer.step()
        torch.accelerator.synchronize()
        simulator.reset_counters()
        optimizer.step()
        torch.accelerator.synchronize()
        transfers = simulator.counters().copies_in
        # A border of a batch or of a slab splits a run.
        most = runs + len(device.plan.batches) - 1 + slabs - 1
        assert transfers <= most, (missing, transfers, most)


def test_per_group_options_do_not_split_a_batch(simulator: ModuleType) -> None:
    """Hundreds of groups (layer-wise learning rates) still travel in a few transfers."""
    params = []
    for _ in range(60):
        param = torch.zeros(2_000, device="simulated").requires_grad_()
        param.grad = torch.zeros_like(param)
        params.append(param)
    groups = [{"params": [param], "lr": 1e-3 / (index + 1)} for index, param in enumerate(params)]
    optimizer: Any = SwapAdamW(groups, fused=True)
    optimizer.step()
    torch.accelerator.synchronize()
    simulator.reset_counters()
    optimizer.step()
    torch.accelerator.synchronize()
    (device,) = swap_of(optimizer).devices.values()
    assert len(device.plan.batches) < 60
    slabs = len(device.store._slabs)
    assert simulator.counters().copies_in <= len(device.plan.batches) + slabs


def test_two_devices_work_at_the_same_time(simulator: ModuleType) -> None:
    """One pipeline per device: two links are twice as fast as one."""
    def on(*devices: str) -> Any:
        params = []
        for device in devices:
            for _ in range(8):
                param = torch.zeros(400_000, device=device).requires_grad_()
                param.grad = torch.zeros_like(param)
                params.append(param)
        # Few batches: the host issues the two pipelines in turn, and must not be what limits.
        config = SwapOptimizerConfig(swap_times=2)
        optimizer = SwapAdamW(params, fused=True, swap_config=config)
        optimizer.step()
        return optimizer

    def landed(optimizer: Any) -> float:
        for index in range(2):
            torch.accelerator.synchronize(index)
        begin = simulator.now()
        optimizer.step()
        for index in range(2):
            torch.accelerator.synchronize(index)
        return simulator.now() - begin

    one = landed(on("simulated:0"))
    both = landed(on("simulated:0", "simulated:1"))
    assert both <= 1.3 * one
