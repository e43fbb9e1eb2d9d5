"""What a model and a configuration will need, before anything is allocated.

>>> from swap_adam.forecast import ParamSpec, forecast
>>> forecast([ParamSpec((4096, 4096), "bfloat16")] * 32).pinned_nbytes

The library's own planner and pipeline run here on a backend that only counts: no framework, no
device and no memory is used, and the schedule is the real one.
"""
from __future__ import annotations

from swap_adam.forecast.forecast import Forecast, LinkTime, forecast
from swap_adam.forecast.params import ParamSpec

__all__ = ["Forecast", "LinkTime", "ParamSpec", "forecast"]
