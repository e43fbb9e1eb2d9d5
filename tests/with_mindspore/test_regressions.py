"""What users would have lost to defects that were found by trying to break it."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from mindspore.nn.utils import no_init_parameters
from ms_mindformers import AdamW, mf_case
from ms_training import (
    SWAP_CLASS,
    Case,
    Outcome,
    assert_same,
    gradients_of,
    make_optimizer,
    train,
    values_of,
)

from swap_adam import SwapOptimizerConfig, swap_optimizer
from swap_adam.mindspore import state
from swap_adam.simulator.mindspore import SimulatedDevice, mindspore_device

ADAM = Case("default", nn.Adam)


@pytest.mark.simulator_only
def test_a_simulated_device_inside_another_does_not_switch_the_outer_one_off() -> None:
    with mindspore_device() as outer:
        with mindspore_device() as inner:
            make_optimizer(ADAM, SwapOptimizerConfig(4))
        assert inner is not outer
        optimizer = make_optimizer(ADAM, SwapOptimizerConfig(4))
        assert outer.pinned_nbytes > 0
        optimizer(gradients_of(optimizer, ADAM, 0))
        assert outer.copies > 0


@pytest.mark.parametrize("original", [nn.Adam, nn.AdamWeightDecay, AdamW])
@pytest.mark.parametrize("is_converted", [False, True], ids=["made", "converted"])
def test_states_made_without_memory_are_swapped_all_the_same(
    device: SimulatedDevice | None, original: type, is_converted: bool
) -> None:
    outcomes = []
    for config in (None, SwapOptimizerConfig(4)):
        with no_init_parameters():
            network = nn.Dense(64, 64)
            if config is None or is_converted:
                optimizer = original(network.trainable_params())
            else:
                optimizer = SWAP_CLASS[original](network.trainable_params(), swap_config=config)
        if config is not None and is_converted:
            swap_optimizer(optimizer, config)
        network.init_parameters_data()
        optimizer.init_parameters_data()
        for param in network.trainable_params():
            param.set_data(Tensor(np.ones(param.shape, np.float32)))
        gradients = tuple(Tensor(np.full(p.shape, 0.5, np.float32)) for p in optimizer.parameters)
        returned = [optimizer(gradients) for _ in range(3)][-1]
        outcomes.append(Outcome(optimizer, returned, values_of(optimizer)))
    assert_same(*outcomes)
    if device is not None:
        assert device.pinned_nbytes == 2 * 64 * 64 * 4
        assert device.held_nbytes == 0


def _transpose(first: Parameter, second: Parameter) -> None:
    first.set_data(first.T)


def _exchange(first: Parameter, second: Parameter) -> None:
    kept = Parameter(Tensor([0.0]))
    kept.set_data(first)
    first.set_data(second)
    second.set_data(kept)


@pytest.mark.parametrize("rearrange", [_transpose, _exchange])
def test_states_rearranged_among_themselves_count(
    device: SimulatedDevice | None, rearrange: Callable[[Parameter, Parameter], None]
) -> None:
    swapped = make_optimizer(ADAM, SwapOptimizerConfig(4))
    swapped(gradients_of(swapped, ADAM, 0))
    rearrange(swapped.moment1[0], swapped.moment2[0])
    native = make_optimizer(ADAM)
    for name, value in values_of(swapped).items():
        param = {param.name: param for param in native.get_parameters()}[name]
        param.set_data(Tensor(np.ascontiguousarray(value)))
    outcomes = [
        Outcome(optimizer, optimizer(gradients_of(optimizer, ADAM, 1)), values_of(optimizer))
        for optimizer in (native, swapped)
    ]
    assert_same(*outcomes)


def test_a_state_reshaped_in_place_is_refused(device: SimulatedDevice | None) -> None:
    optimizer = make_optimizer(ADAM, SwapOptimizerConfig(4))
    state = optimizer.moment1[0]
    state.set_data(state.reshape(-1))
    before = values_of(optimizer)
    if device is None:
        return
    with pytest.raises(ValueError, match=r"shape \(4096,\).*must have shape \(64, 64\)"):
        optimizer(gradients_of(optimizer, ADAM, 0))
    for name, value in values_of(optimizer).items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize("param_dtype, grad_dtype", [
    (mindspore.float16, mindspore.float32),
    (mindspore.float32, mindspore.float64),
    (mindspore.float32, mindspore.complex64),
], ids=str)
def test_a_gradient_of_a_wider_dtype_is_the_originals_error_and_tears_nothing(
    device: SimulatedDevice | None, param_dtype: object, grad_dtype: object
) -> None:
    case = Case("default", nn.Adam, dtype=param_dtype)
    for config in (None, SwapOptimizerConfig(4)):
        optimizer = make_optimizer(case, config)
        before = values_of(optimizer)
        good = gradients_of(optimizer, case, 0)
        with pytest.raises(TypeError) as caught:
            optimizer(tuple(grad.astype(grad_dtype) for grad in good))
        if config is not None:
            assert "layer0.w" in str(caught.value) and "cast it to" in str(caught.value)
        for name, value in values_of(optimizer).items():
            np.testing.assert_array_equal(value, before[name])
        optimizer(good)


@pytest.mark.parametrize("grad_dtype", [mindspore.float16, mindspore.int32], ids=str)
def test_a_gradient_of_a_narrower_dtype_is_taken_as_by_the_original(
    device: SimulatedDevice | None, grad_dtype: object
) -> None:
    outcomes = []
    for config in (None, SwapOptimizerConfig(4)):
        optimizer = make_optimizer(ADAM, config)
        gradients = tuple(g.astype(grad_dtype) for g in gradients_of(optimizer, ADAM, 0))
        outcomes.append(Outcome(optimizer, optimizer(gradients), values_of(optimizer)))
    assert_same(*outcomes)


def _fill(param: Parameter) -> None:
    param[...] = Tensor(np.full(param.shape, 0.5, np.float32))


def _slice(param: Parameter) -> None:
    param[:] = 0.5


def _reshaped(param: Parameter) -> None:
    param.set_data(Tensor(np.full(param.numel(), 0.5, np.float32)).reshape(param.shape))


@pytest.mark.parametrize("original", [nn.Adam, nn.AdamWeightDecay])
@pytest.mark.parametrize("write", [_fill, _slice, _reshaped])
@pytest.mark.parametrize("which", ["parameter", "state"])
def test_a_parameter_that_was_written_as_a_whole_goes_on_being_trained(
    device: SimulatedDevice | None, original: type, write: Callable[[Parameter], None], which: str
) -> None:
    case = Case("default", original)
    once = make_optimizer(case)
    once(gradients_of(once, case, 0))
    after_one_step = values_of(once)
    outcomes = []
    for config in (None, SwapOptimizerConfig(4)):
        optimizer = make_optimizer(case, config)
        states = optimizer.moment1 if original is nn.Adam else optimizer.moments1
        written = optimizer.parameters[3] if which == "parameter" else states[1]
        if config is None:  # what has run before would not see some routes
            values = {name: Tensor(value) for name, value in after_one_step.items()}
            for param in optimizer.get_parameters():
                param.set_data(values[param.name])
            written.set_data(Tensor(np.full(written.shape, 0.5, np.float32)))
        else:
            optimizer(gradients_of(optimizer, case, 0))
            with mindspore._no_grad():
                write(written)
        returned = [optimizer(gradients_of(optimizer, case, step)) for step in (1, 2)][-1]
        outcomes.append(Outcome(optimizer, returned, values_of(optimizer)))
    assert_same(*outcomes)


@pytest.mark.parametrize("original", [nn.Adam, nn.AdamWeightDecay])
def test_a_parameter_inside_another_tensor_is_refused_and_not_left_untrained(
    device: SimulatedDevice | None, original: type
) -> None:
    case = Case("default", original)
    optimizer = make_optimizer(case, SwapOptimizerConfig(4))
    param = optimizer.parameters[3]
    param.set_data(Tensor(np.ones((2 * param.shape[0], *param.shape[1:]), np.float32))[:100])
    before = values_of(optimizer)
    with pytest.raises(ValueError, match=r"layer3.w is a view .* set_data\(\) with a clone\(\)"):
        optimizer(gradients_of(optimizer, case, 0))
    for name, value in values_of(optimizer).items():
        np.testing.assert_array_equal(value, before[name])
    param.set_data(param.clone())
    optimizer(gradients_of(optimizer, case, 0))
    assert not np.array_equal(values_of(optimizer)[param.name], before[param.name])


def test_an_interrupt_while_attributes_are_put_back_leaves_an_optimizer_that_loading_heals(
    device: SimulatedDevice | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = mf_case("non-fused", "bf16")
    optimizer = make_optimizer(case, SwapOptimizerConfig(4))
    path = str(tmp_path / "good.ckpt")
    mindspore.save_checkpoint(optimizer, path)

    unshadow, calls = state.unshadow, []

    def interrupted(optimizer: nn.Optimizer, before: dict[str, object]) -> None:
        calls.append(optimizer)
        if len(calls) == 2:  # the first one comes before the update
            raise KeyboardInterrupt
        unshadow(optimizer, before)

    with monkeypatch.context() as patched:
        patched.setattr(state, "unshadow", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer(gradients_of(optimizer, case, 0))
    mindspore.load_param_into_net(optimizer, mindspore.load_checkpoint(path), strict_load=True)
    for step in range(case.steps):
        returned = optimizer(gradients_of(optimizer, case, step))
    assert_same(train(case), Outcome(optimizer, returned, values_of(optimizer)))


@pytest.mark.parametrize("is_swapped", [True, False], ids=["swapped", "resident"])
def test_masters_reach_the_model_batch_by_batch_when_swapped_and_once_at_the_end_when_not(
    device: SimulatedDevice | None, monkeypatch: pytest.MonkeyPatch, is_swapped: bool
) -> None:
    case = mf_case("non-fused", "bf16")
    config = SwapOptimizerConfig(4, include_master_params=is_swapped, packed_swap=False)
    optimizer = make_optimizer(case, config)
    count = len(optimizer._parameters)
    copied: list[int] = []  # how many masters each call has copied
    copy = AdamW._copy_main_params_to_model_params

    def counted(self: nn.Optimizer) -> None:
        copied.append(sum(self._is_low_precision_param))
        copy(self)

    monkeypatch.setattr(AdamW, "_copy_main_params_to_model_params", counted)
    optimizer(gradients_of(optimizer, case, 0))
    calls = [masters for masters in copied if masters]
    assert sum(calls) == count, "each master once"
    if is_swapped:
        assert len(calls) > 2
    else:
        assert copied[-1] == count


@pytest.mark.parametrize("original", [nn.Adam, nn.AdamWeightDecay, AdamW])
def test_a_learning_rate_set_between_two_updates_counts_from_the_next_one(
    device: SimulatedDevice | None, original: type
) -> None:
    case = Case("default", original)
    optimizer = make_optimizer(case, SwapOptimizerConfig(4))
    optimizer(gradients_of(optimizer, case, 0))
    optimizer.learning_rate.set_data(Tensor(0.001, mindspore.float32))
    optimizer(gradients_of(optimizer, case, 1))
    listed = Case("list", original, lambda: {"learning_rate": [0.1, 0.001]}, steps=2)
    expected = train(listed).values
    actual = values_of(optimizer)
    for name in expected:
        if name != "learning_rate":
            np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)
