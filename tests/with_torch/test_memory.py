"""Device bytes, exactly: what a user gains, and what a wrong bound would take away again.

The bounds are asserted on the *held* figure: what nobody else can have, freed memory that a stream
may still use included. Every number here is computed from the shapes and ``swap_times``.
"""
from __future__ import annotations

import copy
import gc
import io
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from training import noise

from swap_adam import SwapOptimizerConfig, swap_optimizer, unswap_optimizer
from swap_adam.swap import swap_of
from swap_adam.torch import SwapAdamW

pytestmark = pytest.mark.simulator_only

MODES: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False}, "foreach": {}, "fused": {"fused": True},
}
SWAP_TIMES = [1, 2, 7, 16, 1000]
EQUAL = [(64, 128)] * 32  # 2 MiB of moments
GIANT = [(100,), (1024,), (480, 520), (33, 33), (8192,), (5000,), (1500,)]  # one is 93 %
BLOCK = 512  # the allocator's rounding, and the alignment of what starts a transfer
STATES = 2


def rounded(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


@pytest.fixture(autouse=True)
def _fast_garbage_collection() -> Iterator[None]:
    """What is there already is no garbage: without it a collection takes milliseconds."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Run:
    """An optimizer with gradients that stay, and the meter."""

    def __init__(
        self, simulator: ModuleType, shapes: list[Any], mode: str, packed: bool, swap_times: int,
        **config: Any,
    ) -> None:
        self.simulator = simulator
        gc.collect()  # what an earlier test left
        self.base = simulator.memory_held()
        params = [torch.zeros(shape, device="simulated").requires_grad_() for shape in shapes]
        for index, param in enumerate(params):
            param.grad = noise(0, index, param.detach())
        self.params = params
        self.mode = mode
        self.optimizer: Any = SwapAdamW(
            params, lr=1e-3, **MODES[mode],
            swap_config=SwapOptimizerConfig(packed_swap=packed, swap_times=swap_times, **config),
        )
        # Parameters, their gradients, and with fused a step counter each.
        self.resident = 2 * sum(rounded(4 * param.numel()) for param in params)
        if mode == "fused":
            self.resident += BLOCK * len(params)
        swapped = [param.numel() for param in params if param.numel() >= 1024]
        self.resident += sum(
            STATES * rounded(4 * param.numel()) for param in params if param.numel() < 1024
        )
        self.swapped_nbytes = 4 * STATES * sum(swapped)
        self.cap = max(-(-self.swapped_nbytes // swap_times), 128 * 4 * STATES)
        self.largest = 4 * STATES * max(swapped)

    @property
    def batches(self) -> list[Any]:
        (device,) = swap_of(self.optimizer).devices.values()
        return device.plan.batches

    def temporaries(self) -> int:
        """What the native call itself allocates for the largest of these batches."""
        most = 0
        for batch in [batch.units for batch in self.batches]:
            sizes = [rounded(4 * unit.numel) for unit in batch]
            cut = sum(unit.whole is not None for unit in batch)
            if self.mode == "foreach":
                most = max(most, sum(sizes))
            elif self.mode == "for-loop":
                # A square root and its quotient, beside the last tensor's quotient.
                most = max(most, *(a + 2 * b for a, b in zip([0, *sizes], sizes)))
            else:
                # The step counter of a cut tensor for each of its pieces.
                most = max(most, cut * rounded(4 * len(self.batches)))
        small = [rounded(4 * p.numel()) for p in self.params if p.numel() < 1024]
        if self.mode != "fused" and small:
            most = max(most, sum(small) if self.mode == "foreach" else 3 * max(small))
        return most

    def bound(self, packed: bool) -> int:
        """Twice the cap (per tensor: or the largest tensor) and the alignment of its transfers."""
        if packed:
            transfers = max(len(batch.transfers) for batch in self.batches)
            assert transfers <= 8, "alignment is a few blocks per batch"
            return 2 * self.cap + 4 * BLOCK * transfers
        # Each of a batch's buffers is rounded up.
        buffers = max(len(batch.buffers) for batch in self.batches)
        return 2 * max(self.cap, self.largest) + 2 * BLOCK * buffers

    def held(self) -> int:
        return self.simulator.memory_held() - self.base

    def peak(self) -> int:
        return self.simulator.max_memory_held() - self.base

    def reset_peak(self) -> None:
        torch.get_device_module("simulated").reset_peak_memory_stats()


@pytest.mark.parametrize("shapes", [EQUAL, GIANT], ids=["equal", "giant"])
@pytest.mark.parametrize("swap_times", SWAP_TIMES)
@pytest.mark.parametrize("mode", MODES)
def test_packed_holds_two_areas_within_a_step_and_nothing_between(
    simulator: ModuleType, shapes: list[Any], swap_times: int, mode: str
) -> None:
    check_steps(Run(simulator, shapes, mode, True, swap_times), packed=True)


@pytest.mark.parametrize("shapes", [EQUAL, GIANT], ids=["equal", "giant"])
@pytest.mark.parametrize("swap_times", SWAP_TIMES)
@pytest.mark.parametrize("mode", MODES)
def test_per_tensor_holds_two_batches_within_a_step_and_nothing_between(
    simulator: ModuleType, shapes: list[Any], swap_times: int, mode: str
) -> None:
    check_steps(Run(simulator, shapes, mode, False, swap_times), packed=False)


def check_steps(run: Run, packed: bool) -> None:
    run.reset_peak()
    for step in range(3):
        run.optimizer.step()
        assert run.held() <= run.resident + run.bound(packed), "right after a step"
        torch.accelerator.synchronize()
        assert run.held() == run.resident, "between steps"
    assert run.peak() <= run.resident + run.bound(packed) + run.temporaries()
    # Steps back to back: the host may be a step ahead of the device.
    run.reset_peak()
    for step in range(4):
        run.optimizer.step()
    assert run.peak() <= run.resident + run.bound(packed) + run.temporaries()
    torch.accelerator.synchronize()
    assert run.held() == run.resident


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per tensor"])
def test_other_gradients_in_every_step_do_not_hold_more(
    simulator: ModuleType, packed: bool
) -> None:
    """Experts come and go: a new plan must not take memory beside what the last step holds."""
    run = Run(simulator, EQUAL, "fused", packed, 7)
    run.optimizer.step()
    torch.accelerator.synchronize()
    run.reset_peak()
    grads = [param.grad for param in run.params]
    for step in range(6):
        for index, (param, grad) in enumerate(zip(run.params, grads)):
            param.grad = grad if index % 3 != step % 3 else None
        run.optimizer.step()
        # A gap in the middle of a batch splits its transfer.
        transfers = max(len(batch.transfers) for batch in run.batches)
        bound = 2 * run.cap + 4 * BLOCK * transfers if packed else run.bound(False)
        assert run.peak() <= run.resident + bound + BLOCK * len(run.params)
    torch.accelerator.synchronize()
    assert run.held() == run.resident


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per tensor"])
def test_no_gradient_is_kept_alive_by_the_optimizer(simulator: ModuleType, packed: bool) -> None:
    run = Run(simulator, GIANT, "fused", packed, 7)
    for step in range(2):
        for index, param in enumerate(run.params):
            param.grad = noise(step, index, param.detach())
        run.optimizer.step()
        run.optimizer.zero_grad()
        torch.accelerator.synchronize()
        gradients = sum(rounded(4 * param.numel()) for param in run.params)
        assert run.held() == run.resident - gradients


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per tensor"])
def test_a_new_state_never_is_on_the_device_as_a_whole(
    simulator: ModuleType, packed: bool
) -> None:
    """The first step makes all states; the original's would be there at once."""
    run = Run(simulator, EQUAL, "fused", packed, 16)
    run.reset_peak()
    run.optimizer.step()
    assert run.peak() <= run.resident + run.bound(packed) + run.temporaries()
    assert run.bound(packed) < run.swapped_nbytes / 4


def native_with_states(shapes: list[Any]) -> tuple[Optimizer, list[Tensor]]:
    params = [torch.zeros(shape, device="simulated").requires_grad_() for shape in shapes]
    optimizer = AdamW(params, fused=True)
    for index, param in enumerate(params):
        param.grad = noise(0, index, param.detach())
    optimizer.step()
    return optimizer, params


@pytest.mark.parametrize("shapes", [EQUAL, GIANT], ids=["equal", "giant"])
def test_conversion_frees_the_states_and_needs_nothing(
    simulator: ModuleType, shapes: list[Any]
) -> None:
    gc.collect()
    optimizer, params = native_with_states(shapes)
    torch.accelerator.synchronize()
    torch.get_device_module("simulated").reset_peak_memory_stats()
    before = simulator.memory_held()
    swapped = sum(STATES * rounded(4 * p.numel()) for p in params if p.numel() >= 1024)
    swap_optimizer(optimizer)
    assert simulator.max_memory_held() == before
    torch.accelerator.synchronize()
    assert simulator.memory_held() == before - swapped
    # And back: no more than the states themselves.
    unswap_optimizer(optimizer)
    assert simulator.max_memory_held() == before
    assert simulator.memory_held() == before


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per tensor"])
def test_saving_needs_no_device_memory_and_transfers_only_what_stays_on_the_device(
    simulator: ModuleType, packed: bool
) -> None:
    run = Run(simulator, GIANT, "foreach", packed, 7)
    run.optimizer.step()
    torch.accelerator.synchronize()
    run.reset_peak()
    simulator.reset_counters()
    pinned = simulator.pinned_nbytes()
    saved = run.optimizer.state_dict()
    counters = simulator.counters()
    small = sum(4 * p.numel() * STATES for p in run.params if p.numel() < 1024)
    assert (counters.allocations, counters.copies_in, counters.kernels) == (0, 0, 0)
    assert counters.copies_out_nbytes == small
    assert run.peak() == run.held() == run.resident
    assert simulator.pinned_nbytes() == pinned
    torch.save(saved, io.BytesIO())
    assert simulator.counters().copies_out_nbytes == small


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per tensor"])
@pytest.mark.parametrize("location", ["cpu", "simulated"])
def test_loading_brings_no_state_to_the_device(
    simulator: ModuleType, packed: bool, location: str
) -> None:
    saved: Any = native_with_states(GIANT)[0].state_dict()
    if location == "cpu":
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        saved = torch.load(file, map_location="cpu", weights_only=True)
    run = Run(simulator, GIANT, "fused", packed, 7)
    run.optimizer.step()
    for _ in range(2):
        # Also right after a step, with its copies in flight.
        run.reset_peak()
        before = run.held()
        pinned = simulator.pinned_nbytes()
        run.optimizer.load_state_dict(copy.copy(saved))
        small = sum(STATES * rounded(4 * p.numel()) for p in run.params if p.numel() < 1024)
        # The original's way for what stays on the device: new tensors, then the old ones go.
        assert run.peak() <= before + small + 2 * BLOCK * len(run.params)
        torch.accelerator.synchronize()
        # As the original does, it takes tensors that are on the device already as they are.
        theirs = small + BLOCK * len(run.params) if location == "simulated" else 0
        assert run.held() == run.resident - theirs
        assert simulator.pinned_nbytes() == pinned, "no second set of slabs"
        run.optimizer.step()


def test_uncut_tensors_raise_the_bound_to_the_largest_and_no_more(simulator: ModuleType) -> None:
    """split_tensors=False: the user is told in the documentation that a batch then grows."""
    run = Run(simulator, GIANT, "fused", True, 16, split_tensors=False)
    run.reset_peak()
    run.optimizer.step()
    run.optimizer.step()
    transfers = max(len(batch.transfers) for batch in run.batches)
    bound = run.largest + run.cap + 4 * BLOCK * transfers
    assert run.peak() <= run.resident + bound + BLOCK * len(run.params)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_the_temporaries_are_those_of_the_native_call(
    simulator: ModuleType, mode: str, maximize: bool
) -> None:
    """What is allocated and freed before the first update is what the update then needs."""
    peaks = []
    for swapped in (False, True):
        gc.collect()
        params = [torch.zeros(4096, device="simulated").requires_grad_() for _ in range(5)]
        for param in params:
            param.grad = torch.ones_like(param)
        options: Any = {**MODES[mode], "maximize": maximize}
        optimizer: Any = (
            SwapAdamW(params, swap_config=SwapOptimizerConfig(swap_times=1), **options)
            if swapped else AdamW(params, **options)
        )
        optimizer.step()
        torch.accelerator.synchronize()
        base = simulator.memory_held()
        torch.get_device_module("simulated").reset_peak_memory_stats()
        if swapped:
            (device,) = swap_of(optimizer).devices.values()
            base += device.plan.staging_nbytes
            assert len(device.plan.batches[0].units) > 1
            scale = 5 / max(len(batch.units) for batch in device.plan.batches)
        else:
            scale = 1.0
        optimizer.step()
        peak = simulator.max_memory_held() - base
        peaks.append(peak * scale if mode == "foreach" else peak)
    assert peaks[0] == peaks[1]


def test_the_native_optimizer_holds_what_we_save(simulator: ModuleType) -> None:
    """The meter itself: the same shapes with the original."""
    gc.collect()
    base = simulator.memory_held()
    optimizer, params = native_with_states(EQUAL)
    torch.accelerator.synchronize()
    native = simulator.memory_held() - base
    run = Run(simulator, EQUAL, "fused", True, 16)
    run.optimizer.step()
    torch.accelerator.synchronize()
    assert native - run.held() == run.swapped_nbytes
