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
    from swap_adam.simulator.control import STRICT as STRICT
    from swap_adam.simulator.control import capturing as capturing
    from swap_adam.simulator.control import configure as configure
    from swap_adam.simulator.control import counters as counters
    from swap_adam.simulator.control import enable as enable
    from swap_adam.simulator.control import enabled as enabled
    from swap_adam.simulator.control import max_memory_held as max_memory_held
    from swap_adam.simulator.control import max_pinned_nbytes as max_pinned_nbytes
    from swap_adam.simulator.control import memory_held as memory_held
    from swap_adam.simulator.control import memory_timeline as memory_timeline
    from swap_adam.simulator.control import now as now
    from swap_adam.simulator.control import pinned_nbytes as pinned_nbytes
    from swap_adam.simulator.control import reset as reset
    from swap_adam.simulator.control import reset_clock as reset_clock
    from swap_adam.simulator.control import reset_counters as reset_counters
    from swap_adam.simulator.control import reset_max_pinned_nbytes as reset_max_pinned_nbytes
    from swap_adam.simulator.control import spend as spend
    from swap_adam.simulator.control import violations as violations
    from swap_adam.simulator.costs import LINKS as LINKS
    from swap_adam.simulator.costs import Costs as Costs
    from swap_adam.simulator.records import Counters as Counters
    from swap_adam.simulator.records import Operation as Operation
    from swap_adam.simulator.records import record_operations as record_operations
    from swap_adam.simulator.records import trace as trace

__all__ = [
    "Costs", "Counters", "LINKS", "Operation", "STRICT", "capturing", "configure", "counters",
    "enable", "enabled", "max_memory_held", "max_pinned_nbytes", "memory_held", "memory_timeline",
    "mindspore_device", "now", "pinned_nbytes", "record_operations", "reset", "reset_clock",
    "reset_counters", "reset_max_pinned_nbytes", "spend", "trace", "violations",
]

_HOME = dict.fromkeys(__all__, "control") | {
    "Costs": "costs",
    "Counters": "records",
    "LINKS": "costs",
    "Operation": "records",
    "mindspore_device": "mindspore",
    "record_operations": "records",
    "trace": "records",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
