"""The Ascend backend on the CPU: its streams and events stood in for, its memory not pinned.

This finds what it gets wrong in Python and nothing about order. Per tensor only: on the CPU an
in-place update of a view at an offset is lost, and packed needs those.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from mindspore import mint, nn
from mindspore.graph.api import _pynative_executor
from ms_device import IS_SIMULATED
from ms_training import Case, assert_same, make_optimizer, train

from swap_adam import SwapOptimizerConfig, swap_optimizer, unswap_optimizer
from swap_adam.backend import StreamRole
from swap_adam.mindspore import backend as backend_module
from swap_adam.mindspore.backend import AscendBackend, register_device

pytestmark = pytest.mark.skipif(not IS_SIMULATED, reason="all tests run with it on Ascend")


class FakeStream:
    pass


class FakeStreamCtx:
    def __init__(self, stream: FakeStream) -> None:
        assert isinstance(stream, FakeStream)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class FakeEvent:
    def __init__(self) -> None:
        self.is_recorded = False

    def record(self, stream: FakeStream) -> None:
        assert isinstance(stream, FakeStream)
        self.is_recorded = True

    def wait(self, stream: FakeStream) -> None:
        assert self.is_recorded and isinstance(stream, FakeStream)
        _pynative_executor.sync()

    def query(self) -> bool:
        assert self.is_recorded
        return False

    def synchronize(self) -> None:
        assert self.is_recorded
        _pynative_executor.sync()


class PageableMint:
    """``mint`` without pinned memory, which the CPU cannot allocate."""

    @staticmethod
    def empty(*size: Any, pin_memory: bool = False, device: str, **more: Any) -> Any:
        assert not pin_memory or device == "CPU"
        return mint.empty(*size, device=device, **more)


@pytest.fixture
def ascend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(backend_module, "Stream", FakeStream)
    monkeypatch.setattr(backend_module, "StreamCtx", FakeStreamCtx)
    monkeypatch.setattr(backend_module, "Event", FakeEvent)
    monkeypatch.setattr(backend_module, "current_stream", FakeStream)
    monkeypatch.setattr(backend_module, "mint", PageableMint)
    monkeypatch.setattr(AscendBackend, "target", "CPU")
    register_device("CPU", AscendBackend)
    yield
    register_device("CPU", None)


@pytest.mark.parametrize("case", [
    Case("amsgrad", nn.Adam, lambda: {"use_amsgrad": True}),
    Case("default", nn.AdamWeightDecay),
], ids=lambda case: case.original.__name__)
def test_its_python_is_right(ascend: None, case: Case) -> None:
    native = train(case)
    assert_same(native, train(case, SwapOptimizerConfig(4)))
    assert_same(native, train(case, SwapOptimizerConfig(4), convert_at=2))
    optimizer = swap_optimizer(make_optimizer(case), SwapOptimizerConfig(4))
    unswap_optimizer(optimizer)
    assert type(optimizer) is case.original


def test_pinned_memory_that_is_not_there_is_told_in_bytes(
    ascend: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*size: Any, **more: Any) -> None:
        raise RuntimeError("aclrtMallocHost failed")

    monkeypatch.setattr(PageableMint, "empty", staticmethod(refuse))
    with pytest.raises(MemoryError, match="cannot pin 16384 bytes .*aclrtMallocHost failed"):
        train(Case("default", nn.Adam), SwapOptimizerConfig(4))


def test_pinned_memory_that_numpy_sees_a_copy_of_is_refused(ascend: None) -> None:
    class Copying:
        @staticmethod
        def empty(*size: Any, **more: Any) -> Any:
            class Tensor:
                def asnumpy(self) -> Any:
                    return mint.empty(8).asnumpy()

                def data_ptr(self) -> int:
                    return 1

            return Tensor()

    backend_module.mint = Copying
    with pytest.raises(RuntimeError, match="gives NumPy a copy of pinned memory"):
        AscendBackend().allocate_slab(8)


def test_device_memory_that_is_not_there_is_told_before_anything_is_copied_into_it(
    ascend: None,
) -> None:
    """MindSpore's resize returns as if nothing were wrong."""
    backend = AscendBackend()
    buffer = backend.make_buffer(16)
    backend.release(buffer, None)
    with pytest.raises(RuntimeError, match=f"out of device memory: {1 << 46} bytes .* 0 given"):
        backend.acquire(buffer, 1 << 46)
    backend.acquire(buffer, 16)
    assert buffer.tensor.nbytes == 16


def test_a_batch_changes_the_stream_once_however_many_transfers_it_has(
    ascend: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every change of the stream waits for what Python has dispatched so far."""
    entered = []

    class CountedStreamCtx(FakeStreamCtx):
        def __enter__(self) -> None:
            entered.append(self)

    monkeypatch.setattr(backend_module, "StreamCtx", CountedStreamCtx)
    backend = AscendBackend()
    pairs = [(backend.make_buffer(8).tensor, backend.allocate_slab(8)) for _ in range(5)]
    backend.copy(StreamRole.COPY_IN, pairs)
    assert len(entered) == 1


def test_a_part_of_a_slab_is_never_copied(ascend: None) -> None:
    """To MindSpore a view of a host tensor is on the device."""
    backend = AscendBackend()
    slab = backend.allocate_slab(16)
    assert backend.byte_view(slab, 0, 16) is slab
    for part in ((8, 8), (0, 8)):
        with pytest.raises(AssertionError):
            backend.byte_view(slab, *part)
