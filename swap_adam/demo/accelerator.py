"""The device that the demo runs on, real or simulated, and what can be read from it."""
from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from swap_adam.demo.spans import RECORDED, Span, read_spans

SAMPLE_SECONDS = 0.001  # a look holds Python's lock for a while


@dataclass
class Recording:
    """What happened on the device while it was recorded, filled when the recording ends.

    ``memory`` are milliseconds since the start and bytes held from then on; ``spans`` is empty
    where the device has no profiler that writes them.
    """

    memory: list[tuple[float, int]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


class Accelerator(Protocol):
    """``clock`` says in a word what the times are, ``clock_note`` in a sentence."""

    device: torch.device
    description: str
    clock: str
    clock_note: str

    def mark(self) -> torch.Event:
        """An event that is recorded on the current stream and tells the time."""

    def settle(self) -> None:
        """Wait for the device, so that :meth:`held_nbytes` has what is freed no longer in it."""

    def held_nbytes(self) -> int:
        """Device bytes that nobody else can have now."""

    def peak_nbytes(self) -> int:
        """The most since :meth:`reset_peak`."""

    def reset_peak(self) -> None: ...

    def pinned_nbytes(self) -> int | None:
        """Host bytes pinned by this process, ``None`` where the device cannot tell."""

    def host_ms(self) -> float:
        """The host's time on ``clock``, in milliseconds since some moment."""

    def recorded(self, trace: Path) -> AbstractContextManager[Recording]:
        """Record the block and write its Chrome trace; filled when the block has ended."""


class RealAccelerator:
    """A device that is there, through torch's own interfaces."""

    clock = "measured"
    clock_note = "Times are those of events on the compute stream, medians."

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        self._module.set_device(device)  # whose stream events are recorded on
        self.description = str(self._module.get_device_name(device))

    def mark(self) -> torch.Event:
        # The module's own: torch.Event does not tell the time on some devices.
        event: torch.Event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def settle(self) -> None:
        torch.accelerator.synchronize(self.device)
        # Only an allocation makes the allocator look which streams have passed.
        torch.empty(1, device=self.device)

    def held_nbytes(self) -> int:
        # Not memory_allocated(), which leaves out what a stream has still to pass.
        return int(self._module.memory_stats(self.device)["active_bytes.all.current"])

    def peak_nbytes(self) -> int:
        return int(self._module.memory_stats(self.device)["active_bytes.all.peak"])

    def reset_peak(self) -> None:
        self._module.reset_peak_memory_stats(self.device)

    def pinned_nbytes(self) -> int | None:
        return None

    def host_ms(self) -> float:
        return time.perf_counter() * 1e3

    @contextmanager
    def recorded(self, trace: Path) -> Iterator[Recording]:
        recording = Recording()
        torch.accelerator.synchronize(self.device)
        with torch.profiler.profile() as profiler:
            with torch.profiler.record_function(RECORDED), self._sampled(recording):
                yield recording
                torch.accelerator.synchronize(self.device)
        profiler.export_chrome_trace(str(trace))
        recording.spans = read_spans(trace)

    @contextmanager
    def _sampled(self, recording: Recording) -> Iterator[None]:
        """Allocators keep no history that every device can show, so a thread looks often."""
        stopped = threading.Event()
        start_ms = self.host_ms()

        def sample() -> None:
            while not stopped.wait(SAMPLE_SECONDS):
                recording.memory.append((self.host_ms() - start_ms, self.held_nbytes()))

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()


class SimulatedAccelerator:
    """The simulated one, whose times are those of its virtual clock."""

    def __init__(self, link: str) -> None:
        import swap_adam.simulator as simulator

        simulator.enable()
        simulator.reset()
        simulator.configure(link=link)
        costs = simulator.LINKS[link]
        self._simulator = simulator
        self.device = torch.device("simulated", 0)
        self.description = (
            f"simulated accelerator, link preset {link} ({costs.copy_in_gb_per_s:g} GB/s in, "
            f"{costs.copy_out_gb_per_s:g} GB/s out)"
        )
        self.clock = f"virtual, {link}"
        self.clock_note = (
            "Times are those of a virtual clock, which counts launches and bytes, not arithmetic: "
            "no device has run anything."
        )

    def mark(self) -> torch.Event:
        event = torch.get_device_module(self.device).Event(enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device))
        assert isinstance(event, torch.Event)
        return event

    def settle(self) -> None:
        torch.accelerator.synchronize(self.device)

    def held_nbytes(self) -> int:
        return self._simulator.memory_held(self.device.index)

    def peak_nbytes(self) -> int:
        return self._simulator.max_memory_held(self.device.index)

    def reset_peak(self) -> None:
        torch.get_device_module(self.device).reset_peak_memory_stats(self.device)

    def pinned_nbytes(self) -> int | None:
        return self._simulator.pinned_nbytes()

    def host_ms(self) -> float:
        return self._simulator.now() * 1e3

    @contextmanager
    def recorded(self, trace: Path) -> Iterator[Recording]:
        recording = Recording()
        before = self.held_nbytes()
        self._simulator.reset_clock()
        yield recording
        torch.accelerator.synchronize(self.device)
        changes = self._simulator.memory_timeline(self.device.index)
        recording.memory = [(0.0, before), *((at * 1e3, held) for at, held in changes)]
        self._simulator.trace(trace)
        recording.spans = read_spans(trace)


def choose_accelerator(name: str, link: str) -> Accelerator:
    """``auto`` is the real one where there is one; ``simulated``; or a device such as ``cuda:1``.

    Raises:
        RuntimeError: the device that was asked for is not there.
    """
    if name == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        name = "simulated" if found is None else f"{found.type}:{found.index or 0}"
    # torch.device() does not know this name before the device is enabled.
    if name.partition(":")[0] == "simulated":
        return SimulatedAccelerator(link)
    device = torch.device(name)
    there = torch.accelerator.current_accelerator(check_available=True)
    if there is None or there.type != device.type:
        is_there = "no accelerator" if there is None else f"the accelerator {there.type!r}"
        raise RuntimeError(
            f"device {name!r} is asked for, and torch finds {is_there} here; "
            "'simulated' works without one"
        )
    return RealAccelerator(torch.device(device.type, device.index or 0))
