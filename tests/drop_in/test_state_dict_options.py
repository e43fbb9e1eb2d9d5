"""Every option of torch.distributed.checkpoint's state dicts, in both directions, in one process.

What a native optimizer loads, ours loads, whoever saved it; what it refuses, ours refuses alike.
"""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drop_in_parity import DEVICE, IS_SIMULATED, assert_equal, parameters_of
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict,
)
from torch.optim import AdamW, Optimizer

from swap_adam.torch import SwapAdamW

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="torch without distributed"
)

FULL: dict[str, Any] = {"full_state_dict": True}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"cpu_offload": True},
    {"flatten_optimizer_state_dict": True},
    {"ignore_frozen_params": True},
    {"keep_submodule_prefixes": False},
    {"strict": False},
    {"dsd_fqn_modifiers": "names_in_checkpoints"},
    {"broadcast_from_rank0": True},  # refused without full_state_dict
    FULL,
    *({**FULL, name: True} for name in (
        "cpu_offload", "flatten_optimizer_state_dict", "ignore_frozen_params",
    )),
    {**FULL, "strict": False},
    # Without cpu_offload torch takes the full tensors to the device of the process group, and
    # knows no other than cuda.
    {**FULL, "broadcast_from_rank0": True, "cpu_offload": True},
    {**FULL, "broadcast_from_rank0": True, "flatten_optimizer_state_dict": True,
     "cpu_offload": True},
]
CONFIGS: list[dict[str, Any]] = [
    {}, {"min_numel": 0}, {"resident_nbytes": 20_000}, {"state_keys": ["exp_avg"]},
    {"min_numel": 10**9},
]


class Block(nn.Module):
    """A weight that is swapped, small parameters that stay, a frozen one, one without a dim."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 48)
        self.norm = nn.LayerNorm(48)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))

    def names_in_checkpoints(self) -> dict[str, str]:
        return {"linear": "dense"}


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    meeting = tmp_path_factory.mktemp("ranks") / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(config: dict[str, Any] | None, steps: int, seed: int) -> tuple[nn.Module, Optimizer]:
    """Native where ``config`` is ``None``."""
    torch.manual_seed(seed)
    model = nn.Sequential(Block(), nn.Linear(48, 2)).to(DEVICE)
    groups = [
        {"params": list(model[0].parameters())},
        {"params": list(model[1].parameters()), "weight_decay": 0.0},
    ]
    optimizer = (
        AdamW(groups, lr=1e-2) if config is None else SwapAdamW(groups, lr=1e-2, swap_config=config)
    )
    train(optimizer, range(steps))
    return model, optimizer


def train(optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        for index, param in enumerate(parameters_of(optimizer)):
            if param.requires_grad:
                generator = torch.Generator().manual_seed(100 * step + index)
                param.grad = torch.randn(param.shape, generator=generator).to(DEVICE)
        optimizer.step()
        optimizer.zero_grad()


def outcome(
    source: dict[str, Any] | None, target: dict[str, Any] | None, get: dict[str, Any],
    put: dict[str, Any], steps: int,
) -> Any:
    """What is saved and what a training that loads it becomes, or the error."""
    try:
        model, optimizer = make(source, steps, seed=0)
        saved = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**get))
        copied = torch.utils._pytree.tree_map_only(
            Tensor, lambda tensor: tensor.detach().cpu().clone(), saved
        )
        model, optimizer = make(target, steps, seed=0)
        set_optimizer_state_dict(model, optimizer, saved, options=StateDictOptions(**put))
        train(optimizer, range(5, 7))
    except Exception as error:
        return type(error), str(error)
    params = [param.detach().cpu() for param in parameters_of(optimizer)]
    states = [
        {name: value.cpu() for name, value in optimizer.state[param].items()}
        for param in parameters_of(optimizer) if param in optimizer.state
    ]
    return copied, params, states


def assert_same(left: Any, right: Any, where: str) -> None:
    if isinstance(left, dict):
        assert isinstance(right, dict) and list(left) == list(right), where
        for key in left:
            assert_same(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, (list, tuple)):
        assert type(left) is type(right) and len(left) == len(right), (where, left, right)
        for index, (one, other) in enumerate(zip(left, right)):
            assert_same(one, other, f"{where}[{index}]")
    else:
        assert_equal(left, right, where)


@pytest.mark.parametrize("steps", [0, 2], ids=["before the first step", "after"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_saves_and_loads_as_natively(
    options: dict[str, Any], config: dict[str, Any], steps: int
) -> None:
    native = outcome(None, None, options, options, steps)
    for source, target in ((None, config), (config, None), (config, config)):
        assert_same(native, outcome(source, target, options, options, steps), f"{source}>{target}")


@pytest.mark.parametrize(
    "get, put", list(product([{}, {"cpu_offload": True}, FULL], [{}, FULL])), ids=str
)
def test_what_one_set_of_options_saves_another_loads_as_natively(
    get: dict[str, Any], put: dict[str, Any]
) -> None:
    native = outcome(None, None, get, put, 2)
    for source, target in ((None, {}), ({}, None), ({}, {})):
        assert_same(native, outcome(source, target, get, put, 2), f"{source}>{target}")


# What a state dict shows


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_state_dict_shows_every_moment_in_one_place(config: dict[str, Any]) -> None:
    _, optimizer = make(config, 2, seed=0)
    for state in optimizer.state_dict()["state"].values():
        for name, value in state.items():
            assert value.dim() == 0 or value.device.type == "cpu", name


EDITS = {
    "zero_": lambda tensor: tensor.zero_(),
    "view": lambda tensor: tensor.view(-1)[:1].fill_(3.0),
    "detach": lambda tensor: tensor.detach().copy_(torch.ones_like(tensor)),
    "inference": lambda tensor: torch.inference_mode()(lambda: tensor.mul_(2.0))(),
}
THEN = {
    "step": lambda optimizer: None,
    "state": lambda optimizer: optimizer.state,
    "state_dict": lambda optimizer: optimizer.state_dict(),
}


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("then", THEN)
def test_an_edit_of_a_shown_state_counts_as_natively(
    config: dict[str, Any], edit: str, then: str
) -> None:
    """The dict is dropped right after the edit, as a loader that reads in place does."""
    found = []
    for each in (None, config):
        _, optimizer = make(each, 2, seed=0)
        for state in optimizer.state_dict()["state"].values():
            EDITS[edit](state["exp_avg_sq"])
        THEN[then](optimizer)
        train(optimizer, range(2, 4))
        found.append([param.detach().cpu() for param in parameters_of(optimizer)])
    assert_same(*found, where="params")


def test_an_edit_counts_for_those_who_read_convert_pickle_and_copy() -> None:
    import copy
    import pickle

    from swap_adam import unswap_optimizer

    def first_bias(optimizer: Optimizer) -> Tensor:
        param = optimizer.param_groups[0]["params"][2]  # linear.bias
        state: Tensor = optimizer.state[param]["exp_avg"]
        return state.cpu()

    _, optimizer = make({}, 2, seed=0)
    for reader in (
        lambda: optimizer,
        lambda: copy.deepcopy(optimizer),
        lambda: pickle.loads(pickle.dumps(optimizer)),
        lambda: unswap_optimizer(optimizer),
    ):
        optimizer.state_dict()["state"][2]["exp_avg"].add_(1.0)
        want = optimizer.state_dict()["state"][2]["exp_avg"].clone()
        assert torch.equal(first_bias(reader()), want)


def test_after_the_next_step_a_shown_copy_is_a_snapshot() -> None:
    _, optimizer = make({}, 2, seed=0)
    held = optimizer.state_dict()["state"]
    before = {index: state["exp_avg"].clone() for index, state in held.items()}
    train(optimizer, range(2, 3))
    for index, state in held.items():
        if state["exp_avg"].dim():
            assert torch.equal(state["exp_avg"], before[index])
        state["exp_avg"].fill_(7.0)  # nobody reads this any more
    want = make({}, 3, seed=0)[1]
    assert_same(
        [state["exp_avg"] for state in want.state_dict()["state"].values()],
        [state["exp_avg"] for state in optimizer.state_dict()["state"].values()], "moments",
    )


def test_two_state_dicts_between_two_steps_show_the_same_tensors_and_later_edits() -> None:
    _, optimizer = make({}, 2, seed=0)
    first = optimizer.state_dict()["state"]
    param = optimizer.param_groups[0]["params"][2]
    optimizer.state[param]["exp_avg"].fill_(5.0)
    second = optimizer.state_dict()["state"]
    assert second[2]["exp_avg"] is first[2]["exp_avg"]
    assert torch.equal(second[2]["exp_avg"], torch.full((48,), 5.0))


def test_showing_takes_no_memory_of_the_device(simulator: Any, tmp_path: Path) -> None:
    _, optimizer = make({"resident_nbytes": 20_000}, 2, seed=0)
    optimizer.state
    torch.simulated.reset_peak_memory_stats()
    held = simulator.memory_held()
    torch.save(optimizer.state_dict(), tmp_path / "states")
    assert simulator.max_memory_held() == held


@pytest.mark.skipif(not IS_SIMULATED, reason="needs two devices of the real kind")
def test_two_ranks_save_and_load_full_and_sharded_checkpoints_as_natively(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    script = Path(__file__).with_name("two_ranks_checkpoint.py")
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), str(rank), f"file://{tmp_path}/meeting"],
            env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all("fine" in output for output in outputs), "\n".join(outputs)


@pytest.mark.parametrize("small", [False, True], ids=["swapped", "resident"])
def test_a_tensor_put_into_the_states_counts_and_is_not_updated(small: bool) -> None:
    """Wherever it comes from; and unswapped it is the original's own again."""
    from swap_adam import unswap_optimizer

    for where in (DEVICE, "cpu"):
        found = []
        for config in (None, {}):
            _, optimizer = make(config, 2, seed=0)
            param = optimizer.param_groups[0]["params"][2 if small else 1]
            mine = torch.ones_like(param, device=where if config is not None else DEVICE)
            optimizer.state[param]["exp_avg"] = mine
            train(optimizer, range(2, 3))
            found.append(optimizer.state[param]["exp_avg"].cpu())
        assert torch.equal(*found)
        assert bool((mine == 1).all())
        unswap_optimizer(optimizer)
        mine = optimizer.state[param]["exp_avg"] = torch.ones_like(param)
        train(optimizer, range(3, 4))
        assert optimizer.state[param]["exp_avg"] is mine and not bool((mine == 1).all())
