"""What a user would lose if bytes were laid out wrongly: states, pinned memory, or transfers."""
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swap_adam.alignment import DEVICE_ALIGNMENT_NBYTES, HOST_ALIGNMENT_NBYTES, align
from swap_adam.schedule.staging import Segment, lay_out_region, merge_runs, plan_ring
from swap_adam.slabs import WASTE_BUDGET, plan_slabs, slab_limit_nbytes

SIZES = st.lists(st.one_of(st.integers(1, 5000), st.integers(1, 10**7)), max_size=60)


@settings(max_examples=300, deadline=None)
@given(SIZES, st.sampled_from([1 << 12, 1 << 20, None]))
def test_no_two_states_share_pinned_bytes(sizes: list[int], max_slab: int | None) -> None:
    plan = plan_slabs(sizes, max_slab)
    assert len(plan.placements) == len(sizes)
    ends: dict[int, int] = {}
    for place, size in sorted(
        zip(plan.placements, sizes), key=lambda at: (at[0].slab_index, at[0].offset_nbytes)
    ):
        assert place.offset_nbytes % HOST_ALIGNMENT_NBYTES == 0
        assert place.offset_nbytes >= ends.get(place.slab_index, 0), "no overlap"
        ends[place.slab_index] = place.offset_nbytes + size
    for index, end in ends.items():
        assert end <= plan.slab_nbytes[index]
    assert set(ends) == set(range(len(plan.slab_nbytes))), "no slab is empty"
    for nbytes in plan.slab_nbytes:
        assert nbytes & (nbytes - 1) == 0, "a power of two, as a host allocator would round to"
        assert nbytes <= max(max_slab or slab_limit_nbytes(sizes), 2 * max(sizes))


@settings(max_examples=300, deadline=None)
@given(SIZES)
def test_states_keep_the_update_order_so_that_a_batch_is_one_transfer(sizes: list[int]) -> None:
    """Only alignment between neighbours; large states, which are cut anyway, go first."""
    plan = plan_slabs(sizes)
    limit = WASTE_BUDGET * sum(align(size, HOST_ALIGNMENT_NBYTES) for size in sizes)
    for wanted in (True, False):
        kept = [(place, size) for place, size in zip(plan.placements, sizes)
                if (size > limit) is wanted]
        for (left, size), (right, _) in zip(kept, kept[1:]):
            if left.slab_index == right.slab_index:
                expected = align(left.offset_nbytes + size, HOST_ALIGNMENT_NBYTES)
                assert right.offset_nbytes == expected
            else:
                assert right.slab_index > left.slab_index


@pytest.mark.parametrize("exponent", range(20, 34))
@pytest.mark.parametrize("count", [100, 816])
def test_pinned_bytes_are_within_5_percent_for_totals_of_1_1_times_a_power_of_two(
    exponent: int, count: int
) -> None:
    """The worst case of a host allocator that rounds up: it would lock 1.8 times the bytes."""
    total = int(1.1 * 2**exponent)
    sizes = [total // count // 4 * 4] * count
    plan = plan_slabs(sizes)
    assert sum(plan.slab_nbytes) <= 1.05 * sum(sizes)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(4 * 256, 40_000), min_size=150, max_size=400),
)
def test_pinned_bytes_are_within_5_percent_of_any_many_small_tensors(sizes: list[int]) -> None:
    """No tensor is more than a few percent of the total, the total is above 1 MB."""
    sizes = [size // 4 * 4 for size in sizes]
    total = sum(sizes)
    if total < 2**20 or max(sizes) > 0.02 * total:
        return
    assert sum(plan_slabs(sizes).slab_nbytes) <= 1.05 * total


def test_a_transformers_moments_are_within_5_percent() -> None:
    """GPT-2 small: 12 layers, an embedding that is 31 % of it. Adam's two moments."""
    width, layers, vocabulary, context = 768, 12, 50257, 1024
    layer = [width, width, 3 * width * width, 3 * width, width * width, width, width, width,
             4 * width * width, 4 * width, 4 * width * width, width]
    numels = [vocabulary * width, context * width] + layer * layers + [width, width]
    sizes = [numel * 4 for numel in numels if numel >= 1024 for _ in range(2)]
    assert sum(plan_slabs(sizes).slab_nbytes) <= 1.05 * sum(sizes)


def llama(width: int, hidden: int, layers: int, vocabulary: int, kv: int) -> list[int]:
    layer = [width * width, width * kv, width * kv, width * width, *[width * hidden] * 3,
             width, width]
    return [vocabulary * width, *layer * layers, width, vocabulary * width]


@pytest.mark.parametrize("numels", [
    pytest.param(llama(896, 4864, 24, 151936, 128), id="0.5B"),
    pytest.param(llama(4096, 11008, 32, 32000, 4096), id="7B"),
    pytest.param(llama(4096, 14336, 32, 128256, 1024), id="8B, large vocabulary"),
    pytest.param(llama(5120, 13824, 40, 32000, 5120), id="13B"),
    pytest.param(llama(8192, 28672, 80, 32000, 1024), id="70B"),
])
def test_large_language_models_are_within_5_percent(numels: list[int]) -> None:
    """Their tensors are hundreds of MB each: slabs of 512 MiB would waste up to half."""
    sizes = [numel * 4 for numel in numels for _ in range(2)]
    plan = plan_slabs(sizes)
    assert sum(plan.slab_nbytes) <= 1.05 * sum(sizes)
    assert max(plan.slab_nbytes) <= 1 << 34, "one pinned block of hundreds of GB may fail"


@pytest.mark.parametrize("numel", [2**22 + 1, 3 * 2**20, 5 * 2**20, 2**22])
def test_a_single_giant_tensor_costs_its_own_power_of_two_and_no_more(numel: int) -> None:
    """A tensor is one piece of memory and a pinned block a power of two: 5 % is out of reach.

    What can be had is that its two moments together fit one block where that is smaller than two
    blocks of their own.
    """
    size = numel * 4
    alone = 1 << (size - 1).bit_length()
    together = 1 << (2 * size - 1).bit_length()
    assert sum(plan_slabs([size]).slab_nbytes) == alone
    assert sum(plan_slabs([size, size]).slab_nbytes) == min(2 * alone, together)


@st.composite
def segments(draw: st.DrawFn) -> list[Segment]:
    """Parts of slots in slabs: mostly neighbours, some gaps, in any order."""
    found = []
    for slab in range(draw(st.integers(1, 3))):
        offset = 0
        for _ in range(draw(st.integers(1, 8))):
            offset += draw(st.sampled_from([0, 0, 0, 16, 512, 5000]))
            nbytes = draw(st.integers(1, 3000))
            found.append(Segment(slab, offset, nbytes))
            offset = align(offset + nbytes, HOST_ALIGNMENT_NBYTES)
    return draw(st.permutations(found))


@settings(max_examples=300, deadline=None)
@given(segments())
def test_staged_states_do_not_overlap_and_are_aligned(parts: list[Segment]) -> None:
    region = lay_out_region(parts)
    taken = sorted(
        (offset, offset + part.nbytes) for offset, part in zip(region.device_offsets_nbytes, parts)
    )
    for (_, end), (start, _) in zip(taken, taken[1:]):
        assert start >= end
    assert taken[-1][1] <= region.nbytes
    assert region.nbytes % DEVICE_ALIGNMENT_NBYTES == 0
    for run in merge_runs(parts, region):
        assert run.device_offset_nbytes % DEVICE_ALIGNMENT_NBYTES == 0


@settings(max_examples=300, deadline=None)
@given(segments())
def test_transfers_move_exactly_the_staged_bytes_and_are_as_few_as_can_be(
    parts: list[Segment],
) -> None:
    region = lay_out_region(parts)
    runs = merge_runs(parts, region)
    # Every segment lies in one run, at the same distance from its start on both sides.
    for part, offset in zip(parts, region.device_offsets_nbytes):
        inside = [
            run for run in runs
            if run.slab_index == part.slab_index
            and run.host_offset_nbytes <= part.offset_nbytes
            and part.offset_nbytes + part.nbytes <= run.host_offset_nbytes + run.nbytes
        ]
        assert len(inside) == 1
        (run,) = inside
        assert offset - run.device_offset_nbytes == part.offset_nbytes - run.host_offset_nbytes
    # Maximal: between two runs of a slab there is more than alignment.
    by_slab: dict[int, list[tuple[int, int]]] = {}
    for run in runs:
        by_slab.setdefault(run.slab_index, []).append(
            (run.host_offset_nbytes, run.host_offset_nbytes + run.nbytes)
        )
    for spans in by_slab.values():
        spans.sort()
        for (_, end), (start, _) in zip(spans, spans[1:]):
            assert start - end >= HOST_ALIGNMENT_NBYTES
    # Nothing but segments and alignment is moved.
    padding = sum(run.nbytes for run in runs) - sum(part.nbytes for part in parts)
    assert 0 <= padding < HOST_ALIGNMENT_NBYTES * len(parts)


@settings(max_examples=200, deadline=None)
@given(segments())
def test_alignment_costs_less_than_512_bytes_per_transfer(parts: list[Segment]) -> None:
    region = lay_out_region(parts)
    runs = merge_runs(parts, region)
    assert region.nbytes < sum(run.nbytes for run in runs) + DEVICE_ALIGNMENT_NBYTES * len(runs)


@settings(max_examples=200, deadline=None)
@given(segments(), st.data())
def test_a_state_that_moved_on_the_host_still_reaches_its_place(
    parts: list[Segment], data: st.DataObject
) -> None:
    region = lay_out_region(parts)
    moved = list(parts)
    index = data.draw(st.integers(0, len(parts) - 1))
    moved[index] = Segment(99, 0, parts[index].nbytes)
    runs = merge_runs(moved, region)
    assert any(
        run.slab_index == 99 and run.nbytes == parts[index].nbytes
        and run.device_offset_nbytes == region.device_offsets_nbytes[index]
        for run in runs
    )


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=40), st.integers(2, 4))
def test_batches_that_share_staging_bytes_wait_for_each_other(
    sizes: list[int], in_flight: int
) -> None:
    """A batch copied into bytes that another still copies out of would corrupt its states."""
    ring = plan_ring(sizes, in_flight)
    spans = [(start, start + size) for start, size in zip(ring.offsets_nbytes, sizes)]
    for later, (start, end) in enumerate(spans):
        assert start % DEVICE_ALIGNMENT_NBYTES == 0 and end <= ring.nbytes
        assert ring.reuses[later] < later
        for earlier, (other_start, other_end) in enumerate(spans[:later]):
            if start < other_end and other_start < end:
                assert ring.reuses[later] >= earlier
    aligned = [align(size, DEVICE_ALIGNMENT_NBYTES) for size in sizes]
    assert ring.nbytes <= max(
        sum(aligned[i:i + in_flight]) for i in range(len(aligned))
    ), "no more than that many batches are held"
    assert list(ring.reuses) == sorted(ring.reuses)


@pytest.mark.parametrize("in_flight", [2, 3])
def test_equal_batches_wait_only_for_the_one_that_had_their_bytes(in_flight: int) -> None:
    ring = plan_ring([4096] * 10, in_flight)
    assert ring.nbytes == in_flight * 4096
    assert list(ring.reuses) == [-1] * in_flight + list(range(10 - in_flight))
