"""How a step's batches are cut, laid out, moved and given back: a schedule is a type.

A further schedule is a further file beside :mod:`~swap_adam.schedule.packed` and
:mod:`~swap_adam.schedule.per_tensor`, and a place here if the configuration can ask for it.
"""
from __future__ import annotations

from typing import Any

from swap_adam.schedule.packed import PackedSchedule
from swap_adam.schedule.per_tensor import PerTensorSchedule
from swap_adam.schedule.schedule import Schedule, StagingPolicy

__all__ = ["PackedSchedule", "PerTensorSchedule", "Schedule", "StagingPolicy", "schedule_type"]


def schedule_type(packed: bool) -> type[Schedule[Any, Any]]:
    """The schedule for ``packed_swap``."""
    return PackedSchedule if packed else PerTensorSchedule
