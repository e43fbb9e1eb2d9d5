"""The device that is measured, real or simulated, and its link to the host."""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

import swap_adam.simulator as simulator
from swap_adam.simulator import LINKS, Costs, Counters

PROBE_NBYTES = 256 << 20
PASS_NBYTES = 64 << 20
REPEATS = 5


@dataclass(frozen=True)
class Link:
    """GB/s (1e9 bytes per second) of either direction, when both work if the link is duplex."""

    name: str
    in_gb_per_s: float
    out_gb_per_s: float
    is_duplex: bool

    @property
    def label(self) -> str:
        return self.name if self.is_duplex else f"{self.name} half"

    def limit_ms(self, nbytes: int) -> float:
        """The least that moving ``nbytes`` in both directions can take."""
        into, out = nbytes / self.in_gb_per_s / 1e6, nbytes / self.out_gb_per_s / 1e6
        return max(into, out) if self.is_duplex else into + out


class Accelerator(Protocol):
    """``repeats`` is how often a measurement is taken, for the median."""

    device: torch.device
    description: str
    clock: str
    repeats: int

    def links(self) -> Sequence[Link]: ...

    def mark(self) -> torch.Event:
        """An event that is recorded on the current stream and tells the time."""

    def use(self, link: Link) -> None:
        """Measure on ``link`` from here on."""

    def issue_pass(self, milliseconds: float) -> None:
        """Keep the current stream busy for about that long, as forward and backward do."""

    def host_ms(self) -> float: ...

    def counters(self) -> Counters | None:
        """What was issued since the last call, where the device tells."""

    def races(self) -> list[str]:
        """The races since the last call, where the device sees them."""

    def pinned_nbytes(self) -> int | None:
        """Pinned host memory in use, where the device tells."""


class SimulatedAccelerator:
    """The simulated accelerator: exact times of its virtual clock, for every link preset."""

    clock = "of its virtual clock, exact"
    repeats = 1

    def __init__(self) -> None:
        simulator.enable()
        simulator.reset()
        self.device = torch.device("simulated", 0)
        self.description = "simulated accelerator"
        self._costs = Costs()
        # Reading one row of it moves one row and, to the clock, all of it.
        self._pass = torch.empty(PASS_NBYTES // 4, 1, device=self.device)
        self._row = torch.zeros(1, dtype=torch.long, device=self.device)
        self._out = torch.empty(1, 1, device=self.device)

    def links(self) -> Sequence[Link]:
        return [
            Link(name, costs.copy_in_gb_per_s, costs.copy_out_gb_per_s, is_duplex)
            for name, costs in LINKS.items()
            for is_duplex in (True, False)
        ]

    def mark(self) -> torch.Event:
        event = torch.get_device_module(self.device).Event(enable_timing=True)
        event.record()
        assert isinstance(event, torch.Event)
        return event

    def use(self, link: Link) -> None:
        simulator.reset()
        simulator.configure(link=link.name, duplex=link.is_duplex, races="collect")
        self._costs = LINKS[link.name]

    def issue_pass(self, milliseconds: float) -> None:
        kernel_ms = self._costs.kernel_us / 1e3 + PASS_NBYTES / self._costs.device_gb_per_s / 1e6
        for _ in range(max(1, round(milliseconds / kernel_ms))):
            torch.index_select(self._pass, 0, self._row, out=self._out)

    def host_ms(self) -> float:
        return simulator.now() * 1e3

    def counters(self) -> Counters | None:
        counters = simulator.counters()
        simulator.reset_counters()
        return counters

    def races(self) -> list[str]:
        return simulator.violations()

    def pinned_nbytes(self) -> int | None:
        return simulator.pinned_nbytes()


class RealAccelerator:
    """A device that is there. Its link is measured first: alone, and both directions at once."""

    clock = "of events on the compute stream, medians"
    repeats = REPEATS

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        self._module.set_device(device)  # whose stream events are recorded on
        self.description = str(self._module.get_device_name(device))
        self._links: list[Link] = []
        self._pass = torch.zeros(PASS_NBYTES // 4, device=device)
        self._pass_ms = self._time(lambda: self._pass.mul_(1.0))

    def mark(self) -> torch.Event:
        # The module's own: torch.Event does not tell the time on some devices.
        event: torch.Event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def links(self) -> Sequence[Link]:
        if not self._links:
            self._links.append(self._measure_link())
        return self._links

    def _measure_link(self) -> Link:
        host = [torch.empty(PROBE_NBYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        device = [torch.empty_like(buffer, device=self.device) for buffer in host]
        streams = [torch.Stream(device=self.device) for _ in range(2)]

        def into() -> None:
            device[0].copy_(host[0], non_blocking=True)

        def out() -> None:
            host[1].copy_(device[1], non_blocking=True)

        def both() -> None:
            current = torch.accelerator.current_stream(self.device)
            for stream, copy in zip(streams, (into, out)):
                stream.wait_stream(current)
                with stream:
                    copy()
            for stream in streams:
                current.wait_stream(stream)

        into_ms, out_ms, both_ms = self._time(into), self._time(out), self._time(both)
        self.description += (
            f", {PROBE_NBYTES / into_ms / 1e6:.1f} GB/s in, {PROBE_NBYTES / out_ms / 1e6:.1f} GB/s "
            f"out, {PROBE_NBYTES / both_ms / 1e6:.1f} GB/s each way when both run"
        )
        speed = PROBE_NBYTES / both_ms / 1e6
        return Link("measured", speed, speed, is_duplex=True)

    def use(self, link: Link) -> None:
        torch.accelerator.synchronize(self.device)

    def issue_pass(self, milliseconds: float) -> None:
        for _ in range(max(1, round(milliseconds / self._pass_ms))):
            self._pass.mul_(1.0)

    def host_ms(self) -> float:
        return time.perf_counter() * 1e3

    def counters(self) -> Counters | None:
        return None

    def races(self) -> list[str]:
        return []

    def pinned_nbytes(self) -> int | None:
        return None

    def _time(self, issue: Callable[[], object]) -> float:
        """Milliseconds of what ``issue`` puts on the current stream: the median of a few."""
        times = []
        issue()
        for _ in range(self.repeats):
            start = self.mark()
            issue()
            end = self.mark()
            torch.accelerator.synchronize(self.device)
            times.append(start.elapsed_time(end))
        return statistics.median(times)


def choose_accelerator(name: str) -> Accelerator:
    """``auto`` is the real one where there is one; ``simulated``; or a device such as ``cuda:1``.

    Raises:
        RuntimeError: the device that was asked for is not there.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    is_real = found is not None and found.type != "simulated"
    if name == "simulated" or (name == "auto" and not is_real):
        return SimulatedAccelerator()
    if not is_real or found is None:
        raise RuntimeError(
            f"device {name!r} is asked for, and torch finds no accelerator here; "
            "'simulated' works without one"
        )
    device = torch.device(found.type) if name == "auto" else torch.device(name)
    if device.type != found.type:
        raise RuntimeError(f"device {name!r} is asked for; the accelerator here is {found.type!r}")
    return RealAccelerator(torch.device(device.type, device.index or 0))
