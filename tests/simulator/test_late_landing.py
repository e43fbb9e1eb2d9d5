"""A copy without blocking moves its bytes late, so that a missing wait shows as wrong data too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import swap_adam.simulator as simulator

Use = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def races_are_not_raised(device: str) -> None:
    simulator.configure(races="collect")


def filled(value: float) -> torch.Tensor:
    return torch.full((8,), float(value)).pin_memory()


def test_reader_that_did_not_wait_sees_the_old_bytes(device: str) -> None:
    staging = torch.zeros(8, device=device)
    copies = torch.Stream(device=device)
    copies.wait_stream(torch.accelerator.current_stream())
    with copies:
        staging.copy_(filled(7), non_blocking=True)
    stale = staging + 0
    torch.accelerator.current_stream().wait_stream(copies)
    fresh = staging + 0
    torch.accelerator.synchronize()
    assert stale.tolist() == [0] * 8 and fresh.tolist() == [7] * 8
    assert len(simulator.violations()) == 1


def test_host_sees_a_copy_out_only_after_it_waited(device: str) -> None:
    host = filled(1)
    host.copy_(torch.full((8,), 5.0, device=device), non_blocking=True)
    assert host.clone().tolist() == [1] * 8
    torch.accelerator.synchronize()
    assert host.tolist() == [5] * 8


def test_host_that_overwrites_a_source_in_flight_changes_what_arrives(device: str) -> None:
    host = filled(1)
    staging = host.to(device, non_blocking=True)
    host.fill_(9)
    assert (staging + 0).tolist() == [9] * 8
    assert len(simulator.violations()) == 1


def test_staging_overwritten_in_flight_takes_the_wrong_bytes_out(device: str) -> None:
    staging, host = torch.full((8,), 3.0, device=device), filled(0)
    copies = torch.Stream(device=device)
    copies.wait_stream(torch.accelerator.current_stream())
    with copies:
        host.copy_(staging, non_blocking=True)
    staging.fill_(4)
    copies.synchronize()
    assert host.tolist() == [4] * 8
    assert len(simulator.violations()) == 1


def test_the_same_stream_sees_its_own_copy(device: str) -> None:
    staging = filled(7).to(device, non_blocking=True)
    back = filled(0)
    back.copy_(staging * 2, non_blocking=True)
    torch.accelerator.synchronize()
    assert back.tolist() == [14] * 8
    assert simulator.violations() == []


def test_copy_lands_although_its_device_tensor_is_gone(device: str) -> None:
    host, state = filled(0), torch.full((8,), 6.0, device=device)
    host.copy_(state, non_blocking=True)
    state.record_stream(torch.accelerator.current_stream())
    del state
    torch.accelerator.synchronize()
    assert host.tolist() == [6] * 8
    assert simulator.violations() == []


@pytest.mark.parametrize("pin, non_blocking", [(False, True), (True, False), (False, False)])
def test_pageable_or_blocking_copies_are_there_at_once(
    device: str, pin: bool, non_blocking: bool
) -> None:
    host = torch.zeros(8).pin_memory() if pin else torch.zeros(8)
    waits = simulator.counters().host_waits
    host.copy_(torch.full((8,), 5.0, device=device), non_blocking=non_blocking)
    assert host.tolist() == [5] * 8
    assert simulator.counters().host_waits == waits + 1


@pytest.mark.parametrize("non_blocking", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.double(),
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t.expand(3, 4, 6),
        lambda t: torch.complex(t, t).conj(),
        lambda t: torch.complex(t, -t).imag,
        lambda t: t[None, :, :, None].expand(2, 4, 6, 3).contiguous(
            memory_format=torch.channels_last),
    ],
    ids=["dtype", "transposed", "strided", "expanded", "conjugate", "negative", "channels_last"],
)
def test_every_layout_arrives_and_comes_back(device: str, non_blocking: bool, change: Use) -> None:
    plain = torch.arange(24.0).reshape(4, 6)
    expected = change(plain)
    there = change(plain.pin_memory().to(device, non_blocking=non_blocking))
    assert there.is_conj() == expected.is_conj() and there.is_neg() == expected.is_neg()
    assert there.stride() == expected.stride()
    assert torch.equal(there.cpu(), expected)
    overlapping = 0 in expected.stride()
    source = change(plain.pin_memory()) if overlapping else expected.pin_memory()
    target = torch.zeros_like(expected, device=device).copy_(source, non_blocking=non_blocking)
    back = torch.zeros(expected.shape, dtype=expected.dtype).pin_memory()
    back.copy_(target, non_blocking=non_blocking)
    torch.accelerator.synchronize()
    assert torch.equal(back, expected)
    target = torch.zeros(expected.shape, dtype=torch.complex128, device=device)
    target.copy_(source, non_blocking=non_blocking)
    assert torch.equal(target.cpu(), expected.to(torch.complex128))
    assert simulator.violations() == []
