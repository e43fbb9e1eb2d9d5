"""One of two processes that save and load a sharded training; test_state_dict_options.py starts
them. Ours loads what the native optimizer loads, and goes on with the same bits."""
from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from drop_in_parity import DEVICE, IS_SIMULATED
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from swap_adam.torch import SwapAdamW

CONFIGS: list[dict[str, Any] | None] = [
    None, {}, {"min_numel": 0}, {"min_numel": 0, "resident_nbytes": 8192},
    {"min_numel": 1050},  # the uneven weight is swapped on one rank only
]
FULL = {"full_state_dict": True}
OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    (FULL, FULL),
    ({**FULL, "cpu_offload": True}, {**FULL, "broadcast_from_rank0": True}),
    (
        {**FULL, "cpu_offload": True, "flatten_optimizer_state_dict": True},
        {**FULL, "broadcast_from_rank0": True, "flatten_optimizer_state_dict": True},
    ),
]


def make(config: dict[str, Any] | None, steps: int) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    # 32 and 31 rows of 33: 1056 and 1023 elements; and a bias that is small everywhere.
    model = nn.Sequential(nn.Linear(33, 63), nn.Linear(63, 64, bias=False)).to(DEVICE)
    fully_shard(model, mesh=init_device_mesh(DEVICE, (2,)))
    params = model.parameters()
    optimizer = AdamW(params) if config is None else SwapAdamW(params, swap_config=config)
    train(optimizer, range(steps))
    return model, optimizer


def train(optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        for index, param in enumerate(optimizer.param_groups[0]["params"]):
            param.grad = torch.full_like(param, 0.1 * (step + 1) + index)
        optimizer.step()
        optimizer.zero_grad()


def outcome(
    config: dict[str, Any] | None, get: dict[str, Any], put: dict[str, Any]
) -> list[Tensor] | tuple[type, str]:
    try:
        model, optimizer = make(config, 2)
        saved = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**get))
        model, optimizer = make(config, 1)
        set_optimizer_state_dict(model, optimizer, saved, options=StateDictOptions(**put))
        train(optimizer, range(2, 4))
    except Exception as error:
        return type(error), str(error)
    params = optimizer.param_groups[0]["params"]
    for param in params:
        for name in ("exp_avg", "exp_avg_sq"):
            shown = optimizer.state[param][name]
            assert isinstance(shown, DTensor) and shown.placements == param.placements
            assert shown.shape == param.shape and shown.stride() == param.stride()
    return [param.to_local().cpu() for param in params]


if __name__ == "__main__":
    torch.set_num_threads(1)
    backend = "gloo"
    if IS_SIMULATED:
        import swap_adam.simulator as simulator

        simulator.enable()
    else:
        backend = f"cpu:gloo,{DEVICE}:{sys.argv[3]}"
    dist.init_process_group(
        backend, init_method=sys.argv[2], rank=int(sys.argv[1]), world_size=2
    )
    for get, put in OPTIONS:
        native = outcome(None, get, put)
        # torch itself (2.13) fails to broadcast what it has flattened.
        assert "flatten_optimizer_state_dict" in put or not isinstance(native, tuple), native
        for config in CONFIGS[1:]:
            swapped = outcome(config, get, put)
            if isinstance(native, tuple) or isinstance(swapped, tuple):
                assert native == swapped, (get, put, config, swapped)
            else:
                assert all(map(torch.equal, native, swapped)), (get, put, config)
    dist.destroy_process_group()
    print("fine")
