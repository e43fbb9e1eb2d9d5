"""What the three MindSpore optimizers share: the step around the pipeline, states, refusals."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import mindspore
from mindspore import Parameter, Tensor

from swap_adam.config import STATE_KEYS, SwapOptimizerConfig
from swap_adam.device import DeviceSwap
from swap_adam.layout import SlabPlan, plan_group_slabs
from swap_adam.mindspore.backend import (
    MindSporeBackend,
    find_backend,
    forbid_in_graphs,
    is_view,
    no_grad,
)
from swap_adam.mindspore.state import (
    MindSporeSlot,
    MindSporeUnit,
    local,
    make_slot,
    may_swap,
    show,
    unique_pointers,
    unshadow,
)
from swap_adam.mixin import SwapPipelineMixin, weakly
from swap_adam.plan import partition_units
from swap_adam.slot import SwapSlot, UpdateUnit

if TYPE_CHECKING:
    from mindspore.nn import Optimizer as _Base
else:
    _Base = object  # a mixin: the optimizer class comes behind it


@dataclass(eq=False)
class Step:
    """What one step has read and returned.

    In an object of its own: a Cell registers every Parameter that is set as its attribute, and
    a learning rate is one.
    """

    gradients: tuple[Tensor, ...] = ()
    lr: Any = None  # as the original has read it: one, or one per parameter
    weight_decay: Any = None
    beta_powers: tuple[Tensor, ...] = ()
    has_begun: bool = False
    results: dict[int, object] = field(default_factory=dict)


class MindSporeSwapMixin(SwapPipelineMixin[Tensor, Any], _Base):
    """Placed before an optimizer class of MindSpore; the subclass brings its arithmetic.

    At rest every swapped state Parameter *is* its host tensor, so that whatever walks a cell's
    Parameters (saving, loading) finds it. Nothing can tell us that somebody reads one, so
    a call returns only when the last copy-out has landed.
    """

    # A checkpoint is loaded over the Parameters themselves.
    recovery = "load_param_into_net()"
    # The original's attribute for each state, by the name that the configuration uses.
    state_attributes: ClassVar[dict[str, str]]
    default_packed = False
    # Whether its operations write through views, see [Note: views] in backend.py.
    takes_views = False
    original: ClassVar[type]

    _swap_units: list[MindSporeUnit]
    _swap_step: Step
    _swap_torn_pointers: dict[int, set[int]]

    # What a subclass brings

    def refuse_options(self) -> None:
        """Raise ValueError for options of the optimizer that cannot be honoured."""

    def has_amsgrad(self) -> bool:
        """Whether there is a state ``max_exp_avg_sq``."""
        raise NotImplementedError

    def update_units(self, units: Sequence[MindSporeUnit]) -> Iterable[object]:
        """Update ``units`` with the original's arithmetic; what it returns for each of them."""
        raise NotImplementedError

    # Life

    def attach(self, config: SwapOptimizerConfig | None) -> None:
        """Move the states out: called at the end of the constructor, or by the conversion.

        Raises:
            ValueError: the optimizer's options, or the configuration, cannot be honoured.
            MemoryError: not enough pinned memory; nothing has changed.
        """
        config = SwapOptimizerConfig() if config is None else config
        self.refuse(config)
        self.init_swap(config)
        self._swap_units = [
            MindSporeUnit(
                index, index, local(param), local(param), [], local(param).numel(),
                resting=self.resting_states(index),
            )
            for index, param in enumerate(self.parameters)
        ]
        self._swap_step = Step()
        self._swap_torn_pointers = {}
        target = mindspore.get_context("device_target")
        factory = find_backend(target)
        if factory is not None:
            self._move_out(target, factory())

    def refuse(self, config: SwapOptimizerConfig) -> None:
        """Raise for what cannot be honoured, with the optimizer left as it is.

        Raises:
            ValueError: naming what, and what to do instead.
            TypeError: ``config`` is no configuration.
        """
        name = self.original.__name__
        if not isinstance(config, SwapOptimizerConfig):
            raise TypeError(f"swap_config must be a SwapOptimizerConfig or None, got {config!r}")
        if mindspore.get_context("mode") != mindspore.PYNATIVE_MODE:
            raise ValueError(
                "mode=GRAPH_MODE is not supported: a compiled graph cannot move states between "
                "its kernels; call mindspore.set_context(mode=mindspore.PYNATIVE_MODE)"
            )
        if config.packed_swap and not self.default_packed:
            raise ValueError(
                f"packed_swap=True is not supported for {name}: its kernels must have every state "
                "in memory of its own; use packed_swap=None or False"
            )
        if config.include_master_params and "master_param" not in self.state_attributes:
            raise ValueError(
                "include_master_params=True needs an optimizer that owns fp32 masters (MindFormers "
                f"AdamW); {name} owns none: leave it at False"
            )
        for option in (
            "allow_closure", "resident_nbytes", "keep_staging", "drain_in_step",
            "prefetch_in_backward",
        ):
            if getattr(config, option):
                raise ValueError(
                    f"{option}={getattr(config, option)!r} is for PyTorch only; leave it at "
                    f"{getattr(SwapOptimizerConfig(), option)!r}"
                )
        keys = config.state_keys
        if keys is not None and "max_exp_avg_sq" in keys and not self.has_amsgrad():
            raise ValueError(
                f"state_keys={keys!r} names max_exp_avg_sq, which exists only with AMSGrad: "
                "construct the optimizer with it, or omit the key"
            )
        if self.use_parallel:
            raise ValueError(
                f"use_parallel=True (enable_parallel_optimizer) is not supported by {name} with "
                "swapping: it shards the states itself; set enable_parallel_optimizer=False"
            )
        self.refuse_options()

    def resting_states(self, index: int) -> dict[str, Parameter]:
        """The state Parameters of parameter ``index``, by our names."""
        states = {}
        for name in STATE_KEYS:
            values = getattr(self, self.state_attributes.get(name, ""), None)
            if values is not None and self.owns_state(name, index):
                states[name] = values[index]
        return states

    def owns_state(self, name: str, index: int) -> bool:
        """Whether the state is the optimizer's own, and no alias of something else."""
        return True

    def bring_back(self) -> None:
        """Put every swapped state back on the device.

        Raises:
            RuntimeError: the device has no memory for them; nothing has changed.
        """
        self.wait_landed()
        self._adopt_replaced()
        self.check_not_torn("unswap_optimizer()")
        made = [(slot, self._backend().to_device(slot.cpu_tensor)) for slot in self._slots()]
        for slot, value in made:
            show(slot.state, value)

    # Step

    @forbid_in_graphs
    def swap_optimizers_run_in_pynative_mode_only(self, gradients: Sequence[Tensor]) -> object:
        """One update of every parameter: what ``construct`` is. Its name is for the compiler,
        which prints it where a graph contains it.

        Raises:
            ValueError: a gradient that is missing or does not fit; nothing has changed.
            RuntimeError: parameters are half updated by an earlier fault.
        """
        self._swap_step = Step(self._check_gradients(gradients))
        try:
            with no_grad():
                self._adopt_replaced()
                self._leave_viewed()
                self._own_memory()
                return self.run_original()
        except BaseException:
            self._swap_torn_pointers = {
                index: set(self._swap_units[index].pointers()) for index in self._swap_torn
            }
            raise
        finally:
            unshadow(self)
            self.wait_landed()
            self._swap_step = Step()
            for unit in self._swap_units:
                unit.grad = unit.param

    def prefetch(self) -> None:
        """Refused: a state may be written at any time up to the next update, unnoticed.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "prefetch() is not supported on MindSpore: states are Parameters that may be written "
            "up to the next update without notice; call the optimizer without it"
        )

    def run_original(self) -> object:
        """The step, with what the original returns."""
        self.run_swap_step()
        return self.results()

    def results(self) -> tuple[object, ...]:
        """What the original's update returned for each parameter, in their order."""
        return tuple(self._swap_step.results[index] for index in range(len(self._swap_units)))

    def begin_update(self) -> None:
        self._swap_step.has_begun = True

    def iter_update_units(self) -> Iterable[UpdateUnit[Tensor]]:
        gradients = self._swap_step.gradients
        for unit, param, grad in zip(self._swap_units, self.parameters, gradients):
            unit.param, unit.grad = local(param), local(grad)
        return list(self._swap_units)

    def step_batch(self, units: Sequence[UpdateUnit[Tensor]]) -> None:
        mine = [unit for unit in units if isinstance(unit, MindSporeUnit)]
        for unit, result in zip(mine, self.update_units(mine)):
            self._swap_step.results[unit.param_index] = result

    def describe_param(self, param_index: int) -> str:
        param = self.parameters[param_index]
        return f"{param.name} (shape {tuple(param.shape)})"

    def _check_gradients(self, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if not isinstance(gradients, (tuple, list)) or len(gradients) != len(self.parameters):
            count = len(gradients) if isinstance(gradients, (tuple, list)) else repr(gradients)
            raise ValueError(
                f"expected a tuple of {len(self.parameters)} gradients, one per parameter, got "
                f"{count}; compute them with respect to optimizer.parameters"
            )
        for index, (param, grad) in enumerate(zip(self.parameters, gradients)):
            if not isinstance(grad, Tensor):
                raise ValueError(
                    f"the gradient of {self.describe_param(index)} is {grad!r}, not a tensor; "
                    "freeze the parameter and leave it out of the optimizer, or pass zeros"
                )
            if grad.shape != param.shape:
                raise ValueError(
                    f"the gradient of {self.describe_param(index)} has the shape "
                    f"{tuple(grad.shape)}; it must have the parameter's"
                )
        return tuple(gradients)

    # States

    def _move_out(self, target: str, backend: MindSporeBackend) -> None:
        config = self.swap_config
        states = [state for unit in self._swap_units for state in unit.resting.values()]
        for state in states:
            if state.has_init:  # made inside no_init_parameters(): it has no memory yet
                state.init_data()
        pointers = unique_pointers([*states, *self.parameters])
        for unit in self._swap_units:
            unit.slots.extend(
                make_slot(state, name, target)
                for name, state in unit.resting.items()
                if may_swap(state, name, config, pointers)
            )
        swapped = [unit for unit in self._swap_units if unit.slots]
        device = DeviceSwap(
            backend,
            self.plan_options(self.default_packed),
            publish=lambda slot: None,
            scratch_sizes=weakly(self.scratch_sizes),
            can_cut=lambda unit: False,
            plan_host=weakly(self._plan_host),
        )
        self._swap_devices[target] = device
        device.register(swapped)
        # Copied first and shown then: on failure no Parameter has changed.
        for slot in self._slots():
            assert slot.cpu_tensor is not None
            backend.to_host(slot.cpu_tensor, local(slot.state))
        for slot in self._slots():
            slot.publish()

    def _slots(self) -> list[MindSporeSlot]:
        return [
            slot for unit in self._swap_units for slot in unit.slots
            if isinstance(slot, MindSporeSlot)
        ]

    def _backend(self) -> MindSporeBackend:
        device, = self._swap_devices.values()
        backend: MindSporeBackend = device.backend  # type: ignore[assignment]
        return backend

    def _plan_host(self, slots: Sequence[SwapSlot[Tensor]]) -> SlabPlan:
        """Slots of the same batch and dtype share a slab, per tensor each has its own."""
        sizes = [slot.storage_nbytes for slot in slots]
        options = self.plan_options(self.default_packed)
        if not options.packed:
            return plan_group_slabs(sizes, range(len(slots)))
        units = [unit for unit in self._swap_units if unit.slots]
        batch_of = {
            id(slot): index
            for index, batch in enumerate(partition_units(units, options).batches)
            for piece in batch
            for slot in units[piece.unit_index].slots
        }
        return plan_group_slabs(sizes, [(batch_of[id(slot)], slot.dtype) for slot in slots])

    def _adopt_replaced(self) -> None:
        """Take what the user has put into the Parameters, after all of it has been checked."""
        self._swap_torn = {
            index for index in self._swap_torn
            if set(self._swap_units[index].pointers()) & self._swap_torn_pointers[index]
        }
        replaced = [slot for slot in self._slots() if slot.is_replaced]
        for slot in replaced:
            slot.check_replacement()
        pointers = {slot.pointer for slot in replaced}
        for slot in replaced:
            if local(slot.state).data_ptr() in pointers:
                # The memory of a state that is about to be overwritten, its own perhaps.
                slot.detach()
        for slot in replaced:
            slot.adopt(self._backend())

    def _own_memory(self) -> None:
        """Give what the kernels write, and the user has made a view (``param[...] = value``, or
        ``set_data`` of a reshaped tensor), memory of its own: their writes would be lost.

        Raises:
            ValueError: a part of another tensor, or transposed, as the original refuses it.
        """
        if self.takes_views or self._swap_torn:
            return
        swapped = {id(slot.state) for slot in self._slots()}
        states = [state for unit in self._swap_units for state in unit.resting.values()]
        written = [*self.parameters, *(state for state in states if id(state) not in swapped)]
        # Each time: a parameter becomes a view where it is, at the same address.
        views = [param for param in written if is_view(local(param))]
        for param in views:
            value = local(param)
            if not value.is_contiguous() or value.untyped_storage().nbytes() != value.nbytes:
                raise ValueError(
                    f"{param.name} is a view of a part of another tensor, or transposed: the "
                    "update would be lost; call set_data() with a clone() of it"
                )
        for param in views:
            show(param, local(param).clone())

    def _leave_viewed(self) -> None:
        """States that somebody views go to fresh bytes, and the view stays as it is.

        With them goes all that shares their slab, since a slab is copied as a whole.
        """
        slots = self._slots()
        slabs = {slot.slab_index for slot in slots if slot.is_viewed}
        if slabs:
            moving = [slot for slot in slots if slot.slab_index in slabs]
            device, = self._swap_devices.values()
            device.store.replace(moving)
            for slot in moving:
                slot.publish()
