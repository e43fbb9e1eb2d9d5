"""What a user would lose if pinned memory were kept wrongly: states, or host memory."""
from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from swap_adam.host_store import HostStore
from swap_adam.slot import Residency


def make_store(core: Any, **options: Any) -> Any:
    backend = core.Backend(**options)
    shown: dict[int, Any] = {}
    store = HostStore(backend, lambda slot: shown.__setitem__(id(slot), slot.cpu_tensor))
    return backend, store, shown


def add(core: Any, store: Any, numels: list[int]) -> list[Any]:
    slots = [core.slot(f"state {i}", numel) for i, numel in enumerate(numels)]
    store.add(slots)
    for index, slot in enumerate(slots):
        slot.transit.move(Residency.HOST)
        slot.cpu_tensor.numbers()[:] = np.arange(slot.numel) + 1000 * index
    return slots


def assert_values(slots: list[Any]) -> None:
    for index, slot in enumerate(slots):
        expected = np.arange(slot.numel) + 1000 * index
        assert (slot.cpu_tensor.numbers() == expected).all()


def assert_no_overlap(slots: list[Any]) -> None:
    spans = sorted(
        (slot.slab_index, slot.host_offset_nbytes, slot.host_offset_nbytes + slot.storage_nbytes)
        for slot in slots
    )
    for left, right in zip(spans, spans[1:]):
        assert left[0] != right[0] or left[2] <= right[1]


def test_a_new_state_is_zero_and_shown(core: Any) -> None:
    _, store, shown = make_store(core)
    slots = [core.slot("exp_avg", numel) for numel in (5, 1000, 3)]
    store.add(slots)
    for slot in slots:
        assert (slot.cpu_tensor.numbers() == 0).all()
        assert shown[id(slot)] is slot.cpu_tensor
    assert_no_overlap(slots)
    assert store.swapped_nbytes == 4 * 1008


def test_more_states_leave_the_first_where_they_are(core: Any) -> None:
    _, store, _ = make_store(core)
    first = add(core, store, [100, 200])
    tensors = [slot.cpu_tensor for slot in first]
    version = store.version
    second = add(core, store, [300])
    assert [slot.cpu_tensor for slot in first] == tensors
    assert store.version > version, "plans made before do not fit any more"
    assert_values(first)
    assert_no_overlap(first + second)


def test_a_held_state_keeps_its_bytes_when_the_next_step_writes(core: Any) -> None:
    """The snapshot rule: what somebody holds is a copy from then on."""
    backend, store, shown = make_store(core)
    slots = add(core, store, [100, 200, 300])
    held = slots[1].cpu_tensor
    version = store.version
    store.replace([slots[1]])
    assert slots[1].cpu_tensor is not held and shown[id(slots[1])] is slots[1].cpu_tensor
    assert store.version > version
    assert_values(slots)
    slots[1].cpu_tensor.numbers()[:] = 0
    assert (held.numbers() == np.arange(200) + 1000).all()
    assert_no_overlap(slots)


def test_pinned_memory_of_replaced_states_is_given_back(core: Any) -> None:
    backend, store, _ = make_store(core)
    slots = add(core, store, [1 << 18, 1 << 18])
    before = backend.pinned
    for _ in range(20):
        store.replace(slots)
    assert backend.pinned == before == store.pinned_nbytes


def test_pinned_memory_of_removed_states_is_given_back(core: Any) -> None:
    backend, store, shown = make_store(core)
    keep, gone = add(core, store, [100]), add(core, store, [1 << 18])
    store.remove(gone)
    del gone
    shown.clear()
    assert store.pinned_nbytes < 4 << 18
    assert backend.pinned == store.pinned_nbytes
    assert_values(keep)


def test_a_removed_state_that_is_held_keeps_its_bytes(core: Any) -> None:
    _, store, _ = make_store(core)
    gone = add(core, store, [1000])
    held = gone[0].cpu_tensor
    store.remove(gone)
    assert (held.numbers() == np.arange(1000)).all()


def test_states_that_come_one_by_one_do_not_waste_pinned_memory(core: Any) -> None:
    """As with experts that get their first gradient at different steps."""
    backend, store, _ = make_store(core)
    slots = []
    for index in range(60):
        slot = core.slot(f"state {index}", 70_000)
        store.add([slot])
        slot.cpu_tensor.numbers()[:] = np.arange(slot.numel) + 1000 * index
        slots.append(slot)
        store.repack_if_wasteful()
        assert store.pinned_nbytes <= 1.05 * store.swapped_nbytes + (1 << 20)
        assert_values(slots)
        assert_no_overlap(slots)
    del slot
    assert backend.pinned == store.pinned_nbytes


def test_a_repack_holds_one_spare_slab_at_a_time(core: Any) -> None:
    backend, store, _ = make_store(core)
    rng = random.Random(3)
    slots = []
    for _ in range(12):
        slots += add(core, store, [rng.randrange(20_000, 70_000) for _ in range(5)])
    for index, slot in enumerate(slots):
        slot.cpu_tensor.numbers()[:] = np.arange(slot.numel) + 1000 * index
    before, backend.pinned_peak = backend.pinned, backend.pinned
    store.repack_if_wasteful()
    assert store.pinned_nbytes < before
    assert backend.pinned == store.pinned_nbytes
    largest = max(call[1] for call in backend.names("allocate_slab")[-10:])
    assert backend.pinned_peak <= before + largest
    assert_values(slots)
    assert_no_overlap(slots)


def test_nothing_is_repacked_for_little(core: Any) -> None:
    _, store, _ = make_store(core)
    slots = add(core, store, [1000] * 10)
    version = store.version
    store.repack_if_wasteful()
    assert store.version == version
    assert_values(slots)


def test_a_giant_tensor_is_not_repacked_over_and_over(core: Any) -> None:
    """Its power of two wastes more than 5 % and no other place would waste less."""
    backend, store, _ = make_store(core)
    add(core, store, [(1 << 19) + 1])
    version = store.version
    for _ in range(3):
        store.repack_if_wasteful()
    assert store.version == version and len(backend.names("allocate_slab")) == 1


@pytest.mark.parametrize("failing", range(4))
def test_running_out_of_pinned_memory_adds_nothing(core: Any, failing: int) -> None:
    backend, store, _ = make_store(core)
    first = add(core, store, [100])
    pinned, version = backend.pinned, store.version
    slots = [core.slot("exp_avg", numel) for numel in (300_000, 40_000, 5000, 600)]
    count = 0

    def fail(name: str) -> None:
        nonlocal count
        if name == "allocate_slab":
            count += 1
            if count > failing:
                raise MemoryError("no more")

    backend.fail = fail
    try:
        store.add(slots)
    except MemoryError:
        assert all(slot.cpu_tensor is None for slot in slots)
        assert all(slot.residency is Residency.PENDING for slot in slots)
        assert store.slots == first and store.version == version
        assert store.pinned_nbytes == pinned == backend.pinned
    else:
        assert failing >= count
    backend.fail = lambda name: None
    if not slots[0].cpu_tensor:
        store.add(slots)
    assert_values(first)
    assert_no_overlap(first + slots)


def test_running_out_of_pinned_memory_keeps_what_is_to_be_replaced(core: Any) -> None:
    backend, store, _ = make_store(core)
    slots = add(core, store, [300_000, 70_000])
    tensors = [slot.cpu_tensor for slot in slots]
    backend.pinned_limit = backend.pinned
    with pytest.raises(MemoryError):
        store.replace(slots)
    assert [slot.cpu_tensor for slot in slots] == tensors
    assert_values(slots)
    backend.pinned_limit = None
    store.replace(slots)
    assert_values(slots)


def test_a_repack_that_finds_no_memory_is_no_error(core: Any) -> None:
    """It would only have saved memory: the states are where they are, and right."""
    backend, store, _ = make_store(core)
    slots = []
    for index in range(12):
        slots += add(core, store, [70_000])
    for index, slot in enumerate(slots):
        slot.cpu_tensor.numbers()[:] = np.arange(slot.numel) + 1000 * index
    backend.pinned_limit = backend.pinned
    store.repack_if_wasteful()
    assert_values(slots)
    backend.pinned_limit = None
    store.repack_if_wasteful()
    assert store.pinned_nbytes <= 1.05 * store.swapped_nbytes + (1 << 20)
    assert_values(slots)
    assert_no_overlap(slots)
