"""How much memory this machine's host has left."""
from __future__ import annotations

import os


def available_nbytes() -> int:
    """What could be allocated now: free, or the page cache's and easily given back."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
