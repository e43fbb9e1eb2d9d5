"""One state that is swapped, and one parameter's update; only here does a residency change."""
from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

TensorT = TypeVar("TensorT")


class Residency(Enum):
    """Where the valid bytes of a state are."""

    PENDING = "pending"  # registered, has no bytes yet
    HOST = "host"  # at rest in pinned memory
    H2D = "h2d"  # its copy-in is issued
    DEVICE = "device"  # in a staging area, being updated
    D2H = "d2h"  # its copy-out is issued; read the host bytes only after `event`


# After a fault an update or a copy may be issued again, and what has not come back rests where it
# was. Memory that is kept is filled again without a rest.
_NEXT: dict[Residency, frozenset[Residency]] = {
    Residency.PENDING: frozenset({Residency.HOST}),
    Residency.HOST: frozenset({Residency.HOST, Residency.H2D, Residency.PENDING}),
    Residency.H2D: frozenset({Residency.H2D, Residency.DEVICE, Residency.HOST}),
    Residency.DEVICE: frozenset({Residency.DEVICE, Residency.D2H, Residency.HOST}),
    Residency.D2H: frozenset({Residency.D2H, Residency.H2D, Residency.HOST}),
}


@dataclass(eq=False)
class Transit:
    """Where the slots of a batch are on their way; they share one, so that a step is cheap.

    ``event`` is what a reader of the bytes waits for.
    """

    residency: Residency = Residency.PENDING
    event: object | None = None

    def move(self, residency: Residency, event: object | None = None) -> None:
        """Move all slots of the batch to ``residency``."""
        assert residency in _NEXT[self.residency], f"{self.residency} cannot become {residency}"
        self.residency = residency
        self.event = event


@dataclass(eq=False)
class SwapSlot(Generic[TensorT]):
    """One logical optimizer state that is swapped.

    ``cpu_tensor`` holds the bytes at rest: local shape, the strides of the parameter, a storage
    of exactly its own size inside a host slab. ``logical_tensor`` is what the optimizer shows:
    ``cpu_tensor`` itself, or a distributed tensor around it. The device tensors of a running
    step are views that belong to its update units, since a cut state has several.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Hashable
    device: Hashable
    numel: int
    storage_nbytes: int
    cpu_tensor: TensorT | None = None
    logical_tensor: TensorT | None = None
    transit: Transit = field(default_factory=Transit)
    slab_index: int = -1
    host_offset_numel: int = 0

    @property
    def residency(self) -> Residency:
        return self.transit.residency

    @property
    def event(self) -> object | None:
        return self.transit.event

    @property
    def itemsize(self) -> int:
        return self.storage_nbytes // self.numel

    @property
    def host_offset_nbytes(self) -> int:
        return self.host_offset_numel * self.itemsize


@dataclass(eq=False)
class UpdateUnit(Generic[TensorT]):
    """The update of one parameter, or of ``numel`` elements of it from ``start_numel`` on.

    ``slots`` are the swapped states only, and ``states`` their tensors on the device, by name,
    valid while the unit's batch is there; the views of a unit that is cut belong to its pieces.
    ``can_cut`` says whether elements ``[a, b)`` in storage order are the same elements in the
    parameter, its gradient and every state. ``repeats`` counts how often the parameter stands in
    its group (a duplicate is updated that often, as the original does). A piece names the unit
    that it was cut from as ``whole``, which has ``piece_count`` of them, ``pieces_left`` still to
    come after it. ``device`` is the key of :attr:`swap_adam.swap.Swap.devices`, of units without
    slots too.
    """

    group_index: int
    param_index: int
    param: TensorT
    grad: TensorT
    slots: list[SwapSlot[TensorT]]
    numel: int
    start_numel: int = 0
    can_cut: bool = False
    pieces_left: int = 0
    piece_count: int = 1
    repeats: int = 1
    states: dict[str, TensorT] = field(default_factory=dict)
    whole: UpdateUnit[TensorT] | None = None
    device: Hashable = None
