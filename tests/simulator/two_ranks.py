"""One of two processes that train a sharded model together; test_distributed.py starts them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import swap_adam.simulator as simulator
from swap_adam import SwapOptimizerConfig
from swap_adam.torch import SwapAdamW


def full(value: float, numel: int = 4) -> torch.Tensor:
    return torch.full((numel,), float(value), device="simulated")


def collectives(rank: int) -> None:
    tensor = full(rank + 1)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3] * 4
    tensor = full(rank + 1)
    work = dist.all_reduce(tensor, op=dist.ReduceOp.AVG, async_op=True)
    work.wait()
    assert tensor.tolist() == [1.5] * 4
    gathered = full(0, 8)
    dist.all_gather_into_tensor(gathered, full(rank + 1))
    assert gathered.tolist() == [1] * 4 + [2] * 4
    scattered = full(0, 2)
    dist.reduce_scatter_tensor(scattered, torch.arange(4.0).to("simulated"))
    assert scattered.tolist() == [4.0 * rank, 4.0 * rank + 2]
    pieces = [full(0) for _ in range(2)]
    dist.all_gather(pieces, full(rank + 1))
    assert [piece[0].item() for piece in pieces] == [1, 2]
    tensor = full(rank)
    dist.broadcast(tensor, 1)
    assert tensor.tolist() == [1] * 4
    host = torch.full((2,), float(rank))  # the CPU's tensors use the same group
    dist.all_reduce(host)
    assert host.tolist() == [1, 1]
    dist.barrier()


def races(rank: int) -> None:
    """A collective is ordered like any other operation of its stream."""
    simulator.configure(races="collect")
    side, tensor = torch.Stream("simulated"), full(1)
    with side:
        dist.all_reduce(tensor)
    found = simulator.violations()
    assert len(found) == 1 and "c10d::allreduce_ #1" in found[0], found
    simulator.configure(races="raise")
    torch.accelerator.synchronize()


def sharded(rank: int, make_optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    reference = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16)
    ).double()
    model = copy.deepcopy(reference).to("simulated")
    mesh = init_device_mesh("simulated", (2,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizers = [
        torch.optim.AdamW(reference.parameters(), lr=1e-2, foreach=True),
        make_optimizer(model.parameters(), lr=1e-2),
    ]
    for _ in range(3):
        data = torch.randn(8, 16, dtype=torch.float64)
        for optimizer in optimizers:
            optimizer.zero_grad()
        reference(data).square().mean().backward()
        model(data.chunk(2)[rank].to("simulated")).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        for expected, parameter in zip(reference.parameters(), model.parameters()):
            assert isinstance(parameter, DTensor)
            assert torch.allclose(expected, parameter.full_tensor().cpu(), rtol=0, atol=1e-9)
    if isinstance(optimizers[1], SwapAdamW):
        (report,) = optimizers[1].swap_report().values()
        assert report.swapped_nbytes == 2 * 8 * sum(
            parameter.to_local().numel() for parameter in model.parameters()
        )
        states = get_optimizer_state_dict(model, optimizers[1])
        set_optimizer_state_dict(model, optimizers[1], states)
    assert simulator.violations() == []


if __name__ == "__main__":
    torch.set_num_threads(1)
    simulator.enable()
    own_rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method=sys.argv[2], rank=own_rank, world_size=2)
    collectives(own_rank)
    races(own_rank)
    sharded(own_rank, partial(torch.optim.AdamW, foreach=True))
    sharded(own_rank, partial(SwapAdamW, swap_config=SwapOptimizerConfig(min_numel=0)))
    dist.destroy_process_group()
    print("fine")
