"""Interrupts at every line of the library, and what a checkpoint saved right then would hold."""
from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn

import swap_adam
from swap_adam.swap import swap_of

LIBRARY = str(Path(swap_adam.__file__).parent)
# A device does not forget what was issued when Python is interrupted.
SIMULATOR = str(Path(LIBRARY, "simulator"))

Values = dict[str, np.ndarray[Any, Any]]


def is_of_library(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith(LIBRARY) and not name.startswith(SIMULATOR)


def is_in_finalizer(frame: FrameType | None) -> bool:
    """Whether an exception would be printed and go no further."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


@dataclass
class Lines:
    """How many lines have been run, and where the interrupt was."""

    count: int = 0
    where: str = "nowhere"


@contextmanager
def interrupt_at(line: int) -> Iterator[Lines]:
    """Raise KeyboardInterrupt at the ``line``-th line of the library that is run."""
    lines = Lines()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if not is_of_library(frame):
            return None
        if event == "line":
            lines.count += 1
            if lines.count == line and not is_in_finalizer(frame):
                code = frame.f_code
                lines.where = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


def load(optimizer: nn.Optimizer, values: Values) -> None:
    """What ``load_checkpoint`` and ``load_param_into_net`` do, from memory."""
    dtypes = {param.name: param.dtype for param in optimizer.get_parameters()}
    checkpoint = {
        name: Parameter(Tensor(value).astype(dtypes[name]), name=name)
        for name, value in values.items()
    }
    mindspore.load_param_into_net(optimizer, checkpoint, strict_load=True)


def assert_old_or_new(
    optimizer: nn.Optimizer, now: Values, before: Values, after: Values, where: object
) -> set[int]:
    """Every parameter has all its states from before the step or all from after it, or is torn;
    and the counters tell whether anything is new. Returns the new ones."""
    new: set[int] = set()
    states = set()
    for unit in swap_of(optimizer).units:
        names = [optimizer.parameters[unit.param_index].name]
        names += [state.name for state in unit.resting.values()]
        states.update(names)
        if unit.param_index in swap_of(optimizer).torn:
            continue
        if all(np.array_equal(now[name], after[name]) for name in names):
            new.add(unit.param_index)
        else:
            for name in names:
                np.testing.assert_array_equal(now[name], before[name], err_msg=f"{where}: {name}")
    expected = after if new or swap_of(optimizer).torn else before
    for name in set(now) - states:
        if name != "learning_rate":
            np.testing.assert_array_equal(now[name], expected[name], err_msg=f"{where}: {name}")
    return new
