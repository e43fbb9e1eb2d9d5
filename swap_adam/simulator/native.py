"""The calls into the built library. Imports torch only when called."""

from __future__ import annotations

from collections.abc import Callable

_loaded = False


def load(path: str, device_count: int) -> None:
    global _loaded
    import torch

    if not _loaded:
        torch.ops.load_library(path)
        _loaded = True
    torch.ops.swap_adam_simulator.start(device_count)


def loaded() -> bool:
    return _loaded


def call(name: str) -> Callable[..., object]:
    """The library's function of that name; RuntimeError before ``enable()``."""
    if not _loaded:
        raise RuntimeError("call swap_adam.simulator.enable() first")
    import torch

    function: Callable[..., object] = getattr(torch.ops.swap_adam_simulator, name)
    return function


def integers(name: str, *arguments: object) -> list[int]:
    result = call(name)(*arguments)
    assert isinstance(result, list)
    return result


def floats(name: str, *arguments: object) -> list[float]:
    result = call(name)(*arguments)
    assert isinstance(result, list)
    return result


def text(name: str, *arguments: object) -> str:
    result = call(name)(*arguments)
    assert isinstance(result, str)
    return result


def number(name: str, *arguments: object) -> float:
    result = call(name)(*arguments)
    assert isinstance(result, (int, float))
    return float(result)
