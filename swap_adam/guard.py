"""One step at a time, and no reader inside one."""
from __future__ import annotations

import threading
from types import TracebackType


class StepGuard:
    """Lets one step in, or readers, of any number of threads.

    Whoever comes from another thread waits: a reader for the end of the step, a step for the end
    of the reading, which is short. Whoever comes from inside a step (a signal handler, a hook, the
    update) cannot wait for it, and gets an error that changes nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._is_stepping = False

    def reading(self, what: str) -> _Reading:
        """To be held around ``what``, which reads or changes what a step uses.

        Raises:
            RuntimeError: on entering, from inside a step.
        """
        return _Reading(self, what)

    def stepping(self) -> _Stepping:
        """To be held around a step.

        Raises:
            RuntimeError: on entering, from inside another step.
        """
        return _Stepping(self, "step()")


class _Reading:
    def __init__(self, guard: StepGuard, what: str) -> None:
        self._guard = guard
        self._what = what

    def __enter__(self) -> None:
        self._guard._lock.acquire()
        if self._guard._is_stepping:
            self._guard._lock.release()
            raise RuntimeError(
                f"{self._what} was called while step() is running, from inside it: the states are "
                "half way between two steps. Do it before or after step(); in a signal handler, "
                "set a flag and do it when step() has returned; another thread may call it at any "
                "time"
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._guard._lock.release()


class _Stepping(_Reading):
    def __enter__(self) -> None:
        super().__enter__()
        self._guard._is_stepping = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._guard._is_stepping = False
        super().__exit__(kind, error, traceback)
