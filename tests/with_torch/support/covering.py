"""Every pair of values in few rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product

Row = tuple[object, ...]


def pairs(row: Row) -> Iterator[tuple[tuple[int, object], tuple[int, object]]]:
    yield from combinations(enumerate(row), 2)


def cover(full: Sequence[Row], rest: Sequence[Sequence[object]]) -> list[Row]:
    """Each row of ``full`` once or more, extended by a value for each axis of ``rest``.

    Every pair of values of two different axes is in at least one row. Greedy and deterministic.
    """
    tails = list(product(*rest))
    missing = {pair for row in full for tail in tails for pair in pairs((*row, *tail))}
    rows: list[Row] = []
    while True:
        for head in full:
            best = max(tails, key=lambda tail: len(missing & set(pairs((*head, *tail)))))
            rows.append((*head, *best))
            missing -= set(pairs(rows[-1]))
        if not missing:
            return rows
