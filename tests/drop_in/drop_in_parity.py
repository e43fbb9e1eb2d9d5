"""The same training twice, natively and swapped, and what it means that both are the same."""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

DEVICE = os.environ.get("SWAP_ADAM_TEST_DEVICE") or "simulated"
IS_SIMULATED = DEVICE == "simulated"


def small_model() -> nn.Module:
    """Two weights that are swapped, cut and whole, and small parameters that stay."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 48), nn.Tanh(),
        nn.Linear(48, 4),
    ).to(DEVICE)


def batch(index: int, features: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + index)
    return torch.randn(8, features, generator=generator).to(DEVICE)


def loss_of(model: nn.Module, index: int) -> Tensor:
    output: Tensor = model(batch(index))
    return output.pow(2).mean()


@dataclass
class Training:
    """A model, its optimizer, and the number of steps it has made."""

    model: nn.Module
    optimizer: Optimizer
    done: int = 0

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = loss_of(self.model, self.done)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
            self.done += 1
        return losses


def training(
    optimizer_class: Callable[..., Optimizer],
    make_model: Callable[[], nn.Module] = small_model,
    **options: Any,
) -> Training:
    model = make_model()
    return Training(model, optimizer_class(model.parameters(), **{"lr": 1e-2, **options}))


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def assert_equal(native: object, swapped: object, where: str) -> None:
    """Equal to the bit, device and type apart where only the device may differ."""
    if not isinstance(native, Tensor):
        assert native == swapped, where
        return
    assert isinstance(swapped, Tensor), where
    assert (native.dtype, native.shape) == (swapped.dtype, swapped.shape), where
    assert native.stride() == swapped.stride(), where
    assert torch.equal(native.detach().cpu(), swapped.detach().cpu()), where


def assert_same_states(native: Optimizer, swapped: Optimizer) -> None:
    """Every state and counter of the parameters, in the same order, and the groups' options."""
    assert len(native.param_groups) == len(swapped.param_groups)
    for index, (mine, theirs) in enumerate(zip(native.param_groups, swapped.param_groups)):
        assert mine.keys() == theirs.keys()
        for key in mine.keys() - {"params"}:
            assert_equal(mine[key], theirs[key], f"group {index}: {key}")
    pairs = zip(parameters_of(native), parameters_of(swapped), strict=True)
    for index, (param, other) in enumerate(pairs):
        state, other_state = native.state.get(param, {}), swapped.state.get(other, {})
        assert list(state) == list(other_state), f"parameter {index}"
        for name, value in state.items():
            assert_equal(value, other_state[name], f"parameter {index}: {name}")
            if name == "step":
                assert value.device == other_state[name].device, f"parameter {index}: step"


def assert_same(native: Training, swapped: Training) -> None:
    pairs = zip(native.model.parameters(), swapped.model.parameters(), strict=True)
    for index, (param, other) in enumerate(pairs):
        assert_equal(param, other, f"parameter {index}")
    assert_same_states(native.optimizer, swapped.optimizer)


def swapped_nbytes(optimizer: Optimizer) -> int:
    """Bytes of the states that are in pinned host memory, of parameters that are on the device."""
    return sum(
        value.numel() * value.element_size()
        for param in parameters_of(optimizer) if param.device.type != "cpu"
        for name, value in optimizer.state.get(param, {}).items()
        if name != "step" and value.device.type == "cpu" and value.is_pinned()
    )


def cpu_copy(tree: Any) -> Any:
    """A deep copy of a state dict with every tensor on the CPU."""
    if isinstance(tree, Tensor):
        return tree.detach().cpu().clone()
    if isinstance(tree, dict):
        return {key: cpu_copy(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(cpu_copy(value) for value in tree)
    return tree


def assert_same_tree(native: Any, swapped: Any, where: str = "state_dict") -> None:
    """Two state dicts with the same keys, types and shapes, equal to the bit."""
    assert type(native) is type(swapped), where
    if isinstance(native, dict):
        assert list(native) == list(swapped), where
        for key, value in native.items():
            assert_same_tree(value, swapped[key], f"{where}[{key!r}]")
    elif isinstance(native, (list, tuple)):
        assert len(native) == len(swapped), where
        for index, (value, other) in enumerate(zip(native, swapped)):
            assert_same_tree(value, other, f"{where}[{index}]")
    else:
        assert_equal(native, swapped, where)


def moved_nbytes() -> tuple[int, int]:
    """Bytes copied to the device and from it so far, where the device tells; else zeros."""
    if not IS_SIMULATED:
        return 0, 0
    from swap_adam import simulator

    counters = simulator.counters()
    return counters.copies_in_nbytes, counters.copies_out_nbytes


def assert_states_moved(before: tuple[int, int], nbytes: int) -> None:
    """``nbytes`` have gone in and out since ``before``: more than data and losses alone."""
    if IS_SIMULATED:
        assert all(now - then >= nbytes for now, then in zip(moved_nbytes(), before))
