"""Loading a state dict: what is swapped goes to its host slot, the rest the original's way."""
from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from swap_adam.config import STATE_KEYS
from swap_adam.slot import Residency
from swap_adam.torch.resident import Candidate
from swap_adam.torch.state import Incoming, TorchSlot, TorchUnit, local, make_slot, may_load
from swap_adam.torch.swap import States, TorchSwap, states_of
from swap_adam.torch.update import ParamGroup

StateDict = dict[str, Any]


def _has_other_shape(param: Tensor, entry: object) -> bool:
    """Whether a moment in a parameter's ``entry`` has another shape than the parameter."""
    return isinstance(entry, dict) and any(
        isinstance(value := entry.get(name), Tensor) and value.shape != param.shape
        for name in STATE_KEYS
    )


class Loading:
    """One call of ``load_state_dict``: a hook before and a hook after the original's own.

    ``hold_back`` gets the pinned memory while nothing has changed; ``bring_in`` fills it.
    """

    def __init__(
        self,
        swap: TorchSwap,
        refused_flags: Callable[[ParamGroup], list[str]],
        is_shown: bool,
    ) -> None:
        self._swap = swap
        self._refused_flags = refused_flags
        self._is_shown = is_shown  # what the optimizer shows now, to somebody who holds a dict
        self._incoming: list[tuple[TorchUnit, dict[str, Tensor]]] = []
        self._new: list[TorchSlot] = []
        self.is_done = False
        self.refused_flags: set[str] = set()  # of the dict; the optimizer keeps its own
        self.misfits: list[int] = []  # param indices whose states have another shape

    def hold_back(self, optimizer: Optimizer, saved: StateDict) -> StateDict:
        """Take out of ``saved`` what goes to the host, and the group flags that are refused."""
        groups, saved_groups = optimizer.param_groups, saved["param_groups"]
        if [len(group["params"]) for group in groups] != [
            len(group["params"]) for group in saved_groups
        ]:
            return saved  # the original's own error follows
        own_states = states_of(optimizer)
        states = dict(saved["state"])
        keys = chain.from_iterable(group["params"] for group in saved_groups)
        owners = (
            (group_index, param)
            for group_index, group in enumerate(groups) for param in group["params"]
        )
        entries = [
            (key, param_index, group_index, param, self._eligible(param, states.get(key)))
            for param_index, (key, (group_index, param)) in enumerate(zip(keys, owners))
        ]
        self.misfits = [
            param_index for key, param_index, _, param, _ in entries
            if _has_other_shape(param, states.get(key))
        ]
        resident = self._swap.resident
        resident.choose(
            Candidate(param, name, local(value).numel() * param.element_size())
            for _, _, _, param, values in entries for name, value in values.items()
        )
        for key, param_index, group_index, param, eligible in entries:
            values = {
                name: value for name, value in eligible.items() if not resident.keeps(param, name)
            }
            if values:
                unit = TorchUnit(
                    group_index, param_index, param, param, [], local(param).numel(),
                    owner=param, param_state={}, device=param.device,
                )
                unit.slots.extend(
                    self._slot(own_states, param, name, value)
                    for name, value in values.items()
                )
                self._incoming.append((unit, values))
                states[key] = {
                    name: Incoming() if name in values else value
                    for name, value in states[key].items()
                }
        self._swap.add_slots(self._new)
        kept_groups = self._keep_own_flags(groups, saved_groups)
        return {**saved, "state": states, "param_groups": kept_groups}

    def _eligible(self, param: Tensor, entry: object) -> dict[str, Tensor]:
        """The states of a parameter's ``entry`` that may be swapped."""
        if not isinstance(entry, dict):
            return {}
        return {
            name: entry[name] for name in STATE_KEYS
            if may_load(param, name, entry.get(name), self._swap.config)
        }

    def bring_in(self, optimizer: Optimizer) -> None:
        """Copy the values that were held back to their slots and show them."""
        states = states_of(optimizer)
        for unit, values in self._incoming:
            unit.param_state = states[unit.owner]
            for slot in unit.slots:
                assert isinstance(slot, TorchSlot) and slot.cpu_tensor is not None
                value = local(values[slot.name])
                if value is not slot.cpu_tensor:
                    slot.cpu_tensor.copy_(value)
                slot.param_state = unit.param_state
                slot.publish()
        self._swap.replace_units([unit for unit, _ in self._incoming])
        self._swap.shown.forget()
        self.is_done = True

    def undo(self) -> None:
        """The original refused the dict: give the new slots up."""
        self._swap.remove_slots(
            [slot for slot in self._new if slot.residency is not Residency.PENDING]
        )

    def _slot(self, states: States, param: Tensor, name: str, value: Tensor) -> TorchSlot:
        """The parameter's slot if the value fits it and nobody holds what it has, else a new one.

        A slot is reused, so that loading needs no second set of pinned memory.
        """
        new = make_slot(param, name, value, {})
        new.dtype, new.storage_nbytes = param.dtype, new.numel * param.element_size()
        old = self._swap.find_slot(states, param, name)
        if (
            old is not None
            and (old.shape, old.strides, old.dtype, old.device)
            == (new.shape, new.strides, new.dtype, new.device)
            and (
                local(value) is old.cpu_tensor
                or not (self._is_shown or self._swap.is_held(old))
            )
        ):
            return old
        self._new.append(new)
        return new

    def _keep_own_flags(
        self, groups: list[ParamGroup], saved_groups: list[StateDict]
    ) -> list[StateDict]:
        """The groups to load, ours winning where theirs has a flag that we refuse."""
        kept = []
        for own, saved in zip(groups, saved_groups):
            refused = self._refused_flags({**own, **saved})
            kept.append({**saved, **{flag: own[flag] for flag in refused}})
            self.refused_flags.update(refused)
        return kept
