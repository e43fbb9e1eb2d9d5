"""The models that are stepped, as shapes: what a step costs does not depend on the values."""
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Workload:
    """Parameters of one dtype, each ``missing_every``-th of which (0: none) has no gradient."""

    name: str
    description: str
    shapes: Shapes
    dtype: torch.dtype = torch.float32
    missing_every: int = 0

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def has_grad(self, index: int) -> bool:
        return not self.missing_every or (index + 1) % self.missing_every > 0

    def states_nbytes(self, min_numel: int, stepped_only: bool) -> int:
        """Bytes of the two moments of all tensors that are large enough to be swapped.

        With ``stepped_only`` of those that have a gradient, which are all that a step must move
        in either direction.
        """
        sizes = [
            math.prod(shape) for index, shape in enumerate(self.shapes)
            if self.has_grad(index) or not stepped_only
        ]
        return sum(2 * self.dtype.itemsize * numel for numel in sizes if numel >= min_numel)

    def make_params(self, device: torch.device) -> list[Tensor]:
        """Parameters with their gradients."""
        params = [
            torch.zeros(shape, dtype=self.dtype, device=device).requires_grad_()
            for shape in self.shapes
        ]
        for index, param in enumerate(params):
            if self.has_grad(index):
                param.grad = torch.zeros_like(param)
        return params


def _gpt() -> Shapes:
    width, layers, vocabulary, context = 768, 12, 50257, 1024
    norm = ((width,), (width,))
    block = (
        *norm, (3 * width, width), (3 * width,), (width, width), (width,),
        *norm, (4 * width, width), (4 * width,), (width, 4 * width), (width,),
    )
    return ((vocabulary, width), (context, width), *(block * layers), *norm)


def _giant(rows: int, others: int) -> Shapes:
    """One tensor that is 90 % of the model, and ``others`` that share the rest."""
    width = 1024
    return ((rows, width), *(((rows // 9 // others), width),) * others)


RFC = Workload(
    "rfc", "the RFC's: 816 tensors, 768 of them (32, 1024)",
    (*((32, 1024),) * 32, (1024,), (2048,)) * 24,
)
GPT = Workload("gpt", "a GPT, embedding tied", _gpt())
GIANT = Workload("giant", "one tensor is 90 % of the model", _giant(108_900, 100))
SMALL_GIANT = Workload(
    "small-giant", "the same, 50 times smaller: latencies show", _giant(2_178, 10)
)
BF16 = Workload("gpt-bf16", "the GPT in bfloat16, moments too", _gpt(), dtype=torch.bfloat16)
HALF = Workload(
    "rfc-half", "the RFC's, every second tensor without a gradient", RFC.shapes, missing_every=2
)

WORKLOADS = {
    workload.name: workload for workload in (RFC, GPT, GIANT, SMALL_GIANT, BF16, HALF)
}
