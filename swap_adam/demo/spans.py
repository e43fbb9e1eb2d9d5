"""What ran when, read from a Chrome trace: the simulated accelerator's or torch.profiler's."""
from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROWS = ("host", "compute", "copy-in", "copy-out")
# Encloses what is recorded: its start is time 0 of the spans.
RECORDED = "swap_adam: recorded"

_Event = Mapping[str, object]


@dataclass(frozen=True)
class Span:
    """``row`` is one of ROWS; times are in milliseconds since the recording began."""

    row: str
    name: str
    start_ms: float
    end_ms: float


def read_spans(path: Path) -> list[Span]:
    """The operations on the device, and on the host where the trace says what it waits for."""
    events: list[_Event] = json.loads(path.read_text())["traceEvents"]
    rows = {
        (event.get("pid"), event.get("tid")): _simulated_row(event)
        for event in events
        if event.get("ph") == "M" and event.get("name") == "thread_name"
    }
    origin_us = min((_number(e, "ts") for e in events if e.get("name") == RECORDED), default=0.0)
    spans = []
    for event in events:
        if event.get("ph") != "X":
            continue
        row = _profiler_row(event) if "cat" in event else rows.get(
            (event.get("pid"), event.get("tid"))
        )
        if row is not None:
            start_ms = (_number(event, "ts") - origin_us) / 1e3
            end_ms = start_ms + _number(event, "dur") / 1e3
            spans.append(Span(row, str(event.get("name")), start_ms, end_ms))
    return spans


def _number(event: _Event, key: str) -> float:
    value = event.get(key, 0.0)
    assert isinstance(value, (int, float))
    return float(value)


def _simulated_row(event: _Event) -> str | None:
    """The simulator names a row "copy-in (stream 3)"."""
    label = event.get("args")
    assert isinstance(label, dict)
    row = str(label.get("name")).partition(" ")[0]
    return row if row in ROWS else None


def _profiler_row(event: _Event) -> str | None:
    """torch.profiler puts kernels and copies into categories, and the direction into the name."""
    name, category = str(event.get("name")), event.get("cat")
    if category == "gpu_memcpy":
        return "copy-in" if "HtoD" in name else "copy-out" if "DtoH" in name else "compute"
    return "compute" if category in ("kernel", "gpu_memset") else None
