"""From an optimizer's state Parameters to slots and back: what is swapped, what is shown."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from mindspore import Parameter, Tensor, nn

from swap_adam.config import SwapOptimizerConfig
from swap_adam.mindspore.backend import MindSporeBackend, host_owner, is_held
from swap_adam.slot import SwapSlot, UpdateUnit


@dataclass(eq=False)
class MindSporeSlot(SwapSlot[Tensor]):
    """A slot together with the optimizer's Parameter, which at rest *is* the host tensor."""

    state: Parameter = field(kw_only=True)
    owner: object = None

    def publish(self) -> None:
        """Make the optimizer's Parameter the host tensor."""
        assert self.cpu_tensor is not None
        show(self.state, self.cpu_tensor)
        self.logical_tensor = self.state
        self.owner = host_owner(self.cpu_tensor)

    @property
    def pointer(self) -> int:
        """Where its host tensor is; 0 before it has one."""
        return self.cpu_tensor.data_ptr() if self.cpu_tensor is not None else 0

    @property
    def is_at_rest(self) -> bool:
        """Whether the optimizer's Parameter is the host tensor."""
        return self.cpu_tensor is not None and local(self.state).data_ptr() == self.pointer

    @property
    def is_replaced(self) -> bool:
        """Whether the user has put another tensor into the Parameter, or another view of it."""
        value = local(self.state)
        return (
            value.data_ptr() != self.pointer
            or tuple(value.shape) != self.shape
            or not value.is_contiguous()
        )

    @property
    def is_viewed(self) -> bool:
        """Whether somebody has a NumPy view of the host tensor."""
        # The slot's attribute, `is_held`'s parameter and the argument of getrefcount.
        return is_held(self.owner, own_references=3)

    def check_replacement(self) -> None:
        """Refuse what the user has put into the Parameter if it does not fit.

        Raises:
            ValueError: another shape or dtype.
        """
        value = local(self.state)
        if tuple(value.shape) != self.shape or value.dtype != self.dtype:
            raise ValueError(
                f"the state {self.state.name} was replaced by a tensor of shape "
                f"{tuple(value.shape)} and dtype {value.dtype}; it must have shape {self.shape} "
                f"and dtype {self.dtype}: set it to such a tensor before the next update"
            )

    def detach(self) -> None:
        """Give the Parameter a copy of what it shows, which nothing else writes to."""
        show(self.state, Tensor.from_numpy(local(self.state).asnumpy().copy()))

    def adopt(self, backend: MindSporeBackend) -> None:
        """Take the value that the user has put into the Parameter. The caller has checked it."""
        assert self.cpu_tensor is not None
        backend.to_host(self.cpu_tensor, local(self.state))
        self.publish()


@dataclass(eq=False)
class MindSporeUnit(UpdateUnit[Tensor]):
    """A parameter's unit with the Parameters of all its states, swapped or not."""

    resting: Mapping[str, Parameter] = field(kw_only=True)

    def places(self) -> dict[int, object]:
        """Where its states are now, with what keeps the memory theirs: loading a checkpoint
        changes all of them, and no new tensor may come to lie where an old one was."""
        return {
            local(state).data_ptr(): local(state).asnumpy() for state in self.resting.values()
        }

    def state(self, name: str) -> Tensor:
        """What the update uses: the view in the staging area, or the state on the device."""
        return self.states[name] if name in self.states else local(self.resting[name])


def local(tensor: Tensor) -> Tensor:
    """The local part of HyperParallel's distributed tensors, any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def show(state: Parameter, value: Tensor) -> None:
    """Bind the Parameter ``state``, or the local part of a distributed one, to ``value``."""
    part = local(state)
    if isinstance(part, Parameter):
        part.set_data(value)
    else:
        part.data = value


def unique_pointers(tensors: Sequence[Tensor]) -> set[int]:
    """The addresses that only one of ``tensors`` has."""
    seen: set[int] = set()
    shared: set[int] = set()
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        pointer = local(tensor).data_ptr()
        (shared if pointer in seen else seen).add(pointer)
    return seen - shared


def may_swap(
    state: Parameter, name: str, config: SwapOptimizerConfig, pointers: set[int]
) -> bool:
    """Whether ``state`` is eligible; ``pointers`` are those of tensors that share no memory.

    Where it is does not count: on MindSpore a state gets its device memory with the first update.
    """
    value = local(state)
    return (
        config.wants(name)
        and value.is_floating_point()
        and value.numel() >= max(config.min_numel, 1)
        and value.is_contiguous()
        and value.data_ptr() in pointers
        and value.untyped_storage().nbytes() == value.nbytes
    )


def make_slot(state: Parameter, name: str, target: str) -> MindSporeSlot:
    """A pending slot for ``state``, called ``name`` here."""
    value = local(state)
    return MindSporeSlot(
        name, tuple(value.shape), tuple(value.stride()), value.dtype, target, value.numel(),
        value.nbytes, state=state,
    )


@contextmanager
def shadowed(
    optimizer: nn.Optimizer, before: dict[str, object], **attributes: object
) -> Iterator[None]:
    """Give ``optimizer`` other attributes for a while, past ``Cell.__setattr__``.

    That one would register every tensor it sees as a Parameter of the cell. What they were is kept
    in ``before``, where the end of the step finds it, should an interrupt strike in the clean-up.
    """
    unshadow(optimizer, before)
    before.update({name: optimizer.__dict__[name] for name in attributes})
    try:
        optimizer.__dict__.update(attributes)
        yield
    finally:
        unshadow(optimizer, before)


def unshadow(optimizer: nn.Optimizer, before: dict[str, object]) -> None:
    """Give ``optimizer`` back what :func:`shadowed` has taken, if that is still to be done."""
    optimizer.__dict__.update(before)
    before.clear()
