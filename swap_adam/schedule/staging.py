"""Where batches lie in a staging area, and what brings them there (pure arithmetic)."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swap_adam.alignment import DEVICE_ALIGNMENT_NBYTES, HOST_ALIGNMENT_NBYTES, align


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
