"""A simulated accelerator: the torch device ``simulated``, over host memory.

>>> import swap_adam.simulator as simulator
>>> simulator.enable()
>>> simulator.configure(link="pcie5")
>>> weight = torch.ones(1000, device="simulated")

It accounts for every byte, has real stream and event semantics, names the two operations of a race,
and tells the time from a virtual clock, so that the time of a schedule is an exact number that does
not depend on the machine. Nothing here imports a framework before ``enable()`` is called.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swap_adam.simulator.control import (
        configure as configure,
        counters as counters,
        enable as enable,
        enabled as enabled,
        max_memory_held as max_memory_held,
        max_pinned_nbytes as max_pinned_nbytes,
        memory_held as memory_held,
        memory_timeline as memory_timeline,
        now as now,
        pinned_nbytes as pinned_nbytes,
        reset as reset,
        reset_clock as reset_clock,
        reset_counters as reset_counters,
        reset_max_pinned_nbytes as reset_max_pinned_nbytes,
        spend as spend,
        violations as violations,
    )
    from swap_adam.simulator.costs import LINKS as LINKS, Costs as Costs
    from swap_adam.simulator.records import (
        Counters as Counters,
        Operation as Operation,
        record_operations as record_operations,
        trace as trace,
    )

_CONTROL = (
    "configure", "counters", "enable", "enabled", "max_memory_held", "max_pinned_nbytes",
    "memory_held", "memory_timeline", "now", "pinned_nbytes", "reset", "reset_clock",
    "reset_counters", "reset_max_pinned_nbytes", "spend", "violations",
)
_HOME = {
    **{name: "control" for name in _CONTROL},
    **{name: "records" for name in ("Counters", "Operation", "record_operations", "trace")},
    "Costs": "costs",
    "LINKS": "costs",
    "mindspore_device": "mindspore",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
