"""Small trainings with fixed gradients, natively and swapped, and their comparison."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn

from swap_adam import SwapOptimizerConfig, swap_optimizer
from swap_adam.mindspore import SwapAdamWeightDecay, SwapMSAdam

# The second is below min_numel, so that it is not swapped.
SHAPES = ((64, 64), (64,), (2000,), (100, 37), (8, 8, 8), (1025,))
LARGE_SHAPES = ((2048, 4096), (40,), (1500, 1000))  # the first has 32 MB in fp32
STEPS = 5
SWAP_TIMES = (1, 4, 1000)

SWAP_CLASS: dict[type, Callable[..., nn.Optimizer]] = {
    nn.Adam: SwapMSAdam, nn.AdamWeightDecay: SwapAdamWeightDecay,
}


class Decay(nn.Cell):
    """Weight decay that depends on the step."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = nn.ExponentialDecayLR(0.1, 0.9, 4)

    def construct(self, global_step: Tensor) -> Tensor:
        return self.schedule(global_step)


@dataclass(frozen=True)
class Case:
    """An optimizer's class and arguments; ``params`` may sort the parameters into groups.

    ``prepare`` is done to the optimizer once it is made, native or swapped.
    """

    name: str
    original: type
    arguments: Callable[[], Mapping[str, Any]] = dict
    params: Callable[[list[Parameter]], list[Any]] = list
    dtype: Any = mindspore.float32
    prepare: Callable[[nn.Optimizer], None] = lambda optimizer: None
    shapes: Sequence[tuple[int, ...]] = SHAPES
    steps: int = STEPS

    def __str__(self) -> str:
        return f"{self.original.__name__}: {self.name}"


def lr_and_decay_groups(params: list[Parameter]) -> list[Any]:
    return [
        {"params": params[:2], "lr": 0.05, "weight_decay": 0.02},
        {"params": params[2:4], "lr": 0.02},
        {"params": params[4:]},
    ]


def decay_groups(params: list[Parameter]) -> list[Any]:
    return [{"params": params[:3], "weight_decay": 0.02}, {"params": params[3:]}]


def ordered_groups(params: list[Parameter]) -> list[Any]:
    return [
        {"params": params[:2], "lr": 0.05},
        {"params": params[2:], "weight_decay": 0.1},
        {"order_params": [*params[3:], *params[:3]]},
    ]


def dynamic_lr_groups(params: list[Parameter]) -> list[Any]:
    return [
        {"params": params[:2], "lr": nn.ExponentialDecayLR(0.1, 0.5, 2)},
        {"params": params[2:], "lr": 0.03},
    ]


def schedule() -> Any:
    return nn.ExponentialDecayLR(0.1, 0.5, 2)


def _unfused(optimizer: nn.Optimizer) -> None:
    optimizer.use_fused_opt = False


ADAM_CASES = (
    Case("default", nn.Adam),
    Case("nesterov", nn.Adam, lambda: {"use_nesterov": True}),
    Case("locking", nn.Adam, lambda: {"use_locking": True}),
    Case("amsgrad", nn.Adam, lambda: {"use_amsgrad": True}),
    Case("weight decay", nn.Adam, lambda: {"weight_decay": 0.1}),
    Case("dynamic weight decay", nn.Adam, lambda: {"weight_decay": Decay()}),
    Case("groups", nn.Adam, params=lr_and_decay_groups),
    Case("groups, amsgrad", nn.Adam, lambda: {"use_amsgrad": True}, lr_and_decay_groups),
    Case("groups, dynamic lr", nn.Adam, params=dynamic_lr_groups),
    Case("groups, weight decay only", nn.Adam, params=decay_groups),
    Case("groups, order_params", nn.Adam, params=ordered_groups),
    Case("schedule", nn.Adam, lambda: {"learning_rate": schedule()}),
    Case("list lr", nn.Adam, lambda: {"learning_rate": [0.1, 0.05, 0.02, 0.01, 0.005]}),
    Case("loss scale 1024", nn.Adam, lambda: {"loss_scale": 1024.0}),
    Case("loss scale 3", nn.Adam, lambda: {"loss_scale": 3.0, "weight_decay": 0.1}),
    Case("fp16", nn.Adam, dtype=mindspore.float16),
)
ADAM_WEIGHT_DECAY_CASES = (
    Case("default", nn.AdamWeightDecay),
    Case("weight decay", nn.AdamWeightDecay, lambda: {"weight_decay": 0.1}),
    Case("dynamic weight decay", nn.AdamWeightDecay, lambda: {"weight_decay": Decay()}),
    Case("groups", nn.AdamWeightDecay, params=lr_and_decay_groups),
    Case("groups, weight decay only", nn.AdamWeightDecay, params=decay_groups),
    Case("groups, order_params", nn.AdamWeightDecay, params=ordered_groups),
    Case("schedule", nn.AdamWeightDecay, lambda: {"learning_rate": schedule()}),
    Case("list lr", nn.AdamWeightDecay, lambda: {"learning_rate": [.1, .05, .02, .01, .005]}),
    Case("unfused", nn.AdamWeightDecay, lambda: {"weight_decay": 0.1}, prepare=_unfused),
)


def make_params(
    shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: Any = mindspore.float32
) -> list[Parameter]:
    """Parameters with fixed values."""
    rng = np.random.default_rng(0)
    return [
        Parameter(
            Tensor(rng.standard_normal(shape, np.float32)).astype(dtype), name=f"layer{index}.w"
        )
        for index, shape in enumerate(shapes)
    ]


def make_gradients(
    step: int, shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: Any = mindspore.float32
) -> tuple[Tensor, ...]:
    """Gradients that differ from step to step, some of them large and some small."""
    rng = np.random.default_rng(100 + step)
    return tuple(
        Tensor(rng.standard_normal(shape, np.float32) * 10.0 ** (index % 3 - 1)).astype(dtype)
        for index, shape in enumerate(shapes)
    )


@dataclass
class Outcome:
    """What a training has left, by the Parameters' names, and what its last call returned."""

    optimizer: nn.Optimizer
    returned: Any
    values: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)


def values_of(optimizer: nn.Optimizer) -> dict[str, np.ndarray[Any, Any]]:
    """Copies of all Parameters that the optimizer has, the model's included."""
    return {param.name: as_numpy(param) for param in optimizer.get_parameters()}


def as_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    # bf16 has no comparison in NumPy.
    exact = tensor.astype(mindspore.float32) if tensor.dtype == mindspore.bfloat16 else tensor
    copy: np.ndarray[Any, Any] = exact.asnumpy().copy()
    return copy


def make_optimizer(
    case: Case, config: SwapOptimizerConfig | None = None
) -> nn.Optimizer:
    """The case's optimizer: native without a ``config``, else the swap class."""
    params = case.params(make_params(case.shapes, case.dtype))
    cls, arguments = case.original, {"learning_rate": 0.1, **case.arguments()}
    if config is not None:
        cls, arguments = SWAP_CLASS[case.original], {**arguments, "swap_config": config}
    optimizer = cls(params, **arguments)
    case.prepare(optimizer)
    return optimizer


def gradients_of(optimizer: nn.Optimizer, case: Case, step: int) -> tuple[Tensor, ...]:
    """The step's gradients in the optimizer's order, which groups may have changed."""
    by_index = make_gradients(step, case.shapes, case.dtype)
    order = [int(param.name.split(".")[0].removeprefix("layer")) for param in optimizer.parameters]
    return tuple(by_index[index] for index in order)


def train(
    case: Case,
    config: SwapOptimizerConfig | None = None,
    convert_at: int | None = None,
) -> Outcome:
    """Train, natively, or swapped from the start, or converted before step ``convert_at``."""
    optimizer = make_optimizer(case, config if convert_at is None else None)
    returned = None
    for step in range(case.steps):
        if step == convert_at:
            assert swap_optimizer(optimizer, config) is optimizer
        returned = optimizer(gradients_of(optimizer, case, step))
    return Outcome(optimizer, returned, values_of(optimizer))


def assert_same(native: Outcome, swapped: Outcome) -> None:
    """Bitwise: parameters, states, powers, counters; and the same kind of return value."""
    assert list(native.values) == list(swapped.values)
    for name, expected in native.values.items():
        actual = swapped.values[name]
        assert actual.dtype == expected.dtype, name
        np.testing.assert_array_equal(actual, expected, err_msg=name)
    assert type(swapped.returned) is type(native.returned)
    assert len(swapped.returned) == len(native.returned)
    for ours, theirs in zip(swapped.returned, native.returned):
        if isinstance(theirs, Tensor):
            np.testing.assert_array_equal(as_numpy(ours), as_numpy(theirs))
        else:
            assert ours == theirs


def is_same(native: Outcome, swapped: Outcome) -> bool:
    """Whether the two have the same values."""
    return all(
        np.array_equal(swapped.values[name], expected) for name, expected in native.values.items()
    )
