"""What the three MindSpore optimizers share: the step around the pipeline, states, refusals."""
from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import mindspore
from mindspore import COOTensor, CSRTensor, Parameter, Tensor
from mindspore.common.sparse_tensor import RowTensorInner

from swap_adam.config import STATE_KEYS, Configuration, SwapOptimizerConfig, as_config
from swap_adam.device import DeviceSwap
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
from swap_adam.errors import add_note
from swap_adam.mixin import SwapPipelineMixin
from swap_adam.schedule import Schedule
from swap_adam.schedule.builder import PlanOptions, partition_units
from swap_adam.slabs import SlabPlan, plan_group_slabs
from swap_adam.slot import Residency, SwapSlot, UpdateUnit
from swap_adam.swap import Swap
from swap_adam.update import Progress, Update

SPARSE = (RowTensorInner, COOTensor, CSRTensor)

if TYPE_CHECKING:
    from mindspore.nn import Optimizer as _Base
else:
    _Base = object  # a mixin: the optimizer class comes behind it


# MindSpore runs Python's operations from one thread at a time: with two, updates are lost without
# a word, and the originals abort the process. Re-entrant, for a signal handler that calls another
# optimizer.
_one_thread = threading.RLock()


@dataclass(eq=False)
class Call:
    """A call of an optimizer that no other may disturb."""

    what: str


class RunningParameters(OrderedDict[str, Parameter]):
    """The Parameters of an optimizer during a step: found by their names, but not walked.

    Whatever saves or loads a cell walks them, and would find some states before and some after
    their update.
    """

    def _refuse(self, *_: object) -> Any:
        raise RuntimeError(
            "the optimizer's Parameters cannot be saved, loaded or listed now: a step is running, "
            "and some of its states are half way; do it between two steps (a signal handler can "
            "set a flag that the training loop reads)"
        )

    __iter__ = __reversed__ = keys = values = items = _refuse


@dataclass(eq=False)
class Step(Call):
    """What one step has read and returned.

    In an object of its own: a Cell registers every Parameter that is set as its attribute, and
    a learning rate is one.
    """

    what: str = "a step"
    gradients: tuple[Tensor, ...] = ()
    lr: Any = None  # as the original has read it: one, or one per parameter
    weight_decay: Any = None
    beta_powers: tuple[Tensor, ...] = ()
    counters: list[tuple[Parameter, Tensor]] = field(default_factory=list)
    has_updated: bool = False  # an update has begun
    is_explained: bool = False  # the error says how far the step has come
    results: dict[int, object] = field(default_factory=dict)


class MindSporeSwap(Swap[Tensor, Any]):
    """What the MindSpore half adds to the machine: one unit per parameter, for good."""

    def __init__(
        self,
        config: SwapOptimizerConfig,
        schedule: type[Schedule[Tensor, Any]],
        recovery: str,
        has_amsgrad: bool,
    ) -> None:
        super().__init__(config, schedule, recovery, check_held=False)
        self.has_amsgrad = has_amsgrad  # when it was made
        self.units: list[MindSporeUnit] = []
        self.step = Step()
        # Where the states of what is torn were then: what has been replaced since is elsewhere.
        self.torn_places: dict[int, dict[int, object]] = {}
        # Attributes of the optimizer that :func:`shadowed` has taken for a while.
        self.shadowed: dict[str, object] = {}
        self.calls: dict[str, Call] = {}  # the one that runs
        self.params: OrderedDict[str, Parameter] | None = None  # the optimizer's, while it does

    def explain(self, progress: Progress, describe_param: Callable[[int], str]) -> str:
        self.step.is_explained = True
        return super().explain(progress, describe_param)


def plan_host(
    registered: Sequence[MindSporeUnit],
    schedule: type[Schedule[Tensor, Any]],
    options: PlanOptions,
    slots: Sequence[SwapSlot[Tensor]],
) -> SlabPlan:
    """What one transfer moves is a slab of its own."""
    units = [unit for unit in registered if unit.slots]
    batch_of = {
        id(slot): index
        for index, batch in enumerate(partition_units(units, schedule, options).batches)
        for piece in batch
        for slot in units[piece.unit_index].slots
    }
    return plan_group_slabs(
        [slot.storage_nbytes for slot in slots],
        [
            schedule.shares_slab(batch_of[id(slot)], slot.dtype, index)
            for index, slot in enumerate(slots)
        ],
    )


class MindSporeUpdate:
    """One step by an optimizer's own methods; see :class:`swap_adam.update.Update`.

    It lives as long as the step, so it may hold the optimizer.
    """

    memory_key = None

    def __init__(self, optimizer: MindSporeSwapMixin) -> None:
        self._optimizer = optimizer

    def can_cut(self, unit: UpdateUnit[Tensor]) -> bool:
        return False

    def scratch(self, units: Sequence[UpdateUnit[Tensor]]) -> Sequence[Sequence[int]]:
        return [self._optimizer.scratch_sizes(units)]

    def split_resident(
        self, units: Sequence[UpdateUnit[Tensor]], limit_nbytes: int | None
    ) -> Sequence[Sequence[UpdateUnit[Tensor]]]:
        return [units] if units else []

    advances = False  # what it advances is put back where nothing was updated

    def begin(self) -> None:
        self._optimizer.begin_update()

    def has_written(self) -> bool:
        return True

    def run(self, units: Sequence[UpdateUnit[Tensor]]) -> None:
        step = self._optimizer._swap.step
        step.has_updated = True
        mine = cast(Sequence[MindSporeUnit], units)  # no other kind is made here
        for unit, result in zip(mine, self._optimizer.update_units(mine), strict=True):
            step.results[unit.param_index] = result


class MindSporeSwapMixin(SwapPipelineMixin[Tensor, Any], _Base):
    """Placed before an optimizer class of MindSpore; the subclass brings its arithmetic.

    At rest every swapped state Parameter *is* its host tensor, so that whatever walks a cell's
    Parameters (saving, loading) finds it. Nothing can tell us that somebody reads one, so
    a call returns only when the last copy-out has landed.

    [Note: interrupts] One may strike at any line. What must be done however a call ends is
    therefore done at the end of a ``try``, and once more in its ``except``, never in a ``finally``.
    """

    # A checkpoint is loaded over the Parameters themselves.
    recovery = "load_param_into_net()"
    # The original's attribute for each state, by the name that the configuration uses.
    state_attributes: ClassVar[dict[str, str]]
    default_packed = False
    # Whether its operations write through views, see [Note: views] in backend.py.
    takes_views = False
    original: ClassVar[type]

    _swap: MindSporeSwap

    # What a subclass brings

    @classmethod
    def refuse_options(cls, optimizer: Any) -> None:
        """Raise ValueError for options of ``optimizer`` that cannot be honoured."""
        if optimizer.use_parallel:
            raise ValueError(
                f"use_parallel=True (enable_parallel_optimizer) is not supported by "
                f"{cls.original.__name__} with swapping: it shards the states itself; set "
                "enable_parallel_optimizer=False"
            )

    @classmethod
    def has_amsgrad(cls, optimizer: Any) -> bool:
        """Whether ``optimizer`` has a state ``max_exp_avg_sq``."""
        raise NotImplementedError

    def read_step(self) -> None:
        """What the original does before its update: what it reads goes into ``_swap.step``."""

    def begin_update(self) -> None:
        """What the original advances once per step, now that all device memory is there."""
        self._swap.step.counters = [(counter, counter.clone()) for counter in self.counters()]

    def sparse_error(self, grad: object) -> type[Exception]:
        """What the original raises for the sparse gradient ``grad``."""
        return TypeError

    def counters(self) -> tuple[Parameter, ...]:
        """What :meth:`begin_update` advances."""
        return self.global_step,

    def update_units(self, units: Sequence[MindSporeUnit]) -> Iterable[object]:
        """Update ``units`` with the original's arithmetic; what it returns for each of them."""
        raise NotImplementedError

    def scratch_sizes(self, units: Sequence[UpdateUnit[Tensor]]) -> Sequence[int]:
        """The temporaries that updating ``units`` has at a time, in bytes each."""
        raise NotImplementedError

    # Life

    def attach(self, config: Configuration | None) -> None:
        """Move the states out: called at the end of the constructor, or by the conversion.

        Raises:
            ValueError: the optimizer's options, or the configuration, cannot be honoured.
            TypeError: ``config`` is no configuration.
            MemoryError: not enough pinned memory; nothing has changed.
        """
        config = as_config(config)
        self.refuse(self, config)
        with _one_thread:
            self._attach(config)

    def _attach(self, config: SwapOptimizerConfig) -> None:
        self._swap = MindSporeSwap(
            config, self.schedule_type(config), self.recovery, self.has_amsgrad(self)
        )
        self._swap.units.extend(
            MindSporeUnit(
                index, index, local(param), local(param), [], local(param).numel(),
                resting=self.resting_states(index),
            )
            for index, param in enumerate(self.parameters)
        )
        target = mindspore.get_context("device_target")
        factory = find_backend(target)
        if factory is not None:
            self._move_out(target, factory())

    def undo_attach(self) -> None:
        """Put on the device again what an interrupted :meth:`attach` has moved out."""
        with _one_thread:
            for slot in self._slots() if "_swap" in self.__dict__ else ():
                if slot.is_at_rest:
                    show(slot.state, self._backend().to_device(slot.cpu_tensor))

    @classmethod
    def refuse(cls, optimizer: Any, config: SwapOptimizerConfig) -> None:
        """Raise for what this class cannot honour, with ``optimizer``, which may still be the
        original, left as it is.

        Raises:
            ValueError: naming what, and what to do instead.
        """
        name = cls.original.__name__
        if mindspore.get_context("mode") != mindspore.PYNATIVE_MODE:
            raise ValueError(
                "mode=GRAPH_MODE is not supported: a compiled graph cannot move states between "
                "its kernels; call mindspore.set_context(mode=mindspore.PYNATIVE_MODE)"
            )
        if config.packed_swap and not cls.default_packed:
            raise ValueError(
                f"packed_swap=True is not supported for {name}: its kernels must have every state "
                "in memory of its own; use packed_swap=None or False"
            )
        if config.include_master_params and "master_param" not in cls.state_attributes:
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
        if keys is not None and "max_exp_avg_sq" in keys and not cls.has_amsgrad(optimizer):
            raise ValueError(
                f"state_keys={keys!r} names max_exp_avg_sq, which exists only with AMSGrad: "
                "construct the optimizer with it, or omit the key"
            )
        cls.refuse_options(optimizer)

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
            RuntimeError: the device has no memory for them, or a step is running; nothing has
                changed.
        """
        call = Call("unswap_optimizer()")
        try:
            self._enter(call)
            with _one_thread:
                self._swap.wait_landed()
                self._adopt_replaced(call.what)
                slots = self._slots()
                made = [self._backend().to_device(slot.cpu_tensor) for slot in slots]
                for slot, value in zip(slots, made):
                    show(slot.state, value)
            self._leave(call)
        except BaseException:
            self._leave(call)
            raise

    # Step

    def _enter(self, call: Call) -> None:
        """Let nobody else in until :meth:`_leave`.

        Raises:
            RuntimeError: somebody is; nothing has changed.
        """
        running = self._swap.calls.setdefault("running", call)  # one of two threads
        if running is not call:
            raise RuntimeError(
                f"{call.what} cannot begin while {running.what} is running: it was called from "
                "inside (a signal handler, a hook) or from another thread; call one after the "
                "other"
            )

    def _leave(self, call: Call) -> None:
        """Let others in, if ``call`` was let in; may be called again."""
        if self._swap.calls.get("running") is call:
            self.__dict__["_params"] = self._swap.params or self._params
            self._swap.params = None
            del self._swap.calls["running"]

    @forbid_in_graphs
    def swap_optimizers_run_in_pynative_mode_only(self, gradients: Sequence[Tensor]) -> object:
        """One update of every parameter: what ``construct`` is. Its name is for the compiler,
        which prints it where a graph contains it.

        Raises:
            ValueError: an option was changed to what is not supported, or a gradient is missing
                or does not fit; nothing has changed.
            RuntimeError: parameters are half updated by an earlier fault, or a step is running;
                nothing has changed.
        """
        step = Step()
        try:
            self._enter(step)
            with _one_thread:
                result = self._step(step, gradients)
            self._leave(step)
        except BaseException:
            self._leave(step)
            raise
        return result

    def _step(self, step: Step, gradients: Sequence[Tensor]) -> object:
        self._refuse_changed_options()
        step.gradients = self._check_gradients(gradients)
        try:
            self._swap.step = step
            self._swap.wait_landed()  # nothing, unless an interrupt has cut the wait below short
            self._swap.params = self._params
            self.__dict__["_params"] = RunningParameters(self._params)
            with no_grad():
                self._adopt_replaced("step()")
                self._leave_viewed()
                self._own_memory()
                result = self.run_original()
            self._swap.wait_landed()
            self._drop_gradients()
        except BaseException as error:
            self._recover(step, error)
            raise
        return result

    def _recover(self, step: Step, error: BaseException) -> None:
        """After a fault at any line of a step: what has been updated lands, and if it cannot, is
        torn."""
        unshadow(self, self._swap.shadowed)
        if step.has_updated and not step.is_explained:
            self._note(error, Progress(set(step.results)))
        torn = self._swap.torn
        in_flight = {
            unit.param_index for unit in self._swap.units
            if any(slot.residency in (Residency.DEVICE, Residency.D2H) for slot in unit.slots)
        }
        try:
            self._tear(torn | in_flight)
            with no_grad():
                if step.has_updated:
                    self.finish_step()
                elif not torn:
                    for counter, value in step.counters:
                        counter.copy_(value)
            self._swap.wait_landed()
            self._tear(torn)
        except BaseException as second:
            progress = Progress(set(step.results) - self._swap.torn, torn=self._swap.torn)
            self._note(second, progress)
            raise
        self._drop_gradients()

    def _note(self, error: BaseException, progress: Progress) -> None:
        progress.count = len(self._swap.units)
        add_note(error, self._swap.explain(progress, self.describe_param))

    def _tear(self, torn: set[int]) -> None:
        """Refuse to go on until all states of the parameters ``torn`` have been replaced, for
        those that are torn already: since then."""
        before = self._swap.torn_places
        self._swap.torn_places = {
            index: before.get(index) or self._swap.units[index].places() for index in torn
        }
        self._swap.torn = torn

    def _drop_gradients(self) -> None:
        self._swap.step = Step()
        for unit in self._swap.units:
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
        self._swap.run_step(self)
        return self.results()

    def results(self) -> tuple[object, ...]:
        """What the original's update returned for each parameter, in their order."""
        return tuple(self._swap.step.results[index] for index in range(len(self._swap.units)))

    def prepare_step(self) -> Update[Tensor]:
        self.read_step()
        return MindSporeUpdate(self)

    def iter_update_units(self, update: Update[Tensor]) -> Iterable[UpdateUnit[Tensor]]:
        gradients = self._swap.step.gradients
        for unit, param, grad in zip(self._swap.units, self.parameters, gradients):
            unit.param, unit.grad = local(param), local(grad)
        return list(self._swap.units)

    def describe_param(self, param_index: int) -> str:
        param = self.parameters[param_index]
        return f"{param.name} (shape {tuple(param.shape)})"

    def _refuse_changed_options(self) -> None:
        """Refuse options that were set after construction and would be ignored."""
        self.refuse_options(self)
        if self.has_amsgrad(self) != self._swap.has_amsgrad:
            raise ValueError(
                "AMSGrad was switched after the optimizer was made, which has its states or has "
                "not; set it back, and make an optimizer with it"
            )

    def _check_gradients(self, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if not isinstance(gradients, (tuple, list)) or len(gradients) != len(self.parameters):
            is_sequence = isinstance(gradients, (tuple, list))
            got = len(gradients) if is_sequence else f"an object of type {type(gradients).__name__}"
            raise ValueError(
                f"expected a tuple of {len(self.parameters)} gradients, one per parameter, got "
                f"{got}; compute them with respect to optimizer.parameters"
            )
        for index, (param, grad) in enumerate(zip(self.parameters, gradients)):
            if isinstance(grad, SPARSE):
                raise self.sparse_error(grad)(
                    f"the gradient of {self.describe_param(index)} is a {type(grad).__name__}: "
                    f"{self.original.__name__} takes no sparse gradients in PyNative mode; make "
                    "the layer's gradient dense"
                )
            if not isinstance(grad, Tensor):
                what = "None" if grad is None else f"of type {type(grad).__name__}"
                raise ValueError(
                    f"the gradient of {self.describe_param(index)} is {what}, not a tensor; "
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
        states = [state for unit in self._swap.units for state in unit.resting.values()]
        for state in states:
            if state.has_init:  # made inside no_init_parameters(): it has no memory yet
                state.init_data()
        pointers = unique_pointers([*states, *self.parameters])
        for unit in self._swap.units:
            unit.slots.extend(
                make_slot(state, name, target)
                for name, state in unit.resting.items()
                if may_swap(state, name, config, pointers)
            )
        swapped = [unit for unit in self._swap.units if unit.slots]
        device = DeviceSwap(
            backend,
            self._swap.schedule,
            self._swap.plan_options,
            publish=lambda slot: None,
            # Without the machine, which owns the device: see Lifecycle.
            plan_host=partial(
                plan_host, self._swap.units, self._swap.schedule, self._swap.plan_options
            ),
        )
        self._swap.devices[target] = device
        device.register(swapped)
        # Copied first and shown then: on failure no Parameter has changed.
        for slot in self._slots():
            assert slot.cpu_tensor is not None
            backend.to_host(slot.cpu_tensor, local(slot.state))
        for slot in self._slots():
            slot.publish()

    def _slots(self) -> list[MindSporeSlot]:
        slots = [slot for unit in self._swap.units for slot in unit.slots]
        return cast("list[MindSporeSlot]", slots)  # no other kind is made here

    def _backend(self) -> MindSporeBackend:
        device, = self._swap.devices.values()
        return cast(MindSporeBackend, device.backend)

    def _adopt_replaced(self, what: str) -> None:
        """Take what the user has put into the Parameters, after all of it has been checked; for
        ``what``, which is refused while some of it is still to come."""
        self._tear({
            index for index in self._swap.torn
            if self._swap.units[index].places().keys() & self._swap.torn_places[index].keys()
        })
        self._swap.check_not_torn(what, self.describe_param)
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
        if self.takes_views:
            return
        swapped = {id(slot.state) for slot in self._slots()}
        states = [state for unit in self._swap.units for state in unit.resting.values()]
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
            device, = self._swap.devices.values()
            device.store.replace(moving)
            for slot in moving:
                slot.publish()
