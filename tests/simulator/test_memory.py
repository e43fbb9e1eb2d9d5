"""Every byte is accounted: allocated, held for streams that have not passed, and pinned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import swap_adam.simulator as simulator

Use = Callable[[torch.Tensor], object]

KIB = 1024


def memory() -> tuple[int, int]:
    return torch.simulated.memory_allocated(), torch.simulated.memory_held()


def test_blocks_count_in_steps_of_512_bytes(device: str) -> None:
    before = torch.simulated.memory_allocated()
    tensors = [torch.empty(numel, dtype=torch.uint8, device=device) for numel in (0, 1, 512, 513)]
    assert torch.simulated.memory_allocated() - before == 0 + 512 + 512 + 1024
    del tensors
    assert torch.simulated.memory_allocated() == before


def test_results_of_kernels_are_accounted_and_views_are_not(device: str) -> None:
    tensor = torch.ones(256, 4, device=device)
    before = torch.simulated.memory_allocated()
    views = [tensor.t(), tensor[1:3], tensor.view(-1), tensor.detach(), tensor.unfold(0, 2, 2)]
    assert torch.simulated.memory_allocated() == before
    views.append(tensor + 1)
    assert torch.simulated.memory_allocated() == before + 4 * KIB
    views.extend(torch._foreach_mul([tensor, tensor], 2.0))
    assert torch.simulated.memory_allocated() == before + 12 * KIB
    views.append(tensor.contiguous())
    assert torch.simulated.memory_allocated() == before + 12 * KIB


def test_peaks_per_device_and_in_torch_accelerator(device: str) -> None:
    for index in range(2):
        torch.simulated.reset_peak_memory_stats(index)
        base = torch.simulated.memory_allocated(index)
        tensor = torch.empty(KIB, device=f"simulated:{index}")
        del tensor
        assert torch.simulated.memory_allocated(index) == base
        assert torch.simulated.max_memory_allocated(index) == base + 4 * KIB
        assert torch.simulated.max_memory_held(index) == base + 4 * KIB
        if hasattr(torch.accelerator, "max_memory_allocated"):
            assert torch.accelerator.max_memory_allocated(index) == base + 4 * KIB
            torch.accelerator.reset_peak_memory_stats(index)
        torch.simulated.reset_peak_memory_stats(index)
        assert torch.simulated.max_memory_allocated(index) == base


def test_freed_memory_is_held_until_the_recorded_stream_has_passed(device: str) -> None:
    base = memory()[1]
    host = torch.empty(256 * KIB, pin_memory=True)
    state = torch.empty(256 * KIB, device=device)
    copies = torch.Stream(device=device)
    with copies:
        host.copy_(state, non_blocking=True)
    done = torch.Event(device)
    done.record(copies)
    state.record_stream(copies)
    del state
    assert memory() == (base, base + KIB * KIB)
    simulator.spend(10e-6)
    assert memory()[1] == base + KIB * KIB  # the copy takes 45 us
    simulator.spend(40e-6)
    assert memory()[1] == base  # nobody waited: time alone has passed
    timeline = simulator.memory_timeline()
    ends = 4e-6 + 3e-6 + KIB * KIB / 25e9
    assert timeline[-1] == (pytest.approx(ends, rel=1e-9), base)
    assert done.query()


def test_recorded_memory_counts_for_the_peak(device: str) -> None:
    """A pipeline that never waits looks bounded by what is allocated, and is not."""
    base = memory()[1]
    copies = torch.Stream(device=device)
    host = torch.zeros(4, 256 * KIB).pin_memory()
    torch.simulated.reset_peak_memory_stats()
    for row in host:
        state = torch.empty(256 * KIB, device=device)
        with copies:
            row.copy_(state, non_blocking=True)
        state.record_stream(copies)
        del state
    assert torch.simulated.max_memory_allocated() == base + KIB * KIB
    assert torch.simulated.max_memory_held() == base + 4 * KIB * KIB
    copies.synchronize()
    assert memory()[1] == base


def test_out_of_memory_names_what_was_asked_and_what_is_there(device: str) -> None:
    base = memory()[1]
    simulator.configure(capacity_nbytes=base + 8 * KIB)
    kept = torch.empty(KIB, device=device)
    with pytest.raises(
        torch.OutOfMemoryError,
        match=rf"simulated:0 is out of memory: asked for 4097 bytes \(4608 as accounted\), "
        rf"{base + 4096} bytes are held \(.* of a capacity of {base + 8192} bytes",
    ):
        torch.empty(4097, dtype=torch.uint8, device=device)
    torch.empty(KIB, device=device)
    assert memory()[0] == base + 4 * KIB
    with pytest.raises(torch.OutOfMemoryError):
        torch._foreach_add([kept, kept], 1.0)
    assert memory() == (base + 4 * KIB, base + 4 * KIB)  # nothing of the failed call is left
    assert simulator.counters().out_of_memory == 2


def test_allocator_waits_for_recorded_streams_before_it_gives_up(device: str) -> None:
    base = memory()[1]
    simulator.configure(capacity_nbytes=base + KIB * KIB)
    host = torch.empty(256 * KIB, pin_memory=True)
    state = torch.empty(256 * KIB, device=device)
    copies = torch.Stream(device=device)
    with copies:
        host.copy_(state, non_blocking=True)
    state.record_stream(copies)
    del state
    torch.empty(256 * KIB, device=device)
    assert simulator.now() == pytest.approx(4e-6 + 3e-6 + KIB * KIB / 25e9 + 5e-6)
    assert simulator.counters().host_waits == 1


def test_resize_to_zero_gives_the_memory_back(device: str) -> None:
    tensor = torch.arange(KIB, device=device, dtype=torch.float32)
    base, storage = memory()[0], tensor.untyped_storage()
    storage.resize_(0)
    assert memory()[0] == base - 4 * KIB and storage.size() == 0
    storage.resize_(4 * KIB)
    assert memory()[0] == base
    tensor.fill_(3)
    assert tensor.sum() == 3 * KIB
    storage.resize_(8 * KIB)  # grows and keeps what was there
    assert memory()[0] == base + 4 * KIB
    assert tensor.sum() == 3 * KIB


@pytest.mark.parametrize(
    "use, name",
    [
        (lambda t: t + 1, "aten::add.Tensor"),
        (lambda t: t.mul_(2), "aten::mul_.Tensor"),
        (lambda t: torch._foreach_add_([t], 1), "aten::_foreach_add_.Scalar"),
        (lambda t: t.cpu(), "aten::copy_"),
        (lambda t: t.copy_(torch.zeros(3, 4)), "aten::copy_"),
        (lambda t: torch.zeros(3, 4).pin_memory().copy_(t, non_blocking=True), "aten::copy_"),
    ],
    ids=["add", "mul_", "foreach", "cpu", "copy_", "async"],
)
def test_use_of_a_released_storage_is_an_error_with_names(device: str, use: Use, name: str) -> None:
    tensor = torch.ones(3, 4, device=device)
    view = tensor.t()
    tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=rf"{name} uses a tensor whose storage was released"):
        use(tensor)
    with pytest.raises(RuntimeError, match=r"float32 \[4, 3\] on simulated:0"):
        view + 1
    one = torch.ones((), device=device)
    one.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="aten::_local_scalar_dense uses a tensor whose storage"):
        one.item()


def test_pinned_blocks_count_as_the_next_power_of_two(device: str) -> None:
    base = simulator.pinned_nbytes()
    one = torch.empty(1100, dtype=torch.uint8, pin_memory=True)
    assert one.is_pinned() and simulator.pinned_nbytes() == base + 2048
    two = torch.empty(4096, dtype=torch.uint8).pin_memory()
    assert two.is_pinned() and simulator.pinned_nbytes() == base + 2048 + 4096
    del one, two
    assert simulator.pinned_nbytes() == base
    assert simulator.max_pinned_nbytes() == base + 6144
    simulator.reset_max_pinned_nbytes()
    assert simulator.max_pinned_nbytes() == base


def test_pinned_memory_is_known_by_address(device: str) -> None:
    slab = torch.zeros(KIB).pin_memory()
    alias = torch.from_numpy(slab.numpy()[16:32])
    assert alias.is_pinned() and slab[4:].is_pinned()
    assert torch.frombuffer(slab.numpy(), dtype=torch.int16, offset=64, count=8).is_pinned()
    assert not torch.zeros(KIB).is_pinned()
    del slab
    assert alias.is_pinned()  # numpy keeps the slab


def test_pinned_memory_runs_out(device: str) -> None:
    base = simulator.pinned_nbytes()
    simulator.configure(pinned_capacity_nbytes=base + 4096)
    kept = torch.empty(2048, dtype=torch.uint8, pin_memory=True)
    with pytest.raises(
        RuntimeError,
        match=rf"pinned host memory: asked for 2049 bytes \(4096 as accounted.*{base + 2048} bytes "
        rf"are in use of {base + 4096}",
    ):
        torch.empty(2049, dtype=torch.uint8, pin_memory=True)
    del kept


def test_reserved_is_what_a_caching_allocator_keeps(device: str) -> None:
    torch.simulated.empty_cache()
    base = torch.simulated.memory_reserved()
    torch.empty(KIB, device=device)
    assert torch.simulated.memory_reserved() == base + 4 * KIB
    torch.simulated.empty_cache()
    assert torch.simulated.memory_reserved() == base


def test_free_and_total_follow_the_capacity(device: str) -> None:
    simulator.configure(capacity_nbytes=1 << 20)
    free, total = torch.simulated.mem_get_info()
    assert total == 1 << 20 and free == total - memory()[1]
    assert torch.simulated.memory_stats()["allocated_bytes.all.current"] == memory()[0]
