"""What the demo reads from a device: the real one's code runs here on the simulated device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from swap_adam.demo.accelerator import (
    RealAccelerator,
    SimulatedAccelerator,
    choose_accelerator,
)
from swap_adam.demo.spans import RECORDED, read_spans


@pytest.mark.parametrize("name", ["auto", "simulated"])
def test_without_a_real_one_it_is_the_simulated_one(name: str) -> None:
    assert isinstance(choose_accelerator(name, "pcie4"), SimulatedAccelerator)


def test_a_real_one_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.device("cuda", 3)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: real)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a {device}")
    accelerator = choose_accelerator("auto", "pcie4")
    assert isinstance(accelerator, RealAccelerator)
    assert (accelerator.device, accelerator.description) == (real, "a cuda:3")


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(RuntimeError, match="'cuda' is asked for, and torch finds the accel"):
        choose_accelerator("cuda", "pcie4")


def test_a_real_device_is_read_through_torch(tmp_path: Path) -> None:
    accelerator = RealAccelerator(torch.device("simulated:0"))
    before = accelerator.held_nbytes()
    accelerator.reset_peak()
    with accelerator.recorded(tmp_path / "trace.json") as recording:
        held = torch.zeros(1_000_000, device=accelerator.device)
        began_ms = accelerator.host_ms()
        while accelerator.host_ms() < began_ms + 50:  # the sampling thread needs its turn
            held.add_(1)
    assert accelerator.peak_nbytes() >= before + held.nbytes
    assert accelerator.pinned_nbytes() is None
    assert max(held_nbytes for _, held_nbytes in recording.memory) >= before + held.nbytes
    times = [at for at, _ in recording.memory]
    assert times == sorted(times)
    assert (tmp_path / "trace.json").stat().st_size > 0


def test_idle_bytes_of_a_real_device_leave_out_what_its_streams_have_passed() -> None:
    """Its allocator does not look when it is asked, only when it allocates."""
    accelerator = RealAccelerator(torch.device("simulated:0"))
    accelerator.settle()
    before = accelerator.held_nbytes()
    tensor = torch.zeros(1_000_000, device=accelerator.device)
    side = torch.Stream(device=accelerator.device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        tensor.add_(1)
    tensor.record_stream(side)
    del tensor
    torch.accelerator.synchronize()
    assert accelerator.held_nbytes() > before
    accelerator.settle()
    assert accelerator.held_nbytes() == before


def test_time_is_told_where_torchs_own_events_do_not() -> None:
    accelerator = RealAccelerator(torch.device("simulated:0"))
    began = accelerator.mark()
    torch.zeros(1_000_000, device=accelerator.device)
    ended = accelerator.mark()
    torch.accelerator.synchronize()
    assert began.elapsed_time(ended) > 0


def test_spans_of_a_profiler_trace(tmp_path: Path) -> None:
    """The shape of what torch.profiler writes for CUDA: microseconds, categories, directions."""

    def event(name: str, category: str, ts: float, dur: float) -> dict[str, object]:
        return {"ph": "X", "name": name, "cat": category, "ts": ts, "dur": dur, "pid": 0, "tid": 7}

    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [
        event(RECORDED, "user_annotation", 1000.0, 90.0),
        event("aten::add_", "cpu_op", 1001.0, 5.0),
        event("vectorized_elementwise_kernel", "kernel", 1010.0, 20.0),
        event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 1030.0, 10.0),
        event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 1040.0, 10.0),
        event("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 1050.0, 2.0),
        {"ph": "i", "name": "an instant", "ts": 1.0},
    ]}))
    spans = read_spans(path)
    assert [span.row for span in spans] == ["compute", "copy-in", "copy-out", "compute"]
    assert (spans[0].start_ms, spans[0].end_ms) == pytest.approx((0.010, 0.030))


def test_spans_of_the_simulated_device(tmp_path: Path) -> None:
    accelerator = SimulatedAccelerator("pcie4")
    host = torch.ones(1_000_000, pin_memory=True)
    with accelerator.recorded(tmp_path / "trace.json") as recording:
        host.copy_(host.to(accelerator.device, non_blocking=True).add_(1), non_blocking=True)
    rows = [span.row for span in recording.spans if span.row != "host"]
    assert sorted(rows) == ["compute", "copy-in", "copy-out"]
    copy_in = next(span for span in recording.spans if span.row == "copy-in")
    assert copy_in.end_ms - copy_in.start_ms == pytest.approx(4e6 / 25e9 * 1e3 + 0.003)
