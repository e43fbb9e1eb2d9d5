"""Which multiples bytes are rounded to, on the host and on the device."""
from __future__ import annotations

HOST_ALIGNMENT_NBYTES = 16
DEVICE_ALIGNMENT_NBYTES = 512
# Device allocators have a pool of their own for blocks up to here.
SMALL_BLOCK_NBYTES = 1 << 20


def align(nbytes: int, alignment: int) -> int:
    """``nbytes`` rounded up to a multiple of ``alignment``."""
    return -(-nbytes // alignment) * alignment
