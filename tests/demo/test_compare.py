"""Bitwise means bitwise."""

from __future__ import annotations

import math

import pytest
import torch

from swap_adam.demo.compare import Snapshot, bitwise_equal, differences

NAN = math.nan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bits_decide(dtype: torch.dtype) -> None:
    def of(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    assert bitwise_equal(of(1.0, NAN), of(1.0, NAN))
    assert not bitwise_equal(of(0.0), of(-0.0))
    assert not bitwise_equal(of(1.0), of(1.0).view(1, 1))
    assert bitwise_equal(torch.tensor(3.0, dtype=dtype), torch.tensor(3.0, dtype=dtype))


def test_dtypes_must_agree() -> None:
    assert not bitwise_equal(torch.zeros(2), torch.zeros(2, dtype=torch.int32))


def test_strides_do_not_matter() -> None:
    values = torch.arange(6.0).view(2, 3)
    assert bitwise_equal(values.t(), values.t().contiguous())


def test_each_difference_is_named() -> None:
    expected = Snapshot((1.0, 2.0, 3.0), {"a": torch.zeros(2), "b": torch.zeros(1)})
    actual = Snapshot((1.0, 2.5), {"a": torch.ones(2), "c": torch.zeros(1)})
    assert differences(expected, actual) == [
        "3 losses are expected, 2 are there",
        "a: torch.float32 (2,) differs",
        "b: only one of the two has it",
        "c: only one of the two has it",
        "loss of step 2: 2.0 is expected, 2.5 is there",
    ]
    assert differences(expected, expected) == []
