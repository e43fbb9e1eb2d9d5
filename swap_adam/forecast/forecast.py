"""From described parameters and a configuration to bytes and times."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swap_adam.backend import StreamRole
from swap_adam.config import Configuration, as_config
from swap_adam.forecast.counting import CountingBackend
from swap_adam.forecast.optimizer import CountedAdamW, Implementation
from swap_adam.forecast.params import ParamSpec
from swap_adam.simulator.costs import LINKS, Costs


@dataclass(frozen=True)
class LinkTime:
    """Seconds from the call of ``step()``.

    ``step_s`` is when the compute stream goes on, ``landed_s`` when the last copy is in host
    memory. ``limit_s`` is what the link alone needs: the copy time of the slower direction, of
    both together where it is half duplex.
    """

    step_s: float
    landed_s: float
    limit_s: float


@dataclass(frozen=True)
class Forecast:
    """Bytes of one device.

    ``state_nbytes`` are all moments, ``swapped_nbytes`` those that rest on the host. A step
    holds ``staging_nbytes`` on the device, and up to ``scratch_nbytes`` of temporaries.
    ``transfer_count`` is per step, both directions together.
    """

    param_count: int
    param_nbytes: int
    state_nbytes: int
    swapped_nbytes: int
    pinned_nbytes: int
    batch_count: int
    largest_batch_nbytes: int
    staging_nbytes: int
    scratch_nbytes: int
    transfer_count: int
    times: Mapping[str, LinkTime]

    @property
    def resident_nbytes(self) -> int:
        """Moments that stay on the device."""
        return self.state_nbytes - self.swapped_nbytes


def forecast(
    params: Sequence[ParamSpec],
    config: Configuration | None = None,
    *,
    amsgrad: bool = False,
    implementation: Implementation = "foreach",
    links: Mapping[str, Costs] = LINKS,
) -> Forecast:
    """What ``SwapAdamW`` will need for ``params`` in one group, all of them with a gradient.

    Raises:
        ValueError: no parameters, no links, or a configuration that does not fit.
    """
    config = as_config(config)
    if not params:
        raise ValueError("params must not be empty")
    if not links:
        raise ValueError("links must not be empty")
    if config.include_master_params:
        raise ValueError("include_master_params=True: AdamW has no masters of its own")
    if config.state_keys and "max_exp_avg_sq" in config.state_keys and not amsgrad:
        raise ValueError(f"state_keys={config.state_keys!r} needs amsgrad=True")
    times: dict[str, LinkTime] = {}
    for link, costs in links.items():
        backend = CountingBackend(costs)
        optimizer = CountedAdamW(params, config, backend, amsgrad, implementation)
        times[link] = _time_step(optimizer, backend)
    plan, store = optimizer.device.plan, optimizer.device.store
    batches = [] if plan is None else plan.batches
    param_nbytes = sum(spec.nbytes for spec in params)
    return Forecast(
        param_count=len(params),
        param_nbytes=param_nbytes,
        state_nbytes=param_nbytes * len(optimizer.state_names),
        swapped_nbytes=store.swapped_nbytes,
        pinned_nbytes=store.pinned_nbytes,
        batch_count=len(batches),
        largest_batch_nbytes=max((batch.nbytes for batch in batches), default=0),
        staging_nbytes=0 if plan is None else plan.staging_nbytes,
        scratch_nbytes=optimizer.device.scratch_nbytes,
        transfer_count=backend.transfer_count,
        times=times,
    )


def _time_step(optimizer: CountedAdamW, backend: CountingBackend) -> LinkTime:
    clock, costs = backend.clock, backend.costs
    began_s = clock.host_s
    optimizer.step()
    step_s = clock.time_of(clock.mark(StreamRole.COMPUTE)) - began_s
    landed_s = clock.time_of(clock.mark(StreamRole.COPY_OUT)) - began_s
    nbytes = optimizer.device.store.swapped_nbytes
    seconds = [nbytes / (gb * 1e9) for gb in (costs.copy_in_gb_per_s, costs.copy_out_gb_per_s)]
    limit_s = max(seconds) if costs.duplex else sum(seconds)
    return LinkTime(step_s, max(step_s, landed_s), limit_s)
