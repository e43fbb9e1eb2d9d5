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

from swap_adam.config import SwapOptimizerConfig
from swap_adam.slot import UpdateUnit
from swap_adam.torch.backend import check_graph_capture, outside_graphs
from swap_adam.torch.loading import Loading
from swap_adam.torch.prefetch_hook import PrefetchHook
from swap_adam.torch.registration import ParamGroup, Registration
from swap_adam.torch.resident import ResidentStates
from swap_adam.torch.state import ParamState, TorchUnit, can_cut

StateDict = dict[str, Any]


if TYPE_CHECKING:
    _Base = Optimizer
else:
    _Base = object  # a mixin: the optimizer class comes behind it


class TorchSwapMixin(Registration, _Base):
    """Placed before a ``torch.optim`` class; the subclass brings its arithmetic.

    ``step()`` is issued on the stream that is current when it is called, and on two copy streams
    per device. It returns with the last copies still in flight: parameters need no further wait
    on the same stream, and reading ``optimizer.state`` or calling ``state_dict()`` waits.
    """

    defaults: dict[str, Any]
    _swap_prefetch_hook: PrefetchHook | None

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

    def read_group(self, group_index: int, group: ParamGroup, params: list[Tensor]) -> None:
        """Read what the step needs of a group, ``params`` being those with a gradient."""
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
        check_graph_capture(self)
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
