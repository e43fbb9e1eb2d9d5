"""A virtual clock: streams of work on serial engines, marks in them, and one host that issues.

Work starts when the host has issued it, what is before it on its stream is done, the marks that
the stream waits for have passed and its engine is free; among several the one that can start first.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(eq=False)
class Point:
    """A moment on a stream; ``passed_s`` is known once it has been simulated."""

    passed_s: float | None = None


@dataclass(frozen=True)
class _Work:
    engine: Hashable
    duration_s: float
    issued_s: float
    sequence: int


@dataclass(frozen=True)
class _Wait:
    point: Point


class Clock:
    """``host_s`` is the host's time; the caller advances it for what the host does."""

    def __init__(self) -> None:
        self.host_s = 0.0
        self._streams: dict[Hashable, deque[_Work | _Wait | Point]] = {}
        self._stream_free_s: dict[Hashable, float] = {}
        self._engine_free_s: dict[Hashable, float] = {}
        self._sequence = 0

    def issue(self, stream: Hashable, engine: Hashable, duration_s: float) -> None:
        """Put work on a stream, as of now."""
        self._sequence += 1
        self._queue(stream).append(_Work(engine, duration_s, self.host_s, self._sequence))

    def mark(self, stream: Hashable) -> Point:
        """A moment that passes when everything issued on the stream so far is done."""
        point = Point()
        self._queue(stream).append(point)
        return point

    def wait(self, stream: Hashable, point: Point) -> None:
        """What is issued on the stream from now on starts after ``point``."""
        self._queue(stream).append(_Wait(point))

    def time_of(self, point: Point) -> float:
        """When ``point`` passes, in seconds."""
        while point.passed_s is None:
            if not self._run_next():
                raise RuntimeError("the streams wait for each other for ever")
        return point.passed_s

    def _queue(self, stream: Hashable) -> deque[_Work | _Wait | Point]:
        return self._streams.setdefault(stream, deque())

    def _run_next(self) -> bool:
        """Pass what needs no engine, then run the work that can start first."""
        progressed = False
        first: tuple[float, int, Hashable, _Work] | None = None
        for stream, queue in self._streams.items():
            progressed |= self._pass(stream, queue)
            if queue and isinstance(work := queue[0], _Work):
                start_s = max(
                    work.issued_s,
                    self._stream_free_s.get(stream, 0.0),
                    self._engine_free_s.get(work.engine, 0.0),
                )
                if first is None or (start_s, work.sequence) < first[:2]:
                    first = (start_s, work.sequence, stream, work)
        if progressed:
            return True  # a stream that was looked at before may have become ready
        if first is None:
            return False
        start_s, _, stream, work = first
        self._streams[stream].popleft()
        end_s = start_s + work.duration_s
        self._stream_free_s[stream] = self._engine_free_s[work.engine] = end_s
        return True

    def _pass(self, stream: Hashable, queue: deque[_Work | _Wait | Point]) -> bool:
        progressed = False
        while queue and not isinstance(head := queue[0], _Work):
            free_s = self._stream_free_s.get(stream, 0.0)
            if isinstance(head, Point):
                head.passed_s = free_s
            elif head.point.passed_s is None:
                break
            else:
                self._stream_free_s[stream] = max(free_s, head.point.passed_s)
            queue.popleft()
            progressed = True
        return progressed
