"""Proof that the tests can fail: each wait, event and bound of the pipeline is deleted in turn.

A wait that can be deleted without anything noticing is either not needed or not tested. Every call
that orders something is taken out, one at a time, wherever the pipeline makes it; then a short
training with all that users do between steps must raise a race, give a wrong number, hold more
memory than its bound, or block. What survives is listed by its line.
"""
from __future__ import annotations

import gc
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW
from training import make_params, noise

import swap_adam
from swap_adam import SwapOptimizerConfig
from swap_adam.swap import swap_of
from swap_adam.torch import SwapAdamW
from swap_adam.torch.backend import TorchBackend

pytestmark = pytest.mark.simulator_only

SHAPES: list[tuple[int, ...]] = [(3000,), (40, 180), (9000,), (2049,), (3000,), (30, 300)]
PACKAGE = str(Path(swap_adam.__file__).parent)
CONFIGS: dict[str, dict[str, Any]] = {
    "packed": {},
    "packed, kept": {"keep_staging": True},
    "packed, drained": {"drain_in_step": True},
    "per tensor": {"packed_swap": False},
    "per tensor, drained": {"packed_swap": False, "drain_in_step": True},
}
Site = tuple[str, int, str]  # file, line, method


class Caught(Exception):
    """What a deletion was noticed by."""


class Deletions:
    """Skips what the backend is asked for at one place of the package, and notes the places."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.target: Site | None = None
        self.sites: set[Site] = set()
        for name, skip in self.skips().items():
            patch.setattr(TorchBackend, name, self._wrap(name, getattr(TorchBackend, name), skip))

    @staticmethod
    def skips() -> dict[str, Callable[..., Any]]:
        """What happens in the place of a call that is deleted."""
        nothing = lambda *_: None  # noqa: E731
        return {
            "wait": nothing, "record": nothing, "synchronize": nothing, "reserve": nothing,
            "is_complete": lambda *_: True,
            "release": lambda method, backend, buffer, pending: method(backend, buffer, None),
        }

    def _wrap(
        self, name: str, method: Callable[..., Any], skip: Callable[..., Any]
    ) -> Callable[..., Any]:
        def call(backend: TorchBackend, *arguments: Any) -> Any:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
                frame = frame.f_back  # a fault of one of the users below, around the method
            assert frame is not None
            site = (frame.f_code.co_filename, frame.f_lineno, name)
            if name == "release" and arguments[1] is None:
                return method(backend, *arguments)  # nothing to delete
            self.sites.add(site)
            if site != self.target:
                return method(backend, *arguments)
            if name == "release":
                return skip(method, backend, *arguments)
            return skip()

        return call

    @contextmanager
    def deleting(self, site: Site | None) -> Iterator[None]:
        self.target = site
        try:
            yield
        finally:
            self.target = None


@pytest.fixture(autouse=True)
def _fast_garbage_collection() -> Iterator[None]:
    """What is there already is no garbage: without it a collection takes milliseconds."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def deletions(monkeypatch: pytest.MonkeyPatch) -> Deletions:
    return Deletions(monkeypatch)


def native_numbers(steps: int, active: Callable[[int, int], bool]) -> list[dict[str, Tensor]]:
    params = make_params(SHAPES)
    optimizer = AdamW(params, fused=True)
    for step in range(steps):
        for index, param in enumerate(params):
            param.grad = noise(step, index, param.detach()) if active(step, index) else None
        optimizer.step()
    return [
        {"param": param.detach().cpu(), **{k: v.cpu() for k, v in optimizer.state[param].items()}}
        for param in params
    ]


def everything(step: int, index: int) -> bool:
    return True


def some(step: int, index: int) -> bool:
    return step % 3 != 1 or index % 2 == 0


class User:
    """A training on the simulated device, with what users do between steps."""

    def __init__(self, simulator: ModuleType, config: dict[str, Any], swap_times: int = 4) -> None:
        gc.collect()
        self.simulator = simulator
        self.params = make_params(SHAPES)
        self.optimizer: Any = SwapAdamW(
            self.params, fused=True,
            swap_config=SwapOptimizerConfig(swap_times=swap_times, **config),
        )
        self.swap_times = swap_times
        self.config = config
        self.steps = 0

    def backward(self, active: Callable[[int, int], bool]) -> None:
        """Gradients, and work on the compute stream that takes a while and frees its memory."""
        for index, param in enumerate(self.params):
            has_grad = active(self.steps, index)
            param.grad = noise(self.steps, index, param.detach()) if has_grad else None
        activations = torch.ones(300, 300, device="simulated")
        for _ in range(3):
            activations = activations @ activations
        del activations

    def step(self, active: Callable[[int, int], bool] = everything) -> None:
        self.backward(active)
        self.optimizer.step()
        self.steps += 1

    def bound(self) -> int:
        nbytes = sum(8 * param.numel() for param in self.params)
        cap = -(-nbytes // self.swap_times)
        if self.config.get("packed_swap") is False:
            cap = max(cap, 8 * max(param.numel() for param in self.params))
        transfers = 24  # 512 bytes of alignment each
        return 2 * cap + 512 * transfers

    def steps_within_the_bound(self, count: int, active: Callable[[int, int], bool]) -> None:
        """With no synchronisation in between: the last step's copies are still under way."""
        # Copied to the device beforehand: a copy from pageable memory would wait.
        gradients = [
            [noise(step, index, param.detach()) for index, param in enumerate(self.params)]
            for step in range(self.steps, self.steps + count)
        ]
        for param in self.params:
            param.grad = None
        torch.accelerator.synchronize()
        kept = self.bound() if self.config.get("keep_staging") else 0
        resident = self.simulator.memory_held() - kept
        for of_step in gradients:
            for index, (param, gradient) in enumerate(zip(self.params, of_step)):
                param.grad = gradient if active(self.steps, index) else None
            torch.get_device_module("simulated").reset_peak_memory_stats()
            self.optimizer.step()
            self.steps += 1
            if self.simulator.max_memory_held() - resident > self.bound() + kept:
                raise Caught("more memory than the bound")

    def assert_right(self, expected: list[dict[str, Tensor]]) -> None:
        torch.accelerator.synchronize()
        states = self.optimizer.state
        for index, (param, want) in enumerate(zip(self.params, expected)):
            have = {"param": param.detach(), **states[param]}
            for name, value in want.items():
                if not torch.equal(have[name].cpu(), value):
                    raise Caught(f"wrong {name} of parameter {index}")


EXPECTED: dict[tuple[int, str], list[dict[str, Tensor]]] = {}


def expected(steps: int, active: Callable[[int, int], bool]) -> list[dict[str, Tensor]]:
    key = (steps, active.__name__)
    if key not in EXPECTED:
        EXPECTED[key] = native_numbers(steps, active)
    return EXPECTED[key]


# What users do. Each raises when something is wrong, and gives nothing back.


def trains_back_to_back(simulator: ModuleType, config: dict[str, Any]) -> None:
    user = User(simulator, config)
    user.step()
    user.steps_within_the_bound(3, everything)
    user.assert_right(expected(4, everything))


def allocates_right_after_a_step(simulator: ModuleType, config: dict[str, Any]) -> None:
    """The next forward takes memory that the step has just given back, and writes into it."""
    user = User(simulator, config)
    for _ in range(3):
        user.step()
        blocks = [torch.ones(size, device="simulated") for size in (20_000, 5_000, 9_000)]
        del blocks
    user.assert_right(expected(3, everything))


def reads_states_right_after_a_step(simulator: ModuleType, config: dict[str, Any]) -> None:
    user = User(simulator, config)
    for steps in range(1, 4):
        user.step()
        total = 0.0
        for param in user.params:
            total += float(user.optimizer.state[param]["exp_avg"].double().sum())
        want = sum(float(e["exp_avg"].double().sum()) for e in expected(steps, everything))
        if total != want:
            raise Caught("old states were read")


def skips_gradients(simulator: ModuleType, config: dict[str, Any]) -> None:
    user = User(simulator, config)
    for _ in range(5):
        user.step(some)
    user.assert_right(expected(5, some))


def steps_under_another_stream(simulator: ModuleType, config: dict[str, Any]) -> None:
    user = User(simulator, config)
    user.step()
    stream = torch.Stream("simulated:0")
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        user.step()
        user.step()
    torch.accelerator.current_stream().wait_stream(stream)
    user.assert_right(expected(3, everything))


def is_interrupted_and_loads(simulator: ModuleType, config: dict[str, Any]) -> None:
    """A fault in the second update, then a checkpoint is loaded at once."""
    import swap_adam.torch.adam as module

    user = User(simulator, config)
    user.step()
    saved = {
        "state": {
            key: {name: value.clone() for name, value in state.items()}
            for key, state in user.optimizer.state_dict()["state"].items()
        },
        "param_groups": user.optimizer.state_dict()["param_groups"],
    }
    kept = [param.detach().clone() for param in user.params]
    original, count = module.adam, 0

    def adam(*arguments: Any, **options: Any) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt
        original(*arguments, **options)

    module.adam = adam
    try:
        user.step()
    except KeyboardInterrupt:
        pass
    finally:
        module.adam = original
    # Memory of the failed step goes to somebody else, who writes into it.
    blocks = [torch.ones(size, device="simulated") for size in (20_000, 5_000, 9_000)]
    del blocks
    user.optimizer.load_state_dict(saved)
    with torch.no_grad():
        for param, value in zip(user.params, kept):
            param.copy_(value)
    user.step()
    user.assert_right(expected(2, everything))


def fails_outside_the_update(simulator: ModuleType, config: dict[str, Any]) -> None:
    """A fault at a copy-out, or behind an update: what was begun is finished, the rest is old."""
    for method, role, failing in (("copy", "COPY_OUT", 0), ("copy", "COPY_OUT", 4),
                                  ("record", "COMPUTE", 1), ("record", "COMPUTE", 3)):
        user = User(simulator, config)
        user.step()
        original = getattr(TorchBackend, method)
        count = 0

        def fail(backend: Any, *arguments: Any) -> None:
            nonlocal count
            if any(getattr(argument, "name", "") == role for argument in arguments):
                count += 1
                if count == failing + 1:
                    raise OSError
            original(backend, *arguments)

        setattr(TorchBackend, method, fail)
        try:
            user.step()
        except OSError:
            pass
        finally:
            setattr(TorchBackend, method, original)
        blocks = [torch.ones(size, device="simulated") for size in (20_000, 5_000, 9_000)]
        del blocks
        one, two = expected(1, everything), expected(2, everything)
        states = user.optimizer.state
        for index, param in enumerate(user.params):
            have = {"param": param.detach().cpu(), **{k: v.cpu() for k, v in states[param].items()}}
            if not any(
                all(torch.equal(have[name], want[index][name]) for name in have)
                for want in (one, two)
            ):
                raise Caught(f"parameter {index} is neither old nor new")


def runs_out_of_memory(simulator: ModuleType, config: dict[str, Any]) -> None:
    """Staging fits, the temporaries of the update do not: nothing must be torn."""
    _runs_out_of_memory(simulator, config, prefetches=False)


def runs_out_of_memory_after_a_prefetch(simulator: ModuleType, config: dict[str, Any]) -> None:
    if config.get("packed_swap") is not False:
        _runs_out_of_memory(simulator, config, prefetches=True)


def _runs_out_of_memory(simulator: ModuleType, config: dict[str, Any], prefetches: bool) -> None:
    gc.collect()
    params = make_params(SHAPES)
    optimizer: Any = SwapAdamW(
        params, foreach=False, swap_config=SwapOptimizerConfig(swap_times=4, **config)
    )
    for step in range(2):
        for index, param in enumerate(params):
            param.grad = noise(step, index, param.detach())
        if step:
            torch.accelerator.synchronize()
            if prefetches:
                optimizer.prefetch()
            there = prefetches or config.get("keep_staging", False)
            (device,) = swap_of(optimizer).devices.values()
            room = (0 if there else device.plan.staging_nbytes) + device.plan.scratch_nbytes // 2
            simulator.configure(capacity_nbytes=simulator.memory_held() + room)
        try:
            optimizer.step()
        except torch.OutOfMemoryError:
            pass
        simulator.configure(capacity_nbytes=0)
    if swap_of(optimizer).torn:
        raise Caught("out of memory inside the update")


def prefetches(simulator: ModuleType, config: dict[str, Any]) -> None:
    """The first copies of the next step run under backward; or for nothing, if none follows."""
    if config.get("packed_swap") is False:
        return
    user = User(simulator, config)
    user.step()
    for number in range(3):
        user.optimizer.prefetch()
        if number == 1:  # a checkpoint comes between
            sum(float(state["exp_avg"].sum()) for state in user.optimizer.state.values())
        user.step()
    user.assert_right(expected(4, everything))
    user.step()
    user.optimizer.prefetch()
    del user
    blocks = [torch.ones(size, device="simulated") for size in (20_000, 5_000, 9_000)]
    del blocks


def goes_away_with_its_copies_in_flight(simulator: ModuleType, config: dict[str, Any]) -> None:
    user = User(simulator, config)
    user.step()
    user.step()
    del user
    blocks = [torch.ones(size, device="simulated") for size in (20_000, 5_000, 9_000)]
    del blocks


USERS = [
    trains_back_to_back, allocates_right_after_a_step, reads_states_right_after_a_step,
    skips_gradients, steps_under_another_stream, is_interrupted_and_loads,
    fails_outside_the_update, runs_out_of_memory, runs_out_of_memory_after_a_prefetch, prefetches,
    goes_away_with_its_copies_in_flight,
]


def finds_fault(
    simulator: ModuleType, user: Callable[[ModuleType, dict[str, Any]], None],
    config: dict[str, Any],
) -> str:
    """What went wrong, or nothing."""
    simulator.configure(races="collect")
    simulator.violations()
    stream = torch.accelerator.current_stream()
    try:
        user(simulator, config)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    else:
        found = ""
    torch.accelerator.set_stream(stream)
    gc.collect()
    try:
        torch.accelerator.synchronize()
    finally:
        violations = simulator.violations()
        simulator.configure(races="raise")
    return found or (f"race: {violations[0]}" if violations else "")


def holds_states(simulator: ModuleType, config: dict[str, Any]) -> None:
    user = User(simulator, config)
    user.step()
    held = [user.optimizer.state[param]["exp_avg_sq"] for param in user.params]
    values = [value.clone() for value in held]
    user.step()
    torch.accelerator.synchronize()
    if not all(torch.equal(value, now) for value, now in zip(values, held)):
        raise Caught("a held state was overwritten")
    user.assert_right(expected(2, everything))


def changes_gradients_within_the_bound(simulator: ModuleType, config: dict[str, Any]) -> None:
    user = User(simulator, config)
    user.step()
    user.steps_within_the_bound(5, some)


def _twice_the_cap(patch: pytest.MonkeyPatch) -> None:
    import swap_adam.schedule.packed as module

    original = module.batch_cap_nbytes
    patch.setattr(module, "batch_cap_nbytes", lambda *arguments: 2 * original(*arguments))


def _no_area_is_reused(patch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    import swap_adam.schedule.packed as module

    original = module.plan_ring

    def plan_ring(*arguments: Any) -> Any:
        ring = original(*arguments)
        return replace(ring, reuses=(-1,) * len(ring.reuses))

    patch.setattr(module, "plan_ring", plan_ring)


def _reuse_is_one_batch_early(patch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    import swap_adam.schedule.packed as module

    original = module.plan_ring

    def plan_ring(*arguments: Any) -> Any:
        ring = original(*arguments)
        return replace(ring, reuses=tuple(max(batch - 1, -1) for batch in ring.reuses))

    patch.setattr(module, "plan_ring", plan_ring)


def _staging_of_the_last_step_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TorchBackend, "synchronize", lambda backend, event: None)


def _held_states_are_not_looked_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TorchBackend, "is_held_elsewhere", lambda backend, slot: False)


def _cuts_anywhere(patch: pytest.MonkeyPatch) -> None:
    import swap_adam.schedule.partition as module

    patch.setattr(module, "CUT_QUANTUM_NUMEL", 3)


def _pieces_share_their_step(patch: pytest.MonkeyPatch) -> None:
    import swap_adam.torch.update as module

    patch.setattr(
        module, "scalars_of",
        lambda units, name: [
            (unit if unit.whole is None else unit.whole).param_state[name] for unit in units
        ],
    )


def _memory_is_not_waited_for_between_per_tensor_batches(patch: pytest.MonkeyPatch) -> None:
    from swap_adam.schedule import PerTensorSchedule

    patch.setattr(PerTensorSchedule, "retire", lambda schedule, plan, index: None)


BOUNDS = [
    (_twice_the_cap, trains_back_to_back, "packed"),
    (_no_area_is_reused, trains_back_to_back, "packed"),
    (_reuse_is_one_batch_early, trains_back_to_back, "packed"),
    (_staging_of_the_last_step_is_not_waited_for, trains_back_to_back, "packed"),
    (_staging_of_the_last_step_is_not_waited_for, changes_gradients_within_the_bound, "packed"),
    (_staging_of_the_last_step_is_not_waited_for, reads_states_right_after_a_step, "per tensor"),
    (_held_states_are_not_looked_for, holds_states, "packed"),
    (_held_states_are_not_looked_for, holds_states, "per tensor"),
    (_cuts_anywhere, trains_back_to_back, "packed"),
    (_pieces_share_their_step, trains_back_to_back, "packed"),
    (_memory_is_not_waited_for_between_per_tensor_batches, trains_back_to_back, "per tensor"),
]


@pytest.mark.parametrize(
    "bound, user, config", BOUNDS,
    ids=[f"{bound.__name__[1:]}, {user.__name__}, {config}" for bound, user, config in BOUNDS],
)
def test_every_bound_that_is_lifted_is_noticed(
    simulator: ModuleType, monkeypatch: pytest.MonkeyPatch, bound: Callable[..., None],
    user: Callable[[ModuleType, dict[str, Any]], None], config: str,
) -> None:
    assert finds_fault(simulator, user, CONFIGS[config]) == ""
    with monkeypatch.context() as patch:
        bound(patch)
        found = finds_fault(simulator, user, CONFIGS[config])
    print(found[:200])
    assert found


def source(site: Site) -> str:
    file, line, method = site
    text = " ".join(linecache.getline(file, line).split())
    return f"{Path(file).name}:{line} {method}: {text}"


def test_every_deleted_wait_event_and_release_is_noticed(
    simulator: ModuleType, deletions: Deletions
) -> None:
    runs = [(user, name) for user in USERS for name in CONFIGS]
    sites_of: dict[tuple[Any, str], set[Site]] = {}
    for run in runs:
        deletions.sites = set()
        found = finds_fault(simulator, run[0], CONFIGS[run[1]])
        assert found == "", f"{run[0].__name__}, {run[1]}, with nothing deleted"
        sites_of[run] = set(deletions.sites)
    sites = set().union(*sites_of.values())
    assert all(file.startswith(PACKAGE) for file, _, _ in sites)
    assert len(sites) >= 15, "the pipeline orders its work by calls that were not seen"
    survivors = []
    for site in sorted(sites):
        for run in runs:
            if site not in sites_of[run]:
                continue
            with deletions.deleting(site):
                found = finds_fault(simulator, run[0], CONFIGS[run[1]])
            if found:
                print(f"{source(site)}\n    {run[0].__name__}, {run[1]}: {found[:150]}")
                break
        else:
            survivors.append(source(site))
    assert survivors == []
