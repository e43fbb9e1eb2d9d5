"""Which eligible states stay on the device, up to ``resident_nbytes`` there."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from swap_adam.resident import choose_resident
from swap_adam.torch.state import local


@dataclass(frozen=True)
class Candidate:
    """An eligible state of a parameter, by its name."""

    param: Tensor
    name: str
    nbytes: int


class ResidentStates:
    """The choice, and what is left of the budget of each device.

    What has been chosen once stays chosen.
    """

    def __init__(self, budget_nbytes: int) -> None:
        self._budget_nbytes = budget_nbytes
        self._kept: dict[Tensor, dict[str, int]] = {}
        self._taken: dict[torch.device, int] = {}

    def choose(self, candidates: Iterable[Candidate]) -> None:
        """Decide about states that have not been decided about."""
        if not self._budget_nbytes:
            return
        by_device: dict[torch.device, list[Candidate]] = {}
        for candidate in candidates:
            if not self.keeps(candidate.param, candidate.name):
                by_device.setdefault(local(candidate.param).device, []).append(candidate)
        for device, mine in by_device.items():
            taken = self._taken.get(device, 0)
            sizes = [candidate.nbytes for candidate in mine]
            for index in choose_resident(sizes, self._budget_nbytes - taken):
                chosen = mine[index]
                self._kept.setdefault(chosen.param, {})[chosen.name] = chosen.nbytes
                taken += chosen.nbytes
            self._taken[device] = taken

    def keeps(self, param: Tensor, name: str) -> bool:
        """Whether the state ``name`` of ``param`` stays on the device."""
        return name in self._kept.get(param, ())

    def forget(self, param: Tensor, device: torch.device) -> None:
        """``param`` has left the optimizer, or ``device``: its states take no budget there."""
        for nbytes in self._kept.pop(param, {}).values():
            self._taken[device] -= nbytes

    def by_device(self) -> dict[torch.device, list[Candidate]]:
        """What stays on each device, in the order of the choice."""
        kept: dict[torch.device, list[Candidate]] = {}
        for param, states in self._kept.items():
            kept.setdefault(local(param).device, []).extend(
                Candidate(param, name, nbytes) for name, nbytes in states.items()
            )
        return kept
