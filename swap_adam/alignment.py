"""Which multiples bytes are rounded to, on the host and on the device."""
from __future__ import annotations

HOST_ALIGNMENT_NBYTES = 16
DEVICE_ALIGNMENT_NBYTES = 512


def align(nbytes: int, alignment: int) -> int:
    """``nbytes`` rounded up to a multiple of ``alignment``."""
    return -(-nbytes // alignment) * alignment
