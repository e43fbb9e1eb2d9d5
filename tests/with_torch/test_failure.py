"""What is left of a training when a step fails: everything, or an error that says what is lost.

Each parameter is compared with its own native trajectory: after a fault it must be, with all its
states and its step counter, exactly where the native one is before or after the update, or it must
be named by the error. Nothing else is allowed.
"""
from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
from device_under_test import IS_FULL
from torch import Tensor
from torch.optim import Adam, AdamW
from training import SWAP_CLASS, make_params, noise, params_of

from swap_adam import SwapOptimizerConfig
from swap_adam.slot import Residency
from swap_adam.swap import swap_of
from swap_adam.torch.backend import TorchBackend

pytestmark = pytest.mark.simulator_only

MODES: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False}, "foreach": {}, "fused": {"fused": True},
}
PIPELINES = [pytest.param(True, id="packed"), pytest.param(False, id="per tensor")]
# Small ones, one below min_numel, and one that is cut over several batches.
SHAPES: list[tuple[int, ...]] = [(1100,), (9, 300), (40, 180), (100,), (1024,), (2049,)]
State = dict[str, Tensor]


def copied(param: Tensor, state: dict[str, Any]) -> State:
    return {
        "param": param.detach().cpu().clone(),
        **{name: value.detach().cpu().clone() for name, value in state.items()},
    }


def same(left: State, right: State) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


class Trajectory:
    """The native parameters after 0, 1, 2... updates, each parameter on its own."""

    def __init__(self, mode: str, original: type = AdamW, shapes: Any = SHAPES) -> None:
        self.options = MODES[mode]
        self.original = original
        self.shapes = shapes
        params = make_params(shapes)
        self.natives = [original([param], **self.options) for param in params]
        self.after = [[copied(param, {})] for param in params]

    def at(self, index: int, updates: int) -> State:
        while len(self.after[index]) <= updates:
            native = self.natives[index]
            (param,) = native.param_groups[0]["params"]
            param.grad = noise(len(self.after[index]), index, param.detach())
            native.step()
            self.after[index].append(copied(param, native.state[param]))
        return self.after[index][updates]


TRAJECTORIES: dict[tuple[str, type], Trajectory] = {}


def trajectory(mode: str, original: type = AdamW) -> Trajectory:
    return TRAJECTORIES.setdefault((mode, original), Trajectory(mode, original))


class Training:
    """Our optimizer, and how many updates each of its parameters has had."""

    def __init__(
        self, mode: str, packed: bool = True, swap_times: int = 4, original: type = AdamW,
        steps: int = 0,
    ) -> None:
        self.truth = trajectory(mode, original)
        self.params = make_params(SHAPES)
        self.optimizer: Any = SWAP_CLASS[original](
            self.params, **MODES[mode],
            swap_config=SwapOptimizerConfig(packed_swap=packed, swap_times=swap_times),
        )
        self.updates = [0] * len(self.params)
        for index in range(len(self.params)):  # made now, not while memory is measured
            self.truth.at(index, steps + 3)
        for _ in range(steps):
            self.step()

    def give_gradients(self) -> None:
        for index, param in enumerate(self.params):
            param.grad = noise(self.updates[index] + 1, index, param.detach())

    def step(self) -> None:
        self.give_gradients()
        self.optimizer.step()
        self.updates = [count + 1 for count in self.updates]

    def now(self, index: int) -> State:
        param = self.params[index]
        # Behind the property's back, which waits.
        states = self.optimizer.__dict__["state"]
        return copied(param, states[param] if param in states else {})

    def assert_right(self) -> None:
        swap_of(self.optimizer).wait_landed()
        for index, count in enumerate(self.updates):
            have, want = self.now(index), self.truth.at(index, count)
            assert have.keys() == want.keys()
            for name in have:
                assert torch.equal(have[name], want[name]), f"{name} of parameter {index}"

    def find_out(self) -> None:
        """After a fault: every parameter is as before or as after, as a whole, or torn."""
        swap_of(self.optimizer).wait_landed()
        torn = swap_of(self.optimizer).torn
        for index, count in enumerate(self.updates):
            if index in torn:
                continue
            have = self.now(index)
            if same(have, self.truth.at(index, count + 1)):
                self.updates[index] += 1
            else:
                before = self.truth.at(index, count)
                fresh = count == 0 and len(have) > 1
                if fresh:  # its states were made, and are as new
                    assert torch.equal(have["param"], before["param"]), index
                    assert all(not value.any() for name, value in have.items() if name != "param")
                else:
                    assert same(have, before), f"parameter {index} is neither before nor after"

    def residency(self) -> set[Residency]:
        return {
            slot.residency for device in swap_of(self.optimizer).devices.values()
            for unit in device.units for slot in unit.slots
        }


def notes_of(error: BaseException) -> str:
    return "\n".join([*getattr(error, "__notes__", []), *map(str, error.args)])


@pytest.fixture(autouse=True)
def _fast_garbage_collection() -> Iterator[None]:
    """What is there already is no garbage: without it a collection takes milliseconds."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


# Out of memory


@pytest.mark.parametrize("packed", PIPELINES)
@pytest.mark.parametrize("steps", [0, 2], ids=["first step", "later step"])
@pytest.mark.parametrize(
    "mode, original",
    [("for-loop", AdamW), ("foreach", AdamW), ("fused", AdamW), ("foreach", Adam)],
)
def test_running_out_of_device_memory_at_any_point_changes_nothing(
    simulator: ModuleType, mode: str, packed: bool, steps: int, original: type
) -> None:
    """The capacity grows from nothing to enough: it strikes before any update."""
    training = Training(mode, packed, original=original, steps=steps)
    training.give_gradients()
    torch.accelerator.synchronize()
    gc.collect()
    held = simulator.memory_held()
    failures = 0
    block = 512 * (1 if IS_FULL else 5)
    while True:
        simulator.configure(capacity_nbytes=simulator.memory_held() + failures * block)
        try:
            training.optimizer.step()
            break
        except torch.OutOfMemoryError as error:
            assert "0 of 6 parameters were updated" in notes_of(error) or steps == 0
        simulator.configure(capacity_nbytes=0)
        failures += 1
        assert not swap_of(training.optimizer).torn
        for index, count in enumerate(training.updates):
            assert torch.equal(
                training.params[index].detach().cpu(), training.truth.at(index, count)["param"]
            )
        if failures % 8 == 1:
            before = list(training.updates)
            training.find_out()
            assert training.updates == before, "nothing has changed"
            torch.accelerator.synchronize()
            gc.collect()
            if steps:
                assert simulator.memory_held() == held
    assert failures > 15
    print(f"{failures} capacities were too small")
    simulator.configure(capacity_nbytes=0)
    training.updates = [count + 1 for count in training.updates]
    training.assert_right()
    training.step()
    training.assert_right()


def test_what_the_step_reserves_is_enough_for_it(simulator: ModuleType) -> None:
    """With a capacity of exactly what the step said that it needs, it runs."""
    for mode in MODES:
        for packed in (True, False):
            training = Training(mode, packed, steps=1)
            torch.accelerator.synchronize()
            gc.collect()
            (device,) = swap_of(training.optimizer).devices.values()
            training.give_gradients()
            needed = device.plan.staging_nbytes + device.plan.scratch_nbytes
            simulator.configure(capacity_nbytes=simulator.memory_held() + needed)
            training.optimizer.step()
            simulator.configure(capacity_nbytes=0)
            training.updates = [count + 1 for count in training.updates]
            training.assert_right()


def test_memory_taken_between_prefetch_and_step_is_missed_before_any_update(
    simulator: ModuleType,
) -> None:
    """Backward allocates after the prefetch: what is left must do for the update, or nothing."""
    training = Training("foreach", steps=1)
    (device,) = swap_of(training.optimizer).devices.values()
    training.give_gradients()
    torch.accelerator.synchronize()
    gc.collect()
    training.optimizer.prefetch()
    simulator.configure(
        capacity_nbytes=simulator.memory_held() + device.plan.scratch_nbytes // 2
    )
    with pytest.raises(torch.OutOfMemoryError):
        training.optimizer.step()
    simulator.configure(capacity_nbytes=0)
    assert not swap_of(training.optimizer).torn
    training.assert_right()
    training.step()
    training.assert_right()


# A fault outside the update call


class Faults:
    """Raises at one call of the backend, or at several, before or after it did its work."""

    METHODS = (
        "make_buffer", "acquire", "release", "reserve", "device_view", "byte_view", "copy",
        "make_event", "record", "wait", "is_complete", "synchronize", "allocate_slab",
        "host_tensor", "host_copy",
    )

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.first, self.count, self.times, self.after = -1, 0, 1, False
        self.error: Callable[[str], BaseException] = OSError
        self.names: list[str] = []
        for name in self.METHODS:
            patch.setattr(TorchBackend, name, self._wrap(name, getattr(TorchBackend, name)))

    def _wrap(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(backend: TorchBackend, *arguments: Any) -> Any:
            position = self.count
            self.count += 1
            self.names.append(name)
            fails = 0 <= self.first <= position < self.first + self.times
            if fails and not self.after:
                raise self.error(f"fault at {name}, call {position}")
            result = method(backend, *arguments)
            if fails:
                raise self.error(f"fault after {name}, call {position}")
            return result

        return call

    def arm(self, position: int, times: int = 1, after: bool = False) -> None:
        self.count, self.first, self.times, self.after = 0, position, times, after
        self.names = []

    def disarm(self) -> None:
        self.first = -1


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


def calls_of_a_step(
    faults: Faults, mode: str, packed: bool, steps: int, reads: bool = False
) -> int:
    """``reads``: the states before it, so that no copy is in flight when it begins."""
    training = Training(mode, packed, steps=steps)
    training.give_gradients()
    if reads:
        training.optimizer.state_dict()
    faults.arm(-1)
    training.optimizer.step()
    return faults.count


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("packed", PIPELINES)
@pytest.mark.parametrize("mode, steps", [("fused", 0), ("fused", 2), ("foreach", 2)])
def test_a_fault_at_any_backend_call_is_rolled_forward_or_changes_nothing(
    simulator: ModuleType, faults: Faults, mode: str, packed: bool, steps: int, after: bool
) -> None:
    total = calls_of_a_step(faults, mode, packed, steps)
    assert total > 40
    outcomes = set()
    for position in range(total):
        training = Training(mode, packed, steps=steps)
        training.give_gradients()
        torch.accelerator.synchronize()
        held = simulator.memory_held()
        faults.arm(position, after=after)
        try:
            training.optimizer.step()
        except OSError as error:
            caught: BaseException = error
        else:
            pytest.fail(f"the fault at {faults.names[position]} was swallowed")
        faults.disarm()
        assert not swap_of(training.optimizer).torn, "one fault outside the update tears nothing"
        before = sum(training.updates)
        training.find_out()
        updated = sum(training.updates) - before
        outcomes.add(updated)
        if "parameters were updated" in notes_of(caught):
            assert f"{updated} of 6 parameters were updated" in notes_of(caught)
            assert ("not a retry" in notes_of(caught)) == bool(updated)
            assert ("Nothing has changed" in notes_of(caught)) == (not updated)
        else:
            assert steps == 0 and updated == 0, "a note, unless the states were still being made"
        assert training.residency() <= {Residency.HOST}
        torch.accelerator.synchronize()
        if steps:
            del caught
            assert simulator.memory_held() == held, f"memory leaked at {faults.names[position]}"
        # The optimizer goes on.
        training.step()
        training.assert_right()
    assert {0, 6} <= outcomes and len(outcomes) > 2, "faults struck at different times"


@pytest.mark.parametrize("times", [2, 10**9], ids=["twice", "for ever"])
@pytest.mark.parametrize("packed", PIPELINES)
def test_a_device_that_goes_on_failing_tears_what_cannot_be_finished(
    simulator: ModuleType, faults: Faults, packed: bool, times: int
) -> None:
    """Rolling forward fails too: what is half done is named, and only load_state_dict helps."""
    total = calls_of_a_step(faults, "fused", packed, 1, reads=True)
    torn = 0
    for position in range(total):
        training = Training("fused", packed, steps=1)
        saved = copy.deepcopy(training.optimizer.state_dict())
        params = [param.detach().clone() for param in training.params]
        training.give_gradients()
        faults.arm(position, times)
        with pytest.raises(OSError) as caught:
            training.optimizer.step()
        faults.disarm()
        note = notes_of(caught.value)
        del caught
        counts = list(training.updates)
        if swap_of(training.optimizer).torn:
            torn += 1
            assert "Half updated" in note
            for index in swap_of(training.optimizer).torn:
                assert f"parameter {index} of its group" in note
            with pytest.raises(RuntimeError, match="half updated"):
                training.optimizer.step()
            training.optimizer.load_state_dict(saved)
            with torch.no_grad():
                for param, value in zip(training.params, params):
                    param.copy_(value)
            training.updates = counts
        else:
            training.find_out()
        training.step()
        training.assert_right()
    assert torn > 3


# A fault inside the update call


class Interrupt:
    """Interrupts the n-th call of the functional: before it, or when half of it is done."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        import swap_adam.torch.adam as module

        self.at, self.half, self.count = -1, False, 0
        original = module.adam

        def adam(params: Any, grads: Any, *lists: Any, **options: Any) -> None:
            self.count += 1
            if self.count - 1 != self.at:
                original(params, grads, *lists, **options)
                return
            if self.half:
                some = len(params) // 2 or 1
                original(params[:some], grads[:some], *(part[:some] for part in lists), **options)
            raise KeyboardInterrupt

        patch.setattr(module, "adam", adam)

    def arm(self, at: int, half: bool) -> None:
        self.at, self.half, self.count = at, half, 0


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupt]:
    yield Interrupt(monkeypatch)


@pytest.mark.parametrize("half", [False, True], ids=["at once", "half done"])
@pytest.mark.parametrize("packed", PIPELINES)
@pytest.mark.parametrize("mode", MODES)
def test_an_interrupt_inside_the_update_names_what_is_torn_and_refuses_to_go_on(
    mode: str, packed: bool, half: bool, interrupt: Interrupt
) -> None:
    position = 0
    while True:
        training = Training(mode, packed, steps=1)
        saved = copy.deepcopy(training.optimizer.state_dict())
        params = [param.detach().clone() for param in training.params]
        training.give_gradients()
        interrupt.arm(position, half)
        try:
            training.optimizer.step()
            break
        except KeyboardInterrupt as error:
            note = notes_of(error)
        interrupt.arm(-1, False)
        torn = set(swap_of(training.optimizer).torn)
        # Before the functional, nothing was written: where that can be told, by step counters on
        # the host, nothing is torn.
        assert bool(torn) == (half or mode == "fused")
        for index, shape in enumerate(SHAPES):
            named = f"parameter {index} of its group (shape {shape})"
            assert (named in note) == (index in torn)
        counts = list(training.updates)
        training.find_out()
        updated = sum(training.updates) - sum(counts)
        assert f"{updated} of 6 parameters were updated" in note
        if torn:
            with pytest.raises(RuntimeError, match="half updated"):
                training.optimizer.step()
            with pytest.raises(RuntimeError, match="half updated"):
                training.optimizer.state_dict()
        # A user restores the model and the optimizer, and goes on.
        training.optimizer.load_state_dict(saved)
        with torch.no_grad():
            for param, value in zip(training.params, params):
                param.copy_(value)
        training.updates = counts
        training.assert_right()
        training.step()
        training.assert_right()
        position += 1
    assert position >= 3


@pytest.mark.parametrize("how", ["new tensors", "in place", "new entry", "deleted entry"])
@pytest.mark.parametrize("packed", PIPELINES)
def test_what_is_torn_can_be_mended_by_hand_as_well_as_by_a_load(
    packed: bool, how: str, interrupt: Interrupt
) -> None:
    training = Training("fused", packed, steps=0 if how == "deleted entry" else 1)
    if how == "deleted entry":
        training.step()
    saved = copy.deepcopy(training.optimizer.state_dict())["state"]
    params = [param.detach().clone() for param in training.params]
    training.give_gradients()
    interrupt.arm(1, True)
    with pytest.raises(KeyboardInterrupt):
        training.optimizer.step()
    interrupt.arm(-1, False)
    states = training.optimizer.state
    torn = sorted(swap_of(training.optimizer).torn)
    assert torn
    with torch.no_grad():
        for param, value in zip(training.params, params):
            param.copy_(value)
    for index in range(len(params)):
        with pytest.raises(RuntimeError, match="half updated"):
            training.optimizer.state_dict()
        param = training.params[index]
        entry = {name: value.clone() for name, value in saved[index].items()}
        if how == "new entry":
            states[param] = entry
        elif how == "deleted entry":
            del states[param]
        elif how == "new tensors":
            states[param].update(entry)
        else:
            for name, value in entry.items():
                states[param][name].copy_(value)
        if index == max(torn):
            break
    del states
    if how == "deleted entry":
        training.optimizer.state_dict()
        return
    for index in range(max(torn) + 1, len(params)):
        for name, value in saved[index].items():
            training.optimizer.state[training.params[index]][name].copy_(value)
    training.assert_right()
    training.step()
    training.assert_right()


def test_a_failed_load_leaves_torn_what_is_torn(interrupt: Interrupt) -> None:
    training = Training("fused", steps=1)
    saved = copy.deepcopy(training.optimizer.state_dict())
    training.give_gradients()
    interrupt.arm(1, True)
    with pytest.raises(KeyboardInterrupt):
        training.optimizer.step()
    interrupt.arm(-1, False)
    with pytest.raises(ValueError):
        training.optimizer.load_state_dict({"state": {}, "param_groups": []})
    with pytest.raises(RuntimeError, match="half updated"):
        training.optimizer.step()
    training.optimizer.load_state_dict(saved)
    training.optimizer.state_dict()


def test_torn_parameters_with_names_are_named_by_them(interrupt: Interrupt) -> None:
    params = make_params([(2000,), (3000,)])
    optimizer: Any = SWAP_CLASS[AdamW]([("embedding", params[0]), ("head", params[1])])
    for index, param in enumerate(params):
        param.grad = noise(0, index, param.detach())
    optimizer.step()
    interrupt.arm(0, True)
    with pytest.raises(KeyboardInterrupt) as caught:
        optimizer.step()
    assert "embedding (shape (2000,))" in notes_of(caught.value)
    with pytest.raises(RuntimeError, match="embedding"):
        optimizer.step()


def test_loading_right_after_a_fault_does_not_race_with_its_copies(
    simulator: ModuleType, interrupt: Interrupt
) -> None:
    """Copies of the failed step are still under way when the slabs are written."""
    for position in range(4):
        training = Training("fused", steps=1)
        saved = copy.deepcopy(training.optimizer.state_dict())
        training.give_gradients()
        interrupt.arm(position, True)
        with pytest.raises(KeyboardInterrupt):
            training.optimizer.step()
        interrupt.arm(-1, False)
        training.optimizer.load_state_dict(saved)
        assert simulator.violations(clear=False) == []


# An interrupt anywhere


def interrupted_at(line: int, call: Callable[[], None]) -> tuple[int, bool]:
    """Runs ``call`` with a KeyboardInterrupt at the n-th line of the package that is executed.

    Returns how many lines there were, and whether it was interrupted.
    """
    count = 0

    def local(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count == line:
                raise KeyboardInterrupt
        return local

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        # Python itself swallows an exception in __del__, and one on the way out of a `with` leaves
        # the stream of a copy set: no code of ours could put either right.
        if frame.f_code.co_name in ("__del__", "copy"):
            return None
        name = frame.f_code.co_filename
        return local if "/swap_adam/" in name and "/simulator/" not in name else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return count, True
    finally:
        sys.settrace(before)
    return count, False


@pytest.mark.parametrize("packed", PIPELINES)
@pytest.mark.parametrize("steps", [0, 1], ids=["first step", "later step"])
def test_an_interrupt_at_any_line_leaves_no_parameter_silently_half_updated(
    packed: bool, steps: int
) -> None:
    """Ctrl-C arrives anywhere. Every so many lines here, at each with SWAP_ADAM_TEST_FULL=1."""
    probe = Training("fused", packed, swap_times=2, steps=steps)
    probe.give_gradients()
    total, _ = interrupted_at(-1, probe.optimizer.step)
    stride = 1 if IS_FULL else max(1, total // 80)
    torn = 0
    for line in range(1 + (7 * steps) % stride, total, stride):
        training = Training("fused", packed, swap_times=2, steps=steps)
        training.give_gradients()
        _, interrupted = interrupted_at(line, training.optimizer.step)
        assert interrupted
        training.find_out()
        if swap_of(training.optimizer).torn:
            torn += 1
            continue
        training.step()
        training.assert_right()
    print(f"{total} lines, every {stride}. interrupted, torn {torn} times")


# Several devices


@pytest.mark.parametrize("packed", PIPELINES)
def test_running_out_of_memory_on_the_second_device_changes_nothing_on_the_first(
    simulator: ModuleType, packed: bool
) -> None:
    def make() -> list[Tensor]:
        return [
            *make_params([(40, 50), (3000,)], device="simulated:0"),
            *make_params([(60, 500), (2000,)], device="simulated:1", seed=1),
        ]

    native, swapped = AdamW(make()), SWAP_CLASS[AdamW](
        make(), swap_config=SwapOptimizerConfig(packed_swap=packed)  # type: ignore[call-arg]
    )

    def gradients(optimizer: Any, step: int) -> None:
        for index, param in enumerate(params_of(optimizer)):
            param.grad = noise(step, index, param.detach())

    for optimizer in (native, swapped):
        gradients(optimizer, 0)
        optimizer.step()
    gradients(swapped, 1)
    for index in range(2):
        torch.accelerator.synchronize(index)
    gc.collect()
    held = [simulator.memory_held(index) for index in range(2)]
    # There is one capacity for both: something else fills the second one.
    ballast = torch.empty(held[0] + 2**20, dtype=torch.uint8, device="simulated:1")
    simulator.configure(capacity_nbytes=simulator.memory_held(1) + 4096)
    with pytest.raises(torch.OutOfMemoryError, match="simulated:1"):
        swapped.step()
    simulator.configure(capacity_nbytes=0)
    del ballast
    for index in range(2):
        torch.accelerator.synchronize(index)
    gc.collect()
    assert [simulator.memory_held(index) for index in range(2)] == held
    for left, right in zip(params_of(native), params_of(swapped)):
        assert torch.equal(left.cpu(), right.cpu())
        for name, value in native.state[left].items():
            assert torch.equal(value.cpu(), swapped.state[right][name].cpu())
    gradients(native, 1)
    native.step()
    gradients(swapped, 1)
    swapped.step()
    for left, right in zip(params_of(native), params_of(swapped)):
        assert torch.equal(left.cpu(), right.cpu())


def test_a_fault_on_the_second_device_leaves_the_first_updated_and_says_so(
    faults: Faults,
) -> None:
    params = [
        *make_params([(40, 50), (3000,)], device="simulated:0"),
        *make_params([(60, 50), (2000,)], device="simulated:1", seed=1),
    ]
    optimizer: Any = SWAP_CLASS[AdamW](
        params, fused=True, swap_config=SwapOptimizerConfig(swap_times=1)  # type: ignore[call-arg]
    )

    def gradients() -> None:
        for index, param in enumerate(params):
            param.grad = noise(0, index, param.detach())

    gradients()
    optimizer.step()
    gradients()
    optimizer.state_dict()  # as below, no copy is in flight when the step begins
    faults.arm(-1)
    optimizer.step()
    total = faults.count
    seen = set()
    for position in range(total):
        gradients()
        counts = [int(optimizer.state[param]["step"]) for param in params]
        faults.arm(position)
        with pytest.raises(OSError) as caught:
            optimizer.step()
        faults.disarm()
        updated = sum(int(optimizer.state[param]["step"]) for param in params) - sum(counts)
        assert f"{updated} of 4 parameters were updated" in notes_of(caught.value)
        seen.add(updated)
        gradients()
        optimizer.step()
    assert {0, 2, 4} <= seen
