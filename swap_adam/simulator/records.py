"""What the device recorded: counters, the operations issued, and the trace."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from swap_adam.simulator import native


@dataclass(frozen=True)
class Counters:
    """Transfers, kernels, waits and allocations, the bytes of the transfers, and how often an event
    that can tell the time was recorded."""

    copies_in: int
    copies_in_nbytes: int
    copies_out: int
    copies_out_nbytes: int
    copies_between_devices: int
    copies_between_devices_nbytes: int
    kernels: int
    host_waits: int
    device_synchronizations: int
    allocations: int
    frees: int
    out_of_memory: int
    timing_events: int


@dataclass(frozen=True)
class Operation:
    """One operation as it was issued; ``issued_at`` in virtual seconds, ``stream`` the stream's id.

    ``kind`` is "kernel", "copy_in", "copy_out" or "copy_between_devices"; ``nbytes`` what the
    operation moves over the link or the device's memory.
    """

    name: str
    kind: str
    device: int
    stream: int
    sequence: int
    nbytes: int
    issued_at: float


_KINDS = ("kernel", "copy_in", "copy_out", "copy_between_devices")
_recording = False


@contextmanager
def record_operations() -> Iterator[list[Operation]]:
    """Yields a list that holds, after the block, the operations issued in it (the latest million).

    >>> with simulator.record_operations() as operations:
    ...     optimizer.step()
    >>> [operation.name for operation in operations]
    """
    global _recording
    if _recording:
        raise RuntimeError("record_operations() does not nest")
    operations: list[Operation] = []
    native.call("log_operations")(True)
    _recording = True
    try:
        yield operations
    finally:
        _recording = False
        lines = native.text("operations").splitlines()
        native.call("log_operations")(False)
        for line in lines:
            name, kind, device, stream, sequence, nbytes, time = line.split("\t")
            operations.append(
                Operation(
                    name, _KINDS[int(kind)], int(device), int(stream), int(sequence), int(nbytes),
                    float(time),
                )
            )


_ENGINES = {-1: "host", 0: "compute", 1: "copy-in", 2: "copy-out"}


def trace(path: str | os.PathLike[str]) -> None:
    """Writes a Chrome trace (chrome://tracing, Perfetto) of the latest operations, as simulated.

    A process per device with one row for each of its engines and streams, and one for the host.
    """
    events: list[dict[str, object]] = []
    rows: dict[tuple[int, int, int], tuple[int, int]] = {}
    for line in native.text("trace").splitlines():
        name, engine, device, stream, start, end, nbytes = line.split("\t")
        key = (int(device), int(engine), int(stream))
        row = rows.setdefault(key, (key[0] + 1, len(rows) + 1))
        events.append(
            {
                "name": name,
                "ph": "X",
                "pid": row[0],
                "tid": row[1],
                "ts": float(start) * 1e6,
                "dur": (float(end) - float(start)) * 1e6,
                "args": {"nbytes": int(nbytes), "stream": int(stream)},
            }
        )
    for (device_index, engine_index, stream_id), (process, thread) in rows.items():
        owner = "host" if device_index < 0 else f"simulated:{device_index}"
        engine_name = _ENGINES[engine_index]
        label = "host" if device_index < 0 else f"{engine_name} (stream {stream_id})"
        for kind, text in (("process_name", owner), ("thread_name", label)):
            events.append(
                {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": text}}
            )
    with open(path, "w") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
