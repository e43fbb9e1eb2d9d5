"""Checkpoints in every direction, and what they cost in memory."""
from __future__ import annotations

import gc
import io
import itertools
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from drop_in_parity import (
    DEVICE,
    Training,
    assert_same,
    assert_same_states,
    assert_same_tree,
    cpu_copy,
    parameters_of,
    swapped_nbytes,
    training,
)
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from swap_adam import SwapOptimizerConfig
from swap_adam.torch import SwapAdam, SwapAdamW
from swap_adam.torch.hyper_adamw import HyperAdamW, SwapHyperAdamW

CLASSES = [(torch.optim.Adam, SwapAdam), (torch.optim.AdamW, SwapAdamW),
           (HyperAdamW, SwapHyperAdamW)]
CONFIGS = [
    SwapOptimizerConfig(swap_times=swap_times, state_keys=keys, packed_swap=packed)
    for packed, swap_times, keys in itertools.product(
        (True, False), (1, 7, 1000),
        (None, ("exp_avg",), ("exp_avg_sq",), ("max_exp_avg_sq", "exp_avg")),
    )
]


def saved(run: Training) -> dict:
    buffer = io.BytesIO()
    torch.save(run.optimizer.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def resume(source: Training, target: Training) -> None:
    target.model.load_state_dict(cpu_copy(source.model.state_dict()))
    target.optimizer.load_state_dict(saved(source))
    target.done = source.done


@pytest.mark.parametrize("native_class, swap_class", CLASSES)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_state_dict_is_the_originals_and_goes_both_ways(native_class, swap_class, amsgrad) -> None:
    native = training(native_class, amsgrad=amsgrad)
    swapped = training(swap_class, amsgrad=amsgrad)
    assert native.train(3) == swapped.train(3)
    assert_same_tree(native.optimizer.state_dict(), swapped.optimizer.state_dict())
    assert_same_tree(cpu_copy(saved(native)), cpu_copy(saved(swapped)))
    into_native = training(native_class, amsgrad=amsgrad)
    into_swapped = training(swap_class, amsgrad=amsgrad)
    resume(swapped, into_native)
    resume(native, into_swapped)
    losses = native.train(3)
    assert swapped.train(3) == losses
    assert into_native.train(3) == losses
    assert into_swapped.train(3) == losses
    for run in (swapped, into_native, into_swapped):
        assert_same(native, run)
    assert swapped_nbytes(into_swapped.optimizer) == swapped_nbytes(swapped.optimizer) > 0


@pytest.mark.parametrize("native_class, swap_class", CLASSES[:2])
def test_every_configuration_loads_every_other(native_class, swap_class) -> None:
    # 24 configurations and the original, each loading from each, then a step.
    def make(config):
        if config is None:
            return training(native_class, amsgrad=True)
        return training(swap_class, amsgrad=True, swap_config=config)

    runs = [make(config) for config in (None, *CONFIGS)]
    losses = {tuple(run.train(2)) for run in runs}
    assert len(losses) == 1
    checkpoints = [saved(run) for run in runs]
    for checkpoint in checkpoints[1:]:
        assert_same_tree(cpu_copy(checkpoints[0]), cpu_copy(checkpoint))
    for run in runs[1:]:
        before = swapped_nbytes(run.optimizer)
        for checkpoint in checkpoints:
            run.optimizer.load_state_dict(cpu_copy(checkpoint))
            assert_same_states(runs[0].optimizer, run.optimizer)
        assert swapped_nbytes(run.optimizer) == before > 0
    for checkpoint in checkpoints[1:]:
        runs[0].optimizer.load_state_dict(cpu_copy(checkpoint))
        assert_same_states(runs[0].optimizer, runs[1].optimizer)
    losses = {tuple(run.train(1)) for run in runs}
    assert len(losses) == 1
    for run in runs[1:]:
        assert_same(runs[0], run)


# The RFC's scenario, under its own name.
@pytest.mark.parametrize("native_class, swap_class", CLASSES)
def test_torch_adam_swap_optimizer_checkpoint_host_state(
    native_class, swap_class, simulator
) -> None:
    native, swapped = training(native_class), training(swap_class)
    assert native.train(2) == swapped.train(2)
    small = sum(  # what is below min_numel stays on the device, and is copied
        value.nbytes for state in swapped.optimizer.state.values() for value in state.values()
        if torch.is_tensor(value) and value.device.type == DEVICE
    )
    torch.simulated.reset_peak_memory_stats()
    held = simulator.memory_held()
    simulator.reset_counters()
    checkpoint = swapped.optimizer.state_dict()
    counters = simulator.counters()
    assert counters.copies_in == counters.allocations == 0
    assert counters.copies_out_nbytes == small
    assert simulator.max_memory_held() == held
    fresh = training(swap_class)
    fresh.model.load_state_dict(cpu_copy(swapped.model.state_dict()))
    fresh.done = swapped.done
    torch.simulated.reset_peak_memory_stats()
    held = simulator.memory_held()
    fresh.optimizer.load_state_dict(cpu_copy(checkpoint))
    # What is not swapped, and nothing else, comes to the device.
    resident = sum(
        value.untyped_storage().nbytes() + 512
        for state in fresh.optimizer.state.values() for value in state.values()
        if torch.is_tensor(value) and value.device.type == DEVICE
    )
    assert simulator.max_memory_held() - held <= resident
    assert swapped_nbytes(fresh.optimizer) > 0
    simulator.reset_counters()
    assert fresh.train(2) == swapped.train(2) == native.train(2)
    assert simulator.counters().copies_in_nbytes >= 2 * swapped_nbytes(fresh.optimizer)
    assert_same(native, fresh)


@pytest.mark.parametrize("swap_class", [SwapAdam, SwapAdamW, SwapHyperAdamW])
def test_safetensors_of_the_moments(swap_class, tmp_path: Path) -> None:
    run = training(swap_class)
    run.train(2)
    state_dict = run.optimizer.state_dict()
    tensors = {
        f"{index}.{name}": value
        for index, state in state_dict["state"].items() for name, value in state.items()
    }
    save_file(tensors, tmp_path / "moments.safetensors")
    size = (tmp_path / "moments.safetensors").stat().st_size
    assert size < sum(t.numel() * t.element_size() for t in tensors.values()) + 8192
    loaded = load_file(tmp_path / "moments.safetensors")
    for index, state in state_dict["state"].items():
        state_dict["state"][index] = {name: loaded[f"{index}.{name}"] for name in state}
    target = training(swap_class)
    target.optimizer.load_state_dict(state_dict)
    assert_same_states(run.optimizer, target.optimizer)


def test_torch_save_writes_the_states_and_not_their_slab(tmp_path: Path) -> None:
    for name, run in (("native", training(torch.optim.AdamW)), ("swap", training(SwapAdamW))):
        run.train(1)
        torch.save(run.optimizer.state_dict(), tmp_path / name)
    native, swap = ((tmp_path / name).stat().st_size for name in ("native", "swap"))
    assert abs(native - swap) < 4096


def template(swap_class, **options) -> Training:
    """Other weights, states, steps and learning rate than what is loaded into it."""
    run = training(swap_class, lr=0.5, betas=(0.5, 0.6), **options)
    run.train(5)
    return run


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.swap_times == 7][::2])
def test_dcp_save_and_load_in_place(config, tmp_path: Path) -> None:
    native = training(torch.optim.AdamW)
    swapped = training(SwapAdamW, swap_config=config)
    assert native.train(3) == swapped.train(3)
    for run, folder in ((native, tmp_path / "native"), (swapped, tmp_path / "swap")):
        dcp.save({"optimizer": get_optimizer_state_dict(run.model, run.optimizer)},
                 checkpoint_id=folder)
    losses = native.train(2)
    for folder in ("native", "swap"):
        target = template(SwapAdamW, swap_config=config)
        target.model.load_state_dict(training(torch.optim.AdamW).model.state_dict())
        loaded = {"optimizer": get_optimizer_state_dict(target.model, target.optimizer)}
        dcp.load(loaded, checkpoint_id=tmp_path / folder)
        set_optimizer_state_dict(target.model, target.optimizer, loaded["optimizer"])
        model = training(torch.optim.AdamW)
        model.train(3)
        target.model.load_state_dict(cpu_copy(model.model.state_dict()))
        target.done = 3
        assert target.train(2) == losses
        assert_same(native, target)
        assert swapped_nbytes(target.optimizer) > 0


def test_dcp_load_in_place_into_what_state_dict_returned(tmp_path: Path) -> None:
    # The tensors are filled in place and nobody calls load_state_dict: what was written counts.
    native, swapped = training(torch.optim.AdamW), training(SwapAdamW)
    native.train(3), swapped.train(3)
    state = {f"{index}.{name}": value
             for index, entry in swapped.optimizer.state_dict()["state"].items()
             for name, value in entry.items()}
    dcp.save(state, checkpoint_id=tmp_path)
    target = training(SwapAdamW)
    target.train(5)
    target.model.load_state_dict(cpu_copy(swapped.model.state_dict()))
    target.done = 3
    filled = {f"{index}.{name}": value
              for index, entry in target.optimizer.state_dict()["state"].items()
              for name, value in entry.items()}
    dcp.load(filled, checkpoint_id=tmp_path)
    del filled, state
    assert target.train(2) == native.train(2)
    assert_same(native, target)


class SlowWriter(dcp.FileSystemWriter):
    """Starts to write only when it may: by then the training has gone on."""

    may_write = threading.Event()

    def write_data(self, *args, **kwargs):
        self.may_write.wait(30)
        return super().write_data(*args, **kwargs)


@pytest.mark.parametrize("packed", [True, False])
def test_dcp_async_save_while_steps_go_on(packed: bool, tmp_path: Path) -> None:
    run = training(SwapAdamW, swap_config=SwapOptimizerConfig(packed_swap=packed))
    run.train(2)
    expected = cpu_copy(run.optimizer.state_dict())
    SlowWriter.may_write.clear()
    future = dcp.async_save(
        {"optimizer": run.optimizer.state_dict()}, storage_writer=SlowWriter(tmp_path)
    )
    run.train(3)
    SlowWriter.may_write.set()
    future.result()
    loaded = {"optimizer": cpu_copy(run.optimizer.state_dict())}
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert_same_tree(expected, loaded["optimizer"])


@pytest.mark.parametrize("packed", [True, False])
def test_a_background_writer_writes_the_states_of_the_call(packed: bool, tmp_path: Path) -> None:
    native = training(torch.optim.AdamW)
    run = training(SwapAdamW, swap_config=SwapOptimizerConfig(packed_swap=packed))
    native.train(2), run.train(2)
    expected = cpu_copy(run.optimizer.state_dict())
    go_on = threading.Event()

    def write(state_dict: dict) -> None:
        go_on.wait(30)
        torch.save(state_dict, tmp_path / "checkpoint.pt")

    thread = threading.Thread(target=write, args=(run.optimizer.state_dict(),))
    thread.start()
    assert run.train(3) == native.train(3)
    go_on.set()
    thread.join()
    assert_same_tree(expected, torch.load(tmp_path / "checkpoint.pt", weights_only=True))
    assert_same(native, run)


@pytest.mark.parametrize("native_class, swap_class", CLASSES[:2])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_get_and_set_optimizer_state_dict(native_class, swap_class, steps_before) -> None:
    native, swapped = training(native_class), training(swap_class)
    native.train(steps_before), swapped.train(steps_before)
    # Copies: the original's tensors are live, ours are snapshots.
    taken = [cpu_copy(get_optimizer_state_dict(run.model, run.optimizer))
             for run in (native, swapped)]
    assert_same_tree(*taken)
    assert_same(native, swapped)
    assert native.train(2) == swapped.train(2)
    assert_same(native, swapped)
    for run, checkpoint in zip((native, swapped), reversed(taken)):
        set_optimizer_state_dict(run.model, run.optimizer, cpu_copy(checkpoint))
    assert_same(native, swapped)
    assert native.train(2) == swapped.train(2)
    assert_same(native, swapped)
    # Into an optimizer that has not made a step.
    fresh = [training(native_class), training(swap_class)]
    for run in fresh:
        set_optimizer_state_dict(run.model, run.optimizer, cpu_copy(taken[0]))
    assert fresh[0].train(2) == fresh[1].train(2)
    assert_same(*fresh)
    assert swapped_nbytes(fresh[1].optimizer) > 0


@pytest.mark.parametrize("native_class, swap_class", CLASSES)
def test_part_of_the_states(native_class, swap_class) -> None:
    native, swapped = training(native_class), training(swap_class)
    native.train(2), swapped.train(2)
    checkpoint = cpu_copy(native.optimizer.state_dict())
    del checkpoint["state"][0], checkpoint["state"][5]
    for run in (native, swapped):
        run.optimizer.load_state_dict(cpu_copy(checkpoint))
    assert_same(native, swapped)
    assert native.train(2) == swapped.train(2)
    assert_same(native, swapped)


def test_what_the_original_refuses_changes_nothing() -> None:
    native, swapped = training(torch.optim.AdamW), training(SwapAdamW)
    native.train(2), swapped.train(2)
    checkpoint = cpu_copy(native.optimizer.state_dict())
    checkpoint["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="doesn't match the size"):
        swapped.optimizer.load_state_dict(checkpoint)
    assert_same(native, swapped)
    assert native.train(2) == swapped.train(2)
    assert_same(native, swapped)


def test_a_refused_flag_in_a_checkpoint_is_left_out_with_one_warning() -> None:
    native = training(torch.optim.AdamW, foreach=True)
    native.train(1)
    target = training(SwapAdamW)
    with pytest.warns(UserWarning, match="foreach=True") as warned:
        target.optimizer.load_state_dict(native.optimizer.state_dict())
    assert [warning.filename for warning in warned] == [__file__]
    assert target.optimizer.param_groups[0]["foreach"] is None
    assert swapped_nbytes(target.optimizer) > 0


def host_peak_nbytes() -> int:
    """The most resident memory of this process since ``forget_host_peak``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise LookupError("VmHWM")


def forget_host_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return host_peak_nbytes()


def test_memory_of_saving_and_loading_states_of_100_batches(
    simulator, tmp_path: Path, record_property
) -> None:
    def make_model() -> torch.nn.Module:
        torch.manual_seed(0)
        # Parts of 1 MiB in a model of 24 MiB: its states are 48 MiB, a batch 1/100 of that.
        return torch.nn.ParameterList(torch.randn(512, 512) for _ in range(24)).to(DEVICE)

    def step(run: Training) -> None:
        for param in run.model.parameters():
            if param.grad is None:
                param.grad = torch.ones_like(param)
        run.optimizer.step()

    config = SwapOptimizerConfig(swap_times=100)
    gc.collect()
    pinned_before = simulator.pinned_nbytes()
    run = training(SwapAdamW, make_model, swap_config=config)
    step(run), step(run)
    states = swapped_nbytes(run.optimizer)
    batch = -(-states // 100)
    figures = {"states": states, "batch": batch}
    pinned = simulator.pinned_nbytes() - pinned_before
    assert pinned <= 1.05 * states

    def measure(name: str, action) -> tuple[int, int]:
        torch.simulated.reset_peak_memory_stats()
        held, resident = simulator.memory_held(), forget_host_peak()
        action()
        device = simulator.max_memory_held() - held
        host = host_peak_nbytes() - resident
        figures[f"{name}: device peak"], figures[f"{name}: host peak"] = device, host
        return device, host

    step_device, _ = measure("step", lambda: step(run))
    path = tmp_path / "optimizer.pt"
    margin = 2 << 20  # of resident memory, for buffers of files and what others allocate
    device, host = measure("state_dict", run.optimizer.state_dict)
    assert device == 0 and host <= margin
    device, host = measure(
        "torch.save", lambda: torch.save(run.optimizer.state_dict(), path)
    )
    assert device == 0 and host <= margin
    step(run)
    checkpoint = torch.load(path, weights_only=True)
    device, host = measure(
        "load into slots", lambda: run.optimizer.load_state_dict(checkpoint)
    )
    assert device <= 2 * batch and host <= margin
    fresh = training(SwapAdamW, make_model, swap_config=config)
    device, host = measure(
        "load into a new optimizer", lambda: fresh.optimizer.load_state_dict(checkpoint)
    )
    assert device <= 2 * batch and host <= 1.05 * states + margin
    mapped = torch.load(path, weights_only=True, mmap=True)
    device, _ = measure(
        "load a mapped file (the host's peak are its pages)",
        lambda: run.optimizer.load_state_dict(mapped),
    )
    assert device == 0
    on_device = torch.load(path, weights_only=True, map_location=DEVICE)
    device, host = measure(
        "load from map_location=device", lambda: run.optimizer.load_state_dict(on_device)
    )
    assert device <= 2 * batch and host <= margin
    assert simulator.pinned_nbytes() - pinned_before == 2 * pinned
    for param, other in zip(parameters_of(run.optimizer), parameters_of(fresh.optimizer)):
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(run.optimizer.state[param][name],
                               fresh.optimizer.state[other][name])
    for name, value in figures.items():
        print(f"{name}: {value / 2**20:.2f} MiB")
        record_property(name, value)
    assert 0 < step_device <= 3 * batch  # two batches, and the temporaries of one
