"""Collectives between processes, each with simulated devices of its own, over gloo."""

from __future__ import annotations

import torch.distributed as dist


def register() -> None:
    """Makes gloo the backend of the device: ``init_process_group("gloo")`` then serves both the
    CPU's tensors and the device's. A collective is one operation of the current stream.
    """
    if not dist.is_available():
        return
    capability = dist.Backend.backend_capability.setdefault("gloo", [])
    if "simulated" not in capability:
        capability.append("simulated")
    dist.Backend.default_device_backend_map["simulated"] = "gloo"
