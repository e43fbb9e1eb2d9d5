"""``python -m swap_adam check``."""

from __future__ import annotations

import pytest
import torch
from torch.optim import AdamW

from swap_adam.__main__ import main
from swap_adam.check import trial
from swap_adam.torch import SwapAdamW


def test_it_passes_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trial, "CASES", trial.CASES[:1])
    assert main(["check", "--device", "simulated"]) == 0
    shown = capsys.readouterr().out
    assert torch.__version__ in shown and "PASS" in shown and "FAIL" not in shown
    assert shown.count("ok  ") == 1 + 4


def test_other_bits_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trial, "CASES", [trial.Case(
        "other eps",
        lambda params: AdamW(params),
        lambda params, config: SwapAdamW(params, eps=1e-7, swap_config=config),
    )])
    assert main(["check", "--device", "simulated"]) == 1
    shown = capsys.readouterr().out
    assert "differs" in shown and shown.endswith("FAIL\n")


def test_states_that_stay_on_the_device_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from swap_adam import SwapOptimizerConfig

    keep = SwapOptimizerConfig(min_numel=10**9)
    monkeypatch.setattr(trial, "CASES", [trial.Case(
        "kept", lambda params: AdamW(params),
        lambda params, config: SwapAdamW(params, swap_config=keep),
    )])
    assert main(["check", "--device", "simulated"]) == 1
    assert "not on the host" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["cuda", "foo", "cuda:7", "cpu", "simulated:9"])
def test_a_device_that_is_not_there_is_told_which_are(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--device", name]) == 2
    error = capsys.readouterr().err
    assert f"{name!r} is asked for" in error and error.endswith("there is simulated\n")


def test_a_device_beyond_the_last_one_is_told_which_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert main(["check", "--device", "cuda:2"]) == 2
    assert "there is cuda:0, cuda:1, simulated\n" in capsys.readouterr().err
