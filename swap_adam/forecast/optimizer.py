"""An optimizer that updates nothing: the core's step on described parameters."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from swap_adam.config import SwapOptimizerConfig
from swap_adam.device import DeviceSwap
from swap_adam.forecast.counting import Bytes, CountingBackend, Mark
from swap_adam.forecast.params import ParamSpec
from swap_adam.mixin import SwapPipelineMixin
from swap_adam.slot import SwapSlot, UpdateUnit

Implementation = Literal["foreach", "for-loop", "fused"]

# Kernels of one AdamW update, by how many times the parameter's bytes each reads and writes:
# decay, first moment, second moment (two), square root, bias correction, epsilon, parameter.
ADAMW_KERNELS = (2, 3, 2, 4, 2, 2, 2, 4)
AMSGRAD_KERNEL = 3
FUSED_ACCESSES = 7
AMSGRAD_FUSED_ACCESSES = 9
STEP_NBYTES = 8
# Temporaries, in the parameter's bytes: see swap_adam.torch.adam.
FOREACH_TEMPORARIES = 2
FOR_LOOP_TEMPORARIES = 4

DEVICE = "device"


class CountedAdamW(SwapPipelineMixin[Bytes, Mark]):
    """AdamW with states of the parameters' dtype, all in one group, every one with a gradient."""

    def __init__(
        self,
        params: Sequence[ParamSpec],
        config: SwapOptimizerConfig,
        backend: CountingBackend,
        amsgrad: bool,
        implementation: Implementation,
    ) -> None:
        self.init_swap(config)
        self._backend = backend
        self._amsgrad = amsgrad
        self._implementation = implementation
        self._units = self._describe(params)
        self.swap = DeviceSwap(
            backend, self.plan_options(default_packed=True), publish=lambda slot: None,
            scratch_sizes=self.scratch_sizes, can_cut=self.can_cut,
            policy=self.staging_policy(),
        )
        self._swap_devices = {DEVICE: self.swap}
        self.swap.register([unit for unit in self._units if unit.slots])

    def _describe(self, params: Sequence[ParamSpec]) -> list[UpdateUnit[Bytes]]:
        """A unit per parameter; ``resident_nbytes`` keeps the largest states, as the library."""
        config = self.swap_config
        eligible = [
            (index, name)
            for index, spec in enumerate(params)
            for name in self.state_names()
            if config.wants(name) and spec.numel >= max(config.min_numel, 1)
        ]
        room = config.resident_nbytes
        kept: set[tuple[int, str]] = set()
        for index, name in sorted(eligible, key=lambda state: -params[state[0]].nbytes):
            if params[index].nbytes <= room:
                room -= params[index].nbytes
                kept.add((index, name))
        units = [
            UpdateUnit(0, index, Bytes(spec.nbytes), Bytes(spec.nbytes), [], spec.numel)
            for index, spec in enumerate(params)
        ]
        for index, name in eligible:
            if (index, name) not in kept:
                spec = params[index]
                units[index].slots.append(SwapSlot(
                    name, (spec.numel,), (1,), spec.dtype, DEVICE, spec.numel, spec.nbytes
                ))
        return units

    def state_names(self) -> tuple[str, ...]:
        names = ("exp_avg", "exp_avg_sq")
        return (*names, "max_exp_avg_sq") if self._amsgrad else names

    def prepare_step(self) -> None:
        """There is nothing to refuse."""

    def iter_update_units(self) -> Iterable[UpdateUnit[Bytes]]:
        return self._units

    def can_cut(self, unit: UpdateUnit[Bytes]) -> bool:
        return True

    def step_batch(self, units: Sequence[UpdateUnit[Bytes]]) -> None:
        sizes = [_param_nbytes(unit) for unit in units]
        if self._implementation == "fused":
            for unit in units:
                if unit.pieces_left and not unit.start_numel:
                    self._backend.kernel(STEP_NBYTES)  # a copy of its step for every piece
            self._backend.kernel(STEP_NBYTES * len(sizes))
            accesses = AMSGRAD_FUSED_ACCESSES if self._amsgrad else FUSED_ACCESSES
            self._backend.kernel(accesses * sum(sizes))
            return
        kernels = (*ADAMW_KERNELS, AMSGRAD_KERNEL) if self._amsgrad else ADAMW_KERNELS
        for nbytes in sizes if self._implementation == "for-loop" else [sum(sizes)]:
            for accesses in kernels:
                self._backend.kernel(accesses * nbytes)

    def scratch_sizes(self, units: Sequence[UpdateUnit[Bytes]]) -> Sequence[int]:
        sizes = [_param_nbytes(unit) for unit in units]
        if self._implementation == "fused":
            return []
        if self._implementation == "foreach":
            return sizes * FOREACH_TEMPORARIES
        return [max(sizes, default=0)] * FOR_LOOP_TEMPORARIES

    def describe_param(self, param_index: int) -> str:
        return f"parameter {param_index}"


def _param_nbytes(unit: UpdateUnit[Bytes]) -> int:
    """Of the elements that the unit stands for."""
    whole = unit if unit.whole is None else unit.whole
    return unit.param.nbytes * unit.numel // max(whole.numel, 1)
