"""The optimizers that are compared, all AdamW."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from swap_adam.bench.single_stream import SingleStreamAdamW
from swap_adam.bench.workloads import Workload
from swap_adam.config import SwapOptimizerConfig
from swap_adam.torch import SwapAdamW


@dataclass(frozen=True)
class Flags:
    """What an implementation of torch.optim.AdamW is asked for with."""

    foreach: bool | None
    fused: bool | None


MODES: Mapping[str, Flags] = {
    "fused": Flags(foreach=None, fused=True),
    "foreach": Flags(foreach=None, fused=None),  # what it takes on an accelerator by itself
    "for-loop": Flags(foreach=False, fused=None),
}


@dataclass(frozen=True)
class Contender:
    """``make(params, workload)`` is the optimizer; ``prefetches`` calls its ``prefetch()``
    before backward, and ``needs_backward`` wants gradients that backward has made."""

    name: str
    mode: str
    make: Callable[[Sequence[Tensor], Workload], Optimizer] = field(compare=False, repr=False)
    prefetches: bool = False
    needs_backward: bool = False

    @property
    def is_native(self) -> bool:
        return self.name == "native"


def native(mode: str) -> Contender:
    flags = MODES[mode]
    return Contender(
        "native", mode,
        lambda params, _: AdamW(params, foreach=flags.foreach, fused=flags.fused),
    )


def swapped(
    name: str,
    config: Callable[[Workload], SwapOptimizerConfig],
    mode: str = "fused",
    optimizer_class: type[SwapAdamW] = SwapAdamW,
    prefetches: bool = False,
) -> Contender:
    """One of ours; the configuration may depend on the workload."""
    flags = MODES[mode]
    return Contender(
        name, mode,
        lambda params, workload: optimizer_class(
            params, foreach=flags.foreach, fused=flags.fused, swap_config=config(workload)
        ),
        prefetches,
    )


def packed(swap_times: int, mode: str = "fused") -> Contender:
    config = SwapOptimizerConfig(swap_times=swap_times)
    return swapped(f"packed {swap_times}", lambda _: config, mode)


def per_tensor(swap_times: int) -> Contender:
    config = SwapOptimizerConfig(swap_times=swap_times, packed_swap=False)
    return swapped(f"per tensor {swap_times}", lambda _: config)


def single_stream(swap_times: int = 16) -> Contender:
    config = SwapOptimizerConfig(swap_times=swap_times, drain_in_step=True)
    return swapped(
        f"one copy stream {swap_times}", lambda _: config, optimizer_class=SingleStreamAdamW
    )


def automatic(budget_nbytes: int | None = None) -> Contender:
    config = SwapOptimizerConfig(swap_times="auto", staging_nbytes=budget_nbytes)
    name = "packed auto" if budget_nbytes is None else f"packed auto {budget_nbytes >> 20} MiB"
    return swapped(name, lambda _: config)


def _half_resident(workload: Workload) -> SwapOptimizerConfig:
    nbytes = workload.states_nbytes(SwapOptimizerConfig().min_numel, stepped_only=False) // 2
    return SwapOptimizerConfig(resident_nbytes=nbytes)


def _options() -> list[Contender]:
    return [
        swapped("packed 16, half resident", _half_resident),
        swapped("packed 16, prefetch", lambda _: SwapOptimizerConfig(), prefetches=True),
        swapped("packed 16, kept staging", lambda _: SwapOptimizerConfig(keep_staging=True)),
        swapped("packed 16, drained", lambda _: SwapOptimizerConfig(drain_in_step=True)),
    ]


def torchao_offload() -> list[Contender]:
    """CPUOffloadOptimizer where it is installed and takes the device."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.type not in ("cuda", "xpu") or find_spec("torchao") is None:
        return []
    offload = import_module("torchao.optim").CPUOffloadOptimizer
    return [Contender(
        "torchao CPUOffload", "fused", lambda params, _: offload(params, AdamW),
        needs_backward=True,
    )]


NATIVE_FUSED = native("fused")
PACKED = packed(16)
SINGLE_STREAM = single_stream()

# Measured with every workload on every link.
MAIN = (NATIVE_FUSED, PACKED, SINGLE_STREAM)


def all_contenders() -> list[Contender]:
    """Every contender that this machine can run."""
    return [
        NATIVE_FUSED, native("foreach"), native("for-loop"),
        *(packed(times) for times in (4, 8, 16, 64)),
        automatic(), automatic(8 << 20),
        packed(16, "foreach"), packed(16, "for-loop"),
        *(per_tensor(times) for times in (4, 8, 16, 64)),
        SINGLE_STREAM,
        *_options(),
        *torchao_offload(),
    ]
