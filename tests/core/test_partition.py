"""What a user would lose if batches were cut wrongly: elements, order, or the memory bound."""
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swap_adam.schedule import PackedSchedule, PerTensorSchedule
from swap_adam.schedule.partition import (
    CUT_QUANTUM_NUMEL,
    Partition,
    Piece,
    UnitSize,
    batch_cap_nbytes,
)

partition_packed = PackedSchedule.cut
partition_per_tensor = PerTensorSchedule.cut

UNITS = st.lists(
    st.builds(
        UnitSize,
        numel=st.one_of(st.integers(1, 300), st.integers(1, 400_000)),
        nbytes_per_element=st.sampled_from([2, 4, 8, 12, 16]),
        can_cut=st.booleans(),
    ),
    min_size=1, max_size=30,
)
SWAP_TIMES = st.one_of(st.integers(1, 40), st.sampled_from([100, 1000, 10**6]))


def nbytes_of(batch: tuple[Piece, ...], units: list[UnitSize]) -> int:
    return sum(piece.numel * units[piece.unit_index].nbytes_per_element for piece in batch)


def held_nbytes(partition: Partition, units: list[UnitSize]) -> int:
    """The most that neighbouring batches hold together: three, or two of a larger limit."""
    sizes = [nbytes_of(batch, units) for batch in partition.batches]
    return max(sum(sizes[i:i + partition.in_flight]) for i in range(len(sizes)))


def assert_complete_and_in_order(partition: Partition, units: list[UnitSize]) -> None:
    """Every element of every unit once, units and their pieces in the order given."""
    flat = [piece for batch in partition.batches for piece in batch]
    expected_unit, expected_start = 0, 0
    for piece in flat:
        assert (piece.unit_index, piece.start_numel) == (expected_unit, expected_start)
        assert piece.numel > 0
        expected_start += piece.numel
        assert expected_start <= units[piece.unit_index].numel
        if expected_start == units[piece.unit_index].numel:
            expected_unit, expected_start = expected_unit + 1, 0
    assert (expected_unit, expected_start) == (len(units), 0)
    assert all(partition.batches), "no batch is empty"


@settings(max_examples=300, deadline=None)
@given(UNITS, SWAP_TIMES)
def test_packed_batches_hold_every_element_once_and_in_order(
    units: list[UnitSize], swap_times: int
) -> None:
    assert_complete_and_in_order(partition_packed(units, swap_times), units)


@settings(max_examples=300, deadline=None)
@given(UNITS, SWAP_TIMES)
def test_per_tensor_batches_hold_every_element_once_and_no_unit_is_cut(
    units: list[UnitSize], swap_times: int
) -> None:
    partition = partition_per_tensor(units, swap_times)
    assert_complete_and_in_order(partition, units)
    for batch in partition.batches:
        assert all(piece.numel == units[piece.unit_index].numel for piece in batch)


@settings(max_examples=300, deadline=None)
@given(UNITS, SWAP_TIMES)
def test_cuts_are_at_multiples_of_128_elements_so_that_fused_stays_bitwise(
    units: list[UnitSize], swap_times: int
) -> None:
    for batch in partition_packed(units, swap_times).batches:
        for piece in batch:
            assert piece.start_numel % CUT_QUANTUM_NUMEL == 0
            end = piece.start_numel + piece.numel
            whole = units[piece.unit_index].numel
            assert end == whole or end % CUT_QUANTUM_NUMEL == 0
            if not units[piece.unit_index].can_cut:
                assert piece.numel == whole


@settings(max_examples=300, deadline=None)
@given(UNITS, SWAP_TIMES)
def test_staging_holds_at_most_twice_the_cap(units: list[UnitSize], swap_times: int) -> None:
    """The memory bound that the user sets with swap_times, oversized uncuttable units aside."""
    partition = partition_packed(units, swap_times)
    total = sum(unit.nbytes for unit in units)
    cap = max(-(-total // swap_times), max(unit.quantum_nbytes for unit in units))
    assert batch_cap_nbytes(units, swap_times) == cap
    largest_whole = max((unit.nbytes for unit in units if not unit.can_cut), default=0)
    assert partition.in_flight * partition.limit_nbytes <= 2 * cap
    if largest_whole <= cap:
        assert held_nbytes(partition, units) <= 2 * cap
    for batch in partition.batches:
        if nbytes_of(batch, units) > cap:
            assert len(batch) == 1 and batch[0].unit_index in partition.oversized
            assert not units[batch[0].unit_index].can_cut
        else:
            assert nbytes_of(batch, units) <= cap


@settings(max_examples=300, deadline=None)
@given(UNITS, SWAP_TIMES)
def test_two_per_tensor_batches_are_at_most_twice_the_cap_or_the_largest_tensor(
    units: list[UnitSize], swap_times: int
) -> None:
    partition = partition_per_tensor(units, swap_times)
    bound = max(batch_cap_nbytes(units, swap_times), max(unit.nbytes for unit in units))
    assert all(nbytes_of(batch, units) <= bound for batch in partition.batches)


@settings(max_examples=200, deadline=None)
@given(UNITS, SWAP_TIMES)
def test_oversized_units_are_reported(units: list[UnitSize], swap_times: int) -> None:
    """The report lists what makes a batch larger than the user asked for, and nothing else."""
    partition = partition_packed(units, swap_times)
    cap = batch_cap_nbytes(units, swap_times)
    expected = {i for i, unit in enumerate(units) if not unit.can_cut and unit.nbytes > cap}
    assert set(partition.oversized) == expected


def test_a_tensor_that_is_90_percent_of_the_model_is_cut_over_many_batches() -> None:
    units = [UnitSize(9_000_000, 8, True)] + [UnitSize(100_000, 8, True)] * 10
    partition = partition_packed(units, 16)
    cap = batch_cap_nbytes(units, 16)
    assert held_nbytes(partition, units) <= 2 * cap
    assert sum(any(p.unit_index == 0 for p in batch) for batch in partition.batches) >= 14


@pytest.mark.parametrize("swap_times", [1, 2, 7, 16, 1000])
def test_swap_times_bounds_the_staging_of_equal_tensors(swap_times: int) -> None:
    units = [UnitSize(4096, 8, True)] * 64
    partition = partition_packed(units, swap_times)
    cap = max(-(-64 * 4096 * 8 // swap_times), 1024)
    assert held_nbytes(partition, units) <= 2 * cap


def test_more_batches_cost_time_only_where_the_cap_asks_for_them() -> None:
    """With swap_times=1 there are a handful of batches, not one per tensor."""
    units = [UnitSize(4096, 8, True)] * 64
    assert len(partition_packed(units, 1).batches) <= 8
    assert len(partition_per_tensor(units, 1).batches) == 1
