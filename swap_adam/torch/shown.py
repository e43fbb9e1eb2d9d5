"""What a state dict shows of states that stay on the device: copies on the host, edits counting."""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from swap_adam.config import STATE_KEYS
from swap_adam.torch.backend import as_normal_tensors
from swap_adam.torch.state import ParamState, local, moved_to


@dataclass
class ShownCopy:
    """``copy`` stands for ``value``, which is ``param_state[name]``, since both had these versions.

    In-place operations of torch advance a version, also those on views; a distributed tensor has
    one of its own beside its local part's.
    """

    param_state: ParamState
    name: str
    value: Tensor
    copy: Tensor
    versions: tuple[int, ...] = ()
    value_versions: tuple[int, ...] = ()

    def note_versions(self) -> None:
        """The two are the same now."""
        self.versions, self.value_versions = _versions(self.copy), _versions(self.value)


class ShownCopies:
    """The copies that are live: from the state dict that shows them to the next step.

    Readers of state dicts expect all states in one place (torch.distributed.checkpoint broadcasts
    to one device), and which states are swapped depends on sizes, which differ from rank to rank.
    Copies between host and device block the host.
    """

    def __init__(self) -> None:
        self._copies: dict[int, ShownCopy] = {}  # by id of the value, which it keeps alive

    def show(self, param_state: ParamState) -> ParamState:
        """A parameter's state with every moment on the host; what is there already is not copied.

        0-dim tensors stay as they are.
        """
        return {
            name: self._show(param_state, name, value)
            if name in STATE_KEYS and isinstance(value, Tensor) and _is_copied(value) else value
            for name, value in param_state.items()
        }

    def write_back(self) -> None:
        """Let edits of the copies count, as those of what they stand for."""
        for shown in self._copies.values():
            if _versions(shown.copy) != shown.versions:
                if shown.param_state.get(shown.name) is shown.value:
                    with torch.no_grad():
                        local(shown.value).copy_(local(shown.copy))
                shown.note_versions()

    def release(self) -> None:
        """Write edits back for the last time: from now on the copies are snapshots."""
        self.write_back()
        self.forget()

    def forget(self) -> None:
        """What the copies stand for has been replaced: they are snapshots."""
        self._copies.clear()

    @as_normal_tensors
    def _show(self, param_state: ParamState, name: str, value: Tensor) -> Tensor:
        shown = self._copies.get(id(value))
        if shown is None:
            shown = ShownCopy(param_state, name, value, moved_to(torch.device("cpu"), value))
            self._copies[id(value)] = shown
            shown.note_versions()
        elif _versions(value) != shown.value_versions:
            with torch.no_grad():
                local(shown.copy).copy_(local(value))
            shown.note_versions()
        return shown.copy


def _is_copied(value: Tensor) -> bool:
    part = local(value)
    return (
        value.dim() > 0
        and part.device.type not in ("cpu", "meta")
        and not is_traceable_wrapper_subclass(part)
        and not isinstance(part, FakeTensor)
    )


def _versions(tensor: Tensor) -> tuple[int, ...]:
    """Equal while no operation has written to ``tensor``; an inference tensor cannot tell."""
    return tuple(
        -1 if part.is_inference() else part._version for part in (tensor, local(tensor))
    )
