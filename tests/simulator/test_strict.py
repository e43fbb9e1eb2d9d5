"""What real devices do where the simulated one is kinder unless it is told to be strict."""

from __future__ import annotations

import pytest
import torch

import swap_adam.simulator as simulator

MIB = 1 << 20


def pinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def block(nbytes: int, device: str = "simulated") -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def keep_busy() -> None:
    tensor = torch.ones(1 << 24, device="simulated")
    for _ in range(20):
        tensor.mul_(1.0)


def active() -> int:
    return torch.simulated.memory_stats()["active_bytes.all.current"]


def test_nothing_of_it_unless_asked_for(device: str) -> None:
    base = simulator.pinned_nbytes()
    del (made := [pinned(MIB)])[:]
    assert simulator.pinned_nbytes() == base and made == []
    assert len({torch.Stream(device=device).stream_id for _ in range(70)}) == 70


def test_a_name_that_is_none_is_refused(device: str) -> None:
    for wrong in ({"host_cach"}, "host_cache"):
        with pytest.raises(ValueError, match="True, False or some of host_cache, resize"):
            simulator.configure(strict=wrong)
    simulator.configure(strict=set(simulator.STRICT))


def test_freed_pinned_blocks_stay_pinned_and_are_handed_out_as_they_were(device: str) -> None:
    simulator.configure(strict={"host_cache"})
    base = simulator.pinned_nbytes()
    torch.ones(1, device=device)  # before, torch.accelerator takes the device for unused
    first = pinned(MIB - 5).fill_(7)
    address = first.data_ptr()
    del first
    assert simulator.pinned_nbytes() == base + MIB
    assert pinned(MIB // 2).data_ptr() != address  # of another class
    again = pinned(MIB)
    assert again.data_ptr() == address and int(again[0]) == 7 and again.is_pinned()
    assert simulator.pinned_nbytes() == base + MIB + MIB // 2
    torch.simulated.host_empty_cache()
    assert simulator.pinned_nbytes() == base + MIB
    del again
    if hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()
    else:
        torch.simulated.host_empty_cache()
    assert simulator.pinned_nbytes() == base


def test_a_cached_block_counts_against_the_capacity(device: str) -> None:
    simulator.configure(strict={"host_cache"})
    simulator.configure(pinned_capacity_nbytes=simulator.pinned_nbytes() + MIB)
    pinned(MIB // 2)
    with pytest.raises(RuntimeError, match="out of pinned host memory"):
        pinned(MIB)
    torch.simulated.host_empty_cache()
    pinned(MIB)


def test_a_pinned_block_is_reused_after_the_copies_that_its_allocator_knows_of(
    device: str,
) -> None:
    simulator.configure(strict={"host_cache"})
    source = pinned(MIB).fill_(3)
    address = source.data_ptr()
    keep_busy()
    copied = source.to(device, non_blocking=True)
    del source
    assert pinned(MIB).data_ptr() != address
    torch.accelerator.synchronize()
    torch.simulated.host_empty_cache()
    assert bool((copied == 3).all())


def test_a_copy_that_the_host_allocator_does_not_know_of_is_a_race_with_the_next_user(
    device: str,
) -> None:
    """It knows blocks by their start only: a foreign storage inside one is nobody's."""
    simulator.configure(strict={"host_cache"}, races="collect")
    source = pinned(MIB).fill_(3)
    foreign = torch.frombuffer(source.numpy()[512:].data, dtype=torch.uint8)
    keep_busy()
    copied = foreign.to(device, non_blocking=True)
    del source, foreign
    torch.zeros(MIB, dtype=torch.uint8, pin_memory=True)
    found = simulator.violations()
    assert found[0].startswith("freed in flight")
    assert any("on the host writes" in text for text in found[1:])
    assert not bool((copied == 3).all()), "its bytes were overwritten"


def test_a_storage_that_is_resized_goes_to_the_current_device(device: str) -> None:
    simulator.configure(strict={"resize_on_current_device"})
    tensor = block(MIB)
    tensor.untyped_storage().resize_(0)
    before = simulator.memory_held(0), simulator.memory_held(1)
    with torch.simulated.device(1):
        tensor.untyped_storage().resize_(MIB)
    assert (simulator.memory_held(0), simulator.memory_held(1)) == (before[0], before[1] + MIB)


def test_statistics_learn_of_passed_streams_from_the_next_allocation(device: str) -> None:
    simulator.configure(strict={"lazy_statistics"})
    base = active()
    tensor = block(MIB)
    side = torch.Stream(device=device)
    with side:
        tensor.add_(1)
    tensor.record_stream(side)
    del tensor
    torch.accelerator.synchronize()
    assert active() == base + MIB and simulator.memory_held() == base
    block(1)
    assert active() == base


def test_freed_memory_is_there_a_moment_after_what_was_recorded_before(device: str) -> None:
    simulator.configure(strict={"late_free_events"})
    base = simulator.memory_held()
    for is_freed_first in (False, True):
        tensor = block(MIB)
        side = torch.Stream(device=device)
        with side:
            tensor.add_(1)
        landed = torch.Event(device)
        tensor.record_stream(side)
        if is_freed_first:
            tensor.untyped_storage().resize_(0)
        landed.record(side)
        del tensor
        landed.synchronize()
        assert (simulator.memory_held() == base) is is_freed_first
        torch.accelerator.synchronize()


def test_small_and_large_blocks_do_not_serve_each_other(device: str) -> None:
    simulator.configure(strict={"memory_pools"}, capacity_nbytes=simulator.memory_held() + 4 * MIB)
    block(3 * MIB)
    small = [block(MIB)]
    with pytest.raises(torch.OutOfMemoryError):
        block(MIB)
    block(3 * MIB)
    small.clear()
    torch.simulated.empty_cache()
    small = [block(MIB) for _ in range(4)]
    small.clear()
    with pytest.raises(torch.OutOfMemoryError):
        block(2 * MIB)
    torch.simulated.empty_cache()
    block(4 * MIB)


def test_only_the_modules_own_event_tells_the_time(device: str) -> None:
    simulator.configure(strict={"no_elapsed_time"})
    for make in (torch.Event, torch.simulated.Event):
        simulator.reset_counters()
        events = [make(device, enable_timing=True) if make is torch.Event
                  else make(enable_timing=True) for _ in range(2)]
        events[0].record()
        keep_busy()
        events[1].record()
        torch.accelerator.synchronize()
        assert simulator.counters().timing_events == 2
        if make is torch.Event:
            with pytest.raises(RuntimeError, match="elapsed"):
                events[0].elapsed_time(events[1])
        else:
            assert events[0].elapsed_time(events[1]) > 0.1


def test_there_are_32_streams_handed_out_in_turn(device: str) -> None:
    simulator.configure(strict={"stream_pool"})
    made = [torch.Stream(device=device).stream_id for _ in range(96)]
    assert len(set(made)) == 32 and made[:32] == made[32:64] == made[64:]


def test_the_deterministic_mode_fills_new_memory(device: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert bool(torch.empty(10, device=device).isnan().all())
        assert bool(torch.empty_strided((2, 3), (3, 1), device=device).isnan().all())
        with simulator.record_operations() as operations:
            torch.empty(10, device=device)
            torch.empty(0, device=device).untyped_storage().resize_(64)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [one.name for one in operations] == ["aten::fill_.Scalar"]


def test_what_blocks_the_host_is_an_error_where_that_is_asked_for(device: str) -> None:
    on_device, on_host = torch.ones(3, device=device), torch.ones(3, pin_memory=True)
    torch.simulated.set_sync_debug_mode("error")
    assert torch.simulated.get_sync_debug_mode() == 2
    try:
        for call in (on_device[0].item, on_device.cpu, on_device.nonzero,
                     lambda: on_host.to(device)):
            with pytest.raises(RuntimeError, match="called a synchronizing simulated operation"):
                call()
        on_host.copy_(on_device, non_blocking=True)
        on_device.add_(1)
        torch.accelerator.synchronize()
    finally:
        torch.simulated.set_sync_debug_mode("default")
    assert on_device[0].item() == 2


def test_nothing_is_asked_or_waited_for_while_a_graph_is_captured(device: str) -> None:
    event = torch.Event(device)
    event.record()
    with simulator.capturing():
        for call in (event.query, event.synchronize, torch.accelerator.synchronize,
                     torch.accelerator.current_stream().query):
            with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                call()
    assert event.query()


def test_a_visible_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swap_adam.simulator.control._device_count", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="set CUDA_VISIBLE_DEVICES= "):
        simulator.enable()
