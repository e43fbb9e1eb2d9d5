"""The parameters of a model, described without a framework."""
from __future__ import annotations

import math
import re
from dataclasses import dataclass

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_TEXT = re.compile(r"(?:(\d+)\*)?(\d+(?:x\d+)*)(?::(\w+))?")


@dataclass(frozen=True)
class ParamSpec:
    """One parameter. ``dtype`` is torch's name without its prefix.

    Raises:
        ValueError: a dtype that Adam's moments cannot have here, or a negative size.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"dtype must be one of {', '.join(ITEMSIZE)}, got {self.dtype!r}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"shape must not have negative sizes, got {self.shape!r}")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


def parse_params(text: str) -> list[ParamSpec]:
    """``[COUNT*]SHAPE[:DTYPE]``, such as ``4096``, ``11008x4096`` or ``32*4096x4096:bfloat16``.

    Raises:
        ValueError: anything else.
    """
    found = _TEXT.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"a parameter is [COUNT*]SHAPE[:DTYPE], such as 32*4096x4096:bfloat16; got {text!r}"
        )
    count, shape, dtype = found.groups()
    spec = ParamSpec(tuple(map(int, shape.split("x"))), dtype or "float32")
    return [spec] * int(count or 1)


def equal_params(numel: int, count: int, dtype: str) -> list[ParamSpec]:
    """``count`` parameters of about the same size, ``numel`` elements in all.

    Raises:
        ValueError: fewer elements than parameters.
    """
    if not 0 < count <= numel:
        raise ValueError(f"{numel} elements cannot be spread over {count} parameters")
    small, larger = divmod(numel, count)
    return [ParamSpec((small + (index < larger),), dtype) for index in range(count)]
