"""Where bytes lie: slots in pinned host slabs, batches in staging areas (pure arithmetic).

Two facts shape it. Host allocators round a pinned block up to a power of two, so only slabs whose
size *is* one waste nothing; and a copy costs a fixed latency, so neighbours on the host must be
neighbours in the staging area to travel in one transfer.
"""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from swap_adam.alignment import HOST_ALIGNMENT_NBYTES, align

# A slab is at most so many times the largest slot: what does not fill its end is little then.
SLAB_PER_SLOT = 32
# A repack needs a spare slab, so small slots get no larger ones, though these would do.
MIN_SLAB_LIMIT_NBYTES = 1 << 29
# One pinned allocation of hundreds of GB fails on some hosts.
MAX_SLAB_NBYTES = 1 << 34
# Of the bytes to place, what rounding and unfilled slab ends may waste if there is a choice.
WASTE_BUDGET = 0.025


@dataclass(frozen=True)
class Placement:
    """A slot's place: which slab, and where in it (bytes)."""

    slab_index: int
    offset_nbytes: int


@dataclass(frozen=True)
class SlabPlan:
    """``placements`` are in the order of the sizes given."""

    slab_nbytes: tuple[int, ...]
    placements: tuple[Placement, ...]


def slab_limit_nbytes(sizes_nbytes: Sequence[int]) -> int:
    """The largest slab for slots of these sizes."""
    wanted = _power_of_two(SLAB_PER_SLOT * max(sizes_nbytes, default=1))
    return min(max(wanted, MIN_SLAB_LIMIT_NBYTES), MAX_SLAB_NBYTES)


def plan_slabs(sizes_nbytes: Sequence[int], max_slab_nbytes: int | None = None) -> SlabPlan:
    """Place slots, back to back, in slabs of power-of-two size.

    They keep their order, except that those of more than ``WASTE_BUDGET`` of all bytes come first:
    the others then fill what such a large one leaves of its slab. A slot never straddles two
    slabs, since its host tensor is one piece of memory. Each slab is the largest one that the next
    slots fill so well that the waste stays within ``WASTE_BUDGET`` of all bytes, else the best
    filled one. A slot larger than ``max_slab_nbytes`` (``None``: :func:`slab_limit_nbytes`) gets
    a slab that holds it.
    """
    if max_slab_nbytes is None:
        max_slab_nbytes = slab_limit_nbytes(sizes_nbytes)
    total = sum(align(size, HOST_ALIGNMENT_NBYTES) for size in sizes_nbytes)
    budget = total * WASTE_BUDGET
    order = sorted(range(len(sizes_nbytes)), key=lambda index: sizes_nbytes[index] <= budget)
    aligned = [align(sizes_nbytes[index], HOST_ALIGNMENT_NBYTES) for index in order]
    ends = list(accumulate(aligned))
    slabs: list[int] = []
    placements = [Placement(-1, -1)] * len(order)
    first = 0
    while first < len(aligned):
        start = ends[first] - aligned[first]
        nbytes, count = _choose_slab(aligned[first], start, ends, budget, max_slab_nbytes)
        stop = first + count
        budget -= nbytes - (ends[stop - 1] - start)
        for index in range(first, stop):
            offset = ends[index] - aligned[index] - start
            placements[order[index]] = Placement(len(slabs), offset)
        slabs.append(nbytes)
        first = stop
    return SlabPlan(tuple(slabs), tuple(placements))


def plan_group_slabs(sizes_nbytes: Sequence[int], groups: Sequence[Hashable]) -> SlabPlan:
    """Place slots back to back in one slab per group, each as large as what lies in it.

    For a framework that copies whole tensors only, and whose pinned blocks are not rounded up:
    what travels together is a slab of its own.
    """
    slab_nbytes: list[int] = []
    index_of: dict[Hashable, int] = {}
    placements: list[Placement] = []
    for nbytes, group in zip(sizes_nbytes, groups):
        if group not in index_of:
            index_of[group] = len(slab_nbytes)
            slab_nbytes.append(0)
        index = index_of[group]
        offset = align(slab_nbytes[index], HOST_ALIGNMENT_NBYTES)
        placements.append(Placement(index, offset))
        slab_nbytes[index] = offset + nbytes
    return SlabPlan(tuple(slab_nbytes), tuple(placements))


def _power_of_two(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length()


def _choose_slab(
    first_nbytes: int, start: int, ends: Sequence[int], budget: float, max_slab_nbytes: int
) -> tuple[int, int]:
    """(slab bytes, how many of the next slots it holds)."""
    smallest = _power_of_two(first_nbytes)
    largest = max(smallest, min(max_slab_nbytes, _power_of_two(ends[-1] - start)))
    placed = bisect_right(ends, start)
    best: tuple[float, int, int] | None = None
    candidate = largest
    while candidate >= smallest:
        stop = bisect_right(ends, start + candidate)
        waste = candidate - (ends[stop - 1] - start)
        if waste <= budget:
            return candidate, stop - placed
        share = waste / candidate
        if best is None or share < best[0]:
            best = (share, candidate, stop - placed)
        candidate //= 2
    assert best is not None  # the smallest candidate always holds the first slot
    return best[1], best[2]
