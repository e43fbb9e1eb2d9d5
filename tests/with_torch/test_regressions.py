"""Defects that were found by trying to break it: each name says what a user would have lost."""

from __future__ import annotations

import collections
import copy
import gc
from types import ModuleType
from typing import Any

import pytest
import torch
from device_under_test import DEVICE  # tests/with_torch/support
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW

from swap_adam import swap_optimizer, unswap_optimizer
from swap_adam.swap import swap_of
from swap_adam.torch import SwapAdamW, SwapOptimizerConfig

SHAPES = [(64, 64), (100, 50), (10,)]
MOMENTS = ("exp_avg", "exp_avg_sq")


class Pair:
    """The original and ours on equal parameters, gradients and edits."""

    def __init__(
        self, shapes: list[tuple[int, ...]] = SHAPES, lrs: tuple[float, ...] = (1e-3,),
        **config: Any,
    ) -> None:
        self.native_params, self.params = self._make(shapes), self._make(shapes)
        self.native = AdamW(self._groups(self.native_params, lrs))
        self.ours = SwapAdamW(
            self._groups(self.params, lrs), swap_config=SwapOptimizerConfig(**config)
        )

    @staticmethod
    def _make(shapes: list[tuple[int, ...]]) -> list[Parameter]:
        generator = torch.Generator().manual_seed(0)
        return [Parameter(torch.randn(shape, generator=generator).to(DEVICE)) for shape in shapes]

    @staticmethod
    def _groups(params: list[Parameter], lrs: tuple[float, ...]) -> list[dict[str, Any]]:
        return [
            {"params": params[index:] if lr == lrs[-1] else [params[index]], "lr": lr}
            for index, lr in enumerate(lrs)
        ]

    def sides(self) -> list[tuple[AdamW, list[Parameter]]]:
        return [(self.native, self.native_params), (self.ours, self.params)]

    def give_gradients(self, seed: int, without: tuple[int, ...] = ()) -> None:
        for _, params in self.sides():
            generator = torch.Generator().manual_seed(seed)
            for index, param in enumerate(params):
                gradient = torch.randn(param.shape, generator=generator).to(DEVICE)
                param.grad = None if index in without else gradient

    def step(self, seed: int, without: tuple[int, ...] = ()) -> None:
        self.give_gradients(seed, without)
        for optimizer, _ in self.sides():
            optimizer.step()

    def assert_same(self) -> None:
        for left, right in zip(self.native_params, self.params):
            assert torch.equal(left, right)
            expected, state = self.native.state[left], self.ours.state[right]
            assert expected.keys() == state.keys()
            for name, value in expected.items():
                assert torch.equal(value.cpu(), state[name].cpu()), name


def cut_out(optimizer: AdamW, params: list[Parameter], part: Any) -> None:
    """Replace the first parameter by a part of it, as pruning does."""
    old = params[0]
    state = optimizer.state.pop(old)
    new = Parameter(old.detach()[part].clone())
    for name in MOMENTS:
        state[name] = state[name][part]
    optimizer.param_groups[0]["params"][0] = params[0] = new
    optimizer.state[new] = state


def test_a_parameter_moved_to_another_group_takes_the_hyperparameters_of_that_group() -> None:
    pair = Pair(SHAPES[:2], lrs=(1e-1, 1e-3), swap_times=8)
    pair.step(0)
    for optimizer, _ in pair.sides():
        groups = optimizer.param_groups
        groups[0]["params"].append(groups[1]["params"].pop())
    pair.step(1)
    pair.assert_same()


def test_removing_a_group_that_never_had_a_gradient_does_not_break_the_next_step() -> None:
    pair = Pair(SHAPES[:2], lrs=(1e-1, 1e-3), swap_times=8)
    pair.step(0, without=(0,))
    for optimizer, _ in pair.sides():
        del optimizer.param_groups[0]
    pair.step(1, without=(0,))
    assert torch.equal(pair.native_params[1], pair.params[1])


def test_running_out_of_memory_over_more_gradients_spoils_no_later_step(
    simulator: ModuleType
) -> None:
    pair = Pair([*SHAPES, (300, 100)], swap_times=2, split_tensors=False)
    pair.step(0)
    pair.step(1, without=(3,))
    pair.give_gradients(2)
    torch.accelerator.synchronize()
    simulator.configure(capacity_nbytes=simulator.memory_held(0) + 1000)
    with pytest.raises(torch.OutOfMemoryError):
        pair.ours.step()
    simulator.configure(capacity_nbytes=0)
    pair.step(2, without=(3,))
    for left, right in zip(pair.native_params, pair.params):
        assert torch.equal(left, right)


@pytest.mark.parametrize("part", [slice(20), (slice(None), slice(5))], ids=["few", "sliced"])
def test_a_state_pruned_to_what_cannot_be_swapped_still_trains(part: Any) -> None:
    """Fewer elements than ``min_numel``, or columns of a matrix."""
    pair = Pair([(400, 10), (64, 64)], min_numel=1000)
    pair.step(0)
    for optimizer, params in pair.sides():
        cut_out(optimizer, params, part)
    pair.step(1)
    pair.assert_same()
    assert pair.ours.state[pair.params[0]]["exp_avg"].device.type == DEVICE


def test_a_state_pruned_before_unswapping_comes_back_to_the_device() -> None:
    pair = Pair()
    pair.step(0)
    for optimizer, params in pair.sides():
        cut_out(optimizer, params, slice(40))
    unswap_optimizer(pair.ours)
    pair.step(1)
    pair.assert_same()


def test_a_failing_hook_after_a_load_does_not_cost_the_loaded_states() -> None:
    saved = Pair()
    saved.step(0)
    fresh = Pair()

    def fail(_: object) -> None:
        raise ZeroDivisionError

    for (source, _), (target, _) in zip(saved.sides(), fresh.sides()):
        checkpoint = copy.deepcopy(source.state_dict())
        handle = target.register_load_state_dict_post_hook(fail)
        with pytest.raises(ZeroDivisionError):
            target.load_state_dict(checkpoint)
        handle.remove()
    fresh.step(1)
    fresh.assert_same()


@pytest.mark.parametrize("has_gradient", [True, False])
@pytest.mark.parametrize("way", ["data", "to device", "set_"])
def test_other_memory_given_to_a_state_tensor_is_what_the_next_steps_use(
    way: str, has_gradient: bool
) -> None:
    """``state["exp_avg"].data = x``, as code that moves the states of an optimizer does."""
    pair = Pair()
    pair.step(0)
    for optimizer, params in pair.sides():
        value = optimizer.state[params[0]]["exp_avg"]
        if way == "data":
            value.data = torch.full_like(value, 0.5)
        elif way == "to device":
            value.data = value.data.to(DEVICE)
        else:
            value.set_(torch.full_like(value, 0.5))
        del value
    if not has_gradient:
        pair.step(1, without=(0,))
    pair.step(2)
    pair.step(3)
    pair.assert_same()
    assert pair.ours.state[pair.params[0]]["exp_avg"].device.type == "cpu"


@pytest.mark.parametrize("config", [{}, {"state_keys": ("exp_avg", "exp_avg_sq")}])
def test_amsgrad_can_be_turned_on_with_maxima_made_from_the_swapped_states(
    config: dict[str, Any]
) -> None:
    pair = Pair(**config)
    pair.step(0)
    for optimizer, params in pair.sides():
        optimizer.param_groups[0]["amsgrad"] = True
        for param in params:
            state = optimizer.state[param]
            state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()
    pair.step(1)
    pair.step(2)
    pair.assert_same()


@pytest.mark.parametrize("inner", [True, False])
def test_a_state_taken_before_the_conversion_is_never_read_while_it_is_copied(inner: bool) -> None:
    params = [Parameter(torch.ones(512, 512, device=DEVICE))]
    optimizer = AdamW(params)

    def train() -> None:
        params[0].grad = torch.ones(512, 512, device=DEVICE)
        optimizer.step()

    train()
    held: Any = optimizer.state[params[0]] if inner else optimizer.state
    swap_optimizer(optimizer, SwapOptimizerConfig(swap_times=4))
    train()
    read = (held if inner else held[params[0]])["exp_avg"].clone()
    assert torch.equal(read, optimizer.state[params[0]]["exp_avg"])


def test_a_state_that_the_user_has_set_is_never_read_while_it_is_copied() -> None:
    pair = Pair([(512, 512)])
    mine: collections.defaultdict[Tensor, Any] = collections.defaultdict(dict)
    pair.ours.state = mine
    pair.step(0)
    read = mine[pair.params[0]]["exp_avg"].clone()
    assert torch.equal(read, pair.native.state[pair.native_params[0]]["exp_avg"].cpu())


def test_held_states_are_never_read_while_they_are_copied_after_an_interrupt(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair([(512, 512), (512, 512)], swap_times=4)
    pair.step(0)
    states = pair.ours.state
    step_batch, calls = pair.ours.step_batch, 0

    def interrupted(update: Any, units: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        step_batch(update, units)

    pair.give_gradients(1)
    monkeypatch.setattr(pair.ours, "step_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pair.ours.step()
    states[pair.params[0]]["exp_avg"].clone()  # no race


@pytest.mark.parametrize("index", [0, 2], ids=["swapped", "small"])
def test_a_held_state_of_a_parameter_without_a_gradient_stays_as_it_was(index: int) -> None:
    """An expert that the next batch does not use, and the one after does."""
    pair = Pair([(512, 512), (64, 64), (10,)])
    pair.step(0)
    held = dict(pair.ours.state[pair.params[index]])
    expected = copy.deepcopy(held)
    pair.step(1, without=(index,))
    pair.step(2)
    for name, value in expected.items():
        assert torch.equal(held[name], value), name
    del held
    pair.assert_same()


def test_loading_does_not_overwrite_the_old_states_that_somebody_still_holds() -> None:
    pair = Pair()
    pair.step(0)
    for optimizer, params in pair.sides():
        old = optimizer.state[params[0]]
        expected = old["exp_avg"].clone()
        checkpoint = copy.deepcopy(optimizer.state_dict())
        checkpoint["state"][0]["exp_avg"].zero_()
        optimizer.load_state_dict(checkpoint)
        assert torch.equal(old["exp_avg"], expected)


def test_the_report_is_there_when_nothing_is_swapped_any_more() -> None:
    pair = Pair()
    pair.step(0)
    pair.ours.load_state_dict({**pair.ours.state_dict(), "state": {}})
    for report in pair.ours.swap_report().values():
        assert (report.swapped_nbytes, report.batch_count, report.whole) == (0, 0, ())


def test_kept_staging_memory_goes_with_the_model_that_moves_to_another_device(
    simulator: ModuleType
) -> None:
    gc.collect()
    before = simulator.memory_held(0)
    pair = Pair(SHAPES[:2], keep_staging=True)
    pair.step(0)
    for param in pair.params:
        param.grad = None
        param.data = param.data.to("simulated:1")
        param.grad = torch.ones_like(param)
    pair.ours.step()
    params, optimizer = pair.params, pair.ours
    del pair
    gc.collect()
    for index in range(2):
        torch.accelerator.synchronize(index)
    assert simulator.memory_held(0) <= before
    assert len(params) == len(optimizer.state)


@pytest.mark.parametrize("reads", [False, True])
def test_draining_gives_no_memory_back_that_another_stream_still_uses(reads: bool) -> None:
    """prefetch() under one stream, the step or a reader under another."""
    pair = Pair([(512, 512)], drain_in_step=True, swap_times=2)
    pair.step(0)
    pair.give_gradients(1)
    torch.accelerator.synchronize()
    first, second = torch.Stream(DEVICE), torch.Stream(DEVICE)
    with first:
        pair.ours.prefetch()
    with second:
        if reads:
            assert len(pair.ours.state) == 1
        pair.ours.step()
    with first:
        torch.full((3 * 512 * 512,), 7.0, device=DEVICE)
    torch.accelerator.synchronize()
    pair.native.step()
    pair.assert_same()


def test_betas_that_foreach_refuses_can_be_corrected_without_a_checkpoint() -> None:
    pair = Pair()
    pair.step(0)
    pair.give_gradients(1)
    for optimizer, _ in pair.sides():
        optimizer.param_groups[0]["betas"] = (torch.tensor(0.9), torch.tensor(0.99))
        if not optimizer.param_groups[0]["foreach"] and DEVICE != "cpu":
            with pytest.raises(ValueError, match="beta1 as a Tensor is not supported"):
                optimizer.step()
        optimizer.param_groups[0]["betas"] = (0.9, 0.99)
    # The original has advanced its counters before its error; ours has changed nothing.
    pair.ours.step()


def test_a_state_dict_hook_may_return_what_it_likes() -> None:
    pair = Pair()
    pair.step(0)
    for optimizer, _ in pair.sides():
        optimizer.register_state_dict_post_hook(lambda _, saved: {"mine": saved["state"]})
        assert set(optimizer.state_dict()) == {"mine"}


def test_a_copied_optimizer_still_prefetches_in_backward() -> None:
    param = Parameter(torch.ones(64, 64, device=DEVICE))
    config = SwapOptimizerConfig(prefetch_in_backward=True)
    copied, optimizer = copy.deepcopy((param, SwapAdamW([param], swap_config=config)))
    (copied * copied).sum().backward()
    assert swap_of(optimizer).prefetch_hook.has_fired  # type: ignore[union-attr]


def test_resident_states_cost_no_temporaries_beyond_those_of_a_batch(
    simulator: ModuleType
) -> None:
    """Keeping states on the device must not cost half as much again while foreach updates them."""
    pair = Pair([(64, 64)] * 24 + [(512, 512)], resident_nbytes=24 * 2 * 64 * 64 * 4)
    for seed in range(3):
        pair.step(seed)
    pair.assert_same()
    pair.step(3)
    pair.give_gradients(4)
    torch.accelerator.synchronize()
    held = simulator.memory_held(0)
    torch.get_device_module("simulated").reset_peak_memory_stats(0)
    pair.ours.step()
    (report,) = pair.ours.swap_report().values()
    peak = simulator.max_memory_held(0) - held
    assert peak <= report.staging_nbytes + report.scratch_nbytes
    torch.accelerator.synchronize()
    pair.native.step()
    pair.assert_same()
