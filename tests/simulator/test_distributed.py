"""Two processes, each with simulated devices, talk over gloo and train one sharded model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from swap_adam.simulator import build


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_two_ranks_train_a_sharded_model(device: str, tmp_path: Path) -> None:
    root = str(Path(build.__file__).parents[2])
    script = Path(__file__).parent / "two_ranks.py"
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), str(rank), f"file://{tmp_path}/meeting"],
            env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert all("fine" in output for output in outputs), "\n".join(outputs)
