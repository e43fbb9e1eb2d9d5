"""Both schedules on a device whose streams run as late and as mixed as they may.

What a user would lose: a state or a parameter (wrong bytes for some order of the streams), memory
(more held than the bound), or time (transfers, allocations and plans made anew every step).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from swap_adam.backend import StreamRole
from swap_adam.device import DeviceSwap
from swap_adam.schedule import schedule_type
from swap_adam.schedule.builder import PlanOptions
from swap_adam.slot import Residency
from swap_adam.update import Updater

NUMELS = [300, 5000, 128, 40_000, 1, 777, 6400, 20_000, 129, 3000]
PIPELINES = [pytest.param(True, id="packed"), pytest.param(False, id="per tensor")]
SWAP_TIMES = [1, 2, 7, 16, 1000]


class Model:
    """Units, and in ``expected`` what their parameters and states must become."""

    def __init__(
        self, core: Any, packed: bool, swap_times: int, seed: int = 0, split: bool = True,
        numels: Sequence[int] = NUMELS,
    ) -> None:
        self.backend = core.Backend(seed)
        self.units = [core.unit(index, numel) for index, numel in enumerate(numels)]
        self.device: Any = DeviceSwap(
            self.backend, schedule_type(packed), PlanOptions(swap_times, split), lambda slot: None,
        )
        self.device.register(self.units)
        self.expected = {
            id(unit): [np.full(unit.numel, index, np.uint32), *np.zeros((2, unit.numel), np.uint32)]
            for index, unit in enumerate(self.units)
        }
        self.times: list[list[tuple[int, int, int]]] = []
        self.before_update: Callable[[Sequence[Any]], None] = lambda units: None

    # What swap_adam.update.Update asks for

    memory_key = None

    def can_cut(self, unit: Any) -> bool:
        return True

    def scratch(self, units: Sequence[Any]) -> Sequence[Sequence[int]]:
        return []

    def run(self, units: Sequence[Any]) -> None:
        """state = 3 * state + index, param = param + state; other on purpose for every step."""
        self.before_update(units)
        self.times.append([(u.param_index, u.start_numel, u.numel) for u in units])
        for unit in units:
            whole = unit if unit.whole is None else unit.whole
            param = whole.param.numbers()[unit.start_numel:unit.start_numel + unit.numel]
            states = [unit.states[slot.name].numbers() for slot in unit.slots]

            def run(param: Any = param, states: Any = states, add: int = unit.param_index) -> None:
                for state in states:
                    state[:] = 3 * state + add + 1
                    param += state

            self.backend.compute(run)

    def step(self, active: Sequence[Any] | None = None, check_held: bool = False) -> None:
        active = self.units if active is None else active
        self.device.settle(active, self, check_held)
        self.device.acquire()
        self.device.fill()
        updater: Any = Updater(self.run, lambda: True)
        self.device.run(updater)
        for unit in active:
            self.expect(unit)

    def expect(self, unit: Any) -> None:
        param, *states = self.expected[id(unit)]
        for state in states:
            state[:] = 3 * state + unit.param_index + 1
            param += state

    def check(self) -> None:
        self.device.wait_landed()
        for unit in self.units:
            for slot, state in zip(unit.slots, self.expected[id(unit)][1:]):
                assert slot.residency is Residency.HOST
                assert (slot.cpu_tensor.numbers() == state).all(), (unit.param_index, slot.name)
        self.backend.drain()
        for unit in self.units:
            param = self.expected[id(unit)][0]
            assert (unit.param.numbers() == param).all(), unit.param_index
        assert self.backend.held == 0


@pytest.mark.parametrize("packed", PIPELINES)
@pytest.mark.parametrize("swap_times", SWAP_TIMES)
@pytest.mark.parametrize("seed", range(4))
def test_states_and_parameters_are_right_in_every_order_of_the_streams(
    core: Any, packed: bool, swap_times: int, seed: int
) -> None:
    numels = NUMELS if swap_times < 1000 else NUMELS[:3] + [9000]
    model = Model(core, packed, swap_times, seed, split=seed % 2 == 0, numels=numels)
    model.step()
    model.step(model.units[1::2])
    model.step(model.units[:1])
    model.step()
    model.check()
    model.step()
    model.check()


@pytest.mark.parametrize("packed", PIPELINES)
@pytest.mark.parametrize("swap_times", SWAP_TIMES)
def test_device_memory_is_bounded_by_swap_times(
    core: Any, packed: bool, swap_times: int
) -> None:
    numels = [20_000] * 12 if packed else [2_000] * 120
    model = Model(core, packed, swap_times, numels=numels)
    swapped = sum(numels) * 8
    cap = max(-(-swapped // swap_times), 1024 if packed else 16_000)
    for _ in range(3):
        model.step()
    transfers = max(len(batch.transfers) for batch in model.device.plan.batches)
    # Alignment: of what starts a transfer, and of each of the per-tensor pipeline's buffers.
    assert model.backend.peak <= 2 * cap + (4 if packed else 2) * 512 * transfers
    model.check()


def test_one_tensor_that_is_90_percent_of_the_model_does_not_raise_the_bound(core: Any) -> None:
    numels = [1000] * 5 + [90_000] + [1000] * 5
    model = Model(core, True, 16, numels=numels)
    model.step()
    model.step()
    assert model.backend.peak <= 2 * -(-sum(numels) * 8 // 16) + 8 * 512
    model.check()


@pytest.mark.parametrize("packed", PIPELINES)
def test_memory_is_not_doubled_when_the_gradients_change_between_steps(
    core: Any, packed: bool
) -> None:
    """A new plan must not take new staging while the last step still drains."""
    model = Model(core, packed, 4)
    model.step()
    model.backend.peak = model.backend.held
    for active in (model.units[::2], model.units, model.units[1:], model.units):
        model.step(active)
    bound = max(2 * -(-sum(NUMELS) * 8 // 4), 0 if packed else 2 * 8 * max(NUMELS))
    assert model.backend.peak <= bound + 20 * 512
    model.check()


@pytest.mark.parametrize("packed", PIPELINES)
def test_nothing_is_made_anew_while_the_step_stays_the_same(core: Any, packed: bool) -> None:
    model = Model(core, packed, 7)
    model.step()
    plan = model.device.plan
    model.backend.calls.clear()
    for _ in range(3):
        model.step()
    assert model.device.plan is plan
    made = {call[0] for call in model.backend.calls}
    assert not made & {"make_buffer", "make_event", "device_view", "allocate_slab", "host_tensor"}
    model.check()


def test_packed_waits_on_the_host_only_for_the_step_before(core: Any) -> None:
    model = Model(core, True, 16)
    model.step()
    model.device.wait_landed()
    model.backend.calls.clear()
    model.step()
    assert not model.backend.names("synchronize")
    model.check()


@pytest.mark.parametrize("packed", PIPELINES)
def test_what_has_no_gradient_is_not_transferred(core: Any, packed: bool) -> None:
    model = Model(core, packed, 7)
    model.step()
    model.check()
    for active in (model.units[::2], [model.units[3]], model.units[4:6]):
        model.backend.calls.clear()
        model.step(active)
        wanted = sum(unit.numel * 8 for unit in active)
        for role in (StreamRole.COPY_IN, StreamRole.COPY_OUT):
            copied = [call[2] for call in model.backend.names("copy") if call[1] is role]
            # Alignment between neighbours of a run travels with them.
            assert wanted <= sum(copied) <= wanted + 16 * 2 * len(active)
        model.check()


def test_a_maximal_run_is_one_transfer(core: Any) -> None:
    """Six neighbours in one batch: one copy in; without the third, two."""
    model = Model(core, True, 1, numels=[1024] * 6)
    model.step()
    copies = [call for call in model.backend.names("copy") if call[1] is StreamRole.COPY_IN]
    batches = len(model.device.plan.batches)
    assert len(copies) == batches
    for active, runs in ((model.units[:2] + model.units[3:], 1), (model.units[1:], 0)):
        model.backend.calls.clear()
        model.step(active)
        copies = [call for call in model.backend.names("copy") if call[1] is StreamRole.COPY_IN]
        assert len(copies) <= len(model.device.plan.batches) + runs
    model.check()


def test_every_piece_is_updated_once_and_in_order(core: Any) -> None:
    model = Model(core, True, 16)
    model.step()
    flat = [piece for batch in model.times for piece in batch]
    assert flat == sorted(flat)
    for index, numel in enumerate(NUMELS):
        pieces = [(start, n) for i, start, n in flat if i == index]
        assert sum(n for _, n in pieces) == numel
        assert [start for start, _ in pieces] == [
            sum(n for _, n in pieces[:k]) for k in range(len(pieces))
        ]
    model.check()


@pytest.mark.parametrize("packed", PIPELINES)
def test_a_held_state_is_a_snapshot(core: Any, packed: bool) -> None:
    model = Model(core, packed, 7)
    model.step()
    model.device.wait_landed()
    held = model.units[3].slots[0].cpu_tensor
    before = held.numbers().copy()
    model.backend.held_elsewhere.add(id(held))
    model.step(check_held=True)
    model.check()
    assert (held.numbers() == before).all()


@pytest.mark.parametrize("packed", PIPELINES)
def test_running_out_of_device_memory_strikes_before_anything_is_updated(
    core: Any, packed: bool
) -> None:
    model = Model(core, packed, 7)
    model.step()
    model.check()
    needed = model.device.plan.staging_nbytes
    for limit in range(0, needed, max(1, needed // 23)):
        model.backend.device_limit = limit
        model.times.clear()
        model.device.settle(model.units, model, False)
        with pytest.raises(MemoryError):
            model.device.acquire()
        assert not model.times
        model.check()
    model.backend.device_limit = needed
    model.step()
    model.check()


@pytest.mark.parametrize("packed", PIPELINES)
@pytest.mark.parametrize("swap_times", [2, 7])
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("times", [1, 2, 10**9], ids=["once", "twice", "for ever"])
def test_a_fault_at_any_call_leaves_every_parameter_old_or_new_or_named_torn(
    core: Any, packed: bool, swap_times: int, steps_before: int, times: int
) -> None:
    """And none of the staging memory stays behind, once the device answers again."""
    numels = [300, 5000, 128, 9000, 777]
    total = faults_of(core, packed, swap_times, steps_before, numels)
    for position in range(total):
        model = Model(core, packed, swap_times, seed=position, numels=numels)
        for _ in range(steps_before):
            model.step()
        model.device.wait_landed()
        count = 0

        def fail(name: str) -> None:
            nonlocal count
            count += 1
            if position < count <= position + times:
                raise OSError(f"fault at {name}")

        updater: Any = Updater(model.run, lambda: True)
        model.backend.fail = fail
        try:
            model.device.settle(model.units, model, False)
            model.device.acquire()
            model.device.fill()
            model.device.run(updater)
        except OSError:
            pass
        else:
            pytest.fail("a fault was swallowed")
        model.backend.fail = lambda name: None
        progress = updater.progress
        assert not progress.updated & progress.torn, position
        if times == 1:
            assert not progress.torn, "one fault outside the update can be rolled forward"
        assert progress.begun <= progress.torn, position
        for unit in model.units:
            if unit.param_index in progress.updated:
                model.expect(unit)
        healthy = [unit for unit in model.units if unit.param_index not in progress.torn]
        everything, model.units = model.units, healthy
        if times == 1:
            model.check()
        model.units = everything
        if not progress.torn:
            model.step()
            model.check()


def faults_of(
    core: Any, packed: bool, swap_times: int, steps_before: int, numels: Sequence[int]
) -> int:
    model = Model(core, packed, swap_times, numels=numels)
    for _ in range(steps_before):
        model.step()
    model.device.wait_landed()
    model.backend.calls.clear()
    model.step()
    return len(model.backend.calls)


@pytest.mark.parametrize("packed", PIPELINES)
def test_a_fault_inside_the_update_names_what_is_torn(core: Any, packed: bool) -> None:
    for batch in range(4):
        model = Model(core, packed, 7)
        model.step()
        model.check()
        seen: list[Any] = []

        def before(units: Sequence[Any], batch: int = batch, seen: list[Any] = seen) -> None:
            seen.append(units)
            if len(seen) > batch:
                raise KeyboardInterrupt

        model.before_update = before
        updater: Any = Updater(model.run, lambda: True)
        model.device.settle(model.units, model, False)
        model.device.acquire()
        model.device.fill()
        with pytest.raises(KeyboardInterrupt):
            model.device.run(updater)
        progress = updater.progress
        assert {unit.param_index for unit in seen[-1]} <= progress.torn
        assert not progress.torn & progress.updated
        assert len(seen) == batch + 1, "nothing more is updated after an interrupt"
        for unit in model.units:
            if unit.param_index in progress.updated:
                model.expect(unit)
        model.units = [u for u in model.units if u.param_index not in progress.torn]
        model.check()
