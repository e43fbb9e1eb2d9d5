"""An optimizer that updates nothing: the core's step on described parameters."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Literal

from swap_adam.alignment import DEVICE_ALIGNMENT_NBYTES, align
from swap_adam.config import SwapOptimizerConfig
from swap_adam.device import DeviceSwap
from swap_adam.forecast.counting import Bytes, CountingBackend, Mark
from swap_adam.forecast.params import ParamSpec
from swap_adam.mixin import SwapPipelineMixin
from swap_adam.resident import choose_resident
from swap_adam.slot import SwapSlot, UpdateUnit
from swap_adam.swap import Swap
from swap_adam.temporaries import (
    Temporaries,
    for_loop_moments,
    foreach_moments,
    split_at,
    temporaries,
)
from swap_adam.update import Update

Implementation = Literal["foreach", "for-loop", "fused"]

# Kernels of one AdamW update, by how many times the parameter's bytes each reads and writes:
# decay, first moment, second moment (two), square root, bias correction, epsilon, parameter.
ADAMW_KERNELS = (2, 3, 2, 4, 2, 2, 2, 4)
AMSGRAD_KERNEL = 3
FUSED_ACCESSES = 7
AMSGRAD_FUSED_ACCESSES = 9
STEP_NBYTES = 8  # read and written
STEP_ITEMSIZE = 4

DEVICE = "device"


class CountedUpdate:
    """See :class:`swap_adam.update.Update`. Counts the kernels of torch's functional."""

    memory_key = None

    def __init__(
        self, backend: CountingBackend, amsgrad: bool, implementation: Implementation
    ) -> None:
        self._backend = backend
        self._amsgrad = amsgrad
        self._implementation = implementation

    @property
    def state_names(self) -> tuple[str, ...]:
        names = ("exp_avg", "exp_avg_sq")
        return (*names, "max_exp_avg_sq") if self._amsgrad else names

    def can_cut(self, unit: UpdateUnit[Bytes]) -> bool:
        return True

    def split_resident(
        self, units: Sequence[UpdateUnit[Bytes]], limit_nbytes: int | None
    ) -> Sequence[Sequence[UpdateUnit[Bytes]]]:
        if limit_nbytes is None or self._implementation != "foreach":
            return [units] if units else []
        sizes = [_temporaries_of(unit).foreach_nbytes for unit in units]
        ends = list(accumulate(split_at(sizes, max(limit_nbytes, *sizes, 0))))
        return [units[start:end] for start, end in zip([0, *ends], ends)]

    advances = False

    def begin(self) -> None:
        """Nothing is advanced."""

    def has_written(self) -> bool:
        return True

    def run(self, units: Sequence[UpdateUnit[Bytes]]) -> None:
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

    def scratch(self, units: Sequence[UpdateUnit[Bytes]]) -> Sequence[Sequence[int]]:
        if self._implementation == "fused":
            return [[
                align((unit.piece_count - 1) * STEP_ITEMSIZE, DEVICE_ALIGNMENT_NBYTES)
                for unit in units if unit.pieces_left
            ]]
        tensors = [_temporaries_of(unit) for unit in units]
        if self._implementation == "foreach":
            return foreach_moments([tensors])
        return for_loop_moments(tensors)


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
        schedule = self.schedule_type(config)
        self._swap = Swap(config, schedule, self.recovery, check_held=False)
        self._update = CountedUpdate(backend, amsgrad, implementation)
        self._units = self._describe(params)
        self.device = DeviceSwap(
            backend, schedule, self._swap.plan_options, publish=lambda slot: None,
            policy=self._swap.staging_policy,
        )
        swapped = [unit for unit in self._units if unit.slots]
        if swapped:
            self._swap.devices[DEVICE] = self.device
            self.device.register(swapped)

    @property
    def state_names(self) -> tuple[str, ...]:
        """The moments of every parameter."""
        return self._update.state_names

    def step(self) -> None:
        """Issue one step; see the backend's clock."""
        self._swap.run_step(self)

    def _describe(self, params: Sequence[ParamSpec]) -> list[UpdateUnit[Bytes]]:
        """A unit per parameter; ``resident_nbytes`` keeps the largest states, as the library."""
        config = self.swap_config
        eligible = [
            (index, name)
            for index, spec in enumerate(params)
            for name in self._update.state_names
            if config.wants(name) and spec.numel >= max(config.min_numel, 1)
        ]
        sizes = [params[index].nbytes for index, _ in eligible]
        kept = {eligible[chosen] for chosen in choose_resident(sizes, config.resident_nbytes)}
        units = [
            UpdateUnit(
                0, index, Bytes(spec.nbytes), Bytes(spec.nbytes), [], spec.numel, device=DEVICE
            )
            for index, spec in enumerate(params)
        ]
        for index, name in eligible:
            if (index, name) not in kept:
                spec = params[index]
                units[index].slots.append(SwapSlot(
                    name, (spec.numel,), (1,), spec.dtype, DEVICE, spec.numel, spec.nbytes
                ))
        return units

    def prepare_step(self) -> Update[Bytes]:
        return self._update

    def iter_update_units(self, update: Update[Bytes]) -> Iterable[UpdateUnit[Bytes]]:
        return self._units

    def describe_param(self, param_index: int) -> str:
        return f"parameter {param_index}"


def _param_nbytes(unit: UpdateUnit[Bytes]) -> int:
    """Of the elements that the unit stands for."""
    whole = unit if unit.whole is None else unit.whole
    return unit.param.nbytes * unit.numel // max(whole.numel, 1)


def _temporaries_of(unit: UpdateUnit[Bytes]) -> Temporaries:
    """A root of as many bytes as the parameter has, which its states have too."""
    return temporaries(_param_nbytes(unit), root_itemsize=1)
