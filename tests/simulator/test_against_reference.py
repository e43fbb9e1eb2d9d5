"""Random programs: the clock and the race detector agree with plain versions that see everything.

The clock fixes times lazily and the detector forgets what it can. The references below do neither:
one sorts a whole program at once, the other compares each operation with all earlier ones.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

import swap_adam.simulator as simulator

US = 1e-6


@dataclass
class Entry:
    """An operation (engine and duration), a mark (index) or a wait for a mark."""

    kind: str
    issued: float
    engine: str = ""
    duration: float = 0.0
    mark: int = -1
    order: int = 0


def mark_times(queues: list[list[Entry]], marks: int) -> list[float]:
    """When each mark is passed: the earliest ready operation goes first, over and over."""
    ends, position = [0.0] * len(queues), [0] * len(queues)
    times: list[float | None] = [None] * marks
    free: dict[str, float] = {}
    while any(at < len(queue) for at, queue in zip(position, queues)):
        moved = False
        for stream, queue in enumerate(queues):
            while position[stream] < len(queue):
                entry = queue[position[stream]]
                if entry.kind == "mark":
                    ends[stream] = max(ends[stream], entry.issued)
                    times[entry.mark] = ends[stream]
                elif entry.kind == "wait":
                    passed = times[entry.mark]
                    if passed is None:
                        break
                    ends[stream] = max(ends[stream], entry.issued, passed)
                else:
                    break
                position[stream] += 1
                moved = True
        if moved:
            continue
        ready = [
            (max(ends[stream], queue[at].issued), queue[at].order, stream)
            for stream, (queue, at) in enumerate(zip(queues, position))
            if at < len(queue) and queue[at].kind == "run"
        ]
        time, _, stream = min(ready)
        entry = queues[stream][position[stream]]
        ends[stream] = free[entry.engine] = max(time, free.get(entry.engine, 0.0)) + entry.duration
        position[stream] += 1
    return [time if time is not None else -1.0 for time in times]


@pytest.mark.parametrize("seed", range(12))
def test_clock_agrees_with_sorting_the_whole_program(device: str, seed: int) -> None:
    simulator.configure(races="off", duplex=seed % 3 != 0)
    choose = random.Random(seed)
    sizes = (1_000, 30_000, 200_000)
    there = {size: torch.zeros(size, device=device) for size in sizes}
    host = {size: torch.zeros(size).pin_memory() for size in sizes}
    simulator.reset_clock()
    streams = [torch.Stream(device=device) for _ in range(4)]
    queues: list[list[Entry]] = [[] for _ in streams]
    events: list[torch.Event] = []
    now = 0.0
    for order in range(150):
        which = choose.randrange(4)
        action = choose.choice(
            ("in", "out", "update", "update", "record", "wait", "spend", "query")
        )
        size = choose.choice(sizes)
        if action in ("in", "out", "update"):
            now += 4 * US
            with streams[which]:
                if action == "in":
                    there[size].copy_(host[size], non_blocking=True)
                elif action == "out":
                    host[size].copy_(there[size], non_blocking=True)
                else:
                    there[size].add_(1)
            duration = 3 * US + 4 * size / 25e9
            if action == "update":
                duration = 2 * US + 8 * size / 1500e9
            engine = "in" if action == "out" and seed % 3 == 0 else action
            queues[which].append(Entry("run", now, engine, duration, order=order))
        elif action == "record":
            now += 0.5 * US
            events.append(torch.Event(device, enable_timing=True))
            events[-1].record(streams[which])
            queues[which].append(Entry("mark", now, mark=len(events) - 1))
        elif action == "wait" and events:
            now += 0.5 * US
            event = choose.randrange(len(events))
            streams[which].wait_event(events[event])
            queues[which].append(Entry("wait", now, mark=event))
        elif action == "spend":
            now += 20 * US
            simulator.spend(20 * US)
        elif action == "query" and events:
            now += 0.5 * US
            choose.choice(events).query()
    assert simulator.now() == pytest.approx(now, rel=1e-12)
    torch.accelerator.synchronize()
    expected = mark_times(queues, len(events))
    for event, time in zip(events[1:], expected[1:]):
        assert events[0].elapsed_time(event) == pytest.approx(
            1e3 * (time - expected[0]), rel=1e-9, abs=1e-9
        )


@dataclass
class Reference:
    """All uses of one storage: operation, first and last byte, whether it wrote."""

    uses: list[tuple[int, int, int, bool]] = field(default_factory=list)

    def races(self, known: set[int], begin: int, end: int, write: bool) -> bool:
        return any(
            begin < other_end and other_begin < end and (write or wrote) and one not in known
            for one, other_begin, other_end, wrote in self.uses
        )


@pytest.mark.parametrize("seed", range(30))
def test_detector_finds_the_first_race_and_none_before_it(device: str, seed: int) -> None:
    """Even seeds have no race at all: then the data must be what plain order gives."""
    simulator.configure(races="collect")
    choose = random.Random(seed)
    plain_storage, plain_host = torch.rand(64), torch.rand(64)
    storage, host = plain_storage.to(device), plain_host.pin_memory()
    torch.accelerator.synchronize()
    simulator.violations()
    streams = [torch.Stream(device=device) for _ in range(3)]
    device_side, host_side = Reference(), Reference()
    known: list[set[int]] = [set() for _ in streams]
    host_known: set[int] = set()
    events: list[tuple[torch.Event, set[int]]] = []
    # Until then, what would race is left out.
    racy = choose.randrange(300) if seed % 2 else 400
    for operation in range(400):
        which = choose.randrange(3)
        action = choose.choices(
            ("read", "write", "in", "out", "host read", "host write", "record", "wait", "block"),
            (2, 2, 2, 2, 1, 1, 9, 9, 2),
        )[0]
        begin = choose.randrange(0, 60)
        end = choose.randrange(begin + 1, min(64, begin + 12) + 1)
        expected = False
        if action in ("read", "write", "in", "out"):
            mine = known[which] | host_known
            writes_device, writes_host = action in ("write", "in"), action == "out"
            both = action in ("in", "out")
            expected = device_side.races(mine, begin, end, writes_device) or (
                both and host_side.races(mine, begin, end, writes_host)
            )
            if expected and operation < racy:
                continue
            device_side.uses.append((operation, begin, end, writes_device))
            if both:
                host_side.uses.append((operation, begin, end, writes_host))
            with streams[which]:
                part, plain = storage[begin:end], plain_storage[begin:end]
                if action == "read":
                    part + 1
                elif action == "write":
                    part.mul_(0.5)
                    plain.mul_(0.5)
                elif action == "in":
                    part.copy_(host[begin:end], non_blocking=True)
                    plain.copy_(plain_host[begin:end])
                else:
                    host[begin:end].copy_(part, non_blocking=True)
                    plain_host[begin:end].copy_(plain)
            known[which].add(operation)
        elif action in ("host read", "host write"):
            expected = host_side.races(host_known, begin, end, action == "host write")
            if expected and operation < racy:
                continue
            part, plain = host[begin:end], plain_host[begin:end]
            if action == "host read":
                assert expected or torch.equal(part, plain)
            else:
                part.add_(1)
                plain.add_(1)
        elif action == "record":
            events.append((torch.Event(device), known[which] | host_known))
            events[-1][0].record(streams[which])
        elif action == "wait" and events:
            event, past = choose.choice(events[-4:])
            streams[which].wait_event(event)
            known[which] |= past
        elif action == "block":
            streams[which].synchronize()
            host_known |= known[which]
        violations = simulator.violations()
        assert bool(violations) is expected, (operation, action, violations)
        if expected:  # afterwards a forgotten use may hide a second race behind the first
            break
    assert expected is bool(seed % 2)
    if not expected:
        torch.accelerator.synchronize()
        assert torch.equal(storage.cpu(), plain_storage) and torch.equal(host, plain_host)
