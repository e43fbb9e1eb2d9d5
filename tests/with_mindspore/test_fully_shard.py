"""The RFC's ``fully_shard`` scenarios, which need ``hyper_parallel``: it is not on PyPI.

Where it is installed they start four workers, the 2 x 2 mesh of the RFC; else they skip.
"""
from __future__ import annotations

import pytest
from ms_launch import run_workers
from ms_mindformers import HAS_HYPER_PARALLEL

needs_hyper_parallel = pytest.mark.skipif(
    not HAS_HYPER_PARALLEL,
    reason="fully_shard is in hyper_parallel, which is not installed (it is not on PyPI)",
)


@needs_hyper_parallel
def test_native_adam_fully_shard_swap_optimizer_state_align_worker() -> None:
    run_workers("ms_fully_shard_worker.py", 4, "adam")


@needs_hyper_parallel
@pytest.mark.parametrize("packed", ["per-tensor", "packed"])
def test_mindformers_adamw_fully_shard_swap_optimizer_state_align_worker(packed: str) -> None:
    run_workers("ms_fully_shard_worker.py", 4, f"mindformers-{packed}")
