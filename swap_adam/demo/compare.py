"""Whether two trainings are the same, bit by bit."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class Snapshot:
    """A copy on the host: losses, and every parameter, state and step counter by its name."""

    losses: tuple[float, ...]
    tensors: Mapping[str, Tensor]


def take_snapshot(model: nn.Module, optimizer: Optimizer, losses: list[float]) -> Snapshot:
    """Waits for what computes or copies what it reads."""
    tensors: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        tensors[name] = _host_copy(param)
        for key, value in optimizer.state[param].items():
            tensors[f"{key} of {name}"] = _host_copy(value)
    return Snapshot(tuple(losses), tensors)


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def differences(expected: Snapshot, actual: Snapshot) -> list[str]:
    """One line per difference; none when the two are bitwise equal."""
    found = []
    for index, (left, right) in enumerate(zip(expected.losses, actual.losses)):
        if left.hex() != right.hex():
            found.append(f"loss of step {index + 1}: {left!r} is expected, {right!r} is there")
    if len(expected.losses) != len(actual.losses):
        found.append(f"{len(expected.losses)} losses are expected, {len(actual.losses)} are there")
    for name in expected.tensors.keys() | actual.tensors.keys():
        if name not in actual.tensors or name not in expected.tensors:
            found.append(f"{name}: only one of the two has it")
            continue
        left_tensor, right_tensor = expected.tensors[name], actual.tensors[name]
        if not bitwise_equal(left_tensor, right_tensor):
            found.append(f"{name}: {left_tensor.dtype} {tuple(left_tensor.shape)} differs")
    return sorted(found)


def bitwise_equal(left: Tensor, right: Tensor) -> bool:
    """Same dtype, shape and bits; unlike ``torch.equal``, NaN equals itself and 0 not -0."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(_bytes(left), _bytes(right))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
