"""Turning the simulated accelerator on, configuring it, and reading what it measured."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Literal

from swap_adam.simulator import native
from swap_adam.simulator.costs import LINKS, Costs
from swap_adam.simulator.records import Counters

Races = Literal["raise", "collect", "off"]
_RACES: dict[str, int] = {"off": 0, "collect": 1, "raise": 2}
_NAME = "simulated"
# What real devices do where the simulated one is kinder unless told otherwise: docs/simulator.md.
STRICT = (
    "host_cache",  # freed pinned blocks stay pinned, and are handed out as they were
    "resize_on_current_device",  # a storage that is resized moves to the current device
    "lazy_statistics",  # only an allocation notices that a recorded stream has passed
    "late_free_events",  # freed memory is there a moment after what was recorded before
    "memory_pools",  # what was used for requests of 1 MiB and less is lost to larger ones
    "no_elapsed_time",  # torch.Event does not tell the time
    "stream_pool",  # there are 32 streams, handed out in turn
)
_device_count = 0


def enable(device_count: int | None = None) -> None:
    """Registers the device ``simulated`` with torch, building it on first use.

    ``device_count`` devices (2 unless said) share one host. Calling it again does nothing; another
    device count than the first is a ValueError. Call it before the first ``backward()`` of the
    process, whatever that runs on: torch's autograd counts devices once. torch has one slot for a
    device of this kind, so a process in which torch_npu or the like is loaded is refused with a
    RuntimeError; so is one that sees a GPU, where all pinned memory is CUDA's.
    """
    global _device_count
    if _device_count:
        if device_count not in (None, _device_count):
            raise ValueError(
                f"the simulated accelerator was enabled with device_count={_device_count} in this "
                f"process; it cannot become {device_count}"
            )
        return
    count = 2 if device_count is None else device_count
    if not 1 <= count <= 64:
        raise ValueError(f"device_count={count}: 1 to 64 are allowed")
    import torch

    from torch.utils.backend_registration import (
        generate_methods_for_privateuse1_backend,
        rename_privateuse1_backend,
    )

    from swap_adam.simulator.build import library

    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", _NAME):
        raise RuntimeError(
            f"torch's slot for an accelerator of one's own is taken by {taken!r} in this process; "
            f"use the simulated accelerator in a process of its own"
        )
    if torch.cuda.is_available():
        raise RuntimeError(
            "a GPU is visible to this process, so that pinned memory would be CUDA's and not the "
            "simulated accelerator's: set CUDA_VISIBLE_DEVICES= (to nothing) in the environment"
        )
    path = library()
    if taken != _NAME:
        rename_privateuse1_backend(_NAME)
    native.load(str(path), count)
    from swap_adam.simulator import device, distributed

    torch._register_device_module(_NAME, device)
    generate_methods_for_privateuse1_backend(for_storage=True)
    device.watch_saving()
    distributed.register()
    _device_count = count
    configure(costs=LINKS["pcie4"])
    atexit.register(_report)


def enabled() -> bool:
    """Whether the device is registered in this process."""
    return _device_count > 0


_costs = LINKS["pcie4"]


def configure(
    *,
    link: str | None = None,
    duplex: bool | None = None,
    costs: Costs | None = None,
    races: Races | None = None,
    capacity_nbytes: int | None = None,
    pinned_capacity_nbytes: int | None = None,
    trace_spans: int | None = None,
    strict: bool | Collection[str] | None = None,
) -> None:
    """Changes what is given and leaves the rest.

    - ``link``: one of ``LINKS``, "pcie4" at first; ``costs`` instead takes numbers of your own;
    - ``duplex``: False makes both directions of the link share one copy engine;
    - ``races``: "raise" (at first) raises RuntimeError at the operation that completes a race or at
      the next operation or wait; "collect" only lists it in ``violations()``; "off" does not look;
    - ``capacity_nbytes``: of each device, checked against ``memory_held``; 0 is no limit;
    - ``pinned_capacity_nbytes``: of the host, 0 is no limit;
    - ``trace_spans``: how many boxes ``trace()`` keeps, 200,000 at first, the latest;
    - ``strict``: what real devices do and this one does not at first: True for all of ``STRICT``,
      False for none, or some of the names.
    """
    global _costs
    if link is not None:
        if costs is not None:
            raise ValueError("give link or costs, not both")
        if link not in LINKS:
            raise ValueError(f"link={link!r}: one of {', '.join(LINKS)} is allowed")
        costs = LINKS[link].with_duplex(_costs.duplex)
    if duplex is not None:
        costs = (costs or _costs).with_duplex(duplex)
    if races is not None and races not in _RACES:
        raise ValueError(f"races={races!r}: one of {', '.join(_RACES)} is allowed")
    if strict is not None:
        names = STRICT if strict is True else strict or ()
        unknown = set(names) - set(STRICT)
        if isinstance(names, str) or unknown:
            raise ValueError(
                f"strict={strict!r}: True, False or some of {', '.join(STRICT)} are allowed"
            )
    for name, value in (
        ("capacity_nbytes", capacity_nbytes),
        ("pinned_capacity_nbytes", pinned_capacity_nbytes),
        ("trace_spans", trace_spans),
    ):
        if value is not None and value < 0:
            raise ValueError(f"{name}={value}: 0 (no limit) or more is allowed")
    if costs is not None:
        _costs = costs
        numbers = [
            costs.copy_in_gb_per_s * 1e9,
            costs.copy_out_gb_per_s * 1e9,
            costs.device_gb_per_s * 1e9,
            costs.host_gb_per_s * 1e9,
            costs.launch_us * 1e-6,
            costs.kernel_us * 1e-6,
            costs.transfer_us * 1e-6,
            costs.wait_us * 1e-6,
            costs.event_us * 1e-6,
        ]
        native.call("set_costs")(numbers, costs.duplex)
    if races is not None:
        native.call("set_races")(_RACES[races])
    if capacity_nbytes is not None:
        for index in range(_device_count):
            native.call("set_capacity")(index, capacity_nbytes)
    if pinned_capacity_nbytes is not None:
        native.call("set_pinned_capacity")(pinned_capacity_nbytes)
    if trace_spans is not None:
        native.call("set_trace_capacity")(trace_spans)
    if strict is not None:
        native.call("set_strict")(sum(1 << STRICT.index(name) for name in set(names)))


def costs() -> Costs:
    """The costs in force."""
    return _costs


def reset() -> None:
    """As after ``enable()``: waits for everything, sets the clock to 0, and clears violations,
    counters, peaks, timelines, the trace and the configuration. Allocations stay.
    """
    native.call("reset")()
    configure(
        costs=LINKS["pcie4"],
        races="raise",
        capacity_nbytes=0,
        pinned_capacity_nbytes=0,
        trace_spans=200_000,
        strict=False,
    )


def reset_clock() -> None:
    """Waits for everything and sets the clock to 0; also clears what ``reset`` clears, but not the
    configuration.
    """
    native.call("reset")()


def now() -> float:
    """The host's virtual time in seconds."""
    return native.number("now")


def spend(seconds: float) -> None:
    """Lets the host be busy for that long, in virtual seconds."""
    native.call("spend")(seconds)


def violations(clear: bool = True) -> list[str]:
    """The races found since the last call, each naming both operations; also those raised."""
    found = native.call("violations")(clear)
    assert isinstance(found, list)
    return found


def counters() -> Counters:
    """What was issued since ``reset_counters()``."""
    return Counters(*native.integers("counters"))


def reset_counters() -> None:
    native.call("reset_counters")()


def memory_held(device: int = 0) -> int:
    """Bytes that nobody else can have: allocated, or freed while a stream that ``record_stream``
    named has not passed, in virtual time, what it had been given until then.
    """
    return native.integers("memory", device)[2]


def max_memory_held(device: int = 0) -> int:
    """The largest ``memory_held`` since ``torch.simulated.reset_peak_memory_stats``."""
    return native.integers("memory", device)[3]


def memory_timeline(device: int = 0) -> list[tuple[float, int]]:
    """Virtual seconds and held bytes at each change since ``reset()``, the latest 100,000."""
    flat = native.floats("memory_timeline", device)
    return [(time, int(held)) for time, held in zip(flat[::2], flat[1::2])]


def pinned_nbytes() -> int:
    """Pinned host memory; a block counts as the next power of two, as CUDA's does.

    With ``strict`` "host_cache" also what nobody uses, until
    ``torch.accelerator.empty_host_cache()`` or, in an older torch,
    ``torch.simulated.host_empty_cache()``.
    """
    return native.integers("pinned")[0]


def max_pinned_nbytes() -> int:
    """The largest ``pinned_nbytes`` since ``reset_max_pinned_nbytes``."""
    return native.integers("pinned")[1]


def reset_max_pinned_nbytes() -> None:
    native.call("reset_pinned_peak")()


@contextmanager
def capturing() -> Iterator[None]:
    """As while a graph is captured: in the block, waiting for events, streams or the device, and
    asking for them, is a RuntimeError."""
    native.call("set_capturing")(True)
    try:
        yield
    finally:
        native.call("set_capturing")(False)


def _report() -> None:
    # torch's backward thread lets go of Python objects a moment after backward() has returned; an
    # interpreter that is gone by then ends the process with an abort.
    time.sleep(0.02)
    left = native.call("not_raised")()
    assert isinstance(left, list)
    if left:
        print(
            f"swap_adam.simulator: {len(left)} violations that nobody was told of, the first: "
            f"{left[0]}",
            file=sys.stderr,
        )
