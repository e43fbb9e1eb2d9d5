"""What the torch optimizers share: the machine in an optimizer's clothes, states, checkpoints."""
from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from swap_adam.config import Configuration, SwapOptimizerConfig, as_config
from swap_adam.device import DeviceReport
from swap_adam.mixin import SwapPipelineMixin
from swap_adam.slot import UpdateUnit
from swap_adam.torch.backend import check_graph_capture, outside_graphs
from swap_adam.torch.loading import Loading
from swap_adam.torch.prefetch_hook import PrefetchHook
from swap_adam.torch.state import ParamState
from swap_adam.torch.swap import TorchSwap, states_of
from swap_adam.torch.update import ParamGroup, TorchUpdate
from swap_adam.update import Update

StateDict = dict[str, Any]

# Flags of a group that nothing here can honour, and what to use instead.
REFUSED: Mapping[str, str] = {
    "foreach": "foreach=None or foreach=False: one call over all tensors would need all states on "
               "the device, None uses foreach batch by batch",
    "capturable": "capturable=False",
    "differentiable": "differentiable=False",
}

if TYPE_CHECKING:
    _Base = Optimizer
else:
    _Base = object  # a mixin: the optimizer class comes behind it


class TorchSwapMixin(SwapPipelineMixin[Tensor, torch.Event], _Base):
    """Placed before a ``torch.optim`` class. A subclass says by three attributes what it is.

    ``step()`` is issued on the stream that is current when it is called, and on two copy streams
    per device. It returns with the last copies still in flight: parameters need no further wait
    on the same stream, and reading ``optimizer.state`` or calling ``state_dict()`` waits.
    """

    # What `unswap_optimizer` turns an instance into.
    original: ClassVar[type[Optimizer]]
    update_type: ClassVar[type[TorchUpdate]]
    # Flags of a group that cannot be honoured, and what to use instead.
    refused: ClassVar[Mapping[str, str]]

    param_groups: list[ParamGroup]
    defaults: dict[str, Any]
    _swap: TorchSwap

    # Life

    def init_swap(self, config: Configuration | None) -> None:
        """Own a machine: called by the constructor, or by the conversion.

        Raises:
            ValueError: the configuration, or a group's flags, cannot be honoured.
            TypeError: ``config`` is no configuration.
        """
        config = as_config(config)
        groups = self.__dict__.get("param_groups", [])  # none yet when unpickling
        self.refuse(config, groups)
        self._swap = TorchSwap(
            config, self.schedule_type(config), self.update_type, self.recovery
        )
        if config.prefetch_in_backward:
            self._swap.prefetch_hook = PrefetchHook(self)
            for group in groups:
                self._swap.prefetch_hook.attach(group["params"])

    @classmethod
    def refuse(cls, config: SwapOptimizerConfig, groups: Iterable[ParamGroup]) -> None:
        """Raise for a configuration, or groups, that this optimizer cannot honour."""
        groups = list(groups)
        if config.include_master_params:
            raise ValueError(
                "include_master_params=True needs an optimizer that owns fp32 masters (MindFormers "
                "AdamW); torch optimizers own none: leave it at False"
            )
        for key in config.state_keys or ():
            if key in cls.update_type.amsgrad_moments:
                if groups and not any(group["amsgrad"] for group in groups):
                    raise ValueError(
                        f"state_keys={config.state_keys!r} names {key}, which exists only with "
                        "amsgrad=True: set it in at least one group or omit the key"
                    )
            elif key not in cls.update_type.moments:
                has = ", ".join(cls.update_type.moments)
                raise ValueError(
                    f"state_keys={config.state_keys!r} names {key}, which {cls.__name__} does not "
                    f"have; it has: {has}"
                )
        for group in groups:
            cls.refuse_group(group)

    @classmethod
    def refused_flags(cls, group: ParamGroup) -> list[str]:
        """The flags of a group that cannot be honoured."""
        return [flag for flag in cls.refused if group.get(flag)]

    @classmethod
    def refuse_group(cls, group: ParamGroup) -> None:
        """Raise ValueError for a group whose flags cannot be honoured."""
        for flag in cls.refused_flags(group):
            raise ValueError(
                f"{cls.__name__} does not support {flag}=True; use {cls.refused[flag]}"
            )

    def add_param_group(self, param_group: ParamGroup) -> None:
        if "_swap" not in self.__dict__:  # the original's constructor adds the first ones
            super().add_param_group(param_group)
            return
        with self._swap.guard.lock:
            self._swap.guard.check("add_param_group()")
            if isinstance(param_group, dict):
                self.refuse_group({**self.defaults, **param_group})
            super().add_param_group(param_group)
            if self._swap.prefetch_hook is not None:
                self._swap.prefetch_hook.attach(self.param_groups[-1]["params"])

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
        self._run_step()
        return loss

    @outside_graphs
    def _run_step(self) -> None:
        swap = self._swap
        with swap.guard.lock:
            swap.guard.check("step()")
            try:
                swap.guard.is_stepping = True
                swap.forget_mended(states_of(self))
                swap.run_step(self)
                self._end_step()
            except BaseException:
                swap.mark_torn()
                self._end_step()
                raise

    def _end_step(self) -> None:
        """However it went. Not in a `finally`, where an interrupt would cut it short: what it cuts
        short in the `try` is done again in the `except`."""
        # Gradients belong to the user, who may free them now: no unit keeps one alive.
        for unit in self._swap.units.values():
            unit.grad = unit.param
        if self._swap.prefetch_hook is not None:
            self._swap.prefetch_hook.has_fired = False
        self._swap.guard.is_stepping = False

    def _init_group(self, group: ParamGroup, *_: object) -> bool:
        """The original's ``step`` was bound before the conversion (accelerate keeps it): do ours.

        Only that one calls this, group by group, to collect what it then updates: nothing.
        """
        if group is self.param_groups[0]:
            self._run_step()
        return False

    def prepare_step(self) -> Update[Tensor]:
        check_graph_capture(self)
        for group in self.param_groups:
            self.refuse_group(group)
        return self.make_update()

    def make_update(self) -> TorchUpdate:
        """The arithmetic of a step that is about to begin."""
        return self.update_type(self.param_groups)

    def iter_update_units(self, update: Update[Tensor]) -> Iterable[UpdateUnit[Tensor]]:
        assert isinstance(update, TorchUpdate)
        return self._swap.collect(
            self.param_groups, states_of(self), update, self.describe_param
        )

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
        states = states_of(self)
        return sys.getrefcount(states) > 3 or any(
            unit.is_container_held() for unit in self._swap.units.values()
        )

    def swap_report(self) -> dict[str, DeviceReport]:
        with self._swap.guard.lock:
            self._swap.guard.check("swap_report()")
            reports = super().swap_report()
            self._swap.report_resident(reports, self.param_groups, self.describe_param)
            return reports

    # State and checkpoints

    @property
    def state(self) -> defaultdict[Tensor, ParamState]:
        """Every parameter's state. Reading it waits on the host for copies in flight.

        It is live: in another thread, take :meth:`state_dict` to have the states between two
        steps. Where a fault has left parameters half updated, theirs are what it left.

        Raises:
            RuntimeError: from inside a step.
        """
        if "_swap" in self.__dict__:
            with self._swap.guard.lock:
                self._swap.guard.check("reading the optimizer's states")
                self._swap.wait_landed()
                self._swap.shown.write_back()
                self._swap.check_held = True
        try:
            states: defaultdict[Tensor, ParamState] = self.__dict__["state"]
        except KeyError:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute 'state'")
        return states

    @state.setter
    def state(self, states: defaultdict[Tensor, ParamState]) -> None:
        self.__dict__["state"] = states
        if "_swap" in self.__dict__:
            self._swap.check_held = True  # whoever sets it holds it

    def state_dict(self) -> StateDict:
        """The original's state dict, all its moments on the host.

        Waits on the host for copies in flight. Swapped states are shown where they are: nothing
        is allocated or moved for them; what stays on the device is copied to the host.
        What is in it stays as it is now: what is still held when a later step writes keeps its
        bytes, and the step uses fresh ones. Until then, in-place edits of it count.

        Raises:
            RuntimeError: parameters are half updated by an earlier fault, or from inside a step.
        """
        with self._swap.guard.lock:
            self._swap.guard.check("state_dict()")
            self._swap.forget_mended(states_of(self))
            self._swap.check_not_torn("state_dict()", self.describe_param)
            states: StateDict = super().state_dict()
            # The entries of the original's dict are live, so they would show later tensors.
            if isinstance(states.get("state"), dict):  # a hook may have made something else of it
                states["state"] = {
                    key: self._swap.shown.show(value) if isinstance(value, dict) else value
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
        with self._swap.guard.lock:
            self._swap.guard.check("load_state_dict()")
            loading = self._load(state_dict)
        if loading.misfits:
            warnings.warn(
                "the checkpoint has states of another shape than the parameter for "
                f"{', '.join(map(self.describe_param, loading.misfits))}: is it another model's? "
                "step() will refuse them",
                stacklevel=2,
            )
        if loading.refused_flags:
            flags = ", ".join(f"{flag}=True" for flag in sorted(loading.refused_flags))
            warnings.warn(
                f"the checkpoint's groups have {flags}, which {type(self).__name__} does not "
                "support; it keeps its own",
                stacklevel=2,
            )

    def _load(self, state_dict: StateDict) -> Loading:
        swap = self._swap
        swap.wait_landed()
        loading = Loading(swap, self.refused_flags, self.is_state_held())
        torn, swap.torn = swap.torn, set()
        # Our hooks see what the user's own have made of the dict, and run before theirs after.
        pre = self.register_load_state_dict_pre_hook(loading.hold_back)
        post = self.register_load_state_dict_post_hook(loading.bring_in, prepend=True)
        try:
            super().load_state_dict(state_dict)
        except BaseException:
            if not loading.is_done:  # else a hook of the user's has failed, after the load
                swap.torn = torn
                loading.undo()
            raise
        finally:
            pre.remove()
            post.remove()
        swap.check_held = True  # what came with the dict has not been looked at
        return loading

    def __getstate__(self) -> dict[str, Any]:
        with self._swap.guard.lock:
            self._swap.guard.check("copying or pickling the optimizer")
            return {**super().__getstate__(), "swap_config": self.swap_config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Called on a bare instance by pickle and deepcopy, and by load_state_dict.
        is_new = not hasattr(self, "_swap")  # a wrapper finds the one of what it wraps
        if is_new:
            self.init_swap(state["swap_config"])
        super().__setstate__({key: value for key, value in state.items() if key != "swap_config"})
        if is_new and self._swap.prefetch_hook is not None:
            for group in self.param_groups:
                self._swap.prefetch_hook.attach(group["params"])
