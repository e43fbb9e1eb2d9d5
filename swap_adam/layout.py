"""Where bytes lie: slots in pinned host slabs, batches in staging areas (pure arithmetic).

Two facts shape it. Host allocators round a pinned block up to a power of two, so only slabs whose
size *is* one waste nothing; and a copy costs a fixed latency, so neighbours on the host must be
neighbours in the staging area to travel in one transfer.
"""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

HOST_ALIGNMENT_NBYTES = 16
DEVICE_ALIGNMENT_NBYTES = 512
# Device allocators have a pool of their own for blocks up to here.
SMALL_BLOCK_NBYTES = 1 << 20
# A slab is at most so many times the largest slot: what does not fill its end is little then.
SLAB_PER_SLOT = 32
# A repack needs a spare slab, so small slots get no larger ones, though these would do.
MIN_SLAB_LIMIT_NBYTES = 1 << 29
# One pinned allocation of hundreds of GB fails on some hosts.
MAX_SLAB_NBYTES = 1 << 34
# Of the bytes to place, what rounding and unfilled slab ends may waste if there is a choice.
WASTE_BUDGET = 0.025


def align(nbytes: int, alignment: int) -> int:
    """``nbytes`` rounded up to a multiple of ``alignment``."""
    return -(-nbytes // alignment) * alignment


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


def cover_pools(choices: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Blocks that are enough for any one of ``choices``, which are lists of blocks (bytes).

    Allocators have a pool for small blocks and one for large ones that do not serve each other,
    so that the most of either counts.
    """
    pools = (
        [[size for size in sizes if (size <= SMALL_BLOCK_NBYTES) == is_small] for sizes in choices]
        for is_small in (True, False)
    )
    return tuple(size for pool in pools for size in max(pool, key=sum, default=[]))


def largest_needs(choices: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Those of ``choices`` with the most in small blocks, in large ones, and in all.

    Once each of them has been there, any of the choices will be, see :func:`cover_pools`.
    """

    def small_nbytes(sizes: Iterable[int]) -> int:
        return sum(size for size in sizes if size <= SMALL_BLOCK_NBYTES)

    def large_nbytes(sizes: Iterable[int]) -> int:
        return sum(size for size in sizes if size > SMALL_BLOCK_NBYTES)

    def all_nbytes(sizes: Iterable[int]) -> int:
        return sum(sizes)

    return [
        tuple(max(choices, key=nbytes, default=()))
        for nbytes in (small_nbytes, large_nbytes, all_nbytes)
    ]


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


@dataclass(frozen=True)
class Segment:
    """Bytes of one slot (or of a piece of it) on the host."""

    slab_index: int
    offset_nbytes: int
    nbytes: int


@dataclass(frozen=True)
class Run:
    """One transfer: ``nbytes`` between a slab and a staging area."""

    slab_index: int
    host_offset_nbytes: int
    device_offset_nbytes: int
    nbytes: int


@dataclass(frozen=True)
class Region:
    """A batch in its staging area: an offset per segment, in the order given, and its bytes."""

    device_offsets_nbytes: tuple[int, ...]
    nbytes: int


def lay_out_region(segments: Sequence[Segment]) -> Region:
    """Lay segments out so that neighbours on the host are neighbours in the staging area.

    Every maximal run of neighbours starts at a multiple of 512 bytes.
    """
    offsets = [0] * len(segments)
    order = sorted(
        range(len(segments)), key=lambda i: (segments[i].slab_index, segments[i].offset_nbytes)
    )
    end = 0
    previous: Segment | None = None
    for index in order:
        segment = segments[index]
        gap = _gap(previous, segment)
        end = align(end, DEVICE_ALIGNMENT_NBYTES) if gap is None else end + gap
        offsets[index] = end
        end += segment.nbytes
        previous = segment
    return Region(tuple(offsets), align(end, DEVICE_ALIGNMENT_NBYTES))


def _gap(left: Segment | None, right: Segment) -> int | None:
    """Alignment bytes between two neighbours in a slab, ``None`` where they are no neighbours."""
    if left is None or left.slab_index != right.slab_index:
        return None
    gap = right.offset_nbytes - (left.offset_nbytes + left.nbytes)
    return gap if 0 <= gap < HOST_ALIGNMENT_NBYTES else None


def merge_runs(segments: Sequence[Segment], region: Region) -> tuple[Run, ...]:
    """The fewest transfers that move ``segments`` to or from their offsets in ``region``.

    The segments may lie elsewhere on the host than those the region was laid out for (a state
    that goes to fresh host bytes), as long as they are as many and as large.
    """
    runs: list[Run] = []
    order = sorted(range(len(segments)), key=lambda i: region.device_offsets_nbytes[i])
    previous: Segment | None = None
    for index in order:
        segment = segments[index]
        offset = region.device_offsets_nbytes[index]
        gap = _gap(previous, segment)
        if gap is not None:
            last = runs[-1]
            if last.device_offset_nbytes + last.nbytes + gap == offset:
                runs[-1] = Run(last.slab_index, last.host_offset_nbytes,
                               last.device_offset_nbytes, last.nbytes + gap + segment.nbytes)
                previous = segment
                continue
        runs.append(Run(segment.slab_index, segment.offset_nbytes, offset, segment.nbytes))
        previous = segment
    return tuple(runs)


@dataclass(frozen=True)
class Ring:
    """Where batches lie in a staging area that they share, one after the other.

    Before batch ``i`` is copied in, batch ``reuses[i]`` (-1: none) and all before it must have
    been copied out: their bytes are taken.
    """

    nbytes: int
    offsets_nbytes: tuple[int, ...]
    reuses: tuple[int, ...]


def plan_ring(batches_nbytes: Sequence[int], in_flight: int) -> Ring:
    """The staging area for batches of these sizes: the largest ``in_flight`` neighbours fit.

    Each batch goes where the bytes are free the earliest, so that small batches share what a
    large one leaves, and the copy-in never waits longer than it must.
    """
    sizes = [align(nbytes, DEVICE_ALIGNMENT_NBYTES) for nbytes in batches_nbytes]
    slot = max(sizes, default=0)
    neighbours = [sum(sizes[i:i + in_flight]) for i in range(len(sizes))]
    nbytes = max(neighbours, default=0)
    occupied: list[tuple[int, int, int]] = []  # start, end, batch
    offsets: list[int] = []
    reuses: list[int] = []
    for index, size in enumerate(sizes):
        starts = {0, *range(slot, nbytes, slot), *(end for _, end, _ in occupied)}
        best = min(
            (max((b for s, e, b in occupied if s < start + size and start < e), default=-1), start)
            for start in starts if start + size <= nbytes
        )
        reuses.append(max(best[0], reuses[-1] if reuses else -1))
        start, end = best[1], best[1] + size
        offsets.append(start)
        remaining: list[tuple[int, int, int]] = []
        for s, e, b in occupied:
            remaining.extend(
                (s2, e2, b) for s2, e2 in ((s, min(e, start)), (max(s, end), e)) if s2 < e2
            )
        occupied = [*remaining, (start, end, index)]
    return Ring(nbytes, tuple(offsets), tuple(reuses))
