"""What a run says it needed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.optim import AdamW

from swap_adam import SwapOptimizerConfig
from swap_adam.demo.accelerator import SimulatedAccelerator
from swap_adam.demo.compare import differences
from swap_adam.demo.model import ModelSize
from swap_adam.demo.text import batches, standard_library
from swap_adam.demo.training import MakeOptimizer, Run, TrainingPlan, train
from swap_adam.torch import SwapAdamW

PLAN = TrainingPlan(ModelSize(layers=2, width=96, heads=2, length=16), batch_size=2, steps=7)
SMALL_STATES_NBYTES = 2 * 2**16


def run(path: Path, make: MakeOptimizer) -> Run:
    accelerator = SimulatedAccelerator("pcie4")
    return train("a run", make, PLAN, standard_library(50_000), accelerator, path / "t.json",
                 lambda done, loss: None)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("native"), AdamW)


@pytest.mark.parametrize("packed", [True, False])
def test_swapping_leaves_parameters_only(tmp_path: Path, native: Run, packed: bool) -> None:
    config = SwapOptimizerConfig(packed_swap=packed)
    swapped = run(tmp_path, lambda params: SwapAdamW(params, swap_config=config))
    assert differences(native.snapshot, swapped.snapshot) == []
    states = 2 * native.needs.param_nbytes
    assert native.needs.idle_extra_nbytes == pytest.approx(states, rel=0.05)
    assert native.needs.host_nbytes == 0
    assert swapped.needs.idle_extra_nbytes < SMALL_STATES_NBYTES
    assert swapped.needs.host_nbytes >= states - SMALL_STATES_NBYTES
    assert swapped.needs.update_extra_nbytes < native.needs.update_extra_nbytes
    assert 0 < native.needs.update_ms < native.needs.step_ms


def test_the_marked_step_lies_in_the_recording(native: Run) -> None:
    moments = native.moments
    assert 0 < moments.step_called_ms < moments.update_called_ms < moments.next_called_ms
    assert moments.update_called_ms <= moments.update_began_ms < moments.update_ended_ms
    assert any(at > moments.next_called_ms for at, _ in native.recording.memory)
    assert {"host", "compute"} <= {span.row for span in native.recording.spans}


def test_a_device_is_left_as_it_was(tmp_path: Path) -> None:
    accelerator = SimulatedAccelerator("pcie4")
    before = accelerator.held_nbytes()
    run(tmp_path, lambda params: SwapAdamW(params))
    torch.accelerator.synchronize()
    assert accelerator.held_nbytes() == before


def test_batches_are_the_same_for_the_same_seed() -> None:
    text = standard_library(10_000)
    first, again = (list(batches(text, 3, 8, 4, seed=5)) for _ in range(2))
    assert len(first) == 4
    for (inputs, targets), (same_inputs, same_targets) in zip(first, again):
        assert inputs.shape == targets.shape == (3, 8)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert torch.equal(inputs, same_inputs) and torch.equal(targets, same_targets)


def test_the_text_is_python() -> None:
    text = bytes(standard_library(200_000).tolist())
    assert len(text) == 200_000 and b"\ndef " in text
