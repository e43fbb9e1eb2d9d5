"""Starting the first copy-ins while backward still computes."""
from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor
from torch.utils.hooks import RemovableHandle


class Prefetches(Protocol):
    """A swap optimizer."""

    def prefetch(self) -> None: ...


class PrefetchHook:
    """Calls the optimizer's ``prefetch()`` when backward has finished its first gradient.

    Once per step: with gradient accumulation that is in the first backward after a step.
    """

    def __init__(self, optimizer: Prefetches) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._handles: list[RemovableHandle] = []
        self.has_fired = False

    def attach(self, params: Iterable[Tensor]) -> None:
        """Listen to the gradients of ``params``; one that needs none now is never listened to."""
        for param in params:
            if param.requires_grad and param.is_leaf:
                self._handles.append(param.register_post_accumulate_grad_hook(self._on_gradient))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _on_gradient(self, _: Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is not None and not self.has_fired:
            self.has_fired = True
            optimizer.prefetch()
