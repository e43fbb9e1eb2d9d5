"""A GPT over bytes: pre-norm transformer blocks with causal attention."""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

BYTE_VALUES = 256


@dataclass(frozen=True)
class ModelSize:
    """``width`` is a multiple of ``heads``; ``length`` is the longest sequence, in bytes."""

    layers: int = 6
    width: int = 384
    heads: int = 6
    length: int = 128

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of {self.heads}, got {self.width}")


class Attention(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.query_key_value = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape  # x: (batch, length, width)
        split = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, head width)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return y


class Block(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.feed_forward_norm = nn.LayerNorm(size.width)
        self.feed_forward = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        y: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return y


class GPT(nn.Module):
    """Predicts the next byte. Parameters are drawn from torch's default generator, on the CPU."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(BYTE_VALUES, size.width)
        self.position_embedding = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, BYTE_VALUES, bias=False)
        self.apply(_initialize)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy in nats per byte; both arguments int64, (batch, length)."""
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.byte_embedding(inputs) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.view(-1, BYTE_VALUES), targets.view(-1))


def _initialize(module: nn.Module) -> None:
    # As GPT-2 does: the default of nn.Embedding is fifty times larger.
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
