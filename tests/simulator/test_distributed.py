"""Processes with simulated devices talk over gloo: every collective and message of a group."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import OnRanks, run_on_ranks  # tests/parallel/support
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import swap_adam.simulator as simulator

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


@pytest.fixture
def on_ranks(tmp_path: Path) -> OnRanks:
    return functools.partial(run_on_ranks, tmp_path)


def given(rank: int, numel: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    """A rank's numbers, on the CPU; small integers, so that sums are exact in any order."""
    return (torch.arange(numel) % 5 + 2 * rank + 1).to(dtype)


def here(tensor: Tensor) -> Tensor:
    return tensor.to("simulated")


REDUCTIONS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "SUM": lambda parts: functools.reduce(operator.add, parts),
    "AVG": lambda parts: functools.reduce(operator.add, parts) / len(parts),
    "PRODUCT": lambda parts: functools.reduce(operator.mul, parts),
    "MAX": lambda parts: functools.reduce(torch.maximum, parts),
    "MIN": lambda parts: functools.reduce(torch.minimum, parts),
}
Group = dist.ProcessGroup
# What one call needs: its name, the call, what it writes, what it reads, what must be written.
Case = tuple[str, Callable[..., object], list[Tensor], list[Tensor], list[Tensor]]


def reductions(group: Group, ranks: list[int], name: str) -> list[Case]:
    reduce, op = REDUCTIONS[name], getattr(dist.ReduceOp, name)
    me, size = group.rank(), len(ranks)
    total = reduce([given(rank) for rank in ranks])
    wide = reduce([given(rank, 4 * size) for rank in ranks])
    own = wide.chunk(size)[me]
    one, two, three = here(given(ranks[me])), here(given(ranks[me])), here(given(ranks[me]))
    part, parts, flat = here(torch.zeros(4)), here(torch.zeros(4)), here(given(ranks[me], 4 * size))
    root = size - 1
    return [
        ("all_reduce", lambda **o: dist.all_reduce(one, op, group, **o), [one], [], [total]),
        ("all_reduce_coalesced",
         lambda **o: dist.all_reduce_coalesced([two, three], op, group, **o),
         [two, three], [], [total, total]),
        ("reduce", lambda **o: dist.reduce(  # who is not the root keeps its own
            reduced, group=group, op=op, group_dst=root, **o),
         [reduced := here(given(ranks[me]))], [], [total if me == root else given(ranks[me])]),
        ("reduce_scatter_tensor",
         lambda **o: dist.reduce_scatter_tensor(part, flat, op, group, **o), [part], [flat], [own]),
        ("reduce_scatter",
         lambda **o: dist.reduce_scatter(parts, list(flat.chunk(size)), op, group, **o),
         [parts], [flat], [own]),
    ]


def movements(group: Group, ranks: list[int]) -> list[Case]:
    me, size = group.rank(), len(ranks)
    mine = here(given(ranks[me]))
    everything = [given(rank) for rank in ranks]
    pieces, flat = [here(torch.zeros(4)) for _ in ranks], here(torch.zeros(4 * size))
    sent = here(given(ranks[me]))
    wide = here(given(ranks[me], 4 * size))
    scattered, gathered = here(torch.zeros(4)), [here(torch.zeros(4)) for _ in ranks]
    swapped, listed = here(torch.zeros(4 * size)), [here(torch.zeros(4)) for _ in ranks]
    crossed = [given(rank, 4 * size).chunk(size)[me] for rank in ranks]
    # Rank i sends i + 1 numbers to everybody.
    split = here(torch.zeros(sum(at + 1 for at in range(size))))
    uneven = here(given(ranks[me], (me + 1) * size))
    return [
        ("broadcast", lambda **o: dist.broadcast(sent, group=group, group_src=1, **o),
         [sent], [], [everything[1]]),
        ("all_gather", lambda **o: dist.all_gather(pieces, mine, group, **o),
         pieces, [mine], everything),
        ("all_gather_into_tensor", lambda **o: dist.all_gather_into_tensor(flat, mine, group, **o),
         [flat], [mine], [torch.cat(everything)]),
        ("gather",
         lambda **o: dist.gather(
             mine, gathered if me == 0 else None, group=group, group_dst=0, **o),
         gathered, [mine], everything if me == 0 else [torch.zeros(4)] * size),
        ("scatter",
         lambda **o: dist.scatter(
             scattered, list(wide.chunk(size)) if me == 1 else None, group=group, group_src=1, **o),
         [scattered], [wide], [given(ranks[1], 4 * size).chunk(size)[me]]),
        ("all_to_all", lambda **o: dist.all_to_all(listed, list(wide.chunk(size)), group, **o),
         listed, [wide], crossed),
        ("all_to_all_single", lambda **o: dist.all_to_all_single(swapped, wide, group=group, **o),
         [swapped], [wide], [torch.cat(crossed)]),
        ("all_to_all_single with splits",
         lambda **o: dist.all_to_all_single(
             split, uneven, [at + 1 for at in range(size)], [me + 1] * size, group, **o),
         [split], [uneven],
         [torch.cat([given(rank, (at + 1) * size).chunk(size)[me]
                     for at, rank in enumerate(ranks)])]),
    ]


def check(case: Case, way: str) -> None:
    name, call, outputs, inputs, expected = case
    before = [tensor.cpu() for tensor in inputs]

    def assert_holds(values: list[Tensor]) -> None:
        for output, value in zip(outputs, values):
            assert torch.equal(output.cpu(), value), f"{name}, {way}: {output.cpu()}, not {value}"

    if way == "at once":
        call()
    else:
        work = call(async_op=True)
        if way == "never waited for":
            torch.accelerator.synchronize()
        else:
            work.wait()
            work.wait()
    assert_holds(expected)
    for tensor, value in zip(inputs, before):
        assert torch.equal(tensor.cpu(), value), f"{name}, {way}: changed its input"
    if way == "waited for again later":  # after the outputs have got other values
        for output in outputs:
            output.fill_(-7)
        work.wait()
        torch.accelerator.synchronize()
        assert_holds([torch.full_like(value, -7) for value in expected])


WAYS = ("at once", "waited for", "waited for again later", "never waited for")


def every_collective(rank: int) -> None:
    mesh = init_device_mesh("simulated", (2, 2), mesh_dim_names=("row", "column"))
    halves = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    groups: list[tuple[Group, list[int]]] = [
        (dist.group.WORLD, [0, 1, 2, 3]),
        (halves[0 if rank in (0, 3) else 1], [0, 3] if rank in (0, 3) else [1, 2]),
        (mesh["row"].get_group(), [rank % 2, rank % 2 + 2]),
        (mesh.get_group("column"), [rank // 2 * 2, rank // 2 * 2 + 1]),
    ]
    for group, ranks in groups:
        assert dist.get_process_group_ranks(group) == ranks
        for way in WAYS:
            for name in REDUCTIONS:
                for case in reductions(group, ranks, name):
                    check((f"{case[0]} {name}", *case[1:]), way)
            for case in movements(group, ranks):
                check(case, way)
    whole = here(torch.tensor([7 + rank]))
    dist.all_reduce(whole, dist.ReduceOp.AVG)  # of integers, as NCCL's: towards zero
    assert whole.tolist() == [8]
    dist.barrier()
    dist.barrier(device_ids=[0])
    host = torch.full((2,), float(rank))  # the CPU's tensors use the same group
    dist.all_reduce(host)
    assert host.tolist() == [6, 6]
    # Last: gloo may tell of it again at the next call.
    with pytest.raises(RuntimeError, match="PREMUL_SUM with Gloo"):
        dist.all_reduce(here(torch.ones(2)), dist._make_nccl_premul_sum(2.0))


def test_every_collective_writes_once_what_one_process_computes(on_ranks: OnRanks) -> None:
    on_ranks(every_collective, 4)


def of_objects(rank: int) -> None:
    size = dist.get_world_size()
    own = {"rank": rank, "tensor": here(given(rank))}
    gathered: list[dict[str, object] | None] = [None] * size
    dist.all_gather_object(gathered, own)
    assert [one["rank"] for one in gathered if one] == list(range(size))
    objects = [own]
    dist.broadcast_object_list(objects, 1)
    assert objects[0]["rank"] == 1 and torch.equal(objects[0]["tensor"].cpu(), given(1))
    received: list[object] = [None]
    dist.scatter_object_list(received, ["a", "b"] if rank == 0 else None, 0)
    assert received == ["ab"[rank]]
    if rank == 0:
        dist.send_object_list(["x", 3], 1)
    else:
        listed: list[object] = [None, None]
        dist.recv_object_list(listed, 0)
        assert listed == ["x", 3]


def functional(rank: int) -> None:
    """As DTensor calls them."""
    import torch.distributed._functional_collectives as functions

    group, parts = dist.group.WORLD, [given(0), given(1)]
    one = here(parts[rank])
    mean, total = (parts[0] + parts[1]) / 2, parts[0] + parts[1]
    found = {
        "all_reduce": (functions.all_reduce(one, "avg", group), mean),
        "all_gather": (functions.all_gather_tensor(one, 0, group), torch.cat(parts)),
        "reduce_scatter": (
            functions.reduce_scatter_tensor(one, "avg", 0, group), mean.chunk(2)[rank]),
        "all_to_all": (
            functions.all_to_all_single(one, None, None, group),
            torch.cat([part.chunk(2)[rank] for part in parts])),
        "broadcast": (functions.broadcast(one, 1, group), parts[1]),
        "permute": (functions.permute_tensor(one, [1, 0], group), parts[1 - rank]),
    }
    lists = {
        "all_reduce_coalesced": (functions.all_reduce_coalesced([one, 2 * one], "sum", group),
                                 [total, 2 * total]),
        "all_gather_into_tensor_coalesced": (
            functions.all_gather_into_tensor_coalesced([one, 2 * one], group),
            [torch.cat(parts), 2 * torch.cat(parts)]),
        "reduce_scatter_tensor_coalesced": (
            functions.reduce_scatter_tensor_coalesced([one, 2 * one], "avg", [0, 0], group),
            [mean.chunk(2)[rank], 2 * mean.chunk(2)[rank]]),
    }
    for name, (outputs, values) in lists.items():
        for index, (output, value) in enumerate(zip(outputs, values)):
            found[f"{name} {index}"] = (output, value)
    for name, (output, value) in found.items():
        assert torch.equal(output.cpu(), value), name


def futures(rank: int) -> None:
    tensor = here(given(rank))
    (result,) = dist.all_reduce(tensor, async_op=True).get_future().wait()
    assert torch.equal(result.cpu(), given(0) + given(1)) and result.data_ptr() == tensor.data_ptr()
    # As DDP's communication hooks do.
    future = dist.all_reduce(tensor, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2).wait()
    assert torch.equal(doubled.cpu(), 4 * (given(0) + given(1)))


def messages(rank: int) -> None:
    peer = 1 - rank
    own, other = here(given(rank)), given(peer)

    def empty() -> Tensor:
        return here(torch.zeros(4))

    # Blocking, in both directions, and from whoever sends.
    target = empty()
    if rank == 0:
        dist.send(own, peer)
        assert dist.recv(target) == peer
    else:
        assert dist.recv(target, peer) == peer
        dist.send(own, peer, tag=0)
    assert torch.equal(target.cpu(), other)
    # Both ask before either waits; then what was sent changes, which the peer must not see.
    target = empty()
    receiving, sending = dist.irecv(target, peer), dist.isend(own, peer)
    assert receiving is not None and sending is not None
    sending.wait()
    own.add_(100)
    for _ in range(3):
        receiving.wait()
    assert receiving.is_completed() and sending.is_completed()
    assert torch.equal(target.cpu(), other)
    target.fill_(5)
    receiving.wait()
    assert target.tolist() == [5] * 4
    own.sub_(100)
    # A batch, sends and receives in any order.
    target = empty()
    operations = [dist.P2POp(dist.isend, own, peer), dist.P2POp(dist.irecv, target, peer)]
    for work in dist.batch_isend_irecv(operations[::1 if rank else -1]):
        work.wait()
    assert torch.equal(target.cpu(), other)
    # Never waited for: there when the device is.
    target = empty()
    dist.irecv(target, peer)
    dist.isend(own, peer)
    torch.accelerator.synchronize()
    assert torch.equal(target.cpu(), other)
    # Part of a tensor; the rest stays.
    target = here(torch.zeros(3, 4))
    dist.isend(own, peer)
    work = dist.irecv(target[1], peer)
    assert work is not None
    work.wait()
    assert torch.equal(target.cpu(), torch.stack([torch.zeros(4), other, torch.zeros(4)]))
    with pytest.raises(ValueError, match="contiguous"):
        dist.irecv(here(torch.zeros(4, 4)).T[0], peer)
    # A message that is late holds up what needs it, and nothing else.
    target, begin = empty(), time.monotonic()
    if rank == 0:
        work = dist.irecv(target, peer)
        assert own.sum().item() == given(0).sum()
        assert time.monotonic() - begin < 1
        assert work is not None
        work.wait()
        assert torch.equal(target.cpu(), other) and time.monotonic() - begin > 1
    else:
        time.sleep(1.5)
        dist.send(own, peer)


def races(rank: int) -> None:
    """What a collective uses is watched, on the stream it runs on."""
    simulator.configure(races="collect")

    def only_race(*parts: str) -> None:
        found = simulator.violations()
        assert len(found) == 1 and all(part in found[0] for part in parts), found
        torch.accelerator.synchronize()

    side, tensor = torch.Stream("simulated"), here(torch.ones(4)).mul_(2)
    with side:
        dist.all_reduce(tensor)
    only_race("c10d::allreduce_ #", "aten::mul_")
    tensor = here(torch.ones(4))
    work = dist.all_reduce(tensor, async_op=True)
    tensor + 1  # before it was waited for
    only_race("aten::add", "c10d::allreduce_")
    work.wait()
    tensor + 1
    assert simulator.violations() == []
    received, sent = here(torch.ones(4)), here(torch.ones(4))
    torch.accelerator.synchronize()
    dist.isend(sent, 1 - rank)
    sent.add_(1)
    only_race("aten::add_", "c10d::send", "which reads")
    work = dist.irecv(received, 1 - rank)
    received * 2
    only_race("aten::mul", "c10d::recv_", "which writes")
    # The root of a broadcast only reads: so may another stream.
    tensor = here(torch.ones(4))
    torch.accelerator.synchronize()
    with side:
        tensor + 1
    dist.broadcast(tensor, 0)
    assert len(simulator.violations()) == rank
    torch.accelerator.synchronize()
    # Memory that goes while a collective uses it is protected.
    tensor = here(torch.ones(4))
    dist.all_reduce(tensor, async_op=True)
    del tensor
    torch.zeros(4, device="simulated")
    assert simulator.violations() == []
    simulator.configure(races="raise")


@pytest.mark.parametrize("worker", [of_objects, functional, futures, messages, races])
def test_two_ranks_talk_as_on_a_real_device(
    on_ranks: OnRanks, worker: Callable[[int], None]
) -> None:
    on_ranks(worker, 2)


def random_numbers(rank: int) -> list[Tensor]:
    import torch.distributed.tensor as tensors
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("simulated", (2,))
    torch.manual_seed(4)
    expected = [torch.randn(8, 32), torch.rand(64)]
    torch.manual_seed(4)
    sharded = tensors.randn(8, 32, device_mesh=mesh, placements=[tensors.Shard(0)])
    plain = torch.rand(64, device="simulated")
    # Every rank draws its shard of what one device would draw, and all go on alike.
    assert torch.equal(sharded.full_tensor().cpu(), expected[0])
    assert torch.equal(plain.cpu(), expected[1])
    replicated = tensors.randn(8, 32, device_mesh=mesh, placements=[tensors.Replicate()])
    dropped = nn.functional.dropout(sharded, 0.5).full_tensor()
    assert 0.3 < (dropped == 0).float().mean() < 0.7
    assert not torch.equal(dropped[:4] == 0, dropped[4:] == 0)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 32))
    fully_shard(model)
    model.to_empty(device="simulated")
    torch.manual_seed(5)
    for layer in (model[0], model[2]):
        layer.reset_parameters()
    model(torch.ones(2, 32, device="simulated")).sum().backward()
    weights = [param.full_tensor().detach().cpu() for param in model.parameters()]
    torch.manual_seed(5)
    assert torch.equal(weights[0], nn.Linear(32, 32).weight.detach())
    return [replicated.to_local().cpu(), dropped.cpu(), *weights]


def test_dtensors_are_initialized_and_dropped_out_alike_on_all_ranks(on_ranks: OnRanks) -> None:
    first, second = on_ranks(random_numbers, 2)
    assert all(torch.equal(one, other) for one, other in zip(first, second))


def attention_across_ranks(rank: int) -> tuple[Tensor, ...]:
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("simulated", (2,))
    parts = [part.to("simulated").detach() for part in attention_inputs()]
    with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2, 2, 2]):
        leaves = [part.clone().requires_grad_() for part in parts]
        output = nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
        output.square().sum().backward()
        return tuple(
            tensor.detach().cpu() for tensor in (output, *(leaf.grad for leaf in leaves)))


def attention_inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 16, 8, generator=generator) for _ in range(3)]


def test_attention_runs_in_context_parallel(on_ranks: OnRanks) -> None:
    """Each rank has a part of the sequence: the first and the last quarter, or the middle."""
    first, second = on_ranks(attention_across_ranks, 2)
    parts = [part.requires_grad_() for part in attention_inputs()]
    output = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
    output.square().sum().backward()
    for one, other, expected in zip(first, second, (output, *(part.grad for part in parts))):
        head, tail = one.chunk(2, dim=2)
        assert torch.allclose(
            torch.cat([head, other, tail], dim=2), expected, rtol=0, atol=1e-5)


def heads_across_ranks(rank: int) -> None:
    """Tensor parallel attention: DTensors sharded over the heads."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("simulated", (2,))
    parts = [torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    shards = [
        distribute_tensor(part.to("simulated"), mesh, [Shard(1)]).requires_grad_() for part in parts
    ]
    for part in parts:
        part.requires_grad_()
    for inputs in (parts, shards):
        output = nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
        output.square().sum().backward()
    for part, shard in zip(parts, shards):
        assert torch.allclose(shard.grad.full_tensor().cpu(), part.grad, rtol=0, atol=1e-5)


def test_attention_runs_on_dtensors(on_ranks: OnRanks) -> None:
    on_ranks(heads_across_ranks, 2)


class Stage(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(8, 8)

    def forward(self, data: Tensor) -> Tensor:
        result: Tensor = self.linear(data).relu()
        return result


def in_a_pipeline(rank: int) -> dict[str, list[Tensor]]:
    from torch.distributed import pipelining

    data, target = torch.ones(8, 8).cumsum(0) / 8, torch.zeros(8, 8)
    results = {}
    for name in ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"):
        count = 2 if "Interleaved" in name else 1  # stages of a rank
        numbers = [rank + 2 * at for at in range(count)]
        modules = [Stage(number).to("simulated") for number in numbers]
        stages = [
            pipelining.PipelineStage(module, number, 2 * count, torch.device("simulated:0"))
            for module, number in zip(modules, numbers)
        ]
        schedule = getattr(pipelining, name)(
            stages if count > 1 else stages[0], n_microbatches=4, loss_fn=nn.functional.mse_loss)
        inputs = {"target": here(target)} if rank == 1 else {}
        schedule.step(*([here(data)] if rank == 0 else []), **inputs)
        results[name] = [p.grad.cpu() for module in modules for p in module.parameters()]
    return results


def test_pipeline_schedules_of_torch_run(on_ranks: OnRanks) -> None:
    results = on_ranks(in_a_pipeline, 2)
    data, target = torch.ones(8, 8).cumsum(0) / 8, torch.zeros(8, 8)
    for name in results[0]:
        count = 4 if "Interleaved" in name else 2
        model = nn.Sequential(*(Stage(number) for number in range(count)))
        nn.functional.mse_loss(model(data), target).backward()
        for number, stage in enumerate(model):
            found = results[number % 2][name][2 * (number // 2):][:2]
            for param, gradient in zip(stage.parameters(), found):
                assert torch.allclose(gradient, param.grad, rtol=0, atol=1e-6), (name, number)


def fails_on_one_rank(rank: int) -> None:
    if rank == 1:
        raise ValueError("no luck on this rank")
    dist.recv(here(torch.zeros(2)), 1)


def test_the_rank_that_failed_is_the_one_whose_output_is_shown(on_ranks: OnRanks) -> None:
    begin = time.monotonic()
    with pytest.raises(AssertionError, match="(?s)rank 1 ended with 1.*no luck on this rank"):
        on_ranks(fails_on_one_rank, 2)
    assert time.monotonic() - begin < 90


def waits_for_nobody(rank: int) -> None:
    time.sleep(600)


def test_ranks_that_are_not_done_in_time_are_ended_and_named(on_ranks: OnRanks) -> None:
    with pytest.raises(AssertionError, match="(?s)rank 0 was not done.*rank 1 was not done"):
        on_ranks(waits_for_nobody, 2, deadline_s=3.0)
