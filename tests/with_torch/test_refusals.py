"""What cannot be honoured is a ValueError that says what to use, before anything has changed."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections import UserDict
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from training import (
    SWAP_CLASS, assert_same_bits, assert_same_training, dense_gradient, make_pair, make_params,
    noise, on_device, params_of, snapshot, train,
)

import swap_adam.torch
from swap_adam import SwapOptimizerConfig, swap_optimizer, unswap_optimizer
from swap_adam.torch import SwapAdam, SwapAdamW, SwapHyperAdamW

# (class, flag, what the message offers instead)
FLAGS = [
    (Adam, "foreach", "foreach=None or foreach=False"),
    (Adam, "capturable", "capturable=False"),
    (Adam, "differentiable", "differentiable=False"),
    (Adam, "fused", "AdamW with fused=True"),
    (AdamW, "foreach", "foreach=None or foreach=False"),
    (AdamW, "capturable", "capturable=False"),
    (AdamW, "differentiable", "differentiable=False"),
]
each_flag = pytest.mark.parametrize(
    "original, flag, remedy", FLAGS, ids=[f"{c.__name__}-{flag}" for c, flag, _ in FLAGS]
)


def assert_unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    for left, right in zip(before["params"], after["params"], strict=True):
        assert_same_bits(left, right, "parameter")
    assert before["groups"] == after["groups"]
    for expected, found in zip(before["states"], after["states"], strict=True):
        assert (expected is None) == (found is None)
        for name in expected or {}:
            assert_same_bits(expected[name], found[name], name)


@each_flag
def test_constructor_refuses_the_flag(original: type[Optimizer], flag: str, remedy: str) -> None:
    params = make_params()
    before = [param.detach().clone() for param in params]
    with pytest.raises(ValueError, match=f"does not support {flag}=True; use .*{remedy}"):
        SWAP_CLASS[original](params, **{flag: True})
    assert all(torch.equal(left, right) for left, right in zip(before, params))


@each_flag
def test_constructor_refuses_the_flag_of_one_group(
    original: type[Optimizer], flag: str, remedy: str
) -> None:
    groups = [{"params": make_params()}, {"params": make_params(seed=1), flag: True}]
    with pytest.raises(ValueError, match=f"does not support {flag}=True; use .*{remedy}"):
        SWAP_CLASS[original](groups)


@each_flag
@pytest.mark.parametrize("trained", [False, True])
def test_conversion_refuses_the_flag_and_leaves_the_optimizer_alone(
    original: type[Optimizer], flag: str, remedy: str, trained: bool
) -> None:
    optimizer = original(make_params(), **{flag: trained is False})
    if trained:
        train(optimizer, 2)
        optimizer.param_groups[0][flag] = True
    before, attributes = snapshot(optimizer), set(vars(optimizer))
    tensors = [id(t) for s in optimizer.state.values() for t in s.values()]
    with pytest.raises(ValueError, match=f"does not support {flag}=True; use .*{remedy}"):
        swap_optimizer(optimizer)
    assert type(optimizer) is original
    assert set(vars(optimizer)) == attributes
    assert [id(t) for s in optimizer.state.values() for t in s.values()] == tensors
    assert_unchanged(before, snapshot(optimizer))


@each_flag
def test_a_later_group_with_the_flag_is_refused_and_not_added(
    original: type[Optimizer], flag: str, remedy: str
) -> None:
    native, swapped = make_pair(original, config={"swap_times": 3})
    for optimizer in (native, swapped):
        train(optimizer, 2)
    before = snapshot(swapped)
    with pytest.raises(ValueError, match=f"does not support {flag}=True; use .*{remedy}"):
        swapped.add_param_group({"params": make_params(seed=1), flag: True})
    assert len(swapped.param_groups) == 1
    assert_unchanged(before, snapshot(swapped))
    for optimizer in (native, swapped):
        train(optimizer, range(2, 4))
    assert_same_training(native, swapped)


@each_flag
def test_a_group_edited_by_hand_is_refused_at_the_step_with_nothing_updated(
    original: type[Optimizer], flag: str, remedy: str
) -> None:
    native, swapped = make_pair(
        original, config={"swap_times": 3},
        make=lambda: [{"params": make_params()}, {"params": make_params(seed=1)}],
    )
    for optimizer in (native, swapped):
        train(optimizer, 2)
    usual = swapped.param_groups[1][flag]
    swapped.param_groups[1][flag] = True
    before = snapshot(swapped)
    with pytest.raises(ValueError, match=f"does not support {flag}=True; use .*{remedy}"):
        swapped.step()
    assert_unchanged(before, snapshot(swapped))
    swapped.param_groups[1][flag] = usual
    for optimizer in (native, swapped):
        train(optimizer, range(2, 4))
    assert_same_training(native, swapped)


def test_the_first_step_with_an_edited_group_makes_no_states() -> None:
    optimizer = SwapAdamW(make_params())
    optimizer.param_groups[0]["capturable"] = True
    with pytest.raises(ValueError, match="capturable"):
        train(optimizer, 1)
    assert not optimizer.state


# Closures


@pytest.mark.parametrize("cls", [SwapAdam, SwapAdamW])
def test_a_closure_is_refused_and_not_run(cls: type[Optimizer]) -> None:
    optimizer = cls(make_params())
    before = snapshot(optimizer)
    for call in (lambda c: optimizer.step(c), lambda c: optimizer.step(closure=c)):
        with pytest.raises(ValueError, match="allow_closure=True"):
            call(lambda: pytest.fail("the closure was run"))
    assert_unchanged(before, snapshot(optimizer))


@pytest.mark.parametrize("original", [Adam, AdamW])
def test_an_allowed_closure_runs_once_first_with_gradients_and_its_loss_is_returned(
    original: type[Optimizer],
) -> None:
    results: list[list[float]] = []

    def run(optimizer: Optimizer) -> Optimizer:
        losses = []
        for step in range(4):
            calls = []

            def closure() -> Tensor:
                calls.append(torch.is_grad_enabled())
                optimizer.zero_grad()
                loss = sum(
                    (param * noise(step, index, param.detach())).square().sum()
                    for index, param in enumerate(params_of(optimizer))
                )
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
            assert calls == [True]
        results.append(losses)
        return optimizer

    native, swapped = make_pair(original, config={"allow_closure": True, "swap_times": 3})
    assert_same_training(run(native), run(swapped))
    assert results[0] == results[1]


def test_a_step_without_closure_returns_none() -> None:
    optimizer = SwapAdamW(make_params())
    assert optimizer.step() is None


# Conversion takes exact types


class MyAdamW(AdamW):
    pass


class Wrapper:
    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer


class WrappedOptimizer(Optimizer):
    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(params_of(optimizer), {})
        self.optimizer = optimizer


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: MyAdamW(make_params()), "derive your class from SwapAdam, SwapAdamW"),
        (lambda: SGD(make_params(), lr=0.1), "other optimizers are not swapped"),
        (lambda: WrappedOptimizer(AdamW(make_params())), "convert that one, its attribute"),
    ],
    ids=["subclass", "another", "wrapped"],
)
def test_any_other_optimizer_is_a_type_error_that_lists_the_supported_ones(
    make: Callable[[], Any], message: str
) -> None:
    optimizer = make()
    kind = type(optimizer)
    with pytest.raises(TypeError, match=message) as caught:
        swap_optimizer(optimizer)
    assert "torch.optim.adam.Adam" in str(caught.value)
    assert "torch.optim.adamw.AdamW" in str(caught.value)
    assert type(optimizer) is kind


@pytest.mark.parametrize("value", [None, 3, Wrapper(AdamW(make_params())), [torch.ones(1)]])
def test_what_is_no_optimizer_is_a_type_error_that_lists_the_supported_ones(value: Any) -> None:
    with pytest.raises(TypeError, match="supported are exactly: torch.optim.Adam, torch.optim.Ad"):
        swap_optimizer(value)
    with pytest.raises(TypeError):
        unswap_optimizer(value)


def test_there_is_nothing_to_undo_for_a_native_optimizer() -> None:
    with pytest.raises(TypeError, match="not a swap optimizer"):
        unswap_optimizer(AdamW(make_params()))


def test_converting_again_needs_the_same_configuration() -> None:
    config = SwapOptimizerConfig(swap_times=3)
    optimizer = swap_optimizer(AdamW(make_params()), config)
    assert swap_optimizer(optimizer) is optimizer
    assert swap_optimizer(optimizer, SwapOptimizerConfig(swap_times=3)) is optimizer
    with pytest.raises(ValueError, match="already a SwapAdamW .*unswap_optimizer"):
        swap_optimizer(optimizer, SwapOptimizerConfig(swap_times=4))
    assert optimizer.swap_config is config


def test_a_patched_step_that_cannot_be_carried_over_is_refused_with_a_remedy() -> None:
    optimizer = AdamW(make_params())
    patched = optimizer.step = lambda *args: None  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="convert first and patch afterwards"):
        swap_optimizer(optimizer)
    assert type(optimizer) is AdamW
    assert optimizer.step is patched


# Configurations


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"swap_times": 0}, ValueError, "swap_times must be >= 1, got 0"),
        ({"swap_times": -3}, ValueError, "swap_times must be >= 1, got -3"),
        ({"swap_times": 2.5}, TypeError, "swap_times must be an int, got 2.5"),
        ({"swap_times": 0.0}, ValueError, "swap_times must be >= 1, got 0"),
        ({"swap_times": True}, TypeError, "swap_times must be an int, got True"),
        ({"min_numel": -1}, ValueError, "min_numel must be >= 0, got -1"),
        ({"min_numel": None}, TypeError, "min_numel must be an int, got None"),
        ({"state_keys": ()}, ValueError, "state_keys must not be empty.*exp_avg, exp_avg_sq"),
        ({"state_keys": ("momentum",)}, ValueError, "unknown key 'momentum'; allowed are: exp_avg"),
        ({"state_keys": ("exp_avg", "exp_avg")}, ValueError, "must not repeat a key"),
        ({"state_keys": "exp_avg"}, TypeError, "sequence of names"),
        ({"state_keys": ("master_param",)}, ValueError, "needs include_master_params=True"),
        ({"state_keys": ("exp_avg",), "include_master_params": True}, ValueError,
         "omits master_param"),
        ({"include_master_params": 1}, TypeError, "include_master_params must be True or False"),
        ({"packed_swap": "yes"}, TypeError, "packed_swap must be True, False or None, got 'yes'"),
        ({"allow_closure": None}, TypeError, "allow_closure must be True or False"),
        ({"split_tensors": 0}, TypeError, "split_tensors must be True or False"),
        ({"swap_times": "many"}, ValueError, "must be an int >= 1 or .auto., got 'many'"),
        ({"staging_nbytes": 1000}, ValueError, "staging_nbytes=1000 needs swap_times=.auto."),
        ({"swap_times": "auto", "staging_nbytes": 0}, ValueError, "staging_nbytes must be >= 1"),
        ({"resident_nbytes": -1}, ValueError, "resident_nbytes must be >= 0, got -1"),
        ({"resident_nbytes": 0.5}, TypeError, "resident_nbytes must be an int"),
        ({"resident_nbytes": float("inf")}, TypeError, "resident_nbytes must be an int"),
        ({"resident_nbytes": "12e9"}, TypeError, "got '12e9'; in a yaml file write the digits"),
        ({"keep_staging": 1}, TypeError, "keep_staging must be True or False"),
        ({"drain_in_step": "no"}, TypeError, "drain_in_step must be True or False"),
        ({"prefetch_in_backward": None}, TypeError, "prefetch_in_backward must be True or False"),
        ({"keep_staging": True, "packed_swap": False}, ValueError, "keep_staging=True needs the"),
        ({"prefetch_in_backward": True, "packed_swap": False}, ValueError,
         "prefetch_in_backward=True needs the"),
        ({"keep_staging": True, "drain_in_step": True}, ValueError, "exclude each other"),
    ],
    ids=str,
)
def test_a_wrong_field_is_named_with_its_value_and_what_is_allowed(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        SwapOptimizerConfig(**options)


def test_a_configuration_cannot_be_changed_afterwards() -> None:
    keys = ["exp_avg"]
    config = SwapOptimizerConfig(state_keys=keys)
    keys.append("exp_avg_sq")
    assert tuple(config.state_keys or ()) == ("exp_avg",)
    with pytest.raises(AttributeError):
        config.swap_times = 3  # type: ignore[misc]


MISFITS = [
    ({"include_master_params": True}, ValueError, "include_master_params=True needs"),
    ({"state_keys": ("exp_avg", "max_exp_avg_sq")}, ValueError, "only with amsgrad=True"),
]


@pytest.mark.parametrize("options, error, message", MISFITS, ids=str)
@pytest.mark.parametrize("original", [Adam, AdamW])
def test_a_configuration_that_does_not_fit_the_optimizer_is_refused_with_nothing_changed(
    original: type[Optimizer], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    config = SwapOptimizerConfig(**options)
    with pytest.raises(error, match=message):
        SWAP_CLASS[original](make_params(), swap_config=config)
    optimizer = original(make_params())
    train(optimizer, 1)
    before = snapshot(optimizer)
    with pytest.raises(error, match=message):
        swap_optimizer(optimizer, config)
    assert type(optimizer) is original
    assert all(on_device(optimizer))
    assert_unchanged(before, snapshot(optimizer))


@pytest.mark.parametrize("field", ["swap_times", "min_numel", "staging_nbytes", "resident_nbytes"])
@pytest.mark.parametrize("number", [12e9, 12 * 10**9, np.int64(12 * 10**9)], ids=["e", "int", "np"])
def test_a_whole_number_is_taken_however_it_is_written(field: str, number: Any) -> None:
    options = {"swap_times": "auto"} if field == "staging_nbytes" else {}
    value = getattr(SwapOptimizerConfig(**{**options, field: number}), field)
    assert value == 12 * 10**9 and type(value) is int


ENTRANCES: dict[str, Callable[[Any], Any]] = {
    "SwapAdam": lambda config: SwapAdam(make_params(), swap_config=config),
    "SwapAdamW": lambda config: SwapAdamW(make_params(), swap_config=config),
    "SwapHyperAdamW": lambda config: SwapHyperAdamW(make_params(), swap_config=config),
    "swap_optimizer": lambda config: swap_optimizer(AdamW(make_params()), config),
    "torch.swap_optimizer": lambda config: swap_adam.torch.swap_optimizer(
        AdamW(make_params()), config
    ),
}
each_entrance = pytest.mark.parametrize("enter", ENTRANCES.values(), ids=ENTRANCES)


@each_entrance
@pytest.mark.parametrize("kind", [dict, MappingProxyType, UserDict], ids=lambda kind: kind.__name__)
def test_a_mapping_of_the_fields_is_a_configuration(
    enter: Callable[[Any], Any], kind: Callable[[Any], Any]
) -> None:
    optimizer = enter(kind({"swap_times": 3, "state_keys": ["exp_avg"]}))
    assert optimizer.swap_config == SwapOptimizerConfig(swap_times=3, state_keys=("exp_avg",))
    assert swap_optimizer(optimizer, {"state_keys": ["exp_avg"], "swap_times": 3}) is optimizer
    assert enter({}).swap_config == enter(None).swap_config == SwapOptimizerConfig()


@each_entrance
@pytest.mark.parametrize(
    "config, error, message",
    [
        ({"swap_time": 3, 7: 1}, TypeError, "unknown fields 'swap_time', 7; allowed are: swap_t"),
        ({"swap_times": 0}, ValueError, "swap_times must be >= 1, got 0"),
        (3, TypeError, "swap_config must be a SwapOptimizerConfig, a mapping of its fields or "),
        ("auto", TypeError, "swap_config must be a SwapOptimizerConfig"),
        ([("swap_times", 3)], TypeError, "swap_config must be a SwapOptimizerConfig"),
    ],
    ids=str,
)
def test_something_else_as_configuration_is_an_error(
    enter: Callable[[Any], Any], config: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        enter(config)


def test_a_refused_mapping_leaves_the_optimizer_as_it_is() -> None:
    optimizer = AdamW(make_params())
    with pytest.raises(TypeError, match="unknown fields"):
        swap_optimizer(optimizer, {"swap_time": 3})
    assert type(optimizer) is AdamW


@pytest.mark.parametrize("swap_class", [SwapAdam, SwapAdamW, SwapHyperAdamW])
def test_a_field_as_an_argument_is_told_where_it_belongs(swap_class: Any) -> None:
    with pytest.raises(TypeError, match=r"swap_config=SwapOptimizerConfig\(swap_times=8\)"):
        swap_class(make_params(), swap_times=8)
    with pytest.raises(TypeError, match="the argument swap_config, not config"):
        swap_class(make_params(), config=SwapOptimizerConfig())
    with pytest.raises(TypeError, match="unexpected keyword argument 'learning_rate'"):
        swap_class(make_params(), learning_rate=8)
    assert "swap_config" in inspect.signature(swap_class).parameters


def test_setting_the_configuration_names_the_calls_that_change_it() -> None:
    optimizer = SwapAdamW(make_params(), swap_config={"swap_times": 3})
    remedy = r"unswap_optimizer\(optimizer\), then swap_optimizer\(optimizer, config\)"
    with pytest.raises(AttributeError, match=remedy):
        optimizer.swap_config = SwapOptimizerConfig()
    for same in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert same.swap_config == SwapOptimizerConfig(swap_times=3)
        with pytest.raises(AttributeError, match=remedy):
            same.swap_config = None
    unswap_optimizer(optimizer)
    swap_optimizer(optimizer, {"swap_times": 5})
    assert optimizer.swap_config.swap_times == 5


def test_converting_again_prints_the_fields_that_differ() -> None:
    optimizer = SwapAdamW(make_params(), swap_config={"swap_times": 3, "min_numel": 5})
    with pytest.raises(ValueError) as caught:
        swap_optimizer(optimizer, {"swap_times": 4, "min_numel": 5})
    assert "a SwapAdamW with swap_times=3, asked for swap_times=4; call" in str(caught.value)


@pytest.mark.parametrize("convert", [swap_optimizer, swap_adam.torch.swap_optimizer])
@pytest.mark.parametrize(
    "make, remedy",
    [
        (lambda: torch.nn.Linear(2, 2), "it is a model: convert the optimizer that was made of"),
        (lambda: [AdamW(make_params())], "convert its optimizers one by one"),
        (lambda: SimpleNamespace(optimizer=AdamW(make_params())), "its attribute `optimizer`"),
        (lambda: SimpleNamespace(optimizer=None), "convert the optimizer that it is given"),
        (lambda: AdamW, "make an optimizer of the class"),
    ],
    ids=["model", "list", "wrapper", "trainer", "class"],
)
def test_what_is_no_optimizer_is_told_what_to_convert(
    convert: Callable[[Any], Any], make: Callable[[], Any], remedy: str
) -> None:
    with pytest.raises(TypeError, match=remedy):
        convert(make())


def test_a_models_own_framework_is_named_first() -> None:
    with pytest.raises(TypeError, match="supported are exactly: torch.optim.Adam, .* mindspore.nn"):
        swap_optimizer(torch.nn.Linear(2, 2))


def test_amsgrad_in_one_of_two_groups_is_enough_for_its_key() -> None:
    config = SwapOptimizerConfig(state_keys=("max_exp_avg_sq",))
    groups = [{"params": make_params()}, {"params": make_params(seed=1), "amsgrad": True}]
    optimizer = SwapAdamW(groups, swap_config=config)
    train(optimizer, 1, dense_gradient)
    assert on_device(optimizer)[0] == {"exp_avg", "exp_avg_sq"}
    assert on_device(optimizer)[6] == {"exp_avg", "exp_avg_sq"}
