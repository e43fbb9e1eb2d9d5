"""Real text that every machine has: the sources of Python's own standard library."""
from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor


def standard_library(max_nbytes: int) -> Tensor:
    """The first ``max_nbytes`` bytes of the sources, files in the order of their names.

    Returns a uint8 tensor on the CPU.

    Raises:
        FileNotFoundError: this Python has no sources of its standard library on disk.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for file in sorted(folder.glob("*.py")):
        text += file.read_bytes()
        if len(text) >= max_nbytes:
            break
    if not text:
        raise FileNotFoundError(f"no sources of the standard library in {folder}")
    return torch.frombuffer(text[:max_nbytes], dtype=torch.uint8)


def batches(
    text: Tensor, batch_size: int, length: int, count: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """``count`` batches of bytes and, for each byte, the one that follows it.

    Both are int64 of shape (batch_size, length), on the CPU; the same for the same seed.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(len(text) - length, (batch_size, 1), generator=generator)
        window = text[starts + torch.arange(length + 1)].long()
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()
