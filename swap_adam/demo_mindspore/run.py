"""``python -m swap_adam demo --framework mindspore``: handwritten digits, natively and swapped.

A small network learns the 8 x 8 digits that ship inside scikit-learn, with ``nn.Adam`` and with
``SwapMSAdam``, on MindSpore's CPU as the simulated device: see
:mod:`swap_adam.simulator.mindspore`.
"""
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

# Else MindSpore warns of its own deprecated names.
os.environ.setdefault("GLOG_v", "3")

import mindspore  # noqa: E402
import numpy as np  # noqa: E402
from mindspore import Parameter, Tensor, nn  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from swap_adam.config import SwapOptimizerConfig  # noqa: E402
from swap_adam.mindspore import SwapMSAdam  # noqa: E402
from swap_adam.simulator.mindspore import mindspore_device  # noqa: E402

PIXELS, DIGITS = 64, 10
HELD_BACK = 360  # of 1797 pictures, to tell the accuracy


@dataclass(frozen=True)
class Run:
    """What a training has left and what it needed."""

    name: str
    losses: tuple[float, ...]
    accuracy: float
    values: dict[str, NDArray[np.float32]]
    idle_nbytes: int
    peak_nbytes: int
    pinned_nbytes: int
    copies_per_step: float


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 if all runs are bitwise equal, 1 if not, 2 if it cannot run."""
    parser = argparse.ArgumentParser(
        prog="python -m swap_adam demo --framework mindspore",
        description="Handwritten digits, with nn.Adam and with SwapMSAdam, on MindSpore's CPU as "
        "the simulated device.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=3, help="rounds over the digits (3)")
    parser.add_argument("--layers", type=int, default=8, help="hidden layers (8)")
    parser.add_argument("--width", type=int, default=256, help="their width (256)")
    parser.add_argument(
        "--swap-times", type=int, nargs="+", default=[4, 16], help="one swapped run each (4 16)"
    )
    arguments = parser.parse_args(argv)
    if find_spec("sklearn") is None:
        print("the demo's data come with scikit-learn, not installed here: "
              "pip install scikit-learn", file=sys.stderr)
        return 2
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    mindspore.set_device("CPU")
    pictures, labels = load_digits()
    runs = [_run("native Adam", nn.Adam, pictures, labels, arguments)]
    for swap_times in arguments.swap_times:
        config = SwapOptimizerConfig(swap_times)

        def make(*args: object, **kwargs: object) -> nn.Optimizer:
            return SwapMSAdam(*args, **kwargs, swap_config=config)  # type: ignore[arg-type]

        runs.append(_run(f"swapped, {swap_times} batches", make, pictures, labels, arguments))
    differing = [_differences(runs[0], run) for run in runs]
    print(f"\n{len(pictures) - HELD_BACK} handwritten digits, {arguments.epochs} epochs; MindSpore "
          f"{mindspore.__version__} on the CPU as a simulated device\n")
    print(_table(runs, differing))
    return int(any(differing))


def load_digits() -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Pictures of shape (1797, 64) between 0 and 1, and their digits, in a fixed random order."""
    data = import_module("sklearn.datasets").load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    pictures = (data.data[order] / 16).astype(np.float32)
    return pictures, data.target[order].astype(np.int32)


def make_network(layers: int, width: int) -> nn.Cell:
    """A perceptron, always with the same values: He et al., 2015, equation 10."""
    cells: list[nn.Cell] = []
    for layer in range(layers):
        cells += [nn.Dense(width if layer else PIXELS, width), nn.ReLU()]
    network = nn.SequentialCell(*cells, nn.Dense(width, DIGITS))
    rng = np.random.default_rng(0)
    for param in network.trainable_params():
        scale = (2 / param.shape[-1]) ** 0.5 if param.ndim > 1 else 0.0
        param.set_data(Tensor((rng.standard_normal(param.shape) * scale).astype(np.float32)))
    return network


def _run(
    name: str,
    make: Callable[..., nn.Optimizer],
    pictures: NDArray[np.float32],
    labels: NDArray[np.int32],
    arguments: argparse.Namespace,
) -> Run:
    with mindspore_device() as device:
        network = make_network(arguments.layers, arguments.width)
        loss = nn.CrossEntropyLoss()
        optimizer = make(network.trainable_params(), learning_rate=1e-3)

        def forward(inputs: Tensor, targets: Tensor) -> Tensor:
            return loss(network(inputs), targets)

        compute = mindspore.value_and_grad(forward, None, optimizer.parameters)
        losses = []
        for epoch in range(arguments.epochs):
            for start in range(HELD_BACK, len(pictures), 128):
                batch = slice(start, start + 128)
                value, gradients = compute(Tensor(pictures[batch]), Tensor(labels[batch]))
                optimizer(gradients)
                losses.append(float(value.asnumpy()))
            print(f"{name}: epoch {epoch + 1}, loss {losses[-1]:.6f}", file=sys.stderr)
        answers = network(Tensor(pictures[:HELD_BACK])).asnumpy().argmax(axis=1)
        return Run(
            name, tuple(losses), float((answers == labels[:HELD_BACK]).mean()),
            {param.name: _copy(param) for param in optimizer.get_parameters()},
            idle_nbytes=device.state_nbytes(optimizer) + device.held_nbytes,
            peak_nbytes=device.state_nbytes(optimizer) + device.peak_nbytes,
            pinned_nbytes=device.pinned_nbytes,
            copies_per_step=device.copies / len(losses),
        )


def _copy(param: Parameter) -> NDArray[np.float32]:
    copy: NDArray[np.float32] = param.asnumpy().copy()
    return copy


def _differences(expected: Run, actual: Run) -> int:
    """How many losses, parameters, states and counters are not bitwise the same."""
    return sum(a != b for a, b in zip(expected.losses, actual.losses, strict=True)) + sum(
        value.tobytes() != actual.values[name].tobytes() for name, value in expected.values.items()
    )


def _table(runs: Sequence[Run], differing: Sequence[int]) -> str:
    rows = [
        ("", [run.name for run in runs]),
        (f"loss after {len(runs[0].losses)} steps", [f"{run.losses[-1]:.6f}" for run in runs]),
        ("accuracy on held-back digits", [f"{run.accuracy:.1%}" for run in runs]),
        ("bitwise equal", [
            "reference", *(f"NO, {count} differ" if count else "yes" for count in differing[1:])
        ]),
        ("optimizer on device, between steps", [_megabytes(run.idle_nbytes) for run in runs]),
        ("optimizer on device, peak", [_megabytes(run.peak_nbytes) for run in runs]),
        ("host, pinned", [_megabytes(run.pinned_nbytes) for run in runs]),
        ("copies per step", [f"{run.copies_per_step:.0f}" for run in runs]),
    ]
    widths = [max(len(cells[i]) for _, cells in rows) for i in range(len(runs))]
    label_width = max(len(label) for label, _ in rows)
    lines = [
        "  ".join([label.ljust(label_width), *(c.rjust(w) for c, w in zip(cells, widths))])
        for label, cells in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.2f} MB"
