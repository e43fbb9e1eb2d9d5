"""What the torch half adds to the machine: which parameters are swapped, kept, or let go.

States become slots, are kept resident, or are given up as the optimizer's groups and states change.
"""
from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from swap_adam.config import STATE_KEYS, SwapOptimizerConfig
from swap_adam.device import DeviceReport, DeviceSwap
from swap_adam.schedule import Schedule
from swap_adam.slot import Residency, SwapSlot
from swap_adam.swap import Swap
from swap_adam.torch.backend import TorchBackend, as_normal_tensors, slab_pool
from swap_adam.torch.prefetch_hook import PrefetchHook
from swap_adam.torch.resident import Candidate, ResidentStates
from swap_adam.torch.shown import ShownCopies
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
from swap_adam.torch.update import ParamGroup, TorchUpdate

States = defaultdict[Tensor, ParamState]


def states_of(optimizer: Optimizer) -> States:
    """The states past the property, which waits; a wrapper made of the optimizer's class has them
    behind a property of its own."""
    states: States | None = optimizer.__dict__.get("state")
    return optimizer.state if states is None else states


@dataclass(frozen=True)
class TornState:
    """The state of a half updated parameter, with how often each tensor had been written to."""

    unit: TorchUnit
    tensors: dict[str, tuple[Tensor, int]]

    @classmethod
    def of(cls, unit: TorchUnit) -> TornState:
        return cls(unit, {
            name: (value, value._version)
            for name, value in unit.param_state.items() if isinstance(value, Tensor)
        })

    def is_mended(self, states: States) -> bool:
        """Whether each of them has been replaced, or written to, or the whole entry has."""
        now = states.get(self.unit.owner)
        if now is not self.unit.param_state:
            return True
        return all(
            now.get(name) is not value or value._version > version
            for name, (value, version) in self.tensors.items()
        )


class TorchSwap(Swap[Tensor, torch.Event]):
    """Keeps the registered units in step with the groups and states of an optimizer.

    It is given those with each call, and keeps neither. Copies here block the host: they are done
    when a method returns.
    """

    def __init__(
        self,
        config: SwapOptimizerConfig,
        schedule: type[Schedule[Tensor, torch.Event]],
        update_type: type[TorchUpdate],
        recovery: str,
    ) -> None:
        # Somebody may hold what there is before the first step.
        super().__init__(config, schedule, recovery, check_held=True)
        self.update_type = update_type
        self.units: dict[Tensor, TorchUnit] = {}
        self.resident = ResidentStates(config.resident_nbytes)
        self.prefetch_hook: PrefetchHook | None = None
        self.shown = ShownCopies()
        # By param_index, what the states of a torn parameter were when it was torn.
        self._torn_states: dict[int, TornState] = {}

    def mark_torn(self) -> None:
        """Remember what the states of torn parameters are now, to see when they are mended."""
        for unit in self.units.values():
            if unit.param_index in self.torn and unit.param_index not in self._torn_states:
                self._torn_states[unit.param_index] = TornState.of(unit)

    def forget_mended(self, states: States) -> None:
        """What is torn no longer is when all of its states were replaced or written since."""
        if not self.torn:
            self._torn_states.clear()
            return
        for index, torn in list(self._torn_states.items()):
            if torn.is_mended(states):
                del self._torn_states[index]
                self.torn.discard(index)
                self.check_held = True

    def collect(
        self,
        groups: Sequence[ParamGroup],
        states: States,
        update: TorchUpdate,
        describe_param: Callable[[int], str],
    ) -> list[TorchUnit]:
        """The units of a step: every parameter with a gradient, in order, its states registered.

        ``update`` reads the groups. What has left the groups is forgotten.

        Raises:
            RuntimeError: a sparse gradient.
            KeyError: a state is missing, as in the original.
            MemoryError: not enough pinned memory; nothing has changed.
        """
        units: list[TorchUnit] = []
        stale: list[TorchUnit] = []
        moved = False
        if self.check_held:
            self.shown.release()
            for registered in self.units.values():
                registered.note_edits()
        param_index = -1
        known = 0  # registered parameters that are still in the groups
        for group_index, group in enumerate(groups):
            required = frozenset(self.update_type.states_of(group))
            with_grad: list[Tensor] = []
            seen: dict[Tensor, TorchUnit] | None = None
            if len(set(map(id, group["params"]))) < len(group["params"]):
                seen = {}
            for param in group["params"]:
                param_index += 1
                grad = param.grad
                if grad is None:
                    known += param in self.units
                    continue
                if grad.is_sparse:
                    raise RuntimeError(self.update_type.sparse_error)
                with_grad.append(param)
                if seen is not None and param in seen:
                    seen[param].repeats += 1
                    continue
                param_state = states[param]
                unit = self.units.get(param)
                known += unit is not None
                if unit is None or not unit.is_current(param_state):
                    unit = TorchUnit(
                        group_index, param_index, param, grad, [], 0,
                        owner=param, param_state=param_state, device=param.device,
                    )
                    if param_state:
                        unit.require(required)
                    stale.append(unit)
                else:
                    unit.require(required)
                    if (unit.group_index, unit.param_index) != (group_index, param_index):
                        moved = True
                unit.group_index, unit.param_index, unit.repeats = group_index, param_index, 1
                unit.point_at(grad)
                if seen is not None:
                    seen[param] = unit
                units.append(unit)
            update.read_group(group_index, group, with_grad)
        if known < len(self.units):
            self._forget_gone(groups)
        self._check_shapes(stale, groups, describe_param)
        update.check(units, units if self.check_held else stale)
        if stale:
            self._adopt(stale, groups)
        if moved:  # the pieces of a cut parameter know its place
            for device in self.devices.values():
                device.forget_plan()
        if self.check_held:
            self._detach_held(self.units.values())
        return units

    def _check_shapes(
        self,
        units: Iterable[TorchUnit],
        groups: Sequence[ParamGroup],
        describe_param: Callable[[int], str],
    ) -> None:
        """Refuse states that the update could not take, in the middle of a step.

        Raises:
            ValueError: naming the parameter, both shapes, and what to do.
        """
        for unit in units:
            group = groups[unit.group_index]
            for name in self.update_type.moments_of(group):
                value = unit.param_state.get(name)
                # A fused kernel counts elements, and takes them in another shape too.
                if isinstance(value, Tensor) and value.shape != unit.owner.shape and not (
                    group.get("fused") and value.numel() == unit.owner.numel()
                ):
                    raise ValueError(
                        f"the state {name} of {describe_param(unit.param_index)} has the shape "
                        f"{tuple(value.shape)}: it is another parameter's, of another model's "
                        "checkpoint perhaps. Load the right one, or delete the parameter's entry "
                        "of optimizer.state to begin it anew. Nothing has changed."
                    )

    def adopt_all(self, groups: Sequence[ParamGroup], states: States) -> None:
        """Register every parameter that has a state, whether or not it has a gradient.

        Raises:
            MemoryError: not enough pinned memory; nothing has changed.
        """
        units = []
        param_index = -1
        for group_index, group in enumerate(groups):
            for param in dict.fromkeys(group["params"]):
                param_index += 1
                if states.get(param):
                    units.append(TorchUnit(
                        group_index, param_index, param, param, [], 0,
                        owner=param, param_state=states[param], device=param.device,
                    ))
        self._adopt(units, groups)

    @as_normal_tensors
    def bring_back(self, states: States) -> None:
        """Put every swapped state back on its parameter's device, laid out as it was.

        Raises:
            torch.OutOfMemoryError: they do not fit; nothing has changed.
        """
        self.wait_landed()
        self.shown.release()
        made: dict[tuple[int, str], tuple[ParamState, Tensor]] = {}
        for unit in self.units.values():
            for slot in unit.slots:
                if unit.param_state.get(slot.name) is slot.logical_tensor:
                    assert slot.cpu_tensor is not None
                    value = torch.empty_strided(
                        slot.cpu_tensor.shape, slot.cpu_tensor.stride(),
                        dtype=slot.cpu_tensor.dtype, device=unit.device,
                    ).copy_(slot.cpu_tensor)
                    shown = unit.param_state, shown_as(unit.owner, value)
                    made[id(unit.param_state), slot.name] = shown
        for param, param_state in states.items():
            if not isinstance(param, Tensor):
                continue  # a user's own value
            for name in STATE_KEYS:
                # What the user has made of a state that was on the host.
                if (id(param_state), name) not in made and is_left_behind(param, param_state, name):
                    shown = param_state, moved_to(local(param).device, param_state[name])
                    made[id(param_state), name] = shown
        for (_, name), (param_state, value) in made.items():
            param_state[name] = value

    @as_normal_tensors
    def _adopt(self, units: Sequence[TorchUnit], groups: Sequence[ParamGroup]) -> None:
        """Register ``units``: make the states that are missing, move out those that are there.

        A state on the host that cannot be swapped, cut out of one that was, goes to the device.

        Raises:
            MemoryError: not enough pinned memory; nothing has changed.
        """
        values: list[tuple[SwapSlot[Tensor], ParamState, Tensor]] = []
        made: list[ParamState] = []
        left_behind: list[tuple[TorchUnit, str, Tensor]] = []
        self._choose_resident(units, groups)
        try:
            for unit in units:
                if not unit.param_state:
                    made.append(unit.param_state)
                    self._make_state(unit, groups[unit.group_index])
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

    def _choose_resident(
        self, units: Sequence[TorchUnit], groups: Sequence[ParamGroup]
    ) -> None:
        """Decide which states of ``units`` stay on the device, or are made there."""
        candidates = []
        for unit in units:
            param, param_state = unit.owner, unit.param_state
            previous = self.units.get(param)
            if previous is not None and previous.device != unit.device:
                self.resident.forget(param, previous.device)
            for name in self.update_type.moments_of(groups[unit.group_index]):
                # A state that is still to be made is like the parameter.
                value = param_state.get(name) if param_state else param
                if (
                    isinstance(value, Tensor)
                    and value.device == param.device
                    and may_adopt(param, name, value, self.config)
                ):
                    part = local(value)
                    candidates.append(Candidate(param, name, part.numel() * part.element_size()))
        self.resident.choose(candidates)

    def _make_state(self, unit: TorchUnit, group: ParamGroup) -> None:
        """A new state as the original makes it; its swapped moments get zeros on the host only."""
        param, param_state = unit.owner, unit.param_state
        param_state.update(self.update_type.init_scalars(group, param))
        for name in self.update_type.moments_of(group):
            if may_swap(param, name, self.config) and not self.resident.keeps(param, name):
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
        previous = self.units.get(param)
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
                and may_adopt(param, name, value, self.config)
                and not (self.resident.keeps(param, name) and value.device == param.device)
            ):
                slot = make_slot(param, name, value, param_state)
                unit.slots.append(slot)
                values.append((slot, param_state, value))
        return values

    def _register(self, units: Sequence[TorchUnit]) -> None:
        gone = [self.units[unit.owner] for unit in units if unit.owner in self.units]
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
            unit.registered_dtypes = unit.state_dtypes()
            self.units[unit.owner] = unit

    def _forget_gone(self, groups: Sequence[ParamGroup]) -> None:
        """Give up what belongs to parameters that left the groups: pruned, or grown."""
        present = {param for group in groups for param in group["params"]}
        gone = [unit for param, unit in self.units.items() if param not in present]
        for device in {unit.device for unit in gone if unit.slots}:
            self._device(device).register(
                [], [unit for unit in gone if unit.slots and unit.device == device]
            )
        for unit in gone:
            self.resident.forget(unit.owner, unit.device)
            del self.units[unit.owner]

    def _device(self, device: torch.device) -> DeviceSwap[Tensor, torch.Event]:
        if device not in self.devices:
            self.devices[device] = DeviceSwap(
                TorchBackend(device), self.schedule, self.plan_options, _publish,
                policy=self.staging_policy, pool=slab_pool(device),
            )
        return self.devices[device]

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
            self.devices[device].store.remove(
                [slot for slot in slots if slot.device == device]
            )

    def replace_units(self, units: Sequence[TorchUnit]) -> None:
        """Swap ``units`` and nothing else from now on."""
        for device, swap in self.devices.items():
            swap.register([unit for unit in units if unit.device == device], gone=swap.units)
        self.units = {unit.owner: unit for unit in units}

    def report_resident(
        self,
        reports: dict[str, DeviceReport],
        groups: Sequence[ParamGroup],
        describe_param: Callable[[int], str],
    ) -> None:
        """Add to ``reports`` what stays on the device by choice."""
        params = [param for group in groups for param in group["params"]]
        indices = {id(param): index for index, param in enumerate(params)}
        for device, kept in self.resident.by_device().items():
            reports[str(device)] = replace(
                reports.get(str(device), DeviceReport()),
                resident_nbytes=sum(state.nbytes for state in kept),
                resident=tuple(
                    f"{state.name} of {describe_param(indices[id(state.param)])}"
                    for state in kept if id(state.param) in indices
                ),
            )

    def find_slot(self, states: States, param: Tensor, name: str) -> TorchSlot | None:
        """The slot that holds the state ``name`` of ``param`` now."""
        unit = self.units.get(param)
        if unit is None or states.get(param) is not unit.param_state:
            return None
        for slot in unit.torch_slots():
            if slot.name == name and slot.logical_tensor is unit.param_state.get(name):
                return None if slot.is_rebound() else slot
        return None

    def is_held(self, slot: TorchSlot) -> bool:
        """Whether somebody holds what the optimizer shows for ``slot``."""
        return self.devices[slot.device].backend.is_held_elsewhere(slot)

    @as_normal_tensors
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
                    and value.numel() <= self.config.min_numel
                    and sys.getrefcount(value) > 3  # the entry, the name above, the argument
                ):
                    unit.param_state[name] = value.clone()


def _publish(slot: SwapSlot[Tensor]) -> None:
    assert isinstance(slot, TorchSlot)
    # What the user has put in its place, for another parameter perhaps, stays.
    if slot.logical_tensor is None or slot.param_state.get(slot.name) is slot.logical_tensor:
        slot.publish()
