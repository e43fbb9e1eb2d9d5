"""The transfers and views of one device's step, kept while the step looks the same."""
from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from swap_adam.backend import Backend
from swap_adam.host_store import HostStore
from swap_adam.schedule.partition import Partition
from swap_adam.schedule.staging import Run
from swap_adam.slot import Residency, Transit, UpdateUnit

TensorT = TypeVar("TensorT")
EventT = TypeVar("EventT")


@dataclass(eq=False)
class Transfer(Generic[TensorT]):
    """Byte views of the same run of bytes, on the device and on the host."""

    device: TensorT
    host: TensorT


@dataclass(eq=False)
class Batch(Generic[TensorT, EventT]):
    """What is on the device at the same time: units, where they lie, and their transfers.

    In a staging area it lies on bytes that batch ``reuses`` (-1: none) and those before it had.
    Without one, every state has one of ``buffers``, given with its bytes.
    """

    units: list[UpdateUnit[TensorT]]
    transfers: list[Transfer[TensorT]]
    buffers: list[tuple[TensorT, int]]
    nbytes: int
    reuses: int
    transit: Transit
    copied_in: EventT
    updated: EventT
    copied_out: EventT


@dataclass(frozen=True)
class Layout(Generic[TensorT, EventT]):
    """Batches with their place on the device, and the most bytes that they hold there at a time,
    alignment included. ``staging`` is the area that they share, if they share one."""

    batches: list[Batch[TensorT, EventT]]
    staging: TensorT | None
    nbytes: int


@dataclass(eq=False)
class StepPlan(Generic[TensorT, EventT]):
    """The batches that have something to update, in order.

    ``scratch_nbytes`` bounds the temporaries of the largest batch's update. If each of
    ``reserves``, a list of blocks, can be had, nothing that the step takes while it updates is
    missing. ``large`` are the
    active units that are no batch of their own unless they are cut, and whether they are.
    """

    partition: Partition
    layout: Layout[TensorT, EventT]
    scratch_nbytes: int
    reserves: tuple[tuple[int, ...], ...]
    active: list[UpdateUnit[TensorT]]
    large: list[tuple[UpdateUnit[TensorT], bool]]
    host_version: int
    memory_key: Hashable  # of the update

    @property
    def batches(self) -> list[Batch[TensorT, EventT]]:
        return self.layout.batches

    @property
    def staging(self) -> TensorT | None:
        return self.layout.staging

    @property
    def staging_nbytes(self) -> int:
        """What the step holds on the device at most, temporaries excluded."""
        return self.layout.nbytes


def make_batch(
    backend: Backend[TensorT, EventT],
    units: list[UpdateUnit[TensorT]],
    transfers: list[Transfer[TensorT]],
    nbytes: int,
    *,
    buffers: Sequence[tuple[TensorT, int]] = (),
    reuses: int = -1,
) -> Batch[TensorT, EventT]:
    """A batch with its events; its slots are on their way together from now on."""
    transit = Transit(Residency.HOST)
    for unit in units:
        for slot in unit.slots:
            slot.transit = transit
    return Batch(
        units, transfers, list(buffers), nbytes, reuses, transit,
        backend.make_event(), backend.make_event(), backend.make_event(),
    )


def make_transfer(
    backend: Backend[TensorT, EventT],
    store: HostStore[TensorT, EventT],
    buffer: TensorT,
    start_nbytes: int,
    run: Run,
) -> Transfer[TensorT]:
    """The transfer of ``run``, whose offsets on the device count from ``start_nbytes``."""
    return Transfer(
        backend.byte_view(buffer, start_nbytes + run.device_offset_nbytes, run.nbytes),
        backend.byte_view(store.slab(run.slab_index), run.host_offset_nbytes, run.nbytes),
    )
