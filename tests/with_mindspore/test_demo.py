"""``make demo-mindspore`` in small."""
from __future__ import annotations

import pytest
from ms_device import IS_SIMULATED

pytest.importorskip("sklearn")

pytestmark = pytest.mark.skipif(not IS_SIMULATED, reason="the demo runs on the CPU")
SMALL = ["--epochs", "1", "--layers", "2", "--width", "64", "--swap-times", "2"]


def test_the_demo_compares_native_and_swapped(capsys: pytest.CaptureFixture[str]) -> None:
    from swap_adam.demo_mindspore import main

    assert main(SMALL) == 0
    printed = capsys.readouterr().out
    assert "bitwise equal" in printed and "reference" in printed and "NO" not in printed
    assert "swapped, 2 batches" in printed


def test_the_demo_fails_when_a_number_differs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from swap_adam.demo_mindspore import main
    from swap_adam.simulator.mindspore import SimulatedBackend

    monkeypatch.setattr(SimulatedBackend, "wait", lambda self, role, event: None)
    assert main(SMALL) == 1
    assert "differ" in capsys.readouterr().out
