"""What the three torch optimizers share: the step around the pipeline, states, checkpoints."""
from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from swap_adam.config import STATE_KEYS, SwapOptimizerConfig
from swap_adam.device import DeviceSwap
from swap_adam.mixin import SwapPipelineMixin, weakly
from swap_adam.slot import Residency, SwapSlot, UpdateUnit
from swap_adam.torch.backend import TorchBackend, outside_graphs
from swap_adam.torch.loading import Loading
from swap_adam.torch.prefetch_hook import PrefetchHook
from swap_adam.torch.resident import Candidate, ResidentStates
from swap_adam.torch.state import (
    ParamState,
    TorchSlot,
    TorchUnit,
    can_cut,
    is_left_behind,
    local,
    make_slot,
    may_adopt,
    may_swap,
    moved_to,
    shown_as,
)

ParamGroup = dict[str, Any]
StateDict = dict[str, Any]


if TYPE_CHECKING:
    _Base = Optimizer
else:
    _Base = object  # a mixin: the optimizer class comes behind it


class TorchSwapMixin(SwapPipelineMixin[Tensor, torch.Event], _Base):
    """Placed before a ``torch.optim`` class; the subclass brings its arithmetic.

    ``step()`` is issued on the stream that is current when it is called, and on two copy streams
    per device. It returns with the last copies still in flight: parameters need no further wait
    on the same stream, and reading ``optimizer.state`` or calling ``state_dict()`` waits.
    """

    param_groups: list[ParamGroup]
    defaults: dict[str, Any]
    _swap_units: dict[Tensor, TorchUnit]
    _swap_resident: ResidentStates
    _swap_prefetch_hook: PrefetchHook | None
    _swap_entries: dict[int, TorchUnit]
    _swap_warned_flags: bool

    # What a subclass brings

    @classmethod
    def original_class(cls) -> type | None:
        """What :func:`swap_adam.unswap_optimizer` turns an instance into; none for a subclass."""
        raise NotImplementedError

    @classmethod
    def refuse_group(cls, group: ParamGroup) -> None:
        """Raise ValueError for a group whose flags cannot be honoured."""
        raise NotImplementedError

    @classmethod
    def refused_flags(cls, group: ParamGroup) -> list[str]:
        """The flags of a group that cannot be honoured."""
        raise NotImplementedError

    # What is in the state of every parameter, without amsgrad and with it.
    _names: tuple[frozenset[str], frozenset[str]]

    def state_names(self, group: ParamGroup) -> frozenset[str]:
        """The states that every parameter of ``group`` has, swapped or not."""
        return self._names[bool(group["amsgrad"])]

    def read_group(self, group_index: int, group: ParamGroup, params: list[Tensor]) -> None:
        """Read what the step needs of a group, ``params`` being those with a gradient."""
        raise NotImplementedError

    def init_param_state(self, group: ParamGroup, param: Tensor) -> ParamState:
        """What the original puts into a new state before the moments (``step``, or nothing)."""
        raise NotImplementedError

    def update_group(self, group_index: int, units: Sequence[TorchUnit]) -> None:
        """One call of the original's functional over ``units`` of one group."""
        raise NotImplementedError

    sparse_error: str

    # Life

    def init_swap(self, config: SwapOptimizerConfig) -> None:
        super().init_swap(config)
        self._swap_check_held = True  # somebody may hold what there is before the first step
        self._swap_units = {}
        self._swap_resident = ResidentStates(config.resident_nbytes)
        self._swap_prefetch_hook = PrefetchHook(self) if config.prefetch_in_backward else None
        if self._swap_prefetch_hook is not None:
            for group in self.__dict__.get("param_groups", ()):  # none yet when unpickling
                self._swap_prefetch_hook.attach(group["params"])
        self._swap_warned_flags = False

    @classmethod
    def refuse_config(cls, config: SwapOptimizerConfig, groups: Sequence[ParamGroup]) -> None:
        """Raise for a configuration, or groups, that this optimizer cannot honour."""
        if not isinstance(config, SwapOptimizerConfig):
            raise TypeError(f"swap_config must be a SwapOptimizerConfig or None, got {config!r}")
        if config.include_master_params:
            raise ValueError(
                "include_master_params=True needs an optimizer that owns fp32 masters (MindFormers "
                "AdamW); torch optimizers own none: leave it at False"
            )
        if config.state_keys is not None and "max_exp_avg_sq" in config.state_keys:
            if not any(group["amsgrad"] for group in groups):
                raise ValueError(
                    f"state_keys={config.state_keys!r} names max_exp_avg_sq, which exists only "
                    "with amsgrad=True: set it in at least one group or omit the key"
                )
        for group in groups:
            cls.refuse_group(group)

    def add_param_group(self, param_group: ParamGroup) -> None:
        if "_swap_units" in self.__dict__ and isinstance(param_group, dict):
            self.refuse_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        hook: PrefetchHook | None = self.__dict__.get("_swap_prefetch_hook")
        if hook is not None:
            hook.attach(self.param_groups[-1]["params"])

    # Step

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """One update of every parameter that has a gradient.

        Raises:
            ValueError: a closure without ``allow_closure=True``, or a group with a refused flag.
            RuntimeError: parameters are half updated by an earlier fault.
        """
        loss = None
        if closure is not None:
            if not self.swap_config.allow_closure:
                raise ValueError(
                    "step(closure) is refused by default. To have the closure run once, first, "
                    "with gradients enabled, construct the optimizer with "
                    "swap_config=SwapOptimizerConfig(allow_closure=True), or pass that to "
                    "swap_optimizer(); Lightning needs it, with automatic and with manual "
                    "optimization. Otherwise compute the loss before step() and call it without "
                    "arguments"
                )
            with torch.enable_grad():
                loss = closure()
        self.run_swap_step()
        return loss

    @outside_graphs
    def run_swap_step(self) -> None:
        try:
            super().run_swap_step()
        finally:
            # Gradients belong to the user, who may free them now: no unit keeps one alive.
            for unit in self._swap_units.values():
                unit.grad = unit.param
            if self._swap_prefetch_hook is not None:
                self._swap_prefetch_hook.has_fired = False

    def _init_group(self, group: ParamGroup, *_: object) -> bool:
        """The original's ``step`` was bound before the conversion (accelerate keeps it): do ours.

        Only that one calls this, group by group, to collect what it then updates: nothing.
        """
        if group is self.param_groups[0]:
            self.run_swap_step()
        return False

    def prepare_step(self) -> None:
        for group in self.param_groups:
            self.refuse_group(group)

    def iter_update_units(self) -> Iterable[UpdateUnit[Tensor]]:
        states: defaultdict[Tensor, ParamState] = self.__dict__["state"]
        units: list[TorchUnit] = []
        stale: list[TorchUnit] = []
        moved = False
        if self._swap_check_held:
            for registered in self._swap_units.values():
                registered.note_edits()
        param_index = -1
        known = 0  # registered parameters that are still in the groups
        for group_index, group in enumerate(self.param_groups):
            required = self.state_names(group)
            with_grad: list[Tensor] = []
            seen: dict[Tensor, TorchUnit] | None = None
            if len(set(map(id, group["params"]))) < len(group["params"]):
                seen = {}
            for param in group["params"]:
                param_index += 1
                grad = param.grad
                if grad is None:
                    known += param in self._swap_units
                    continue
                if grad.is_sparse:
                    raise RuntimeError(self.sparse_error)
                with_grad.append(param)
                if seen is not None and param in seen:
                    seen[param].repeats += 1
                    continue
                param_state = states[param]
                unit = self._swap_units.get(param)
                known += unit is not None
                if unit is None or not unit.is_current(param_state):
                    unit = TorchUnit(
                        group_index, param_index, param, grad, [], 0,
                        owner=param, param_state=param_state, device=param.device,
                    )
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
            self.read_group(group_index, group, with_grad)
        if known < len(self._swap_units):
            self._forget_gone()
        if stale:
            self._adopt(stale)
        if moved:  # the pieces of a cut parameter know its place
            self.forget_plans()
        if self._swap_check_held:
            self._detach_held(self._swap_units.values())
        return units

    def forget_plans(self) -> None:
        """Make new plans for the next step."""
        for device in self._swap_devices.values():
            device.forget_plan()

    def step_batch(self, units: Sequence[UpdateUnit[Tensor]]) -> None:
        by_group: dict[int, list[TorchUnit]] = {}
        for unit in cast(Sequence[TorchUnit], units):
            by_group.setdefault(unit.group_index, []).append(unit)
        for group_index, members in by_group.items():
            self.update_group(group_index, members)

    def can_cut(self, unit: UpdateUnit[Tensor]) -> bool:
        assert isinstance(unit, TorchUnit)
        return can_cut(unit)

    def describe_param(self, param_index: int) -> str:
        for group in self.param_groups:
            if param_index < len(group["params"]):
                shape = tuple(group["params"][param_index].shape)
                names = group.get("param_names")
                name = names[param_index] if names else f"parameter {param_index} of its group"
                return f"{name} (shape {shape})"
            param_index -= len(group["params"])
        return f"parameter {param_index}"

    # Registration

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
                weakly(self.scratch_nbytes), weakly(self.can_cut), policy=self.staging_policy(),
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
            self.remove_slots(added)
            for slot in added:
                slot.transit.move(Residency.PENDING)
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

    def is_state_held(self) -> bool:
        # The optimizer's attribute, the name below and the argument of getrefcount.
        states = self.__dict__["state"]
        return sys.getrefcount(states) > 3 or any(
            unit.is_container_held() for unit in self._swap_units.values()
        )

    # State and checkpoints

    @property
    def state(self) -> defaultdict[Tensor, ParamState]:
        """Every parameter's state. Reading it waits on the host for copies in flight."""
        if "_swap_devices" in self.__dict__:
            self.check_not_torn("reading the optimizer's states")
            self.wait_landed()
            self._swap_check_held = True
        try:
            states: defaultdict[Tensor, ParamState] = self.__dict__["state"]
        except KeyError:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute 'state'")
        return states

    @state.setter
    def state(self, states: defaultdict[Tensor, ParamState]) -> None:
        self.__dict__["state"] = states
        self._swap_check_held = True  # whoever sets it holds it

    def state_dict(self) -> StateDict:
        """The original's state dict, its swapped tensors on the host.

        Waits on the host for copies in flight; allocates no memory and causes no device traffic.
        What is in it stays as it is now: what is still held when a later step writes keeps its
        bytes, and the step uses fresh ones.

        Raises:
            RuntimeError: parameters are half updated by an earlier fault.
        """
        self.check_not_torn("state_dict()")
        states: StateDict = super().state_dict()
        # The entries of the original's dict are live, so they would show later tensors.
        if isinstance(states.get("state"), dict):  # a hook may have made something else of it
            states["state"] = {
                key: dict(value) if isinstance(value, dict) else value
                for key, value in states["state"].items()
            }
        return states

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state dict of the original or of a swap optimizer, in whole or in part.

        Swapped states are copied to pinned host memory, whatever device they come from; nothing
        is allocated on the device for them. Group flags that this optimizer refuses are not
        taken over, with one warning.

        Raises:
            ValueError: the groups do not match, as the original; nothing has changed.
            MemoryError: not enough pinned memory; nothing has changed.
        """
        self.wait_landed()
        loading = Loading(self)
        torn, self._swap_torn = self._swap_torn, set()
        # Our hooks see what the user's own have made of the dict, and run before theirs after.
        pre = self.register_load_state_dict_pre_hook(loading.hold_back)
        post = self.register_load_state_dict_post_hook(loading.bring_in, prepend=True)
        try:
            super().load_state_dict(state_dict)
        except BaseException:
            if not loading.is_done:  # else a hook of the user's has failed, after the load
                self._swap_torn = torn
                loading.undo()
            raise
        finally:
            pre.remove()
            post.remove()
        if loading.refused_flags:
            flags = ", ".join(f"{flag}=True" for flag in sorted(loading.refused_flags))
            warnings.warn(
                f"the checkpoint's groups have {flags}, which {type(self).__name__} does not "
                "support; it keeps its own",
                stacklevel=2,
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "swap_config": self.swap_config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Called on a bare instance by pickle and deepcopy, and by load_state_dict.
        is_new = "_swap_devices" not in self.__dict__
        if is_new:
            self.init_swap(state["swap_config"])
        super().__setstate__({key: value for key, value in state.items() if key != "swap_config"})
        if is_new and self._swap_prefetch_hook is not None:
            for group in self.param_groups:
                self._swap_prefetch_hook.attach(group["params"])


def _publish(slot: SwapSlot[Tensor]) -> None:
    assert isinstance(slot, TorchSlot)
    # What the user has put in its place, for another parameter perhaps, stays.
    if slot.logical_tensor is None or slot.param_state.get(slot.name) is slot.logical_tensor:
        slot.publish()
