"""At rest each swapped state is an ordinary Parameter on the host: saving and loading do not know.
"""
from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from threading import enumerate as running_threads
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from ms_mindformers import mf_case
from ms_training import (
    Case,
    Outcome,
    assert_same,
    gradients_of,
    make_optimizer,
    values_of,
)

from swap_adam import SwapOptimizerConfig
from swap_adam.simulator.mindspore import SimulatedDevice

AMSGRAD = Case("amsgrad", nn.Adam, lambda: {"use_amsgrad": True})
CASES = {
    "Adam": (AMSGRAD, SwapOptimizerConfig(4)),
    "AdamWeightDecay": (Case("default", nn.AdamWeightDecay), SwapOptimizerConfig(4)),
    "AdamW": (mf_case("non-fused", "bf16"), SwapOptimizerConfig(4, include_master_params=True)),
}
STATE = "moment1.layer0.w"


def go_on(optimizer: nn.Optimizer, case: Case, start: int, stop: int) -> Outcome:
    returned = None
    for step in range(start, stop):
        returned = optimizer(gradients_of(optimizer, case, step))
    return Outcome(optimizer, returned, values_of(optimizer))


def trained(name: str, steps: int = 2) -> tuple[nn.Optimizer, nn.Optimizer, Case]:
    """A native and a swapped optimizer after the same steps."""
    case, config = CASES[name]
    native, swapped = make_optimizer(case), make_optimizer(case, config)
    for optimizer in (native, swapped):
        go_on(optimizer, case, 0, steps)
    return native, swapped, case


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("suffix", ["ckpt", "safetensors"])
def test_the_file_is_byte_for_byte_the_originals(
    device: SimulatedDevice | None, name: str, suffix: str, tmp_path: Path
) -> None:
    native, swapped, _ = trained(name)
    for label, optimizer in (("native", native), ("swapped", swapped)):
        path = str(tmp_path / f"{label}.{suffix}")
        mindspore.save_checkpoint(optimizer, path, format=suffix)
    written = [(tmp_path / f"{label}.{suffix}").read_bytes() for label in ("native", "swapped")]
    assert len(written[0]) > 10_000
    assert written[0] == written[1]


@pytest.mark.parametrize("how", ["thread", "process"])
def test_a_background_writer_writes_the_state_at_the_call(
    device: SimulatedDevice | None, how: str, tmp_path: Path
) -> None:
    _, swapped, case = trained("Adam")
    at_the_call = values_of(swapped)
    path = tmp_path / "async.ckpt"
    mindspore.save_checkpoint(swapped, str(path), async_save=how)
    go_on(swapped, case, 2, 4)
    for thread in running_threads():
        if thread.name == "asyn_save_ckpt":
            thread.join()
    for process in multiprocessing.active_children():
        process.join()
    loaded = mindspore.load_checkpoint(str(path))
    assert set(loaded) == set(at_the_call)
    for key, value in at_the_call.items():
        np.testing.assert_array_equal(loaded[key].asnumpy(), value, err_msg=key)


def test_a_checkpoint_of_the_whole_training_cell_is_the_originals(
    device: SimulatedDevice | None, tmp_path: Path
) -> None:
    written = []
    for config in (None, SwapOptimizerConfig(4)):
        rng = np.random.default_rng(0)
        network = nn.Dense(64, 64)
        for param in network.trainable_params():
            param.set_data(Tensor(rng.standard_normal(param.shape, np.float32)))
        case = Case("cell", nn.Adam, params=lambda _: network.trainable_params())
        cell = nn.TrainOneStepCell(
            nn.WithLossCell(network, nn.MSELoss()), make_optimizer(case, config)
        )
        inputs = Tensor(rng.standard_normal((8, 64), np.float32))
        cell(inputs, inputs)
        path = tmp_path / f"{config is None}.ckpt"
        mindspore.save_checkpoint(cell, str(path))
        written.append(path.read_bytes())
    assert written[0] == written[1]


@pytest.mark.parametrize("name", CASES)
def test_resuming_goes_either_way_between_native_and_swapped(
    device: SimulatedDevice | None, name: str, tmp_path: Path
) -> None:
    native, swapped, case = trained(name)
    mindspore.save_checkpoint(swapped, str(tmp_path / "a.ckpt"))
    expected = go_on(native, case, 2, 4)
    fresh_native = make_optimizer(case)
    fresh_swapped = make_optimizer(case, CASES[name][1])
    for fresh in (fresh_native, fresh_swapped):
        loaded = mindspore.load_checkpoint(str(tmp_path / "a.ckpt"))
        assert mindspore.load_param_into_net(fresh, loaded, strict_load=True) == ([], [])
        assert_same(expected, go_on(fresh, case, 2, 4))
    if device is not None:
        assert device.state_nbytes(fresh_swapped) == device.state_nbytes(swapped)


def test_loading_does_not_tie_the_optimizer_to_the_loaded_dict(
    device: SimulatedDevice | None, tmp_path: Path
) -> None:
    _, swapped, case = trained("Adam")
    mindspore.save_checkpoint(swapped, str(tmp_path / "a.ckpt"))
    loaded = mindspore.load_checkpoint(str(tmp_path / "a.ckpt"))
    before = loaded[STATE].asnumpy().copy()
    mindspore.load_param_into_net(swapped, loaded)
    go_on(swapped, case, 2, 4)
    np.testing.assert_array_equal(loaded[STATE].asnumpy(), before)


def _set_data(param: Parameter, value: Tensor) -> None:
    param.set_data(value)


def _data_attribute(param: Parameter, value: Tensor) -> None:
    param.data = value


def _item(param: Parameter, value: Tensor) -> None:
    param[...] = value


def _assign_value(param: Parameter, value: Tensor) -> None:
    param.assign_value(value)


def _assign(param: Parameter, value: Tensor) -> None:
    ops.assign(param, value)


def _copy(param: Parameter, value: Tensor) -> None:
    with mindspore._no_grad():
        param.copy_(value)


def _numpy(param: Parameter, value: Tensor) -> None:
    param.asnumpy()[...] = value.asnumpy()


ROUTES: tuple[Callable[[Parameter, Tensor], None], ...] = (
    _set_data, _data_attribute, _item, _assign_value, _assign, _copy, _numpy,
)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__.strip("_"))
def test_what_the_user_writes_into_a_state_counts(
    device: SimulatedDevice | None, route: Callable[[Parameter, Tensor], None]
) -> None:
    trained_native, swapped, case = trained("Adam")
    # One that has not run yet: the original's compiled construct would not see some routes.
    native = make_optimizer(case)
    for param in native.get_parameters():
        param.set_data(Tensor(values_of(trained_native)[param.name]))
    for optimizer in (native, swapped):
        state = {param.name: param for param in optimizer.get_parameters()}[STATE]
        route(state, Tensor(np.full(state.shape, 0.25, np.float32)))
    assert_same(go_on(native, case, 2, 4), go_on(swapped, case, 2, 4))
    if device is not None:
        assert device.state_nbytes(swapped) < device.state_nbytes(native) / 4


@pytest.mark.parametrize("value, told", [
    (np.zeros((3, 5), np.float32), r"shape \(3, 5\).*must have shape \(64, 64\)"),
], ids=["shape"])
def test_a_state_of_the_wrong_shape_is_refused_before_anything_changes(
    device: SimulatedDevice | None, value: Any, told: str
) -> None:
    _, swapped, case = trained("Adam")
    state = {param.name: param for param in swapped.get_parameters()}[STATE]
    good = Tensor(state.asnumpy().copy())
    state.set_data(Tensor(value))
    before = values_of(swapped)
    with pytest.raises(ValueError, match=told):
        go_on(swapped, case, 2, 3)
    for name, expected in before.items():
        np.testing.assert_array_equal(values_of(swapped)[name], expected)
    state.set_data(good)
    native, _, _ = trained("Adam")
    assert_same(go_on(native, case, 2, 4), go_on(swapped, case, 2, 4))


def test_a_state_of_the_wrong_dtype_is_refused(device: SimulatedDevice | None) -> None:
    _, swapped, case = trained("Adam")
    state = {param.name: param for param in swapped.get_parameters()}[STATE]
    state.set_dtype(mindspore.float16)
    with pytest.raises(ValueError, match="dtype Float16; it must have .*Float32"):
        go_on(swapped, case, 2, 3)


def test_a_numpy_view_taken_before_a_step_keeps_its_values(
    device: SimulatedDevice | None
) -> None:
    for name in ("Adam", "AdamW"):
        native, swapped, case = trained(name)
        param = swapped.moment1[0] if name == "Adam" else swapped.exp_avg[0]
        view = param.asnumpy()
        part = view[3:5]
        expected = part.copy()
        del view
        assert_same(go_on(native, case, 2, 4), go_on(swapped, case, 2, 4))
        np.testing.assert_array_equal(part, expected)
        assert not np.array_equal(param.asnumpy()[3:5], expected)


def test_parameters_dict_and_state_dict_show_the_states(device: SimulatedDevice | None) -> None:
    native, swapped, _ = trained("Adam")
    assert list(native.parameters_dict()) == list(swapped.parameters_dict())
    for name, param in swapped.parameters_dict().items():
        np.testing.assert_array_equal(
            param.asnumpy(), native.parameters_dict()[name].asnumpy(), err_msg=name
        )


def test_reloading_masters_from_the_model_reaches_swapped_masters(
    device: SimulatedDevice | None
) -> None:
    native, swapped, case = trained("AdamW")
    for optimizer in (native, swapped):
        for param in optimizer.parameters:
            param.set_data(Tensor(np.full(param.shape, 0.5, np.float32)).astype(param.dtype))
        optimizer.reload_main_params_from_model()
    assert_same(go_on(native, case, 2, 4), go_on(swapped, case, 2, 4))
