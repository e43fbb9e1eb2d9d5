"""One step at a time, and no reader inside one."""
from __future__ import annotations

import threading


class StepGuard:
    """Lets one step in, or readers, of any number of threads.

    Whoever reads or changes what a step uses holds ``lock`` and calls :meth:`check` first. From
    another thread one waits so: a reader for the end of the step, a step for the end of the
    reading, which is short. From inside a step (a signal handler, a hook, the update) one cannot
    wait for it, and gets an error that changes nothing.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_stepping = False

    def check(self, what: str) -> None:
        """Refuse ``what`` inside a step.

        Raises:
            RuntimeError: saying that a step is running, and what to do.
        """
        if self.is_stepping:
            raise RuntimeError(
                f"{what} was called while step() is running, from inside it: the states are "
                "half way between two steps. Do it before or after step(); in a signal handler, "
                "set a flag and do it when step() has returned; another thread may call it at any "
                "time"
            )
