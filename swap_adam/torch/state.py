"""From an optimizer's state to slots and back: what is swapped, and what is shown in its place."""
from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.optim.optimizer import (
    _default_to_fused_or_foreach,
    _device_dtype_check_for_fused,
    _get_scalar_dtype,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from swap_adam.config import STATE_KEYS, SwapOptimizerConfig
from swap_adam.slot import SwapSlot, UpdateUnit
from swap_adam.torch.backend import SOLE_OWNER, as_normal_tensors, storage_use_count

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# One parameter's state as the optimizer keeps it: tensors by name, and whatever a user adds.
ParamState = dict[str, Any]


@dataclass(eq=False)
class TorchSlot(SwapSlot[Tensor]):
    """A slot together with the place where its tensor is shown: the parameter's state."""

    owner: Tensor = field(kw_only=True)
    param_state: ParamState = field(kw_only=True)
    address: int = field(kw_only=True, default=0)  # of the bytes that are shown

    def is_rebound(self) -> bool:
        """Whether the user has given what is shown other memory: ``state["exp_avg"].data = x``."""
        shown = self.logical_tensor
        return shown is not None and local(shown).data_ptr() != self.address

    @as_normal_tensors
    def publish(self) -> None:
        """Show the host tensor in the optimizer's state."""
        assert self.cpu_tensor is not None
        self.address = self.cpu_tensor.data_ptr()
        self.logical_tensor = shown_as(self.owner, self.cpu_tensor)
        self.param_state[self.name] = self.logical_tensor


@dataclass(eq=False)
class TorchUnit(UpdateUnit[Tensor]):
    """A parameter's unit together with its entry in the optimizer's state.

    ``owner`` is the parameter as the user knows it. ``param`` and ``grad`` are what the update is
    called with: the local parts of distributed tensors where gradient and parameter agree.
    """

    owner: Tensor = field(kw_only=True)
    param_state: ParamState = field(kw_only=True)
    device: torch.device = field(kw_only=True)
    scalar_copies: dict[str, list[Tensor]] = field(kw_only=True, default_factory=dict)
    is_edited: bool = field(kw_only=True, default=False)
    registered_dtypes: list[object] = field(kw_only=True, default_factory=list)
    _required: frozenset[str] = field(init=False, default=frozenset())
    _seen: int = field(init=False, default=-1)

    def __post_init__(self) -> None:
        if self.whole is not None:
            self.param_state = {}  # a piece asks the whole, whose entry's holders are counted

    def is_current(self, param_state: ParamState) -> bool:
        """Whether the user has replaced neither the state, nor a part of it, nor the data."""
        if self.param_state is not param_state or not param_state or self.is_edited:
            return False
        if self.owner.device != self.device:
            return False
        for slot in self.slots:
            if param_state.get(slot.name) is not slot.logical_tensor:
                return False
        return not self.slots or self.slots[0].shape == local(self.owner).shape

    def torch_slots(self) -> list[TorchSlot]:
        """``slots``, all of which are this framework's."""
        return cast(list[TorchSlot], self.slots)

    def state_dtypes(self) -> list[object]:
        """Those that the temporaries of an update depend on."""
        return [getattr(self.param_state.get(name), "dtype", None) for name in STATE_KEYS]

    def note_edits(self) -> None:
        """Look for edits of the states; after one the unit is not current.

        A shown tensor has other memory, or a state on the host was added, made from a swapped one,
        or a state has another dtype.
        """
        swapped = {slot.name for slot in self.slots}
        self.is_edited = (
            self.is_edited
            or self.state_dtypes() != self.registered_dtypes
            or any(slot.is_rebound() for slot in self.torch_slots())
            or any(
                is_left_behind(self.owner, self.param_state, name)
                for name in STATE_KEYS if name not in swapped
            )
        )

    def require(self, names: frozenset[str]) -> None:
        """Raise KeyError, as the original does before its update, where a state is missing."""
        seen = len(self.param_state)
        if names is not self._required or seen != self._seen:
            for name in sorted(names):
                self.param_state[name]
            self._required, self._seen = names, seen

    def point_at(self, grad: Tensor) -> None:
        """Take the gradient of this step."""
        distributed = as_dtensor(self.owner)
        if distributed is None:
            self.grad = grad
            return
        gradient = as_dtensor(grad)
        agree = gradient is not None and gradient._spec.placements == distributed._spec.placements
        if gradient is not None and agree and gradient.device_mesh == distributed.device_mesh:
            self.param, self.grad = distributed._local_tensor, gradient._local_tensor
        else:
            self.param, self.grad = self.owner, grad

    def is_container_held(self) -> bool:
        """Whether somebody holds the entry itself: the optimizer, this unit, its slots, a call."""
        return sys.getrefcount(self.param_state) > 3 + len(self.slots)


def as_dtensor(tensor: Tensor) -> DTensor | None:
    """``tensor`` if it is a DTensor. Costs no import where nobody has made one."""
    if type(tensor) in (Parameter, Tensor):
        return None  # nearly all, and every step asks
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and isinstance(tensor, module.DTensor):
        return cast("DTensor", tensor)
    return None


def local(tensor: Tensor) -> Tensor:
    """The local part of a DTensor, any other tensor itself."""
    distributed = as_dtensor(tensor)
    return tensor if distributed is None else distributed._local_tensor


def shown_as(param: Tensor, host: Tensor) -> Tensor:
    """What the optimizer shows for the host tensor of a state of ``param``.

    A DTensor is made from its spec: ``DTensor.from_local`` would move the host tensor back.
    """
    distributed = as_dtensor(param)
    if distributed is None:
        return host
    spec = distributed._spec
    if spec.tensor_meta is not None and spec.tensor_meta.dtype != host.dtype:
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=host.dtype))
    return type(distributed)(host, spec, requires_grad=False)


def same_layout(left: Tensor, right: Tensor) -> bool:
    """Whether elements in storage order are the same elements of both."""
    if left.shape != right.shape:
        return False
    return all(
        a == b
        for a, b, size in zip(left.stride(), right.stride(), left.shape)
        if size > 1
    )


def is_dense(tensor: Tensor) -> bool:
    """Strided, no gaps and no overlaps: its elements fill one run of memory."""
    if tensor.layout is not torch.strided:
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def may_swap(param: Tensor, name: str, config: SwapOptimizerConfig) -> bool:
    """Whether a state ``name`` of ``param``, made as the original makes it, is eligible."""
    part = local(param)
    return (
        config.wants(name)
        and part.is_floating_point()
        and part.device.type not in ("cpu", "meta")
        and part.layout is torch.strided
        and not is_traceable_wrapper_subclass(part)
        and not isinstance(part, FakeTensor)  # a shape without memory, whatever its device
        and part.numel() >= max(config.min_numel, 1)
    )


def may_adopt(param: Tensor, name: str, value: object, config: SwapOptimizerConfig) -> bool:
    """Whether the existing state ``value`` is eligible: see ``may_swap``, and its own memory.

    A host tensor is always copied, so only one that is on the device must own its storage.
    """
    if not isinstance(value, Tensor) or not may_swap(param, name, config):
        return False
    part, mine = local(value), local(param)
    if (
        (as_dtensor(value) is None) != (as_dtensor(param) is None)
        or not part.is_floating_point()
        or part.layout is not torch.strided
        or is_traceable_wrapper_subclass(part)
        or not same_layout(part, torch.empty_like(mine, device="meta"))
    ):
        return False
    if part.device.type == "cpu":
        return True
    return (
        part.device == mine.device
        and part.untyped_storage().nbytes() == part.numel() * part.element_size()
        and storage_use_count(part) == SOLE_OWNER
    )


def is_left_behind(param: Tensor, param_state: ParamState, name: str) -> bool:
    """Whether a state is on the host, cut out of a swapped one perhaps, and ``param`` is not."""
    value = param_state.get(name)
    return (
        isinstance(value, Tensor)
        and local(value).device.type == "cpu"
        and local(param).device.type not in ("cpu", "meta")
    )


def moved_to(device: torch.device, value: Tensor) -> Tensor:
    """A copy of a state on ``device``, distributed as it was."""
    return shown_as(value, local(value).to(device))


def make_slot(param: Tensor, name: str, like: Tensor, state: ParamState) -> TorchSlot:
    """A pending slot for the state ``name`` of ``param``, with the dtype and layout of ``like``."""
    layout = torch.empty_like(local(like), device="meta")
    return TorchSlot(
        name, tuple(layout.shape), layout.stride(), layout.dtype, local(param).device,
        layout.numel(), layout.numel() * layout.element_size(), owner=param, param_state=state,
    )


def can_cut(unit: TorchUnit) -> bool:
    """Whether pieces of the unit's parameter, gradient and states are the same elements."""
    param, grad = unit.param, unit.grad
    if unit.repeats > 1 or as_dtensor(param) is not None or not is_dense(param):
        return False
    if not same_layout(param, grad) or is_traceable_wrapper_subclass(grad):
        return False
    for name in STATE_KEYS:
        value = unit.param_state.get(name)
        if isinstance(value, Tensor) and not same_layout(param, local(value)):
            return False
    return True


def piece_of(tensor: Tensor, unit: UpdateUnit[Tensor]) -> Tensor:
    """The elements of ``tensor`` that a piece stands for, in storage order, as a 1-D view."""
    start = tensor.storage_offset() + unit.start_numel
    return tensor.as_strided((unit.numel,), (1,), start)


def may_load(param: Tensor, name: str, value: object, config: SwapOptimizerConfig) -> bool:
    """Whether a loaded ``value`` is eligible. It keeps its strides, as the original keeps them."""
    return (
        isinstance(value, Tensor)
        and may_swap(param, name, config)
        and (as_dtensor(value) is None) == (as_dtensor(param) is None)
        and value.is_floating_point()
        and value.shape == param.shape
        and local(value).shape == local(param).shape
        and is_dense(local(value))
    )


def default_to_foreach(params: list[Tensor]) -> bool:
    """Whether the original would take its foreach implementation for ``params`` by default."""
    _, foreach = _default_to_fused_or_foreach(params, differentiable=False, use_fused=False)
    return foreach


def check_fused_param(param: Tensor) -> None:
    """The original's error for a parameter that its fused implementation cannot take."""
    _device_dtype_check_for_fused(param)


def scalar_dtype(is_fused: bool) -> torch.dtype:
    """The dtype of ``step``."""
    dtype: torch.dtype = _get_scalar_dtype(is_fused=is_fused)
    return dtype


class Incoming:
    """Stands for a value that goes to the host, opaque to the original's ``load_state_dict``.

    That would cast and move every tensor it sees to the parameter's device.
    """
