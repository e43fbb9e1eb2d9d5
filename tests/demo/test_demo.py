"""The demo as a user starts it, with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.optim import AdamW

from swap_adam.__main__ import main
from swap_adam.demo import command, run
from swap_adam.torch import SwapAdamW

TINY = ["--layers", "1", "--width", "48", "--steps", "7"]


def demo(output: Path, *options: str) -> int:
    return main(["demo", *TINY, "--output", str(output), *options])


def test_all_runs_are_equal_and_everything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo(tmp_path) == 0
    shown = capsys.readouterr().out
    assert shown.count("yes") == 2 and "NO" not in shown
    assert "virtual, pcie4" in shown
    for picture in ("memory.png", "timeline.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    traces = sorted(tmp_path.glob("trace-*.json"))
    assert [path.name for path in traces] == [
        "trace-adamw.json", "trace-swapadamw-packed.json", "trace-swapadamw-per-tensor.json"
    ]
    assert all(json.loads(path.read_text())["traceEvents"] for path in traces)


def test_a_difference_fails_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "optimizers", lambda swap_times: {
        "AdamW": lambda params: AdamW(params, lr=1e-3),
        "other eps": lambda params: SwapAdamW(params, lr=1e-3, eps=1e-7),
    })
    assert demo(tmp_path) == 1
    shown = capsys.readouterr().out
    assert "NO" in shown
    assert "other eps: blocks.0.attention.out.bias: torch.float32 (48,) differs" in shown


def test_the_link_is_named_with_the_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo(tmp_path, "--link", "c2c") == 0
    assert "virtual, c2c" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, message",
    [
        (["--device", "cuda"], "device 'cuda' is asked for"),
        (["--steps", "1"], "steps must be >="),
        (["--width", "50"], "width must be a multiple"),
        (["--swap-times", "0"], "swap_times must be >= 1"),
    ],
)
def test_what_cannot_run_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert demo(tmp_path, *options) == 2
    assert message in " ".join(capsys.readouterr().out.split())


def test_a_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        command, "find_spec", lambda name: None if name in ("matplotlib", "rich") else object()
    )
    assert demo(tmp_path) == 2
    assert "pip install 'swap_adam[torch,demo]'" in capsys.readouterr().err


def test_the_model_is_as_large_as_promised() -> None:
    from swap_adam.demo.model import GPT, ModelSize

    with torch.device("meta"):
        assert sum(param.numel() for param in GPT(ModelSize()).parameters()) >= 10_000_000
