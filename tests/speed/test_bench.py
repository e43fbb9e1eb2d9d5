"""The benchmark itself: the same figures every time, and files that say all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import swap_adam.simulator as simulator
import torch
from swap_adam.bench import command, main
from swap_adam.bench.accelerators import (
    Link,
    RealAccelerator,
    SimulatedAccelerator,
    choose_accelerator,
)
from swap_adam.bench.contenders import (
    NATIVE_FUSED,
    PACKED,
    SINGLE_STREAM,
    Contender,
    all_contenders,
)
from swap_adam.bench.grids import label
from swap_adam.bench.json_report import as_record
from swap_adam.bench.measurement import measure
from swap_adam.bench.workloads import RFC, SMALL_GIANT, Workload

TWO = Workload("two", "two tensors", ((256, 1024), (1024,)))
EIGHT = Workload("eight", "eight large tensors", ((1024, 1024),) * 8)


@pytest.mark.parametrize("contender", [NATIVE_FUSED, PACKED], ids=["native", "packed"])
def test_a_real_device_has_its_link_measured_once_and_its_idle_bytes_right(
    contender: Contender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swap_adam.bench.accelerators.PROBE_NBYTES", 1 << 20)
    monkeypatch.setattr("swap_adam.bench.accelerators.PASS_NBYTES", 1 << 20)
    monkeypatch.setattr(RealAccelerator, "repeats", 1)
    device = torch.device("simulated", 0)
    accelerator = RealAccelerator(device)
    (link,) = accelerator.links()
    (line,) = measure(accelerator, EIGHT, contender, accelerator.links())
    assert line.step_ms > 0 and line.link is link
    assert accelerator.description.count("GB/s in") == 1
    moments = 2 * EIGHT.numel * 4
    steps = len(EIGHT.shapes) * 512  # of the fused implementation, one on the device for each
    assert line.idle_nbytes == steps + (moments if contender is NATIVE_FUSED else 0)


def test_limits() -> None:
    nbytes = 680_000_000
    duplex, half = (Link("c2c", 340, 295, is_duplex) for is_duplex in (True, False))
    assert duplex.limit_ms(nbytes) == pytest.approx(680 / 295)
    assert half.limit_ms(nbytes) == pytest.approx(680 / 295 + 2)


def test_workloads_are_what_they_say() -> None:
    assert (RFC.numel, len(RFC.shapes)) == (25_239_552, 816)
    sizes = [torch.Size(shape).numel() for shape in SMALL_GIANT.shapes]
    assert max(sizes) / sum(sizes) == pytest.approx(0.9, abs=0.005)


def test_figures_do_not_change(accelerator: SimulatedAccelerator) -> None:
    links = accelerator.links()[:2]
    first, second = (
        [as_record(line) for line in measure(accelerator, TWO, PACKED, links)] for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize("contender", all_contenders(), ids=lambda one: label(one, None))
def test_every_contender_runs(contender: Contender, accelerator: SimulatedAccelerator) -> None:
    (line,) = measure(accelerator, TWO, contender, accelerator.links()[:1])
    assert line.step_ms > 0
    assert line.races == ()


def test_one_copy_stream_is_one(accelerator: SimulatedAccelerator) -> None:
    optimizer = SINGLE_STREAM.make(TWO.make_params(accelerator.device), TWO)
    optimizer.step()
    with simulator.record_operations() as operations:
        optimizer.step()
    copies = {one.stream for one in operations if one.kind in ("copy_in", "copy_out")}
    assert len(copies) == 1


def test_what_is_used_on_a_real_device(accelerator: SimulatedAccelerator) -> None:
    """It knows nothing of the simulated one: speeds and times are those that it measures."""
    real = RealAccelerator(accelerator.device)
    (link,) = real.links()
    assert link.in_gb_per_s == pytest.approx(25, rel=0.01)
    ours, native = (
        list(measure(real, EIGHT, contender, [link]))[0] for contender in (PACKED, NATIVE_FUSED)
    )
    assert 1.0 <= ours.over_limit <= 1.1
    assert native.step_ms < 0.1 * ours.step_ms
    assert ours.tail_ms == pytest.approx(0.0, abs=1e-6)
    assert ours.counters is None


def test_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "WORKLOADS", {"two": TWO})
    monkeypatch.setattr(command, "COMPARED", (TWO,))
    assert main(["--workload", "two", "--no-host-cost", "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "bench.json").read_text())
    links = {line["link"]["name"] for line in report["lines"]}
    assert links == {"pcie4", "pcie5", "c2c", "hccs"}
    assert {line["optimizer"] for line in report["lines"]} >= {"native", "packed 16"}
    assert report["costs"]["pcie4"]["launch_us"] == 4.0
    assert "packed 16, fused" in (tmp_path / "bench.md").read_text()
    assert (tmp_path / "bench-two.png").stat().st_size > 10_000
    assert "pcie4 half" in capsys.readouterr().out


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cuda:7"]) == 2
    assert "cuda:7" in capsys.readouterr().err


def test_simulated_is_chosen_where_no_device_is() -> None:
    assert choose_accelerator("auto").device.type == "simulated"
