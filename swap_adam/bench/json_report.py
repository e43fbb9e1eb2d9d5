"""Everything that was measured, as JSON."""
from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from swap_adam.bench.accelerators import Accelerator
from swap_adam.bench.host_cost import HostCost
from swap_adam.bench.measurement import Line
from swap_adam.simulator import LINKS


def write_json(
    path: Path, accelerator: Accelerator, lines: Sequence[Line], host_costs: Sequence[HostCost]
) -> None:
    """Bytes are bytes, times milliseconds of the compute stream; see ``Line``."""
    simulated = accelerator.device.type == "simulated"
    report = {
        "device": accelerator.description,
        "clock": accelerator.clock,
        "torch": torch.__version__,
        "costs": {name: asdict(costs) for name, costs in LINKS.items()} if simulated else None,
        "lines": [as_record(line) for line in lines],
        "host_costs": [asdict(cost) for cost in host_costs],
    }
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def as_record(line: Line) -> dict[str, object]:
    return {
        "workload": line.workload.name,
        "numel": line.workload.numel,
        "tensors": len(line.workload.shapes),
        "dtype": str(line.workload.dtype).removeprefix("torch."),
        "optimizer": line.contender.name,
        "mode": line.contender.mode,
        "link": asdict(line.link),
        "swap_times": line.swap_times,
        "moved_nbytes": line.moved_nbytes,
        "limit_ms": line.limit_ms,
        "step_ms": line.step_ms,
        "repeated_ms": line.repeated_ms,
        "tail_ms": line.tail_ms,
        "host_ms": line.host_ms,
        "idle_nbytes": line.idle_nbytes,
        "before_nbytes": line.before_nbytes,
        "peak_nbytes": line.peak_nbytes,
        "pinned_share": line.pinned_share,
        "counters": None if line.counters is None else asdict(line.counters),
        "races": list(line.races),
    }
