"""Which device the tests run on. Importing this makes it usable."""

from __future__ import annotations

import os
from importlib import import_module

DEVICE = os.environ.get("SWAP_ADAM_TEST_DEVICE") or "simulated"
IS_SIMULATED = DEVICE == "simulated"
IS_FULL = os.environ.get("SWAP_ADAM_TEST_FULL", "") not in ("", "0")

if IS_SIMULATED:
    # Never beside a real device: the simulator would be torch's accelerator then.
    import swap_adam.simulator

    swap_adam.simulator.enable()
elif DEVICE == "npu":
    import_module("torch_npu")
