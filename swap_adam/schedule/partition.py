"""Cutting the swapped units of one device into batches of bounded bytes (pure arithmetic).

Let ``S`` be the bytes of all registered slots of the device and ``cap = ceil(S / swap_times)``.
The batches that are on the device at a time take at most ``2 * cap`` bytes; how many these are,
and so how large each may be, a schedule decides.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Cuts at multiples of this many elements keep every vector tail where the whole tensor has it.
CUT_QUANTUM_NUMEL = 128


@dataclass(frozen=True)
class UnitSize:
    """What partitioning needs to know of a unit: ``nbytes_per_element`` sums over its slots."""

    numel: int
    nbytes_per_element: int
    can_cut: bool

    @property
    def nbytes(self) -> int:
        return self.numel * self.nbytes_per_element

    @property
    def quantum_nbytes(self) -> int:
        return min(self.numel, CUT_QUANTUM_NUMEL) * self.nbytes_per_element


@dataclass(frozen=True)
class Piece:
    """``numel`` elements of a unit, from ``start_numel`` on."""

    unit_index: int
    start_numel: int
    numel: int


@dataclass(frozen=True)
class Partition:
    """Batches in update order, of at most ``limit_nbytes`` each, ``in_flight`` at a time.

    A unit that cannot be cut and is larger (``oversized``, unit indices) is a batch of its own.
    """

    batches: tuple[tuple[Piece, ...], ...]
    swap_times: int
    in_flight: int
    limit_nbytes: int
    oversized: tuple[int, ...]


# What a batch costs beside its bytes, and what the bytes cost: two transfers and one update are
# launched (some 4 us each), and on the slowest common link 25 bytes move in a nanosecond.
BATCH_LATENCY_S = 10e-6
LINK_NBYTES_PER_S = 25e9


def choose_swap_times(swapped_nbytes: int, staging_nbytes: int | None) -> int:
    """The number for ``swap_times="auto"``.

    ``n`` batches of ``S`` bytes cost ``S / n`` bytes of copying that nothing hides, and ``n``
    latencies: ``n = sqrt(S / (bandwidth * latency))`` is the least of their sum. A step holds
    ``2 S / n`` for staging, so a budget asks for ``n >= 2 S / staging_nbytes``.
    """
    fastest = round(math.sqrt(swapped_nbytes / (LINK_NBYTES_PER_S * BATCH_LATENCY_S)))
    needed = 1 if staging_nbytes is None else -(-2 * swapped_nbytes // staging_nbytes)
    return max(1, fastest, needed)


def batch_cap_nbytes(units: Sequence[UnitSize], swap_times: int) -> int:
    """``ceil(S / swap_times)``, never below one quantum of the widest unit."""
    total = sum(unit.nbytes for unit in units)
    return max([-(-total // swap_times), *(unit.quantum_nbytes for unit in units)])


def fill_batches(
    units: Sequence[UnitSize], swap_times: int, in_flight: int, limit_nbytes: int
) -> Partition:
    """Fill batches in the order of ``units``, each up to ``limit_nbytes``.

    What is larger is cut at multiples of ``CUT_QUANTUM_NUMEL`` elements where it can be cut.
    """
    batches: list[list[Piece]] = [[]]
    room = limit_nbytes

    def add(piece: Piece) -> None:
        nonlocal room
        batches[-1].append(piece)
        room -= piece.numel * units[piece.unit_index].nbytes_per_element

    def open_batch() -> None:
        nonlocal room
        if batches[-1]:
            batches.append([])
        room = limit_nbytes

    for index, unit in enumerate(units):
        if unit.nbytes <= limit_nbytes or not unit.can_cut:
            if unit.nbytes > room:
                open_batch()
            add(Piece(index, 0, unit.numel))
            continue
        start = 0
        while start < unit.numel:
            quanta = room // (unit.nbytes_per_element * CUT_QUANTUM_NUMEL)
            if quanta < 1:
                open_batch()
                continue
            numel = min(unit.numel - start, quanta * CUT_QUANTUM_NUMEL)
            add(Piece(index, start, numel))
            start += numel
    oversized = tuple(
        index for index, unit in enumerate(units)
        if not unit.can_cut and unit.nbytes > limit_nbytes
    )
    filled = tuple(tuple(batch) for batch in batches if batch)
    return Partition(filled, swap_times, in_flight, limit_nbytes, oversized)
