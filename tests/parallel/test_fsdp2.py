"""Sharded training by fully_shard: swapped as native, and both as one process."""

from __future__ import annotations

from typing import Any

import torch
from ranks import OnRanks
from sharded_training import (
    IMPLEMENTATIONS,
    PIPELINES,
    assert_same,
    assert_trains_as_one_process,
    native_and_swapped,
)
from torch import nn
from torch.distributed.fsdp import fully_shard


def shard(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def fsdp2(rank: int, look: bool) -> dict[str, Any]:
    return native_and_swapped(rank, 2, shard, look)


def test_fsdp2_trains_swapped_as_natively_and_as_one_process(on_ranks: OnRanks) -> None:
    results = on_ranks(fsdp2, 2, True)
    for rank, result in enumerate(results):
        nbytes = sum(2 * param["local"].nbytes for param in result["default"]["parameters"])
        for name in IMPLEMENTATIONS:
            for pipeline in PIPELINES:
                swapped = result[f"{name}, {pipeline}"]
                assert swapped["swapped_nbytes"] == nbytes > 0
                assert_same(result[name], swapped, f"rank {rank}, {name}, {pipeline}")
    # The fused kernel rounds the last numbers of a tensor otherwise, and a shard ends elsewhere.
    assert_trains_as_one_process(results, rounded_apart=("fused",))


def test_fsdp2_steps_without_a_wait_in_between_have_no_race(on_ranks: OnRanks) -> None:
    """Shards are freed while the compute stream still reads them, and used again in order."""
    waiting, back_to_back = on_ranks(fsdp2, 2, True), on_ranks(fsdp2, 2, False)
    for expected, found in zip(waiting, back_to_back):
        for name in expected:
            assert torch.equal(expected[name]["losses"], found[name]["losses"])
            assert_same(expected[name]["whole"], found[name]["whole"], name)
