"""The device can fail: with any wait of the pipelines left out, training goes wrong visibly.

Without this, the parity tests would prove nothing about waits on a machine with no accelerator.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from mindspore import nn
from ms_mindformers import mf_case
from ms_training import Case, is_same, train

from swap_adam import SwapOptimizerConfig
from swap_adam.backend import StreamRole
from swap_adam.simulator.mindspore import Event, SimulatedBackend, SimulatedDevice

pytestmark = pytest.mark.simulator_only

PER_TENSOR = Case("default", nn.Adam, steps=2)
PACKED = mf_case("non-fused", steps=2)
# Whether to leave a wait of a stream for an event out.
Deleted = Callable[[StreamRole, Event], bool]


def _is_of_compute(event: Event) -> bool:
    return event.mark is not None and event.mark.stream is None


WAITS: dict[str, Deleted] = {
    "an update for its copy in": lambda role, event: role is StreamRole.COMPUTE,
    "a copy out for its update": lambda role, event: role is StreamRole.COPY_OUT,
    "a copy in for what computes in its memory": (
        lambda role, event: role is StreamRole.COPY_IN and _is_of_compute(event)
    ),
}
PACKED_WAITS: dict[str, Deleted] = {
    **WAITS,
    "a copy in for the copy out of the same memory": (
        lambda role, event: role is StreamRole.COPY_IN and not _is_of_compute(event)
    ),
}


def assert_detected(case: Case) -> None:
    """Whatever is wrong shows: in the numbers, or as memory that is used after its release."""
    native = train(case)
    try:
        swapped = train(case, SwapOptimizerConfig(4))
    except AssertionError:
        return
    assert not is_same(native, swapped)


def delete_waits(monkeypatch: pytest.MonkeyPatch, is_deleted: Deleted) -> None:
    wait = SimulatedBackend.wait

    def wait_for_some(self: SimulatedBackend, role: StreamRole, event: Event) -> None:
        if not is_deleted(role, event):
            wait(self, role, event)

    monkeypatch.setattr(SimulatedBackend, "wait", wait_for_some)


@pytest.mark.parametrize("case, name", [
    *((PER_TENSOR, name) for name in WAITS), *((PACKED, name) for name in PACKED_WAITS),
], ids=lambda value: value if isinstance(value, str) else value.original.__name__)
def test_a_missing_wait_shows(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, case: Case, name: str
) -> None:
    delete_waits(monkeypatch, PACKED_WAITS[name])
    assert_detected(case)


@pytest.mark.parametrize("case", [PER_TENSOR, PACKED], ids=["per tensor", "packed"])
def test_a_host_that_does_not_wait_shows(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    monkeypatch.setattr(SimulatedBackend, "synchronize", lambda self, event: None)
    assert_detected(replace(case, steps=1))


@pytest.mark.parametrize("case", [PER_TENSOR, PACKED], ids=["per tensor", "packed"])
def test_memory_that_goes_before_its_copies_shows(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    release = SimulatedBackend.release
    monkeypatch.setattr(
        SimulatedBackend, "release", lambda self, buffer, pending: release(self, buffer, None)
    )
    assert_detected(replace(case, steps=1))


@pytest.mark.parametrize("case", [PER_TENSOR, PACKED], ids=["per tensor", "packed"])
def test_with_every_wait_in_place_nothing_shows(device: SimulatedDevice, case: Case) -> None:
    assert is_same(train(case), train(case, SwapOptimizerConfig(4)))


def test_a_copy_is_not_done_before_somebody_waits(device: SimulatedDevice) -> None:
    backend = SimulatedBackend(device)
    slab, buffer = backend.allocate_slab(8), backend.make_buffer(8)
    slab.memory[:] = 7
    started, copied, updated, landed = (backend.make_event() for _ in range(4))
    backend.record(started, StreamRole.COMPUTE)
    backend.wait(StreamRole.COPY_IN, started)
    inward, host = backend.byte_view(buffer, 0, 8), backend.byte_view(slab, 0, 8)
    backend.copy(StreamRole.COPY_IN, [(inward, host)])
    backend.record(copied, StreamRole.COPY_IN)
    assert set(buffer.memory) == {0xFF}
    assert not backend.is_complete(copied)
    backend.wait(StreamRole.COMPUTE, copied)
    assert set(buffer.memory) == {7}
    buffer.memory[:] = 9  # the update
    backend.record(updated, StreamRole.COMPUTE)
    backend.wait(StreamRole.COPY_OUT, updated)
    backend.copy(StreamRole.COPY_OUT, [(host, inward)])
    backend.record(landed, StreamRole.COPY_OUT)
    backend.release(buffer, StreamRole.COPY_OUT)
    assert set(slab.memory) == {7}
    assert device.held_nbytes == 8
    backend.synchronize(landed)
    assert set(slab.memory) == {9}
    assert device.held_nbytes == 0
    assert set(buffer.memory) == {0xFF}
    assert device.peak_nbytes == 8
    assert (device.copied_in_nbytes, device.copied_out_nbytes) == (8, 8)
