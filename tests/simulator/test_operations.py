"""Operations behave as on any device: geometry, errors, names, counters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import swap_adam.simulator as simulator

Use = Callable[[torch.Tensor], object]


def test_tensors_of_two_devices_do_not_mix(device: str) -> None:
    here, host = torch.ones(3, device=device), torch.ones(3)
    there = here.to("simulated:1")
    for other in (there, host):
        with pytest.raises(RuntimeError, match="aten::add.Tensor.*same device.*simulated:0"):
            here + other
    assert torch.equal((here + torch.tensor(2.0)).cpu(), torch.full((3,), 3.0))  # a scalar may
    assert torch.equal(here[torch.tensor([0, 2])].cpu(), torch.ones(2))  # so may indices


def test_out_tensors_are_resized_and_accounted(device: str) -> None:
    ones = torch.ones(300, device=device)
    out = torch.empty(0, device=device)
    before = torch.simulated.memory_allocated()
    assert torch.add(ones, 1, out=out) is out
    assert out.shape == (300,) and out.device == ones.device
    assert torch.simulated.memory_allocated() == before + 1536
    assert torch.equal(out.cpu(), torch.full((300,), 2.0))
    pointer = out.data_ptr()
    torch.mul(ones, 3, out=out)
    assert out.data_ptr() == pointer and out.sum() == 900


def test_views_share_storage_whatever_made_them(device: str) -> None:
    base = torch.zeros(4, 6, device=device)
    base.t()[1:3].mul_(0).add_(1)
    base.view(torch.int32).view(-1)[0] = 0
    torch.view_as_real(torch.view_as_complex(base.view(-1, 2)))[0, 0] = 7
    base.unfold(1, 2, 2)[3, 2] = 9
    base.split(2)[1][0, 0] = 5
    expected = torch.zeros(4, 6)
    expected[:, 1:3] = 1
    expected[0, 0], expected[3, 4:], expected[2, 0] = 7, 9, 5
    assert torch.equal(base.cpu(), expected)


def test_complex_tensors(device: str) -> None:
    value = torch.complex(torch.ones(3), torch.arange(3.0))
    there = value.to(device)
    assert torch.equal((there.conj() * there).cpu(), value.conj() * value)
    assert torch.equal(there.imag.cpu(), value.imag)
    assert torch.equal(there.conj().imag.cpu(), value.conj().imag)
    there.conj().mul_(2)
    assert torch.equal(there.cpu(), value * 2)
    assert torch.equal(there.resolve_conj().cpu(), value * 2)


def test_device_of_factories_follows_the_current_one(device: str) -> None:
    assert torch.zeros(1, device=device).device.index == 0
    with torch.simulated.device(1):
        assert torch.zeros(1, device=device).device.index == 1
        assert torch.tril_indices(3, 3, device=device).device.index == 1
    assert torch.accelerator.current_device_index() == 0
    assert torch.accelerator.device_count() == torch.simulated.device_count() == 2
    with pytest.raises(RuntimeError, match="simulated:7"):
        torch.zeros(1, device="simulated:7")


def test_streams_are_current_per_device(device: str) -> None:
    first, second = torch.Stream(device="simulated:0"), torch.Stream(device="simulated:1")
    assert first.stream_id != second.stream_id
    default = torch.accelerator.current_stream()
    with first:
        assert torch.accelerator.current_stream() == first
        assert torch.accelerator.current_stream(1) != first
        with second:
            assert torch.accelerator.current_device_index() == 1
            assert torch.accelerator.current_stream() == second
        assert torch.accelerator.current_stream() == first
    assert torch.accelerator.current_stream() == default == torch.simulated.default_stream()
    torch.accelerator.set_stream(first)
    assert torch.accelerator.current_stream() == first
    torch.accelerator.set_stream(default)
    with torch.simulated.stream(second):
        assert torch.simulated.current_stream() == second
    assert torch.accelerator.current_stream() == default


def test_recorded_operations_say_which_mode_ran(device: str) -> None:
    side = torch.Stream(device=device)
    tensor, host = torch.ones(4, device=device), torch.ones(4).pin_memory()
    torch.accelerator.synchronize()
    with simulator.record_operations() as operations:
        torch._foreach_add_([tensor], 1)
        with side:
            tensor.t()
            torch.empty(4, device=device)
            host.to(device, non_blocking=True)
        tensor.to("simulated:1")
        tensor.cpu()
    assert [(one.name, one.kind, one.device, one.nbytes) for one in operations] == [
        ("aten::_foreach_add_.Scalar", "kernel", 0, 32),
        ("aten::copy_", "copy_in", 0, 16),
        ("aten::copy_", "copy_between_devices", 0, 16),
        ("aten::copy_", "copy_out", 0, 16),
    ]
    assert operations[1].stream == side.stream_id and operations[0].stream == 0


def test_counters_count(device: str) -> None:
    host = torch.ones(4).pin_memory()
    simulator.reset_counters()
    there = host.to(device, non_blocking=True)
    there.add_(1)
    there.add_(1)
    host.copy_(there, non_blocking=True)
    torch.accelerator.current_stream().synchronize()
    torch.accelerator.synchronize()
    assert there[0].item() == 3
    counters = simulator.counters()
    assert (counters.copies_in, counters.copies_in_nbytes) == (1, 16)
    assert (counters.copies_out, counters.copies_out_nbytes) == (2, 20)
    assert (counters.kernels, counters.allocations) == (2, 1)
    assert (counters.host_waits, counters.device_synchronizations) == (2, 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.nonzero(),
        lambda t: torch.equal(t, t),
        lambda t: t[t > 0],
        lambda t: bool(t.any()),
    ],
    ids=["nonzero", "equal", "mask", "bool"],
)
def test_results_that_depend_on_data_make_the_host_wait(device: str, call: Use) -> None:
    tensor = torch.ones(5, device=device)
    simulator.reset_counters()
    call(tensor)
    assert simulator.counters().host_waits == 1


def test_foreach_copy_between_host_and_device(device: str) -> None:
    host = [torch.full((3,), float(value)) for value in range(3)]
    there = [torch.zeros(3, device=device) for _ in range(3)]
    torch._foreach_copy_(there, host)
    back = [torch.zeros(3) for _ in range(3)]
    torch._foreach_copy_(back, there)
    assert all(torch.equal(a, b) for a, b in zip(back, host))
    torch._foreach_copy_(there, there[::-1])
    assert there[0].tolist() == [2.0] * 3


def test_empty_tensors_need_no_kernel(device: str) -> None:
    empty = torch.empty(0, device=device)
    simulator.reset_counters()
    assert (empty + 1).shape == (0,) and empty.cpu().shape == (0,)
    assert simulator.counters().kernels == 0


def test_data_swap_and_set(device: str) -> None:
    tensor, other = torch.zeros(4, device=device), torch.ones(6, device=device)
    tensor.data = other[2:5]
    assert tensor.shape == (3,) and tensor.storage_offset() == 2
    assert tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    tensor.set_(torch.full((8,), 2.0, device=device).untyped_storage(), 4, (2, 2), (2, 1))
    assert tensor.sum() == 8
    tensor.resize_(10)
    assert tensor.shape == (10,)


def test_sparse_gradients_reach_the_optimizer(device: str) -> None:
    weight = torch.ones(5, 2, device=device, requires_grad=True)
    indices = torch.tensor([1, 3, 3], device=device)
    torch.nn.functional.embedding(indices, weight, sparse=True).sum().backward()
    assert weight.grad is not None and weight.grad.is_sparse
    assert weight.grad.coalesce().values().tolist() == [[1, 1], [2, 2]]
    with pytest.raises(RuntimeError, match="Adam does not support sparse gradients"):
        torch.optim.AdamW([weight]).step()


def test_operation_that_makes_what_the_device_lacks_is_named(device: str) -> None:
    with pytest.raises(NotImplementedError, match="to_sparse.*the simulated accelerator lacks"):
        torch.ones(3, device=device).to_sparse()
