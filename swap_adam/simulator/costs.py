"""What the virtual clock assumes: the one table of these numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Costs:
    """Bandwidths in GB/s (1e9 bytes per second) and fixed costs in microseconds.

    A transfer takes ``transfer_us`` plus its bytes over the link; a kernel ``kernel_us`` plus the
    bytes of its tensors over the device's memory (a tensor that is read and written counts twice).
    The host spends ``launch_us`` to issue either, ``event_us`` to record, wait for or query an
    event, ``wait_us`` for every blocking wait (on top of what it waits for), and the bytes that it
    reads or writes in pinned memory over ``host_gb_per_s``. Views cost nothing.
    """

    copy_in_gb_per_s: float = 25.0
    copy_out_gb_per_s: float = 25.0
    device_gb_per_s: float = 1500.0
    host_gb_per_s: float = 40.0
    launch_us: float = 4.0
    kernel_us: float = 2.0
    transfer_us: float = 3.0
    wait_us: float = 5.0
    event_us: float = 0.5
    duplex: bool = True
    """Whether both directions of the link work at once; False: they share one copy engine."""

    def with_duplex(self, duplex: bool) -> Costs:
        return replace(self, duplex=duplex)


LINKS: dict[str, Costs] = {
    "pcie4": Costs(copy_in_gb_per_s=25, copy_out_gb_per_s=25, device_gb_per_s=1500),
    "pcie5": Costs(copy_in_gb_per_s=55, copy_out_gb_per_s=55, device_gb_per_s=4800),
    "c2c": Costs(copy_in_gb_per_s=340, copy_out_gb_per_s=295, device_gb_per_s=4800),
    "hccs": Costs(copy_in_gb_per_s=40, copy_out_gb_per_s=40, device_gb_per_s=1600),
}
"""Costs by the name of the link between host and device."""
