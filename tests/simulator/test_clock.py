"""The time of a schedule is the number that arithmetic gives, and nothing is free."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import swap_adam.simulator as simulator
from swap_adam.simulator import native

US = 1e-6
NUMEL = 1_000_000
COPY = 3 * US + 4 * NUMEL / 25e9
UPDATE = 2 * US + 2 * 4 * NUMEL / 1500e9


def exactly(value: float) -> object:
    return pytest.approx(value, rel=1e-12, abs=0)


def pipeline(batches: int, slots: int) -> float:
    """Copy in, update, copy out, on three streams; seconds from the first copy to the last."""
    host = torch.zeros(batches, NUMEL).pin_memory()
    staging = torch.empty(slots, NUMEL, device="simulated")
    torch.accelerator.synchronize()
    compute = torch.accelerator.current_stream()
    copy_in, copy_out = torch.Stream("simulated"), torch.Stream("simulated")
    free: list[torch.Event | None] = [None] * slots
    started = simulator.now() + 4 * US  # the first copy has been launched

    def signal(stream: torch.Stream) -> torch.Event:
        event = torch.Event("simulated")
        event.record(stream)
        return event

    for batch in range(batches):
        slot = batch % slots
        if free[slot] is not None:
            copy_in.wait_event(free[slot])
        with copy_in:
            staging[slot].copy_(host[batch], non_blocking=True)
        compute.wait_event(signal(copy_in))
        staging[slot].add_(1)
        copy_out.wait_event(signal(compute))
        with copy_out:
            host[batch].copy_(staging[slot], non_blocking=True)
        free[slot] = signal(copy_out)
    copy_out.synchronize()
    assert host.sum() == host.numel()
    return finished() - started


def finished() -> float:
    """When the last transfer or kernel ended."""
    return max(end for engine, _, end in spans() if engine >= 0)


def spans() -> list[tuple[int, float, float]]:
    """Engine (-1 for the host), start and end of everything in the trace."""
    lines = [line.split("\t") for line in native.text("trace").splitlines()]
    return [(int(line[1]), float(line[4]), float(line[5])) for line in lines]


@pytest.mark.parametrize("duplex", [True, False])
@pytest.mark.parametrize("batches", [2, 4, 6])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_double_buffered_pipeline_takes_what_arithmetic_says(
    device: str, slots: int, batches: int, duplex: bool
) -> None:
    simulator.configure(duplex=duplex)
    taken = pipeline(batches, slots)
    if slots == 1:
        expected = batches * (2 * COPY + UPDATE)
    elif not duplex:  # the one copy engine never idles
        expected = 2 * batches * COPY
    elif slots == 2:
        expected = batches // 2 * (2 * COPY + UPDATE) + COPY
    else:
        expected = (batches + 1) * COPY + UPDATE
    assert taken == exactly(expected)


def test_host_pays_for_everything_it_issues(device: str) -> None:
    tensor = torch.empty(1000, device=device)
    assert simulator.now() == 0
    tensor.view(10, 100).t()[2:5].unsqueeze(0)
    assert simulator.now() == 0  # views are free
    tensor.zero_()
    assert simulator.now() == exactly(4 * US)
    event = torch.Event(device)
    event.record()
    assert simulator.now() == exactly(4.5 * US)
    other = torch.Stream(device=device)
    other.wait_event(event)
    assert simulator.now() == exactly(5 * US)
    kernel = 4 * US + 2 * US + 4000 / 1500e9
    event.synchronize()
    assert simulator.now() == exactly(kernel + 5 * US)
    event.synchronize()  # a wait that need not wait costs the call
    assert simulator.now() == exactly(kernel + 10 * US)


@pytest.mark.parametrize("link", sorted(simulator.LINKS))
def test_each_link_has_its_speeds(device: str, link: str) -> None:
    simulator.configure(link=link)
    costs = simulator.LINKS[link]
    host, there = torch.zeros(NUMEL).pin_memory(), torch.empty(NUMEL, device=device)
    torch.accelerator.synchronize()
    for source, target, bandwidth in (
        (host, there, costs.copy_in_gb_per_s),
        (there, host, costs.copy_out_gb_per_s),
    ):
        start = simulator.now()
        target.copy_(source)
        copied = 4 * US + 3 * US + 4 * NUMEL / (bandwidth * 1e9) + 5 * US
        assert simulator.now() - start == pytest.approx(copied, rel=1e-9)
    start = simulator.now()
    there.add_(1)
    torch.accelerator.synchronize()
    updated = 4 * US + 2 * US + 8 * NUMEL / (costs.device_gb_per_s * 1e9) + 5 * US
    assert simulator.now() - start == pytest.approx(updated, rel=1e-9)


def test_foreach_and_fused_are_one_kernel_each(device: str) -> None:
    lists = [[torch.ones(1000, device=device) for _ in range(10)] for _ in range(4)]
    steps = [torch.ones((), device=device) for _ in range(10)]
    torch.accelerator.synchronize()
    for nbytes, call in (
        (10 * 2 * 4000, lambda: torch._foreach_mul_(lists[0], 2.0)),
        (10 * 3 * 4000, lambda: torch._foreach_add_(lists[0], lists[1])),
        (10 * 1 * 4000, lambda: torch._foreach_zero_(lists[2])),
        (10 * 2 * 4000, lambda: torch._foreach_sqrt(lists[3])),
        (
            10 * (7 * 4000 + 4),  # the gradients are only read
            lambda: torch._fused_adamw_(
                *lists, [], steps, lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8,
                amsgrad=False, maximize=False,
            ),
        ),
    ):
        start = simulator.now()
        call()
        torch.accelerator.synchronize()
        expected = 4 * US + 2 * US + nbytes / 1500e9 + 5 * US
        assert simulator.now() - start == pytest.approx(expected, rel=1e-9)


def test_host_work_in_pinned_memory_costs_time(device: str) -> None:
    host = torch.empty(NUMEL).pin_memory()
    start = simulator.now()
    host.zero_()
    assert simulator.now() - start == pytest.approx(4 * NUMEL / 40e9)
    start = simulator.now()
    torch.frombuffer(host.numpy(), dtype=torch.float32).add_(1)
    assert simulator.now() - start == pytest.approx(2 * 4 * NUMEL / 40e9)
    start = simulator.now()
    torch.zeros(NUMEL).add_(1)  # pageable memory is not the simulator's business
    assert simulator.now() == start


def test_one_engine_serves_the_streams_in_the_order_they_became_ready(device: str) -> None:
    big, small = (torch.zeros(size).pin_memory() for size in (NUMEL, 1000))
    targets = [torch.empty(size, device=device) for size in (NUMEL, 1000)]
    first, second = torch.Stream(device=device), torch.Stream(device=device)
    ends = [torch.Event(device, enable_timing=True) for _ in range(3)]
    start = simulator.now()
    ends[0].record(first)
    with first:
        targets[0].copy_(big, non_blocking=True)
    ends[1].record(first)
    with second:
        targets[1].copy_(small, non_blocking=True)
    ends[2].record(second)
    torch.accelerator.synchronize()
    assert simulator.now() >= start
    # The second waits for the engine although its stream is idle.
    assert ends[1].elapsed_time(ends[2]) == pytest.approx(1e3 * (3 * US + 4000 / 25e9))


def test_what_is_issued_later_may_still_run_first(device: str) -> None:
    """A copy that waits for compute does not keep the engine from one that need not."""
    made, host = torch.zeros(10 * NUMEL, device=device), torch.zeros(10 * NUMEL).pin_memory()
    torch.accelerator.synchronize()
    out, other = torch.Stream(device=device), torch.Stream(device=device)
    small, there = torch.zeros(1000).pin_memory(), torch.zeros(1000, device=device)
    torch.accelerator.synchronize()
    for _ in range(20):
        made.add_(1)
    done = torch.Event(device)
    done.record()
    out.wait_event(done)
    with out:
        host.copy_(made, non_blocking=True)
    with other:
        small.copy_(there, non_blocking=True)
    start = simulator.now()
    other.synchronize()
    assert simulator.now() - start == pytest.approx(3 * US + 4000 / 25e9 + 5 * US, rel=1e-6)


def test_elapsed_time_is_virtual_milliseconds(device: str) -> None:
    first, last = (torch.Event(device, enable_timing=True) for _ in range(2))
    host, there = torch.zeros(NUMEL).pin_memory(), torch.empty(NUMEL, device=device)
    first.record()
    there.copy_(host, non_blocking=True)
    there.copy_(host, non_blocking=True)
    last.record()
    last.synchronize()
    # The first copy starts when it has been launched, half an event after the first record.
    assert first.elapsed_time(last) == pytest.approx(1e3 * (2 * COPY + 4 * US), rel=1e-9)


def test_polling_an_event_comes_to_an_end(device: str) -> None:
    there = torch.zeros(NUMEL).pin_memory().to(device, non_blocking=True)
    event = torch.Event(device)
    event.record()
    assert not event.query()
    polls = 0
    while not event.query():
        polls += 1
    assert polls == pytest.approx(COPY / (0.5 * US), rel=0.05)
    assert torch.accelerator.current_stream().query()
    assert there.sum() == 0 and simulator.violations() == []


def test_the_same_program_takes_the_same_time(device: str) -> None:
    times = set()
    for _ in range(3):
        simulator.reset_clock()
        pipeline(4, 2)
        times.add(simulator.now())
    assert len(times) == 1


def test_trace_shows_both_directions_at_once(device: str, tmp_path: Path) -> None:
    pipeline(4, 2)
    simulator.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    boxes = {
        name: [e for e in events if e["ph"] == "X" and rows[e["pid"], e["tid"]].startswith(name)]
        for name in ("host", "compute", "copy-in", "copy-out")
    }
    assert len(boxes["copy-in"]) == len(boxes["copy-out"]) == 4
    assert {box["name"] for box in boxes["compute"]} >= {"aten::add_.Tensor"}
    assert any(
        a["ts"] < b["ts"] + b["dur"] and b["ts"] < a["ts"] + a["dur"]
        for a in boxes["copy-in"]
        for b in boxes["copy-out"]
    )


def test_trace_is_bounded(device: str) -> None:
    simulator.configure(trace_spans=10)
    tensor = torch.zeros(10, device=device)
    for _ in range(20):
        tensor.add_(1)
    torch.accelerator.synchronize()
    assert len(spans()) == 10
