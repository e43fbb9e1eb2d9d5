"""Which MindSpore device the tests run on.

``SWAP_ADAM_TEST_DEVICE`` unset, or a device of torch's alone such as ``cuda``: the CPU, as the
simulated device, whose copies are late and whose released memory is poisoned. ``npu``: an Ascend
device with the real backend; what only the simulated one can tell is skipped.
``SWAP_ADAM_TEST_FULL=1`` runs every combination.
"""
from __future__ import annotations

import os
import tempfile
from contextlib import AbstractContextManager, nullcontext

# MindFormers writes log files below this directory, by default the current one.
if "LOCAL_DEFAULT_PATH" not in os.environ:
    _logs = tempfile.TemporaryDirectory(prefix="mindformers-", ignore_cleanup_errors=True)
    os.environ["LOCAL_DEFAULT_PATH"] = _logs.name

import mindspore  # noqa: E402

from swap_adam.simulator.mindspore import SimulatedDevice, mindspore_device  # noqa: E402

IS_SIMULATED = os.environ.get("SWAP_ADAM_TEST_DEVICE") != "npu"
IS_FULL = os.environ.get("SWAP_ADAM_TEST_FULL", "") not in ("", "0")

mindspore.set_device("CPU" if IS_SIMULATED else "Ascend")


def swapping(capacity_nbytes: int | None = None) -> AbstractContextManager[SimulatedDevice | None]:
    """Optimizers made in this context swap."""
    return mindspore_device(capacity_nbytes) if IS_SIMULATED else nullcontext()
