"""Nothing swapped stays on the device between updates, and at most two batches are there within."""
from __future__ import annotations

import pytest
from mindspore import nn
from ms_mindformers import mf_case
from ms_training import SHAPES, Case, make_optimizer, train

from swap_adam import SwapOptimizerConfig
from swap_adam.simulator.mindspore import SimulatedDevice
from swap_adam.swap import swap_of

pytestmark = pytest.mark.simulator_only
AMSGRAD = Case("amsgrad", nn.Adam, lambda: {"use_amsgrad": True})
MASTERS = mf_case("fused, amsgrad", "bf16", steps=3)


def swapped_nbytes(states: int) -> int:
    """Bytes of the states with at least 1024 elements, in fp32."""
    return sum(
        4 * states * size for size in (int(_numel(shape)) for shape in SHAPES) if size >= 1024
    )


def _numel(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel


@pytest.mark.parametrize("swap_times", [1, 2, 4, 1000])
@pytest.mark.parametrize("case, packed, states", [
    (AMSGRAD, False, 3), (MASTERS, True, 4), (MASTERS, False, 4),
], ids=["Adam", "AdamW packed", "AdamW per tensor"])
def test_device_bytes_are_those_of_two_batches_within_and_none_between(
    device: SimulatedDevice, case: Case, packed: bool, states: int, swap_times: int
) -> None:
    config = SwapOptimizerConfig(
        swap_times, packed_swap=packed, include_master_params=case is MASTERS
    )
    swapped = train(case, config)
    total = swapped_nbytes(states)
    assert device.held_nbytes == 0
    native_nbytes = device.state_nbytes(train(case).optimizer)
    assert device.state_nbytes(swapped.optimizer) == native_nbytes - total
    # Tensors stay whole, so a batch is at least one of them; 512 bytes of alignment per tensor.
    largest = 4 * states * max(_numel(shape) for shape in SHAPES)
    batch = max(-(-total // swap_times), largest)
    assert device.peak_nbytes <= 2 * batch + 512 * 4 * len(SHAPES)
    assert total <= device.pinned_nbytes <= 1.05 * total


def test_a_step_moves_every_swapped_byte_once_each_way(device: SimulatedDevice) -> None:
    case = Case("default", nn.Adam, steps=1)
    train(case, SwapOptimizerConfig(4))
    assert device.copied_in_nbytes == device.copied_out_nbytes == swapped_nbytes(2)


def test_packed_moves_a_batch_in_one_copy_each_way(device: SimulatedDevice) -> None:
    case = mf_case("non-fused", steps=1)
    optimizer = train(case, SwapOptimizerConfig(4)).optimizer
    report, = optimizer.swap_report().values()
    assert device.copies == 2 * report.batch_count


def test_a_tensor_larger_than_a_batch_stays_whole_and_is_listed(device: SimulatedDevice) -> None:
    case = mf_case("non-fused", steps=1)
    optimizer = train(case, SwapOptimizerConfig(1000, split_tensors=True)).optimizer
    report, = optimizer.swap_report().values()
    assert report.batch_count == 4
    assert report.whole == tuple(
        f"layer{index}.w (shape {SHAPES[index]})" for index in (0, 2, 3, 5)
    )
    assert report.swapped_nbytes == swapped_nbytes(2)
    alignment = 15 * 2 * len(SHAPES)
    assert report.swapped_nbytes <= report.pinned_nbytes <= report.swapped_nbytes + alignment


def test_a_deleted_optimizer_leaves_no_memory_behind(device: SimulatedDevice) -> None:
    import gc

    case = Case("default", nn.Adam, steps=1)
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            outcome = train(case, SwapOptimizerConfig(4))
            assert device.pinned_nbytes == swapped_nbytes(2)
            del outcome
            assert device.pinned_nbytes == device.held_nbytes == 0
    finally:
        gc.enable()


def test_min_numel_keeps_small_states_on_the_device(device: SimulatedDevice) -> None:
    kept = make_optimizer(AMSGRAD, SwapOptimizerConfig(min_numel=4097))
    assert device.state_nbytes(kept) == device.state_nbytes(make_optimizer(AMSGRAD))
    everything = make_optimizer(AMSGRAD, SwapOptimizerConfig(min_numel=0))
    scalars = ("global_step", "learning_rate", "beta1_power", "beta2_power")
    assert device.state_nbytes(everything) == sum(
        getattr(everything, name).nbytes for name in scalars
    )


@pytest.mark.parametrize("keys", [("exp_avg",), ("exp_avg_sq", "max_exp_avg_sq")], ids=str)
def test_only_the_named_states_leave_the_device(
    device: SimulatedDevice, keys: tuple[str, ...]
) -> None:
    native = make_optimizer(AMSGRAD)
    swapped = make_optimizer(AMSGRAD, SwapOptimizerConfig(state_keys=keys))
    moved = device.state_nbytes(native) - device.state_nbytes(swapped)
    assert moved == swapped_nbytes(len(keys))
    assert {slot.name for unit in swap_of(swapped).units for slot in unit.slots} == set(keys)


def test_the_models_own_fp32_parameters_are_never_swapped(device: SimulatedDevice) -> None:
    case = mf_case("non-fused", "fp32")
    optimizer = make_optimizer(case, SwapOptimizerConfig(include_master_params=True))
    names = {slot.name for unit in swap_of(optimizer).units for slot in unit.slots}
    assert names == {"exp_avg", "exp_avg_sq"}
    pointers = [slot.pointer for unit in swap_of(optimizer).units for slot in unit.slots]
    assert not {param.data_ptr() for param in optimizer.parameters} & set(pointers)


def test_a_state_that_shares_its_memory_is_not_swapped(device: SimulatedDevice) -> None:
    from swap_adam import swap_optimizer

    native = make_optimizer(Case("default", nn.Adam))
    native.moment2[0].set_data(native.moment1[0])
    swapped = swap_optimizer(native)
    assert not swap_of(swapped).units[0].slots
    assert [slot.name for slot in swap_of(swapped).units[2].slots] == ["exp_avg", "exp_avg_sq"]


def test_gradients_are_not_kept_alive(device: SimulatedDevice) -> None:
    import gc
    import weakref

    from ms_training import gradients_of

    case = Case("default", nn.Adam)
    optimizer = make_optimizer(case, SwapOptimizerConfig(4))
    gradients = gradients_of(optimizer, case, 0)
    seen = [weakref.ref(grad) for grad in gradients]
    optimizer(gradients)
    del gradients
    gc.collect()
    assert all(reference() is None for reference in seen)
