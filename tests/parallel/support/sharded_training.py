"""One small model, trained alike on every rank and by a single process on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from swap_adam import SwapOptimizerConfig
from swap_adam.torch import SwapAdamW

IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "default": {}, "fused": {"fused": True}, "for-loop": {"foreach": False},
}
PIPELINES: dict[str, dict[str, Any]] = {"packed": {}, "per tensor": {"packed_swap": False}}
STEPS, BATCH, WIDTH = 5, 8, 24

Wrap = Callable[[nn.Module], nn.Module]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        # Without a bias: that of the keys has a gradient of zero, and Adam makes steps of the
        # rounding of it.
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, data: Tensor) -> Tensor:
        query, key, value = self.query_key_value(self.norm(data)).chunk(3, -1)
        heads = [part.unflatten(-1, (3, -1)).transpose(1, 2) for part in (query, key, value)]
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        projected: Tensor = self.project(attended.transpose(1, 2).flatten(2))
        return data + projected


class Transformer(nn.Module):
    """Odd sizes, so that shards are uneven."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 37)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def new_model() -> Transformer:
    """On the CPU, the same numbers at every call."""
    torch.manual_seed(0)
    return Transformer()


def tokens(step: int) -> Tensor:
    """(BATCH, 12) on the CPU: what all ranks together see in a step."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, 37, (BATCH, 12), generator=generator)


def loss_of(model: nn.Module, data: Tensor) -> Tensor:
    logits = model(data[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten())


def whole(tensor: Tensor) -> Tensor:
    """A copy on the CPU; of a DTensor all of it, for which every rank must call."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu().clone()


def mine(tensor: Tensor) -> dict[str, Any]:
    """A rank's own part on the CPU, and how it is laid out."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    layout = (tensor.placements, tensor.device_mesh.shape) if isinstance(tensor, DTensor) else ()
    return {
        "type": type(tensor).__name__, "layout": str(layout), "shape": tuple(tensor.shape),
        "stride": tuple(tensor.stride()), "dtype": tensor.dtype,
        "local": local.detach().cpu().clone(),
    }


def train(
    rank: int, world_size: int, wrap: Wrap, make: Callable[[Iterable[Tensor]], Optimizer],
    look: bool = True,
) -> dict[str, Any]:
    """Trains this rank's part of every batch: losses, gradients, parameters and states.

    Between steps nothing waits for the device unless ``look``, which copies losses and gradients.
    """
    model = wrap(new_model().to("simulated"))
    optimizer = make(model.parameters())
    parts = [tokens(step).chunk(world_size)[rank].to("simulated") for step in range(STEPS)]
    losses, gradients = [], []
    for part in parts:
        optimizer.zero_grad()
        loss = loss_of(model, part)
        loss.backward()
        losses.append(loss.detach())
        if look:
            gradients.append([whole(p.grad) for p in model.parameters() if p.grad is not None])
        optimizer.step()
    found: dict[str, Any] = {
        "losses": torch.stack(losses).cpu(), "gradients": gradients,
        "whole": [whole(param) for param in model.parameters()],
        "parameters": [mine(param) for param in model.parameters()],
        "states": [
            {name: mine(value) for name, value in optimizer.state[param].items()}
            for param in model.parameters()
        ],
    }
    if isinstance(optimizer, SwapAdamW):
        (report,) = optimizer.swap_report().values()
        found["swapped_nbytes"] = report.swapped_nbytes
    return found


def native_and_swapped(
    rank: int, world_size: int, wrap: Wrap, look: bool = True
) -> dict[str, dict[str, Any]]:
    """By name: every implementation natively, and swapped in both pipelines."""
    results = {}
    for name, flags in IMPLEMENTATIONS.items():
        results[name] = train(
            rank, world_size, wrap,
            lambda params: AdamW(params, lr=1e-2, **flags),  # noqa: B023
            look,
        )
        for pipeline, fields in PIPELINES.items():
            config = SwapOptimizerConfig(min_numel=0, swap_times=4, **fields)
            results[f"{name}, {pipeline}"] = train(
                rank, world_size, wrap,
                lambda params: SwapAdamW(  # noqa: B023
                    params, lr=1e-2, swap_config=config, **flags),  # noqa: B023
                look,
            )
    return results


def single_process(world_size: int, flags: dict[str, bool]) -> dict[str, Any]:
    """The same training by one process on the CPU: the mean of what each part's loss gives."""
    model = new_model()
    optimizer = AdamW(model.parameters(), lr=1e-2, **flags)
    losses, gradients = [], []
    for step in range(STEPS):
        parts = []
        losses.append([])
        for part in tokens(step).chunk(world_size):
            optimizer.zero_grad()
            loss = loss_of(model, part)
            loss.backward()
            losses[-1].append(loss.detach())
            parts.append([p.grad for p in model.parameters() if p.grad is not None])
        mean = [torch.stack(grads).sum(0) / world_size for grads in zip(*parts)]
        for param, gradient in zip(model.parameters(), mean):
            param.grad = gradient
        gradients.append([gradient.clone() for gradient in mean])
        optimizer.step()
    return {
        "losses": torch.tensor(losses), "gradients": gradients,
        "whole": [param.detach().clone() for param in model.parameters()],
    }


def assert_same(native: Any, swapped: Any, where: str = "") -> None:
    """Every bit of two results of ``train()``."""
    if isinstance(native, Tensor):
        assert native.dtype == swapped.dtype and torch.equal(native, swapped), where
    elif isinstance(native, dict):
        assert native.keys() == swapped.keys() - {"swapped_nbytes"}, where
        for key, value in native.items():
            assert_same(value, swapped[key], f"{where}/{key}")
    elif isinstance(native, list):
        assert len(native) == len(swapped), where
        for index, value in enumerate(native):
            assert_same(value, swapped[index], f"{where}/{index}")
    else:
        assert native == swapped, where


def assert_trains_as_one_process(
    results: list[dict[str, dict[str, Any]]], rounded_apart: tuple[str, ...] = ()
) -> None:
    """Losses, gradients and parameters of both ranks are those of one process on the CPU.

    To the last bit: the sum of two numbers does not depend on the order, and half of it is exact.
    The implementations in ``rounded_apart`` update a shard otherwise than the whole, so that only
    what comes before the first update is compared so; what comes after to 1e-5, parameters of
    about 0.1 that have moved by 5e-2.
    """
    assert len(results) == 2
    for name, flags in IMPLEMENTATIONS.items():
        expected = single_process(2, flags)
        for rank, found in enumerate(result[name] for result in results):
            losses = expected["losses"][:, rank]
            if name not in rounded_apart:
                assert torch.equal(found["losses"], losses), (name, rank)
                assert_same(expected["gradients"], found["gradients"], f"{name}/gradients")
                assert_same(expected["whole"], found["whole"], f"{name}/parameters")
                continue
            assert torch.equal(found["losses"][0], losses[0]), (name, rank)
            assert_same(expected["gradients"][0], found["gradients"][0], f"{name}/gradients")
            close = partial(torch.testing.assert_close, rtol=0, atol=1e-5)
            close(found["losses"], losses)
            close(found["gradients"], expected["gradients"])
            close(found["whole"], expected["whole"])
