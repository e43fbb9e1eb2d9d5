"""Which parameters are swapped: their states become slots, are kept resident, or are let go."""
from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from swap_adam.config import STATE_KEYS
from swap_adam.device import DeviceReport, DeviceSwap
from swap_adam.mixin import SwapPipelineMixin, weakly
from swap_adam.slot import Residency, SwapSlot
from swap_adam.torch.backend import TorchBackend
from swap_adam.torch.resident import Candidate, ResidentStates
from swap_adam.torch.state import (
    ParamState,
    TorchSlot,
    TorchUnit,
    is_left_behind,
    local,
    make_slot,
    may_adopt,
    may_swap,
    moved_to,
    shown_as,
)

ParamGroup = dict[str, Any]


class Registration(SwapPipelineMixin[Tensor, torch.Event]):
    """Keeps the registered units in step with the optimizer's groups and states.

    Copies here block the host: they are done when a method returns.
    """

    param_groups: list[ParamGroup]
    _swap_units: dict[Tensor, TorchUnit]
    _swap_resident: ResidentStates

    # What is in the state of every parameter, without amsgrad and with it.
    _names: tuple[frozenset[str], frozenset[str]]

    def state_names(self, group: ParamGroup) -> frozenset[str]:
        """The states that every parameter of ``group`` has, swapped or not."""
        return self._names[bool(group["amsgrad"])]

    def init_param_state(self, group: ParamGroup, param: Tensor) -> ParamState:
        """What the original puts into a new state before the moments (``step``, or nothing)."""
        raise NotImplementedError

    def adopt_all(self) -> None:
        """Register every parameter that has a state, whether or not it has a gradient.

        Raises:
            MemoryError: not enough pinned memory; nothing has changed.
        """
        states = self.__dict__["state"]
        units = []
        param_index = -1
        for group_index, group in enumerate(self.param_groups):
            for param in dict.fromkeys(group["params"]):
                param_index += 1
                if states.get(param):
                    units.append(TorchUnit(
                        group_index, param_index, param, param, [], 0,
                        owner=param, param_state=states[param], device=param.device,
                    ))
        self._adopt(units)

    def bring_back(self) -> None:
        """Put every swapped state back on its parameter's device, laid out as it was.

        Raises:
            torch.OutOfMemoryError: they do not fit; nothing has changed.
        """
        self.check_not_torn("unswap_optimizer()")
        self.wait_landed()
        made: dict[tuple[int, str], tuple[ParamState, Tensor]] = {}
        for unit in self._swap_units.values():
            for slot in unit.slots:
                if unit.param_state.get(slot.name) is slot.logical_tensor:
                    assert slot.cpu_tensor is not None
                    value = torch.empty_strided(
                        slot.cpu_tensor.shape, slot.cpu_tensor.stride(),
                        dtype=slot.cpu_tensor.dtype, device=unit.device,
                    ).copy_(slot.cpu_tensor)
                    shown = unit.param_state, shown_as(unit.owner, value)
                    made[id(unit.param_state), slot.name] = shown
        for param, param_state in self.__dict__["state"].items():
            for name in STATE_KEYS:
                # What the user has made of a state that was on the host.
                if (id(param_state), name) not in made and is_left_behind(param, param_state, name):
                    shown = param_state, moved_to(local(param).device, param_state[name])
                    made[id(param_state), name] = shown
        for (_, name), (param_state, value) in made.items():
            param_state[name] = value

    def _adopt(self, units: Sequence[TorchUnit]) -> None:
        """Register ``units``: make the states that are missing, move out those that are there.

        A state on the host that cannot be swapped, cut out of one that was, goes to the device.

        Raises:
            MemoryError: not enough pinned memory; nothing has changed.
        """
        values: list[tuple[SwapSlot[Tensor], ParamState, Tensor]] = []
        made: list[ParamState] = []
        left_behind: list[tuple[TorchUnit, str, Tensor]] = []
        self._choose_resident(units)
        try:
            for unit in units:
                if not unit.param_state:
                    made.append(unit.param_state)
                    self._make_state(unit)
                    continue
                values.extend(self._take_state(unit))
                swapped = {slot.name for slot in unit.slots}
                left_behind.extend(
                    (unit, name, unit.param_state[name]) for name in STATE_KEYS
                    if name not in swapped and is_left_behind(unit.owner, unit.param_state, name)
                )
            if left_behind:
                self.wait_landed()
            for unit, name, value in left_behind:
                unit.param_state[name] = moved_to(unit.device, value)
            self._register(units)
            for slot, _, value in values:
                assert slot.cpu_tensor is not None
                slot.cpu_tensor.copy_(local(value))
        except BaseException:
            for param_state in made:
                param_state.clear()
            for slot, param_state, value in values:
                param_state[slot.name] = value
            for unit, name, value in left_behind:
                unit.param_state[name] = value
            raise

    def _choose_resident(self, units: Sequence[TorchUnit]) -> None:
        """Decide which states of ``units`` stay on the device, or are made there."""
        candidates = []
        for unit in units:
            param, param_state = unit.owner, unit.param_state
            previous = self._swap_units.get(param)
            if previous is not None and previous.device != unit.device:
                self.resident.forget(param, previous.device)
            names = self.state_names(self.param_groups[unit.group_index])
            for name in filter(names.__contains__, STATE_KEYS):
                # A state that is still to be made is like the parameter.
                value = param_state.get(name) if param_state else param
                if (
                    isinstance(value, Tensor)
                    and value.device == param.device
                    and may_adopt(param, name, value, self.swap_config)
                ):
                    part = local(value)
                    candidates.append(Candidate(param, name, part.numel() * part.element_size()))
        self.resident.choose(candidates)

    def _make_state(self, unit: TorchUnit) -> None:
        """A new state as the original makes it; its swapped moments get zeros on the host only."""
        param, param_state = unit.owner, unit.param_state
        group = self.param_groups[unit.group_index]
        param_state.update(self.init_param_state(group, param))
        for name in STATE_KEYS:
            if name not in self.state_names(group):
                continue
            if may_swap(param, name, self.swap_config) and not self.resident.keeps(param, name):
                slot = make_slot(param, name, param, param_state)
                unit.slots.append(slot)
                param_state[name] = None  # keeps the original's order of keys
            else:
                param_state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)

    def _take_state(
        self, unit: TorchUnit
    ) -> list[tuple[SwapSlot[Tensor], ParamState, Tensor]]:
        """An existing state: slots that still fit are kept, other eligible values get a new one.

        Returns the values to copy, with their slots and where they are shown now.
        """
        values: list[tuple[SwapSlot[Tensor], ParamState, Tensor]] = []
        param, param_state = unit.owner, unit.param_state
        previous = self._swap_units.get(param)
        kept = (
            {slot.name: slot for slot in previous.torch_slots()} if previous is not None else {}
        )
        for name in STATE_KEYS:
            value = param_state.get(name)
            slot = kept.get(name)
            if (
                slot is not None
                and slot.logical_tensor is value
                and not slot.is_rebound()
                and slot.device == local(param).device
                and slot.shape == local(param).shape
                and previous is not None
                and previous.param_state is param_state
            ):
                unit.slots.append(slot)
            elif (
                isinstance(value, Tensor)
                and may_adopt(param, name, value, self.swap_config)
                and not (self.resident.keeps(param, name) and value.device == param.device)
            ):
                slot = make_slot(param, name, value, param_state)
                unit.slots.append(slot)
                values.append((slot, param_state, value))
        return values

    def _register(self, units: Sequence[TorchUnit]) -> None:
        gone = [self._swap_units[unit.owner] for unit in units if unit.owner in self._swap_units]
        devices = {unit.device for unit in [*units, *gone] if unit.slots}
        slots = [slot for unit in units for slot in unit.slots]
        self.add_slots([
            slot for slot in slots
            if slot.residency is Residency.PENDING and isinstance(slot, TorchSlot)
        ])
        for device in devices:
            self._device(device).register(
                [unit for unit in units if unit.slots and unit.device == device],
                [unit for unit in gone if unit.slots and unit.device == device],
            )
        for unit in units:
            if unit.slots:
                unit.numel = unit.slots[0].numel
            self._swap_units[unit.owner] = unit

    def _forget_gone(self) -> None:
        """Give up what belongs to parameters that left the groups: pruned, or grown."""
        present = {param for group in self.param_groups for param in group["params"]}
        gone = [unit for param, unit in self._swap_units.items() if param not in present]
        for device in {unit.device for unit in gone if unit.slots}:
            self._device(device).register(
                [], [unit for unit in gone if unit.slots and unit.device == device]
            )
        for unit in gone:
            self.resident.forget(unit.owner, unit.device)
            del self._swap_units[unit.owner]

    def _device(self, device: torch.device) -> DeviceSwap[Tensor, torch.Event]:
        if device not in self._swap_devices:
            self._swap_devices[device] = DeviceSwap(
                TorchBackend(device), self.plan_options(default_packed=True), _publish,
                weakly(self.scratch_sizes), weakly(self.can_cut), policy=self.staging_policy(),
            )
        return self._swap_devices[device]

    def add_slots(self, slots: Sequence[TorchSlot]) -> None:
        """Give pending slots pinned bytes, all or none, before anything refers to them.

        Raises:
            MemoryError: not enough pinned memory.
        """
        added: list[TorchSlot] = []
        try:
            for device in {slot.device for slot in slots}:
                assert isinstance(device, torch.device)
                mine = [slot for slot in slots if slot.device == device]
                self._device(device).add_slots(mine)
                added.extend(mine)
        except BaseException:
            for slot in added:  # or its slab stays pinned
                if slot.param_state.get(slot.name) is slot.logical_tensor:
                    del slot.param_state[slot.name]
                slot.cpu_tensor = slot.logical_tensor = None
                slot.transit.move(Residency.PENDING)
            self.remove_slots(added)
            raise

    def remove_slots(self, slots: Sequence[TorchSlot]) -> None:
        """Give slots up that no unit has."""
        for device in {slot.device for slot in slots}:
            self._swap_devices[device].store.remove(
                [slot for slot in slots if slot.device == device]
            )

    def replace_units(self, units: Sequence[TorchUnit]) -> None:
        """Swap ``units`` and nothing else from now on."""
        for device, swap in self._swap_devices.items():
            swap.register([unit for unit in units if unit.device == device], gone=swap.units)
        self._swap_units = {unit.owner: unit for unit in units}

    @property
    def resident(self) -> ResidentStates:
        """Which eligible states stay on the device."""
        return self._swap_resident

    def swap_report(self) -> dict[str, DeviceReport]:
        reports = super().swap_report()
        params = [param for group in self.param_groups for param in group["params"]]
        indices = {id(param): index for index, param in enumerate(params)}
        for device, kept in self.resident.by_device().items():
            reports[str(device)] = replace(
                reports.get(str(device), DeviceReport()),
                resident_nbytes=sum(state.nbytes for state in kept),
                resident=tuple(
                    f"{state.name} of {self.describe_param(indices[id(state.param)])}"
                    for state in kept if id(state.param) in indices
                ),
            )
        return reports

    def find_slot(self, param: Tensor, name: str) -> TorchSlot | None:
        """The slot that holds the state ``name`` of ``param`` now."""
        unit = self._swap_units.get(param)
        if unit is None or self.__dict__["state"].get(param) is not unit.param_state:
            return None
        for slot in unit.torch_slots():
            if slot.name == name and slot.logical_tensor is unit.param_state.get(name):
                return None if slot.is_rebound() else slot
        return None

    def is_held(self, slot: TorchSlot) -> bool:
        """Whether somebody holds what the optimizer shows for ``slot``."""
        return self._swap_devices[slot.device].backend.is_held_elsewhere(slot)

    def _detach_held(self, units: Iterable[TorchUnit]) -> None:
        """Held counters and small states become snapshots, like the moments: DeviceSwap.settle.

        Large states that the configuration keeps on the device stay live, as the original's:
        a snapshot of them might not fit.
        """
        for unit in units:
            if unit.device.type == "cpu":
                continue
            swapped = {slot.name for slot in unit.slots}
            for name in [name for name in unit.param_state if name not in swapped]:
                value = unit.param_state[name]
                if (
                    isinstance(value, Tensor)
                    and value.numel() <= self.swap_config.min_numel
                    and sys.getrefcount(value) > 3  # the entry, the name above, the argument
                ):
                    unit.param_state[name] = value.clone()


def _publish(slot: SwapSlot[Tensor]) -> None:
    assert isinstance(slot, TorchSlot)
    # What the user has put in its place, for another parameter perhaps, stays.
    if slot.logical_tensor is None or slot.param_state.get(slot.name) is slot.logical_tensor:
        slot.publish()
