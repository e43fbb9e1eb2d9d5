"""Two processes, each with its own data and its own states on the host."""
from __future__ import annotations

from ms_launch import run_workers


def test_two_data_parallel_processes_train_as_natively() -> None:
    run_workers("ms_data_parallel_worker.py", 2)
