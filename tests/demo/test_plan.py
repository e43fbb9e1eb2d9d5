"""The forecast against the simulated accelerator, and ``python -m swap_adam plan``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import swap_adam.simulator as simulator
from swap_adam import SwapOptimizerConfig
from swap_adam.__main__ import main
from swap_adam.forecast import ParamSpec, forecast
from swap_adam.forecast.params import equal_params, parse_params
from swap_adam.simulator.costs import LINKS
from swap_adam.torch import SwapAdamW

SHAPES = [(700, 300)] * 12 + [(300,)] * 12 + [(2000, 1000)]
MODES: dict[str, dict[str, bool]] = {
    "foreach": {}, "for-loop": {"foreach": False}, "fused": {"fused": True}
}


@pytest.mark.parametrize("link", ["pcie4", "c2c"])
@pytest.mark.parametrize("duplex", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("implementation", MODES)
@pytest.mark.parametrize("amsgrad", [True, False])
def test_the_forecast_is_what_the_simulator_measures(
    implementation: str, packed: bool, duplex: bool, link: str, amsgrad: bool
) -> None:
    config = SwapOptimizerConfig(packed_swap=packed)
    costs = LINKS[link].with_duplex(duplex)
    found = forecast(
        [ParamSpec(shape) for shape in SHAPES], config, amsgrad=amsgrad,
        implementation=implementation, links={link: costs},  # type: ignore[arg-type]
    )

    simulator.configure(costs=costs)
    params = [torch.nn.Parameter(torch.zeros(shape, device="simulated")) for shape in SHAPES]
    for param in params:
        param.grad = torch.ones_like(param)
    pinned = simulator.pinned_nbytes()
    optimizer = SwapAdamW(params, amsgrad=amsgrad, swap_config=config, **MODES[implementation])
    optimizer.step()
    torch.accelerator.synchronize()
    held = simulator.memory_held()
    torch.get_device_module("simulated").reset_peak_memory_stats()
    # The forecast's clock knows nothing of how long an allocator's events take.
    simulator.configure(strict=set(simulator.STRICT) - {"late_free_events"})
    simulator.reset_clock()
    simulator.reset_counters()
    began, ended = (torch.simulated.Event(enable_timing=True) for _ in range(2))
    began.record()
    optimizer.step()
    ended.record()
    torch.accelerator.synchronize()

    time = found.times[link]
    counters = simulator.counters()
    assert found.pinned_nbytes == simulator.pinned_nbytes() - pinned
    assert found.transfer_count == counters.copies_in + counters.copies_out
    assert time.landed_s == pytest.approx(simulator.now(), rel=0.03)
    # Where the directions take turns, the last update waits for one copy more or less.
    step_s = began.elapsed_time(ended) / 1e3
    assert time.step_s == pytest.approx(step_s, rel=0.04 if duplex else 0.08)
    peak = simulator.max_memory_held() - held
    assert found.staging_nbytes <= peak * 1.01
    assert peak <= 1.01 * (found.staging_nbytes + found.scratch_nbytes)


def test_bytes_add_up() -> None:
    params = [ParamSpec((1000, 1000)), ParamSpec((1000,)), ParamSpec((500, 500), "bfloat16")]
    found = forecast(params, links={"pcie4": LINKS["pcie4"]})
    assert found.param_nbytes == 4_000_000 + 4_000 + 500_000
    assert found.state_nbytes == 2 * found.param_nbytes
    assert found.resident_nbytes == 8_000
    assert found.swapped_nbytes <= found.pinned_nbytes <= 1.05 * found.swapped_nbytes
    # What is swapped needs its own bytes over the link, and no step is faster than that.
    assert found.times["pcie4"].limit_s == pytest.approx(found.swapped_nbytes / 25e9)
    assert found.times["pcie4"].landed_s > found.times["pcie4"].limit_s


def test_the_slower_direction_limits() -> None:
    found = forecast([ParamSpec((10**7,))])
    nbytes = found.swapped_nbytes
    assert found.times["c2c"].limit_s == pytest.approx(nbytes / 295e9)
    half = LINKS["c2c"].with_duplex(False)
    both = forecast([ParamSpec((10**7,))], links={"half": half}).times["half"].limit_s
    assert both == pytest.approx(nbytes / 340e9 + nbytes / 295e9)


def test_nothing_to_swap() -> None:
    found = forecast([ParamSpec((10,)), ParamSpec((0,))])
    assert (found.swapped_nbytes, found.batch_count, found.staging_nbytes) == (0, 0, 0)
    assert all(time.limit_s == 0 < time.step_s for time in found.times.values())


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: forecast([]), "params must not be empty"),
        (lambda: forecast([ParamSpec((1,))], links={}), "links must not be empty"),
        (lambda: ParamSpec((1,), "int8"), "dtype must be one of"),
        (lambda: ParamSpec((-1,)), "negative"),
        (lambda: equal_params(3, 4, "float32"), "cannot be spread"),
        (lambda: parse_params("4096 by 4096"), "a parameter is"),
        (
            lambda: forecast(
                [ParamSpec((1,))], SwapOptimizerConfig(state_keys=("max_exp_avg_sq",))
            ),
            "needs amsgrad=True",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_shapes_are_read() -> None:
    assert parse_params("2*30x40:bfloat16") == [ParamSpec((30, 40), "bfloat16")] * 2
    assert parse_params(" 7 ") == [ParamSpec((7,))]
    sizes = [spec.numel for spec in equal_params(10, 4, "float32")]
    assert sizes == [3, 3, 2, 2]


def test_the_command_prints_bytes_and_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = tmp_path / "shapes.txt"
    shapes.write_text("# a comment\n2*1000x1000\n\n1000:bfloat16\n")
    assert main(["plan", "--shapes", str(shapes), "--shape", "2000x1000"]) == 0
    shown = capsys.readouterr().out
    assert "4 tensors, 16.00 MB" in shown
    assert [f"step() on {link}" in shown for link in LINKS] == [True] * len(LINKS)
    assert main(["plan", "--params", "7e9", "--dtype", "bfloat16", "--link", "pcie5"]) == 0
    shown = capsys.readouterr().out
    assert "28.00 GB" in shown and "pcie5" in shown and "pcie4" not in shown


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--params", "1e6", "--shape", "1000"],
        ["--shapes", "no-such-file"],
        ["--params", "1e6", "--swap-times", "0"],
        ["--shape", "1000", "--dtype", "bfloat16"],
        ["--shape", "1000", "--tensors", "2"],
    ],
)
def test_the_command_exits_with_2_for_what_it_cannot_plan(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *options]) == 2
    assert capsys.readouterr().err


def test_the_command_reads_counts_as_7e9(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for options in (["--params", "1e6", "--resident-nbytes", "2e6"],
                    ["--params", "1000000", "--resident-nbytes", "2000000"]):
        assert main(["plan", *options]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    with pytest.raises(SystemExit):
        main(["plan", "--params", "7B"])
    assert "a whole number such as 7e9, got '7B'" in capsys.readouterr().err


def test_resident_states_are_those_that_the_library_keeps() -> None:
    config = SwapOptimizerConfig(resident_nbytes=10_000_000)
    found = forecast([ParamSpec(shape) for shape in SHAPES], config)
    params = [torch.nn.Parameter(torch.zeros(shape, device="simulated")) for shape in SHAPES]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = SwapAdamW(params, swap_config=config)
    optimizer.step()
    (report,) = optimizer.swap_report().values()
    assert found.swapped_nbytes == report.swapped_nbytes
    assert found.pinned_nbytes == report.pinned_nbytes
    assert found.batch_count == report.batch_count
    assert found.staging_nbytes == report.staging_nbytes
