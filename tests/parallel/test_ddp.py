"""Data parallel training by DistributedDataParallel: swapped as native, and both as one process."""

from __future__ import annotations

from typing import Any

from ranks import OnRanks
from sharded_training import (
    IMPLEMENTATIONS,
    PIPELINES,
    assert_same,
    assert_trains_as_one_process,
    native_and_swapped,
    new_model,
)
from torch.nn.parallel import DistributedDataParallel


def ddp(rank: int) -> dict[str, Any]:
    # Buckets small enough that there are several.
    return native_and_swapped(
        rank, 2, lambda model: DistributedDataParallel(model, bucket_cap_mb=0.01))


def test_ddp_trains_swapped_as_natively_and_as_one_process(on_ranks: OnRanks) -> None:
    results = on_ranks(ddp, 2)
    nbytes = sum(2 * param.nbytes for param in new_model().parameters())
    for rank, result in enumerate(results):
        for name in IMPLEMENTATIONS:
            for pipeline in PIPELINES:
                swapped = result[f"{name}, {pipeline}"]
                assert swapped["swapped_nbytes"] == nbytes
                assert_same(result[name], swapped, f"rank {rank}, {name}, {pipeline}")
    assert_trains_as_one_process(results)
