"""The schedule of the RFC, to compare with: one copy stream, whole tensors, two staging areas."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swap_adam.backend import StreamRole
from swap_adam.device import DeviceSwap
from swap_adam.mixin import weakly
from swap_adam.partition import Partition
from swap_adam.plan import PlanBuilder, PlanOptions, partition_units
from swap_adam.slot import UpdateUnit
from swap_adam.torch import SwapAdamW
from swap_adam.torch.backend import TorchBackend


class WholeTensorsBuilder(PlanBuilder[Tensor, torch.Event]):
    """At most ``swap_times`` batches' worth of whole tensors, two batches on the device."""

    def partition(self, registered: Sequence[UpdateUnit[Tensor]]) -> Partition:
        options = PlanOptions(self._options.swap_times, packed=False, split_tensors=False)
        return partition_units(registered, options)


class SingleStreamAdamW(SwapAdamW):
    """Both directions of the link are issued on one stream, so that they never work at once.

    To be used with ``drain_in_step``, since the RFC's step waits for its last copy.
    """

    def _device(self, device: torch.device) -> DeviceSwap[Tensor, torch.Event]:
        is_new = device not in self._swap_devices
        swap = super()._device(device)
        if is_new:
            backend = swap.backend
            assert isinstance(backend, TorchBackend)
            backend._streams[StreamRole.COPY_OUT] = backend._streams[StreamRole.COPY_IN]
            swap._builder = WholeTensorsBuilder(
                backend, swap.store, self.plan_options(default_packed=True),
                weakly(self.scratch_sizes), weakly(self.can_cut),
            )
        return swap
