"""Every missing wait is named, with both operations; what is ordered is never called a race."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch

import swap_adam.simulator as simulator

Use = Callable[[torch.Tensor], object]

N = 1024


def race(*parts: str) -> pytest.RaisesExc[RuntimeError]:
    """Expects a race whose text holds the parts in this order."""
    return pytest.raises(RuntimeError, match="(?s)" + ".*".join(parts))


def stream(index: int = 0) -> torch.Stream:
    return torch.Stream(device=f"simulated:{index}")


def compute() -> torch.Stream:
    return torch.accelerator.current_stream()


def event(on: torch.Stream) -> torch.Event:
    made = torch.Event("simulated")
    made.record(on)
    return made


def pinned(value: float = 1.0, numel: int = N) -> torch.Tensor:
    return torch.full((numel,), value).pin_memory()


def test_compute_reads_what_the_copy_in_has_not_brought(device: str) -> None:
    staging = torch.zeros(N, device=device)
    copies = stream()
    copies.wait_event(event(compute()))
    with copies:
        staging.copy_(pinned(), non_blocking=True)
    with race(r"aten::add\.Tensor #\d+ on the default stream of simulated:0 reads", "float",
              r"aten::copy_ #1 on stream \d+ of simulated:0, which writes bytes \[0, 4096\)"):
        staging + 1
    compute().wait_event(event(copies))
    staging + 1


def test_copy_out_takes_what_compute_has_not_made(device: str) -> None:
    state, host = torch.zeros(N, device=device), pinned()
    state.add_(1)
    copies = stream()
    with copies, race(r"aten::copy_ #1 on stream \d+", "reads", r"aten::add_\.Tensor",
                      "default stream", "writes"):
        host.copy_(state, non_blocking=True)
    copies.wait_event(event(compute()))
    with copies:
        host.copy_(state, non_blocking=True)


def test_staging_is_filled_again_before_it_was_copied_out(device: str) -> None:
    staging = torch.zeros(N, device=device)
    torch.accelerator.synchronize()
    copy_in, copy_out = stream(), stream()
    host = pinned()
    with copy_out:
        host.copy_(staging, non_blocking=True)
    with copy_in, race("writes", r"aten::copy_ #1 on stream \d+ of simulated:0, which reads"):
        staging.copy_(pinned(), non_blocking=True)


def test_staging_is_filled_again_before_compute_is_done_with_it(device: str) -> None:
    staging = torch.zeros(N, device=device)
    copies = stream()
    with copies, race("aten::copy_", "writes", "aten::zero_|aten::fill_", "writes"):
        staging.copy_(pinned(), non_blocking=True)


@pytest.mark.parametrize(
    "read",
    [
        lambda host: host + 1,
        lambda host: torch.equal(host, host.new_ones(N)),
        lambda host: torch.zeros(N).copy_(host),
        lambda host: host[3].item(),
        lambda host: host.clone(),
        lambda host: host.to(torch.float64),
        lambda host: torch.save(host, io.BytesIO()),
        lambda host: torch.from_numpy(host.numpy()[:10]).sum(),
        lambda host: torch.frombuffer(host.numpy(), dtype=torch.float32) * 2,
        lambda host: torch._foreach_add([host], 1),
        lambda host: copy.deepcopy(host),
        lambda host: pickle.dumps(host),
    ],
    ids=["add", "equal", "copy", "item", "clone", "to", "save", "numpy", "frombuffer", "foreach",
         "deepcopy", "pickle"],
)
def test_host_reads_a_copy_out_that_has_not_landed(device: str, read: Use) -> None:
    host, state = pinned(), torch.zeros(N, device=device)
    host.copy_(state, non_blocking=True)
    with race("on the host reads", "pinned host memory", "aten::copy_ #", "default stream",
              "which writes"):
        read(host)
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()
    simulator.violations()
    read(host)
    torch.accelerator.synchronize()


def test_host_overwrites_a_source_in_flight(device: str) -> None:
    host = pinned()
    state = host.to(device, non_blocking=True)
    host.zero_()
    with race("aten::zero_ on the host writes", "aten::copy_ #", "which reads"):
        state + 1


def test_host_may_read_a_source_in_flight(device: str) -> None:
    host = pinned()
    host.to(device, non_blocking=True)
    host + 1
    torch.accelerator.synchronize()


@pytest.mark.parametrize("release", ["free", "resize"])
def test_storage_goes_in_flight_without_record_stream(device: str, release: str) -> None:
    state, host, copies = torch.zeros(N, device=device), pinned(), stream()
    copies.wait_event(event(compute()))
    with copies:
        host.copy_(state, non_blocking=True)
    if release == "free":
        del state
    else:
        state.untyped_storage().resize_(0)
    assert simulator.violations() == []  # nobody else has the memory yet
    with race("freed in flight: allocation", "aten::copy_ #1 on stream", "read",
              "on the default stream", "writes", "record_stream"):
        torch.zeros(N, device=device)
        torch.accelerator.synchronize()


@pytest.mark.parametrize("release", ["free", "resize"])
@pytest.mark.parametrize("remedy", ["record_stream", "stream waits", "host waits"])
def test_storage_that_is_protected_may_go(device: str, release: str, remedy: str) -> None:
    state, host, copies = torch.ones(N, device=device), pinned(), stream()
    copies.wait_event(event(compute()))
    with copies:
        host.copy_(state, non_blocking=True)
    if remedy == "record_stream":
        state.record_stream(copies)
    elif remedy == "stream waits":
        compute().wait_event(event(copies))
    else:
        copies.synchronize()
    if release == "free":
        del state
    else:
        state.untyped_storage().resize_(0)
    torch.zeros(N, device=device)
    copies.synchronize()
    assert host.sum() == N
    assert simulator.violations() == []


@pytest.mark.parametrize("owner", ["a kernel's output", "a smaller one", "a larger one"])
def test_freed_memory_is_used_again_whoever_gets_it(device: str, owner: str) -> None:
    state, other, host = torch.zeros(N, device=device), torch.ones(N, device=device), pinned()
    copies = stream()
    copies.wait_event(event(compute()))
    with copies:
        host.copy_(state, non_blocking=True)
    del state
    with race("freed in flight: allocation", "aten::copy_ #1 on stream", "read"):
        if owner == "a kernel's output":
            other + 1
        else:
            torch.empty(N // 2 if owner == "a smaller one" else 2 * N, device=device).fill_(1)
        torch.accelerator.synchronize()


def test_freed_memory_is_used_again_by_a_stream_that_waited_only_for_its_owner(
    device: str,
) -> None:
    state, host, copies, third = torch.zeros(N, device=device), pinned(), stream(), stream()
    copies.wait_event(event(compute()))
    with copies:
        host.copy_(state, non_blocking=True)
    del state
    again = torch.empty(N, device=device)
    third.wait_event(event(compute()))
    with third, race("freed in flight", "aten::copy_ #1", "aten::fill_", "on stream"):
        again.fill_(1)


@pytest.mark.parametrize("wait", ["before it is allocated", "before it is written"])
def test_freed_memory_may_be_used_again_after_a_wait(device: str, wait: str) -> None:
    """As FSDP2 does: its shards are allocated on one stream and read on another one."""
    communication, host = stream(), pinned()
    with communication:
        shard = torch.ones(N, device=device)
    compute().wait_event(event(communication))
    for _ in range(3):
        host.copy_(shard, non_blocking=True)  # on the default stream
        del shard
        if wait == "before it is allocated":
            communication.wait_event(event(compute()))
        with communication:
            shard = torch.empty(N, device=device)
        if wait == "before it is written":
            communication.wait_event(event(compute()))
        with communication:
            shard.fill_(1)
        compute().wait_event(event(communication))
    torch.accelerator.synchronize()
    assert simulator.violations() == []


def test_freed_memory_may_be_used_again_by_another_stream_of_its_own(device: str) -> None:
    """An allocator keeps the free memory of every stream apart."""
    state, host, copies, third = torch.zeros(N, device=device), pinned(), stream(), stream()
    copies.wait_event(event(compute()))
    with copies:
        host.copy_(state, non_blocking=True)
    del state
    with third:
        torch.zeros(N, device=device)
    with copies:
        torch.zeros(N, device=device)
    torch.accelerator.synchronize()
    assert simulator.violations() == []


def test_a_recorded_stream_stands_for_what_it_waited_for(device: str) -> None:
    state, host, copies, last = torch.ones(N, device=device), pinned(), stream(), stream()
    copies.wait_event(event(compute()))
    with copies:
        host.copy_(state, non_blocking=True)
    last.wait_event(event(copies))
    state.record_stream(last)
    del state
    torch.zeros(N, device=device)
    torch.accelerator.synchronize()
    assert simulator.violations() == []


def test_memory_is_used_on_another_stream_than_it_was_allocated_on(device: str) -> None:
    torch.zeros(N, device=device)  # the allocation below may reuse what this kernel still writes
    staging = torch.empty(N, device=device)
    with stream(), race("aten::copy_ #1", "writes", "the allocation", "default stream"):
        staging.copy_(pinned(), non_blocking=True)


def test_second_stream_reads_without_a_wait(device: str) -> None:
    made = torch.ones(N, device=device).mul_(2)
    with stream(), race(r"aten::add\.Tensor #1 on stream", "reads", r"aten::mul_\.Tensor"):
        made + 1


def test_second_stream_overwrites_what_is_read(device: str) -> None:
    made = torch.ones(N, device=device)
    torch.accelerator.synchronize()
    made + 1
    with stream(), race("aten::mul_", "writes", "aten::add", "which reads"):
        made.mul_(2)


def test_two_streams_may_read(device: str) -> None:
    made = torch.ones(N, device=device)
    torch.accelerator.synchronize()
    made + 1
    with stream():
        made + 1


def test_copy_between_devices_reads_what_another_stream_still_writes(device: str) -> None:
    made = torch.ones(N, device="simulated:0")
    torch.accelerator.synchronize()
    with stream(0):
        made.mul_(2)
    with race("aten::copy_", "default stream of simulated:0 reads", "aten::mul_", "stream"):
        made.to("simulated:1")


def test_copy_between_devices_is_read_on_a_stream_that_did_not_wait(device: str) -> None:
    made = torch.ones(N, device="simulated:0").to("simulated:1")
    with stream(1), race("of simulated:1 reads", "aten::copy_", "simulated:0, which writes"):
        made + 1
    made + 1  # but the current stream of the target goes on after the copy


def test_disjoint_ranges_of_one_storage_do_not_race(device: str) -> None:
    staging = torch.zeros(2 * N, device=device)
    torch.accelerator.synchronize()
    host, first, second = pinned(numel=2 * N), stream(), stream()
    with first:
        staging[:N].copy_(host[:N], non_blocking=True)
    with second:
        staging[N:].copy_(host[N:], non_blocking=True)
        staging[N:] += 1
    with second, race(r"\[4092, 4096\)"):
        staging.narrow(0, N - 1, 2).add_(1)


def test_columns_of_one_matrix_do_not_race(device: str) -> None:
    matrix = torch.zeros(8, 8, device=device)
    torch.accelerator.synchronize()
    with stream():
        matrix[:, :4] += 1
    with stream():
        matrix[:, 4:] += 1
    with stream(), race("aten::add_"):
        matrix[:, 3:5] += 1


def test_a_wait_carries_what_was_waited_for_before(device: str) -> None:
    first, second, third = stream(), stream(), stream()
    made = torch.zeros(N, device=device)
    torch.accelerator.synchronize()
    with first:
        made += 1
    second.wait_event(event(first))
    third.wait_event(event(second))
    with third:
        made += 1
    host_knows = event(third)
    host_knows.synchronize()
    with stream():
        made += 1
    assert simulator.violations() == []


def test_an_event_stands_for_what_came_before_its_record(device: str) -> None:
    copies = stream()
    made = torch.zeros(N, device=device)
    torch.accelerator.synchronize()
    early = event(compute())
    made += 1
    copies.wait_event(early)
    with copies, race("aten::add_"):
        made += 1


def test_recording_an_event_again_does_not_move_earlier_waits(device: str) -> None:
    copies = stream()
    made = torch.zeros(N, device=device)
    torch.accelerator.synchronize()
    signal = event(compute())
    copies.wait_event(signal)
    made += 1
    signal.record(compute())
    with copies, race("aten::add_"):
        made += 1


def test_pinned_memory_goes_while_a_copy_uses_an_alias(device: str) -> None:
    slab = pinned(numel=2 * N)
    alias = torch.frombuffer(slab.numpy(), dtype=torch.float32, offset=4 * N, count=N)
    assert alias.is_pinned()
    state = alias.to(device, non_blocking=True)
    del alias, slab
    with race("freed in flight", "pinned host memory", "aten::copy_", "read"):
        state + 1


def test_torch_protects_pinned_memory_that_it_knows(device: str) -> None:
    before = simulator.pinned_nbytes()
    state = pinned(3.0).to(device, non_blocking=True)
    assert simulator.pinned_nbytes() == before
    assert state.sum() == 3 * N


def test_collect_lists_and_goes_on(device: str) -> None:
    simulator.configure(races="collect")
    made = torch.ones(N, device=device).mul_(2)
    with stream():
        made + 1
        made * 3
    found = simulator.violations()
    assert len(found) == 2 and "aten::mul_" in found[0] and "aten::mul.Tensor" in found[1]
    assert simulator.violations() == []


def test_off_does_not_look(device: str) -> None:
    simulator.configure(races="off")
    made = torch.ones(N, device=device).mul_(2)
    with stream():
        made + 1
    assert simulator.violations() == []


def test_backward_in_its_own_thread_is_the_same_host(device: str) -> None:
    weight = torch.ones(N, device=device, requires_grad=True)
    host = pinned()
    for _ in range(3):
        data = host.to(device, non_blocking=True)
        (weight * data).sum().backward()
        assert weight.grad is not None
        weight.grad = None
    assert simulator.violations() == []


def test_fused_adamw_reads_gradients_unless_it_unscales_them(device: str) -> None:
    def arguments() -> list[list[torch.Tensor]]:
        return [[torch.ones(N, device=device)] for _ in range(4)]

    def step(scale: torch.Tensor | None) -> None:
        torch._fused_adamw_(
            parameters, gradients, averages, squares, [], steps, lr=0.1, beta1=0.9, beta2=0.99,
            weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False, grad_scale=scale,
            found_inf=None if scale is None else torch.zeros((), device=device),
        )

    parameters, gradients, averages, squares = arguments()
    steps = [torch.ones((), device=device)]
    torch.accelerator.synchronize()
    side = stream()
    with side:
        gradients[0] + 1
    step(None)
    with race("aten::_fused_adamw_", "writes", "aten::add"):
        step(torch.ones((), device=device))
